"""Models on the meta device, with all layers or a few, and facts that need no model.

The :class:`Facts` of an architecture are all that a plan needs besides simulations. They are plain
data, so that a plan whose simulations are known builds no model. Quantized frozen weights are
counted at their stored size, and dequantized for each GEMM.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from liger_multi.memory.estimation import blocks_of, meta_model
from liger_multi.memory.planning.applying import in_float8, layers_of, mlps_of
from liger_multi.memory.planning.store import Store
from liger_multi.memory.recorder import stored
from liger_multi.memory.setup import common_heads
from liger_multi.memory.simulation import on_meta
from liger_multi.memory.sizes import positions_of
from liger_multi.modules import parameters
from liger_multi.ops import QuantizedWeight

# --- frozen weights of few bits ---


class _Product(torch.autograd.Function):
    """Allocates like a GEMM with a quantized weight, in forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: int) -> Tensor:
        ctx.shape = rows, x.shape[-1]
        return nn.functional.linear(x, x.new_empty(rows, x.shape[-1]))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return dy @ dy.new_empty(ctx.shape), None


class Stored(nn.Module):
    """Stands in for a linear layer whose weight is quantized.

    Args:
        layer: The layer that it replaces; its stored tensors are kept as they are.
    """

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        for i, tensor in enumerate([*layer.parameters(), *layer.buffers()]):
            self.register_buffer(f"stored_{i}", tensor.detach())

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the right shape."""
        run: Any = _Product.apply
        return run(x, self.out_features)  # type: ignore[no-any-return]


def stored_bits(module: Any) -> bool:
    """Whether a module is a linear layer whose weight has fewer than 16 bits per element."""
    if not all(isinstance(getattr(module, n, None), int) for n in ("in_features", "out_features")):
        return False
    weight = parameters.stored(module)
    if weight is None or weight.requires_grad:
        return False
    elements: int = module.in_features * module.out_features
    return weight.element_size() < 2 or weight.numel() < elements


def stand_in(model: nn.Module) -> int:
    """Replace layers with quantized weights by :class:`Stored`; returns the bytes of those."""
    total = 0
    for path, module in list(model.named_modules()):
        if stored_bits(module):
            parent, _, name = path.rpartition(".")
            stored = Stored(module)
            setattr(model.get_submodule(parent), name, stored)
            total += sum(b.nbytes for b in stored.buffers())
    return total


# --- what is known of an architecture ---

DEPTH = 3  # layers of a short simulation: the first, one that stands for many, and the last
MAIN = ""  # stands for the dtype that most weights have


@dataclass(frozen=True)
class Weight:
    """The shape of a parameter.

    Attributes:
        shape: Its shape.
        requires_grad: Whether it is trained.
        dtype: Its dtype.
    """

    shape: tuple[int, ...]
    requires_grad: bool
    dtype: torch.dtype

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.numel() * self.dtype.itemsize

    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def element_size(self) -> int:
        """Bytes of an element."""
        return self.dtype.itemsize


Form = tuple[list[int], bool, str]
"""Shape, whether it is trained, and the dtype's name; :data:`MAIN` follows the precision."""


@dataclass
class Forms:
    """Parameters of a model.

    Attributes:
        layers: Parameters of every layer, or of one where all are equal.
        outside: Parameters outside of layers.
        blocks: Parameters of every distinct block that is sharded as one unit.
        root: Parameters of no block, which are sharded with the model itself.
    """

    layers: list[list[Form]]
    outside: list[Form]
    blocks: list[list[Form]]
    root: list[Form]

    @classmethod
    def of(cls, model: Any, layers: Iterable[nn.Module]) -> Forms:
        """Parameters of a model on the meta device."""
        main = main_dtype(model)

        def forms(parameters: Iterable[Any]) -> list[Form]:
            return [
                (list(t.shape), p.requires_grad, MAIN if t.dtype == main else str(t.dtype)[6:])
                for p in parameters
                for t in stored(p)
            ]

        def forms_outside(parts: Iterable[nn.Module]) -> list[Form]:
            inner_ids = {id(p) for part in parts for p in part.parameters()}
            return forms(p for p in model.parameters() if id(p) not in inner_ids)

        layer_list = list(layers)
        blocks = blocks_of(model)
        layer_forms = [forms(layer.parameters()) for layer in layer_list]
        block_forms = [forms(block.parameters()) for block in blocks]
        return cls(
            layer_forms[:1] if all(form == layer_forms[0] for form in layer_forms) else layer_forms,
            forms_outside(layer_list),
            [form for i, form in enumerate(block_forms) if form not in block_forms[:i]],
            forms_outside(blocks),
        )


