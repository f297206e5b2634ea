"""What a launch table may choose for attention and for experts, on this machine.

``python -m benchmarks.tune_triton attention [MASK ...]``: for each mask, kernel and tile (queries x
keys x stages x warps) milliseconds on the device, and the error against dense scores in fp32 at a
shorter length. Several processes compile the tiles first. Nothing is chosen: people review the
lines and write a launch table.

``python -m benchmarks.tune_triton experts``: first whole calls, forward and with backward: ours as
the tables have it, ours with PyTorch's grouped GEMMs, ours with Triton's alone, PyTorch's
composition, Liger's. Then every GEMM by itself both ways, with the rate that it reaches, which is
what decides ``library`` in a table.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.store import run_command
from benchmarks.tune import Forced
from liger_multi import ops
from liger_multi.backends.triton.attention import attention
from liger_multi.backends.triton.experts import fused_moe, grouped
from liger_multi.backends.triton.experts.pairs import Groups, RowOperand, sorted_pairs
from liger_multi.bench.cases import cases, draw
from liger_multi.bench.measure import Clock
from liger_multi.bench.providers import find
from liger_multi.ops.attention import key_ranges

# --- attention ---

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
    "causal": Mask(32, 8, 128),
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

        def draw(heads: int) -> Tensor:
            x = torch.randn(2, length, heads, mask.size, device=device, dtype=torch.bfloat16)
            return x.transpose(1, 2)

        self.q, self.dy = draw(mask.heads), draw(mask.heads)
        self.k, self.v = draw(mask.groups), draw(mask.groups)
        self.sinks = torch.randn(mask.heads, device=device) if mask.sinks else None
        left, expected = mask.window or (-1, -1)
        self.ranges = None
        if mask.window is not None:
            self.ranges = key_ranges(
                length,
                length,
                self.q.device,
                causal=expected == 0,
                left=left,
                right=expected,
                global_tokens=mask.global_tokens,
                documents=None,
            )
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
        operands = (self.dy, self.q, self.k, self.v, self.y, self.lse, self.inner, self.dq)
        attention._backward_queries(*operands, self.ranges, *self.how)
        return (self.dq,)

    def keys(self) -> tuple[Tensor, ...]:
        """The gradients of keys and values."""
        operands = (self.dy, self.q, self.k, self.v, self.lse, self.inner, self.dk, self.dv)
        attention._backward_keys(*operands, self.ranges, *self.how)
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
        visible = j <= i
        if mask.window is not None:
            visible = (j >= i - mask.window[0]) & (j <= i + mask.window[1])
            visible = visible | (j < mask.global_tokens) | (i < mask.global_tokens)
        s = s.masked_fill(~visible.to(s.device), -torch.inf)
        lse = s.logsumexp(-1)
        if self.sinks is not None:
            lse = torch.logaddexp(lse, self.sinks[None, :, None])
        y = torch.exp(s - lse[..., None]) @ v
        dq, dk, dv = torch.autograd.grad(y, leaves, self.dy.float())
        return {"f": (y.detach(), lse.detach()), "q": (dq,), "k": (dk, dv)}


def error(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> float:
    """The largest distance in the 2-norm, relative."""
    pairs = zip(actual, expected, strict=True)
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
    times = []
    call()
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(10):
            buffer.zero_()
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return float(statistics.median(times))


def attention_command(arguments: Sequence[str]) -> int:
    """Print the tiles of every mask and kernel, the fastest first."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tune_triton attention", description=attention_command.__doc__
    )
    parser.add_argument("masks", nargs="*", choices=[*MASKS, []], default=list(MASKS))
    parser.add_argument("--kernels", default="fqk")
    parser.add_argument("--jobs", type=int, default=12)
    parser.add_argument("--show", type=int, default=8)
    options = parser.parse_args(arguments)
    pairs = list(itertools.product(options.masks or list(MASKS), options.kernels))
    jobs = [(name, which, tile) for name, which in pairs for tile in tiles(name, which)]
    began = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(options.jobs) as workers:
        workers.map(_compile, jobs, chunksize=1)
    print(f"compiled {len(jobs)} in {time.monotonic() - began:.0f} s", flush=True)
    for name, which in pairs:
        small, large = Call(MASKS[name], SHORT), Call(MASKS[name], 8192)
        expected = small.right()[which]
        first = error(small.direction(which)(), expected)
        print(
            f"== {name} {which} {milliseconds(large.direction(which)):.3f} "
            f"err {first:.4f} as it comes"
        )
        rows = []
        for tile in tiles(name, which):
            with numbers(name, which, tile):
                try:
                    wrong = error(small.direction(which)(), expected)
                    rows.append((milliseconds(large.direction(which)), tile, wrong))
                except Exception as failure:
                    print("  ", tile, type(failure).__name__, str(failure)[:60])
        for ms, tile, wrong in sorted(rows)[: options.show]:
            print(f"   {ms:.3f} {tile} err {wrong:.4f}", flush=True)
    print(f"{time.monotonic() - began:.0f} s")
    return 0


# --- experts ---

ROUNDS = 15


