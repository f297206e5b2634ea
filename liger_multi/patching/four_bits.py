"""Linear layers whose frozen weight another library keeps in 4 bits.

The operator dequantizes the weight for one GEMM, in forward and again in backward. The layer stays
its owner's: what it saves, loads and moves, and the bits of its numbers.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from liger_multi import ops
from liger_multi._torch_private import constant_in_graphs
from liger_multi.checks import autocast_dtype
from liger_multi.modules.parameters import stored
from liger_multi.ops import QuantizedWeight
from liger_multi.ops._packing import codes_of_outputs, shape_of
from liger_multi.ops.dequantize import DTYPES
from liger_multi.patching.evidence.facts import LINEAR_FORWARDS, ModelFacts
from liger_multi.patching.evidence.signature import PLAIN, code_holds, is_watched
from liger_multi.patching.options import FourBitOptions, Request, run_bound
from liger_multi.patching.report import Skipped
from liger_multi.patching.swap import (
    Change,
    Patched,
    Replace,
    Restore,
    Swap,
    conflict_of,
    original,
    stock_class,
    unpatched_class,
)

# --- weights as their owners keep them ---

# A view is made at every call, of the tensors that the layer has then: loading, moving and
# merging need no notice. A layer of a format that no reader knows stays as it is, with the
# reason.

Reader = Callable[[Any, Any], "QuantizedWeight | str"]
"""From a layer and its weight."""


def _of_bitsandbytes(layer: Any, weight: Any) -> QuantizedWeight | str:
    """``Params4bit``, whose state may stand at the layer (FSDP makes new parameters)."""
    if "ds_id" in vars(weight):  # a view that autograd keeps would keep what was gathered
        return "DeepSpeed shards its weight, and gathers it for the layer's own call"
    state = getattr(weight, "quant_state", None) or getattr(layer, "quant_state", None)
    if state is None:
        return "its weight is not quantized yet (bitsandbytes does it when a layer moves)"
    if getattr(state, "packing_format_for_cpu", False):
        return "bitsandbytes has packed its weight for inference on a CPU"
    rows, columns = state.shape
    if columns % 2:
        return f"its rows of {columns} codes end within a byte"
    more: dict[str, Any] = {}
    if state.nested:
        if state.state2.blocksize != 256:
            return f"its scales are quantized in blocks of {state.state2.blocksize}"
        own = state.state2
        more = {"scale_levels": own.code, "scale_absmax": own.absmax, "scale_offset": state.offset}
    return QuantizedWeight(
        weight.view(torch.uint8).view(rows, columns // 2),  # .data has no version of the weight's
        state.absmax,
        format=state.quant_type,
        dtype=state.dtype,
        group=state.blocksize,
        **more,
    )


def _of_torchao(format: str, group: int) -> Reader:
    def read(layer: Any, weight: Any) -> QuantizedWeight | str:
        if weight.is_swizzled_scales or weight.block_size != group:
            return f"torchao keeps its scales in the order of a device, or blocks of {group} differ"
        codes = weight.qdata.view(torch.uint8)
        if codes.shape[-1] * 2 != weight.shape[-1]:
            return f"its codes are of the format {getattr(weight, 'elem_dtype', codes.dtype)}"
        if not codes.is_contiguous():
            return "its codes are transposed"
        scale, one = weight.scale, getattr(weight, "per_tensor_scale", None)
        scale = scale.view(torch.uint8) if format == "mxfp4" else scale
        scale = scale.view(codes.shape[0], -1)
        return QuantizedWeight(
            codes, scale, format=format, dtype=weight.orig_dtype, global_scale=one
        )

    return read


def _of_modelopt(layer: Any, weight: Any) -> QuantizedWeight | str:
    """A compressed weight of modelopt, whose scales stand at the quantizer of its layer."""
    if weight.metadata["qtensor_class"].__name__ != "NVFP4QTensor":
        return f"modelopt keeps its weight as {weight.metadata['qtensor_class'].__name__}"
    quantizer = layer.weight_quantizer
    others = [layer.input_quantizer, layer.output_quantizer]
    if any(q.is_enabled or q.pre_quant_scale is not None for q in others):
        return "modelopt rounds or scales its inputs or outputs too"
    scales, one = quantizer._scale, quantizer._double_scale
    if quantizer.block_sizes[-1] != 16 or scales.dtype != torch.float8_e4m3fn:
        return f"its blocks are of {quantizer.block_sizes[-1]}, with scales in {scales.dtype}"
    return QuantizedWeight(
        weight.data, scales, format="nvfp4", dtype=weight.metadata["dtype"], global_scale=one
    )


READERS: dict[tuple[str, str], Reader] = {
    ("liger_multi.ops._quantized", "QuantizedWeight"): lambda layer, weight: weight,
    ("bitsandbytes.nn.modules", "Params4bit"): _of_bitsandbytes,
    ("torchao.prototype.mx_formats.nvfp4_tensor", "NVFP4Tensor"): _of_torchao("nvfp4", 16),
    ("torchao.prototype.mx_formats.mx_tensor", "MXTensor"): _of_torchao("mxfp4", 32),
    ("modelopt.torch.quantization.qtensor.base_qtensor", "QTensorWrapper"): _of_modelopt,
}
"""Readers by module and name of a weight's class."""
PACKED = ("weight_packed", "qweight")
"""Names of packed weights of compressed-tensors, and of GPTQ and AWQ."""


