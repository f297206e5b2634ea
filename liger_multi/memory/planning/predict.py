"""The peak and the time of settings, from a few simulated layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any, TypeVar

import torch
from torch import nn

from liger_multi.memory.estimation import (
    WORKSPACE,
    fsdp_bytes,
    gathered_bytes,
    move_copies,
    state_bytes,
    temporary_bytes,
)
from liger_multi.memory.planning.applying import Applied, layers_of, prepare
from liger_multi.memory.planning.cost import PARKED, Card, Traffic, step_seconds
from liger_multi.memory.planning.result import LEVELS, Candidate, Settings
from liger_multi.memory.planning.shapes import Facts, Shapes, weights
from liger_multi.memory.planning.traces import (
    NOTHING,
    Body,
    Bytes,
    Cutting,
    Head,
    Part,
    Trace,
    add_bytes,
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
    stored,
)
from liger_multi.memory.setup import DTYPES, OPTIMIZERS, Optimizer
from liger_multi.patcher import sharder

# --- simulated passes of one architecture: each kind of layer and head a few times ---

# A pass is what layers do and what the head does. Layers do not depend on the chunks of the loss,
# nor the head on what layers keep. Layers, and a loss in one piece, are linear in the number of
# sequences; layers are also linear in the share that tensor parallelism leaves to a device. So
# any number of sequences is derived from two simulated ones, unless these two ran different
# operators.

Piece = TypeVar("Piece", Body, Head)


@dataclass
class Prepared:
    """A model of shapes, set up to be simulated with any number of sequences.

    Attributes:
        model: With patches, policies and tiles.
        layers: Its layers.
        inner: The module that runs the layers, if it is not the model itself.
        around: The handle that :func:`prepare` returned.
        warm: Whether it ran before: some recompute policies learn from a first step.
        running: The simulation that runs, which counts what ranks send to each other.
    """

    model: Any
    layers: nn.ModuleList
    inner: nn.Module | None
    around: Applied
    warm: bool = False
    running: list[Cutting] = field(default_factory=list)

    def shard(self, ranks: int) -> None:
        """Leave the model the tokens of one of some ranks."""

        def sent(nbytes: int) -> None:
            for simulation in self.running:
                simulation.exchange(nbytes)

        sharder().shard_on_meta(self.model, ranks, sent)


def _main_dtype(settings: Settings, facts: Facts) -> torch.dtype:
    """Of parameters; a base in 4 bits has the dtype of autocast, in which it is dequantized."""
    dtype, autocast, _ = DTYPES[settings.dtype]
    return autocast if autocast is not None and facts.quantized else dtype


class Passes:
    """Passes of an architecture: derived from known ones where possible, otherwise simulated.

    Args:
        shapes: Shapes of the model.
        device: Device type that the tensors stand for.
        on_progress: Called with a few words before every simulation.

    Attributes:
        on_progress: The argument ``on_progress``.
        simulations: Number of simulated passes.
        tensors: The smallest and the largest tensor parallelism that will be requested.
    """

    def __init__(self, shapes: Shapes, device: str, on_progress: Callable[[str], None]) -> None:
        self.shapes, self.device, self.on_progress = shapes, device, on_progress
        self.simulations = 0
        self.tensors = (1, 1)
        self._prepared: dict[tuple[Settings, int | None], Prepared] = {}
        self._bodies: dict[Settings, dict[int, Body]] = {}
        self._heads: dict[Settings, dict[int, Head]] = {}
        self._derived_bodies: dict[tuple[Settings, int], Body] = {}
        self._derived_heads: dict[tuple[Settings, int], Head] = {}
        self._traces: dict[tuple[Settings, int], Trace] = {}

    def trace(self, settings: Settings, recompute: str) -> Trace:
        """One pass of a device, every layer under the policy ``recompute``."""
        key = replace(_body_key(settings, recompute), chunk=settings.chunk), settings.micro_batch
        if key not in self._traces:
            self._traces[key] = self._trace(settings, recompute)
        return self._traces[key]

    def _trace(self, settings: Settings, recompute: str) -> Trace:
        body = self._body(settings, recompute)
        if body is None:
            body = self._simulate(settings, recompute, self.shapes.depth)[0]
        head = self._head(settings)
        if head is None:
            # layers that differ may need each other
            depth = 1 if self.shapes.facts.uniform else None
            head = self._simulate(replace(settings, tiles=1, tensor=1), "none", depth)[1]
        trace = Trace(body, head)
        if trace.fits:
            return trace
        return Trace(*self._simulate(settings, recompute, self.shapes.depth))

    def take_over(self, simulations: int, entries: Mapping[str, Mapping[str, Any]]) -> None:
        """Count and keep the passes that another process simulated for the same shapes."""
        self.simulations += simulations
        self.shapes.store.add(entries)
        self._bodies.clear()
        self._heads.clear()

    # --- what is known, and what follows from it ---

    def _body(self, settings: Settings, recompute: str) -> Body | None:
        key, micro = _body_key(settings, recompute), settings.micro_batch
        simulated = self._simulated_pieces(self._bodies, "bodies", key, Body)
        if micro in simulated:
            return simulated[micro]
        if (key, micro) not in self._derived_bodies and self.device != "cpu":
            # small activations are not offloaded, and which ones are small depends on the sequences
            derived = _from_other_batches(simulated, micro, settings.offload_activations)
            derived = derived or self._between_device_counts(settings, recompute)
            if derived is not None:
                self._derived_bodies[key, micro] = derived
        return self._derived_bodies.get((key, micro))

    def _between_device_counts(self, settings: Settings, recompute: str) -> Body | None:
        """Interpolate between the fewest and the most devices: sizes fall as one over them."""
        fewest, most_devices = self.tensors
        if not fewest < settings.tensor < most_devices:
            return None
        ends = []
        for tensor in (fewest, most_devices):
            end_settings = replace(settings, tensor=tensor)
            body = self._body(end_settings, recompute)
            ends.append(body or self._simulate(end_settings, recompute, self.shapes.depth)[0])
        share = (1 / settings.tensor - 1 / fewest) / (1 / most_devices - 1 / fewest)
        return ends[0].interpolated(ends[1], share) if ends[0].same_events(ends[1]) else None

    def _head(self, settings: Settings) -> Head | None:
        key, micro = _head_key(settings), settings.micro_batch
        simulated = self._simulated_pieces(self._heads, "heads", key, Head)
        if micro in simulated:
            return simulated[micro]
        # with several chunks, the bytes moved grow with their number as well
        if (key, micro) not in self._derived_heads and self.device != "cpu" and not key.chunk:
            derived = _from_other_batches(simulated, micro)
            if derived is not None:
                self._derived_heads[key, micro] = derived
        return self._derived_heads.get((key, micro))

    def _simulated_pieces(
        self, table: dict[Settings, dict[int, Piece]], section: str, key: Settings, cls: type[Piece]
    ) -> dict[int, Piece]:
        """Simulated pieces by the number of sequences."""
        if key not in table:
            table[key] = {}
            name = _name(key, self.device)
            for entry in self.shapes.store.names(section):
                start, _, micro = entry.rpartition(" ")
                piece = None
                if start == name and micro.isdigit():
                    piece = self.shapes.store.read(section, entry, cls.from_data)
                if piece is not None:
                    table[key][int(micro)] = piece
        return table[key]

    def _keep(self, section: str, key: Settings, micro: int, piece: Body | Head) -> None:
        self.shapes.store.write(section, f"{_name(key, self.device)} {micro}", piece.as_data())

    # --- simulation ---

    def _simulate(self, settings: Settings, recompute: str, depth: int | None) -> tuple[Body, Head]:
        """Simulate a model with ``depth`` layers, and keep its body and head."""
        micro = settings.micro_batch
        if not self.shapes.facts.checked:
            depth = self.shapes.depth
        body, head = self._simulated(settings, recompute, depth)
        if not self.shapes.facts.checked:
            self.shapes.learn(body.uniform)
            self._prepared.clear()
            if not self.shapes.facts.uniform:
                return self._simulate(settings, recompute, None)
            body = body.shorter(self.shapes.depth)
        if depth != 1 or self.shapes.count == 1:
            key = _body_key(settings, recompute)
            self._simulated_pieces(self._bodies, "bodies", key, Body)[micro] = body
            self._keep("bodies", key, micro, body)
        key = _head_key(settings)
        self._simulated_pieces(self._heads, "heads", key, Head)[micro] = head
        self._keep("heads", key, micro, head)
        return body, head

    def _prepare(self, settings: Settings, recompute: str, depth: int | None) -> Prepared:
        key = replace(_body_key(settings, recompute), chunk=settings.chunk), depth
        if key not in self._prepared:
            dtype = _main_dtype(settings, self.shapes.facts)
            model = self.shapes.model(dtype, settings.attention, settings.tensor, depth)
            path, layers = layers_of(model)
            target = replace(settings, recompute=recompute, layers=len(layers))
            context = prepare(model, target, True)
            inner = model.get_submodule(path.rpartition(".")[0])
            inner = None if inner is model else inner
            self._prepared[key] = Prepared(model, layers, inner, context)
            if settings.ranks > 1:
                self._prepared[key].shard(settings.ranks)
        return self._prepared[key]

    def _simulated(
        self, settings: Settings, recompute: str, depth: int | None
    ) -> tuple[Body, Head]:
        """Simulate one step on the meta device, and record what layers and head do."""
        self.simulations += 1
        variant = replace(settings, recompute=recompute, layers=recompute != "none")
        size = f"{settings.micro_batch} x {settings.sequence:,}"
        self.on_progress(f"simulation {self.simulations}: {size}, {variant}")
        prepared = self._prepare(settings, recompute, depth)
        model, layers = prepared.model, prepared.layers
        simulation = Cutting(
            list(layers),
            prepared.inner,
            settings.ranks,
            target=self.device,
            capacity=None,
            model=model,
            vocabulary=self.shapes.facts.vocabulary or None,
            sequence=settings.tokens,
            autocast=DTYPES[settings.dtype][1],
        )
        if recompute not in ("none", "full") and not prepared.warm:
            simulation.warm(settings.micro_batch)  # policies learn from a first step
        prepared.warm = True
        offload, sent = prepared.around.offload, []
        marks = (
            []
            if offload is None
            else [
                layers[0].register_forward_pre_hook(lambda *_: sent.append(offload.sent_bytes)),
                layers[-1].register_forward_hook(lambda *_: sent.append(offload.sent_bytes)),
            ]
        )
        prepared.running.append(simulation)
        simulation.step(settings.micro_batch, settings.sequence, 0)
        prepared.running.clear()
        for mark in marks:
            mark.remove()
        model.zero_grad()
        body, head = simulation.recorded()
        parameter_bytes = sum(t.nbytes for p in model.parameters() for t in stored(p))
        body.buffers = simulation.standing() - parameter_bytes
        if offload is not None:
            in_layers = sent[1] - sent[0]
            body.offloaded = in_layers / len(layers)
            body.offloaded_outside = offload.offloaded_bytes - in_layers
            for layer in body.layers:
                layer.forward.work.launches += PARKED * offload.offloaded_tensors / len(layers)
        return body, head


def _body_key(settings: Settings, recompute: str) -> Settings:
    """The settings that layers depend on, besides the number of sequences."""
    return Settings(
        sequence=settings.sequence,
        precision=_precision_key(settings),
        patched=settings.patched,
        recompute=recompute,
        tiles=settings.tiles,
        attention=settings.attention,
        offload_activations=settings.offload_activations,
        tensor=settings.tensor,
        ranks=settings.ranks,
    )


def _head_key(settings: Settings) -> Settings:
    """The settings that the head depends on. All chunks that hold every token are equal.

    Offload matters: the last layer's output is not freed where it was offloaded.
    """
    chunk = settings.chunk
    if chunk and settings.micro_batch * settings.tokens <= chunk:
        chunk = 0
    return Settings(
        sequence=settings.sequence,
        precision=_precision_key(settings),
        patched=settings.patched,
        chunk=chunk,
        attention=settings.attention,
        offload_activations=settings.offload_activations,
        ranks=settings.ranks,
    )


def _precision_key(settings: Settings) -> str:
    """The part of a precision that a simulation depends on."""
    dtype, autocast, _ = DTYPES[settings.dtype]
    return f"{dtype} {autocast}{' fp8' * (settings.precision == 'fp8')}"


def _name(key: Settings, device: str) -> str:
    """The name of an entry in the store, without the number of sequences."""
    plain = Settings().as_data()
    changed = {name: value for name, value in key.as_data().items() if value != plain[name]}
    return f"{device} {sorted(changed.items())}"


def _from_other_batches(
    pieces: Mapping[int, Piece], micro: int, between: bool = False
) -> Piece | None:
    """Derive a number of sequences from two others, if the same operators ran at both."""
    for smaller, larger in combinations(sorted(pieces), 2):
        if between and not smaller < micro < larger:
            continue
        if pieces[smaller].same_events(pieces[larger]):
            share = (micro - smaller) / (larger - smaller)
            return pieces[smaller].interpolated(pieces[larger], share)
    return None


IN_FLIGHT = 2**30  # bytes of offloaded activations that may be in flight


@dataclass
class Static:
    """Bytes of some parameters and of what belongs to them."""

    parameters: int = 0
    gradients: int = 0
    states: int = 0
    temporaries: int = 0

    @classmethod
    def of(cls, parameters: Iterable[Any], spec: Optimizer, copies: int) -> Static:
        """Sum over some parameters."""
        tensors = list(parameters)
        trained = [p for p in tensors if p.requires_grad]
        return cls(
            sum(p.nbytes for p in tensors),
            sum(p.nbytes for p in trained),
            state_bytes(trained, spec, copies),
            temporary_bytes(trained, spec, copies),
        )

    def plus(self, other: Static, times: int, spec: Optimizer) -> Static:
        """Add another sum ``times`` times."""
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
class StaticMemory:
    """Memory of the parameters, gradients and optimizer states of one model in one precision.

    Attributes:
        layers: Memory of each layer, or of one where all are equal.
        outside: Memory of everything else.
        blocks: Parameters of units that are gathered one after the other.
        root: Parameters of no unit.
    """

    layers: list[Static]
    outside: Static
    blocks: list[list[Any]]
    root: list[Any]
    _gathered: dict[tuple[str, int], tuple[int, int]] = field(default_factory=dict)

    def gathered(self, spread: str, devices: int, copies: int) -> tuple[int, int]:
        """What is there of other devices' shards: in layers, and beyond that after backward."""
        key = spread, devices
        if key not in self._gathered:
            units = self.blocks, self.root
            if spread == "fsdp2":
                self._gathered[key] = fsdp_bytes(*units, devices, copies)
            else:
                self._gathered[key] = gathered_bytes(*units, LEVELS[spread]), 0
        return self._gathered[key]


