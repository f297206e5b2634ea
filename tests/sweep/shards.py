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

from liger_multi import trees
from liger_multi.distributed import shard_sequence
from liger_multi.errors import PackingError, PatchError
from tests.sweep.cases import Pair, build
from tests.sweep.packing import unlike, weights_of
from tests.sweep.run import _said, liven
from tests.sweep.trees import GRADIENT, LENGTHS as SEGMENTS, Verdict, filled

RANKS = 2
LENGTHS = (11, 6, 20)  # samples of the packed row; ranks do not divide their sum
LIMIT = datetime.timedelta(seconds=120)


def work(pair: Pair) -> dict[str, Any]:
    """The verdict of a fork, which forks the second rank."""
    from liger_multi.patching import patch, register_attention

    register_attention()
    verdict = Verdict(pair.kind, pair.type, pair.cls)
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
    one = copy.deepcopy(model)  # some models keep states of a call, which cannot be copied
    expected = _expected(one, calls)
    try:
        if one.config._attn_implementation == "eager":
            model.set_attn_implementation("eager")
        shard_sequence(model)
        if not expected:
            verdict.why = "one process takes none of these rows, and shard_sequence refuses nothing"
            return
        for name in expected:
            reason = unlike(_gradients(model, calls[name], RANKS), expected[name], GRADIENT)
            if reason:
                verdict.status, verdict.why = "wrong", f"{name}: {reason}"
                return
        verdict.status = "equal"
    except (PatchError, PackingError) as error:
        verdict.status, verdict.why = "refused", str(error)
    except ValueError as error:
        refused = not expected or "shard" in str(error) or "ranks" in str(error)
        verdict.status, verdict.why = "refused" if refused else "wrong", _said(error)
    except Exception as error:
        verdict.status, verdict.why = "wrong", _said(error)


def _expected(model: Any, calls: dict[str, dict[str, torch.Tensor]]) -> dict[str, Any]:
    """Of one process, which may refuse packed rows, or our attention, or tokens alone."""
    try:
        _gradients(model, calls["a plain row"])
    except Exception as error:
        if "attn_implementation='liger_multi'" in str(error):
            model.set_attn_implementation("eager")
    expected = {}
    for name, call in calls.items():
        with contextlib.suppress(Exception):
            expected[name] = _gradients(model, call)
    return expected


def _calls() -> dict[str, Any]:
    """A plain row, the row with another token in its middle, packed samples, and trees."""
    length = sum(LENGTHS)
    ids = torch.randint(10, 60, (1, length), generator=torch.Generator().manual_seed(1))
    other = ids.clone()
    other[0, length // 3] = 61 - other[0, length // 3] % 7
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    return {
        "a plain row": {"input_ids": ids},
        "a row with another token": {"input_ids": other},
        "a packed row": {"input_ids": ids, "position_ids": positions},
        "a row of trees": trees.pack(filled(SEGMENTS, torch.Generator().manual_seed(1))),
    }


def _gradients(model: Any, call: Any, ranks: int = 1) -> Any:
    """Logits of all tokens, and the gradients of a weighted sum of them, averaged over ranks."""
    torch.manual_seed(7)
    model.zero_grad()
    is_tree = isinstance(call, trees.Batch)
    arguments = call.inputs if is_tree else {**call, "use_cache": False}
    with trees.shared(call) if is_tree else contextlib.nullcontext():
        logits = model(**arguments).logits[:, :]
    if logits.shape[:2] != arguments["input_ids"].shape:
        raise ValueError(f"its logits are not those of its tokens: {tuple(logits.shape)}")
    (logits * weights_of(logits.shape)).sum().backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    for grad in grads.values() if ranks > 1 else ():
        dist.all_reduce(grad)
        grad /= ranks
    return logits.detach(), grads
