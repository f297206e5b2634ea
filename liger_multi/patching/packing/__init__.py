"""Packed rows: which sample every token belongs to, and models that keep samples apart."""
