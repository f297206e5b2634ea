"""Simulated passes of one architecture: each kind of layer and head a few times, the rest derived.

A pass is what layers do and what the head does. Layers do not depend on the chunks of the loss, nor
the head on what layers keep. Layers, and a loss in one piece, are linear in the number of
sequences; layers are also linear in the share that tensor parallelism leaves to a device. So any
number of sequences is derived from two simulated ones, unless these two ran different operators.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, TypeVar

from torch import nn

from liger_multi.memory.planning.applying import Applied, layers_of, prepare
from liger_multi.memory.planning.cost import PARKED
from liger_multi.memory.planning.result import Settings
from liger_multi.memory.planning.shapes import Shapes
from liger_multi.memory.planning.traces import Body, Cutting, Head, Trace
from liger_multi.memory.recorder import stored
from liger_multi.memory.setup import DTYPES

Piece = TypeVar("Piece", Body, Head)


@dataclass
class Prepared:
    """A model of shapes, set up to be simulated with any number of sequences.

    Attributes:
        model: With patches, policies and tiles.
        layers: Of it.
        inner: What runs them, if it is not the model itself.
        around: What :func:`prepare` did.
        warm: Whether it ran before, from which policies learn.
    """

    model: Any
    layers: nn.ModuleList
    inner: nn.Module | None
    around: Applied
    warm: bool = False


class Passes:
    """Passes of an architecture: derived from known ones where possible, otherwise simulated.

    Args:
        shapes: The model's.
        device: Device type that the tensors stand for.
        said: Called with a few words before every simulation.

    Attributes:
        said: The argument ``said``.
        simulations: How many there were.
        tensors: The least and the greatest tensor parallelism that will be asked for.
    """

    def __init__(self, shapes: Shapes, device: str, said: Callable[[str], None]) -> None:
        self.shapes, self.device, self.said = shapes, device, said
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
            plain = replace(settings, tiles=1, tensor=1)
            head = self._simulate(plain, "none", depth)[1]
        trace = Trace(body, head)
        if trace.fits:
            return trace
        return Trace(*self._simulate(settings, recompute, self.shapes.depth))

    def take_over(self, simulations: int, entries: Mapping[str, Mapping[str, Any]]) -> None:
        """Count and keep what another process simulated of the same shapes."""
        self.simulations += simulations
        self.shapes.store.add(entries)
        self._bodies.clear()
        self._heads.clear()

    # --- what is known, and what follows from it ---

    def _body(self, settings: Settings, recompute: str) -> Body | None:
        key, micro = _body_key(settings, recompute), settings.micro_batch
        known = self._known(self._bodies, "bodies", key, Body)
        if micro in known:
            return known[micro]
        if (key, micro) not in self._derived_bodies and self.device != "cpu":
            # small activations are not offloaded, and which ones are small depends on the sequences
            derived = _along(known, micro, settings.offload_activations)
            derived = derived or self._across(settings, recompute)
            if derived is not None:
                self._derived_bodies[key, micro] = derived
        return self._derived_bodies.get((key, micro))

    def _across(self, settings: Settings, recompute: str) -> Body | None:
        """Derive it from the fewest and the most devices: one factor of every size is divided."""
        low, high = self.tensors
        if not low < settings.tensor < high:
            return None
        ends = []
        for tensor in (low, high):
            one = replace(settings, tensor=tensor)
            known = self._body(one, recompute)
            ends.append(known or self._simulate(one, recompute, self.shapes.depth)[0])
        share = (1 / settings.tensor - 1 / low) / (1 / high - 1 / low)
        return ends[0].toward(ends[1], share) if ends[0].alike(ends[1]) else None

    def _head(self, settings: Settings) -> Head | None:
        key, micro = _head_key(settings), settings.micro_batch
        known = self._known(self._heads, "heads", key, Head)
        if micro in known:
            return known[micro]
        # with several chunks, the bytes moved grow with their number as well
        if (key, micro) not in self._derived_heads and self.device != "cpu" and not key.chunk:
            derived = _along(known, micro)
            if derived is not None:
                self._derived_heads[key, micro] = derived
        return self._derived_heads.get((key, micro))

    def _known(
        self, table: dict[Settings, dict[int, Piece]], section: str, key: Settings, cls: type[Piece]
    ) -> dict[int, Piece]:
        """What was simulated, by the number of sequences."""
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
        """Simulate a model with so many layers, and keep what follows from it."""
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
            self._known(self._bodies, "bodies", key, Body)[micro] = body
            self._keep("bodies", key, micro, body)
        key = _head_key(settings)
        self._known(self._heads, "heads", key, Head)[micro] = head
        self._keep("heads", key, micro, head)
        return body, head

    def _prepare(self, settings: Settings, recompute: str, depth: int | None) -> Prepared:
        key = replace(_body_key(settings, recompute), chunk=settings.chunk), depth
        if key not in self._prepared:
            dtype = DTYPES[settings.dtype][0]
            model = self.shapes.model(dtype, settings.attention, settings.tensor, depth)
            path, layers = layers_of(model)
            target = replace(settings, recompute=recompute, layers=len(layers))
            around = prepare(model, target, True)
            inner = model.get_submodule(path.rpartition(".")[0])
            inner = None if inner is model else inner
            self._prepared[key] = Prepared(model, layers, inner, around)
        return self._prepared[key]

    def _simulated(
        self, settings: Settings, recompute: str, depth: int | None
    ) -> tuple[Body, Head]:
        self.simulations += 1
        some = replace(settings, recompute=recompute, layers=recompute != "none")
        size = f"{settings.micro_batch} x {settings.sequence:,}"
        self.said(f"simulation {self.simulations}: {size}, {some}")
        prepared = self._prepare(settings, recompute, depth)
        model, layers = prepared.model, prepared.layers
        simulation = Cutting(
            list(layers),
            prepared.inner,
            target=self.device,
            capacity=None,
            model=model,
            vocabulary=self.shapes.facts.vocabulary or None,
            sequence=settings.sequence,
            autocast=DTYPES[settings.dtype][1],
        )
        if recompute not in ("none", "full") and not prepared.warm:
            simulation.warm(settings.micro_batch)  # policies learn from a first step
        prepared.warm = True
        simulation.step(settings.micro_batch, settings.sequence, 0)
        model.zero_grad()
        body, head = simulation.recorded()
        parameter_bytes = sum(t.nbytes for p in model.parameters() for t in stored(p))
        body.buffers = simulation.standing() - parameter_bytes
        offload = prepared.around.offload
        if offload is not None:
            body.offloaded = offload.offloaded_bytes / len(layers)
            for layer in body.layers:
                layer.forward.work.launches += PARKED * offload.offloaded_tensors / len(layers)
        return body, head


def _body_key(settings: Settings, recompute: str) -> Settings:
    """What layers depend on, besides the number of sequences."""
    return Settings(
        sequence=settings.sequence,
        precision=_precision_key(settings),
        patched=settings.patched,
        recompute=recompute,
        tiles=settings.tiles,
        attention=settings.attention,
        offload_activations=settings.offload_activations,
        tensor=settings.tensor,
    )


def _head_key(settings: Settings) -> Settings:
    """What a head depends on; a chunk that holds all tokens is as good as another one.

    The last layer's output is not freed where it was offloaded.
    """
    chunk = settings.chunk
    if chunk and settings.micro_batch * settings.sequence <= chunk:
        chunk = 0
    return Settings(
        sequence=settings.sequence,
        precision=_precision_key(settings),
        patched=settings.patched,
        chunk=chunk,
        attention=settings.attention,
        offload_activations=settings.offload_activations,
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


def _along(known: Mapping[int, Piece], micro: int, between: bool = False) -> Piece | None:
    """Derive a number of sequences from two others, if the same operators ran at both."""
    for low, high in combinations(sorted(known), 2):
        if between and not low < micro < high:
            continue
        if known[low].alike(known[high]):
            share = (micro - low) / (high - low)
            return known[low].toward(known[high], share)
    return None
