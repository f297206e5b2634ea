"""Rotary kinds beside the functions and modules of Hugging Face, long positions, bad input."""

import types

import pytest
import torch
from test_rope import compare, stock

import liger_multi
from liger_multi import ops
from tests import harness

BATCH, TOKENS, HEADS, WIDTH = 2, 6, (4, 2), 16
PAIRS = WIDTH // 2
SECTIONS = (2, 3, 3)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
KINDS = ("rope_multimodal", "rope_complex", "rope_sorted", "rope_positions", "rope")


@pytest.fixture(params=["reference", "triton"])
def place(request):
    """The device of a backend, which the operators are bound to."""
    reason = harness.refusal(request.param)
    if reason is not None:
        pytest.skip(reason)
    with liger_multi.use(**dict.fromkeys(KINDS, request.param)):
        yield harness.device_of(request.param)


def made(dtype, inside=False):
    """q and k as a projection makes them: heads inside in memory."""
    shapes = [(BATCH, TOKENS, heads, WIDTH) for heads in HEADS]
    tensors = [torch.randn(shape).to(dtype) for shape in shapes]
    return [(x if inside else x.transpose(1, 2)).requires_grad_() for x in tensors]


def grids():
    """Positions of time, height and width."""
    return torch.randint(50, (3, BATCH, TOKENS))


def inv_freq():
    return 100.0 ** -(torch.arange(PAIRS) / PAIRS)


def rotary(family, name, **parameters):
    """A rotary module of Hugging Face with our frequencies."""
    module = pytest.importorskip(f"transformers.models.{family}.modeling_{family}")
    kind = getattr(module, name, None)
    if kind is None or not hasattr(kind, "recomposition_frequencies"):
        pytest.skip("this transformers merges sections elsewhere")
    found = kind.__new__(kind)
    torch.nn.Module.__init__(found)
    found.inv_freq, found.attention_scaling, found.rope_type = inv_freq(), 1.0, "default"
    found.config = types.SimpleNamespace(rope_parameters={"rope_type": "default"})
    for key, value in parameters.items():
        setattr(found, key, value)
    return found


# --- the functions and modules that they stand for ---

MERGED = {
    "qwen2_vl": ("Qwen2VLRotaryEmbedding", "chunked"),
    "qwen3_vl": ("Qwen3VLTextRotaryEmbedding", "interleaved"),
}


@DTYPES
@pytest.mark.parametrize("family", MERGED)
def test_multimodal_is_what_the_module_and_the_function_compute(family, dtype):
    name, arrangement = MERGED[family]
    module, function = rotary(family, name, mrope_section=list(SECTIONS)), stock(family)
    ids = grids()
    cos, sin = module(torch.empty(0, dtype=dtype), ids)
    turns = ids[..., None].float() * inv_freq()
    both = torch.cat((turns, turns), -1)
    each = (both.cos().to(dtype), both.sin().to(dtype))
    options = {"arrangement": arrangement}
    compare(
        lambda q, k: ops.rope_multimodal(q, k, *each, SECTIONS, **options),
        lambda q, k: function(q, k, cos, sin),
        made(dtype),
    )
    compare(
        lambda q, k: ops.rope_positions(q, k, ids, inv_freq(), sections=SECTIONS, **options),
        lambda q, k: function(q, k, cos, sin),
        made(dtype),
    )


@DTYPES
def test_multimodal_is_the_function_that_took_sections(dtype):
    """As transformers had it before 5.1: one value a channel, sections for both halves."""
    cos, sin = (torch.randn(3, BATCH, TOKENS, WIDTH).to(dtype) for _ in range(2))

    def right(q, k):
        parts = [
            torch.cat([m[i % 3] for i, m in enumerate(t.split(SECTIONS * 2, -1))], -1)
            for t in (cos, sin)
        ]
        return stock("llama")(q, k, *parts)

    compare(lambda q, k: ops.rope_multimodal(q, k, cos, sin, SECTIONS), right, made(dtype))


@DTYPES
@pytest.mark.parametrize("batch", [1, BATCH])
def test_complex_is_what_llama4_computes(dtype, batch):
    """Every sequence of a batch has its own angles, which were those of the first one."""
    angle = torch.rand(batch, TOKENS, PAIRS) * 6
    freqs = torch.polar(torch.ones_like(angle), angle)
    function = stock("llama4", "apply_rotary_emb")
    compare(
        lambda q, k: ops.rope_complex(q, k, freqs),
        lambda q, k: function(q, k, freqs),
        made(dtype, inside=True),
    )


