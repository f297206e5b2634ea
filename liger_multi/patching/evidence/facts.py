"""The structure and the code of a model, read once per patch call and shared by all parts.

Every part of ``PARTS`` gets a :class:`ModelFacts` and asks it for the modules that may concern it:
by class (:class:`ClassFacts`, one for all modules of a class), by type of layer, or by names of
submodules. Other modules never reach the part.

Facts are cached for one call, in which no part adds modules or changes an original class. Whether a
module is patched may change during the call, so :meth:`ModelFacts.instances` is not cached.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

from torch import Tensor, nn

from liger_multi.grouping import grouped
from liger_multi.patching.evidence import redirect
from liger_multi.patching.evidence.signature import PLAIN
from liger_multi.patching.swap import unpatched_class

Named: TypeAlias = "tuple[str, nn.Module]"
"""A module after its path in the model."""

LINEAR_FORWARDS = {
    ("torch.nn.modules.linear", "Linear.forward"): False,
    ("transformers.pytorch_utils", "Conv1D.forward"): True,
}
"""Forwards of a plain linear layer, by module and name, and whether their weight is transposed."""


@dataclass(frozen=True, eq=False)
class ClassFacts:
    """The code of a class of modules.

    Attributes:
        module_class: The original class.
    """

    module_class: type[nn.Module]

    @cached_property
    def forward_names(self) -> frozenset[str]:
        """The attributes and globals that its own forward loads."""
        forward = redirect.methods(self.module_class).get("forward")
        return frozenset() if forward is None else redirect.names(forward)

    @cached_property
    def arguments(self) -> Collection[str]:
        """The names of the arguments of forward; empty if Python cannot tell them."""
        try:
            return inspect.signature(self.module_class.forward).parameters
        except (TypeError, ValueError):
            return ()

    def answers(self, name: str) -> bool:
        """Whether instances may have a method of this name, also by ``__getattr__``."""
        module_class: Any = self.module_class
        return hasattr(module_class, name) or module_class.__getattr__ is not nn.Module.__getattr__


def home_of(module_class: type[nn.Module]) -> tuple[str, str]:
    """Where a class's forward was written: module and qualified name."""
    forward = module_class.forward
    return getattr(forward, "__module__", ""), getattr(forward, "__qualname__", "")


@dataclass(frozen=True, eq=False)
class ModelFacts:
    """The modules of a model, and which of them may concern a part.

    Attributes:
        root: The model.
    """

    root: nn.Module

    @cached_property
    def modules(self) -> tuple[Named, ...]:
        """All modules in the order of ``named_modules``."""
        return tuple(self.root.named_modules())

    @cached_property
    def paths(self) -> Mapping[int, str]:
        """Paths by the identity of modules."""
        return {id(module): path for path, module in self.modules}

    @cached_property
    def order(self) -> Mapping[str, int]:
        """The index in :attr:`modules` by path."""
        return {path: index for index, (path, _) in enumerate(self.modules)}

    @cached_property
    def classes(self) -> Mapping[ClassFacts, tuple[Named, ...]]:
        """The modules by class."""
        groups = grouped((unpatched_class(entry[1]), entry) for entry in self.modules)
        return {
            ClassFacts(module_class): tuple(modules) for module_class, modules in groups.items()
        }

    @cached_property
    def leaves(self) -> tuple[Named, ...]:
        """Modules without submodules."""
        return tuple(entry for entry in self.modules if not entry[1]._modules)

    @cached_property
    def linears(self) -> tuple[Named, ...]:
        """Linear layers of any library, but not the wrappers of adapters."""
        return tuple(entry for entry in self.modules if looks_like_linear(entry[1]))

    @cached_property
    def quantized(self) -> tuple[Named, ...]:
        """Modules with a tensor of another class or dtype than plain floating-point weights."""
        return tuple(entry for entry in self.modules if _holds_codes(entry[1]))

    def of_class(self, accepts: Callable[[ClassFacts], object]) -> list[Named]:
        """Modules whose class ``accepts`` takes; it is called once per class."""
        return self.merged(*(entries for facts, entries in self.classes.items() if accepts(facts)))

    def with_children(self, names: Collection[str], minimum: int) -> list[Named]:
        """Modules with at least ``minimum`` submodules of these names."""
        return [entry for entry in self.modules if len(entry[1]._modules.keys() & names) >= minimum]

    def with_linears(self, *counts: int) -> list[Named]:
        """Modules with one of these numbers of linear layers, also layers with adapters."""
        return [
            entry
            for entry in self.modules
            if sum(map(has_features, entry[1]._modules.values())) in counts
        ]

    def around(self, path: str) -> list[nn.Module]:
        """The modules that contain the one at ``path``, the model first."""
        names = path.split(".") if path else []
        return [self.root.get_submodule(".".join(names[:n])) for n in range(len(names))]

    def with_attribute(self, name: str) -> list[Named]:
        """Modules with an attribute of their own under this name."""
        return [entry for entry in self.modules if name in vars(entry[1])]

    def instances(self, *classes: type[nn.Module]) -> list[Named]:
        """Modules that are now instances of one of these classes, such as patched ones."""
        return [entry for entry in self.modules if isinstance(entry[1], classes)]

    def merged(self, *groups: Iterable[Named]) -> list[Named]:
        """The modules of all groups, once each and in the order of the model."""
        by_id = {id(module): (path, module) for group in groups for path, module in group}
        return sorted(by_id.values(), key=lambda entry: self.order[entry[0]])


def looks_like_linear(module: nn.Module) -> bool:
    """Whether a module is a linear layer of any library, but not one with an adapter around it."""
    module_class, attributes = unpatched_class(module), vars(module)
    if issubclass(module_class, nn.Linear) or home_of(module_class) in LINEAR_FORWARDS:
        return True
    sizes = (attributes.get(name) for name in ("in_features", "out_features"))
    return all(isinstance(n, int) for n in sizes) and "base_layer" not in attributes["_modules"]


def has_features(layer: nn.Module | None) -> bool:
    """Whether a layer has ``in_features`` and ``out_features``."""
    sizes = (getattr(layer, name, None) for name in ("in_features", "out_features"))
    return all(isinstance(size, int) for size in sizes)


def _holds_codes(module: nn.Module) -> bool:
    attributes = vars(module)
    tables = (attributes["_parameters"], attributes["_buffers"], attributes)
    return any(
        type(x) not in PLAIN or not x.is_floating_point() or x.itemsize < 2
        for table in tables
        for x in table.values()
        if isinstance(x, Tensor)
    )
