"""Overrides for torchtitan: ``--override.imports liger_multi.integrations.torchtitan.rms_norm``.

Each function below is one override and replaces the modules of one configuration class, before the
model is built. Parameters keep their names, so checkpoints, sharding and initialization stay.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.config import derive, override
from torchtitan.models.common import RMSNorm
from torchtitan.models.common.feed_forward import FeedForward
from torchtitan.models.common.rope import ComplexRoPE, CosSinRoPE, RoPE

from liger_multi import ops
from liger_multi.errors import PatchError

IGNORED = -100
"""The label that torchtitan's loss leaves out."""


class FusedRMSNorm(RMSNorm):
    """``RMSNorm`` of torchtitan, on ``ops.rms_norm``."""

    @dataclass(kw_only=True, slots=True)
    class Config(RMSNorm.Config):
        """Its configuration."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalize; the weight multiplies in fp32, as in ``torch.nn.RMSNorm``."""
        return ops.rms_norm(x, self.weight, self.eps, casting="olmo")


class FusedFeedForward(FeedForward):
    """``FeedForward`` of torchtitan, on ``ops.swiglu``."""

    @dataclass(kw_only=True, slots=True)
    class Config(FeedForward.Config):
        """Its configuration."""

    def forward(self, x: Tensor) -> Tensor:
        """Compute; the three layers are called, whatever they are made of."""
        return self.w2(ops.swiglu(self.w1(x), self.w3(x)))  # type: ignore[no-any-return]


class FusedComplexRoPE(ComplexRoPE):
    """``ComplexRoPE`` of torchtitan, on ``ops.rope_complex``."""

    @dataclass(kw_only=True, slots=True)
    class Config(ComplexRoPE.Config):
        """Its configuration."""

    @staticmethod
    def apply_rotary_emb(query: Tensor, key: Tensor, rope_cache: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate neighboring elements of ``(B, S, heads, D)``; cache ``(B or 1, S, 1, D/2)``."""
        return ops.rope_complex(query, key, rope_cache.squeeze(2), unsqueeze_dim=2)


class FusedCosSinRoPE(CosSinRoPE):
    """``CosSinRoPE`` of torchtitan, on ``ops.rope``."""

    @dataclass(kw_only=True, slots=True)
    class Config(CosSinRoPE.Config):
        """Its configuration."""

    @staticmethod
    def apply_rotary_emb(query: Tensor, key: Tensor, rope_cache: Tensor) -> tuple[Tensor, Tensor]:
        """Half-split RoPE; the cache ``(B or 1, S, 1, 2D)`` holds cosines, then sines."""
        cos, sin = rope_cache.squeeze(2).chunk(2, dim=-1)
        return ops.rope(query, key, cos, sin, unsqueeze_dim=2, casting="cohere")


@contextmanager
def _forward(module: nn.Module, function: Any) -> Iterator[None]:
    """Let calls of a module run another function, between the hooks that gather its weight."""
    own_forward = vars(module).get("forward")
    module.forward = function
    try:
        yield
    finally:
        if own_forward is None:
            del module.forward
        else:
            module.forward = own_forward


class FusedLoss(ChunkedLossWrapper):
    """``ChunkedLossWrapper`` around ``CrossEntropyLoss``, on ``ops.fused_linear_cross_entropy``.

    One call of the head computes the loss of all rows; chunks are the operator's own. Gradients
    flow through autograd, where the original runs backward of its chunks within forward.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ChunkedLossWrapper.Config):
        """Its configuration.

        Attributes:
            chunk: Rows of a chunk, as for the operator; ``num_chunks`` has no effect.
        """

        chunk: int | str = "auto"

    def __init__(self, config: Config, **kwargs: Any) -> None:
        super().__init__(config, **kwargs)
        self.chunk = config.chunk

    def __call__(
        self, pred: Tensor, labels: Tensor, global_valid_tokens: Tensor | None = None, **_: Any
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of hidden states: a sum, over the number of valid tokens where it is given."""
        head = self.lm_head
        with _forward(head, functools.partial(self._sum, head, labels)):
            loss = head(pred)
        return loss if global_valid_tokens is None else loss / global_valid_tokens, {}

    def _sum(self, head: nn.Linear, labels: Tensor, hidden: Tensor) -> Tensor:
        classes = head.out_features
        if head.weight.shape[0] != classes or type(head.weight).__name__ == "DTensor":
            raise PatchError(
                "the override liger_multi.integrations.torchtitan.loss needs the whole vocabulary "
                f"of {classes} classes; got a head that tensor parallelism has split. Leave it out"
            )
        return ops.fused_linear_cross_entropy(
            hidden,
            head.weight,
            labels,
            head.bias,
            ignore_index=IGNORED,
            reduction="sum",
            chunk=self.chunk,
        )


@override(  # type: ignore[untyped-decorator]
    target=RMSNorm.Config, exact=True, description="ops.rms_norm of liger_multi"
)
def rms_norm(cfg: RMSNorm.Config) -> RMSNorm.Config:
    """RMSNorm."""
    return derive(cfg, FusedRMSNorm.Config)


@override(  # type: ignore[untyped-decorator]
    target=FeedForward.Config, exact=True, description="ops.swiglu of liger_multi"
)
def swiglu(cfg: FeedForward.Config) -> FeedForward.Config:
    """Gated MLPs."""
    return derive(cfg, FusedFeedForward.Config)


_ROTARY = {ComplexRoPE.Config: FusedComplexRoPE.Config, CosSinRoPE.Config: FusedCosSinRoPE.Config}


@override(  # type: ignore[untyped-decorator]
    target=RoPE.Config, description="ops.rope and ops.rope_complex of liger_multi"
)
def rope(cfg: RoPE.Config) -> RoPE.Config:
    """Rotary embeddings; a kind that is none of torchtitan's two stays as it is."""
    replacement = _ROTARY.get(type(cfg))
    return cfg if replacement is None else derive(cfg, replacement)


@override(  # type: ignore[untyped-decorator]
    target=ChunkedLossWrapper.Config,
    exact=True,
    description="ops.fused_linear_cross_entropy of liger_multi",
)
def loss(cfg: ChunkedLossWrapper.Config, *, chunk: int | str = "auto") -> FusedLoss.Config:
    """The head and its loss.

    Raises:
        PatchError: The wrapped loss is no cross entropy.
    """
    if type(cfg.loss_fn) is not CrossEntropyLoss.Config:
        raise PatchError(
            "the override liger_multi.integrations.torchtitan.loss computes CrossEntropyLoss; got "
            f"{type(cfg.loss_fn).__qualname__}"
        )
    return derive(cfg, FusedLoss.Config, chunk=chunk)  # type: ignore[no-any-return]
