"""Build the environment of the levels: ``.venv/bin/python -m ci.npu.environment .venv-npu``.

An environment of its own, since triton-ascend takes the place of Triton: torch_npu over stub CANN
libraries, triton-ascend and the vendor's compiler, from package registries. Everything else is that
of the interpreter that runs this, if its PyTorch is the one that torch_npu was built for, and
installed otherwise. Needs Python 3.11 (there is a wheel of each), gcc, binutils and x86-64 Linux.

The stub CANN libraries let the torch_npu wheel load on a machine without CANN or an NPU.
``PYTHON -m ci.npu.environment --stubs FOLDER`` with the Python that torch_npu is installed in makes
them. With ``LD_LIBRARY_PATH=FOLDER``, torch_npu's dispatcher, schemas, meta functions and autograd
formulas are the real ones. Device memory is host memory, streams and events are numbers, and no
operator ever runs: those entry points return an error, since zeros would look like results.

Environment: ``CANN_STUB_DEVICES`` (0) devices, of the kind ``CANN_STUB_SOC`` (Ascend910B3).
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import platform
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

from ci.venv import PINNED, ROOT, inherit, packages_of, torch_arguments

# --- the environment ---

TORCH = "2.13.0"
ASCEND = (
    f"torch_npu=={TORCH}",
    "triton-ascend==3.2.0",
    "ascendnpu-ir==1.2.0",
    "pybind11",
    "numpy<2.4",
)
OTHERS = (
    "pytest>=8.2",
    "pytest-xdist>=3.5",
    "PyYAML>=6",
    "transformers>=5.0",
    "setuptools",
    "wheel",
)
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


# --- stub libraries ---


# Names that only CANN defines: binutils lists some of libc's without their versions.
OWNED = (
    "acl",
    "Msprof",
    "rtDev",
    "rtFunction",
    "rtKernel",
    "rtGet",
    "Hccl",
    "hccl",
    "_ZN2ge",
    "_ZNK2ge",
)
LOOKED_UP = re.compile(
    rb"\x00((?:acl(?:rt|mdl|prof|op|sys|Get|Set|Create|Destroy|Init|Finalize|Query|Profiling)"
    rb"|Hccl|Msprof)[A-Za-z0-9_]{3,60})\x00"
)
SYSTEM = re.compile(r"(lib(stdc\+\+|m|gcc_s|pthread|c|dl|rt)|ld-linux.*)\.so")
MAIN = "libascendcl.so"

PRELUDE = r"""
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

