"""Errors that callers of Liger-Kernel catch as one class, and callers of ours as another."""

from __future__ import annotations


class ArgumentError(ValueError, AssertionError):
    """An argument that Liger-Kernel asserts and this library checks."""


class TargetError(IndexError, AssertionError):
    """A target outside of the vocabulary, which Liger-Kernel asserts."""
