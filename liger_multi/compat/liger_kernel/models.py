"""``apply_liger_kernel_to_<model>`` and what looks them up: names for :func:`liger_multi.patch`."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import inspect
import logging
import sys
from collections.abc import Callable, Mapping
from inspect import Parameter
from typing import Any

from torch import nn

from liger_multi import patching
from liger_multi.compat.liger_kernel import functional, model_forward
from liger_multi.errors import PatchError, check_name, loading
from liger_multi.patching import PatchReport, registered
from liger_multi.patching.apply import is_type_patched, register_type
from liger_multi.patching.kinds import MLP_OPS, NORM_OPS
from liger_multi.patching.options import BUILT_IN, OFF, PACKING

_DENSE = "rope cross_entropy fused_linear_cross_entropy rms_norm swiglu model"
_GELU = "rope cross_entropy fused_linear_cross_entropy rms_norm geglu model"
_SEES = "rope cross_entropy fused_linear_cross_entropy layer_norm rms_norm {} model"
_PARTS = "cross_entropy fused_linear_cross_entropy {} rope swiglu geglu"

_LIKE_LLAMA = (
    "deepseek_v2 deepseek_v3 deepseek_v4 exaone4 falcon_h1 glm4 glm4v glm4v_moe gpt_oss granite "
    "hunyuan_v1_dense hunyuan_v1_moe llama ministral mistral mixtral olmo2 olmo3 phi3 qwen2 qwen3 "
    "qwen3_moe qwen3_next smollm3 qwen3_5_text qwen3_5_moe_text"
)
_WITH_TEXT = "qwen2_5_vl qwen3_5 qwen3_5_moe qwen3_vl qwen3_vl_moe"
_LIKE_GEMMA = "gemma gemma2 gemma3_text gemma4_text"
_GEMMA_SEES = "gemma3 gemma4 paligemma"
_FLAGS: dict[str, tuple[tuple[str, ...], str]] = {
    **{name: ((name,), _DENSE) for name in _LIKE_LLAMA.split()},
    **{name: ((name, f"{name}_text"), _DENSE) for name in _WITH_TEXT.split()},
    **{name: ((name,), _GELU) for name in _LIKE_GEMMA.split()},
    **{name: ((name,), _SEES.format("geglu")) for name in _GEMMA_SEES.split()},
    # whose parts are models of other types
    "llava": (("llava",), _PARTS.format("model rms_norm layer_norm")),
    "internvl": (("internvl",), _PARTS.format("rms_norm layer_norm model")),
    "smolvlm": (("smolvlm",), _PARTS.format("rms_norm layer_norm model")),
    "muse_glimmer": (("muse_glimmer",), _SEES.format("swiglu")),
    "mllama": (("mllama", "mllama_text_model"), _SEES.format("swiglu")),
    "qwen2_vl": (
        ("qwen2_vl", "qwen2_vl_text"),
        "rope cross_entropy fused_linear_cross_entropy rms_norm layer_norm swiglu model",
    ),
    "llama4": (("llama4", "llama4_text"), f"{_DENSE} layer_norm"),
    "nemotron": (("nemotron",), "relu_squared cross_entropy fused_linear_cross_entropy model"),
    "pixtral": (("pixtral",), "rope rms_norm swiglu model"),
}
MODELS = {name: (types, tuple(flags.split())) for name, (types, flags) in _FLAGS.items()}
"""Name of a function to the model types that it patches and its arguments, in Liger's order."""

_LOG = logging.getLogger(__name__)
_PREFIX = "apply_liger_kernel_to_"
_ON = {op: op not in OFF for op in BUILT_IN}
_NOTHING = dict.fromkeys(BUILT_IN, False)
"""What a call asks for that turns off every flag, also of operators that Liger-Kernel lacks."""
_types: set[str] = set()
"""Model types that are patched through these names."""


_FOLLOWERS = {
    **dict.fromkeys(("swiglu", "geglu", "relu_squared"), (*MLP_OPS, "fused_moe")),
    "rms_norm": NORM_OPS,
}
"""Flag to operators that it turns on and off where a call does not name them."""


