"""What the benchmark runs: samples scaled to the device, their inputs, and the fp64 truth.

Beside them stands the peak: the least work of every operator, and what the device reaches.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from liger_multi import ops
from liger_multi.dispatch.config import use
from liger_multi.dispatch.registry import REFERENCE, operators
from liger_multi.errors import unknown
from liger_multi.testing import samples, tolerance
from liger_multi.testing.samples import Sample, public

# --- the peak ---


@dataclass(frozen=True)
class Work:
    """The least that any implementation must do, forward alone and with backward."""

    forward_bytes: float
    both_bytes: float
    forward_operations: float = 0.0
    both_operations: float = 0.0


def _elementwise(
    forward: int, both: int, codes: int = 0
) -> Callable[[Mapping[str, Sequence[int]], int], Work]:
    """Work in passes over the first tensor: each input is read once, each output written once.

    Besides, forward writes ``codes`` of one byte per element.
    """

    def work(shapes: Mapping[str, Sequence[int]], size: int) -> Work:
        elements = math.prod(next(iter(shapes.values())))
        return Work(*(elements * (passes * size + codes) for passes in (forward, both)))

    return work


def _gated_packed(shapes: Mapping[str, Sequence[int]], size: int) -> Work:
    half = math.prod(shapes["gate_up"]) * size / 2
    return Work(3 * half, 8 * half)


def _gated_norm(shapes: Mapping[str, Sequence[int]], size: int) -> Work:
    # x (and a gate) read, y written; dy and those read, their gradients written
    inputs = 2 if "gate" in shapes else 1
    once = math.prod(shapes["x"]) * size
    return Work((inputs + 1) * once, (inputs + 1 + 2 * inputs + 1) * once)


def _modulated_norm(shapes: Mapping[str, Sequence[int]], size: int) -> Work:
    once, by = math.prod(shapes["x"]) * size, math.prod(shapes["scale"]) * size
    # x, scale and shift read, y written; dy, x and scale read, three gradients written
    return Work(2 * once + 2 * by, 5 * once + 5 * by)


def _rope(shapes: Mapping[str, Sequence[int]], size: int) -> Work:
    heads = (math.prod(shapes["q"]) + math.prod(shapes["k"])) * size
    angles = sum(math.prod(shape) for name, shape in shapes.items() if name in ("cos", "sin"))
    angles = angles * size + math.prod(shapes.get("freqs", (0,))) * 4
    # an integer a token
    angles += math.prod(shapes.get("position_ids", (0,))) * 8
    return Work(2 * heads + angles, 4 * heads + 2 * angles)


def _rms_norm_rope(shapes: Mapping[str, Sequence[int]], size: int) -> Work:
    once, angles = (math.prod(shapes[name]) * size for name in ("x", "cos"))
    # x and angles read, y written; dy, x and angles read, dx written
    return Work(2 * once + 2 * angles, 5 * once + 4 * angles)


def _rope_multimodal(shapes: Mapping[str, Sequence[int]], size: int) -> Work:
    return _rope({**shapes, "cos": shapes["cos"][1:], "sin": shapes["sin"][1:]}, size)


def _linear(shapes: Mapping[str, Sequence[int]], size: int) -> Work:
    rows, width = math.prod(shapes["hidden"][:-1]), shapes["hidden"][-1]
    classes = shapes["weight"][0]
    once, product = (rows + classes) * width * size, 2.0 * rows * width * classes
    # forward: one product, inputs read; backward: two more, gradients written
    return Work(once, 2 * once, product, 3 * product)


def _plain_linear(shapes: Mapping[str, Sequence[int]], size: int) -> Work:
    rows, (outer, width) = math.prod(shapes["x"][:-1]), shapes["weight"]
    x, weight, y = rows * width * size, outer * width * size, rows * outer * size
    product = 2.0 * rows * width * outer
    # x and weight read, y written; then dy, x and weight read, two gradients written
    return Work(x + weight + y, 3 * (x + weight) + 2 * y, product, 3 * product)


def _gated_mlp(shapes: Mapping[str, Sequence[int]], size: int) -> Work:
    rows, width = math.prod(shapes["x"][:-1]), shapes["x"][-1]
    inner, outer = shapes["gate_weight"][0], shapes["down_weight"][0]
    product = 2.0 * rows * inner * (2 * width + outer)
    # beside the products: gate and up read, one written; then three read, three written
    return Work(3 * rows * inner * size, 9 * rows * inner * size, product, 3 * product)


def _lora_update(shapes: Mapping[str, Sequence[int]], size: int) -> Work:
    inputs, outputs = math.prod(shapes["x"]), math.prod(shapes["base"])
    product = 2.0 * shapes["a"][0] * (inputs + outputs)
    # x and base read, y written; then dy and x read, dx written
    forward = (inputs + 2 * outputs) * size
    return Work(forward, forward + (outputs + 2 * inputs) * size, product, 4 * product)


def _lora_mlp(shapes: Mapping[str, Sequence[int]], size: int) -> Work:
    rows, inner = math.prod(shapes["x"][:-1]), shapes["gate_weight"][0]
    width, outer = shapes["x"][-1], shapes["down_weight"][0]
    product = 2.0 * rows * inner * (2 * width + outer)
    # frozen layers have no gradient, so backward is as many products as forward
    return Work(3 * rows * inner * size, 9 * rows * inner * size, product, 2 * product)


def _lora_qkv(shapes: Mapping[str, Sequence[int]], size: int) -> Work:
    rows, width = math.prod(shapes["x"][:-1]), shapes["x"][-1]
    outputs = sum(shapes[name][0] for name in shapes if name.endswith("_weight"))
    product = 2.0 * rows * width * outputs
    # x read, outputs written; then these gradients and x read, dx written; frozen as lora_mlp's
    forward = rows * (width + outputs) * size
    return Work(forward, 2 * forward + rows * width * size, product, 2 * product)


def _fused_moe(shapes: Mapping[str, Sequence[int]], size: int) -> Work:
    width, pairs = shapes["x"][-1], math.prod(shapes["index"])
    weights = math.prod(shapes["gate_up_weight"]) + math.prod(shapes["down_weight"])
    product = 2.0 * pairs * weights / shapes["gate_up_weight"][0]
    tokens = math.prod(shapes["x"][:-1]) * width * size
    kept = 2 * pairs * weights / shapes["gate_up_weight"][0] / width / 3 * size
    # weights read, x read, y and what is kept written; weights read, their gradients written,
    # what is kept read, dy and x read, dx written
    once = weights * size + 2 * tokens + kept
    return Work(once, once + 2 * weights * size + 3 * tokens + kept, product, 3 * product)


def _lora_moe(shapes: Mapping[str, Sequence[int]], size: int) -> Work:
    moe = _fused_moe(shapes, size)
    weights = math.prod(shapes["gate_up_weight"]) + math.prod(shapes["down_weight"])
    # frozen weights have no gradient, so backward is as many products as forward
    both = moe.both_bytes - weights * size
    return replace(moe, both_bytes=both, both_operations=2 * moe.forward_operations)


def _streams(forward: int, both: int, alone: tuple[int, int]) -> Callable[..., Work]:
    """Passes over the streams, and over what has one stream."""

    def work(shapes: Mapping[str, Sequence[int]], size: int) -> Work:
        many = math.prod(shapes["x"]) * size
        one = many / shapes["x"][-2]
        return Work(forward * many + alone[0] * one, both * many + alone[1] * one)

    return work


def _linear_pair(shapes: Mapping[str, Sequence[int]], size: int) -> Work:
    rows, width = math.prod(shapes["hidden"][:-1]), shapes["hidden"][-1]
    other, classes = shapes["teacher_hidden"][-1], shapes["weight"][0]
    mine, theirs = (rows + classes) * width * size, (rows + classes) * other * size
    product, teacher = (2.0 * rows * classes * w for w in (width, other))
    return Work(mine + theirs, 2 * mine + theirs, product + teacher, 3 * product + teacher)


def _embedding(shapes: Mapping[str, Sequence[int]], size: int) -> Work:
    rows, width = math.prod(shapes["index"]), shapes["weight"][1]
    gathered, table = rows * width * size, math.prod(shapes["weight"]) * size
    # rows read and written; what arrives read, and the gradient written, most of it zeros
    return Work(2 * gathered, 3 * gathered + table)


def _pairs(length: int, keys: int, options: Mapping[str, Any]) -> float:
    """Queries times the keys that each sees."""
    window, causal = options.get("window"), options.get("causal", False)
    left, right = (window - 1,) * 2 if isinstance(window, int) else window or (-1, -1)
    right = 0 if causal else right
    places = torch.arange(keys - length, keys)
    first = 0 if left < 0 or window is None else (places - left).clamp(min=0)
    end = keys if right < 0 else (places + right + 1).clamp(max=keys)
    return float((end - first + torch.zeros_like(places)).sum())


def _attention(
    shapes: Mapping[str, Sequence[int]], size: int, options: Mapping[str, Any] = {}
) -> Work:
    (batch, heads, length, width), (_, groups, keys, value) = shapes["q"], shapes["v"]
    tokens = batch * (heads * length + groups * keys) * (width + value) * size
    # forward: two products; backward: the scores again and four more
    product = 2.0 * batch * heads * _pairs(length, keys, options)
    forward = product * (width + value)
    return Work(tokens, 3 * tokens, forward, forward + product * (3 * width + 2 * value))


def _neighbors(
    shapes: Mapping[str, Sequence[int]], size: int, options: Mapping[str, Any] = {}
) -> Work:
    reach = options.get("kernel_size", 7) // 2  # a dilation leaves out as many as it reaches
    return _attention(shapes, size, {"window": (reach, reach)})


def _sparse_attention(shapes: Mapping[str, Sequence[int]], size: int) -> Work:
    (batch, heads, length, width), listed = shapes["q"], shapes["indices"][-1]
    value = shapes["v"][-1] if "v" in shapes else width  # a latent's value is nearly all of it
    once = (math.prod(shapes["q"]) + batch * heads * length * value) * size
    once += math.prod(shapes["k"]) * size + math.prod(shapes["indices"]) * 4
    # forward: two products of listed pairs; backward: the scores again and four more
    product = 2.0 * batch * heads * length * listed
    forward = product * (width + value)
    return Work(once, 3 * once, forward, forward + product * (3 * width + 2 * value))


def _indexer(
    shapes: Mapping[str, Sequence[int]], size: int, options: Mapping[str, Any] = {}
) -> Work:
    (batch, length, heads, width), keys = shapes["q"], shapes["k"][1]
    once = (math.prod(shapes["q"]) + math.prod(shapes["k"])) * size + math.prod(shapes["w"]) * 4
    topk = options.get("topk", 0)
    listed = 2.0 * heads * width * batch * length * (topk or shapes["indices"][-1])
    # the selection has a product of all pairs that are seen, scores of a list one of listed pairs
    seen = 2.0 * heads * width * batch * _pairs(length, keys, {"causal": True})
    forward = seen if topk else listed
    return Work(once, 3 * once, forward, forward + 3 * listed)


def _delta_rule(shapes: Mapping[str, Sequence[int]], size: int) -> Work:
    keys, values = math.prod(shapes["q"]) * size, math.prod(shapes["v"]) * size
    size_k, size_v, chunk = shapes["k"][-1], shapes["v"][-1], 64
    rows = math.prod(shapes["v"][:-1])  # tokens of value heads
    gates = math.prod(shapes["g"]) * 4 + rows * size  # of 4 bytes; beta
    # q, k, v and gates read, y written; those and dy read, their gradients written
    forward = 2 * keys + 2 * values + gates
    # of each token a row of three squares and of three states; backward makes them again, and has
    # the gradients of both factors of each
    product = 2.0 * rows * (chunk * (2 * size_k + 2 * size_v) + 3 * size_k * size_v)
    return Work(forward, forward + 4 * keys + 3 * values + 2 * gates, product, 4 * product)


def _ssd_scan(shapes: Mapping[str, Sequence[int]], size: int) -> Work:
    rows, groups = math.prod(shapes["x"]) * size, math.prod(shapes["B"]) * size
    value, states, chunk = shapes["x"][-1], shapes["B"][-1], 64
    steps = math.prod(shapes["dt"]) * 4
    # x, B, C and dt read, y written; those and dy read, four gradients written
    forward = 2 * rows + 2 * groups + steps
    # of each token a row of a square and of two states, and of a group a row of another square
    tokens, shared = math.prod(shapes["dt"]), math.prod(shapes["B"][:-1])
    product = 2.0 * (tokens * (chunk * value + 2 * states * value) + shared * chunk * states)
    return Work(forward, forward + 2 * rows + 2 * groups + steps, product, 4 * product)


def _selective_scan(shapes: Mapping[str, Sequence[int]], size: int) -> Work:
    rows, pairs = math.prod(shapes["u"]) * size, math.prod(shapes["B"]) * size
    steps = math.prod(shapes["delta"]) * 4
    # u, z, delta, B and C read, y written; those and dy read, five gradients written
    forward = 3 * rows + steps + 2 * pairs
    return Work(forward, 2 * forward + 2 * rows + steps + 2 * pairs)


def _residuals(shapes: Mapping[str, Sequence[int]], size: int) -> Work:
    count, every = shapes["blocks"][0], math.prod(shapes["blocks"]) * size
    # blocks read, y written; dy and blocks read, their gradients written
    return Work(every * (1 + 1 / count), every * (3 + 2 / count))


def _gated_conv(shapes: Mapping[str, Sequence[int]], size: int) -> Work:
    once = math.prod(shapes["x"]) * size / 3
    # two gates and values read, y written; dy and these read, three gradients written
    return Work(4 * once, 11 * once)


def _multi_token(shapes: Mapping[str, Sequence[int]], size: int) -> Work:
    *_, heads, rows, cols = shapes["scores"]
    scores = math.prod(shapes["scores"])
    seen = scores * sum(min(row + 1, cols) for row in range(rows)) / (rows * cols)
    wide = shapes["weight"][0] / heads  # what y has to scores, where the convolution keeps sizes
    product = 2.0 * seen * wide * math.prod(shapes["weight"][1:])
    # seen scores read, probabilities and y written with their zeros; what is seen of dy and the
    # probabilities read, dscores written; no product past the diagonal
    forward = (seen + scores * (1 + wide)) * size
    both = forward + (seen * (1 + wide) + scores) * size
    return Work(forward, both, product, 3 * product)


def _kl_div(
    shapes: Mapping[str, Sequence[int]], size: int, options: Mapping[str, Any] = {}
) -> Work:
    # the gradient of log-probabilities is that of the teacher, and reads nothing else
    return _elementwise(2, 5 if options.get("form") == "logits" else 4)(shapes, size)


WORK: dict[str, Callable[..., Work]] = {
    "attention_residuals": _residuals,
    "gated_delta_rule": _delta_rule,
    "kimi_delta_attention": _delta_rule,
    "selective_scan": _selective_scan,
    "ssd_scan": _ssd_scan,
    "indexer_scores": _indexer,
    "indexer_topk": _indexer,
    "multi_token_attention": _multi_token,
    "neighborhood_attention": _neighbors,
    "attention": _attention,
    "sparse_attention": _sparse_attention,
    # x read, y written; dy and x read, dx written (statistics and weights are one row)
    "rms_norm": _elementwise(2, 5),
    # both terms read, sum and norm written; two gradients and the sum read, one written
    "fused_add_rms_norm": _elementwise(4, 8),
    # the same, and codes of FP8 written
    "rms_norm_quantized": _elementwise(2, 5, 1),
    "layer_norm_quantized": _elementwise(2, 5, 1),
    "fused_add_rms_norm_quantized": _elementwise(4, 8, 1),
    # as that, with two gradients written
    "fused_scaled_add_rms_norm": _elementwise(4, 9),
    "layer_norm": _elementwise(2, 5),
    "poly_norm": _elementwise(2, 5),
    "group_norm": _elementwise(2, 5),
    "dyt": _elementwise(2, 5),
    "gated_rms_norm": _gated_norm,
    "modulated_rms_norm": _modulated_norm,
    # x read, y written; dy and x read, dx written
    "causal_conv1d": _elementwise(2, 5),
    "gated_short_conv": _gated_conv,
    # gate and up read, y written; dy, gate and up read, two gradients written
    "swiglu": _elementwise(3, 8),
    "swiglu_quantized": _elementwise(3, 8, 1),
    "swiglu_packed": _gated_packed,
    "gated_mlp": _gated_mlp,
    "gated_mlp_float8": _gated_mlp,
    "linear": _plain_linear,
    "linear_float8": _plain_linear,
    "lora_mlp": _lora_mlp,
    "lora_qkv": _lora_qkv,
    "lora_update": _lora_update,
    "fused_moe": _fused_moe,
    "lora_moe": _lora_moe,
    # streams read; read again, their gradient written
    "hyper_connections": _streams(1, 3, (0, 0)),
    # streams read, one written; dy and streams read, a gradient written
    "hyper_connections_pre": _streams(1, 3, (1, 2)),
    # streams and one read, streams written; dy, both read, both gradients written
    "hyper_connections_post": _streams(2, 5, (1, 3)),
    "geglu": _elementwise(3, 8),
    "geglu_quantized": _elementwise(3, 8, 1),
    "geglu_packed": _gated_packed,
    "swiglu_clamped": _elementwise(3, 8),
    "swiglu_clamped_packed": _gated_packed,
    # x read, y written; dy and x read, dx written
    "relu_squared": _elementwise(2, 5),
    # q, k, cos and sin read, q and k written, twice
    "rms_norm_rope": _rms_norm_rope,
    "rope": _rope,
    "rope_sorted": _rope,
    "rope_complex": _rope,
    "rope_positions": _rope,
    # of three grids, each pair needs the angles of one
    "rope_multimodal": _rope_multimodal,
    # logits read; the gradient written, which one pass can do
    "cross_entropy": _elementwise(1, 2),
    "cross_entropy_inplace": _elementwise(1, 2),
    "fused_linear_cross_entropy": _linear,
    # three products: whoever computes the logits twice, to save memory, does four
    "fused_linear_log_prob": _linear,
    # logits read; read again, and the gradient written
    "token_log_prob": _elementwise(1, 3),
    # x read, y written; dy and y read, dx written
    "softmax": _elementwise(2, 5),
    "sparsemax": _elementwise(2, 5),
    # logits read; the gradient written, which one pass can do
    "selective_log_softmax": _elementwise(1, 2),
    "embedding": _embedding,
    # student and teacher read; read again, and the gradient written
    "kl_div": _kl_div,
    "jsd": _elementwise(2, 5),
    "tvd": _elementwise(2, 5),
    # student and teacher read; the gradient written, which one pass can do
    "kl_div_inplace": _elementwise(2, 3),
    "jsd_inplace": _elementwise(2, 3),
    "tvd_inplace": _elementwise(2, 3),
    # both logits, and two products for the gradients of the student
    "fused_linear_kl_div": _linear_pair,
    "fused_linear_jsd": _linear_pair,
    "fused_linear_tvd": _linear_pair,
}
OPTIONS = ("attention", "neighborhood_attention", "indexer_topk", "kl_div")  # on which work depends


def least(
    op: str, shapes: Mapping[str, Sequence[int]], size: int, options: Mapping[str, Any]
) -> Work | None:
    """The work of a call, or None for an operator that the table does not know."""
    found = WORK.get(op)
    if found is None:
        return None
    return found(shapes, size, options) if op in OPTIONS else found(shapes, size)


@dataclass(frozen=True)
class Ceilings:
    """What the device reaches in this run: a large copy (read + written), a large product."""

    copy_bytes_per_second: float
    matmul_operations_per_second: float

    def floor_ms(self, bytes_: float, operations: float) -> float:
        """No implementation is faster than the slower of both."""
        return 1e3 * max(
            bytes_ / self.copy_bytes_per_second, operations / self.matmul_operations_per_second
        )

    def percent(self, work: Work | None, forward_ms: float, both_ms: float) -> dict[str, float]:
        """Percent of peak that measured times reach; empty for unknown work."""
        if work is None:
            return {}
        forward = self.floor_ms(work.forward_bytes, work.forward_operations)
        both = self.floor_ms(work.both_bytes, work.both_operations)
        return {"forward": 100 * forward / forward_ms, "both": 100 * both / both_ms}


CPU_BYTES, CPU_OPERATIONS = 16e6, 2e10
JUMPS = ("fused_linear_tvd", "gated_mlp_float8")
"""Of these, a rounded logit may turn a sign and a rounded product may get the next code of FP8: no
bound holds for every element, so that the relative error in the 2-norm decides."""
JUMPED = 2**-4  # of that error: half a step of E4M3 codes
ORACLE_BYTES = 2**30  # of the widest tensor of one chunk of rows


# --- cases ---


@dataclass(frozen=True)
class Case:
    """One sample of one operator, perhaps scaled down.

    Attributes:
        op: Operator's name.
        sample: What is run.
        divisors: By what the rows and the vocabulary were divided; empty for the full shape.
    """

    op: str
    sample: Sample
    divisors: Mapping[str, int]

    @property
    def label(self) -> str:
        """The sample's name, and how it was scaled."""
        return " ".join([self.sample.name, *(f"{k}/{v}" for k, v in self.divisors.items())])

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the inputs by name."""
        return {n: t.shape for n, t in self.sample.tensors.items()}

    @property
    def row_tensors(self) -> tuple[str, ...]:
        """Inputs whose first axis is the rows."""
        return _row_tensors(self.sample)

    def work(self, dtype: torch.dtype) -> Work | None:
        """Minimal work, or None for an operator that the table does not know."""
        return least(self.op, self.shapes, dtype.itemsize, self.sample.options)


def _row_tensors(sample: Sample) -> tuple[str, ...]:
    first = next(iter(sample.tensors.values())).shape
    return tuple(
        name
        for name, t in sample.tensors.items()
        if t.shape and t.shape[0] == first[0] and (t.classes or len(t.shape) == len(first))
    )


def _divide(sample: Sample, divisors: Mapping[str, int]) -> Sample:
    """The sample with fewer rows and a smaller vocabulary."""
    rows, classes = _row_tensors(sample), max(t.classes for t in sample.tensors.values())
    fewer = max(1, classes // divisors.get("V", 1))
    tensors = {}
    for name, t in sample.tensors.items():
        shape = list(t.shape)
        for axis, length in enumerate(shape):
            if axis == 0 and name in rows:
                shape[0] = max(1, length // divisors.get("rows", 1))
            elif classes and length == classes:
                shape[axis] = fewer
        tensors[name] = replace(t, shape=tuple(shape), classes=fewer if t.classes else 0)
    return replace(sample, tensors=tensors)


def scaled(op: str, sample: Sample, itemsize: int, limit_bytes: float, operations: float) -> Case:
    """Halve rows and vocabulary in turn until the sample is small enough for a CPU."""
    divisors: dict[str, int] = {}
    while True:
        small = _divide(sample, divisors)
        shapes = {n: t.shape for n, t in small.tensors.items()}
        work = least(op, shapes, itemsize, sample.options) or Work(0, 0)
        rows = next(iter(shapes.values()))[0]
        classes = max(t.classes for t in small.tensors.values())
        fits = small.elements * itemsize <= limit_bytes and work.both_operations <= operations
        if fits or (rows <= 1 and classes <= 1):
            return Case(op, small, divisors)
        key = "V" if classes > rows else "rows"
        divisors = {**divisors, key: divisors.get(key, 1) * 2}


def select(kind: str, pattern: str, known: Sequence[str]) -> list[str]:
    """The names that a comma-joined list of globs means; ValueError names the nearest."""
    found: list[str] = []
    for part in filter(None, (p.strip() for p in pattern.split(","))):
        hits = [name for name in known if fnmatch.fnmatchcase(name, part)]
        if not hits:
            raise ValueError(unknown(kind, part, known))
        found += hits
    if not found:
        raise ValueError(f"no {kind} named by {pattern!r}: '*' means all {len(known)}")
    return [name for name in known if name in found]


def cases(
    ops: str, names: str, dtype: torch.dtype, limits: tuple[float, float] | None
) -> list[Case]:
    """Bench samples of the operators; ``limits`` (bytes, operations) scales them down."""
    bench = {
        op: [s for s in samples.of(op) if s.size == "bench"]
        for op in select("operator", ops, operators())
    }
    known = list(dict.fromkeys(s.name for each in bench.values() for s in each))
    wanted = select("sample", names, known)
    return [
        scaled(op, s, dtype.itemsize, *limits) if limits else Case(op, s, {})
        for op, each in bench.items()
        for s in each
        if s.name in wanted
    ]


# --- inputs ---


def draw(sample: Sample, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """The inputs, drawn on the device: a billion fp64 numbers on the host take minutes."""
    generator = torch.Generator(device).manual_seed(0)
    made = {}
    for name, spec in sample.tensors.items():
        if spec.classes:
            ids = torch.randint(spec.classes, spec.shape, generator=generator, device=device)
            order = torch.arange(ids.numel(), device=device).reshape(spec.shape)
            drop = order < round(spec.ignored * ids.numel())
            made[name] = ids.masked_fill(drop, spec.ignore_index)
            continue
        shape = (1, *spec.shape[1:]) if spec.layout == "expanded" else spec.shape
        options = {"generator": generator, "device": device, "dtype": torch.float32}
        values = (
            torch.rand(shape, **options).add_(0.5)  # type: ignore[call-overload]
            if spec.positive
            else torch.randn(shape, **options).mul_(spec.scale)  # type: ignore[call-overload]
        )
        values = spec.formed(values).to(spec.dtype or dtype)
        laid = samples._LAYOUTS[spec.layout](values, spec.shape)
        made[name] = laid.requires_grad_(spec.grad)
    for name in {"cos", "sin"} & made.keys():
        made[name] = of_pairs(made[name], next(iter(made.values())), sample.options.get("style"))
    return made


def of_pairs(angles: Tensor, turned: Tensor, style: object) -> Tensor:
    """Both channels of a pair have one angle, as in a model: peers read the half of them only."""
    half = angles.shape[-1] // 2
    if angles.shape[-1] < turned.shape[-1]:
        return angles  # one value a pair
    one = angles[..., :half]
    return one.repeat_interleave(2, -1) if style == "interleaved" else torch.cat((one, one), -1)


def upstream(
    case: Case, device: torch.device, dtype: torch.dtype, fp64_reference: Reference
) -> tuple[Tensor, ...]:
    """A gradient for every result: random, or 1 for a scalar loss, as a training step has."""
    meta = {
        n: torch.empty(t.shape, device="meta", dtype=torch.int64 if t.classes else torch.float64)
        for n, t in case.sample.tensors.items()
    }
    generator = torch.Generator(device).manual_seed(1)
    return tuple(
        torch.randn(result.shape, generator=generator, device=device).to(dtype)
        if result.ndim
        else torch.ones((), device=device)
        for result in fp64_reference(case, meta)
    )


# --- truth ---

Reference = Callable[["Case", Mapping[str, Tensor]], tuple[Tensor, ...]]
"""What an operator should return, differentiable, for inputs of any floating dtype."""


def reference(case: Case, tensors: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    """The operator's own reference, which in fp64 is the equations in order and nothing rounded."""
    name = public(case.op)
    options = {k: v for k, v in case.sample.options.items() if k != "inplace"}
    with use(**{name: REFERENCE}):
        return differentiable(getattr(ops, name)(**tensors, **options))


