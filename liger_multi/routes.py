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
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from liger_multi import checks
from liger_multi.arguments import by_name
from liger_multi.errors import LigerMultiError
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
    def from_indices(cls, indices: Tensor) -> Routes:
        """Routes from the indices of an inference engine, ``(layers, tokens, k)`` of integers.

        Raises:
            RoutesError: They have another shape or dtype.
        """
        if not isinstance(indices, Tensor) or indices.ndim != 3 or indices.is_floating_point():
            raise RoutesError(
                f"routes: indices must be integers (layers, tokens, k), got "
                f"{checks.describe(indices)}"
            )
        return cls(list(indices))

    @property
    def tokens(self) -> int:
        """Tokens of each layer."""
        return len(self.layers[0]) if self.layers else 0

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a file that :meth:`load` reads, in the smallest integers that hold the indices."""
        most = max((int(x.max()) for x in self.layers if x.numel()), default=0)
        dtype = next(
            d for d in (torch.uint8, torch.int16, torch.int32) if torch.iinfo(d).max >= most
        )
        torch.save([x.to("cpu", dtype) for x in self.layers], path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Routes:
        """Read what :meth:`save` wrote."""
        return cls(torch.load(path, weights_only=True))


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
        above = [".".join(names[:n]) for n in range(len(names), 0, -1)]
        layer = (modules[p] for p in above if hasattr(type(modules[p]), "gradient_checkpointing"))
        routers.append(_Router(path, experts, next(layer, module)))
    if not routers:
        raise RoutesError(f"routes: {unpatched_class(model).__name__} has no module with experts")
    if len({id(router.around) for router in routers}) < len(routers):
        raise RoutesError("routes: a layer has two blocks of experts, and nothing tells them apart")
    return routers


def _expert_count(module: nn.Module) -> int:
    """How many experts a block has; 0 where it is none."""
    experts = module._modules.get("experts")
    if isinstance(experts, nn.ModuleList):
        return len(experts)
    if experts is None:
        return 0
    stacks = [p.shape[0] for p in experts.parameters(recurse=False) if p.ndim == 3]
    return max(stacks, default=0)


# --- a forward pass ---


@dataclass
class _Pass:
    """One forward pass, whose tokens are some of those of the routes.

    Attributes:
        first: The number of its first token among those of the routes.
        sources: The row of the routers' tokens that each of its tokens is, ``(count,)``; rows of
            trees have shared ones several times.
        known: What is replayed; None where routes are recorded.
        chosen: What every router chose, ``(rows, k)``, also for a layer that runs again.
    """

    first: int
    sources: Tensor
    known: list[Tensor] | None
    chosen: dict[int, Tensor] = field(default_factory=dict)

    def indices(self, number: int, today: Tensor) -> Tensor:
        """The experts of all rows, ``(rows, k)``: by the routes, or today's without any."""
        if number not in self.chosen:
            self.chosen[number] = today if self.known is None else self._replayed(number, today)
        return self.chosen[number]

    def _replayed(self, number: int, today: Tensor) -> Tensor:
        known = self.known[number][self.first : self.first + len(self.sources)]  # type: ignore[index]
        if known.shape[1] != today.shape[1]:
            raise RoutesError(
                f"routes: layer {number} chooses {today.shape[1]} experts of a token, and the "
                f"routes have {known.shape[1]}"
            )
        return today.index_copy(0, self.sources, known.to(today))


def _sources(arguments: Mapping[str, Any]) -> Tensor:
    """The rows of the routers' tokens that are tokens of sequences, in their order."""
    rows = rows_of(arguments)
    if rows is None:
        raise RoutesError("routes: the model got neither input_ids nor inputs_embeds")
    batch, tokens = rows.shape[:2]
    offer = offered(tokens, batch)
    if offer is not None:
        tree = offer.tree
        places = [p for end in tree.ends if end >= 0 for p in tree.path(end)]
        return torch.tensor(places, dtype=torch.int64, device=rows.device)
    visible = visible_tokens(arguments.get("attention_mask"), tokens)
    if visible is None:
        return torch.arange(batch * tokens, device=rows.device)
    return visible.expand(batch, tokens).flatten().nonzero()[:, 0].to(rows.device)