def _choices(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Patch keys of Liger-like flags: None is off, and a flag rules the operators of its kind.

    A flag at its default is dropped: that every model is asked for every flag names none of them.
    Packed rows are not checked unless that is asked for: Liger-Kernel does not look at them.
    """
    choices = {name: False if value is None else value for name, value in flags.items()}
    choices.setdefault(PACKING, False)
    ruled = [
        (op, choices[flag])
        for flag, ops in _FOLLOWERS.items()
        for op in ops
        if isinstance(choices.get(flag), bool)
    ]
    choices = {**dict(ruled), **choices}
    allowed = (*BUILT_IN, *registered.probes())
    for name in choices:
        check_name(PatchError, "kernel option", name, allowed)
    return {name: value for name, value in choices.items() if value is not _ON.get(name, True)}


def _fuses(choices: Mapping[str, Any]) -> bool:
    return choices.get("fused_linear_cross_entropy", True) is not False


def _refuse_replaced_loss(choices: Mapping[str, Any]) -> None:
    """Who puts another function in Liger's place expects it to be called; here nobody would."""
    public = sys.modules.get("liger_kernel.transformers.functional")
    name = "liger_fused_linear_cross_entropy"
    current = getattr(public, name, None)
    if _fuses(choices) and current is not None and current is not getattr(functional, name):
        raise PatchError(
            f"liger_kernel.transformers.functional.{name} was replaced by {current!r}, which "
            "patched models do not call; pass options of fused_linear_cross_entropy instead, or "
            "fused_linear_cross_entropy=False"
        )


after_patch: Callable[[nn.Module], None] | None = None
"""What a trainer's integration does to a model that its switch has patched."""


def _patch_instance(model: nn.Module, flags: Mapping[str, Any]) -> PatchReport:
    choices = _choices(flags)
    _refuse_replaced_loss(choices)
    report = patching.patch(model, **choices)
    if _fuses(choices):
        model_forward.dress(model)
    if after_patch is not None:
        after_patch(model)
    return report


def _patch_type(model_type: str, flags: Mapping[str, Any]) -> None:
    choices = _choices(flags)
    _refuse_replaced_loss(choices)
    patching.patch(model_type, **choices)  # which checks what is asked for
    register_type(model_type, functools.partial(_patch_instance, flags=dict(flags)))
    _types.add(model_type)


def _registered(model_type: Any) -> Callable[..., Any] | None:
    """A function that somebody else put into the table for a model type."""
    function = MODEL_TYPE_TO_APPLY_LIGER_FN.get(model_type)
    return None if function is _OURS.get(model_type) else function


def _apply_liger_kernel_to_instance(model: nn.Module, **kwargs: Any) -> Any:
    """Patch a model, by the function that is registered for its type if it is none of ours.

    Args:
        model: The model.
        kwargs: Operator to True, False, a backend's name or a mapping of options, as for
            :func:`liger_multi.patch`.

    Raises:
        PatchError: An unknown operator or option.
    """
    registered_function = _registered(getattr(getattr(model, "config", None), "model_type", None))
    return (
        _patch_instance(model, kwargs)
        if registered_function is None
        else registered_function(model=model, **kwargs)
    )


def _apply_liger_kernel(model_type: str, **kwargs: Any) -> None:
    """Patch the models of a type that are built from now on, by the function of the table.

    A type that the table does not have is logged and left as it is.

    Raises:
        PatchError: An unknown operator or option.
    """
    apply = MODEL_TYPE_TO_APPLY_LIGER_FN.get(model_type)
    if apply is None:
        _LOG.info("no function for model type %r; nothing is patched", model_type)
        return
    if _registered(model_type) is None:
        _patch_type(model_type, kwargs)
    else:
        apply(**kwargs)


def forget_types() -> None:
    """Stop patching the model types that were named through these functions."""
    for model_type in sorted(_types):
        if is_type_patched(model_type):
            patching.unpatch(model_type)
    _types.clear()


def _known_types(model_types: tuple[str, ...]) -> list[str]:
    """Those that this transformers has; all of them where it has none, for the error's sake."""
    from transformers import CONFIG_MAPPING

    return [t for t in model_types if t in CONFIG_MAPPING] or list(model_types)


def _function(name: str) -> Callable[..., PatchReport | None]:
    model_types, flags = MODELS[name]
    signature = inspect.Signature(
        [Parameter(flag, Parameter.POSITIONAL_OR_KEYWORD, default=_ON.get(flag)) for flag in flags]
    )

    def apply(*args: Any, **kwargs: Any) -> PatchReport | None:
        other_options = {key: kwargs.pop(key) for key in list(kwargs) if key not in flags}
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        arguments = {**bound.arguments, **other_options}
        model = arguments.pop("model", None)
        if not any(arguments.values()):
            arguments = {**_NOTHING, **arguments}
        if model is not None:
            return _patch_instance(model, arguments)
        for model_type in _known_types(model_types):
            _patch_type(model_type, arguments)
        return None

    apply.__name__ = apply.__qualname__ = f"{_PREFIX}{name}"
    types_text = ", ".join(model_types)
    apply.__doc__ = f"Patch a model, or the models of type {types_text} that are built from now on."
    apply.__signature__ = signature  # type: ignore[attr-defined]
    return apply


_functions = {name: _function(name) for name in MODELS}
_OURS = {
    model_type: _functions[name] for name, (types, _) in MODELS.items() for model_type in types
}
MODEL_TYPE_TO_APPLY_LIGER_FN: dict[str, Callable[..., Any]] = dict(_OURS)
"""Model type to function; functions for other types may be put here."""


def functions(path: str = "", names: str = "") -> dict[str, Callable[..., PatchReport | None]]:
    """The functions by their names, the same in every submodule."""
    return {f"{_PREFIX}{name}": function for name, function in _functions.items()}


# --- what imports transformers or TRL: looked up at first access ---


TRL_HOMES = ("trl.experimental.orpo", "trl.trainer", "trl")
"""Where versions of TRL have their trainer, the newest first."""


def _patched(
    build: Callable[..., Any], config: Callable[[], Any], /, *args: Any, **kwargs: Any
) -> Any:
    """What ``build`` makes, patched by those keywords that are operators or flags of the table.

    A function that somebody registered for the type is called with those that it names, before the
    model is built.
    """
    if any(map(_registered, MODEL_TYPE_TO_APPLY_LIGER_FN)):
        registered_function = _registered(getattr(config(), "model_type", None))
        if registered_function is not None:
            names = [
                name for name in inspect.signature(registered_function).parameters if name in kwargs
            ]
            registered_function(**{name: kwargs.pop(name) for name in names})
            return build(*args, **kwargs)
    table = MODEL_TYPE_TO_APPLY_LIGER_FN.values()
    flag_names = {name for function in table for name in inspect.signature(function).parameters}
    allowed = (flag_names | {*BUILT_IN}) - {"model", "args", "kwargs"}
    flags = {name: kwargs.pop(name) for name in allowed & {*kwargs}}
    model = build(*args, **kwargs)
    _apply_liger_kernel_to_instance(model, **flags)
    return model


@functools.cache
def _auto_model() -> type[Any]:
    from transformers import AutoConfig, AutoModelForCausalLM

    class AutoLigerKernelForCausalLM(AutoModelForCausalLM):  # type: ignore[misc]
        """``AutoModelForCausalLM`` whose models are patched.

        Keywords that are operators go to the function of the model's type, the others to
        transformers.
        """

        @classmethod
        def from_pretrained(
            cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any
        ) -> Any:
            path = pretrained_model_name_or_path

            def config() -> Any:
                return kwargs.get("config") or AutoConfig.from_pretrained(path, **kwargs)

            return _patched(super().from_pretrained, config, path, *args, **kwargs)

        @classmethod
        def from_config(cls, config: Any, **kwargs: Any) -> Any:
            return _patched(super().from_config, lambda: config, config, **kwargs)

    return AutoLigerKernelForCausalLM


def _trainer_of_trl() -> Any:
    for module_name in TRL_HOMES:
        try:
            return importlib.import_module(module_name).ORPOTrainer
        except (ImportError, AttributeError):
            continue
    raise ImportError(
        f"LigerORPOTrainer needs the ORPOTrainer of TRL, which none of {', '.join(TRL_HOMES)} has"
    )


@functools.cache
def _trainer() -> type[Any]:
    from liger_multi.integrations import TrainerCallback

    class LigerORPOTrainer(_trainer_of_trl()):  # type: ignore[misc]
        """TRL's ``ORPOTrainer`` whose model is patched when the trainer is made.

        The losses are TRL's; logits are computed only where they are read.
        """

        def __init__(self, *args: Any, callbacks: Any = None, **kwargs: Any) -> None:
            super().__init__(*args, callbacks=[*(callbacks or ()), TrainerCallback()], **kwargs)

    return LigerORPOTrainer


def _versions() -> tuple[Any, Any]:
    """The installed transformers, and the oldest one that Liger-Kernel supports."""
    from packaging.version import parse

    return parse(importlib.metadata.version("transformers")), parse("5.0.0")


_NAMES: dict[str, Callable[[], Any]] = {
    "AutoLigerKernelForCausalLM": _auto_model,
    "LigerORPOTrainer": _trainer,
    "transformer_version": lambda: _versions()[0],
    "MIN_SUPPORTED_TRANSFORMERS_VERSION": lambda: _versions()[1],
    "IS_TRANSFORMERS_V5_OR_LATER": lambda: _versions()[0] >= _versions()[1],
}


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with loading(f"{__name__}.{name}"):
        value = _NAMES[name]()
    if isinstance(value, type):  # pickles find it by this name
        value.__qualname__ = name
    return value
