"""What stands in on the meta device for attention, and for autocast, which it has none of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.library import Library
from torch.overrides import TorchFunctionMode

from liger_multi.memory.recorder import Recorder

NAMESPACE = "liger_multi_stand_in"


def _attend(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Result and normalizer of a flash attention kernel."""
    shape = (*query.shape[:-1], value.shape[-1])
    order = (0, 2, 1, 3) if query.ndim == 4 else tuple(range(query.ndim))
    out = query.new_empty([shape[i] for i in order]).permute(order)
    return out, query.new_empty(query.shape[:-1], dtype=torch.float32)


# an operator, so that policies of recomputation meet it by its name
_LIBRARY = Library(NAMESPACE, "DEF")
_LIBRARY.define(
    "scaled_dot_product_attention(Tensor query, Tensor key, Tensor value) -> (Tensor, Tensor)"
)
_LIBRARY.impl("scaled_dot_product_attention", _attend, "CompositeExplicitAutograd")


class _Attention(torch.autograd.Function):
    """What a flash attention kernel allocates."""

    @staticmethod
    def forward(
        ctx: Any, recorder: Recorder, query: Tensor, key: Tensor, value: Tensor, mask: Any
    ) -> Tensor:
        ctx.recorder = recorder
        out: Tensor
        attend = getattr(torch.ops, NAMESPACE).scaled_dot_product_attention
        out, normalizer = attend(query, key, value)
        ctx.save_for_backward(query, key, value, out, normalizer, mask)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:
        query, key, value, _, normalizer, _ = ctx.saved_tensors

        def make() -> tuple[Tensor, ...]:
            partial = torch.empty_like(query, dtype=torch.float32)  # of the gradient of the query
            rows = torch.empty_like(normalizer)
            # a head of keys that several heads of queries share has a gradient of each first
            shared = query.ndim == 4 and key.shape[1] != query.shape[1]
            each = [t.new_empty(query.shape[1], *t[:, 0].shape) for t in (key, value) if shared]
            made = tuple(torch.empty_like(t) for t in (query, key, value))
            del partial, rows, each
            return made

        named = "scaled_dot_product_attention_backward"
        return None, *ctx.recorder.named(named, make), None


_attention: Any = _Attention.apply


def _spelled_out(device_type: str, given: Mapping[str, Any]) -> bool:
    """Whether PyTorch has no fused kernel on a GPU and keeps rows x columns of every head.

    The one for fp32 takes no groups of heads.
    """
    query, key = given["query"], given["key"]
    grouped = given.get("enable_gqa") and query.shape[-3] != key.shape[-3]
    return device_type != "cpu" and query.dtype == torch.float32 and bool(grouped)


_PRODUCTS = {
    *(nn.functional.linear, torch.matmul, torch.mm, torch.bmm, torch.addmm, torch.baddbmm),
    *(Tensor.matmul, Tensor.__matmul__, Tensor.mm, Tensor.bmm),
    nn.functional.scaled_dot_product_attention,
}


class MetaImplementations(TorchFunctionMode):
    """Answer for ``F.scaled_dot_product_attention``, and cast for products as autocast does."""

    def __init__(
        self, recorder: Recorder, target: str, autocast: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self._recorder, self._target, self._autocast = recorder, target, autocast
        self.casts: dict[int, Tensor] = {}

    def _cast(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dtype != torch.float32:
            return value
        if not isinstance(value, nn.Parameter):
            return value.to(self._autocast)
        if id(value) not in self.casts:  # autocast keeps those of weights until it ends
            self.casts[id(value)] = value.to(self._autocast)
        return self.casts[id(value)]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Everything else passes."""
        kwargs = kwargs or {}
        if self._autocast is not None and func in _PRODUCTS:
            args = tuple(self._cast(a) for a in args)
            kwargs = {name: self._cast(a) for name, a in kwargs.items()}
        if func is nn.functional.scaled_dot_product_attention:
            names = ("query", "key", "value", "attn_mask")
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            if _spelled_out(self._target, given):
                return func(*args, **kwargs)
            return _attention(self._recorder, *(given.get(name) for name in names))
        return func(*args, **kwargs)
