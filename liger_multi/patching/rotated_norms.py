"""QK-norm and RoPE as one operator: norms of queries and keys, and their rotation.

A forward calls the norms first and the rotary function later. So a patched attention module
(:class:`RotatedNorms`) has another copy of its forward (:mod:`.evidence.redirect`). In this copy,
the norms return their input, and the rotary function gets both norms along with the angles, and
calls ``ops.rms_norm_rope``. :func:`find_rotated_norms` yields a patch if a replica agrees.

:class:`SharedRotatedNorms` also computes projections with adapters at once (:mod:`.lora`).
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

from liger_multi.modules.arguments import cache_parameter, has_cache
from liger_multi.modules.parameters import has
from liger_multi.patching.evidence import redirect
from liger_multi.patching.evidence.facts import ModelFacts
from liger_multi.patching.evidence.probe import (
    Overridden,
    Watch,
    disagreement,
    linear,
    probe_context,
    random,
    scalars,
    skeleton,
    with_weights,
)
from liger_multi.patching.evidence.signature import (
    code_holds,
    globally_hooked,
    is_current,
    is_watched,
)
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
    patched_class,
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
"""The argument with cos and sin."""
WIDEST = 8192
"""Most channels of a norm over all heads, which kernels keep in registers."""
_BARE = {name: f"_liger_multi_bare_{name}" for names in NORMS for name in names}


def names_of(module: nn.Module) -> tuple[str, str] | None:
    """The names of a module's norms of queries and keys; None unless it has both."""
    return next((names for names in NORMS if set(names) <= module._modules.keys()), None)


@dataclass(frozen=True)
class RotatedNormsSettings:
    """The options of the patch, and the names of both norms."""

    options: Options
    norms: tuple[str, str]


class Angles(NamedTuple):
    """The argument cos of the copy: cos, the norms to apply before, options and settings."""

    cos: Tensor
    norms: tuple[Any, Any]
    options: Options
    settings: tuple[NormSettings, NormSettings]


class Copy(NamedTuple):
    """The copy of a forward.

    Attributes:
        run: The copy.
        original: The forward that was copied.
        is_current: Tells whether the rotary function is unchanged.
        caches_get_cos: Whether it passes cos to a cache, which needs the tensor.
        updated: The name of the argument of a cache that it only updates, or None.
    """

    run: FunctionType
    original: FunctionType
    is_current: Callable[[], bool]
    caches_get_cos: bool
    updated: str | None


class CosForCache:
    """A wrapper of a cache in the copy, which passes the tensor cos to the cache.

    Models of transformers 5.0 have a cache in training too, and pass cos and sin to it.
    """

    def __init__(self, cache: Any) -> None:
        self._cache = cache

    def update(self, *args: Any, **kwargs: Any) -> Any:
        """The method of the cache."""
        args = tuple(_with_cos(value) for value in args)
        return self._cache.update(*args, **{n: _with_cos(v) for n, v in kwargs.items()})


def _with_cos(value: Any) -> Any:
    """An argument with the tensor cos in place of :class:`Angles`."""
    if not isinstance(value, dict):
        return value
    return {n: v.cos if isinstance(v, Angles) else v for n, v in value.items()}


