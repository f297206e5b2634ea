"""What a forward depends on apart from its inputs: recorded by a patch, compared at every call.

:func:`signature_of` takes a module and returns its :class:`Signature`, or the reason why it has
none. :func:`is_current` and :func:`code_holds` tell at every call whether that is still true; if
not, the module's own forward runs.

A probe describes a module at one moment. All that its forward reads and user code may change later
belongs to the signature: values of attributes, submodules that the operator does not call with
their hooks, and the functions of the classes. What no call can compare, such as a buffer or a
configuration object, is a reason to leave a module alone.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Hashable, Iterable, Sized
from dataclasses import dataclass, replace
from types import FunctionType, MethodType
from typing import Any, TypeAlias, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from liger_multi._torch_private import GLOBAL_HOOKS, call_linear, constant_in_graphs
from liger_multi.dispatch.autograd import transforming
from liger_multi.patching.evidence import reached, redirect
from liger_multi.patching.evidence.reached import token

# --- hooks, and linear layers without any ---

Verdict = TypeVar("Verdict")
PLAIN = (Tensor, nn.Parameter)
_CALL, _FORWARD = nn.Module.__call__, nn.Linear.forward


def globally_hooked() -> bool:
    """Whether hooks on all modules exist, or a function of PyTorch's linear layers was replaced."""
    return any(GLOBAL_HOOKS) or calls_replaced()


def global_hooks() -> list[Any]:
    """Hooks on the calls of all modules."""
    return [hook for hooks in GLOBAL_HOOKS if hooks for hook in hooks.values()]


@constant_in_graphs
def calls_replaced() -> bool:
    """Whether ``nn.Linear.__call__``, ``nn.Linear.forward`` or ``F.linear`` were replaced."""
    replaced = nn.Linear.__call__ is not _CALL or nn.Linear.forward is not _FORWARD
    return replaced or F.linear is not call_linear


def is_watched(module: nn.Module) -> bool:
    """Whether a module has hooks, or a forward among its attributes."""
    attributes: dict[str, Any] = module.__dict__
    pre_hooks, hooks = attributes["_forward_pre_hooks"], attributes["_forward_hooks"]
    hooked = (
        pre_hooks or hooks or attributes["_backward_pre_hooks"] or attributes["_backward_hooks"]
    )
    return bool(hooked) or "forward" in attributes


_OF_LIBRARIES = ("torch.distributed.", "deepspeed.", "liger_multi.memory.")
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def is_watched_by_users(module: nn.Module) -> bool:
    """The same without the hooks of libraries that gather parameters or measure memory.

    For modules without parameters, on which such hooks do nothing.
    """
    if not is_watched(module):
        return False
    attributes: dict[str, Any] = module.__dict__
    hooks = [hook for name in _HOOKS for hook in attributes[name].values()]
    return "forward" in attributes or not all(
        is_infrastructure(hook, _OF_LIBRARIES) for hook in hooks
    )


_INFRASTRUCTURE = ("torch.distributed.", "deepspeed.")


def is_infrastructure(hook: Any, libraries: tuple[str, ...] = _INFRASTRUCTURE) -> bool:
    """Whether a hook belongs to a library that gathers and shards parameters."""
    while hasattr(hook, "func"):  # a partial
        hook = hook.func
    return str(getattr(hook, "__module__", "")).startswith(libraries)


def bare_parts(layer: nn.Module | None) -> tuple[Tensor, Tensor | None] | None:
    """Weight and bias of a plain linear layer (:func:`is_plain_linear`); None for others."""
    module_class = type(layer)
    plain = (
        module_class is nn.Linear
        or getattr(module_class, "_liger_multi_plain", None) is module_class
    )
    if layer is None or not plain or is_watched(layer):
        return None
    parameters: Any = layer._parameters  # reading an attribute takes eight times as long
    weight: Tensor | None = parameters.get("weight")
    bias: Tensor | None = parameters.get("bias")
    if weight is None or "bias" not in parameters:  # tensors in place of parameters
        weight, bias = cast(Any, layer).weight, cast(Any, layer).bias
    if type(weight) not in PLAIN or (bias is not None and type(bias) not in PLAIN):
        return None
    return weight, bias