def differentiable(found: Any) -> tuple[Tensor, ...]:
    """What has gradients of that which a call returned: of a loss, nothing that stands beside."""
    found = getattr(found, "loss", found)
    if isinstance(found, Tensor):
        return (found,)
    return tuple(t for t in found if isinstance(t, Tensor) and t.is_floating_point())


@dataclass(frozen=True)
class Truth:
    """Results and gradients in high precision."""

    results: tuple[Tensor, ...]
    grads: Mapping[str, Tensor]
    precision: str


def truth(
    case: Case,
    tensors: Mapping[str, Tensor],
    douts: tuple[Tensor, ...],
    dtype: torch.dtype,
    fp64_reference: Reference,
) -> Truth:
    """Run the reference on the rounded inputs in ``dtype``, rows in chunks so that fp64 fits."""
    rows = _row_tensors(case.sample)
    count = tensors[rows[0]].shape[0]
    step = max(1, int(ORACLE_BYTES // (_widest(case) * dtype.itemsize)))
    if any(t.positive and n not in rows for n, t in case.sample.tensors.items()):
        step = count  # class weights: the denominator is not a count of rows
    shared = {n: _widen(t, dtype) for n, t in tensors.items() if n not in rows}
    parts: list[tuple[Tensor, ...]] = []
    grads: dict[str, list[Tensor]] = {n: [] for n, t in tensors.items() if t.requires_grad}
    for start in range(0, count, step):
        part = slice(start, start + step)
        wide = {n: _widen(t[part], dtype) if n in rows else shared[n] for n, t in tensors.items()}
        results = fp64_reference(case, wide)
        results = tuple(r if r.ndim else r * _share(case, tensors, part) for r in results)
        ups = [(up[part] if r.ndim else up).to(dtype) for r, up in zip(results, douts, strict=True)]
        pairs = [(r, up) for r, up in zip(results, ups, strict=True) if r.requires_grad]
        smooth, given = ([pair[i] for pair in pairs] for i in (0, 1))
        found = torch.autograd.grad(smooth, [wide[n] for n in grads], given)
        for name, grad in zip(grads, found, strict=True):
            if name in rows or not grads[name]:
                grads[name].append(grad)
            else:
                grads[name][0] += grad
        parts.append(tuple(r.detach() for r in results))
    joined = {n: torch.cat(each) if len(each) > 1 else each[0] for n, each in grads.items()}
    totals = tuple(
        torch.cat(each) if each[0].ndim else torch.stack(each).sum()
        for each in zip(*parts, strict=True)
    )
    return Truth(totals, joined, "fp64" if dtype == torch.float64 else "fp32")


def _widest(case: Case) -> int:
    """The most columns that a formula has of a row."""
    shapes = case.shapes
    found = [shapes[n][-1] for n, t in case.sample.tensors.items() if not t.classes and shapes[n]]
    found += [t.classes for t in case.sample.tensors.values()]
    experts = shapes.get("gate_up_weight", ())
    if len(experts) == 3:  # a token has a row for each of its experts
        found.append(shapes["index"][-1] * max(shapes["x"][-1], experts[1]))
    return max(1, *found)


def _widen(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    return tensor.detach().to(dtype).requires_grad_(tensor.requires_grad)


def _share(case: Case, tensors: Mapping[str, Tensor], part: slice) -> float:
    """What a chunk's mean weighs in the mean of all rows; 1 for a sum."""
    if case.sample.options.get("reduction", "mean") != "mean":
        return 1.0
    target = next((n for n, t in case.sample.tensors.items() if t.classes), None)
    if target is None:  # every row counts
        rows = tensors[case.row_tensors[0]]
        return float(rows[part].shape[0]) / max(1, rows.shape[0])
    valid = tensors[target] != case.sample.options.get("ignore_index", -100)
    return float(valid[part].sum()) / max(1.0, float(valid.sum()))


def error(got: Tensor, exact: Tensor, dtype: torch.dtype) -> tuple[float, float]:
    """Largest error in units of the tolerance (1 passes), and relative error in the 2-norm."""
    if got.shape != exact.shape:
        return math.inf, math.inf
    kind = max(dtype, got.dtype, key=lambda d: torch.finfo(d).eps)
    finite = torch.where(exact.isfinite(), exact.abs(), 0)
    largest = finite.max().reshape(1) if exact.numel() else exact.new_zeros(1)
    del finite
    worst, squares, norms = 0.0, 0.0, 0.0
    for ours, right in _pieces(got, exact):
        # The tolerance refers to the largest value of the whole tensor: hand it to every piece.
        ours, right = torch.cat([ours.to(right), largest]), torch.cat([right, largest])
        worst = max(worst, tolerance.excess(ours, right, kind))
        wrong = torch.where(ours == right, 0, ours - right)  # of equal infinities, nothing
        squares += float(wrong.double().square().sum())
        norms += float(right[:-1][right[:-1].isfinite()].double().square().sum())
    relative = math.sqrt(squares / norms) if norms else math.sqrt(squares)
    return worst, relative if math.isfinite(relative) else math.inf


def _pieces(got: Tensor, exact: Tensor, size: int = 2**26) -> Iterator[tuple[Tensor, Tensor]]:
    """Both tensors flat and in pieces, so that fp64 copies stay small."""
    flat, right = got.detach().reshape(-1), exact.reshape(-1)
    for start in range(0, right.numel(), size):
        yield flat[start : start + size], right[start : start + size]
