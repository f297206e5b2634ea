"""Run cases that stand on standard input, a JSON text a line, and answer on standard output.

Before a case its number is written, so that whoever started this process knows what it was doing
when it ended. It ends itself after an error of a device that would spoil what follows.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
import time
from typing import Any

import torch

from liger_multi.dispatch import launch
from liger_multi.dispatch.config import Configuration, parse, using_configuration
from liger_multi.dispatch.registry import REFERENCE
from liger_multi.errors import BackendUnavailableError, summary
from liger_multi.testing import bitwise, checks, samples
from liger_multi.testing.checks import WrongResultError, poison_empty
from liger_multi.testing.verify.cases import Case

FLOAT8_HEADS: dict[str, tuple[str, ...] | None] = {"float8_logits": None, "float8": ()}
"""Ways to multiply in 8 bits, and outputs with gradients: "float8" rounds the gradients too."""
EVEN = torch.empty(64, 32, device="meta")  # a weight of the sizes that every device takes
MOST_TEXT = 600  # characters of a message


def run(case: Case, device: torch.device) -> dict[str, Any]:
    """The verdict on a case, with the worst error in units of the tolerance."""
    sample = next(s for s in samples.of(case.op) if s.name == case.sample)
    dtype = getattr(torch, case.dtype)
    forward, backward = checks.runs(case.backend, case.op)
    heads = FLOAT8_HEADS if case.check == "float8 head" else {"exact": None}
    orders = {"mixed": [(forward, REFERENCE), (REFERENCE, backward)]}
    try:
        worst, order = 0.0, list(dict.fromkeys((forward, backward, REFERENCE)))
        if case.check == "promises":
            bitwise.check_promises(case.op, sample, dtype, device, order)
        else:
            if case.check == "float8 head":
                _needs_8_bits(device)
            own_order = [(forward, backward)]
            pairs = itertools.product(heads.items(), orders.get(case.check, own_order))
            for (products, used_outputs), (first, second) in pairs:
                with using_configuration(
                    Configuration((parse({"head_gemms": products}, case.name),))
                ):
                    errors = checks.compare(
                        case.op, sample, dtype, device, first, second, used_outputs
                    )
                worst = max(worst, *errors.values(), 0.0)
        if case.entry is not None:  # compilers make races for some numbers of warps and stages
            bitwise.check_repeats(case.op, sample, dtype, device, order)
        synchronize(device)
        return {"verdict": "right", "worst": worst}
    except BackendUnavailableError as error:
        return {"verdict": "refused", "text": _shortened(error)}
    except WrongResultError as error:
        return {"verdict": "wrong", "worst": error.worst, "text": _shortened(error)}
    except AssertionError as error:
        return {"verdict": "wrong", "text": _shortened(error)}
    except (torch.OutOfMemoryError, MemoryError) as error:
        return {"verdict": "out of memory", "text": _shortened(error)}
    except Exception as error:
        return {"verdict": "crashed", "text": summary(error)[:MOST_TEXT]}


def _needs_8_bits(device: torch.device) -> None:
    from liger_multi.reference.cross_entropy.float8 import unsupported

    if reason := unsupported(device, EVEN):
        raise BackendUnavailableError(reason)


def _shortened(error: BaseException) -> str:
    return str(error)[:MOST_TEXT]


def synchronize(device: torch.device) -> None:
    """Wait for a device, so that its errors belong to the case that made them."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def is_usable(device: torch.device) -> bool:
    """Whether the device still answers; after an illegal access it never does in this process."""
    try:
        return float(torch.ones(1, device=device).sum()) == 1.0
    except RuntimeError:
        return False


def compilations() -> list[float]:
    """Seconds of every compilation by Triton from now on; empty where it does not tell."""
    seconds: list[float] = []
    with contextlib.suppress(ImportError):  # absent, or older than 3.4
        from triton import knobs

        def heard(*, times: Any, cache_hit: bool, **_: Any) -> None:
            if not cache_hit:
                seconds.append(times.total / 1e6)

        knobs.compilation.listener = heard
    return seconds


def answer(case: Case, device: torch.device, compiled: list[float]) -> dict[str, Any]:
    """Run a case, with its entry of the launch table where it has one."""
    began = time.perf_counter()
    compiled.clear()
    with contextlib.ExitStack() as stack:
        if case.entry is not None:
            key, index = case.entry
            entry = launch.table_of(launch.device_info(device))[key][index]
            stack.enter_context(launch.forced({key: entry["config"]}, launch.variant_of(entry)))
        entries = stack.enter_context(launch.observed())
        result = run(case, device)
    seconds = round(time.perf_counter() - began, 3)
    result |= {"compiled": len(compiled), "compiling": round(sum(compiled), 3)}
    return {**result, "entries": sorted(entries), "seconds": seconds}


def main() -> None:
    """Answer until standard input ends."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what compilers print does not stand between answers
    device = torch.device(sys.argv[1])
    poison_empty()
    torch.set_num_threads(max(1, int(sys.argv[2])))
    torch.backends.cudnn.allow_tf32 = False  # PyTorch lets convolutions round fp32 otherwise

    def write(**data: Any) -> None:
        out.write(json.dumps(data) + "\n")
        out.flush()

    compiled = compilations() if device.type != "cpu" else []
    write(ready=is_usable(device))  # its context is no time of the first case
    for line in sys.stdin:
        request, data = json.loads(line)
        case = Case(**{**data, "entry": tuple(data["entry"]) if data["entry"] else None})
        write(begin=request)
        result = answer(case, device, compiled)
        alive = is_usable(device)
        write(end=request, alive=alive, **result)
        if not alive:
            return


if __name__ == "__main__":
    main()
