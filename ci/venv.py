"""Build the project's environment: ``python -m ci.venv .venv --extras test``.

Needs the standard library alone, so that any Python >= 3.10 can run it. Which PyTorch it takes:

1. The base interpreter already has one that drives an accelerator (CUDA, ROCm, Ascend): the
   environment sees the base packages and never replaces that PyTorch. Without a package index, it
   makes do with what the base has.
2. Otherwise ``--torch`` is installed: the CPU build, or on a machine with an NVIDIA device the CUDA
   build. ``--torch-index`` overrides where from; ROCm and Ascend builds need it, or case 1.

Versions of everything else follow from ``--constraint``, by default ``ci/constraints/pinned.txt``:
a release of a linter or of transformers changes no run until that file does. What a base
interpreter of case 1 has stays as it is. ``make pins`` builds an environment without constraints
and runs ``python -m ci.venv --write-pins`` in it: the names in the file stay, and each gets the
version that is installed.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import shutil
import site
import socket
import subprocess
import sys
import venv
from pathlib import Path
from urllib.parse import urlsplit

ROOT = Path(__file__).absolute().parent.parent
PINNED = ROOT / "ci" / "constraints" / "pinned.txt"
PIN = re.compile(r"^([\w.-]+)==(\S+)$", re.MULTILINE)
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
BUILD_TOOLS = ["pip>=23", "setuptools>=77", "wheel"]
PROBE = """
import importlib.util as u, json
found = {"torch": "", "accelerated": False, "triton": u.find_spec("triton") is not None}
try:
    import torch
    npu = u.find_spec("torch_npu") is not None
    found["torch"] = torch.__version__
    found["accelerated"] = bool(torch.version.cuda or torch.version.hip or npu)
except ImportError:
    pass
print(json.dumps(found))
"""


def probe(python: str) -> dict[str, object]:
    """What an interpreter has: the version of torch, whether it drives a device, and Triton."""
    out = subprocess.run([python, "-c", PROBE], capture_output=True, text=True, check=True, cwd="/")
    versions: dict[str, object] = json.loads(out.stdout.splitlines()[-1])
    return versions


def at_least(version: str, floor: tuple[int, int]) -> bool:
    """Whether a version such as ``2.11.0+cu130`` reaches ``floor``."""
    numbers = version.split("+")[0].split(".")[:2]
    return tuple(int("".join(c for c in n if c.isdigit()) or 0) for n in numbers) >= floor


def reachable(url: str, seconds: float = 3.0) -> bool:
    """Whether a host answers; pip alone would retry an absent one for minutes."""
    if any(
        os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")
    ):
        return True
    try:
        with socket.create_connection((urlsplit(url).hostname or "", 443), timeout=seconds):
            return True
    except OSError:
        return False


def torch_arguments(torch: str, index: str) -> list[str]:
    """The arguments of ``pip install`` that fetch PyTorch for this machine."""
    if index:
        return [torch, "--index-url", index]
    if Path("/dev/kfd").exists() or Path("/dev/davinci_manager").exists():
        raise SystemExit(
            "this machine has an AMD or Ascend device, but the base Python has no PyTorch that "
            "drives it: install that first (https://pytorch.org/get-started), or name its index, "
            "e.g. make TORCH=torch==2.11.0 TORCH_INDEX=https://download.pytorch.org/whl/rocm7.2"
        )
    if Path("/dev/nvidiactl").exists() or shutil.which("nvidia-smi"):
        return [torch]
    return [torch, "--extra-index-url", CPU_INDEX] if reachable(CPU_INDEX) else [torch]


def constraints(path: Path | None, base: bool) -> list[str]:
    """The lines of a file of constraints, and of those that it includes (``-c other.txt``).

    Args:
        path: The file, or None. What it says itself goes before what it includes.
        base: Whether what this interpreter has is used, and so left out.
    """
    versions: dict[str, str] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path else ():
        if path and line.startswith("-c "):
            included = constraints(path.parent / line.removeprefix("-c ").strip(), base)
            versions |= {one.partition("==")[0]: one for one in included}
        elif line and not line.startswith("#"):
            versions[line.partition("==")[0]] = line
    return [line for name, line in versions.items() if not (base and installed(name))]


def installed(name: str) -> bool:
    """Whether this interpreter has a package."""
    try:
        return bool(importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return False


def build(
    folder: Path,
    torch: str,
    index: str,
    extras: list[str],
    constraint: Path | None = PINNED,
    triton: bool = True,
) -> None:
    """Create the environment, or bring one up to date; with Triton where PyTorch brings none."""
    base = probe(sys.executable)
    shared = bool(base["accelerated"]) and at_least(str(base["torch"]), (2, 7)) and not index
    python = str(folder / "bin" / "python")
    if not Path(python).exists():
        if (
            shutil.which("apt-get")
            and subprocess.run([sys.executable, "-c", "import ensurepip"]).returncode
        ):
            raise SystemExit("this Python cannot make environments: apt-get install python3-venv")
        venv.create(folder, with_pip=True, system_site_packages=shared)
    if shared and sys.prefix != sys.base_prefix:
        inherit(folder)
    # modules are compiled when they are first imported, and not all of PyTorch's thousands now
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-compile"]
    lines, constraint_file = constraints(constraint, shared), folder / "constraints.txt"
    if shared:
        constraint_file.write_text(
            "\n".join([*lines, f"torch=={base['torch']}\n"]), encoding="utf-8"
        )
        there = bool(base["triton"]) or not triton
        build_shared(folder, [*pip, "-c", str(constraint_file)], there, extras)
        return
    subprocess.run([*pip, *BUILD_TOOLS], check=True)
    if not at_least(str(probe(python)["torch"] or "0.0"), (2, 7)):
        subprocess.run([*pip, *torch_arguments(torch, index)], check=True)
    if probe(python)["accelerated"]:  # which brings the Triton that it pins
        lines = [line for line in lines if not line.startswith("triton==")]
    else:
        extras = [*extras, *["triton"] * (triton and sys.platform == "linux")]
    constraint_file.write_text("\n".join([*lines, ""]), encoding="utf-8")
    install = ["--no-build-isolation", "-e", target(extras)]
    subprocess.run([*pip, "-c", str(constraint_file), *install], check=True)


def packages_of(folder: Path) -> Path:
    """The folder of an environment's own packages."""
    return next((folder / "lib").glob("python*/site-packages"))


