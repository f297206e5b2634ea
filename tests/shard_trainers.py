"""Trainers whose rows are spread over ranks, beside one process, for ``test_sequence``."""

import importlib
import os
from typing import Any
from unittest import mock

import peft
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, DistributedType, GradientState, PartialState

from liger_multi import trees
from liger_multi.integrations import SequenceParallel, SharedPrefixes, TrainerCallback
from tests.models import arguments, build, rows, tokenizer, with_words

LENGTHS = (13, 22, 9, 17)
scores = trees.scores


def reward(completion_ids: Any, **_: Any) -> list[float]:
    return [float(sum(ids) % 7) for ids in completion_ids]


def packed() -> list[dict[str, torch.Tensor]]:
    """Rows of two samples that cross the shares, with uneven numbers of targets."""
    generator, batches = torch.Generator().manual_seed(0), []
    for count in LENGTHS:
        ids = torch.randint(3, 200, (count + 7,), generator=generator)
        labels = ids.clone()
        labels[count : count + 3] = -100
        places = torch.cat([torch.arange(count), torch.arange(7)])
        batches.append({"input_ids": ids, "labels": labels, "position_ids": places})
    return batches


def own_loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    """A ``compute_loss_func``: focal, of shifted labels, over all targets of the batch."""
    logits, targets = outputs.logits[:, :-1].float(), labels[:, 1:]
    taken = logits.log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    losses = -(1 - taken.exp()) * taken * (targets != -100)
    return losses.sum() / num_items_in_batch


def metrics(prediction: Any) -> dict[str, float]:
    """Of logits and labels, which are of whole rows."""
    logits, labels = prediction.predictions[:, :-1], prediction.label_ids[:, 1:]
    right = logits.argmax(-1) == labels
    return {"share": float(right[labels != -100].mean()), "last": float(logits[:, -1].mean())}


