"""Models of shapes whose frozen base is in 4 bits, with adapters on all of its linear layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from liger_multi.errors import need
from liger_multi.memory.estimation import meta_model
from liger_multi.ops import QuantizedWeight
from liger_multi.ops.dequantize import FORMATS

INT4_GROUP = 128
"""Elements of a block of int4, as checkpoints of AWQ and GPTQ have them."""
RANK = 16


def adapted_in_four_bits(config: Any, format: str, rank: int = RANK) -> Any:
    """A model on the meta device: frozen weights in 4 bits, and LoRA in fp32 on top of them.

    Stacks of experts and linear layers are quantized, except for the head, and for weights whose
    rows are not whole blocks. In ``mxfp4``, a model with experts keeps everything else in 16 bits,
    as the checkpoints of gpt-oss do.

    Args:
        config: Of a causal language model of Hugging Face.
        format: Of :func:`liger_multi.ops.dequantize`.
        rank: Of the adapters.

    Raises:
        ValueError: An unknown format.
        MissingPackageError: peft cannot be imported.
    """
    if format not in FORMATS:
        raise ValueError(f"weights must be one of {', '.join(FORMATS)}, got {format!r}")
    need("adapters on weights in 4 bits", ["peft"], "peft")
    import peft

    model = meta_model(config, torch.bfloat16, "sdpa", 0)
    head = model.get_output_embeddings()
    linear = [
        path for path, m in model.named_modules() if isinstance(m, nn.Linear) and m is not head
    ]
    stacks = [path for path, p in model.named_parameters() if p.ndim == 3]
    only_experts = format == "mxfp4" and stacks
    for path in stacks if only_experts else [*stacks, *(f"{path}.weight" for path in linear)]:
        owner, _, name = path.rpartition(".")
        module = model.get_submodule(owner)
        quantized = _quantized(module, module._parameters[name], format)
        if quantized is not None:
            module._parameters[name] = nn.Parameter(quantized, requires_grad=False)
    adapters = peft.LoraConfig(r=rank, target_modules=linear, target_parameters=stacks or None)
    return peft.get_peft_model(model, adapters, low_cpu_mem_usage=True)


def _quantized(module: Any, weight: Any, format: str) -> QuantizedWeight | None:
    """Codes and scales for a weight; blocks lie along its inputs."""
    turned = weight.ndim == 3 and bool(getattr(module, "is_transposed", False))
    *lead, columns = (weight.mT if turned else weight).shape
    group = FORMATS[format].group or INT4_GROUP
    if columns % group:
        return None
    dtypes = {"int4": weight.dtype, "nvfp4": torch.float8_e4m3fn, "mxfp4": torch.uint8}
    scales = torch.empty(
        *lead, columns // group, dtype=dtypes.get(format, torch.float32), device="meta"
    )
    codes = torch.empty(*lead, columns // 2, dtype=torch.uint8, device="meta")
    return QuantizedWeight(codes, scales, format=format, dtype=weight.dtype, transposed=turned)
