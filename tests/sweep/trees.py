"""One pair with shared prefixes: equal to every path by itself, or refused with a reason."""

from __future__ import annotations

import contextlib
from dataclasses import asdict
from typing import Any

import torch

from liger_multi import trees
from liger_multi.errors import PackingError
from liger_multi.patching import patch, register_attention
from tests.sweep.cases import Pair, Verdict, build
from tests.sweep.packing import unlike, weighted_gradients
from tests.sweep.run import _said, liven

LENGTHS = [(11, [(3, [(5, []), (1, [(2, []), (4, [])])]), (1, []), (6, [])]), (7, [(2, [])])]
"""A tree of three levels with branches of one token, and a second tree in the row."""
GRADIENT = 5e-4
"""Part of a gradient's largest entry that may differ: sums over branches have another order."""


def work(pair: Pair) -> dict[str, Any]:
    """The verdict of a fork, which registers our attention for itself."""
    register_attention()
    return asdict(judge(pair))


def judge(pair: Pair) -> Verdict:
    """Compare a row of trees with its paths, in this process: "equal", "refused" or "wrong"."""
    verdict = Verdict(**vars(pair))
    try:
        model = build(pair)
        liven(model)
        patch(model)
        with contextlib.suppress(Exception):  # of any model; the trial says what follows from it
            model.set_attn_implementation("liger_multi")
        batch = trees.pack(filled(LENGTHS, torch.Generator().manual_seed(1)))
        expected = _paths(model, batch)
    except Exception as error:
        verdict.why = _said(error)
        return verdict
    try:
        reason = unlike(_together(model, batch), expected, GRADIENT)
        verdict.status, verdict.why = ("wrong", reason) if reason else ("equal", "")
    except PackingError as error:
        verdict.status, verdict.why = "refused", str(error)
    except Exception as error:
        verdict.status, verdict.why = "wrong", _said(error)
    return verdict


def filled(lengths: list[Any], generator: torch.Generator) -> list[Any]:
    """Tokens in place of lengths."""

    def ids(count: int) -> list[int]:
        return torch.randint(10, 60, (count,), generator=generator).tolist()

    return [(ids(count), filled(below, generator)) for count, below in lengths]


def _gradients(model: Any, logits: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
    """Logits ``(tokens, classes)``, and the gradients of a weighted sum of them."""
    model.zero_grad()
    return logits.detach(), weighted_gradients(model, logits)


def _paths(model: Any, batch: trees.Batch) -> tuple[torch.Tensor, dict[str, Any]]:
    """Every segment's logits in the path that ends with it."""
    row, parts = batch.inputs["input_ids"], []
    for segment, length in enumerate(batch.tree.lengths):
        path = batch.tree.path(segment)
        torch.manual_seed(7)
        logits = model(input_ids=row[:, path], use_cache=False).logits
        if logits.shape[:2] != (1, len(path)):
            raise ValueError(f"its logits are not those of its tokens: {tuple(logits.shape)}")
        parts.append(logits[0, -length:])
    return _gradients(model, torch.cat(parts))


def _together(model: Any, batch: trees.Batch) -> tuple[torch.Tensor, dict[str, Any]]:
    torch.manual_seed(7)
    with trees.shared(batch):
        logits = model(**batch.inputs).logits
    return _gradients(model, logits[0])
