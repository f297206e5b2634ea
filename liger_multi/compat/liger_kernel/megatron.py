"""``liger_kernel.megatron``: modules for Megatron-Core, and what puts them into its places.

Megatron-Core is asked for by :func:`apply_liger_kernel_to_megatron` alone; the modules read what
they need of a configuration by name.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from liger_multi import ops
from liger_multi.compat.liger_kernel.modules import LigerVocabParallelCrossEntropy

_HERE = "apply_liger_kernel_to_megatron"


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
        self.weight = nn.Parameter(torch.empty(self.hidden_size))
        # Megatron-Core sums gradients of such parameters over the ranks of a sequence
        self.weight.sequence_parallel = getattr(config, "sequence_parallel", False)  # type: ignore[attr-defined]
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, 0.0 if self.zero_centered_gamma else 1.0)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize; gamma around zero is added to one in fp32, the result has the dtype of x."""
        offset, casting = (1.0, "gemma") if self.zero_centered_gamma else (0.0, "llama")
        return ops.rms_norm(x, self.weight, self.eps, offset=offset, casting=casting).to(x.dtype)

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

    ``fallback_impl`` is called for what is not served: a bias, FP8 inputs, offloaded inputs.
    ``in_place`` changes nothing.
    """

    def __init__(
        self, fallback_impl: Callable[..., Tensor] | None = None, in_place: bool = False
    ) -> None:
        super().__init__()
        self.fallback_impl, self.in_place = fallback_impl, in_place

    def forward(
        self,
        input: Tensor,
        bias: Tensor | None = None,
        fp8_input_store: bool = False,
        cpu_offload_input: bool = False,
    ) -> Tensor:
        asked = {
            "bias": bias is not None,
            "fp8_input_store": fp8_input_store,
            "cpu_offload_input": cpu_offload_input,
        }
        if any(asked.values()):
            if self.fallback_impl is not None:
                return self.fallback_impl(input, bias, fp8_input_store, cpu_offload_input)
            raise RuntimeError(
                f"LigerMegatronSwiGLU: {', '.join(n for n, on in asked.items() if on)} is not "
                "served; pass fallback_impl=megatron.core.fusions.fused_bias_swiglu."
                "bias_swiglu_impl, or turn it off"
            )
        if input.ndim not in (2, 3):
            raise ValueError(
                "LigerMegatronSwiGLU: input must be (tokens, 2 F) or (sequence, batch, 2 F), got "
                f"{tuple(input.shape)}"
            )
        return ops.swiglu_packed(input)


# --- Megatron-Core's places ---

_undo: list[Callable[[], None]] = []
_done: set[str] = set()


def _place(path: str) -> Any:
    """Something of Megatron-Core.

    Raises:
        ImportError: It is not installed, or does not have it.
    """
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(f"megatron.core.{module}"), name)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{_HERE}: needs megatron.core.{path} of megatron-core (pip install megatron-core); "
            f"{error}",
            name=error.name,
        ) from error
    except AttributeError as error:
        raise ImportError(
            f"{_HERE}: the installed megatron-core has no megatron.core.{path}"
        ) from error


def _rebind(old: Any, new: Any) -> None:
    """Put one thing in the place of another wherever Megatron has it by name."""
    for module in [m for n, m in [*sys.modules.items()] if n.partition(".")[0] == "megatron"]:
        for name, value in [*vars(module).items()] if module is not None else ():
            if value is old:
                setattr(module, name, new)


def _replace(old: Any, new: Any) -> None:
    """The same, until :func:`restore`: also in modules that are imported in between."""
    _rebind(old, new)
    _undo.append(lambda: _rebind(new, old))


def _norms() -> None:
    torch_norm: Any = _place("transformer.torch_norm.WrappedTorchNorm")
    provider = _place("models.backends.LocalSpecProvider")
    layer_norm = provider.layer_norm

    class LigerOrTorchNorm(torch_norm):  # type: ignore[misc]
        """Ours where the configuration asks for an RMSNorm, else Megatron-Core's."""

        def __new__(cls, config: Any, *args: Any, **kwargs: Any) -> Any:
            if getattr(config, "normalization", None) == "RMSNorm":
                return LigerMegatronRMSNorm(config, *args, **kwargs)
            return torch_norm(config, *args, **kwargs)

    def chosen(self: Any, rms_norm: bool = False, *args: Any, **kwargs: Any) -> Any:
        return LigerMegatronRMSNorm if rms_norm else layer_norm(self, rms_norm, *args, **kwargs)

    _replace(torch_norm, LigerOrTorchNorm)
    provider.layer_norm = chosen
    _undo.append(lambda: setattr(provider, "layer_norm", layer_norm))


