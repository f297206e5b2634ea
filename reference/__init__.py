"""Chunked PyTorch: what every backend is compared with, and the end of automatic chains."""

from liger_multi.dispatch.backend import Backend

if __name__ != "liger_multi.reference":
    raise ImportError(
        f"this folder is the package liger_multi.reference and was imported as {__name__!r}; a "
        f"second copy would register "
        "everything twice: import liger_multi.reference"
    )

_ORDER = "PyTorch chooses the order of a sum, and instructions, by sizes and the card"

BACKEND = Backend("reference", not_bitwise={"rows": _ORDER, "chunk": _ORDER, "cards": _ORDER})
