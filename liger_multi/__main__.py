"""``python -m liger_multi``: the same commands as ``liger-multi``."""

from __future__ import annotations

from liger_multi.cli.main import program

if __name__ == "__main__":  # a process that is spawned imports this file again
    program()
