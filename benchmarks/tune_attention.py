"""Time attention's kernels under launch values: ``python -m benchmarks.tune_attention [MASK ...]``.

For each mask, kernel and tile (queries x keys x stages x warps): milliseconds on the device, and
the error against dense scores in fp32 at a shorter length. Several processes compile the tiles
first. Nothing is chosen: people review the lines and write a launch table.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.tune import Forced
from liger_multi.backends.triton.attention import attention
from liger_multi.ops._ranges import key_ranges

KERNELS = {"f": "attention.forward", "q": "attention.backward", "k": "attention.backward_keys"}
SHORT = 2048  # as divisible as 8192 where a kernel is compiled for that
FIELDS = ("block_m", "block_n", "stages", "num_warps")


class Mask(NamedTuple):
    """Heads, groups, size of a head, and what is seen."""

    heads: int
    groups: int
    size: int
    window: tuple[int, int] | None = None
    global_tokens: int = 0
    sinks: bool = False
    softcap: float = 0.0


MASKS = {
    "window": Mask(32, 8, 128, (1023, 0)),
    "global": Mask(12, 12, 64, (256, 256), 64),
    "sinks-window": Mask(64, 8, 64, (127, 0), sinks=True),
    "sinks": Mask(64, 8, 64, sinks=True),
    "softcap": Mask(32, 8, 128, softcap=50.0),
    "neighbors": Mask(12, 12, 64, (31, 31)),
}


class Call:
    """One mask's inputs at a length, and its three kernels."""

    def __init__(self, mask: Mask, length: int, device: str = "cuda") -> None:
        torch.manual_seed(0)
        self.mask = mask

        def made(heads: int) -> Tensor:
            x = torch.randn(2, length, heads, mask.size, device=device, dtype=torch.bfloat16)
            return x.transpose(1, 2)

        self.q, self.dy = made(mask.heads), made(mask.heads)
        self.k, self.v = made(mask.groups), made(mask.groups)
        self.sinks = torch.randn(mask.heads, device=device) if mask.sinks else None
        left, right = mask.window or (-1, -1)
        self.ranges = None
        if mask.window is not None:
            self.ranges = key_ranges(
                length, length, self.q.device, causal=right == 0, left=left, right=right,
                global_tokens=mask.global_tokens, documents=None,
            )  # fmt: skip
        self.how = (self.ranges is None, mask.size**-0.5, mask.softcap)
        self.y, self.lse = self.forward()
        self.dq, self.inner = torch.empty_like(self.q), torch.empty_like(self.lse)
        self.dk, self.dv = torch.empty_like(self.k), torch.empty_like(self.v)
        self.queries()

    def forward(self) -> tuple[Tensor, Tensor]:
        """The result and the logarithm of the sums."""
        return attention.forward(self.q, self.k, self.v, self.sinks, self.ranges, *self.how)

    def queries(self) -> tuple[Tensor, ...]:
        """The gradient of the queries."""
        given = (self.dy, self.q, self.k, self.v, self.y, self.lse, self.inner, self.dq)
        attention._backward_queries(*given, self.ranges, *self.how)
        return (self.dq,)

    def keys(self) -> tuple[Tensor, ...]:
        """The gradients of keys and values."""
        given = (self.dy, self.q, self.k, self.v, self.lse, self.inner, self.dk, self.dv)
        attention._backward_keys(*given, self.ranges, *self.how)
        return self.dk, self.dv

    def direction(self, which: str) -> Callable[[], tuple[Tensor, ...]]:
        """One of the three."""
        return {"f": self.forward, "q": self.queries, "k": self.keys}[which]

    def right(self) -> dict[str, tuple[Tensor, ...]]:
        """All three from dense scores in fp32."""
        mask, length = self.mask, self.q.shape[2]
        leaves = [x.detach().float().requires_grad_() for x in (self.q, self.k, self.v)]
        k, v = (x.repeat_interleave(mask.heads // mask.groups, 1) for x in leaves[1:])
        s = leaves[0] @ k.mT * mask.size**-0.5
        if mask.softcap:
            s = mask.softcap * torch.tanh(s / mask.softcap)
        i, j = torch.arange(length)[:, None], torch.arange(length)
        seen = j <= i
        if mask.window is not None:
            seen = (j >= i - mask.window[0]) & (j <= i + mask.window[1])
            seen = seen | (j < mask.global_tokens) | (i < mask.global_tokens)
        s = s.masked_fill(~seen.to(s.device), -torch.inf)
        lse = s.logsumexp(-1)
        if self.sinks is not None:
            lse = torch.logaddexp(lse, self.sinks[None, :, None])
        y = torch.exp(s - lse[..., None]) @ v
        dq, dk, dv = torch.autograd.grad(y, leaves, self.dy.float())
        return {"f": (y.detach(), lse.detach()), "q": (dq,), "k": (dk, dv)}


def error(found: tuple[Tensor, ...], right: tuple[Tensor, ...]) -> float:
    """The largest distance in the 2-norm, relative."""
    pairs = zip(found, right, strict=True)
    return max(float((a.float() - b).norm() / b.norm()) for a, b in pairs)


def tiles(name: str, which: str) -> Iterator[tuple[int, ...]]:
    """What may be fast: rows of the stationary tile by rows of the pass, stages, warps."""
    sides = ((64, 32), (64, 64), (128, 32), (128, 64), (64, 128), (128, 128))
    for (own, inner), stages in itertools.product(sides, (1, 2, 3)):
        warps = 8 if own == 128 else 4
        tile = (inner, own) if which == "k" else (own, inner)
        wide = MASKS[name].size > 64
        if own * inner > (4096 if wide and which == "k" and own == 64 else 8192):
            continue
        yield (*tile, stages, warps)
        if which == "k" and own == inner == 64:
            yield (*tile, stages, 8)


def numbers(name: str, which: str, tile: tuple[int, ...]) -> Forced:
    """A tile and no other number, at every length."""
    shared = {"parts": 8} if which == "k" and MASKS[name].global_tokens else {}
    return Forced(KERNELS[which], dict(zip(FIELDS, tile, strict=True)) | shared)


def _compile(job: tuple[str, str, tuple[int, ...]]) -> None:
    name, which, tile = job
    try:
        if name not in _calls:
            _calls[name] = Call(MASKS[name], 8192)
        with numbers(name, which, tile):
            _calls[name].direction(which)()
        torch.cuda.synchronize()
    except Exception as failure:
        print(name, which, tile, type(failure).__name__, str(failure)[:80], flush=True)


_calls: dict[str, Call] = {}


def milliseconds(call: Callable[[], Any], repeats: int = 7) -> float:
    """Median on the device, with cold caches; the host is ahead."""
    buffer = torch.empty(2**28, dtype=torch.int8, device="cuda")
    found = []
    call()
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(10):
            buffer.zero_()
        begin.record()
        call()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end))
    return float(statistics.median(found))


