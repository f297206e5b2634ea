"""What the suite's hooks and tests share beside `liger_multi.testing`: backends, parts, forms.

What of the suite runs together, on one worker of ``-n`` and in one part of ``--part i/n``, is a
unit: a file, whose module fixtures are then made once. A file of samples has no such fixtures and
is one unit per operator, as is a test that takes longest in its file. Units go out with the longest
first, by the times of ``seconds.json``, which ``--record-seconds`` writes. A unit without a time
counts by its tests.

Which samples of an operator reach the same code, so that what is slow need not run all of them? A
sample's form is what decides the constants of kernels and the graph of a compiler: the tensors that
are there, their fixed dtypes, which of them need gradients, and the options. Numbers of options
count as given or not; shapes and strides are run-time arguments. Where a shape chooses another
kernel, the sample says so (``Sample.path``).
"""

import fnmatch
import functools
import json
import textwrap
import zlib
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

from liger_multi.testing import samples
from liger_multi.testing.checks import accelerator, device_of, interpreted, refusal
from liger_multi.testing.suite import plugin
from tests import harness, processes

PATIENCE = 1800.0
"""Seconds after which a process of a test hangs; a machine that is only slow has long ended it."""


def interpret_faster() -> None:
    """Let Triton's interpreter replace its language once a launch, not at every call of a function.

    What functions that kernels call replace is what their kernel has replaced already, unless they
    see other modules of the language. It is half of the time of interpreted tests. A quarter of the
    rest goes into conditions of overflow that are dropped, since nothing asserts them without
    ``debug``, and into a table of dtypes that is made anew at every operation; a third of what then
    is left into the types of blocks, which :func:`_remember_types` makes once.
    """
    from triton import language
    from triton.runtime import interpreter

    original = interpreter._patch_lang
    if hasattr(original, "__wrapped__") or not hasattr(interpreter, "_LangPatchScope"):
        return
    options = interpreter.interpreter_builder.options
    if not getattr(options, "debug", True):
        interpreter.interpreter_builder.options = replace(options, sanitize_overflow=False)
    dtype_of, dtypes = interpreter._get_np_dtype, {}
    replaced: set[int] = set()

    def np_dtype(kind):
        name = kind.scalar.name
        if name not in dtypes:
            dtypes[name] = dtype_of(kind)
        return dtypes[name]

    @functools.cache
    def modules_of(fn):
        modules = (language, language.core)
        return {id(m) for m in fn.__globals__.values() if any(m is other for other in modules)}

    class Scope(interpreter._LangPatchScope):
        def restore(self):
            replaced.clear()
            self.launch.restore()

    def patch_lang(fn):
        seen, scope = modules_of(fn), Scope()
        if not seen or not seen <= replaced:
            scope.launch = original(fn)
            replaced.update(seen)
        return scope

    patch_lang.__wrapped__ = original
    interpreter._patch_lang = patch_lang
    interpreter._get_np_dtype = np_dtype
    _remember_types(language.core)
    _widen_by_bits(interpreter, language)
    _broadcast_unequal_alone(interpreter)


def _widen_by_bits(interpreter, language) -> None:
    """Let bfloat16 become fp32 by a shift.

    The interpreter takes numbers apart; of denormal ones it makes others (Triton 3.9).
    """
    convert = interpreter._convert_float

    def convert_float(values, source, target, rounding):
        if source == language.bfloat16 and target == language.float32:
            return values.view("uint16").astype("uint32") << 16
        return convert(values, source, target, rounding)

    interpreter._convert_float = convert_float


def _remember_types(core) -> None:
    """Let equal types of blocks share what they hold, and tensors of a type their shape.

    Operations make new types of blocks, and tensors count the elements of theirs: neither changes.
    """
    make_block, make_tensor = core.block_type.__init__, core.tensor.__init__
    blocks, shapes = {}, {}

    def block(self, element_ty, shape):
        sizes = tuple([s.value if isinstance(s, core.constexpr) else s for s in shape])
        key = (str(element_ty), getattr(element_ty, "address_space", None), sizes)
        if key in blocks:
            self.__dict__.update(blocks[key])
        else:
            make_block(self, element_ty, shape)
            blocks[key] = self.__dict__

    def tensor(self, handle, type):
        kept = type.__dict__.get("_of_tensors")
        if kept is None:
            make_tensor(self, handle, type)
            sizes = tuple([s.value for s in self.shape])
            type._of_tensors = self.shape, self.numel = shapes.setdefault(
                sizes, (self.shape, self.numel)
            )
        else:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.shape, self.numel = kept

    core.block_type.__init__, core.tensor.__init__ = block, tensor


def _broadcast_unequal_alone(interpreter) -> None:
    """Spare tensors of one shape the comparison of what they would be broadcast to."""
    semantic = type(interpreter.interpreter_semantic)
    broadcast = semantic.broadcast_impl_value

    def broadcast_impl_value(self, left, right):
        equal = left.type.is_block() and right.type.is_block() and left.shape is right.shape
        return (left, right) if equal else broadcast(self, left, right)

    semantic.broadcast_impl_value = broadcast_impl_value


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


Kept = list[str] | dict[str, list[str]] | str


def read_thinned(file: Path) -> dict[tuple[str, str], Kept]:
    """Of tests that `make test` runs a part of: what stays (tests/thinned.yaml says how)."""
    text = yaml.safe_load(file.read_text(encoding="utf-8"))
    return {(name, test): keep for name, tests in text.items() for test, keep in tests.items()}


