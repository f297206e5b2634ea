"""Norms of queries and keys and their rotation as one operator (QK-norm and RoPE).

A norm is called where the queries are made, and the rotation later, by another name. So the forward
of an attention module is copied once more (:mod:`liger_multi.patching.evidence.redirect`): in this
copy the norms pass their input on, and what stands for the rotary function has both modules with
the angles, and calls the norms with these.

Projections with adapters may be computed together in the same module, around the copy.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor, nn

from liger_multi.arguments import cache_parameter, has_cache
from liger_multi.patching.evidence import redirect
from liger_multi.patching.evidence.probe import (
    Watch,
    disagreement,
    linear,
    probe_context,
    random,
    scalars,
    skeleton,
)
from liger_multi.patching.evidence.signature import code_holds, globally_hooked, holds, is_watched
from liger_multi.patching.lora import SharedInput, in_one
from liger_multi.patching.norms import FusedNorm, NormSettings, Rotation, apply_rotated
from liger_multi.patching.options import ROTATED, Options, Request
from liger_multi.patching.report import Skipped, executed
from liger_multi.patching.rotary import FusedRotary, Rotary, recognized, rotary_calls
from liger_multi.patching.swap import (
    Change,
    Patched,
    Replace,
    Swap,
    made_class,
    swapped,
    unpatched_class,
)

NORMS = (
    ("q_norm", "k_norm"),
    ("q_layernorm", "k_layernorm"),
    ("query_layernorm", "key_layernorm"),
    ("qk_norm", "qk_norm"),
)
"""Names of the norms of queries and of keys."""
ANGLES = "position_embeddings"
"""The argument that has cos and sin."""
WIDEST = 8192
"""Channels of a norm of all heads that kernels keep in registers."""
_BARE = {name: f"_liger_multi_bare_{name}" for names in NORMS for name in names}


def names_of(module: nn.Module) -> tuple[str, str] | None:
    """The names of a module's norms of queries and keys, if it has both."""
    return next((names for names in NORMS if set(names) <= module._modules.keys()), None)


@dataclass(frozen=True)
class RotatedNormsSettings:
    """The options of the patch, and the names of both norms."""

    options: Options
    norms: tuple[str, str]


class Angles(NamedTuple):
    """Replaces cos in the copy: cos itself, the norms to apply before, options, settings."""

    cos: Tensor
    norms: tuple[Any, Any]
    options: Options
    settings: tuple[NormSettings, NormSettings]


class Copy(NamedTuple):
    """The copy of a forward.

    Attributes:
        run: The copy.
        made_from: The forward of the class, as it was copied.
        holds: Whether the rotary function is what it was.
        caches_get_cos: Whether it gives cos to a cache, which wants the tensor.
        updated: The argument of a cache that it updates and does nothing else with, or None.
    """

    run: FunctionType
    made_from: FunctionType
    holds: Callable[[], bool]
    caches_get_cos: bool
    updated: str | None


class CosForCache:
    """Stands for a cache in the copy, and hands the cache cos itself.

    Models of transformers 5.0 make a cache in training too, and hand it cos and sin.
    """

    def __init__(self, cache: Any) -> None:
        self._cache = cache

    def update(self, *args: Any, **kwargs: Any) -> Any:
        """The method of the cache."""
        args = tuple(_with_cos(value) for value in args)
        return self._cache.update(*args, **{n: _with_cos(v) for n, v in kwargs.items()})


def _with_cos(value: Any) -> Any:
    """An argument with cos itself in place of its replacement."""
    if not isinstance(value, dict):
        return value
    return {n: v.cos if isinstance(v, Angles) else v for n, v in value.items()}


class RotatedNorms(Patched):
    """An attention module whose queries and keys are normalized and rotated in one go."""

    _liger_multi_rotated: ClassVar[Copy | None]
    _liger_multi_below: ClassVar[tuple[Any, Any]]

    def __init_subclass__(cls, **keywords: Any) -> None:
        """Make the copy with the class."""
        super().__init_subclass__(**keywords)
        if "_liger_multi_swap" in vars(cls):
            swap: Swap = vars(cls)["_liger_multi_swap"]
            names = cast(RotatedNormsSettings, swap.around_settings).norms
            cls._liger_multi_rotated = copied(cast(Any, swap.stock), names)
            cls._liger_multi_below = swap, vars(cls)["_liger_multi_inner"]
            for name in _BARE.values():
                setattr(cls, name, _bare)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The copy, where norms and angles are what the probe saw."""
        module_class = type(self)
        if not issubclass(module_class, RotatedNorms):
            return cast(Any, module_class).forward(self, *args, **kwargs)
        return _rotated(self, module_class, args, kwargs)


class SharedRotatedNorms(SharedInput, RotatedNorms):
    """The same, with projections that are computed together."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The forward of the first base, around that of the second."""
        module_class = type(self)
        if not issubclass(module_class, SharedRotatedNorms):
            return cast(Any, module_class).forward(self, *args, **kwargs)
        return in_one(
            self, functools.partial(_rotated, self, module_class, args, kwargs), args, kwargs
        )