static long setting(const char *name, long otherwise) {
  const char *text = getenv(name);
  return text ? atol(text) : otherwise;
}
static int allocate(void **p, size_t n) {
  *p = aligned_alloc(512, (n / 512 + 2) * 512);
  return *p ? 0 : 207001;
}
static int handle(void **p) {
  static long handles = 1;
  *p = (void *)(uintptr_t)(0x10000 + __sync_add_and_fetch(&handles, 1) * 64);
  return 0;
}
// None until a thread sets one, as CANN has it: torch_npu takes note of a device where it sets it.
static __thread int current = -1;
"""
# What torch_npu needs an answer from, as the body of a C function; the others return 0.
ANSWERS = {
    "int aclrtGetDeviceCount(uint32_t *n)": '*n = setting("CANN_STUB_DEVICES", 0); return 0;',
    "int aclrtGetDevice(int32_t *d)": "if (current < 0) return 107002; *d = current; return 0;",
    "int aclrtSetDevice(int32_t d)": "current = d; return 0;",
    "const char *aclrtGetSocName(void)": (
        'const char *s = getenv("CANN_STUB_SOC"); return s ? s : "Ascend910B3";'
    ),
    "const char *aclGetRecentErrMsg(void)": 'return "a stub of CANN runs no operator";',
    "int aclrtMalloc(void **p, size_t n, int policy)": "return allocate(p, n);",
    "int aclrtMallocAlign32(void **p, size_t n, int policy)": "return allocate(p, n);",
    "int aclrtMallocHost(void **p, size_t n)": "return allocate(p, n);",
    "int aclrtMallocHostWithCfg(void **p, uint64_t n, void *c)": "return allocate(p, n);",
    "int aclrtFree(void *p)": "free(p); return 0;",
    "int aclrtFreeHost(void *p)": "free(p); return 0;",
    "int aclrtMemcpy(void *d, size_t m, const void *s, size_t n, int kind)": (
        "memmove(d, s, n); return 0;"
    ),
    "int aclrtMemcpyAsync(void *d, size_t m, const void *s, size_t n, int kind, void *stream)": (
        "memmove(d, s, n); return 0;"
    ),
    "int aclrtMemset(void *d, size_t m, int32_t v, size_t n)": "memset(d, v, n); return 0;",
    "int aclrtMemsetAsync(void *d, size_t m, int32_t v, size_t n, void *stream)": (
        "memset(d, v, n); return 0;"
    ),
    "int aclrtCreateStream(void **s)": "return handle(s);",
    "int aclrtCreateStreamWithConfig(void **s, uint32_t p, uint32_t f)": "return handle(s);",
    "int aclrtCreateEventExWithFlag(void **s, uint32_t f)": "return handle(s);",
    "int aclrtCreateEventWithFlag(void **s, uint32_t f)": "return handle(s);",
    "int aclrtGetCurrentContext(void **c)": "*c = (void *)0x1000; return 0;",
    "int aclrtGetMemInfo(int a, size_t *free, size_t *total)": (
        "*free = *total = (size_t)64 << 30; return 0;"
    ),
    "int aclrtQueryEventStatus(void *e, int *s)": "*s = 1; return 0;",
    "int aclrtQueryEventWaitStatus(void *e, int *s)": "*s = 0; return 0;",
    "int aclrtStreamQuery(void *e, int *s)": "*s = 0; return 0;",
    "int aclrtStreamGetId(void *e, int32_t *s)": "*s = (int32_t)((uintptr_t)e >> 6); return 0;",
    "int aclrtEventElapsedTime(float *ms, void *a, void *b)": "*ms = 0.f; return 0;",
    "int aclrtEventGetTimestamp(void *a, uint64_t *t)": "*t = 0; return 0;",
    "int aclrtGetDeviceInfo(uint32_t d, int what, int64_t *v)": (
        "*v = what == 201 ? 40 : what == 101 || what == 102 ? 20 : what == 204 ? 196608 "
        ": what == 601 ? 2201 : 0; return 0;"
    ),
    "int aclGetDeviceCapability(uint32_t d, int what, int64_t *v)": (
        "*v = what == 1 ? 40 : what == 0 ? 20 : 0; return 0;"
    ),
    "int aclrtGetDeviceResLimit(int32_t d, int what, uint32_t *v)": (
        "*v = what ? 40 : 20; return 0;"
    ),
    "int aclrtGetStreamResLimit(void *s, int what, uint32_t *v)": "*v = what ? 40 : 20; return 0;",
    "int aclrtGetResInCurrentThread(int what, uint32_t *v)": "*v = what ? 40 : 20; return 0;",
    "int aclrtGetStreamOverflowSwitch(void *s, uint32_t *f)": "*f = 1; return 0;",
    "int aclrtGetSysParamOpt(int o, int64_t *v)": "*v = 0; return 0;",
    "int aclrtGetPrimaryCtxState(int32_t d, uint32_t *f, int32_t *active)": (
        "if (f) *f = 0; *active = 1; return 0;"
    ),
    "int aclrtGetLogicDevIdByUserDevId(int32_t user, int32_t *logic)": "*logic = user; return 0;",
    "int aclrtDeviceCanAccessPeer(int32_t *can, int32_t a, int32_t b)": "*can = 1; return 0;",
    "int aclrtPointerGetAttributes(const void *p, void *a)": "memset(a, 0, 16); return 0;",
    "int aclsysGetCANNVersion(int kind, void *v)": "return 100000;",
    "size_t aclGetCompileoptSize(int o)": "return 32;",
    "int aclGetCompileopt(int o, char *v, size_t n)": (
        'strncpy(v, "must_keep_origin_dtype", n); return 0;'
    ),
    "int aclopCompileAndExecute(void)": "return 500003;",
    "int aclopCompileAndExecuteV2(void)": "return 500003;",
    "int aclrtGetLastError(int level)": "return 0;",
    "int aclrtPeekAtLastError(int level)": "return 0;",
}


def _run(*command: str | Path) -> str:
    return subprocess.run(
        list(map(str, command)), capture_output=True, text=True, check=True
    ).stdout


def _symbols(file: Path, flag: str) -> dict[str, bool]:
    """Dynamic symbols, and whether each names the version of a system library."""
    words = [line.split()[-1] for line in _run("nm", "-D", flag, file).splitlines()]
    return {word.split("@")[0]: "@" in word for word in words}


def _needed(file: Path) -> list[str]:
    lines = _run("readelf", "-d", file).splitlines()
    return [line.split("[")[1].split("]")[0] for line in lines if "(NEEDED)" in line]


def installed(name: str) -> Path:
    """The folder of a package, found without importing it."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"{name} is not installed for {sys.executable}")
    return Path(next(iter(spec.submodule_search_locations)))


