"""Steps with one long row over several cards: ``python -m benchmarks.long_context --ranks 4``.

Parts, each in processes of its own, so that a failure ends no other part:

* ``correct``: tiny models in fp32 under FSDP2, sequence parallel, the policy ``keep_attention`` and
  offload; loss and every gradient beside one process.
* ``dense`` and ``hybrid``: a model like Qwen3-8B or Qwen3.5-9B with random weights in bf16, the
  same way, with AdamW. Every length runs with one block of layers (one layer, or four of a hybrid),
  then with as many as the time allows. The states are those of all layers. Where layers are left
  out, the step of the whole model is extrapolated (``layers``, ``block``, ``seconds_block``). Host
  memory of a step is pinned before it. Lengths of ``--on-card`` run first, without offload.
* ``variants``: some layers at one length: attention kept or computed again, offload or not, FP8;
  and the error of gradients in FP8.

Every row is printed as JSON when it was measured. ``--seconds`` ends everything; ``--device cpu``
tries all of it with gloo and tiny models. ``--plan`` adds what a plan predicts, which needs no
device and takes half a minute a row; ``--by-cards`` only predicts the longest rows.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import datetime
import faulthandler
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks import harness, store
from liger_multi._torch_private import empty_host_cache

PARTS = ("correct", "dense", "variants", "hybrid")
TILE = 32768  # tokens that an MLP takes at a time
_HEADS = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-8b": (
        "Qwen3",
        {
            **_HEADS,
            "vocab_size": 151936,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "tie_word_embeddings": False,
        },
    ),
    "llama-3-8b": (
        "Llama",
        {
            **_HEADS,
            "vocab_size": 128256,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "rope_theta": 5e5,
        },
    ),
    "qwen3.5-9b": (
        "Qwen3_5Text",
        {
            "vocab_size": 248320,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 32,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "tie_word_embeddings": False,
        },
    ),
}
TINY = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
CORRECT = ("qwen3-8b", "llama-3-8b", "qwen3.5-9b")
LENGTHS = (131072, 262144, 524288)
COUNTS, SHARES = (1, 2, 4, 8, 16, 32), (2 * TILE, 4 * TILE)  # cards, and tokens of one
SHARE = 0.6  # of the time that is left, for a length that is not the last
ROUGH = 1.1  # times the step that one block of layers lets expect
LATER = 45.0  # seconds that steps of all lengths leave to a part that follows
AGAIN = 8.0  # seconds; what takes less runs again, without pinning host memory
MARGIN = 6.0  # seconds, to end in time
LOSS, GRADIENT, NOISE = 1e-5, 5e-4, 1e-6  # as tests/shard_models.py; noise of the largest gradient


# --- models ---


def config_of(name: str, tiny: bool) -> Any:
    """The configuration of a model, of random weights."""
    import transformers

    prefix, sizes = MODELS[name]
    if tiny:
        sizes = {key: TINY.get(key, value) for key, value in sizes.items()}
    config = getattr(transformers, f"{prefix}Config")(
        **sizes, max_position_embeddings=2**20, use_cache=False
    )
    config._attn_implementation = "liger_multi"
    return config


def empty(name: str, tiny: bool) -> Any:
    """A patched model without memory."""
    import transformers

    import liger_multi

    model_class = getattr(transformers, f"{MODELS[name][0].removesuffix('Text')}ForCausalLM")
    with torch.device("meta"):
        model = model_class._from_config(config_of(name, tiny), dtype=torch.float32)
    liger_multi.patch(model)
    return model


def fill(model: Any, device: torch.device, scale: float | None = None) -> None:
    """Random weights in this rank's shards, and buffers as a new model has them.

    Args:
        model: On the meta device.
        device: Of this rank.
        scale: Of weights; None scales them by their inputs, so that attention is not uniform.
    """
    model.to_empty(device=device)
    generator = torch.Generator(device).manual_seed(1 + torch.distributed.get_rank())
    with torch.no_grad():
        for parameter in model.parameters():
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            if parameter.ndim > 1:
                width = parameter.numel() // parameter.shape[0]
                local.normal_(0, scale or width**-0.5, generator=generator)
            else:
                local.fill_(1.0)
        for module in model.modules():
            if "inv_freq" in dict(module.named_buffers(recurse=False)):
                fresh = type(module)(module.config).to(device)
                for key, buffer in fresh.named_buffers(recurse=False):
                    setattr(module, key, buffer)


class Setting:
    """A policy, tiled MLPs and offload on a sharded model, for ``tokens`` tokens of a rank."""

    def __init__(self, model: Any, policy: str, tokens: int, **options: Any) -> None:
        """``offload`` (whether) and ``compress`` are options."""
        from liger_multi import memory

        self._undo = contextlib.ExitStack()
        self.offload: Any = None
        self.tiny = tiny = next(model.parameters()).device.type == "cpu"
        self.tiles = max(1, tokens // (128 if tiny else TILE))
        tiled = memory.Settings(tiles=self.tiles, attention="liger_multi", patched=False)
        self._undo.enter_context(memory.apply(tiled, model))
        self._undo.enter_context(memory.apply_recompute(model, policy))
        if options.pop("offload", True):
            width = model.config.get_text_config().hidden_size
            flight = 5 * 2 * tokens * width + 2**28  # input and attention of a layer, with room
            least = 1024 if tiny else 2**20
            self.offload = memory.offload_activations(
                model, in_flight_bytes=flight, timed=True, min_bytes=least, **options
            )
            self._undo.enter_context(self.offload)

    def pin(self, count: float, nbytes: int) -> float:
        """Take pinned memory for tensors of a step, which keeps it; seconds of that."""
        start = time.perf_counter()
        if self.offload and not self.tiny:
            _ = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(int(count))]
        return time.perf_counter() - start

    def exposed_seconds(self) -> float:
        """How long this card waited for copies."""
        return self.offload.exposed_seconds() if self.offload else 0.0

    def remove(self) -> None:
        """Take it back."""
        self._undo.close()
        if self.offload and not self.tiny:
            empty_host_cache()


# --- one rank ---


class Rank:
    """One process of a part.

    Attributes:
        device: Its accelerator.
        size: How many ranks there are.
        mesh: Of all ranks.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        from liger_multi.patching import register_attention

        self.options, self.tiny = options, options.device == "cpu"
        self.end = float(os.environ["LONG_CONTEXT_END"])
        faulthandler.dump_traceback_later(max(1.0, self.left() + MARGIN), exit=True)
        number, self.size = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
        self.device = torch.device("cpu") if self.tiny else torch.device("cuda", number)
        if not self.tiny:
            torch.accelerator.set_device_index(number)
        dist.init_process_group(
            "gloo" if self.tiny else "nccl",
            timeout=datetime.timedelta(seconds=90),
            device_id=None if self.tiny else self.device,
        )
        self.mesh = init_device_mesh(self.device.type, (self.size,), mesh_dim_names=("sp",))
        self.module = torch.get_device_module(self.device)
        register_attention()

    def left(self) -> float:
        """Seconds until everything ends."""
        return self.end - time.time() - MARGIN

    def agreed(self, value: float, largest: bool = True) -> float:
        """The largest or smallest value of all ranks."""
        import torch.distributed as dist

        tensor = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, dist.ReduceOp.MAX if largest else dist.ReduceOp.MIN)
        return float(tensor)

    def say(self, row: dict[str, Any]) -> None:
        """Print a row, on one rank."""
        if torch.distributed.get_rank() == 0:
            print(json.dumps(row), flush=True)

    def ids(self, tokens: int, vocabulary: int) -> Tensor:
        """A row, the same on every rank."""
        generator = torch.Generator().manual_seed(tokens)
        return torch.randint(vocabulary, (1, tokens), generator=generator).to(self.device)