def is_plain_linear(layer: nn.Module | None) -> bool:
    """Whether a layer is PyTorch's linear layer with ordinary tensors, and without hooks."""
    return bare_parts(layer) is not None


Plain: TypeAlias = "tuple[tuple[str, type, Any], ...]"
"""Attributes by name, with their types and values."""


@dataclass(frozen=True)
class Signature:
    """What a forward depends on, apart from its inputs and the operands of the operator.

    Attributes:
        plain: Attributes of the instance.
        fields: Attributes of its configuration: where that is, then as in ``plain``.
        parts: Submodules that the operator does not call.
        absent: Tables (``_parameters``, ``_buffers``, ``_modules``) with names that hold None.
        inherited: Methods and values of the class that no attribute of the instance may hide.
        missing: Names that the forward looked up and did not find.
        code: A digest of the code, which a process that unpickles the module compares.
    """

    plain: Plain = ()
    fields: tuple[tuple[str, str, type, Any], ...] = ()
    parts: tuple[Part, ...] = ()
    absent: tuple[tuple[str, str], ...] = ()
    inherited: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    code: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Part:
    """A submodule without parameters: its name, its class and its own signature."""

    name: str
    module_class: type[nn.Module]
    signature: Signature


# --- at every call ---


def is_current(module: nn.Module, signature: Signature) -> bool:
    """Whether a signature is still true of an instance."""
    attributes = module.__dict__
    for name, value_class, value in signature.plain:
        if name not in attributes:
            return False
        current = attributes[name]
        if current is not value and (
            type(current) is not value_class or not _equal(current, value, module)
        ):
            return False
    for owner_name, name, value_class, value in signature.fields:
        current = getattr(attributes.get(owner_name), name, ...)
        if type(current) is not value_class or current != value:
            return False
    for name in signature.inherited:
        if name in attributes:
            return False
    for table, name in signature.absent:
        if attributes[table].get(name) is not None:
            return False
    for part in signature.parts:
        inner = attributes["_modules"].get(part.name)
        if (
            inner is None
            or _unpatched(inner) is not part.module_class
            or is_watched_by_users(inner)
        ):
            return False
        if not is_current(inner, part.signature):
            return False
    for name in signature.missing:  # noqa: SIM110
        if hasattr(module, name):
            return False
    return True


def code_holds(module_class: Any) -> bool:
    """Whether the code of a patched class, and the values that it reads, are unchanged.

    False in compiled graphs if the code reads values, which a graph would keep, and under the
    transforms of ``torch.func``, which operators do not support.
    """
    if module_class._liger_multi_reads and torch.compiler.is_compiling():
        return False
    return _code_holds(module_class) and not _transforming()


@constant_in_graphs
def _transforming() -> bool:
    return transforming()


@constant_in_graphs
def _code_holds(module_class: Any) -> bool:
    for owner, name, recorded in module_class._liger_multi_code:
        if getattr(owner, name, None) is not recorded:  # the rest is rarely needed
            return reached.still_current(module_class._liger_multi_code)
    return True


def _equal(current: Any, value: Any, owner: nn.Module) -> bool:
    if isinstance(current, functools.partial):
        func, args, *keywords = value
        return (
            current.func is func
            and current.args == args
            and [*current.keywords.items()] == keywords
        )
    if isinstance(current, MethodType):
        return current.__func__ is value and current.__self__ is owner
    return bool(current == value)


# --- at the patch ---


