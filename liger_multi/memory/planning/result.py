"""A plan: its candidates, the best of them, and how it is shown, saved and written out.

Ready files are for Trainer, accelerate, DeepSpeed and this library.
"""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from liger_multi.errors import ConfigurationError, check_name, shown, unknown
from liger_multi.files.documents import read_yaml
from liger_multi.files.page import Page, Paged
from liger_multi.files.pictures import INK, PAPER, PARTS, figure
from liger_multi.memory.measure import format_bytes
from liger_multi.memory.recompute import POLICIES
from liger_multi.memory.setup import ATTENTIONS, OPTIMIZERS

# --- what is decided, and what is predicted ---

SPREADS = ("none", "ddp", "zero1", "zero2", "zero3", "fsdp2")
PRECISIONS = ("bf16", "fp8", "amp", "fp16", "fp32")
PURE = ("bf16", "fp8")
"""Precisions with weights and optimizer states in bfloat16."""
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
        precision: ``"bf16"``: everything in bfloat16; ``"fp8"``: the same with the GEMMs of wide
            linear layers in FP8, whose frozen weights are kept in it; ``"amp"``: fp32 weights and
            states with GEMMs in bfloat16 (autocast, or 16-bit copies where an engine shards);
            ``"fp16"``: the same in float16 with loss scaling; ``"fp32"``.
        optimizer: As of :func:`liger_multi.memory.estimate`.
        patched: Whether the model runs this library's operators.
        chunk: Rows of logits that are computed at a time, where patched.
        recompute: Policy of :data:`liger_multi.memory.POLICIES`.
        layers: Number of layers that follow the policy, from the first one on.
        tiles: Pieces of the sequence that an MLP runs in.
        attention: Implementation: ``"sdpa"``, ``"eager"`` or ``"flash_attention_2"``.
        offload_activations: Whether what layers keep waits in the host's memory.
        offload_states: Where optimizer states stand, if not on the device: ``"cpu"``, ``"nvme"``.
        spread: What data parallel devices share: ``"none"`` for one device, ``"ddp"`` (nothing),
            ``"zero1"``, ``"zero2"``, ``"zero3"`` or ``"fsdp2"``.
        tensor: Devices that one layer is divided over.
        pipeline: Stages of layers.
        data: Devices with different sequences.
        ranks: Devices that share the tokens of a sequence
            (:func:`liger_multi.distributed.shard_sequence`).
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
    ranks: int = 1

    @property
    def dtype(self) -> str:
        """The dtype option of :func:`liger_multi.memory.estimate` for the precision."""
        low_precision = "float16" if self.precision == "fp16" else "bfloat16"
        if self.precision in PURE:
            return "bfloat16"
        if self.precision == "fp32":
            return "float32"
        sharded = self.level or self.offload_states
        return f"{low_precision}-mixed" if sharded else f"{low_precision}-autocast"

    @property
    def level(self) -> int:
        """The ZeRO stage that shards the same: 0 to 3."""
        return LEVELS[self.spread]

    @property
    def tokens(self) -> int:
        """Tokens of a sequence on one device."""
        return -(-self.sequence // self.ranks)

    @property
    def sequences(self) -> int:
        """Sequences of all devices in one optimizer step."""
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
        defaults = {f.name: f.default for f in fields(cls)}
        for name, value in data.items():
            check_name(ConfigurationError, f"field of {source}", name, defaults)
            optional = name in ("chunk", "offload_states") and value is None
            types: dict[str, type] = {"chunk": int, "offload_states": str}
            value_class = types.get(name, type(defaults[name]))
            if not optional and type(value) is not value_class:
                raise ConfigurationError(
                    f"{name} in {source} must be {value_class.__name__}, got {shown(value)}"
                )
            smallest = 0 if name == "layers" else 1
            if value_class is int and not optional and not smallest <= value < 2**31:
                raise ConfigurationError(
                    f"{name} in {source} must be at least {smallest} and below 2**31, got "
                    f"{shown(value)}"
                )
            if name in CHOICES and value not in CHOICES[name]:
                choices = [choice for choice in CHOICES[name] if choice]
                raise ConfigurationError(unknown(f"{name} in {source}", value, choices))
        return cls(**data)

    def __str__(self) -> str:
        parts = ["patched" if self.patched else "unpatched", self.precision]
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
        if self.ranks > 1:
            parts.append(f"sequences over {self.ranks} ranks x DP {self.data}")
        return ", ".join(parts)


@dataclass
class Candidate:
    """Settings and their predicted memory and time.

    Attributes:
        settings: The settings.
        peak_bytes: Highest moment of a step on one device.
        parts: Bytes at that moment, by category.
        seconds: Time of one optimizer step by :mod:`liger_multi.memory.planning.cost`.
        relative: Time per token, where 1 is the fastest candidate that fits.
        host_bytes: Bytes in the host's memory, for one device.
        fits: Whether the peak is within the budget, and what stands on the host within its memory.
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
        """Tokens per second of all devices; only ratios between candidates mean something."""
        return self.settings.sequences * self.settings.sequence / max(self.seconds, 1e-12)

    def as_data(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Candidate:
        """From :meth:`as_data`."""
        return cls(**{**data, "settings": Settings.from_data(data["settings"])})


# --- the plan ---


@dataclass
class TrainingPlan(Paged):
    """The candidates for a model, a memory and a number of devices.

    Attributes:
        model: Model type.
        layers: Number of layers.
        card: The card whose rates predict the times.
        memory_bytes: Memory of one device.
        budget_bytes: Bytes of it that a peak may take.
        devices: Number of devices.
        batch: Requested number of sequences per optimizer step.
        candidates: The best of each group: those that fit, the fastest per token first, then the
            others, the lowest peak first.
        largest_batch: Largest micro-batch with the settings of the best candidate.
        longest_sequence: Longest sequence with them, one at a time.
        most_batch: The same with the settings of the candidate with the lowest peak.
        most_sequence: Likewise.
        notes: Advice in sentences.
        simulations: Number of simulated steps.
        compression: Whether files ask engines for their own compression.
        layer_class: Class of a layer, which engines wrap.
        vocabulary: Of the model.
        host_memory_bytes: What of the host's memory a device may take; 0 for no limit.
    """

    model: str
    layers: int
    card: str
    memory_bytes: int
    budget_bytes: int
    devices: int
    batch: int | None
    candidates: list[Candidate]
    largest_batch: int = 0
    longest_sequence: int = 0
    most_batch: int = 0
    most_sequence: int = 0
    notes: list[str] = field(default_factory=list)
    simulations: int = 0
    compression: bool = False
    layer_class: str = ""
    vocabulary: int = 0
    host_memory_bytes: int = 0

    @property
    def best(self) -> Candidate:
        """The fastest candidate that fits."""
        return self.candidates[0]

    @property
    def nearest(self) -> Candidate:
        """The candidate with the lowest peak; those that fit into the host's memory go first."""
        host_limit = self.host_memory_bytes or math.inf
        return min(self.candidates, key=lambda c: (c.host_bytes > host_limit, c.peak_bytes))

    @property
    def fitting(self) -> list[Candidate]:
        """Candidates that fit, the fastest first."""
        return [c for c in self.candidates if c.fits]

    def as_data(self) -> dict[str, Any]:
        """The plan as plain data."""
        return asdict(self)

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> TrainingPlan:
        """From :meth:`as_data`."""
        candidates = [Candidate.from_data(candidate) for candidate in data["candidates"]]
        return cls(**{**data, "candidates": candidates})

    def draw(self, path: str | Path, most: int = 12) -> None:
        """Write a PNG of the memory of the first candidates by part (needs matplotlib)."""
        draw_candidates(self, Path(path), most=most)

    def write(self, folder: str | Path, candidate: Candidate | None = None) -> list[Path]:
        """Write ready files for a candidate; None: the best one. Returns what was written."""
        return write(self, Path(folder), candidate or self.best)

    def page(self) -> Page:
        """The best, the others, the limits and notes."""
        page = Page()
        best, host_limit = self.best if self.best.fits else self.nearest, self.host_memory_bytes
        facts = [
            ("model", f"{self.model}, {self.layers} layers"),
            (
                "devices",
                f"{self.devices} x {format_bytes(self.memory_bytes)}, rates of {self.card}",
            ),
            ("may be used", format_bytes(self.budget_bytes)),
            *([("may be used of the host, each", format_bytes(host_limit))] if host_limit else []),
            ("best" if best.fits else "nearest", str(best.settings)),
            ("peak", format_bytes(best.peak_bytes)),
            ("batch", f"{best.settings.sequences} x {best.settings.sequence:,} tokens a step"),
        ]
        if best.host_bytes:
            facts.append(("on the host, each", format_bytes(best.host_bytes)))
        if self.largest_batch:
            largest = f"{self.largest_batch} (any way: {self.most_batch})"
            facts.append(("largest micro-batch", largest))
            longest = f"{self.longest_sequence:,} (any way: {self.most_sequence:,})"
            facts.append(("longest sequence", longest))
        page.add("TrainingPlan" if best.fits else "Nothing fits", facts)
        chosen = self.candidates[:ROWS]
        if best not in chosen:
            chosen = [*chosen, best]
        page.add("Ways, the fastest that fits first", list(map(row_of, chosen)), HEADER)
        left = len(self.candidates) - len(chosen)
        names = [*self.notes, *([f"{left} more ways were weighed"] if left > 0 else [])]
        page.add("Notes", [(f"{i}.", note) for i, note in enumerate(names, 1)])
        return page


# --- ready files ---

VERSION = 1
NAMES = (
    "plan.yaml",
    "liger_multi.yaml",
    "training_arguments.json",
    "environment.sh",
    "accelerate.yaml",
    "deepspeed.json",
)
# Predicted peaks count tensors. Without this option fragments add to them: 10.8 GiB of tensors, in
# uneven tiles, were out of memory in 15 GiB (H200, torch 2.11).
ENVIRONMENT = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
TRAINER_OPTIMIZERS = {
    "adamw": "adamw_torch_fused",
    "adamw_foreach": "adamw_torch",
    "adamw_loop": "adamw_torch",
    "adamw_8bit": "adamw_bnb_8bit",
    "adafactor": "adafactor",
    "sgd": "sgd",
    "sgd_momentum": "sgd",
}


def write(plan: TrainingPlan, folder: Path, candidate: Candidate) -> list[Path]:
    """Write the files that fit a candidate.

    ``plan.yaml`` (:func:`load`), ``liger_multi.yaml`` (:func:`liger_multi.configure`) and
    ``training_arguments.json`` always, ``environment.sh`` to source before; ``accelerate.yaml``
    unless layers stand in stages; ``deepspeed.json`` where states are sharded or offloaded by it.
    """
    import yaml

    folder.mkdir(parents=True, exist_ok=True)
    settings = candidate.settings
    files: dict[str, Any] = {
        "plan.yaml": {
            "version": VERSION,
            "model": plan.model,
            "peak_bytes": candidate.peak_bytes,
            "memory_bytes": plan.memory_bytes,
            "devices": plan.devices,
            "settings": settings.as_data(),
        },
        "liger_multi.yaml": {"default": "auto"},
        "training_arguments.json": training_arguments(settings),
        "environment.sh": "".join(
            f"export {name}={value}\n" for name, value in ENVIRONMENT.items()
        ),
    }
    if settings.patched and settings.chunk:
        width = 4 if settings.precision == "fp32" else 2
        files["liger_multi.yaml"]["chunk_bytes"] = settings.chunk * max(1, plan.vocabulary) * width
    if settings.pipeline == 1 and settings.ranks == 1:
        files["accelerate.yaml"] = accelerate(plan, settings)
    if _uses_deepspeed(settings):
        files["deepspeed.json"] = deepspeed(settings, plan.devices, plan.compression)
    paths = []
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content, indent=1) + "\n"
        if name.endswith(".yaml"):
            text = yaml.safe_dump(content, sort_keys=False)
        (folder / name).write_text(text, encoding="utf-8")
        paths.append(folder / name)
    return paths


