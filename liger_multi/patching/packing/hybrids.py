"""Packed samples in hybrid models: mixers get the id of every token's sample.

Modeling files pass ids of packed samples to mixers as ``seq_idx`` or ``cu_seq_lens_q``, but do not
compute them from ``position_ids``. A mixer without ids leaks each sample into the next one.
:func:`packing` takes the facts of a model and returns a swap per module:

* :class:`PackedModel` computes the ids once per forward pass, on the device.
* :class:`IdPassingModel` passes them on where a model drops keyword arguments.
* :class:`SeparateModel` raises for packed rows if some mixer could not get ids.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn

from liger_multi._torch_private import assert_async
from liger_multi.errors import PackingError
from liger_multi.modules.arguments import parameters_of
from liger_multi.patching import shards
from liger_multi.patching.evidence.facts import ModelFacts
from liger_multi.patching.mixers import SERVED, WHOLE, FusedMixer, mixer_calls, unserved
from liger_multi.patching.packing.samples import rows_of, sample_ids
from liger_multi.patching.packing.tree import offered, running
from liger_multi.patching.swap import Patched, Swap, unpatched_class


class _Model(Patched):
    """A model whose arguments are changed before its forward; it keeps the signature."""

    def __init_subclass__(cls, **keywords: Any) -> None:
        """Create the forward with the class."""
        super().__init_subclass__(**keywords)
        if "_liger_multi_swap" in vars(cls):
            cls.forward = _with_forward_kwargs(vars(cls)["_liger_multi_swap"])

    @staticmethod
    def forward_kwargs(
        swap: Swap, arguments: dict[str, Any], kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        """New keyword arguments of the forward; ``arguments`` has all arguments by name."""
        return kwargs

    @staticmethod
    def called(swap: Swap, model: Any, arguments: dict[str, Any]) -> Any:
        """The object that the forward is called with."""
        return model


def _with_forward_kwargs(swap: Swap) -> Callable[..., Any]:
    behavior, stock = cast("type[_Model]", swap.behavior), swap.stock.forward
    names = parameters_of(stock)

    @functools.wraps(stock)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self, behavior) and shards.row() is None:  # which tells ids itself
            arguments = {**dict(zip(names, args, strict=False)), **kwargs}
            kwargs = behavior.forward_kwargs(swap, arguments, kwargs)
            return swap.stock.forward(behavior.called(swap, self, arguments), *args, **kwargs)
        return swap.stock.forward(self, *args, **kwargs)

    return forward


def _ids_for_mixers(arguments: dict[str, Any]) -> Tensor | None:
    """The ids for mixers, ``(B, T)``: of samples, or of segments with the tree of the row."""
    ids, rows = sample_ids(arguments), rows_of(arguments)
    if rows is None or rows.shape[1] == 1:
        return None
    tree = running(rows.shape[1], rows.shape[0])
    if tree is not None:
        return None if tree.is_path and not tree.padding else tree.ids(rows.device)
    return None if ids is None else ids.expand(rows.shape[0], -1)


class PackedModel(_Model):
    """A model that passes ids of samples to its mixers, as ``seq_idx``."""

    @staticmethod
    def forward_kwargs(
        swap: Swap, arguments: dict[str, Any], kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        """Add the ids, unless rows have one token."""
        ids = _ids_for_mixers(arguments)
        return kwargs if ids is None else {**kwargs, "seq_idx": ids}


class _IdPassingProxy:
    """Takes the place of a model in one call, and passes ids of samples to the inner model."""

    def __init__(self, model: Any, inner: str, seq_idx: Tensor) -> None:
        self._liger_multi_model = model
        setattr(self, inner, functools.partial(getattr(model, inner), seq_idx=seq_idx))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._liger_multi_model, name)


class IdPassingModel(_Model):
    """A model whose forward drops its keyword arguments, such as Mamba-2's head."""

    @staticmethod
    def called(swap: Swap, model: Any, arguments: dict[str, Any]) -> Any:
        """The ``self`` of the forward: a proxy that passes ids on, if there are any."""
        ids = _ids_for_mixers(arguments)
        inner = cast(str, swap.settings)
        return model if ids is None else _IdPassingProxy(model, inner, ids)