def left_as(item: pytest.Item, thinned: dict[tuple[str, str], Kept]) -> str | None:
    """The marker of a test that `make test` leaves out; None for one that it runs.

    The share of a file, under ``*``, is of its tests that have none of their own.
    """
    test = getattr(item, "originalname", item.name)
    callspec = getattr(item, "callspec", None)
    parameters = callspec.id if callspec else ""
    keep = thinned.get((item.path.name, test), ["*"])
    if isinstance(keep, str):
        return None if _in_share(parameters, keep) else "sampled"
    if isinstance(keep, dict):
        return None if _is_one_of(parameters, keep["stay"]) else "sampled"
    if not _is_one_of(parameters, keep):
        return "slow"
    whole = thinned.get((item.path.name, "*"), "1/1")
    assert isinstance(whole, str)
    return None if _in_share(f"{test} {parameters}", whole) else "sampled"


def _is_one_of(name: str, globs: list[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, glob) for glob in globs)


def _in_share(name: str, share: str) -> bool:
    """Whether a name is one of, say, the third that stays."""
    stay, of = map(int, share.split("/"))
    return zlib.crc32(name.encode()) % of < stay


# --- parts ---

SECONDS = Path(__file__).parent / "seconds.json"
BY_PARAMETER = (
    *("test_ops.py", "test_contracts.py", "test_autograd_rules.py"),
    "test_npu.py::test_kernels_compile_as_listed",
)
A_TEST = 0.05


def unit(nodeid):
    """The unit of a test; what an operator compiles for 16 bits is a unit of its own."""
    path, _, name = nodeid.partition("::")
    file, (test, _, values) = path.rpartition("/")[2], name.partition("[")
    if {file, f"{file}::{test}"}.isdisjoint(BY_PARAMETER):
        return file
    values = values.removesuffix("]").split("-")
    narrow = [v for v in values[-1:] if v in ("float16", "bfloat16")]
    return f"{file}[{'-'.join([values[0], *narrow])}]"


def run_name(config):
    """What times are recorded under: kernels that are interpreted take others, as do slow tests."""
    kind = "interpreted" if harness.interpreted() else "native"
    return f"{kind} {config.getoption('markexpr').removesuffix(' and not sampled')}".strip()


def recorded():
    """Seconds by run and unit."""
    return json.loads(SECONDS.read_text(encoding="utf-8")) if SECONDS.exists() else {}


def weights(nodeids, config):
    """Seconds by unit, the longest first."""
    counts = Counter(map(unit, nodeids))
    known = recorded().get(run_name(config), {})
    found = {name: known.get(name, count * A_TEST) for name, count in counts.items()}
    return dict(sorted(found.items(), key=lambda pair: (-pair[1], pair[0])))


def shares(seconds, count):
    """The part of every unit, from 1: each goes where the least is so far."""
    totals, found = [0.0] * count, {}
    for name, each in seconds.items():
        part = min(range(count), key=totals.__getitem__)
        totals[part] += each
        found[name] = part + 1
    return found


def parse_part(text):
    """Part and count of ``2/4``; without a text, all of one."""
    if not text:
        return 1, 1
    part, _, count = text.partition("/")
    if not (part.isdigit() and count.isdigit() and 1 <= int(part) <= int(count)):
        raise pytest.UsageError(f"--part {text}: expected i/n, with i from 1 to n")
    return int(part), int(count)


def select(config, items):
    """Keep the units of one part, and put the longest first."""
    seconds = weights([item.nodeid for item in items], config)
    if not config.pluginmanager.hasplugin("randomly"):
        order = {name: index for index, name in enumerate(seconds)}
        items.sort(key=lambda item: order[unit(item.nodeid)])
    part, count = parse_part(config.getoption("--part"))
    found = shares(seconds, count)
    config.hook.pytest_deselected(items=[i for i in items if found[unit(i.nodeid)] != part])
    items[:] = [item for item in items if found[unit(item.nodeid)] == part]


class Recorder:
    """Writes what every unit took."""

    def __init__(self, config):
        self.config, self.seconds = config, Counter()

    def pytest_runtest_logreport(self, report):
        self.seconds[unit(report.nodeid)] += report.duration

    def pytest_sessionfinish(self):
        every = recorded()
        found = {n: round(s, 1) for n, s in sorted(self.seconds.items()) if s >= 0.5}
        every[run_name(self.config)] = every.get(run_name(self.config), {}) | found
        text = json.dumps(dict(sorted(every.items())), indent=1, sort_keys=True)
        SECONDS.write_text(text + "\n", encoding="utf-8")


def scheduler(config, log):
    """A worker takes a unit at a time, in the order of the items; for xdist."""
    from xdist.scheduler import LoadScopeScheduling

    class Units(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return unit(nodeid)

    config.option.loadscopereorder = False
    return Units(config, log)


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
    seen, names = set(), set()
    for sample in samples.of(op):
        if sample.size == "small":
            (names.add(sample.name) if form(sample) in seen else seen.add(form(sample)))
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
    seen, names = set(), set()
    for sample in samples.of(op):
        if sample.size == "small":
            options, tensors, path = form(sample)
            frozen = sum(not grad for *_, grad in tensors) - sum(
                t.classes > 0 for t in sample.tensors.values()
            )
            parts = {*options, frozenset(sample.tensors), frozen > 0, *([("path", path)] * paths)}
            if not parts <= seen:
                names.add(sample.name)
            seen |= parts
    return frozenset(names)
