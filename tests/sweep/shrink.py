"""Tiny configurations of any model type: the numbers of a default one, made small by their names.

``RULES`` says how; what a model type needs beside it stands in :mod:`sweep.cases`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

HIDDEN, HEADS, PAIRS_OF_HEADS, HEAD, INNER = 64, 4, 2, 16, 96
VOCABULARY = 211  # a prime, so that no other axis is mistaken for it
LAYERS = 2

Number = Callable[[int, Any], int]


def _at_most(limit: int) -> Number:
    return lambda old, _: min(old, limit)


def _exactly(value: int) -> Number:
    return lambda old, _: value if old > 0 else old


def _key_heads(old: int, config: Any) -> int:
    every = getattr(config, "num_attention_heads", None)
    return old if old <= 1 else (HEADS if old == every else PAIRS_OF_HEADS)


def _layers(old: int, config: Any) -> int:
    return min(old, LAYERS)


# The first pattern that matches an attribute decides; None leaves it.
RULES: tuple[tuple[str, Number | None], ...] = (
    (r"^_?(num_labels|type_vocab_size|num_channels|.*_channels$|.*version.*)", None),
    (r"(_stride|_factor|_frequency|_interval|_period|_offset|_step|_ratio|kernel_size)$", None),
    (r"(vocab_size|codebook_size|num_embeddings|entity_vocab_size)$", _at_most(VOCABULARY)),
    (r"^vocab_size_per_layer_input$", _at_most(VOCABULARY)),
    (r"^(num_kv_shared_layers|num_nextn_predict_layers|.*mtp.*)$", _exactly(0)),
    (r"^(first_k_dense_replace|num_dense_layers)$", _at_most(1)),
    (r"^(max_window_layers|moe_layer_end_index|rescale_every)$", _at_most(LAYERS)),
    (
        (
            r"^(n_layers?|.*num_(.*_)?layers|.*(encoder|decoder|attention)_layers|layers|depth|.*_depth"
            r"|num_self_attends_per_block|num_feedforward_networks|num_hidden_groups)$"
        ),
        _layers,
    ),
    (
        r"(experts_per_tok(en)?|moe_topk|moe_k|moe_top_k|top_k_experts|num_selected_experts)$",
        _at_most(2),
    ),
    (r"(num_shared_experts|n_shared_experts)$", _at_most(1)),
    (
        r"(num_experts|n_routed_experts|num_local_experts|moe_num_experts|zero_expert_num)$",
        _at_most(4),
    ),
    (r"^(n_group|topk_group|num_expert_group|limited_.*groups?)$", _at_most(1)),
    (r"(kv_heads|key_value_heads|kv_n_heads|query_groups)$", _key_heads),
    (r"(num_heads|n_heads?|attention_heads|_heads|n_head|num_attn_heads)$", _at_most(HEADS)),
    (r"^(qk_rope_head_dim|rotary_dim)$", _at_most(8)),
    (r"^(qk_nope_head_dim)$", _at_most(8)),
    (r"^(qk_head_dim|v_head_dim|index_head_dim)$", _at_most(HEAD)),
    (
        r"(head_dim|dim_head|d_head|d_kv|head_size|kv_channels|headdim|attention_head_dim)$",
        _at_most(HEAD),
    ),
    (r"(lora_rank|lowrank|rank)$", _at_most(16)),
    (
        (
            r"^(.*max.*position.*|max_seq_len|n_positions|n_ctx|context_length|model_max_length"
            r"|max_(source|target)_positions)$"
        ),
        _at_most(128),
    ),
    (r"(sliding_window|window_size|local_attention|chunk_size|attention_window)$", _at_most(8)),
    (r"(image_size|resolution|img_size|crop_size)$", _at_most(32)),
    (r"(patch_size)$", _at_most(8)),
    (r"(state_size|d_state)$", _at_most(16)),
    (
        (
            r"(intermediate_size|ffn_dim|d_ff|dim_ff|dff|mlp_dim|ffn_hidden_size|n_inner|d_inner|inner_dim"
            r"|feed_forward_size|intermediate_size_mlp|share_expert_dim|moe_hidden_size)$"
        ),
        _at_most(INNER),
    ),
    (
        (
            r"(hidden_size|d_model|n_embd|embed_dim|hidden_dim|embedding_size|embed_proj_dim|emb_dim"
            r"|projection_dim|proj_dim|_dim|^dim|out_hidden_size|d_latents|lru_width|emb_size"
            r"|embedding_dim)$"
        ),
        _at_most(HIDDEN),
    ),
)
TOKEN = re.compile(r"(token_id|token_index|_id|_idx|_index|tokens?_ids?)$")
DROP = re.compile(r"drop|jitter")


def shrink(config: Any, built: tuple[str, ...] = ()) -> Any:
    """``config`` with small numbers, in place; configurations within it as well.

    Args:
        config: A configuration of transformers.
        built: Model types that are small already.
    """
    from transformers import PreTrainedConfig

    if config.model_type in built:
        return config

    old_layers = getattr(config, "num_hidden_layers", None)
    renamed: dict[int, int] = {}
    before = dict(vars(config))
    for name, value in before.items():
        if isinstance(value, PreTrainedConfig):
            shrink(value, built)
        elif isinstance(value, float) and DROP.search(name):
            setattr(config, name, 0.0)
        elif isinstance(value, int) and not isinstance(value, bool):
            made = _number(config, name, value, renamed, before)
            if made != value:
                setattr(config, name, made)
    _lists(config, before, old_layers)
    _rope(config)
    return config


def _number(config: Any, name: str, old: int, renamed: dict[int, int], before: Any) -> int:
    if TOKEN.search(name):
        if old < 150:
            return old
        return renamed.setdefault(old, VOCABULARY - 1 - len(renamed))
    view = type("View", (), before)
    for pattern, rule in RULES:
        if re.search(pattern, name):
            return old if rule is None else rule(old, view)
    return old


def _lists(config: Any, before: dict[str, Any], old_layers: int | None) -> None:
    """Lists of a value a layer: the first of every kind, so that each is there."""
    long = {
        n: list(v)
        for n, v in before.items()
        if isinstance(v, (list, tuple)) and old_layers and len(v) == old_layers and old_layers > 1
    }
    if not long:
        return
    rows = list(zip(*long.values()))
    chosen: list[int] = []
    for at, row in enumerate(rows):
        if repr(row) not in {repr(rows[i]) for i in chosen} and len(chosen) < 4:
            chosen.append(at)
    while len(chosen) < LAYERS:
        chosen.append(next(i for i in range(len(rows)) if i not in chosen))
    for name, values in long.items():
        setattr(config, name, [_value(name, values[i]) for i in sorted(chosen)])
    config.num_hidden_layers = len(chosen)


def _value(name: str, value: Any) -> Any:
    if isinstance(value, int) and not isinstance(value, bool):
        for pattern, rule in RULES:
            if re.search(pattern, re.sub(r"_per_layer$", "", name)):
                return value if rule is None else rule(value, None)
    return value


def _rope(config: Any) -> None:
    """Sections and factors a channel, cut to the channels that there are."""
    heads, width = _read(config, "num_attention_heads"), _read(config, "hidden_size")
    head = _read(config, "head_dim") or (
        width // heads if isinstance(heads, int) and isinstance(width, int) and heads else None
    )
    for name in ("rope_parameters", "rope_scaling"):
        _rope_dict(getattr(config, name, None), head)


def _read(config: Any, name: str) -> Any:
    """An attribute; None also where layers differ in it, of which a configuration may say so."""
    try:
        return getattr(config, name, None)
    except Exception as error:
        if "per-layer" not in str(error):
            raise
        return None


def _rope_dict(found: Any, head: int | None) -> None:
    if not isinstance(found, dict) or not isinstance(head, int):
        return
    pairs = int(head * (found.get("partial_rotary_factor") or 1.0)) // 2
    for key, value in list(found.items()):
        if isinstance(value, dict):
            _rope_dict(value, head)
        elif key == "mrope_section":
            total = sum(value)
            parts = [max(1, v * pairs // total) for v in value[1:]]
            found[key] = [pairs - sum(parts), *parts]
        elif key in ("long_factor", "short_factor"):
            found[key] = list(value[:1]) * pairs