def load(path: str | Path) -> Settings:
    """Settings from a ``plan.yaml``, as :func:`apply` takes them.

    Raises:
        ConfigurationError: The file cannot be read, is not YAML or has another form.
    """
    content = read_yaml(path, "the plan")
    settings = content.get("settings") if isinstance(content, Mapping) else None
    if not isinstance(settings, Mapping):
        raise ConfigurationError(f"{str(path)!r} has no mapping of settings, got {shown(content)}")
    allowed = ("version", "model", "peak_bytes", "memory_bytes", "devices", "settings")
    for name in content:
        check_name(ConfigurationError, f"key of {str(path)!r}", name, allowed)
    if content.get("version") != VERSION:
        raise ConfigurationError(
            f"{str(path)!r} has version {content.get('version')!r}, this is {VERSION}"
        )
    return Settings.from_data(settings, str(path))


def training_arguments(settings: Settings) -> dict[str, Any]:
    """Keyword arguments of transformers' ``TrainingArguments``.

    Checkpointing stays off: :func:`apply` recomputes, and both together would do so twice.
    """
    arguments: dict[str, Any] = {
        "output_dir": "output",
        "per_device_train_batch_size": settings.micro_batch,
        "gradient_accumulation_steps": settings.accumulation,
        "bf16": settings.precision == "amp",
        "fp16": settings.precision == "fp16",
        "average_tokens_across_devices": settings.data > 1,
    }
    if settings.optimizer in TRAINER_OPTIMIZERS:
        arguments["optim"] = TRAINER_OPTIMIZERS[settings.optimizer]
    if settings.spread == "ddp":
        arguments["ddp_find_unused_parameters"] = False
    return arguments


