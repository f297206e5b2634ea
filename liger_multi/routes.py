"""Replayed routes: a mixture of experts trains with the choices of an earlier pass.

A policy that samples with other kernels than it trains with chooses other experts for some tokens,
and their log-probabilities differ by more than rounding. Here the choice of experts is recorded, or
comes from an inference engine, and is made again. Only the choice: weights of the experts are
computed from today's logits at those indices, so routers keep their gradients.

    with routes.record(model) as recorded:
        model(**inputs)
    with routes.replay(model, recorded):
        model(**inputs).loss.backward()

Routes are kept for every layer and token, in the order of the sequences and without padding, so
they fit the same sequences in a padded batch, in a packed row and in a row of trees
(:mod:`liger_multi.trees`).

Source: Ma et al. 2025 (arXiv:2510.11370).
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from liger_multi import checks
from liger_multi.errors import LigerMultiError
from liger_multi.modules.arguments import by_name
from liger_multi.patching import shards
from liger_multi.patching.packing.samples import rows_of, visible_tokens
from liger_multi.patching.packing.tree import offered
from liger_multi.patching.packing.trial import trying
from liger_multi.patching.swap import unpatched_class

__all__ = ["Routes", "RoutesError", "record", "replay"]


class RoutesError(LigerMultiError, ValueError):
    """A router is not recognized, or routes do not fit the tokens."""


@dataclass
class Routes:
    """The experts of every token: for each layer with experts a tensor ``(tokens, k)``.

    Attributes:
        layers: Indices of experts, by the number of the layer among those that have a router; of
            all sequences one after another, without padding.
    """

    layers: list[Tensor] = field(default_factory=list)

    @classmethod
    def from_indices(cls, indices: Any) -> Routes:
        """Routes from the indices of an inference engine, ``(layers, tokens, k)`` of integers.

        Args:
            indices: A tensor or an array.

        Raises:
            RoutesError: They have another shape or dtype, or are below 0.
        """
        if hasattr(indices, "__array__") and not isinstance(indices, Tensor):
            indices = torch.as_tensor(indices)
        if not isinstance(indices, Tensor) or indices.ndim != 3:
            raise RoutesError(
                f"routes: indices must be integers (layers, tokens, k), got "
                f"{checks.describe(indices)}"
            )
        return cls([_signed(layer, index) for index, layer in enumerate(indices)])

    @property
    def tokens(self) -> int:
        """Tokens of each layer."""
        return len(self.layers[0]) if self.layers else 0

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a file that :meth:`load` reads, in the smallest integers that hold the indices."""
        layers = [_signed(x, index) for index, x in enumerate(self.layers)]
        largest = max((int(x.max()) for x in layers if x.numel()), default=0)
        dtype = next(
            d for d in (torch.uint8, torch.int16, torch.int32) if torch.iinfo(d).max >= largest
        )
        torch.save([x.to("cpu", dtype) for x in layers], path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Routes:
        """Read what :meth:`save` wrote."""
        return cls(torch.load(path, weights_only=True))


_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)  # PyTorch has no maximum of these


def _signed(indices: Any, index: int) -> Tensor:
    """Indices of one layer in a dtype that can be computed with; RoutesError where they are none.

    To look at them waits for their device.
    """
    layer: Tensor = indices
    integers = isinstance(layer, Tensor) and not (layer.is_floating_point() or layer.is_complex())
    if not integers or layer.dtype == torch.bool or layer.ndim != 2:
        raise RoutesError(
            f"routes: layer {index} must have integers (tokens, k), got {checks.describe(layer)}"
        )
    layer = layer.to(torch.int64) if layer.dtype in _UNSIGNED else layer
    if layer.numel() and int(layer.min()) < 0:
        raise RoutesError(f"routes: layer {index} has an expert {int(layer.min())}")
    return layer


# --- the routers of a model ---


@dataclass(frozen=True)
class _Router:
    """A block of experts, and the module around it that a checkpoint runs again.

    Attributes:
        path: Of the block.
        experts: How many there are.
        around: The layer, or the block itself.
    """

    path: str
    experts: int
    around: nn.Module


def _routers(model: nn.Module) -> list[_Router]:
    """The blocks that have experts, in the order of the model."""
    modules = dict(model.named_modules())
    routers = []
    for path, module in modules.items():
        experts = _expert_count(module)
        if experts < 2:
            continue
        names = path.split(".")
        ancestors = [".".join(names[:n]) for n in range(len(names), 0, -1)]
        layer = (
            modules[p] for p in ancestors if hasattr(type(modules[p]), "gradient_checkpointing")
        )
        routers.append(_Router(path, experts, next(layer, module)))
    if not routers:
        raise RoutesError(f"routes: {unpatched_class(model).__name__} has no module with experts")
    if len({id(router.around) for router in routers}) < len(routers):
        raise RoutesError("routes: a layer has two blocks of experts, and nothing tells them apart")
    return routers


