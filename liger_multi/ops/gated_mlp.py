"""Contract of ``gated_mlp``."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from liger_multi import checks
from liger_multi.dispatch.bitwise import BY_OUR_GEMM, bitwise
from liger_multi.dispatch.op import Op
from liger_multi.ops._formulas import gated_product
from liger_multi.ops._work import Options, Shapes, Work
from liger_multi.ops.linear import linear_of_mode
from liger_multi.testing.samples import Sample, Tensor as T

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")
# traced: its GEMMs and its activation are then the compiler's to fuse
op = Op(
    "gated_mlp",
    family="activations",
    compile="trace",
    rowwise=True,
    bitwise=bitwise(BY_OUR_GEMM, "x y gate up", 1),
    opens=True,
)


@op.forward(returns="y", residuals="gate up")
def forward(
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    gate_bias: Tensor | None,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    activation: str,
    needs_x: bool,
    needs_gate_weight: bool,
    needs_up_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    row_shape = x.shape[:-1]
    inner = (*row_shape, gate_weight.shape[0])
    return x.new_empty((*row_shape, down_weight.shape[0])), x.new_empty(inner), x.new_empty(inner)


def unread(needs_x: bool, needs_gate_weight: bool, needs_up_weight: bool) -> tuple[str, ...]:
    """What backward does not read."""
    weights = () if needs_x else ("gate_weight", "up_weight")
    return weights if needs_gate_weight or needs_up_weight else (*weights, "x")


def shapes_of(tensors: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes of the gradients; each width is read from a tensor that was saved."""
    x, first, down, gate = (tensors[n] for n in ("x", "gate_weight", "down_weight", "gate"))
    inner, outer = gate.shape[-1], down.shape[0]
    width = x.shape[-1] if x is not None else 0 if first is None else first.shape[1]
    return {
        "x": (*gate.shape[:-1], width),
        "gate_weight": (inner, width),
        "up_weight": (inner, width),
        "down_weight": (outer, inner),
        "gate_bias": (inner,),
        "up_bias": (inner,),
        "down_bias": (outer,),
    }


def _gradients(**kwargs: Any) -> tuple[Tensor, ...]:
    gate, shapes = kwargs["gate"], shapes_of(kwargs)
    return tuple([gate.new_empty(s if kwargs[f"needs_{n}"] else (0,)) for n, s in shapes.items()])


op.backward(
    reads="dy x? gate_weight? up_weight? down_weight gate up activation",
    returns="dx dgate_weight dup_weight ddown_weight dgate_bias dup_bias ddown_bias",
    not_saved=unread,
    shapes=_gradients,
)


def gated_mlp(
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    *,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: str = "silu",
) -> Tensor:
    """A whole gated MLP that keeps no activation but the outputs of its first two layers.

    Math:
        ``gate = x @ gate_weight.T + gate_bias``, ``up = x @ up_weight.T + up_bias``,
        ``y = (act(gate) * up) @ down_weight.T + down_bias``. Backward computes ``act(gate) * up``
        again in the pass that makes the gradients of gate and up, and adds both terms of the
        gradient of x in the precision of the GEMM.

    Shapes:
        x ``(..., H)`` with any strides, gate_weight and up_weight ``(F, H)``, down_weight
        ``(D, F)``, gate_bias and up_bias ``(F,)``, down_bias ``(D,)``; y ``(..., D)``, contiguous.

    Dtypes:
        In: one floating dtype, or any under autocast, which then sets the dtype of the GEMMs.
        Inside: that of the GEMMs is the library's for linear layers; the activation is fp32
        (fp64 for fp64), rounded to the dtype of gate as the Hugging Face MLP does. Out: that of
        the GEMMs.

    Memory:
        Kept for backward: x, gate and up, the weights that backward needs; linear layers around
        an activation keep ``(..., F)`` once more. Backward holds three of ``(..., F)`` for a while.
        Under PyTorch's checkpointing it runs as such layers, whose last GEMM is then not
        computed again.

    Raises:
        TypeError: An argument is not a floating-point tensor, or dtypes differ without autocast.
        ValueError: Shapes do not fit together, mixed devices, unknown activation.

    Source:
        Shazeer 2020 (arXiv:2002.05202); transformers ``LlamaMLP``, ``Gemma2MLP``.
    """
    tensors: dict[str, Tensor | None] = {
        "x": x,
        "gate_weight": gate_weight,
        "up_weight": up_weight,
        "down_weight": down_weight,
        "gate_bias": gate_bias,
        "up_bias": up_bias,
        "down_bias": down_bias,
    }
    checks.floating("gated_mlp", **tensors, optional=("gate_bias", "up_bias", "down_bias"))
    checks.one_of("gated_mlp", "activation", activation, ACTIVATIONS)
    shapes_fit("gated_mlp", x, gate_weight, up_weight, down_weight)
    inner, outer = gate_weight.shape[0], down_weight.shape[0]
    checks.vector("gated_mlp", "gate_bias", gate_bias, inner, "rows of gate_weight")
    checks.vector("gated_mlp", "up_bias", up_bias, inner, "rows of up_weight")
    checks.vector("gated_mlp", "down_bias", down_bias, outer, "rows of down_weight")
    run: Callable[..., Tensor] = _in_steps if checks.in_checkpoint() else op
    return run(*checks.one_dtype(op.name, tensors), activation)


