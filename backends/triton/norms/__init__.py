"""Norms over the last axis, group norm and dynamic tanh."""
