"""What the Triton kernels share: rounding, row views and the sum of per-program partials."""

import math
import os
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_multi.backends.triton.common.launching import launch
from liger_multi.dispatch.launch import DeviceInfo, launch_config
from liger_multi.reference.common import clamp

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
MOST_PARTIALS = 1024  # that programs of a few columns each sum alone
LARGEST_TILE = 8192  # elements of several rows that a kernel takes at a time
# columns of 4 bytes that a row of 2 GiB has, and a step of a kernel less
LONGEST_ROW: tl.constexpr = tl.constexpr(2**29 - 2**16)
INTERPRETED: tl.constexpr = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
PASSES_AT_BOUND: tl.constexpr = tl.constexpr(clamp.PASSES_AT_BOUND)


@dataclass(frozen=True)
class ReduceConfig:
    """Tile of the sum over partials: ``block_rows`` partials by ``block`` columns."""

    block_rows: int = 32
    block: int = 64
    num_warps: int = 4


@triton.jit
def round_to(value, DTYPE: tl.constexpr):
    """Cast an fp32 value to DTYPE, rounding to nearest even.

    Triton's interpreter truncates to bf16, so there the rounding is done on the bits. NaN is kept.
    """
    if INTERPRETED and DTYPE == tl.bfloat16:
        bits = value.to(tl.uint32, bitcast=True)
        near = (bits & 0xFFFF0000) + ((((bits & 0xFFFF) + 0x7FFF + ((bits >> 16) & 1)) >> 16) << 16)
        value = tl.where(value == value, near.to(tl.float32, bitcast=True), value)
    return value.to(DTYPE)


def short_offsets(_semantic=None, _builder=None):
    """Whether memory operations take 32-bit offsets, so that bounds are worth telling the compiler.

    AMD's buffer operations take them. They also check bounds, so that a mask costs no branch.
    NVIDIA has none, and there the bounds of a loop would cost registers (40 instead of 32, Triton
    3.9).
    """
    options = getattr(getattr(_semantic, "builder", _builder), "options", None)
    name = getattr(options, "backend_name", "interpreter")
    return tl.constexpr(name not in ("cuda", "interpreter"))


def _nvidia(_semantic=None, _builder=None):
    """Whether NVIDIA's instructions may be named."""
    options = getattr(getattr(_semantic, "builder", _builder), "options", None)
    return tl.constexpr(getattr(options, "backend_name", "interpreter") == "cuda")


for _builtin in (short_offsets, _nvidia):  # the compiler calls them and passes its builder
    setattr(_builtin, "__triton_builtin__", True)  # noqa: B010


@triton.jit
def log2_near(x):
    """log2 of an fp32 x that is not denormal, to 2^-22 of the larger of 1 and the result.

    NVIDIA has one instruction for it. tl.log2 is accurate to an ulp, but takes about 25
    instructions there (Triton 3.2 to 3.9).
    """
    if _nvidia():
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.log2(x)


@triton.jit
def exp2_near(x):
    """2^x of an fp32 x, to 2 ulp; 0 where the result is denormal.

    tl.exp2 takes three instructions more on NVIDIA, for denormal numbers (Triton 3.9).
    """
    if _nvidia():
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.exp2(x)


@triton.jit
def reciprocal_near(x):
    """1 / x of an fp32 x, to 1 ulp; 0 where the result is denormal.

    A division takes about seven instructions more on NVIDIA, for denormal and huge x (Triton 3.9).
    """
    if _nvidia():
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return 1.0 / x


@triton.jit
def two_sum(a, b):
    """The rounded sum of two numbers and what rounding left out; 0 if that is not finite."""
    high = a + b
    back = high - a
    low = (a - (high - back)) + (b - back)
    return high, tl.where(tl.abs(high) < float("inf"), low, 0.0)


@triton.jit
def log1p(x):
    """log(1 + x) of an fp32 scalar that is not negative, to a few ulp also where x is tiny."""
    s = tl.div_rn(x, x + 2.0)
    q = s * s
    near = 0.33333333333 + q * (0.2 + q * (0.14285714286 + q * 0.11111111111))
    return tl.where(x < 0.5, 2.0 * s + 2.0 * s * q * near, tl.log2(1.0 + x) * LN2)


@triton.jit
def one_minus_exp(x):
    """1 - exp(-x) of an fp32 scalar that is not negative, to a few ulp also where x is tiny."""
    near = 1.0 - x * (1.0 / 7.0) * (1.0 - x * 0.125)
    near = 1.0 - x * (1.0 / 5.0) * (1.0 - x * (1.0 / 6.0) * near)
    near = 1.0 - x * (1.0 / 3.0) * (1.0 - x * 0.25 * near)
    return tl.where(x < 0.5, x * (1.0 - x * 0.5 * near), 1.0 - tl.exp2(x * -LOG2E))


