"""Rotary embedding beside the functions that it stands for, its layouts, and bad input."""

import pytest
import torch

from liger_multi import ops
from liger_multi.tolerance import excess

BATCH, TOKENS, HEADS, WIDTH = 2, 6, (4, 2), 16
KINDS = {
    "same": (torch.float32, torch.float32),
    "bf16": (torch.bfloat16, torch.bfloat16),
    "bf16-fp32-angles": (torch.bfloat16, torch.float32),
}


def stock(family, name="apply_rotary_pos_emb"):
    module = pytest.importorskip(f"transformers.models.{family}.modeling_{family}")
    return getattr(module, name)


def angles(rotary, dtype, batch=1, interleaved=False):
    """cos and sin as rotary modules make them: both channels of a pair alike."""
    position = torch.arange(TOKENS) + 3 * torch.arange(batch)[:, None]
    half = position[..., None] * 100.0 ** -(torch.arange(rotary // 2) * 2 / rotary)
    full = half.repeat_interleave(2, -1) if interleaved else torch.cat((half, half), -1)
    return full.cos().to(dtype), full.sin().to(dtype)


def queries_and_keys(dtype, heads_axis=1, layout="swapped"):
    made = []
    for heads in HEADS:
        shape = (BATCH, heads, TOKENS, WIDTH) if heads_axis == 1 else (BATCH, TOKENS, heads, WIDTH)
        x = torch.randn(shape).to(dtype)
        x = x.transpose(1, 2).contiguous().transpose(1, 2) if layout == "swapped" else x
        made.append(x.requires_grad_())
    return made


def compare(function, right, inputs, exact=True):
    """Outputs, their dtypes and gradients of two functions of q and k; bit by bit, or nearly."""
    ours, theirs = function(*inputs), right(*inputs)
    ups = [torch.randn(x.shape).to(x.dtype) for x in theirs]
    grads = [torch.autograd.grad(outs, inputs, ups) for outs in (ours, theirs)]
    for got, want in zip((*ours, *grads[0]), (*theirs, *grads[1]), strict=True):
        assert got.dtype == want.dtype
        if exact:
            assert torch.equal(got, want)
        else:
            assert excess(got.detach(), want.detach().double(), got.dtype) <= 1


# The fp32 angles of a bf16 call: the stock gradient sums two terms that were rounded before.
FAMILIES = {
    "llama": (WIDTH, {}),
    "phi3": (12, {}),
    "cohere": (WIDTH, {"style": "interleaved", "casting": "cohere"}),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("axis", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_reference_is_bit_exact_to_transformers(family, axis, kind):
    (dtype, angle), (rotary, options) = KINDS[kind], FAMILIES[family]
    cos, sin = angles(rotary, angle, BATCH, interleaved=family == "cohere")
    function = stock(family)
    compare(
        lambda q, k: ops.rope(q, k, cos, sin, unsqueeze_dim=axis, **options),
        lambda q, k: function(q, k, cos, sin, unsqueeze_dim=axis),
        queries_and_keys(dtype, axis),
        exact=family == "cohere" or dtype == angle,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_glm4_has_one_value_a_pair_on_half_of_the_channels(kind):
    dtype, angle = KINDS[kind]
    cos, sin = angles(WIDTH // 2, angle)
    function, half = stock("glm4"), WIDTH // 4
    compare(
        lambda q, k: ops.rope(
            q, k, cos[..., :half], sin[..., :half], style="interleaved", rotary_dim=WIDTH // 2
        ),
        lambda q, k: function(q, k, cos, sin),
        queries_and_keys(dtype),
        exact=dtype == angle,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_gpt_oss_has_one_value_a_pair(kind):
    dtype, angle = KINDS[kind]
    cos, sin = (x[..., : WIDTH // 2] for x in angles(WIDTH, angle, BATCH))
    function = stock("gpt_oss")
    compare(
        lambda q, k: ops.rope(q, k, cos, sin, rotary_dim=WIDTH),
        lambda q, k: function(q, k, cos, sin),
        queries_and_keys(dtype),
        exact=dtype == angle,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_vision_has_no_batch(kind):
    dtype, angle = KINDS[kind]
    cos, sin = (x[0] for x in angles(WIDTH, angle))
    function = stock("qwen2_vl", "apply_rotary_pos_emb_vision")
    compare(
        lambda q, k: ops.rope(q, k, cos, sin, casting="cohere"),
        lambda q, k: function(q, k, cos, sin),
        [x[0].transpose(0, 1).detach().requires_grad_() for x in queries_and_keys(dtype)],
    )


def test_nanochat_turns_the_other_way():
    cos, sin = angles(WIDTH, torch.float32)
    function = stock("nanochat")
    compare(
        lambda q, k: ops.rope(q, k, cos, -sin),
        lambda q, k: function(q, k, cos, sin),
        queries_and_keys(torch.float32),
    )
