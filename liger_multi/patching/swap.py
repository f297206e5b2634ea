"""Swap the class of one module instance, and give the original class back.

Nothing is written into the module: its behavior is defined by its new class, one per
(original class, behavior, settings). The one exception is a weight that is kept in FP8, which takes
the place of the original while the module has that behavior. The name of the class and its module
are kept, so ``save_pretrained``, adapters that match by class or by name, and ``isinstance`` see
what they saw before; ``deepcopy`` and ``pickle`` rebuild the class.

What a model was before a patch comes back in whatever order patches end. Every block remembers the
class that each module had when it began. One that ends while a later one is still open hands that
over: the later block then restores the state in which the earlier one began. So no order of ends
leaves anything behind, in one thread or in several.
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
    """Why an instance has the class that it has.

    Attributes:
        op: Operator that the new forward calls.
        stock: The class that the instance had.
        behavior: The mixin that brings the new forward.
        settings: What the forward needs to know; hashable and picklable.
        around: A mixin whose forward calls that of the behavior, if any.
        around_settings: What that forward needs to know; hashable and picklable.
    """

    op: str
    stock: type[nn.Module]
    behavior: type[Patched]
    settings: Hashable
    around: type[Patched] | None = None
    around_settings: Hashable = None


class Patched(nn.Module):
    """Base of the behaviors; the concrete classes are made by :func:`apply`.

    Somebody may hold a bound ``forward`` of a patched module (accelerate's hooks, a compiled
    forward) and call it when the module has its original class again, and another thread may give
    that back while a forward runs. So every behavior's forward reads the class of the instance
    once, as its first step, and has all that the class says from there: settings, and the original
    forward (:func:`original`; ``super()`` looks at the instance again). Where that class is not one
    of the behavior's, the forward is the one of the class.
    """

    loose: ClassVar[bool] = False
    """Whether a module may be called unpatched while somebody's class is on top of this one."""
    reported: ClassVar[bool] = True
    """Whether the report has a line for a module that gets its class back."""
    _liger_multi_swap: ClassVar[Swap]
    _liger_multi_code: ClassVar[Code]
    _liger_multi_reads: ClassVar[bool]
    _liger_multi_inner: ClassVar[type[nn.Module]]

    @staticmethod
    def entered(module: nn.Module, settings: Any) -> None:
        """Called when a module gets this behavior, or other settings of it."""

    @staticmethod
    def left(module: nn.Module) -> None:
        """Called when a module gets another behavior, or its original class; undoes ``entered``."""

    @staticmethod
    def fixed(module: nn.Module) -> str | None:
        """Why ``entered`` cannot be undone now, or None."""
        return None

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle and deepcopy through the original class; the made class has no importable name."""
        reduced = super().__reduce_ex__(protocol)
        module_class = reduced[1][0] if isinstance(reduced, tuple) and reduced[1] else None
        if not isinstance(module_class, type) or "_liger_multi_swap" not in vars(module_class):
            return reduced
        return (_new, (module_class._liger_multi_swap,), *reduced[2:])  # type: ignore[attr-defined]


COMPILERS = (DYNAMO, "torch.jit")


class SwappedType(type):
    """The type of the classes that :func:`apply` gives: equal to the original, one way only.

    Other libraries compare classes directly: ``type(module) in mapping`` (``quantize_dynamic``,
    policies of DeepSpeed) or ``type(module) == nn.Linear``. These comparisons hold as for the
    original. Two patched classes of one original are not equal to each other. ``is`` distinguishes
    all of them. So do PyTorch's compilers: Dynamo finds what ``super()`` calls by the place of a
    class among its bases, where both of them stand, and TorchScript keeps a type by class.
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


_types: dict[type, type[SwappedType]] = {type: SwappedType}
"""Our metaclasses by the metaclass of the original class; abstract classes have their own."""


def _type_of(stock: type[nn.Module]) -> type[SwappedType]:
    known = _types.get(type(stock))
    if known is None:
        metaclass: Any = type(stock)
        if not issubclass(metaclass, SwappedType):
            metaclass = type(SwappedType.__name__, (SwappedType, metaclass), {})
        known = _types.setdefault(type(stock), metaclass)
    return known


_classes: dict[Swap, type[nn.Module]] = {}


