"""``liger_kernel.megatron``: modules for Megatron-Core, and what puts them into its places.

Megatron-Core is asked for by :func:`apply_liger_kernel_to_megatron` alone; the modules read what
they need of a configuration by name.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from liger_multi import ops
from liger_multi.compat.liger_kernel.modules import LigerVocabParallelCrossEntropy

_HERE = "apply_liger_kernel_to_megatron"
_LOG = logging.getLogger(__name__)


class LigerMegatronRMSNorm(nn.Module):
    """:func:`liger_multi.ops.rms_norm` with the arguments that Megatron-Core builds norms with.

    ``persist_layer_norm`` and ``normalization`` are taken and not read; the configuration says
    which norm it wants.
    """

    def __init__(
        self,
        config: Any,
        hidden_size: int | Sequence[int],
        eps: float = 1e-5,
        persist_layer_norm: bool = False,
        zero_centered_gamma: bool = False,
        normalization: str = "RMSNorm",
    ) -> None:
        super().__init__()
        norm_type = getattr(config, "normalization", "RMSNorm")
        if norm_type != "RMSNorm":
            raise ValueError(
                f"LigerMegatronRMSNorm: config.normalization must be 'RMSNorm', got {norm_type!r}"
            )
        self.config, self.eps = config, eps
        sizes = (hidden_size,) if isinstance(hidden_size, int) else hidden_size
        self.hidden_size = torch.Size(sizes)
        self.zero_centered_gamma = bool(
            zero_centered_gamma or getattr(config, "layernorm_zero_centered_gamma", False)
        )
        self._offset = float(self.zero_centered_gamma)
        self.weight = nn.Parameter(torch.empty(self.hidden_size))
        # Megatron-Core sums gradients of such parameters over the ranks of a sequence
        self.weight.sequence_parallel = getattr(config, "sequence_parallel", False)  # type: ignore[attr-defined]
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, 1.0 - self._offset)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize; gamma around zero is added to one in fp32, the result has the dtype of x."""
        casting = "gemma" if self._offset else "llama"
        y = ops.rms_norm(x, self.weight, self.eps, offset=self._offset, casting=casting)
        return y.to(x.dtype)

    def extra_repr(self) -> str:
        return (
            f"hidden_size={tuple(self.hidden_size)}, eps={self.eps}, "
            f"zero_centered_gamma={self.zero_centered_gamma}"
        )


class LigerMegatronCrossEntropy(LigerVocabParallelCrossEntropy):
    """:class:`LigerVocabParallelCrossEntropy`, smoothed as Megatron-Core does."""

    defaults: ClassVar[dict[str, Any]] = {
        **LigerVocabParallelCrossEntropy.defaults,
        "label_smoothing_formula": "megatron",
        "label_smoothing_mode": "partition",
    }


class LigerMegatronSwiGLU(nn.Module):
    """:func:`liger_multi.ops.swiglu_packed` with the arguments of Megatron-Core's function.

    ``fallback_impl`` is called for what is not served: a bias, FP8 inputs, offloaded inputs. The
    first call for each of them is logged. ``in_place`` changes nothing.
    """

    def __init__(
        self, fallback_impl: Callable[..., Tensor] | None = None, in_place: bool = False
    ) -> None:
        super().__init__()
        self.fallback_impl, self.in_place = fallback_impl, in_place
        self._logged_fallbacks: set[str] = set()

    def forward(
        self,
        input: Tensor,
        bias: Tensor | None = None,
        fp8_input_store: bool = False,
        cpu_offload_input: bool = False,
    ) -> Tensor:
        unsupported = {
            "bias": bias is not None,
            "fp8_input_store": fp8_input_store,
            "cpu_offload_input": cpu_offload_input,
        }
        reason = ", ".join(name for name, is_set in unsupported.items() if is_set)
        if reason:
            if self.fallback_impl is None:
                raise RuntimeError(
                    f"LigerMegatronSwiGLU: {reason} is not served; pass fallback_impl="
                    "megatron.core.fusions.fused_bias_swiglu.bias_swiglu_impl, call "
                    f"{_HERE}(swiglu=True), which leaves such calls to Megatron-Core, or turn it "
                    "off"
                )
            if reason not in self._logged_fallbacks:
                self._logged_fallbacks.add(reason)
                _LOG.info("LigerMegatronSwiGLU is falling back to fallback_impl for %s", reason)
            return self.fallback_impl(input, bias, fp8_input_store, cpu_offload_input)
        if input.ndim not in (2, 3):
            raise ValueError(
                "LigerMegatronSwiGLU: input must be 2D (tokens, 2 F) or 3D (sequence, batch, 2 F), "
                f"got {tuple(input.shape)}"
            )
        return ops.swiglu_packed(input)


