"""Mixers of hybrid models: convolutions and recurrences."""
