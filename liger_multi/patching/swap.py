"""Change the class of a module instance, and restore the original class.

:func:`apply` takes a module and a :class:`Swap`, and gives the module a subclass of its class, one
per (original class, behavior, settings). Nothing is written into the module, except for a frozen
weight that is kept in FP8. The subclass has the name of the original. So ``save_pretrained``,
adapters that match classes or names, and ``isinstance`` work as before. ``deepcopy`` and ``pickle``
rebuild the class. :func:`restore` gives the original class back.

A :class:`Block` restores the classes that modules had when it began. Blocks may end in any order:
one that ends before a later one passes its classes on, and the later block restores them.
"""

from __future__ import annotations

import functools
import itertools
import sys
import threading
import weakref
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import FunctionType
from typing import Any, ClassVar, TypeAlias, cast

import torch.nn.functional as F
from torch import nn

from liger_multi._torch_private import DYNAMO, constant_in_graphs
from liger_multi.errors import PatchError
from liger_multi.modules.forward_wrapper import ForwardWrapper
from liger_multi.patching.evidence import redirect
from liger_multi.patching.evidence.reached import Place, reads_values
from liger_multi.patching.evidence.signature import Signature, code_of
from liger_multi.patching.options import Options
from liger_multi.patching.report import Skipped

# --- one module ---

Code: TypeAlias = "tuple[Place, ...]"
"""Functions and the values that they read: the owner of each, its name and its value."""


@dataclass(frozen=True)
class Swap:
    """The definition of a patched class.

    Attributes:
        op: Operator that the new forward calls.
        stock: The original class.
        behavior: The mixin with the new forward.
        settings: Settings of that forward; hashable and picklable.
        around: A mixin whose forward calls that of the behavior, if any.
        around_settings: Settings of that mixin; hashable and picklable.
    """

    op: str
    stock: type[nn.Module]
    behavior: type[Patched]
    settings: Hashable
    around: type[Patched] | None = None
    around_settings: Hashable = None