# --- Megatron-Core's places ---

_MARK = "__liger_patched__"
_FUSED_CALL_SITE = "models.common.language_module.language_module"
_undo: list[Callable[[], None]] = []


def _attribute_at(path: str) -> Any:
    """Something of Megatron-Core.

    Raises:
        ImportError: It is not installed, or does not have it.
    """
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(f"megatron.core.{module}"), name)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{_HERE} requires megatron-core (pip install megatron-core) with "
            f"megatron.core.{path}; {error}",
            name=error.name,
        ) from error
    except AttributeError as error:
        raise ImportError(
            f"{_HERE}: the installed megatron-core has no megatron.core.{path}; the symbol path "
            "may have changed in this version"
        ) from error


def _rebind(old: Any, new: Any) -> None:
    """Put one thing in the place of another wherever Megatron has it by name."""
    for module in [m for n, m in [*sys.modules.items()] if n.partition(".")[0] == "megatron"]:
        for name, value in [*vars(module).items()] if module is not None else ():
            if value is old:
                setattr(module, name, new)


def _marked(new: Any, old: Any) -> Any:
    """A replacement that says so, by the attributes that Liger-Kernel gives its own."""
    setattr(new, _MARK, True)
    new.__wrapped__ = old
    return new


def _replace(path: str, build: Callable[[Any], Any]) -> None:
    """Replace something by what is built of it, until :func:`restore`.

    That reaches every module that has it by name, also those that are imported in between. What
    stands there already from an earlier call stays.
    """
    old = _attribute_at(path)
    if not hasattr(old, _MARK):
        new = _marked(build(old), old)
        _rebind(old, new)
        _undo.append(lambda: _rebind(new, old))


def _norm(torch_norm: Any) -> Any:
    class _LigerOrTorchNorm(torch_norm):  # type: ignore[misc]
        """Ours where the configuration asks for an RMSNorm, else Megatron-Core's."""

        def __new__(cls, config: Any, *args: Any, **kwargs: Any) -> Any:
            if getattr(config, "normalization", None) == "RMSNorm":
                return LigerMegatronRMSNorm(config, *args, **kwargs)
            return torch_norm(config, *args, **kwargs)

    return _LigerOrTorchNorm


def _norms() -> None:
    provider = _attribute_at("models.backends.LocalSpecProvider")
    layer_norm = provider.layer_norm

    def patched_layer_norm(self: Any, rms_norm: bool = False, *args: Any, **kwargs: Any) -> Any:
        return LigerMegatronRMSNorm if rms_norm else layer_norm(self, rms_norm, *args, **kwargs)

    _replace("transformer.torch_norm.WrappedTorchNorm", _norm)
    if not hasattr(layer_norm, _MARK):
        provider.layer_norm = _marked(patched_layer_norm, layer_norm)
        _undo.append(lambda: setattr(provider, "layer_norm", layer_norm))


def _cross_entropy() -> Any:
    """The class of the loss, where users put their own."""
    public = sys.modules.get("liger_kernel.megatron.cross_entropy")
    return getattr(public, "LigerMegatronCrossEntropy", LigerMegatronCrossEntropy)