def _expert_count(module: nn.Module) -> int:
    """How many experts a block has; 0 where it is none."""
    experts = module._modules.get("experts")
    while isinstance(experts, nn.Module) and "base_layer" in experts._modules:
        experts = experts._modules["base_layer"]  # below adapters of PEFT
    if isinstance(experts, nn.ModuleList):
        return len(experts)
    if experts is None:
        return 0
    stacks = [p.shape[0] for p in experts.parameters(recurse=False) if p.ndim == 3]
    count = getattr(experts, "num_experts", 0)  # which dbrx's two axes do not tell
    return max(stacks, default=count if isinstance(count, int) else 0)


# --- a forward pass ---


@dataclass
class _Pass:
    """One forward pass, whose tokens are some of those of the routes.

    Attributes:
        first: The number of its first token among those of the routes.
        sources: The row of the routers' tokens that each of its tokens is, ``(count,)``; rows of
            trees have shared ones several times.
        known: What is replayed; None where routes are recorded.
        chosen: What every router chose, ``(rows, k)``, also for a layer that runs again; by the
            number of the router and the axes of its scores.
        last: The axes of the scores by which every router chose.
        row: The whole row, if the model is sharded: its routers have this rank's tokens.
    """

    first: int
    sources: Tensor
    known: list[Tensor] | None
    chosen: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    last: dict[int, int] = field(default_factory=dict)
    row: shards.Row | None = None

    def indices(self, number: int, axes: int, today: Tensor) -> Tensor:
        """The experts of all rows, ``(rows, k)``: by the routes, or today's without any."""
        key, row = (number, axes), shards.row()
        if row is not None and row.ranks is not None:  # a layer that runs again is in none
            self.row = row
        if key not in self.chosen:
            self.chosen[key] = today
            if self.known is not None and self.known[number].shape[1] == today.shape[1]:
                self.chosen[key] = self._replayed(self.known[number], today)
        return self.chosen[key]

    def end(self, number: int, axes: int) -> None:
        """A router has run, and chose by scores of so many axes."""
        chosen = self.chosen[number, axes].shape[1]
        if self.known and self.known[number].shape[1] != chosen:
            raise RoutesError(
                f"routes: layer {number} chooses {chosen} experts of a token, and the routes have "
                f"{self.known[number].shape[1]}"
            )
        self.last[number] = axes

    def _replayed(self, indices: Tensor, today: Tensor) -> Tensor:
        indices, sources = indices[self.first : self.first + len(self.sources)], self.sources
        if self.row is not None:
            indices, sources = indices[self._local_rows[0]], self._local_rows[1]
        return today.index_copy(0, sources, indices.to(today))

    @functools.cached_property
    def _local_rows(self) -> tuple[Tensor, Tensor]:
        """Which tokens this rank has, and their rows in its routers."""
        row: Any = self.row
        batch, position = self.sources // row.length, self.sources % row.length
        local = (position // row.share == row.ranks.rank).nonzero()[:, 0]
        return local, batch[local] * row.share + position[local] % row.share

    def of_tokens(self, number: int) -> Tensor:
        """What a router chose for every token, ``(count, k)``, also of other ranks."""
        chosen = self.chosen[number, self.last[number]]
        if self.row is not None and self.row.ranks is not None:
            rows = chosen.unflatten(0, (-1, self.row.share))
            chosen = shards.gather(rows, self.row.ranks)[:, : self.row.length].flatten(0, 1)
        return chosen[self.sources]


def _sources(arguments: Mapping[str, Any]) -> Tensor:
    """The rows of the routers' tokens that are tokens of sequences, in their order."""
    rows = rows_of(arguments)
    if rows is None:
        raise RoutesError("routes: the model got neither input_ids nor inputs_embeds")
    batch, tokens = rows.shape[:2]
    offer = offered(tokens, batch)
    if offer is not None:
        tree = offer.tree
        nodes = [p for end in tree.ends if end >= 0 for p in tree.path(end)]
        return torch.tensor(nodes, dtype=torch.int64, device=rows.device)
    visible = visible_tokens(arguments.get("attention_mask"), tokens)
    if visible is None:
        return torch.arange(batch * tokens, device=rows.device)
    return visible.expand(batch, tokens).flatten().nonzero()[:, 0].to(rows.device)


class _Choosing(TorchFunctionMode):
    """Looks for ``topk`` over experts while a layer runs, and puts the routes in its place.

    Routers with groups of experts first choose by ``(tokens, groups, experts of a group)``: where
    there is one group, these are scores of all experts with an axis more than those that follow. To
    replace that choice as well changes nothing, as the only group is taken in any case.
    """

    def __init__(self, forward: _Pass, number: int, experts: int) -> None:
        super().__init__()
        self.forward, self.number, self.experts = forward, number, experts
        self.axes: list[int] = []

    @property
    def count(self) -> int:
        """How often the router chose among all experts, by scores with the fewest axes."""
        return self.axes.count(min(self.axes, default=0))

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        output = function(*args, **(kwargs or {}))
        if function not in (torch.topk, Tensor.topk):
            return output
        scores, today = args[0] if args else kwargs["input"], output[1]
        over_experts = scores.shape[:-1] == today.shape[:-1] and scores.shape[-1] == self.experts
        if not over_experts or today.shape[-1] == self.experts:
            return output
        self.axes.append(scores.ndim)
        indices = self.forward.indices(self.number, scores.ndim, today.detach().flatten(0, -2))
        if self.forward.known is not None:  # the same is recorded, in whichever order blocks begin
            for recording in _recording.get():
                recording.forward.chosen[recording.number, scores.ndim] = indices
        indices = indices.view(today.shape)
        return torch.return_types.topk((scores.gather(-1, indices), indices))


_recording: ContextVar[tuple[_Choosing, ...]] = ContextVar("recording", default=())
_REPLAYS = "_liger_multi_replays"
"""Attribute of the forward of a layer whose routes are replayed."""


class _Following:
    """The routers of a model that record or replay."""

    def __init__(self, model: nn.Module, routes: Routes, *, recording: bool) -> None:
        self.routes, self.recording = routes, recording
        self.name, self.routers = unpatched_class(model).__name__, _routers(model)
        self.count, self.running = 0, set[int]()
        self.inputs: dict[tuple[int, int], _Pass] = {}  # of layers, by their number and address
        self.forward: _Pass | None = None
        if recording:
            routes.layers = [torch.zeros(0, 0, dtype=torch.int64)] * len(self.routers)
        elif len(routes.layers) != len(self.routers):
            raise RoutesError(
                f"routes: {self.name} has {len(self.routers)} layers with experts, and the routes "
                f"have {len(routes.layers)}"
            )
        else:
            self.routes = Routes([_signed(x, number) for number, x in enumerate(routes.layers)])
            self._check_sizes()

    def _check_sizes(self) -> None:
        """Refuse routes whose layers have other tokens than each other, or unknown experts."""
        for index, (layer, router) in enumerate(zip(self.routes.layers, self.routers)):
            largest = int(layer.max()) if layer.numel() else 0
            if len(layer) != self.routes.tokens:
                raise RoutesError(
                    f"routes: layer 0 has {self.routes.tokens} tokens, layer {index} {len(layer)}"
                )
            if largest >= router.experts:
                raise RoutesError(
                    f"routes: {router.path} has {router.experts} experts, and the routes of layer "
                    f"{index} name expert {largest}"
                )

    def begin(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """Before a forward of the model: which tokens it has."""
        if torch.compiler.is_compiling():
            raise RoutesError(f"routes: {self.name} is compiled, which is not served")
        sources = _sources(by_name(unpatched_class(model).forward, args, kwargs))
        last = self.count + len(sources)
        if not self.recording and last > self.routes.tokens:
            raise RoutesError(
                f"routes: {self.name} got {last} tokens, and the routes have {self.routes.tokens}"
            )
        routes = None if self.recording else self.routes.layers
        self.forward = _Pass(self.count, sources, routes)

    def end(self, model: nn.Module, args: Any, output: Any) -> None:
        """After a forward: keep what the routers chose."""
        forward, self.forward = self.forward, None
        if forward is None:
            return
        missing = [r.path for n, r in enumerate(self.routers) if n not in forward.last]
        if missing:
            raise RoutesError(f"routes: {self.name} did not run {', '.join(missing)}")
        self.count += len(forward.sources)
        if not self.recording:
            return
        for index in range(len(self.routers)):
            earlier, rows = self.routes.layers[index], forward.of_tokens(index).to(torch.int16)
            self.routes.layers[index] = torch.cat([earlier, rows]) if earlier.numel() else rows

    def pass_of(self, number: int, args: Any, kwargs: Any) -> _Pass | None:
        """The pass that a layer runs in, or runs again for: a checkpoint keeps its input."""
        inputs = (x for x in (*args, *kwargs.values()) if type(x) is Tensor)
        hidden = None if torch.compiler.is_compiling() else next(inputs, None)
        if hidden is None:
            return self.forward
        key = number, hidden.data_ptr()
        if self.forward is not None:
            self.inputs[key] = self.forward
        return self.inputs.get(key)

    def within(
        self, number: int, function: Callable[..., Any], forward: _Pass | None
    ) -> Callable[..., Any]:
        """A layer's forward that chooses by the routes of a pass, whenever it is called."""
        router = self.routers[number]
        if forward is None or trying():
            return function

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if number in self.running:  # the layer's forward, in its checkpoint
                return function(*args, **kwargs)
            self.running.add(number)
            choosing = _Choosing(forward, number, router.experts)
            token = _recording.set(_recording.get() + (choosing,) * self.recording)
            try:
                with choosing:
                    output = function(*args, **kwargs)
            finally:
                _recording.reset(token)
                self.running.discard(number)
            if choosing.count != 1:
                raise RoutesError(
                    f"routes: the router of {router.path} is not recognized: it chose by topk over "
                    f"{router.experts} experts {choosing.count} times in a pass, wanted once"
                )
            forward.end(number, min(choosing.axes))
            return output

        return call

    def install(self, number: int) -> Callable[[], None]:
        """Stand around the forward of a layer and around its checkpoint; returns how to leave."""
        layer: Any = self.routers[number].around
        table = vars(layer)
        names = [n for n in ("forward", CHECKPOINT) if hasattr(layer, n)]
        saved = {n: table[n] for n in names if n in table}
        inner = {n: getattr(layer, n) for n in names}
        if not self.recording and getattr(inner["forward"], _REPLAYS, False):
            raise RoutesError(f"routes: {self.name} replays routes already; end that block before")

        def forward(*args: Any, **kwargs: Any) -> Any:
            pass_of_layer = self.pass_of(number, args, kwargs)
            return self.within(number, inner["forward"], pass_of_layer)(*args, **kwargs)

        def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            checkpointed = self.within(number, function, self.forward)
            return inner[CHECKPOINT](checkpointed, *args, **kwargs)

        wrappers = {"forward": functools.wraps(inner["forward"])(forward), CHECKPOINT: checkpoint}
        vars(wrappers["forward"]).update({} if self.recording else {_REPLAYS: True})
        table.update({n: wrappers[n] for n in names})

        def uninstall() -> None:
            for name in names:
                if table.get(name) is wrappers[name]:  # checkpointing may be turned on meanwhile
                    del table[name]
                    table.update({name: saved[name]} if name in saved else {})

        return uninstall


CHECKPOINT = "_gradient_checkpointing_func"
"""What calls a layer of transformers under a checkpoint."""


@contextlib.contextmanager
def _installed(model: nn.Module, routes: Routes, *, recording: bool) -> Iterator[Routes]:
    follower = _Following(model, routes, recording=recording)
    with contextlib.ExitStack() as stack:
        for index in range(len(follower.routers)):
            stack.callback(follower.install(index))
        stack.callback(model.register_forward_pre_hook(follower.begin, with_kwargs=True).remove)
        stack.callback(model.register_forward_hook(follower.end).remove)
        yield routes


# --- record and replay ---


def record(model: nn.Module) -> contextlib.AbstractContextManager[Routes]:
    """Record which experts the tokens of all forward passes within are routed to.

    The tokens of a pass follow those of the pass before. Without an attention mask, every token of
    a batch is recorded. In a row of trees, the tokens are those of the paths, one path after
    another, as in :meth:`liger_multi.trees.Batch.unshared`.

    Args:
        model: A model of transformers with experts, patched or not.

    Raises:
        RoutesError: A router does not choose by one ``topk`` over its experts; the model has no
            experts.
    """
    return _installed(model, Routes(), recording=True)


def replay(model: nn.Module, routes: Routes) -> contextlib.AbstractContextManager[Routes]:
    """Let the routers of all forward passes within choose the experts that routes name.

    The first pass takes the first tokens, and so on. Weights are today's, at the indices of the
    routes, and gradients reach the router through them; layers of a checkpoint choose the same
    experts when they run again, also after the block. Padding keeps today's choice. Checkpoints of
    other libraries than transformers run again as today outside of the block, so backward belongs
    into it.

    Args:
        model: As for :func:`record`.
        routes: Recorded or made of indices.

    Raises:
        RoutesError: As :func:`record`; the routes have another number of layers, experts of a token
            or fewer tokens, or name experts that the model does not have; a block within another.
    """
    return _installed(model, routes, recording=False)
