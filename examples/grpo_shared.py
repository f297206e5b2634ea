"""GRPO with TRL where every prompt is computed once for all of its answers.

    python examples/grpo_shared.py --tiny

On a GPU, with as many rows as answers, so that a micro-batch is a whole group:

    python examples/grpo_shared.py --model Qwen/Qwen2.5-0.5B-Instruct --dataset trl-lib/tldr \
        --rate 1e-6 --rows 8 --answers 8 --answer 128 --output grpo
"""

import tempfile
from collections.abc import Sequence

import _common

with _common.needs("transformers", "accelerate", "datasets", "trl"):
    from grpo import short
    from trl import GRPOConfig, GRPOTrainer

    from liger_multi.integrations import TrainerCallback


def main(arguments: Sequence[str] | None = None) -> list[float]:
    parser = _common.parser(__doc__, "Qwen/Qwen2.5-0.5B-Instruct", "trl-lib/tldr")
    parser.add_argument("--answer", type=int, default=128, help="tokens of an answer at most")
    parser.add_argument("--answers", type=int, default=4, help="of a prompt, compared")
    options = _common.parsed(parser, arguments)
    tokenizer, model = _common.load(options)
    prompts = [{"prompt": _common.count_from(i, 3)} for i in range(16)]
    callback = TrainerCallback(shared_prefixes=True)
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model,
            reward_funcs=short,
            args=GRPOConfig(
                output_dir=options.output or folder,
                max_steps=3 if options.tiny else options.steps,
                per_device_train_batch_size=options.rows,
                num_generations=options.answers,
                max_completion_length=8 if options.tiny else options.answer,
                learning_rate=options.rate,
                bf16=options.gpu,
                use_cpu=not options.gpu,
                logging_steps=1,
                save_strategy="no",
                report_to="none",
            ),
            train_dataset=_common.dataset(options, prompts),
            processing_class=tokenizer,
            callbacks=[callback],
        )
        print(callback.report)
        trainer.train()
        if options.output:
            trainer.save_model()
    return [row["reward"] for row in trainer.state.log_history if "reward" in row]


if __name__ == "__main__":
    main()