class Patched(nn.Module):
    """Base of the behaviors; :func:`patched_class` creates the concrete classes.

    A bound ``forward`` of a patched module (of accelerate's hooks, or compiled) may be called after
    the original class was restored, and another thread may restore it during a forward. So every
    forward reads the class of the instance once, as its first step, and takes settings and the
    original forward (:func:`original`) from that class; ``super()`` would read the instance again.
    If the class no longer has the behavior, the class's own forward runs.
    """

    loose: ClassVar[bool] = False
    """Whether ``unpatch`` may leave a module with another class on top of this one."""
    reported: ClassVar[bool] = True
    """Whether reports have a line for a restored module."""
    _liger_multi_swap: ClassVar[Swap]
    _liger_multi_code: ClassVar[Code]
    _liger_multi_reads: ClassVar[bool]
    _liger_multi_inner: ClassVar[type[nn.Module]]

    @staticmethod
    def on_enter(module: nn.Module, settings: Any) -> None:
        """Called after a module gets this behavior, or other settings of it."""

    @staticmethod
    def on_leave(module: nn.Module) -> None:
        """Called after a module loses this behavior; undoes ``on_enter``."""

    @staticmethod
    def fixed(module: nn.Module) -> str | None:
        """Why ``on_enter`` cannot be undone now, or None."""
        return None

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle and deepcopy by the swap: the patched class cannot be imported."""
        reduced = super().__reduce_ex__(protocol)
        module_class = reduced[1][0] if isinstance(reduced, tuple) and reduced[1] else None
        if not isinstance(module_class, type) or "_liger_multi_swap" not in vars(module_class):
            return reduced
        return (_unpickled, (module_class._liger_multi_swap,), *reduced[2:])  # type: ignore[attr-defined]


COMPILERS = (DYNAMO, "torch.jit")


class SwappedType(type):
    """The metaclass of patched classes, which makes them equal to their original, one way only.

    Other libraries compare classes directly: ``type(module) in mapping`` (``quantize_dynamic``,
    policies of DeepSpeed) or ``type(module) == nn.Linear``. These comparisons give the same result
    as before the patch. Two patched classes of one original are not equal. Within PyTorch's
    compilers, all classes differ: Dynamo resolves ``super()`` by the position of a class among its
    bases, and TorchScript caches types by class.
    """

    def __eq__(cls, other: object) -> bool:
        """Whether the other one is this class or its original."""
        if cls is other:
            return True
        swap = cls.__dict__.get("_liger_multi_swap")
        if swap is None or swap.stock is not other:
            return False
        return not str(sys._getframe(1).f_globals.get("__name__")).startswith(COMPILERS)

    def __hash__(cls) -> int:
        """The hash of the original class."""
        swap = cls.__dict__.get("_liger_multi_swap")
        return type.__hash__(cls if swap is None else swap.stock)

    def __setattr__(cls, name: str, value: Any) -> None:
        """Set an attribute; a property of ``parametrize`` becomes one of the original class."""
        swap = cls.__dict__.get("_liger_multi_swap")
        owner: type = cls
        if swap is not None and isinstance(value, property) and is_parametrized(swap.stock):
            owner = swap.stock
        type.__setattr__(owner, name, value)

    def __delattr__(cls, name: str) -> None:
        """Delete an attribute, or such a property."""
        swap = cls.__dict__.get("_liger_multi_swap")
        type.__delattr__(cls if swap is None or name in cls.__dict__ else swap.stock, name)


def is_parametrized(module_class: type) -> bool:
    """Whether ``torch.nn.utils.parametrize`` has derived a class, for the properties of a module.

    The last removal gives the module the first base of its class, whatever that is.
    """
    getstate = vars(module_class).get("__getstate__")
    return getattr(getstate, "__module__", None) == "torch.nn.utils.parametrize"


_types: dict[type, type[SwappedType]] = {type: SwappedType}
"""Metaclasses by the metaclass of the original class, which is another one for abstract classes."""


def _type_of(stock: type[nn.Module]) -> type[SwappedType]:
    metaclass_cached = _types.get(type(stock))
    if metaclass_cached is None:
        metaclass: Any = type(stock)
        if not issubclass(metaclass, SwappedType):
            metaclass = type(SwappedType.__name__, (SwappedType, metaclass), {})
        metaclass_cached = _types.setdefault(type(stock), metaclass)
    return metaclass_cached


_classes: dict[Swap, type[nn.Module]] = {}


def patched_class(swap: Swap) -> type[nn.Module]:
    """The patched class of a swap; one object per swap."""
    swapped_class = _classes.get(swap)
    if swapped_class is None:
        stock = swap.stock
        bases: tuple[type[nn.Module], ...] = (swap.behavior, stock)
        if swap.around is not None:
            bases = (swap.around, patched_class(replace(swap, around=None, around_settings=None)))
        if is_parametrized(stock):
            bases = (patched_class(replace(swap, stock=stock.__bases__[0])), bases[-1])
        namespace = {
            "_liger_multi_swap": swap,
            "_liger_multi_inner": bases[-1],
            "__module__": stock.__module__,
            "__qualname__": stock.__qualname__,
            "__doc__": stock.__doc__,
        }
        fresh: Any = _type_of(stock)(stock.__name__, bases, namespace)
        fresh._liger_multi_made = fresh  # subclasses inherit it, but differ from it
        _note_code(fresh, swap)
        swapped_class = _classes.setdefault(swap, fresh)
    return swapped_class


def _note_code(module_class: Any, swap: Swap) -> None:
    """Record on a patched class the code that was probed, and whether that reads values."""
    signature = getattr(swap.settings, "signature", None)
    code = code_of(swap.stock, signature if isinstance(signature, Signature) else None)
    module_class._liger_multi_code, module_class._liger_multi_reads = code, reads_values(code)


def _unpickled(swap: Swap) -> nn.Module:
    swapped_class = patched_class(swap)
    return swapped_class.__new__(swapped_class)


def swapped(module: nn.Module) -> Swap | None:
    """The swap of an instance with a patched class; None with other classes, also on top of one."""
    return swap_of(type(module))


def stock_class(module: nn.Module) -> type[nn.Module]:
    """The class of a module without its patch."""
    return stock_of(type(module))


def unpatched_class(module: nn.Module) -> type[nn.Module]:
    """The class without the patch, also below a class that another library put on top."""
    module_class = type(module)
    return (
        module_class._liger_multi_swap.stock if issubclass(module_class, Patched) else module_class
    )


def original(module_class: type[nn.Module]) -> Any:
    """The original forward of a patched class, or of a class on top of one."""
    return module_class._liger_multi_swap.stock.forward  # type: ignore[attr-defined]


def buried(module: nn.Module) -> bool:
    """Whether another library has put a class on top of the patched one (FSDP2 does)."""
    return isinstance(module, Patched) and swapped(module) is None


def apply(module: nn.Module, swap: Swap) -> str:
    """Give ``module`` the class of ``swap``, and return its status for the report."""
    previous = swapped(module)
    _drop_own_forward(module)
    _note_code(patched_class(swap), swap)  # as just probed
    if previous == swap:
        swap.behavior.on_enter(module, swap.settings)  # weights may have been replaced
        return "already patched"
    module.__class__ = patched_class(swap)
    if previous and previous.behavior is not swap.behavior:
        previous.behavior.on_leave(module)
    swap.behavior.on_enter(module, swap.settings)
    return "options changed" if previous else "patched"


def restore(module: nn.Module) -> Swap | None:
    """Restore the original class, and return the swap; None if the module was not patched."""
    swap = swapped(module)
    if swap:
        _drop_own_forward(module)
        module.__class__ = swap.stock
        swap.behavior.on_leave(module)
    return swap


def has_own_forward(module: nn.Module) -> bool:
    """Whether a module's attributes have a bound forward of its class, patched or not.

    transformers 5.0 leaves one after it has captured outputs, and accelerate after it has removed
    its hooks: both replace ``module.forward`` by a wrapper, and later write the bound method back.
    """
    own_forward = vars(module).get("forward")
    function = getattr(own_forward, "__func__", None)
    if getattr(own_forward, "__self__", None) is not module or function is None:
        return False
    written_in = str(getattr(function, "__globals__", {}).get("__name__"))
    is_wrapper = written_in.startswith("liger_multi.patching.")
    return is_wrapper or function in (type(module).forward, stock_class(module).forward)


def _drop_own_forward(module: nn.Module) -> None:
    """Remove such an attribute, which would hide the forward of a new class."""
    if has_own_forward(module):
        del module.__dict__["forward"]


def refuse_buried(modules: Iterable[tuple[str, nn.Module]], action: str) -> None:
    """Check that all classes can be restored, before anything is changed.

    Raises:
        PatchError: With the first module that has a class on top of the patched one, or whose
            behavior cannot be undone.
    """
    modules = list(modules)
    buried_modules = [
        (path, type(m).__name__)
        for path, m in modules
        if buried(m) and not cast("type[Patched]", type(m))._liger_multi_swap.behavior.loose
    ]
    if buried_modules:
        path, name = buried_modules[0]
        others = f" and {len(buried_modules) - 1} more" if len(buried_modules) > 1 else ""
        raise PatchError(
            f"cannot {action}: the class of {path or 'the model'!r}{others} was swapped again "
            "after the patch and is now "
            f"{name} (FSDP2 does this); {action} before wrapping the model"
        )
    for path, module in modules:
        swap = swapped(module)
        reason = None if swap is None else swap.behavior.fixed(module)
        if reason is not None:
            raise PatchError(f"cannot {action} {path!r}: {reason}; {action} before sharding")


def swap_of(module_class: type[nn.Module]) -> Swap | None:
    """The swap of a patched class; None for other classes, also for subclasses of one.

    Reads attributes and not ``vars(module_class)``, which Dynamo refuses to read after a write to
    the class during tracing.
    """
    is_patched = getattr(module_class, "_liger_multi_made", None) is module_class
    return module_class._liger_multi_swap if is_patched else None  # type: ignore[attr-defined]


def stock_of(module_class: type[nn.Module]) -> type[nn.Module]:
    """The original class of a patched class, or the class itself."""
    swap = swap_of(module_class)
    return swap.stock if swap else module_class


# --- patches of other libraries, which are reported and left alone ---

LIBRARIES = {
    "liger_kernel": "Liger",
    "unsloth": "Unsloth",
    "unsloth_zoo": "Unsloth",
    "kernels": "a hub kernel",
    "trl": "TRL",
    "cut_cross_entropy": "Cut Cross Entropy",
    "axolotl": "axolotl",
}
"""Packages that replace forwards, functions or losses, with their names in messages."""


def library_of(function: Any) -> str | None:
    """The name of the library that a function, method or class comes from; None for others."""
    function = getattr(function, "__func__", function)
    return LIBRARIES.get(str(getattr(function, "__module__", "") or "").partition(".")[0])


def conflict_of(module: nn.Module) -> str | None:
    """Why a module is not patched: other code has replaced its forward or its class; else None."""
    module_class = stock_class(module)
    own_forward = vars(module).get("forward")
    while isinstance(own_forward, ForwardWrapper):  # it calls the forward of the class
        own_forward = own_forward.before
    if own_forward is not None and not has_own_forward(module):
        return f"{library_of(own_forward) or 'other code'} replaced its forward"
    library = library_of(module_class) or library_of(module_class.forward)
    return f"{library} serves it ({module_class.__name__})" if library else None


def loss_conflict(model: nn.Module) -> str | None:
    """Why a model's loss is not patched: its forward or the loss function was replaced."""
    library = library_of(vars(model).get("forward")) or library_of(stock_class(model).forward)
    if library:
        return f"{library} replaced the forward of {type(model).__name__}, with the loss in it"
    library = library_of(F.cross_entropy)
    return f"{library} replaced torch.nn.functional.cross_entropy" if library else None