class RotatedNorms(Patched):
    """An attention module whose queries and keys are normalized and rotated by one operator."""

    _liger_multi_rotated: ClassVar[Copy | None]
    _liger_multi_below: ClassVar[tuple[Any, Any]]

    def __init_subclass__(cls, **keywords: Any) -> None:
        """Create the copy with the class."""
        super().__init_subclass__(**keywords)
        if "_liger_multi_swap" in vars(cls):
            swap: Swap = vars(cls)["_liger_multi_swap"]
            names = cast(RotatedNormsSettings, swap.around_settings).norms
            cls._liger_multi_rotated = copied(cast(Any, swap.stock), names)
            cls._liger_multi_below = swap, vars(cls)["_liger_multi_inner"]
            for name in _BARE.values():
                setattr(cls, name, _skip_norm)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The copy, if norms and angles are as they were probed."""
        module_class = type(self)
        if not issubclass(module_class, RotatedNorms):
            return cast(Any, module_class).forward(self, *args, **kwargs)
        return _rotated(self, module_class, args, kwargs)


class SharedRotatedNorms(SharedInput, RotatedNorms):
    """Rotated norms of an attention module whose projections are computed at once."""

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
"""The new value of ``around`` of an attention module, by its old value."""
APART: dict[type[Patched] | None, type[Patched] | None] = {
    RotatedNorms: None,
    SharedRotatedNorms: SharedInput,
}
"""The value of ``around`` without the norms."""


def _rotated(
    module: Any, module_class: type[RotatedNorms], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The copy of the forward, or norms and rotary function one after the other."""
    swap, inner = module_class._liger_multi_below  # compilers cannot read the dict of a class
    rotated, settings = (
        module_class._liger_multi_rotated,
        cast(RotatedNormsSettings, swap.around_settings),
    )
    cos_sin, names = kwargs.get(ANGLES), settings.norms
    is_usual_call = (
        rotated is not None
        and getattr(swap.stock, "forward", None) is rotated.original
        and rotated.is_current()
        and _norms_hold(module, names)
    )
    if rotated is None or not is_usual_call or not _angles_fit(module, args, kwargs, cos_sin):
        return inner.forward(module, *args, **kwargs)
    kwargs_of_copy = kwargs
    if rotated.caches_get_cos and has_cache(args, kwargs):
        cache = kwargs.get(rotated.updated) if rotated.updated else None
        if cache is None:
            return inner.forward(module, *args, **kwargs)
        kwargs_of_copy = {**kwargs, cast(str, rotated.updated): CosForCache(cache)}
    norms = (module._modules[names[0]], module._modules[names[1]])
    first, second = norm_of(norms[0]), norm_of(norms[1])
    if first is None or second is None:  # another thread has just restored a class
        return inner.forward(module, *args, **kwargs)
    cos, sin = cast(Any, cos_sin)
    angles = (Angles(cos, norms, settings.options, (first, second)), sin)
    run = functools.partial(rotated.run, module, *args, **{**kwargs_of_copy, ANGLES: angles})
    if torch.compiler.is_compiling():
        return run()
    try:
        return run()
    except AttributeError as error:
        if not any(name in str(error) for name in (_BARE[n] for n in names)):
            raise
        # another thread restored the class before the copy called a norm
        return inner.forward(module, *args, **kwargs)


def _skip_norm(self: Any, x: Tensor) -> Tensor:
    """The input of a norm, which is applied later."""
    return x


@functools.lru_cache(maxsize=256)
def copied(stock: Any, norms: tuple[str, str]) -> Copy | None:
    """The copy of a forward; None for forwards of another form."""
    calls = rotary_calls(stock)
    if len(calls) != 1 or calls[0][0] != "forward":
        return None
    _, function, name, target = calls[0]
    rotary = recognized(target)
    parameters = inspect.signature(function).parameters
    if (
        redirect.refusal(function, name)
        or not isinstance(rotary, Rotary)
        or ANGLES not in parameters
    ):
        return None
    spec = rotary.spec
    plain = (
        spec.style == "half" and spec.angles == "channel" and not (spec.backwards or spec.sorted)
    )
    if not plain or rotary.single or not set(norms) <= redirect.names(function):
        return None
    targets: dict[str, FunctionType] = {name: _served(name, rotary, target)}
    for norm in norms:

        def skip_norm(x: Tensor) -> Tensor:
            return x

        skip_norm.__name__ = _BARE[norm]  # an attribute of the class has this name
        targets[norm] = cast(FunctionType, skip_norm)
    function_copy = redirect.redirected(function, targets)
    is_current, cache = redirect.currency_of(function, name), cache_parameter(function)
    only_updates = cache is not None and redirect.only_calls(function, cache, "update")
    hands_cos = "cache_kwargs" in redirect.variables(function)
    return Copy(function_copy, function, is_current, hands_cos, cache if only_updates else None)


