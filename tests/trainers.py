"""Tiny data, tokenizers and arguments for tests with trainers."""

import pytest
import torch

from tests.models import batch

transformers = pytest.importorskip("transformers")
WORDS = [f"w{i}" for i in range(40)]


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {w: i for i, w in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def text(generator, low, high):
    count = int(torch.randint(low, high, (1,), generator=generator))
    picked = torch.randint(len(WORDS), (count,), generator=generator)
    return "".join(f" {WORDS[i]}" for i in picked)


def rows(kind, count=8):
    g = torch.Generator().manual_seed(0)
    found = []
    for i in range(count):
        row = {"prompt": text(g, 2, 5)}
        if kind == "pair":
            row |= {"chosen": text(g, 2, 7), "rejected": text(g, 2, 7)}
        elif kind in ("completion", "label"):
            row |= {"completion": text(g, 2, 7)}
        found.append(row | ({"label": i % 3 == 0} if kind == "label" else {}))
    from datasets import Dataset

    return Dataset.from_list(found)


class Texts(torch.utils.data.Dataset):
    """Rows of uneven length."""

    def __init__(self, count=8):
        self.rows = []
        for i in range(count):
            row = batch(rows=1, length=14, seed=i)
            row["labels"][0, : 2 + i] = -100
            self.rows.append({k: v[0] for k, v in row.items()})

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


def trainer(model, directory, **arguments):
    pytest.importorskip("accelerate")
    callbacks = arguments.pop("callbacks", None)
    more = {k: arguments.pop(k) for k in ("compute_metrics", "model_init") if k in arguments}
    defaults = {
        "output_dir": str(directory),
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 4,
        "max_steps": 3,
        # AdamW divides a gradient by its own size: what rounding leaves of a zero becomes a step
        "optim": "sgd",
        "learning_rate": 0.1,
        "report_to": [],
        "logging_steps": 1,
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 4,
        "lr_scheduler_type": "constant",
    }
    return transformers.Trainer(
        model=model,
        args=transformers.TrainingArguments(**{**defaults, **arguments}),
        train_dataset=Texts(),
        eval_dataset=Texts(4),
        callbacks=callbacks,
        **more,
    )


def arguments(tmp_path, **more):
    return {
        "output_dir": str(tmp_path), "per_device_train_batch_size": 2, "max_steps": 4,
        "learning_rate": 0.1, "logging_steps": 1, "report_to": [], "save_strategy": "no",
        "use_cpu": True, "bf16": False, "disable_tqdm": True, "seed": 3, "optim": "sgd",
        "lr_scheduler_type": "constant", **more,
    }  # fmt: skip
