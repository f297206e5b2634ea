"""Launches past Triton's argument binder, and the tuner of launch numbers."""

import functools
import random
import re
import types
from pathlib import Path

import pytest
import torch

from liger_multi.dispatch import launch as numbers, torch_ops
from liger_multi.dispatch.torch_ops import Primitive
from liger_multi.testing import samples

pytest.importorskip("triton", reason="no Triton on this machine")

from dataclasses import dataclass

import triton
from triton.backends.compiler import GPUTarget

from benchmarks import tune
from liger_multi.backends.triton.common import launching, specialization
from tests import harness

ROOT = Path(__file__).parents[2]


TARGETS = {
    "cuda": GPUTarget("cuda", 90, 32),
    "cuda, Blackwell": GPUTarget("cuda", 100, 32),
    "hip": GPUTarget("hip", "gfx942", 64),
    "hip, RDNA": GPUTarget("hip", "gfx1100", 32),
}


class Kernel:
    """Stands in for a jitted kernel; what it compiled stands in for a compiled one."""

    def __init__(self):
        self.bound, self.direct = [], []

    def __getitem__(self, grid):
        def run(*args, **options):
            self.bound.append((grid, args, options))
            return types.SimpleNamespace(
                run=lambda *a: self.direct.append(a), function=7, packed_metadata=8
            )

        return run


def use_target(monkeypatch, target):
    """Make ``target`` the one of Triton's active driver, as in a fresh process."""
    active = types.SimpleNamespace(
        get_current_stream=lambda device: 99, get_current_target=lambda: target
    )
    monkeypatch.setattr(triton.runtime.driver, "_active", active)
    monkeypatch.setattr(launching, "_DIRECT", True)
    monkeypatch.setattr(launching, "_compiled", {})
    monkeypatch.setattr(launching, "_classes", None)


@pytest.fixture
def kernel(monkeypatch):
    use_target(monkeypatch, TARGETS["cuda"])
    return Kernel()


def test_second_launch_skips_binder(kernel):
    x = torch.zeros(32)
    for rows in (48, 64):  # both divisible by 16
        launching.launch(kernel, 5, (x, None, rows, 1e-6), (True, 128), 4)
    assert [(grid, args) for grid, args, _ in kernel.bound] == [
        ((5, 1), (x, None, 48, 1e-6, True, 128))
    ]
    assert kernel.bound[0][2] == {"num_warps": 4, "enable_fp_fusion": True}
    assert kernel.direct == [(5, 1, 1, 99, 7, 8, None, None, None, x, None, 64, 1e-6, True, 128)]


def test_specialized_arguments_recompile(kernel):
    wide = torch.zeros(64)
    calls = [
        ((wide, 48), (1,), 4),
        ((wide[1:], 48), (1,), 4),  # no longer divisible by 16 bytes
        ((wide.double(), 48), (1,), 4),
        ((wide, 47), (1,), 4),
        ((wide, 1), (1,), 4),
        ((wide, 2**40), (1,), 4),
        ((wide, 2**40 + 1), (1,), 4),
        ((wide, None), (1,), 4),
        ((wide, 48.0), (1,), 4),
        ((wide, (48, 32)), (1,), 4),  # every number of a tuple by itself
        ((wide, (48, 31)), (1,), 4),
        ((wide, (48, 1)), (1,), 4),
        ((wide, (2**40, 32)), (1,), 4),
        ((wide, 48), (2,), 4),
        ((wide, 48), (1,), 8),
    ]
    for args, constants, warps in calls:
        launching.launch(kernel, 1, args, constants, warps)
    assert len(kernel.bound) == len(calls)
    assert not kernel.direct


