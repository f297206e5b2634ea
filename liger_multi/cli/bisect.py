"""``liger-multi bisect``: the first operator that differs between two configurations."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from liger_multi.cli import checking
from liger_multi.cli.plan import progress
from liger_multi.errors import LigerMultiError, require_packages, shown, shown_path, summary
from liger_multi.testing import Bisection, bisect

TINY = "tiny-llama"
EXAMPLE = "such as rms_norm=reference,split=1"
_FLAGS = {"true": True, "false": False}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``liger-multi bisect``."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help=f"a Python file with model(), batch() and maybe model_b(), or {TINY}",
    )
    for side in ("a", "b"):
        parser.add_argument(
            f"--{side}",
            default="",
            metavar="KEY=VALUE,...",
            help=f"configuration {side}, {EXAMPLE} (default: none)",
        )
    parser.add_argument("--forward-only", action="store_true", help="no gradients")
    parser.add_argument("--device", help=f"of {TINY} (default: the accelerator, else the CPU)")
    parser.add_argument(
        "--picture",
        type=checking.path,
        metavar="PNG",
        help="draw the difference of every call (default: draw nothing)",
    )
    checking.add_overwrite(parser)
    checking.add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print what differs; 0 when nothing does, 1 when something does."""
    if arguments.picture:
        require_packages("bisect --picture", ["matplotlib"], "cli")
        checking.file("--picture", arguments.picture, ".png", arguments.overwrite)
    settings_of_side = {side: settings(side, getattr(arguments, side)) for side in ("a", "b")}
    if arguments.model != TINY and arguments.device:
        raise LigerMultiError(
            f"--device {arguments.device} is for {TINY}; {shown_path(arguments.model)} puts its "
            "model and batch on a device itself"
        )
    with contextlib.redirect_stdout(sys.stderr), progress("bisect") as said:
        if arguments.model == TINY:
            require_packages("bisect", ["transformers"], "transformers")
            settings_of_side = {
                side: {"patch": True, **chosen} for side, chosen in settings_of_side.items()
            }
            models, batch = tiny_model(checking.device("bisect", arguments.device))
        else:
            models, batch = _from_file(Path(arguments.model))
        report = _compared(models, batch, settings_of_side, not arguments.forward_only, said)
    if arguments.json:
        checking.write_json(report.as_data())
    else:
        report.page().show()
    if arguments.picture:
        report.picture(arguments.picture)
    return int(not report.equal)


def settings(side: str, text: str) -> dict[str, Any]:
    """A configuration from ``key=value,key=value``.

    A key alone is true, ``true`` and ``false`` are flags, digits a number, ``x+y`` a list.

    Raises:
        LigerMultiError: A part has no key, or a key comes twice.
    """
    options: dict[str, Any] = {}
    for part in text.split(",") if text.strip() else ():
        key, equals, value = (text_part.strip() for text_part in part.partition("="))
        if not key or (equals and not value) or key in options:
            problem = "is given twice" if key and key in options else "must be KEY or KEY=VALUE"
            raise LigerMultiError(
                f"--{side}: {shown(part)} {problem}, {EXAMPLE}; got {shown(text)}"
            )
        options[key] = _value(value) if equals else True
    return options


def _value(text: str) -> Any:
    if text.lower() in _FLAGS:
        return _FLAGS[text.lower()]
    if text.isascii() and text.isdigit() and len(text) < 20:
        return int(text)
    return text.split("+") if "+" in text else text


def _compared(
    models: tuple[Any, Any],
    batch: Any,
    settings_of_side: dict[str, dict[str, Any]],
    backward: bool,
    said: Callable[[str], None],
) -> Bisection:
    """Run both; whatever the model raises becomes one line."""
    with _one_line("the model"):
        return bisect(
            *models,
            batch,
            a=settings_of_side["a"],
            b=settings_of_side["b"],
            backward=backward,
            said=said,
        )


# --- models ---


def tiny_model(device: torch.device) -> tuple[tuple[Any, None], dict[str, Any]]:
    """A Llama of two layers with random weights, and four sequences."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model = LlamaForCausalLM(config)
        ids = torch.randint(0, config.vocab_size, (4, 32))
    ids = ids.to(device)
    return (model.to(device).train(), None), {"input_ids": ids, "labels": ids}


def _from_file(path: Path) -> tuple[tuple[Any, Any], Any]:
    """What the functions of a Python file return."""
    if path.suffix != ".py" or not path.is_file():
        raise LigerMultiError(
            f"bisect: MODEL must be {TINY} or a Python file that exists, got {shown_path(path)}"
        )
    with _one_line(shown_path(path), path):
        module = _loaded(path)
    batch = {}
    for name in ("model", "batch", "model_b"):
        function = getattr(module, name, None)
        if callable(function):
            with _one_line(f"{name}() of {shown_path(path)}", path):
                batch[name] = function()
        elif name != "model_b" or function is not None:
            value_text = "nothing of this name" if function is None else shown(function)
            raise LigerMultiError(
                f"bisect: {shown_path(path)} must define a function {name}(), got {value_text}"
            )
    return (batch["model"], batch.get("model_b")), batch["batch"]


def _loaded(path: Path) -> ModuleType:
    """The file as a module; it finds what lies beside it, as a script does."""
    spec = importlib.util.spec_from_file_location("liger_multi_bisected", path.resolve())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.resolve().parent))
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def _one_line(action: str, path: Path | None = None) -> Iterator[None]:
    """One line for an exception of others, with the line of the file that raised it."""
    try:
        yield
    except LigerMultiError:
        raise
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        file = str(path.resolve()) if path else frames[-1].filename if frames else ""
        lines = [frame.lineno for frame in frames if frame.filename == file]
        location = f" ({file}:{lines[-1]})" if lines else ""
        raise LigerMultiError(f"bisect: {action} failed{location}: {summary(error)}") from error
