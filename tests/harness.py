"""What the suite's hooks and tests share: backends under test, poison, expected failures."""

import fnmatch
import os
import textwrap
from dataclasses import dataclass
from pathlib import Path

import processes
import pytest
import torch
import yaml
from torch.utils._device import _device_constructors

PATIENCE = 1800.0
"""Seconds after which a process of a test hangs; a machine that is only slow has long ended it."""
DTYPES = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def interpreted() -> bool:
    """Whether Triton kernels run on CPU tensors in this process."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def interpret_faster() -> None:
    """Let Triton's interpreter replace its language once a launch, not at every call of a function.

    What functions that kernels call replace is what their kernel has replaced already, unless they
    see other modules of the language. It is half of the time of interpreted tests.
    """
    from triton import language
    from triton.runtime import interpreter

    original = interpreter._patch_lang
    if hasattr(original, "__wrapped__") or not hasattr(interpreter, "_LangPatchScope"):
        return
    replaced: set[int] = set()

    class Scope(interpreter._LangPatchScope):
        def restore(self):
            replaced.clear()
            self.launch.restore()

    def patch_lang(fn):
        modules = (language, language.core)
        seen = {id(m) for m in fn.__globals__.values() if any(m is other for other in modules)}
        scope = Scope()
        if not seen or not seen <= replaced:
            scope.launch = original(fn)
            replaced.update(seen)
        return scope

    patch_lang.__wrapped__ = original
    interpreter._patch_lang = patch_lang


def accelerator() -> torch.device | None:
    """The device type of this machine's accelerator, or None; touches no driver context."""
    if not torch.accelerator.is_available():
        return None
    return torch.device(torch.accelerator.current_accelerator())


def device_of(backend: str) -> torch.device | None:
    """Where a backend's tests put their tensors, or None if this machine has no such device.

    The reference follows an accelerator only where one was asked for; see :func:`selected_device`.
    """
    from liger_multi.dispatch.registry import backends

    if backend == "reference":
        return torch.device("cpu")
    wanted = backends()[backend].device_type
    if wanted is None:
        return torch.device("cpu") if interpreted() else accelerator()
    if wanted == "cpu":
        return torch.device(wanted)
    found = accelerator()
    return torch.device(wanted) if found is not None and found.type == wanted else None


def refusal(backend: str) -> str | None:
    """Why a backend cannot be tested on this machine, or None."""
    from liger_multi.dispatch.registry import unavailable

    reason = unavailable(backend)
    if reason is None and device_of(backend) is None:
        reason = "this machine has no device for it (kernels on a CPU need TRITON_INTERPRET=1)"
    return reason


def selected_backends(config: pytest.Config) -> list[str]:
    """Names of the backends under test: ``--backend`` and the reference, or all that can run.

    Interpreted kernels are asked for by name (``TRITON_INTERPRET=1 pytest --backend triton``): they
    cannot share a process with tests that compile them.
    """
    from liger_multi.dispatch.registry import backends
    from liger_multi.errors import unknown

    named = config.getoption("--backend")
    if not named:
        return [n for n in backends() if refusal(n) is None and (interpreted() or n != "triton")]
    names = [n for part in named for n in part.split(",") if n]
    for name in names:
        if name not in backends():
            raise pytest.UsageError("--backend: " + unknown("backend", name, backends()))
        reason = refusal(name)
        if reason is not None:
            raise pytest.UsageError(f"--backend {name}: cannot run on this machine: {reason}")
    return list(dict.fromkeys([*names, "reference"]))


def selected_device(config: pytest.Config) -> torch.device:
    """The device of the first backend named by ``--backend``; the CPU without one."""
    named = config.getoption("--backend")
    found = device_of(selected_backends(config)[0]) if named else None
    return found or torch.device("cpu")


# --- processes ---


def in_two_processes(folder: Path, body: str) -> None:
    """Run a script as ranks 0 and 1, with its rank and a file to meet at; each says "done"."""
    in_processes(folder, body, 2)


def kind_of_ranks(config: pytest.Config, count: int) -> str:
    """The kind of device under test where every rank can have one, else the CPU."""
    kind = selected_device(config).type
    return kind if kind != "cpu" and torch.accelerator.device_count() >= count else "cpu"


def in_processes(folder: Path, body: str, count: int, kind: str = "cpu") -> None:
    """The same with more ranks, or on devices of another kind."""
    script, meeting = folder / "rank.py", folder / "meeting"
    script.write_text(textwrap.dedent(body))
    every = [[str(rank), str(meeting)] for rank in range(count)]
    # gloo: a plan would go to devices
    environment = {"CUDA_VISIBLE_DEVICES": ""} if kind == "cpu" else {}
    forked = accelerator() is None
    ended = processes.run(script, folder, every, environment, PATIENCE, forked)
    # all of them: where one fails, the others lose their connection to it
    said = "\n".join(
        f"rank {rank}, exit {code}:\n{text}" for rank, (code, text) in enumerate(ended)
    )
    assert all(code == 0 and "done" in text for code, text in ended), said


