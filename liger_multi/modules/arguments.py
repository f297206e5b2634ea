"""What the arguments of a model's forward are: by signature, and by what their values are.

transformers renames arguments: what its models called ``past_key_values`` is ``cache`` since 5.24,
and mixers had ``cache_params``. So nothing outside of this module compares such a name. A cache is
recognized as an object by its class and its methods. A tuple of tensors, which could be anything,
is one where the signature says so. Looking at an argument never writes to it.
"""

from __future__ import annotations

import functools
import inspect
import re
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from liger_multi._torch_private import constant_in_graphs

# --- arguments by name ---


@functools.lru_cache(maxsize=1024)
def parameters_of(forward: Callable[..., Any]) -> tuple[str, ...]:
    """The names of a method's positional arguments, ``self`` aside."""
    parameters = list(inspect.signature(forward).parameters.values())[1:]
    return tuple(
        p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    )


def by_name(
    forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments of a call of a method, by name."""
    return {**dict(zip(parameters_of(forward), args, strict=False)), **kwargs}


# --- caches ---

_CACHE_NAME = re.compile(
    r"past|past_(key|bucket).*|layer_past|(layer_)?state|cache(_params)?|.*_cache|mems"
)
"""Names of arguments that hold what earlier tokens left. They tell of containers of tensors only,
and which argument of a signature is the cache; objects are recognized without them."""
_NO_CACHE_NAME = re.compile(r"(use|return|output)_.*")
_CACHE_CLASS = re.compile(r"\w*Cache\b")
_CACHE_METHODS = frozenset(
    {
        "get_seq_length",
        "get_mask_sizes",
        "get_max_cache_shape",
        "get_usable_length",
        "get_query_offset",
        "get_conv_state",
        "get_recurrent_state",
        "update_conv_state",
        "update_recurrent_state",
        "update_ssm_state",
        "update_rnn_state",
        "update_indexer",
        "key_value_memory_dict",
        "key_cache",
    }
)
"""Any of them makes an object a cache: no other object of transformers' interfaces has one."""
_PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device)
_NO_CACHES = (Tensor, nn.Module, *_PLAIN, type, tuple, list, set, frozenset)


def is_cache(value: Any) -> bool:
    """Whether an object keeps what earlier tokens left, by its class and its methods."""
    if value is None or isinstance(value, _NO_CACHES):
        return False
    if _is_cache_class(type(value)):
        return True
    # an object that hands everything on to another one
    return _hands_on(type(value)) and any(hasattr(value, name) for name in _CACHE_METHODS)


@constant_in_graphs
def _is_cache_class(owner: type) -> bool:
    answer = _cache_classes.get(owner)
    if answer is None:
        answer = _cache_classes[owner] = _looks_like_a_cache(owner)
    return answer


@constant_in_graphs
def _hands_on(owner: type) -> bool:
    return hasattr(owner, "__getattr__")


_cache_classes: weakref.WeakKeyDictionary[type, bool] = weakref.WeakKeyDictionary()


def _looks_like_a_cache(owner: type) -> bool:
    return any(
        base.__module__ == "transformers.cache_utils"
        or _CACHE_CLASS.fullmatch(base.__name__)
        or not _CACHE_METHODS.isdisjoint(vars(base))
        or not _CACHE_METHODS.isdisjoint(vars(base).get("__dataclass_fields__", ()))
        for base in owner.__mro__[:-1]
    )


@constant_in_graphs
def names_cache(name: str) -> bool:
    """Whether an argument of this name is a cache, where its value does not tell."""
    return bool(_CACHE_NAME.fullmatch(name)) and not _NO_CACHE_NAME.fullmatch(name)


@functools.lru_cache(maxsize=1024)
def cache_parameter(forward: Callable[..., Any]) -> str | None:
    """The name of a method's argument that takes a cache, by its annotation or its name."""
    parameters = list(inspect.signature(forward).parameters.values())[1:]
    candidates = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    annotated = [p.name for p in candidates if _CACHE_CLASS.search(_text(p.annotation))]
    return next(iter([*annotated, *(p.name for p in candidates if names_cache(p.name))]), None)


def _text(annotation: Any) -> str:
    if annotation is inspect.Parameter.empty:
        return ""
    return annotation if isinstance(annotation, str) else str(annotation)


def caches(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The caches among arguments, by name."""
    return {name: value for name, value in arguments.items() if _is_one(name, value)}


def has_cache(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call hands over a cache; positional arguments are identified by their types."""
    return any(is_cache(value) for value in args) or len(caches(kwargs)) > 0


def fills_cache(arguments: Mapping[str, Any]) -> bool:
    """Whether a call says where its tokens go in a cache that the model is to make or has.

    Generation of transformers 5.0 hands over no cache for the first tokens. Training does not
    generate, so a call that autograd records is none, whatever its arguments say.
    """
    positions = arguments.get("cache_position")
    generates = isinstance(positions, Tensor) and bool(arguments.get("use_cache"))
    return generates and not torch.is_grad_enabled()


def _is_one(name: str, value: Any) -> bool:
    if is_cache(value):
        return True
    # an object of unknown form, or tensors in a container, where a cache is expected
    return names_cache(name) and not isinstance(value, (Tensor, *_PLAIN))


def without_caches(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], positional: tuple[str, ...] = ()
) -> tuple[tuple[Any, ...], dict[str, Any], list[str]]:
    """Arguments with None in place of caches, and the names of these.

    Args:
        args: The positional ones.
        kwargs: The others.
        positional: Names of the positional ones, where they are known.
    """
    names = [positional[n] if n < len(positional) else f"argument {n}" for n in range(len(args))]
    dropped = [
        n for n, (name, value) in enumerate(zip(names, args, strict=True)) if _is_one(name, value)
    ]
    left_out = caches(kwargs)
    if not dropped and not left_out:
        return args, dict(kwargs), []
    return (
        tuple(None if n in dropped else value for n, value in enumerate(args)),
        {name: None if name in left_out else value for name, value in kwargs.items()},
        [*(names[n] for n in dropped), *left_out],
    )