# --- correctness ---


def gradients(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and whole gradients of a step."""
    model.zero_grad()
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    whole = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            grad = parameter.grad
            whole[name] = grad.full_tensor() if hasattr(grad, "full_tensor") else grad.clone()
    return loss.detach(), whole


def worst(expected: dict[str, Tensor], actual: dict[str, Tensor]) -> tuple[float, str]:
    """The largest error of a gradient, in units of its limit's scale, and whose it is."""
    scale = max(float(g.abs().max()) for g in expected.values())
    errors = {
        name: float((actual[name] - g).abs().max())
        / max(float(g.abs().max()), NOISE / GRADIENT * scale)
        for name, g in expected.items()
    }
    name = max(errors, key=lambda key: errors[key])
    return errors[name], name


def correct(rank: Rank) -> None:
    """Compare tiny models with one process."""
    from liger_multi.distributed import shard_sequence

    for name in CORRECT:
        row: dict[str, Any] = {"part": "correct", "model": name, "cards": rank.size}
        try:
            one = empty(name, tiny=True)
        except AttributeError as error:  # this transformers has no such model
            rank.say({**row, "failed": str(error)})
            continue
        fill(one, rank.device)
        for tensor in (*one.parameters(), *one.buffers()):
            torch.distributed.broadcast(tensor.detach(), 0)
        one.eval()
        many = harness.shard(copy.deepcopy(one), rank.mesh["sp"], None)
        setting = Setting(many, "keep_attention", 512)
        try:
            shard_sequence(many, rank.mesh["sp"])
        except Exception as error:  # mixers of an older transformers are refused
            rank.say({**row, "failed": f"{type(error).__name__}: {error}"[:300]})
            continue
        tokens = 1001 if not rank.tiny else 101
        ids = rank.ids(tokens, TINY["vocab_size"])
        lengths = (tokens // 3, 5, tokens - tokens // 3 - 5)
        positions = torch.cat([torch.arange(n) for n in lengths])[None].to(rank.device)
        for form, more in {"row": {}, "packed": {"position_ids": positions}}.items():
            batch = {"input_ids": ids, "labels": ids, **more}
            loss, expected = gradients(one, batch)
            actual_loss, actual = gradients(many, batch)
            by_gradient, whose = worst(expected, actual)
            by_loss = float((actual_loss - loss).abs() / loss.abs())
            right = by_loss <= LOSS and by_gradient <= GRADIENT
            rank.say(
                {
                    **row,
                    "variant": form,
                    "tokens": tokens,
                    "loss_error": by_loss,
                    "gradient_error": by_gradient,
                    "of": whose,
                    "right": right,
                }
            )
        setting.remove()


# --- speed ---


def operations(config: Any, tokens: int, layers: int, passes: float) -> float:
    """Of a step with ``layers`` layers: GEMMs four times, attention ``passes`` of its forwards."""
    text = config.get_text_config()
    layer_types = (getattr(text, "layer_types", None) or ["full_attention"] * layers)[:layers]
    heads = text.num_attention_heads * text.head_dim
    keys = text.num_key_value_heads * text.head_dim
    # a recurrent layer counts as projections of the same size
    linear = 2 * text.hidden_size * (2 * heads + 2 * keys + 3 * text.intermediate_size)
    head = 2 * text.hidden_size * text.vocab_size * 3
    attention = 2 * tokens * heads * layer_types.count("full_attention") * passes
    return float(tokens * (4 * linear * layers + head + attention))


def trained(rank: Rank, model: Any, ids: Tensor, optimizer: Any = None) -> tuple[float, float]:
    """Seconds of one step on all ranks, and the loss."""
    harness.wait(rank.device)
    torch.distributed.barrier()
    start = time.perf_counter()
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    if optimizer is not None:
        optimizer.step()
    model.zero_grad(set_to_none=True)
    harness.wait(rank.device)
    return rank.agreed(time.perf_counter() - start), float(loss.detach())


def measured(rank: Rank, model: Any, setting: Setting, ids: Tensor, optimizer: Any) -> Any:
    """A step as a row: time, memory of the device and the host, waits for copies."""
    setting.exposed_seconds()
    if not rank.tiny:
        rank.module.reset_peak_memory_stats()
    seconds, loss = trained(rank, model, ids, optimizer)
    peak = 0 if rank.tiny else rank.module.max_memory_allocated()
    reserved = 0 if rank.tiny else rank.module.max_memory_reserved()
    offloaded = setting.offload.offloaded_bytes if setting.offload else 0
    exposed = rank.agreed(setting.exposed_seconds())
    return {
        "seconds": seconds,
        "loss": loss,
        "peak_bytes": int(rank.agreed(peak)),
        "reserved_bytes": int(rank.agreed(reserved)),
        "host_bytes_per_card": int(rank.agreed(offloaded)),
        "exposed_seconds": exposed,
        "exposed_percent": 100 * exposed / seconds,
    }


def layers_of(row: dict[str, Any], config: Any) -> dict[str, Any]:
    """A row with the step of all layers, from steps with a block of layers and with some."""
    whole, some, block = config.num_hidden_layers, row["layers"], row["block"]
    per_layer = (row["seconds"] - row["seconds_block"]) / max(1, some - block)
    seconds = row["seconds"] + (whole - some) * per_layer
    return {
        **row,
        "seconds_all_layers": seconds,
        "extrapolated": some < whole,
        "tokens_per_second": row["tokens"] / seconds,
        "host_bytes_all_layers": row["host_bytes_per_card"] * whole // some * row["cards"],
        "tflops_per_card": row["operations"] / row["seconds"] / row["cards"] / 1e12,
    }


def host_free() -> int:
    """Bytes of memory that the host has left."""
    with open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemAvailable"):
                return int(line.split()[1]) * 1024
    return 2**62


@contextlib.contextmanager
def fewer_layers(model: Any, layers: int) -> Iterator[None]:
    """Run the first layers only; the others keep their states."""
    config = model.config.get_text_config()
    whole, config.num_hidden_layers = config.num_hidden_layers, layers
    try:
        yield
    finally:
        config.num_hidden_layers = whole


def built(rank: Rank, name: str) -> Any:
    """The sharded model; in fp32 where its states fit into the cards, else in bf16."""
    from liger_multi.distributed import shard_sequence

    model = empty(name, rank.tiny)
    count = sum(parameter.numel() for parameter in model.parameters())
    room = 0 if rank.tiny else rank.module.get_device_properties(rank.device).total_memory
    fits = rank.tiny or count * 16 / rank.size < 0.45 * room
    states = rank.options.states or ("fp32" if fits else "bf16")
    half = None if rank.tiny else torch.bfloat16
    model.to(torch.float32 if states == "fp32" else torch.bfloat16)
    harness.shard(model, rank.mesh["sp"], half)
    fill(model, rank.device, 0.02)
    model.train()
    shard_sequence(model, rank.mesh["sp"], check=False)
    rank.say({"log": f"{name}: {count / 1e9:.2f}B parameters, {states}, {rank.left():.0f} s left"})
    model.states = states
    return model


def block_of(config: Any) -> int:
    """Layers after which the types of layers repeat."""
    layer_types = getattr(config, "layer_types", None) or ["full_attention"]
    return int(layer_types.index("full_attention")) + 1


def affordable(
    rank: Rank, config: Any, tokens: int, few: float, share: float, pinning: float
) -> int:
    """How many layers fit into a share of the time that is left, and into the host's memory.

    Args:
        rank: This one; all of them get the same number.
        config: Of the whole model.
        tokens: Of the row.
        few: Seconds of a step with one block of layers.
        share: Of the time.
        pinning: Seconds that host memory of a layer takes; 0 where layers stay on the card.
    """
    block = block_of(config)
    room = rank.agreed(rank.left() * share / ROUGH, largest=False)
    free = rank.agreed(host_free(), largest=False) / rank.size
    width = 5 * tokens // rank.size * config.hidden_size  # bytes of a layer on the host
    per_work = few / operations(config, tokens, block, 3.5)
    counts = range(2 * block, config.num_hidden_layers + 1, block)
    fit = [n for n in counts if not pinning or n * width < 0.9 * free]
    seconds = {n: per_work * operations(config, tokens, n, 3.5) + pinning * n for n in fit}
    return max((n for n in fit if seconds[n] < room), default=0)


def speed(rank: Rank, name: str) -> None:
    """Steps of every length, the shortest first."""
    model = built(rank, name)
    config = copy.deepcopy(model.config.get_text_config())
    optimizer = harness.adamw(model.parameters(), rank.device)
    on_card, block = rank.options.on_card, block_of(config)
    lengths = [*((n, False) for n in on_card), *((n, True) for n in rank.options.lengths)]
    warm = 256 if rank.tiny else 8192
    setting = Setting(model, "keep_attention", warm // rank.size)
    for _ in range(2):  # compiles kernels, and makes the states of the optimizer
        seconds, _ = trained(rank, model, rank.ids(warm, config.vocab_size), optimizer)
    rank.say({"log": f"warm, {seconds:.2f} s for {warm} tokens, {rank.left():.0f} s left"})
    setting.remove()
    for number, (tokens, offload) in enumerate(lengths):
        if not rank.tiny:
            rank.module.empty_cache()
        variant = (rank.options.compress or "bf16") if offload else "bf16, on the card"
        options = {"compress": rank.options.compress} if offload else {"offload": False}
        setting = Setting(model, "keep_attention", tokens // rank.size, **options)
        ids = rank.ids(tokens, config.vocab_size)
        with fewer_layers(model, block):
            few, _ = trained(rank, model, ids)
            if few < AGAIN:
                few, _ = trained(rank, model, ids)
        nbytes = tokens // rank.size * config.hidden_size * (1 if rank.options.compress else 2)
        of_block = setting.offload.offloaded_bytes / nbytes if offload else 0.0
        pinning = rank.agreed(setting.pin(of_block + 1, nbytes))  # one more than there are
        share = 1.0 if number == len(lengths) - 1 else SHARE
        layers = affordable(rank, config, tokens, few, share, pinning * of_block / block)
        if not layers:
            rank.say({"log": f"{few:.1f} s for {block} layers, {tokens} tokens: no time for more"})
            setting.remove()
            continue
        pinned = rank.agreed(setting.pin(of_block * layers / block, nbytes))
        rank.say({"log": f"{few:.2f} s for {block} layers, {pinned:.1f} s to pin memory"})
        with fewer_layers(model, layers):
            row = measured(rank, model, setting, ids, optimizer)
        row["seconds_pinned"] = pinned
        setting.remove()
        head = {"part": "step", "model": name, "cards": rank.size, "tokens": tokens}
        head |= {"states": model.states, "variant": variant}
        head |= {"layers": layers, "block": block, "seconds_block": few, "tiles": setting.tiles}
        head["operations"] = operations(config, tokens, layers, 3.5)
        rank.say(layers_of({**head, **row}, config))


def planned(row: dict[str, Any]) -> dict[str, int]:
    """What a plan predicts for a step, of a card and of its host; states are of all layers."""
    from liger_multi.memory import Settings
    from liger_multi.memory.planning.cost import CARDS
    from liger_multi.memory.planning.predict import Predictor
    from liger_multi.memory.planning.shapes import Shapes

    settings = Settings(
        sequence=row["tokens"],
        precision="amp" if row["states"] == "fp32" else "bf16",
        recompute="keep_attention",
        layers=row["layers"],
        tiles=row["tiles"],
        offload_activations=row["host_bytes_per_card"] > 0,
        spread="fsdp2",
        ranks=row["cards"],
    )
    whole = config_of(row["model"], tiny=False)
    some = copy.deepcopy(whole)
    some.num_hidden_layers = row["layers"]
    some.layer_types = (getattr(whole, "layer_types", None) or [])[: row["layers"]] or None
    predictors = [Predictor(Shapes(c, row["tokens"]), CARDS["h200"]) for c in (whole, some)]
    states, of_some = (predictor.shared_bytes(settings) for predictor in predictors)
    candidate = predictors[1].predict(settings)
    peak = candidate.peak_bytes + (states - of_some) // row["cards"]
    return {"planned_bytes": peak, "planned_host_bytes": candidate.host_bytes}


def by_cards(name: str = "qwen3-8b") -> list[dict[str, Any]]:
    """The longest rows that plans predict: peaks grow with the tokens of a card along a line."""
    from liger_multi.memory.planning.cost import CARDS, DEFAULT_HOST_MEMORY
    from liger_multi.memory.planning.search import HEADROOM

    rows = []
    for cards in COUNTS:
        low, high = (
            planned(
                {
                    "model": name,
                    "cards": cards,
                    "tokens": cards * share,
                    "layers": config_of(name, tiny=False).num_hidden_layers,
                    "tiles": share // TILE,
                    "states": "fp32",
                    "host_bytes_per_card": share,
                }
            )
            for share in SHARES
        )
        for card in ("h100", "h200"):
            room = {"planned_bytes": CARDS[card].memory, "planned_host_bytes": DEFAULT_HOST_MEMORY}
            fitting = {}
            for key, limit in room.items():
                beyond = (1 - HEADROOM) * limit - low[key]
                growth = (high[key] - low[key]) / (SHARES[1] - SHARES[0])
                fitting[key] = SHARES[0] + beyond / growth
            tokens = max(0, int(min(fitting.values())) // 1024 * 1024) * cards
            bound = "host" if fitting["planned_host_bytes"] < fitting["planned_bytes"] else "card"
            row = {"model": name, "card": card, "cards": cards, "tokens": tokens, "bound": bound}
            print(json.dumps(row), flush=True)
            rows.append(row)
    return rows


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "keep_attention, offload": ("keep_attention", {}),
    "keep_attention, offload, float8": ("keep_attention", {"compress": "float8"}),
    "keep_attention": ("keep_attention", {"offload": False}),
    "full, offload": ("full", {}),
    "full": ("full", {"offload": False}),
}


def variants(rank: Rank) -> None:
    """Some layers under every way to keep activations."""
    name, tokens = rank.options.model, rank.options.lengths[0]
    MODELS[name][1]["num_hidden_layers"] = rank.options.layers
    model = built(rank, name)
    ids = rank.ids(tokens, model.config.vocab_size)
    base: dict[str, Tensor] = {}  # on the host, so that peaks are those of steps
    for variant, (policy, options) in VARIANTS.items():
        setting = Setting(model, policy, tokens // rank.size, **options)
        took = 0.0
        for _ in range(2):  # the first one compiles, and takes memory of the host
            if rank.agreed(rank.left(), largest=False) < 1.5 * took + 2:
                rank.say({"log": f"no time for {variant}"})
                return
            row = measured(rank, model, setting, ids, None)
            took = row["seconds"]
        head = {"part": "variant", "model": name, "cards": rank.size, "tokens": tokens}
        head |= {"layers": rank.options.layers, "variant": variant}
        if variant in ("keep_attention, offload", "keep_attention, offload, float8"):
            row["gradient_errors"] = errors(rank, model, base)
        rank.say({**head, **row, "tokens_per_second": tokens / row["seconds"]})
        setting.remove()


def errors(rank: Rank, model: Any, base: dict[str, Tensor]) -> dict[str, float]:
    """Relative errors of gradients to those in ``base``, which is filled the first time."""
    tokens = 256 if rank.tiny else 16384
    ids = rank.ids(tokens, model.config.vocab_size)
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    local = {
        name: parameter.grad.to_local().float().cpu()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    model.zero_grad(set_to_none=True)
    if not base:
        base.update(local)
        return {}
    sums: dict[str, float] = {}
    for name, grad in local.items():
        squares = torch.stack([(grad - base[name]).square().sum(), base[name].square().sum()])
        squares = squares.to(rank.device)
        torch.distributed.all_reduce(squares)
        sums[name] = float((squares[0] / squares[1].clamp(min=1e-30)).sqrt())
    queries = [e for name, e in sums.items() if "q_proj" in name or "k_proj" in name]
    others = sorted(e for name, e in sums.items() if "q_proj" not in name and "k_proj" not in name)
    return {
        "largest_query_key": max(queries, default=0.0),
        "largest_other": others[-1],
        "median_other": others[len(others) // 2],
    }


JOBS: dict[str, Callable[[Rank], None]] = {
    "correct": correct,
    "dense": lambda rank: speed(rank, rank.options.model),
    "variants": variants,
    "hybrid": lambda rank: speed(rank, "qwen3.5-9b"),
}


def work(options: argparse.Namespace) -> None:
    """One part, in one process of several."""
    rank = Rank(options)
    try:
        JOBS[options.part](rank)
    except BaseException as error:
        lines = str(error).strip().splitlines() or [""]
        failed = f"rank {torch.distributed.get_rank()}, {type(error).__name__}: {lines[0][:300]}"
        print(json.dumps({"part": options.part, "failed": failed}), flush=True)
        if not isinstance(error, torch.OutOfMemoryError):
            sys.excepthook(type(error), error, error.__traceback__)
        sys.stderr.flush()
        os._exit(1)  # others may wait for this one: torchrun ends them
    rank.say({"log": f"{options.part} done, {rank.left():.0f} s left"})
    torch.distributed.barrier()
    harness.wait(rank.device)
    sys.stdout.flush()
    os._exit(0)  # nothing that a destructor could wait for


# --- all parts ---


def run_part(part: str, arguments: Sequence[str], end: float, ranks: int) -> list[dict[str, Any]]:
    """The rows that a part printed until it ended, or until its time was over."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={ranks}", "-m", "benchmarks.long_context", *arguments]
    environment = {
        # host memory is pinned in threads; freed blocks of other lengths are given back
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True,"
        "pinned_use_cuda_host_register:True,pinned_num_register_threads:16",
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",  # large pages are pinned in less time
        "NCCL_NVLS_ENABLE": "0",
        "OMP_NUM_THREADS": "1" if "cpu" in arguments else "8",
        **os.environ,
        "LONG_CONTEXT_END": str(end),
    }
    process = subprocess.Popen(
        [*command, "--part", part],
        cwd=store.ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )

    def stop() -> None:  # torchrun ends its processes, which are in sessions of their own
        with contextlib.suppress(ProcessLookupError):
            process.terminate()

    timer = threading.Timer(max(1.0, end - time.time()), stop)
    timer.start()
    rows = []
    assert process.stdout is not None
    try:
        for text in process.stdout:
            print(text, end="", flush=True)
            if text.startswith("{"):
                rows.append(json.loads(text))
        process.wait(5.0)
    except subprocess.TimeoutExpired:
        process.kill()
    finally:
        timer.cancel()
        stop()
    return [row for row in rows if "part" in row]


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__)
    store.add_options(parser)
    parser.add_argument("--ranks", type=int, default=4, help="cards of this host")
    parser.add_argument("--parts", nargs="*", default=PARTS[:3], choices=PARTS)
    parser.add_argument("--model", default="qwen3-8b", choices=tuple(MODELS))
    parser.add_argument("--lengths", type=int, nargs="*", default=LENGTHS)
    parser.add_argument("--on-card", type=int, nargs="*", default=(), help="lengths, no offload")
    parser.add_argument("--layers", type=int, default=4, help="of the part variants")
    parser.add_argument("--states", choices=("fp32", "bf16"), help="dtype of weights and AdamW")
    parser.add_argument("--compress", choices=("float8",), help="of activations")
    parser.add_argument("--seconds", type=float, default=240.0, help="after which all has ended")
    parser.add_argument("--plan", action="store_true", help="also say what a plan predicts")
    parser.add_argument("--by-cards", action="store_true", help="predict the longest rows")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the parts, print and keep their rows."""
    began = time.time()
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    options = parsed(arguments)
    if options.part:
        work(options)
    if options.device == "cpu" and options.lengths == LENGTHS:
        arguments += ["--lengths", "512", "1024"]
    if options.by_cards:
        head = {**store.head("longest-by-cards", options, torch.device("cpu")), "rows": by_cards()}
        store.keep({**head, "device": store.ESTIMATED}, options)
        return
    end = began + options.seconds
    rows: list[dict[str, Any]] = []
    for number, part in enumerate(options.parts):
        left = end - time.time()
        if left < 15:
            print(json.dumps({"log": f"no time for {part}, {left:.0f} s"}), flush=True)
            continue
        later = len(options.parts) - number - 1
        limit = end - LATER * later if part in ("dense", "hybrid") else end
        rows += run_part(part, arguments, limit, options.ranks)
    device = torch.device(options.device)
    head = store.head("long-context", options, device)
    store.keep({**head, "rows": rows}, options)
    steps = [row for row in rows if row["part"] == "step"] if options.plan else []
    for row in steps:
        row |= planned(row)
        print(f"{row['peak_bytes']:,} bytes measured, {row['planned_bytes']:,} planned", flush=True)
    if steps:
        store.keep({**head, "rows": rows}, options)


if __name__ == "__main__":
    main()
