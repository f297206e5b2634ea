"""Real text that every machine has: the sources and docstrings of Python's standard library."""

from __future__ import annotations

import random
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

END_OF_FILE = "<|endoftext|>"
# Tests repeat themselves, tables are no text, installed packages differ between machines.
SKIPPED = frozenset(
    (
        "test",
        "tests",
        "idle_test",
        "__pycache__",
        "site-packages",
        "dist-packages",
        "encodings",
        "pydoc_data",
    )
)


@dataclass(frozen=True)
class Corpus:
    """Python files as text.

    Attributes:
        root: The folder they came from.
        texts: One text a file.
    """

    root: Path
    texts: tuple[str, ...]

    @property
    def characters(self) -> int:
        """Number of characters in all texts."""
        return sum(map(len, self.texts))


class Blocks(Dataset[dict[str, Tensor]]):
    """Fixed blocks of tokens; the labels are the tokens, since Hugging Face models shift them."""

    def __init__(self, tokens: Tensor) -> None:
        self.tokens = tokens

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def read(limit: int, root: Path | None = None) -> Corpus:
    """Read sources of the standard library, at most ``limit`` characters.

    Raises:
        FileNotFoundError: The folder holds no readable Python sources.
    """
    root = Path(sysconfig.get_paths()["stdlib"]) if root is None else root
    texts, size = [], 0
    for text in _sources(root):
        texts.append(text[: limit - size])
        size += len(texts[-1])
        if size >= limit:
            break
    if not texts:
        raise FileNotFoundError(
            f"found no Python sources below {root}; the demo trains on the standard library's"
        )
    return Corpus(root, tuple(texts))


def _sources(root: Path) -> Iterator[str]:
    for path in sorted(root.rglob("*.py")):
        if SKIPPED.isdisjoint(path.relative_to(root).parts):
            text = path.read_text(encoding="utf-8", errors="replace")
            if text.strip():
                yield text


def learn_tokenizer(corpus: Corpus, vocabulary: int) -> Any:
    """Learn a byte-level BPE of at most ``vocabulary`` entries from the corpus itself."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        min_frequency=2,
        special_tokens=[END_OF_FILE],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus.texts, trainer)
    return tokenizer


def blocks(corpus: Corpus, tokenizer: Any, count: int, length: int, seed: int) -> Blocks:
    """Cut ``count`` blocks of ``length`` tokens from files in the order that ``seed`` gives.

    Raises:
        ValueError: The corpus has fewer tokens than asked for.
    """
    order = list(range(len(corpus.texts)))
    random.Random(seed).shuffle(order)
    end = tokenizer.token_to_id(END_OF_FILE)
    tokens: list[int] = []
    for index in order:
        if len(tokens) >= count * length:
            break
        tokens += [*tokenizer.encode(corpus.texts[index]).ids, end]
    if len(tokens) < count * length:
        raise ValueError(
            f"the corpus below {corpus.root} has {len(tokens)} tokens, "
            f"{count} blocks of {length} need {count * length}"
        )
    return Blocks(torch.tensor(tokens[: count * length]).view(count, length))
