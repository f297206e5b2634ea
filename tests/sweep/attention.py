"""One pair with ``attn_implementation="liger_multi"``: equal to eager and causal, or refused."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from tests.sweep import cases
from tests.sweep.cases import Pair, configuration, inputs
from tests.sweep.run import _said, liven

OURS = "liger_multi"
REFUSAL = f"attn_implementation={OURS!r} "
EQUAL, MOVED, STILL = 1e-4, 1e-6, 1e-7
"""Parts of the largest logit: between implementations; what the future may move ours, and eager."""
Batch = dict[str, Any]


@dataclass
class Verdict(cases.Verdict):
    """A status is "served"; "unused", served but never called; "refused"; or "wrong".

    Attributes:
        causal: Whether eager attention is causal, so that ours was held to it.
    """

    causal: bool = False


def judge(pair: Pair) -> Verdict:
    """Compare the ways to ask for our attention with eager, in this process."""
    verdict = Verdict(**vars(pair))
    for text in (True, False):
        try:
            eager = build(pair, "eager")
            every = batches(pair, eager, text)
            expected = {name: logits(eager, batch) for name, batch in every.items()}
            break
        except Exception as error:
            verdict.why = _said(error)
    else:
        return verdict
    verdict.why = ""
    for way in (constructed, switched, forced):
        with counted() as calls:
            refusals, wrong = _compared(way, pair, eager, every, expected, verdict)
        status = "wrong" if wrong else "refused" if refusals else "served" if calls else "unused"
        if wrong or verdict.status == "not built":  # what is wrong counts, else the first way
            why = wrong or next(iter(refusals), "")
            verdict.status, verdict.why = status, f"{way.__name__}: {why}" if why else ""
        if wrong:
            break
    return verdict


def work(pair: Pair) -> dict[str, Any]:
    """The verdict of a fork, which registers our attention for itself."""
    from liger_multi.patching import register_attention

    register_attention()
    return asdict(judge(pair))


def build(pair: Pair, implementation: str) -> Any:
    """A tiny model in eval mode whose configuration asks for an implementation."""
    import transformers

    config = configuration(pair)
    config._attn_implementation = implementation
    torch.manual_seed(0)
    model = getattr(transformers, pair.cls)(config)
    liven(model)
    return model.eval()


def constructed(pair: Pair, eager: Any) -> Any:
    """Built with our attention."""
    model = build(pair, OURS)
    model.load_state_dict(eager.state_dict())
    return model


def switched(pair: Pair, eager: Any) -> Any:
    """Switched to our attention when it was built; transformers may decline with a warning."""
    model = copy.deepcopy(eager)
    model.set_attn_implementation(OURS)
    return model


def forced(pair: Pair, eager: Any) -> Any:
    """Our attention written into the configuration of a model, past all checks of transformers."""
    model = copy.deepcopy(eager)
    model.config._attn_implementation = OURS
    return model


def batches(pair: Pair, model: Any, text: bool) -> dict[str, Batch]:
    """Inputs without padding, and with padding on either side: text alone, or all that it takes."""
    whole = inputs(pair, model, text=text)
    ids, mask = whole.get("input_ids"), whole.get("attention_mask")
    if getattr(model.config, "is_encoder_decoder", False) and "labels" in whole:
        spoken = whole.pop("labels").clamp(min=10) if ids is None else ids.clone()
        whole.setdefault("decoder_input_ids", spoken)
    every = {"no padding": whole}
    if ids is None or mask is None or mask.shape != ids.shape:
        return every
    left = mask.clone()
    left[0, :3] = 0
    for side, padded in (("left", left), ("right", left.flip(-1))):
        every[f"padding {side}"] = {**whole, "attention_mask": padded}
    return every


def logits(model: Any, batch: Batch) -> torch.Tensor:
    """What the model says of a batch."""
    torch.manual_seed(7)
    with torch.no_grad():
        outputs = model(**batch).logits
    return outputs[0] if isinstance(outputs, tuple) else outputs


def later(batch: Batch) -> Batch:
    """The batch with other last tokens."""
    name = "decoder_input_ids" if "decoder_input_ids" in batch else "input_ids"
    if batch.get(name) is None:
        return batch
    ids = batch[name].clone()
    ids[:, -1] = (ids[:, -1] + 1) % 100 + 11
    return {**batch, name: ids}


def _compared(
    way: Callable[[Pair, Any], Any],
    pair: Pair,
    eager: Any,
    every: dict[str, Batch],
    expected: dict[str, torch.Tensor],
    verdict: Verdict,
) -> tuple[list[str], str]:
    """Refusals, and what is wrong: another result, the future, or an error that is no refusal."""
    refusals = []
    try:
        model = way(pair, eager)
    except Exception as error:
        return [str(error)], "" if REFUSAL in str(error) else _said(error)
    for name, batch in every.items():
        try:
            got = logits(model, batch)
        except Exception as error:
            if REFUSAL not in str(error) and not _by_a_table(error, way):
                return refusals, f"{name}: {_said(error)}"
            refusals.append(str(error))
            continue
        wrong = differs(batch, expected[name], got)
        if wrong and differs(batch, _by_sdpa(pair, eager, batch), got):
            return refusals, f"{name}: {wrong}"
        if name == "no padding" and pair.kind != "masked":
            wrong = _sees_future(eager, model, batch, expected[name], got, verdict)
            if wrong:
                return refusals, wrong
    return refusals, ""


def _by_a_table(error: Exception, way: Callable[[Pair, Any], Any]) -> bool:
    """Whether the model's own table of functions lacks our name, which nobody could check."""
    return way is forced and isinstance(error, KeyError) and error.args == (OURS,)


