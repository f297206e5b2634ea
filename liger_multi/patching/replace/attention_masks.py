"""The mask of ``attn_implementation="liger_multi"``: ranges of keys that only our attention reads.

transformers asks the mask function of an implementation once per forward pass and kind of layer.
Ours turns any mask of transformers into ranges of keys, two numbers per query in place of a row: it
has transformers evaluate the mask for some queries at a time and keeps where each row begins and
ends. A mask with one hole per row becomes two ranges; others stay dense. So windows, chunks, packed
sequences, padding and caches need no code of their own.

transformers does not check who receives the mask. Models with attention code of their own ask for
it as well, and add it to their scores. So what we return is no tensor and never None: it is a
:class:`KeyMask`, which is complete by itself and raises in every operation of everybody else.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from liger_multi.errors import ConfigurationError

NAME = "liger_multi"
ELEMENTS = 2**26  # of a dense mask that exist at a time


class MaskReadError(ConfigurationError, AttributeError, TypeError):
    """Code other than our attention read a :class:`KeyMask`."""


class KeyMask:
    """Which keys each query sees. It has a shape and moves to devices; all else raises.

    Attributes:
        causal: Without tensors: the queries are the last keys, and see none after them. Without
            tensors and not causal, every query sees every key.
        ranges: ``(B, L, 2 or 4)`` int32, as ``ops.attention`` takes them.
        dense: ``(B, 1, L, S)`` bool, for a mask of another form.
        shape: ``(B, 1, L, S)``, of the mask that this one stands for.
    """

    ndim = 4

    def __init__(
        self,
        shape: tuple[int, int, int, int],
        *,
        causal: bool = False,
        ranges: Tensor | None = None,
        dense: Tensor | None = None,
    ) -> None:
        self.shape, self.causal, self.ranges, self.dense = shape, causal, ranges, dense

    @property
    def plain(self) -> bool:
        """Whether it is causal or all of the keys, without tensors."""
        return self.ranges is None and self.dense is None

    def to(self, *args: Any, **kwargs: Any) -> KeyMask:
        """The mask on another device, for models that are spread over several."""
        ranges, dense = (
            None if x is None else x.to(*args, **kwargs) for x in (self.ranges, self.dense)
        )
        return KeyMask(self.shape, causal=self.causal, ranges=ranges, dense=dense)

    def contiguous(self) -> KeyMask:
        """Itself: generation asks it of each mask that it makes before a step."""
        return self

    def __repr__(self) -> str:
        form = "ranges" if self.ranges is not None else "dense" if self.dense is not None else ""
        return f"KeyMask({tuple(self.shape)}, {form or ('causal' if self.causal else 'all keys')})"

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        raise MaskReadError(_misread(getattr(function, "__name__", str(function))))

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise MaskReadError(_misread(f".{name}"))


def _raising(name: str) -> Callable[..., NoReturn]:
    def operation(self: KeyMask, *others: Any) -> NoReturn:
        raise MaskReadError(_misread(name))

    return operation


_BINARY = (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"),
    *("and", "or", "xor", "lshift", "rshift"),
)
_OTHERS = (
    *("eq", "ne", "lt", "le", "gt", "ge", "neg", "invert", "abs", "bool", "int", "float", "index"),
    *("len", "iter", "getitem", "setitem", "contains"),
)
for _name in (*(f"{side}{name}" for name in _BINARY for side in ("", "r", "i")), *_OTHERS):
    setattr(KeyMask, f"__{_name}__", _raising(f"__{_name}__"))
KeyMask.__hash__ = object.__hash__  # type: ignore[method-assign]


def _misread(operation: str) -> str:
    module, model = _reader()
    return (
        f"attn_implementation={NAME!r} cannot serve {model}: {module} reads the attention mask "
        f"itself ({operation}) where it must only hand it to transformers' AttentionInterface; "
        "use 'sdpa' where the model supports it, or 'eager'"
    )


def _reader() -> tuple[str, str]:
    """The innermost module and the outermost model that are running."""
    if torch.compiler.is_compiling():
        return "one of its modules", "this model"
    from transformers import PreTrainedModel

    frame, module, model = sys._getframe(1), "", ""
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            module = module or type(owner).__name__
            model = type(owner).__name__ if isinstance(owner, PreTrainedModel) else model
        frame = frame.f_back  # type: ignore[assignment]
    return module or "code outside of modules", model or "this model"


def mask(
    batch_size: int,
    kv_length: int,
    q_length: int | None = None,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | KeyMask | None = None,
    cache_position: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **options: Any,
) -> KeyMask:
    """What transformers' mask interface asks for, as a :class:`KeyMask`."""
    from transformers.masking_utils import (
        bidirectional_mask_function,
        causal_mask_function,
        sdpa_mask,
    )

    if isinstance(attention_mask, KeyMask):  # made before the forward pass, as generation does
        return attention_mask
    if cache_position is not None:  # where the queries stand is known to the device alone
        q_length, q_offset = len(cache_position), cache_position[0]
    assert q_length is not None
    queries = q_length
    shape = (batch_size, 1, queries, kv_length)
    if not _tracing() and attention_mask is not None and attention_mask.shape[-1] >= kv_length:
        attention_mask = None if bool(attention_mask.all()) else attention_mask
    last = isinstance(q_offset, int) and q_offset + queries == kv_length + kv_offset
    if attention_mask is None and (last or queries == kv_length):
        if mask_function is causal_mask_function and allow_is_causal_skip:
            return KeyMask(shape, causal=True)
        if mask_function is bidirectional_mask_function and allow_is_bidirectional_skip:
            return KeyMask(shape)

    def dense() -> Iterator[Tensor]:
        step = max(1, ELEMENTS // max(1, batch_size * kv_length))
        for start in range(0, queries, step):
            count = min(step, queries - start)
            where: dict[str, Any] = {"q_length": count, "q_offset": q_offset + start}
            if cache_position is not None:
                where = {"cache_position": cache_position[start : start + count]}
            made = sdpa_mask(
                batch_size=batch_size, kv_length=kv_length, kv_offset=kv_offset, **where,
                mask_function=mask_function, attention_mask=attention_mask, **options,
                allow_is_causal_skip=False, allow_is_bidirectional_skip=False,
            )  # fmt: skip
            yield made.expand(batch_size, -1, count, kv_length)

    return _compressed(shape, dense)


def _tracing() -> bool:
    return torch.compiler.is_compiling()


def _compressed(shape: tuple[int, int, int, int], dense: Callable[[], Iterator[Tensor]]) -> KeyMask:
    """The ranges of the rows of a dense mask that comes in parts, or the mask itself."""
    parts = [_one_range(part) for part in dense()]
    ranges, exact = (torch.cat(each, 2) for each in zip(*parts, strict=True))
    if _tracing():
        torch._assert_async(
            exact.all(), "attention: under a compiler, padding must be at one end of a sequence"
        )
        return KeyMask(shape, ranges=ranges[:, 0])
    if bool(exact.all()):
        return KeyMask(shape, ranges=ranges[:, 0])
    parts = [_two_ranges(part) for part in dense()]
    ranges, exact = (torch.cat(each, 2) for each in zip(*parts, strict=True))
    if bool(exact.all()):
        return KeyMask(shape, ranges=ranges[:, 0])
    return KeyMask(shape, dense=torch.cat(list(dense()), 2))


def _extent(seen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Places, and the first and one past the last that a row sees (0, 0 where it sees none)."""
    place = torch.arange(seen.shape[-1], device=seen.device, dtype=torch.int32)
    last = torch.where(seen, place + 1, 0).amax(-1)
    first = torch.where(seen, place, seen.shape[-1]).amin(-1)
    return place, torch.minimum(first, last), last


def _one_range(seen: Tensor) -> tuple[Tensor, Tensor]:
    """The range of every row, and whether it is all that the row sees."""
    _, first, last = _extent(seen)
    return torch.stack([first, last], -1), seen.sum(-1) == last - first


def _two_ranges(seen: Tensor) -> tuple[Tensor, Tensor]:
    """A row's first and last run of keys, and whether they are all that it sees."""
    place, first, last = _extent(seen)
    hole = torch.where(seen | (place < first[..., None]), seen.shape[-1], place).amin(-1)
    end = torch.minimum(hole, last)
    begin = torch.where(seen | (place >= last[..., None]), 0, place + 1).amax(-1)
    begin = torch.where(end == last, last, begin)
    exact = seen.sum(-1) == (end - first) + (last - begin)
    return torch.stack([first, end, begin, last], -1), exact
