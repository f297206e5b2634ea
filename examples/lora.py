"""LoRA with PEFT: adapters on attention, MLP and head, patched after they are put on.

    python examples/lora.py --tiny

On a GPU:

    python examples/lora.py --model Qwen/Qwen2.5-0.5B --dataset roneneldan/TinyStories \
        --rate 2e-4 --rank 16 --output adapter
"""

import tempfile
from collections.abc import Sequence

import _common

with _common.needs("transformers", "accelerate", "peft"):
    from peft import LoraConfig, get_peft_model
    from transformers import Trainer, TrainingArguments

    from liger_multi.integrations import TrainerCallback

LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]


def main(arguments: Sequence[str] | None = None) -> list[float]:
    parser = _common.parser(__doc__)
    parser.add_argument("--rank", type=int, default=8)
    options = _common.parsed(parser, arguments)
    tokenizer, model = _common.load(options)
    config = LoraConfig(
        r=options.rank, lora_alpha=2 * options.rank, target_modules=LAYERS, task_type="CAUSAL_LM"
    )
    adapted = get_peft_model(model, config)
    callback = TrainerCallback(strict=True)  # an adapter that it cannot serve is an error
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=adapted,
            args=TrainingArguments(
                output_dir=options.output or folder,
                max_steps=options.steps,
                per_device_train_batch_size=options.rows,
                learning_rate=options.rate,
                weight_decay=0.0,
                bf16=options.gpu,
                use_cpu=not options.gpu,
                logging_steps=1,
                save_strategy="no",
                report_to="none",
            ),
            train_dataset=_common.sequences(options, tokenizer),
            callbacks=[callback],
        )
        print(callback.report)
        trainer.train()
    if options.output:
        adapted.save_pretrained(options.output)  # PEFT's own format; loads without liger_multi
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


if __name__ == "__main__":
    main()
