"""Models of shapes alone, with all of their layers or with a few."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from liger_multi.memory.estimation import meta_model
from liger_multi.memory.planning.applying import layers_of, mlps_of
from liger_multi.memory.planning.quantized import stand_in
from liger_multi.memory.planning.traces import DEPTH
from liger_multi.memory.simulation import on_meta


def _signature(layer: nn.Module) -> tuple[Any, ...]:
    return tuple(
        (name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in layer.named_parameters()
    )


class Shapes:
    """A configuration's or a model's architecture, copied as often as it is needed.

    Args:
        given: A Hugging Face configuration or model; nothing of it is changed.
        sequence: Tokens that are planned for.

    Attributes:
        count: Layers.
        layer_class: Class of a layer.
        has_mlps: Whether layers have MLPs that can run in tiles.
        quantized: Bytes of frozen weights that are stored in few bits.
        uniform: Whether all layers have equal parameters; may be set to False by who finds that
            they do not behave alike.
    """

    def __init__(self, given: Any, sequence: int) -> None:
        self.given = given
        self.is_model = isinstance(given, nn.Module)
        self.full = meta_model(given, _dtype(given), "sdpa", sequence)
        self.quantized = stand_in(self.full) if self.is_model else 0
        path, layers = layers_of(self.full)
        self.path, self.count = path, len(layers)
        self.layer_class = type(layers[0]).__name__
        self.uniform = len({_signature(layer) for layer in layers}) == 1
        self.has_mlps = bool(mlps_of(self.full))
        self.checked = False  # the first simulation has two middle layers, which are compared
        self._parts: dict[int, Any] = {1: self.full}
        self._sequence = sequence

    @property
    def config(self) -> Any:
        """The configuration."""
        return self.full.config

    @property
    def text(self) -> Any:
        """The configuration of its decoder."""
        return self.config.get_text_config()

    def model(self, dtype: torch.dtype, attention: str, parts: int = 1, whole: bool = False) -> Any:
        """A copy on the meta device, in training mode.

        Args:
            dtype: Of its parameters.
            attention: Implementation.
            parts: Devices that heads and inner rows of MLPs are divided over; this is one's share.
            whole: Whether it has all layers.
        """
        source = self._part(parts)
        path, layers = layers_of(source)
        parent, _, name = path.rpartition(".")
        holder: Any = source.get_submodule(parent)
        depth = DEPTH if self.checked else DEPTH + 1
        few = layers if whole or not self.uniform else layers[:depth]
        setattr(holder, name, few)
        try:
            model: Any = on_meta(source, dtype)
        finally:
            setattr(holder, name, layers)
        text = model.config.get_text_config()
        if len(few) < len(layers):
            text.num_hidden_layers = len(few)
        model.config._attn_implementation = "eager" if attention == "eager" else "sdpa"
        return model.train()

    def _part(self, parts: int) -> Any:
        if parts not in self._parts:
            config = copy.deepcopy(self.config)
            text = config.get_text_config()
            if getattr(text, "head_dim", None) is None:
                text.head_dim = text.hidden_size // text.num_attention_heads
            for field in divided(text):
                setattr(text, field, max(1, getattr(text, field) // parts))
            self._parts[parts] = meta_model(config, _dtype(self.given), "sdpa", self._sequence)
        return self._parts[parts]

    def divisible(self, parts: int) -> bool:
        """Whether tensor parallelism over ``parts`` devices cuts this model evenly."""
        if parts == 1:
            return True
        if self.is_model and any(not p.requires_grad for p in self.full.parameters()):
            return False  # adapters would have to be divided as well
        names = divided(self.text)
        return bool(names) and all(getattr(self.text, n) % parts == 0 for n in names)


def divided(text: Any) -> Sequence[str]:
    """Fields of a configuration that tensor parallelism divides."""
    names = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
    return [name for name in names if isinstance(getattr(text, name, None), int)]


def _dtype(given: Any) -> torch.dtype:
    if isinstance(given, nn.Module):
        sizes: dict[torch.dtype, int] = {}
        for p in given.parameters():
            if p.is_floating_point():
                sizes[p.dtype] = sizes.get(p.dtype, 0) + p.numel()
        return max(sizes, key=sizes.__getitem__, default=torch.bfloat16)
    return torch.bfloat16