AROUND: dict[type[Patched] | None, type[Patched]] = {
    None: RotatedNorms,
    RotatedNorms: RotatedNorms,
    SharedInput: SharedRotatedNorms,
    SharedRotatedNorms: SharedRotatedNorms,
}
"""What stands around an attention module, by what stood there."""
APART: dict[type[Patched] | None, type[Patched] | None] = {
    RotatedNorms: None,
    SharedRotatedNorms: SharedInput,
}
"""What stands there without the norms."""


def _rotated(
    module: Any, module_class: type[RotatedNorms], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The copy of the forward, or the rotary functions and norms one after the other."""
    swap, inner = module_class._liger_multi_below  # compilers read no dict of a class
    rotated, settings = (
        module_class._liger_multi_rotated,
        cast(RotatedNormsSettings, swap.around_settings),
    )
    cos_sin, names = kwargs.get(ANGLES), settings.norms
    known = (
        rotated is not None
        and getattr(swap.stock, "forward", None) is rotated.made_from
        and rotated.holds()
        and _norms_hold(module, names)
    )
    if rotated is None or not known or not _angles_fit(module, args, kwargs, cos_sin):
        return inner.forward(module, *args, **kwargs)
    handed = kwargs
    if rotated.caches_get_cos and has_cache(args, kwargs):
        cache = kwargs.get(rotated.updated) if rotated.updated else None
        if cache is None:
            return inner.forward(module, *args, **kwargs)
        handed = {**kwargs, cast(str, rotated.updated): CosForCache(cache)}
    norms = (module._modules[names[0]], module._modules[names[1]])
    first, second = norm_of(norms[0]), norm_of(norms[1])
    if first is None or second is None:  # another thread has just given a class back
        return inner.forward(module, *args, **kwargs)
    cos, sin = cast(Any, cos_sin)
    angles = (Angles(cos, norms, settings.options, (first, second)), sin)
    run = functools.partial(rotated.run, module, *args, **{**handed, ANGLES: angles})
    if torch.compiler.is_compiling():
        return run()
    try:
        return run()
    except AttributeError as error:
        if not any(name in str(error) for name in (_BARE[n] for n in names)):
            raise
        # another thread gave the class back before the copy came to a norm
        return inner.forward(module, *args, **kwargs)


def _bare(self: Any, x: Tensor) -> Tensor:
    """A norm that comes later."""
    return x


@functools.lru_cache(maxsize=256)
def copied(stock: Any, norms: tuple[str, str]) -> Copy | None:
    """The copy of a forward, or None where it is not of that form."""
    calls = rotary_calls(stock)
    if len(calls) != 1 or calls[0][0] != "forward":
        return None
    _, function, name, called = calls[0]
    rotary = recognized(called)
    takes = inspect.signature(function).parameters
    if redirect.refusal(function, name) or not isinstance(rotary, Rotary) or ANGLES not in takes:
        return None
    spec = rotary.spec
    plain = (
        spec.style == "half" and spec.angles == "channel" and not (spec.backwards or spec.sorted)
    )
    if not plain or rotary.single or not set(norms) <= redirect.names(function):
        return None
    targets: dict[str, FunctionType] = {name: _served(name, rotary, called)}
    for norm in norms:

        def passed(x: Tensor) -> Tensor:
            return x

        passed.__name__ = _BARE[norm]  # an attribute of the class has this name
        targets[norm] = cast(FunctionType, passed)
    function_copy, holds = redirect.redirected(function, targets), redirect.still(function, name)
    cache = cache_parameter(function)
    only = cache is not None and redirect.only_calls(function, cache, "update")
    hands_cos = "cache_kwargs" in redirect.variables(function)
    return Copy(function_copy, function, holds, hands_cos, cache if only else None)


def _served(name: str, rotary: Rotary, stock: Any) -> FunctionType:
    """The function that replaces a rotary function in the copy."""
    casting, default, axes = rotary.spec.casting, rotary.unsqueeze_dim, rotary.axes

    def served(q: Tensor, k: Tensor, cos: Any, sin: Tensor, **named: Any) -> tuple[Tensor, Tensor]:
        axis = axes[q.ndim, cos.cos.ndim, named.get("unsqueeze_dim", default), True]
        if type(q).__name__ == "DTensor" or type(k).__name__ == "DTensor":
            q, k = (_normalized(norm, x, axis) for norm, x in zip(cos.norms, (q, k), strict=True))
            return cast("tuple[Tensor, Tensor]", stock(q, k, cos.cos, sin, **named))
        first, second = (
            Rotation(cos.cos, sin, axis, casting, cos.options, of) for of in cos.settings
        )
        return _turned(cos.norms[0], q, first), _turned(cos.norms[1], k, second)

    served.__name__ = f"_liger_multi_normed_{name}"
    return cast(FunctionType, served)


def _turned(norm: Any, x: Tensor, by: Rotation) -> Tensor:
    """A norm with its rotation, also where another thread has just given its class back."""
    y = norm(x, rotation=by) if isinstance(norm, FusedNorm) else apply_rotated(norm, x, by)
    return cast(Tensor, y)


def _normalized(norm: Any, x: Tensor, axis: int) -> Tensor:
    """The norm alone, of heads or of all heads of a token."""
    if norm.weight.shape[0] == x.shape[-1]:
        return cast(Tensor, norm(x))
    rows = norm(x.movedim(axis, 2).flatten(2))
    return cast(Tensor, rows.unflatten(2, (-1, x.shape[-1])).movedim(2, axis))


def _angles_fit(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], angles: Any) -> bool:
    """Whether hidden states and angles have the forms of the probe, and all channels turn."""
    hidden = args[0] if args else kwargs.get("hidden_states")
    if not isinstance(hidden, Tensor) or hidden.ndim != 3 or type(angles) is not tuple:
        return False
    return len(angles) == 2 and all(
        isinstance(angle, Tensor)
        and angle.ndim == 3
        and not angle.requires_grad
        and angle.shape[0] in (1, hidden.shape[0])
        and angle.shape[1] == hidden.shape[1]
        and angle.shape[2] == module.head_dim
        for angle in angles
    )


def _norms_hold(module: nn.Module, names: tuple[str, str]) -> bool:
    """Whether both norms are patched as they were, and nobody looks on."""
    if globally_hooked():
        return False
    return all(norm is not None and _norm_holds(norm) for norm in map(module._modules.get, names))


def _norm_holds(norm: nn.Module) -> bool:
    module_class = type(norm)  # once: another thread may give the class back
    settings = norm_of(norm)
    if settings is None or is_watched(norm) or not issubclass(module_class, FusedNorm):
        return False
    return code_holds(module_class) and holds(norm, settings.signature)


def norm_of(norm: nn.Module | None) -> NormSettings | None:
    """The settings of a patched norm that the operator has, or None."""
    swap: Swap | None = None if norm is None else swapped(norm)
    if swap is None or swap.behavior is not FusedNorm:
        return None
    settings = cast(NormSettings, swap.settings)
    spec = settings.spec
    known = spec.op == "rms_norm" and spec.weight == "inside" and not spec.plus and spec.axis == -1
    casting = dict(spec.options).get("casting")
    weighted = [name for _, name in settings.tensors] == ["weight"]
    usual = known and weighted and settings.eps is not None
    weight = norm._parameters.get("weight") if usual and norm is not None else None
    usual = usual and (weight is None or weight.numel() <= WIDEST)
    return settings if usual and casting in ("llama", "olmo", "gemma") else None


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
    module_class = unpatched_class(module)
    if copied(cast(Any, module_class), norms) is None:
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
    parameters = getattr(config, "rope_parameters", None)
    parameters = parameters if isinstance(parameters, dict) else {}
    tables = [parameters, *(one for one in parameters.values() if isinstance(one, dict))]
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
            norm = skeleton(part)
            _with_weights(norm, part, generator)
            replica._modules[name] = norm
    return replica


def _with_weights(replica: nn.Module, like: nn.Module, generator: torch.Generator) -> None:
    """Give random weights to a skeleton."""
    for name, p in like._parameters.items():
        if p is not None:
            replica._parameters[name] = nn.Parameter(random(generator, *p.shape))


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
    with executed(replica) as executed_ops:
        said = disagreement(replica, stock, ours, [x], close, generator)
    if said and not executed_ops.calls[ROTATED]:
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
    for part, module_class in parts:
        part.__class__ = module_class
    try:
        yield
    finally:
        for (part, _), module_class in zip(parts, before, strict=True):
            part.__class__ = module_class


def find_rotated_norms(model: nn.Module, request: Request) -> Iterator[Change]:
    """Norms of queries and keys that are computed with their rotation, where both are served."""
    options, probed = _rotated_options(request), Probed()
    for path, module in model.named_modules():
        current = swapped(module)
        if current is None or current.behavior is not FusedRotary:
            continue
        names = names_of(module)
        reason = None if options is None or names is None else "something stands around its forward"
        if options is not None and names is not None and current.around in AROUND:
            settings = RotatedNormsSettings(options, names)
            swap = replace(current, around=AROUND[current.around], around_settings=settings)
            reason = probed.refusal(module, made_class(swap), names)
            if reason is None:
                yield Replace(path, module, swap, ROTATED, options.shown(), op=ROTATED)
                continue
        if current.around in APART:
            split = replace(current, around=APART[current.around], around_settings=None)
            yield Replace(path, module, split)
        if reason is not None and ROTATED in request.named:  # else both run, one after the other
            yield Skipped(path, ROTATED, reason)


def _rotated_options(request: Request) -> Any:
    """The options; None also by default, where a backend is named for one of both operators."""
    named = (options.backend for op in ("rms_norm", "rope") if (options := request.get(op)))
    apart = any(named) and ROTATED not in request.named
    return None if apart else request.get(ROTATED)
