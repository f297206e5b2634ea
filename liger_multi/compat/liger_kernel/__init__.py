"""The import names of Liger-Kernel, for trainers that know no others.

``install()`` makes ``import liger_kernel`` and its submodules this library's, in this process;
``TrainingArguments(use_liger_kernel=True)`` and the like then patch with these operators. Call it
before the trainer's library is imported: several look for the package once, when imported.
"""

from __future__ import annotations

from liger_multi.compat.liger_kernel.finder import install, installed, uninstall

__all__ = ["install", "installed", "uninstall"]