def _uses_deepspeed(settings: Settings) -> bool:
    offloads_alone = settings.spread in ("none", "ddp") and bool(settings.offload_states)
    return settings.pipeline == 1 and (settings.spread.startswith("zero") or offloads_alone)


def accelerate(plan: TrainingPlan, settings: Settings) -> dict[str, Any]:
    """A configuration for ``accelerate launch --config_file``."""
    distributed_type = "MULTI_GPU" if plan.devices > 1 else "NO"
    config: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": distributed_type,
        "mixed_precision": {"amp": "bf16", "fp16": "fp16"}.get(settings.precision, "no"),
        "num_machines": 1,
        "machine_rank": 0,
        "num_processes": plan.devices,
        "main_training_function": "main",
        "use_cpu": False,
    }
    if settings.spread == "fsdp2":
        config["distributed_type"] = "FSDP"
        config["fsdp_config"] = {
            "fsdp_version": 2,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_transformer_layer_cls_to_wrap": plan.layer_class,
            "fsdp_reshard_after_forward": True,
            "fsdp_offload_params": bool(settings.offload_states),
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
            "fsdp_cpu_ram_efficient_loading": True,
            "fsdp_activation_checkpointing": False,
        }
    elif _uses_deepspeed(settings):
        config["distributed_type"] = "DEEPSPEED"
        # what is in this file must not stand here as well
        del config["mixed_precision"]
        config["deepspeed_config"] = {
            "deepspeed_config_file": "deepspeed.json",
            "zero3_init_flag": settings.spread == "zero3",
        }
    if settings.tensor > 1:
        shard = "shard" if settings.spread == "fsdp2" else "replicate"
        config["parallelism_config"] = {
            "parallelism_config_tp_size": settings.tensor,
            f"parallelism_config_dp_{shard}_size": settings.data,
        }
    return config


