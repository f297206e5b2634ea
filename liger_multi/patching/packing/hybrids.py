"""Hybrid models: mixers are told which sample every token belongs to.

Modeling files take ids of packed samples as ``seq_idx`` or ``cu_seq_lens_q`` and hand them from the
model to its mixers among other keyword arguments. Nobody makes them from ``position_ids``, and a
mixer without them lets a sample see the one before it. :class:`PackedModel` makes them, once a
forward pass, on the device. :class:`SeparateModel` raises where mixers could not keep samples
apart.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from liger_multi._torch_private import assert_async
from liger_multi.arguments import parameters_of
from liger_multi.errors import PackingError
from liger_multi.patching import shards
from liger_multi.patching.mixers import SERVED, WHOLE, FusedMixer, mixer_calls, unserved
from liger_multi.patching.packing.samples import rows_of, sample_ids
from liger_multi.patching.packing.tree import offered, running
from liger_multi.patching.swap import Patched, Swap, unpatched_class

# --- which samples the tokens belong to ---


@dataclass(frozen=True)
class PackedSettings:
    """What a model's mixers lack, for the message of :class:`SeparateModel`."""

    lacking: tuple[str, ...] = ()


class _Model(Patched):
    """A model that reads its arguments before its forward; the signature is that of its class."""

    def __init_subclass__(cls, **keywords: Any) -> None:
        """Make the forward with the class."""
        super().__init_subclass__(**keywords)
        if "_liger_multi_swap" in vars(cls):
            cls.forward = _with_forward_kwargs(vars(cls)["_liger_multi_swap"])

    @staticmethod
    def forward_kwargs(
        swap: Swap, arguments: dict[str, Any], kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        """The keyword arguments that the forward is called with; ``arguments`` has all by name."""
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
    """What mixers are told, ``(B, T)``: ids of samples, or of segments with the tree of a row."""
    ids, rows = sample_ids(arguments), rows_of(arguments)
    if rows is None or rows.shape[1] == 1:
        return None
    tree = running(rows.shape[1], rows.shape[0])
    if tree is not None:
        return None if tree.is_path and not tree.padding else tree.ids(rows.device)
    return None if ids is None else ids.expand(rows.shape[0], -1)


class PackedModel(_Model):
    """A model that tells its mixers which sample a token belongs to, as ``seq_idx``."""

    @staticmethod
    def forward_kwargs(
        swap: Swap, arguments: dict[str, Any], kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        """Add the ids, unless there is one token a row."""
        ids = _ids_for_mixers(arguments)
        return kwargs if ids is None else {**kwargs, "seq_idx": ids}


@dataclass(frozen=True)
class TellingSettings:
    """The name of the inner model to which a model passes nothing."""

    inner: str


class _Telling:
    """A stand-in for a model in one call; it passes ids of samples to the inner model."""

    def __init__(self, model: Any, inner: str, seq_idx: Tensor) -> None:
        self._liger_multi_model = model
        setattr(self, inner, functools.partial(getattr(model, inner), seq_idx=seq_idx))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._liger_multi_model, name)


class TellingModel(_Model):
    """A model whose forward takes keyword arguments and hands them to nobody, as Mamba-2's head."""

    @staticmethod
    def called(swap: Swap, model: Any, arguments: dict[str, Any]) -> Any:
        """What stands for the model in its forward: itself, where samples are not told."""
        ids = _ids_for_mixers(arguments)
        inner = cast(TellingSettings, swap.settings).inner
        return model if ids is None else _Telling(model, inner, ids)


def tells(forward: Callable[..., Any], inner: str) -> bool:
    """Whether a forward may run with another object in place of its module: it only reads it."""
    tree = _tree(forward)
    if tree is None:
        return False
    reads = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and _is_self(n.value)]
    return (
        len(reads) == sum(_is_self(n) for n in ast.walk(tree))
        and all(isinstance(n.ctx, ast.Load) for n in reads)
        and any(n.attr == inner for n in reads)
        and not any(isinstance(n, ast.Name) and n.id == "super" for n in ast.walk(tree))
    )


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


