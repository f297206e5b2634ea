"""Operators of hybrid models on one GPU beside others: ``python -m benchmarks.hybrid_operators``.

Each operator runs forward, and forward and backward, after it the functions of fla-core and of
transformers (unpatched) for the same recurrence where there are some. Printed are medians by CUDA
events, the peak beside the arguments, and errors: the RMS of the difference from the recurrence in
fp64 over that of the recurrence, the largest of the result and all gradients, on a short input of
the same kind. With ``--repeats N``, the operator's forward and backward run N times more, and how
many of them have other bits than the first is printed. ``--lines FILE`` writes what is printed, for
``python -m benchmarks.store --notes hybrid-operators``.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import inspect
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from liger_multi.testing import FORMULAS, samples

Draw = Callable[..., Tensor]
Arguments = dict[str, Any]
Function = Callable[[Arguments], Tensor]

DEVICE = "cuda"
SHORT = 192  # tokens of the comparison with fp64
MOST_SECONDS = 5.0  # of all rounds, but for the first three


@dataclass(frozen=True)
class Case:
    """One operator.

    Attributes:
        name: Of the operator.
        sizes: In words.
        make: Its arguments for (batch, tokens, a share of the heads or channels).
        options: Arguments that are not tensors.
        peers: Functions of other libraries by what is said of them.
    """

    name: str
    sizes: str
    make: Callable[[Draw, int, int, int], Arguments]
    options: Arguments = field(default_factory=dict)
    peers: dict[str, Function] = field(default_factory=dict)

    def ours(self, arguments: Arguments) -> Tensor:
        """The operator."""
        result: Tensor = samples.call(self.name, **arguments, **self.options)
        return result

    def exact(self, arguments: Arguments) -> Tensor:
        """Its formula, token by token."""
        result: Tensor = FORMULAS[self.name](**arguments, **self.options)
        return result


def _delta(
    heads: int, of_values: int, channels: bool
) -> Callable[[Draw, int, int, int], Arguments]:
    def make(draw: Draw, batch: int, length: int, share: int) -> Arguments:
        keys, values = heads // share, of_values // share
        rows = {"q": keys, "k": keys, "v": values}
        tensors = {n: draw(batch, length, many, 128) for n, many in rows.items()}
        gates = (batch, length, values, 128)[: 4 if channels else 3]
        return {
            **tensors,
            "g": -draw(*gates, dtype=torch.float32).abs() / 4,
            "beta": draw(batch, length, values).sigmoid(),
        }

    return make


def _heads(count: int, width: int, states: int, groups: int) -> Any:
    def make(draw: Draw, batch: int, length: int, share: int) -> Arguments:
        many, group, wide = count // share, max(1, groups // share), torch.float32
        return {
            "x": draw(batch, length, many, width),
            "dt": draw(batch, length, many),
            "A": -draw(many, dtype=wide).exp(),
            "B": draw(batch, length, group, states),
            "C": draw(batch, length, group, states),
            "D": draw(many, dtype=wide),
            "dt_bias": draw(many, dtype=wide) - 3,
        }

    return make


def _channels(draw: Draw, batch: int, length: int, share: int) -> Arguments:
    cols, wide = 8192 // share, torch.float32
    rows = {n: draw(batch, length, cols) for n in ("u", "delta", "z")}
    pairs = {n: draw(batch, length, 16) for n in ("B", "C")}
    vectors = {"D": draw(cols, dtype=wide), "delta_bias": draw(cols, dtype=wide) - 3}
    return {**rows, "A": -draw(cols, 16, dtype=wide).exp(), **pairs, **vectors}


def _convolution(draw: Draw, batch: int, length: int, share: int) -> Arguments:
    cols = 8192 // share
    return {"x": draw(batch, length, cols), "weight": draw(cols, 4)}


def _gated(draw: Draw, batch: int, length: int, share: int) -> Arguments:
    cols = 2048 // share
    return {"x": draw(batch, length, 3 * cols), "weight": draw(cols, 3)}


# --- others ---


def _unpatched(model: str, name: str) -> Function:
    """A function of transformers, which takes as many key heads as value heads."""

    def function(arguments: Arguments) -> Tensor:
        module = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
        q, k, v, g, beta = arguments.values()
        q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
        plain = inspect.unwrap(getattr(module, name))  # not what it leaves to fla-core
        out = plain(q, k, v, g, beta, use_qk_l2norm_in_kernel=True)
        result: Tensor = out[0]
        return result

    return function


def _fla_delta(arguments: Arguments) -> Tensor:
    module = importlib.import_module("fla.ops.gated_delta_rule")
    result: Tensor = module.chunk_gated_delta_rule(**arguments, use_qk_l2norm_in_kernel=True)[0]
    return result


def _fla_delta_unchecked(arguments: Arguments) -> Tensor:
    """Without the check that refuses Triton 3.4 to 3.7.0 on Hopper."""
    chunks: Any = importlib.import_module("fla.ops.common.chunk_o")
    chunks.IS_NVIDIA_HOPPER = False
    return _fla_delta(arguments)


def _fla_kimi(arguments: Arguments) -> Tensor:
    module = importlib.import_module("fla.ops.kda")
    result: Tensor = module.chunk_kda(**arguments, use_qk_l2norm_in_kernel=True)[0]
    return result


def _fla_convolution(arguments: Arguments) -> Tensor:
    module = importlib.import_module("fla.modules.causal_conv1d")
    out = module.causal_conv1d(**arguments, activation="silu")
    result: Tensor = out[0] if isinstance(out, tuple) else out
    return result


NORMED = {"qk_l2norm": True}
DELTA = {
    "fla-core": _fla_delta,
    "fla-core without its check": _fla_delta_unchecked,
    "transformers": _unpatched("qwen3_next", "torch_chunk_gated_delta_rule"),
}
KIMI = {
    "fla-core": _fla_kimi,
    "transformers": _unpatched("kimi_linear", "chunk_kimi_delta_attention"),
}
CASES = (
    Case(
        "gated_delta_rule", "16 key and 32 value heads of 128", _delta(16, 32, False), NORMED, DELTA
    ),
    Case("kimi_delta_attention", "32 heads of 128", _delta(32, 32, True), NORMED, KIMI),
    Case("kimi_delta_attention", "16 heads of 128", _delta(16, 16, True), NORMED, KIMI),
    Case(
        "ssd_scan",
        "128 heads of 64, 128 states, 8 groups",
        _heads(128, 64, 128, 8),
        {"dt_softplus": True},
    ),
    Case(
        "ssd_scan",
        "32 heads of 128, 256 states, 1 group",
        _heads(32, 128, 256, 1),
        {"dt_softplus": True},
    ),
    Case("selective_scan", "8192 channels, 16 states, gate", _channels, {"delta_softplus": True}),
    Case(
        "causal_conv1d",
        "8192 channels, 4 weights, silu",
        _convolution,
        {"activation": "silu"},
        {"fla-core": _fla_convolution},
    ),
    Case("gated_short_conv", "2048 channels, 3 weights", _gated),
)


def drawn(case: Case, batch: int, length: int, share: int) -> Arguments:
    """Arguments that need gradients."""
    generator = torch.Generator(DEVICE).manual_seed(0)

    def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(*shape, generator=generator, device=DEVICE).to(dtype)

    tensors = case.make(draw, batch, length, share)
    return {n: x.detach().requires_grad_() for n, x in tensors.items()}


def _gradients(function: Function, arguments: Arguments, dy: Tensor) -> tuple[Tensor, ...]:
    y = function(arguments)
    return y, *torch.autograd.grad(y, list(arguments.values()), dy)


def median(call: Callable[[], object], rounds: int) -> float:
    """Median time in ms by CUDA events, the host ahead; fewer rounds of slow calls."""
    for _ in range(2):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        call()
    torch.cuda.synchronize()
    rounds = max(3, min(rounds, int(MOST_SECONDS / (time.perf_counter() - begun))))
    pairs = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        pairs.append((begin, end))
    torch.cuda.synchronize()
    return float(statistics.median(begin.elapsed_time(end) for begin, end in pairs))


def apart(case: Case, function: Function) -> str:
    """The largest error of the result and of the gradients on a short input."""
    arguments = drawn(case, 1, SHORT, 16)
    wide = {n: x.detach().double().requires_grad_() for n, x in arguments.items()}
    dy = torch.randn_like(case.ours(arguments))
    exact = _gradients(case.exact, wide, dy.double())
    gradients = _gradients(function, arguments, dy)
    errors = [
        float(((a.double() - b).norm() / b.norm()).detach())
        for a, b in zip(gradients, exact, strict=True)
    ]
    worst = max(errors)
    name = ("y", *(f"d{n}" for n in arguments))[errors.index(worst)]
    return f"{worst:.1e} ({name})"


def differing(case: Case, arguments: Arguments, dy: Tensor, repeats: int) -> int:
    """How many of so many calls have another result or gradient than the first, in bits."""
    first = _gradients(case.ours, arguments, dy)
    calls = (_gradients(case.ours, arguments, dy) for _ in range(repeats))
    return sum(not all(map(torch.equal, first, again)) for again in calls)


def measured(case: Case, rounds: int, repeats: int) -> Iterator[str]:
    """One line for the operator and one for each peer, or what it raises."""
    arguments = drawn(case, 2, 8192, 1)
    dy = torch.randn_like(case.ours(arguments))
    for who, function in {"liger_multi": case.ours, **case.peers}.items():
        head = f"{case.name}, {case.sizes}, {who}"
        try:
            forward = median(lambda f=function: f(arguments).detach(), rounds)  # type: ignore[misc]
            base = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            _gradients(function, arguments, dy)
            peak = (torch.cuda.max_memory_allocated() - base) / 2**20
            both = median(lambda f=function: _gradients(f, arguments, dy), rounds)  # type: ignore[misc]
            error = apart(case, function)
        except Exception as error_:  # a peer's refusal is a result
            yield f"{head}: {type(error_).__name__}: {str(error_).splitlines()[0][:200]}"
            continue
        times = f"fwd {forward:.3f} ms, fwd+bwd {both:.3f} ms"
        yield f"{head}: {times}, peak {peak:.0f} MiB, error {error}"
        if repeats and who == "liger_multi":
            yield f"{head}: {differing(case, arguments, dy, repeats)} of {repeats} calls differ"


def version(name: str) -> str:
    """Of an installed package."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def copied() -> float:
    """Bandwidth of a copy in TB/s, read and written."""
    x = torch.randn(2**27, device="cuda").bfloat16()
    y = torch.empty_like(x)
    return 2 * x.nbytes / median(lambda: y.copy_(x), 20) / 1e9


def main() -> int:
    """Measure every case."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.hybrid_operators", description=__doc__
    )
    parser.add_argument("names", nargs="*", help="operators; all by default")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=0)
    parser.add_argument("--lines", type=Path, metavar="FILE")
    options = parser.parse_args()
    packages = ("torch", "triton", "fla-core", "transformers")
    lines = [
        "python -m benchmarks.hybrid_operators, 2x8192 tokens, bf16, gates and A fp32, "
        + ", ".join(f"{name} {version(name)}" for name in packages)
        + f"; copy {copied():.2f} TB/s"
    ]
    print(lines[0], flush=True)
    for case in CASES:
        if options.names and case.name not in options.names:
            continue
        for line in measured(case, options.rounds, options.repeats):
            lines.append(line)
            print(line, flush=True)
            if options.lines is not None:
                options.lines.write_text("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