def _served(name: str, rotary: Rotary, stock: Any) -> FunctionType:
    """The function that replaces a rotary function in the copy."""
    casting, default, axes = rotary.spec.casting, rotary.unsqueeze_dim, rotary.axes

    def served(q: Tensor, k: Tensor, cos: Any, sin: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:
        axis = axes[q.ndim, cos.cos.ndim, kwargs.get("unsqueeze_dim", default), True]
        if type(q).__name__ == "DTensor" or type(k).__name__ == "DTensor":
            q, k = (_normalized(norm, x, axis) for norm, x in zip(cos.norms, (q, k), strict=True))
            return cast("tuple[Tensor, Tensor]", stock(q, k, cos.cos, sin, **kwargs))
        first, second = (
            Rotation(cos.cos, sin, axis, casting, cos.options, settings)
            for settings in cos.settings
        )
        # not the modules, which have no hooks: another thread may have just restored their classes
        return apply_rotated(cos.norms[0], q, first), apply_rotated(cos.norms[1], k, second)

    served.__name__ = f"_liger_multi_normed_{name}"
    return cast(FunctionType, served)


def _normalized(norm: Any, x: Tensor, axis: int) -> Tensor:
    """The norm without rotation, per head or over all heads of a token."""
    if norm.weight.shape[0] == x.shape[-1]:
        return cast(Tensor, norm(x))
    rows = norm(x.movedim(axis, 2).flatten(2))
    return cast(Tensor, rows.unflatten(2, (-1, x.shape[-1])).movedim(2, axis))


def _angles_fit(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], angles: Any) -> bool:
    """Whether hidden states and angles have the probed shapes, and all channels are rotated."""
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
    """Whether both norms are still patched, and have no hooks."""
    if globally_hooked():
        return False
    return all(norm is not None and _norm_holds(norm) for norm in map(module._modules.get, names))


def _norm_holds(norm: nn.Module) -> bool:
    module_class = type(norm)  # once: another thread may restore the class
    settings = norm_of(norm)
    if settings is None or is_watched(norm) or not issubclass(module_class, FusedNorm):
        return False
    return code_holds(module_class) and is_current(norm, settings.signature)


def norm_of(norm: nn.Module | None) -> NormSettings | None:
    """The settings of a patched norm that the operator supports, or None."""
    swap: Swap | None = None if norm is None else swapped(norm)
    if swap is None or swap.behavior is not FusedNorm:
        return None
    settings = cast(NormSettings, swap.settings)
    spec = settings.spec
    is_supported = (
        spec.op == "rms_norm"
        and spec.weight_applied == "inside"
        and not spec.weight_offset
        and spec.axis == -1
    )
    casting = dict(spec.options).get("casting")
    weighted = [name for _, name in settings.tensors] == ["weight"]
    usual = is_supported and weighted and settings.eps is not None
    weight = norm._parameters.get("weight") if usual and norm is not None else None
    usual = usual and (weight is None or weight.numel() <= WIDEST)
    return settings if usual and casting in ("llama", "olmo", "gemma") else None


HIDDEN, TOKENS = 24, 5
LAST = ("o_proj", "out_proj", "dense")
"""Names of the output projection."""


class Probed:
    """The verdicts of one patch call; of equal layers, one is tried."""

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
        key, attributes = _key(module, patched), dict(scalars(module))
        for values, verdict in self._known.get(key, ()):
            if all(attributes.get(name, _NOTHING) == value for name, value in values.items()):
                return verdict
        watch = Watch()
        verdict = _refusal(module, patched, norms, watch)
        values = {name: value for name, value in attributes.items() if name in watch.read}
        self._known.setdefault(key, []).append((values, verdict))
        return verdict


_NOTHING = object()


def _key(module: nn.Module, patched: type[nn.Module]) -> Any:
    """The properties that equal modules share, apart from numbers that their forwards read."""
    parts = tuple(
        (name, type(part), scalars(part), tuple(tuple(p.shape) for p in part.parameters(False)))
        for name, part in module._modules.items()
        if part is not None
    )
    types = tuple(sorted((n, type(v).__name__) for n, v in vars(module).items()))
    return patched, id(getattr(module, "config", None)), parts, types


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
    except Exception as error:  # of any forward
        return f"its forward failed on a replica: {type(error).__name__}: {error}"


def _turns_in_part(config: Any) -> bool:
    """Whether a configuration rotates a part of the channels only."""
    parameters = getattr(config, "rope_parameters", None)
    parameters = parameters if isinstance(parameters, dict) else {}
    tables = [parameters, *(nested for nested in parameters.values() if isinstance(nested, dict))]
    factors = [table.get(_FACTOR) for table in tables] + [getattr(config, _FACTOR, None)]
    return any(factor not in (None, 1) for factor in factors)