# --- a block ---

lock = threading.RLock()
"""Serializes patches of several threads."""
_open: weakref.WeakSet[Block] = weakref.WeakSet()
_numbers = itertools.count()


class Block:
    """The classes of a model's modules at this moment, which :meth:`end` restores.

    A block without references is dropped, and the model stays as it is.
    """

    def __init__(self, model: nn.Module) -> None:
        with lock:
            self.model, self.number = model, next(_numbers)
            self.before = {id(m): (m, type(m)) for m in model.modules()}
            _open.add(self)

    def end(self) -> None:
        """Restore the classes, except those that a later open block has recorded.

        Modules that were added since lose their patch.

        Raises:
            PatchError: Another library has put a class on top of a patched one since.
        """
        with lock:
            if self not in _open:
                return
            _open.discard(self)
            modules = list(self.model.named_modules())
            added = {id(m): (m, stock_class(m)) for _, m in modules if id(m) not in self.before}
            restored = {}
            # also modules that have left the model since
            for module, module_class in (self.before | added).values():
                next_block = self._next(module)
                if next_block is None:
                    restored[id(module)] = (module, module_class)
                elif stock_of(next_block.before[id(module)][1]) is stock_of(module_class):
                    next_block.before[id(module)] = (module, module_class)
            refuse_buried(
                [
                    (path, m)
                    for path, m in modules
                    if id(m) in restored and (id(m) in added or type(m) is not restored[id(m)][1])
                ],
                "unpatch",
            )
            for module, module_class in restored.values():
                _give_back(module, module_class)

    def forget(self) -> None:
        """End the block without restoring anything."""
        with lock:
            _open.discard(self)

    def _next(self, module: nn.Module) -> Block | None:
        """The first later open block that has recorded the module."""
        later_blocks = [b for b in _open if b.number > self.number and id(module) in b.before]
        return min(later_blocks, key=lambda block: block.number, default=None)


