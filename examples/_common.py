"""What the examples share: arguments, a tiny model with text of its own, data sets, ranks."""

import argparse
import contextlib
import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

FILES = {".txt": "text", ".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}
WORDS = [
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "and",
    "so",
    "on",
    "we",
    "count",
    "again",
]
TINY = {"steps": 12, "rows": 4, "length": 32, "rate": 1e-2}


@contextlib.contextmanager
def needs(*packages: str) -> Iterator[None]:
    """Guard optional imports: the script ends with the install command if a package is missing.

    ``accelerate`` is named where nothing imports it by name: the Trainer does.
    """
    missing = " ".join(name for name in packages if importlib.util.find_spec(name) is None)
    if missing:
        raise SystemExit(f"{Path(sys.argv[0]).name} needs: pip install {missing}")
    yield


def parser(
    doc: str | None, model: str = "Qwen/Qwen2.5-0.5B", dataset: str = "roneneldan/TinyStories"
) -> argparse.ArgumentParser:
    """The arguments that all examples have; add to them, then call :func:`parsed`."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--tiny", action="store_true", help="a tiny model and text, on a CPU")
    parser.add_argument("--model", default=model, help="of the hub, or a folder")
    parser.add_argument(
        "--dataset", default=dataset, help=f"of the hub, or a file: {', '.join(FILES)}"
    )
    parser.add_argument(
        "--samples", type=int, default=2000, help="how many of the data set's first"
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rows", type=int, default=4, help="sequences of a step and device")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a sequence")
    parser.add_argument("--rate", type=float, default=2e-5, help="learning rate")
    parser.add_argument("--output", help="a folder for the trained model")
    return parser


def parsed(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """The arguments; ``--tiny`` has smaller defaults, and ``gpu`` says whether to use one."""
    if parser.parse_args(arguments).tiny:
        parser.set_defaults(**TINY)
    options = parser.parse_args(arguments)
    options.gpu = torch.accelerator.is_available() and not options.tiny
    return options


def device_of(options: argparse.Namespace) -> torch.device:
    """The accelerator, or the CPU."""
    accelerator = torch.accelerator.current_accelerator() if options.gpu else None
    return accelerator or torch.device("cpu")


def load(options: argparse.Namespace) -> tuple[Any, Any]:
    """Tokenizer and model; a llama of two layers that counts in words where ``--tiny`` is given."""
    with needs("transformers"):
        import transformers as hf
    torch.manual_seed(0)
    if not options.tiny:
        model = hf.AutoModelForCausalLM.from_pretrained(options.model, dtype="auto")
        return hf.AutoTokenizer.from_pretrained(options.model), model
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {w: i for i, w in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = hf.PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    config = hf.LlamaConfig(
        vocab_size=len(words),
        hidden_size=getattr(options, "width", 32),
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    return tokenizer, hf.LlamaForCausalLM(config)


def count_from(start: int, words: int) -> str:
    """Words that follow one another, so that there is something to learn."""
    return " ".join(WORDS[(start + i) % len(WORDS)] for i in range(words))


def dataset(options: argparse.Namespace, tiny: Sequence[dict[str, str]]) -> Any:
    """The first samples of the data set; those of ``tiny`` with ``--tiny``."""
    with needs("datasets"):
        from datasets import Dataset, load_dataset
    if options.tiny:
        return Dataset.from_list(list(tiny))
    file_type = FILES.get(Path(options.dataset).suffix)
    source = (
        {"path": file_type, "data_files": options.dataset}
        if file_type
        else {"path": options.dataset}
    )
    stream = load_dataset(**source, split="train", streaming=True)
    return Dataset.from_list(list(stream.take(options.samples)))


def sequences(options: argparse.Namespace, tokenizer: Any) -> Any:
    """The column ``text`` of the data set as sequences of ``length`` tokens, none of them padded.

    Returns:
        A ``datasets.Dataset`` of tensors, ``input_ids`` and ``labels``.
    """
    tiny = [{"text": count_from(i, 24 + i % 16)} for i in range(400)]
    ids: list[int] = []
    for text in dataset(options, tiny)["text"]:
        ids += [*tokenizer(text).input_ids, tokenizer.eos_token_id]
    cuts = range(0, len(ids) - options.length + 1, options.length)
    rows = [ids[at : at + options.length] for at in cuts]
    if not rows:
        raise SystemExit(
            f"{len(ids)} tokens make no sequence of {options.length}: --samples has more"
        )
    from datasets import Dataset

    return Dataset.from_dict({"input_ids": rows, "labels": rows}).with_format("torch")


def started(options: argparse.Namespace) -> bool:
    """Whether this process is a rank; with ``--tiny``, a process that is none starts two ranks."""
    if "RANK" in os.environ:
        return True
    if not options.tiny:
        raise SystemExit("start it with torchrun, as its first lines say")
    from torch.distributed.run import main

    main(["--standalone", "--nproc-per-node=2", *sys.argv])
    return False


def adapted(options: argparse.Namespace, model: Any, data: Any) -> list[float]:
    """Train what requires a gradient, in plain PyTorch; the losses."""
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer, losses = torch.optim.AdamW(weights, options.rate), []
    for batch in batches(options, data):
        loss = model(**{name: t.to(model.device) for name, t in batch.items()}).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        print(f"loss {losses[-1]:.3f}")
    return losses


def batches(options: argparse.Namespace, data: Any, rank: int = 0, ranks: int = 1) -> Iterator[Any]:
    """``steps`` batches of ``rows`` sequences, in random order; every rank gets others."""
    from torch.utils.data import DataLoader, RandomSampler

    count = options.steps * options.rows * ranks
    drawn = RandomSampler(data, True, count, torch.Generator().manual_seed(1))
    loader: Any = DataLoader(data, options.rows, sampler=list(drawn)[rank::ranks])
    yield from loader