def code_of(
    module_class: type[nn.Module], signature: Signature | None
) -> tuple[reached.Place, ...]:
    """The functions and values that a forward depends on, as they are now.

    Without a signature, functions are not followed.
    """
    places = _code(module_class, ("forward", *(signature.inherited if signature else ())))
    for part in signature.parts if signature else ():
        places += _code(part.module_class, ("forward", "__call__", *part.signature.inherited))
    if signature is None:
        return (
            *places,
            *([(F, "linear", call_linear)] if module_class.forward is _FORWARD else []),
        )
    code = reached.Reached(functions_of(module_class, signature))
    if signature.code and signature.code != code.digest:
        # unpickled by a process with other code: never true
        return ((module_class, "forward", None),)
    return (*places, *code.places)


def cached_verdict(
    cache: dict[Any, Verdict | str],
    module_class: type[nn.Module],
    signature: Signature,
    attributes: Hashable,
    probe: Callable[[], Verdict | str],
    argument_count: int = 0,
) -> Verdict | str:
    """What a probe says of modules that are alike; it runs for the first of them.

    Args:
        cache: Earlier verdicts.
        module_class: The class of the modules.
        signature: What their forward depends on.
        attributes: What else they have in common.
        probe: The probe of one of them, which returns its settings or a reason against them.
        argument_count: Arguments of forward, on which no branch may have one outcome only; 0 where
            branches do not matter.
    """
    key = (module_class, code_of(module_class, signature), signature, attributes)
    if key not in cache:
        functions = reached.Reached(functions_of(module_class, signature)).functions
        outcomes = reached.Outcomes(functions)
        with outcomes.watched() if argument_count else contextlib.nullcontext():
            verdict = probe()
        if argument_count and not isinstance(verdict, str):
            verdict = outcomes.one_sided(argument_count) or verdict
        cache[key] = verdict
    return cache[key]


def functions_of(module_class: type[nn.Module], signature: Signature) -> list[Any]:
    """The functions that a forward runs: methods of its classes, and attributes."""
    functions = methods_of(module_class, ("forward", *signature.inherited))[1]
    functions += [value for _, _, value in signature.plain]
    for part in signature.parts:
        functions += functions_of(part.module_class, part.signature)
    return functions


def watched_code(module_class: type[nn.Module], signature: Signature) -> Callable[[], bool]:
    """A test whether :func:`code_of` a class is still the same as now."""
    code = code_of(module_class, signature)
    has_values = reached.reads_values(code)

    @constant_in_graphs
    def unchanged() -> bool:
        return reached.still_current(code)

    return lambda: not (has_values and torch.compiler.is_compiling()) and unchanged()


def _code(module_class: type, names: Iterable[str]) -> list[reached.Place]:
    """Methods of a class and of the bases that ``super()`` reaches."""
    places = []
    for name in dict.fromkeys(names):
        owners = [
            k for k in module_class.__mro__[1:] if name in vars(k) and k not in (nn.Module, object)
        ]
        places += [(k, name, getattr(k, name, None)) for k in (module_class, *owners)]
    return [entry for entry in places if not isinstance(entry[2], MethodType)]


