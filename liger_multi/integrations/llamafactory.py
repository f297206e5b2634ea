"""Start LLaMA-Factory with these operators: ``python -m liger_multi.integrations.llamafactory``.

``enable_liger_kernel: true`` in ``train.yaml`` then patches with them. On several devices it is
what ``torchrun -m`` starts, because LLaMA-Factory's own command starts new processes.
"""

from __future__ import annotations

from liger_multi.compat import liger_kernel


def main() -> None:
    """Serve the import names of Liger-Kernel, and train by the file on the command line."""
    liger_kernel.install(force=True)
    from llamafactory.train.tuner import run_exp

    run_exp()


if __name__ == "__main__":
    main()
