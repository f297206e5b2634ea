"""Mixtures of experts and their grouped GEMMs."""
