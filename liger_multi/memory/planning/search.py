"""Search ways to train a model, cheap ones first, for the fastest that fits."""

from __future__ import annotations

import contextlib
import itertools
import math
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch

from liger_multi.dispatch.registry import device_type
from liger_multi.dispatch.stored import assumed_memory
from liger_multi.dtypes import short_name
from liger_multi.errors import PlanError, check_name, shown
from liger_multi.memory.measure import format_bytes
from liger_multi.memory.planning.cost import Card, card_of, host_bytes
from liger_multi.memory.planning.predict import Predictor
from liger_multi.memory.planning.result import (
    PRECISIONS,
    PURE,
    SPREADS,
    Candidate,
    Settings,
    TrainingPlan,
)
from liger_multi.memory.planning.shapes import Shapes
from liger_multi.memory.planning.store import Store
from liger_multi.memory.recompute import POLICIES
from liger_multi.memory.setup import OPTIMIZERS, positive
from liger_multi.memory.simulation import in_training
from liger_multi.memory.sizes import Source, beyond

# --- the search ---

HEADROOM = 0.06  # of the memory: the driver's context, fragmentation, buckets
CHUNK_BYTES = (5 * 2**28, 2**28)  # of logits: what the automatic choice takes at most, and less
LARGEST_MICRO, LARGEST_PASS = 32, 2**16  # sequences and tokens, where nobody asks for a number
LEAST_ROWS = 1024  # of logits at a time: thinner products are slow
SMALL = 1 / 64  # of the memory: what is less of it needs no sharing over devices
STEP = 256  # tokens, of the longest sequence
TRIES = 6
MOST = 2**16
MOST_CHUNKS = 256  # of a loss, where limits are searched
UNRELATED = ("_name_or_path", "transformers_version")  # of a configuration


@dataclass(frozen=True)
class Space:
    """The search space.

    Attributes:
        precisions: Of :data:`PRECISIONS`.
        policies: Of :data:`liger_multi.memory.POLICIES`.
        patched: Patched, unpatched or both.
        tiled: Whether MLPs may run in tiles.
        offload: Whether activations may wait on the host.
        offload_states: Where optimizer states may stand beside the device.
        attentions: Implementations.
        spreads: Of :data:`SPREADS`, for several devices.
        layouts: ``(tensor, pipeline)``; None: powers of two that fit.
        ranks: Over how many devices the tokens of a sequence may be spread, such as ``(1, 4, 8)``;
            more than one for patched models, without tensor parallelism and pipelines.
    """

    precisions: tuple[str, ...] = ("bf16", "amp", "fp32")
    policies: tuple[str, ...] = tuple(POLICIES)
    patched: tuple[bool, ...] = (True, False)
    tiled: bool = True
    offload: bool = True
    offload_states: tuple[str | None, ...] = (None, "cpu")
    attentions: tuple[str, ...] = ("sdpa",)
    spreads: tuple[str, ...] = ("ddp", "zero1", "zero2", "zero3", "fsdp2")
    layouts: tuple[tuple[int, int], ...] | None = None
    ranks: tuple[int, ...] = (1,)


