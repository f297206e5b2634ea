"""``attn_implementation="liger_multi"``: the attention operator in transformers' interfaces.

transformers asks two functions of one name: a mask function, once a forward pass and kind of layer,
and an attention function, once a layer. Ours turns any mask of transformers into ranges of keys,
two numbers a query in place of a row: it has transformers evaluate the mask for some queries at a
time and keeps where each row begins and ends. A mask with one hole a row becomes two ranges; others
stay dense. So windows, chunks, packed sequences, padding and caches need no code of their own, and
no mask is recognised by name.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from liger_multi import checks
from liger_multi.errors import ConfigurationError
from liger_multi.ops.attention import attention

NAME = "liger_multi"
ELEMENTS = 2**26  # of a dense mask that exist at a time
UNKNOWN = ("position_bias", "head_mask", "score_mod", "alibi")  # change scores, by names in use
logger = logging.getLogger("liger_multi")
_said: set[str] = set()


def register_attention(name: str = NAME) -> None:
    """Make ``attn_implementation=name`` this library's attention, for all models.

    Models that do not ask for the name are not affected. Registering twice is registering once.

    Raises:
        ConfigurationError: Somebody else has registered the name.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    for interface, ours in ((AttentionInterface, forward), (AttentionMaskInterface, mask)):
        there = interface._global_mapping.get(name)
        if there is not None and there is not ours:
            raise ConfigurationError(
                f"register_attention: transformers has another {name!r}, {there!r}; "
                "register under a name of your own"
            )
    AttentionInterface.register(name, forward)
    AttentionMaskInterface.register(name, mask)


def unregister_attention(name: str = NAME) -> None:
    """Take ``name`` out of transformers again; models that still ask for it fail with its name."""
    from transformers import AttentionInterface, AttentionMaskInterface

    for interface, ours in ((AttentionInterface, forward), (AttentionMaskInterface, mask)):
        if interface._global_mapping.get(name) is ours:
            del interface._global_mapping[name]


# --- masks ---


def mask(
    batch_size: int,
    kv_length: int,
    q_length: int | None = None,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    cache_position: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **options: Any,
) -> Tensor | None:
    """Ranges of keys, ``(B, 1, queries, 2 or 4)`` int32; None for a plain mask, or a dense one."""
    from transformers.masking_utils import (
        bidirectional_mask_function,
        causal_mask_function,
        sdpa_mask,
    )

    if cache_position is not None:  # where the queries stand is known to the device alone
        q_length, q_offset = len(cache_position), cache_position[0]
    assert q_length is not None
    queries = q_length
    if not _tracing() and attention_mask is not None and attention_mask.shape[-1] >= kv_length:
        attention_mask = None if bool(attention_mask.all()) else attention_mask
    last = isinstance(q_offset, int) and q_offset + queries == kv_length + kv_offset
    if attention_mask is None and (last or queries == kv_length):
        if mask_function is causal_mask_function and allow_is_causal_skip:
            return None
        if mask_function is bidirectional_mask_function and allow_is_bidirectional_skip:
            return None

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

    return _compressed(dense)


def _tracing() -> bool:
    return torch.compiler.is_compiling()


def _compressed(dense: Callable[[], Iterator[Tensor]]) -> Tensor:
    """The ranges of the rows of a dense mask that comes in parts, or the mask itself."""
    parts = [_one_range(part) for part in dense()]
    ranges, exact = (torch.cat(each, 2) for each in zip(*parts, strict=True))
    if _tracing():
        torch._assert_async(
            exact.all(), "attention: under a compiler, padding must be at one end of a sequence"
        )
        return ranges
    if bool(exact.all()):
        return ranges
    parts = [_two_ranges(part) for part in dense()]
    ranges, exact = (torch.cat(each, 2) for each in zip(*parts, strict=True))
    return ranges if bool(exact.all()) else torch.cat(list(dense()), 2)


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


# --- attention ---


def forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The attention of a layer, ``(B, L, H, E)``; windows and padding are all in the mask."""
    if dropout:
        raise ValueError(
            f"attn_implementation={NAME!r} has no dropout of probabilities, got {dropout}; set "
            "attention_dropout to 0 in the model's configuration, or use 'eager'"
        )
    for name in UNKNOWN:
        if others.get(name) is not None:
            raise ValueError(f"attn_implementation={NAME!r} does not support {name}; use 'eager'")
    kind = checks.autocast_dtype(value.device.type) or value.dtype
    q, k, v = (x.to(kind) for x in (query, key, value))
    if attention_mask is None or attention_mask.dtype == torch.int32:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        y = attention(
            q, k, v, causal=causal and attention_mask is None, sinks=s_aux, softcap=softcap,
            scale=scaling, ranges=None if attention_mask is None else attention_mask[:, 0],
        )  # fmt: skip
    else:
        y = _by_rows(q, k, v, attention_mask, scaling, softcap, s_aux)
    return y.transpose(1, 2), None


def _by_rows(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float | None, softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """Plain attention for a mask of any shape, in memory of L x S."""
    if "dense" not in _said:
        _said.add("dense")
        logger.warning(
            "attention: this mask is not made of one or two ranges of keys a query; it stays dense "
            "(%s), and scores of that size exist", tuple(seen.shape),
        )  # fmt: skip
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    s = (q @ k.mT).float() * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        s = torch.tanh(s / softcap) * softcap
    seen = seen[..., : k.shape[2]]
    s = s.masked_fill(~seen, torch.finfo(s.dtype).min) if seen.dtype == torch.bool else s + seen
    if sinks is not None:
        s = torch.cat([s, sinks.to(s)[None, :, None, None].expand(*s.shape[:3], 1)], -1)
    p = torch.softmax(s, -1)[..., : k.shape[2]].to(v.dtype)
    return (p @ v).transpose(1, 2).contiguous().transpose(1, 2)