def made_class(swap: Swap) -> type[nn.Module]:
    """The class that :func:`apply` gives to an instance."""
    swapped_class = _classes.get(swap)
    if swapped_class is None:
        stock = swap.stock
        bases = (swap.behavior, stock)
        if swap.around is not None:
            bases = (swap.around, made_class(replace(swap, around=None, around_settings=None)))
        namespace = {
            "_liger_multi_swap": swap,
            "_liger_multi_inner": bases[-1],
            "__module__": stock.__module__,
            "__qualname__": stock.__qualname__,
            "__doc__": stock.__doc__,
        }
        fresh: Any = _type_of(stock)(stock.__name__, bases, namespace)
        fresh._liger_multi_made = fresh  # a subclass inherits it, and is not it
        _note_code(fresh, swap)
        swapped_class = _classes.setdefault(swap, fresh)
    return swapped_class


def _note_code(module_class: Any, swap: Swap) -> None:
    """Record on a class of ours the code that it was probed with, and whether that reads values."""
    signature = getattr(swap.settings, "signature", None)
    code = code_of(swap.stock, signature if isinstance(signature, Signature) else None)
    module_class._liger_multi_code, module_class._liger_multi_reads = code, reads_values(code)


def _new(swap: Swap) -> nn.Module:
    swapped_class = made_class(swap)
    return swapped_class.__new__(swapped_class)


def swapped(module: nn.Module) -> Swap | None:
    """The swap of an instance whose class is exactly one of ours, else None."""
    return swap_of(type(module))


def stock_class(module: nn.Module) -> type[nn.Module]:
    """The class that the module has when it is not patched."""
    swap = swapped(module)
    return swap.stock if swap else type(module)


def unpatched_class(module: nn.Module) -> type[nn.Module]:
    """The same, also where somebody swapped the class once more on top of ours."""
    module_class = type(module)
    return (
        module_class._liger_multi_swap.stock if issubclass(module_class, Patched) else module_class
    )


def original(module_class: type[nn.Module]) -> Any:
    """The forward that instances of a class of ours, or of one on top of it, were built with."""
    return module_class._liger_multi_swap.stock.forward  # type: ignore[attr-defined]


def buried(module: nn.Module) -> bool:
    """Whether somebody swapped the class once more on top of ours (FSDP2 does)."""
    return isinstance(module, Patched) and swapped(module) is None


def apply(module: nn.Module, swap: Swap) -> str:
    """Give ``module`` the class of ``swap``; return what happened, in the report's words."""
    before = swapped(module)
    _drop_own_forward(module)
    _note_code(made_class(swap), swap)  # probed just now
    if before == swap:
        swap.behavior.entered(module, swap.settings)  # weights may have been replaced since
        return "already patched"
    module.__class__ = made_class(swap)
    if before and before.behavior is not swap.behavior:
        before.behavior.left(module)
    swap.behavior.entered(module, swap.settings)
    return "options changed" if before else "patched"


def restore(module: nn.Module) -> Swap | None:
    """Give the original class back; None when the module was not patched."""
    swap = swapped(module)
    if swap:
        _drop_own_forward(module)
        module.__class__ = swap.stock
        swap.behavior.left(module)
    return swap


def has_own_forward(module: nn.Module) -> bool:
    """Whether the forward in a module's attributes is just that of its class, bound.

    transformers 5.0 leaves it there when it has captured outputs, and accelerate when it removes
    its hooks: they put a wrapper into the attributes, and put back what ``module.forward`` was.
    Where the patch came or went in between, that is one of our forwards, or the original one.
    """
    own_forward = vars(module).get("forward")
    function = getattr(own_forward, "__func__", None)
    if getattr(own_forward, "__self__", None) is not module or function is None:
        return False
    written_in = str(getattr(function, "__globals__", {}).get("__name__"))
    ours = written_in.startswith("liger_multi.patching.")
    return ours or function in (type(module).forward, stock_class(module).forward)


def _drop_own_forward(module: nn.Module) -> None:
    """Let the class decide again; the attribute would outlive a change of class."""
    if has_own_forward(module):
        del module.__dict__["forward"]


def refuse_buried(modules: Iterable[tuple[str, nn.Module]], action: str) -> None:
    """Raise, before anything is changed, when a class on top of ours or a module is in the way.

    Raises:
        PatchError: Names the first module and its class.
    """
    modules = list(modules)
    buried_modules = [
        (path, type(m).__name__)
        for path, m in modules
        if buried(m) and not cast("type[Patched]", type(m))._liger_multi_swap.behavior.loose
    ]
    if buried_modules:
        path, name = buried_modules[0]
        more = f" and {len(buried_modules) - 1} more" if len(buried_modules) > 1 else ""
        raise PatchError(
            f"cannot {action}: the class of {path or 'the model'!r}{more} was swapped again "
            "after the patch and is now "
            f"{name} (FSDP2 does this); {action} before wrapping the model"
        )
    for path, module in modules:
        swap = swapped(module)
        reason = None if swap is None else swap.behavior.fixed(module)
        if reason is not None:
            raise PatchError(f"cannot {action} {path!r}: {reason}; {action} before sharding")