class SeparateModel(_Model):
    """A model, mixers of which could not keep samples apart: rows of several samples raise."""

    @staticmethod
    def forward_kwargs(
        swap: Swap, arguments: dict[str, Any], kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        """Look for several samples; this waits for the device, where ids are given at all.

        Raises:
            ValueError: A row has several samples.
        """
        ids, rows = sample_ids(arguments), rows_of(arguments)
        lacking = ", ".join(cast(Any, swap.settings).lacking)
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


def packing(model: nn.Module) -> dict[str, Swap]:
    """How the models in a model, by their paths, treat rows of several samples.

    Those that take embeddings and have mixers tell these where samples begin, if everything that
    mixes is served and gets keyword arguments. Else the whole model refuses such rows.
    """
    mixers = {p: _lacking(m) for p, m in model.named_modules() if mixer_calls(unpatched_class(m))}
    if not any(isinstance(model.get_submodule(p), FusedMixer) for p in mixers):
        return {}
    bases = [
        p
        for p, m in model.named_modules()
        if "inputs_embeds" in inspect.signature(unpatched_class(m).forward).parameters
        and _holds(p, mixers)
    ]
    bases = [p for p in bases if not any(q != p and _holds(p, [q]) for q in bases)]
    lacking = {name for names in mixers.values() for name in names}
    lacking |= {
        type(model.get_submodule(path)).__name__
        for path in mixers
        if not any(_holds(base, [path]) and _passes_on(model, base, path) for base in bases)
    }
    lacking |= {name for base in bases for name in _convolutions(model, base)}
    lacking |= {f"the attention of {c.__name__}" for c in _unmasked(model, bases)}
    telling: dict[str, Swap] = {}
    for path, inner in (place for base in bases for place in _deaf(model, base)):
        stock = unpatched_class(model.get_submodule(path))
        if tells(stock.forward, inner):
            telling[path] = Swap("packing", stock, TellingModel, TellingSettings(inner))
        else:
            lacking.add(stock.__name__)
    if lacking:
        settings = PackedSettings(tuple(sorted(lacking)))
        return {"": Swap("packing", unpatched_class(model), SeparateModel, settings)}
    return telling | {
        path: Swap("packing", unpatched_class(module), PackedModel, PackedSettings())
        for path, module in ((p, model.get_submodule(p)) for p in bases)
    }


def _convolutions(model: nn.Module, base: str) -> set[str]:
    """Classes of modules with a convolution over tokens that is not called by a name we know."""
    class_names = set()
    for path, module in model.get_submodule(base).named_modules():
        if isinstance(module, nn.Conv1d) and module.kernel_size[0] > 1 and path:
            parent = model.get_submodule(f"{base}.{path}".lstrip(".").rpartition(".")[0])
            if not isinstance(parent, FusedMixer):
                class_names.add(type(parent).__name__)
    return class_names


def _deaf(model: nn.Module, base: str) -> list[tuple[str, str]]:
    """Models that tell a model in them nothing of samples: paths, and names of the inner one."""
    names = base.split(".") if base else []
    outer = [(".".join(names[:n]), name) for n, name in enumerate(names)]
    modules = [(path, name, model.get_submodule(path)) for path, name in outer]
    return [
        (path, name)
        for path, name, module in modules
        if not isinstance(module, _HOLDERS) and not _hands_on(unpatched_class(module).forward, name)
    ]


def _unmasked(model: nn.Module, bases: Iterable[str]) -> set[type]:
    """Classes of models whose layers of attention are masked without positions."""
    kinds = {unpatched_class(model.get_submodule(base)) for base in bases}
    return {module_class for module_class in kinds if not _masks_by_positions(module_class.forward)}


@functools.lru_cache(maxsize=1024)
def _masks_by_positions(forward: Callable[..., Any]) -> bool:
    """Whether every causal mask that a forward makes is made of the positions too."""
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


def _lacking(module: nn.Module) -> list[str]:
    """The functions of a mixer that get no ids of samples."""
    lacking = unserved(unpatched_class(module))
    settings = type(module)._liger_multi_swap.settings if isinstance(module, FusedMixer) else None
    for _, function, name, _ in mixer_calls(unpatched_class(module)):
        is_passed_on = name in WHOLE or _hands_on(function, name)
        if getattr(settings, SERVED[name], None) is None or not is_passed_on:
            lacking.append(name)
    return lacking


_HOLDERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def _holds(path: str, others: Iterable[str]) -> bool:
    return any(not path or other == path or other.startswith(f"{path}.") for other in others)


def _passes_on(model: nn.Module, base: str, path: str) -> bool:
    """Whether keyword arguments of a model reach one of its modules: every call is read."""
    names = path.split(".")
    depth = base.count(".") + 1 if base else 0
    at = [(names[n], model.get_submodule(".".join(names[:n]))) for n in range(depth, len(names))]
    calls = [(name, module) for name, module in at if not isinstance(module, _HOLDERS)]
    return _takes_any(model.get_submodule(path)) and all(
        _takes_any(module) and _hands_on(unpatched_class(module).forward, name)
        for name, module in calls
    )


def _takes_any(module: nn.Module) -> bool:
    parameters = inspect.signature(unpatched_class(module).forward).parameters.values()
    return any(p.kind is p.VAR_KEYWORD for p in parameters)


def _tree(forward: Callable[..., Any]) -> ast.AST | None:
    """The source of a method; None where there is none, and nobody can tell what it does."""
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(forward))))
    except (OSError, SyntaxError):
        return None


@functools.lru_cache(maxsize=1024)
def _hands_on(forward: Callable[..., Any], name: str) -> bool:
    """Whether a method calls something, or what it loops over of it, with ``**kwargs``.

    Beside such a call, one with nothing but a tensor is for what does not mix tokens.

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
    mine = [
        call
        for call in calls
        if (isinstance(call.func, ast.Attribute) and call.func.attr == name)
        or (isinstance(call.func, ast.Name) and call.func.id in {name, *items})
    ]
    unpacking = [call for call in mine if any(k.arg is None for k in call.keywords)]
    return bool(unpacking) and all(
        c in unpacking or (len(c.args) == 1 and not c.keywords) for c in mine
    )
