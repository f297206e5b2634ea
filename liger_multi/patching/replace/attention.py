"""``attn_implementation="liger_multi"``: the attention operator in transformers' interfaces.

transformers asks two functions of one name: a mask function, once per forward pass and kind of
layer (:mod:`liger_multi.patching.replace.attention_masks`), and the attention function here, once
per layer. Three checks keep a model from computing something else than its eager attention:

* When a model asks for the name, its class must call the attention interface
  (:mod:`liger_multi.patching.recognize.attention_support`).
* The mask raises when other code than :func:`forward` reads it.
* :func:`forward` refuses masks and keyword arguments that it does not know.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
from torch import Tensor

from liger_multi import checks
from liger_multi.dispatch.primitive import constant_in_graphs
from liger_multi.errors import ConfigurationError
from liger_multi.ops.attention import attention
from liger_multi.patching.recognize import attention_support
from liger_multi.patching.replace.attention_masks import NAME, KeyMask, mask

REFUSED = ("position_bias", "head_mask", "score_mod", "alibi")  # change scores, by names in use
HARMLESS = (
    *("use_cache", "return_dict", "position_ids", "cache_position", "labels", "logits_to_keep"),
    *("output_attentions", "output_hidden_states", "output_router_logits", "num_items_in_batch"),
    # windows and packed sequences are in the mask
    *("sliding_window", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"),
)
logger = logging.getLogger("liger_multi")
_said: set[str] = set()


def register_attention(name: str = NAME) -> None:
    """Make ``attn_implementation=name`` this library's attention, for models that can use it.

    Models that do not ask for the name are not affected. A model that asks for it without calling
    transformers' attention interface is refused. Registering twice is registering once.

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
    attention_support.watch(name)


def unregister_attention(name: str = NAME) -> None:
    """Take ``name`` out of transformers again; models that still ask for it fail with its name."""
    from transformers import AttentionInterface, AttentionMaskInterface

    for interface, ours in ((AttentionInterface, forward), (AttentionMaskInterface, mask)):
        if interface._global_mapping.get(name) is ours:
            del interface._global_mapping[name]
    attention_support.unwatch(name)


def forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | KeyMask | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The attention of a layer, ``(B, L, H, E)``; windows and padding are all in the mask.

    Raises:
        ValueError: Dropout, a keyword argument or a mask that this implementation does not know, or
            no mask where the layer needs one.
    """
    if dropout:
        raise ValueError(
            f"attn_implementation={NAME!r} has no dropout of probabilities, got {dropout}; set "
            "attention_dropout to 0 in the model's configuration, or use 'eager'"
        )
    for name, given in others.items():
        if given is not None and name not in HARMLESS and _changes_scores(type(module), name):
            raise _refusal(module, f"does not support {name}")
    kind = checks.autocast_dtype(value.device.type) or value.dtype
    q, k, v = (x.to(kind) for x in (query, key, value))
    if isinstance(attention_mask, Tensor):
        _dense_fits(module, q, k, attention_mask)
        y = _by_rows(q, k, v, attention_mask, scaling, softcap, s_aux)
    else:
        seen = attention_mask
        if seen is None:
            seen = KeyMask(
                (q.shape[0], 1, q.shape[2], k.shape[2]),
                causal=_causal_without_mask(module, q, k, is_causal, others),
            )
        _mask_fits(module, q, k, seen, is_causal, others)
        if seen.dense is not None:
            y = _by_rows(q, k, v, seen.dense, scaling, softcap, s_aux)
        else:
            y = attention(
                q, k, v, causal=seen.causal, sinks=s_aux, softcap=softcap, scale=scaling,
                ranges=seen.ranges,
            )  # fmt: skip
    return y.transpose(1, 2), None


@constant_in_graphs
def _changes_scores(layer: type, name: str) -> bool:
    """Whether a keyword argument may matter: eager attention of the layer's file is not without it.

    Models pass on what they do not know themselves, such as the token types of a tokenizer; eager
    attention swallows it. Where there is no eager attention to compare with, it may matter.
    """
    return _known_changes(layer, name)


@functools.lru_cache(maxsize=1024)
def _known_changes(layer: type, name: str) -> bool:
    eager = attention_support.eager_functions(layer)
    return (
        name in REFUSED
        or not eager
        or any(name in attention_support.names_read(function) for function in eager)
    )


def _refusal(module: torch.nn.Module, reason: str) -> ValueError:
    return ValueError(
        f"attn_implementation={NAME!r} {reason}, asked by {type(module).__name__}; use 'eager'"
    )


def _causal_without_mask(
    module: torch.nn.Module, q: Tensor, k: Tensor, is_causal: bool | None, others: dict[str, Any]
) -> bool:
    """What a layer without a mask sees: as SDPA, by ``is_causal``, but nothing is assumed."""
    queries, keys = q.shape[2], k.shape[2]
    window = others.get("sliding_window")
    if window is not None and keys > window and is_causal is not False:
        raise _refusal(module, f"needs a mask for a window of {window} in {keys} keys, got None")
    causal = getattr(module, "is_causal", None) if is_causal is None else is_causal
    if queries == 1 or causal is False:
        return False
    if causal is None:
        raise _refusal(module, "needs a mask, or is_causal as argument or attribute, got neither")
    if queries != keys:
        raise _refusal(module, f"needs a mask for {queries} queries of {keys} keys, got None")
    return True


def _mask_fits(
    module: torch.nn.Module,
    q: Tensor,
    k: Tensor,
    given: KeyMask,
    is_causal: bool | None,
    others: dict[str, Any],
) -> None:
    batch, _, queries, keys = given.shape
    if (queries, keys) != (q.shape[2], k.shape[2]) or batch not in (1, q.shape[0]):
        raise _refusal(
            module,
            f"got {given} for {q.shape[2]} queries and {k.shape[2]} keys, batch {q.shape[0]}",
        )
    if given.plain and is_causal is not None and queries > 1 and is_causal != given.causal:
        raise _refusal(module, f"got is_causal={is_causal}, which contradicts its mask, {given}")
    lengths = others.get("cu_seq_lens_q")
    if given.plain and lengths is not None and len(lengths) > 2:
        raise _refusal(
            module,
            f"got cu_seq_lens_q of {len(lengths) - 1} sequences with {given}, in which they are "
            "one; pass position_ids, and neither attention_mask nor past_key_values",
        )


def _dense_fits(module: torch.nn.Module, q: Tensor, k: Tensor, given: Tensor) -> None:
    """Refuse masks of which it is not certain how they are meant."""
    wanted = (*q.shape[:3], k.shape[2])
    known = given.dtype == torch.bool or given.is_floating_point()
    if not known or given.ndim != 4 or any(
        size not in (1, want) for size, want in zip(given.shape, wanted, strict=True)
    ):  # fmt: skip
        raise _refusal(
            module,
            f"needs a mask of bool or floating dtype that broadcasts to {tuple(wanted)}, got "
            f"{checks.describe(given)}",
        )


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
    s = s.masked_fill(~seen, torch.finfo(s.dtype).min) if seen.dtype == torch.bool else s + seen
    if sinks is not None:
        s = torch.cat([s, sinks.to(s)[None, :, None, None].expand(*s.shape[:3], 1)], -1)
    p = torch.softmax(s, -1)[..., : k.shape[2]].to(v.dtype)
    return (p @ v).transpose(1, 2).contiguous().transpose(1, 2)
