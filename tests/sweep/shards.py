"""One pair on rows that two ranks share: equal to one process, or refused with a reason."""

from __future__ import annotations

import contextlib
import copy
import datetime
import os
import signal
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from liger_multi.distributed import shard_sequence
from liger_multi.errors import PackingError, PatchError
from tests.sweep.cases import Pair, Verdict, build
from tests.sweep.packing import unlike, weighted_gradients, weights_of
from tests.sweep.run import _said, liven
from tests.sweep.trees import GRADIENT

RANKS = 2
LENGTHS = (11, 6, 20)  # samples of the packed row; ranks do not divide their sum
LIMIT = datetime.timedelta(seconds=120)


def work(pair: Pair) -> dict[str, Any]:
    """The verdict of a fork, which forks the second rank."""
    from liger_multi.patching import patch, register_attention

    register_attention()
    verdict = Verdict(**vars(pair))
    try:
        model = build(pair)
        liven(model)
        patch(model)
        with contextlib.suppress(Exception):  # of any model; shard_sequence refuses what is left
            model.set_attn_implementation("liger_multi")
    except Exception as error:
        verdict.why = _said(error)
        return asdict(verdict)
    with tempfile.TemporaryDirectory() as folder:
        second = os.fork()
        try:
            judge(verdict, model, Path(folder) / "meeting", int(second == 0))
        finally:
            if second == 0:
                os._exit(0)
            os.kill(second, signal.SIGKILL)
            os.waitpid(second, 0)
    return asdict(verdict)


def judge(verdict: Verdict, model: Any, meeting: Path, rank: int) -> None:
    """Compare rows on two ranks with one process, on both ranks alike."""
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=RANKS, timeout=LIMIT
    )
    calls = _calls()
    expected: dict[str, Any] = {}
    for name, call in calls.items():
        try:
            expected[name] = _gradients(model, call)
        except Exception as error:
            if name == "a packed row" and expected:  # refused in one process, too
                continue
            verdict.why = _said(error)
            return
    spread = copy.deepcopy(model)
    try:
        shard_sequence(spread)
        for name in expected:
            reason = unlike(_gradients(spread, calls[name], rank), expected[name], GRADIENT)
            if reason:
                verdict.status, verdict.why = "wrong", f"{name}: {reason}"
                return
        verdict.status = "equal"
    except (PatchError, PackingError) as error:
        verdict.status, verdict.why = "refused", str(error)
    except ValueError as error:
        refused = "shard" in str(error) or "ranks" in str(error)
        verdict.status, verdict.why = "refused" if refused else "wrong", _said(error)
    except Exception as error:
        verdict.status, verdict.why = "wrong", _said(error)


def _calls() -> dict[str, dict[str, torch.Tensor]]:
    """A plain row, the row with another token in its middle, and packed samples."""
    length = sum(LENGTHS)
    ids = torch.randint(10, 60, (1, length), generator=torch.Generator().manual_seed(1))
    other = ids.clone()
    other[0, length // 3] = 61 - other[0, length // 3] % 7
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    return {
        "a plain row": {"input_ids": ids},
        "a row with another token": {"input_ids": other},
        "a packed row": {"input_ids": ids, "position_ids": positions},
    }


def _gradients(model: Any, call: dict[str, Any], rank: int | None = None) -> Any:
    """Logits of all tokens, and the gradients of a weighted sum of them, of one or of all ranks."""
    torch.manual_seed(7)
    model.zero_grad()
    length = call["input_ids"].shape[1]
    logits = model(**call, use_cache=False).logits[:, :]
    share = length if rank is None else -(-length // RANKS)
    if logits.shape[:2] != (1, share):
        raise ValueError(f"its logits are not those of its tokens: {tuple(logits.shape)}")
    begin, values = share * (rank or 0), logits[0].detach()
    weights = weights_of(torch.Size((length, logits.shape[-1])))[begin : begin + share]
    grads = weighted_gradients(model, logits[0, : length - begin], weights)
    if rank is not None:
        parts = [torch.empty_like(values) for _ in range(RANKS)]
        dist.all_gather(parts, values.contiguous())
        values = torch.cat(parts)[:length]
        for grad in grads.values():
            dist.all_reduce(grad)
    return values, grads
