"""What results are held against: gradients of two equal models by one bound, and TRL's own losses.

The bound follows from the dtype of the gradients. TRL's losses are its trainers' methods as they
are, on replicas with given hidden states.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from liger_multi.dispatch.op import inline_ops
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
    assert_within(actual, exact, dtype)


def assert_within(
    actual: Iterable[torch.Tensor],
    exact: Iterable[torch.Tensor],
    dtype: torch.dtype,
    bound: float = 1,
) -> None:
    """Tensors in order, no further from exact ones than ``bound`` tolerances of a dtype."""
    for x, y in zip(actual, exact, strict=True):
        assert excess(x.detach(), y.detach(), dtype) <= bound


def assert_equal(actual: Iterable[torch.Tensor], expected: Iterable[torch.Tensor]) -> None:
    """Tensors in order, equal in every element, shape and dtype."""
    torch.testing.assert_close([*actual], [*expected], rtol=0, atol=0)


def largest(tensor: torch.Tensor) -> float:
    """The largest finite magnitude; 0 for an empty tensor."""
    finite = tensor.detach().double().nan_to_num(0.0, 0.0, 0.0)
    return float(finite.abs().max()) if finite.numel() else 0.0


def saved(
    call: Callable[[], Any], but: Iterable[torch.Tensor] = ()
) -> tuple[Any, list[torch.Tensor]]:
    """The result of a call, and what autograd keeps for it: one tensor of each storage.

    ``but`` are tensors of the caller, which are kept in any case.
    """
    tensors: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        tensors.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = call()
    own = {tensor.untyped_storage().data_ptr() for tensor in but}
    return result, [tensor for place, tensor in tensors.items() if place not in own]


def recorded(
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    note: Callable[..., Any] = lambda *args, **kwargs: (args, kwargs),
) -> list[Any]:
    """What ``note`` makes of the arguments of each call of a function, which still runs."""
    calls, function = [], getattr(owner, name)

    @functools.wraps(function)
    def spy(*args: Any, **kwargs: Any) -> Any:
        calls.append(note(*args, **kwargs))
        return function(*args, **kwargs)

    monkeypatch.setattr(owner, name, spy)
    return calls


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages of tensors that share none."""
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


class Operations(TorchDispatchMode):
    """Records operations of PyTorch, those inside of operators as well.

    Attributes:
        calls: Function, arguments and result of each.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], Any]] = []

    def __enter__(self) -> Any:
        self._inside = inline_ops()
        self._inside.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._inside.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, result))
        return result

    def names(self) -> list[str]:
        """The operations without overloads, in order."""
        return [func.overloadpacket.__name__ for func, _, _ in self.calls]

    def reads(self) -> list[str]:
        """The operations that wait for a device: numbers that are read, and indices by masks."""
        waits = {"_local_scalar_dense", "nonzero"}
        by_mask = [
            any(m is not None and m.dtype == torch.bool for m in args[1])
            for func, args, _ in self.calls
            if func is torch.ops.aten.index.Tensor
        ]
        return [n for n in self.names() if n in waits] + ["index"] * sum(by_mask)

    def tensors(self, *functions: Any) -> list[torch.Tensor]:
        """Results of these functions, or of all."""
        results = [
            out for f, _, out in self.calls if not functions or f.overloadpacket in functions
        ]
        return [t for t in tree_leaves(results) if isinstance(t, torch.Tensor)]


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
