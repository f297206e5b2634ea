"""One pair with two samples in a row: as the samples by themselves, or refused with a reason."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from liger_multi.patching import patch, unpatch
from tests import comparing
from tests.sweep import cases
from tests.sweep.cases import Pair, build
from tests.sweep.run import _said, liven

LENGTHS = (17, 13)
EQUAL = 2e-4
"""Part of the largest logit, and of the largest entry of a gradient."""
ENDS = torch.tensor([0, *LENGTHS], dtype=torch.int32).cumsum(0, dtype=torch.int32)
TOLD: dict[str, dict[str, Any]] = {
    "seq_idx": {
        "seq_idx": torch.repeat_interleave(torch.arange(2), torch.tensor(LENGTHS)).int()[None]
    },
    "cu_seq_lens": {
        **dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), ENDS),
        **dict.fromkeys(("max_length_q", "max_length_k"), max(LENGTHS)),
    },
}
"""What may tell samples beside positions, as ``DataCollatorWithFlattening`` gives it."""


@dataclass
class Verdict(cases.Verdict):
    """What became of one pair.

    A status is "apart", equal to its samples with positions that begin again and no cache; "other",
    with other arguments, which the error named; "refused", with none; "wrong", let through and not
    equal; "no positions".

    Attributes:
        beside: The same with positions and one of :data:`TOLD`, as status and reason; "not taken"
            where the forward has no such argument, "unpatched" where it raises without us too.
    """

    beside: dict[str, list[str]] = field(default_factory=dict)


def judge(pair: Pair) -> Verdict:
    """Compare a packed row with its samples, in this process."""
    verdict = Verdict(**vars(pair))
    try:
        model = build(pair)
        liven(model)
        if "position_ids" not in inspect.signature(model.forward).parameters:
            verdict.status = "no positions"
            return verdict
        patch(model)
        ids = torch.randint(10, 60, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(1))
        expected = results(model, [{"input_ids": part} for part in torch.split(ids, LENGTHS, 1)])
    except Exception as error:
        verdict.why = _said(error)
        return verdict
    if expected[0].shape[1] != sum(LENGTHS):
        verdict.why = f"its logits are not those of its tokens: {tuple(expected[0].shape)}"
        return verdict
    verdict.status, verdict.why = packed(model, ids, expected)
    for name, key in TOLD.items():
        verdict.beside[name] = [*packed(model, ids, expected, key)]
    return verdict


def packed(
    model: Any, ids: torch.Tensor, expected: Any, kwargs: dict[str, Any] | None = None
) -> tuple[str, str]:
    """Status and reason of a packed row, with the arguments that an error names as well."""
    place = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    batch = {"input_ids": ids, "position_ids": place, **(kwargs or {})}
    if not _takes(model, kwargs or {}):
        return "not taken", ""
    try:
        reason = unlike(results(model, [batch]), expected)
        return ("wrong", reason) if reason else ("apart", "")
    except Exception as error:
        text = str(error)
        if not isinstance(error, ValueError) or "several samples" not in text:
            return ("wrong" if _runs_unpatched(model, batch) else "unpatched"), _said(error)
    if " they are kept apart" not in text:
        return "refused", text.partition(": ")[2][:160]
    way = text.partition("With ")[2].partition(" they are kept apart")[0]
    if "of shape (4, B, T)" not in way:
        return "other", way
    reason = unlike(results(model, [{**batch, "position_ids": place.expand(4, -1, -1)}]), expected)
    return ("wrong", reason) if reason else ("other", way)


def _takes(model: Any, names: Iterable[str]) -> bool:
    known = inspect.signature(model.forward).parameters
    return all(n in known for n in names) or any(p.kind == p.VAR_KEYWORD for p in known.values())


def _runs_unpatched(model: Any, batch: dict[str, Any]) -> bool:
    """Whether a model that was never patched takes a step with a batch."""
    stock = copy.deepcopy(model)
    unpatch(stock)
    try:
        results(stock, [batch])
    except Exception:  # somebody's forward
        return False
    return True


def results(model: Any, batches: list[dict[str, Any]]) -> tuple[torch.Tensor, dict[str, Any]]:
    """Logits of all tokens, and the gradients of a weighted sum of them."""
    torch.manual_seed(7)
    model.zero_grad()
    logits = torch.cat([model(**batch, use_cache=False).logits for batch in batches], 1)
    return logits.detach(), weighted_gradients(model, logits)


def weights_of(shape: torch.Size) -> torch.Tensor:
    """Weights of logits, so that every one counts by itself."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(2))


def weighted_gradients(
    model: Any, logits: torch.Tensor, weights: torch.Tensor | None = None
) -> dict[str, torch.Tensor]:
    """The gradients of a weighted sum of logits."""
    (logits * (weights_of(logits.shape) if weights is None else weights)).sum().backward()
    return {n: g.clone() for n, g in comparing.gradients(model).items()}


def unlike(got: Any, expected: Any, gradient: float = EQUAL) -> str:
    """What is not equal within rounding, or nothing."""
    (ours, grads), (logits, right) = got, expected
    moved = float((ours - logits).abs().max() / logits.abs().max())
    if not moved <= EQUAL:
        return f"logits differ by {moved:.1e} of the largest"
    if grads.keys() != right.keys():
        return f"gradients of other parameters: {sorted(grads.keys() ^ right.keys())[:3]}"
    reason = comparing.difference(grads, right, gradient, torch.float32)
    return f"the gradient of {reason}" if reason else ""


def work(pair: Pair) -> dict[str, Any]:
    """The verdict of a fork."""
    return asdict(judge(pair))
