"""``apply_liger_kernel_to_<model>`` and what looks them up: names for :func:`liger_multi.patch`."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from liger_multi import patching
from liger_multi.compat.liger_kernel import functional
from liger_multi.errors import PatchError, unknown
from liger_multi.patching import PatchReport, modeltypes
from liger_multi.patching.options import BUILT_IN, PACKING
from liger_multi.patching.recognize import registered

_DENSE = ("rope", "cross_entropy", "fused_linear_cross_entropy", "rms_norm", "swiglu")
_GELU = ("rope", "cross_entropy", "fused_linear_cross_entropy", "rms_norm", "geglu")
_SEEN = (*_DENSE, "layer_norm")
_HEADS = ("cross_entropy", "fused_linear_cross_entropy")

_LIKE_LLAMA = (
    "deepseek_v4 exaone4 falcon_h1 glm4 glm4v glm4v_moe gpt_oss granite hunyuan_v1_dense "
    "hunyuan_v1_moe llama ministral mistral mixtral olmo2 olmo3 phi3 qwen2 qwen3 qwen3_moe "
    "qwen3_next smollm3 qwen3_5_text qwen3_5_moe_text"
)
_WITH_TEXT = "qwen2_5_vl qwen3_5 qwen3_5_moe qwen3_vl qwen3_vl_moe"
_LIKE_GEMMA = "gemma gemma2 gemma3_text gemma4_text"
_GEMMA_SEES = "gemma3 gemma4 paligemma"
_OF_PARTS = "internvl llava smolvlm"  # whose parts are models of other types
MODELS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    **{name: ((name,), _DENSE) for name in _LIKE_LLAMA.split()},
    **{name: ((name, f"{name}_text"), _DENSE) for name in _WITH_TEXT.split()},
    **{name: ((name,), _GELU) for name in _LIKE_GEMMA.split()},
    **{name: ((name,), (*_GELU, "layer_norm")) for name in _GEMMA_SEES.split()},
    **{name: ((name,), (*_SEEN, "geglu")) for name in _OF_PARTS.split()},
    "qwen2_vl": (("qwen2_vl", "qwen2_vl_text"), _SEEN),
    "llama4": (("llama4", "llama4_text"), _SEEN),
    "mllama": (("mllama", "mllama_text_model"), _SEEN),
    "nemotron": (("nemotron",), (*_HEADS, "relu_squared")),
    "pixtral": (("pixtral",), ("rope", "rms_norm", "swiglu")),
}
"""Name of a function to the model types that it patches and the flags that it has."""

_PREFIX = "apply_liger_kernel_to_"
_ON = {op: op != "cross_entropy" for op in BUILT_IN}
_types: set[str] = set()
"""Model types that are patched through these names."""


def _choices(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Patch keys of Liger-like flags: None is off, and swiglu rules the experts too.

    A flag at its default is dropped: that every model is asked for every flag names none of them.
    Packed rows are not checked unless that is asked for: Liger-Kernel does not look at them.
    """
    made = {name: False if value is None else value for name, value in flags.items()}
    made.setdefault(PACKING, False)
    if isinstance(made.get("swiglu"), bool):
        made.setdefault("fused_moe", made["swiglu"])
    known = (*BUILT_IN, *registered.probes())
    for name in made:
        if name not in known:
            raise PatchError(unknown("kernel option", name, known))
    return {name: value for name, value in made.items() if value is not _ON.get(name, True)}


def _refuse_replaced_loss(choices: Mapping[str, Any]) -> None:
    """Who puts another function in Liger's place expects it to be called; here nobody would."""
    public = sys.modules.get("liger_kernel.transformers.functional")
    name = "liger_fused_linear_cross_entropy"
    now = getattr(public, name, None)
    on = choices.get("fused_linear_cross_entropy", True)
    if on and now is not None and now is not getattr(functional, name):
        raise PatchError(
            f"liger_kernel.transformers.functional.{name} was replaced by {now!r}, which patched "
            "models do not call; pass options of fused_linear_cross_entropy instead, or "
            "fused_linear_cross_entropy=False"
        )


