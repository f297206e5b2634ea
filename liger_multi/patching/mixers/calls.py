"""Functions of modeling files that mix tokens: what they compute, found by running them.

Hybrid models (linear attention, state spaces, short convolutions) call module-level functions with
the same names in every modeling file. One that computes what an operator does is served by it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from liger_multi.arguments import cache_parameter
from liger_multi.dispatch.explain import passed_over
from liger_multi.patching.evidence import redirect
from liger_multi.patching.evidence.probe import (
    alike,
    disagreement,
    linear,
    probe_context,
    random,
    scalars,
    skeleton,
)
from liger_multi.patching.evidence.reached import Place, reached
from liger_multi.patching.swap import unpatched_class

SERVED = {
    "causal_conv1d_fn": "causal_conv1d",
    "torch_chunk_gated_delta_rule": "gated_delta_rule",
    "chunk_kimi_delta_attention": "kimi_delta_attention",
    "mamba2_chunk_scan": "ssd_scan",
    "mamba2_split_conv1d_scan_combined": "ssd_scan",
    "mamba_selective_scan": "selective_scan",
    "mamba_inner_fn": "selective_scan",
}
"""Operators by the functions that they stand for."""
WHOLE = ("mamba2_split_conv1d_scan_combined", "mamba_inner_fn")
"""Functions that do all of a mixer where some package is installed, and else return None."""

_KEYS, _VALUES = ("num_k_heads", "head_k_dim"), ("num_v_heads", "head_v_dim")
_STATES = ("n_groups", "ssm_state_size")
SIZES: dict[str, dict[str, tuple[str, ...]]] = {
    "gated_delta_rule": {"q": _KEYS, "k": _KEYS, "v": _VALUES},
    "kimi_delta_attention": dict.fromkeys("qkv", ("num_heads", "head_dim")),
    "ssd_scan": {"x": ("num_heads", "head_dim"), "B": _STATES, "C": _STATES},
    "selective_scan": {"u": ("intermediate_size",), "B": ("ssm_state_size",)},
}
"""The attributes of mixers that are the last sizes of an operator's tensors."""


def sizes_of(op: str, module: nn.Module) -> dict[str, list[int]]:
    """The last sizes of an operator's tensors in a mixer; empty where one is not known."""
    sizes_by_name = {
        n: [getattr(module, a, None) for a in attributes]
        for n, attributes in SIZES.get(op, {}).items()
    }
    known = all(isinstance(size, int) for sizes in sizes_by_name.values() for size in sizes)
    return sizes_by_name if known else {}  # type: ignore[return-value]


def without_kernels(op: str, module: nn.Module) -> str | None:
    """Why no kernel of the module's device takes its sizes; None where one does, or has none."""
    like, sizes = next(module.parameters(), None), sizes_of(op, module)
    if like is None or like.device.type == "meta" or not sizes:
        return None
    return passed_over(op, {name: like.new_empty(1, 1, *last) for name, last in sizes.items()})


def mixer_calls(
    module_class: type, served: Any = SERVED
) -> list[tuple[str, FunctionType, str, Any]]:
    """The calls of a class to functions of these names: (method, its function, name, callee)."""
    return [
        (method, function, name, called)
        for method, function in redirect.methods(module_class).items()
        for name, called in redirect.calls(function, lambda n, f: n in served).items()
    ]


def unserved(module_class: type) -> list[str]:
    """The functions over all tokens that a class calls and that no operator stands for."""
    return sorted({call[2] for call in mixer_calls(module_class) if refusal(*call[1:])})


def refusal(function: FunctionType, name: str, called: Any) -> str | None:
    """Why a call is left alone, or None."""
    if why := redirect.refusal(function, name):
        return why
    body = inspect.unwrap(called) if callable(called) else None
    if not isinstance(body, FunctionType):
        return f"{name} is {type(called).__name__}, not a function"
    places = reached([body])
    return f"{name}: {places}" if isinstance(places, str) else _known(name, body, places)


def differs(name: str, body: Callable[..., Any], places: tuple[Place, ...] = ()) -> str | None:
    """Whether a function computes something else than its operator; None where they agree.

    It may compute something else when ``places`` have other values.
    """
    try:
        with probe_context() as generator:
            same = _PROBES[name](body, _Draw(generator))
    except Exception as error:  # a function of another signature
        return f"{name} cannot be probed: {type(error).__name__}: {error}"
    return None if same else f"{name} computes something else than {SERVED[name]}"


_known = functools.lru_cache(maxsize=256)(differs)


