"""The suite as pytest runs it on one backend: ``python -m liger_multi.testing --backend NAME``."""
