"""What the suite's hooks and tests share beside `liger_multi.testing`: backends under test."""

import fnmatch
import textwrap
from pathlib import Path

import pytest
import torch
import yaml

from liger_multi.testing.checks import accelerator, device_of, interpreted, refusal
from liger_multi.testing.suite import plugin
from tests import processes

PATIENCE = 1800.0
"""Seconds after which a process of a test hangs; a machine that is only slow has long ended it."""


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


# --- expected failures ---


def read_xfails(folder: Path) -> dict[str, list[plugin.Expected]]:
    """The lines of ``<backend>.txt`` by backend."""
    return {file.stem: plugin.read_expected(file) for file in sorted(folder.glob("*.txt"))}


def apply_xfails(
    items: list[pytest.Item], named: list[str], xfails: dict[str, list[plugin.Expected]]
) -> None:
    """Mark every test that a line of its backends means; an unexpected pass then fails."""
    for backend, entries in xfails.items():
        plugin.mark_expected([i for i in items if backend in backends_of_test(i, named)], entries)


def backends_of_test(item: pytest.Item, named: list[str]) -> set[str]:
    """The backends that a test runs, and those asked for.

    Kernels that vendors share run under their own layer's name, and for the vendor asked for.
    """
    callspec = getattr(item, "callspec", None)
    found = {str(v) for k, v in callspec.params.items() if "backend" in k} if callspec else set()
    return found if found == {"reference"} else found | set(named)


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
