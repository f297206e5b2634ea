"""Attention: the interface of transformers, and layers whose indexer selects keys."""
