"""One folder per vendor; its ``BACKEND`` states where it runs and what it inherits."""

if __name__ != "liger_multi.backends":
    raise ImportError(
        f"this folder is the package liger_multi.backends and was imported as {__name__!r}; a "
        f"second copy would register "
        "everything twice: import liger_multi.backends"
    )