@in_training
def plan(
    model_or_config: Any,
    memory: str | int | Card,
    devices: int = 1,
    batch: int | None = None,
    sequence: int = 2048,
    *,
    optimizer: str = "adamw",
    precision: str | Sequence[str] | None = None,
    device: str = "cuda",
    host_memory: str | int | None = None,
    headroom: float = HEADROOM,
    space: Space | None = None,
    limits: bool = True,
    compression: bool = False,
    on_progress: Callable[[str], None] | None = None,
    cache: bool = False,
    processes: int = 1,
) -> TrainingPlan:
    """The fastest way to train a model that fits, and the alternatives that were considered.

    Peaks come from the simulation of :func:`liger_multi.memory.estimate`, of three layers where
    layers repeat; times from a model that only ranks (``docs/planning.md``).

    Args:
        model_or_config: A configuration of a Hugging Face model, or a causal language model with
            adapters and frozen parts as it is (not patched yet); nothing of it is changed. Or a
            :class:`liger_multi.memory.sizes.Source` of a configuration.
        memory: Of one device: a size such as ``"24GiB"``, a card such as ``"h200"``, or both as
            ``"h200:24GiB"``.
        devices: Of one host.
        batch: Sequences in one optimizer step, over all devices and accumulated; a multiple of
            what the devices take. None: what is fastest for each way.
        sequence: Tokens of each.
        optimizer: As of :func:`liger_multi.memory.estimate`.
        precision: One of ``"bf16"``, ``"fp8"``, ``"amp"``, ``"fp16"``, ``"fp32"`` or several; None:
            what the card is fast in, and fp32. ``"fp8"`` is bf16 whose wide linear layers multiply
            in FP8 and keep frozen weights in it. ``"bfloat16"`` and the like are the same names.
        device: Device type.
        host_memory: Of the host for each device, such as ``"128GiB"``, within which states and
            activations may be offloaded. None: what this machine has for each of its devices, or
            128 GiB where it has none.
        headroom: Share of the memory of devices and host that a plan leaves free.
        space: What may be chosen.
        limits: Whether the largest batch and the longest sequence are looked for.
        compression: Whether files ask engines for their own compression (ZeRO++).
        on_progress: Called with a few words before every simulation, as for a progress bar.
        cache: Whether simulations of a configuration are kept in the user's cache folder, or the
            one that ``LIGER_MULTI_CACHE`` names, and taken from there; those of a model are not.
        processes: 2 lets a copy of this process simulate one half, where nothing was simulated
            before; on Linux, in a process of one thread that has not used a GPU.

    Raises:
        PlanError: Nothing fits; ``nearest`` is the candidate with the lowest peak, and ``plan`` all
            that was weighed.
        ValueError: An option that is unknown, or two that do not fit.
        TypeError: ``model_or_config`` is neither.
    """
    device_type(device)
    card, size = card_of(memory)
    space = _space(space, precision, card)
    _check(devices, batch, sequence, optimizer, headroom, space)
    _check_float8(space, card, device)
    store = _store(model_or_config, size) if cache else Store()
    source = model_or_config
    if isinstance(source, Source) and not store.names("facts"):
        source = source()
    shapes = Shapes(source, sequence, store)
    host = round(host_bytes(host_memory) * (1 - headroom))
    predictor = Predictor(shapes, card, device, on_progress, host)
    search = _Search(predictor, space, round(size * (1 - headroom)), processes)
    result = TrainingPlan(
        model=shapes.facts.model_type,
        layers=shapes.count,
        card=card.name + (" (nearest in memory)" if card.guessed else ""),
        memory_bytes=size,
        budget_bytes=search.budget,
        devices=devices,
        batch=batch,
        candidates=[],
        compression=compression,
        layer_class=shapes.facts.layer_class,
        vocabulary=shapes.facts.vocabulary,
        host_memory_bytes=host,
    )
    memory_token = assumed_memory.set(size)
    try:
        search.ask(devices, batch, sequence, optimizer)
        result.candidates = search.ranked()
        if result.best.fits and limits:
            result.largest_batch, result.longest_sequence = search.limits(result.best.settings)
            result.most_batch, result.most_sequence = search.limits(result.nearest.settings)
    finally:
        assumed_memory.reset(memory_token)
        shapes.keep()
        store.save()
    result.notes = notes_of(result, card, shapes)
    result.simulations = search.predictor.simulations
    if not result.best.fits:
        nearest = result.nearest
        host_text = f", and {format_bytes(nearest.host_bytes)} on the host" * bool(
            nearest.host_bytes
        )
        raise PlanError(
            f"nothing fits into {format_bytes(search.budget)} of {format_bytes(size)} and "
            f"{format_bytes(host)} of the host for each device: the nearest plan "
            f"({nearest.settings}) needs {format_bytes(nearest.peak_bytes)}{host_text}",
            nearest,
            result,
        )
    return result