def signature_of(
    module: nn.Module,
    module_class: type[nn.Module],
    excluded: Collection[str],
    names: Collection[str] | None = None,
    starts: Iterable[str] = ("forward",),
) -> Signature | str:
    """What a module depends on, or why calls cannot compare that.

    Args:
        module: A module.
        module_class: Its original class.
        excluded: Names that the operator reads or calls itself.
        names: Names that the forward looked up while it ran, in addition to those in its code.
        starts: The methods that run.
    """
    starts, requested = tuple(starts), set(names or ())
    names = {
        *requested,
        *methods_of(module_class, starts)[0],
        *(s for s in starts if s != "forward"),
    }
    names -= {*excluded, *_of_every_module()}
    attributes = vars(module)
    plain, fields, absent_names, parts = [], [], [], []
    for name in sorted(names & attributes.keys()):
        compared = token(attributes[name], module)
        value_fields = [] if compared else _fields(attributes[name], names)
        if compared is None and not value_fields:
            description = type(attributes[name]).__name__
            return f"its forward reads its {name} ({description}), which may change later"
        plain += [(name, *compared)] if compared else []
        fields += [(name, *field) for field in value_fields]
    for table in ("_parameters", "_buffers", "_modules"):
        for name in sorted(names & attributes[table].keys()):
            value = attributes[table][name]
            if value is None:
                absent_names.append((table, name))
            elif table == "_modules":
                inner = _part(name, value)
                if isinstance(inner, str):
                    return inner
                parts.append(inner)
            else:
                description = "buffer" if table == "_buffers" else "parameter"
                return f"its forward reads its {description} {name}, which may change later"
    of_class = {
        n for n in names - attributes.keys() if n != "forward" and _on_class(module_class, n)
    }
    known_names = {*attributes, *of_class, *(n for _, n in absent_names), *(p.name for p in parts)}
    missing = {n for n in requested & names - known_names if not hasattr(module_class, n)}
    for name in sorted(of_class):
        value = getattr(module_class, name)
        if not (token(value) or callable(value) or isinstance(value, property)):
            description = type(value).__name__
            return f"its forward reads {name} ({description}) of its class, which may change later"
    signature = Signature(
        plain=tuple(plain),
        fields=tuple(fields),
        parts=tuple(parts),
        absent=tuple(absent_names),
        inherited=tuple(sorted(of_class)),
        missing=tuple(sorted(missing)),
    )
    code = reached.Reached(functions_of(module_class, signature))
    return code.refusal or replace(signature, code=code.digest)


def _fields(config: Any, names: Collection[str]) -> list[tuple[str, type, Any]]:
    """The attributes of a configuration with these names; none where one is no plain value."""
    if isinstance(config, (torch.Tensor, nn.Module, Sized)) or callable(config):
        return []
    values = {n: getattr(config, n) for n in sorted(names) if hasattr(config, n)}
    tokens = {n: token(value) for n, value in values.items()}
    return [] if None in tokens.values() else [(n, *t) for n, t in tokens.items() if t]


def _unpatched(module: nn.Module) -> type[nn.Module]:
    """The original class of a part, which may be patched itself, as an activation is."""
    module_class = type(module)
    is_patched = getattr(module_class, "_liger_multi_made", None) is module_class
    return module_class._liger_multi_swap.stock if is_patched else module_class  # type: ignore[attr-defined]


def _part(name: str, module: nn.Module) -> Part | str:
    module_class = _unpatched(module)
    if any(value is not None for value in module._parameters.values()) or module._modules:
        return f"its {name} ({module_class.__name__}) has parameters or layers of its own"
    signature = signature_of(module, module_class, ())
    if isinstance(signature, str):
        return f"its {name} ({module_class.__name__}): {signature}"
    return Part(name, module_class, signature)


def _on_class(module_class: type, name: str) -> bool:
    return any(name in vars(k) for k in module_class.__mro__ if k not in (nn.Module, object))


@functools.cache
def _of_every_module() -> frozenset[str]:
    return frozenset(vars(nn.Module())) | {"forward", "__class__", "__dict__"}


def methods_of(module_class: type, starts: Iterable[str]) -> tuple[set[str], list[FunctionType]]:
    """All names that methods load, and the functions: the methods, and others that these name."""
    names: set[str] = set()
    functions: list[FunctionType] = []
    todo = list(starts)
    while todo:
        name = todo.pop()
        for owner in module_class.__mro__:
            if owner not in (nn.Module, object):
                for function in _functions(vars(owner).get(name)):
                    fresh = redirect.names(function) - names
                    names |= fresh
                    todo += fresh
                    functions.append(function)
    return names, functions


def _functions(value: Any) -> list[FunctionType]:
    if isinstance(value, property):
        return [f for f in (value.fget,) if isinstance(f, FunctionType)]
    value = getattr(value, "__func__", value)  # of a static or class method
    return [value] if isinstance(value, FunctionType) else []
