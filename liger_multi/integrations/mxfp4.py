"""gpt-oss with its experts left in MXFP4: loading, saving, and merging adapters back.

transformers keeps these experts in 4 bits only with kernels from its hub, which have no backward,
and otherwise dequantizes them to 16 bits. Here blocks and scales of the checkpoint are the
parameters of the usual experts, as a :class:`~liger_multi.ops.QuantizedWeight`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from liger_multi.errors import PatchError
from liger_multi.integrations.codes import export_codes
from liger_multi.ops import QuantizedWeight
from liger_multi.patching.attention.interface import NAME, register_attention

_PARTS = ("_blocks", "_scales")
_LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_LARGEST = 2  # the exponent of 4, the largest power of two of E2M1


def load_mxfp4(
    model_dir: str | os.PathLike[str],
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    attn_implementation: str = "liger_multi",
) -> Any:
    """A causal language model whose experts stay in MXFP4; everything else is in ``dtype``.

    The model trains with LoRA after :func:`liger_multi.patch`; ``save_pretrained`` writes blocks
    and scales again. Nothing of the experts exists in 16 bits while it loads.

    transformers has no SDPA for attention with sinks: gpt-oss would run ``"eager"``, which
    materializes several tensors of heads x queries x keys. So the default is the attention
    of this library, which this function registers.

    Args:
        model_dir: A folder with ``config.json`` and safetensors, such as a snapshot of
            ``openai/gpt-oss-20b``.
        dtype: Of all other weights, and of results.
        device: Where the model goes.
        attn_implementation: Of transformers; ``"eager"`` for its own.

    Raises:
        PatchError: The checkpoint holds no MXFP4, or lacks a tensor.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    if attn_implementation == NAME:
        register_attention()
    folder = Path(model_dir)
    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=attn_implementation
        )
    packed: dict[str, dict[str, Tensor]] = {}
    filled = set()
    for name, tensor in _tensors(folder, device):
        part = next((part for part in _PARTS if name.endswith(part)), None)
        if part is None:
            _fill(model, name, tensor.to(dtype) if tensor.is_floating_point() else tensor)
            filled.add(name)
            continue
        base = name.removesuffix(part)
        pair = packed.setdefault(base, {})
        pair[part] = tensor
        if len(pair) == len(_PARTS):
            blocks, scales = (pair[p] for p in _PARTS)
            _fill(model, base, _weight(blocks, scales, dtype))
            filled.add(base)
            packed[base] = {}
    if not packed:
        raise PatchError(f"{folder} has no tensors that end with _blocks, so nothing in MXFP4")
    _without_values(model, config, device)
    model.tie_weights()
    missing = [n for n, t in model.state_dict().items() if t.is_meta and n not in filled]
    if missing:
        raise PatchError(f"{folder} lacks {', '.join(missing[:5])}")
    export_codes(model)
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model.eval()


def _tensors(folder: Path, device: torch.device | str) -> Iterator[tuple[str, Tensor]]:
    from safetensors import safe_open

    index = folder / "model.safetensors.index.json"
    files = [folder / "model.safetensors"]
    if index.is_file():
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        files = [folder / name for name in dict.fromkeys(names)]
    for file in files:
        with safe_open(file, framework="pt", device=str(device)) as opened:
            for name in opened.keys():  # noqa: SIM118
                yield name, opened.get_tensor(name)