def test_profiler_hooks_get_every_launch(kernel, monkeypatch):
    x = torch.zeros(32)
    launching.launch(kernel, 1, (x,), (), 4)
    hooks = types.SimpleNamespace(launch_enter_hook=print, launch_exit_hook=None)
    monkeypatch.setattr(launching, "_RUNTIME", hooks)
    launching.launch(kernel, 1, (x,), (), 4)
    hooks.launch_enter_hook = types.SimpleNamespace(calls=[])  # a chain without members
    launching.launch(kernel, 1, (x,), (), 4)
    assert (len(kernel.bound), len(kernel.direct)) == (2, 1)


class Checked(Kernel):
    """Fails where it is run for arguments that Triton would compile another kernel for."""

    def __init__(self):
        super().__init__()
        self.specialize = specialization.specialize_for_target()

    def of(self, args):
        return [self.specialize(a) for a in args]

    def __getitem__(self, grid):
        def run(*args, **options):
            compiled_for = self.of(args)
            self.bound.append(args)

            def direct(*launched):
                assert compiled_for == self.of(launched[9:])
                self.direct.append(launched)

            return types.SimpleNamespace(run=direct, function=7, packed_metadata=8)

        return run


LIMIT = 2**31  # bytes of a storage; of AMD, above which addresses have 64 bits
INTEGERS = (
    0,
    1,
    2,
    8,
    15,
    16,
    17,
    32,
    48,
    -1,
    -16,
    2**16,
    2**30,
    2**31 - 1,
    2**31 - 16,
    2**31,
    2**31 + 1,
    2**32,
    2**62,
    2**63 - 1,
    2**63,
    2**63 + 1,
    2**64 - 16,
    2**64 - 1,
    -(2**31),
    -(2**31) - 1,
    -(2**31) - 16,
    -(2**63),
)


@functools.cache
def reserved(size):
    """A storage of many bytes that takes no memory, as nothing is written."""
    return torch.zeros(0, dtype=torch.uint8).set_(torch.UntypedStorage(size))