def only_reads_self(forward: Callable[..., Any], inner: str) -> bool:
    """Whether a forward only reads attributes of ``self``, so that a proxy may replace it."""
    tree = _tree(forward)
    if tree is None:
        return False
    self_attributes = [
        n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and _is_self(n.value)
    ]
    return (
        len(self_attributes) == sum(_is_self(n) for n in ast.walk(tree))
        and all(isinstance(n.ctx, ast.Load) for n in self_attributes)
        and any(n.attr == inner for n in self_attributes)
        and not any(isinstance(n, ast.Name) and n.id == "super" for n in ast.walk(tree))
    )


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


class SeparateModel(_Model):
    """A model that raises for packed rows, because some mixer would leak samples."""

    @staticmethod
    def forward_kwargs(
        swap: Swap, arguments: dict[str, Any], kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        """Check for several samples; if there are ids, this waits for the device.

        Raises:
            ValueError: A row has several samples.
        """
        ids, rows = sample_ids(arguments), rows_of(arguments)
        lacking = ", ".join(cast("tuple[str, ...]", swap.settings))
        if rows is not None and offered(rows.shape[1], rows.shape[0]) is not None:
            raise PackingError(
                f"{swap.stock.__name__} does not serve shared prefixes: nothing keeps branches "
                f"apart in {lacking}"
            )
        if ids is None or ids.shape[-1] < 2:
            return kwargs
        begins = ids[:, 1:] != ids[:, :-1]
        message = (
            f"{swap.stock.__name__} got rows of several samples, which it would mix: nothing keeps "
            f"them apart in {lacking}. Pass one sample a row, with an attention mask."
        )
        if torch.compiler.is_compiling():
            assert_async(~begins.any(), message)
        elif bool(begins.any()):
            raise ValueError(message)
        return kwargs


def packing(facts: ModelFacts) -> dict[str, Swap]:
    """Swaps for packed rows by path.

    Modules with mixers that take embeddings pass ids on, if all mixers are patched and get keyword
    arguments. Otherwise the whole model refuses packed rows.
    """
    if not facts.instances(FusedMixer):
        return {}
    model, calling = (
        facts.root,
        facts.of_class(lambda class_facts: mixer_calls(class_facts.module_class)),
    )
    mixers = {path: _functions_without_ids(module) for path, module in calling}
    embedding = facts.of_class(lambda class_facts: "inputs_embeds" in class_facts.arguments)
    bases = [path for path, _ in embedding if _contains_any(path, mixers)]
    bases = [p for p in bases if not any(q != p and _contains_any(p, [q]) for q in bases)]
    lacking = {name for names in mixers.values() for name in names}
    lacking |= {
        type(model.get_submodule(path)).__name__
        for path in mixers
        if not any(_contains_any(base, [path]) and _passes_on(model, base, path) for base in bases)
    }
    lacking |= {name for base in bases for name in _convolutions(model, base)}
    lacking |= {f"the attention of {c.__name__}" for c in _unmasked(model, bases)}
    telling: dict[str, Swap] = {}
    for path, inner in (entry for base in bases for entry in _models_that_drop_kwargs(model, base)):
        stock = unpatched_class(model.get_submodule(path))
        if only_reads_self(stock.forward, inner):
            telling[path] = Swap("packing", stock, IdPassingModel, inner)
        else:
            lacking.add(stock.__name__)
    if lacking:
        settings = tuple(sorted(lacking))
        return {"": Swap("packing", unpatched_class(model), SeparateModel, settings)}
    return telling | {
        path: Swap("packing", unpatched_class(module), PackedModel, None)
        for path, module in ((p, model.get_submodule(p)) for p in bases)
    }


def _convolutions(model: nn.Module, base: str) -> set[str]:
    """Classes of modules with a convolution over tokens that no operator serves."""
    class_names = set()
    for path, module in model.get_submodule(base).named_modules():
        if isinstance(module, nn.Conv1d) and module.kernel_size[0] > 1 and path:
            parent = model.get_submodule(f"{base}.{path}".lstrip(".").rpartition(".")[0])
            if not isinstance(parent, FusedMixer):
                class_names.add(type(parent).__name__)
    return class_names


def _models_that_drop_kwargs(model: nn.Module, base: str) -> list[tuple[str, str]]:
    """Models that drop keyword arguments: paths, and the name of the model within."""
    names = base.split(".") if base else []
    outer = [(".".join(names[:n]), name) for n, name in enumerate(names)]
    modules = [(path, name, model.get_submodule(path)) for path, name in outer]
    return [
        (path, name)
        for path, name, module in modules
        if not isinstance(module, _HOLDERS) and not _hands_on(unpatched_class(module).forward, name)
    ]


def _unmasked(model: nn.Module, bases: Iterable[str]) -> set[type]:
    """Classes of models whose attention masks do not depend on positions."""
    classes = {unpatched_class(model.get_submodule(base)) for base in bases}
    return {model_class for model_class in classes if not _masks_by_positions(model_class.forward)}


@functools.lru_cache(maxsize=1024)
def _masks_by_positions(forward: Callable[..., Any]) -> bool:
    """Whether a forward passes positions to every call of ``create_causal_mask``."""
    tree = _tree(forward)
    if tree is None:
        return False
    masks = [
        n
        for n in ast.walk(tree)
        if isinstance(n, ast.Call)
        and isinstance(n.func, ast.Name)
        and n.func.id == "create_causal_mask"
    ]
    dicts = {
        target.id: [key.value for key in node.value.keys if isinstance(key, ast.Constant)]
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict)
        for target in node.targets
        if isinstance(target, ast.Name)
    }

    def has_positions(call: ast.Call) -> bool:
        inner = [
            k.value.id for k in call.keywords if k.arg is None and isinstance(k.value, ast.Name)
        ]
        return any(k.arg == "position_ids" for k in call.keywords) or any(
            "position_ids" in dicts.get(name, ()) for name in inner
        )

    return all(has_positions(call) for call in masks)