def requirements() -> tuple[set[str], set[str]]:
    """Functions that torch_npu takes from CANN, and the libraries it wants them from."""
    home = installed("torch_npu")
    every = sorted(home.rglob("*.so"))
    ours = [f for f in every if "torchair" not in f.parts and "atb" not in f.name]
    theirs = sorted((installed("torch") / "lib").glob("*.so*"))
    defined = {name for file in [*ours, *theirs] for name in _symbols(file, "--defined-only")}
    present = {file.name for file in [*ours, *theirs]}
    libraries, names = set(), set()
    for file in ours:
        libraries |= {n for n in _needed(file) if n not in present and not SYSTEM.match(n)}
        for name, versioned in _symbols(file, "--undefined-only").items():
            if not versioned and name not in defined and name.startswith(OWNED):
                names.add(name)
    core = (home / "lib" / "libtorch_npu.so").read_bytes()
    looked_up = {m.decode() for m in LOOKED_UP.findall(core)}
    return names | {n for n in looked_up if not n.startswith("aclnn")}, libraries


def source(names: set[str]) -> str:
    """The C source of a library that has these functions."""
    lines = [PRELUDE, *(f"{head} {{ {body} }}" for head, body in ANSWERS.items())]
    answered = {m for head in ANSWERS for m in re.findall(r"\b(acl\w+)\(", head)}
    for i, name in enumerate(sorted(names - answered)):
        if name.startswith("_Z"):
            lines.append(f'long mangled{i}(void) __asm__("{name}"); long mangled{i}(void)')
        else:
            lines.append(f"long {name}(void)")
        lines[-1] += " { return 0; }"
    return "\n".join(lines) + "\n"


def make(folder: Path) -> None:
    """Write the libraries."""
    names, libraries = requirements()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "stub.c").write_text(source(names))
    (folder / "empty.c").write_text("int cann_stub;\n")
    shared = ("gcc", "-shared", "-fPIC", "-O1", "-w", "-fno-builtin")
    _run(*shared, "-o", folder / MAIN, f"-Wl,-soname,{MAIN}", folder / "stub.c")
    for name in sorted(libraries - {MAIN}):
        _run(
            *shared,
            "-o",
            folder / name,
            f"-Wl,-soname,{name}",
            "-Wl,--no-as-needed",
            f"-L{folder}",
            f"-l:{MAIN}",
            folder / "empty.c",
        )


# --- building ---


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
    subprocess.run(
        [python, "-m", "ci.npu.environment", "--stubs", str(folder / "cann")], check=True, cwd=ROOT
    )


def main() -> int:
    """Read the command line; 3 where this machine cannot have the environment."""
    parser = argparse.ArgumentParser(description="Build the environment of the Ascend levels.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--check", action="store_true", help="print why not, and build nothing")
    parser.add_argument("--stubs", action="store_true", help="the stub libraries alone, as folder")
    options = parser.parse_args()
    if options.stubs:
        make(options.folder)
        return 0
    folder, reason = options.folder.absolute(), refusal()
    if reason is not None:
        print(f"the Ascend levels {reason}", file=sys.stdout if options.check else sys.stderr)
        return 3
    if options.check:
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
