"""Predict the memory of training from shapes alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from liger_multi.dispatch.devices import device_type
from liger_multi.errors import shown, unknown
from liger_multi.memory.breakdown import Profile, summarize
from liger_multi.memory.recorder import (
    GRADIENTS,
    LOGITS,
    OTHER,
    PARAMETERS,
    SAVED,
    STATES,
    TEMPORARY,
    Block,
)
from liger_multi.memory.simulation import Simulation, on_meta

# Bytes that the matrix library takes from the allocator: 32 MiB a handle on a Hopper card (torch
# 2.11), one handle for the thread of forward and one for backward's.
WORKSPACE = 2 * 32 * 2**20


@dataclass(frozen=True)
class Optimizer:
    """Memory of an optimizer.

    Attributes:
        states: Numbers kept for every trained one, in the dtype of the parameters.
        state_bytes: Bytes kept for every trained number whatever its dtype.
        temporaries: What a step allocates: ``"none"``, ``"all"`` (as much as all parameters) or
            ``"largest"`` (twice the largest parameter).
    """

    states: float = 0.0
    state_bytes: float = 0.0
    temporaries: str = "none"


OPTIMIZERS = {
    "adamw": Optimizer(2),
    "adamw_foreach": Optimizer(2, temporaries="all"),
    "adamw_loop": Optimizer(2, temporaries="largest"),
    # a byte for each of two states and an fp32 scale for every 256 of them
    "adamw_8bit": Optimizer(0, 2 * (1 + 4 / 256)),
    "adafactor": Optimizer(0, 0, "largest"),
    "sgd": Optimizer(),
    "sgd_momentum": Optimizer(1),
    "none": Optimizer(),
}
DTYPES = {
    "float32": (torch.float32, None, 0),
    "bfloat16": (torch.bfloat16, None, 0),
    "float16": (torch.float16, None, 0),
    # weights and gradients in 16 bits, fp32 copies of the weights and fp32 states
    "bfloat16-mixed": (torch.bfloat16, None, 4),
    "float16-mixed": (torch.float16, None, 4),
    # weights, gradients and states in fp32, products in 16 bits
    "bfloat16-autocast": (torch.float32, torch.bfloat16, 0),
    "float16-autocast": (torch.float32, torch.float16, 0),
}
ATTENTIONS = ("sdpa", "flash_attention_2", "eager")
OFFLOADS = (None, "cpu", "nvme")
MOST = 2**31 - 1  # sequences, tokens, devices


@dataclass
class Estimate:
    """What one device will hold.

    Attributes:
        title: What was asked.
        profile: A step over time, with this device's share of everything.
        parts: Static bytes by kind on this device.
        host_bytes: Static bytes that stand in the host's memory instead (or on its disk).
        gathered_bytes: Parameters and gradients of other devices' shards that are here for a while.
        workspace_bytes: What the matrix library takes from the allocator.
        trained: Parameters with gradients.
        total: Parameters.
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
        """Everything else at its own highest moment: it grows with the tokens."""
        names = (SAVED, LOGITS, TEMPORARY, OTHER)
        places = [list(self.profile.at_peak).index(name) for name in names]
        return max((sum(row[i] for i in places) for row in self.profile.timeline), default=0)

    @property
    def peak_bytes(self) -> int:
        """The highest moment of a step; below the sum of both, as gradients come when logits go."""
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

    def __str__(self) -> str:
        from liger_multi.memory.tables import estimate_page

        return estimate_page(self).plain()

    def __rich__(self) -> Any:
        from liger_multi.memory.tables import estimate_page

        return estimate_page(self).rich()


