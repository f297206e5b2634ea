"""Rotary embedding against the functions that it replaces, its layouts, and bad input.

The other operators of the family are compared with the functions and modules of Hugging Face,
at long positions too.
"""

import itertools
import types

import pytest
import torch

import liger_multi
from liger_multi import ops
from liger_multi.dispatch import launch
from liger_multi.testing.tolerance import excess
from tests import harness
from tests.comparing import assert_equal

BATCH, TOKENS, HEADS, WIDTH = 2, 6, (4, 2), 16
KINDS = {
    "same": (torch.float32, torch.float32),
    "bf16": (torch.bfloat16, torch.bfloat16),
    "bf16-fp32-angles": (torch.bfloat16, torch.float32),
}


def stock(family, name="apply_rotary_pos_emb"):
    return getattr(pytest.importorskip(f"transformers.models.{family}.modeling_{family}"), name)


def angles(rotary, dtype, batch=1, interleaved=False):
    """cos and sin as rotary modules make them: both channels of a pair alike."""
    position = torch.arange(TOKENS) + 3 * torch.arange(batch)[:, None]
    half = position[..., None] * 100.0 ** -(torch.arange(rotary // 2) * 2 / rotary)
    full = half.repeat_interleave(2, -1) if interleaved else torch.cat((half, half), -1)
    return full.cos().to(dtype), full.sin().to(dtype)


def queries_and_keys(dtype, heads_axis=1, layout="swapped"):
    tensors = []
    for heads in HEADS:
        shape = (BATCH, heads, TOKENS, WIDTH) if heads_axis == 1 else (BATCH, TOKENS, heads, WIDTH)
        x = torch.randn(shape).to(dtype)
        x = x.transpose(1, 2).contiguous().transpose(1, 2) if layout == "swapped" else x
        tensors.append(x.requires_grad_())
    return tensors


def compare(function, right, inputs, exact=True):
    """Outputs, their dtypes and gradients of two functions of q and k; bit by bit, or nearly.

    Nearly, where bf16 meets fp32 angles: the stock gradient adds two terms already rounded to bf16.
    """
    ours, theirs = function(*inputs), right(*inputs)
    ups = [torch.randn(x.shape).to(x.dtype) for x in theirs]
    grads = [torch.autograd.grad(outs, inputs, ups) for outs in (ours, theirs)]
    for got, want in zip((*ours, *grads[0]), (*theirs, *grads[1]), strict=True):
        assert got.dtype == want.dtype
        if exact:
            assert torch.equal(got, want)
        else:
            assert excess(got.detach(), want.detach().double(), got.dtype) <= 1


HALF_OF_PAIRS = {"style": "interleaved", "rotary_dim": WIDTH // 2}
FAMILIES = {
    "llama": (WIDTH, WIDTH, 1, {}),
    "phi3": (12, 12, 1, {}),
    "cohere": (WIDTH, WIDTH, 1, {"style": "interleaved", "casting": "cohere"}),
    "glm4": (WIDTH // 2, WIDTH // 4, 1, HALF_OF_PAIRS),
    "gpt_oss": (WIDTH, WIDTH // 2, 1, {"rotary_dim": WIDTH}),
    "nanochat": (WIDTH, WIDTH, -1, {}),
}
"""By type: channels that turn, values of an angle that the operator takes, a sign, and options."""


@pytest.mark.parametrize("precision", KINDS)
@pytest.mark.parametrize("axis", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_reference_is_bit_exact_to_transformers(family, axis, precision):
    (dtype, angle), (rotary, values, sign, options) = KINDS[precision], FAMILIES[family]
    cos, sin = angles(rotary, angle, BATCH, interleaved=family == "cohere")
    few = (cos[..., :values], sign * sin[..., :values])
    function, of_pairs = stock(family), family == "gpt_oss"
    compare(
        lambda q, k: ops.rope(q, k, *few, unsqueeze_dim=axis, **options),
        lambda q, k: function(q, k, *(few if of_pairs else (cos, sin)), unsqueeze_dim=axis),
        queries_and_keys(dtype, axis),
        exact=family == "cohere" or dtype == angle,
    )


@pytest.mark.parametrize("precision", KINDS)
def test_vision_has_no_batch(precision):
    dtype, angle = KINDS[precision]
    cos, sin = (x[0] for x in angles(WIDTH, angle))
    function = stock("qwen2_vl", "apply_rotary_pos_emb_vision")
    compare(
        lambda q, k: ops.rope(q, k, cos, sin, casting="cohere"),
        lambda q, k: function(q, k, cos, sin),
        [x[0].transpose(0, 1).detach().requires_grad_() for x in queries_and_keys(dtype)],
    )


# --- shapes and layouts ---


def bound():
    """The kernels where this session tests them, interpreted or on a device of their own."""
    return liger_multi.use(**({"rope": "triton"} if harness.interpreted() else {}))


def test_angles_without_a_batch_serve_every_sequence(device):
    cos, sin = (x.to(device) for x in angles(WIDTH, torch.float32))
    q, k = (x.to(device) for x in queries_and_keys(torch.float32))
    with bound():
        right = ops.rope(q, k, cos.expand(BATCH, -1, -1), sin.expand(BATCH, -1, -1))
        for pair in ((cos, sin), (cos[0], sin[0]), (cos[0], sin[0].mT.contiguous().mT)):
            assert_equal(ops.rope(q, k, *pair), right)


@pytest.mark.parametrize("axes", list(itertools.permutations(range(3))))
@pytest.mark.parametrize("style", ["half", "interleaved"])
def test_outputs_and_gradients_keep_the_layout_of_their_inputs(device, axes, style):
    """Whatever the layout of the upstream gradient; q in another one than k."""
    back = [axes.index(i) for i in range(3)]
    q, k = (x.detach().to(device) for x in queries_and_keys(torch.float32, layout="contiguous"))
    q = q.permute(*axes, 3).contiguous().permute(*back, 3).requires_grad_()
    k = k.requires_grad_()
    cos, sin = (x.to(device) for x in angles(WIDTH, torch.float32))
    with bound():
        outs = ops.rope(q, k, cos, sin, style=style)
    ups = [torch.randn_like(x).mT.contiguous().mT for x in outs]
    grads = torch.autograd.grad(outs, (q, k), ups)
    for x, out, grad in zip((q, k), outs, grads, strict=True):
        assert out.stride() == grad.stride() == torch.empty_like(x).stride()


@pytest.mark.parametrize("axes", [1, 2, 0])
def test_blocks_of_tokens_are_the_whole(monkeypatch, axes):
    """The reference takes some tokens at a time; one after the other gives the same."""
    from liger_multi.reference.rope import rope as reference

    cos, sin = angles(WIDTH - 4, torch.float32, 1 if axes == 0 else BATCH)
    inputs = queries_and_keys(torch.float32, axes or 2)
    if axes == 0:
        inputs, cos, sin = [x[0].detach().requires_grad_() for x in inputs], cos[0], sin[0]
    results = []
    for count in (TOKENS, 4, 1):
        monkeypatch.setattr(
            reference,
            "row_blocks",
            lambda rows, _, count=count: [
                slice(i, min(i + count, rows)) for i in range(0, rows, count)
            ],
        )
        outs = ops.rope(*inputs, cos, sin, unsqueeze_dim=axes or 1)
        grads = torch.autograd.grad(outs, inputs, [x.detach() + 1 for x in outs])
        results.append((*outs, *grads))
    for other in results[1:]:
        assert_equal(other, results[0])


@pytest.mark.parametrize("casting", ["llama", "cohere"])
@pytest.mark.parametrize("wide", ["q", "k", "cos", "sin"])
def test_one_fp64_tensor_makes_the_call_fp64(device, wide, casting):
    cos, sin = angles(WIDTH, torch.float32)
    q, k = (x.detach() for x in queries_and_keys(torch.float32))
    inputs = {"q": q, "k": k, "cos": cos, "sin": sin}
    inputs = {n: (x.double() if n == wide else x).to(device) for n, x in inputs.items()}
    leaves = [inputs[n].requires_grad_() for n in "qk"]
    exact = {n: x.detach().double().requires_grad_(n in "qk") for n, x in inputs.items()}
    outs, right = ops.rope(**inputs, casting=casting), ops.rope(**exact)
    grads = torch.autograd.grad(outs, leaves, [torch.ones_like(x) for x in outs])
    exact_grads = torch.autograd.grad(
        right, [exact["q"], exact["k"]], [torch.ones_like(x) for x in right]
    )
    promoted = wide in ("cos", "sin") and casting == "llama"
    for name, got, want in zip("qk", outs, right, strict=True):
        assert got.dtype == (torch.float64 if promoted or wide == name else torch.float32)
        assert torch.equal(got, want.to(got.dtype))
    assert_equal(grads, (g.to(leaf.dtype) for leaf, g in zip(leaves, exact_grads, strict=True)))


# --- compilers ---


def launches(batch, tokens, heads=(32, 8), width=128):
    """What a call's launch would be compiled for: types, constants, alignment, options."""
    from ci.static import TARGETS, recorded
    from liger_multi.backends.triton.rope import rope

    cases = []
    q, k = (torch.empty(batch, tokens, h, width, device="meta").transpose(1, 2) for h in heads)
    cos = torch.empty(1, tokens, width, device="meta")
    with launch.simulate(TARGETS["sm90"].info), recorded("rope", cases):
        options = {"style": "half", "head_axis": 1, "rotary_dim": width, "casting": "llama"}
        rope.forward(q, k, cos, cos, **options, q_order="0213", k_order="0213")
    (case,) = cases
    free = {p.name for p in case.kernel.params if p.do_not_specialize}
    types = {n: t for n, t in case.signature.items() if n not in free}
    constants = {n: v for n, v in case.constants.items() if n not in free}
    return types, constants, [n for n in case.aligned if n not in free], case.options


def test_no_batch_and_no_length_compiles_a_kernel_again():
    if harness.interpreted():
        pytest.skip("interpreted kernels are not compiled")
    pytest.importorskip("triton")
    first = launches(4, 2048)
    for batch, tokens in ((1, 1), (1, 17), (3, 1001), (64, 16), (2, 65536)):
        assert launches(batch, tokens) == first
    assert launches(4, 2048, width=64) != first


# --- bad input ---

q, k = torch.randn(2, 4, 6, 16), torch.randn(2, 2, 6, 16)
cos, sin = torch.randn(1, 6, 16), torch.randn(1, 6, 16)
three = (torch.randn(6, 4, 16), torch.randn(6, 2, 16))
BAD = {
    "q of integers": ((q.long(), k, cos, sin), {}, "q must be a floating-point tensor"),
    "no k": ((q, None, cos, sin), {}, "k must be a floating-point tensor, got None"),
    "no sin": ((q, k, cos, None), {}, "sin must be a floating-point tensor"),
    "axis no integer": ((q, k, cos, sin), {"unsqueeze_dim": 1.0}, "an integer, got float 1.0"),
    "two devices": ((q, k, cos.to("meta"), sin), {}, "one device, got cos on meta"),
    "two axes": ((q[0, 0], k[0, 0], cos, sin), {}, r"q must have shape \(B, H, S, D\), .* got"),
    "other axes": ((q, k[0], cos, sin), {}, r"got \(2, 4, 6, 16\) and \(2, 6, 16\)"),
    "other tokens": ((q, k[:, :, :5], cos, sin), {}, r"except for the heads \(axis 1\)"),
    "other width": ((q, k[..., :8], cos, sin), {}, r"got \(2, 4, 6, 16\) and \(2, 2, 6, 8\)"),
    "heads elsewhere": ((q, k, cos, sin), {"unsqueeze_dim": 2}, r"the heads \(axis 2\)"),
    "axis of channels": ((q, k, cos, sin), {"unsqueeze_dim": 3}, "must be 1 or 2 .* got 3"),
    "axis of a batch": ((q, k, cos, sin), {"unsqueeze_dim": 0}, "must be 1 or 2 .* got 0"),
    "axis 2 of 3": (
        (*three, cos[0], sin[0]),
        {"unsqueeze_dim": 2},
        "must be 1 for q with 3 axes, got 2",
    ),
    "cos unlike sin": ((q, k, cos, sin[..., :8]), {}, "cos and sin must have the same shape"),
    "angles of fewer tokens": (
        (q, k, cos[:, :5], sin[:, :5]),
        {},
        r"\(6, R\), \(1, 6, R\) or \(2, 6, R\) for q of shape \(2, 4, 6, 16\)",
    ),
    "angles of another batch": (
        (q, k, cos.expand(3, -1, -1), sin.expand(3, -1, -1)),
        {},
        r"got a tensor of shape \(3, 6, 16\)",
    ),
    "angles of a batch": (
        (*three, cos, sin),
        {},
        r"shape \(6, R\) for q of shape \(6, 4, 16\)",
    ),
    "angles of four axes": ((q, k, cos[None], sin[None]), {}, r"got .*\(1, 1, 6, 16\)"),
    "rotary too wide": ((q, k, torch.ones(6, 20), torch.ones(6, 20)), {}, "at most 16.* got 20"),
    "rotary odd": ((q, k, cos[..., :7], sin[..., :7]), {}, "must be even .* got 7"),
    "rotary none": ((q, k, cos[..., :0], sin[..., :0]), {}, "must be even .* got 0"),
    "rotary unlike cos": ((q, k, cos, sin), {"rotary_dim": 8}, "or twice that .* got 8 for a"),
    "style": ((q, k, cos, sin), {"style": "haf"}, "did you mean 'half'"),
    "casting": ((q, k, cos, sin), {"casting": "gemma"}, "unknown casting 'gemma'"),
    "learned cos": ((q, k, cos.clone().requires_grad_(), sin), {}, "pass cos.detach"),
    "learned sin": ((q, k, cos, sin.clone().requires_grad_()), {}, "sin has no gradient"),
}
TYPES = ("q of integers", "no k", "no sin", "axis no integer")


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(name):
    args, options, message = BAD[name]
    with pytest.raises(TypeError if name in TYPES else ValueError, match=message):
        ops.rope(*args, **options)


def test_learned_angles_are_fine_where_nothing_has_a_gradient():
    with torch.no_grad():
        got = ops.rope(q, k, cos.clone().requires_grad_(), sin)
    assert torch.equal(got[0], ops.rope(q, k, cos, sin)[0])


# --- kinds of positions and layouts ---

PAIRS = WIDTH // 2
SECTIONS = (2, 3, 3)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
OPERATORS = ("rope_multimodal", "rope_complex", "rope_sorted", "rope_positions", "rope")


@pytest.fixture(params=["reference", "triton"])
def place(request):
    """The device of a backend, which the operators are bound to."""
    device = harness.place_of(request.param)
    with liger_multi.use(**dict.fromkeys(OPERATORS, request.param)):
        yield device


def queries(dtype, inside=False):
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
    module_class = getattr(module, name, None)
    if module_class is None or not hasattr(module_class, "recomposition_frequencies"):
        pytest.skip("this transformers merges sections elsewhere")
    layer = module_class.__new__(module_class)
    torch.nn.Module.__init__(layer)
    layer.inv_freq, layer.attention_scaling, layer.rope_type = inv_freq(), 1.0, "default"
    layer.config = types.SimpleNamespace(rope_parameters={"rope_type": "default"})
    for key, value in parameters.items():
        setattr(layer, key, value)
    return layer


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
        queries(dtype),
    )
    compare(
        lambda q, k: ops.rope_positions(q, k, ids, inv_freq(), sections=SECTIONS, **options),
        lambda q, k: function(q, k, cos, sin),
        queries(dtype),
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

    compare(lambda q, k: ops.rope_multimodal(q, k, cos, sin, SECTIONS), right, queries(dtype))


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
        queries(dtype, inside=True),
    )


@DTYPES
def test_complex_is_deepseek_v2_and_llama4_vision(dtype):
    angle = torch.rand(1, TOKENS, PAIRS) * 6
    freqs = torch.polar(torch.ones_like(angle), angle)
    function = stock("deepseek_v2", "apply_rotary_emb")
    compare(
        lambda q, k: ops.rope_complex(q, k, freqs, unsqueeze_dim=1),
        lambda q, k: function(q, k, freqs),
        queries(dtype),
    )
    vision = stock("llama4", "vision_apply_rotary_emb")
    compare(
        lambda q, k: ops.rope_complex(q, k, freqs[0]),
        lambda q, k: vision(q, k, freqs),
        [x.detach()[:, :, :2].requires_grad_() for x in queries(dtype, inside=True)],
    )


@DTYPES
def test_sorted_is_what_deepseek_v3_computes(dtype):
    few = [torch.randn(BATCH, TOKENS, PAIRS).to(dtype) for _ in range(2)]
    cos, sin = (torch.cat((t, t), -1) for t in few)
    function = stock("deepseek_v3", "apply_rotary_pos_emb_interleave")
    compare(
        lambda q, k: ops.rope_sorted(q, k, *few, rotary_dim=WIDTH),
        lambda q, k: function(q, k, cos, sin),
        queries(dtype),
    )
    compare(
        lambda q, k: ops.rope_sorted(q, k, cos, sin),
        lambda q, k: function(q, k, cos, sin),
        queries(dtype),
    )


@DTYPES
@pytest.mark.parametrize("backwards", [False, True])
def test_positions_are_what_the_module_of_llama_makes_of_them(dtype, backwards):
    """And of nanochat, which turns the other way."""
    module = pytest.importorskip("transformers.models.llama.modeling_llama")
    layer = module.LlamaRotaryEmbedding.__new__(module.LlamaRotaryEmbedding)
    torch.nn.Module.__init__(layer)
    layer.inv_freq, layer.attention_scaling, layer.rope_type = inv_freq(), 1.25, "default"
    ids = torch.randint(5000, (BATCH, TOKENS))
    cos, sin = layer(torch.empty(0, dtype=dtype), ids)
    function = stock("nanochat" if backwards else "llama")
    sign = -1 if backwards else 1
    compare(
        lambda q, k: ops.rope_positions(q, k, ids, sign * inv_freq(), scaling=1.25),
        lambda q, k: function(q, k, cos, sin),
        queries(dtype),
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
        [x[0].transpose(0, 1).detach().requires_grad_() for x in queries(dtype)],
    )


@DTYPES
def test_two_axes_of_sam_are_interleaved_pairs_in_fp32(dtype):
    """2-D vision: `rope` has it."""
    function = stock("sam2_video", "apply_rotary_pos_emb_2d")
    cos, sin = (torch.randn(TOKENS, PAIRS).repeat_interleave(2, -1) for _ in range(2))
    compare(
        lambda q, k: ops.rope(q, k, cos, sin, style="interleaved", casting="cohere"),
        lambda q, k: function(q, k, cos, sin),
        queries(dtype),
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


@pytest.mark.parametrize("layout", ["int32", "strided"])
def test_positions_of_any_integers(place, layout):
    q = torch.randn(2, 2, 5, 8).to(place)
    ids, freq = torch.randint(9, (2, 5)), torch.rand(4).to(place)
    right = ops.rope_positions(q, q, ids.to(place), freq)
    positions = ids.int() if layout == "int32" else ids.repeat_interleave(3, 1)[:, ::3]
    assert_equal(ops.rope_positions(q, q, positions.to(place), freq), right)


# --- bad input ---

few_q, few_k, c = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 3, 8), torch.randn(3, 2, 3, 8)
ids, freq, heads = torch.zeros(2, 3, dtype=torch.long), torch.ones(4), {"unsqueeze_dim": 1}
BAD_KINDS = [
    (
        lambda: ops.rope_multimodal(few_q, few_k, c, c, (1, 1, 1)),
        ValueError,
        r"add up to 4, got \(1, 1, 1",
    ),
    (
        lambda: ops.rope_multimodal(few_q, few_k, c, c, "121"),
        TypeError,
        "a sequence of integers, got str",
    ),
    (lambda: ops.rope_multimodal(few_q, few_k, c[:2], c[:2], (1, 2, 1)), ValueError, "3 grids"),
    (lambda: ops.rope_multimodal(few_q, few_k, c, c[:2], (1, 2, 1)), ValueError, "same shape"),
    (lambda: ops.rope_multimodal(few_q, few_k, None, c, (1, 2, 1)), TypeError, "cos must be"),
    (
        lambda: ops.rope_multimodal(few_q, few_k, c, c, (1, 2, 1), arrangement="mixed"),
        ValueError,
        "unknown arrangement 'mixed'",
    ),
    (
        lambda: ops.rope_complex(few_q, few_k, c, **heads),
        ValueError,
        "complex, or have the two parts",
    ),
    (
        lambda: ops.rope_complex(few_q, None, c),
        TypeError,
        "k must be a floating-point tensor, got None",
    ),
    (
        lambda: ops.rope_complex(few_q, few_k, torch.ones(2, 3, 9, 2), **heads),
        ValueError,
        "at most 8",
    ),
    (
        lambda: ops.rope_complex(few_q, few_k, torch.ones(2, 5, 4, 2), **heads),
        ValueError,
        r"\(3, R\)",
    ),
    (
        lambda: ops.rope_sorted(few_q, few_k, c[0], c[0], rotary_dim=6),
        ValueError,
        "rotary_dim must be",
    ),
    (lambda: ops.rope_sorted(few_q, few_k[:, :, :2], c[0], c[0]), ValueError, "same shape except"),
    (
        lambda: ops.rope_sorted(few_q, few_k, c[0].clone().requires_grad_(), c[0]),
        ValueError,
        "cos has no gradient",
    ),
    (
        lambda: ops.rope_positions(few_q, few_k, ids.float(), freq),
        TypeError,
        "int64 or int32 tensor",
    ),
    (
        lambda: ops.rope_positions(few_q, few_k, ids[:, :2], freq),
        ValueError,
        r"must have shape \(3,\), \(1, 3\) or \(2, 3\), got .*\(2, 2\)",
    ),
    (lambda: ops.rope_positions(few_q, few_k, ids, torch.ones(5)), ValueError, "at most 4 numbers"),
    (
        lambda: ops.rope_positions(few_q, few_k, ids, freq, sections=(1, 2, 1)),
        ValueError,
        r"\(3, 3,\), \(3, 1, 3\) or \(3, 2, 3\)",
    ),
    (
        lambda: ops.rope_positions(few_q, few_k, ids, freq, scaling="2"),
        TypeError,
        "scaling must be a num",
    ),
]


test_bad_input_of_kinds_is_named = harness.refuses(BAD_KINDS)
