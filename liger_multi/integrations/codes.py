"""Checkpoints of weights in 4 bits: codes and scales under names of formats that others read.

A :class:`~liger_multi.ops.QuantizedWeight` has no storage, so safetensors cannot write it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from liger_multi.ops import QuantizedWeight


class Layout(NamedTuple):
    """Where a format keeps the tensors of a weight.

    Attributes:
        names: Of tensors, by what follows the name of the parameter.
        format: Of compressed-tensors; None where its loader has no such layout.
        scheme: What its configuration says of weights.
    """

    names: Mapping[str, str]
    format: str | None = None
    scheme: Mapping[str, Any] = {}


_FLOAT = {"type": "float", "symmetric": True}
_E4M3 = dict.fromkeys(("scale_dtype", "zp_dtype"), "torch.float8_e4m3fn")
_BYTE = dict.fromkeys(("scale_dtype", "zp_dtype"), "torch.uint8")
_PACKED = {"_packed": "codes", "_scale": "scales"}
BLOCKS = Layout({"_blocks": "codes", "_scales": "scales"})
"""Stacks of experts of gpt-oss."""
MODELOPT = Layout({"": "codes", "_scale": "scales", "_scale_2": "global_scale"})
NVFP4 = Layout(
    {**_PACKED, "_global_scale": "global_scale"},
    "nvfp4-pack-quantized",
    {**_FLOAT, "strategy": "tensor_group", **_E4M3},
)
MXFP4 = Layout(_PACKED, "mxfp4-pack-quantized", {**_FLOAT, "strategy": "group", **_BYTE})
INT4 = Layout(
    {**_PACKED, "_zero_point": "zeros", "_shape": "shape"},
    "pack-quantized",
    {"type": "int", "strategy": "group"},
)
OWN = Layout(
    {
        f".{name}": name
        for name in (
            "codes",
            "scales",
            "global_scale",
            "zeros",
            "scale_levels",
            "scale_absmax",
            "scale_offset",
        )
    }
)
"""Everything else, under names of ours."""


def layout_of(weight: QuantizedWeight) -> Layout:
    """The layout that keeps every bit of a weight."""
    bytes_ = weight.packing is None and weight.codes.ndim == weight.scales.ndim
    if bytes_ and weight.format == "mxfp4" and weight.ndim == 3 and weight.transposed:
        return OWN if weight.block != 32 else BLOCKS
    if not bytes_ or weight.ndim != 2 or weight.transposed:
        return OWN
    if weight.format == "mxfp4" and weight.block == 32 and weight.scales.dtype == torch.uint8:
        return MXFP4
    if weight.format == "nvfp4" and weight.block == 16 and weight.scales.dtype != torch.uint8:
        return NVFP4 if weight.divides or not weight.more else MODELOPT
    zeros = weight.more.get("zeros")
    fits_words = weight.columns % 8 == 0 and (zeros is None or zeros.dtype == torch.uint8)
    same_dtype = weight.scales.dtype == weight.dtype
    return INT4 if weight.format == "int4" and fits_words and same_dtype else OWN


def export_codes(model: nn.Module) -> int:
    """Let checkpoints of a model have codes and scales in the place of weights in 4 bits.

    ``state_dict``, ``save_pretrained`` and ``load_state_dict`` then have plain tensors, under the
    names of compressed-tensors (NVFP4, MXFP4, INT4 with groups), of modelopt (NVFP4 whose global
    scale multiplies) and of gpt-oss (stacks in MXFP4). Others are ``<weight>.codes``, ``.scales``
    and so on. Loading copies into the codes of the model, bit for bit.

    Where all weights are linear layers in one layout of compressed-tensors, the model's
    ``config`` says so, and ``from_pretrained`` loads the checkpoint through that library.

    Args:
        model: Changed in place; patched or not.

    Returns:
        The number of weights.
    """
    owners = [
        (module, name, p)
        for module in model.modules()
        for name, p in module._parameters.items()
        if isinstance(p, QuantizedWeight)
    ]
    for module, _, _ in owners:
        if _to_codes not in module._state_dict_hooks.values():
            module.register_state_dict_post_hook(_to_codes)
            module.register_load_state_dict_pre_hook(_from_codes)
    config: Any = getattr(model, "config", None)
    if config is not None and getattr(config, "quantization_config", None) is None:
        scheme = _scheme(model)
        if scheme is not None:
            config.quantization_config = scheme
    return len(owners)


def _scheme(model: nn.Module) -> dict[str, Any] | None:
    """The configuration of compressed-tensors for all weights in 4 bits of a model."""
    weights, unquantized = [], []
    for path, module in model.named_modules():
        module_weights = [p for p in module._parameters.values() if isinstance(p, QuantizedWeight)]
        if module_weights and not isinstance(module, nn.Linear):
            return None
        weights += module_weights
        if isinstance(module, nn.Linear) and not module_weights:
            unquantized.append(path)
    schemes = {(layout_of(w).format, w.block, "zeros" in w.more) for w in weights}
    if len(schemes) != 1:
        return None
    ((format, group, zeros),) = schemes
    if format is None:
        return None
    scheme = {"num_bits": 4, "group_size": group, "dynamic": False, "symmetric": not zeros}
    scheme |= layout_of(weights[0]).scheme
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "ignore": unquantized,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": scheme, "format": format}},
    }


# --- tensors of a weight, and a weight of tensors ---


def _packed_zeros(zeros: Tensor) -> Tensor:
    """Zeros (N, groups) of a byte each, eight rows a word."""
    padded = nn.functional.pad(zeros, (0, 0, 0, -zeros.shape[0] % 8))
    codes = padded.unflatten(0, (-1, 8)).long()
    words = (codes << torch.arange(0, 32, 4, device=zeros.device)[None, :, None]).sum(1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def _zeros_of(words: Tensor, rows: int) -> Tensor:
    shifts = torch.arange(0, 32, 4, device=words.device)[None, :, None]
    return ((words[:, None] >> shifts) & 15).flatten(0, 1)[:rows].to(torch.uint8)


def _tensors(weight: QuantizedWeight, layout: Layout) -> dict[str, Tensor]:
    """What a checkpoint keeps, by what follows the name of the parameter."""
    tensors = {"codes": weight.codes, "scales": weight.scales, **weight.more}
    if layout is BLOCKS:
        tensors["codes"] = weight.codes.unflatten(-1, (-1, 16))
    elif layout is NVFP4 and not weight.more:
        tensors["global_scale"] = torch.ones(1, device=weight.device)
    elif layout is INT4:
        tensors["codes"] = weight.codes.contiguous().view(torch.int32)
        tensors["shape"] = torch.tensor(weight.shape)
        if "zeros" in tensors:
            tensors["zeros"] = _packed_zeros(tensors["zeros"])
    names = layout.names.items()
    return {end: tensors[name].detach() for end, name in names if name in tensors}


def _weight_of(weight: QuantizedWeight, layout: Layout, parts: Mapping[str, Tensor]) -> Tensor:
    """A weight like another one, over tensors of a checkpoint."""
    names = ("codes", "scales", *weight.more)
    ends = {name: end for end, name in layout.names.items() if end in parts and name in names}
    tensors = {name: parts[end].to(weight.device) for name, end in ends.items()}
    tensors["codes"] = tensors["codes"].view(weight.codes.dtype).view(weight.codes.shape)
    if layout is INT4 and "zeros" in tensors:
        tensors["zeros"] = _zeros_of(tensors["zeros"], weight.shape[0])
    return weight.changed(**tensors)


def _of_codes(module: nn.Module) -> dict[str, QuantizedWeight]:
    parameters: Mapping[str, Any] = module._parameters
    return {n: p for n, p in parameters.items() if isinstance(p, QuantizedWeight)}


def _to_codes(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Codes and scales in the place of weights, after a module has written its state."""
    for name, weight in _of_codes(module).items():
        if isinstance(state.get(f"{prefix}{name}"), QuantizedWeight):
            quantized = state.pop(f"{prefix}{name}")
            parts = _tensors(quantized, layout_of(weight))
            state |= {f"{prefix}{name}{end}": tensor for end, tensor in parts.items()}


def _from_codes(
    module: nn.Module,
    state: dict[str, Any],
    prefix: str,
    metadata: Any,
    strict: bool,
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> None:
    """Weights in the place of codes and scales, before a module reads its state."""
    for name, weight in _of_codes(module).items():
        layout, key = layout_of(weight), f"{prefix}{name}"
        parts = {end: state[key + end] for end in layout.names if key + end in state}
        expected_parts = _tensors(weight, layout)
        if not expected_parts.keys() <= parts.keys() or isinstance(parts.get(""), QuantizedWeight):
            continue
        mismatched = [
            end
            for end, expected in expected_parts.items()
            if (parts[end].shape, parts[end].dtype) != (expected.shape, expected.dtype)
        ]
        errors += [
            f"{key}{end}: the checkpoint has {tuple(parts[end].shape)} in {parts[end].dtype}, "
            f"needed {tuple(expected_parts[end].shape)} in {expected_parts[end].dtype}"
            for end in mismatched
        ]
        for end in parts:
            del state[key + end]
        state[key] = weight if mismatched else _weight_of(weight, layout, parts)
