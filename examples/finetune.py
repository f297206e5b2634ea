"""Fine-tuning with the Trainer of transformers: a callback patches the model.

    python examples/finetune.py --tiny

On a GPU:

    python examples/finetune.py --model Qwen/Qwen2.5-0.5B --dataset roneneldan/TinyStories
"""

import tempfile
from collections.abc import Sequence

import _common

with _common.needs("transformers", "accelerate"):
    from transformers import Trainer, TrainingArguments

    from liger_multi.integrations import TrainerCallback


def main(arguments: Sequence[str] | None = None) -> list[float]:
    options = _common.parsed(_common.parser(__doc__), arguments)
    tokenizer, model = _common.load(options)
    callback = TrainerCallback()  # TrainerCallback(rope=False, swiglu="reference") for less
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=model,
            args=TrainingArguments(
                output_dir=options.output or folder,
                max_steps=options.steps,
                per_device_train_batch_size=options.rows,
                learning_rate=options.rate,
                bf16=options.gpu,
                use_cpu=not options.gpu,
                logging_steps=1,
                save_strategy="no",
                report_to="none",
            ),
            train_dataset=_common.sequences(options, tokenizer),
            processing_class=tokenizer,
            callbacks=[callback],
        )
        print(callback.report)  # what was replaced, what was skipped and why
        trainer.train()
        if options.output:
            trainer.save_model()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


if __name__ == "__main__":
    main()
