"""Norms, and activations that are one operator."""
