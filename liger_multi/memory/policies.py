"""Which results of a decoder layer are kept for backward, and which are computed again.

A policy is told by names of operators: PyTorch's products and attention, and ours. What a policy
keeps is the *result* of an operator; backward then runs the layer forwards once more, in which a
kept result is looked up and everything else is computed, up to the last tensor that is needed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any

import torch

from liger_multi.errors import unknown

# Products with weights. Batched ones without are attention spelled out: as large as its scores.
PRODUCTS = (
    *("aten::mm", "aten::addmm", "aten::linear", "aten::_scaled_mm", "aten::_grouped_mm"),
    *("aten::convolution", "aten::mkldnn_linear*", "bitsandbytes::*", "liger_multi::fused_moe_*"),
)
ATTENTION = (
    *(
        "*scaled_dot_product_*",
        "aten::_flash_attention_forward",
        "flash_attn*::*",
        "flex_attention",
    ),
    *("aten::_efficient_attention_forward", "liger_multi::*attention_forward"),
)
# Gated activations of ours are in no list: their operators compute them again as they are.
ACTIVATIONS = (
    *("aten::silu", "aten::gelu", "aten::relu", "aten::sigmoid", "aten::tanh", "aten::hardswish"),
    "liger_multi::relu_squared_*",
)


@dataclass(frozen=True)
class Policy:
    """What a layer keeps.

    Attributes:
        name: As in :data:`POLICIES`.
        description: In one line.
        keeps: Patterns of names of operators (``namespace::name``) whose results are kept; all
            others are computed again. None: nothing is.
        widening: Whether products that make a row longer are kept too.
    """

    name: str
    description: str
    keeps: tuple[str, ...] | None = ()
    widening: bool = True

    def keep(self, op: str, width: tuple[int, int] | None = None) -> bool:
        """Whether the result of an operator is kept.

        Args:
            op: ``namespace::name``.
            width: Of a product: columns that go in and that come out.
        """
        if self.keeps is None:
            return True
        if width is not None and not self.widening and width[1] > width[0]:
            return False
        return any(fnmatchcase(op, pattern) for pattern in self.keeps)


POLICIES: Mapping[str, Policy] = MappingProxyType(
    {
        policy.name: policy
        for policy in (
            Policy("none", "keep what autograd keeps; compute nothing again", None),
            Policy(
                "norms",
                "compute norms, rotary embeddings and sums again; keep products, attention and "
                "activations",
                PRODUCTS + ATTENTION + ACTIVATIONS,
            ),
            Policy(
                "norms_and_mlp",
                "keep products and attention; compute everything else again",
                PRODUCTS + ATTENTION,
            ),
            Policy(
                "narrow",
                "keep attention and products that are no wider than their input; compute the inner "
                "tensors of the MLP again",
                PRODUCTS + ATTENTION,
                widening=False,
            ),
            Policy("keep_attention", "keep attention; compute everything else again", ATTENTION),
            Policy("full", "keep the layer's input only"),
        )
    }
)
"""By name, from the fewest to the most that is computed again."""


def policy_of(given: str | Policy) -> Policy:
    """A policy by its name, or as it is."""
    if isinstance(given, Policy):
        return given
    if given not in POLICIES:
        raise ValueError(unknown("recompute policy", given, POLICIES))
    return POLICIES[given]


def _name(func: Any) -> str:
    """``namespace::name`` without the overload; a higher-order operator has a bare name."""
    name = func.name() if callable(getattr(func, "name", None)) else str(func)
    return str(name).partition(".")[0]


@functools.cache
def _kept(policy: Policy, func: Any, width: tuple[int, int] | None) -> bool:
    return policy.keep(_name(func), width)


@functools.cache
def _is_product(func: Any) -> bool:
    return any(fnmatchcase(_name(func), pattern) for pattern in PRODUCTS)


@functools.cache
def _randomness(func: Any) -> int | None:
    """Where the chance of dropout stands in an operator that may draw numbers; -1: it always does.

    None: it never does.
    """
    tags = getattr(func, "tags", ())
    if torch.Tag.nondeterministic_seeded not in tags:
        return None
    names = [argument.name for argument in func._schema.arguments]
    return names.index("dropout_p") if "dropout_p" in names else -1


def _draws(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call takes random numbers: one that did must run again, or later ones differ."""
    place = _randomness(func)
    if place is None:
        return False
    if place < 0:
        return True
    given = args[place] if place < len(args) else kwargs.get("dropout_p", 0.0)
    return bool(given)


def _width(args: tuple[Any, ...]) -> tuple[int, int] | None:
    """Columns of the input and of the result of a product; its last two matrices are factors."""
    factors = [a for a in args[:3] if isinstance(a, torch.Tensor) and a.ndim > 1]
    return (factors[-2].shape[-1], factors[-1].shape[-1]) if len(factors) > 1 else None


def keeps(policy: Policy, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether the result of this call of an operator is kept."""
    width = _width(args) if not policy.widening and _is_product(func) else None
    return _kept(policy, func, width) and not _draws(func, args, kwargs)


# Backward of these reads nothing: what comes before them at the end of a layer is not needed.
_UNREAD = (
    *("aten::add", "aten::view", "aten::_unsafe_view", "aten::reshape", "aten::t", "aten::detach"),
    *("aten::transpose", "aten::permute", "aten::_reshape_alias", "aten::alias", "aten::expand"),
)


@functools.cache
def _unread(func: Any) -> bool:
    return _name(func) in _UNREAD


class Counted:
    """A policy within one run of a layer, which leaves out a last product that nobody reads.

    Args:
        policy: Of the layer.
        skip: Number of the kept call that :attr:`last` was in an earlier run.

    Attributes:
        last: Number of the kept call that is a product and is followed by nothing that keeps it.
    """

    def __init__(self, policy: Policy, skip: int | None) -> None:
        self._policy, self._skip = policy, skip
        self._counts = [0, 0]
        self.last: int | None = None

    def __call__(self, context: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
        """PyTorch's question about one operator."""
        from torch.utils.checkpoint import CheckpointPolicy

        again = int(context.is_recompute)
        if not keeps(self._policy, func, args, kwargs):
            if not again and not _unread(func):
                self.last = None
            return CheckpointPolicy.PREFER_RECOMPUTE
        number = self._counts[again]
        self._counts[again] += 1
        if not again:
            self.last = number if _is_product(func) else None
        if number == self._skip:
            return CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.MUST_SAVE


def traced(policy: Policy) -> Callable[..., Any]:
    """A policy for a compiler, which asks while it traces and drops what nobody reads by itself.

    A function is all that Dynamo sees: it would take an argument apart and build it again, and
    what PyTorch 2.9 (of a dataclass) and 2.11 (of a named tuple) build is not what was given.
    """
    from torch.utils.checkpoint import CheckpointPolicy

    def answer(context: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
        if keeps(policy, func, args, kwargs):
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return answer
