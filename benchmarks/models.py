"""Whole models: ``python -m benchmarks.models``, and their host time: ``... models host-time``.

Tokens a second and peak memory: model x size x variant, each in a process of its own (peers patch
modules of the whole process), which train some steps in turns: random weights and tokens, fused
AdamW, SDPA attention, bf16. The loss of every variant stands beside its time, so that a fast wrong
answer is seen.

``--cards 8`` trains over several cards by FSDP2: batch and tokens are those of each card,
parameters are fp32 and sharded, layers compute in bf16, gradients are reduced in fp32. A row has
tokens a second of all cards together, and the highest peak of one card.

``host-time`` prints the host time of operators, and of steps of small models (:func:`host_time`).
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from benchmarks import harness, store
from benchmarks.harness import (
    Call,
    adamw,
    device_of,
    limit_memory,
    medians,
    timed_steps,
    train_step,
)
from liger_multi.bench.measure import release
from liger_multi.memory.sizes import SIZES

ROOT = Path(__file__).parent.parent

# of the sizes of Qwen3.5
_QWEN: dict[str, Any] = {
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "vocab_size": 248320,
    "max_position_embeddings": 262144,
}
HYBRIDS: dict[str, dict[str, Any]] = {
    "0.8B": {
        **_QWEN,
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "linear_num_value_heads": 16,
        "tie_word_embeddings": True,
    },
    "9B": {
        **_QWEN,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "linear_num_value_heads": 32,
        "tie_word_embeddings": False,
    },
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    **SIZES,
    "tiny": (
        "Llama",
        {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 512,
            "tie_word_embeddings": True,
        },
    ),
    # the layers of Mamba-2 and attention of a Bamba of 24 layers
    "bamba-24-layers": (
        "Bamba",
        {
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "mamba_n_heads": 64,
            "mamba_d_head": 64,
            "mamba_d_state": 128,
            "mamba_n_groups": 1,
            "vocab_size": 128256,
            "attn_layer_indices": [9, 18],
            "max_position_embeddings": 262144,
        },
    ),
    "llama-4-layers": ("Llama", {**SIZES["llama-3.2-1b"][1], "num_hidden_layers": 4}),
    # as google/gemma-3-1b-pt, Qwen/Qwen3-30B-A3B (48 layers) and Qwen/Qwen2.5-VL-3B-Instruct (36
    # layers of text and 32 of vision) on the Hugging Face hub
    "gemma-3-1b": (
        "Gemma3",
        {
            "hidden_size": 1152,
            "intermediate_size": 6912,
            "num_hidden_layers": 26,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "vocab_size": 262144,
            "sliding_window": 512,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3-30b-a3b-4-layers": (
        "Qwen3Moe",
        {
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_hidden_layers": 4,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "vocab_size": 151936,
            "tie_word_embeddings": False,
        },
    ),
    # 4 of the 24 layers of openai/gpt-oss-20b, which alternate windows and all tokens
    "gpt-oss-20b-4-layers": (
        "GptOss",
        {
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_hidden_layers": 4,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
            "sliding_window": 128,
            "max_position_embeddings": 131072,
            "vocab_size": 201088,
            "tie_word_embeddings": False,
        },
    ),
    "qwen2.5-vl-3b-8-layers": (
        "Qwen2_5_VL",
        {
            "vocab_size": 151936,
            "image_token_id": 151655,
            "tie_word_embeddings": True,
            "text_config": {
                "hidden_size": 2048,
                "intermediate_size": 11008,
                "num_hidden_layers": 8,
                "num_attention_heads": 16,
                "num_key_value_heads": 2,
                "vocab_size": 151936,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 1000000.0,
                    "mrope_section": [16, 24, 24],
                },
            },
            "vision_config": {
                "hidden_size": 1280,
                "intermediate_size": 3420,
                "depth": 8,
                "num_heads": 16,
                "out_hidden_size": 2048,
                "fullatt_block_indexes": [3, 7],
            },
        },
    ),
}
MODELS |= {f"qwen3.5-{name.lower()}": ("Qwen3_5", sizes) for name, sizes in HYBRIDS.items()}
NAMES = {
    "Gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM"),
    "Qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM"),
    "Qwen2_5_VL": ("Qwen2_5_VLConfig", "Qwen2_5_VLForConditionalGeneration"),
}
"""Classes of a family that does not name them as most do."""
ATTENTION = {"GptOss": "eager"}  # SDPA has no sinks
PATCHES = 32  # of a picture along each side, of which 2 x 2 become a token
WARM_STEPS = 3


@dataclass(frozen=True)
class Run:
    """One measurement: ``model:batchxtokens[+checkpointing]`` under one variant."""

    model: str
    batch: int
    tokens: int
    checkpointing: bool

    @classmethod
    def parse(cls, text: str) -> Run:
        """From the command line's form."""
        name, _, size = text.partition(":")
        size, _, extra = size.partition("+")
        batch, _, tokens = size.partition("x")
        if name not in MODELS or not (batch.isdigit() and tokens.isdigit()):
            raise ValueError(
                f"a run is MODEL:BATCHxTOKENS[+checkpointing] with a model of "
                f"{', '.join(MODELS)}; got {text!r}"
            )
        if extra not in ("", "checkpointing"):
            raise ValueError(f"only +checkpointing is known, got {text!r}")
        return cls(name, int(batch), int(tokens), bool(extra))

    def __str__(self) -> str:
        extra = "+checkpointing" if self.checkpointing else ""
        return f"{self.model}:{self.batch}x{self.tokens}{extra}"