def _group(tp_group: Any) -> Any:
    """The group of a call; without one, that of Megatron-Core where it was initialized."""
    state = None if tp_group else importlib.import_module("megatron.core.parallel_state")
    get = getattr(state, "get_tensor_model_parallel_group", None)
    return get(check_initialized=False) if get else tp_group


def _fused(original: Any) -> Any:
    loss = _cross_entropy()()

    def liger_fused_vocab_parallel_cross_entropy(
        vocab_parallel_logits: Tensor, target: Tensor, tp_group: Any = None
    ) -> Tensor:
        return loss(vocab_parallel_logits, target, _group(tp_group))  # type: ignore[no-any-return]

    return liger_fused_vocab_parallel_cross_entropy


def _unfused(original: Any) -> Any:
    build = _cross_entropy()
    loss = build()

    def liger_vocab_parallel_cross_entropy(
        vocab_parallel_logits: Tensor,
        target: Tensor,
        label_smoothing: float | None = None,
        tp_group: Any = None,
    ) -> Tensor:
        call = loss if label_smoothing is None else build(label_smoothing=label_smoothing)
        return call(vocab_parallel_logits, target, _group(tp_group))  # type: ignore[no-any-return]

    return liger_vocab_parallel_cross_entropy


def _cross_entropies() -> None:
    for path in (_FUSED_CALL_SITE, "models.backends"):
        with suppress(ImportError):  # which of them calls the fused loss depends on the version
            importlib.import_module(f"megatron.core.{path}")
    name, module_name = (
        "fused_vocab_parallel_cross_entropy",
        "megatron.core.fusions.fused_cross_entropy",
    )
    _attribute_at(
        f"tensor_parallel.cross_entropy.{name.removeprefix('fused_')}"
    )  # both, or neither
    _replace(f"fusions.fused_cross_entropy.{name}", _fused)
    _replace(f"tensor_parallel.cross_entropy.{name.removeprefix('fused_')}", _unfused)
    fused = getattr(sys.modules[module_name], name)
    modules = [m for n, m in sys.modules.items() if n.startswith("megatron.") and n != module_name]
    if not any(value is fused for m in modules if m is not None for value in vars(m).values()):
        _LOG.warning(
            "Could not find where this Megatron version calls %s; with "
            "cross_entropy_loss_fusion=True it may keep its own",
            name,
        )


def _swiglu(original: Any) -> Any:
    class SwiGLUFunction(original):  # type: ignore[misc]
        """Ours, and Megatron-Core's for FP8 inputs and offloaded inputs."""

        @classmethod
        def apply(
            cls, input: Tensor, fp8_input_store: bool = False, cpu_offload_input: bool = False
        ) -> Tensor:
            if fp8_input_store or cpu_offload_input:
                return original.apply(input, fp8_input_store, cpu_offload_input)  # type: ignore[no-any-return]
            return ops.swiglu_packed(input)

    return SwiGLUFunction


def apply_liger_kernel_to_megatron(
    rms_norm: bool = True, cross_entropy: bool = False, swiglu: bool = False
) -> None:
    """Let Megatron-Core build and call what is asked for from here, until ``uninstall()``.

    * ``rms_norm``: :class:`LigerMegatronRMSNorm` in local specifications and as final norm. Norms
      of Transformer Engine stay.
    * ``cross_entropy``: :class:`LigerMegatronCrossEntropy` for the fused and the unfused function.
    * ``swiglu``: :func:`liger_multi.ops.swiglu_packed` for the fused activation without a bias.

    A second call for the same part changes nothing. Replacements have the attributes
    ``__liger_patched__`` and ``__wrapped__``.

    Raises:
        ImportError: Megatron-Core is not installed, or lacks a place.
    """
    if rms_norm:
        _norms()
    if cross_entropy:
        _cross_entropies()
    if swiglu:
        _replace("fusions.fused_bias_swiglu.SwiGLUFunction", _swiglu)


def restore() -> None:
    """Give Megatron-Core its own back; models that were built keep their norms."""
    while _undo:
        _undo.pop()()
