"""Memory measured around a block and through a step.

Peaks are compared with allocations of known sizes, and profiles with steps of known memory, with a
small model, and with an allocator's history.
"""

import dataclasses
import gc
import json
import struct

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import liger_multi
from benchmarks.harness import tracked_peak
from benchmarks.memory import Case
from liger_multi.memory import Profile, compare, format_bytes, measure, peak_memory, profile
from liger_multi.memory.breakdown import HIDDEN, OLDER, join, summarize
from liger_multi.memory.measure import Peak
from liger_multi.memory.recorder import BACKWARD, CATEGORIES, FORWARD, OPTIMIZER, Block, Recorder

# --- peaks ---


KIB = 1024


def kib(count):
    """A float32 tensor of ``count`` KiB."""
    return torch.empty(count * KIB // 4)


def rising_and_falling():
    a, b = kib(100), kib(50)
    del b
    return a, kib(20)


def views_of_one_storage():
    a = kib(100)
    view = a.view(2, -1)[1].t()
    del a
    gc.collect()
    return view, kib(10)


REGIONS = {
    "rising and falling": (rising_and_falling, (0, 150, 120)),
    "views of one storage": (views_of_one_storage, (0, 110, 110)),
    "a resized storage": (lambda: kib(10).resize_(40 * KIB // 4), (0, 40, 40)),
}


@pytest.mark.parametrize(("region", "sizes"), REGIONS.values(), ids=REGIONS)
def test_live_bytes_of_a_region(region, sizes):
    with measure("cpu") as peak:
        result = region()
    outside = kib(100)
    assert (peak.start_bytes, peak.peak_bytes, peak.end_bytes) == tuple(n * KIB for n in sizes)
    assert peak.method == "live tensors"
    del result, outside


def test_older_tensors_count_once_touched():
    old, untouched = kib(100), kib(999)
    with measure("cpu") as peak:
        b = kib(60)
        del b
        old.add_(1)
        c = kib(10)
    assert peak.start_bytes == 100 * KIB
    assert peak.peak_bytes == 160 * KIB, "the 60 KiB stood beside the old tensor"
    assert peak.end_bytes == 110 * KIB
    assert peak.added_bytes == 60 * KIB
    del c, untouched


def test_older_tensor_freed_in_region():
    old = kib(100)
    with measure("cpu") as peak:
        old.add_(1)
        del old
        b = kib(30)
    assert (peak.peak_bytes, peak.end_bytes) == (100 * KIB, 30 * KIB)
    del b


def test_known_tensors_count_untouched():
    old = kib(100)
    with measure("cpu", known=[old, old.view(2, -1)]) as peak:
        pass
    assert (peak.start_bytes, peak.peak_bytes) == (100 * KIB, 100 * KIB)


class WithTemporaries(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, dy):
        scratch = kib(500)
        del scratch
        return dy * 2


def test_measure_sees_temporaries_of_backward():
    x = torch.ones(4 * KIB, requires_grad=True)
    with measure("cpu") as peak:
        WithTemporaries.apply(x).sum().backward()
    # x and two scalars are alive besides the scratch; the product is freed by then
    assert 516 * KIB <= peak.peak_bytes <= 516 * KIB + 16


def test_foreach_operators():
    tensors = [kib(10) for _ in range(3)]
    with measure("cpu") as peak:
        result = torch._foreach_add(tensors, 1.0)
    assert (peak.start_bytes, peak.peak_bytes) == (30 * KIB, 60 * KIB)
    del result


def test_region_that_raises():
    def region():
        a = kib(10)
        raise RuntimeError(f"half way, {a.nbytes} bytes")

    with pytest.raises(RuntimeError, match="half way"), measure("cpu") as peak:
        region()
    assert peak.peak_bytes == 10 * KIB
    assert torch._C._len_torch_dispatch_stack() == 0


def test_widest():
    weight = torch.ones(1000, 8)
    with measure("cpu", width=1000) as peak:
        torch.empty(3, 1000)
        torch.empty(5, 1000, dtype=torch.float64)
        torch.empty(5000, 77)
        # neither is memory of its own
        torch.ones(1, 1000).expand(4096, 1000)
        weight.t()
    assert peak.widest_bytes == 40000
    assert peak.widest_shape == (5, 1000)
    assert peak.widest_dtype == torch.float64


def test_widest_without_a_match_and_unasked():
    with measure("cpu", width=1000) as peak:
        torch.empty(10)
    assert (peak.widest_bytes, peak.widest_shape) == (0, None)
    with measure("cpu") as peak:
        torch.empty(10)
    assert peak.widest_bytes is None


def test_temporaries_of_our_operators():
    hidden = torch.randn(64, 4, requires_grad=True)
    weight = torch.randn(512, 4, requires_grad=True)
    target = torch.randint(0, 512, (64,))
    shapes, peaks = [], []
    for chunk in (8, 64):
        with measure("cpu", width=512) as peak:
            loss = liger_multi.ops.fused_linear_cross_entropy(hidden, weight, target, chunk=chunk)
            loss.backward()
        shapes.append(peak.widest_shape)
        peaks.append(peak.peak_bytes)
        hidden.grad = weight.grad = None
    assert shapes == [(8, 512), (64, 512)]
    assert peaks[0] < peaks[1]


def test_measuring_changes_no_result():
    def step():
        torch.manual_seed(0)
        x = torch.randn(6, 8, requires_grad=True)
        y = liger_multi.ops.rms_norm(x, torch.ones(8)).square().sum()
        y.backward()
        return y.detach(), x.grad

    plain = step()
    measured, peak = peak_memory(step, device="cpu")
    assert all(map(torch.equal, plain, measured))
    assert peak.peak_bytes > 0


def test_nested_regions():
    with measure("cpu") as outer:
        a = kib(10)
        with measure("cpu") as inner:
            b = kib(20)
    assert (inner.peak_bytes, outer.peak_bytes) == (20 * KIB, 30 * KIB)
    del a, b


def test_width_must_be_positive():
    with (
        pytest.raises(ValueError, match="positive length of an axis or None, got 0"),
        measure("cpu", width=0),
    ):
        pass


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (-(2**20), "-1.0 MiB"),
        (3 * 2**30, "3.00 GiB"),
    ],
)
def test_format_bytes(count, text):
    assert format_bytes(count) == text


@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
def test_allocator_of_an_accelerator():
    device = torch.accelerator.current_accelerator()
    keep = torch.empty(2**20, device=device)
    with measure(width=1024) as peak:
        a = torch.empty(2**21, device=device)
        del a
        b = torch.ones(512, 1024, device=device, requires_grad=True)
        # its gradient is made in autograd's own thread
        (b * 2).sum().backward()
    assert isinstance(peak, Peak)
    assert peak.method == "allocator"
    assert peak.device.type == device.type
    assert peak.added_bytes >= 2**23
    assert peak.start_bytes >= keep.nbytes
    assert peak.widest_bytes == 2**21
    assert b.grad is not None


# --- profiles ---


class Exp(nn.Module):
    """Keeps its result."""

    def forward(self, x):
        scratch = x * 2
        return torch.exp(scratch)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Exp()
        self.weight = nn.Parameter(torch.ones(256 * KIB // 4))

    def forward(self, x):
        return self.inner(x * self.weight)


def net_step(frozen=False):
    net, x = Net(), torch.ones(256 * KIB // 4)
    net.weight.requires_grad_(not frozen)
    optimizer = torch.optim.SGD([net.weight], lr=0.1, momentum=0.9)

    def step():
        net(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return net, optimizer, step


@pytest.fixture(scope="module")
def step_profile():
    net, optimizer, step = net_step()
    return profile(step, model=net, optimizer=optimizer, title="net")


def test_profile_categories_of_known_step(step_profile):
    one = 256 * KIB
    assert step_profile.largest["parameters"] == one
    assert step_profile.largest["gradients"] == one
    assert step_profile.largest["optimizer states"] == one
    # the exponential is kept for its own backward; the input is the caller's
    assert one <= step_profile.largest["saved activations"] < one + KIB
    assert step_profile.largest["other"] == one
    assert step_profile.largest["logits and loss"] == 0
    assert step_profile.largest["temporaries"] >= 2 * one


def test_profile_peak_equals_measured_peak(step_profile):
    net, optimizer, step = net_step()
    step()
    known = [net.weight, *(s["momentum_buffer"] for s in optimizer.state.values())]
    with measure("cpu", known=known) as peak:
        step()
    assert step_profile.peak_bytes == peak.peak_bytes
    assert sum(step_profile.at_peak.values()) == step_profile.peak_bytes
    assert max(map(sum, step_profile.timeline)) == step_profile.peak_bytes


def test_profile_phases(step_profile):
    assert [name for _, name in step_profile.phases] == [FORWARD, BACKWARD, OPTIMIZER]
    places = [place for place, _ in step_profile.phases]
    assert places == sorted(places)
    assert places[-1] < len(step_profile.timeline)


def test_saved_activation_origins(step_profile):
    (holder,) = [h for h in step_profile.saved if h.bytes >= 256 * KIB]
    assert (holder.module, holder.kind, holder.op) == ("inner", "Exp", "aten::exp")


def test_backward_block_origins():
    net, optimizer, step = net_step()
    recorder = Recorder("cpu", net, optimizer)
    with recorder.recording():
        step()
    origins = {(b.module, b.op, b.role) for b in recorder.blocks if b.phase == BACKWARD}
    # the derivative of the exponential, and of what came before it in the same module
    assert {op for module, op, _ in origins if module == "inner"} >= {"aten::mul.Tensor"}
    assert ("", "aten::mul.Tensor", "gradients") in origins, "of the module that owns the weight"


def test_a_frozen_parameter_has_no_gradient():
    net = Net()
    net.weight.requires_grad_(False)
    x = torch.ones(256 * KIB // 4, requires_grad=True)
    observed = profile(lambda: net(x).sum().backward(), model=net, warm=0)
    assert observed.largest["gradients"] == 0


def test_recomputed_layers():
    net, x = Net(), torch.ones(256 * KIB // 4, requires_grad=True)

    def step():
        checkpoint(net, x, use_reentrant=False).sum().backward()
        net.weight.grad = x.grad = None

    observed = profile(step, model=net)
    plain = profile(lambda: (net(x).sum().backward(), net.zero_grad()), model=net)
    assert sum(h.bytes for h in observed.saved) < KIB
    assert sum(h.bytes for h in plain.saved) >= 256 * KIB
    assert observed.largest["saved activations"] >= 256 * KIB, "while it is computed again"


def test_a_step_that_raises_leaves_no_hooks():
    net, optimizer, _ = net_step()

    def step():
        net(torch.ones(256 * KIB // 4))
        raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        profile(step, model=net, optimizer=optimizer, warm=0)
    assert torch._C._len_torch_dispatch_stack() == 0
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())
    assert not net.weight._post_accumulate_grad_hooks
    assert not optimizer._optimizer_step_pre_hooks


def test_profiling_changes_no_result():
    results = []
    for watched in (False, True):
        net, optimizer, step = net_step()
        for _ in range(2):
            profile(step, model=net, optimizer=optimizer, warm=0) if watched else step()
        results.append(net.weight.detach().clone())
    assert torch.equal(*results)


def test_warm_must_be_a_number_of_steps():
    with pytest.raises(ValueError, match="0 or more, got -1"):
        profile(lambda: None, warm=-1)


def test_json_round_trip(step_profile, tmp_path):
    step_profile.save(tmp_path / "p.json")
    assert Profile.load(tmp_path / "p.json") == step_profile
    assert json.loads((tmp_path / "p.json").read_text())["peak_bytes"] == step_profile.peak_bytes


def test_sums_by_origin(step_profile):
    assert sum(step_profile.by("category").values()) == step_profile.peak_bytes
    assert list(step_profile.by("category").values()) == sorted(
        step_profile.by("category").values(), reverse=True
    )
    with pytest.raises(ValueError, match=r"by wants some of category.*got \('size',\)"):
        step_profile.by("size")


def test_text_and_comparison(step_profile):
    text = str(step_profile)
    assert "Memory of net" in text
    assert "aten::exp" in text
    both = compare(
        step_profile,
        Profile.from_data({**step_profile.as_data(), "peak_bytes": 10, "title": "less"}),
    )
    assert both.saved_bytes == step_profile.peak_bytes - 10
    assert "less" in str(both)


def test_rich_tables(step_profile):
    console = pytest.importorskip("rich.console").Console(record=True, width=120, quiet=True)
    with console.capture():
        console.print(step_profile, compare(step_profile, step_profile))
    assert step_profile.__rich__() is not None
    assert compare(step_profile, step_profile).__rich__() is not None


def test_pictures(step_profile, tmp_path):
    pytest.importorskip("matplotlib")
    step_profile.draw(tmp_path / "one.png")
    compare(step_profile, step_profile).draw(tmp_path / "two.png")
    heights = []
    for name in ("one.png", "two.png"):
        content = (tmp_path / name).read_bytes()
        assert content[:8] == b"\x89PNG\r\n\x1a\n"
        heights.append(struct.unpack(">II", content[16:24])[1])
    assert heights[1] > 1.5 * heights[0], "one panel a profile"


def test_profile_of_patched_model():
    pytest.importorskip("transformers")
    case = Case("dense", 2, 64, "float32")

    profiles = []
    for patched in (False, True):
        model = dataclasses.replace(case, patched=patched).build("cpu")
        optimizer, step = case.step(model)
        step()
        peak = tracked_peak(model, optimizer, step)
        profiles.append(profile(step, model=model, optimizer=optimizer, warm=0))
        # but for the loss, a scalar
        assert abs(profiles[-1].peak_bytes - peak) <= 4, "hooks changed what ran"
    stock, ours = profiles
    assert ours.peak_bytes < stock.peak_bytes
    saved = ours.by("kind", "op", saved=True)
    assert saved["LlamaMLP", "gated_mlp.forward"] == 3 * 2 * 2 * 64 * 256 * 4, "gate and up"
    assert saved["LlamaRMSNorm", "rms_norm.forward"] < stock.by("kind", saved=True)["LlamaRMSNorm",]
    holders = [h for h in ours.holders if h.op == "fused_linear_cross_entropy.forward"]
    assert {h.category for h in holders} == {"logits and loss", "gradients"}
    assert any("layers.*" in h.module for h in ours.saved)
    parameters = [h for h in stock.holders if h.category == "parameters" and h.module == "lm_head"]
    assert parameters[0].bytes == 1999 * 96 * 4


def trace():
    """A history of an allocator that reuses addresses, and what a recorder saw of it."""

    def entry(action, addr, size, time_us):
        return {"action": action, "addr": addr, "size": size, "time_us": time_us}

    entries = [
        entry("segment_alloc", 1000, 4096, 9),
        entry("alloc", 100, 512, 10),  # kept for backward
        entry("alloc", 200, 1024, 12),  # scratch of a kernel, which no recorder sees
        entry("free_requested", 200, 1024, 13),
        entry("free_completed", 200, 1024, 13),
        entry("alloc", 200, 2048, 20),  # a gradient at the same address
        entry("free_requested", 100, 512, 22),
        entry("free_requested", 7, 256, 23),  # older than the step
        entry("alloc", 300, 128, 31),
        {"action": "oom", "device_free": 5, "size": 9, "time_us": 39},
        entry("segment_free", 1000, 4096, 40),
    ]
    recorded = [
        Block(1000, role="parameters", address=1),
        Block(500, FORWARD, "m", "M", "aten::exp", died=BACKWARD, address=100, time=11),
        Block(2000, BACKWARD, "m", "M", "aten::mul", role="gradients", address=200, time=21),
        Block(100, OPTIMIZER, "", "", "aten::add", died=OPTIMIZER, address=300, time=31),
    ]
    phases = [(9, FORWARD), (20, BACKWARD), (30, OPTIMIZER)]
    return join(entries, recorded, phases, allocated=1512, reserved=2048)


def test_allocator_history_join():
    joined = trace()
    summary = summarize(
        Profile("t", "cuda", "history"), joined.blocks, joined.events, joined.phases
    )
    assert summary.peak_bytes == 1512 + 512 + 2048
    assert summary.at_peak["parameters"] == 1000
    assert summary.at_peak["other"] == 512, "allocated before and unknown"
    assert summary.at_peak["saved activations"] == 512, "the allocator's size, not the tensor's"
    assert summary.at_peak["gradients"] == 2048
    assert summary.largest["temporaries"] == 1024
    assert [b.op for b in joined.blocks if b.op in (OLDER, HIDDEN)] == [OLDER, HIDDEN]
    assert summary.phases[-1][1] == OPTIMIZER
    assert joined.facts == {
        "allocated": 4072,
        "reserved": 6144,
        "fragmentation": 2072,
        "hidden": 0,
        "largest reserved": 6144,
    }
    assert sum(change for _, change in joined.events) == 1512 + 2048 - 256 + 128


def test_allocator_history_hidden_blocks():
    joined = trace()
    (hidden,) = [b for b in joined.blocks if b.op == HIDDEN]
    assert (hidden.phase, hidden.category, hidden.size) == (FORWARD, "temporaries", 1024)


def test_categories_are_complete(step_profile):
    assert tuple(step_profile.at_peak) == CATEGORIES


@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
def test_history_of_an_accelerator():
    device = torch.accelerator.current_accelerator()
    net = Net().to(device)
    x = torch.ones(256 * KIB // 4, device=device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

    def step():
        net(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with measure(device) as peak:
        step()
    observed = profile(step, model=net, optimizer=optimizer, warm=0)
    assert observed.method == "allocator history"
    assert observed.peak_bytes == pytest.approx(peak.peak_bytes, rel=0.02)
    assert observed.largest["gradients"] >= 256 * KIB
    assert observed.largest["optimizer states"] >= 256 * KIB
    assert observed.largest["saved activations"] >= 256 * KIB
    assert observed.allocator["reserved"] >= observed.allocator["allocated"]