def _median(clock: Clock, step: Callable[[], Any]) -> float:
    for _ in range(3):
        step()
    flushes = clock.flushes(2000.0)
    return statistics.median(clock.marks([step], flushes)[0] for _ in range(ROUNDS))


def whole(tensors: dict[str, Tensor], call: Callable[..., Tensor], clock: Clock) -> str:
    """Milliseconds forward, with backward, and the peak beside inputs and gradients."""
    leaves = [t for t in tensors.values() if t.requires_grad]
    dy = torch.randn_like(tensors["x"])
    both = []
    for backward in (False, True):

        def step(backward: bool = backward) -> None:
            y = call(**tensors)
            if backward:
                torch.autograd.grad(y, leaves, dy)

        both.append(_median(clock, step))
    module: Any = torch.get_device_module(tensors["x"].device)
    module.reset_peak_memory_stats()
    before = module.memory_allocated()
    torch.autograd.grad(call(**tensors), leaves, dy)
    extra = module.max_memory_allocated() - before - sum(t.nbytes for t in leaves)
    return f"forward {both[0]:7.3f} ms   both {both[1]:7.3f} ms   extra {extra / 2**20:7.0f} MiB"


def gemms(tensors: dict[str, Tensor], clock: Clock) -> list[str]:
    """Every GEMM, by the library and by tiles of ours."""
    x, first, second = (tensors[n].detach() for n in ("x", "gate_up_weight", "down_weight"))
    index = tensors["index"]
    order, inverse, offsets = sorted_pairs(index, first.shape[0])
    groups = Groups(offsets, order, index.shape[-1], inverse)
    inner = torch.randn(order.shape[0], second.shape[2], device=x.device).to(x.dtype)
    wide = torch.randn(order.shape[0], first.shape[1], device=x.device).to(x.dtype)
    how = ("silu", (7.0, 1.0, 0.0), False)
    rows, weights = RowOperand, grouped.weight_gradient
    operations = 2.0 * order.shape[0] * second.shape[1] * second.shape[2]
    steps: dict[str, tuple[float, Callable[[], Any]]] = {
        "up": (
            2,
            lambda: fused_moe.activated(rows(x, True), first, None, index, groups, True, how),
        ),
        "down": (1, lambda: grouped.product("fused_moe.down", rows(inner), second, groups)),
        "dproduct": (
            1,
            lambda: grouped.product("fused_moe.dproduct", rows(x, True), second.mT, groups),
        ),
        "dx": (2, lambda: grouped.product("fused_moe.dx", rows(wide), first.mT, groups)),
        "dgate_up_weight": (
            2,
            lambda: weights("fused_moe.dgate_up_weight", rows(wide), rows(x, True), groups, False),
        ),
        "ddown_weight": (
            1,
            lambda: weights("fused_moe.ddown_weight", rows(x, True), rows(inner), groups, False),
        ),
    }
    lines = []
    for name, (share, step) in steps.items():
        for library in (True, False):
            with grouped.products_by(library):
                ms = _median(clock, step)
            rate = share * operations / ms / 1e9
            by = "library" if library else "triton"
            lines.append(
                f"  {name:<16} {by:<8} {ms:7.3f} ms  {rate:5.0f} TFLOP/s, gathers included"
            )
    sort = _median(clock, lambda: sorted_pairs(index, first.shape[0]))
    return [*lines, f"  {'sort':<25} {sort:7.3f} ms"]


def experts_command(arguments: Sequence[str]) -> int:
    """Print the comparison for every bench sample that has no bias."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tune_triton experts", description=experts_command.__doc__
    )
    parser.add_argument("--sample", default="*of 128")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args(arguments)
    device, dtype = torch.device(args.device), torch.bfloat16
    clock = Clock(device)
    for case in cases("fused_moe", args.sample, dtype, None):
        print(f"{case.label}, {torch.get_device_module(device).get_device_name()}")
        tensors = draw(case.sample, device, dtype)
        ways: list[tuple[str, Any, Any]] = [
            ("ours", ops.fused_moe, contextlib.nullcontext()),
            ("ours, library", ops.fused_moe, grouped.products_by(True)),
            ("ours, triton", ops.fused_moe, grouped.products_by(False)),
        ]
        for name in ("torch", "liger"):
            peer = find(name, case, device, dtype)
            if isinstance(peer, str):
                print(f"{name:<16} {peer}")
            else:
                ways.append((name, peer.call, contextlib.nullcontext()))
        for name, call, scope in ways:
            with scope:
                options = case.sample.options if name.startswith("ours") else {}
                try:
                    said = whole(tensors, lambda c=call, o=options, **t: c(**t, **o), clock)
                except RuntimeError as failure:  # a peer may not run here
                    said = f"{type(failure).__name__}: {failure!s:.120}"
            print(f"{name:<16} {said}", flush=True)
        print("\n".join(gemms(tensors, clock)))
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Time attention's tiles, or the experts."""
    return run_command({"attention": attention_command, "experts": experts_command}, arguments)


if __name__ == "__main__":
    sys.exit(main())