def _store(model_or_config: Any, memory: int) -> Store:
    """The store of an architecture; empty for a model with weights and code of its own.

    Pieces of a base in 4 bits depend on the memory of the device.
    """
    if isinstance(model_or_config, Source):
        weights_key = {} if model_or_config.weights is None else {"memory": memory}
        identity = model_or_config.identity
        return Store.of({"of": identity, **weights_key} if weights_key else identity)
    if not hasattr(model_or_config, "to_dict"):
        return Store()
    model_class = type(model_or_config)
    config = {k: v for k, v in model_or_config.to_dict().items() if k not in UNRELATED}
    return Store.of({"class": f"{model_class.__module__}.{model_class.__qualname__}", **config})


def _space(space: Space | None, precision: str | Sequence[str] | None, card: Card) -> Space:
    chosen = space or Space()
    if precision is not None:
        names = (precision,) if isinstance(precision, str) else tuple(precision)
        names = tuple(short_name(name) for name in names)
        chosen = replace(chosen, precisions=names)
    elif not card.bf16 and chosen.precisions == Space().precisions:
        chosen = replace(chosen, precisions=("fp16", "fp32"))
    return chosen


def _check(
    devices: int, batch: int | None, sequence: int, optimizer: str, headroom: float, space: Space
) -> None:
    positive(devices=devices, sequence=sequence, batch=1 if batch is None else batch)
    if not isinstance(headroom, int | float) or not 0 <= headroom < 1:
        raise ValueError(f"headroom must be a share from 0 to below 1, got {shown(headroom)}")
    check_name(ValueError, "optimizer", optimizer, OPTIMIZERS)
    tables: tuple[tuple[str, tuple[str, ...], Any], ...] = (
        ("precision", space.precisions, dict.fromkeys(PRECISIONS)),
        ("spread", space.spreads, dict.fromkeys(SPREADS)),
        ("recompute policy", space.policies, POLICIES),
    )
    for noun, names, table in tables:
        for name in names:
            check_name(ValueError, noun, name, table)
    for ranks in space.ranks:
        positive(ranks=ranks)


def _check_float8(space: Space, card: Card, device: str) -> None:
    """Refuse FP8 where it would save no time."""
    if "fp8" not in space.precisions:
        return
    reason = "precision='fp8' is planned for devices with FP8 GEMMs, got"
    if device == "cpu":
        raise ValueError(f"{reason} device='cpu'; ask for 'bf16' or 'fp32'")
    if not card.products8:
        raise ValueError(f"{reason} {card.name}; ask for {'bf16' if card.bf16 else 'fp16'!r}")
    if not any(space.patched):
        raise ValueError("precision='fp8' is a patch of this library, got space.patched without")


