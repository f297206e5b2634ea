"""What PyTorch has itself, where a configuration names it: no device chooses it."""

from liger_multi.dispatch.backend import Backend

BACKEND = Backend("pytorch")
