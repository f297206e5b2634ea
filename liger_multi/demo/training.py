"""Train one model with the unmodified Hugging Face Trainer and record what each step did.

The text is what every machine has: the sources and docstrings of Python's standard library.
"""

from __future__ import annotations

import contextlib
import random
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

from liger_multi.memory import measure
from liger_multi.memory.measure import Peak

# --- the text ---

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


# --- training ---


@dataclass(frozen=True)
class Scale:
    """Sizes of the models and of the run."""

    vocabulary: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    sequence: int
    batch: int
    steps: int
    corpus_characters: int

    @property
    def tokens(self) -> int:
        """Tokens of one step."""
        return self.sequence * self.batch


@dataclass(frozen=True)
class DemoConfig:
    """One demo.

    Attributes:
        scale: Sizes of the models and of the run.
        timed: Steps at the end of each run that give the throughput.
        seed: Of weights and data.
        device: Where to train.
        bound: The largest difference of two losses that passes for noise.
    """

    scale: Scale
    timed: int
    seed: int
    device: torch.device
    bound: float

    @property
    def total(self) -> int:
        """Steps of one run."""
        return self.scale.steps + self.timed

    @property
    def on_cpu(self) -> bool:
        """Whether the run is on a CPU: no allocator statistics, float32."""
        return self.device.type == "cpu"

    @property
    def where(self) -> str:
        """Precision and device in words."""
        if self.on_cpu:
            return "float32 on CPU"
        name = torch.get_device_module(self.device).get_device_name(self.device)
        return f"bfloat16 on {name}"


@dataclass
class Run:
    """What one training run did, step by step.

    Attributes:
        losses: Loss of every step, as the model returned it.
        seconds: Wall time of every step.
        peaks: Peak memory of every step; None where the step ran without the meter.
        timed: The last steps, which ran without anything that slows them, give the throughput.
        tokens: Tokens of one step.
    """

    timed: int
    tokens: int
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    peaks: list[Peak | None] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        """Throughput of the timed steps."""
        return self.tokens * self.timed / sum(self.seconds[-self.timed :])

    @property
    def peak_bytes(self) -> int:
        """Largest peak of all measured steps."""
        return max(p.peak_bytes for p in self.peaks if p is not None)

    @property
    def widest(self) -> Peak:
        """The measurement with the largest vocabulary-wide tensor."""
        return max((p for p in self.peaks if p is not None), key=lambda p: p.widest_bytes or 0)


def build(model_type: str, scale: Scale, seed: int) -> Any:
    """A model of the Hugging Face type ``model_type`` with random weights, without a download."""
    config = AutoConfig.for_model(
        model_type,
        vocab_size=scale.vocabulary,
        hidden_size=scale.hidden,
        intermediate_size=scale.intermediate,
        num_hidden_layers=scale.layers,
        num_attention_heads=scale.heads,
        num_key_value_heads=scale.kv_heads,
        max_position_embeddings=scale.sequence,
        tie_word_embeddings=model_type.startswith("qwen"),
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    set_seed(seed)
    return AutoModelForCausalLM.from_config(config)


def train(model: Any, data: Blocks, plan: DemoConfig, on_step: Callable[[Run], None]) -> Run:
    """Train ``model`` as planned and call ``on_step`` with the record after every step."""
    run = Run(plan.timed, plan.scale.tokens)
    recorder = _Recorder(run, plan, on_step)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=plan.total,
            per_device_train_batch_size=plan.scale.batch,
            # Wide models in bfloat16 leave the stable range at 1e-3, and any two runs part.
            learning_rate=1e-3 if plan.on_cpu else 3e-4,
            lr_scheduler_type="cosine",
            warmup_steps=2,
            seed=plan.seed,
            bf16=not plan.on_cpu,
            use_cpu=plan.on_cpu,
            dataloader_pin_memory=False,
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        if arguments.n_gpu > 1:
            # Several devices in one process would mean DataParallel, which is not compared here.
            arguments._n_gpu = 1
        trainer = Trainer(
            model=model,
            args=arguments,
            train_dataset=data,
            data_collator=default_data_collator,
            callbacks=[recorder],
        )
        trainer.remove_callback(PrinterCallback)
        hook = model.register_forward_hook(recorder.take_loss)
        try:
            trainer.train()
        finally:
            hook.remove()
            recorder.close()
    return run


class _Recorder(TrainerCallback):
    """Loss, time and memory of every step."""

    def __init__(self, run: Run, plan: DemoConfig, on_step: Callable[[Run], None]) -> None:
        self._run, self._plan, self._on_step = run, plan, on_step
        self._stack = contextlib.ExitStack()
        self._loss: torch.Tensor | None = None
        self._begin = 0.0

    def take_loss(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        """Keep the loss as the model returned it; the Trainer's own log rounds to four digits."""
        self._loss = output.loss.detach()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the meter and the clock."""
        plan, step = self._plan, state.global_step
        # An allocator counts for free. Watching operators (all that a CPU has, and the only way to
        # find the widest tensor) costs time, so the timed steps go without.
        watched = step < plan.scale.steps if plan.on_cpu else step == 0
        peak = None
        if watched or not plan.on_cpu:
            meter = measure(plan.device, width=plan.scale.vocabulary if watched else None)
            peak = self._stack.enter_context(meter)
        self._run.peaks.append(peak)
        self._begin = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop both and report."""
        if not self._plan.on_cpu:
            torch.accelerator.synchronize()
        self._run.seconds.append(time.perf_counter() - self._begin)
        self.close()
        assert self._loss is not None
        self._run.losses.append(self._loss.item())
        self._on_step(self._run)

    def close(self) -> None:
        """Stop the meter, also when a step failed half way."""
        self._stack.close()
