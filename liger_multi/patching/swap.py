"""Swap the class of one module instance, and give the stock class back.

Nothing is written into the module: what an instance should do stands on its new class, one per
(stock class, behaviour, settings). Stock name and module are kept, so ``save_pretrained``, adapters
that match by class or by name, and ``isinstance`` see what they saw before; ``deepcopy`` and
``pickle`` rebuild the class.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

from torch import nn

from liger_multi.errors import PatchError


@dataclass(frozen=True)
class Swap:
    """Why an instance has the class that it has.

    Attributes:
        op: Operator that the new forward calls.
        stock: The class that the instance had.
        behaviour: The mixin that brings the new forward.
        settings: What the forward needs to know; hashable and picklable.
        around: A mixin whose forward calls that of the behaviour, if any.
    """

    op: str
    stock: type[nn.Module]
    behaviour: type[Patched]
    settings: Hashable
    around: type[Patched] | None = None


class Patched(nn.Module):
    """Base of the behaviours; the concrete classes are made by :func:`swap`."""

    _liger_multi_swap: ClassVar[Swap]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle and deepcopy through the stock class; the made class has no importable name."""
        reduced = super().__reduce_ex__(protocol)
        kind = reduced[1][0] if isinstance(reduced, tuple) and reduced[1] else None
        if not isinstance(kind, type) or "_liger_multi_swap" not in vars(kind):
            return reduced
        return (_new, (kind._liger_multi_swap,), *reduced[2:])  # type: ignore[attr-defined]


_classes: dict[Swap, type[nn.Module]] = {}


def _class_of(swap: Swap) -> type[nn.Module]:
    made = _classes.get(swap)
    if made is None:
        stock = swap.stock
        bases = (swap.behaviour, stock)
        if swap.around is not None:
            bases = (swap.around, _class_of(replace(swap, around=None)))
        namespace = {
            "_liger_multi_swap": swap,
            "__module__": stock.__module__,
            "__qualname__": stock.__qualname__,
            "__doc__": stock.__doc__,
        }
        fresh = type(stock.__name__, bases, namespace)
        made = _classes.setdefault(swap, fresh)
    return made


def _new(swap: Swap) -> nn.Module:
    made = _class_of(swap)
    return made.__new__(made)


def swapped(module: nn.Module) -> Swap | None:
    """The swap of an instance whose class is exactly one of ours, else None."""
    return vars(type(module)).get("_liger_multi_swap")


def stock_class(module: nn.Module) -> type[nn.Module]:
    """The class that the module has when it is not patched."""
    found = swapped(module)
    return found.stock if found else type(module)


def buried(module: nn.Module) -> bool:
    """Whether somebody swapped the class once more on top of ours (FSDP2 does)."""
    return isinstance(module, Patched) and swapped(module) is None


def apply(module: nn.Module, swap: Swap) -> str:
    """Give ``module`` the class of ``swap``; return what happened, in the report's words."""
    found = swapped(module)
    _drop_own_forward(module)
    if found == swap:
        return "already patched"
    module.__class__ = _class_of(swap)
    return "options changed" if found else "patched"


def restore(module: nn.Module) -> Swap | None:
    """Give the stock class back; None when the module was not patched."""
    found = swapped(module)
    if found:
        _drop_own_forward(module)
        module.__class__ = found.stock
    return found


def has_own_forward(module: nn.Module) -> bool:
    """Whether the forward in a module's attributes is just that of its class, bound.

    transformers 5.0 leaves it there when it has captured outputs: it put a wrapper into the
    attributes, and puts back what ``module.forward`` was.
    """
    held = vars(module).get("forward")
    return (
        getattr(held, "__self__", None) is module
        and getattr(held, "__func__", None) is type(module).forward
    )


def _drop_own_forward(module: nn.Module) -> None:
    """Let the class decide again; the attribute would outlive a change of class."""
    if has_own_forward(module):
        del module.__dict__["forward"]


def refuse_buried(modules: Iterable[tuple[str, nn.Module]], action: str) -> None:
    """Raise, before anything is changed, when a class on top of ours is in the way.

    Raises:
        PatchError: Names the first module and its class.
    """
    found = [(path, type(m).__name__) for path, m in modules if buried(m)]
    if found:
        path, name = found[0]
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        raise PatchError(
            f"cannot {action}: the class of {path or 'the model'!r}{more} was swapped again "
            "after the patch and is now "
            f"{name} (FSDP2 does this); {action} before wrapping the model"
        )


def snapshot(model: nn.Module) -> Callable[[], None]:
    """Remember the classes of all modules; the returned function brings them back.

    Modules that came in between lose the patch; a class that is no longer ours raises PatchError.
    """
    before = {id(m): (m, type(m)) for m in model.modules()}

    def bring_back() -> None:
        now = [(path, m) for path, m in model.named_modules()]
        refuse_buried(
            [(p, m) for p, m in now if id(m) not in before or type(m) is not before[id(m)][1]],
            "unpatch",
        )
        for _, module in now:
            if id(module) not in before:
                restore(module)
        for module, kind in before.values():  # also those that left the model while it was patched
            if type(module) is not kind and stock_class(module) is stock_of(kind):
                _drop_own_forward(module)
                module.__class__ = kind

    return bring_back


def stock_of(kind: type[nn.Module]) -> type[nn.Module]:
    """The class that stands behind one of ours, or the class itself."""
    found = cast("Swap | None", vars(kind).get("_liger_multi_swap"))
    return found.stock if found else kind
