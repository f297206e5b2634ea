"""Codes of 4 bits as the libraries that write them read them, bit by bit, and what is refused."""

import importlib

import pytest
import torch

from liger_multi import ops
from liger_multi.dispatch.registry import REFERENCE
from liger_multi.testing.bitwise import same_bits
from tests import harness

BACKENDS = [b for b in (REFERENCE, "triton") if harness.device_of(b) is not None]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def dequantized(backend, *args, **options):
    import liger_multi

    device = harness.device_of(backend)
    moved = [a.to(device) for a in args]
    named = {n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in options.items()}
    with liger_multi.use(dequantize=backend):
        return ops.dequantize(*moved, **named).cpu()


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
    torch.manual_seed(7)
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
