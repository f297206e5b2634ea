"""GRPO with TRL: its trainer as it is, patched by a callback; its loss needs no logits already.

On a CPU, with a tiny model:

    python examples/grpo_trl.py

On a GPU, with a real one:

    python examples/grpo_trl.py --model Qwen/Qwen2.5-0.5B --steps 50 --bf16
"""

import argparse
import tempfile

import _common
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from liger_multi.integrations import TrainerCallback


def reward(completion_ids, **_):
    """Short answers are good ones, and those that end with an even token."""
    return [float(ids[-1] % 2 == 0) - 0.1 * len(ids) for ids in completion_ids]


def main(arguments=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="", help="a model of the hub; a tiny one by default")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--bf16", action="store_true")
    options = parser.parse_args(arguments)

    words, model = _common.loaded(options.model)
    callback = TrainerCallback()
    prompts = [{"prompt": " ".join(text.split()[:3])} for text in _common.sentences(16)]
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model,
            reward_funcs=reward,
            args=GRPOConfig(
                output_dir=folder,
                max_steps=options.steps,
                per_device_train_batch_size=4,
                num_generations=4,
                max_completion_length=256 if options.model else 6,
                beta=0.0,
                learning_rate=1e-3,
                logging_steps=1,
                bf16=options.bf16,
                use_cpu=not options.model,
                report_to=[],
                save_strategy="no",
                disable_tqdm=True,
            ),
            train_dataset=Dataset.from_list(prompts),
            processing_class=words,
            callbacks=[callback],
        )
        print(callback.report)
        trainer.train()
    return [row["reward"] for row in trainer.state.log_history if "reward" in row]


if __name__ == "__main__":
    main()
