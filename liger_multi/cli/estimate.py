"""``liger-multi estimate``: what training a model will need on each device."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from dataclasses import fields

from liger_multi.cli.checking import simulated
from liger_multi.dispatch.config_file import parse_bytes
from liger_multi.errors import LigerMultiError
from liger_multi.memory import estimate
from liger_multi.memory.setup import DTYPES, OPTIMIZERS, TrainingSetup
from liger_multi.memory.sizes import SIZES, config_of
from liger_multi.memory.tables import estimate_page


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``liger-multi estimate``."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help=f"a config.json or other JSON file of one, a folder of one, or {', '.join(SIZES)}",
    )
    parser.add_argument("--batch", type=int, default=1, help="sequences of a device and step")
    parser.add_argument("--sequence", type=int, default=2048, help="tokens of each")
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES, help="of the weights")
    parser.add_argument("--optimizer", default="adamw", choices=OPTIMIZERS)
    parser.add_argument("--zero-stage", type=int, default=0, choices=(0, 1, 2, 3))
    parser.add_argument("--fsdp", action="store_true", help="FSDP2 over all devices")
    parser.add_argument("--world", type=int, default=1, help="devices that shards are spread over")
    parser.add_argument("--offload", choices=("cpu", "nvme"), help="optimizer states stand there")
    parser.add_argument("--offload-parameters", action="store_true", help="parameters too")
    parser.add_argument("--checkpointing", action="store_true", help="keep inputs of layers only")
    parser.add_argument("--patched", action="store_true", help="with the operators of this library")
    parser.add_argument("--attention", default="sdpa", help="sdpa, flash_attention_2 or eager")
    parser.add_argument("--device", default="cuda", help="device type to predict (default: cuda)")
    parser.add_argument("--capacity", help="memory of a device, such as 80GiB")
    parser.add_argument("--json", action="store_true", help="print the same facts as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print an estimate; 1 when a device of the given capacity is too small for it."""
    if importlib.util.find_spec("transformers") is None:
        raise LigerMultiError(
            "estimate needs transformers, which cannot be imported here; "
            'install with: pip install "liger-multi[transformers]"'
        )
    given = {f.name: getattr(arguments, f.name) for f in fields(TrainingSetup)}
    if given["capacity"] is not None:
        given["capacity"] = parse_bytes(given["capacity"], "--capacity")
    with simulated("estimate", arguments.model):
        config = config_of(arguments.model, arguments.sequence)
        made = estimate(config, arguments.batch, arguments.sequence, TrainingSetup(**given))
    fits = given["capacity"] is None or made.peak_bytes <= given["capacity"]
    if arguments.json:
        data = {name: value for name, value in made.as_data().items() if name != "profile"}
        sys.stdout.write(json.dumps({**data, "fits": fits}, indent=1) + "\n")
        return int(not fits)
    page = estimate_page(made)
    if not fits:
        page.add("Too large", [("problem", f"a device has {arguments.capacity}")])
    page.show()
    return int(not fits)