class _Search:
    """The best candidate of every way to train.

    Args:
        predictor: Predicts peaks and times of the model.
        space: The search space.
        budget: Bytes that a plan may take.
        processes: Number of processes that simulate.
        weighed: Whether settings are considered.
    """

    def __init__(
        self,
        predictor: Predictor,
        space: Space,
        budget: int,
        processes: int = 1,
        weighed: Callable[[Settings], bool] = lambda _: True,
    ) -> None:
        self.predictor, self.space, self.budget = predictor, space, budget
        self.processes, self._weighed = processes, weighed
        self.shapes = predictor.shapes
        self._best: dict[Settings, Candidate] = {}
        self._lowest: dict[Settings, Candidate] = {}
        self._tokens = LARGEST_PASS

    def ask(self, devices: int, batch: int | None, sequence: int, optimizer: str) -> None:
        """Evaluate the search space for a number of devices."""
        # of a pass at most: more rows than these would be one chunk as well
        self._tokens = max(LARGEST_PASS, sequence) if batch is None else batch * sequence
        layouts = self._layouts(devices)
        shares = [tensor for tensor, _ in layouts] or [1]
        self.predictor.passes.tensors = min(shares), max(shares)
        plain = Settings(sequence=sequence, optimizer=optimizer, patched=True)
        heads = self.shapes.facts.heads
        computations = [
            replace(plain, precision=precision, tensor=t, pipeline=p, data=data, ranks=ranks)
            for precision in self.space.precisions
            for t, p in layouts
            for ranks in self.space.ranks
            if ranks == 1 or (t == p == 1 and devices % ranks == 0 and heads % ranks == 0)
            for data in [devices // (t * p * ranks)]
            if batch is None or batch % data == 0
            if precision != "fp8" or t == 1  # divided layers stay in 16 bits
        ]
        if self.processes > 1:
            self._simulate_in_two(computations, batch)
        self._weigh(computations, batch)
        if not self._best:
            undivided = [ranks for ranks in self.space.ranks if heads % ranks]
            raise ValueError(
                f"batch={batch} cannot be divided over {devices} devices"
                + f", and the {heads} heads of mixers not over ranks={undivided}" * bool(undivided)
            )

    def _weigh(self, computations: Iterable[Settings], batch: int | None) -> None:
        for plain in computations:
            self._layout(plain, batch, (plain.tensor, plain.pipeline) == (1, 1))

    def _simulate_in_two(self, computations: Sequence[Settings], batch: int | None) -> None:
        """Simulate what the search will need, half of it in a second process.

        Settings with extras share next to no simulation with the others. The first one of all is
        simulated before the process is forked: it imports the model's class, and tells whether
        layers are equal.
        """
        passes = self.predictor.passes
        if not computations or self.shapes.store.names("bodies") or not can_fork():
            return
        for settings in itertools.islice(self._computations(computations[0], True), 1):
            self.predictor.traces(settings)
        earlier = passes.simulations

        def simulate(weighed: Callable[[Settings], bool]) -> tuple[int, Any]:
            half = _Search(self.predictor, self.space, self.budget, weighed=weighed)
            half._tokens = self._tokens
            half._weigh(computations, batch)
            return passes.simulations - earlier, self.shapes.store.entries()

        def elsewhere() -> tuple[int, Any]:
            passes.on_progress = lambda _: None  # one process tells what it does
            return simulate(_has_extras)

        with forked(elsewhere) as result:
            simulate(lambda settings: not _has_extras(settings))
            remote = result()
        if remote is not None:
            passes.take_over(*remote)

    def _layouts(self, devices: int) -> list[tuple[int, int]]:
        if self.space.layouts is not None:
            layouts = list(self.space.layouts)
        else:
            powers = [2**i for i in range(int(math.log2(devices)) + 1)]
            layouts = [(t, p) for t in powers for p in powers if t * p <= devices]
        return [
            (t, p)
            for t, p in layouts
            if devices % (t * p) == 0 and p <= self.shapes.count and self.shapes.divisible(t)
        ]

    def _layout(self, plain: Settings, batch: int | None, first: bool) -> None:
        is_parallel = plain.data * plain.ranks > 1
        spreads = [s for s in self.space.spreads if s != "none"] if is_parallel else ["none"]
        if plain.pipeline > 1:  # its stages hold whole weights of theirs
            spreads = [s for s in spreads if s in ("ddp", "zero1")] or ["none"]
        if plain.tensor > 1:
            spreads = [s for s in spreads if s in ("none", "ddp", "fsdp2")] or ["ddp"]
        for settings in filter(self._weighed, self._computations(plain, first)):
            largest = min(LARGEST_MICRO, max(1, LARGEST_PASS // settings.tokens))
            largest = 2 ** int(math.log2(largest)) if batch is None else batch // settings.data
            self._micros(settings, batch, largest & -largest if batch else largest, spreads)

    def _is_small(self, settings: Settings) -> bool:
        """Whether a whole model and its states take a small share of a device's memory."""
        return self.predictor.shared_bytes(settings) < SMALL * self.budget

    def _micros(
        self, settings: Settings, batch: int | None, largest: int, spreads: Sequence[str]
    ) -> None:
        """One sequence at a time, and as many as fit, by powers of two.

        A batch in one pass is tried whatever fits: it has no gradients that wait for other passes.
        """
        tried = set()

        def fits(micro: int) -> bool:
            tried.add(micro)
            passes = batch // settings.data // micro if batch else self._passes(settings)
            variant = replace(settings, micro_batch=micro, accumulation=passes)
            results = [self._spread(variant, spread) for spread in spreads]  # every one is noted
            return any(results)

        if fits(1) and largest > 1:
            self._more_sequences(fits, largest, max(2, self._guess(settings, 1)))
        if batch and batch // settings.data not in tried:
            fits(batch // settings.data)

    def _more_sequences(self, fits: Callable[[int], bool], largest: int, guess: int) -> None:
        """Two sequences at a time and more, up or down from a guess."""
        micro = min(largest, guess)
        if fits(micro):
            while micro < largest and fits(2 * micro):
                micro *= 2
            return
        while micro > 2:
            micro //= 2
            if fits(micro):
                return

    def _passes(self, settings: Settings) -> int:
        """Accumulated micro-batches where the batch is free: enough to fill a pipeline."""
        return 2 * settings.pipeline if settings.pipeline > 1 else 1

    def _guess(self, settings: Settings, micro: int) -> int:
        """The number of sequences that should fit, a power of two, from the memory of one."""
        growing = self.predictor.growing(replace(settings, micro_batch=micro))
        lowest = self._lowest.get(_group(settings))
        static = (
            0
            if lowest is None
            else sum(lowest.parts.get(name, 0) for name in ("parameters", "optimizer states"))
        )
        ratio = micro * (self.budget - static) / max(1, growing)
        return int(2 ** max(0, math.floor(math.log2(max(1.0, ratio)))))

    def _computations(self, plain: Settings, first: bool) -> Iterator[Settings]:
        """How layers and the head are computed; fewer ways after the first precision."""
        space = self.space
        main = first and plain.precision == space.precisions[0]
        fewer_policies = ("none", "norms_and_mlp", "full")
        for attention in space.attentions:
            for patched in space.patched:
                base = replace(plain, patched=patched, attention=attention)
                if not patched and (plain.precision == "fp8" or plain.ranks > 1):
                    continue
                if not patched:
                    yield from self._policies(base, ("none", "full") if main else ("none",) * first)
                    continue
                wide, narrow = (replace(base, chunk=self._chunk(base, n)) for n in CHUNK_BYTES)
                yield from self._policies(
                    wide if first else narrow, POLICIES if main else fewer_policies
                )
                if main and narrow != wide:
                    yield from self._policies(narrow, ("none", "full"))
                if first and space.tiled and self.shapes.facts.has_mlps:
                    tiles = max(2, -(-plain.tokens // self.shapes.facts.hidden))
                    tiled = replace(narrow, tiles=tiles)
                    yield from self._policies(tiled, ("none", "full") if main else ("full",))
                if first and space.offload:
                    offloaded = replace(narrow, offload_activations=True)
                    attention_policy = ("keep_attention",) * (plain.ranks > 1)
                    yield from self._policies(
                        offloaded, ("none",) * main + ("full", *attention_policy)
                    )

    def _policies(self, base: Settings, names: Iterable[str]) -> Iterator[Settings]:
        for name in names:
            if name in self.space.policies:
                layers = 0 if name == "none" else self.shapes.count
                yield replace(base, recompute=name, layers=layers)

    def _chunk(self, settings: Settings, size: int) -> int:
        """Rows of logits that fit into ``size`` bytes, a power of two."""
        width = 4 if settings.precision == "fp32" else 2
        rows = max(LEAST_ROWS, size // (width * max(1, self.shapes.facts.vocabulary)))
        return int(2 ** int(math.log2(max(1, min(rows, 2 * self._tokens - 1)))))

    def _spread(self, computation: Settings, spread: str) -> bool:
        """Evaluate one way with every place for optimizer states; returns whether any fits."""
        fits = False
        for offload_states in self.space.offload_states:
            if not _exists(computation.precision, spread, offload_states):
                continue
            if computation.precision == "fp8" and spread == "fsdp2" and self.shapes.facts.adapted:
                continue  # shards of a frozen weight are of the dequantized one
            settings = replace(computation, spread=spread, offload_states=offload_states)
            candidate = self.predictor.predict(settings, self.budget)
            if not candidate.fits and settings.layers:
                self._note(candidate)
                continue
            if candidate.fits and settings.layers:
                candidate = self._fewest(settings, candidate)
            self._note(candidate)
            fits = fits or candidate.fits
        return fits

    def _fewest(self, settings: Settings, all_of_them: Candidate) -> Candidate:
        """The same candidate with as few recomputing layers as possible."""
        low, high, best = 0, settings.layers, all_of_them
        while high - low > 1:  # the peak falls with every layer
            middle = (low + high) // 2
            candidate = self.predictor.predict(replace(settings, layers=middle), self.budget)
            if candidate.fits:
                high, best = middle, candidate
            else:
                low = middle
        return best

    def _note(self, candidate: Candidate) -> None:
        s = candidate.settings
        group = _group(s)
        if group not in self._lowest or candidate.peak_bytes < self._lowest[group].peak_bytes:
            self._lowest[group] = candidate
        key = _computation_of(s)
        old = self._best.get(key)
        if old is None or _rank(candidate) < _rank(old):
            self._best[key] = candidate

    def ranked(self) -> list[Candidate]:
        """Candidates that fit, fastest first; then the others, lowest peak first."""
        candidates = sorted(self._best.values(), key=_rank)
        speeds = [self._speed(candidate) for candidate in candidates]
        pairs = zip(speeds, candidates, strict=True)
        fastest = max((speed for speed, candidate in pairs if candidate.fits), default=0.0)
        for candidate, speed in zip(candidates, speeds, strict=True):
            candidate.relative = (fastest or speeds[0]) / speed
        return sorted(candidates, key=_rank_shown)

    def _speed(self, candidate: Candidate) -> float:
        """Tokens per second, capped by those of the same way without offloaded or sharded states.

        Offloaded states, and shards of a small model, only save memory. Side effects of an engine,
        such as 16-bit copies in place of autocast, are not credited to them.
        """
        plain, speed = replace(candidate.settings, offload_states=None), candidate.tokens_per_second
        simpler = [plain] if candidate.settings.offload_states else []
        if plain.level and self._is_small(plain):
            simpler.append(replace(plain, spread="ddp"))
        twins = [self._best.get(_computation_of(settings)) for settings in simpler]
        return min([speed, *(t.tokens_per_second for t in twins if t is not None and t.fits)])

    def limits(self, settings: Settings) -> tuple[int, int]:
        """Largest micro-batch at this sequence length, and longest sequence with micro-batch 1.

        No sequence is longer than the positions of the model, or than what was asked for.
        """
        variants: list[Callable[[int], Settings]] = [
            lambda n: _coarser(replace(settings, micro_batch=n)),
            lambda n: _coarser(replace(settings, micro_batch=1, sequence=n * STEP)),
        ]
        batch = self._largest(variants[0], settings.micro_batch)
        positions = self.shapes.facts.positions
        cap = max(positions, settings.sequence) if positions else 0
        if cap:
            one_sequence = _coarser(replace(settings, micro_batch=1, sequence=cap))
            if self.predictor.predict(one_sequence, self.budget).fits:
                return batch, cap
        length = self._largest(variants[1], max(1, settings.sequence // STEP), cap // STEP)
        return batch, length * STEP

    def _largest(self, settings: Callable[[int], Settings], start: int, limit: int = 0) -> int:
        """The largest number that fits, by proportional steps; it was simulated itself.

        Args:
            settings: From a number to the settings.
            start: Where to begin.
            limit: A number that is too large, if one is known.
        """
        fits, fails, guess = 0, limit, start
        for _ in range(TRIES):
            candidate = self.predictor.predict(settings(guess), self.budget)
            fits, fails = (guess, fails) if candidate.fits else (fits, guess)
            growing = self.predictor.growing(settings(guess))
            static = sum(candidate.parts.get(n, 0) for n in ("parameters", "optimizer states"))
            guess = int(guess * max(0, self.budget - static) / max(1, growing))
            if fits and fails and not fits < guess < fails:
                guess = (fits + fails) // 2
            elif fails and guess >= fails:
                guess = fails // 2
            elif fits and guess <= fits:
                guess = fits + max(1, fits // 16)
            if guess < 1 or guess == fits or (fails and guess >= fails) or guess > MOST:
                break
        return fits


def _coarser(settings: Settings) -> Settings:
    """The same settings with larger chunks, so that a long pass does not have thousands of them."""
    rows = settings.micro_batch * settings.tokens // MOST_CHUNKS
    return replace(settings, chunk=settings.chunk and max(settings.chunk, 1 << rows.bit_length()))


def _rank(candidate: Candidate) -> tuple[bool, float]:
    if not candidate.fits:
        return True, float(candidate.peak_bytes)
    s = candidate.settings
    # equal times go to what is simpler
    extras = (s.offload_activations, s.tiles > 1, s.level, s.tensor * s.ranks > 1, s.pipeline > 1)
    return False, (1 + 1e-6 * sum(map(int, extras))) / candidate.tokens_per_second


def _computation_of(settings: Settings) -> Settings:
    """The settings by which two ways to train differ."""
    layers = bool(settings.layers)
    return replace(settings, micro_batch=1, accumulation=1, layers=layers, chunk=None)


def _rank_shown(candidate: Candidate) -> tuple[bool, float, bool, bool, int]:
    """Order by the displayed time; ties prefer full-precision updates, then simpler settings."""
    if not candidate.fits:
        return True, 0.0, False, False, 0
    s = candidate.settings
    return False, round(candidate.relative, 2), s.precision in PURE, bool(s.offload_states), s.level


def _exists(precision: str, spread: str, offload_states: str | None) -> bool:
    """Whether an engine supports it: DeepSpeed keeps fp32 weights, DDP offloads nothing."""
    if precision in PURE:
        return not spread.startswith("zero") and (spread == "fsdp2" or not offload_states)
    return not (offload_states and spread == "ddp") and not (
        offload_states == "nvme" and spread == "fsdp2"
    )


def _has_extras(settings: Settings) -> bool:
    return settings.tiles > 1 or settings.offload_activations or not settings.patched


def _group(settings: Settings) -> Settings:
    return replace(
        settings, micro_batch=1, accumulation=1, spread="none", offload_states=None, layers=0
    )


# --- a second process, where the machine has a core for it ---


def can_fork() -> bool:
    """Whether a fork of this process can work: it has one thread, and a second core is free."""
    if sys.platform != "linux" or threading.active_count() > 1:
        return False
    return len(os.sched_getaffinity(0)) > 1 and not torch.cuda.is_initialized()


@contextlib.contextmanager
def forked(work: Callable[[], Any]) -> Iterator[Callable[[], Any]]:
    """Run ``work`` in a fork of this process, which has done the slow imports already.

    Yields a function that waits for the result of ``work``, which is plain data. It returns None
    if the process failed; the caller then does the work itself and meets the error.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(work, sender), daemon=True)
    process.start()
    sender.close()

    def result() -> Any:
        try:
            return receiver.recv()
        except (EOFError, OSError):
            return None

    try:
        yield result
    finally:
        process.terminate()
        process.join()
        receiver.close()


def _work(work: Callable[[], Any], sender: Connection) -> None:
    torch.set_num_threads(1)  # those of the first process are not here
    with contextlib.suppress(Exception):
        sender.send(work())


# --- what a plan cannot do by itself ---


class _Way(NamedTuple):
    """What notes describe: the best candidate, or the nearest one where nothing fits."""

    best: Candidate
    s: Settings
    card: Card
    shapes: Shapes


class _Note(NamedTuple):
    """Advice, and the condition under which it holds."""

    holds: Callable[[_Way], Any]
    text: str


NOTES = (
    _Note(
        lambda w: w.s.precision in PURE,
        "Weights and AdamW states in bfloat16: updates below a 256th of a weight are lost. "
        "precision='amp' keeps fp32 weights at 16 bytes a trained parameter.",
    ),
    _Note(
        lambda w: w.s.precision == "fp8",
        "apply(plan, model) has wide linear layers multiply in FP8 (linear_float8); the loss "
        "of a run in FP8 differs: compare some steps with bf16 first (docs/fp8.md).",
    ),
    _Note(
        lambda w: w.s.precision == "amp",
        "Run forward and loss under torch.autocast(dtype=torch.bfloat16), backward outside of "
        "it; bfloat16 needs no loss scaling. Trainer and accelerate do so with bf16.",
    ),
    _Note(
        lambda w: w.s.precision == "fp16",
        "float16 overflows at 65 504: scale the loss (torch.amp.GradScaler, starting at 2**16; "
        "unscale_ before clipping), skip steps with infinite gradients, keep fp32 weights. "
        "Trainer and accelerate do so with fp16, DeepSpeed by its fp16 section.",
    ),
    _Note(
        lambda w: w.s.precision == "fp32",
        "fp32 products run at the rate without TF32; "
        "torch.set_float32_matmul_precision('high') is faster where 10 bits of mantissa do.",
    ),
    _Note(
        lambda w: not w.card.bf16 and w.s.precision in (*PURE, "amp"),
        "{w.card.name} has no bfloat16 products in hardware; ask for precision='fp16'.",
    ),
    _Note(
        lambda w: w.s.spread == "ddp",
        "DDP keeps buckets as large as the gradients, which are counted; "
        "gradient_as_bucket_view=True saves them. Where links are slow, PyTorch's "
        "communication hooks compress gradients: bf16_compress_hook or PowerSGD "
        "(torch.distributed.algorithms.ddp_comm_hooks; ddp_comm_hook of accelerate's "
        "DistributedDataParallelKwargs).",
    ),
    _Note(
        lambda w: w.s.spread.startswith("zero"),
        "ZeRO++ of DeepSpeed compresses what ZeRO-3 sends: zero_quantized_weights, "
        "zero_quantized_gradients, zero_hpz_partition_size. "
        "compression=True writes them into the DeepSpeed JSON of a ZeRO-3 plan.",
    ),
    _Note(
        lambda w: w.s.pipeline > 1,
        "Stages of a pipeline need torch.distributed.pipelining or DeepSpeed's pipelines: "
        "neither Trainer nor accelerate cuts a model into stages, and no file says so.",
    ),
    _Note(
        lambda w: w.s.tensor > 1,
        "Tensor parallelism is counted with whole embeddings, norms and logits on every "
        "device (tp_plan='auto' of transformers divides attention and MLPs).",
    ),
    _Note(
        lambda w: w.s.ranks > 1,
        "Tokens over {w.s.ranks} ranks: liger_multi.distributed.shard_sequence(model, mesh['sp']) "
        "in a loop under torchrun (docs/long-context.md); no file of an engine says so. Attention "
        "is counted over whole sequences in every layer.",
    ),
    _Note(
        lambda w: w.s.recompute != "none" and w.s.layers,
        "Recompute policy {w.s.recompute!r} on the first {w.s.layers} of {w.shapes.count} "
        "layers: liger_multi.memory.apply(plan, model), or apply_recompute.",
    ),
    _Note(
        lambda w: w.s.tiles > 1 or w.s.offload_activations or w.s.chunk,
        "apply(plan, model) sets what stands in no engine's file: chunks, tiles, offload.",
    ),
    _Note(
        lambda w: w.best.host_bytes,
        "{host} of the host's memory are needed for each device.",
    ),
    _Note(
        lambda w: w.shapes.quantized,
        "{quantized} of frozen weights are counted at their stored size, and the largest of "
        "them once more as it is dequantized for a product.",
    ),
    _Note(
        lambda w: w.card.guessed,
        "The card is known by its memory only; times are told with the rates of {w.card.name}.",
    ),
    _Note(
        lambda w: True,
        "Times rank ways to train and are no forecast; windows of attention are not counted, "
        "nor are compilers.",
    ),
)


def notes_of(plan: TrainingPlan, card: Card, shapes: Shapes) -> list[str]:
    """Notes on the best candidate, or on the nearest where nothing fits."""
    best = plan.best if plan.best.fits else plan.nearest
    note_context, positions = _Way(best, best.settings, card, shapes), shapes.facts.positions
    length = beyond(positions, best.settings.sequence)
    if not length and positions and positions in (plan.longest_sequence, plan.most_sequence):
        length = (
            f"The longest sequence is what the model has positions for (max_position_embeddings: "
            f"{positions:,}); memory would allow more."
        )
    sizes = {"host": best.host_bytes, "quantized": shapes.quantized}
    sizes_text = {name: format_bytes(size) for name, size in sizes.items()}
    notes = [
        note.text.format(w=note_context, **sizes_text) for note in NOTES if note.holds(note_context)
    ]
    return [length, *notes] if length else notes