def is_compressed(layer: Any) -> bool:
    """Whether compressed-tensors keeps the weight of a layer packed."""
    return stored(layer, "weight_packed") is not None and stored(layer) is None


_FLOATS = {16: "nvfp4", 32: "mxfp4"}
"""Formats of compressed-tensors of the type float, by the elements of a block."""


def _compressed(layer: Any) -> QuantizedWeight | str:
    """A packed weight of compressed-tensors, by the scheme that stands at its layer."""
    scheme: Any = getattr(layer, "quantization_scheme", None)
    how = getattr(scheme, "weights", None)
    codes, scales = (stored(layer, f"weight_{n}") for n in ("packed", "scale"))
    if how is None or codes is None or scales is None:
        return "compressed-tensors has packed its weight without a scheme or scales"
    if scheme.input_activations is not None or scheme.output_activations is not None:
        return "compressed-tensors rounds its inputs or outputs too"
    kind, own = str(getattr(how.type, "value", how.type)), scales.dtype
    if how.num_bits != 4:
        return f"compressed-tensors keeps its weight in {how.num_bits} bits ({kind})"
    if stored(layer, "weight_g_idx") is not None:
        return "its groups are of columns in another order (weight_g_idx)"
    codes = codes.view(torch.uint8)
    if kind == "float":
        format = _FLOATS.get(how.group_size, "")
        if not format or stored(layer, "weight_zero_point") is not None:
            return f"its blocks of {how.group_size} or their zeros are of no format that is known"
        one = stored(layer, "weight_global_scale")
        # compressed-tensors has no other dtype for the numbers of these formats
        return QuantizedWeight(
            codes, scales, format=format, global_scale=one, divides=one is not None
        )
    if scales.ndim != 2 or scales.shape[0] != codes.shape[0]:
        return f"its scales are by {getattr(how.strategy, 'value', how.strategy)}"
    zeros = stored(layer, "weight_zero_point")
    if zeros is not None:  # eight rows a word
        shifts = torch.arange(0, 32, 4, device=zeros.device)[None, :, None]
        zeros = ((zeros[:, None] >> shifts) & 15).flatten(0, 1)[: codes.shape[0]].to(torch.uint8)
    if codes.shape[1] * 2 != layer.in_features:
        return f"its rows of {layer.in_features} codes end within a word"
    return QuantizedWeight(codes, scales, format="int4", dtype=own, zeros=zeros)