class _Draw:
    """Makes the inputs of two functions, and compares their results and the gradients."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator
        self.leaves: list[Tensor] = []

    def __call__(self, *shape: int) -> Tensor:
        leaf = random(self.generator, *shape).requires_grad_()
        self.leaves.append(leaf)
        return leaf * 1  # to which a function may write

    def close(self, ours: Tensor, theirs: Tensor) -> bool:
        """Whether one result is the other, and so are all gradients."""
        if ours.shape != theirs.shape or not torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5):
            return False
        upstream = random(self.generator, *ours.shape)
        return all(
            torch.allclose(a, b, rtol=1e-3, atol=1e-4 * float(b.abs().max().clamp(min=1)))
            for a, b in zip(*(self._gradients(y, upstream) for y in (ours, theirs)), strict=True)
        )

    def _gradients(self, result: Tensor, upstream: Tensor) -> list[Tensor]:
        if not result.requires_grad:
            return [torch.zeros_like(leaf) for leaf in self.leaves]
        gradients = torch.autograd.grad(
            result, self.leaves, upstream, allow_unused=True, retain_graph=True
        )
        return [
            torch.zeros_like(leaf) if grad is None else grad
            for leaf, grad in zip(self.leaves, gradients, strict=True)
        ]


# --- a convolution with gates around it, and projections ---


_MASKING = "apply_mask_to_padding_states"


def masking(forward: Callable[..., Any]) -> Callable[[Tensor, Tensor | None], Tensor]:
    """What sets hidden tokens to 0 in a modeling file; until 5.17 not in a batch of one row."""
    own = getattr(inspect.unwrap(forward), "__globals__", {})
    function: Callable[[Tensor, Tensor | None], Tensor] = own.get(_MASKING, _without_padding)
    return function


def _without_padding(x: Tensor, mask: Tensor | None) -> Tensor:
    return x if mask is None else (x * mask[:, :, None]).to(x.dtype)


_LAST = ("kwargs", "seq_idx")  # of LFM2, and of LFM2-MoE in transformers 5.17


def _takes_a_row(forward: Callable[..., Any]) -> bool:
    """Whether a forward takes hidden states, a cache, a mask and ids, in this order."""
    names = tuple(inspect.signature(forward).parameters)
    expected = ("self", "hidden_states", cache_parameter(forward), "attention_mask")
    return names[:-1] == expected and names[-1] in _LAST


def gates(module: nn.Module) -> bool:
    """Whether a mixer is a gated convolution between two projections, as ``Lfm2ShortConv``.

    A small copy is compared with the operator, with and without a mask, as ``gated_short_conv``
    and its projections compute it.
    """
    inner, into, out = (getattr(module, n, None) for n in ("conv", "in_proj", "out_proj"))
    projected = all(isinstance(getattr(m, "in_features", None), int) for m in (into, out))
    if type(inner) is not nn.Conv1d or not projected or inner.padding_mode != "zeros":
        return False
    width = inner.in_channels
    like = (inner.groups, inner.out_channels, inner.padding, inner.stride, inner.dilation)
    plain = (width, width, (inner.kernel_size[0] - 1,), (1,), (1,))
    if like != plain or (into.in_features, into.out_features) != (width, 3 * width):  # type: ignore[union-attr]
        return False
    module_class = unpatched_class(module)
    if not _takes_a_row(module_class.forward):
        return False
    biased = tuple(getattr(m, "bias", None) is not None for m in (inner, into, out))
    return _gates(module_class, scalars(module), biased, inner.kernel_size[0], module)


def _gates(
    module_class: type, known: Any, biased: tuple[bool, ...], reach: int, module: nn.Module
) -> bool:
    key = (module_class, getattr(module_class, "forward", None), known, biased, reach)
    is_gated = _GATES.get(key)
    if is_gated is None:
        try:
            with probe_context() as generator:
                is_gated = _is_gated(skeleton(module), biased, reach, generator)
        except Exception:  # somebody's forward: any failure means that it is not one of ours
            is_gated = False
        _GATES[key] = is_gated
    return is_gated


_GATES: dict[Any, bool] = {}
_POWERS = (-10, -6, -3, -1, 1, 3)  # of inputs; results are products of three numbers


def _is_gated(
    replica: Any, biased: tuple[bool, ...], reach: int, generator: torch.Generator
) -> bool:
    from liger_multi import ops

    width, (bias, into, out) = 6, biased
    replica.in_proj = linear(generator, width, 3 * width, into)
    replica.out_proj = linear(generator, width, width, out)
    shape = {"kernel_size": reach, "padding": reach - 1, "groups": width, "bias": bias}
    replica.conv = nn.Conv1d(width, width, **shape, device="meta")  # type: ignore[arg-type]
    replica.conv.weight = nn.Parameter(random(generator, width, 1, reach))
    if bias:
        replica.conv.bias = nn.Parameter(random(generator, width))
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, :3] = 0
    without_padding = masking(type(replica).forward)

    def by(mask: Tensor | None, batch: int = 2) -> str | None:
        def stock(x: Tensor) -> Any:
            return replica.forward(x, attention_mask=mask)

        def ours(x: Tensor) -> Tensor:
            rows = replica.in_proj(without_padding(x, mask))
            weight = replica.conv.weight.squeeze(1)
            output: Tensor = replica.out_proj(ops.gated_short_conv(rows, weight, replica.conv.bias))
            return output

        x = random(generator, batch, 9, width)
        difference = disagreement(replica, stock, ours, [x], _close, generator)
        with torch.no_grad():
            sizes = [x * 10.0**power for power in _POWERS] + [x * 0]
            alone = difference or all(alike(stock(y), ours(y)) for y in sizes)
        return difference or (None if alone else "its output differs for tiny or large numbers")

    return by(None) is None and by(mask) is None and by(mask[:1], 1) is None


# --- functions ---


def _close(ours: Tensor, theirs: Tensor) -> bool:
    return ours.shape == theirs.shape and torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def _convolves(body: Callable[..., Tensor], draw: _Draw) -> bool:
    from liger_multi import ops

    x, weight, bias = draw(2, 5, 9), draw(5, 4), draw(5)
    return all(
        draw.close(
            ops.causal_conv1d(x, weight, b, activation=activation, channel_axis=1),
            body(x, weight, b, activation=activation),
        )
        for b in (None, bias)
        for activation in (None, "silu")
    )


def _follows_a_delta_rule(op: str, body: Callable[..., tuple[Tensor, Tensor]], draw: _Draw) -> bool:
    return _same_rule(op, body, draw, 2) and _same_rule(op, body, draw, 4)


def _same_rule(op: str, body: Callable[..., tuple[Tensor, Tensor]], draw: _Draw, many: int) -> bool:
    """Whether results agree for two heads of keys and ``many`` of values."""
    from liger_multi import ops

    channels = (8,) if op == "kimi_delta_attention" else ()
    q, k, v = draw(1, 70, 2, 8), draw(1, 70, 2, 8), draw(1, 70, many, 6)
    g, beta = -draw(1, 70, many, *channels).abs(), draw(1, 70, many).sigmoid()
    state = draw(1, many, 8, 6)
    try:
        theirs = body(
            q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True, initial_state=state,
            output_final_state=True,
        )  # fmt: skip
    except RuntimeError:
        if many == q.shape[2]:
            raise
        return True  # its callers repeat the keys themselves
    rule = getattr(ops, f"{op}_with_state")
    ours = rule(q, k, v, g, beta, qk_l2norm=True, initial_state=state)
    return all(draw.close(a, b) for a, b in zip(ours, theirs, strict=True))


def _scans_heads(body: Callable[..., tuple[Tensor, Tensor]], draw: _Draw) -> bool:
    from liger_multi import ops

    x, dt, a, d = draw(2, 37, 4, 6), draw(2, 37, 4), -draw(4).abs(), draw(4)
    b, c = draw(2, 37, 2, 8), draw(2, 37, 2, 8)
    options: dict[str, Any] = {
        "D": d,
        "dt_bias": draw(4),
        "dt_softplus": True,
        "dt_limit": (0.1, 2.0),
    }
    state = draw(2, 4, 6, 8)
    theirs = body(
        x, dt, a, b, c, chunk_size=16, initial_states=state, return_final_states=True, **options
    )
    ours = ops.ssd_scan_with_state(x, dt, a, b, c, initial_state=state, chunk=16, **options)
    return all(draw.close(p, q) for p, q in zip(ours, theirs, strict=True))


def _scans_channels(body: Callable[..., tuple[Tensor, Tensor]], draw: _Draw) -> bool:
    from liger_multi import ops

    u, delta, z, a = draw(2, 6, 11), draw(2, 6, 11), draw(2, 6, 11), -draw(6, 4).abs()
    b, c, d, bias = draw(2, 4, 11), draw(2, 4, 11), draw(6), draw(6)
    options: dict[str, Any] = {"D": d, "delta_bias": bias, "delta_softplus": True}
    theirs = body(u, delta, a, b, c, z=z, return_last_state=True, **options)
    ours = ops.selective_scan_with_state(u.mT, delta.mT, a, b.mT, c.mT, z=z.mT, **options)
    return draw.close(ours[0].mT, theirs[0]) and draw.close(ours[1], theirs[1])


def _does_nothing(body: Callable[..., Any], draw: _Draw) -> bool:
    taken = inspect.signature(body).parameters.values()
    needed = [p for p in taken if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    return body(*[draw(2, 2) for _ in needed]) is None


_PROBES: dict[str, Callable[[Any, _Draw], bool]] = {
    "causal_conv1d_fn": _convolves,
    "torch_chunk_gated_delta_rule": functools.partial(_follows_a_delta_rule, "gated_delta_rule"),
    "chunk_kimi_delta_attention": functools.partial(_follows_a_delta_rule, "kimi_delta_attention"),
    "mamba2_chunk_scan": _scans_heads,
    "mamba_selective_scan": _scans_channels,
    **dict.fromkeys(WHOLE, _does_nothing),
}
