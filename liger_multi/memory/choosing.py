"""Choose recompute policies by a budget of bytes: once, or before each forward by live headroom.

What a layer keeps and recomputes under each policy follows from shapes alone.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from liger_multi._torch_private import tree_leaves, tree_map
from liger_multi.checks import describe
from liger_multi.errors import check_name
from liger_multi.memory.estimation import estimate, meta_model
from liger_multi.memory.measure import tensors_in
from liger_multi.memory.recompute import (
    POLICIES,
    Recompute,
    apply_recompute,
    decoder_layers,
    undo_all,
)
from liger_multi.memory.recorder import FORWARD, RECOMPUTE
from liger_multi.memory.setup import DTYPES, SetupOptions, TrainingSetup, positive, setup_of
from liger_multi.memory.simulation import Simulation, backward, in_training
from liger_multi.patcher import patcher

if TYPE_CHECKING:
    from typing_extensions import Unpack

# --- costs ---


@dataclass(frozen=True)
class Cost:
    """One layer under one policy.

    Attributes:
        kept_bytes: Bytes saved for backward, the layer's input included.
        seconds: Time of the recomputation at a device's peak rates.
    """

    kept_bytes: int
    seconds: float


@dataclass(frozen=True)
class Stats:
    """What policies cost in every layer of a model, for one shape of batch.

    Attributes:
        layers: For every layer, in order, the cost by policy name.
        tokens: Tokens of the simulated batch; bytes and seconds are proportional to them.
    """

    layers: tuple[Mapping[str, Cost], ...]
    tokens: int

    def kept_bytes(self, policies: tuple[str, ...]) -> int:
        """Bytes that all layers keep, plus those of the largest layer while it is recomputed."""
        pairs = list(zip(self.layers, policies, strict=True))
        recomputed = (
            max(c.kept_bytes for c in layer.values()) - layer[p].kept_bytes
            for layer, p in pairs
            if p != "none"
        )
        return sum(layer[p].kept_bytes for layer, p in pairs) + max([0, *recomputed])

    def seconds(self, policies: tuple[str, ...]) -> float:
        """Time of the recomputation in all layers."""
        return sum(layer[p].seconds for layer, p in zip(self.layers, policies, strict=True))


# --- one layer ---

# Of one second on an H200 (torch 2.11, 2026-11): 16-bit FLOPs, bytes read and written.
FLOPS, BANDWIDTH = 6.9e14, 4.24e12


@in_training
def layer_stats(
    model_or_config: Any,
    batch: int,
    sequence: int,
    *,
    dtype: str = "bfloat16",
    patched: bool | Mapping[str, Any] = False,
    attention: str = "sdpa",
    device: str = "cuda",
    flops: float = FLOPS,
    bandwidth: float = BANDWIDTH,
) -> Stats:
    """Run every kind of layer under every policy on the meta device.

    Args:
        model_or_config: As of :func:`liger_multi.memory.estimate`, as are the options not named
            here; recompute policies that a model has already are left out.
        batch: Sequences.
        sequence: Tokens of each.
        dtype: Of the weights.
        patched: Whether the model is patched, or its options.
        attention: ``"sdpa"``, ``"flash_attention_2"`` or ``"eager"``.
        device: Type of the device that it stands for.
        flops: Of GEMMs, per second.
        bandwidth: Bytes read and written per second.
    """
    param_dtype, autocast, _ = DTYPES[check_name(ValueError, "dtype", dtype, DTYPES)]
    model = _unwrapped(meta_model(model_or_config, param_dtype, attention, sequence))
    if patched:
        patcher().patch(model, **(patched if isinstance(patched, Mapping) else {}))
    model.train()
    layers = [layer for _, layer in decoder_layers(model)]
    calls = _calls(model, layers, batch, sequence, device, autocast)
    costs: dict[Any, dict[str, Cost]] = {}
    for layer, (args, kwargs) in zip(layers, calls, strict=True):
        key = _cost_key(layer)
        if key not in costs:
            costs[key] = {}
            for name in POLICIES:
                counter = _Count(device, None, layer, None, sequence, autocast)
                costs[key][name] = counter.cost(name, args, kwargs, flops, bandwidth)
    return Stats(tuple(costs[_cost_key(layer)] for layer in layers), batch * sequence)


def _unwrapped(model: Any) -> Any:
    """The same copy of a model, with neither policies nor checkpointing of its own."""
    undo_all(model)
    for _, layer in decoder_layers(model):
        if getattr(layer, "gradient_checkpointing", False):
            layer.__dict__["gradient_checkpointing"] = False
    return model


def _cost_key(layer: nn.Module) -> Any:
    """The key under which layers cost the same."""
    sizes = tuple((n, p.shape, p.dtype, p.requires_grad) for n, p in layer.named_parameters())
    return type(layer), getattr(layer, "attention_type", None), sizes


def _calls(
    model: Any, layers: list[nn.Module], batch: int, sequence: int, device: str, autocast: Any
) -> list[tuple[Any, Any]]:
    """The arguments that every layer is called with."""
    calls: dict[int, tuple[Any, Any]] = {}

    def note(layer: nn.Module, args: Any, kwargs: Any) -> None:
        calls[id(layer)] = args, kwargs

    handles = [layer.register_forward_pre_hook(note, with_kwargs=True) for layer in layers]
    simulation = Simulation(device, None, model, None, sequence, autocast)
    ids = torch.empty(batch, sequence, dtype=torch.int64, device="meta")
    with simulation.surroundings(), torch.no_grad():
        simulation.forward(lambda: model(input_ids=ids))
    for handle in handles:
        handle.remove()
    missing = sum(id(layer) not in calls for layer in layers)
    if missing:
        raise ValueError(f"{missing} of {len(layers)} layers were not called for token ids alone")
    return [calls[id(layer)] for layer in layers]


class _Count(Simulation):
    """Simulates one layer's forward and backward; counts the work of its second forward."""

    _flops = _bytes = 0.0

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operator; in a second forward, count its work."""
        is_nested = bool(self._ops)
        result = super().run(func, args, kwargs)
        if not is_nested and self._phase() == RECOMPUTE:
            self._work(func, args, kwargs, result)
        return result

    def _work(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        inputs = {t.untyped_storage()._cdata: t for t in tensors_in((args, *kwargs.values()))}
        outputs = [t for t in tensors_in((result,)) if t.untyped_storage()._cdata not in inputs]
        if not outputs:
            return  # a view
        self._bytes += sum(t.nbytes for t in (*inputs.values(), *outputs))
        name = func.name()
        if "scaled_dot_product" in name or name.endswith("attention_forward"):
            query, key = args[0], args[1]
            self._flops += 2 * query.numel() * key.shape[-2]  # causal: half of both GEMMs
        elif outputs and any(word in name for word in ("::mm", "::addmm", "::bmm", "grouped_mm")):
            factors = [t for t in tensors_in(args[:3]) if t.ndim > 1]
            self._flops += 2 * outputs[0].numel() * factors[-2].shape[-1]

    def cost(self, policy: str, args: Any, kwargs: Any, flops: float, bandwidth: float) -> Cost:
        """Bytes between forward and backward, and seconds of the second forward."""
        layer: Any = self._model
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        hidden = next(t for t in inputs if t.is_floating_point())

        def fresh(value: Any) -> Any:
            if value is hidden:
                return value.detach().requires_grad_()
            return value.detach() if isinstance(value, Tensor) else value

        args, kwargs = tree_map(fresh, (args, kwargs))
        with apply_recompute(nn.ModuleList([nn.ModuleList([layer])]), policy), self.surroundings():
            result = self.forward(lambda: layer(*args, **kwargs))
            output = result if isinstance(result, Tensor) else result[0]
            born = [b for b in self.blocks if b.phase == FORWARD and not b.died]
            kept_bytes = sum(b.size for b in born) - output.nbytes + hidden.nbytes
            backward(output)
        return Cost(kept_bytes, self._flops / flops + self._bytes / bandwidth)


# --- the choice ---


@dataclass(frozen=True)
class Choice:
    """A policy for every layer, an argument of ``apply_recompute``.

    Attributes:
        policies: Policy names, by layer.
        kept_bytes: As :meth:`Stats.kept_bytes`.
        seconds: As :meth:`Stats.seconds`.
        fits: Whether the budget suffices; if not, this is the choice that keeps least.
    """

    policies: tuple[str, ...]
    kept_bytes: int
    seconds: float
    fits: bool

    def __str__(self) -> str:
        counts = {name: self.policies.count(name) for name in POLICIES if name in self.policies}
        parts = ", ".join(f"{name}: {n} layers" for name, n in counts.items())
        return f"{parts}; {self.kept_bytes / 2**30:.2f} GiB kept"


def choose(model_or_stats: Any, budget_bytes: int, **options: Any) -> Choice:
    """The cheapest policies whose layers together keep at most so many bytes.

    Layer by layer, the policy that costs the least time per byte comes first, from the first
    layer on (what it keeps lives longest).

    Args:
        model_or_stats: From :func:`layer_stats`, or its first argument.
        budget_bytes: For what layers keep, and the largest of them while it is computed again.
        options: Of :func:`layer_stats` (``batch`` and ``sequence`` are needed), where no
            statistics are given.
    """
    stats = model_or_stats
    if not isinstance(stats, Stats):
        stats = layer_stats(stats, **options)
    elif options:
        raise TypeError(f"options go with a model, got {', '.join(options)} beside statistics")
    chosen = ["none"] * len(stats.layers)
    steps: list[tuple[int, str]] = []
    for _, layer, name in sorted(_steps(stats)):
        if stats.kept_bytes(tuple(chosen)) <= budget_bytes:
            break
        steps.append((layer, chosen[layer]))
        chosen[layer] = name
    for layer, previous in steps[:-1]:  # the last step may have made more room than was needed
        less = [*chosen[:layer], previous, *chosen[layer + 1 :]]
        cheaper = stats.layers[layer][previous].seconds < stats.layers[layer][chosen[layer]].seconds
        if cheaper and stats.kept_bytes(tuple(less)) <= budget_bytes:
            chosen = less
    policies = tuple(chosen)
    kept_bytes = stats.kept_bytes(policies)
    return Choice(policies, kept_bytes, stats.seconds(policies), kept_bytes <= budget_bytes)


def _steps(stats: Stats) -> Iterator[tuple[float, int, str]]:
    """Seconds per byte, layer and policy of every step along each layer's lower convex hull."""
    for index, layer in enumerate(stats.layers):
        cost = layer["none"]
        while True:
            lower = [(n, c) for n, c in layer.items() if c.kept_bytes < cost.kept_bytes]
            if not lower:
                break
            rates = [
                ((c.seconds - cost.seconds) / (cost.kept_bytes - c.kept_bytes), c.kept_bytes, n)
                for n, c in lower
            ]
            rate, _, name = min(rates)
            yield rate, index, name
            cost = layer[name]


