"""Embedding look-up."""
