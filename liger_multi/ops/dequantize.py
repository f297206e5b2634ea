"""Contract of ``dequantize``."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_multi import checks
from liger_multi.dispatch.bitwise import PER_ROW, bitwise
from liger_multi.dispatch.op import Op
from liger_multi.ops._samples import each_frozen, frozen
from liger_multi.ops._work import Options, Shapes, Work
from liger_multi.testing.samples import Sample, Tensor as T

op = Op(
    "dequantize",
    family="quantized",
    bitwise=bitwise(PER_ROW, "codes:-2 scales:-2 zeros:-2 y:-2", 1, reference="exact"),
)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_E4M3 = (torch.float8_e4m3fn, torch.uint8)
_E8M0 = tuple(t for t in (torch.uint8, getattr(torch, "float8_e8m0fnu", None)) if t is not None)


class FourBitFormat(NamedTuple):
    """What a format fixes.

    Attributes:
        group: Elements of a block, where the caller says nothing; 0: from the shapes.
        scales: Dtypes of scales; None for any floating one.
        flat: Whether blocks follow each other in the flat weight, across the ends of rows.
    """

    group: int
    scales: tuple[torch.dtype, ...] | None
    flat: bool = False


FORMATS: Mapping[str, FourBitFormat] = {
    "nf4": FourBitFormat(64, (torch.float32, torch.uint8), flat=True),
    "fp4": FourBitFormat(64, (torch.float32, torch.uint8), flat=True),
    "mxfp4": FourBitFormat(32, _E8M0),
    "nvfp4": FourBitFormat(16, _E4M3),
    "int4": FourBitFormat(0, None),
}


@op.forward(returns="y")
def forward(
    codes: Tensor,
    scales: Tensor,
    global_scale: Tensor | None,
    zeros: Tensor | None,
    scale_levels: Tensor | None,
    scale_absmax: Tensor | None,
    scale_offset: Tensor | None,
    format: str,
    group: int,
    divides: bool,
    dtype: torch.dtype,
) -> Tensor:
    return codes.new_empty((*codes.shape[:-1], 2 * codes.shape[-1]), dtype=dtype)


op.backward(reads="dy codes scales zeros format group", returns="dscales")


def dequantize(
    codes: Tensor,
    scales: Tensor,
    *,
    format: str,
    group: int | None = None,
    global_scale: Tensor | None = None,
    divides: bool = False,
    zeros: Tensor | None = None,
    scale_levels: Tensor | None = None,
    scale_absmax: Tensor | None = None,
    scale_offset: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """A weight of 16 bits or more, from codes of 4 bits and the scales of their blocks.

    Math:
        ``y[i] = level(code[i]) * scale[i // group]``, rounded once to ``dtype``. Levels: 16 numbers
        of a table for ``nf4`` and ``fp4`` (bitsandbytes); E2M1 for ``mxfp4`` and ``nvfp4`` (0, 0.5,
        1, 1.5, 2, 3, 4, 6 and their negatives); ``code - zero`` for ``int4``, with 8 for a zero
        that is not there. Scales: as they are; of ``mxfp4`` E8M0, ``2^(s - 127)`` (255 is NaN); of
        ``nvfp4`` E4M3, multiplied by ``global_scale``, or divided by it where ``divides`` says so.
        Double quantization of ``nf4`` and ``fp4``: ``scale[j] = scale_levels[scales[j]] *
        scale_absmax[j // 256] + scale_offset``. The gradient of floating scales is the sum over
        their block of ``dy * level``.

    Shapes:
        codes ``(..., K / 2)``, two codes a byte: the first is in the upper four bits for ``nf4``
        and ``fp4``, in the lower ones for the others. scales and zeros ``(..., K / group)``;
        for ``nf4`` and ``fp4`` of any shape, one for each ``group`` elements of the flat weight, of
        which the last may have fewer. group: 64 for ``nf4`` and ``fp4``, 32 for ``mxfp4``, 16 for
        ``nvfp4``, from the shapes for ``int4``; other even ones if given. global_scale: one number.
        scale_levels ``(256,)``, scale_absmax ``(blocks / 256)``, scale_offset: one number.
        y ``(..., K)``, contiguous. Codes and scales that are not contiguous are copied.

    Dtypes:
        In: codes uint8; scales fp32 (``nf4``, ``fp4``), uint8 or float8_e8m0fnu (``mxfp4``),
        float8_e4m3fn or its bytes (``nvfp4``), any floating dtype (``int4``); zeros integers or
        floating;
        all else fp32; scales of double quantization uint8. Inside: fp32. Out: ``dtype``, bfloat16,
        float16 or float32.

    Memory:
        Kept for backward, where scales require a gradient: codes and scales. Read: half a byte an
        element and the scales; written: y.

    Raises:
        TypeError: A dtype that the format does not have, or arguments of another format.
        ValueError: An unknown format, shapes that do not fit together, mixed devices.

    Source:
        Dettmers et al. 2023 (arXiv:2305.14314) and ``bitsandbytes``; OCP Microscaling Formats 1.0;
        NVIDIA NVFP4 as ``compressed-tensors`` (divides) and ``modelopt`` (multiplies) store it.
    """
    name = op.name
    checks.one_of(name, "format", format, FORMATS)
    if not isinstance(dtype, torch.dtype) or dtype not in DTYPES:
        raise TypeError(
            f"{name}: dtype must be bfloat16, float16 or float32, got {checks.describe(dtype)}"
        )
    nested = {
        "scale_levels": scale_levels,
        "scale_absmax": scale_absmax,
        "scale_offset": scale_offset,
    }
    _codes_fit(codes)
    _scales_fit(codes, scales, format, nested)
    size = _group_of(codes, scales, format, group)
    _others_fit(codes, scales, format, {"global_scale": global_scale, "zeros": zeros, **nested})
    checks.boolean(name, "divides", divides)
    if divides and global_scale is None:
        raise ValueError(f"{name}: divides says what global_scale does, which is None")
    result: Tensor = op(
        codes.contiguous(),
        scales.contiguous(),
        global_scale,
        None if zeros is None else zeros.contiguous(),
        **nested,
        format=format,
        group=size,
        divides=divides,
        dtype=dtype,
    )
    return result


def _codes_fit(codes: object) -> None:
    if not isinstance(codes, Tensor) or codes.dtype != torch.uint8:
        raise TypeError(
            f"{op.name}: codes must be a tensor of uint8, two codes a byte, got "
            f"{checks.describe(codes)}"
        )
    if codes.ndim == 0:
        checks.refuse(op.name, "codes must have shape (..., K / 2)", codes)


def _scales_fit(
    codes: Tensor, scales: object, format: str, nested: Mapping[str, Tensor | None]
) -> None:
    """Scales have a dtype of the format, and numbers of double quantization come together."""
    name, allowed = op.name, FORMATS[format].scales
    dtype_fits = isinstance(scales, Tensor) and (
        scales.is_floating_point() and scales.itemsize > 1
        if allowed is None
        else scales.dtype in allowed
    )
    if not isinstance(scales, Tensor) or not dtype_fits:
        dtypes = "floating" if allowed is None else " or ".join(str(t)[6:] for t in allowed)
        raise TypeError(
            f"{name}: scales of {format} must be a {dtypes} tensor, got {checks.describe(scales)}"
        )
    quantized = FORMATS[format].flat and scales.dtype == torch.uint8
    for key, value in nested.items():
        if (value is not None) != quantized:
            expected = "is needed for scales in uint8" if quantized else "is for scales in uint8"
            raise TypeError(
                f"{name}: {key} {expected}, got {checks.describe(value)} and scales "
                f"{checks.describe(scales)}"
            )
    if scales.device != codes.device:
        checks.refuse(name, f"scales must be on {codes.device}, where codes are", scales)


def _group_of(codes: Tensor, scales: Tensor, format: str, group: int | None) -> int:
    """Elements of a block; the number of scales fits them."""
    name, (fixed, _, flat) = op.name, FORMATS[format]
    leading, width = codes.shape[:-1], 2 * codes.shape[-1]
    size = fixed if group is None else checks.integer(name, "group", group)
    if size == 0 and group is None:
        columns = scales.shape[-1] if scales.ndim else 0
        size = width // columns if columns else 2
    if size < 2 or size % 2:
        checks.refuse(name, "group must be an even number of elements", f"{size}")
    if flat:
        blocks = -(-math.prod(leading) * width // size)
        if scales.numel() != blocks:
            checks.refuse(
                name,
                f"{format} needs {blocks} scales, one for every {size} of "
                f"{math.prod(leading) * width} elements",
                scales,
            )
    elif width % size or scales.shape != (*leading, width // size):
        checks.refuse(
            name,
            f"scales of {format} must have shape {(*leading, width / size)}, one for every {size} "
            f"of K = {width} elements of codes {tuple(codes.shape)}",
            scales,
        )
    return size


_OF_FORMAT = {
    "global_scale": ("nvfp4",),
    "zeros": ("int4",),
    "scale_levels": ("nf4", "fp4"),
    "scale_absmax": ("nf4", "fp4"),
    "scale_offset": ("nf4", "fp4"),
}


def _others_fit(
    codes: Tensor, scales: Tensor, format: str, tensors: Mapping[str, Tensor | None]
) -> None:
    """Everything beside codes and scales, each with the one number of elements that it may have."""
    name = op.name
    elements = {
        "global_scale": 1,
        "zeros": scales.numel(),
        "scale_levels": 256,
        "scale_absmax": -(-scales.numel() // 256),
        "scale_offset": 1,
    }
    for key, value in tensors.items():
        if value is None:
            continue
        if format not in _OF_FORMAT[key]:
            formats = " and ".join(_OF_FORMAT[key])
            raise TypeError(f"{name}: {key} is for {formats}, got format={format!r}")
        checks.constant(name, key, value)
        numbers = key == "zeros" and value.dtype != torch.bool and not value.is_complex()
        if value.dtype != torch.float32 and not numbers:
            dtypes = "integers or floating" if key == "zeros" else "float32"
            raise TypeError(f"{name}: {key} must be {dtypes}, got {checks.describe(value)}")
        if value.numel() != elements[key] or value.device != codes.device:
            checks.refuse(
                name, f"{key} must have {elements[key]} elements on {codes.device}", value
            )


def formula(
    codes: Tensor,
    scales: Tensor,
    *,
    format: str,
    group: int | None = None,
    global_scale: Tensor | None = None,
    divides: bool = False,
    zeros: Tensor | None = None,
    scale_levels: Tensor | None = None,
    scale_absmax: Tensor | None = None,
    scale_offset: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """A level times the scale of its block."""
    from liger_multi.reference.quantized.dequantize import LEVELS

    parts = [codes & 15, codes >> 4]
    index = torch.stack(parts[::-1] if FORMATS[format].flat else parts, -1).long().flatten()
    wide = torch.float64
    size = FORMATS[format].group if group is None else group
    size = size or 2 * codes.shape[-1] // max(1, scales.shape[-1])
    block = torch.arange(index.numel(), device=codes.device) // size
    scale = scales.reshape(-1)
    if format == "mxfp4":
        exponent = scale.view(torch.uint8).to(wide)
        scale = torch.where(exponent == 255, math.nan, torch.exp2(exponent - 127))
    elif format == "nvfp4":
        scale = scale.view(torch.float8_e4m3fn) if scale.dtype == torch.uint8 else scale
        scale = scale.to(wide)
        if global_scale is not None:
            scale = scale / global_scale if divides else scale * global_scale
    elif scale_levels is not None and scale_absmax is not None and scale_offset is not None:
        block_index = torch.arange(scale.numel(), device=codes.device) // 256
        scale = scale_levels[scale.long()] * scale_absmax[block_index] + scale_offset
    if format == "int4":
        level = index.to(wide) - (8 if zeros is None else zeros.to(wide).reshape(-1)[block])
    else:
        level = torch.tensor(LEVELS[format], dtype=wide, device=codes.device)[index]
    return (level * scale.to(wide)[block]).view(*codes.shape[:-1], 2 * codes.shape[-1])


def work(shapes: Shapes, size: int, options: Options) -> Work:
    """What a call reads and writes at least; y has 2 bytes per element."""
    codes = math.prod(shapes["codes"])
    scales = math.prod(shapes["scales"]) * (4 if FORMATS[options["format"]].flat else 1)
    forward = codes + scales + 4 * codes
    # backward reads dy and codes, and writes gradients of scales
    return Work(forward, forward + 5 * codes + scales)


def _case(shape: tuple[int, ...], format: str, group: int = 0, **extra: T) -> dict[str, T]:
    """Codes of a weight of a shape, and scales of its rows' blocks."""
    size, leading = group or FORMATS[format].group, shape[:-1]
    scales = (*leading, shape[-1] // size)
    specs: dict[str, Any] = {
        "nf4": T(scales, torch.float32, positive=True),
        "fp4": T(scales, torch.float32, positive=True),
        "mxfp4": T(scales, torch.uint8, classes=134, least=120),
        "nvfp4": T(scales, torch.uint8, classes=80, least=40),
        "int4": T(scales, torch.float32, positive=True),
    }
    return {"codes": _codes(*leading, shape[-1] // 2), "scales": specs[format], **extra}


def _codes(*shape: int, layout: str = "contiguous") -> T:
    return T(shape, torch.uint8, classes=256, layout=layout)


def _options(format: str, **options: Any) -> dict[str, Any]:
    """Options; wide results keep what upstream gradients are drawn in."""
    return {"format": format, "dtype": torch.float32, **options}


def _narrow(format: str, dtype: torch.dtype, shape: tuple[int, ...] = (6, 128)) -> Sample:
    group = 32 if format == "int4" else 0
    name = f"{format}-{str(dtype)[6:]}"
    tensors = frozen(_case(shape, format, group), "scales")
    if format == "int4":  # its scales have any dtype
        tensors["scales"] = replace(tensors["scales"], dtype=None)
    return Sample(name, tensors, _options(format, dtype=dtype))


_ONE = T((1,), torch.float32, positive=True, grad=False)


def _bench(format: str) -> dict[str, Any]:
    """Options of a model's weight, which becomes bfloat16 whatever the others are."""
    return {"format": format, "dtype": torch.bfloat16}


def _nested(blocks: int) -> dict[str, T]:
    return {
        "scales": T((blocks,), torch.uint8, classes=256),
        "scale_levels": T((256,), torch.float32, grad=False),
        "scale_absmax": T((-(-blocks // 256),), torch.float32, positive=True, grad=False),
        "scale_offset": T((), torch.float32, positive=True, grad=False),
    }


SAMPLES = (
    *[Sample(f, _case((6, 128), f), _options(f)) for f in ("nf4", "fp4")],
    Sample("int4", _case((6, 128), "int4", 32), _options("int4")),
    Sample("group-of-two", _case((3, 20), "int4", 2), _options("int4")),
    *[Sample(f, _case((6, 128), f), _options(f)) for f in ("mxfp4", "nvfp4")],
    *[_narrow(f, torch.bfloat16) for f in FORMATS],
    _narrow("mxfp4", torch.float16, (3, 4, 64)),
    Sample("global", _case((4, 64), "nvfp4", global_scale=_ONE), _options("nvfp4")),
    Sample("divides", _case((4, 64), "nvfp4", global_scale=_ONE), _options("nvfp4", divides=True)),
    Sample(
        "zeros",
        _case((4, 128), "int4", 32, zeros=T((4, 4), torch.uint8, classes=16)),
        _options("int4"),
    ),
    Sample("odd-groups", _case((5, 132), "int4", 66), _options("int4"), path="groups of 66"),
    Sample("other-group", _case((2, 256), "nf4", 128), _options("nf4", group=128)),
    Sample(
        "part-of-a-block", {"codes": _codes(45), "scales": T((2,), torch.float32)}, _options("fp4")
    ),
    Sample(
        "double-quantized",
        {"codes": _codes(19200), **_nested(600)},
        _options("nf4"),
        path="scales of scales",
    ),
    *each_frozen(_case((4, 64), "nf4"), "scales", _options("nf4")),
    Sample("no-rows", _case((0, 64), "mxfp4"), _options("mxfp4")),
    Sample("no-columns", _case((3, 0), "nvfp4"), _options("nvfp4")),
    Sample(
        "sliced",
        _case((4, 64), "mxfp4") | {"codes": _codes(4, 32, layout="sliced")},
        _options("mxfp4"),
    ),
    Sample("past-65535-rows", _case((65537, 32), "mxfp4"), _options("mxfp4"), "thin"),
    *[
        Sample(f"{'x'.join(map(str, shape))}-{f}", _case(shape, f, group), _bench(f), "bench")
        for f, shape, group in (
            ("nf4", (14336, 4096), 0),
            ("mxfp4", (14336, 4096), 0),
            ("nvfp4", (14336, 4096), 0),
            ("int4", (14336, 4096), 128),
            ("mxfp4", (32, 5760, 2880), 0),
        )
    ],
    Sample(
        "14336x4096-nf4-nested",
        {"codes": _codes(14336, 2048), **_nested(14336 * 64)},
        _bench("nf4"),
        "bench",
        is_whole=True,
    ),
)