def swap_of(module_class: type[nn.Module]) -> Swap | None:
    """The swap of a class that is exactly one of ours, else None.

    This reads attributes and not ``vars(module_class)``: Dynamo refuses to read that mapping when
    anything was written to the class while it was tracing.
    """
    ours = getattr(module_class, "_liger_multi_made", None) is module_class
    return module_class._liger_multi_swap if ours else None  # type: ignore[attr-defined]


def stock_of(module_class: type[nn.Module]) -> type[nn.Module]:
    """The class that stands behind one of ours, or the class itself."""
    swap = swap_of(module_class)
    return swap.stock if swap else module_class


# --- patches of other libraries: reported, never stacked upon ---

LIBRARIES = {
    "liger_kernel": "Liger",
    "unsloth": "Unsloth",
    "unsloth_zoo": "Unsloth",
    "kernels": "a hub kernel",
    "trl": "TRL",
    "cut_cross_entropy": "Cut Cross Entropy",
    "axolotl": "axolotl",
}
"""Top-level packages that replace forwards, functions or losses, and how messages call them."""


def library_of(function: Any) -> str | None:
    """Which of these libraries a function, method or class comes from."""
    function = getattr(function, "__func__", function)
    return LIBRARIES.get(str(getattr(function, "__module__", "") or "").partition(".")[0])


def conflict_of(module: nn.Module) -> str | None:
    """Why a module is not ours to patch: its forward was replaced, on it or on its class."""
    module_class = stock_class(module)
    own_forward = vars(module).get("forward")
    if own_forward is not None and not has_own_forward(module):
        return f"{library_of(own_forward) or 'somebody else'} replaced its forward"
    library = library_of(module_class) or library_of(module_class.forward)
    return f"{library} serves it ({module_class.__name__})" if library else None


def loss_conflict(model: nn.Module) -> str | None:
    """Why a model's loss is not ours: the forward that holds it, or the loss function itself."""
    library = library_of(vars(model).get("forward")) or library_of(stock_class(model).forward)
    if library:
        return f"{library} replaced the forward of {type(model).__name__}, with the loss in it"
    library = library_of(F.cross_entropy)
    return f"{library} replaced torch.nn.functional.cross_entropy" if library else None


# --- a block ---

lock = threading.RLock()
"""Held while classes of modules change: patches of several threads follow one another."""
_open: weakref.WeakSet[Block] = weakref.WeakSet()
_numbers = itertools.count()


class Block:
    """The classes of a model's modules from here on, until :meth:`end` brings them back.

    A block that nobody holds any more is forgotten, and the model stays as it is.
    """

    def __init__(self, model: nn.Module) -> None:
        with lock:
            self.model, self.number = model, next(_numbers)
            self.before = {id(m): (m, type(m)) for m in model.modules()}
            _open.add(self)

    def end(self) -> None:
        """Bring the classes back that no later block holds; modules that came lose the patch.

        Raises:
            PatchError: A class that is no longer ours, and was when the block began.
        """
        with lock:
            if self not in _open:
                return
            _open.discard(self)
            now = list(self.model.named_modules())
            came = {id(m): (m, stock_class(m)) for _, m in now if id(m) not in self.before}
            mine = {}
            # those that left the model while it was patched, too
            for module, module_class in (self.before | came).values():
                later = self._next(module)
                if later is None:
                    mine[id(module)] = (module, module_class)
                elif stock_of(later.before[id(module)][1]) is stock_of(module_class):
                    later.before[id(module)] = (module, module_class)
            refuse_buried(
                [
                    (path, m)
                    for path, m in now
                    if id(m) in mine and (id(m) in came or type(m) is not mine[id(m)][1])
                ],
                "unpatch",
            )
            for module, module_class in mine.values():
                _give_back(module, module_class)

    def forget(self) -> None:
        """Keep what was done since."""
        with lock:
            _open.discard(self)

    def _next(self, module: nn.Module) -> Block | None:
        """The first of the open blocks that began later and hold the module."""
        holding = [b for b in _open if b.number > self.number and id(module) in b.before]
        return min(holding, key=lambda block: block.number, default=None)


def _give_back(module: nn.Module, module_class: type[nn.Module]) -> None:
    """Back to a class that the module had, where it still is a form of it."""
    if type(module) is module_class or stock_class(module) is not stock_of(module_class):
        return
    swap = swap_of(module_class)
    if swap is None:
        restore(module)
    else:
        apply(module, swap)


# --- what parts ask for ---

