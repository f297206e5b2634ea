"""Whole steps of a model and training runs under each setting of ``deterministic``.

Parts of :mod:`benchmarks.bitwise`, which runs them in processes of their own.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import liger_multi
from benchmarks import bitwise_operators as operators
from benchmarks import models
from benchmarks.bitwise_operators import Place, Row, first_line
from liger_multi.dispatch.config import use
from liger_multi.patching import options, register_attention
from liger_multi.testing.bitwise import same_bits
from liger_multi.testing.training import batches, train_twice

WHOLE, TINY = models.Run("llama-3.2-1b", 2, 4096, False), models.Run("tiny", 2, 32, False)
WARM, STEPS = 2, 6
Scope = Callable[[], AbstractContextManager[Any]]


@dataclass
class Variant:
    """A model under a setting, with the times of its steps.

    Attributes:
        name: As the rows have it.
        model: It may be that of other variants, too; only one of them steps at a time.
        optimizer: Of the model.
        scope: In force around every step.
        note: What a reader has to know of it.
        failure: Why it has no time.
        times: Seconds of every step.
        row: What else was found.
    """

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scope: Scope
    note: str = ""
    failure: str = ""
    times: list[float] = field(default_factory=list)
    row: Row = field(default_factory=dict)


def patched(run: models.Run, device: torch.device) -> tuple[nn.Module, str]:
    """The model with all of our operators, and what it lacks."""
    register_attention()
    model = models.build(run, device)
    model.set_attn_implementation("liger_multi")
    if "linear" in options.BUILT_IN:
        liger_multi.patch(model, linear=True)
        return model, ""
    liger_multi.patch(model)
    return model, "linear layers are the library's"


class PeerHead(nn.Module):
    """An LM head by the peer's GEMM, which keeps the weight that the embedding has."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, hidden: Tensor) -> Tensor:
        """Logits; the peer wants the weight as (inputs, outputs)."""
        import sgemm_bi  # type: ignore[import-not-found, unused-ignore]

        out: Tensor = sgemm_bi.deterministic_linear(
            hidden, self.weight.t().contiguous(), None, tensor_cores=True
        )
        return out


def with_peer(run: models.Run, device: torch.device) -> nn.Module:
    """The unpatched model with the linear layers of ``sgemm-bi``, tensor cores on."""
    import sgemm_bi

    model = models.build(run, device)
    for _, parent in list(model.named_modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and name != "lm_head":
                setattr(parent, name, sgemm_bi.Linear.from_torch(child, tensor_cores=True))
    model.lm_head = PeerHead(model.lm_head.weight)
    return model  # type: ignore[no-any-return]


@contextlib.contextmanager
def torch_deterministic(fill: bool) -> Iterator[None]:
    """PyTorch's own switch, with or without the filling of uninitialized memory."""
    flags = torch.utils.deterministic
    before = flags.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)
    flags.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        flags.fill_uninitialized_memory = before  # type: ignore[attr-defined]


def variants(run: models.Run, device: torch.device) -> Iterator[Variant]:
    """Patched under each setting, unpatched, unpatched under PyTorch's switch, and the peer."""

    def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-6, fused=device.type == "cuda")

    model, note = patched(run, device)
    optimizer = optimizer_of(model)
    settings: dict[str, bool | str] = {"default": False, "deterministic": True, "rows": "rows"}
    for name, value in settings.items():
        yield Variant(name, model, optimizer, partial(use, deterministic=value), note)
    baseline = models.build(run, device)
    optimizer = optimizer_of(baseline)
    yield Variant("baseline", baseline, optimizer, contextlib.nullcontext)
    filled, unfilled = (partial(torch_deterministic, fill) for fill in (True, False))
    note = "torch.use_deterministic_algorithms"
    yield Variant("baseline-deterministic", baseline, optimizer, filled, note)
    note += ", fill_uninitialized_memory off"
    yield Variant("baseline-deterministic-unfilled", baseline, optimizer, unfilled, note)
    library = operators.sgemm_bi()
    if isinstance(library, str):
        yield Variant("sgemm-bi", baseline, optimizer, contextlib.nullcontext, failure=library)
        return
    try:
        peer = with_peer(run, device)
    except Exception as failure:
        text = first_line(failure)
        yield Variant("sgemm-bi", baseline, optimizer, contextlib.nullcontext, failure=text)
        return
    note = "linear layers of sgemm-bi, tensor cores; attention, norms and loss unpatched"
    yield Variant("sgemm-bi", peer, optimizer_of(peer), contextlib.nullcontext, note)


