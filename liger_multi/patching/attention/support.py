"""Which model classes can use ``attn_implementation="liger_multi"``.

transformers checks its own names when a model is built (``_supports_sdpa`` and others), but accepts
registered names for every class. :func:`unsupported` takes a model class and returns why it cannot
use such a name, or None. It follows all code that the class can call, and checks three things:

* The code calls transformers' attention interface.
* No table of attention classes lacks the name.
* The eager attention is the softmax attention of the operator, in a comparison of results.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from liger_multi.patching.evidence.probe import probe_context, random
from liger_multi.patching.evidence.reached import codes, contents

_names: set[str] = set()
_original: list[Any] = []  # the wrapped method of transformers


def watch(name: str) -> None:
    """Check every model that selects ``name`` from now on."""
    from transformers import PreTrainedModel

    _names.add(name)
    if _original:
        return
    original = PreTrainedModel.get_correct_attn_implementation

    @functools.wraps(original)
    def checked(self: Any, requested_attention: str | None, *args: Any, **kwargs: Any) -> str:
        if requested_attention in _names:
            reason = unsupported(type(self), requested_attention)
            if reason:
                raise ValueError(
                    f"attn_implementation={requested_attention!r} cannot serve "
                    f"{type(self).__name__}: {reason}; use 'sdpa' where the model supports it, or "
                    "'eager'"
                )
        return str(original(self, requested_attention, *args, **kwargs))

    _original.append(original)
    PreTrainedModel.get_correct_attn_implementation = checked


def unwatch(name: str) -> None:
    """No longer check ``name``; the last name restores transformers' method."""
    from transformers import PreTrainedModel

    _names.discard(name)
    current = PreTrainedModel.get_correct_attn_implementation
    if not _names and _original and getattr(current, "__wrapped__", None) is _original[0]:
        PreTrainedModel.get_correct_attn_implementation = _original.pop()


def unsupported(model: type, name: str) -> str | None:
    """Why a class of models cannot use the implementation, or None.

    The class may be part of a larger model. A class without attention, such as an image tokenizer,
    is supported. So is one with its own attention that builds no mask and runs under SDPA; it keeps
    its attention, and raises if its parent passes it our mask.
    """
    from transformers import AttentionInterface

    asks = has_attention = masks = parts = False
    eager: list[types.FunctionType] = []
    for global_name, value in _globals_reached(model):
        if isinstance(value, dict) and "eager" in value and name not in value:
            return f"it picks attention classes from a table of its own, {global_name}"
        asks |= isinstance(value, AttentionInterface)
        has_attention |= _is_attention(value)
        masks |= getattr(value, "__module__", "") == MASKS[0] and global_name not in MASKS[1:]
        parts |= isinstance(value, type) and _is_model_of_its_own(model, value)
        if isinstance(value, types.FunctionType) and "eager" in global_name:
            eager.append(value)
    if not asks and (
        (masks and not parts)
        or (has_attention and not any(getattr(model, flag, False) for flag in FLAGS))
    ):
        return "it has attention of its own and does not call transformers' AttentionInterface"
    for function in eager if asks else ():
        reason = _other_than_softmax(function)
        if reason:
            return f"its {function.__name__} {reason}"
    return None


MASKS = ("transformers.masking_utils", "create_recurrent_attention_mask")  # the latter: no keys
FLAGS = ("_supports_sdpa", "_supports_flex_attn", "_supports_attention_backend")


def _is_attention(value: object) -> bool:
    return (
        isinstance(value, type)
        and issubclass(value, nn.Module)
        and "attention" in value.__name__.lower()
    )


# --- what the code of a class can call ---


@functools.lru_cache(maxsize=512)
def _globals_reached(model: type) -> tuple[tuple[str, object], ...]:
    """The globals that a class loads, and that loaded classes and functions load in turn."""
    todo: list[Any] = [model]
    visited: set[int] = {id(model)}
    values: list[tuple[str, object]] = []
    while todo:
        for function in _functions(model, todo.pop()):
            for name in (n for part in codes(function.__code__) for n in part.co_names):
                value = function.__globals__.get(name)
                if value is None or id(value) in visited:
                    continue
                visited.add(id(value))
                values.append((name, value))
                todo += [part for part in _parts(value) if _is_code_of(model, part)]
    return tuple(values)


def _functions(model: type, item: Any) -> Iterator[types.FunctionType]:
    """The functions of a class and its bases, or a function; also those that decorators wrap."""
    values: list[Any] = [item]
    if isinstance(item, type):
        bases = [base for base in item.__mro__ if _is_code_of(model, base)]
        values = [value for base in bases for value in vars(base).values()]
    visited: set[int] = set()
    while values:
        value = values.pop()
        if isinstance(value, (staticmethod, classmethod)):
            value = value.__func__
        if isinstance(value, property):
            value = value.fget
        if isinstance(value, types.FunctionType) and id(value) not in visited:
            visited.add(id(value))
            yield value
            values += [getattr(value, "__wrapped__", None)]
            values += map(contents, value.__closure__ or ())