def inherit(folder: Path) -> None:
    """Let an environment see the packages of the environment that this interpreter belongs to."""
    lines = [f"import site; site.addsitedir({path!r})" for path in site.getsitepackages()]
    (packages_of(folder) / "base-environment.pth").write_text("\n".join(lines) + "\n")


def build_shared(folder: Path, pip: list[str], triton: bool, extras: list[str]) -> None:
    """Install into an environment that sees the base packages, without touching its PyTorch."""
    install = target([*extras, *["triton"] * (not triton)])
    full = [*pip, "--retries", "1"]
    done = subprocess.run([*full, *BUILD_TOOLS[1:]]).returncode == 0
    done = done and not subprocess.run([*full, "--no-build-isolation", "-e", install]).returncode
    if not done:
        # No pip here: building needs newer tools than a fresh environment may have.
        say = "no package index answers: the environment has what the base Python has, and this"
        print(f"{say} checkout on its path", file=sys.stderr)
        (packages_of(folder) / "checkout.pth").write_text(f"{ROOT}\n")


def target(extras: list[str]) -> str:
    """This checkout with its extras, as pip writes it."""
    return f".[{','.join(extras)}]" if extras else "."


# --- pins ---


def updated(text: str) -> str:
    """The file's text with the installed versions; what is not installed stays as it is."""

    def current(match: re.Match[str]) -> str:
        name = match[1]
        return f"{name}=={importlib.metadata.version(name)}" if installed(name) else match[0]

    return PIN.sub(current, text)


def write_pins() -> None:
    """Bring the pins up to date with this interpreter, and print what changed."""
    old = PINNED.read_text(encoding="utf-8")
    new = updated(old)
    PINNED.write_text(new, encoding="utf-8")
    before, after = dict(PIN.findall(old)), dict(PIN.findall(new))
    for name, version in after.items():
        if before[name] != version:
            print(f"{name} {before[name]} -> {version}")


# --- the command ---


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Build the project's environment.")
    parser.add_argument("folder", type=Path, nargs="?", help="where the environment stands")
    parser.add_argument("--write-pins", action="store_true", help="pin what is installed here")
    parser.add_argument("--torch", default="torch==2.13.0", help="requirement to install")
    parser.add_argument("--torch-index", default="", help="package index of PyTorch")
    parser.add_argument("--extras", default="test", help="comma-joined extras of the project")
    parser.add_argument("--constraint", default=str(PINNED), help="versions; empty for the newest")
    parser.add_argument("--no-triton", action="store_true", help="what runs no kernel needs none")
    args = parser.parse_args()
    if sys.version_info < (3, 10):  # noqa: UP036  run by whatever python3 is
        raise SystemExit(
            f"liger_multi needs Python 3.10 or newer, this is {sys.version.split()[0]}"
        )
    if args.write_pins:
        return write_pins()
    if args.folder is None:
        parser.error("which folder?")
    print(f"building {args.folder} (minutes, once)", file=sys.stderr)
    try:
        build(
            args.folder.absolute(),
            args.torch,
            args.torch_index,
            [e for e in args.extras.split(",") if e],
            Path(args.constraint).absolute() if args.constraint else None,
            triton=not args.no_triton,
        )
    except subprocess.CalledProcessError as error:
        raise SystemExit(f"this step failed: {' '.join(map(str, error.cmd))}") from None


if __name__ == "__main__":
    main()
