"""Weights in 4 bits: codes as the libraries that write them read them, and operators that use them.

A frozen weight has the bits of its numbers, which are not kept.
"""

import copy
import importlib
import pickle

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import liger_multi
from liger_multi import ops
from liger_multi.dispatch.registry import REFERENCE
from liger_multi.dispatch.stored import assumed_memory
from liger_multi.memory.measure import measure
from liger_multi.ops import LoRA, QuantizedWeight, _quantized
from liger_multi.testing.bitwise import same_bits
from tests import harness

BACKENDS = [b for b in (REFERENCE, "triton") if harness.device_of(b) is not None]
HIDDEN, INNER, EXPERTS, ROWS = 64, 128, 3, 9


def quantized(format, *shape):
    codes = torch.randint(256, (*shape[:-1], shape[-1] // 2), dtype=torch.uint8)
    group = {"nf4": 64, "mxfp4": 32, "nvfp4": 16, "int4": 32}[format]
    blocks = (*shape[:-1], shape[-1] // group)
    scales = {
        "nf4": lambda: torch.rand(blocks).flatten() * 0.2,
        "mxfp4": lambda: torch.randint(120, 124, blocks, dtype=torch.uint8),
        "nvfp4": lambda: (torch.rand(blocks) * 0.2).to(torch.float8_e4m3fn),
        "int4": lambda: torch.rand(blocks) * 0.05,
    }[format]()
    return QuantizedWeight(codes, scales, format=format, dtype=torch.float32)


def lora(out, into, rank=4):
    a, b = torch.randn(rank, into) * into**-0.5, torch.randn(out, rank) * 0.5
    return LoRA(a.requires_grad_(), b.requires_grad_(), 0.5)


def _linear(weights, x):
    return ops.linear(x, weights[0], torch.ones(weights[0].shape[0]))


def _lora_qkv(weights, x):
    layers = zip("qkv", weights, ADAPTERS["qkv"], strict=True)
    named = {}
    for name, weight, adapter in layers:
        named |= {f"{name}_weight": weight, f"{name}_lora": adapter}
    return torch.cat(ops.lora_qkv(x, **named), -1)


def _routed(x):
    generator = torch.Generator().manual_seed(3)
    index = torch.randint(EXPERTS, (x.shape[0], 2), generator=generator).to(x.device)
    return index, torch.rand(index.shape, generator=generator).to(x)


def _lora_moe(weights, x, **options):
    return ops.lora_moe(x, *weights, *_routed(x), *ADAPTERS["moe"], **options)


def _head(weights, x):
    target = torch.arange(x.shape[0], device=x.device)
    return ops.fused_linear_cross_entropy(x, weights[0], target, reduction="none")


def _log_prob(weights, x):
    target = torch.arange(x.shape[0], device=x.device)
    return ops.fused_linear_log_prob(x, weights[0], target).log_prob


def _mean_head(weights, x):
    """Gradients are computed in forward, of chunks of rows."""
    target = torch.arange(x.shape[0], device=x.device)
    bias = torch.ones(weights[0].shape[0])
    return ops.fused_linear_cross_entropy(x, weights[0], target, bias, chunk=4)


def _kl_div(weights, x):
    teacher = torch.ones_like(x) - 0.5 * x.detach()
    return ops.fused_linear_kl_div(x, weights[0], teacher, weights[1], reduction="none")


def _embedding(weights, x):
    return ops.embedding(torch.tensor([3, 1, 3], device=x.device), weights[0]) * x[:3]


MLP = ((INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER))
MOE = ((EXPERTS, 2 * INNER, HIDDEN), (EXPERTS, HIDDEN, INNER))
CALLS = {
    "linear": (_linear, ((INNER, HIDDEN),)),
    "gated_mlp": (lambda weights, x: ops.gated_mlp(x, *weights), MLP),
    "lora_mlp": (lambda weights, x: ops.lora_mlp(x, *weights, *ADAPTERS["mlp"]), MLP),
    "lora_qkv": (_lora_qkv, ((INNER, HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, HIDDEN))),
    "fused_moe": (
        lambda weights, x: ops.fused_moe(x, *weights, *_routed(x), activation="silu"),
        MOE,
    ),
    "lora_moe": (lambda weights, x: _lora_moe(weights, x, activation="silu"), MOE),
    "lora_moe transposed": (
        lambda weights, x: _lora_moe([w.mT for w in weights], x, transposed=True),
        MOE,
    ),
    "fused_linear_cross_entropy": (_head, ((INNER, HIDDEN),)),
    "fused_linear_cross_entropy mean": (_mean_head, ((INNER, HIDDEN),)),
    "fused_linear_log_prob": (_log_prob, ((INNER, HIDDEN),)),
    "fused_linear_kl_div": (_kl_div, ((INNER, HIDDEN), (INNER, HIDDEN))),
    "embedding": (_embedding, ((INNER, HIDDEN),)),
}


def _stacked(out, into):
    a = (torch.randn(EXPERTS, 4, into) * into**-0.5).requires_grad_()
    return LoRA(a, torch.randn(EXPERTS, out, 4).requires_grad_(), 0.5)


torch.manual_seed(1)
ADAPTERS = {
    "mlp": [lora(*shape) for shape in MLP],
    "qkv": [lora(*shape) for shape in ((INNER, HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, HIDDEN))],
    "moe": [_stacked(2 * INNER, HIDDEN), _stacked(HIDDEN, INNER)],
}
LEAVES = [t for every in ADAPTERS.values() for one in every for t in one[:2]]


def step(call, weights, backend, wrapped=lambda run, x: run(x)):
    """The output and the gradients of x and of all adapters."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(ROWS, HIDDEN, generator=generator).requires_grad_()
    for leaf in LEAVES:
        leaf.grad = None
    with liger_multi.use(**{"*": list(dict.fromkeys([backend, REFERENCE]))}):
        y = wrapped(lambda rows: call(weights, rows), x)
        y.backward(torch.randn(y.shape, generator=generator).to(y))
    return [y.detach(), x.grad, *[leaf.grad for leaf in LEAVES]]


def checkpointed(run, x):
    return checkpoint(run, x, use_reentrant=False)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("wrapped", [lambda run, x: run(x), checkpointed], ids=["", "checkpoint"])
def test_the_bits_of_the_dequantized_weight(backend, name, wrapped):
    if harness.device_of(backend).type != "cpu":
        pytest.skip("tensors of this test are on the CPU")
    call, shapes = CALLS[name]
    weights = [quantized("mxfp4", *shape) for shape in shapes]
    numbers = [w.dequantized() for w in weights]
    assert same_bits(step(call, weights, backend, wrapped), step(call, numbers, backend, wrapped))


@pytest.mark.parametrize("name", CALLS)
def test_nothing_of_16_bits_is_kept(name):
    """Autograd keeps codes: of no saved tensor the storage is as large as a weight."""
    call, shapes = CALLS[name]
    weights = [quantized("nf4", *shape) for shape in shapes]
    owned = {t.data_ptr() for w in weights for t in (w.codes, w.scales)}
    kept = []

    def pack(tensor):
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        x = torch.randn(2, HIDDEN, requires_grad=True)
        call(weights, x) if name != "embedding" else call(
            weights, torch.randn(3, 64).requires_grad_()
        )
    smallest = min(w.numel() for w in weights)
    for tensor in kept:
        if isinstance(tensor, QuantizedWeight):
            assert {tensor.codes.data_ptr(), tensor.scales.data_ptr()} <= owned
        elif all(tensor is not leaf for leaf in LEAVES):
            assert tensor.numel() < smallest


@pytest.mark.parametrize("format", ["nf4", "mxfp4", "nvfp4", "int4"])
def test_views_of_a_stack(format):
    weight = quantized(format, EXPERTS, INNER, HIDDEN)
    numbers = weight.dequantized()
    assert weight.shape == numbers.shape == (EXPERTS, INNER, HIDDEN)
    assert same_bits(weight[1].dequantized(), numbers[1])
    assert same_bits(weight[1:].dequantized(), numbers[1:])
    assert same_bits(weight.mT[2].dequantized().contiguous(), numbers[2].mT.contiguous())
    assert same_bits(copy.deepcopy(weight).dequantized(), numbers)
    assert weight.to(torch.bfloat16).dequantized().dtype == torch.bfloat16
    assert same_bits(weight * 2, numbers * 2)
    assert same_bits(weight[..., :5], numbers[..., :5])
    assert "4" in repr(weight)
    assert weight.stored_bytes < numbers.numel() * 0.7
    assert torch.nn.Parameter(weight, requires_grad=False).stored_bytes == weight.stored_bytes


def nested():
    """Scales of nf4 that are quantized themselves."""
    weight = quantized("nf4", 3, 96, 256)
    own = {"scale_levels": torch.rand(256), "scale_absmax": torch.rand(5)}
    codes = torch.randint(256, weight.scales.shape, dtype=torch.uint8)
    return QuantizedWeight(weight.codes, codes, format="nf4", scale_offset=torch.tensor(0.1), **own)


def test_quantized_scales_take_no_others():
    """Copying a weight with plain scales into one with quantized ones raises, and changes none."""
    weight = nested()
    before, plain = weight.dequantized(), weight._with_own_scales()
    with pytest.raises(TypeError, match="writes to a frozen weight"):
        weight.copy_(plain.changed(codes=plain.codes ^ 1))
    assert same_bits(weight.dequantized(), before)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("make", ["nf4", "mxfp4", "nvfp4", "int4", nested])
def test_pieces_are_the_weight(make, turned, monkeypatch):
    weight = make() if callable(make) else quantized(make, 3, 96, 256)
    weight = weight.mT if turned else weight
    assert len(weight.pieces()) == 1
    monkeypatch.setattr(_quantized, "PIECE_BYTES", weight.numel() * weight.itemsize // 3)
    parts = weight.pieces()
    assert len(parts) > 2
    assert torch.equal(torch.cat([p.dequantized() for p in parts], -2), weight.dequantized())


def test_pieces_by_the_configuration():
    weight = quantized("nvfp4", 96, 256)
    liger_multi.configure({"chunk_bytes": weight.numel() * weight.itemsize // 3})
    parts = weight.pieces()
    assert [p.shape[0] for p in parts] == [32, 32, 32]
    assert torch.equal(torch.cat([p.dequantized() for p in parts]), weight.dequantized())


@pytest.mark.parametrize("zeros", [None, torch.uint8, torch.int8, torch.float32])
@pytest.mark.parametrize("group", [2, 6, 32, 64, 128, 252])
def test_groups_of_int4(group, zeros):
    """Down to two codes, up to a whole row; rows of a table, and the layer."""
    columns = 252 if 252 % group == 0 else 256
    codes, scales = random_codes(12, columns // 2), torch.rand(12, columns // group)
    own = None if zeros is None else torch.randint(16, scales.shape).to(zeros)
    weight = QuantizedWeight(codes, scales, format="int4", dtype=torch.float32, zeros=own)
    middle = 8 if own is None else own.float().repeat_interleave(group, 1)
    integers = torch.stack([codes & 15, codes >> 4], -1).flatten(1)
    numbers = (integers.float() - middle) * scales.repeat_interleave(group, 1)
    assert same_bits(weight.dequantized(), numbers)
    index = torch.tensor([3, 0, 3])
    assert same_bits(weight.numbers_at(index), numbers[index])
    x = torch.randn(3, columns, requires_grad=True)
    y = ops.linear(x, weight)
    torch.testing.assert_close(y, x @ numbers.T)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], numbers.sum(0).expand(3, -1))


BY_PIECES = [name for name in CALLS if name != "embedding"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", BY_PIECES)
def test_by_pieces(backend, name, monkeypatch):
    if harness.device_of(backend).type != "cpu":
        pytest.skip("tensors of this test are on the CPU")
    call, shapes = CALLS[name]
    weights = [quantized("mxfp4", *shape) for shape in shapes]
    expected = step(call, weights, backend)
    size = weights[0].numel() * weights[0].itemsize
    monkeypatch.setattr(_quantized, "PIECE_BYTES", size // 4)
    assert len(weights[0].pieces()) > 2
    for actual, one in zip(step(call, weights, backend), expected, strict=True):
        torch.testing.assert_close(actual, one, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("gemms", ["float8", "float8_logits"])
def test_pieces_of_a_head_in_float8(gemms, monkeypatch):
    """The scale of the whole weight, and no more than a piece of its numbers at a time."""
    liger_multi.configure({"head_gemms": gemms})
    weight = quantized("mxfp4", 96, 64)
    numbers, sizes, stock = weight.dequantized(), [], QuantizedWeight.dequantized

    def run(head):
        x = torch.randn(ROWS, 64, generator=torch.Generator().manual_seed(2)).requires_grad_()
        loss = ops.fused_linear_cross_entropy(x, head, torch.arange(ROWS))
        return loss, *torch.autograd.grad(loss, x)

    def noted(part):
        sizes.append(part.numel())
        return stock(part)

    expected = run(numbers)
    monkeypatch.setattr(_quantized, "PIECE_BYTES", weight.numel() * 2 // 4)  # logits are in bf16
    monkeypatch.setattr(QuantizedWeight, "dequantized", noted)
    (loss, dx), (expected_loss, expected_dx) = run(weight), expected
    assert same_bits(loss, expected_loss)
    # only FP8 gradients are one GEMM; others are sums over pieces, each rounded to bf16
    assert (gemms == "float8_logits") or same_bits(dx, expected_dx)
    torch.testing.assert_close(dx, expected_dx, rtol=0.02, atol=1e-3)
    assert 0 < max(sizes) <= weight.numel() // 4


LARGE = {(INNER, HIDDEN): (4096, 512), (HIDDEN, INNER): (512, 4096), (HIDDEN, HIDDEN): (512, 512)}


@pytest.mark.parametrize("wrapped", [lambda run, x: run(x), checkpointed], ids=["", "checkpoint"])
@pytest.mark.parametrize("name", [n for n in BY_PIECES if not n.startswith(("lora", "fused_moe"))])
def test_pieces_bound_the_peak_of_a_step(name, wrapped, monkeypatch):
    """All tensors of forward and backward take less than half of one weight in 16 bits or more."""
    call, shapes = CALLS[name]
    weights = [quantized("mxfp4", *LARGE[shape]) for shape in shapes]
    size = weights[0].numel() * weights[0].itemsize
    known = [t for w in weights for t in w.tensors]

    def peak():
        x = torch.randn(ROWS, 512, requires_grad=True)
        with measure("cpu", known=known) as peak:
            y = wrapped(lambda rows: call(weights, rows), x)
            y.sum().backward()
        return peak.added_bytes

    assert peak() > size
    monkeypatch.setattr(_quantized, "PIECE_BYTES", size // 64)
    assert peak() < size // 2


@pytest.mark.parametrize("name", ["linear", "lora_mlp", "lora_qkv"])
def test_float8(name):
    """The rounding of FP8 rows, 2^-4 of a number, in results and gradients; not that of bf16."""
    call, shapes = CALLS[name]
    weights = [quantized("mxfp4", *shape) for shape in shapes]
    expected = step(call, weights, REFERENCE)
    run = call if name != "linear" else lambda w, x: ops.linear_float8(x, w[0], torch.ones(INNER))
    actual = step(run, [w.changed(float8=True) for w in weights], REFERENCE)
    for one, right in zip(actual[:2], expected[:2], strict=True):
        error = float((one - right).norm() / right.norm())
        assert 2**-9 < error < 2**-4, error
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        run([w.changed(float8=True) for w in weights], torch.randn(2, HIDDEN, requires_grad=True))
    sizes = {w.numel() for w in weights}
    assert all(t.numel() not in sizes for t in kept if type(t) is not QuantizedWeight)


@pytest.mark.parametrize("format", ["nf4", "mxfp4", "nvfp4", "int4"])
def test_rows_of_a_table(format):
    """Only rows that are read become numbers, with the bits of the whole table."""
    weight, index = quantized(format, INNER, HIDDEN), torch.tensor([[3, 1], [INNER - 1, 3]])
    expected = ops.embedding(index, weight.dequantized(), 3, scale=0.5)
    assert same_bits(ops.embedding(index, weight, 3, scale=0.5), expected)
    assert ops.embedding(index[:0], weight).shape == (0, 2, HIDDEN)
    with pytest.raises(IndexError):
        ops.embedding(index + 1, weight)


def _assign(weight):
    weight[0] = 1


@pytest.mark.parametrize(
    "write",
    [
        lambda weight: weight.mul_(2),
        lambda weight: weight.T.zero_(),
        lambda weight: torch.add(torch.ones(weight.shape), 1, out=weight),
        lambda weight: torch._foreach_mul_([torch.ones(3), weight], 2.0),
        _assign,
    ],
)
def test_it_is_frozen(write):
    weight = quantized("mxfp4", INNER, HIDDEN)
    before = weight.dequantized()
    with torch.no_grad(), pytest.raises(TypeError, match="writes to a frozen weight in 4 bits"):
        write(weight)
    assert same_bits(weight.dequantized(), before)


def test_unknown_tensors_are_refused():
    weight = quantized("nf4", INNER, HIDDEN)
    with pytest.raises(TypeError, match="unknown tensors"):
        QuantizedWeight(weight.codes, weight.scales, format="nf4", zero=weight.scales)


def test_other_linear_layers_keep_codes():
    """A GEMM of PyTorch dequantizes in forward and again in backward."""
    weight, x = quantized("mxfp4", INNER, HIDDEN), torch.randn(3, HIDDEN, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = torch.nn.functional.linear(x, weight)
    assert [type(t) for t in kept if t.numel() == weight.numel()] == [QuantizedWeight]
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert same_bits(grad, weight.dequantized().sum(0).expand(3, -1)) or torch.allclose(
        grad, weight.dequantized().sum(0).expand(3, -1), atol=1e-5
    )


@pytest.mark.parametrize("tensor", ["codes", "scales"])
def test_writes_between_forward_and_backward_raise(tensor):
    weight = quantized("mxfp4", INNER, HIDDEN)
    x = torch.randn(ROWS, HIDDEN, requires_grad=True)
    y = ops.linear(x, weight)
    y.sum().backward(retain_graph=True)
    getattr(weight, tensor).zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    ops.linear(x, weight).sum().backward()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda t: pickle.loads(pickle.dumps(t))])
def test_copies_of_what_autograd_keeps(copied):
    """Hooks may keep copies, whose tensors count their own writes."""
    weight = quantized("mxfp4", INNER, HIDDEN)
    weight.codes.add_(1)
    x = torch.randn(ROWS, HIDDEN, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(copied, lambda t: t):
        y = ops.linear(x, weight)
    expected = weight.dequantized().sum(0).expand(ROWS, -1)
    weight.codes.zero_()
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], expected)


def test_pieces_of_small_devices():
    """A 64th of the device's memory, where nobody asks for another size."""
    weight = QuantizedWeight(
        torch.empty(8, 512, 256, dtype=torch.uint8, device="meta"),
        torch.empty(8, 512, 16, dtype=torch.uint8, device="meta"),
        format="mxfp4",
    )
    assert len(weight.pieces()) == 1
    token = assumed_memory.set(16 * weight.numel() * weight.itemsize)
    try:
        assert [p.shape for p in weight.pieces()] == [(8, 128, 512)] * 4
    finally:
        assumed_memory.reset(token)


# --- codes, bit by bit ---

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def dequantized(backend, *args, **options):
    device = harness.device_of(backend)
    moved = [a.to(device) for a in args]
    named = {n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in options.items()}
    with liger_multi.use(dequantize=backend):
        return ops.dequantize(*moved, **named).cpu()


@pytest.mark.parametrize("backend", [b for b in BACKENDS if b != REFERENCE])
@pytest.mark.parametrize("format", ["mxfp4", "nvfp4"])
def test_every_code_and_scale(backend, format):
    """Zeros of either sign, subnormal numbers and NaN among them."""
    codes = torch.arange(16, dtype=torch.uint8)[:, None].repeat(256, 16)
    codes |= codes << 4
    blocks = {"mxfp4": 1, "nvfp4": 2}[format]
    scales = torch.arange(256, dtype=torch.uint8).repeat_interleave(16)[:, None].repeat(1, blocks)
    options = {"format": format, "dtype": torch.float32}
    expected, actual = (dequantized(b, codes, scales, **options) for b in (REFERENCE, backend))
    assert torch.equal(actual.isnan(), expected.isnan())
    assert same_bits(actual.nan_to_num(), expected.nan_to_num())


def random_codes(*shape):
    return torch.randint(256, shape, dtype=torch.uint8)


def from_bitsandbytes(dtype, quant_type="nf4", nested=False, blocksize=64, shape=(96, 320)):
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = torch.randn(shape).to(dtype)
    packed, state = functional.quantize_4bit(
        weight, blocksize=blocksize, compress_statistics=nested, quant_type=quant_type
    )
    options = {"format": quant_type, "group": blocksize}
    if nested:
        options |= {
            "scale_levels": state.state2.code,
            "scale_absmax": state.state2.absmax,
            "scale_offset": state.offset,
        }
    expected = functional.dequantize_4bit(packed, state)
    return (packed.view(shape[0], -1), state.absmax), options, expected


def from_transformers(dtype):
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    blocks = random_codes(3, 24, 4, 16)
    # from 2 on, for Triton's interpreter has no subnormal numbers in bf16
    scales = torch.randint(2, 254, (3, 24, 4), dtype=torch.uint8)
    expected = mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=dtype).mT.contiguous()
    return (blocks.flatten(-2), scales), {"format": "mxfp4"}, expected


def from_torchao_mx(dtype):
    pytest.importorskip("torchao")
    tensors = importlib.import_module("torchao.prototype.mx_formats.mx_tensor")
    scales = torch.randint(115, 138, (24, 4), dtype=torch.uint8)
    codes = random_codes(24, 64)
    plain = scales.view(torch.float8_e8m0fnu)
    expected = tensors.to_dtype(codes, plain, torch.float4_e2m1fn_x2, 32, dtype)
    return (codes, plain), {"format": "mxfp4"}, expected


def from_torchao_nvfp4(dtype):
    pytest.importorskip("torchao")
    tensors = importlib.import_module("torchao.prototype.mx_formats.nvfp4_tensor")
    weight = torch.randn(32, 64).bfloat16()
    coded = tensors.NVFP4Tensor.to_nvfp4(weight, per_tensor_scale=torch.tensor(0.0123))
    scales = coded.scale.view(32, 4)
    options = {"format": "nvfp4", "global_scale": coded.per_tensor_scale}
    return (coded.qdata.view(torch.uint8), scales), options, coded.dequantize(dtype)


def from_compressed_tensors(dtype, format="nvfp4"):
    pytest.importorskip("compressed_tensors")
    quantization = importlib.import_module("compressed_tensors.quantization")
    compressors = importlib.import_module("compressed_tensors.compressors")
    if format == "nvfp4":
        args = {"num_bits": 4, "type": "float", "group_size": 16, "strategy": "tensor_group"}
        name, group = "nvfp4-pack-quantized", 16
        scales = (torch.rand(32, 8) * 400 + 1).to(torch.float8_e4m3fn)
        state = {"weight_global_scale": torch.tensor([123.4])}
        options = {"format": format, "divides": True, "global_scale": state["weight_global_scale"]}
    elif format == "mxfp4":
        args = {"num_bits": 4, "type": "float", "group_size": 32, "strategy": "group"}
        name, group, options, state = "mxfp4-pack-quantized", 32, {"format": format}, {}
        scales = torch.randint(110, 140, (32, 4), dtype=torch.uint8)
    else:
        args = {"num_bits": 4, "type": "int", "group_size": 32, "strategy": "group"}
        name, group, options, state = "pack-quantized", 32, {"format": "int4"}, {}
        scales = torch.rand(32, 4).to(dtype)
        state["weight_shape"] = torch.tensor([32, 128])
    codes = random_codes(32, 64)
    packed = codes.view(torch.int32) if format == "int4" else codes
    scheme = quantization.QuantizationScheme(
        targets=["Linear"], weights=quantization.QuantizationArgs(symmetric=True, **args)
    )
    assert scheme.weights.group_size == group
    compressor = compressors.BaseCompressor.get_value_from_registry(name)
    state |= {"weight_packed": packed, "weight_scale": scales}
    return (codes, scales), options, compressor.decompress(state, scheme)["weight"]


OWNERS = {
    "bitsandbytes nf4": from_bitsandbytes,
    "bitsandbytes fp4": lambda dtype: from_bitsandbytes(dtype, "fp4"),
    "bitsandbytes nested": lambda dtype: from_bitsandbytes(dtype, nested=True, shape=(256, 512)),
    "bitsandbytes blocks across rows": lambda dtype: from_bitsandbytes(
        dtype, blocksize=128, shape=(7, 90)
    ),
    "transformers": from_transformers,
    "torchao mx": from_torchao_mx,
    "torchao nvfp4": from_torchao_nvfp4,
    "compressed-tensors nvfp4": from_compressed_tensors,
    "compressed-tensors mxfp4": lambda dtype: from_compressed_tensors(dtype, "mxfp4"),
    "compressed-tensors int4": lambda dtype: from_compressed_tensors(dtype, "int4"),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("owner", OWNERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
def test_the_bits_of_the_owner(backend, owner, dtype):
    tensors, options, expected = OWNERS[owner](dtype)
    if owner.startswith("compressed"):
        dtype = expected.dtype  # that of its scales, or bf16
    assert same_bits(dequantized(backend, *tensors, dtype=dtype, **options), expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_scale_and_code(backend):
    """All 256 scales of both formats; 255 is NaN in E8M0, as OCP has it."""
    scales = torch.arange(256, dtype=torch.uint8).view(16, 16)
    codes = torch.arange(256, dtype=torch.uint8)
    first = codes.repeat(16).view(16, 256)
    y = dequantized(backend, first, scales, format="mxfp4", dtype=torch.float32).view(256, 32)
    assert y[255].isnan().all()
    levels = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    levels = torch.cat([levels, -levels])
    order = torch.stack([first & 15, first >> 4], -1).view(256, 32).long()
    right = levels[order] * torch.exp2(torch.arange(256, dtype=torch.float64) - 127)[:, None]
    assert same_bits(y[:255], right[:255].float())
    second = codes.repeat(8).view(16, 128)
    y = dequantized(backend, second, scales, format="nvfp4", dtype=torch.float32)
    own = scales.view(torch.float8_e4m3fn).double().repeat_interleave(16, 1)
    order = torch.stack([second & 15, second >> 4], -1).view(16, 256).long()
    right = (levels[order] * own).float()
    assert torch.equal(y.isnan(), right.isnan())
    assert same_bits(y.nan_to_num(), right.nan_to_num())


CODES = torch.zeros(4, 32, dtype=torch.uint8)
SCALES = {
    "nf4": torch.ones(4),
    "mxfp4": torch.zeros(4, 2, dtype=torch.uint8),
    "nvfp4": torch.ones(4, 4).to(torch.float8_e4m3fn),
    "int4": torch.ones(4, 2),
}


@pytest.mark.parametrize(
    ("format", "change", "error", "message"),
    [
        ("nf5", {}, ValueError, "nf5"),
        ("nf4", {"codes": CODES.float()}, TypeError, "codes must be a tensor of uint8"),
        ("nf4", {"scales": torch.ones(5)}, ValueError, "needs 4 scales, one for every 64 of 256"),
        ("nf4", {"scales": torch.ones(4).half()}, TypeError, "float32 or uint8"),
        ("nf4", {"scales": torch.zeros(4, dtype=torch.uint8)}, TypeError, "scale_levels is needed"),
        ("nf4", {"scale_offset": torch.ones(1)}, TypeError, "is for scales in uint8"),
        ("mxfp4", {"scales": torch.zeros(4, 3, dtype=torch.uint8)}, ValueError, r"\(4, 2.0\)"),
        ("mxfp4", {"scales": torch.ones(4, 2)}, TypeError, "scales of mxfp4"),
        ("mxfp4", {"group": 3}, ValueError, "even number"),
        ("mxfp4", {"global_scale": torch.ones(1)}, TypeError, "is for nvfp4"),
        ("nvfp4", {"global_scale": torch.ones(2)}, ValueError, "must have 1 elements"),
        ("nvfp4", {"divides": True}, ValueError, "what global_scale does, which is None"),
        ("int4", {"zeros": torch.zeros(4, 3)}, ValueError, "zeros must have 8 elements"),
        ("int4", {"dtype": torch.int8}, TypeError, "dtype must be"),
        ("int4", {"group": 48}, ValueError, "scales of int4 must have shape"),
    ],
)
def test_what_is_refused(format, change, error, message):
    arguments = {"codes": CODES, "scales": SCALES.get(format, SCALES["nf4"]), **change}
    with pytest.raises(error, match=message):
        ops.dequantize(**arguments, format=format)