LORA = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
COMMON = {"per_device_train_batch_size": 1, "max_steps": 2, "gradient_accumulation_steps": 2}
EVALUATED = {**COMMON, "eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 1}
SCORES = ("eval_loss", "eval_share", "eval_last")
TRL = {"max_steps": 2, "max_length": 32}
GROUPS = {"num_generations": 4, "per_device_train_batch_size": 4, "max_completion_length": 6}
GRPO = {"max_steps": 2, **GROUPS}
KINDS: dict[str, tuple[str, dict[str, Any], Any, dict[str, Any]]] = {
    "Trainer": ("transformers.Training", COMMON, packed, {}),
    "Trainer, own loss": (
        "transformers.Training",
        EVALUATED,
        packed,
        {"compute_loss_func": own_loss, "compute_metrics": metrics},
    ),
    "Trainer, smoothed": (
        "transformers.Training",
        {**EVALUATED, "label_smoothing_factor": 0.1},
        packed,
        {"compute_metrics": metrics},
    ),
    "SFT": ("trl.SFT", TRL, "completion", {}),
    "SFT, own loss": ("trl.SFT", TRL, "completion", {"compute_loss_func": own_loss}),
    "packed SFT": ("trl.SFT", {**TRL, "packing": True, "padding_free": True}, "completion", {}),
    "SFT of experts": ("trl.SFT", {**TRL, "router_aux_loss_coef": 0.3}, "completion", {}),
    "SFT of adapters": ("trl.SFT", TRL, "completion", {"peft_config": LORA}),
    "GRPO": ("trl.GRPO", GRPO, "prompt", {"reward_funcs": reward}),
    "GRPO of trees": ("trl.GRPO", GRPO, "prompt", {"reward_funcs": reward}),
    "GRPO of trees by a mixin": (
        "trl.GRPO",
        {**GRPO, "beta": 0.1},
        "prompt",
        {"reward_funcs": reward, "peft_config": LORA},
    ),
    "DPO of trees": ("trl.DPO", TRL, "pair", {"peft_config": LORA}),
}


def whole(parameter: Any) -> torch.Tensor:
    """A weight, which ZeRO-3 and FSDP2 have on all ranks together."""
    if hasattr(parameter, "full_tensor"):
        return parameter.detach().full_tensor()
    if not hasattr(parameter, "ds_id"):
        return parameter.detach().clone()
    import deepspeed

    with deepspeed.zero.GatheredParameters([parameter]):
        return parameter.detach().clone()


def reset() -> None:
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def train(kind: str, folder: Any, **more: Any) -> dict[str, Any]:
    """Losses of the steps and the weights after the last; ``more`` is for the trainer's config."""
    reset()
    home, options, data, call = KINDS[kind]
    package, name = home.split(".")
    module = importlib.import_module(package)
    config_class = getattr(module, f"{name}Arguments" if name == "Training" else f"{name}Config")
    words, plain = tokenizer(), package == "transformers"
    known = "mixtral" if "experts" in kind else "llama"
    model = build(known) if plain else with_words(words, known)
    trainer_class = module.Trainer if plain else getattr(module, f"{name}Trainer")
    if kind.endswith("mixin"):
        trainer_class = type("Shared", (SharedPrefixes, trainer_class), {})
    torch.manual_seed(4)  # adapters are drawn
    args = config_class(**arguments(folder, **{**options, **more}))
    if args.fsdp:
        assert args.device.type == "cpu"  # its ranks are there
        # accelerate has FSDP for ranks of GPUs alone; nothing of it asks for a GPU
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    trainer = trainer_class(
        model,
        args=args,
        train_dataset=data() if callable(data) else rows(data),
        eval_dataset=data() if callable(data) else None,
        callbacks=[
            TrainerCallback(unpatch_at_end=True, shared_prefixes=kind.endswith(" of trees"))
        ],
        **({} if plain else {"processing_class": words}),
        **call,
    )
    torch.manual_seed(5)
    scored: list[Any] = []
    keep = lambda *call, **options: scored.append(scores(*call, **options)) or scored[-1]  # noqa: E731
    with mock.patch.object(trees, "scores", keep):
        trainer.train()
    spread = "parallelism_config" in more
    assert [x.share.ranks is not None for x in scored] == [spread] * len(scored)
    assert (len(scored) >= 2) == (" of trees" in kind)
    ids = torch.arange(10)[None]
    assert model(input_ids=ids, use_cache=False).logits.shape[1] == 10, "rows are whole again"
    return {
        "losses": [row["loss"] for row in trainer.state.log_history if "loss" in row],
        "scores": [row[n] for row in trainer.state.log_history for n in SCORES if n in row],
        "weights": {n: whole(p) for n, p in model.named_parameters()},
    }


ZERO = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}


def check(trainer: str, folder: Any, groups: int = 1, stage: int = 0, fsdp: bool = False) -> None:
    """Ranks that share rows, in groups, train as one process did."""
    rank, size = dist.get_rank(), dist.get_world_size()
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ |= {name: str(value) for name, value in ranks.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # the ranks have met already
    more: dict[str, Any] = {}
    if stage:
        os.environ["DS_ACCELERATOR"] = "cpu"
        import deepspeed

        # its own collective in shared memory would be compiled first, for minutes
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        options = {"stage": stage, "stage3_param_persistence_threshold": 0}
        more = {"deepspeed": {**ZERO, "zero_optimization": options}}
    if fsdp:
        more = {"fsdp": True, "fsdp_config": {"version": 2}}
    axis = "dp_shard_size" if fsdp else "dp_replicate_size"
    config = SequenceParallel(sp_size=size // groups, **{axis: groups})
    one = torch.load(f"{folder}/one.pt")
    result = train(trainer, folder, parallelism_config=config, **more)
    for name in ("losses", "scores"):
        torch.testing.assert_close(result[name], one[name], rtol=1e-4, atol=1e-6)
    for name, weight in one["weights"].items():
        torch.testing.assert_close(result["weights"][name], weight, rtol=1e-4, atol=1e-6, msg=name)