# A part is a generator ``find(model, request)``. :mod:`liger_multi.patching.apply` carries out
# every change before it asks for the next one, so a part sees the model as its earlier changes
# left it.


@dataclass(frozen=True, eq=False)
class Replace:
    """Give a module the class of a swap.

    Attributes:
        path: Of the module in the model.
        module: The module.
        swap: Its new class.
        replaced_by: What the report says that runs now; None for no line.
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
    """Give a module the class back that it had before it was patched, if it was.

    Attributes:
        path: Of the module in the model.
        module: The module.
        instead_of: An operator whose line for this module, of the same call, goes away; there is
            no line for the restored class then.
    """

    path: str
    module: nn.Module
    instead_of: str = ""


@dataclass(frozen=True)
class Relabel:
    """Modules that an earlier part replaced run another operator after all.

    Attributes:
        paths: Of the modules.
        op: The operator of their lines.
        replaced_by: What these say now.
    """

    paths: frozenset[str]
    op: str
    replaced_by: str


Change: TypeAlias = Replace | Restore | Relabel | Skipped


# --- modules whose methods call functions of ours under global names of their modeling file ---

# A behavior says which calls of a class it serves, and by what. The methods are made with the
# class of an instance: copies that load our function
# (:mod:`liger_multi.patching.evidence.redirect`).

Call: TypeAlias = "tuple[str, FunctionType, str, Any]"
"""A method's name, the method, a global name that it calls, and what stands there."""


class Calling(Patched):
    """A module whose methods call other functions than those of its class."""

    def __init_subclass__(cls, **keywords: Any) -> None:
        """Make the methods with the class: it is made wherever something patches or unpickles."""
        super().__init_subclass__(**keywords)
        if "_liger_multi_swap" in vars(cls):
            renew(cls)

    @staticmethod
    def find_calls(stock: type) -> list[Call]:
        """The calls of a class that are served."""
        raise NotImplementedError

    @staticmethod
    def served(name: str, called: Any, settings: Any) -> FunctionType:
        """The function that replaces a call; :func:`named` by its options."""
        raise NotImplementedError

    @staticmethod
    def whole(method: Any, copy: FunctionType, settings: Any) -> FunctionType:
        """The method that replaces one, whose ``copy`` calls the functions that are served."""
        return copy


def renew(patched_class: type) -> None:
    """Make the methods of a class of ours from those that its original class has now."""
    patched_class = next(
        k for k in patched_class.__mro__ if any(b.__base__ is Calling for b in k.__bases__)
    )
    swap: Swap = vars(patched_class)["_liger_multi_swap"]
    behavior = cast("type[Calling]", swap.behavior)
    methods: dict[str, tuple[FunctionType, dict[str, Any]]] = {}
    for method, function, name, called in behavior.find_calls(swap.stock):
        methods.setdefault(method, (function, {}))[1][name] = called
    if methods == vars(patched_class).get("_liger_multi_methods"):
        return
    for method in vars(patched_class).get("_liger_multi_methods", {}):
        delattr(patched_class, method)
    for method, (function, used) in methods.items():
        targets = {
            name: redirect.while_current(
                function, name, behavior.served(name, called, swap.settings)
            )
            for name, called in used.items()
        }
        around = functools.partial(_while_it_holds, swap=swap, name=method)
        setattr(patched_class, method, redirect.redirected(function, targets, around))
    patched_class._liger_multi_methods = methods  # type: ignore[attr-defined]


def _while_it_holds(copy: FunctionType, swap: Swap, name: str) -> FunctionType:
    """A method that is the copy, as long as the original class has what it was copied from.

    It may be called, by somebody who holds it, when the module has its original class again.
    """
    behavior, stock = cast("type[Calling]", swap.behavior), swap.stock
    ours = behavior.whole(getattr(stock, name), copy, swap.settings)

    @functools.wraps(copy)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        module_class = type(self)
        if issubclass(module_class, behavior) and _method_holds(module_class, name):
            return ours(self, *args, **kwargs)
        return getattr(stock, name)(self, *args, **kwargs)

    return cast(FunctionType, method)


@constant_in_graphs
def _method_holds(module_class: Any, name: str) -> bool:
    copied_from, _ = module_class._liger_multi_methods[name]
    return getattr(module_class._liger_multi_swap.stock, name, None) is copied_from


def named(function: Any, name: str, options: Options) -> FunctionType:
    """The name that a function has in the globals of a modeling file."""
    suffix = "".join(f"_{value}" for value in options.shown().values())
    function.__name__ = f"_liger_multi_{name}{suffix}"
    return cast(FunctionType, function)