def _functions_without_ids(module: nn.Module) -> list[str]:
    """The functions of a mixer that get no ids."""
    lacking = unserved(unpatched_class(module))
    settings = type(module)._liger_multi_swap.settings if isinstance(module, FusedMixer) else None
    for _, function, name, _ in mixer_calls(unpatched_class(module)):
        is_passed_on = name in WHOLE or _hands_on(function, name)
        if getattr(settings, SERVED[name], None) is None or not is_passed_on:
            lacking.append(name)
    return lacking


_HOLDERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def _contains_any(path: str, paths: Iterable[str]) -> bool:
    return any(not path or inner == path or inner.startswith(f"{path}.") for inner in paths)


def _passes_on(model: nn.Module, base: str, path: str) -> bool:
    """Whether keyword arguments of a model reach one of its modules, by the source of all calls."""
    names = path.split(".")
    depth = base.count(".") + 1 if base else 0
    modules = [
        (names[n], model.get_submodule(".".join(names[:n]))) for n in range(depth, len(names))
    ]
    calls = [(name, module) for name, module in modules if not isinstance(module, _HOLDERS)]
    return _takes_any(model.get_submodule(path)) and all(
        _takes_any(module) and _hands_on(unpatched_class(module).forward, name)
        for name, module in calls
    )


def _takes_any(module: nn.Module) -> bool:
    parameters = inspect.signature(unpatched_class(module).forward).parameters.values()
    return any(p.kind is p.VAR_KEYWORD for p in parameters)


def _tree(forward: Callable[..., Any]) -> ast.AST | None:
    """The syntax tree of a method; None without source."""
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(forward))))
    except (OSError, SyntaxError):
        return None


@functools.lru_cache(maxsize=1024)
def _hands_on(forward: Callable[..., Any], name: str) -> bool:
    """Whether a method passes ``**kwargs`` to an attribute, its elements in a loop, or a function.

    Other calls of it may only have one positional argument: these do not mix tokens.

    Args:
        forward: The method.
        name: An attribute of the module, or a function.
    """
    tree = _tree(forward)
    if tree is None:
        return False

    def mentions(node: ast.AST) -> bool:
        return any(isinstance(n, ast.Attribute) and n.attr == name for n in ast.walk(node))

    loops = [n for n in ast.walk(tree) if isinstance(n, ast.For) and mentions(n.iter)]
    items = {n.id for loop in loops for n in ast.walk(loop.target) if isinstance(n, ast.Name)}
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call)]
    calls_of_name = [
        call
        for call in calls
        if (isinstance(call.func, ast.Attribute) and call.func.attr == name)
        or (isinstance(call.func, ast.Name) and call.func.id in {name, *items})
    ]
    unpacking = [call for call in calls_of_name if any(k.arg is None for k in call.keywords)]
    return bool(unpacking) and all(
        c in unpacking or (len(c.args) == 1 and not c.keywords) for c in calls_of_name
    )