def main() -> int:
    """Print the tiles of every mask and kernel, the fastest first."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tune_attention", description=__doc__
    )
    parser.add_argument("masks", nargs="*", choices=[*MASKS, []], default=list(MASKS))
    parser.add_argument("--kernels", default="fqk")
    parser.add_argument("--jobs", type=int, default=12)
    parser.add_argument("--show", type=int, default=8)
    given = parser.parse_args()
    wanted = list(itertools.product(given.masks or list(MASKS), given.kernels))
    jobs = [(name, which, tile) for name, which in wanted for tile in tiles(name, which)]
    began = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(given.jobs) as workers:
        workers.map(_compile, jobs, chunksize=1)
    print(f"compiled {len(jobs)} in {time.monotonic() - began:.0f} s", flush=True)
    for name, which in wanted:
        small, large = Call(MASKS[name], SHORT), Call(MASKS[name], 8192)
        right = small.right()[which]
        first = error(small.direction(which)(), right)
        print(
            f"== {name} {which} {milliseconds(large.direction(which)):.3f} "
            f"err {first:.4f} as it comes"
        )
        rows = []
        for tile in tiles(name, which):
            with numbers(name, which, tile):
                try:
                    wrong = error(small.direction(which)(), right)
                    rows.append((milliseconds(large.direction(which)), tile, wrong))
                except Exception as failure:
                    print("  ", tile, type(failure).__name__, str(failure)[:60])
        for ms, tile, wrong in sorted(rows)[: given.show]:
            print(f"   {ms:.3f} {tile} err {wrong:.4f}", flush=True)
    print(f"{time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
