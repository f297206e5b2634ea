"""What a layer keeps and computes again under each recompute policy, from shapes alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from liger_multi.memory.costs import Cost, Stats
from liger_multi.memory.estimation import meta_model
from liger_multi.memory.policies import POLICIES
from liger_multi.memory.recompute import apply_recompute, decoder_layers, undo_all
from liger_multi.memory.recorder import FORWARD, RECOMPUTE
from liger_multi.memory.setup import DTYPES, known
from liger_multi.memory.simulation import Simulation, backward
from liger_multi.memory.storages import tensors_in

# Of one second on an H200 (torch 2.11, 2026-11): products of 16 bits, bytes read and written.
FLOPS, BANDWIDTH = 6.9e14, 4.24e12


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
        flops: Of products, a second.
        bandwidth: Bytes read and written a second.
    """
    kind, autocast, _ = DTYPES[known("dtype", dtype, DTYPES)]
    model = meta_model(model_or_config, kind, attention, sequence)
    undo_all(model)
    if patched:
        from liger_multi.patching import patch

        patch(model, **(patched if isinstance(patched, Mapping) else {}))
    model.train()
    layers = [layer for _, layer in decoder_layers(model)]
    for layer in layers:
        if getattr(layer, "gradient_checkpointing", False):
            layer.__dict__["gradient_checkpointing"] = False
    calls = _calls(model, layers, batch, sequence, device, autocast)
    found: dict[Any, dict[str, Cost]] = {}
    for layer, (args, kwargs) in zip(layers, calls, strict=True):
        key = _kind(layer)
        if key not in found:
            found[key] = {}
            for name in POLICIES:
                one = _Count(device, None, layer, None, sequence, autocast)
                found[key][name] = one.cost(name, args, kwargs, flops, bandwidth)
    return Stats(tuple(found[_kind(layer)] for layer in layers), batch * sequence)


def _kind(layer: nn.Module) -> Any:
    """What layers that cost the same have in common."""
    sizes = tuple((n, p.shape, p.dtype, p.requires_grad) for n, p in layer.named_parameters())
    return type(layer), getattr(layer, "attention_type", None), sizes


def _calls(
    model: Any, layers: list[nn.Module], batch: int, sequence: int, device: str, autocast: Any
) -> list[tuple[Any, Any]]:
    """What every layer is called with."""
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
    """One layer, forwards and backwards, with the work of its second forward."""

    _flops = _bytes = 0.0

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One operator; one of a second forward is work."""
        inside = bool(self._ops)
        result = super().run(func, args, kwargs)
        if not inside and self._phase() == RECOMPUTE:
            self._work(func, args, kwargs, result)
        return result

    def _work(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        given = {t.untyped_storage()._cdata: t for t in tensors_in((args, *kwargs.values()))}
        made = [t for t in tensors_in((result,)) if t.untyped_storage()._cdata not in given]
        if not made:
            return  # a view
        self._bytes += sum(t.nbytes for t in (*given.values(), *made))
        name = func.name()
        if "scaled_dot_product" in name or name.endswith("attention_forward"):
            query, key = args[0], args[1]
            self._flops += 2 * query.numel() * key.shape[-2]  # causal: half of both products
        elif made and any(word in name for word in ("::mm", "::addmm", "::bmm", "grouped_mm")):
            factors = [t for t in tensors_in(args[:3]) if t.ndim > 1]
            self._flops += 2 * made[0].numel() * factors[-2].shape[-1]

    def cost(self, policy: str, args: Any, kwargs: Any, flops: float, bandwidth: float) -> Cost:
        """Bytes between forward and backward, and seconds of the second forward."""
        layer: Any = self._model
        taken = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        hidden = next(t for t in taken if t.is_floating_point())

        def fresh(value: Any) -> Any:
            if value is hidden:
                return value.detach().requires_grad_()
            return value.detach() if isinstance(value, Tensor) else value

        args, kwargs = tree_map(fresh, (args, kwargs))
        with apply_recompute(nn.ModuleList([nn.ModuleList([layer])]), policy), self.surroundings():
            made = self.forward(lambda: layer(*args, **kwargs))
            output = made if isinstance(made, Tensor) else made[0]
            born = [b for b in self.blocks if b.phase == FORWARD and not b.died]
            kept = sum(b.size for b in born) - output.nbytes + hidden.nbytes
            backward(output)
        return Cost(kept, self._flops / flops + self._bytes / bandwidth)