@DTYPES
def test_complex_is_what_deepseek_v2_and_the_vision_of_llama4_compute(dtype):
    angle = torch.rand(1, TOKENS, PAIRS) * 6
    freqs = torch.polar(torch.ones_like(angle), angle)
    function = stock("deepseek_v2", "apply_rotary_emb")
    compare(
        lambda q, k: ops.rope_complex(q, k, freqs, unsqueeze_dim=1),
        lambda q, k: function(q, k, freqs),
        made(dtype),
    )
    vision = stock("llama4", "vision_apply_rotary_emb")
    compare(
        lambda q, k: ops.rope_complex(q, k, freqs[0]),
        lambda q, k: vision(q, k, freqs),
        [x.detach()[:, :, :2].requires_grad_() for x in made(dtype, inside=True)],
    )


@DTYPES
def test_sorted_is_what_deepseek_v3_computes(dtype):
    few = [torch.randn(BATCH, TOKENS, PAIRS).to(dtype) for _ in range(2)]
    cos, sin = (torch.cat((t, t), -1) for t in few)
    function = stock("deepseek_v3", "apply_rotary_pos_emb_interleave")
    compare(
        lambda q, k: ops.rope_sorted(q, k, *few, rotary_dim=WIDTH),
        lambda q, k: function(q, k, cos, sin),
        made(dtype),
    )
    compare(
        lambda q, k: ops.rope_sorted(q, k, cos, sin),
        lambda q, k: function(q, k, cos, sin),
        made(dtype),
    )


@DTYPES
@pytest.mark.parametrize("backwards", [False, True])
def test_positions_are_what_the_module_of_llama_makes_of_them(dtype, backwards):
    """And of nanochat, which turns the other way."""
    module = pytest.importorskip("transformers.models.llama.modeling_llama")
    found = module.LlamaRotaryEmbedding.__new__(module.LlamaRotaryEmbedding)
    torch.nn.Module.__init__(found)
    found.inv_freq, found.attention_scaling, found.rope_type = inv_freq(), 1.25, "default"
    ids = torch.randint(5000, (BATCH, TOKENS))
    cos, sin = found(torch.empty(0, dtype=dtype), ids)
    function = stock("nanochat" if backwards else "llama")
    sign = -1 if backwards else 1
    compare(
        lambda q, k: ops.rope_positions(q, k, ids, sign * inv_freq(), scaling=1.25),
        lambda q, k: function(q, k, cos, sin),
        made(dtype),
    )


