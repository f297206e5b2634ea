"""Logits that are computed only if something reads them, and the losses that avoid them."""
