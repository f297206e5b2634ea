"""Linear layers that multiply in FP8."""
