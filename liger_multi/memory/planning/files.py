"""Ready files of a plan: for Trainer, accelerate, DeepSpeed and this library."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from liger_multi.documents import read_yaml
from liger_multi.errors import ConfigurationError, shown, unknown
from liger_multi.memory.planning.settings import Candidate, Settings

if TYPE_CHECKING:
    from liger_multi.memory.planning.result import TrainingPlan

VERSION = 1
NAMES = (
    "plan.yaml",
    "liger_multi.yaml",
    "training_arguments.json",
    "environment.sh",
    "accelerate.yaml",
    "deepspeed.json",
)
# Told peaks are of tensors. Without it blocks of other sizes lay beside them: 10.8 GiB of tensors,
# in uneven tiles, were out of memory in 15 GiB (H200, torch 2.11).
ENVIRONMENT = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
OPTIMIZERS = {
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
    made: dict[str, Any] = {
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
        made["liger_multi.yaml"]["chunk_bytes"] = settings.chunk * max(1, plan.vocabulary) * width
    if settings.pipeline == 1:
        made["accelerate.yaml"] = accelerate(plan, settings)
    if _uses_deepspeed(settings):
        made["deepspeed.json"] = deepspeed(settings, plan.devices, plan.compression)
    paths = []
    for name, content in made.items():
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
    known = ("version", "model", "peak_bytes", "memory_bytes", "devices", "settings")
    for name in content:
        if name not in known:
            raise ConfigurationError(unknown(f"key of {str(path)!r}", name, known))
    if content.get("version") != VERSION:
        raise ConfigurationError(
            f"{str(path)!r} has version {content.get('version')!r}, this is {VERSION}"
        )
    return Settings.from_data(settings, str(path))


def training_arguments(settings: Settings) -> dict[str, Any]:
    """Keyword arguments of transformers' ``TrainingArguments``.

    Checkpointing stays off: :func:`apply` recomputes, and two at once would do so twice.
    """
    made: dict[str, Any] = {
        "output_dir": "output",
        "per_device_train_batch_size": settings.micro_batch,
        "gradient_accumulation_steps": settings.accumulation,
        "bf16": settings.precision == "amp",
        "fp16": settings.precision == "fp16",
        "average_tokens_across_devices": settings.data > 1,
    }
    if settings.optimizer in OPTIMIZERS:
        made["optim"] = OPTIMIZERS[settings.optimizer]
    if settings.spread == "ddp":
        made["ddp_find_unused_parameters"] = False
    return made


def _uses_deepspeed(settings: Settings) -> bool:
    alone = settings.spread in ("none", "ddp") and bool(settings.offload_states)
    return settings.pipeline == 1 and (settings.spread.startswith("zero") or alone)


def accelerate(plan: TrainingPlan, settings: Settings) -> dict[str, Any]:
    """A configuration for ``accelerate launch --config_file``."""
    kind = "MULTI_GPU" if plan.devices > 1 else "NO"
    made: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": kind,
        "mixed_precision": {"amp": "bf16", "fp16": "fp16"}.get(settings.precision, "no"),
        "num_machines": 1,
        "machine_rank": 0,
        "num_processes": plan.devices,
        "main_training_function": "main",
        "use_cpu": False,
    }
    if settings.spread == "fsdp2":
        made["distributed_type"] = "FSDP"
        made["fsdp_config"] = {
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
        made["distributed_type"] = "DEEPSPEED"
        # what is in this file must not stand here as well
        del made["mixed_precision"]
        made["deepspeed_config"] = {
            "deepspeed_config_file": "deepspeed.json",
            "zero3_init_flag": settings.spread == "zero3",
        }
    if settings.tensor > 1:
        shard = "shard" if settings.spread == "fsdp2" else "replicate"
        made["parallelism_config"] = {
            "parallelism_config_tp_size": settings.tensor,
            f"parallelism_config_dp_{shard}_size": settings.data,
        }
    return made


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
    made: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": settings.micro_batch,
        "gradient_accumulation_steps": settings.accumulation,
        "train_batch_size": settings.sequences,
        "gradient_clipping": 1.0,
        "zero_optimization": zero,
        "bf16": {"enabled": settings.precision in ("amp", "bf16")},
    }
    if settings.precision == "fp16":
        made["fp16"] = {
            "enabled": True, "loss_scale": 0, "initial_scale_power": 16, "loss_scale_window": 1000,
            "hysteresis": 2, "min_loss_scale": 1,
        }  # fmt: skip
    if settings.offload_states:
        made["zero_force_ds_cpu_optimizer"] = False
    return made