@in_training
def choose_within(
    model_or_config: Any,
    peak_bytes: int,
    batch: int,
    sequence: int,
    setup: TrainingSetup | None = None,
    **options: Unpack[SetupOptions],
) -> Choice:
    """The cheapest policies with which a step is estimated to need at most so many bytes.

    :func:`choose` counts what layers keep. Here, the whole step counts: weights, optimizer states,
    the loss, and the gradients that come in backward where activations of the last layers have
    gone, so that these layers may keep more. It takes the steps of :func:`choose` until the
    estimated peak fits, and then takes them back for as many of the last layers as it can.

    The step has one pass. Where passes accumulate, gradients stand beside what all layers keep:
    give :func:`choose` the bytes that are free then.

    Args:
        model_or_config: As of :func:`liger_multi.memory.estimate`; policies that a model has
            already, and checkpointing of its own, are left out.
        peak_bytes: Of one device, for all that the estimate counts.
        batch: Sequences of one device and one step.
        sequence: Tokens of each.
        setup: How it is trained, as for the estimate.
        **options: Attributes of :class:`TrainingSetup`, which take the place of those in ``setup``.

    Raises:
        ValueError: As for the estimate; a peak that is no positive integer; or a setup with
            ``checkpointing``, which is chosen here.
        TypeError: As for the estimate.
    """
    setup = setup_of(setup, **options)
    if setup.checkpointing:
        raise ValueError("choose_within chooses what is recomputed; got checkpointing=True as well")
    positive(batch=batch, sequence=sequence)
    positive(2**63, peak_bytes=peak_bytes)
    dtype = DTYPES[setup.dtype][0]
    model = _unwrapped(meta_model(model_or_config, dtype, setup.attention, sequence))
    stats = layer_stats(
        model,
        batch,
        sequence,
        dtype=setup.dtype,
        patched=setup.patched,
        attention=setup.attention,
        device=setup.device,
    )
    steps = sorted(_steps(stats))
    count = len(stats.layers)

    def policies(taken: int, whole: int = 0) -> tuple[str, ...]:
        named = {layer: name for _, layer, name in steps[:taken]}
        return tuple(named.get(i, "none") if i < count - whole else "none" for i in range(count))

    def fits(chosen: tuple[str, ...]) -> bool:
        with apply_recompute(model, chosen):
            return estimate(model, batch, sequence, setup).peak_bytes <= peak_bytes

    taken = bisect_left(range(len(steps)), True, key=lambda taken: fits(policies(taken)))
    others = range(1, count) if taken else range(0)  # where something is recomputed at all
    whole = bisect_left(others, True, key=lambda n: not fits(policies(taken, n)))
    chosen = policies(taken, whole)
    kept_bytes, seconds = stats.kept_bytes(chosen), stats.seconds(chosen)
    return Choice(chosen, kept_bytes, seconds, taken < len(steps) or fits(chosen))


