"""Linear layers whose frozen weight another library keeps in 4 bits.

The operator dequantizes the weight for one GEMM, in forward and again in backward. The layer stays
its owner's: what it saves, loads and moves, and the bits of its numbers.
"""

from __future__ import annotations

import importlib
from typing import Any, cast

import torch
from torch import Tensor, nn

from liger_multi.checks import autocast_dtype
from liger_multi.ops import QuantizedWeight
from liger_multi.parameters import stored
from liger_multi.patching.evidence.signature import PLAIN, code_holds, is_watched
from liger_multi.patching.four_bits.weights import is_compressed, quantized_weight
from liger_multi.patching.options import FourBitOptions, run_bound
from liger_multi.patching.swap import Patched, original


class FourBitLinear(Patched):
    """A linear layer over codes; what the operator does not take runs the owner's forward."""

    bias: Tensor | None

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """``x @ weight.T + bias``."""
        module_class = type(self)
        if not issubclass(module_class, FourBitLinear):
            return cast(Tensor, module_class.forward(self, x, *args, **kwargs))
        simple = not (args or kwargs) and code_holds(module_class)
        weight = weight_for(self, x) if simple else None
        if weight is None and isinstance(self, CompressedLinear):  # its forward has no weight
            return nn.functional.linear(x, self.weight.dequantized(), self.bias)
        if weight is None:
            return cast(Tensor, original(module_class)(self, x, *args, **kwargs))
        options = cast(FourBitOptions, module_class._liger_multi_swap.settings)
        weight = multiplied(weight, options)
        return cast(
            Tensor, run_bound(options, ("linear", "linear_float8"), _apply, self, x, weight)
        )


_ASIDE = "_liger_multi_forward"


class CompressedLinear(FourBitLinear):
    """The same for compressed-tensors, which has no weight and a forward in the instance."""

    @property
    def weight(self) -> QuantizedWeight:
        """A view, so that adapters are built on the layer and know its dtype and device."""
        weight = quantized_weight(self)
        if isinstance(weight, str):
            raise AttributeError(weight)
        return weight

    @staticmethod
    def entered(module: nn.Module, settings: Any) -> None:
        """Put the forward aside that compressed-tensors has written into the instance."""
        if "forward" in vars(module):
            module.__dict__[_ASIDE] = module.__dict__.pop("forward")

    @staticmethod
    def left(module: nn.Module) -> None:
        """Put it back."""
        if _ASIDE in vars(module):
            module.__dict__["forward"] = module.__dict__.pop(_ASIDE)


def decompress_others(hook: Any, model: nn.Module, args: Any) -> None:
    """What compressed-tensors does before the first forward, but for layers that are patched.

    Its hook makes 16 bits of all packed weights of the model.
    """
    every = [m for m in model.modules() if is_compressed(m)]
    others = [m for m in every if not isinstance(m, FourBitLinear)]
    if len(others) == len(every):
        hook(model, args)
        return
    for module in others:
        importlib.import_module("compressed_tensors.compressors.base").decompress_module(module)


def _apply(layer: Any, x: Tensor, weight: QuantizedWeight) -> Tensor:
    from liger_multi.ops import linear, linear_float8

    return (linear_float8 if weight.float8 else linear)(x, weight, layer.bias)


def multiplied(weight: QuantizedWeight, options: FourBitOptions) -> QuantizedWeight:
    """The weight with the dtype of its GEMMs."""
    rounded = options.compute == "float8" and weight.numel() >= options.smallest
    return weight.changed(float8=True) if rounded else weight


def four_bit_weight(layer: Any) -> QuantizedWeight | None:
    """The weight of a patched layer, where its call is nothing but a GEMM with it."""
    module_class = type(layer)
    if not issubclass(module_class, FourBitLinear) or torch.compiler.is_compiling():
        return None
    options = cast(FourBitOptions, module_class._liger_multi_swap.settings)
    if options.backend is not None or not code_holds(module_class) or is_watched(layer):
        return None
    weight = quantized_weight(layer)
    if isinstance(weight, str) or not _computes_in(layer, weight.dtype):
        return None
    same = autocast_dtype(weight.device.type) in (None, weight.dtype)
    return multiplied(weight, options) if same else None


def weight_for(layer: Any, x: Any) -> QuantizedWeight | None:
    """The weight for the operator; None where the owner computes another way, or a graph is made.

    Graphs call the layer as it is: a compiler would merge the two times that a weight is
    dequantized, and keep its numbers.
    """
    if type(x) not in PLAIN or torch.compiler.is_compiling():
        return None
    weight = quantized_weight(layer)
    if isinstance(weight, str) or x.ndim == 0 or x.shape[-1] != weight.shape[1]:
        return None
    same = x.dtype == weight.dtype and x.device == weight.device
    cast_to = autocast_dtype(x.device.type)
    return weight if same and cast_to in (None, x.dtype) and _computes_in(layer, x.dtype) else None


def _computes_in(layer: Any, dtype: torch.dtype) -> bool:
    """Whether the owner's layer multiplies in a dtype, and its bias has it."""
    # gptqmodel's layers have one that follows the input
    computes = None if stored(layer) is None else getattr(layer, "compute_dtype", None)
    bias = layer.bias
    return computes in (None, dtype) and (bias is None or bias.dtype == dtype)


def is_four_bit(layer: nn.Module | None) -> bool:
    """Whether a layer is patched, and nothing stands around its call."""
    return layer is not None and four_bit_weight(layer) is not None
