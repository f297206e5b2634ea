"""The peak: the least work of every operator, and what the device reaches in this run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Work:
    """The least that any implementation must do, forward alone and with backward."""

    forward_bytes: float
    both_bytes: float
    forward_operations: float = 0.0
    both_operations: float = 0.0


def _elementwise(forward: int, both: int) -> Callable[[Mapping[str, Sequence[int]], int], Work]:
    """Work in passes over the first tensor: each input is read once, each output written once."""

    def work(shapes: Mapping[str, Sequence[int]], size: int) -> Work:
        pass_bytes = math.prod(next(iter(shapes.values()))) * size
        return Work(forward * pass_bytes, both * pass_bytes)

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


def _rope_multimodal(shapes: Mapping[str, Sequence[int]], size: int) -> Work:
    return _rope({**shapes, "cos": shapes["cos"][1:], "sin": shapes["sin"][1:]}, size)


def _linear(shapes: Mapping[str, Sequence[int]], size: int) -> Work:
    rows, width = math.prod(shapes["hidden"][:-1]), shapes["hidden"][-1]
    classes = shapes["weight"][0]
    once, product = (rows + classes) * width * size, 2.0 * rows * width * classes
    # forward: one product, inputs read; backward: two more, gradients written
    return Work(once, 2 * once, product, 3 * product)


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
    total, right = 0.0, 0 if causal else right
    for place in range(keys - length, keys):
        first = 0 if left < 0 or window is None else max(0, place - left)
        total += (keys if right < 0 else min(keys, place + right + 1)) - first
    return total


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


def _residuals(shapes: Mapping[str, Sequence[int]], size: int) -> Work:
    count, every = shapes["blocks"][0], math.prod(shapes["blocks"]) * size
    # blocks read, y written; dy and blocks read, their gradients written
    return Work(every * (1 + 1 / count), every * (3 + 2 / count))


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
    "multi_token_attention": _multi_token,
    "neighborhood_attention": _neighbors,
    "attention": _attention,
    # x read, y written; dy and x read, dx written (statistics and weights are one row)
    "rms_norm": _elementwise(2, 5),
    # both terms read, sum and norm written; two gradients and the sum read, one written
    "fused_add_rms_norm": _elementwise(4, 8),
    # as that, with two gradients written
    "fused_scaled_add_rms_norm": _elementwise(4, 9),
    "layer_norm": _elementwise(2, 5),
    "poly_norm": _elementwise(2, 5),
    "group_norm": _elementwise(2, 5),
    "dyt": _elementwise(2, 5),
    "gated_rms_norm": _gated_norm,
    "modulated_rms_norm": _modulated_norm,
    # gate and up read, y written; dy, gate and up read, two gradients written
    "swiglu": _elementwise(3, 8),
    "swiglu_packed": _gated_packed,
    "gated_mlp": _gated_mlp,
    "lora_mlp": _lora_mlp,
    "lora_qkv": _lora_qkv,
    "lora_update": _lora_update,
    "fused_moe": _fused_moe,
    # streams read; read again, their gradient written
    "hyper_connections": _streams(1, 3, (0, 0)),
    # streams read, one written; dy and streams read, a gradient written
    "hyper_connections_pre": _streams(1, 3, (1, 2)),
    # streams and one read, streams written; dy, both read, both gradients written
    "hyper_connections_post": _streams(2, 5, (1, 3)),
    "geglu": _elementwise(3, 8),
    "geglu_packed": _gated_packed,
    "swiglu_clamped": _elementwise(3, 8),
    "swiglu_clamped_packed": _gated_packed,
    # x read, y written; dy and x read, dx written
    "relu_squared": _elementwise(2, 5),
    # q, k, cos and sin read, q and k written, twice
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
OPTIONS = ("attention", "neighborhood_attention", "kl_div")  # on which work depends


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
