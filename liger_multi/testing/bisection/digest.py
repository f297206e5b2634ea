"""A hash of the bits of a tensor, its statistics, and how far two tensors are apart.

The hash is the sum of all elements, as integers, times odd weights of their place in a block and of
their block, modulo 2^64: one changed element always changes it, and so do exchanged elements.
Strides do not count. Nothing here waits for the device: numbers stay on it until :func:`on_host`
fetches all at once.

The difference of two tensors is estimated without keeping either. Both are reduced to a few sums of
elements with random signs, and these sums differ as much as the tensors do (count sketch: Charikar,
Chen, Farach-Colton, "Finding frequent items in data streams", 2002).
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from liger_multi._torch_private import fake_tensor, is_wrapper_subclass

BLOCK = 2**18  # elements: 2 MiB of weights, which stay in a cache
TOGETHER = 16  # blocks at a time on an accelerator: 32 MiB of products
SUMS = 16  # with random signs; the estimated difference is right to about a fifth
_MODULUS = 2**64
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_LAZY = "liger_multi.patching.head.storage"

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Digest:
    """What is kept of some bits.

    Attributes:
        hash: 64 bits of it.
        largest: The largest magnitude; NaN where there is one.
        norm: The root of the sum of squares.
        sketch: Sums with random signs.
    """

    hash: int
    largest: float
    norm: float
    sketch: tuple[float, ...]


# --- tensors that can be read ---


def is_lazy(value: object) -> bool:
    """Whether a value is logits that were not computed; reading their shape computes nothing."""
    known: Any = sys.modules.get(_LAZY)
    return known is not None and bool(known.is_lazy(value))


def computed(value: Any) -> Any:
    """The values of lazy logits, which stay lazy for everybody else; other values as they come."""
    if not is_lazy(value):
        return value
    with torch.no_grad():
        return value._slot.deferred.detached().compute()


def readable(value: Tensor) -> Tensor | None:
    """The plain tensor that holds the bits (of a DTensor, this process's part), or None."""
    if is_lazy(value) or isinstance(value, fake_tensor() or ()):
        return None
    if torch.nn.parameter.is_lazy(value) or value.is_meta or value.is_quantized or value.is_nested:
        return None
    if hasattr(value, "to_local"):
        value = value.to_local()
    if is_wrapper_subclass(value):
        return None
    plain = value.detach().as_subclass(Tensor)
    return plain if plain.layout is torch.strided else plain.to_dense()


# --- the digest ---


def _signed(value: int) -> int:
    """The same 64 bits as PyTorch has them: a signed integer."""
    value %= _MODULUS
    return value - _MODULUS if value >= _MODULUS // 2 else value


@functools.lru_cache(maxsize=8)
def _wide(device: torch.device) -> torch.dtype:
    """The dtype of sums: float64, or float32 where a device lacks it."""
    try:
        torch.ones(1, dtype=torch.float64, device=device)
    except (RuntimeError, TypeError):
        return torch.float32
    return torch.float64


@functools.lru_cache(maxsize=8)
def _weights(device: torch.device) -> Pair:
    """Odd weights of the places in a block, and those of blocks."""
    with torch.inference_mode(False):
        bits = torch.arange(1, BLOCK + 1, device=device) * _signed(_GOLDEN)
        factors = []
        for factor in (_FIRST, _SECOND):  # after SplitMix64 (Steele, Lea, Flood, 2014)
            bits = (bits ^ (bits >> 30)) * _signed(factor)
            factors.append((bits ^ (bits >> 31)) | 1)
        return factors[1], factors[0]


@functools.lru_cache(maxsize=16)
def _signs(device: torch.device, dtype: torch.dtype) -> Pair:
    """Random signs of the places in a block, and those of blocks."""
    with torch.inference_mode(False):
        one, other = ((w >> 40) & 1 for w in _weights(device))
        return (2 * one - 1).to(dtype), (2 * other - 1).to(_wide(device))


def _flat(tensor: Tensor) -> Pair:
    """The bits and the values of a tensor in one row each."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    flat = tensor.resolve_neg().reshape(-1)
    bits = flat.view(_INTEGERS[flat.element_size()])
    castable = flat.dtype.is_floating_point and not str(flat.dtype).startswith("torch.float4")
    return bits, flat if castable else bits


def digest(tensor: Tensor) -> Pair:
    """The hash and the statistics of a plain tensor, on its device.

    Returns:
        An int64 tensor without axes, and a row of the largest magnitude, the norm and the sums.
    """
    device = tensor.device
    (weights, of_blocks), wide = _weights(device), _wide(device)
    bits, values = _flat(tensor)
    total, sums = weights.new_zeros(()), torch.zeros(SUMS, dtype=wide, device=device)
    if not bits.numel():
        return total, torch.cat([sums[:2], sums])
    if values.dtype not in _EXACT:
        values = values.to(torch.float32 if values.dtype.is_floating_point else wide)
    signs, block_signs = _signs(device, values.dtype)
    step, first = (1 if device.type == "cpu" else TOGETHER) * BLOCK, 0
    for start in range(0, bits.numel(), step):
        stop = min(start + step, bits.numel())
        whole = start + (stop - start) // BLOCK * BLOCK
        for low, high in ((start, whole), (whole, stop)):
            if low == high:
                continue
            count = -(-(high - low) // BLOCK)  # blocks; the last of a tensor is shorter
            b, x = bits[low:high].view(count, -1), values[low:high].view(count, -1)
            blocks = slice(first, first + count)
            total = total + ((b * weights[: b.shape[1]]).sum(1) * of_blocks[blocks]).sum()
            x = x * signs[: x.shape[1]]  # exact
            if x.shape[1] % SUMS:
                x = torch.nn.functional.pad(x, (0, -x.shape[1] % SUMS))
            parts = x.view(count, SUMS, -1).sum(2, dtype=wide)
            sums = sums + (parts * block_signs[blocks, None]).sum(0)
            first += count
    norms = [
        torch.linalg.vector_norm(values, order, dtype=_norm_dtype(values.dtype))
        for order in (math.inf, 2)
    ]
    return total, torch.cat([torch.stack(norms).to(wide), sums])


_EXACT = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def _norm_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def on_host(pairs: Iterable[Pair]) -> dict[int, Digest]:
    """The digests of pairs by their identity, fetched with one copy per device."""
    by_device: dict[torch.device, list[Pair]] = {}
    for pair in pairs:
        by_device.setdefault(pair[0].device, []).append(pair)
    digests = {}
    for several in by_device.values():
        hashes = torch.stack([pair[0] for pair in several]).tolist()
        rows = torch.stack([pair[1] for pair in several]).tolist()
        for pair, bits, row in zip(several, hashes, rows, strict=True):
            digests[id(pair)] = Digest(bits % _MODULUS, row[0], row[1], tuple(row[2:]))
    return digests


def relative(ones: Sequence[Digest], others: Sequence[Digest]) -> float:
    """The estimated norm of the difference of two tensors in parts, by that of the first."""
    if [d.hash for d in ones] == [d.hash for d in others]:
        return 0.0
    apart = sum(
        (x - y) ** 2
        for one, other in zip(ones, others, strict=True)
        for x, y in zip(one.sketch, other.sketch, strict=True)
    )
    size = sum(one.norm**2 for one in ones)
    if not (math.isfinite(apart) and math.isfinite(size)):
        return math.inf
    return math.sqrt(apart / size) if size else math.inf


# --- how far two tensors are apart ---


@dataclass(frozen=True)
class Distance:
    """How two tensors of one shape and dtype differ.

    Attributes:
        name: Of the tensor.
        dtype: Of both.
        ulps: The largest distance of two elements in units in the last place of their dtype; 0
            where only signs of zeros differ, infinite where one is NaN. Of integers, the
            difference.
        largest: The largest absolute difference of finite elements.
        elements: How many differ in a bit.
        of_elements: Of how many.
        rows: How many rows (all axes but the last, elements of one axis) have such an element.
        of_rows: Of how many.
    """

    name: str
    dtype: str
    ulps: float
    largest: float
    elements: int
    of_elements: int
    rows: int
    of_rows: int


def _ordered(bits: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Sign and number of values between zero and each element."""
    if not dtype.is_floating_point:
        return torch.ones_like(bits, dtype=torch.bool), bits
    width = 8 * dtype.itemsize
    magnitude = bits & ((1 << (width - 1)) - 1)
    return (bits >> (width - 1)) & 1 == 0, magnitude


def distance(name: str, one: Tensor, other: Tensor) -> Distance:
    """Compare two plain tensors of one shape and dtype; copies them to the host."""
    one, other = one.detach().cpu(), other.detach().cpu()
    shape = one.shape
    (bits, values), (bits2, values2) = _flat(one), _flat(other)
    dtype = values.dtype if values is not bits else torch.int64
    differs = bits != bits2
    (plus, size), (plus2, size2) = (_ordered(b.to(torch.int64), dtype) for b in (bits, bits2))
    ulps = torch.where(plus == plus2, (size - size2).abs().double(), size.double() + size2.double())
    x, y = values.double(), values2.double()
    ulps = ulps.masked_fill(differs & (x.isnan() | y.isnan()), math.inf)
    apart = (x - y).abs()[differs & x.isfinite() & y.isfinite()]
    per_row = one.is_complex() + 1
    width = (shape[-1] if len(shape) > 1 else 1) * per_row
    rows = differs.reshape(-1, width).any(1) if differs.numel() else differs
    return Distance(
        name=name,
        dtype=str(one.dtype).removeprefix("torch."),
        ulps=float(ulps[differs].max()) if differs.any() else 0.0,
        largest=float(apart.max()) if apart.numel() else 0.0,
        elements=int(differs.sum()),
        of_elements=differs.numel(),
        rows=int(rows.sum()),
        of_rows=rows.numel(),
    )
