"""Kernels of multi_token_attention beside the common suite: tiles, strides, what is not read."""

import pytest
import torch

from liger_multi.reference.attention.operators import MultiTokenAttention
from tests import harness

pytest.importorskip("triton")
if (DEVICE := harness.device_of("triton")) is None:
    pytest.skip("kernels on a CPU need TRITON_INTERPRET=1", allow_module_level=True)

from liger_multi.backends.triton.attention import multi_token_attention as kernels
from liger_multi.backends.triton.cross_entropy.softmax import TileConfig

NEEDS = (True, True, False)
SHAPES = [(1, 1, 37, 37), (1, 2, 21, 53), (1, 1, 40, 19)]


def shape(stride=1, padding=1, dilation=1, sparse=False):
    return stride, padding, dilation, 1, sparse


def made(sizes, seed=0, out=2, size=3):
    generator = torch.Generator().manual_seed(seed)
    scores = 3.0 * torch.randn(sizes, generator=generator)
    weight = torch.randn(out, sizes[1], size, size, generator=generator)
    return scores.to(DEVICE), weight.to(DEVICE)


def compare(scores, weight, options):
    """Forward and backward with the reference's on the same inputs."""
    y, p = kernels.forward(scores, weight, None, *options)
    right_y, right_p = MultiTokenAttention.forward(scores, weight, None, *options)
    torch.testing.assert_close(p, right_p, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(y, right_y, rtol=1e-5, atol=1e-5)
    assert not y.triu(1).any()
    assert not p.triu(1).any()
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    given = dy.clone()
    found = kernels.backward(dy, weight, None, p, *options, *NEEDS)
    right = MultiTokenAttention.backward(dy, weight, None, p, *options, *NEEDS)
    assert torch.equal(dy, given)
    assert not found[0].triu(1).any()
    for got, exact in zip(found, right, strict=True):
        torch.testing.assert_close(got, exact, rtol=1e-5, atol=1e-5)


@pytest.fixture(autouse=True)
def same_convolutions():
    with torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
        yield


@pytest.fixture(params=["formula", "steps", "tiles", "turned"])
def tiles(request, monkeypatch):
    """As launched, rows of more than a step, tiles of several rows, and heads on the last axis."""
    if request.param != "formula":
        tile = TileConfig(1, 16, 1) if request.param == "steps" else TileConfig(4, 128, 1)
        transpose = kernels.TransposeConfig(16 if request.param == "turned" else 0, 1)
        others = {"zero": kernels.ZeroConfig(16, 1), "transpose": transpose}
        monkeypatch.setattr(
            kernels, "launch_config", lambda name, *_, **__: others.get(name.split(".")[1], tile)
        )


@pytest.mark.parametrize("sizes", SHAPES)
@pytest.mark.parametrize("sparse", [False, True])
def test_equals_the_reference(tiles, sizes, sparse):
    compare(*made(sizes), shape(sparse=sparse))


def test_heads_that_are_no_power_of_two(tiles):
    compare(*made((2, 3, 18, 21), out=5), shape())


@pytest.mark.parametrize("tiles", ["turned"], indirect=True)
def test_heads_far_apart_are_turned_another_way(tiles, monkeypatch):
    monkeypatch.setattr(kernels, "FAR", 64)
    monkeypatch.delattr(kernels, "_multi_token_turn_kernel")
    compare(*made((2, 3, 18, 21), out=5), shape())


def test_the_triangle_is_of_what_the_convolution_makes(tiles):
    for options in (shape(2, 0), shape(1, 2, 2), shape(3, 3)):
        compare(*made((1, 1, 23, 30)), options)


def test_scores_of_any_strides(tiles):
    scores, weight = made((2, 2, 4, 33))
    wide = torch.full((2, 4, 2, 48), torch.nan, device=DEVICE)
    by_heads = wide.transpose(1, 2)[..., 3:36].copy_(scores)
    by_columns = scores.mT.contiguous().mT
    same = scores[:1, :1].expand(2, 2, 4, 33)
    for view in (by_heads, by_columns, same):
        compare(view, weight, shape())


def test_nothing_past_the_diagonal_is_used(tiles):
    scores, weight = made((1, 1, 19, 19))
    past = torch.ones(19, 19, dtype=torch.bool, device=DEVICE).triu(1)
    filled = scores.masked_fill(past, torch.nan)
    y, p = kernels.forward(scores, weight, None, *shape())
    again, _ = kernels.forward(filled, weight, None, *shape())
    assert torch.equal(y, again)
    dy = torch.randn_like(y)
    found = kernels.backward(dy, weight, None, p, *shape(), *NEEDS)
    others = kernels.backward(dy.masked_fill(past, torch.nan), weight, None, p, *shape(), *NEEDS)
    assert all(torch.equal(a, b) for a, b in zip(found, others, strict=True))


def test_an_upstream_gradient_that_is_one_number(tiles):
    scores, weight = made((1, 2, 18, 18))
    y, p = kernels.forward(scores, weight, None, *shape())
    ones = torch.ones((), device=DEVICE).expand(y.shape)
    found = kernels.backward(ones, weight, None, p, *shape(), *NEEDS)
    right = MultiTokenAttention.backward(ones, weight, None, p, *shape(), *NEEDS)
    for got, exact in zip(found, right, strict=True):
        torch.testing.assert_close(got, exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("hidden", [float("-inf"), torch.finfo(torch.float32).min])
def test_rows_that_see_only_hidden_scores_have_no_probabilities(tiles, hidden):
    """As those before the first token of a sequence that is padded on the left."""
    scores, weight = made((1, 2, 20, 20))
    scores[..., :7] = hidden
    compare(scores, weight, shape())


def test_not_a_number_stays_in_its_row(tiles):
    scores, weight = made((1, 1, 20, 20))
    scores[0, 0, 9, 4] = torch.nan
    _, p = kernels.forward(scores, weight, None, *shape())
    assert p.isnan().nonzero().tolist() == [[0, 0, 9, col] for col in range(10)]


def test_doubles_are_refused():
    assert "float64" in kernels.supports(torch.ones(1, 1, 3, 3, dtype=torch.float64))
    assert kernels.supports(torch.ones(1, 1, 3, 3)) is None