def _weight(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> QuantizedWeight:
    """The stack (E, in, out) of transformers, over rows of outputs as they are stored."""
    return QuantizedWeight(blocks.flatten(-2), scales, format="mxfp4", dtype=dtype, transposed=True)


def _fill(model: nn.Module, name: str, value: Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    try:
        owner = model.get_submodule(path)
        current = getattr(owner, leaf)
    except AttributeError:
        raise PatchError(f"the checkpoint has {name}, which the model does not have") from None
    if current.shape != value.shape:
        raise PatchError(f"{name} has shape {tuple(value.shape)}, needed {tuple(current.shape)}")
    if leaf in owner._buffers:
        owner._buffers[leaf] = value
    else:
        owner._parameters[leaf] = nn.Parameter(value, requires_grad=False)


def _without_values(model: nn.Module, config: Any, device: torch.device | str) -> None:
    """Modules whose buffers no checkpoint holds (rotary angles) are built again."""
    for path, module in list(model.named_modules()):
        if any(b is not None and b.is_meta for b in module._buffers.values()):
            model.set_submodule(path, type(module)(config).to(device))


def dequantize_weights(model: nn.Module) -> int:
    """Replace frozen weights in 4 bits with their numbers, so that PEFT can merge into them.

    Args:
        model: Changed in place; patched or not.

    Returns:
        The number of weights.
    """
    replaced: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, weight in module._parameters.items():
            if isinstance(weight, QuantizedWeight):
                if id(weight) not in replaced:
                    numbers = weight.dequantized().contiguous()
                    replaced[id(weight)] = nn.Parameter(numbers, requires_grad=False)
                module._parameters[name] = replaced[id(weight)]
    return len(replaced)


class MergeError(NamedTuple):
    """How far a merged weight in 4 bits is from the sum of weight and adapter.

    Attributes:
        path: Of the weight.
        relative: The norm of the difference over the norm of the sum.
        of_update: The same over the norm of what the adapter adds: 1 means that it is lost.
    """

    path: str
    relative: float
    of_update: float


@torch.no_grad()
def merge_mxfp4(weight: QuantizedWeight, delta: Tensor, path: str = "") -> MergeError:
    """Add an update to a weight in MXFP4, in place, and say what rounding to 4 bits lost.

    Codes are the nearest to the sum, under the scale of every block that its largest number needs.

    Args:
        weight: In MXFP4.
        delta: Of its shape, such as PEFT's ``get_delta_weight``.
        path: For the result.

    Raises:
        ValueError: Another format, or another shape.
    """
    if weight.format != "mxfp4" or delta.shape != weight.shape:
        raise ValueError(
            f"merge_mxfp4: needs a weight in mxfp4 and an update of its shape, got {weight!r} and "
            f"{tuple(delta.shape)}"
        )
    added = delta.mT if weight.transposed else delta
    plain = weight.changed(transposed=False, dtype=torch.float32)
    squared_error, total, update = 0.0, 0.0, 0.0
    for e in range(plain.codes.shape[0] if plain.ndim > 2 else 1):
        part = plain[e] if plain.ndim > 2 else plain
        change = (added[e] if plain.ndim > 2 else added).float()
        expected = part.dequantized() + change
        codes, scales = quantize_mxfp4(expected)
        part.codes.copy_(codes)
        part.scales.copy_(scales)
        squared_error += float((part.dequantized() - expected).square().sum())
        total, update = (
            total + float(expected.square().sum()),
            update + float(change.square().sum()),
        )
    return MergeError(
        path,
        (squared_error / max(total, 1e-38)) ** 0.5,
        (squared_error / max(update, 1e-38)) ** 0.5,
    )


def merge_adapters_mxfp4(model: nn.Module) -> list[MergeError]:
    """Add the active adapters of PEFT to stacks of experts in MXFP4, which stay in 4 bits.

    PEFT counts them as merged then: its ``merge_and_unload`` merges the other layers, and removes
    the wrappers of the stacks.

    Args:
        model: With adapters (``target_parameters``); changed in place; patched or not.

    Returns:
        What rounding lost, of every stack with an adapter.
    """
    errors = []
    for path, wrapper in model.named_modules():
        name = vars(wrapper).get("parameter_name")
        weight = wrapper.get_base_layer()._parameters.get(name) if name else None
        if not isinstance(weight, QuantizedWeight) or wrapper.merged_adapters:
            continue
        active = [a for a in wrapper.active_adapters if a in wrapper.lora_A]
        if active:
            delta = sum(wrapper.get_delta_weight(adapter) for adapter in active)
            errors.append(merge_mxfp4(weight, delta, f"{path}.{name}"))
            wrapper.merged_adapters += active
    return errors


def quantize_mxfp4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes ``(..., K / 2)`` and scales ``(..., K / 32)`` of numbers, as OCP's MX 1.0 rounds them.

    The scale of a block is the power of two of its largest number, less that of 4; what then is
    above 6 becomes 6, and ties go to the even code.

    Raises:
        ValueError: The last axis is no multiple of 32.
    """
    if weight.shape[-1] % 32:
        raise ValueError(f"quantize_mxfp4: K must be a multiple of 32, got {tuple(weight.shape)}")
    rows = weight.float().unflatten(-1, (-1, 32))
    _, exponent = torch.frexp(rows.abs().amax(-1))  # of a fraction in [0.5, 1)
    exponent = (exponent - 1 - _LARGEST).clamp(-127, 127)
    scaled = torch.ldexp(rows.abs(), -exponent.unsqueeze(-1))
    levels = torch.tensor(_LEVELS, device=weight.device)
    middle = (levels[1:] + levels[:-1]) / 2
    # a tie goes down, to an odd code every second time
    code = torch.bucketize(scaled.contiguous(), middle)
    tie = scaled == middle[code.clamp(max=len(middle) - 1)]
    code = torch.where(tie & (code % 2 == 1), code + 1, code)
    code = (code | (rows.signbit().long() << 3)).flatten(-2).to(torch.uint8)
    return code[..., ::2] | code[..., 1::2] << 4, (exponent + 127).to(torch.uint8)
