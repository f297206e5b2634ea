"""What a forward depends on apart from its inputs: recorded at the patch, compared at every call.

A probe sees a module at one moment. Whatever its forward may read and user code may change later
belongs to the signature of the module: values of attributes, classes of submodules that the
operator does not call, hooks on these, and the functions of the classes. Where one of them is no
longer what the probe saw, the module's own forward runs. What cannot be compared at every call,
such as a buffer or a configuration object, is a reason to leave the module alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Sized
from dataclasses import dataclass, replace
from types import FunctionType, MethodType
from typing import Any, TypeAlias, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from liger_multi._torch_private import GLOBAL_HOOKS, call_linear, constant_in_graphs
from liger_multi.dispatch.autograd import transforming
from liger_multi.patching.evidence import reached, redirect
from liger_multi.patching.evidence.reached import token

# --- linear layers that do nothing but multiply ---

PLAIN = (Tensor, nn.Parameter)
_CALL, _FORWARD = nn.Module.__call__, nn.Linear.forward


def globally_hooked() -> bool:
    """Whether something looks at the calls of every module, or of every linear layer."""
    return any(GLOBAL_HOOKS) or calls_replaced()


def global_hooks() -> list[Any]:
    """Hooks on the calls of every module."""
    return [hook for hooks in GLOBAL_HOOKS if hooks for hook in hooks.values()]


@constant_in_graphs
def calls_replaced() -> bool:
    """Whether somebody put functions of theirs into PyTorch's classes."""
    replaced = nn.Linear.__call__ is not _CALL or nn.Linear.forward is not _FORWARD
    return replaced or F.linear is not call_linear


def is_watched(module: nn.Module) -> bool:
    """Whether a module's call is more than its class's forward."""
    attributes: dict[str, Any] = module.__dict__
    before, after = attributes["_forward_pre_hooks"], attributes["_forward_hooks"]
    hooked = before or after or attributes["_backward_pre_hooks"] or attributes["_backward_hooks"]
    return bool(hooked) or "forward" in attributes


_OF_LIBRARIES = ("torch.distributed.", "deepspeed.", "liger_multi.memory.")
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def is_watched_by_users(module: nn.Module) -> bool:
    """The same for a module without parameters.

    Hooks that gather parameters or measure memory stand on every module, and do nothing on this.
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
    """Whether a hook belongs to a library that gathers and shards parameters, not to the user."""
    while hasattr(hook, "func"):  # a partial
        hook = hook.func
    return str(getattr(hook, "__module__", "")).startswith(libraries)


def bare_parts(layer: nn.Module | None) -> tuple[Tensor, Tensor | None] | None:
    """Weight and bias of a layer that is :func:`is_plain_linear`; None for another one."""
    module_class = type(layer)
    plain = (
        module_class is nn.Linear
        or getattr(module_class, "_liger_multi_plain", None) is module_class
    )
    if layer is None or not plain or is_watched(layer):
        return None
    parameters: Any = layer._parameters  # asking for an attribute takes eight times as long
    weight: Tensor | None = parameters.get("weight")
    bias: Tensor | None = parameters.get("bias")
    if weight is None or "bias" not in parameters:  # tensors stand in the place of parameters
        weight, bias = cast(Any, layer).weight, cast(Any, layer).bias
    if type(weight) not in PLAIN or (bias is not None and type(bias) not in PLAIN):
        return None
    return weight, bias


def is_plain_linear(layer: nn.Module | None) -> bool:
    """Whether a layer is PyTorch's linear layer, with plain weights and nothing around its call."""
    return bare_parts(layer) is not None


Plain: TypeAlias = "tuple[tuple[str, type, Any], ...]"
"""Attributes by name, with their types and values."""


@dataclass(frozen=True)
class Signature:
    """What a forward depends on, apart from inputs and what the operator takes.

    Attributes:
        plain: Values of the instance.
        fields: Values of its configuration: its name, and theirs as in ``plain``.
        parts: Submodules that the operator does not call.
        absent: Tables (``_parameters``, ``_buffers``, ``_modules``) and names that hold None.
        inherited: Methods and values of the class, which no attribute may hide.
        missing: Names that the forward asked for in vain.
        code: What tells whether a process that unpickles the module has the code of the probe.
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
    """A submodule without parameters: its place, its class and what it depends on."""

    name: str
    module_class: type[nn.Module]
    signature: Signature


# --- at every call ---


def holds(module: nn.Module, signature: Signature) -> bool:
    """Whether an instance is still what the probe saw."""
    attributes = module.__dict__
    for name, value_class, value in signature.plain:
        if name not in attributes:
            return False
        now = attributes[name]
        if now is not value and (type(now) is not value_class or not _equal(now, value, module)):
            return False
    for holder, name, value_class, value in signature.fields:
        now = getattr(attributes.get(holder), name, ...)
        if type(now) is not value_class or now != value:
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
        if not holds(inner, part.signature):
            return False
    for name in signature.missing:  # noqa: SIM110
        if hasattr(module, name):
            return False
    return True


def code_holds(module_class: Any) -> bool:
    """Whether the code behind a class of ours, and what it reads, is as it was at the patch.

    A compiled graph would keep values that the code reads, so the original forward is traced there.
    Under transforms of ``torch.func``, which operators do not have, it runs as well.
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
            return reached.holds(module_class._liger_multi_code)
    return True