class Predictor:
    """Predicts steps from simulated layers and heads.

    The optimizer's bytes follow from the parameters, and the bytes of shards from both.

    Args:
        shapes: Shapes of the model.
        card: The card that it runs on.
        device: Device type that the tensors stand for.
        on_progress: Called with a few words before every simulation.
        host: Bytes of the host's memory for each device; None for no limit.
    """

    def __init__(
        self,
        shapes: Shapes,
        card: Card,
        device: str = "cuda",
        on_progress: Callable[[str], None] | None = None,
        host: int | None = None,
    ) -> None:
        self.shapes, self.card, self.device, self.host = shapes, card, device, host
        self.passes = Passes(shapes, device, on_progress or (lambda _: None))
        self._static_memory: dict[tuple[str, str, int, bool], StaticMemory] = {}
        self._static: dict[tuple[Any, ...], Static] = {}

    @property
    def simulations(self) -> int:
        """Passes that were simulated."""
        return self.passes.simulations

    def static_memory(self, settings: Settings) -> StaticMemory:
        """Memory of parameters, gradients and optimizer states."""
        float8 = settings.precision == "fp8"
        key = settings.dtype, settings.optimizer, settings.tensor, float8
        if key not in self._static_memory:
            dtype, copies = _main_dtype(settings, self.shapes.facts), DTYPES[settings.dtype][2]
            spec = OPTIMIZERS[settings.optimizer]
            forms = self.shapes.forms(settings.tensor, float8)
            blocks = [weights(block, dtype) for block in forms.blocks]
            root = weights(forms.root, dtype)
            self._static_memory[key] = StaticMemory(
                [Static.of(weights(layer, dtype), spec, copies) for layer in forms.layers],
                Static.of(weights(forms.outside, dtype), spec, copies),
                blocks,
                root,
            )
        return self._static_memory[key]

    def predict(self, settings: Settings, budget: int | None = None) -> Candidate:
        """Peak and time of one way to train."""
        stages = [self._stage(settings, i) for i in range(settings.pipeline)]
        worst = max(stages, key=lambda stage: stage[0])
        seconds = max(stage[3] for stage in stages)
        host = max(stage[2] for stage in stages)
        fits = (budget is None or worst[0] <= budget) and (self.host is None or host <= self.host)
        return Candidate(settings, worst[0], worst[1], seconds, 0.0, host, fits)

    def shared_bytes(self, settings: Settings) -> int:
        """What sharding can divide: parameters, gradients and states of one whole model."""
        static = self._of_stage(settings, 0, self.shapes.count)
        return static.parameters + static.gradients + static.states

    def growing(self, settings: Settings) -> int:
        """Peak of the memory that grows with the tokens: activations, logits, temporaries."""
        static = {PARAMETERS, GRADIENTS, STATES}
        factors = vector({name: float(name not in static) for name in CATEGORIES})
        forward, backward = sequence_of(self.traces(settings))
        return round(peak_of(forward + backward, NOTHING, factors, False)[0])

    def traces(self, settings: Settings) -> list[Trace]:
        """The pass that each layer follows, from the first layer on, with a rank's tokens."""
        count, recomputing = self.shapes.count, min(settings.layers, self.shapes.count)
        traces = (
            [self.passes.trace(settings, settings.recompute)] * recomputing if recomputing else []
        )
        if recomputing < count:
            traces += [self.passes.trace(settings, "none")] * (count - recomputing)
        return traces

    def _stage(self, settings: Settings, stage: int) -> tuple[int, dict[str, int], int, float]:
        """Peak, parts at it, bytes on the host and seconds of one stage of the pipeline."""
        count, stages = self.shapes.count, settings.pipeline
        bounds = [round(i * count / stages) for i in range(stages + 1)]
        begin, end = bounds[stage], bounds[stage + 1]
        traces = self.traces(settings)
        forward, backward = sequence_of(traces, begin, end)
        parts = forward + backward
        static = self._of_stage(settings, begin, end)
        share = _shares(settings)
        on_host = _on_host(settings)
        dtype, autocast, copies = DTYPES[settings.dtype]
        sizes = {PARAMETERS: static.parameters, GRADIENTS: static.gradients, STATES: static.states}
        ratio = 1.0
        if settings.spread == "fsdp2" and copies:  # its shards are the fp32 weights
            move_copies(sizes, dtype, copies)
            ratio = copies / dtype.itemsize
        factors = vector({n: 0.0 if n in on_host else share.get(n, 1.0) for n in CATEGORIES})
        factors = tuple(
            f * (ratio if n == GRADIENTS else 1) for f, n in zip(factors, CATEGORIES, strict=True)
        )
        # gradients of an earlier pass, or of the last step, are there already
        accumulating = settings.accumulation > 1 or stages > 1
        tokens = settings.micro_batch * settings.tokens
        hidden = tokens * self.shapes.facts.hidden * (autocast or dtype).itemsize
        start: dict[str, float] = {
            PARAMETERS: sizes[PARAMETERS] + traces[0].body.buffers,
            STATES: sizes[STATES],
        }
        start[GRADIENTS] = static.gradients if accumulating else 0
        start[OTHER] = static.gradients if settings.spread == "ddp" else 0
        if settings.tensor > 1:
            start[TEMPORARY] = hidden  # a sum of layers on its way
        if settings.offload_activations and self.device != "cpu":  # on their way
            start[OTHER] += min(IN_FLIGHT, traces[0].body.offloaded * (end - begin))
        in_flight = min(stages - stage, settings.accumulation) - 1
        start[OTHER] += in_flight * sum(_kept_bytes(forward)) if in_flight else 0
        scratch = round(static.temporaries * share.get(STATES, 1.0)) if not on_host else 0
        extra, ending, devices = 0, 0, settings.data * settings.ranks
        if devices > 1 or on_host:
            extra, ending = self.static_memory(settings).gathered(settings.spread, devices, copies)
        last = vector({TEMPORARY: float(max(scratch, ending))})
        peak, parts_at_peak = peak_of(parts, vector(start), factors, accumulating, last)
        extra += 0 if self.device == "cpu" else WORKSPACE
        by_category = {
            name: round(size * factor)
            for name, size, factor in zip(CATEGORIES, parts_at_peak, factors, strict=True)
        }
        by_category["gathered and workspace"] = extra
        in_memory = [name for name in on_host if name != STATES or settings.offload_states == "cpu"]
        host = sum(round(sizes[name] * share.get(name, 1.0)) for name in in_memory)
        offloaded = sum(trace.body.offloaded for trace in traces[begin:end])
        offloaded += traces[-1].body.offloaded_outside * (end == count)
        seconds = self._seconds(settings, parts, static, offloaded, hidden, end - begin)
        host += round(offloaded * (in_flight + 1))
        return round(peak) + extra, by_category, host, seconds

    def _of_stage(self, settings: Settings, begin: int, end: int) -> Static:
        """Static bytes of some layers; the outer stages hold what is outside of layers."""
        key = settings.precision, settings.dtype, settings.optimizer, settings.tensor, begin, end
        if key not in self._static:
            memory, spec = self.static_memory(settings), OPTIMIZERS[settings.optimizer]
            total = memory.outside if begin == 0 or end == self.shapes.count else Static()
            for i in range(begin, end):
                total = total.plus(memory.layers[min(i, len(memory.layers) - 1)], 1, spec)
            self._static[key] = total
        return self._static[key]

    def _seconds(
        self,
        settings: Settings,
        parts: list[Part],
        static: Static,
        offloaded: float,
        hidden: int,
        layers: int,
    ) -> float:
        """Seconds of a step: work, exchanged bytes, and the optimizer's reads and writes."""
        passes, level, data = settings.accumulation, settings.level, settings.data * settings.ranks
        ring = 2 * (data - 1) / data
        exchanged = ring * static.gradients
        if level == 3:
            # each pass gathers weights twice and reduces gradients once: half an all-reduce each
            exchanged = passes * (ring * static.parameters + ring * static.gradients / 2)
        elif level == 2:
            exchanged = ring / 2 * (passes * static.gradients + static.parameters)
        if settings.tensor > 1:  # two all-reduces per layer in forward and two in backward
            ring = 2 * (settings.tensor - 1) / settings.tensor
            waited = passes * layers * 4 * ring * hidden
        else:
            waited = 0.0
        waited += 2 * passes * hidden * (settings.pipeline > 1)
        work = work_of(parts)
        waited += passes * work.exchanged * (settings.ranks - 1) / settings.ranks
        shared = 1 / data if level else 1.0
        touched = 2 * static.parameters + static.gradients + 2 * static.states
        states = 2 * static.states * shared if settings.offload_states else 0.0
        crossing = (static.gradients + static.parameters) * shared if states else 0.0
        if PARAMETERS in _on_host(settings):  # up again for forward and backward of every pass
            crossing += 2 * passes * static.parameters * shared
        return step_seconds(
            work,
            0.0 if states else touched * shared,
            Traffic(exchanged, waited, 2 * passes * offloaded, states, crossing),
            self.card,
            passes,
            settings.pipeline,
        )


def _shares(settings: Settings) -> dict[str, float]:
    sharded = {1: (STATES,), 2: (STATES, GRADIENTS), 3: (STATES, GRADIENTS, PARAMETERS)}
    return dict.fromkeys(sharded.get(settings.level, ()), 1 / (settings.data * settings.ranks))


def _on_host(settings: Settings) -> tuple[str, ...]:
    """Bytes on the host: FSDP2 offloads everything that it shards."""
    if not settings.offload_states:
        return ()
    return (STATES, GRADIENTS, PARAMETERS) if settings.spread == "fsdp2" else (STATES,)


def _kept_bytes(forward: list[Part]) -> Bytes:
    """Bytes that one micro-batch saves for backward."""
    total = NOTHING
    for segment, times in forward:
        total = add_bytes(total, segment.net_bytes(False), times)
    return total
