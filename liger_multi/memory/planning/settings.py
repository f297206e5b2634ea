"""What a plan decides, and what is predicted for a choice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from liger_multi.errors import ConfigurationError, shown, unknown
from liger_multi.memory.policies import POLICIES
from liger_multi.memory.setup import ATTENTIONS, OPTIMIZERS

SPREADS = ("none", "ddp", "zero1", "zero2", "zero3", "fsdp2")
PRECISIONS = ("bf16", "amp", "fp16", "fp32")
CHOICES = {
    "spread": SPREADS,
    "precision": PRECISIONS,
    "optimizer": tuple(OPTIMIZERS),
    "recompute": tuple(POLICIES),
    "attention": ATTENTIONS,
    "offload_states": (None, "cpu", "nvme"),
}
LEVELS = {"none": 0, "ddp": 0, "zero1": 1, "zero2": 2, "zero3": 3, "fsdp2": 3}


@dataclass(frozen=True)
class Settings:
    """One way to train.

    Attributes:
        sequence: Tokens of a sequence.
        micro_batch: Sequences of a device and pass.
        accumulation: Passes before the optimizer's step.
        precision: ``"bf16"``: everything in bfloat16; ``"amp"``: fp32 weights and states with
            products in bfloat16 (autocast, or 16-bit copies where an engine shards); ``"fp16"``:
            the same in float16 with loss scaling; ``"fp32"``.
        optimizer: As of :func:`liger_multi.memory.estimate`.
        patched: Whether the model runs this library's operators.
        chunk: Rows of logits that exist at a time, where patched.
        recompute: Policy of :data:`liger_multi.memory.POLICIES`.
        layers: Layers that follow it, from the first one on.
        tiles: Pieces of the sequence that an MLP runs in.
        attention: Implementation: ``"sdpa"``, ``"eager"`` or ``"flash_attention_2"``.
        offload_activations: Whether what layers keep waits in the host's memory.
        offload_states: Where optimizer states stand, if not on the device: ``"cpu"``, ``"nvme"``.
        spread: What data parallel devices share: ``"none"`` for one device, ``"ddp"`` (nothing),
            ``"zero1"``, ``"zero2"``, ``"zero3"`` or ``"fsdp2"``.
        tensor: Devices that one layer is divided over.
        pipeline: Stages of layers.
        data: Devices with different sequences.
    """

    sequence: int = 2048
    micro_batch: int = 1
    accumulation: int = 1
    precision: str = "bf16"
    optimizer: str = "adamw"
    patched: bool = True
    chunk: int | None = None
    recompute: str = "none"
    layers: int = 0
    tiles: int = 1
    attention: str = "sdpa"
    offload_activations: bool = False
    offload_states: str | None = None
    spread: str = "none"
    tensor: int = 1
    pipeline: int = 1
    data: int = 1

    @property
    def dtype(self) -> str:
        """The name that :func:`liger_multi.memory.estimate` has for the precision."""
        kind = "float16" if self.precision == "fp16" else "bfloat16"
        if self.precision in ("bf16", "fp32"):
            return {"bf16": "bfloat16", "fp32": "float32"}[self.precision]
        sharded = self.level or self.offload_states
        return f"{kind}-mixed" if sharded else f"{kind}-autocast"

    @property
    def level(self) -> int:
        """Of ZeRO: how much is shared out."""
        return LEVELS[self.spread]

    @property
    def sequences(self) -> int:
        """Of all devices in one optimizer step."""
        return self.micro_batch * self.accumulation * self.data

    def as_data(self) -> dict[str, Any]:
        """The settings as plain data."""
        return asdict(self)

    @classmethod
    def from_data(cls, data: Mapping[str, Any], source: str = "settings") -> Settings:
        """Settings from :meth:`as_data`.

        Raises:
            ConfigurationError: A field that does not exist, or a value that it cannot have.
        """
        known = {f.name: f.default for f in fields(cls)}
        for name, value in data.items():
            if name not in known:
                raise ConfigurationError(unknown(f"field of {source}", name, known))
            optional = name in ("chunk", "offload_states") and value is None
            kinds: dict[str, type] = {"chunk": int, "offload_states": str}
            kind = kinds.get(name, type(known[name]))
            if not optional and type(value) is not kind:
                raise ConfigurationError(
                    f"{name} in {source} must be {kind.__name__}, got {shown(value)}"
                )
            least = 0 if name == "layers" else 1
            if kind is int and not optional and not least <= value < 2**31:
                raise ConfigurationError(
                    f"{name} in {source} must be at least {least} and below 2**31, got "
                    f"{shown(value)}"
                )
            if name in CHOICES and value not in CHOICES[name]:
                choices = [choice for choice in CHOICES[name] if choice]
                raise ConfigurationError(unknown(f"{name} in {source}", value, choices))
        return cls(**data)

    def __str__(self) -> str:
        parts = ["patched" if self.patched else "stock", self.precision]
        if self.layers:
            parts.append(f"recompute {self.recompute} x {self.layers}")
        parts += [f"MLP in {self.tiles} tiles"] * (self.tiles > 1)
        parts += [self.attention] * (self.attention != "sdpa")
        parts += ["activations on the host"] * self.offload_activations
        if self.spread != "none":
            parts.append(self.spread)
        if self.offload_states:
            parts.append(f"states on {self.offload_states}")
        if self.tensor * self.pipeline > 1:
            parts.append(f"TP {self.tensor} x PP {self.pipeline} x DP {self.data}")
        return ", ".join(parts)


@dataclass
class Candidate:
    """Settings, and what is predicted for them.

    Attributes:
        settings: What is chosen.
        peak_bytes: Highest moment of a step on one device.
        parts: What is there at that moment, by category.
        seconds: Of one optimizer step, by the model of :mod:`liger_multi.memory.planning.cost`.
        relative: Time a token, where 1 is the fastest candidate that fits.
        host_bytes: What stands in the host's memory, for one device.
        fits: Whether the peak is within the budget.
    """

    settings: Settings
    peak_bytes: int
    parts: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    relative: float = 0.0
    host_bytes: int = 0
    fits: bool = True

    @property
    def tokens_per_second(self) -> float:
        """Of all devices; its ratio to another candidate's is what it is for."""
        return self.settings.sequences * self.settings.sequence / max(self.seconds, 1e-12)

    def as_data(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Candidate:
        """From :meth:`as_data`."""
        return cls(**{**data, "settings": Settings.from_data(data["settings"])})