def _equal(now: Any, value: Any, owner: nn.Module) -> bool:
    if isinstance(now, functools.partial):
        func, args, *keywords = value
        return now.func is func and now.args == args and [*now.keywords.items()] == keywords
    if isinstance(now, MethodType):
        return now.__func__ is value and now.__self__ is owner
    return bool(now == value)


# --- at the patch ---


def code_of(
    module_class: type[nn.Module], signature: Signature | None
) -> tuple[reached.Place, ...]:
    """The functions and values on which a forward depends, as they are now.

    Without a signature, what the functions read in turn is not followed.
    """
    places = _code(module_class, ("forward", *(signature.inherited if signature else ())))
    for part in signature.parts if signature else ():
        places += _code(part.module_class, ("forward", "__call__", *part.signature.inherited))
    if signature is None:
        return (
            *places,
            *([(F, "linear", call_linear)] if module_class.forward is _FORWARD else []),
        )
    now = reached.Reached(functions_of(module_class, signature))
    if signature.code and signature.code != now.digest:
        # unpickled where the code is another: it never holds
        return ((module_class, "forward", None),)
    return (*places, *now.places)


def functions_of(module_class: type[nn.Module], signature: Signature) -> list[Any]:
    """The functions that run in a forward: methods of classes, and functions among attributes."""
    functions = methods_of(module_class, ("forward", *signature.inherited))[1]
    functions += [value for _, _, value in signature.plain]
    for part in signature.parts:
        functions += functions_of(part.module_class, part.signature)
    return functions


def watched_code(module_class: type[nn.Module], signature: Signature) -> Callable[[], bool]:
    """Tells whether :func:`code_of` a class is still what it is now."""
    code = code_of(module_class, signature)
    reads = reached.reads_values(code)

    @constant_in_graphs
    def unchanged() -> bool:
        return reached.holds(code)

    return lambda: not (reads and torch.compiler.is_compiling()) and unchanged()


def _code(module_class: type, names: Iterable[str]) -> list[reached.Place]:
    """``super()`` reaches the bases, so all that define a name count."""
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
    taken: Collection[str],
    names: Collection[str] | None = None,
    starts: Iterable[str] = ("forward",),
) -> Signature | str:
    """What a module depends on, or why that cannot be compared at every call.

    Args:
        module: A module.
        module_class: Its original class.
        taken: Names that the operator reads or calls itself.
        names: Names that the forward asked for when it ran, in addition to those in its code.
        starts: The methods that run.
    """
    starts, asked = tuple(starts), set(names or ())
    names = {*asked, *methods_of(module_class, starts)[0], *(s for s in starts if s != "forward")}
    names -= {*taken, *_of_every_module()}
    attributes = vars(module)
    plain, fields, absent, parts = [], [], [], []
    for name in sorted(names & attributes.keys()):
        compared = token(attributes[name], module)
        inside = [] if compared else _fields(attributes[name], names)
        if compared is None and not inside:
            what = type(attributes[name]).__name__
            return f"its forward reads its {name} ({what}), which may change later"
        plain += [(name, *compared)] if compared else []
        fields += [(name, *field) for field in inside]
    for table in ("_parameters", "_buffers", "_modules"):
        for name in sorted(names & attributes[table].keys()):
            value = attributes[table][name]
            if value is None:
                absent.append((table, name))
            elif table == "_modules":
                inner = _part(name, value)
                if isinstance(inner, str):
                    return inner
                parts.append(inner)
            else:
                what = "buffer" if table == "_buffers" else "parameter"
                return f"its forward reads its {what} {name}, which may change later"
    of_class = {
        n for n in names - attributes.keys() if n != "forward" and _on_class(module_class, n)
    }
    known = {*attributes, *of_class, *(n for _, n in absent), *(p.name for p in parts)}
    missing = {n for n in asked & names - known if not hasattr(module_class, n)}
    for name in sorted(of_class):
        value = getattr(module_class, name)
        if not (token(value) or callable(value) or isinstance(value, property)):
            what = type(value).__name__
            return f"its forward reads {name} ({what}) of its class, which may change later"
    signature = Signature(
        plain=tuple(plain),
        fields=tuple(fields),
        parts=tuple(parts),
        absent=tuple(absent),
        inherited=tuple(sorted(of_class)),
        missing=tuple(sorted(missing)),
    )
    code = reached.Reached(functions_of(module_class, signature))
    return code.refusal or replace(signature, code=code.digest)


def _fields(holder: Any, names: Collection[str]) -> list[tuple[str, type, Any]]:
    """What code with these names reads of a configuration; nothing where that is not plain."""
    if isinstance(holder, (torch.Tensor, nn.Module, Sized)) or callable(holder):
        return []
    values = {n: getattr(holder, n) for n in sorted(names) if hasattr(holder, n)}
    tokens = {n: token(value) for n, value in values.items()}
    return [] if None in tokens.values() else [(n, *t) for n, t in tokens.items() if t]


def _unpatched(module: nn.Module) -> type[nn.Module]:
    """The class of a part; one of ours, which an activation may have, computes the same."""
    module_class = type(module)
    ours = getattr(module_class, "_liger_multi_made", None) is module_class
    return module_class._liger_multi_swap.stock if ours else module_class  # type: ignore[attr-defined]


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
    """The names that methods load, and the functions: the methods and those that they name."""
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
