"""What every trainer trains on: ``python -m tests.trainers.runs.setting FOLDER``.

Runs in a trainer's environment and writes a tiny random model with its tokenizer, a
teacher like it, and the same dialogues in the format of every trainer.
"""

from __future__ import annotations

import json
import random
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

ROWS = 32
SYLLABLES = ("ba", "de", "fi", "go", "ku", "la", "me", "no")
WORDS = [first + last for first in SYLLABLES for last in SYLLABLES]
SPECIAL = ("<pad>", "<eos>", "<unk>", "<bos>")
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }} "
    "<eos> {% endgeneration %}{% else %}{{ m['content'] }} {% endif %}{% endfor %}"
)
CONFIG = {
    "vocab_size": len(SPECIAL) + len(WORDS),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 3,
}

Dialogue = dict[str, Any]


def dialogues() -> list[Dialogue]:
    """Questions, each with an answer, another answer, and whether the first is liked."""
    source = random.Random(0)

    def words() -> str:
        return " ".join(source.choice(WORDS) for _ in range(source.randint(3, 9)))

    return [
        {"question": words(), "answer": words(), "other": words(), "liked": i % 2 == 0}
        for i in range(ROWS)
    ]


def _said(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


def _asked(d: Dialogue) -> list[dict[str, str]]:
    return [_said("user", d["question"])]


def _whole(d: Dialogue, answer: str = "answer") -> list[dict[str, str]]:
    return [*_asked(d), _said("assistant", d[answer])]


def _answered(d: Dialogue, answer: str) -> list[dict[str, str]]:
    return [_said("assistant", d[answer])]


def _alpaca(d: Dialogue) -> dict[str, Any]:
    return {"instruction": d["question"], "input": "", "output": d["answer"]}


FORMATS: dict[str, Callable[[Dialogue], dict[str, Any]]] = {
    "messages": lambda d: {"messages": _whole(d)},
    "prompts": lambda d: {"prompt": _asked(d)},
    "questions": lambda d: {"messages": _asked(d)},
    "pairs": lambda d: {
        "prompt": _asked(d),
        "chosen": _answered(d, "answer"),
        "rejected": _answered(d, "other"),
    },
    "labels": lambda d: {
        "prompt": _asked(d),
        "completion": _answered(d, "answer"),
        "label": d["liked"],
    },
    "text": lambda d: {"text": f"{d['question']} {d['answer']}"},
    "alpaca": _alpaca,
    "alpaca_pairs": lambda d: {**_alpaca(d), "chosen": d["answer"], "rejected": d["other"]},
    "alpaca_labels": lambda d: {**_alpaca(d), "kto_tag": d["liked"]},
    "message_pairs": lambda d: {"messages": _whole(d), "rejected_response": d["other"]},
    "message_labels": lambda d: {"messages": _whole(d), "label": d["liked"]},
    "conversation_pairs": lambda d: {"chosen": _whole(d), "rejected": _whole(d, "other")},
    "plain_labels": lambda d: {
        "prompt": d["question"],
        "completion": d["answer"],
        "label": d["liked"],
    },
    "dialogue_pairs": lambda d: {
        "messages": _asked(d),
        "chosen": _said("assistant", d["answer"]),
        "rejected": _said("assistant", d["other"]),
    },
}
"""Folder below ``data`` to what a row of its ``train.jsonl`` is."""

_RANKING = {"prompt": "instruction", "query": "input", "chosen": "chosen", "rejected": "rejected"}
CATALOGUE = {
    "alpaca": {"file_name": "alpaca/train.jsonl"},
    "alpaca_pairs": {
        "file_name": "alpaca_pairs/train.jsonl",
        "ranking": True,
        "columns": _RANKING,
    },
    "alpaca_labels": {
        "file_name": "alpaca_labels/train.jsonl",
        "columns": {
            "prompt": "instruction",
            "query": "input",
            "response": "output",
            "kto_tag": "kto_tag",
        },
    },
}
"""What LLaMA-Factory wants to know of its files."""


def reward(completions: list[Any], **_: Any) -> list[float]:
    """A reward that differs from one answer to the next."""
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [float(sum(map(ord, text)) % 7) for text in texts]


def tokenizer() -> Any:
    """A word a token."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: i for i, word in enumerate((*SPECIAL, *WORDS))}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        bos_token="<bos>",
        chat_template=TEMPLATE,
        model_max_length=128,
    )


def model(seed: int) -> Any:
    """A model with random weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(Qwen3Config(**CONFIG))
    with torch.no_grad():  # activations of a usual size, and norms whose weight matters
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            else:
                parameter.mul_(3)
    return model


def write(folder: Path) -> None:
    """Models, their tokenizer, one without a chat template, and data below a folder."""
    from datasets import Dataset

    for seed, name in enumerate(("model", "teacher")):
        model(seed).save_pretrained(folder / name)
        tokenizer().save_pretrained(folder / name)
    words = folder / "words"
    words.mkdir(parents=True, exist_ok=True)
    tokenizer().backend_tokenizer.save(str(words / "tokenizer.json"))
    text = {"bos_token": "<bos>", "eos_token": "<eos>"}
    (words / "tokenizer_config.json").write_text(json.dumps(text), encoding="utf-8")
    for name, row in FORMATS.items():
        place = folder / "data" / name
        place.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps(row(d)) for d in dialogues()]
        (place / "train.jsonl").write_text("\n".join([*lines, ""]), encoding="utf-8")
    chats = [FORMATS["messages"](d) for d in dialogues()]
    Dataset.from_list(chats).to_parquet(folder / "data" / "messages.parquet")
    (folder / "data" / "dataset_info.json").write_text(json.dumps(CATALOGUE), encoding="utf-8")


# --- a CPU in place of the accelerator that a trainer asks for ---

ALONE = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "0",
}
"""What ``torchrun`` sets, for one process."""


def _none(*_: Any) -> int:
    """Bytes of a device without memory of its own."""
    return 0


LACKING = {
    "get_device_name": lambda _=None: "CPU",
    "get_device_properties": lambda _=None: SimpleNamespace(total_memory=2**30),
    "mem_get_info": lambda _=None: (2**30, 2**30),
    "memory_stats": lambda _=None: defaultdict(int),
    "memory_allocated": _none,
    "max_memory_allocated": _none,
    "memory_reserved": _none,
    "max_memory_reserved": _none,
    "reset_peak_memory_stats": _none,
    "empty_cache": _none,
    "get_rng_state": torch.get_rng_state,
    "set_rng_state": torch.set_rng_state,
}
"""Functions of ``torch.cuda`` that trainers call."""


def accelerator(**more: Any) -> ModuleType:
    """``torch.cpu`` with the functions that it lacks beside ``torch.cuda``, and others."""
    module = ModuleType("cpu")
    vars(module).update(vars(torch.cpu) | LACKING | more)
    return module


if __name__ == "__main__":
    write(Path(sys.argv[1]))