def _ours(model: Any, **choices: Any) -> Any:
    import liger_multi

    liger_multi.patch(model, **choices)
    return model


def _with_attention(model: Any) -> Any:
    from liger_multi.patching import register_attention

    register_attention()
    model.set_attn_implementation("liger_multi")
    return _ours(model)


def _compiled(then: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda model: torch.compile(then(model))


VARIANTS: dict[str, Callable[[Any], Any]] = {
    "stock": lambda model: model,
    "liger": harness.liger,
    "ours": _ours,
    "ours+float8": functools.partial(_ours, linear_float8=True),
    "stock+compile": _compiled(lambda model: model),
    "liger+compile": _compiled(harness.liger),
    "ours+compile": _compiled(_ours),
    "ours+attention": _with_attention,
    "ours+attention+compile": _compiled(_with_attention),
}


def build(run: Run, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Any:
    """The model with random weights, made on its device."""
    import transformers

    family, sizes = MODELS[run.model]
    sizes = dict(sizes)
    text = sizes.get("text_config")
    if text is None:
        sizes = {"max_position_embeddings": max(2048, run.tokens), **sizes}
    names = NAMES.get(family, (f"{family}Config", f"{family}ForCausalLM"))
    config, class_name = (getattr(transformers, name) for name in names)
    config = config(**sizes)
    config._attn_implementation = ATTENTION.get(family, "sdpa")
    torch.manual_seed(0)
    with torch.device(device):
        model = class_name._from_config(config, dtype=dtype)
    model.train()
    model.config.get_text_config().use_cache = False
    if run.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def pictures(model: Any, ids: Tensor) -> dict[str, Tensor]:
    """A picture in every sequence, whose tokens are the first; nothing for a model of text."""
    token = getattr(model.config, "image_token_id", None)
    if token is None:
        return {}
    vision = model.config.vision_config
    count, width = ids.shape[0], 3 * vision.temporal_patch_size * vision.patch_size**2
    ids.masked_fill_(ids == token, 0)
    ids[:, : (PATCHES // vision.spatial_merge_size) ** 2] = token
    return {
        "pixel_values": torch.randn(
            count * PATCHES**2, width, device=ids.device, dtype=torch.bfloat16
        ),
        "image_grid_thw": torch.tensor([[1, PATCHES, PATCHES]] * count, device=ids.device),
        "mm_token_type_ids": (ids == token).to(torch.int32),
        "labels": ids.masked_fill(ids == token, -100),
    }


class Training:
    """A model under one variant, trained some steps at a time, in turns with other processes.

    Between two turns it leaves the device's memory. A compiled model keeps its weights alone, for
    its graphs hold them; the others are built anew, with the weights that they began with.
    """

    def __init__(self, run: Run, variant: str, limit_gb: float | None) -> None:
        self.run, self.variant, self.limit_gb = run, variant, limit_gb
        self.device = device_of()
        self.model: Any = None

    def turn(self, steps: int) -> dict[str, Any]:
        """Times of some steps, the peak of memory and the last loss; or why there are none.

        Without steps it compiles: forward and backward run, and the weights stay as they are.
        """
        failure = None
        try:
            return self.train(steps)
        except Exception as error:
            memory = "out of memory" in str(error)
            failure = "out of memory" if memory else f"{type(error).__name__}: {error}"[:200]
            traceback.print_exc()
        finally:
            self.leave(failure is not None)
        return {"failure": failure}

    def train(self, steps: int) -> dict[str, Any]:
        """The same, without what follows a turn."""
        device = self.device
        limit_memory(device, (self.limit_gb or 0) * 1e9)
        if self.model is None:
            self.model = VARIANTS[self.variant](build(self.run, device))
        optimizer = adamw(self.model.parameters(), device)
        generator = torch.Generator(device).manual_seed(1)

        def step() -> Tensor:
            loss: Tensor = self.model(**self.batch(generator)).loss
            loss.backward()
            if steps:
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return loss.detach()

        return timed_steps(step, device, steps, WARM_STEPS)

    def batch(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Random tokens, and pictures where the model sees them."""
        vocabulary, run = MODELS[self.run.model][1]["vocab_size"], self.run
        ids = torch.randint(
            vocabulary, (run.batch, run.tokens), generator=generator, device=self.device
        )
        return {"input_ids": ids, "labels": ids, **pictures(self.model, ids)}

    def leave(self, failed: bool) -> None:
        """Free what the next process needs."""
        if failed or not compiled(self.variant):
            self.model = None
        release(self.device)


def child(run: Run, variant: str, limit_gb: float | None) -> None:
    """Take a turn for every line of the input, which says how many steps."""
    training = Training(run, variant, limit_gb)
    for text in sys.stdin:
        print(json.dumps(training.turn(int(text))), flush=True)


class Turns:
    """What the turns of a run under one variant found."""

    def __init__(self, run: Run, variant: str, cards: int = 1) -> None:
        self.run, self.variant, self.cards = run, variant, cards
        self.turns: list[dict[str, Any]] = []
        self.failure: str | None = None

    def ask(self, steps: int) -> None:
        """Begin a turn, where that can be done ahead of the answer."""

    def answer(self) -> dict[str, Any]:
        """What the turn found, once it has ended."""
        return {}

    def measure(self, steps: int) -> dict[str, Any]:
        """One turn."""
        self.ask(steps)
        return self.answer()

    def turn(self, steps: int) -> None:
        """Measure some steps, unless an earlier turn failed."""
        if self.failure is None:
            start = time.perf_counter()
            answer = self.measure(steps)
            self.failure = answer.get("failure")
            self.turns.append({**answer, "turn": time.perf_counter() - start})

    @property
    def spent(self) -> str:
        """Seconds of every turn, building and warming up included."""
        return ", ".join(f"{turn['turn']:.0f}" for turn in self.turns) + " s"

    def result(self) -> dict[str, Any]:
        """Medians of all turns; a failure is a row too."""
        if self.failure is not None:
            return {"failure": self.failure}
        return medians(self.turns, self.cards * self.run.batch * self.run.tokens)

    def end(self) -> None:
        """Let processes go."""


class Worker(Turns):
    """A process of its own for a run under one variant."""

    def __init__(self, run: Run, variant: str, limit_gb: float | None) -> None:
        super().__init__(run, variant)
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed with the process)
        command = [sys.executable, "-m", "benchmarks.models", "--child", str(run), variant]
        command += [] if limit_gb is None else ["--limit-gb", str(limit_gb)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=self.errors, text=True
        )

    def ask(self, steps: int) -> None:
        """Begin a turn."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(f"{steps}\n")
            self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """What the turn found, once it has ended."""
        assert self.process.stdout is not None
        for text in self.process.stdout:
            if text.startswith("{"):
                return json.loads(text)  # type: ignore[no-any-return]
        self.errors.seek(0)
        lines = self.errors.read().strip().splitlines() or ["the process ended without a word"]
        errors = [text for text in lines if re.match(r"[\w.]*Error\b", text)]
        return {"failure": (errors or lines)[-1][:200]}

    def end(self) -> None:
        """Let the process go."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait()
        self.errors.close()


# --- several cards ---


def sharded(run: Run, variant: str, device: torch.device, mesh: Any) -> Any:
    """The model of a variant in fp32, its layers and the rest sharded over the mesh."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = VARIANTS[variant](build(run, device, torch.float32))
    half = torch.float32 if device.type == "cpu" else torch.bfloat16
    policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32)
    for layer in model.get_decoder().layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def train_sharded(run: Run, variant: str, steps: int) -> dict[str, Any]:
    """Seconds of every step, the peak of this card and the last loss; a step ends on all cards."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    device = device_of()
    if device.type != "cpu":
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        device = torch.device(device.type, int(os.environ["LOCAL_RANK"]))
    mesh = init_device_mesh(device.type, (int(os.environ["WORLD_SIZE"]),))
    model = sharded(run, variant, device, mesh)
    optimizer = adamw(model.parameters(), device)
    generator = torch.Generator(device).manual_seed(1 + dist.get_rank())
    vocabulary = MODELS[run.model][1]["vocab_size"]

    def step() -> Tensor:
        ids = torch.randint(vocabulary, (run.batch, run.tokens), generator=generator, device=device)
        return train_step(model, ids, optimizer)

    return timed_steps(step, device, steps, WARM_STEPS, dist.barrier)


def rank(arguments: Sequence[str]) -> int:
    """One process of a turn over several cards; the first prints what all found."""
    import torch.distributed as dist

    name, variant, steps = arguments
    try:
        report = train_sharded(Run.parse(name), variant, int(steps))
    except torch.OutOfMemoryError:
        print(json.dumps({"failure": "out of memory"}), flush=True)
        os._exit(1)  # the other cards wait for this one
    reports: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(reports, report)
    if dist.get_rank() == 0:
        peak = max(one["peak_bytes"] or 0 for one in reports)
        print(json.dumps({**report, "peak_bytes": peak}), flush=True)
    dist.destroy_process_group()
    return 0


class Cards(Turns):
    """The same over several cards, every turn in processes of its own, one a card."""

    def measure(self, steps: int) -> dict[str, Any]:
        """One turn; a failure is an answer too."""
        command = ["torch.distributed.run", "--standalone", f"--nproc-per-node={self.cards}"]
        command += ["-m", "benchmarks.models", "rank", str(self.run), self.variant, str(steps)]
        return harness.child(*command)


def compiled(variant: str) -> bool:
    """Whether the variant passes through ``torch.compile``."""
    return variant.endswith("+compile")


def in_turns(workers: Sequence[Turns], rounds: int, steps: int) -> Iterator[int]:
    """Give every process its turns, one after the other; those that compile do so together."""
    compiling = [one for one in workers if compiled(one.variant)]
    for one in compiling:
        one.ask(0)
    for one in compiling:
        one.answer()  # what failed for want of memory is tried again alone
    for number in range(rounds):
        for one in workers[:: 1 if number % 2 == 0 else -1]:
            one.turn(steps)
        yield number


def line(run: Run, variant: str, measured: dict[str, Any], baseline: dict[str, Any]) -> str:
    """A row of the table."""
    if "failure" in measured:
        return f"{run!s:38s} {variant:14s} {measured['failure']}"
    speed, base = measured["tokens_per_second"], baseline.get("tokens_per_second")
    ratio = f"{speed / base:6.3f}" if base else "     -"
    peak = measured["peak_bytes"]
    memory = f"{peak / 2**30:8.2f} GiB" if peak else "-"
    return (
        f"{run!s:38s} {variant:14s} {speed:10.0f} tok/s {ratio} x stock  {memory:>12s}  "
        f"loss {measured['loss']:.4f}  +-{measured['spread_percent'] / 2:.1f} %"
    )


def whole_models(arguments: Sequence[str]) -> int:
    """Measure every run under every variant, print a table and keep the rows."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.models", description=__doc__)
    parser.add_argument(
        "runs",
        nargs="*",
        default=["tiny:2x32"],
        help="MODEL:BATCHxTOKENS[+checkpointing]; readme: those of README's table on one card",
    )
    parser.add_argument("--variants", default="stock,liger,ours")
    parser.add_argument("--steps", type=int, default=4, help="of a turn, beside those to warm up")
    parser.add_argument("--rounds", type=int, default=3, help="turns of every variant")
    parser.add_argument(
        "--limit-gb", type=float, help="memory that a process may take, in 1e9 bytes"
    )
    parser.add_argument("--cards", type=int, help="over which parameters are sharded, also one")
    store.add_options(parser)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        child(Run.parse(options.runs[0]), options.runs[1], options.limit_gb)
        return 0
    variants, texts = options.variants.split(","), options.runs
    if texts == ["readme"]:
        from benchmarks.tables.performance import DENSE, MIXTURE

        texts = [*DENSE, MIXTURE]
        if importlib.util.find_spec("liger_kernel") is None:
            variants = [name for name in variants if not name.startswith("liger")]
            print("Liger-Kernel is not installed: its column stays empty", flush=True)
    try:
        runs = [Run.parse(text) for text in texts]
        unknown = [name for name in variants if name not in VARIANTS]
        if unknown:
            raise ValueError(f"unknown variant {unknown[0]!r}; known: {', '.join(VARIANTS)}")
    except ValueError as wrong:
        parser.error(str(wrong))
    return report(runs, variants, options)


def report(runs: list[Run], variants: list[str], options: argparse.Namespace) -> int:
    """Run everything, and print how it went; what is done is kept after every round."""
    # all load their packages at once; the device's memory is taken at the first turn
    several = options.cards is not None
    workers: dict[Run, list[Turns]] = {
        run: [
            Cards(run, name, options.cards) if several else Worker(run, name, options.limit_gb)
            for name in variants
        ]
        for run in runs
    }
    head = store.head("several-cards" if several else "models", options, device_of())
    head |= {"limit_gb": options.limit_gb}
    rows: list[dict[str, Any]] = []
    paths: list[Path] = []
    for run, own in workers.items():
        for _ in in_turns(own, options.rounds, options.steps):
            results = {one.variant: one.result() for one in own}
            places = {"cards": options.cards} if several else {}
            new = [
                {"run": str(run), **places, "variant": name, **row} for name, row in results.items()
            ]
            paths = store.keep({**head, "rows": rows + new}, options)
        rows += new
        for one in own:
            text = line(run, one.variant, results[one.variant], results.get("stock", {}))
            print(f"{text}  turns of {one.spent}", flush=True)
            one.end()
    for file in paths:
        sys.stdout.write(f"written to {file}\n")
    return int(any("failure" in row and row["variant"] != "stock" for row in rows))


# --- host time ---

BATCHES, CALLS = 200, 10


def stub_launches() -> None:
    """Let every launch of a Triton kernel find a compiled kernel that does nothing."""
    import triton
    from triton.backends.compiler import GPUTarget

    from liger_multi.backends.triton.common import launching, specialization

    class Compiled(dict[Any, Any]):
        def get(self, key: Any, default: Any = None) -> Any:
            return (_nothing, None, None, _nothing, None)

    card = GPUTarget("cuda", 90, 32)
    triton.runtime.driver._active = SimpleNamespace(get_current_target=lambda: card)
    launching._classes = specialization.ArgumentClasses(specialization.specialize_for_target())
    launching._compiled = Compiled()


def _nothing(*_: Any) -> None:
    return None


def timed(call: Call, wait: Call) -> float:
    """Microseconds of one call: the least of many batches, which others on the host disturb."""
    best = float("inf")
    # a device has a thread of its own for backward; without one, other processes do not count
    clock = time.thread_time if wait is _nothing else time.perf_counter
    for _ in range(BATCHES):
        wait()
        start = clock()
        for _ in range(CALLS):
            call()
        best = min(best, clock() - start)
    return 1e6 * best / CALLS


def both_ways(name: str, forward: Call, leaves: list[Tensor], wait: Call) -> str:
    """Time of a forward with gradient, and of its backward."""
    out = forward()
    outs = [y for y in (out if isinstance(out, tuple) else (out,)) if y.requires_grad]
    upstream = [torch.ones_like(y) for y in outs]

    def backward() -> None:
        torch.autograd.grad(outs, leaves, upstream, retain_graph=True)

    return f"{name:28} forward {timed(forward, wait):7.1f} backward {timed(backward, wait):7.1f} us"


class _Bare(torch.autograd.Function):
    """What an operator with one launch each way cannot do without."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x.new_empty(x.shape)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return x.new_empty(x.shape), weight.new_empty(weight.shape)


def time_operators(device: torch.device, wait: Call) -> None:
    """One line an operator, in the sizes of a layer of Qwen2-0.5B with a sequence of 512."""
    from liger_multi import ops

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=torch.bfloat16).requires_grad_()

    small = device.type == "cpu"  # GEMMs are no part of what a stub leaves out
    rows, hidden, inner = (16, 32, 64) if small else (512, 896, 4864)
    x, weight = draw(1, rows, hidden), draw(hidden)
    gate, up = draw(1, rows, inner), draw(1, rows, inner)
    layers = [draw(inner, hidden), draw(inner, hidden), draw(hidden, inner)]
    q, k = (draw(1, rows, n, 64).detach().transpose(1, 2).requires_grad_() for n in (14, 2))
    cos, sin = (draw(1, rows, 64).detach() for _ in range(2))
    bare: Any = _Bare.apply
    silu, linear = torch.nn.functional.silu, torch.nn.functional.linear

    def stock_mlp() -> Tensor:
        return linear(silu(linear(x, layers[0])) * linear(x, layers[1]), layers[2])

    def mlp_in_steps() -> Tensor:
        return linear(ops.swiglu(linear(x, layers[0]), linear(x, layers[1])), layers[2])

    cases: tuple[tuple[str, Call, list[Tensor]], ...] = (
        ("bare Function", lambda: bare(x, weight), [x, weight]),
        ("F.rms_norm", lambda: torch.rms_norm(x, (hidden,), weight, 1e-6), [x, weight]),
        ("rms_norm", lambda: ops.rms_norm(x, weight, 1e-6), [x, weight]),
        ("fused_add_rms_norm", lambda: ops.fused_add_rms_norm(x, x, weight), [x, weight]),
        ("layer_norm", lambda: ops.layer_norm(x, weight, weight), [x, weight]),
        ("swiglu", lambda: ops.swiglu(gate, up), [gate, up]),
        ("rope", lambda: ops.rope(q, k, cos, sin), [q, k]),
        ("MLP of PyTorch", stock_mlp, [x, *layers]),
        ("MLP around swiglu", mlp_in_steps, [x, *layers]),
        ("gated_mlp", lambda: ops.gated_mlp(x, *layers), [x, *layers]),
    )
    for name, call, leaves in cases:
        print(both_ways(name, call, leaves, wait), flush=True)


OTHERS_OFF = {"rms_norm": False, "rope": False, "fused_linear_cross_entropy": False}
HOST_VARIANTS: dict[str, dict[str, Any] | None] = {
    "stock": None,
    "ours": {},
    "ours, MLPs in steps": {"swiglu": {"whole": False}},
    "only norms": {**OTHERS_OFF, "rms_norm": True, "swiglu": False},
    "only rotary": {**OTHERS_OFF, "rope": True, "swiglu": False},
    "only MLPs whole": {**OTHERS_OFF, "swiglu": {"whole": True}},
    "only MLPs in steps": {**OTHERS_OFF, "swiglu": {"whole": False}},
    "only the loss": {**OTHERS_OFF, "fused_linear_cross_entropy": True, "swiglu": False},
}


class Trained:
    """A model under one variant, with the times of its steps in milliseconds."""

    def __init__(self, name: str, run: Run, device: torch.device) -> None:
        import liger_multi

        self.name, self.model = name, build(run, device)
        options = HOST_VARIANTS[name]
        if options is not None:
            liger_multi.patch(self.model, **options)
        self.optimizer = adamw(self.model.parameters(), device)
        self.times: list[tuple[float, ...]] = []

    def step(self, ids: Tensor, wait: Call) -> None:
        """Enqueue forward, backward and the optimizer's step, and wait for the device."""
        times = [time.perf_counter()]
        loss = self.model(input_ids=ids, labels=ids).loss
        times.append(time.perf_counter())
        loss.backward()
        times.append(time.perf_counter())
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        wait()
        times.append(time.perf_counter())
        self.times.append((*[1e3 * (b - a) for a, b in itertools.pairwise(times)],))

    def line(self, run: Run) -> str:
        """Medians; the time of a step is that of host and device."""
        forward, backward, rest = (statistics.median(part) for part in zip(*self.times))
        whole = statistics.median(sum(times) for times in self.times)
        least = min(sum(times) for times in self.times)
        speed = run.batch * run.tokens / whole * 1e3
        return (
            f"{run!s:20} {self.name:20} forward {forward:6.1f} backward {backward:6.1f} then "
            f"{rest:6.1f} step {whole:6.1f} (least {least:6.1f}) ms {speed:8.0f} tokens/s"
        )


def time_models(
    names: Sequence[str], variants: Sequence[str], steps: int, device: torch.device, wait: Call
) -> None:
    """Every variant of every run, step by step in turns, in one process."""
    runs = [Run.parse(name) for name in names]
    longest = max(runs, key=lambda run: run.tokens)
    trained = [Trained(name, longest, device) for name in variants]
    for run in runs:
        for _, one in itertools.product(range(3 + steps), trained):
            ids = torch.randint(500, (run.batch, run.tokens), device=device)
            wait()
            one.step(ids, wait)
        for one in trained:
            del one.times[:3]
            print(one.line(run), flush=True)
            one.times.clear()


def host_time(arguments: Sequence[str]) -> int:
    """Print host times of operators, and of steps of small models.

    On an accelerator calls are enqueued without a wait. With TRITON_INTERPRET=1, which lets
    Triton's operators take tensors of a CPU, they run there with launches that do nothing, so that
    what is left is our Python, PyTorch's bookkeeping and allocations.
    """
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.models host-time", description=host_time.__doc__
    )
    parser.add_argument("runs", nargs="*", help="MODEL:BATCHxTOKENS to train some steps of")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--variant", action="append", choices=HOST_VARIANTS)
    options = parser.parse_args(arguments)
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    device = torch.device("cpu") if interpreted else device_of()
    import liger_multi

    if device.type == "cpu":
        if not interpreted:
            parser.error("on a CPU, set TRITON_INTERPRET=1")
        liger_multi.configure({"default": "triton"})
        stub_launches()
        torch.set_num_threads(1)
    wait: Call = _nothing if device.type == "cpu" else torch.accelerator.synchronize
    time_operators(device, wait)
    if options.runs:
        variants = options.variant or list(HOST_VARIANTS)
        time_models(options.runs, variants, options.steps, device, wait)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure whole models, or host time."""
    commands = {"": whole_models, "host-time": host_time, "rank": rank}
    return store.run_command(commands, arguments)


if __name__ == "__main__":
    sys.exit(main())
