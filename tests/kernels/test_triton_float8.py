"""Rounding to 8 bits by kernels: bit by bit what PyTorch's casts give."""

import pytest
import torch

pytest.importorskip("triton")

from liger_multi.backends.triton.cross_entropy.float8 import TritonRounding
from liger_multi.reference.cross_entropy.float8 import FORMATS, PLAIN
from tests.harness import interpreted

DEVICE = "cpu" if interpreted() or not torch.cuda.is_available() else "cuda"
if DEVICE == "cpu" and not interpreted():
    pytest.skip("kernels on a CPU need TRITON_INTERPRET=1", allow_module_level=True)
ROUNDING = TritonRounding()


def same(found, wanted):
    codes = [made.data.view(torch.uint8).cpu() for made in (found, wanted)]
    return torch.equal(*codes) and torch.equal(found.scale.cpu(), wanted.scale.cpu())


KINDS = [kind for pair in FORMATS for kind in pair]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_value_of_16_bits(kind):
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.float16, torch.bfloat16):
        x = every.view(dtype)
        limit = torch.finfo(torch.float16).max  # and what is scaled to nothing by 2**127
        x = x[x.isfinite() & (x.float().abs() <= limit)]
        x = x[: x.numel() // 32 * 32].reshape(-1, 32).to(DEVICE)
        assert same(ROUNDING.rounded(x, kind), PLAIN.rounded(x, kind))
    near = x[x.float().abs() <= torch.finfo(kind).max].float().reshape(1, -1)
    assert same(ROUNDING.rounded(near, kind), PLAIN.rounded(near, kind)), "nearly no scale"


@pytest.mark.parametrize("kind", [pair[0] for pair in FORMATS], ids=str)
@pytest.mark.parametrize("shape", [(70, 48), (1, 3000), (200, 16), (64, 128)])
def test_both_layouts(shape, kind):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator).bfloat16().to(DEVICE)
    for given in (x, x.t()):
        for found, wanted in zip(
            ROUNDING.both_ways(given, kind), PLAIN.both_ways(given, kind), strict=True
        ):
            assert found.data.is_contiguous()
            assert same(found, wanted)


def test_nothing_zeros_and_what_is_no_number():
    for x in (torch.zeros(0, 16), torch.zeros(3, 16)):
        x = x.to(DEVICE)
        assert same(ROUNDING.rounded(x), PLAIN.rounded(x))
        assert same(ROUNDING.both_ways(x)[1], PLAIN.both_ways(x)[1])
    x = torch.ones(4, 16)
    x[1, 2] = float("nan")
    for kind in KINDS:
        made = ROUNDING.rounded(x.to(DEVICE), kind)
        assert made.data.float().isnan().nonzero().tolist() == [[1, 2]]