def estimate(
    config_or_model: Any,
    batch: int,
    sequence: int,
    *,
    dtype: str = "bfloat16",
    optimizer: str = "adamw",
    zero_stage: int = 0,
    fsdp: bool = False,
    world: int = 1,
    offload: str | None = None,
    offload_parameters: bool = False,
    checkpointing: bool = False,
    patched: bool | Mapping[str, Any] = False,
    attention: str = "sdpa",
    device: str = "cuda",
    capacity: int | None = None,
) -> Estimate:
    """Memory of one training step on each device, without weights and without a device.

    The model's forward and backward run on the meta device, so the architecture, adapters and
    patches of the model given are the ones that count.

    Args:
        config_or_model: A configuration of a Hugging Face model, or a causal language model (with
            adapters, frozen parts or patches as it is); nothing of it is changed.
        batch: Sequences of one device and one step.
        sequence: Tokens of each.
        dtype: Of the weights: ``"bfloat16"``, ``"float16"`` or ``"float32"`` for everything;
            ``"bfloat16-mixed"`` for bf16 weights and gradients with fp32 copies and states (16
            bytes a parameter with AdamW); ``"bfloat16-autocast"`` for fp32 weights under autocast.
        optimizer: ``"adamw"`` (fused), ``"adamw_foreach"``, ``"adamw_loop"``, ``"adamw_8bit"``,
            ``"adafactor"``, ``"sgd"``, ``"sgd_momentum"`` or ``"none"``.
        zero_stage: 1 shards optimizer states over ``world``, 2 gradients too, 3 parameters too.
        fsdp: FSDP2: all three are sharded, a block is gathered while the next one is fetched.
        world: Devices that shards are spread over.
        offload: ``"cpu"`` or ``"nvme"``: optimizer states (and fp32 copies) stand there.
        offload_parameters: Parameters too (ZeRO-3, FSDP2).
        checkpointing: Keep the inputs of layers only.
        patched: Whether the model is patched by :func:`liger_multi.patch`, or its options.
        attention: ``"sdpa"`` or ``"flash_attention_2"`` (nothing quadratic), or ``"eager"``.
        device: ``"cuda"`` or another accelerator, or ``"cpu"``, where the references run.
        capacity: Bytes of the device, from which automatic chunks of logits follow.

    Raises:
        ValueError: An option that is unknown, two that do not fit, or a configuration of no causal
            language model that transformers itself has; code beside a configuration is never run.
        TypeError: ``config_or_model`` is neither.
    """
    kind, autocast, copies = DTYPES[known("dtype", dtype, DTYPES)]
    spec = OPTIMIZERS[known("optimizer", optimizer, OPTIMIZERS)]
    positive(batch=batch, sequence=sequence, world=world)
    _check(zero_stage, fsdp, offload, offload_parameters, device, capacity)
    model = meta_model(config_or_model, kind, attention, sequence)
    if patched:
        from liger_multi.patching import patch

        patch(model, **(patched if isinstance(patched, Mapping) else {}))
    model.train()
    if checkpointing:
        checkpoint(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    states = state_bytes(trained, spec, copies)
    vocabulary = getattr(model.config.get_text_config(), "vocab_size", None)
    simulation = Simulation(device, capacity, model, vocabulary, sequence, autocast)
    simulation.add(Block(states, role=STATES))
    simulation.step(batch, sequence, temporary_bytes(trained, spec, copies))
    sharded = {1: (STATES,), 2: (STATES, GRADIENTS), 3: (STATES, GRADIENTS, PARAMETERS)}
    level = 3 if fsdp else zero_stage
    scale = dict.fromkeys(sharded.get(level, ()), 1 / world)
    away = {STATES} if offload else set()
    away |= {PARAMETERS} if offload_parameters else set()
    static = {
        PARAMETERS: sum(p.nbytes for p in model.parameters()),
        GRADIENTS: sum(p.nbytes for p in trained),
        STATES: states,
    }
    share = {name: round(size * scale.get(name, 1.0)) for name, size in static.items()}
    scale |= dict.fromkeys(away, 0.0)
    title = _title(config_or_model, batch, sequence, dtype, optimizer, level, fsdp, world)
    title += ", checkpointing" * checkpointing + ", patched" * bool(patched)
    title += f", {offload} offload" if offload else ""
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
        {name: 0 if name in away else size for name, size in share.items()},
        sum(size for name, size in share.items() if name in away),
        gathered(model, level, fsdp) if world > 1 or away else 0,
        0 if device == "cpu" else WORKSPACE,
        sum(p.numel() for p in trained),
        sum(p.numel() for p in model.parameters()),
    )


def known(what: str, name: str, table: Mapping[str, Any]) -> str:
    """A name that stands in a table."""
    if not isinstance(name, str) or name not in table:
        raise ValueError(unknown(what, name, table))
    return name


