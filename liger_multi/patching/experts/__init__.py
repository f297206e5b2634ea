"""Stacks of experts: a mixture of experts is one operator."""
