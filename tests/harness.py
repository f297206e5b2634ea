"""What the suite's hooks and tests share beside `liger_multi.testing`: backends, parts, forms.

Which samples of an operator reach the same code, so that what is slow need not run all of them? A
sample's form is what decides the constants of kernels and the graph of a compiler: the tensors that
are there, their fixed dtypes, which of them need gradients, and the options. Numbers of options
count as given or not; shapes and strides are run-time arguments. Where a shape chooses another
kernel, the sample says so (``Sample.path``).
"""

import contextlib
import functools
import os
import subprocess
import sys
import textwrap
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import liger_multi
from liger_multi.testing import samples
from liger_multi.testing.checks import accelerator, device_of, interpreted, refusal
from liger_multi.testing.suite import plugin
from tests import processes

ROOT = Path(__file__).parents[1]
PATIENCE = 1800.0
"""Seconds after which a process of a test hangs; a machine that is only slow has long ended it."""


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


def interpreted_kernels(*names: str, autouse: bool = True) -> Any:
    """A fixture: operators by interpreted kernels where these are under test and take the call.

    Elsewhere the device chooses.
    """

    @pytest.fixture(autouse=autouse)
    def kernels(request: pytest.FixtureRequest) -> Iterator[None]:
        named = interpreted() and "triton" in selected_backends(request.config)
        choice = liger_multi.use(**dict.fromkeys(names, ("triton", "reference"))) if named else None
        with choice or contextlib.nullcontext():
            yield

    return kernels


def selected_device(config: pytest.Config) -> torch.device:
    """The device of the first backend named by ``--backend``; the CPU without one."""
    named = config.getoption("--backend")
    device = device_of(selected_backends(config)[0]) if named else None
    return device or torch.device("cpu")


def place_of(backend: str) -> torch.device:
    """The device of a backend; a test that needs it is skipped where it cannot run."""
    reason, device = refusal(backend), device_of(backend)
    if reason is not None or device is None:
        pytest.skip(reason or f"{backend} has no device here")
    return device


def needs_memory(device: torch.device, gib: int) -> None:
    """Skip where no device has so many GiB free, as tensors of 2^31 elements take."""
    module = None if device.type == "cpu" else torch.get_device_module(device.type)
    if module is None or module.mem_get_info()[0] < gib * 2**30:
        pytest.skip(f"needs a device with {gib} GiB of free memory")


def assert_last_rows_are_theirs_alone(
    run: Callable[[Tensor], Tensor], x: Tensor, axis: int = 0
) -> None:
    """The last rows' results and gradients are those of the rows alone, bit for bit."""
    last = x.detach().narrow(axis, -3, 3).clone().requires_grad_()
    y, right = run(x.requires_grad_()), run(last)
    assert torch.equal(y[-3:], right)
    up = torch.zeros_like(y)
    up[-3:] = torch.randn_like(right)
    (grad,) = torch.autograd.grad(y, x, up)
    assert torch.equal(grad.narrow(axis, -3, 3), torch.autograd.grad(right, last, up[-3:])[0])
    assert not grad.narrow(axis, 0, x.shape[axis] - 3).any()


def refuses(table: Any, call: Callable[[Any], Any] = lambda run: run()) -> Any:
    """A test of each row of a table, or of its values: a call, its error, and what that says."""
    names, rows = (table, table.values()) if isinstance(table, dict) else (range(len(table)), table)

    @pytest.mark.parametrize(("run", "error", "message"), rows, ids=names)
    def test(run: Any, error: Any, message: str) -> None:
        with pytest.raises(error, match=message):
            call(run)

    return test


# --- processes ---