def _cross_entropies() -> None:
    fused = _place("fusions.fused_cross_entropy.fused_vocab_parallel_cross_entropy")
    plain = _place("tensor_parallel.cross_entropy.vocab_parallel_cross_entropy")
    loss = LigerMegatronCrossEntropy()

    def fused_vocab_parallel_cross_entropy(
        vocab_parallel_logits: Tensor, target: Tensor, tp_group: Any
    ) -> Tensor:
        return loss(vocab_parallel_logits, target, tp_group)  # type: ignore[no-any-return]

    def vocab_parallel_cross_entropy(
        vocab_parallel_logits: Tensor,
        target: Tensor,
        label_smoothing: float = 0.0,
        tp_group: Any = None,
    ) -> Tensor:
        call = LigerMegatronCrossEntropy(label_smoothing=label_smoothing)
        if tp_group is None:
            tp_group = _place("parallel_state.get_tensor_model_parallel_group")()
        return call(vocab_parallel_logits, target, tp_group)  # type: ignore[no-any-return]

    _replace(fused, fused_vocab_parallel_cross_entropy)
    _replace(plain, vocab_parallel_cross_entropy)


def _swiglu() -> None:
    original: Any = _place("fusions.fused_bias_swiglu.SwiGLUFunction")

    class SwiGLUFunction(original):  # type: ignore[misc]
        """Ours, and Megatron-Core's for FP8 inputs and offloaded inputs."""

        @classmethod
        def apply(
            cls, input: Tensor, fp8_input_store: bool = False, cpu_offload_input: bool = False
        ) -> Tensor:
            if fp8_input_store or cpu_offload_input:
                return original.apply(input, fp8_input_store, cpu_offload_input)  # type: ignore[no-any-return]
            return ops.swiglu_packed(input)

    _replace(original, SwiGLUFunction)


_PARTS: dict[str, Callable[[], None]] = {
    "rms_norm": _norms,
    "cross_entropy": _cross_entropies,
    "swiglu": _swiglu,
}


def apply_liger_kernel_to_megatron(
    rms_norm: bool = True, cross_entropy: bool = False, swiglu: bool = False
) -> None:
    """Let Megatron-Core build and call what is asked for from here, until ``uninstall()``.

    * ``rms_norm``: :class:`LigerMegatronRMSNorm` in local specifications and as final norm. Norms
      of Transformer Engine stay.
    * ``cross_entropy``: :class:`LigerMegatronCrossEntropy` for the fused and the unfused function.
    * ``swiglu``: :func:`liger_multi.ops.swiglu_packed` for the fused activation without a bias.

    A second call for the same part changes nothing.

    Raises:
        ImportError: Megatron-Core is not installed, or lacks a place.
    """
    asked = {"rms_norm": rms_norm, "cross_entropy": cross_entropy, "swiglu": swiglu}
    for part, on in asked.items():
        if on and part not in _done:
            _PARTS[part]()
            _done.add(part)


def restore() -> None:
    """Give Megatron-Core its own back; models that were built keep their norms."""
    while _undo:
        _undo.pop()()
    _done.clear()