# --- poison ---

_EMPTY = {
    torch: ("empty", "empty_like", "empty_strided", "empty_permuted"),
    torch.Tensor: ("new_empty", "new_empty_strided"),
}


def poison_value(dtype: torch.dtype) -> float | int | bool | None:
    """What uninitialized memory of a dtype holds under test: NaN, the largest integer, or True."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    if dtype is torch.bool:
        return True
    try:
        return torch.iinfo(dtype).max
    except TypeError:
        return None  # quantized and sub-byte dtypes cannot be filled


def _poisoned(original):
    def empty(*args, **kwargs):
        made = original(*args, **kwargs)
        value = poison_value(made.dtype)
        if value is not None and made.numel():
            with torch.no_grad():
                made.fill_(value)
        return made

    empty.__name__, empty.__wrapped__ = original.__name__, original
    return empty


def poison_empty() -> None:
    """Fill whatever the ``empty`` family returns, for the rest of the process; idempotent."""
    # cached there: contexts such as torch.device("meta") know the functions that are replaced here
    _device_constructors()
    for owner, names in _EMPTY.items():
        for name in names:
            original = getattr(owner, name)
            if not hasattr(original, "__wrapped__"):
                setattr(owner, name, _poisoned(original))


# --- expected failures ---


@dataclass(frozen=True)
class Xfail:
    """One expected failure: glob patterns over the names of a test's parameters, and why."""

    op: str
    reason: str
    link: str
    sample: str = "*"
    dtype: str = "*"
    test: str = "*"

    def matches(self, names: dict[str, str]) -> bool:
        """Whether a test with these parameter names is the one meant."""
        if "op" not in names:
            return False
        return all(
            fnmatch.fnmatchcase(names.get(key, ""), getattr(self, key))
            for key in ("op", "sample", "dtype", "test")
        )


def read_xfails(folder: Path) -> dict[str, list[Xfail]]:
    """The entries of ``<backend>.yaml`` by backend."""
    found = {}
    for file in sorted(folder.glob("*.yaml")):
        try:
            entries = yaml.safe_load(file.read_text()) or []
        except yaml.YAMLError as error:
            raise pytest.UsageError(f"{file.name} is not YAML: {error}") from error
        for entry in entries:
            keys = {"op", "reason", "link", "sample", "dtype", "test"}
            if not isinstance(entry, dict) or not {"op", "reason", "link"} <= set(entry) <= keys:
                raise pytest.UsageError(
                    f"{file.name}: an entry needs op, reason and link, "
                    f"and may have sample, dtype and test; "
                    f"got {entry!r}"
                )
        found[file.stem] = [
            Xfail(**{**e, "dtype": DTYPES.get(e.get("dtype", "*"), e.get("dtype", "*"))})
            for e in entries
        ]
    return found


def read_thinned(file: Path) -> dict[tuple[str, str], list[str]]:
    """Of tests that `make test` runs a part of: globs of the parameters that stay."""
    text = yaml.safe_load(file.read_text(encoding="utf-8"))
    return {(name, test): keep for name, tests in text.items() for test, keep in tests.items()}


def leaves(item: pytest.Item, thinned: dict[tuple[str, str], list[str]]) -> bool | None:
    """Whether a test is left to `make test-full`; None where its kind is not thinned."""
    keep = thinned.get((item.path.name, getattr(item, "originalname", item.name)))
    if keep is None:
        return None
    callspec = getattr(item, "callspec", None)
    return not any(fnmatch.fnmatchcase(callspec.id if callspec else "", glob) for glob in keep)


def parameter_name(value: object) -> str:
    """The name by which files speak of a parameter: of an op, a sample, a dtype or a text."""
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    text = str(getattr(value, "name", value))
    return DTYPES.get(text, text)


def parameter_names(item: pytest.Item) -> dict[str, str]:
    """Names of a test's parameters, and of the test."""
    callspec = getattr(item, "callspec", None)
    names = {k: parameter_name(v) for k, v in callspec.params.items()} if callspec else {}
    return {**names, "test": getattr(item, "originalname", item.name)}


def apply_xfails(
    items: list[pytest.Item], named: list[str], xfails: dict[str, list[Xfail]]
) -> None:
    """Mark every test that an entry of its backends speaks of; an unexpected pass then fails."""
    for item in items:
        names = parameter_names(item)
        # Kernels that vendors share run under their own layer's name, and for the vendor asked for.
        backends = {v for k, v in names.items() if "backend" in k}
        if backends != {"reference"}:
            backends |= set(named)
        for entry in (e for b in sorted(backends) for e in xfails.get(b, ())):
            if entry.matches(names):
                item.add_marker(
                    pytest.mark.xfail(reason=f"{entry.reason} ({entry.link})", strict=True)
                )