def python(
    *words: Any, cwd: Path = ROOT, path: Any = (), code: int | None = 0, **environment: str
) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter that finds this checkout, and before it what is in other folders.

    It ends with ``code``, or as it likes where that is None; an empty variable is not set.
    """
    folders = [*map(str, path), str(ROOT), *filter(None, sys.path)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(folders), **environment}
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=cwd,
        env={name: value for name, value in env.items() if value},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert code in (None, done.returncode), done.stdout[-3000:] + done.stderr[-3000:]
    return done


def in_two_processes(folder: Path, body: str) -> None:
    """Run a script as ranks 0 and 1, with its rank and a file to meet at; each says "done"."""
    in_processes(folder, body, 2)


def kind_of_ranks(config: pytest.Config, count: int) -> str:
    """The kind of device under test where every rank can have one, else the CPU."""
    device_type = selected_device(config).type
    return (
        device_type if device_type != "cpu" and torch.accelerator.device_count() >= count else "cpu"
    )


def in_processes(folder: Path, body: str | Path, count: int, device_type: str = "cpu") -> None:
    """The same with more ranks, or on devices of another type; a file gets both as arguments."""
    script, meeting = folder / "rank.py", folder / "meeting"
    if isinstance(body, Path):
        script = body
    else:
        script.write_text(textwrap.dedent(body))
    every = [[str(rank), str(meeting), str(count), device_type] for rank in range(count)]
    # gloo: a plan would go to devices
    environment = {"CUDA_VISIBLE_DEVICES": ""} if device_type == "cpu" else {}
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
    names = {str(v) for k, v in callspec.params.items() if "backend" in k} if callspec else set()
    return names if names == {"reference"} else names | set(named)


# --- what `make test` runs, and parts ---

EVERY = 17
"""`make test` runs the first and every seventeenth case of a test with parameters. A prime number
makes these cases vary in every parameter. The others are slow."""

COMPLETE = frozenset({"tests/dispatch/test_dispatch.py::test_generated_code_equals_slow_path"})
"""Tests whose cases are all fast: each is a decision about another operator, within a second."""


def mark_slow_case(item: pytest.Item, cases: Counter[str]) -> None:
    """Mark a case that `make test` leaves to `make test-full`; ``cases`` counts those of a test."""
    if item.get_closest_marker("slow") is None:
        test = item.nodeid.partition("[")[0]
        if cases[test] % EVERY and test not in COMPLETE:
            item.add_marker("slow")
        cases[test] += 1


def parse_part(text: str) -> tuple[int, int]:
    """Part and count of ``2/4``; without a text, all of one."""
    if not text:
        return 1, 1
    part, _, count = text.partition("/")
    if not (part.isdigit() and count.isdigit() and 1 <= int(part) <= int(count)):
        raise pytest.UsageError(f"--part {text}: expected i/n, with i from 1 to n")
    return int(part), int(count)


def keep_part(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests of other parts: a checksum of its id says which one a test is in."""
    part, count = parse_part(config.getoption("--part"))
    chosen, others = list[pytest.Item](), list[pytest.Item]()
    for item in items:
        mine = zlib.crc32(item.nodeid.encode()) % count == part - 1
        (chosen if mine else others).append(item)
    if others:
        config.hook.pytest_deselected(items=others)
        items[:] = chosen


# --- forms of samples ---


def form(sample):
    """What samples that reach the same code have in common."""
    options = frozenset(
        (name, value if isinstance(value, (bool, str, tuple)) else "given")
        for name, value in sample.options.items()
    )
    tensors = tuple((name, t.dtype, t.grad) for name, t in sample.tensors.items())
    return options, tensors, sample.path


def first_sample(op, sample):
    """Whether a sample is the first of its operator."""
    return sample.name == next(s.name for s in samples.of(op) if s.size == "small")


def repeats_a_form(op, sample):
    """Whether an earlier sample of the operator has the same form."""
    return sample.name in _repeating(op)


@functools.cache
def _repeating(op):
    visited, names = set(), set()
    for sample in samples.of(op):
        if sample.size == "small":
            (names.add(sample.name) if form(sample) in visited else visited.add(form(sample)))
    return frozenset(names)


def adds_to_a_graph(op, sample):
    """Whether a sample is the first with one of its options, or the first without some tensor.

    What a graph of the compiler depends on; of frozen tensors the first is enough.
    """
    return sample.name in _adding(op, False)


def adds_a_launch(op, sample):
    """The same, or the first of its path: what it adds to the kernels that are launched."""
    return sample.name in _adding(op, True)


@functools.cache
def _adding(op, paths):
    visited, names = set(), set()
    for sample in samples.of(op):
        if sample.size == "small":
            options, tensors, path = form(sample)
            frozen = sum(not grad for *_, grad in tensors) - sum(
                t.classes > 0 for t in sample.tensors.values()
            )
            parts = {*options, frozenset(sample.tensors), frozen > 0, *([("path", path)] * paths)}
            if not parts <= visited:
                names.add(sample.name)
            visited |= parts
    return frozenset(names)