def formula(
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    *,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: str = "silu",
) -> Tensor:
    """``down(activation(gate(x)) * up(x))``."""
    gate, up = F.linear(x, gate_weight, gate_bias), F.linear(x, up_weight, up_bias)
    return F.linear(gated_product(gate, up, activation), down_weight, down_bias)


def work(shapes: Shapes, size: int, options: Options) -> Work:
    rows, width = math.prod(shapes["x"][:-1]), shapes["x"][-1]
    inner, outer = shapes["gate_weight"][0], shapes["down_weight"][0]
    product = 2.0 * rows * inner * (2 * width + outer)
    # beside the products: gate and up read, one written; then three read, three written
    return Work(3 * rows * inner * size, 9 * rows * inner * size, product, 3 * product)


def _in_steps(
    x: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    gate_bias: Tensor | None,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    activation: str,
) -> Tensor:
    """The MLP as separate operators.

    Checkpointing recomputes a layer until every tensor that backward needs is saved. For ``down``
    this is its input, so PyTorch stops before its GEMM, one of the twelve of the MLP's step.
    """
    from liger_multi.ops import geglu, swiglu

    wide = linear_of_mode(x, gate, gate_bias), linear_of_mode(x, up, up_bias)
    approximate = {"gelu": "none", "gelu_tanh": "tanh"}.get(activation)
    inner = swiglu(*wide) if approximate is None else geglu(*wide, approximate=approximate)
    return linear_of_mode(inner, down, down_bias)


def shapes_fit(op: str, x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> None:
    """Raise for weights that are no layers of one gated MLP of ``x``."""
    if gate.ndim != 2 or up.shape != gate.shape:
        checks.refuse(
            op,
            "gate_weight and up_weight must have one shape (F, H)",
            f"{tuple(gate.shape)} and {tuple(up.shape)}",
        )
    if down.ndim != 2 or down.shape[1] != gate.shape[0]:
        checks.refuse(
            op,
            f"down_weight must have shape (D, {gate.shape[0]}) for gate_weight {tuple(gate.shape)}",
            down,
        )
    if x.ndim == 0 or x.shape[-1] != gate.shape[1]:
        checks.refuse(
            op,
            f"the last axis of x must be H = {gate.shape[1]} of gate_weight {tuple(gate.shape)}",
            x,
        )


def _case(
    rows: tuple[int, ...], hidden: int, inner: int, outer: int = 0, **frozen: bool
) -> dict[str, T]:
    """Tensors of a sample; names in ``frozen`` get no gradient."""
    shapes = {
        "x": (*rows, hidden),
        "gate_weight": (inner, hidden),
        "up_weight": (inner, hidden),
        "down_weight": (outer or hidden, inner),
    }
    return {
        n: T(s, scale=1.0 if n == "x" else s[1] ** -0.5, grad=not frozen.get(n, False))
        for n, s in shapes.items()
    }


def _bias(inner: int, outer: int) -> dict[str, T]:
    sizes = {"gate_bias": inner, "up_bias": inner, "down_bias": outer}
    return {name: T((size,), scale=0.3) for name, size in sizes.items()}


SAMPLES = (
    Sample("rows", _case((2, 5), 16, 24)),
    Sample("gelu", _case((6,), 16, 24), {"activation": "gelu"}),
    Sample("gelu-tanh", _case((6,), 16, 24), {"activation": "gelu_tanh"}),
    Sample("biases", _case((3, 4), 8, 12) | _bias(12, 8)),
    Sample("other-width-out", _case((5,), 8, 12, 6)),
    Sample("odd-widths", _case((7,), 13, 19)),
    Sample("one-row", _case((1,), 16, 40)),
    Sample("one-axis", _case((), 8, 12)),
    Sample("no-rows", _case((0,), 8, 12)),
    Sample("sliced", _case((4,), 8, 12) | {"x": T((4, 8), layout="sliced")}),
    Sample("transposed", _case((2, 4), 8, 12) | {"x": T((2, 4, 8), layout="transposed")}),
    Sample("frozen-x", _case((4,), 8, 12, x=True)),
    Sample(
        "frozen-weights", _case((4,), 8, 12, gate_weight=True, up_weight=True, down_weight=True)
    ),
    Sample("frozen-up", _case((4,), 8, 12, up_weight=True)),
    Sample("only-down", _case((4,), 8, 12, x=True, gate_weight=True, up_weight=True)),
    Sample(
        "past-65535-rows",
        _case((65537,), 4, 4, gate_weight=True, up_weight=True, down_weight=True),
        size="thin",
    ),
    Sample("8192x2048x8192", _case((8192,), 2048, 8192), size="bench"),
    Sample("8192x4096x14336", _case((8192,), 4096, 14336), size="bench"),
    Sample("8192x896x4864", _case((8192,), 896, 4864), size="bench"),
)
