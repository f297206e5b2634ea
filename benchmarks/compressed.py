"""Training with activations that wait in a byte: ``python -m benchmarks.compressed``.

The same weights are trained on the same text (:mod:`benchmarks.convergence`) under the policy
``keep_attention``: with what waits in its dtype (``kept``), in FP8 (``compressed``), and in its
dtype from other weights (``seed``). Then gradients of a batch are compared by layer.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks import convergence, store
from liger_multi.grouping import grouped
from liger_multi.memory import apply_recompute, compress_activations

SIZES = {"num_hidden_layers": 8, "hidden_size": 128, "intermediate_size": 352, "head_dim": 32}


def kept(model: Any) -> None:
    """A patched model whose layers keep their input and the result of attention."""
    import liger_multi

    liger_multi.patch(model, strict=True)
    apply_recompute(model, "keep_attention")


def compressed(model: Any) -> None:
    """The same in a byte."""
    kept(model)
    compress_activations(model, min_bytes=0)


PROVIDERS = {"kept": kept, "compressed": compressed, "seed": kept}


def layer_of(name: str) -> str:
    """The layer of a parameter, or the module outside of layers."""
    parts = name.split(".")
    return f"layer {parts[2]}" if "layers" in parts else parts[-2]


def gradients(model: Any, ids: Tensor) -> dict[str, Tensor]:
    """All gradients of a layer as one vector."""
    model.zero_grad()
    model(input_ids=ids, labels=ids).loss.backward()
    parts = ((layer_of(n), p.grad.detach().float().flatten()) for n, p in model.named_parameters())
    return {layer: torch.cat(some) for layer, some in grouped(parts).items()}


def errors(model: Any, *, ids: Tensor, into: dict[str, float]) -> None:
    """Relative errors of the gradients of every layer, that rounding alone makes."""
    expected = gradients(model, ids)
    with compress_activations(model, min_bytes=0):
        actual = gradients(model, ids)
    for layer, gradient in expected.items():
        error = float((actual[layer] - gradient).norm() / gradient.norm())
        into[layer] = float(f"{error:.3g}")


def row(case: convergence.Case, device: torch.device) -> dict[str, Any]:
    """Curves of every provider, and errors of gradients after the steps of ``kept``."""
    *train, last = convergence.text(case)
    by_layer: dict[str, float] = {}
    curves = {}
    after = functools.partial(errors, ids=last.to(device), into=by_layer)
    with (
        mock.patch.dict(convergence.TINY, SIZES),
        mock.patch.dict(convergence.PROVIDERS, PROVIDERS),
    ):
        for name in PROVIDERS:
            ids, then = torch.stack(train), after if name == "kept" else None
            curves[name] = convergence.train(case, name, ids, device, then)["loss"]
            print(f"{name}: {curves[name][0]:.4f} to {curves[name][-1]:.4f}", flush=True)
    print(by_layer)
    fields = {name: getattr(case, name) for name in ("model", "dtype", "batch", "tokens")}
    return {**fields, "steps": len(train), "layers": 8, "losses": curves, "gradients": by_layer}


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, compare and store."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compressed", description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cpu")
    store.add_options(parser)
    options = parser.parse_args(arguments)
    case = convergence.Case("llama", options.dtype, 4, 64, options.steps + 1)
    device = torch.device(options.device)
    head = store.head("compressed-activations", options, device)
    store.keep({**head, "rows": [row(case, device)]}, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
