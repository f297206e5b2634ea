"""Attention with masks made of key ranges."""