def weights(forms: Iterable[Form], dtype: torch.dtype) -> list[Weight]:
    """Parameters whose main dtype is ``dtype``."""
    return [
        Weight(tuple(shape), trained, getattr(torch, dtype_name) if dtype_name else dtype)
        for shape, trained, dtype_name in forms
    ]


@dataclass
class Facts:
    """Facts about an architecture that a plan needs.

    Attributes:
        model_type: The model type of the configuration.
        count: Number of layers.
        layer_class: Class of a layer.
        uniform: Whether all layers have equal parameters and behave alike.
        checked: Whether a simulation has confirmed that.
        has_mlps: Whether layers have MLPs that can run in tiles.
        quantized: Bytes of quantized frozen weights.
        positions: The longest sequence that its configuration allows, if it names one.
        vocabulary: Entries of its vocabulary, or 0.
        hidden: The hidden size.
        divided: Fields of the configuration that tensor parallelism divides.
        heads: Number of heads that ranks sharing tokens must divide; 0 for any.
        adapted: Whether it is a model with frozen parameters, whose adapters cannot be divided.
        forms: Parameters, by the number of devices that they are divided over.
    """

    model_type: str
    count: int
    layer_class: str
    uniform: bool
    checked: bool
    has_mlps: bool
    quantized: int
    positions: int | None
    vocabulary: int
    hidden: int
    divided: dict[str, int]
    heads: int
    adapted: bool
    forms: dict[str, Forms] = field(default_factory=dict)

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> Facts:
        """From :meth:`as_data`."""
        forms = {
            parts: Forms(**fields_of_forms) for parts, fields_of_forms in data["forms"].items()
        }
        return cls(**{**data, "forms": forms})

    def as_data(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def divided(text: Any) -> Sequence[str]:
    """Fields of a configuration that tensor parallelism divides."""
    names = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
    return [name for name in names if isinstance(getattr(text, name, None), int)]


def main_dtype(model: nn.Module) -> torch.dtype:
    """The dtype of most elements of a model's floating-point parameters."""
    sizes: dict[torch.dtype, int] = {}
    for p in model.parameters():
        if p.is_floating_point():
            sizes[p.dtype] = sizes.get(p.dtype, 0) + p.numel()
    return max(sizes, key=sizes.__getitem__, default=torch.bfloat16)


# --- models of shapes ---


class Shapes:
    """A configuration's or a model's architecture, copied as often as it is needed.

    Args:
        config_or_model: A Hugging Face configuration or model, of which nothing is changed; or a
            function that returns one, which is called when the first model is built.
        sequence: Tokens that are planned for.
        store: Where earlier results about the architecture are kept.

    Attributes:
        facts: What is known without a model.
    """

    def __init__(self, config_or_model: Any, sequence: int, store: Store | None = None) -> None:
        self.store = store or Store()
        self._config_or_model, self._sequence = config_or_model, sequence
        self._parts: dict[int, Any] = {}
        self.quantized = 0
        self.facts = self.store.read("facts", "", Facts.from_data) or self._ask()
        self.quantized = self.facts.quantized

    def _ask(self) -> Facts:
        full, source = self._part(1), self._source()
        layers = layers_of(full)[1]
        text = full.config.get_text_config()
        frozen = any(not p.requires_grad for p in full.parameters())
        return Facts(
            model_type=str(getattr(full.config, "model_type", type(source).__name__)),
            count=len(layers),
            layer_class=type(layers[0]).__name__,
            uniform=len({_signature(layer) for layer in layers}) == 1,
            checked=False,
            has_mlps=bool(mlps_of(full)),
            quantized=self.quantized,
            positions=positions_of(full.config),
            vocabulary=getattr(text, "vocab_size", None) or 0,
            hidden=text.hidden_size,
            divided={name: getattr(text, name) for name in divided(text)},
            heads=common_heads(full.config),
            adapted=isinstance(source, nn.Module) and frozen,
        )

    def _source(self) -> Any:
        if callable(self._config_or_model) and not isinstance(self._config_or_model, nn.Module):
            self._config_or_model = self._config_or_model()
        return self._config_or_model

    @property
    def count(self) -> int:
        """Layers."""
        return self.facts.count

    @property
    def depth(self) -> int | None:
        """Simulated layers; the first simulation has one more, to compare middle layers."""
        if not self.facts.uniform:
            return None
        return DEPTH if self.facts.checked else DEPTH + 1

    def learn(self, uniform: bool) -> None:
        """Record whether middle layers behave alike."""
        self.facts.checked = True
        self.facts.uniform = self.facts.uniform and uniform

    def keep(self) -> None:
        """Write the facts to the store."""
        self.store.write("facts", "", self.facts.as_data())

    def forms(self, parts: int, float8: bool = False) -> Forms:
        """Parameters of one device, with heads and MLPs divided over several.

        Args:
            parts: Number of devices.
            float8: Whether frozen weights are kept in FP8.
        """
        cached, key = self.facts.forms, f"{parts}{' in FP8' * float8}"
        if key not in cached:
            full = self._part(parts)
            if float8:
                full = on_meta(full, torch.bfloat16)
                in_float8(full)
            cached[key] = Forms.of(full, layers_of(full)[1])
        return cached[key]

    def model(
        self, dtype: torch.dtype, attention: str, parts: int = 1, depth: int | None = None
    ) -> Any:
        """A copy on the meta device, in training mode.

        Args:
            dtype: Dtype of its parameters.
            attention: Attention implementation.
            parts: Devices that heads and inner rows of MLPs are divided over; this is one's share.
            depth: Number of layers; None: all.
        """
        source = self._part(parts)
        path, layers = layers_of(source)
        parent, _, name = path.rpartition(".")
        parent_module: Any = source.get_submodule(parent)
        first_layers = layers[:depth]
        setattr(parent_module, name, first_layers)
        try:
            model: Any = on_meta(source, dtype)
        finally:
            setattr(parent_module, name, layers)
        text = model.config.get_text_config()
        if len(first_layers) < len(layers):
            text.num_hidden_layers = len(first_layers)
        model.config._attn_implementation = "eager" if attention == "eager" else "sdpa"
        return model.train()

    def _part(self, parts: int) -> Any:
        if parts not in self._parts:
            self._parts[parts] = self._whole() if parts == 1 else self._divided(parts)
        return self._parts[parts]

    def _whole(self) -> Any:
        source = self._source()
        is_model = isinstance(source, nn.Module)
        dtype = main_dtype(source) if is_model else torch.bfloat16
        full = meta_model(source, dtype, "sdpa", self._sequence)
        codes = [p for p in full.parameters() if isinstance(p, QuantizedWeight)]
        self.quantized = stand_in(full) + sum(weight.stored_bytes for weight in codes)
        return full

    def _divided(self, parts: int) -> Any:
        full = self._part(1)
        config = copy.deepcopy(full.config)
        text = config.get_text_config()
        if getattr(text, "head_dim", None) is None:
            text.head_dim = text.hidden_size // text.num_attention_heads
        for name in divided(text):
            setattr(text, name, max(1, getattr(text, name) // parts))
        return meta_model(config, main_dtype(full), "sdpa", self._sequence)

    def divisible(self, parts: int) -> bool:
        """Whether tensor parallelism over ``parts`` devices cuts this model evenly."""
        if parts == 1:
            return True
        facts = self.facts
        sizes = facts.divided.values()
        return not facts.adapted and bool(sizes) and all(n % parts == 0 for n in sizes)


def _signature(layer: nn.Module) -> tuple[Any, ...]:
    return tuple(
        (name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in layer.named_parameters()
    )