def _give_back(module: nn.Module, module_class: type[nn.Module]) -> None:
    """Restore a recorded class, unless the original class of the module has changed."""
    if type(module) is module_class or stock_class(module) is not stock_of(module_class):
        return
    swap = swap_of(module_class)
    if swap is None:
        restore(module)
    else:
        apply(module, swap)


# --- changes that parts yield ---

# A part is a generator ``find(model, request)`` over the facts of a model
# (:class:`~liger_multi.patching.evidence.facts.ModelFacts`). :mod:`liger_multi.patching.apply`
# carries out every change before it asks for the next one, so a part sees the classes that its
# earlier changes gave.


@dataclass(frozen=True, eq=False)
class Replace:
    """Give a module the class of a swap.

    Attributes:
        path: Of the module in the model.
        module: The module.
        swap: Its new class.
        replaced_by: The new forward, for the report; None for no line.
        options: Options of the line.
        op: The operator of the line; by default that of the swap.
    """

    path: str
    module: nn.Module
    swap: Swap
    replaced_by: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    op: str = ""


@dataclass(frozen=True, eq=False)
class Restore:
    """Restore the original class of a module, if it is patched.

    Attributes:
        path: Of the module in the model.
        module: The module.
        instead_of: An operator, whose line for this module in the same report is removed; there is
            no line for the restored class then.
    """

    path: str
    module: nn.Module
    instead_of: str = ""


