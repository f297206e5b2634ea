"""Contract of ``fused_moe``."""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from liger_multi import checks
from liger_multi.dispatch.bitwise import BY_GEMM, BY_OUR_GEMM, bitwise
from liger_multi.dispatch.op import Op
from liger_multi.ops._formulas import gated_product
from liger_multi.ops._work import Options, Shapes, Work
from liger_multi.ops.relu_squared import formula as relu_squared_formula
from liger_multi.ops.swiglu_clamped import formula as swiglu_clamped_formula, numbers
from liger_multi.testing.samples import Sample, Tensor as T

UNGATED = "relu_squared"
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "swiglu_clamped", UNGATED)
op = Op(
    "fused_moe",
    family="experts",
    bitwise=bitwise(BY_OUR_GEMM, "x index routing y", backward=BY_GEMM),
    opens=True,
)


@op.forward(returns="y", residuals="gate_up order offsets")
def forward(
    x: Tensor,
    gate_up_weight: Tensor,
    down_weight: Tensor,
    index: Tensor,
    routing: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    activation: str,
    limit: float,
    alpha: float,
    up_offset: float,
    interleaved: bool,
    transposed: bool,
    y_dtype: torch.dtype,
    needs_x: bool,
    needs_gate_up_weight: bool,
    needs_down_weight: bool,
    needs_routing: bool,
    needs_gate_up_bias: bool,
    needs_down_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Shape rule; without gradients no row of gate_up is kept."""
    requested = needs_x or needs_gate_up_weight or needs_down_weight
    requested = requested or needs_routing or needs_gate_up_bias or needs_down_bias
    pairs = index.shape[0] * index.shape[1]
    wide = gate_up_weight.shape[2 if transposed else 1]
    return (
        x.new_empty(x.shape, dtype=y_dtype),
        x.new_empty(pairs if requested else 0, wide),
        index.new_empty(pairs, dtype=torch.int32),
        index.new_empty(gate_up_weight.shape[0] + 1, dtype=torch.int32),
    )


def _unread(needs_x: bool, needs_gate_up_weight: bool) -> tuple[str, ...]:
    weight = () if needs_x else ("gate_up_weight",)
    return weight if needs_gate_up_weight else (*weight, "x")


def _gradients(**kwargs: Any) -> tuple[Tensor, ...]:
    down, dy, gate_up, routing = (kwargs[n] for n in ("down_weight", "dy", "gate_up", "routing"))
    experts, hidden, wide = down.shape[0], dy.shape[1], gate_up.shape[1]
    shapes = {
        "x": dy.shape,
        "gate_up_weight": (experts, *((hidden, wide) if kwargs["transposed"] else (wide, hidden))),
        "down_weight": down.shape,
        "routing": routing.shape,
        "gate_up_bias": (experts, wide),
        "down_bias": (experts, hidden),
    }
    sizes = {n: shape if kwargs[f"needs_{n}"] else (0,) for n, shape in shapes.items()}
    return tuple([(routing if n == "routing" else gate_up).new_empty(s) for n, s in sizes.items()])


op.backward(
    reads="dy x? gate_up_weight? down_weight index routing down_bias gate_up order offsets "
    "activation limit alpha up_offset interleaved transposed",
    returns="dx dgate_up_weight ddown_weight drouting dgate_up_bias ddown_bias",
    not_saved=_unread,
    shapes=_gradients,
)


def fused_moe(
    x: Tensor,
    gate_up_weight: Tensor,
    down_weight: Tensor,
    index: Tensor,
    routing: Tensor,
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: str = "silu",
    limit: float = 7.0,
    alpha: float = 1.702,
    up_offset: float = 1.0,
    interleaved: bool = False,
    transposed: bool = False,
) -> Tensor:
    """A mixture of experts: tokens sorted by expert, grouped GEMMs, a weighted sum.

    Math:
        For token t and each of its experts ``e = index[t, k]``:
        ``gate, up = x[t] @ gate_up_weight[e].T + gate_up_bias[e]``,
        ``o = (act(gate) * up) @ down_weight[e].T + down_bias[e]``, and
        ``y[t] = sum over k of routing[t, k] * o``. ``swiglu_clamped`` is the operator of that name,
        with limit, alpha and up_offset. ``relu_squared`` stands for experts without a gate:
        ``o = relu(up)^2 @ down_weight[e].T``, and the first GEMM has the columns of up alone.
        Gate and up are the halves of the first GEMM, or, with
        ``interleaved``, its even and odd columns. An index outside of ``[0, E)`` (the sentinel of
        expert parallelism) adds nothing and gets no gradient. Every sum has one order: no atomic
        additions, and no number is read back by the host.

    Shapes:
        x ``(..., H)``, gate_up_weight ``(E, 2 I, H)`` and down_weight ``(E, H, I)``, or with
        ``transposed`` ``(E, H, 2 I)`` and ``(E, I, H)``; index and routing ``(..., K)``,
        gate_up_bias ``(E, 2 I)``, down_bias ``(E, H)``; any strides. y ``(..., H)``, contiguous.
        Without a gate, I stands in the place of 2 I.

    Dtypes:
        In: integer index, routing of any floating dtype, one floating dtype for the others, or any
        under autocast, which then sets the dtype of the GEMMs. Inside: GEMMs accumulate in
        fp32 and are rounded; activation, weighting and sums over k are fp32 (fp64 for fp64). Out:
        that of x.

    Memory:
        Kept for backward: x, the weights that backward needs, index and routing, and gate and up
        of every pair of token and expert, ``(T K, 2 I)``. The activation's product is computed
        again.

    Raises:
        TypeError: Wrong kinds of arguments, or dtypes that differ without autocast.
        ValueError: Shapes do not fit together, mixed devices, unknown activation, limit <= 0.

    Source:
        Shazeer et al. 2017 (arXiv:1701.06538); transformers ``MixtralExperts``,
        ``Qwen3MoeExperts``, ``GptOssExperts``, ``NemotronHExperts``.
    """
    name = op.name
    tensors: dict[str, Tensor | None] = {
        "x": x,
        "gate_up_weight": gate_up_weight,
        "down_weight": down_weight,
        "gate_up_bias": gate_up_bias,
        "down_bias": down_bias,
    }
    biases = ("gate_up_bias", "down_bias")
    checks.floating(name, **tensors, routing=routing, optional=biases)
    checks.one_of(name, "activation", activation, ACTIVATIONS)
    clamps = numbers(name, limit, alpha, up_offset)
    checks.boolean(name, "interleaved", interleaved)
    checks.boolean(name, "transposed", transposed)
    _shapes_fit(tensors, index, routing, transposed, activation)
    cast = checks.one_dtype(name, tensors)
    rows, weights = cast[0], (cast[1], cast[2])
    assert rows is not None
    pairs = index.shape[-1]
    result: Tensor = op(
        rows.reshape(_count(rows), rows.shape[-1]),
        *weights,
        index.reshape(_count(index), pairs).to(torch.int64),
        routing.reshape(_count(routing), pairs),
        *cast[3:],
        activation,
        *clamps,
        interleaved,
        transposed,
        x.dtype,
    )
    return result.view(x.shape)


def formula(
    x: Tensor,
    gate_up_weight: Tensor,
    down_weight: Tensor,
    index: Tensor,
    routing: Tensor,
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: str = "silu",
    limit: float = 7.0,
    alpha: float = 1.702,
    up_offset: float = 1.0,
    interleaved: bool = False,
    transposed: bool = False,
) -> Tensor:
    """Each token's chosen experts, added with its routing weights."""
    first, second = (w.mT if transposed else w for w in (gate_up_weight, down_weight))
    rows, chosen = x.reshape(-1, x.shape[-1]), index.reshape(-1, index.shape[-1])
    weights, y = routing.reshape(chosen.shape), torch.zeros_like(rows)
    # the gradient of unbind is one stack; that of a subscript has the size of all experts, for each
    for e, (up_weight, weight) in enumerate(zip(first.unbind(), second.unbind(), strict=True)):
        share = torch.where(chosen == e, weights, 0).sum(-1, keepdim=True)
        inner = rows @ up_weight.T + (0 if gate_up_bias is None else gate_up_bias[e])
        gate, up = (inner[:, ::2], inner[:, 1::2]) if interleaved else inner.chunk(2, dim=-1)
        if activation == "relu_squared":
            product = relu_squared_formula(inner)
        elif activation == "swiglu_clamped":
            product = swiglu_clamped_formula(
                gate, up, limit=limit, alpha=alpha, up_offset=up_offset
            )
        else:
            product = gated_product(gate, up, activation)
        y = y + share * (product @ weight.T + (0 if down_bias is None else down_bias[e]))
    return y.view(x.shape)


def work(shapes: Shapes, size: int, options: Options) -> Work:
    width, pairs = shapes["x"][-1], math.prod(shapes["index"])
    weights = math.prod(shapes["gate_up_weight"]) + math.prod(shapes["down_weight"])
    product = 2.0 * pairs * weights / shapes["gate_up_weight"][0]
    tokens = math.prod(shapes["x"][:-1]) * width * size
    saved_bytes = 2 * pairs * weights / shapes["gate_up_weight"][0] / width / 3 * size
    # weights read, x read, y and what is kept written; weights read, their gradients written,
    # what is kept read, dy and x read, dx written
    forward_bytes = weights * size + 2 * tokens + saved_bytes
    return Work(
        forward_bytes,
        forward_bytes + 2 * weights * size + 3 * tokens + saved_bytes,
        product,
        3 * product,
    )


def _count(rows: Tensor) -> int:
    return rows.shape[:-1].numel()


def _shapes_fit(
    tensors: dict[str, Tensor | None],
    index: Tensor,
    routing: Tensor,
    transposed: bool,
    activation: str,
    name: str = op.name,
) -> None:
    x, first, second = (tensors[n] for n in ("x", "gate_up_weight", "down_weight"))
    assert x is not None
    assert first is not None
    assert second is not None
    if first.ndim != 3 or second.ndim != 3:
        checks.refuse(
            name,
            "gate_up_weight and down_weight must have three axes, experts first",
            f"{tuple(first.shape)} and {tuple(second.shape)}",
        )
    (experts, *gate_up), (_, *down) = first.shape, second.shape
    wide, hidden = gate_up[::-1] if transposed else gate_up
    parts = 1 if activation == UNGATED else 2
    expected = (experts, *((wide // parts, hidden) if transposed else (hidden, wide // parts)))
    if wide % parts or (second.shape[0], *down) != expected:
        columns = "columns of up" if parts == 1 else "an even number of columns of gate and up"
        checks.refuse(
            name,
            f"down_weight must have shape {expected} for {columns}, and "
            f"gate_up_weight {tuple(first.shape)}",
            second,
        )
    if experts < 1:
        raise ValueError(f"{name}: at least one expert is needed, got {checks.describe(first)}")
    if x.ndim == 0 or x.shape[-1] != hidden:
        checks.refuse(
            name,
            f"the last axis of x must be H = {hidden} of gate_up_weight {tuple(first.shape)}",
            x,
        )
    if not isinstance(index, Tensor) or index.ndim != x.ndim:
        checks.refuse(
            name, f"index must have shape {(*x.shape[:-1], 'K')}, experts of every row of x", index
        )
    checks.targets(name, index, (*x.shape[:-1], index.shape[-1]), x, "index")
    checks.same_shape(name, index=index, routing=routing)
    for bias, size in (("gate_up_bias", wide), ("down_bias", hidden)):
        tensor = tensors[bias]
        if tensor is not None and tuple(tensor.shape) != (experts, size):
            checks.refuse(name, f"{bias} must have shape {(experts, size)}", tensor)


def _case(
    rows: tuple[int, ...],
    top_k: int,
    experts: int,
    hidden: int,
    inner: int,
    *,
    transposed: bool = False,
    bias: bool = False,
    sentinels: float = 0.0,
    ignore_index: int = -1,
    frozen: tuple[str, ...] = (),
    parts: int = 2,
) -> dict[str, T]:
    """Tensors of a sample, with ``parts`` of the first layer; ``frozen`` ones get no gradient."""

    def matrix_shape(rows: int, cols: int) -> tuple[int, int, int]:
        return (experts, cols, rows) if transposed else (experts, rows, cols)

    tensors = {
        "x": T((*rows, hidden)),
        "gate_up_weight": T(matrix_shape(parts * inner, hidden), scale=hidden**-0.5),
        "down_weight": T(matrix_shape(hidden, inner), scale=inner**-0.5),
        "index": T((*rows, top_k), classes=experts, ignored=sentinels, ignore_index=ignore_index),
        "routing": T((*rows, top_k), positive=True),
    }
    if bias:
        tensors["gate_up_bias"] = T((experts, parts * inner), scale=0.3)
        tensors["down_bias"] = T((experts, hidden), scale=0.3)
    return {n: replace(t, grad=False) if n in frozen else t for n, t in tensors.items()}


_WEIGHTS = ("gate_up_weight", "down_weight")
_NO_GATE = {"activation": UNGATED}
_GPT_OSS = {"activation": "swiglu_clamped", "interleaved": True, "transposed": True}
SAMPLES = (
    Sample("rows", _case((5,), 2, 3, 8, 6)),
    Sample("two-axes", _case((2, 3), 2, 4, 8, 6)),
    Sample("gelu", _case((6,), 2, 3, 8, 4), {"activation": "gelu"}),
    Sample("gelu-tanh", _case((6,), 2, 3, 8, 4), {"activation": "gelu_tanh"}),
    Sample("interleaved", _case((5,), 3, 4, 8, 4), {"interleaved": True}),
    Sample("transposed", _case((5,), 2, 3, 8, 6, transposed=True), {"transposed": True}),
    Sample("biases", _case((6,), 2, 3, 8, 4, bias=True)),
    Sample("gpt-oss", _case((6,), 2, 3, 8, 4, transposed=True, bias=True), _GPT_OSS, path="biases"),
    Sample(
        "clamped-halves",
        _case((5,), 2, 3, 8, 4),
        {"activation": "swiglu_clamped", "limit": 0.5, "alpha": 1.0, "up_offset": 0.0},
    ),
    Sample("no-gate", _case((6,), 2, 3, 8, 6, parts=1), _NO_GATE),
    Sample(
        "no-gate-biases",
        _case((6,), 2, 3, 8, 5, parts=1, transposed=True, bias=True),
        _NO_GATE | {"transposed": True},
    ),
    Sample("no-gate-wider", _case((9,), 2, 2, 144, 136, parts=1, sentinels=0.3), _NO_GATE),
    Sample("sentinels", _case((6,), 2, 3, 8, 4, bias=True, sentinels=0.4, ignore_index=3)),
    Sample("minus-one", _case((6,), 2, 3, 8, 4, sentinels=0.4)),
    Sample("nobody-here", _case((4,), 2, 3, 8, 4, bias=True, sentinels=1.0)),
    Sample("unused-experts", _case((3,), 1, 40, 8, 4)),
    Sample("one-expert", _case((37,), 1, 1, 16, 8), path="whole blocks"),
    Sample("one-row", _case((1,), 4, 8, 16, 8)),
    Sample("no-rows", _case((0,), 2, 3, 8, 4)),
    Sample("no-axes", _case((), 2, 3, 8, 4)),
    Sample("odd-widths", _case((13,), 2, 2, 37, 21, bias=True)),
    Sample("wider", _case((9,), 2, 2, 144, 136)),
    Sample("sliced", _case((4,), 2, 3, 8, 4) | {"x": T((4, 8), layout="sliced")}),
    Sample(
        "strided-weights",
        _case((6,), 2, 3, 8, 8) | {"gate_up_weight": T((3, 16, 8), layout="transposed")},
    ),
    Sample("fp32-routing", _case((6,), 2, 3, 8, 4) | {"routing": T((6, 2), torch.float32)}),
    Sample("frozen-weights", _case((4,), 2, 3, 8, 4, bias=True, frozen=_WEIGHTS)),
    Sample("frozen-x", _case((4,), 2, 3, 8, 4, frozen=("x",))),
    Sample("frozen-routing", _case((4,), 2, 3, 8, 4, frozen=("routing", "down_weight"))),
    Sample("only-down", _case((4,), 2, 3, 8, 4, frozen=("x", "routing", "gate_up_weight"))),
    Sample("only-x", _case((4,), 2, 3, 8, 4, frozen=("routing", *_WEIGHTS))),
    Sample(
        "past-16383-pairs",  # from which the library's products are taken, in 16 bits
        {
            name: t if t.classes else replace(t, dtype=torch.bfloat16)
            for name, t in _case((2048,), 8, 8, 16, 8).items()
        },
        size="thin",
        path="the library's GEMMs",
    ),
    Sample("past-65535-rows", _case((33000,), 2, 3, 2, 2, frozen=_WEIGHTS), size="thin"),
    Sample("8192x2048 768 of 128", _case((8192,), 8, 128, 2048, 768), size="bench"),
    Sample("512x2048 768 of 128", _case((512,), 8, 128, 2048, 768), size="bench"),
    Sample("64x2048 768 of 128", _case((64,), 8, 128, 2048, 768), size="bench"),
    Sample("32768x2048 768 of 128", _case((32768,), 8, 128, 2048, 768), size="bench"),
    Sample("8192x4096 14336 of 8", _case((8192,), 2, 8, 4096, 14336), size="bench"),
    Sample(
        "8192x2880 2880 of 32",
        _case((8192,), 4, 32, 2880, 2880, transposed=True, bias=True),
        _GPT_OSS,
        size="bench",
    ),
)
COMPILE_SAMPLES = (
    Sample("8192x2688 1856 of 128 no gate", _case((8192,), 6, 128, 2688, 1856, parts=1), _NO_GATE),
)