def deepspeed(settings: Settings, devices: int, compression: bool = False) -> dict[str, Any]:
    """A DeepSpeed configuration; the optimizer is the trainer's.

    Args:
        settings: Of the plan.
        devices: Of all nodes.
        compression: Write ZeRO++ options where stage 3 has them.
    """
    stage = settings.level or 1
    zero: dict[str, Any] = {
        "stage": stage,
        "overlap_comm": True,
        "contiguous_gradients": True,
    }
    if settings.offload_states == "nvme":
        zero["offload_optimizer"] = {"device": "nvme", "nvme_path": "/tmp", "pin_memory": True}
    elif settings.offload_states:
        zero["offload_optimizer"] = {"device": settings.offload_states, "pin_memory": True}
    if stage == 3:
        zero["stage3_gather_16bit_weights_on_model_save"] = True
        if compression:
            zero |= {
                "zero_quantized_weights": True,
                "zero_quantized_gradients": True,
                "zero_hpz_partition_size": devices,
            }
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": settings.micro_batch,
        "gradient_accumulation_steps": settings.accumulation,
        "train_batch_size": settings.sequences,
        "gradient_clipping": 1.0,
        "zero_optimization": zero,
        "bf16": {"enabled": settings.precision in (*PURE, "amp")},
    }
    if settings.precision == "fp16":
        config["fp16"] = {
            "enabled": True,
            "loss_scale": 0,
            "initial_scale_power": 16,
            "loss_scale_window": 1000,
            "hysteresis": 2,
            "min_loss_scale": 1,
        }
    if settings.offload_states:
        config["zero_force_ds_cpu_optimizer"] = False
    return config