class Steps:
    """Steps of several variants in turns, in one process."""

    def __init__(self, run: models.Run, device: torch.device) -> None:
        self.run, self.device = run, device
        self.module = torch.get_device_module(device)
        vocabulary = models.MODELS[run.model][1]["vocab_size"]
        generator = torch.Generator(device).manual_seed(1)
        shape = (run.batch, run.tokens)
        self.ids = torch.randint(vocabulary, shape, generator=generator, device=device)

    def wait(self) -> None:
        """For the device."""
        if self.device.type != "cpu":
            self.module.synchronize()

    def gradients(self, one: Variant) -> list[Tensor]:
        """The loss and all gradients of one forward and backward."""
        one.optimizer.zero_grad(set_to_none=True)
        with one.scope():
            loss = one.model(input_ids=self.ids, labels=self.ids).loss
            loss.backward()
        gradients = [p.grad for p in one.model.parameters() if p.grad is not None]
        one.optimizer.zero_grad(set_to_none=True)
        return [loss.detach(), *gradients]

    def bits(self, one: Variant) -> Row:
        """Whether loss and gradients repeat, and whether a sequence depends on the others."""
        repeat = same_bits(self.gradients(one), self.gradients(one))
        base: Any = one.model
        with one.scope(), torch.no_grad():
            whole = base.model(input_ids=self.ids).last_hidden_state
            alone = [base.model(input_ids=ids[None]).last_hidden_state for ids in self.ids]
        rows = all(same_bits(whole[i : i + 1], part) for i, part in enumerate(alone))
        return {"repeat": repeat, "rows": rows}

    def step(self, one: Variant) -> Tensor:
        """Forward, backward and the optimizer's step."""
        with one.scope():
            loss: Tensor = one.model(input_ids=self.ids, labels=self.ids).loss
            loss.backward()
            one.optimizer.step()
            one.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def timed(self, one: Variant) -> None:
        """One step, with its time, its loss and what it held beyond what was there."""
        memory = self.device.type == "cuda"
        self.wait()
        if memory:
            self.module.reset_peak_memory_stats()
            before = self.module.memory_allocated()
        start = time.perf_counter()
        loss = self.step(one)
        self.wait()
        one.times.append(time.perf_counter() - start)
        one.row["loss"] = loss.item()
        if memory:
            one.row["extra_bytes"] = self.module.max_memory_allocated() - before


def step(place: Place) -> Iterator[Row]:
    """Rows of the whole step: time, memory and bits of every variant."""
    run = TINY if place.tiny else WHOLE
    steps, every = Steps(run, place.device), list(variants(run, place.device))
    warm, count = (1, 2) if place.tiny else (WARM, STEPS)
    for turn in range(warm + count):
        for one in every[:: 1 if turn % 2 == 0 else -1]:
            if not one.failure:
                try:
                    steps.timed(one)
                except Exception as failure:
                    one.failure = first_line(failure)
                    one.optimizer.zero_grad(set_to_none=True)
    for one in every:
        row: Row = {"part": "step", "name": run.model, "shape": f"{run.batch}x{run.tokens}"}
        row |= {"variant": one.name} | ({"note": one.note} if one.note else {})
        if not one.failure:
            with contextlib.suppress(torch.OutOfMemoryError):
                one.row |= steps.bits(one)
        times = sorted(1e3 * seconds for seconds in one.times[warm:])
        if one.failure or not times:
            yield row | {"failure": one.failure or "no step was timed"}
            continue
        median = (times[(len(times) - 1) // 2] + times[len(times) // 2]) / 2
        tokens = run.batch * run.tokens / median * 1e3
        spread = (times[-1] - times[0]) / 2
        row |= {"both_ms": median, "both_spread_ms": spread, "calls": len(times)}
        yield row | {"tokens_per_second": tokens} | one.row


# --- training ---

_SMALL: dict[str, Any] = {
    "vocab_size": 223,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "output_router_logits": True,
    "mlp_only_layers": [0],
}
SMALL: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", _SMALL),
    "qwen3_moe": ("Qwen3Moe", {**_SMALL, **_EXPERTS}),
}
RUNS = tuple(f"{kind}{extra}" for kind in SMALL for extra in ("", "+checkpointing"))


def small(name: str, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """A patched model with random weights, the same every time."""
    import transformers

    base, _, extra = name.partition("+")
    family, sizes = SMALL[base]
    config = getattr(transformers, f"{family}Config")(**sizes)
    register_attention()
    torch.manual_seed(0)
    model: Any = getattr(transformers, f"{family}ForCausalLM")(config).to(device, dtype).train()
    model.set_attn_implementation("liger_multi")
    keys = {"linear": True} if "linear" in options.BUILT_IN else {}
    liger_multi.patch(model, **keys)
    model.config.use_cache = False
    if extra:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model  # type: ignore[no-any-return]


def training(name: str, place: Place) -> Iterator[Row]:
    """Whether two training runs of a small model end with equal bits."""
    dtype = torch.float32 if place.device.type == "cpu" else place.dtype
    vocabulary = _SMALL["vocab_size"]
    first, second = train_twice(
        lambda: small(name, place.device, dtype),
        lambda: batches(vocabulary, place.device),
    )
    row: Row = {"part": "training", "name": name, "shape": "100 steps", "variant": "deterministic"}
    yield row | {
        "repeat": first == second,
        "first_loss": first.first,
        "last_loss": first.last,
        "digests": [first.parameters, second.parameters],
        "loss_digests": [first.losses, second.losses],
    }
