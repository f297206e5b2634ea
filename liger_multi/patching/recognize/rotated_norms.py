"""Attention modules whose norms of queries and keys may be computed with the rotation.

Between a norm and the rotation a module may do more: clip, scale, use what it normalized. So a
replica runs its own forward and the one that has both in one operator, and outputs and gradients
are compared.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from liger_multi.patching.options import ROTATED
from liger_multi.patching.recognize.probe import (
    Watch,
    disagreement,
    linear,
    probe_context,
    random,
    scalars,
    skeleton,
)
from liger_multi.patching.replace.rotated_norms import ANGLES, copied, norm_of
from liger_multi.patching.replace.swap import unpatched_class
from liger_multi.patching.watch import executed

HIDDEN, TOKENS = 24, 5
LAST = ("o_proj", "out_proj", "dense")
"""Names of the layer that makes hidden states of what the heads return."""


class Probed:
    """What the probes of one patch call said; layers that are alike are tried once."""

    def __init__(self) -> None:
        self._known: dict[Any, list[tuple[dict[str, Any], str | None]]] = {}

    def refusal(
        self, module: nn.Module, patched: type[nn.Module], norms: tuple[str, str]
    ) -> str | None:
        """Why norms and rotation of a module stay apart, or None.

        Args:
            module: An attention module whose norms are patched.
            patched: The class that it would get.
            norms: The names of its norms.
        """
        key, own = _key(module, patched), dict(scalars(module))
        for read, said in self._known.get(key, ()):
            if all(own.get(name, _NOTHING) == value for name, value in read.items()):
                return said
        watch = Watch()
        said = _refusal(module, patched, norms, watch)
        read = {name: value for name, value in own.items() if name in watch.read}
        self._known.setdefault(key, []).append((read, said))
        return said


_NOTHING = object()


def _key(module: nn.Module, patched: type[nn.Module]) -> Any:
    """What modules have in common that are alike, but for numbers that their forwards read."""
    parts = tuple(
        (name, type(part), scalars(part), tuple(tuple(p.shape) for p in part.parameters(False)))
        for name, part in module._modules.items()
        if part is not None
    )
    kinds = tuple(sorted((n, type(v).__name__) for n, v in vars(module).items()))
    return patched, id(getattr(module, "config", None)), parts, kinds


def _refusal(
    module: nn.Module, patched: type[nn.Module], norms: tuple[str, str], watch: Watch
) -> str | None:
    kind = unpatched_class(module)
    if copied(cast(Any, kind), norms) is None:
        return "its norms and its rotary function are not called as the operator has them"
    if any(norm_of(module._modules.get(name)) is None for name in norms):
        return "its norms are none that the operator has"
    width = getattr(module, "head_dim", None)
    if not isinstance(width, int) or width % 2:
        return f"its head_dim is {width!r}, not an even number"
    if _turns_in_part(getattr(module, "config", None)):
        return "only a part of its channels turns"
    try:
        with probe_context() as generator:
            replica = _replica(module, generator)
            with watch.over(replica):
                return _compared(module, replica, patched, width, norms, generator)
    except Exception as error:  # somebody's forward: failing, it is not one of this form
        return f"its forward failed on a replica: {type(error).__name__}: {error}"


def _turns_in_part(config: Any) -> bool:
    """Whether a configuration gives its rotary embedding a part of the channels."""
    given = getattr(config, "rope_parameters", None)
    given = given if isinstance(given, dict) else {}
    tables = [given, *(one for one in given.values() if isinstance(one, dict))]
    factors = [table.get(_FACTOR) for table in tables] + [getattr(config, _FACTOR, None)]
    return any(factor not in (None, 1) for factor in factors)


_FACTOR = "partial_rotary_factor"


class _Eager:
    """A configuration that asks for the attention of the modeling file."""

    _attn_implementation = "eager"

    def __init__(self, config: Any) -> None:
        self.config = config

    def __getattr__(self, name: str) -> Any:
        return getattr(self.config, name)


def _replica(module: nn.Module, generator: torch.Generator) -> Any:
    """A copy whose hidden states are narrow; heads are as many and as wide as the module's."""
    replica = skeleton(module)
    if "config" in vars(replica):
        replica.__dict__["config"] = _Eager(replica.config)
    _with_weights(replica, module, generator)
    for name, part in module._modules.items():
        if part is None:
            continue
        if hasattr(part, "in_features"):
            layer: Any = part
            last = name in LAST
            inside, out = (layer.in_features, HIDDEN) if last else (HIDDEN, layer.out_features)
            bias = getattr(layer, "bias", None) is not None
            replica._modules[name] = linear(generator, inside, out, bias)
        else:
            made = skeleton(part)
            _with_weights(made, part, generator)
            replica._modules[name] = made
    return replica


def _with_weights(made: nn.Module, like: nn.Module, generator: torch.Generator) -> None:
    """Give random weights to a skeleton."""
    for name, p in like._parameters.items():
        if p is not None:
            made._parameters[name] = nn.Parameter(random(generator, *p.shape))


def _compared(
    module: nn.Module,
    replica: Any,
    patched: type[nn.Module],
    width: int,
    norms: tuple[str, str],
    generator: torch.Generator,
) -> str | None:
    cos, sin = (random(generator, 1, TOKENS, width).cos() for _ in range(2))
    takes = inspect.signature(unpatched_class(module).forward).parameters
    rest = {"attention_mask": None} if "attention_mask" in takes else {}

    def stock(x: Tensor) -> Any:
        return _first(replica.forward(x, **{ANGLES: (cos, sin)}, **rest))

    def ours(x: Tensor) -> Tensor:
        with _as(module, replica, patched, norms):
            return cast(Tensor, _first(replica.forward(x, **{ANGLES: (cos, sin)}, **rest)))

    def close(a: Tensor, b: Tensor) -> bool:
        return torch.allclose(a, b, rtol=1e-4, atol=1e-5)

    x = random(generator, 2, TOKENS, HIDDEN)
    with executed(replica) as seen:
        said = disagreement(replica, stock, ours, [x], close, generator)
    if said and not seen.calls[ROTATED]:
        return "it rotates nothing: a layer without positions"
    return said and f"it does more than normalize and then rotate: {said}"


def _first(output: Any) -> Any:
    return output[0] if isinstance(output, tuple) else output


@contextmanager
def _as(
    module: nn.Module, replica: Any, patched: type[nn.Module], norms: tuple[str, str]
) -> Iterator[None]:
    """The replica and its norms with the classes of the patch."""
    parts: list[tuple[Any, type]] = [(replica, patched)]
    parts += [(replica._modules[name], type(module._modules[name])) for name in norms]
    before = [type(part) for part, _ in parts]
    for part, kind in parts:
        part.__class__ = kind
    try:
        yield
    finally:
        for (part, _), kind in zip(parts, before, strict=True):
            part.__class__ = kind