def _apply_liger_kernel_to_instance(model: nn.Module, **kwargs: Any) -> PatchReport:
    """Patch a model.

    Args:
        model: The model.
        kwargs: Operator to True, False, a backend's name or a mapping of options, as for
            :func:`liger_multi.patch`.

    Raises:
        PatchError: An unknown operator or option.
    """
    choices = _choices(kwargs)
    _refuse_replaced_loss(choices)
    return patching.patch(model, **choices)


def _apply_liger_kernel(model_type: str, **kwargs: Any) -> None:
    """Patch the models of a type that are built from now on.

    Raises:
        PatchError: An unknown model type, operator or option.
    """
    choices = _choices(kwargs)
    _refuse_replaced_loss(choices)
    patching.patch(model_type, **choices)
    _types.add(model_type)


def forget_types() -> None:
    """Stop patching the model types that were named through these functions."""
    for model_type in sorted(_types):
        if modeltypes.registered(model_type):
            patching.unpatch(model_type)
    _types.clear()


def _known_types(model_types: tuple[str, ...]) -> list[str]:
    """Those that this transformers has; all of them where it has none, for the error's sake."""
    from transformers import CONFIG_MAPPING

    return [t for t in model_types if t in CONFIG_MAPPING] or list(model_types)


def _function(name: str) -> Callable[..., PatchReport | None]:
    model_types, flags = MODELS[name]
    defaults = {flag: _ON[flag] for flag in flags}

    def apply(model: nn.Module | None = None, **kwargs: Any) -> PatchReport | None:
        if model is not None:
            return _apply_liger_kernel_to_instance(model, **kwargs)
        for model_type in _known_types(model_types):
            _apply_liger_kernel(model_type, **kwargs)
        return None

    kinds = inspect.Parameter
    apply.__name__ = apply.__qualname__ = f"{_PREFIX}{name}"
    named = ", ".join(model_types)
    apply.__doc__ = f"Patch a model, or the models of type {named} that are built from now on."
    apply.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            *(
                kinds(flag, kinds.POSITIONAL_OR_KEYWORD, default=on, annotation=bool)
                for flag, on in defaults.items()
            ),
            kinds("model", kinds.POSITIONAL_OR_KEYWORD, default=None),
            kinds("kwargs", kinds.VAR_KEYWORD),
        ]
    )
    return _bound(apply)


def _bound(apply: Callable[..., Any]) -> Callable[..., Any]:
    """Take flags by position as the signature shows them."""

    @functools.wraps(apply)
    def function(*args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(apply).bind(*args, **kwargs).arguments
        return apply(**{**given.pop("kwargs", {}), **given})

    return function


_functions = {name: _function(name) for name in MODELS}
MODEL_TYPE_TO_APPLY_LIGER_FN: dict[str, Callable[..., PatchReport | None]] = {
    model_type: _functions[name] for name, (types, _) in MODELS.items() for model_type in types
}


def functions() -> dict[str, Callable[..., PatchReport | None]]:
    """The functions by their names."""
    return {f"{_PREFIX}{name}": function for name, function in _functions.items()}


class AutoLigerKernelForCausalLM:
    """``AutoModelForCausalLM`` whose models are patched.

    Keywords that are operators go to :func:`liger_multi.patch`, the others to transformers.
    """

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Load a model and patch it."""
        return cls._made("from_pretrained", pretrained_model_name_or_path, *args, **kwargs)

    @classmethod
    def from_config(cls, config: Any, **kwargs: Any) -> Any:
        """Build a model and patch it."""
        return cls._made("from_config", config, **kwargs)

    @staticmethod
    def _made(way: str, *args: Any, **kwargs: Any) -> Any:
        from transformers import AutoModelForCausalLM

        ops = {name: kwargs.pop(name) for name in list(kwargs) if name in BUILT_IN}
        model = getattr(AutoModelForCausalLM, way)(*args, **kwargs)
        _apply_liger_kernel_to_instance(model, **ops)
        return model
