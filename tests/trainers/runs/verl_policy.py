"""GRPO and PPO of verl without its sampler: ``python -m tests.trainers.runs.verl_policy OPTIONS``.

verl samples answers on servers of vLLM, SGLang or TensorRT-LLM, which need a GPU, and spreads its
workers by Ray. Here answers are drawn at random, and everything runs in one process. All else is
verl's: the worker with its engine, log-probabilities and entropies before the update, advantages,
and the loss of the policy with its bonus for entropy, over mini-batches. Options are those of
``verl.trainer.sft_trainer``, and ``+policy.advantage`` is grpo or gae. verl builds critics with
FlashAttention only, so the values of PPO are 0.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import hydra
import numpy
import torch
from tensordict import NonTensorData, TensorDict
from torch import Tensor
from verl.trainer.ppo.core_algos import (
    compute_gae_advantage_return,
    compute_grpo_outcome_advantage,
)
from verl.trainer.sft_trainer import SFTTrainer
from verl.utils import tensordict_utils as tu
from verl.utils.device import auto_set_device
from verl.utils.distributed import destroy_global_process_group, initialize_global_process_group
from verl.workers.config import ActorConfig
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding

PROMPTS, ANSWERS, MINI, MICRO = 4, 2, 4, 2
LONGEST = (7, 9)
"""Tokens of a prompt, which is padded on its left, and of an answer, which is on its right."""
WORDS = (4, 68)
TEMPERATURE = 0.9


def sampled(step: int) -> dict[str, Tensor]:
    """Prompts, each with some answers, and a reward for the last token of every answer."""
    g = torch.Generator().manual_seed(step)
    before, after = LONGEST
    prompts = torch.randint(*WORDS, (PROMPTS, before), generator=g)
    lengths = torch.randint(3, before + 1, (PROMPTS, 1), generator=g)
    shown = (torch.arange(before) >= before - lengths).long()
    prompts, shown = ((x * shown).repeat_interleave(ANSWERS, 0) for x in (prompts, shown))
    shown = (prompts != 0).long()
    rows = PROMPTS * ANSWERS
    answers = torch.randint(*WORDS, (rows, after), generator=g)
    text = torch.randint(2, after + 1, (rows, 1), generator=g)
    mask = (torch.arange(after) < text).long()
    answers = answers * mask
    attention = torch.cat((shown, mask), 1)
    rewards = torch.zeros(rows, after)
    rewards[torch.arange(rows), text.squeeze(1) - 1] = (answers.sum(1) % 7).float()
    return {
        "prompts": prompts,
        "responses": answers,
        "input_ids": torch.cat((prompts, answers), 1),
        "attention_mask": attention,
        "position_ids": (attention.cumsum(1) - 1).clamp_min(0),
        "response_mask": mask,
        "rewards": rewards,
    }


class PolicyTrainer(SFTTrainer):  # type: ignore[misc]
    """The trainer of verl's supervised runs, whose steps are those of its policies."""

    def _build_engine(self) -> None:
        super()._build_engine()
        self.advantage: str = self.config.policy.advantage
        self.actor_config = ActorConfig(
            strategy="fsdp2",
            rollout_n=ANSWERS,
            ppo_mini_batch_size=MINI,
            ppo_micro_batch_size_per_gpu=MICRO,
            entropy_coeff=0.01,
            calculate_entropy=True,
            use_kl_loss=True,
            kl_loss_coef=0.05,
        )
        self.training_client.set_loss_fn(partial(ppo_loss, config=self.actor_config))

    def data(self, tensors: dict[str, Tensor], **more: Any) -> TensorDict:
        """A batch as verl's workers take it."""
        batch = tu.get_tensordict(tensor_dict={k: x.clone() for k, x in tensors.items()})
        batch = left_right_2_no_padding(batch)
        tu.assign_non_tensor(
            batch,
            temperature=TEMPERATURE,
            pad_mode="no_padding",
            micro_batch_size_per_gpu=MICRO,
            use_dynamic_bsz=False,
            pad_token_id=0,
            global_batch_size=MINI,
            **more,
        )
        return batch

    def inferred(self, worker: Any, batch: dict[str, Tensor], *names: str) -> list[Tensor]:
        """What a worker says of every token of the answers."""
        lengths = NonTensorData(batch["attention_mask"].sum(1).tolist())
        data = self.data(
            batch,
            calculate_entropy="entropy" in names,
            compute_loss=False,
            global_token_num=lengths,
        )
        output = worker.infer_batch(data)
        return [no_padding_2_padding(tu.get(output, name), data).float() for name in names]

    def updated(self, worker: Any, batch: dict[str, Tensor], **more: Any) -> dict[str, float]:
        """The means of what a worker logged of an update."""
        data = self.data(batch, mini_batch_size=MINI, epochs=2, seed=1, **more)
        logged = tu.get(worker.train_mini_batch(data), "metrics")
        return {name: float(numpy.mean(values)) for name, values in logged.items()}

    def advantages(self, rewards: Tensor, mask: Tensor) -> Tensor:
        """Of the tokens of the answers; without a critic every value is 0."""
        if self.advantage == "grpo":
            group = numpy.arange(PROMPTS).repeat(ANSWERS)
            advantages, _ = compute_grpo_outcome_advantage(rewards, mask, group)
        else:
            values = torch.zeros_like(rewards)
            advantages, _ = compute_gae_advantage_return(rewards, values, mask, 1.0, 0.95)
        return advantages  # type: ignore[no-any-return]

    def fit(self) -> None:
        """Train, and print the numbers of every step."""
        for step in range(1, self.total_training_steps + 1):
            batch = sampled(step)
            old, entropy = self.inferred(self.training_client, batch, "log_probs", "entropy")
            mask = batch["response_mask"]
            batch |= {"old_log_probs": old, "ref_log_prob": old}
            batch["advantages"] = self.advantages(batch["rewards"], mask)
            logged = self.updated(
                self.training_client, batch, calculate_entropy=True, compute_loss=True
            )
            mean = (entropy * mask).sum().item() / mask.sum().item()
            print(
                f"step:{step} - policy/entropy:{mean} - train/loss:{logged['loss']} - "
                f"train/grad_norm:{logged['grad_norm']}",
                flush=True,
            )


@hydra.main(
    config_path="pkg://verl.trainer.config", config_name="sft_trainer_engine", version_base=None
)  # type: ignore[untyped-decorator]
def main(config: Any) -> None:
    """Train."""
    auto_set_device(config)
    initialize_global_process_group()
    PolicyTrainer(config=config).fit()
    destroy_global_process_group()


if __name__ == "__main__":
    main()