class _Choosing(TorchFunctionMode):
    """Looks for ``topk`` over experts while a layer runs, and puts the routes in its place."""

    def __init__(self, forward: _Pass, number: int, experts: int) -> None:
        super().__init__()
        self.forward, self.number, self.experts, self.count = forward, number, experts, 0

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
        self.count += 1
        indices = self.forward.indices(self.number, today.detach().flatten(0, -2))
        indices = indices.view(today.shape)
        return torch.return_types.topk((scores.gather(-1, indices), indices))


class _Following:
    """The routers of a model that record or replay."""

    def __init__(self, model: nn.Module, routes: Routes, *, recording: bool) -> None:
        self.routes, self.recording = routes, recording
        self.name, self.routers = unpatched_class(model).__name__, _routers(model)
        self.count, self.running = 0, set[int]()
        self.forward: _Pass | None = None
        if recording:
            routes.layers = [torch.zeros(0, 0, dtype=torch.int64)] * len(self.routers)
        elif len(routes.layers) != len(self.routers):
            raise RoutesError(
                f"routes: {self.name} has {len(self.routers)} layers with experts, and the routes "
                f"have {len(routes.layers)}"
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
        known = None if self.recording else self.routes.layers
        self.forward, self.count = _Pass(self.count, sources, known), last

    def end(self, model: nn.Module, args: Any, output: Any) -> None:
        """After a forward: keep what the routers chose."""
        forward, self.forward = self.forward, None
        if forward is None:
            return
        missing = [r.path for n, r in enumerate(self.routers) if n not in forward.chosen]
        if missing:
            raise RoutesError(f"routes: {self.name} did not run {', '.join(missing)}")
        if not self.recording:
            return
        for number, chosen in forward.chosen.items():
            before, rows = self.routes.layers[number], chosen[forward.sources].to(torch.int16)
            self.routes.layers[number] = torch.cat([before, rows]) if before.numel() else rows

    def within(self, number: int, function: Callable[..., Any]) -> Callable[..., Any]:
        """A layer's forward that chooses by the routes of this pass, whenever it is called."""
        forward, router = self.forward, self.routers[number]
        if forward is None or trying():
            return function

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if number in self.running:  # the layer's forward, in its checkpoint
                return function(*args, **kwargs)
            self.running.add(number)
            try:
                with _Choosing(forward, number, router.experts) as choosing:
                    output = function(*args, **kwargs)
            finally:
                self.running.discard(number)
            if choosing.count != 1:
                raise RoutesError(
                    f"routes: the router of {router.path} is not recognized: it chose by topk over "
                    f"{router.experts} experts {choosing.count} times in a pass, wanted once"
                )
            return output

        return call

    def install(self, number: int) -> Callable[[], None]:
        """Stand around the forward of a layer and around its checkpoint; returns how to leave."""
        layer: Any = self.routers[number].around
        table = vars(layer)
        names = [n for n in ("forward", CHECKPOINT) if hasattr(layer, n)]
        before = {n: table[n] for n in names if n in table}
        inner = {n: getattr(layer, n) for n in names}

        def forward(*args: Any, **kwargs: Any) -> Any:
            return self.within(number, inner["forward"])(*args, **kwargs)

        def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            return inner[CHECKPOINT](self.within(number, function), *args, **kwargs)

        ours = {"forward": functools.wraps(inner["forward"])(forward), CHECKPOINT: checkpoint}
        table.update({n: ours[n] for n in names})

        def leave() -> None:
            for name in names:
                del table[name]
            table.update(before)

        return leave


CHECKPOINT = "_gradient_checkpointing_func"
"""What calls a layer of transformers under a checkpoint."""


@contextlib.contextmanager
def _following(model: nn.Module, routes: Routes, *, recording: bool) -> Iterator[Routes]:
    following = _Following(model, routes, recording=recording)
    hooks = [
        model.register_forward_pre_hook(following.begin, with_kwargs=True),
        model.register_forward_hook(following.end),
    ]
    leaving = [following.install(number) for number in range(len(following.routers))]
    try:
        yield routes
    finally:
        for hook in hooks:
            hook.remove()
        for leave in leaving:
            leave()


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
            experts, or is compiled.
    """
    return _following(model, Routes(), recording=True)


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
            or fewer tokens.
    """
    return _following(model, routes, recording=False)