_FACTOR = "partial_rotary_factor"


def _replica(module: nn.Module, generator: torch.Generator) -> Any:
    """A copy with few hidden channels, but the module's heads."""
    replica = skeleton(module)
    if "config" in vars(replica):
        replica.__dict__["config"] = Overridden(replica.config, _attn_implementation="eager")
    with_weights(replica, module, generator)
    for name, part in module._modules.items():
        if part is None:
            continue
        if hasattr(part, "in_features"):
            layer: Any = part
            last = name in LAST
            in_features, out_features = (
                (layer.in_features, HIDDEN) if last else (HIDDEN, layer.out_features)
            )
            bias = has(layer, "bias")
            replica._modules[name] = linear(generator, in_features, out_features, bias)
        else:
            replica._modules[name] = with_weights(skeleton(part), part, generator)
    return replica


def _compared(
    module: nn.Module,
    replica: Any,
    patched: type[nn.Module],
    width: int,
    norms: tuple[str, str],
    generator: torch.Generator,
) -> str | None:
    """Why norms and rotation by one operator differ from the forward, or None."""
    cos, sin = (random(generator, 1, TOKENS, width).cos() for _ in range(2))
    parameters = inspect.signature(unpatched_class(module).forward).parameters
    mask_argument = {"attention_mask": None} if "attention_mask" in parameters else {}

    def stock(x: Tensor) -> Any:
        return _first(replica.forward(x, **{ANGLES: (cos, sin)}, **mask_argument))

    def formula(x: Tensor) -> Tensor:
        with _as(module, replica, patched, norms):
            return cast(Tensor, _first(replica.forward(x, **{ANGLES: (cos, sin)}, **mask_argument)))

    def close(a: Tensor, b: Tensor) -> bool:
        return torch.allclose(a, b, rtol=1e-4, atol=1e-5)

    x = random(generator, 2, TOKENS, HIDDEN)
    with executed(replica) as executed_ops:
        difference = disagreement(replica, stock, formula, [x], close, generator)
    if difference and not executed_ops.calls[ROTATED]:
        return "it rotates nothing: a layer without positions"
    return difference and f"it does more than normalize and then rotate: {difference}"


def _first(output: Any) -> Any:
    return output[0] if isinstance(output, tuple) else output


@contextmanager
def _as(
    module: nn.Module, replica: Any, patched: type[nn.Module], norms: tuple[str, str]
) -> Iterator[None]:
    """Give the replica and its norms the patched classes within a block."""
    parts: list[tuple[Any, type]] = [(replica, patched)]
    parts += [(replica._modules[name], type(module._modules[name])) for name in norms]
    classes = [type(part) for part, _ in parts]
    for part, module_class in parts:
        part.__class__ = module_class
    try:
        yield
    finally:
        for (part, _), module_class in zip(parts, classes, strict=True):
            part.__class__ = module_class


def find_rotated_norms(model: ModelFacts, request: Request) -> Iterator[Change]:
    """Attention modules whose norms of queries and keys and rotary function are patched."""
    options, probed = _rotated_options(request), Probed()
    for path, module in model.instances(FusedRotary):
        current = swapped(module)
        if current is None:  # another class is on top
            continue
        names = names_of(module)
        reason = None if options is None or names is None else "something stands around its forward"
        if options is not None and names is not None and current.around in AROUND:
            settings = RotatedNormsSettings(options, names)
            swap = replace(current, around=AROUND[current.around], around_settings=settings)
            reason = probed.refusal(module, patched_class(swap), names)
            if reason is None:
                yield Replace(path, module, swap, ROTATED, options.shown(), op=ROTATED)
                continue
        if current.around in APART:
            split = replace(current, around=APART[current.around], around_settings=None)
            yield Replace(path, module, split)
        if reason is not None and ROTATED in request.named:  # norms and rope stay patched
            yield Skipped(path, ROTATED, reason)


def _rotated_options(request: Request) -> Any:
    """The options; None by default if a backend is named for one of both operators."""
    backends = (options.backend for op in ("rms_norm", "rope") if (options := request.get(op)))
    is_separate = any(backends) and ROTATED not in request.named
    return None if is_separate else request.get(ROTATED)