class Adaptive(Recompute):
    """What :func:`adapt` did.

    Attributes:
        choice: The choice of the last forward with gradients; None before the first.
    """

    choice: Choice | None = None

    def __init__(
        self, model: nn.Module, stats: Stats, reserve_bytes: int, probe: Callable[[], int]
    ) -> None:
        handle = apply_recompute(model, "full")
        super().__init__(handle.policies, handle._wrapped)
        self._stats, self._reserve, self._probe = stats, reserve_bytes, probe
        self._hook = model.register_forward_pre_hook(self._before, with_kwargs=True)

    def _before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.is_grad_enabled():
            return
        scale = _tokens(args, kwargs) / self._stats.tokens
        free_bytes = max(0, self._probe() - self._reserve)
        self.choice = choose(self._stats, int(free_bytes / max(scale, 1e-9)))
        for layer, name in zip(self._wrapped, self.choice.policies, strict=True):
            layer.policy = POLICIES[name]
            self.policies[layer.path] = name

    def remove(self) -> None:
        """Stop choosing, and give every layer back the ``forward`` it had."""
        super().remove()
        self._hook.remove()


def adapt(
    model: nn.Module,
    stats: Stats,
    *,
    reserve_bytes: int = 0,
    probe: Callable[[], int] | None = None,
) -> Adaptive:
    """Choose policies again before each forward with gradients, by the memory that is free then.

    The choice follows from the free bytes and the number of tokens alone. Results depend on it by
    rounding only: a patched gated MLP runs in steps where it is recomputed.

    Args:
        model: As of ``apply_recompute``.
        stats: From :func:`layer_stats`, for any number of tokens.
        reserve_bytes: Left for what layers do not hold: later gradients, and the loss.
        probe: Returns the free bytes; by default those of the model's device and of its allocator.

    Raises:
        ValueError: No probe for a device that does not tell its free memory, or statistics of
            another number of layers.
    """
    device = next(model.parameters()).device
    if probe is None and device.type == "cpu":
        raise ValueError("adapt: a CPU does not tell what is free for a model; give a probe")
    handle = Adaptive(model, stats, reserve_bytes, probe or (lambda: _free_bytes(device)))
    if len(handle._wrapped) != len(stats.layers):
        count = len(handle._wrapped)
        handle.remove()
        raise ValueError(f"adapt: statistics of {len(stats.layers)} layers, the model has {count}")
    return handle


def _free_bytes(device: torch.device) -> int:
    module = torch.get_device_module(device)
    cached = module.memory_reserved(device) - module.memory_allocated(device)
    return int(module.mem_get_info(device)[0] + cached)


def _tokens(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Number of tokens of a batch, from its ids or its embeddings."""
    for value in (kwargs.get("input_ids"), kwargs.get("inputs_embeds"), *args):
        if isinstance(value, torch.Tensor):
            token_shape = value.shape[:-1] if value.is_floating_point() else value.shape
            return token_shape.numel()
    arguments = ", ".join(describe(a) for a in (*args, *kwargs.values()))
    raise ValueError(f"adapt: no input_ids or inputs_embeds to count tokens of, got {arguments}")
