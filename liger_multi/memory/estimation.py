"""Predict the memory of training from shapes alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from liger_multi.errors import require_packages, shown
from liger_multi.files.page import Page, Paged
from liger_multi.memory.breakdown import Profile, percent, summarize
from liger_multi.memory.measure import format_bytes
from liger_multi.memory.offload import compress_activations, offload_activations
from liger_multi.memory.recorder import (
    CATEGORIES,
    GRADIENTS,
    LOGITS,
    OTHER,
    PARAMETERS,
    SAVED,
    STATES,
    TEMPORARY,
    Block,
    stored,
)
from liger_multi.memory.setup import (
    ATTENTIONS,
    DTYPES,
    OPTIMIZERS,
    Optimizer,
    SetupOptions,
    TrainingSetup,
    common_heads,
    positive,
    setup_of,
)
from liger_multi.memory.simulation import Simulation, in_training, on_meta
from liger_multi.ops import QuantizedWeight
from liger_multi.ops.dequantize import FORMATS
from liger_multi.patcher import patcher, sharder

if TYPE_CHECKING:
    from typing_extensions import Unpack

# Bytes that the matrix library takes from the allocator: 32 MiB a handle on a Hopper card (torch
# 2.11), one handle for the thread of forward and one for backward's.
WORKSPACE = 2 * 32 * 2**20


@dataclass
class Estimate(Paged):
    """What one device will hold.

    Attributes:
        title: Model and setup in words.
        profile: A step over time, with this device's share of everything.
        parts: Static bytes on this device, by category.
        host_bytes: Bytes that stand in the host's memory instead (or on its disk): static ones, and
            activations.
        gathered_bytes: Parameters and gradients gathered from other devices' shards.
        workspace_bytes: What the matrix library takes from the allocator.
        trained: Number of parameters with gradients.
        total: Number of parameters.
    """

    title: str
    profile: Profile
    parts: dict[str, int] = field(default_factory=dict)
    host_bytes: int = 0
    gathered_bytes: int = 0
    workspace_bytes: int = 0
    trained: int = 0
    total: int = 0

    @property
    def static_bytes(self) -> int:
        """Parameters, gradients and optimizer states, all at once."""
        return sum(self.parts.values())

    @property
    def dynamic_bytes(self) -> int:
        """Peak of everything else, which grows with the tokens."""
        names = (SAVED, LOGITS, TEMPORARY, OTHER)
        columns = [list(self.profile.at_peak).index(name) for name in names]
        return max((sum(row[i] for i in columns) for row in self.profile.timeline), default=0)

    @property
    def peak_bytes(self) -> int:
        """Peak of a step. It is below the sum of both, as gradients come when logits go."""
        return self.profile.peak_bytes + self.gathered_bytes + self.workspace_bytes

    def as_data(self) -> dict[str, Any]:
        """The numbers as plain data."""
        return {
            "title": self.title,
            "static_bytes": self.static_bytes,
            "dynamic_bytes": self.dynamic_bytes,
            "logits_bytes": self.profile.largest.get(LOGITS, 0),
            "peak_bytes": self.peak_bytes,
            "host_bytes": self.host_bytes,
            "gathered_bytes": self.gathered_bytes,
            "workspace_bytes": self.workspace_bytes,
            "parameters": self.total,
            "trained": self.trained,
            "static": self.parts,
            "at_peak": self.profile.at_peak,
            "profile": self.profile.as_data(),
        }

    def page(self) -> Page:
        """A prediction: static, dynamic, peak."""
        page = Page()
        trained = f"{self.trained / 1e6:,.1f} M trained of {self.total / 1e6:,.1f} M parameters"
        rows = [("model", trained)]
        rows += [(f"static: {name}", format_bytes(size)) for name, size in self.parts.items()]
        rows.append(("static", format_bytes(self.static_bytes)))
        if self.host_bytes:
            rows.append(("on the host instead", format_bytes(self.host_bytes)))
        rows.append(("dynamic, at its own peak", format_bytes(self.dynamic_bytes)))
        for name in CATEGORIES[3:]:
            if self.profile.largest.get(name):
                rows.append((f"  {name}, largest", format_bytes(self.profile.largest[name])))
        if self.gathered_bytes:
            rows.append(("shards of others, for a while", format_bytes(self.gathered_bytes)))
        if self.workspace_bytes:
            rows.append(("workspace of products", format_bytes(self.workspace_bytes)))
        rows.append(("peak of a device", format_bytes(self.peak_bytes)))
        page.add(f"Estimate for {self.title}", rows)
        at_peak = {
            **self.profile.at_peak,
            "shards of others": self.gathered_bytes,
            "workspace of products": self.workspace_bytes,
            "sum, the peak": self.peak_bytes,
        }
        peak = [
            (name, format_bytes(size), percent(size, self.peak_bytes))
            for name, size in at_peak.items()
            if size
        ]
        page.add(f"At the peak ({self.profile.peak_phase})", peak, ("category", "bytes", "share"))
        page.add("Notes", [(f"{i}.", note) for i, note in enumerate(self._why_below(), 1)])
        return page

    def _why_below(self) -> Iterator[str]:
        """Why the peak is less than static and dynamic together, if it is."""
        sum_bytes = (
            self.static_bytes + self.dynamic_bytes + self.gathered_bytes + self.workspace_bytes
        )
        if sum_bytes <= self.peak_bytes:
            return
        at_peak = self.profile.at_peak
        reasons = [
            f"{name} take {format_bytes(at_peak.get(name, 0))} of {format_bytes(size)}"
            for name, size in self.parts.items()
            if at_peak.get(name, 0) < size
        ]
        dynamic = sum(size for name, size in at_peak.items() if name in CATEGORIES[3:])
        if dynamic < self.dynamic_bytes:
            sizes = format_bytes(dynamic), format_bytes(self.dynamic_bytes)
            reasons.append(f"what is dynamic takes {sizes[0]} of {sizes[1]}")
        yield (
            "Static and dynamic have their highest moments at different times: together they would "
            f"be {format_bytes(sum_bytes)}, the peak is {format_bytes(self.peak_bytes)}. At the "
            f"peak, {' and '.join(reasons)}."
        )


@in_training
def estimate(
    config_or_model: Any,
    batch: int,
    sequence: int,
    setup: TrainingSetup | None = None,
    **options: Unpack[SetupOptions],
) -> Estimate:
    """Memory of one training step on each device, without weights and without a device.

    The model's forward and backward run on the meta device, so the architecture, adapters and
    patches of the model given are the ones that count.

    Args:
        config_or_model: A configuration of a Hugging Face model, or a causal language model (with
            adapters, frozen parts or patches as it is); nothing of it is changed.
        batch: Sequences of one device and one step.
        sequence: Tokens of each, of all ranks that share it. With ``ranks``, the first rank's step
            is simulated with our attention, and with what is sent.
        setup: How it is trained; the defaults of :class:`TrainingSetup`, if not given.
        **options: Attributes of :class:`TrainingSetup`, which take the place of those in ``setup``.

    Raises:
        ValueError: An option that is unknown, two that do not fit, or a configuration of no causal
            language model that transformers itself has; code beside a configuration is never run.
        TypeError: ``config_or_model`` is neither.
    """
    setup = setup_of(setup, **options)
    positive(batch=batch, sequence=sequence)
    dtype, autocast, copies = DTYPES[setup.dtype]
    spec, device, level = OPTIMIZERS[setup.optimizer], setup.device, setup.level
    model = meta_model(config_or_model, dtype, setup.attention, sequence)
    heads = common_heads(model.config)
    if heads % setup.ranks:
        raise ValueError(
            f"ranks={setup.ranks} do not divide the heads of the mixers of {type(model).__name__}: "
            f"at most {heads} ranks share its sequences"
        )
    if setup.patched:
        patcher().patch(model, **(setup.patched if isinstance(setup.patched, Mapping) else {}))
    model.train()
    if setup.checkpointing:
        checkpoint(model)
    away_bytes = parked(model, setup)
    tokens = -(-sequence // setup.ranks)
    if setup.ranks > 1:
        sharder().shard_on_meta(model, setup.ranks)
    trained = [p for p in model.parameters() if p.requires_grad]
    on_host = {STATES} if setup.offload else set()
    on_host |= {PARAMETERS} if setup.offload_parameters else set()
    shared, ending = 0, 0
    if setup.world > 1 or on_host:
        units = units_of(model)
        shared, ending = (
            fsdp_bytes(*units, setup.world, copies)
            if setup.fsdp
            else (gathered_bytes(*units, level), 0)
        )
    static = {
        PARAMETERS: sum(t.nbytes for p in model.parameters() for t in stored(p)),
        GRADIENTS: sum(p.nbytes for p in trained),
        STATES: state_bytes(trained, spec, copies),
    }
    ratio = dict.fromkeys(static, 1.0)
    if setup.fsdp and copies:  # its shards are the fp32 weights
        unsharded = static.copy()
        move_copies(static, dtype, copies)
        ratio |= {name: static[name] / max(1, unsharded[name]) for name in (PARAMETERS, GRADIENTS)}
    vocabulary = getattr(model.config.get_text_config(), "vocab_size", None)
    simulation = Simulation(device, setup.capacity, model, vocabulary, tokens, autocast)
    simulation.add(Block(static[STATES], role=STATES))
    simulation.step(batch, sequence, max(ending, temporary_bytes(trained, spec, copies)))
    sharded = {1: (STATES,), 2: (STATES, GRADIENTS), 3: (STATES, GRADIENTS, PARAMETERS)}
    scale = dict.fromkeys(sharded.get(level, ()), 1 / setup.world)
    share = {name: round(size * scale.get(name, 1.0)) for name, size in static.items()}
    scale = {name: factor * ratio[name] for name, factor in scale.items()}
    scale |= dict.fromkeys(on_host, 0.0)
    title = f"{_name(config_or_model)} {batch} x {sequence}, {setup.text}"
    profile = summarize(
        Profile(title, device, "shapes"),
        simulation.blocks,
        simulation.events,
        simulation.phases,
        scale,
    )
    return Estimate(
        title,
        profile,
        {name: 0 if name in on_host else size for name, size in share.items()},
        sum(size for name, size in share.items() if name in on_host) + away_bytes(),
        shared,
        0 if device == "cpu" else WORKSPACE,
        sum(p.numel() for p in trained),
        sum(p.numel() for p in model.parameters()),
    )


def meta_model(config_or_model: Any, dtype: torch.dtype, attention: str, sequence: int) -> Any:
    """A meta copy of a model, or a model of a configuration."""
    if attention not in ATTENTIONS:
        raise ValueError(
            f"attention must be 'sdpa', 'flash_attention_2' or 'eager', got {attention!r}"
        )
    # flash attention keeps what sdpa does
    implementation = "eager" if attention == "eager" else "sdpa"
    if isinstance(config_or_model, nn.Module):
        model: Any = on_meta(config_or_model, dtype)
        model.config._attn_implementation = implementation
    elif hasattr(config_or_model, "get_text_config"):
        import copy

        from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, __version__

        if type(config_or_model) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            raise ValueError(
                f"transformers {__version__} has no causal language model for a "
                f"{type(config_or_model).__name__} "
                f"(model_type {shown(config_or_model.model_type)}); where its code "
                "stands elsewhere, give a model of it instead of the configuration"
            )
        config = copy.deepcopy(config_or_model)
        model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config_or_model)]
        if attention != "sdpa" or getattr(model_class, "_supports_sdpa", True):
            # state space models have no attention to choose
            config._attn_implementation = implementation
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
        model.tie_weights()  # which transformers 5.0 leaves out on the meta device
    else:
        raise TypeError(
            "expected a Hugging Face configuration or a model, got "
            f"{type(config_or_model).__name__}: {config_or_model!r:.80}"
        )
    model.config.use_cache = False
    return model


def checkpoint(model: Any) -> None:
    """Turn on transformers' checkpointing, and what frozen embeddings need for it."""
    name = "activation_checkpointing_enable"  # transformers 5.23 on
    enable = getattr(model, name, None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    if any(not p.requires_grad for p in model.parameters()):
        model.enable_input_require_grads()


def parked(model: Any, setup: TrainingSetup) -> Callable[[], int]:
    """Apply a setup's options for kept activations; the result tells the bytes on the host."""
    if setup.offload_activations:
        handle = offload_activations(model, compress=setup.compress)
        return lambda: handle.offloaded_bytes
    if setup.compress is not None:
        compress_activations(model, setup.compress)
    return lambda: 0


def state_bytes(trained: list[Any], spec: Optimizer, copies: int) -> int:
    """Bytes of an optimizer's states; ``copies``: bytes per element of its fp32 copy, or 0."""
    total = 0.0
    for parameter in trained:
        size = copies or parameter.element_size()
        total += parameter.numel() * (spec.states * size + spec.state_bytes + copies)
    if spec is OPTIMIZERS["adafactor"]:
        total += sum(4 * (sum(p.shape[-2:]) if p.ndim > 1 else p.numel()) for p in trained)
    return round(total)


def move_copies(static: dict[str, int], dtype: torch.dtype, copies: int) -> None:
    """Count fp32 copies as the parameters that they are under FSDP2, with gradients like them."""
    elements = static[GRADIENTS] // dtype.itemsize
    static[PARAMETERS] += elements * (copies - dtype.itemsize)
    static[GRADIENTS] = elements * copies
    static[STATES] -= elements * copies


def temporary_bytes(trained: list[Any], spec: Optimizer, copies: int) -> int:
    """Bytes that an optimizer's step takes beside its states."""
    sizes: list[int] = [p.numel() * (copies or p.element_size()) for p in trained] or [0]
    return {"none": 0, "all": sum(sizes), "largest": 2 * max(sizes)}[spec.temporaries]


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The modules of a model that shards are gathered by."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    return [m for m in model.modules() if type(m).__name__ in names]


def units_of(model: Any) -> tuple[list[list[Any]], list[Any]]:
    """Parameters of every block, and those of none."""
    blocks = [list(block.parameters()) for block in blocks_of(model)]
    in_blocks = {id(p) for block in blocks for p in block}
    return blocks, [p for p in model.parameters() if id(p) not in in_blocks]


REDUCED = 4  # bytes of an element of a sum of gradients, which FSDP2 makes in fp32


def fsdp_bytes(
    blocks: list[list[Any]], root: list[Any], devices: int, copies: int
) -> tuple[int, int]:
    """What FSDP2 has of other devices' shards: in layers, and beyond that when backward ends.

    Parameters outside of blocks stay gathered, and their gradients are summed when backward ends.
    Of blocks, one runs while the next one is fetched, and the last sum of gradients is on its way.

    Args:
        blocks: Parameters of each.
        root: Those of no block.
        devices: Over which they are sharded.
        copies: Bytes per element of fp32 weights and gradients, or 0 where they are as gathered.
    """

    def elements(parameters: list[Any]) -> int:
        return sum(math.prod(p.shape) for p in parameters if p.requires_grad)

    def unreduced(parameters: list[Any]) -> int:  # whole gradients, less the shards that count
        shard: int = sum(copies * math.prod(p.shape) if copies else p.nbytes for p in parameters)
        total: int = sum(p.nbytes for p in parameters)
        return max(0, total - shard // devices)

    trained = [p for p in root if p.requires_grad]
    head = max(trained, key=lambda p: p.nbytes, default=None)
    sums = max(map(elements, blocks), default=0)
    block = max((sum(p.nbytes for p in block_parameters) for block_parameters in blocks), default=0)
    layers = sum(p.nbytes for p in root) + 2 * block + REDUCED * sums
    layers += unreduced([head]) if head is not None else 0
    end = REDUCED * (elements(root) + sums) + unreduced(trained)
    return layers, max(0, end - layers)


def gathered_bytes(blocks: list[list[Any]], root: list[Any], level: int) -> int:
    """The largest moment's parameters and gradients that belong to other devices.

    With sharded gradients, one block's full gradient waits for its reduction. With sharded
    parameters, one block runs while the next one is fetched, and those of no block are gathered.

    Args:
        blocks: Parameters of every block.
        root: Parameters of no block.
        level: ZeRO stage.
    """
    root_bytes: int = sum(p.nbytes for p in root)
    block: int = max((sum(p.nbytes for p in parameters) for parameters in blocks), default=0)
    trained = any(p.requires_grad for parameters in (*blocks, root) for p in parameters)
    gradient: int = max(block, root_bytes) if trained else 0
    if level == 2:
        return gradient
    return 2 * block + root_bytes + gradient if level == 3 else 0


def _name(config_or_model: Any) -> str:
    config = getattr(config_or_model, "config", config_or_model)
    return str(getattr(config, "model_type", type(config_or_model).__name__))


# --- models whose frozen base is in 4 bits ---

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
        rank: Rank of the adapters.

    Raises:
        ValueError: An unknown format.
        MissingPackageError: peft cannot be imported.
    """
    if format not in FORMATS:
        raise ValueError(f"weights must be one of {', '.join(FORMATS)}, got {format!r}")
    require_packages("adapters on weights in 4 bits", ["peft"], "peft")
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
    is_transposed = weight.ndim == 3 and bool(getattr(module, "is_transposed", False))
    *leading, columns = (weight.mT if is_transposed else weight).shape
    group = FORMATS[format].group or INT4_GROUP
    if columns % group:
        return None
    dtypes = {"int4": weight.dtype, "nvfp4": torch.float8_e4m3fn, "mxfp4": torch.uint8}
    scales = torch.empty(
        *leading, columns // group, dtype=dtypes.get(format, torch.float32), device="meta"
    )
    codes = torch.empty(*leading, columns // 2, dtype=torch.uint8, device="meta")
    return QuantizedWeight(
        codes, scales, format=format, dtype=weight.dtype, transposed=is_transposed
    )