@DTYPES
def test_positions_of_an_image(dtype):
    """Rows and columns as the vision tower of qwen2_vl joins them."""
    rows, cols = torch.randint(30, (2, TOKENS))
    few = inv_freq()[: PAIRS // 2]
    turns = torch.cat((rows[:, None] * few, cols[:, None] * few), -1)
    both = torch.cat((turns, turns), -1)
    function = stock("qwen2_vl", "apply_rotary_pos_emb_vision")
    ids = torch.stack((rows, cols))
    compare(
        lambda q, k: ops.rope_positions(
            q, k, ids, torch.cat((few, few)), sections=(PAIRS // 2,) * 2, casting="cohere"
        ),
        lambda q, k: function(q, k, both.cos(), both.sin()),
        [x[0].transpose(0, 1).detach().requires_grad_() for x in made(dtype)],
    )


@DTYPES
def test_two_axes_of_sam_are_interleaved_pairs_in_fp32(dtype):
    """2-D vision: `rope` has it."""
    function = stock("sam2_video", "apply_rotary_pos_emb_2d")
    cos, sin = (torch.randn(TOKENS, PAIRS).repeat_interleave(2, -1) for _ in range(2))
    compare(
        lambda q, k: ops.rope(q, k, cos, sin, style="interleaved", casting="cohere"),
        lambda q, k: function(q, k, cos, sin),
        made(dtype),
    )


# --- numbers ---


def test_long_positions_keep_their_angles(place):
    """The kernel's own cosine: a million tokens, frequencies near 1."""
    ids = torch.tensor([0, 1, 77, 4095, 65535, 65536, 99991]).to(place)
    freq = torch.tensor([1.0, 0.749894, 0.5623413, 1e-4]).to(place)
    q = torch.zeros(1, 2, ids.numel(), 8)
    q[..., :4] = 1.0  # turned, it is cos and sin
    q = q.to(place)
    out, _ = ops.rope_positions(q, q, ids, freq)
    turns = (ids[:, None].float() * freq).double()  # rounded as the rotary modules round it
    right = torch.cat((turns.cos(), turns.sin()), -1)
    torch.testing.assert_close(out[0, 0].double(), right, rtol=0, atol=3e-7)


@pytest.mark.parametrize("kind", ["int32", "strided"])
def test_positions_of_any_integers(place, kind):
    q = torch.randn(2, 2, 5, 8).to(place)
    ids, freq = torch.randint(9, (2, 5)), torch.rand(4).to(place)
    right = ops.rope_positions(q, q, ids.to(place), freq)
    given = ids.int() if kind == "int32" else ids.repeat_interleave(3, 1)[:, ::3]
    for got, want in zip(ops.rope_positions(q, q, given.to(place), freq), right, strict=True):
        assert torch.equal(got, want)


def test_inputs_are_not_written_and_nothing_of_them_is_kept(place):
    """They were rotated in place, unnoticed by autograd."""
    q, k = (torch.randn(2, 3, heads, 8).to(place).requires_grad_() for heads in (4, 2))
    before = [q.detach().clone(), k.detach().clone()]
    freqs = torch.randn(2, 3, 4, 2).to(place)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        outs = ops.rope_complex(q, k, freqs)
    assert [torch.equal(x, y) for x, y in zip((q, k), before, strict=True)] == [True, True]
    assert kept == [freqs.shape]
    sum(o.sum() for o in outs).backward()


# --- bad input ---

q, k, c = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 3, 8), torch.randn(3, 2, 3, 8)
ids, freq, heads = torch.zeros(2, 3, dtype=torch.long), torch.ones(4), {"unsqueeze_dim": 1}
BAD = [
    (lambda: ops.rope_multimodal(q, k, c, c, (1, 1, 1)), ValueError, r"add up to 4, got \(1, 1, 1"),
    (lambda: ops.rope_multimodal(q, k, c, c, "121"), TypeError, "a sequence of integers, got str"),
    (lambda: ops.rope_multimodal(q, k, c[:2], c[:2], (1, 2, 1)), ValueError, "3 grids"),
    (lambda: ops.rope_multimodal(q, k, c, c[:2], (1, 2, 1)), ValueError, "same shape"),
    (lambda: ops.rope_multimodal(q, k, None, c, (1, 2, 1)), TypeError, "cos must be"),
    (
        lambda: ops.rope_multimodal(q, k, c, c, (1, 2, 1), arrangement="mixed"),
        ValueError,
        "unknown arrangement 'mixed'",
    ),
    (lambda: ops.rope_complex(q, k, c, **heads), ValueError, "complex, or have the two parts"),
    (
        lambda: ops.rope_complex(q, None, c),
        TypeError,
        "k must be a floating-point tensor, got None",
    ),
    (lambda: ops.rope_complex(q, k, torch.ones(2, 3, 9, 2), **heads), ValueError, "at most 8"),
    (lambda: ops.rope_complex(q, k, torch.ones(2, 5, 4, 2), **heads), ValueError, r"\(3, R\)"),
    (lambda: ops.rope_sorted(q, k, c[0], c[0], rotary_dim=6), ValueError, "rotary_dim must be"),
    (lambda: ops.rope_sorted(q, k[:, :, :2], c[0], c[0]), ValueError, "same shape except"),
    (
        lambda: ops.rope_sorted(q, k, c[0].clone().requires_grad_(), c[0]),
        ValueError,
        "cos has no gradient",
    ),
    (lambda: ops.rope_positions(q, k, ids.float(), freq), TypeError, "int64 or int32 tensor"),
    (
        lambda: ops.rope_positions(q, k, ids[:, :2], freq),
        ValueError,
        r"must have shape \(3,\), \(1, 3\) or \(2, 3\), got .*\(2, 2\)",
    ),
    (lambda: ops.rope_positions(q, k, ids, torch.ones(5)), ValueError, "at most 4 numbers"),
    (
        lambda: ops.rope_positions(q, k, ids, freq, sections=(1, 2, 1)),
        ValueError,
        r"\(3, 3,\), \(3, 1, 3\) or \(3, 2, 3\)",
    ),
    (lambda: ops.rope_positions(q, k, ids, freq, scaling="2"), TypeError, "scaling must be a num"),
]


@pytest.mark.parametrize(("call", "kind", "message"), BAD, ids=range(len(BAD)))
def test_bad_input_is_named(call, kind, message):
    with pytest.raises(kind, match=message):
        call()