def positive(most: int = MOST, **values: object) -> None:
    """Refuse what is no number of things."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise ValueError(
                f"{name} must be a positive integer, got {shown(value)}"
                + f", the largest is {most}" * (isinstance(value, int) and value > most)
            )


def _check(
    zero_stage: int,
    fsdp: bool,
    offload: str | None,
    offload_parameters: bool,
    device: str,
    capacity: int | None,
) -> None:
    device_type(device)
    if capacity is not None:
        positive(2**63 - 1, capacity=capacity)
    if zero_stage not in (0, 1, 2, 3):
        raise ValueError(f"zero_stage must be 0, 1, 2 or 3, got {zero_stage!r}")
    if fsdp and zero_stage:
        raise ValueError(f"fsdp shards by itself; give it or zero_stage={zero_stage}, not both")
    if offload not in OFFLOADS:
        raise ValueError(f"offload must be None, 'cpu' or 'nvme', got {offload!r}")
    if offload_parameters and not (fsdp or zero_stage == 3):
        raise ValueError("offload_parameters needs parameters in shards: zero_stage=3 or fsdp=True")


def meta_model(given: Any, dtype: torch.dtype, attention: str, sequence: int) -> Any:
    """A meta copy of a model, or a model of a configuration."""
    if attention not in ATTENTIONS:
        raise ValueError(
            f"attention must be 'sdpa', 'flash_attention_2' or 'eager', got {attention!r}"
        )
    kind = "eager" if attention == "eager" else "sdpa"  # flash attention keeps what sdpa does
    if isinstance(given, nn.Module):
        model: Any = on_meta(given, dtype)
        model.config._attn_implementation = kind
    elif hasattr(given, "get_text_config"):
        import copy

        from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, __version__

        if type(given) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            raise ValueError(
                f"transformers {__version__} has no causal language model for a "
                f"{type(given).__name__} (model_type {shown(given.model_type)}); where its code "
                "stands elsewhere, give a model of it instead of the configuration"
            )
        config = copy.deepcopy(given)
        config._attn_implementation = kind
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
        model.tie_weights()  # which transformers 5.0 leaves out on the meta device
    else:
        raise TypeError(
            "expected a Hugging Face configuration or a model, got "
            f"{type(given).__name__}: {given!r:.80}"
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


def state_bytes(trained: list[nn.Parameter], spec: Optimizer, copies: int) -> int:
    """Bytes of an optimizer's states; ``copies``: of an element of its fp32 copy, or 0."""
    total = 0.0
    for parameter in trained:
        size = copies or parameter.element_size()
        total += parameter.numel() * (spec.states * size + spec.state_bytes + copies)
    if spec is OPTIMIZERS["adafactor"]:
        total += sum(4 * (sum(p.shape[-2:]) if p.ndim > 1 else p.numel()) for p in trained)
    return round(total)


def temporary_bytes(trained: list[nn.Parameter], spec: Optimizer, copies: int) -> int:
    """Bytes that an optimizer's step takes beside its states."""
    sizes = [p.numel() * (copies or p.element_size()) for p in trained] or [0]
    return {"none": 0, "all": sum(sizes), "largest": 2 * max(sizes)}[spec.temporaries]


def gathered(model: Any, level: int, fsdp: bool) -> int:
    """The largest moment's parameters and gradients that belong to other devices.

    With gradients in shards, one block's whole gradient waits for its reduction; with parameters in
    shards, one block runs while the next is fetched, and what stands outside of blocks is whole.
    """
    names = set(getattr(model, "_no_split_modules", None) or ())
    blocks = [m for m in model.modules() if type(m).__name__ in names]
    inside = {id(p) for block in blocks for p in block.parameters()}
    sizes = [sum(p.nbytes for p in block.parameters()) for block in blocks]
    outside = sum(p.nbytes for p in model.parameters() if id(p) not in inside)
    block = max(sizes, default=0)
    gradient = max(block, outside) if any(p.requires_grad for p in model.parameters()) else 0
    if level == 2:
        return gradient
    return 2 * block + outside + gradient if level == 3 else 0


def _title(
    given: Any,
    batch: int,
    sequence: int,
    dtype: str,
    optimizer: str,
    level: int,
    fsdp: bool,
    world: int,
) -> str:
    config = getattr(given, "config", given)
    name = f"{getattr(config, 'model_type', type(given).__name__)}"
    spread = ("FSDP2" if fsdp else f"ZeRO-{level}") if level else ""
    spread += f" on {world} devices" if world > 1 else ""
    parts = [f"{name} {batch} x {sequence}", dtype, optimizer, spread.strip()]
    return ", ".join(part for part in parts if part)