@dataclass(frozen=True)
class Relabel:
    """Change report lines of modules that an earlier part replaced.

    Attributes:
        paths: Paths of the modules.
        op: The operator of their lines.
        replaced_by: The new text.
    """

    paths: frozenset[str]
    op: str
    replaced_by: str


Change: TypeAlias = Replace | Restore | Relabel | Skipped


# --- modules whose methods call global functions of their modeling file ---

# A behavior tells which calls of a class it replaces, and by which functions. The patched class
# has copies of the methods that load these functions (:mod:`.evidence.redirect`).

Call: TypeAlias = "tuple[str, FunctionType, str, Any]"
"""A method's name, the method, a global name that it calls, and the function of that name."""


class Calling(Patched):
    """A module whose methods call other global functions than those of its class."""

    def __init_subclass__(cls, **keywords: Any) -> None:
        """Create the methods with the class, in every process that patches or unpickles."""
        super().__init_subclass__(**keywords)
        if "_liger_multi_swap" in vars(cls):
            renew(cls)

    @staticmethod
    def find_calls(stock: type) -> list[Call]:
        """The calls of a class that are replaced."""
        raise NotImplementedError

    @staticmethod
    def served(name: str, target: Any, settings: Any) -> FunctionType:
        """The function that replaces a call; :func:`with_name_and_options` by its options."""
        raise NotImplementedError

    @staticmethod
    def new_method(method: Any, copy: FunctionType, settings: Any) -> FunctionType:
        """The new method, from the original one and a ``copy`` with replaced calls."""
        return copy


def renew(module_class: type) -> None:
    """Create the methods of a patched class from those that its original class has now."""
    calling: Any = next(
        k for k in module_class.__mro__ if any(b.__base__ is Calling for b in k.__bases__)
    )
    swap: Swap = vars(calling)["_liger_multi_swap"]
    behavior = cast("type[Calling]", swap.behavior)
    methods: dict[str, tuple[FunctionType, dict[str, Any]]] = {}
    for method, function, name, target in behavior.find_calls(swap.stock):
        methods.setdefault(method, (function, {}))[1][name] = target
    if methods == vars(calling).get("_liger_multi_methods"):
        return
    for method in vars(calling).get("_liger_multi_methods", {}):
        delattr(calling, method)
    for method, (function, targets_of_method) in methods.items():
        targets = {
            name: redirect.while_current(
                function, name, behavior.served(name, target, swap.settings)
            )
            for name, target in targets_of_method.items()
        }
        wrap = functools.partial(_while_it_holds, swap=swap, name=method)
        setattr(calling, method, redirect.redirected(function, targets, wrap))
    calling._liger_multi_methods = methods


def _while_it_holds(copy: FunctionType, swap: Swap, name: str) -> FunctionType:
    """The copy of a method, which calls the original if the class has another method by now.

    It may also be called after the module's original class was restored.
    """
    behavior, stock = cast("type[Calling]", swap.behavior), swap.stock
    patched_method = behavior.new_method(getattr(stock, name), copy, swap.settings)

    @functools.wraps(copy)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        module_class = type(self)
        if issubclass(module_class, behavior) and _method_holds(module_class, name):
            return patched_method(self, *args, **kwargs)
        return getattr(stock, name)(self, *args, **kwargs)

    return cast(FunctionType, method)


@constant_in_graphs
def _method_holds(module_class: Any, name: str) -> bool:
    copied_from, _ = module_class._liger_multi_methods[name]
    return getattr(module_class._liger_multi_swap.stock, name, None) is copied_from


def with_name_and_options(function: Any, name: str, options: Options) -> FunctionType:
    """Give a function its name in the globals of a modeling file."""
    suffix = "".join(f"_{value}" for value in options.shown().values())
    function.__name__ = f"_liger_multi_{name}{suffix}"
    return cast(FunctionType, function)
