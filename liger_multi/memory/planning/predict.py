"""The peak and the time of settings, from a few simulated layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from liger_multi.memory.estimation import WORKSPACE, gathered, state_bytes, temporary_bytes
from liger_multi.memory.planning.applying import Applied, layers_of, prepare
from liger_multi.memory.planning.cost import PARKED, Card, Traffic, step_seconds
from liger_multi.memory.planning.result import Candidate, Settings
from liger_multi.memory.planning.traces import (
    Cutting,
    Part,
    Segment,
    Shapes,
    Trace,
    Work,
    peak_of,
    sequence_of,
    vector,
    work_of,
)
from liger_multi.memory.recorder import (
    CATEGORIES,
    GRADIENTS,
    OTHER,
    PARAMETERS,
    STATES,
    TEMPORARY,
)
from liger_multi.memory.setup import DTYPES, OPTIMIZERS, Optimizer

IN_FLIGHT = 2**30  # bytes of offloaded activations that may be on their way


@dataclass
class Static:
    """Bytes of some parameters and of what belongs to them."""

    parameters: int = 0
    gradients: int = 0
    states: int = 0
    temporaries: int = 0

    @classmethod
    def of(cls, parameters: Iterable[nn.Parameter], spec: Optimizer, copies: int) -> Static:
        """Count them."""
        every = list(parameters)
        trained = [p for p in every if p.requires_grad]
        return cls(
            sum(p.nbytes for p in every),
            sum(p.nbytes for p in trained),
            state_bytes(trained, spec, copies),
            temporary_bytes(trained, spec, copies),
        )

    def plus(self, other: Static, times: int, spec: Optimizer) -> Static:
        """The sum with ``times`` the other one."""
        scratch = self.temporaries + times * other.temporaries
        if spec.temporaries != "all":
            scratch = max(self.temporaries, other.temporaries if times else 0)
        return Static(
            self.parameters + times * other.parameters,
            self.gradients + times * other.gradients,
            self.states + times * other.states,
            scratch,
        )


@dataclass
class Simulated:
    """A trace with the static bytes of the model it is of.

    Attributes:
        trace: Of all layers or a few.
        start: Bytes of parameters and buffers that belong to the simulated model.
        layer: Static bytes of each of its layers.
        outside: Of everything else.
        gathered: What is there of other devices' shards, by level of ZeRO; the last one FSDP2's.
        hidden: Bytes of a layer's output.
    """

    trace: Trace
    start: int
    layer: list[Static]
    outside: Static
    gathered: dict[str, int]
    hidden: int


@dataclass
class Prepared:
    """A model of shapes, set up to be simulated with any number of sequences.

    Attributes:
        model: With patches, policies and tiles.
        layers: Of it.
        around: What :func:`prepare` did.
        warm: Whether it ran before, from which policies learn.
    """

    model: Any
    layers: nn.ModuleList
    around: Applied
    warm: bool = False


@dataclass
class Passed:
    """A simulated pass.

    Attributes:
        trace: Its segments.
        start: As of :class:`Simulated`.
        hidden: As of :class:`Simulated`.
        simulated: Whether it was; else it follows from two that were.
    """

    trace: Trace
    start: int
    hidden: int
    simulated: bool = True


class Predictor:
    """Simulates each kind of layer and head a few times, and puts steps together.

    Everything is a constant or in proportion to the sequences of a pass, where the loss is
    computed in one piece: two simulated numbers of sequences tell about all others. The
    optimizer's bytes follow from the parameters.

    Args:
        shapes: The model's.
        card: That it runs on.
        device: Device type that the tensors stand for.
        said: Called with a few words before every simulation.
    """

    def __init__(
        self,
        shapes: Shapes,
        card: Card,
        device: str = "cuda",
        said: Callable[[str], None] | None = None,
    ) -> None:
        self.shapes, self.card, self.device = shapes, card, device
        self.simulations = 0
        self._said = said or (lambda _: None)
        self._done: dict[Settings, Simulated] = {}
        self._prepared: dict[Settings, Prepared] = {}
        self._passed: dict[Settings, dict[int, Passed]] = {}  # by the number of sequences

    def simulated(self, settings: Settings, recompute: str, whole: bool = False) -> Simulated:
        """One pass of a device, every layer under the policy ``recompute``."""
        if not self.shapes.checked and not whole:
            uniform = self._pass(settings, recompute, whole).trace.uniform
            self.shapes.checked = True
            self.shapes.uniform = self.shapes.uniform and uniform
            self._prepared.clear()
            self._passed.clear()
        key = Settings(
            sequence=settings.sequence, micro_batch=settings.micro_batch,
            precision=settings.dtype, optimizer=settings.optimizer,
            patched=settings.patched, chunk=settings.chunk, recompute=recompute,
            tiles=settings.tiles, attention=settings.attention,
            offload_activations=settings.offload_activations, tensor=settings.tensor,
            pipeline=int(whole),
        )  # fmt: skip
        if key not in self._done:
            self._done[key] = self._simulated(settings, recompute, whole)
        return self._done[key]

    def _simulated(self, settings: Settings, recompute: str, whole: bool) -> Simulated:
        passed = self._pass(settings, recompute, whole)
        prepared = self._prepare(settings, recompute, whole)
        spec, copies = OPTIMIZERS[settings.optimizer], DTYPES[settings.dtype][2]
        inside = {id(p) for p in prepared.layers.parameters()}
        others = (p for p in prepared.model.parameters() if id(p) not in inside)
        levels = {"zero2": (2, False), "zero3": (3, False), "fsdp2": (3, True)}
        return Simulated(
            passed.trace,
            passed.start,
            [Static.of(layer.parameters(), spec, copies) for layer in prepared.layers],
            Static.of(others, spec, copies),
            {name: gathered(prepared.model, *level) for name, level in levels.items()},
            passed.hidden,
        )

    def _pass(self, settings: Settings, recompute: str, whole: bool) -> Passed:
        """A pass that was simulated, or that follows from two that were."""
        known = self._passed.setdefault(_kind(settings, recompute, whole), {})
        micro = settings.micro_batch
        if micro not in known:
            known[micro] = self._between(known, settings) or self._simulate(
                settings, recompute, whole
            )
        return known[micro]

    def _prepare(self, settings: Settings, recompute: str, whole: bool) -> Prepared:
        key = _kind(settings, recompute, whole)
        if key not in self._prepared:
            kind = DTYPES[settings.dtype][0]
            model = self.shapes.model(kind, settings.attention, settings.tensor, whole)
            layers = layers_of(model)[1]
            wanted = replace(settings, recompute=recompute, layers=len(layers))
            self._prepared[key] = Prepared(model, layers, prepare(model, wanted, True))
        return self._prepared[key]

    def _between(self, known: dict[int, Passed], settings: Settings) -> Passed | None:
        """What two simulated passes tell, where everything grows in proportion or not at all.

        It does not on a CPU, where operators choose chunks by their size; nor with a loss in
        several chunks, nor with offloaded activations, of which small ones stay.
        """
        if self.device == "cpu" or settings.offload_activations:
            return None
        whole = [n for n in (settings.micro_batch, *known) if _whole(settings, n)]
        some = [n for n in whole[1:] if known[n].simulated][:2]
        if whole[:1] != [settings.micro_batch] or len(some) < 2:
            return None
        low, high = (known[n] for n in some)
        if not low.trace.alike(high.trace):
            return None
        share = (settings.micro_batch - some[0]) / (some[1] - some[0])
        hidden = low.hidden // some[0] * settings.micro_batch
        return Passed(low.trace.toward(high.trace, share), low.start, hidden, False)

    def _simulate(self, settings: Settings, recompute: str, whole: bool) -> Passed:
        self.simulations += 1
        some = replace(settings, recompute=recompute, layers=recompute != "none")
        size = f"{settings.micro_batch} x {settings.sequence:,}"
        self._said(f"simulation {self.simulations}: {size}, {some}")
        prepared = self._prepare(settings, recompute, whole)
        kind, autocast, _ = DTYPES[settings.dtype]
        model, layers = prepared.model, prepared.layers
        text = model.config.get_text_config()
        simulation = Cutting(
            list(layers),
            target=self.device,
            capacity=None,
            model=model,
            vocabulary=getattr(text, "vocab_size", None),
            sequence=settings.sequence,
            autocast=autocast,
        )
        if recompute not in ("none", "full") and not prepared.warm:
            simulation.warm(settings.micro_batch)  # policies learn from a first step
        prepared.warm = True
        simulation.step(settings.micro_batch, settings.sequence, 0)
        model.zero_grad()
        trace = simulation.trace()
        offload = prepared.around.offload
        if offload is not None:
            trace.offloaded = offload.offloaded_bytes / len(layers)
            for segment in trace.forward:
                segment.work.launches += PARKED * offload.offloaded_tensors / len(layers)
        hidden = settings.micro_batch * settings.sequence * text.hidden_size
        return Passed(trace, simulation.standing(), hidden * (autocast or kind).itemsize)

    def predict(self, settings: Settings, budget: int | None = None) -> Candidate:
        """Peak and time of one way to train."""
        stages = [self._stage(settings, i) for i in range(settings.pipeline)]
        worst = max(stages, key=lambda stage: stage[0])
        seconds = max(stage[3] for stage in stages)
        return Candidate(
            settings,
            worst[0],
            worst[1],
            seconds,
            0.0,
            max(stage[2] for stage in stages),
            budget is None or worst[0] <= budget,
        )

    def growing(self, settings: Settings) -> int:
        """Highest moment of what grows with the tokens: activations, logits, temporaries."""
        kept = {PARAMETERS, GRADIENTS, STATES}
        factors = vector({name: float(name not in kept) for name in CATEGORIES})
        parts = sequence_of([kind.trace for kind in self.kinds(settings)])
        return round(peak_of(parts, vector({}), factors, False)[0])

    def kinds(self, settings: Settings) -> list[Simulated]:
        """The simulation that each layer follows, from the first layer on."""
        count, some = self.shapes.count, settings.layers
        policies = [settings.recompute] * some + ["none"] * (count - some)
        return [self.simulated(settings, policy) for policy in policies]

    def _stage(self, settings: Settings, stage: int) -> tuple[int, dict[str, int], int, float]:
        """Peak, parts at it, bytes on the host and seconds of one stage of the pipeline."""
        count, stages = self.shapes.count, settings.pipeline
        bounds = [round(i * count / stages) for i in range(stages + 1)]
        begin, end = bounds[stage], bounds[stage + 1]
        kinds = self.kinds(settings)
        parts = sequence_of([kind.trace for kind in kinds])
        if stages > 1:
            parts = _cut(kinds, begin, end, stage == 0, stage == stages - 1)
        spec = OPTIMIZERS[settings.optimizer]
        static = _static(kinds, begin, end, spec)
        first = kinds[0]
        known = sum(block.parameters for block in first.layer) + first.outside.parameters
        buffers = first.start - known
        share = _shares(settings)
        away = _away(settings)
        factors = vector({n: 0.0 if n in away else share.get(n, 1.0) for n in CATEGORIES})
        # a pass after the first, or after the last step's gradients, finds some already there
        accumulating = settings.accumulation > 1 or stages > 1
        start: dict[str, float] = {PARAMETERS: static.parameters + buffers, STATES: static.states}
        start[GRADIENTS] = static.gradients if accumulating else 0
        start[OTHER] = static.gradients if settings.spread == "ddp" else 0
        if settings.tensor > 1:
            start[TEMPORARY] = first.hidden  # a sum of layers on its way
        if settings.offload_activations and self.device != "cpu":  # on their way
            start[OTHER] += min(IN_FLIGHT, first.trace.offloaded * (end - begin))
        waiting = min(stages - stage, settings.accumulation) - 1
        kept = sum(_kept(parts).values()) if waiting else 0
        scratch = round(static.temporaries * share.get(STATES, 1.0)) if not away else 0
        steps = [*parts, (_moment({TEMPORARY: float(scratch)}), 1)]
        base = vector(start) + vector({OTHER: float(waiting * kept)})
        peak, at = peak_of(steps, base, factors, accumulating)
        extra = first.gathered.get(settings.spread, 0) * (settings.data > 1 or bool(away))
        extra += 0 if self.device == "cpu" else WORKSPACE
        present = (at * factors).tolist()
        named = {name: round(size) for name, size in zip(CATEGORIES, present, strict=True)}
        named["gathered and workspace"] = extra
        sizes = {PARAMETERS: static.parameters, GRADIENTS: static.gradients, STATES: static.states}
        host = sum(round(sizes[name] * share.get(name, 1.0)) for name in away)
        offloaded = sum(kind.trace.offloaded for kind in kinds[begin:end])
        seconds = self._seconds(settings, parts, static, offloaded, first.hidden, end - begin)
        host += round(offloaded * (waiting + 1))
        return round(peak) + extra, named, host, seconds

    def _seconds(
        self, settings: Settings, parts: list[Part], static: Static, offloaded: float,
        hidden: int, layers: int,
    ) -> float:  # fmt: skip
        passes, level, data = settings.accumulation, settings.level, settings.data
        ring = 2 * (data - 1) / data
        once = ring * static.gradients
        if level == 3:  # weights twice and gradients once a pass, each half of a sum over all
            once = passes * (ring * static.parameters + ring * static.gradients / 2)
        elif level == 2:
            once = ring / 2 * (passes * static.gradients + static.parameters)
        if settings.tensor > 1:  # two sums a layer forwards and two backwards
            ring = 2 * (settings.tensor - 1) / settings.tensor
            waited = passes * layers * 4 * ring * hidden
        else:
            waited = 0.0
        waited += 2 * passes * hidden * (settings.pipeline > 1)
        shared = 1 / data if level else 1.0
        touched = 2 * static.parameters + static.gradients + 2 * static.states
        states = 2 * static.states * shared if settings.offload_states else 0.0
        crossing = (static.gradients + static.parameters) * shared if states else 0.0
        if PARAMETERS in _away(settings):  # up again for forward and backward of every pass
            crossing += 2 * passes * static.parameters * shared
        return step_seconds(
            work_of(parts),
            0.0 if states else touched * shared,
            Traffic(once, waited, 2 * passes * offloaded, states, crossing),
            self.card,
            passes,
            settings.pipeline,
        )


def _kind(settings: Settings, recompute: str, whole: bool) -> Settings:
    """What a simulation depends on, beside the number of sequences."""
    kind, autocast, _ = DTYPES[settings.dtype]
    return Settings(
        sequence=settings.sequence, precision=f"{kind} {autocast}", patched=settings.patched,
        chunk=settings.chunk, recompute=recompute, tiles=settings.tiles,
        attention=settings.attention, offload_activations=settings.offload_activations,
        tensor=settings.tensor, pipeline=int(whole),
    )  # fmt: skip


def _whole(settings: Settings, micro: int) -> bool:
    """Whether the loss of so many sequences is computed in one piece."""
    return not settings.chunk or micro * settings.sequence <= settings.chunk


def _shares(settings: Settings) -> dict[str, float]:
    sharded = {1: (STATES,), 2: (STATES, GRADIENTS), 3: (STATES, GRADIENTS, PARAMETERS)}
    return dict.fromkeys(sharded.get(settings.level, ()), 1 / settings.data)


def _away(settings: Settings) -> tuple[str, ...]:
    """What stands on the host: FSDP2 offloads all that it shards."""
    if not settings.offload_states:
        return ()
    return (STATES, GRADIENTS, PARAMETERS) if settings.spread == "fsdp2" else (STATES,)


def _static(kinds: list[Simulated], begin: int, end: int, spec: Optimizer) -> Static:
    """Of a stage; what is outside of layers stands at the first and the last one."""
    count = len(kinds)
    total = Static()
    if begin == 0 or end == count:
        total = kinds[0].outside
    for i in range(begin, end):
        block = kinds[i].layer[kinds[i].trace.layer(i, count)]
        total = total.plus(block, 1, spec)
    return total


def _cut(kinds: list[Simulated], begin: int, end: int, first: bool, last: bool) -> list[Part]:
    """The segments of one stage of a pipeline."""
    count = len(kinds)
    own = [(k.trace, k.trace.layer(i, count)) for i, k in enumerate(kinds)][begin:end]
    parts: list[Part] = []
    if first:
        parts.append((kinds[0].trace.segments["before"], 1))
    parts += [(trace.forward[i], 1) for trace, i in own]
    if last:
        parts.append((kinds[-1].trace.segments["head"], 1))
    parts += [(trace.backward[i], 1) for trace, i in own[::-1]]
    if first:
        parts.append((kinds[0].trace.segments["after"], 1))
    return parts


def _kept(parts: list[Part]) -> dict[str, float]:
    """What stays from the end of forward until backward of one micro-batch."""
    half = parts[: len(parts) // 2]
    total = sum((times * s.live[-1] for s, times in half if len(s.live)), vector({}))
    return dict(zip(CATEGORIES, total.tolist(), strict=True))


def _moment(values: dict[str, float]) -> Segment:
    live = torch.stack([vector(values), vector({})])
    return Segment(live, live, Work())
