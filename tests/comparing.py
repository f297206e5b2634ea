"""What results are held against: gradients of two equal models by one bound, and TRL's own losses.

The bound follows from the dtype of the gradients. TRL's losses are its trainers' methods as they
are, on replicas with given hidden states.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from liger_multi.testing.tolerance import excess

# --- gradients ---

ULPS = 8
"""Rounding of a gradient, in units in the last place of its summands; see :func:`difference`."""

Gradients = Mapping[str, "torch.Tensor | None"] | Iterable["torch.Tensor | None"]


def gradients(model: Any) -> dict[str, torch.Tensor]:
    """Gradients by name; parameters without one are left out."""
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def assert_same_loss(
    ours: Any, expected: Any, leaves: Any, dtype: torch.dtype = torch.float32, wide: Any = None
) -> None:
    """A loss and its gradients are those of another one, perhaps in fp32 on the same numbers."""
    mine, theirs = ([x for x in xs if x is not None] for xs in (leaves, wide or leaves))
    actual = torch.autograd.grad(ours, mine, retain_graph=True)
    exact = torch.autograd.grad(expected, theirs, retain_graph=True)
    assert excess(ours.detach(), expected.detach(), dtype) <= 1
    for x, y in zip(actual, exact, strict=True):
        assert excess(x, y, dtype) <= 1


def largest(tensor: torch.Tensor) -> float:
    """The largest finite magnitude; 0 for an empty tensor."""
    finite = tensor.detach().double().nan_to_num(0.0, 0.0, 0.0)
    return float(finite.abs().max()) if finite.numel() else 0.0


def resolution(expected: Iterable[torch.Tensor], eps: float) -> float:
    """What rounding alone may change in any entry of the gradients of one model."""
    return ULPS * eps * max((largest(gradient) for gradient in expected), default=0.0)


def difference(
    got: Gradients, expected: Gradients, rtol: float = 2e-5, dtype: torch.dtype | None = None
) -> str:
    """Which gradient of a model is another one than rounding explains, or nothing.

    ``|got - wanted| <= rtol * max|wanted| + ULPS * eps * max|wanted of all parameters|``

    Both terms are needed. The first holds a gradient against its own largest entry: fp32 sums in
    another order differ by 1e-6 of it, eight units in the last place (14 architectures, three
    instruction sets, 2026-11-22). A gradient that is zero in exact arithmetic has no size of its
    own: the keys' bias, or the queries of a first position, get a sum whose summands cancel. Every
    summand is as large as the gradients of the other parameters, and is rounded like them, so what
    remains is 1e-6 of *their* largest entry, with any sign. That is the second term: no backward
    pass in this dtype tells a smaller number from zero, and it scales with the model. ``eps`` is
    that of the dtype of the gradients. The largest remainder seen is 0.8 units.

    Args:
        got: Gradients by name, or in order; None for a parameter that nothing reached.
        expected: Those of the reference, of the same parameters and dtypes.
        rtol: Allowed difference by the gradient's own largest entry.
        dtype: What the models compute in, where the gradients are wider than that.

    Returns:
        The parameter, its difference and its bound; empty if all are equal.
    """
    actual, right = _named(got), _named(expected)
    if actual.keys() != right.keys():
        return f"gradients of other parameters: {sorted(actual.keys() ^ right.keys())[:3]}"
    dtypes = {gradient.dtype for gradient in right.values()} | ({dtype} if dtype else set())
    eps = max((torch.finfo(each).eps for each in dtypes), default=0.0)
    floor = resolution(right.values(), eps)
    for name, gradient in right.items():
        ours = actual[name]
        if (ours.dtype, ours.shape) != (gradient.dtype, gradient.shape):
            return (
                f"{name}: {ours.dtype} {tuple(ours.shape)}, "
                f"wanted {gradient.dtype} {tuple(gradient.shape)}"
            )
        bound = rtol * largest(gradient) + floor
        off = (ours.detach().double() - gradient.detach().double().to(ours.device)).abs()
        if not (off <= bound).all():
            return f"{name}: {float(off.max()):.3g} > {bound:.3g}, {floor:.3g} of it is rounding"
    return ""


def assert_same_gradients(got: Gradients, expected: Gradients, rtol: float = 2e-5) -> None:
    """Every gradient of a model is that of the reference, as :func:`difference` has it."""
    assert any(gradient is not None for gradient in _named(expected).values())
    assert not (said := difference(got, expected, rtol)), said


def _named(named: Gradients) -> dict[str, torch.Tensor]:
    if not isinstance(named, Mapping):
        named = {str(i): gradient for i, gradient in enumerate(named)}
    return {
        name: gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        for name, gradient in named.items()
        if gradient is not None
    }


# --- TRL's losses ---

OUTPUTS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


def require_trl():
    """Skip what compares with TRL where its trainers cannot be imported."""
    pytest.importorskip("trl")
    pytest.importorskip("datasets", reason="TRL's trainers import datasets, which is not there")


class Toy(torch.nn.Module):
    """A causal model whose hidden states are given; TRL adds its own head to it."""

    def __init__(self, hidden, weight, bias=None, temperature=1.0, softcap=None, scale=None):
        super().__init__()
        require_trl()
        self.hidden = hidden
        self.others = []  # other inputs and what they give
        self.lm_head = torch.nn.Linear(*weight.shape[::-1], bias=bias is not None, device="meta")
        del self.lm_head.weight
        self.lm_head.weight = weight  # a plain leaf, so that gradients reach the test's tensors
        if bias is not None:
            del self.lm_head.bias
            self.lm_head.bias = bias
        text = SimpleNamespace(final_logit_softcapping=softcap, logit_scale=scale)
        self.config = SimpleNamespace(get_text_config=lambda: text)
        self.is_gradient_checkpointing = False
        from trl.trainer.utils import add_fused_lm_head

        add_fused_lm_head(self, temperature=temperature, outputs=OUTPUTS)

    def forward(self, *_, **__):
        return SimpleNamespace(logits=self.lm_head(self.hidden))

    def base_model(self, input_ids=None, **_):
        other = [h for ids, h in self.others if ids is input_ids]
        return SimpleNamespace(last_hidden_state=other[0] if other else self.hidden)

    def get_output_embeddings(self):
        return self.lm_head


class Accelerator:
    """One process."""

    device = torch.device("cpu")
    num_processes = 1
    sync_gradients = True

    def gather(self, x):
        return x

    gather_for_metrics = gather

    def reduce(self, x, reduction="sum"):
        return x

    def pad_across_processes(self, x, **_):
        return x


def trainer(model, **attributes):
    """What a trainer's method reads of its trainer."""
    base = {
        "model": model,
        "accelerator": Accelerator(),
        "_metrics": defaultdict(lambda: defaultdict(list)),
        "_total_train_tokens": 0,
        "_tp_size": 1,
        "aux_loss_enabled": False,
        "current_gradient_accumulation_steps": 1,
    }
    return SimpleNamespace(**{**base, **attributes})


def logged(stub):
    """The metrics that a trainer logged."""
    (metrics,) = stub._metrics.values()
    return {key: values[-1] for key, values in metrics.items()}
