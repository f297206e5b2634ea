"""Build the environment of the levels: ``.venv/bin/python -m ci.npu.environment .venv-npu``.

An environment of its own, since triton-ascend takes the place of Triton: torch_npu over stub CANN
libraries, triton-ascend and the vendor's compiler, from package registries. Everything else is that
of the interpreter that runs this, if its PyTorch is the one that torch_npu was built for, and
installed otherwise. Needs Python 3.11 (there is a wheel of each), gcc, binutils and x86-64 Linux.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
import shutil
import subprocess
import sys
import venv
from pathlib import Path

from ci.venv import PINNED, ROOT, inherit, packages_of, torch_arguments

TORCH = "2.13.0"
ASCEND = (
    f"torch_npu=={TORCH}", "triton-ascend==3.2.0", "ascendnpu-ir==1.2.0", "pybind11", "numpy<2.4",
)  # fmt: skip
OTHERS = (
    "pytest>=8.2", "pytest-xdist>=3.5", "PyYAML>=6", "transformers>=5.0", "setuptools", "wheel",
)  # fmt: skip
VERSION = (3, 11)


def refusal() -> str | None:
    """Why the environment cannot be built here, or None."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return f"needs x86-64 Linux, this is {sys.platform} on {platform.machine()}"
    if sys.version_info[:2] != VERSION:
        return f"needs Python {'.'.join(map(str, VERSION))}, this is {platform.python_version()}"
    missing = [tool for tool in ("gcc", "nm", "readelf") if shutil.which(tool) is None]
    return f"needs {' and '.join(missing)}" if missing else None


def here(name: str) -> str:
    """The version of a package of the interpreter that runs this; empty without it."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def build(folder: Path) -> None:
    """Create the environment and the stub libraries in it."""
    python = str(folder / "bin" / "python")
    if not Path(python).exists():
        venv.create(folder, with_pip=True)
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    if sys.prefix != sys.base_prefix and here("torch").split("+")[0] == TORCH:
        inherit(folder)
        subprocess.run([*pip, "--no-deps", *ASCEND], check=True)
    else:
        subprocess.run([*pip, *torch_arguments(f"torch=={TORCH}", "")], check=True)
        subprocess.run([*pip, "-c", str(PINNED), *ASCEND, *OTHERS], check=True)
    (packages_of(folder) / "checkout.pth").write_text(f"{ROOT}\n")
    subprocess.run([python, "-m", "ci.npu.stubs", str(folder / "cann")], check=True, cwd=ROOT)


def main() -> int:
    """Read the command line; 3 where this machine cannot have the environment."""
    parser = argparse.ArgumentParser(description="Build the environment of the Ascend levels.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--check", action="store_true", help="print why not, and build nothing")
    given = parser.parse_args()
    folder, reason = given.folder.absolute(), refusal()
    if reason is not None:
        print(f"the Ascend levels {reason}", file=sys.stdout if given.check else sys.stderr)
        return 3
    if given.check:
        return 0
    print(f"building {folder} (minutes, once)", file=sys.stderr)
    try:
        build(folder)
    except subprocess.CalledProcessError as error:
        print(f"this step failed: {' '.join(map(str, error.cmd))}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