def _parts(value: object) -> list[Any]:
    """The classes and functions that a value is, or contains."""
    if isinstance(value, dict):
        value = tuple(value.values())
    parts = value if isinstance(value, (tuple, list)) else (value,)
    return [part for part in parts if isinstance(part, (type, types.FunctionType))]


def _is_code_of(model: type, part: Any) -> bool:
    """Whether a function or class is code of this model, and no model that is checked itself."""
    module_name = getattr(part, "__module__", None) or ""
    if isinstance(part, type) and _is_model_of_its_own(model, part):
        return False
    if module_name.startswith("transformers."):
        return module_name.startswith("transformers.models.") and ".auto." not in module_name
    module_names = {base.__module__ for base in model.__mro__}
    package = module_name.rpartition(".")[0]
    return module_name in module_names or (
        package != "" and package in {h.rpartition(".")[0] for h in module_names}
    )


def _is_model_of_its_own(model: type, part: type) -> bool:
    """Whether a class builds models with another configuration, which are checked when built."""
    from transformers import PreTrainedModel
    from transformers.models.auto.auto_factory import _BaseAutoModelClass

    if issubclass(part, _BaseAutoModelClass):
        return True
    if not issubclass(part, PreTrainedModel) or issubclass(model, part):
        return False
    config_class: object = getattr(part, "config_class", None)
    return config_class is not getattr(model, "config_class", None)


# --- what eager attention reads and computes ---


def eager_functions(layer: type) -> list[types.FunctionType]:
    """The eager attention functions in the files of a class and its bases."""
    files = [vars(sys.modules.get(base.__module__, types)) for base in layer.__mro__]
    return [
        value
        for file in files
        for name, value in file.items()
        if "eager" in name and isinstance(value, types.FunctionType)
    ]


def names_read(function: types.FunctionType) -> set[str]:
    """The names of a function's arguments, and strings that may be keys of its ``**kwargs``."""
    code = inspect.unwrap(function).__code__
    arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return {*arguments, *(text for text in code.co_consts if isinstance(text, str))}


@functools.lru_cache(maxsize=512)
def _other_than_softmax(eager: types.FunctionType) -> str | None:
    """Why an eager attention function is not the softmax attention of the operator."""
    reason = ""
    # models are often built on the meta device and in half precision
    with probe_context() as generator, torch.no_grad(), torch.device("cpu"):
        q, sinks = random(generator, 2, 4, 5, 8), random(generator, 4)
        visible = torch.ones(5, 5, dtype=torch.bool).tril()
        bias = q.new_zeros(1, 1, 5, 5).masked_fill(~visible, torch.finfo(q.dtype).min)
        for groups in (2, 1):  # some repeat the heads of keys, others expect repeated heads
            k, v = (random(generator, 2, 4 // groups, 5, 8) for _ in range(2))
            module = _AttentionAttributes(groups, q.shape[-1], sinks)
            try:
                y = eager(module, q, k, v, bias, scaling=SCALE, dropout=0.0)[0]
            except Exception as error:  # of any code
                reason = reason or f"cannot be tried ({type(error).__name__}: {error})"
                continue
            reason = "computes something else than softmax(scale q k' + mask) v"
            for expected in _softmax(q, k, v, visible, sinks):
                if y.shape == expected.shape and torch.allclose(y, expected, rtol=1e-4, atol=1e-5):
                    return None
    return reason


SCALE = 8**-0.5


class _AttentionAttributes(nn.Module):
    """The attributes of an attention module that eager functions read."""

    def __init__(self, groups: int, size: int, sinks: Tensor) -> None:
        super().__init__()
        self.num_key_value_groups, self.head_dim, self.layer_idx = groups, size, 0
        self.sinks = sinks
        self.eval()


def _softmax(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, sinks: Tensor) -> Iterator[Tensor]:
    """Attention ``(B, L, H, E)``: with the mask, without, and with the mask and sinks."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = SCALE * (q @ k.mT)
    masked = scores.masked_fill(~visible, -torch.inf)
    sink = sinks[None, :, None, None].expand(*scores.shape[:3], 1)
    with_sinks = torch.softmax(torch.cat([masked, sink], -1), -1)[..., :-1]
    for p in (torch.softmax(masked, -1), torch.softmax(scores, -1), with_sinks):
        yield (p @ v).transpose(1, 2)
