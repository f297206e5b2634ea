"""Parts of thin matrices by a kernel: those of the reference, bit by bit."""

import pytest
import torch

from liger_multi.reference.adapters import operators as reference
from tests import harness

pytest.importorskip("triton")


@pytest.fixture
def split(device):
    if device.type == "cpu" and not harness.interpreted():
        pytest.skip("kernels run on a GPU or interpreted")
    from liger_multi.backends.triton.adapters.operators import split

    return split


@pytest.mark.parametrize("order", [reference.PARTS, reference.LEFT, reference.RIGHT])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("layout", ["rows", "columns", "gaps", "part"])
@pytest.mark.parametrize("shape", [(70, 16), (16, 1100), (5, 7), (1, 3), (3, 1), (0, 4)])
def test_parts_are_those_of_the_reference(split, device, order, axis, layout, shape):
    torch.manual_seed(0)
    wide = torch.randn(shape[0] * 2, shape[1] * 2, device=device) * 1e3
    x = {
        "rows": wide[: shape[0], : shape[1]].contiguous(),
        "columns": wide[: shape[0], : shape[1]].t().contiguous().t(),
        "gaps": wide[::2, ::2],
        "part": wide[: shape[0], shape[1] :],
    }[layout]
    made = split(x, order, axis)
    assert torch.equal(made, reference.split(x, order, axis))
    parts = made.chunk(len(order), axis)
    if order == reference.PARTS:
        assert torch.equal(sum(part.double() for part in parts), x.double())