def every_tensor():
    """Every alignment of pointers into storages of every size, in several dtypes; parameters."""
    for size in (64, 4096, LIMIT - 1, LIMIT, LIMIT + 64):
        storage = reserved(size)
        for offset in (*range(17), 24, 32, 48):
            yield storage[offset : offset + 16]
        for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.int64):
            aligned = storage[: size // 16 * 16].view(dtype)
            yield from (aligned, aligned[1:], aligned[8:9], aligned[16:])
            if dtype.is_floating_point:
                yield torch.nn.Parameter(aligned)


def every_other():
    yield from (None, True, False, 0.0, 1.0, 1e-6, 48.0, float("inf"), float("nan"))
    yield from INTEGERS
    yield from ((), (1,), (48, 1), (1, 48), (48, 1, 17), (48, True), (48, None), (1.0, 48))
    yield from ((2**31, 1), (2**31 - 1, 1), (2**63, 16), ((48, 1), 2))


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_cached_launch_matches_arguments(monkeypatch, target):
    """The cache key covers everything that Triton specializes on for a target."""
    use_target(monkeypatch, target)
    kernel, x = Checked(), torch.zeros(16)
    values = [*every_tensor(), *every_other()]
    calls = [(x, a) for a in values] + [(a, 48, 1e-6) for a in every_tensor()]
    calls += [(x, (1, 2), (3,)), (x, (1,), (2, 3)), (x, (), (1, 2)), (x, 1, (2,)), (x, (1, 2), ())]
    calls = calls * 3
    random.Random(0).shuffle(calls)
    for args in calls:
        launching.launch(kernel, 1, args, (), 4)
    assert len(kernel.bound) + len(kernel.direct) == len(calls)
    distinct = {(len(args), *map(str, kernel.of(args))) for args in calls}
    assert len(kernel.bound) <= 2 * len(distinct), "arguments compile that Triton does not tell"
    for value in every_tensor():  # of the same sizes, in other memory
        launching.launch(kernel, 1, (x, value), (), 4)


@pytest.mark.parametrize("target", [TARGETS["hip"]], ids=["hip"])
def test_amd_kernel_for_2_gib_storage(monkeypatch, target):
    monkeypatch.setattr(triton.knobs.amd, "use_buffer_ops", True)  # the default from 3.6 on
    use_target(monkeypatch, target)
    kernel = Kernel()
    for size in (64, LIMIT - 1, LIMIT, 2 * LIMIT):
        launching.launch(kernel, 1, (reserved(size)[:64], 48), (), 4)
    assert (len(kernel.bound), len(kernel.direct)) == (2, 2)


@pytest.mark.parametrize("first", [False, True])
def test_switches_of_the_compiler_may_change_between_launches(monkeypatch, first):
    """A result of Triton that was cached under one switch is not used under another."""
    use_target(monkeypatch, TARGETS["hip"])
    small, large = reserved(64), reserved(LIMIT)
    monkeypatch.setattr(triton.knobs.amd, "use_buffer_ops", first)
    launching.launch(Kernel(), 1, (small, large), (), 4)
    for state in (not first, first):
        monkeypatch.setattr(triton.knobs.amd, "use_buffer_ops", state)
        kernel = Kernel()
        for args in ((small, small), (large, small), (small, large), (large, large)):
            launching.launch(kernel, 1, args, (), 4)
        assert not kernel.direct or not state


@pytest.mark.parametrize("reads", [lambda x: x.shape, lambda x: x.stride(0), lambda x: type(x)])
def test_unknown_triton_specialization_is_not_cached(reads):
    """The attributes of a tensor that Triton reads decide the cache key."""
    asked = []

    def specialize(argument):
        asked.append(argument)
        return str(reads(argument)) if isinstance(argument, torch.Tensor) else "other"

    classes = specialization.ArgumentClasses(specialize)
    assert not classes.by_address
    assert not classes.by_storage
    assert not classes.tensors
    first, second = classes.number(torch.zeros(4)), classes.number(torch.zeros(8, 4)[:, :2])
    assert (first != second) == (str(reads(torch.zeros(4))) != str(reads(torch.zeros(8, 4))))


def test_remembered_arguments_are_bounded(monkeypatch):
    monkeypatch.setattr(specialization, "MOST", 8)
    use_target(monkeypatch, TARGETS["cuda"])
    kernel, x = Checked(), torch.zeros(16)
    for n in range(200):
        launching.launch(kernel, 1, (x, n, n / 3, x[n % 9 :]), (), 4)
    classes = launching._classes
    assert max(map(len, (classes.integers, classes.scalars, classes.tensors))) <= 8


def test_interpreted_kernel_launch(monkeypatch):
    """Kernels that are interpreted, or that have no device to specialize for."""
    monkeypatch.setattr(launching, "_classes", None)
    calls = []

    class Interpreted:
        def __getitem__(self, grid):
            return lambda *args, **options: calls.append((grid, args))

    launching.launch(Interpreted(), 2, (torch.zeros(4), 3), (True,), 4)
    assert [(grid, args[1:]) for grid, args in calls] == [((2, 1), (3, True))]
    with pytest.raises(AttributeError, match="get_device"):  # as it does once Triton has compiled
        launching.launch(Interpreted(), 2, (None, torch.zeros(4), 3), (True,), 4)


@pytest.mark.slow
def test_host_time_of_operators():
    done = harness.python("-m", "benchmarks.host_time", TRITON_INTERPRET="1")
    lines = done.stdout.splitlines()
    for name in ("bare Function", "rms_norm", "swiglu", "rope", "gated_mlp"):
        assert any(re.match(rf"{name} +forward [ \d.]+ backward [ \d.]+ us", x) for x in lines), (
            name
        )


def test_grids_of_the_tuner():
    assert list(tune.grid("rows=1,2;stages=3|rows=4")) == [
        {"rows": 1, "stages": 3},
        {"rows": 2, "stages": 3},
        {"rows": 4},
    ]
    with pytest.raises(ValueError, match=r"did you mean 'rms_norm\.backward'"):
        tune.tune("rms_nor.backward", "8192x4096", "", 1)
    with pytest.raises(ValueError, match="unknown sample '8192x409'"):
        tune.tune("rms_norm.backward", "8192x409", "", 1)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_tuner_call_arguments(direction):
    """Repeated calls run generated code without look-ups."""
    sample = next(s for s in samples.of("softmax") if s.size == "small")
    for _ in range(2):
        arguments = tune.call_arguments("softmax", direction, sample, torch.device("cpu"))
        assert arguments[0].shape == next(iter(sample.tensors.values())).shape
    assert Primitive.call is torch_ops._CALL


def test_forced_config_scope():
    @dataclass(frozen=True)
    class Config:
        rows: int

    def lookup():
        return numbers.launch_config(
            "some.kernel", lambda info, rows: Config(1), torch.device("cpu"), rows=8
        )

    with tune.Forced("some.kernel", {"rows": 4}):
        assert lookup() == Config(4)
    assert lookup() == Config(1)


def test_entries_of_another_variant_are_not_forced(monkeypatch):
    """With sizes beyond its bounds an entry runs; a kernel for another dtype may not compile."""

    @dataclass(frozen=True)
    class Config:
        block: int

    entries = (
        {"when": {"item": (2, 2), "rows": (1000, 9000)}, "config": {"block": 256}},
        {"when": {"item": (4, 4)}, "config": {"block": 128}},
    )
    monkeypatch.setattr(numbers, "table_of", lambda info: {"some.kernel": entries})

    def lookup(item):
        formula, device = (lambda info, rows, item: Config(1)), torch.device("cpu")
        return numbers.launch_config("some.kernel", formula, device, rows=8, item=item).block

    with numbers.observed() as reached:
        with numbers.observed() as inner:
            assert not inner
        assert (lookup(2), lookup(8)) == (1, 1)
    assert reached == {("some.kernel", 0)}
    with numbers.forced({"some.kernel": entries[0]["config"]}, numbers.variant_of(entries[0])):
        assert (lookup(2), lookup(4)) == (256, 1)


@pytest.mark.parametrize(
    ("us", "entries"),
    [
        ({2: 50.0, 4: 70.0}, {"rows": 2, "num_warps": 4}),
        ({2: 99.0, 4: 98.0}, None),  # not worth an entry
        ({2: 120.0, 4: 120.0}, None),
        ({2: -1.0, 4: 98.0}, None),  # the fastest is wrong
    ],
)
def test_measured_launch_entries(monkeypatch, us, entries):
    @dataclass(frozen=True)
    class Config:
        rows: int
        num_warps: int

    device, configs = torch.device("cpu"), []

    def call(x):
        k = numbers.launch_config(
            "some.forward", lambda info, rows, cols: Config(4, 4), device, rows=64, cols=100
        )
        configs.append(k)
        return x + (us.get(k.rows, 0) < 0)

    def time_us(prim, args, device):
        result = prim.call(*args)
        k = configs[-1]
        return (100.0 if k == Config(4, 4) else abs(us[k.rows]) * (1 + (k.num_warps != 4))), result

    prim = types.SimpleNamespace(call=call, params=("x",), mutates=())
    monkeypatch.setattr(tune, "time_us", time_us)
    monkeypatch.setattr(tune, "where", lambda device: "measured on a card")
    tuned = tune.measure(prim, (torch.zeros(3),), "an op 64x100", device)
    assert {k.rows for k in configs} == {2, 4}
    if entries is None:
        assert tuned == {}
        return
    assert tuned == {
        "some.forward": {
            "when": {"rows": [16, 2**30], "cols": [65, 128]},
            "config": entries,
            "source": "measured on a card: an op 64x100, 100.0 -> 50.0 us",
        }
    }


def test_a_table_is_not_measured_without_a_device(capsys, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        tune.main(["table"])
    assert "this machine has none" in capsys.readouterr().err