# --- a page ---

ROWS = 16


def row_of(candidate: Candidate) -> tuple[str, ...]:
    """A candidate's row: what it does, its micro-batch, peak and time."""
    s = candidate.settings
    passes = f"{s.micro_batch} x {s.accumulation}" + (f" x {s.data}" if s.data > 1 else "")
    speed = f"{candidate.relative:.2f}" if candidate.fits else "-"
    fits = "yes" if candidate.fits else "no"
    chunk = f"{s.chunk:,}" if s.patched and s.chunk else "-"
    host = format_bytes(candidate.host_bytes) if candidate.host_bytes else "-"
    return str(s), passes, chunk, format_bytes(candidate.peak_bytes), host, fits, speed


HEADER = ("way", "batch", "loss rows", "peak", "on the host", "fits", "time")


# --- memory of candidates by part ---

LABEL_WIDTH = 52  # characters of a line


def draw_candidates(plan: TrainingPlan, path: Path, plotted: str = "", most: int = 12) -> None:
    """One bar per candidate: its peak by category, with the budget as a line."""
    chosen = plan.candidates[:most]
    parts = list(dict.fromkeys(name for candidate in chosen for name in candidate.parts))
    parts = [name for name in parts if any(candidate.parts.get(name) for candidate in chosen)]
    unit, name = (2**30, "GiB") if plan.budget_bytes >= 2**30 else (2**20, "MiB")
    lines = max(_label(candidate).count("\n") for candidate in chosen)
    with figure(path, 9.2, 1.5 + (0.38 + 0.14 * lines) * len(chosen), plotted) as canvas:
        axis = canvas.subplots()
        rows = list(range(len(chosen)))[::-1]
        left = [0.0] * len(chosen)
        for i, part in enumerate(parts):
            widths = [candidate.parts.get(part, 0) / unit for candidate in chosen]
            color = PARTS[i % len(PARTS)]
            axis.barh(rows, widths, left=left, color=color, label=part, height=0.7)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        label_box = {"facecolor": PAPER, "edgecolor": "none", "pad": 0}  # over the budget's line
        for row, total, candidate in zip(rows, left, chosen, strict=True):
            speed = f"  {candidate.relative:.2f}" if candidate.fits else "  does not fit"
            axis.annotate(speed, (total, row), va="center", bbox=label_box)
        axis.axvline(plan.budget_bytes / unit, color=INK, lw=0.9, ls=(0, (3, 3)))
        axis.set_yticks(rows, [_label(candidate) for candidate in chosen])
        axis.set_xlim(0, 1.15 * max(*left, plan.budget_bytes / unit))
        # in two lines, for names of ways leave little width to the axis
        axis.set_xlabel(f"{name} at the peak\ntime per token beside the bars; dashed: the budget")
        axis.grid(axis="y", visible=False)
        axis.set_title(f"{plan.model}, {plan.devices} x {format_bytes(plan.memory_bytes)}")
        canvas.legend(loc="outside lower center", ncols=4)


def _label(candidate: Candidate) -> str:
    settings = candidate.settings
    text = f"{settings}, {settings.micro_batch} x {settings.accumulation}"
    return textwrap.fill(text, LABEL_WIDTH)
