"""How to get logits that were not computed: hidden states, head, and what was done since.

A recipe is immutable. Row operations act on its hidden states (autograd sees them there),
elementwise ones are kept as steps. From it come the real logits, or the loss without them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import Tensor

from liger_multi.patching import versions
from liger_multi.patching.options import HeadSettings

Step = tuple[str, Any]
"""An elementwise step: ("mul" | "div", number), ("tanh", None), ("to" | "log_softmax", dtype)."""

STEPS: Final[dict[str, Callable[[Tensor, Any], Tensor]]] = {
    "mul": lambda z, by: z * by,
    "div": lambda z, by: z / by,
    "tanh": lambda z, _: torch.tanh(z),
    "to": lambda z, dtype: z.to(dtype),
    "log_softmax": lambda z, dtype: torch.log_softmax(z, dim=-1, dtype=dtype),
}


class Job:
    """What the head should do instead of a plain forward; passed through ``head.__call__``.

    Going through the call lets the hooks of FSDP and ZeRO gather the weight first.
    """

    def __init__(self, run: Callable[[Any, Tensor], Any]) -> None:
        self.run = run


class Recipe:
    """Logits of ``head(hidden)`` after ``steps``."""

    def __init__(
        self,
        head: Any,
        weights: tuple[Tensor, Tensor | None],
        hidden: Tensor,
        settings: HeadSettings,
        raw_dtype: torch.dtype,
        grad: bool,
        guard: Guard | None = None,
        dtype: torch.dtype | None = None,
        steps: tuple[Step, ...] = (),
    ) -> None:
        self.head = head
        self.weights = weights
        self.hidden = hidden
        self.settings = settings
        self.raw_dtype = raw_dtype
        self.dtype = dtype or raw_dtype
        self.steps = steps
        self.grad = grad
        self.vocabulary: int = head.out_features
        self.guard = guard

    @property
    def shape(self) -> torch.Size:
        """Shape of the logits."""
        return torch.Size((*self.hidden.shape[:-1], self.vocabulary))

    @property
    def bytes(self) -> int:
        """Bytes of the logits."""
        return self.shape.numel() * self.dtype.itemsize

    def step(self, name: str, value: Any = None) -> Recipe:
        """The recipe after one more elementwise step."""
        dtype = self.dtype if name not in ("to", "log_softmax") else value
        return self._with(self.hidden, dtype, (*self.steps, (name, value)), self.grad)

    def rows(self, hidden: Tensor) -> Recipe:
        """The recipe of other rows."""
        return self._with(hidden, self.dtype, self.steps, self.grad)

    def detached(self) -> Recipe:
        """The same values, cut off from autograd."""
        return self._with(self.hidden.detach(), self.dtype, self.steps, False)

    def copy(self) -> Recipe:
        """An equal recipe that is another object."""
        return self._with(self.hidden, self.dtype, self.steps, self.grad)

    def _with(
        self, hidden: Tensor, dtype: torch.dtype, steps: tuple[Step, ...], grad: bool
    ) -> Recipe:
        return Recipe(
            self.head,
            self.weights,
            hidden,
            self.settings,
            self.raw_dtype,
            grad,
            self.guard,
            dtype,
            steps,
        )

    def compute(self) -> Tensor:
        """The real logits, differentiable where the recipe is."""
        with self.mode():
            logits = self.head(self.hidden, Job(lambda head, hidden: head.stock_forward(hidden)))
            return self.finish(logits)

    def finish(self, logits: Tensor) -> Tensor:
        """Apply the steps to raw logits."""
        for name, value in self.steps:
            logits = STEPS[name](logits, value)
        return logits

    def mode(self) -> contextlib.AbstractContextManager[None]:
        """Grad mode and autocast of the forward pass; checks that nothing was overwritten since."""
        if self.guard is None:
            return contextlib.nullcontext()
        self.guard.check(self.head)
        return self.guard.entered(self.grad)

    def circumstances(self) -> contextlib.AbstractContextManager[None]:
        """Autocast of the forward pass, for a backward pass that computes again."""
        return contextlib.nullcontext() if self.guard is None else self.guard.entered(True)

    @property
    def epilogue(self) -> tuple[float, float | None] | None:
        """``(logit_scale, softcap)`` when the steps are no more than that, else None."""
        dtype, names = self.raw_dtype, []
        for name, value in self.steps:
            if name != "to":
                names.append((name, value))
            elif value != dtype and value.itemsize <= dtype.itemsize:
                return None  # the loss would not round the logits down
            else:
                dtype = value
        cap = None
        if len(names) >= 3 and _is_softcap(names[-3:]):
            cap = float(names[-1][1])
            names = names[:-3]
        scale = 1.0
        for name, value in names:
            if name not in ("mul", "div"):
                return None
            scale = scale * value if name == "mul" else scale / value
        return float(scale), cap


def _is_softcap(last: list[Step]) -> bool:
    (divide, by), (squash, _), (multiply, back) = last
    return (divide, squash, multiply) == ("div", "tanh", "mul") and by == back


class Guard:
    """The circumstances of the head's forward that later use has to meet or restore."""

    def __init__(self, head: Any, hidden: Tensor) -> None:
        kind = hidden.device.type
        self.device_type = kind
        self.autocast = torch.is_autocast_enabled(kind)
        self.autocast_dtype = torch.get_autocast_dtype(kind) if self.autocast else None
        weights = _parameters(head)
        for tensor in weights.values():
            versions.watch(tensor)
        self.seen = {
            name: (t, versions.of(t)) for name, t in {"hidden states": hidden, **weights}.items()
        }

    def check(self, head: Any) -> None:
        """Raise when hidden states or the head's parameters were written since the forward pass.

        A parameter that is another object now is left alone: sharding libraries put the gathered
        and the sharded one in turns.
        """
        now = _parameters(head)
        for name, (tensor, version) in self.seen.items():
            if now.get(name, tensor) is tensor and versions.of(tensor) != version:
                raise RuntimeError(
                    f"these logits were not computed during the forward pass, and its {name} "
                    "have been modified in place since "
                    "(an optimizer step does that), so they cannot be computed any more. Read "
                    "the logits before the step, "
                    "keep them with liger_multi.patching.real_logits(outputs.logits), or patch "
                    "with "
                    "fused_linear_cross_entropy=False"
                )

    @contextlib.contextmanager
    def entered(self, grad: bool) -> Iterator[None]:
        """Grad mode and autocast as in the forward pass."""
        with torch.autocast(self.device_type, dtype=self.autocast_dtype, enabled=self.autocast):
            if grad:
                yield
            else:
                with torch.no_grad():
                    yield


def _parameters(head: Any) -> dict[str, Tensor]:
    """Weight and bias of a linear head, under the words that messages use."""
    found = {"head's weights": head.weight, "head's bias": head.bias}
    return {name: tensor for name, tensor in found.items() if tensor is not None}
