"""Gated activations, gated MLPs and the squared ReLU."""