@contextlib.contextmanager
def counted() -> Iterator[list[str]]:
    """The names of modules that call our attention meanwhile."""
    from transformers import AttentionInterface

    known, names = AttentionInterface._global_mapping, []
    ours = known[OURS]

    def spy(module: Any, *args: Any, **kwargs: Any) -> Any:
        names.append(type(module).__name__)
        return ours(module, *args, **kwargs)

    known[OURS] = spy
    try:
        yield names
    finally:
        known[OURS] = ours


def differs(batch: Batch, expected: torch.Tensor | None, got: torch.Tensor) -> str:
    """Where logits of tokens that are no padding are not equal, or nothing."""
    if expected is None or got.shape != expected.shape:
        return "nothing to compare with"
    distance, mask = (got - expected).abs(), batch.get("attention_mask")
    if mask is not None and "decoder_input_ids" not in batch and distance.shape[:2] == mask.shape:
        distance = distance[mask.bool()]
    part = float(distance.max() / expected.abs().max())
    return "" if part <= EQUAL else f"differs from eager by {part:.2g}"


def _by_sdpa(pair: Pair, eager: Any, batch: Batch) -> torch.Tensor | None:
    """A row that sees nothing is 0 there, and all keys in eager."""
    try:
        model = build(pair, "sdpa")
    except ValueError:
        return None
    model.load_state_dict(eager.state_dict())
    return logits(model, batch)


def _sees_future(
    eager: Any,
    model: Any,
    batch: Batch,
    expected: torch.Tensor,
    got: torch.Tensor,
    verdict: Verdict,
) -> str:
    """Earlier positions that the last token moves, though it does not in eager; or nothing."""
    other = later(batch)
    if other is batch:
        return ""
    largest = float(expected.abs().max())
    moved, ours = (
        (logits(m, other) - before).abs().amax(-1)[:, :-1] / largest
        for m, before in ((eager, expected), (model, got))
    )
    verdict.causal = verdict.causal or bool((moved <= STILL).all())
    rows = ours[moved <= STILL]
    if not rows.numel() or float(rows.max()) <= MOVED:
        return ""
    return f"the last token moves earlier logits by {float(rows.max()):.2g}"