# --- GPTQ and AWQ ---

_QLINEAR = "gptqmodel.nn_modules.qlinear"
PACKINGS = {
    (f"{_QLINEAR}.torch", "TorchLinear"): "gptq",
    (f"{_QLINEAR}.tritonv2", "TritonV2Linear"): "gptq",
    (f"{_QLINEAR}.torch_awq", "AwqTorchLinear"): "awq",
    (f"{_QLINEAR}.gemm_awq", "AwqGEMMLinear"): "awq",
    (f"{_QLINEAR}.gemm_awq_triton", "AwqGEMMTritonLinear"): "awq",
}
"""Layers that keep words in the order of the checkpoint; those of other kernels reorder them."""
_ORDER = "_liger_multi_in_order"


def _packing_of(layer: Any) -> str | None:
    own = unpatched_class(layer)
    return PACKINGS.get((own.__module__, own.__qualname__))


def _of_words(layer: Any, packing: str) -> QuantizedWeight | str:
    """Words of gptqmodel, for checkpoints of GPTQ and AWQ as transformers loads them."""
    words, scales, zeros = (stored(layer, n) for n in ("qweight", "scales", "qzeros"))
    if words is None or scales is None or zeros is None:
        return "it lacks scales or zeros"
    if layer.bits != 4 or words.dtype != torch.int32:
        return f"it keeps its weight in {layer.bits} bits, in words of {words.dtype}"
    if layer.adapter is not None or layer.online_full_had or layer.online_partial_had:
        return "gptqmodel adds an adapter of its own, or rotates its inputs"
    rows, columns = shape_of(words, packing)
    group = columns // max(1, scales.shape[0])
    fits = (rows, columns) == (layer.out_features, layer.in_features)
    if not fits or scales.shape != (columns // max(1, group), rows) or group % 2:
        return f"its codes are padded, or their groups of {group} end within a byte"
    index = stored(layer, "g_idx")
    if packing == "gptq" and index is not None and not _in_order(index, group):
        return "its groups are of columns in another order (act-order, g_idx)"
    return QuantizedWeight(
        words,
        scales.t(),
        format="int4",
        dtype=scales.dtype,
        packing=packing,
        zeros=codes_of_outputs(zeros, packing),
    )


def _in_order(index: Tensor, group: int) -> bool:
    """Whether groups are of adjacent columns; a device is asked once for each tensor."""
    state = (None if index.is_inference() else index._version, group)
    known = getattr(index, _ORDER, None)
    if known is None or known[0] != state:
        expected = torch.arange(index.numel(), dtype=index.dtype) // group
        known = state, torch.equal(index.cpu(), expected)
        setattr(index, _ORDER, known)
    return bool(known[1])


# --- checkpoints of modelopt ---


def _exported(layer: Any) -> bool:
    """Whether a layer has the tensors of a checkpoint of modelopt in NVFP4."""
    weight, scales = stored(layer), stored(layer, "weight_scale")
    ours = weight is not None and weight.dtype == torch.uint8 and scales is not None
    return ours and stored(layer, "weight_scale_2") is not None


def _of_checkpoint(layer: Any) -> QuantizedWeight | str:
    """NVFP4 as modelopt exports it; nothing in it says the dtype of the weight, but the bias."""
    names = ("weight", "weight_scale", "weight_scale_2")
    codes, scales, one = (cast(Tensor, stored(layer, name)) for name in names)
    bias = stored(layer, "bias")
    dtype = torch.bfloat16 if bias is None else bias.dtype
    return QuantizedWeight(codes.detach(), scales, format="nvfp4", dtype=dtype, global_scale=one)


@constant_in_graphs
def _reader_of(weight_class: type) -> Reader | None:
    return READERS.get((weight_class.__module__, weight_class.__name__))


def in_four_bits(layer: nn.Module) -> bool:
    """Whether a layer keeps its weight in 4 bits, in any form that is known."""
    weight = stored(layer)
    if weight is not None:
        return _reader_of(type(weight)) is not None or _exported(layer)
    return any(isinstance(stored(layer, name), Tensor) for name in PACKED)


def quantized_weight(layer: Any) -> QuantizedWeight | str:
    """The weight of a layer as operators take it, or why they cannot."""
    weight = stored(layer)
    reader = None if weight is None else _reader_of(type(weight))
    if reader is None and is_compressed(layer):
        return _compressed(layer)
    if reader is None and _exported(layer):
        return _of_checkpoint(layer)
    if reader is None and stored(layer, "qweight") is not None:
        packing = _packing_of(layer)
        own = "keeps its own call: its kernel may have put its words into an order of its own"
        return _of_words(layer, packing) if packing else f"{type(layer).__name__} {own}"
    if reader is None:
        return f"{type(layer).__name__} packs its weight in a form that only its own call reads"
    return reader(layer, weight)


def shown(weight: QuantizedWeight) -> str:
    """Format and bytes for a report."""
    bits = 8 * weight.stored_bytes / max(1, weight.numel())
    return f"{weight.format}, {bits:.2f} bits, {weight.stored_bytes / 2**20:,.1f} MiB"


# --- layers ---


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
        if weight is None and (isinstance(self, CompressedLinear) or _exported(self)):
            return _by_numbers(self, x)
        if weight is None:
            return cast(Tensor, original(module_class)(self, x, *args, **kwargs))
        options = cast(FourBitOptions, module_class._liger_multi_swap.settings)
        weight = multiplied(weight, options)
        return cast(
            Tensor, run_bound(options, ("linear", "linear_float8"), _apply, self, x, weight)
        )


def _by_numbers(layer: Any, x: Tensor) -> Tensor:
    """PyTorch's GEMM, for layers whose owner has no forward over codes."""
    weight = quantized_weight(layer)
    if isinstance(weight, str):
        raise AttributeError(weight)
    return nn.functional.linear(x, weight.dequantized(), layer.bias)


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
    def on_enter(module: nn.Module, settings: Any) -> None:
        """Put the forward aside that compressed-tensors has written into the instance."""
        if "forward" in vars(module):
            module.__dict__[_ASIDE] = module.__dict__.pop("forward")

    @staticmethod
    def on_leave(module: nn.Module) -> None:
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
    product = ops.linear_float8 if weight.float8 else ops.linear
    return product(x, weight, bias_of(layer, x.dtype))


def multiplied(weight: QuantizedWeight, options: FourBitOptions) -> QuantizedWeight:
    """The weight with the dtype of its GEMMs."""
    rounded = options.compute == "float8" and weight.numel() >= options.smallest
    return weight.changed(float8=True) if rounded else weight


def follows_input(layer: Any) -> bool:
    """Whether the owner multiplies in the dtype of its input, whatever that of its scales."""
    return _packing_of(layer) is not None and stored(layer) is None


def _in_dtype(layer: Any, weight: QuantizedWeight, dtype: torch.dtype | None) -> QuantizedWeight:
    """In the dtype of the input of a layer that follows it, whose scales gptqmodel has in fp16."""
    dtype = autocast_dtype(weight.device.type) or dtype
    other = dtype in DTYPES and dtype != weight.dtype and follows_input(layer)
    return weight.changed(dtype=dtype) if other else weight


def four_bit_weight(layer: Any, dtype: torch.dtype | None = None) -> QuantizedWeight | None:
    """The weight of a patched layer, where its call is nothing but a GEMM with it.

    ``dtype``: That of the input.
    """
    module_class = type(layer)
    if not issubclass(module_class, FourBitLinear) or torch.compiler.is_compiling():
        return None
    options = cast(FourBitOptions, module_class._liger_multi_swap.settings)
    if options.backend is not None or not code_holds(module_class) or is_watched(layer):
        return None
    weight = quantized_weight(layer)
    if isinstance(weight, str):
        return None
    weight = _in_dtype(layer, weight, dtype)
    if not _computes_in(layer, weight.dtype):
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
    weight = _in_dtype(layer, weight, x.dtype)
    cast_to = autocast_dtype(x.device.type)
    same = x.dtype == weight.dtype and x.device == weight.device
    return weight if same and cast_to in (None, x.dtype) and _computes_in(layer, x.dtype) else None


def _computes_in(layer: Any, dtype: torch.dtype) -> bool:
    """Whether the owner's layer multiplies in a dtype, and its bias has it."""
    computes, bias = getattr(layer, "compute_dtype", None), layer.bias
    return follows_input(layer) or (
        computes in (None, dtype) and (bias is None or bias.dtype == dtype)
    )


def bias_of(layer: Any, dtype: torch.dtype) -> Tensor | None:
    """The bias as operators take it beside an input of a dtype."""
    bias = cast("Tensor | None", layer.bias)
    return bias if bias is None or not follows_input(layer) else bias.to(dtype)


def is_four_bit(layer: nn.Module | None) -> bool:
    """Whether a layer is patched, and nothing stands around its call."""
    return layer is not None and four_bit_weight(layer) is not None


# --- which layers, before the parts that make operators of several ---

FORWARDS = {
    *LINEAR_FORWARDS,
    ("bitsandbytes.nn.modules", "Linear4bit.forward"),
    *((module, f"{name}.forward") for module, name in PACKINGS),
    ("modelopt.torch.quantization.nn.modules.quant_linear", "RealQuantLinear.forward"),
}
"""Forwards that are a GEMM with the weight, and nothing else."""


def find_four_bits(model: ModelFacts, request: Request) -> Iterator[Change]:
    """Layers of bitsandbytes, torchao and compressed-tensors; others are named with the reason."""
    options = request.get("four_bits")
    for _, module in model.with_attribute(_HOOK):
        _spare(module)
    for path, module in model.merged(model.quantized, model.instances(FourBitLinear)):
        ours = isinstance(module, FourBitLinear)
        if not ours and (isinstance(module, Patched) or not in_four_bits(module)):
            continue
        if options is None:
            yield Restore(path, module)
            continue
        forward = unpatched_class(module).forward
        known = (forward.__module__, getattr(forward, "__qualname__", "")) in FORWARDS
        weight = quantized_weight(module)
        reason = None if _compressed_forward(module) else conflict_of(module)
        if reason is None and isinstance(weight, str):
            reason = weight
        if reason is None and not known:
            reason = f"it has a forward of its own ({unpatched_class(module).__name__})"
        if reason is not None or isinstance(weight, str):
            yield Restore(path, module)
            yield Skipped(path, "four_bits", f"{reason}", strict="four_bits" in request.named)
            continue
        behavior = CompressedLinear if is_compressed(module) else FourBitLinear
        swap = Swap("four_bits", stock_class(module), behavior, options)
        yield Replace(path, module, swap, f"linear[{shown(weight)}]", options.shown())


def _compressed_forward(module: nn.Module) -> bool:
    """Whether compressed-tensors wrote the forward of an instance, which rounds and multiplies."""
    function: Any = getattr(vars(module).get("forward"), "__func__", None)
    written_in = str(getattr(function, "__globals__", {}).get("__name__"))
    return is_compressed(module) and written_in.startswith("compressed_tensors.")


_HOOK = "ct_decompress_hook"


def _spare(model: nn.Module) -> None:
    """Let the hook that decompresses a whole model ask at every forward which layers are ours."""
    handle: Any = vars(model)[_HOOK]
    hook = None if handle is None else model._forward_pre_hooks.get(handle.id)
    if hook is not None and not isinstance(hook, functools.partial):
        model._forward_pre_hooks[handle.id] = functools.partial(decompress_others, hook)