@triton.jit
def of_thread(zero):
    """A zero that the compiler takes for a per-thread value, not for one value per warp.

    ``zero`` is 0, which it must not know either.
    """
    if _nvidia():
        return tl.inline_asm_elementwise(
            "{ .reg .u32 t; mov.u32 t, %laneid; mul.lo.u32 $0, t, $1; }",
            "=r,r",
            [zero],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        return 0


@triton.jit
def fetch(ptr):
    """Prefetch the cache lines that pointers refer to; on NVIDIA only."""
    if _nvidia():
        tl.inline_asm_elementwise(
            "prefetch.global.L1 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [ptr],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def at_most(x, limit: tl.constexpr):
    """The smaller of x and ``limit``, and ``limit`` where x is NaN.

    This is what tl.minimum compiles to. Triton's interpreter would return NaN, so there it is a
    comparison.
    """
    if INTERPRETED:
        return tl.where(x < limit, x, limit)
    return tl.minimum(x, limit)


@triton.jit
def above(x, bound):
    """Whether a clamp to at most ``bound`` passes no gradient, as in the PyTorch that runs."""
    if PASSES_AT_BOUND:
        return x > bound
    else:
        return x >= bound


@triton.jit
def assume_rows(ptr, stride, ROWS: tl.constexpr):
    """Tell the compiler that a tile of rows ends within 2 GiB of its first element.

    :func:`as_rows` and :func:`tile_rows` make it true. Without it, the compiler must use 64-bit
    offsets in tensors of more than 2 GiB.
    """
    if short_offsets():
        if ptr is not None:
            if ROWS > 1:  # the first row of a tile is where its scalar base points
                BYTES: tl.constexpr = ROWS * (ptr.dtype.element_ty.primitive_bitwidth // 8)
                tl.assume(stride >= 0)
                tl.assume(stride < 2**31 // BYTES)


@triton.jit
def assume_cols(cols, MOST: tl.constexpr = LONGEST_ROW):
    """Tell the compiler that a number of columns, or the index of one, keeps a row below 2 GiB.

    Where MOST is not the width of a tile, :func:`checked_cols` has made it true.
    """
    if short_offsets():
        tl.assume(cols >= 0)
        tl.assume(cols <= MOST)


@triton.jit
def load_or(ptr, at, mask, DEFAULT: tl.constexpr):
    """Load numbers in fp32; DEFAULT where there is no tensor."""
    if ptr is None:
        return tl.full(at.shape, DEFAULT, tl.float32)
    else:
        return tl.load(ptr + at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def bf16_parts(x):
    """Three bf16 numbers whose sum is x; those past the digits of x's dtype are zeros.

    Each holds 8 bits of the mantissa, so that matrix units multiply two of them exactly.
    """
    wide = x.to(tl.float32)
    if x.dtype == tl.bfloat16:
        first = x
    else:
        first = round_to(wide, tl.bfloat16)
    rest = wide - first.to(tl.float32)
    second = round_to(rest, tl.bfloat16)
    return first, second, round_to(rest - second.to(tl.float32), tl.bfloat16)


@triton.jit
def add_dot(a, b, total):
    """``total + a @ b`` in fp32, for the second dot of a turn of a loop, and those after it.

    Compilers get two dots of one turn through one accumulator wrong (ci.static.patterns). So this
    dot begins with zeros, and its result is added. Triton would make an addition into a dot with an
    accumulator again; of a fused multiply-add it does not.
    """
    if INTERPRETED:  # which cannot multiply bf16
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.fma(tl.dot(a, b, input_precision="ieee"), 1.0, total)


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)) of an fp32 x, with 0 and 1 as limits."""
    return 1.0 / (1.0 + tl.exp2(x * -LOG2E))


@triton.jit
def tanh_and_slope(x):
    """The hyperbolic tangent of an fp32 x and its derivative, both accurate near saturation.

    With e = exp(-2 |x|): tanh(|x|) = (1 - e) / (1 + e), and the derivative is 4 e / (1 + e)^2. The
    quotient loses digits near 0, so below 0.25 a series to x^9 takes its place. The derivative is
    not 1 - tanh^2, which cancels where tanh is near 1. Cost: one exponential and one division.
    """
    e = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
    inverse = 1.0 / (1.0 + e)
    far = tl.where(x < 0.0, e - 1.0, 1.0 - e) * inverse
    s = x * x
    near = 0.13333333333 + s * (-0.05396825397 + s * 0.02186948854)
    near = x + x * s * (-0.33333333333 + s * near)
    return tl.where(tl.abs(x) < 0.25, near, far), 4.0 * e * inverse * inverse


@triton.jit
def tanh(x):
    """The hyperbolic tangent of an fp32 x."""
    value, _ = tanh_and_slope(x)
    return value


@triton.jit
def _sum_partials_kernel(
    partial_ptr, out_ptr, other_ptr, partials, cols, BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Sum fp32 partials over the programs that wrote them, in a fixed order, and cast.

    Program: BLOCK columns of one set of partials; axis 1 of the grid is the set (at most two).
    Reads its columns of the set, (partials, cols), in tiles of BLOCK_ROWS partials. Writes one row
    of sums: of the first set to ``out_ptr``, of the second to ``other_ptr``.
    """
    assume_rows(partial_ptr, cols, BLOCK_ROWS)
    first, lane = tl.program_id(0) * BLOCK, tl.arange(0, BLOCK)
    col = first + lane
    row = tl.arange(0, BLOCK_ROWS)
    which = tl.program_id(1)
    partial_ptr += which.to(tl.int64) * partials * cols + first
    total = tl.zeros([BLOCK_ROWS, BLOCK], tl.float32)
    offset = row[:, None] * cols + lane[None, :]
    for start in tl.range(0, partials, BLOCK_ROWS):
        mask = (start + row < partials)[:, None] & (col < cols)[None, :]
        total += tl.load(partial_ptr + offset, mask=mask, other=0.0)
        partial_ptr += BLOCK_ROWS * cols
    total = tl.sum(total, axis=0)
    if which == 0:
        tl.store(out_ptr + col, round_to(total, out_ptr.dtype.element_ty), mask=col < cols)
    elif other_ptr is not None:
        tl.store(other_ptr + col, round_to(total, other_ptr.dtype.element_ty), mask=col < cols)


def reduce_config(info: DeviceInfo, rows: int, cols: int) -> ReduceConfig:
    """Few columns: narrower tiles, so that more programs share the work."""
    return ReduceConfig() if cols > 2048 else ReduceConfig(128, 16)


def sum_partials(partial: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum fp32 partials (programs, cols) over the programs, in a fixed order, and cast."""
    return sum_all_partials(partial, dtype)[0]


def sum_all_partials(partial: Tensor, *dtypes: torch.dtype) -> tuple[Tensor, ...]:
    """The same of one or two sets of partials (sets, programs, cols), with a dtype for each."""
    count, cols = partial.shape[-2:]
    outs = tuple([partial.new_empty(cols, dtype=d) for d in dtypes])
    k = launch_config("sum_partials", reduce_config, partial.device, rows=count, cols=cols)
    launch(
        _sum_partials_kernel,
        cdiv(cols, k.block),
        (partial, outs[0], outs[1] if len(outs) > 1 else None, count, checked_cols(cols)),
        (tile_rows(k.block_rows, cols), k.block),
        k.num_warps,
        len(outs),
    )
    return outs


def sum_rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum an fp32 (rows, cols) over its rows and cast, in an order by the shape alone.

    PyTorch's own sum divides the rows among the cores of the card. Of many rows, the first sum has
    every ``parts``-th row, so that programs share it; what they leave is summed as partials are.
    """
    (rows, cols), x = x.shape, x.contiguous()
    if rows > MOST_PARTIALS:
        parts = power_of_2(math.isqrt(rows))
        full_rows = rows // parts * parts
        sums = sum_partials(x[:full_rows].view(-1, parts * cols), torch.float32)
        x = torch.cat([sums.view(parts, cols), x[full_rows:]])
    return sum_partials(x, dtype)


def as_rows(x: Tensor, width: int = 0) -> Tensor:
    """View ``x`` as (rows, cols) with adjacent columns; copies only where no such view exists.

    Also where rows are so far apart that a tile of them would span 2 GiB (see assume_rows); a
    tile has ``width`` columns of each, or all.
    """
    cols = x.shape[-1]
    rows = x if x.dim() == 2 else x.reshape(x.numel() // max(cols, 1), cols)
    tile = LARGEST_TILE // max(width or cols, 1)
    is_near = tile < 2 or rows.stride(0) * tile * rows.element_size() < 2**31
    if is_near and (rows.stride(1) == 1 or cols == 1):
        return rows
    return rows.contiguous().view(-1).view(rows.shape)  # a single row may have kept its stride


def with_stride(x: Tensor) -> tuple[Tensor, int]:
    """``x`` as :func:`as_rows` makes it, and the stride of its rows.

    Contiguous tensors go as they are, whatever their axes: kernels see a pointer, and a view would
    cost the host 3 us.
    """
    if x.is_contiguous():
        return x, x.shape[-1]
    rows = as_rows(x)
    return rows, rows.stride(0)


def empty_contiguous(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A contiguous tensor like ``x``; ``x.new_empty(x.shape)`` takes the host twice as long."""
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def tile_rows(requested: int, *strides: int) -> int:
    """Rows of a tile: one where ``requested`` rows would reach 2 GiB past the first.

    It makes :func:`assume_rows` true of tiles that are parts of wide rows.
    """
    return requested if requested * max(strides) < 2**28 else 1


def checked_cols(cols: int) -> int:
    """Raise for rows that are too long for the offsets that kernels assume."""
    if cols > LONGEST_ROW.value:
        raise ValueError(f"kernels take rows of up to {LONGEST_ROW.value} columns, got {cols}")
    return cols


def cdiv(a: int, b: int) -> int:
    """``a / b`` rounded up; Triton's own costs the host some microseconds a call."""
    return -(-a // b)


def power_of_2(value: int) -> int:
    """The least power of two that is not less than ``value`` (at least 1)."""
    return 1 << max(value - 1, 0).bit_length()


def warps(threads: int, warp_size: int) -> int:
    """Warps that hold about ``threads`` threads, a power of two and at least one."""
    return max(power_of_2(threads) // warp_size, 1)
