"""How a model is trained, as far as memory depends on it: the options of an estimate."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, TypedDict

import torch

from liger_multi.dispatch.registry import device_type
from liger_multi.dtypes import long_name
from liger_multi.errors import check_name, shown
from liger_multi.memory.offload import FORMATS

if TYPE_CHECKING:
    from typing_extensions import Unpack


@dataclass(frozen=True)
class Optimizer:
    """Memory of an optimizer.

    Attributes:
        states: Elements kept per trained element, in the dtype of the parameters.
        state_bytes: Bytes kept per trained element, whatever its dtype.
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


@dataclass(frozen=True)
class TrainingSetup:
    """The options of :func:`liger_multi.memory.estimate`; wrong ones are refused when it is made.

    Attributes:
        dtype: Of the weights: ``"bfloat16"``, ``"float16"`` or ``"float32"`` for everything;
            ``"bfloat16-mixed"`` for bf16 weights and gradients with fp32 copies and states (16
            bytes a parameter with AdamW), under FSDP2 fp32 weights that are gathered in bf16;
            ``"bfloat16-autocast"`` for fp32 weights under autocast. Short names such as ``"bf16"``
            are the same.
        optimizer: ``"adamw"`` (fused), ``"adamw_foreach"``, ``"adamw_loop"``, ``"adamw_8bit"``,
            ``"adafactor"``, ``"sgd"``, ``"sgd_momentum"`` or ``"none"``.
        zero_stage: 1 shards optimizer states over ``world``, 2 gradients too, 3 parameters too.
        fsdp: FSDP2: all three are sharded, a block is gathered while the next one is fetched.
            Parameters outside of blocks stay gathered; their gradients are summed after backward.
        world: Devices that shards are spread over.
        offload: ``"cpu"`` or ``"nvme"``: optimizer states (and fp32 copies) stand there.
        offload_parameters: Parameters too (ZeRO-3, FSDP2).
        ranks: Devices that share the tokens of every sequence
            (:func:`liger_multi.distributed.shard_sequence`); they are among ``world``, where
            something is sharded.
        checkpointing: Keep the inputs of layers only.
        offload_activations: What layers keep waits in the host's memory.
        compress: ``"float8"``: what layers pass on waits in a byte, on the host or the device.
        patched: Whether the model is patched by :func:`liger_multi.patch`, or its options.
        attention: ``"sdpa"`` or ``"flash_attention_2"`` (nothing quadratic), or ``"eager"``.
        device: ``"cuda"`` or another accelerator, or ``"cpu"``, where the references run.
        capacity: Bytes of the device, from which automatic chunks of logits follow.
    """

    dtype: str = "bfloat16"
    optimizer: str = "adamw"
    zero_stage: int = 0
    fsdp: bool = False
    world: int = 1
    offload: str | None = None
    offload_parameters: bool = False
    ranks: int = 1
    checkpointing: bool = False
    offload_activations: bool = False
    compress: str | None = None
    patched: bool | Mapping[str, Any] = False
    attention: str = "sdpa"
    device: str = "cuda"
    capacity: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", long_name(self.dtype))
        check_name(ValueError, "dtype", self.dtype, DTYPES)
        check_name(ValueError, "optimizer", self.optimizer, OPTIMIZERS)
        positive(world=self.world, ranks=self.ranks)
        device_type(self.device)
        if self.capacity is not None:
            positive(2**63 - 1, capacity=self.capacity)
        for refused, message in REFUSED:
            if refused(self):
                raise ValueError(message.format(self))

    @property
    def level(self) -> int:
        """The ZeRO stage that shards the same."""
        return 3 if self.fsdp else self.zero_stage

    @property
    def text(self) -> str:
        """The setup in words, for titles."""
        spread = ("FSDP2" if self.fsdp else f"ZeRO-{self.level}") if self.level else ""
        spread += f" on {self.world} devices" if self.world > 1 else ""
        sequence_text = f"sequences over {self.ranks} ranks" if self.ranks > 1 else ""
        parts = [self.dtype, self.optimizer, spread.strip(), sequence_text]
        parts += ["checkpointing"] * self.checkpointing + ["patched"] * bool(self.patched)
        parts += [f"{self.offload} offload"] if self.offload else []
        parts += ["activations on the host"] * self.offload_activations
        parts += [f"activations in {self.compress}"] if self.compress else []
        return ", ".join(part for part in parts if part)


class SetupOptions(TypedDict, total=False):
    """The attributes of a :class:`TrainingSetup` as keywords."""

    dtype: str
    optimizer: str
    zero_stage: int
    fsdp: bool
    world: int
    offload: str | None
    offload_parameters: bool
    ranks: int
    checkpointing: bool
    offload_activations: bool
    compress: str | None
    patched: bool | Mapping[str, Any]
    attention: str
    device: str
    capacity: int | None


REFUSED: tuple[tuple[Callable[[TrainingSetup], bool], str], ...] = (
    (
        lambda s: s.zero_stage not in (0, 1, 2, 3),
        "zero_stage must be 0, 1, 2 or 3, got {0.zero_stage!r}",
    ),
    (
        lambda s: s.fsdp and s.zero_stage > 0,
        "fsdp shards by itself; give it or zero_stage={0.zero_stage}, not both",
    ),
    (
        lambda s: s.offload not in OFFLOADS,
        "offload must be None, 'cpu' or 'nvme', got {0.offload!r}",
    ),
    (
        lambda s: s.offload_parameters and s.level != 3,
        "offload_parameters needs parameters in shards: zero_stage=3 or fsdp=True",
    ),
    (
        lambda s: s.compress is not None and s.compress not in FORMATS,
        f"compress must be None or one of {FORMATS}, got {{0.compress!r}}",
    ),
    (
        lambda s: bool(s.level) and s.world % s.ranks > 0,
        "world must be a multiple of the {0.ranks} ranks that share sequences, got {0.world}",
    ),
)


HEADS = (
    *("num_attention_heads", "linear_num_value_heads", "num_heads"),
    *("mamba_num_heads", "mamba_n_heads", "n_mamba_heads"),
)
"""Fields of a configuration with the heads of a mixer, which ranks that share tokens divide."""


def common_heads(config: Any) -> int:
    """Greatest common divisor of the numbers of heads of all mixers; 0 where none is known."""
    text = config.get_text_config()
    heads = [getattr(text, name, None) for name in HEADS]
    return math.gcd(*(n for n in heads if isinstance(n, int) and not isinstance(n, bool)))


def setup_of(setup: TrainingSetup | None, **options: Unpack[SetupOptions]) -> TrainingSetup:
    """A setup, changed by keywords."""
    if setup is not None and not isinstance(setup, TrainingSetup):
        raise TypeError(f"setup must be a TrainingSetup, got {shown(setup)}")
    unexpected = [name for name in options if name not in {f.name for f in fields(TrainingSetup)}]
    if unexpected:
        raise TypeError(f"estimate() got an unexpected keyword argument {unexpected[0]!r}")
    return replace(setup or TrainingSetup(), **options)


def positive(largest: int = MOST, **values: object) -> None:
    """Refuse anything but a positive integer."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= largest:
            raise ValueError(
                f"{name} must be a positive integer, got {shown(value)}"
                + f", the largest is {largest}" * (isinstance(value, int) and value > largest)
            )
