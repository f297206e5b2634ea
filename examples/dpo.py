"""DPO with TRL: its trainer as it is, policy and reference patched.

    python examples/dpo.py --tiny

On a GPU:

    python examples/dpo.py --model Qwen/Qwen2.5-0.5B-Instruct \
        --dataset trl-lib/ultrafeedback_binarized --rate 1e-6 --output dpo
"""

import copy
import tempfile
from collections.abc import Sequence

import _common

import liger_multi

with _common.needs("transformers", "accelerate", "datasets", "trl"):
    from trl import DPOConfig, DPOTrainer

    from liger_multi.integrations import TrainerCallback


def pair(i: int) -> dict[str, str]:
    """A prompt, an answer that counts on and one that does not."""
    return {
        "prompt": _common.count_from(i, 6),
        "chosen": " " + _common.count_from(i + 6, 6),
        "rejected": " " + _common.count_from(i + 3, 6),
    }


def main(arguments: Sequence[str] | None = None) -> list[float]:
    model_name, data_name = "Qwen/Qwen2.5-0.5B-Instruct", "trl-lib/ultrafeedback_binarized"
    options = _common.parsed(_common.parser(__doc__, model_name, data_name), arguments)
    tokenizer, model = _common.load(options)
    reference = copy.deepcopy(model)
    liger_multi.patch(reference)  # the callback patches the model that is trained
    callback = TrainerCallback()
    with tempfile.TemporaryDirectory() as folder:
        trainer = DPOTrainer(
            model,
            ref_model=reference,
            args=DPOConfig(
                output_dir=options.output or folder,
                max_steps=options.steps,
                per_device_train_batch_size=options.rows,
                max_length=options.length,
                learning_rate=options.rate,
                bf16=options.gpu,
                use_cpu=not options.gpu,
                logging_steps=1,
                save_strategy="no",
                report_to="none",
            ),
            train_dataset=_common.dataset(options, [pair(i) for i in range(64)]),
            processing_class=tokenizer,
            callbacks=[callback],
        )
        print(callback.report)
        trainer.train()
        if options.output:
            trainer.save_model()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


if __name__ == "__main__":
    main()
