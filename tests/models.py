"""Tiny Hugging Face models for the patching tests, and how a patched one is compared with stock."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from liger_multi.op import inline_ops

transformers = pytest.importorskip("transformers")

VOCABULARY = 223  # a prime, so that no other axis is mistaken for it
KINDS = ("llama", "qwen2", "qwen3", "mistral")
TIED = ("qwen2", "qwen3")

_CLASSES = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "mistral": "Mistral"}


def build(kind: str = "llama", *, tied: bool | None = None, seed: int = 0, **config: Any) -> Any:
    """A model of two layers with random weights; norm weights are not ones."""
    defaults = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "tie_word_embeddings": kind in TIED if tied is None else tied,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    if kind == "qwen3":
        defaults["head_dim"] = 8
    made = getattr(transformers, f"{_CLASSES[kind]}Config")(**{**defaults, **config})
    torch.manual_seed(seed)
    model = getattr(transformers, f"{_CLASSES[kind]}ForCausalLM")(made)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            else:
                parameter.mul_(3)
    return model.train()


def pair(
    kind: str = "llama", device: Any = "cpu", dtype: Any = torch.float32, **config: Any
) -> tuple[Any, Any]:
    """Two equal models, neither patched."""
    stock = build(kind, **config).to(device=device, dtype=dtype)
    return stock, copy.deepcopy(stock)


def batch(
    rows: int = 2, length: int = 11, device: Any = "cpu", seed: int = 1
) -> dict[str, torch.Tensor]:
    """Token ids, with labels of which the start of every row is ignored."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (rows, length), generator=generator)
    labels = ids.clone()
    for row in range(rows):
        labels[row, : 2 + row] = -100
    mask = torch.ones_like(ids)
    return {
        k: v.to(device)
        for k, v in {"input_ids": ids, "labels": labels, "attention_mask": mask}.items()
    }


def gradients(model: Any) -> dict[str, torch.Tensor]:
    """Gradients by name; parameters without one are left out."""
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def assert_same_training(stock: Any, ours: Any, run: Any, rtol: float = 2e-5) -> tuple[Any, Any]:
    """Run both, backpropagate, and compare the loss and every gradient relative to its largest
    entry.

    Args:
        stock: The model that serves as the oracle.
        ours: The patched model.
        run: From a model to its loss.
        rtol: Allowed difference; fp32 sums in another order differ by a few 1e-6.
    """
    losses = []
    for model in (stock, ours):
        model.zero_grad()
        loss = run(model)
        loss.backward()
        losses.append(loss.detach())
    torch.testing.assert_close(losses[1].double(), losses[0].double(), rtol=rtol, atol=0)
    wanted, got = gradients(stock), gradients(ours)
    assert wanted.keys() == got.keys()
    assert wanted
    for name, gradient in wanted.items():
        bound = rtol * gradient.double().abs().max() + 1e-9
        difference = (got[name].double() - gradient.double()).abs().max()
        assert difference <= bound, f"{name}: {difference} > {bound}"
    return losses[0], losses[1]


class Widest(TorchDispatchMode):
    """The most rows of any tensor whose last axis is the vocabulary, inside of operators as well.

    Attributes:
        rows: That number.
        shapes: The shapes of all results.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rows = 0
        self.shapes: set[tuple[int, ...]] = set()

    def __enter__(self) -> Any:
        self._inside = inline_ops()
        self._inside.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._inside.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.t.default, torch.ops.aten.transpose.int):
            return result  # the weight, turned
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.shapes.add(tuple(tensor.shape))
                if tensor.ndim and tensor.shape[-1] == VOCABULARY:
                    self.rows = max(self.rows, tensor.numel() // VOCABULARY)
        return result


class FusedCalls:
    """Counts the calls of the fused loss that patched models make."""

    def __init__(self, monkeypatch: Any) -> None:
        from liger_multi import ops

        self.count = 0
        self.keywords: list[dict[str, Any]] = []
        stock = ops.fused_linear_cross_entropy

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            self.keywords.append(kwargs)
            return stock(*args, **kwargs)

        monkeypatch.setattr(ops, "fused_linear_cross_entropy", counted)
