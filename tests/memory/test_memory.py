"""Peak memory measured around a block, against allocations whose sizes are known."""

import gc

import pytest
import torch

import liger_multi
from liger_multi.memory import Peak, format_bytes, measure, peak_memory

KIB = 1024


def kib(count):
    """A float32 tensor of ``count`` KiB."""
    return torch.empty(count * KIB // 4)


def test_live_bytes_rise_and_fall():
    with measure("cpu") as peak:
        a = kib(100)
        b = kib(50)
        del b
        c = kib(20)
    assert (peak.start_bytes, peak.peak_bytes, peak.end_bytes) == (0, 150 * KIB, 120 * KIB)
    assert peak.method == "live tensors"
    del a, c


def test_views_share_one_storage_and_keep_it_alive():
    with measure("cpu") as peak:
        a = kib(100)
        view = a.view(2, -1)[1].t()
        del a
        gc.collect()
        b = kib(10)
    assert (peak.peak_bytes, peak.end_bytes) == (110 * KIB, 110 * KIB)
    del view, b


def test_older_tensors_count_for_the_whole_region_once_touched():
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


def test_known_tensors_count_untouched():
    old = kib(100)
    with measure("cpu", known=[old, old.view(2, -1)]) as peak:
        pass
    assert (peak.start_bytes, peak.peak_bytes) == (100 * KIB, 100 * KIB)


def test_an_older_tensor_that_dies_leaves():
    old = kib(100)
    with measure("cpu") as peak:
        old.add_(1)
        del old
        b = kib(30)
    assert (peak.peak_bytes, peak.end_bytes) == (100 * KIB, 30 * KIB)
    del b


def test_resized_storage():
    with measure("cpu") as peak:
        a = kib(10)
        a.resize_(40 * KIB // 4)
    assert (peak.peak_bytes, peak.end_bytes) == (40 * KIB, 40 * KIB)


class WithTemporaries(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, dy):
        scratch = kib(500)
        del scratch
        return dy * 2


def test_temporaries_of_a_backward_are_seen():
    x = torch.ones(4 * KIB, requires_grad=True)
    with measure("cpu") as peak:
        WithTemporaries.apply(x).sum().backward()
    # x stands beside the scratch, and so do two scalars; the product is gone by then
    assert 516 * KIB <= peak.peak_bytes <= 516 * KIB + 16


def test_foreach_operators():
    tensors = [kib(10) for _ in range(3)]
    with measure("cpu") as peak:
        made = torch._foreach_add(tensors, 1.0)
    assert (peak.start_bytes, peak.peak_bytes) == (30 * KIB, 60 * KIB)
    del made


def test_a_region_that_raises_still_reports():
    def region():
        a = kib(10)
        raise RuntimeError(f"half way, {a.nbytes} bytes")

    with pytest.raises(RuntimeError, match="half way"), measure("cpu") as peak:
        region()
    assert peak.peak_bytes == 10 * KIB
    assert torch._C._len_torch_dispatch_stack() == 0


def test_the_region_ends():
    with measure("cpu") as peak:
        a = kib(10)
    b = kib(100)
    del a, b
    assert (peak.peak_bytes, peak.end_bytes) == (10 * KIB, 10 * KIB)


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


def test_operators_of_ours_do_not_hide_their_temporaries():
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
