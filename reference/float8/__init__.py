"""Linear layers in FP8 with a scale per row."""
