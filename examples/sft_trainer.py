"""Supervised fine-tuning with the Trainer of transformers, patched by a callback.

On a CPU, with a tiny model:

    python examples/sft_trainer.py

On a GPU, with a real one:

    python examples/sft_trainer.py --model Qwen/Qwen2.5-0.5B --steps 200 --bf16
"""

import argparse
import tempfile

import _common
from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments

from liger_multi.integrations import TrainerCallback


def main(arguments=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="", help="a model of the hub; a tiny one by default")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--bf16", action="store_true")
    options = parser.parse_args(arguments)

    words, model = _common.loaded(options.model)
    callback = TrainerCallback()  # TrainerCallback(rope=False, swiglu="reference") for less
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=model,
            args=TrainingArguments(
                output_dir=folder,
                max_steps=options.steps,
                per_device_train_batch_size=4,
                learning_rate=1e-3,
                logging_steps=1,
                bf16=options.bf16,
                use_cpu=not options.model,
                report_to=[],
                save_strategy="no",
                disable_tqdm=True,
            ),
            train_dataset=[words(text) for text in _common.sentences(64)],
            data_collator=DataCollatorForLanguageModeling(words, mlm=False),
            callbacks=[callback],
        )
        print(callback.report)
        trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


if __name__ == "__main__":
    main()
