"""Mixers of hybrid models: convolutions and recurrences over tokens.

Hybrid models (linear attention, state spaces, short convolutions) call global functions with the
same names in every modeling file (:data:`SERVED`). :func:`find_mixers` yields a patch for every
module that calls one. :func:`refusal` runs the function on small tensors and compares it with the
operator. A patched module (:class:`FusedMixer`) has copies of its methods that call operators.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from liger_multi import ops
from liger_multi._torch_private import constant_in_graphs
from liger_multi.dispatch.explain import passed_over
from liger_multi.errors import PackingError
from liger_multi.modules.arguments import cache_parameter, has_cache, parameters_of
from liger_multi.modules.parameters import has
from liger_multi.patching import shards
from liger_multi.patching.evidence import reached, redirect
from liger_multi.patching.evidence.facts import ModelFacts
from liger_multi.patching.evidence.probe import (
    disagreement,
    linear,
    probe_context,
    random,
    rows_agree,
    scalars,
    skeleton,
)
from liger_multi.patching.options import MIXER_OPS, Options, Request, run_bound
from liger_multi.patching.packing.tree import ScanCall, Tree, tree_of
from liger_multi.patching.report import Skipped
from liger_multi.patching.swap import (
    Call,
    Calling,
    Change,
    Replace,
    Restore,
    Swap,
    conflict_of,
    renew,
    unpatched_class,
    with_name_and_options,
)

# --- the functions, and whether they compute what an operator does ---

SERVED = {
    "causal_conv1d_fn": "causal_conv1d",
    "torch_chunk_gated_delta_rule": "gated_delta_rule",
    "chunk_kimi_delta_attention": "kimi_delta_attention",
    "mamba2_chunk_scan": "ssd_scan",
    "mamba2_split_conv1d_scan_combined": "ssd_scan",
    "mamba_selective_scan": "selective_scan",
    "mamba_inner_fn": "selective_scan",
}
"""Operators by the functions that they replace."""
WHOLE = ("mamba2_split_conv1d_scan_combined", "mamba_inner_fn")
"""Functions that compute a whole mixer if some package is installed, and else return None."""

_KEYS, _VALUES = ("num_k_heads", "head_k_dim"), ("num_v_heads", "head_v_dim")
_STATES = ("n_groups", "ssm_state_size")
SIZES: dict[str, dict[str, tuple[str, ...]]] = {
    "gated_delta_rule": {"q": _KEYS, "k": _KEYS, "v": _VALUES},
    "kimi_delta_attention": dict.fromkeys("qkv", ("num_heads", "head_dim")),
    "ssd_scan": {"x": ("num_heads", "head_dim"), "B": _STATES, "C": _STATES},
    "selective_scan": {"u": ("intermediate_size",), "B": ("ssm_state_size",)},
}
"""Attributes of mixers with the last sizes of an operator's tensors."""


def sizes_of(op: str, module: nn.Module) -> dict[str, list[int]]:
    """The last sizes of an operator's tensors in a mixer; empty if one is unknown."""
    sizes_by_name = {
        n: [getattr(module, a, None) for a in attributes]
        for n, attributes in SIZES.get(op, {}).items()
    }
    all_known = all(isinstance(size, int) for sizes in sizes_by_name.values() for size in sizes)
    return sizes_by_name if all_known else {}  # type: ignore[return-value]


def without_kernels(op: str, module: nn.Module) -> str | None:
    """Why no kernel of the module's device supports its sizes; None if one does, or for a CPU."""
    parameter, sizes = next(module.parameters(), None), sizes_of(op, module)
    if parameter is None or parameter.device.type == "meta" or not sizes:
        return None
    return passed_over(op, {name: parameter.new_empty(1, 1, *last) for name, last in sizes.items()})


def mixer_calls(
    module_class: type, served: Any = SERVED
) -> list[tuple[str, FunctionType, str, Any]]:
    """The calls of a class to functions with these names."""
    return [
        (method, function, name, target)
        for method, function in redirect.methods(module_class).items()
        for name, target in redirect.calls(function, lambda n, f: n in served).items()
    ]


def unserved(module_class: type) -> list[str]:
    """Functions of :data:`SERVED` that a class calls and that no operator can replace."""
    return sorted({call[2] for call in mixer_calls(module_class) if refusal(*call[1:])})


def refusal(function: FunctionType, name: str, target: Any) -> str | None:
    """Why a call cannot be replaced by an operator, or None."""
    if reason := redirect.refusal(function, name):
        return reason
    body = inspect.unwrap(target) if callable(target) else None
    if not isinstance(body, FunctionType):
        return f"{name} is {type(target).__name__}, not a function"
    places = reached.reached([body])
    return (
        f"{name}: {places}" if isinstance(places, str) else _cached_difference(name, body, places)
    )


def differs(
    name: str, body: Callable[..., Any], places: tuple[reached.Place, ...] = ()
) -> str | None:
    """Why a function does not compute what its operator does; None if they agree.

    ``places`` are values that the function reads, which are part of the cache's key.
    """
    try:
        with probe_context() as generator:
            agrees = _PROBES[name](body, _Draw(generator))
    except Exception as error:  # a function of another signature
        return f"{name} cannot be probed: {type(error).__name__}: {error}"
    return None if agrees else f"{name} computes something else than {SERVED[name]}"


_cached_difference = functools.lru_cache(maxsize=256)(differs)


class _Draw:
    """Draws the inputs of two functions, and compares their results and gradients."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator
        self.leaves: list[Tensor] = []

    def __call__(self, *shape: int) -> Tensor:
        leaf = random(self.generator, *shape).requires_grad_()
        self.leaves.append(leaf)
        return leaf * 1  # functions may write to it

    def close(self, actual: Tensor, stock: Tensor) -> bool:
        """Whether two results and all their gradients agree."""
        if not _close(actual, stock):
            return False
        upstream = random(self.generator, *actual.shape)
        return all(
            torch.allclose(a, b, rtol=1e-3, atol=1e-4 * float(b.abs().max().clamp(min=1)))
            for a, b in zip(*(self._gradients(y, upstream) for y in (actual, stock)), strict=True)
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
    """A file's function that zeroes masked tokens; before 5.17 it did nothing for one row."""
    namespace = getattr(inspect.unwrap(forward), "__globals__", {})
    return namespace.get(_MASKING, _without_padding)  # type: ignore[no-any-return]


def _without_padding(x: Tensor, mask: Tensor | None) -> Tensor:
    return x if mask is None else (x * mask[:, :, None]).to(x.dtype)


_LAST = ("kwargs", "seq_idx")  # of LFM2, and of LFM2-MoE in transformers 5.17


def _takes_a_row(forward: Callable[..., Any]) -> bool:
    """Whether a forward takes hidden states, a cache, a mask and ids, in this order."""
    names = tuple(inspect.signature(forward).parameters)
    expected = ("self", "hidden_states", cache_parameter(forward), "attention_mask")
    return names[:-1] == expected and names[-1] in _LAST


def gates(module: nn.Module) -> bool:
    """Whether a mixer is a gated convolution between two projections, such as ``Lfm2ShortConv``.

    A small copy is compared with ``gated_short_conv`` and its projections, with and without a mask.
    """
    inner, in_proj, out = (getattr(module, n, None) for n in ("conv", "in_proj", "out_proj"))
    projected = all(isinstance(getattr(m, "in_features", None), int) for m in (in_proj, out))
    if type(inner) is not nn.Conv1d or not projected or inner.padding_mode != "zeros":
        return False
    width = inner.in_channels
    layout = (inner.groups, inner.out_channels, inner.padding, inner.stride, inner.dilation)
    plain = (width, width, (inner.kernel_size[0] - 1,), (1,), (1,))
    if layout != plain or (in_proj.in_features, in_proj.out_features) != (width, 3 * width):  # type: ignore[union-attr]
        return False
    module_class = unpatched_class(module)
    if not _takes_a_row(module_class.forward):
        return False
    biased = tuple(m is not None and has(m, "bias") for m in (inner, in_proj, out))
    return _gates(module_class, scalars(module), biased, inner.kernel_size[0], module)


def _gates(
    module_class: type, attributes: Any, biased: tuple[bool, ...], reach: int, module: nn.Module
) -> bool:
    key = (module_class, getattr(module_class, "forward", None), attributes, biased, reach)
    is_gated = _GATES.get(key)
    if is_gated is None:
        try:
            with probe_context() as generator:
                is_gated = _is_gated(skeleton(module), biased, reach, generator)
        except Exception:  # of any forward, which then is none
            is_gated = False
        _GATES[key] = is_gated
    return is_gated


_GATES: dict[Any, bool] = {}
_POWERS = (-10, -6, -3, -1, 1, 3)  # of inputs; results are products of three numbers


def _is_gated(
    replica: Any, biased: tuple[bool, ...], reach: int, generator: torch.Generator
) -> bool:
    """Whether a mixer is a gated short convolution between its two projections."""
    width, (bias, in_bias, out_bias) = 6, biased
    replica.in_proj = linear(generator, width, 3 * width, in_bias)
    replica.out_proj = linear(generator, width, width, out_bias)
    shape = {"kernel_size": reach, "padding": reach - 1, "groups": width, "bias": bias}
    replica.conv = nn.Conv1d(width, width, **shape, device="meta")  # type: ignore[arg-type]
    replica.conv.weight = nn.Parameter(random(generator, width, 1, reach))
    if bias:
        replica.conv.bias = nn.Parameter(random(generator, width))
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, :3] = 0
    without_padding = masking(type(replica).forward)

    def difference_of(mask: Tensor | None, batch: int) -> str | None:
        def stock(x: Tensor) -> Any:
            return replica.forward(x, attention_mask=mask)

        def formula(x: Tensor) -> Tensor:
            rows = replica.in_proj(without_padding(x, mask))
            weight = replica.conv.weight.squeeze(1)
            return replica.out_proj(ops.gated_short_conv(rows, weight, replica.conv.bias))  # type: ignore[no-any-return]

        x = random(generator, batch, 9, width)
        difference = disagreement(replica, stock, formula, [x], _close, generator)
        with torch.no_grad():
            sizes = [x * 10.0**power for power in _POWERS] + [x * 0]
            extreme = difference or all(rows_agree(stock(y), formula(y)) for y in sizes)
        return difference or (None if extreme else "its output differs for tiny or large numbers")

    cases = ((None, 2), (mask, 2), (mask[:1], 1))
    return all(difference_of(*case) is None for case in cases)


# --- functions ---


def _close(actual: Tensor, stock: Tensor) -> bool:
    return actual.shape == stock.shape and torch.allclose(actual, stock, rtol=1e-4, atol=1e-5)


def _convolves(body: Callable[..., Tensor], draw: _Draw) -> bool:
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


def _same_rule(
    op: str, body: Callable[..., tuple[Tensor, Tensor]], draw: _Draw, heads: int
) -> bool:
    """Whether results agree for two heads of keys and ``heads`` of values."""
    channels = (8,) if op == "kimi_delta_attention" else ()
    q, k, v = draw(1, 70, 2, 8), draw(1, 70, 2, 8), draw(1, 70, heads, 6)
    g, beta = -draw(1, 70, heads, *channels).abs(), draw(1, 70, heads).sigmoid()
    state = draw(1, heads, 8, 6)
    try:
        stock = body(
            q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True, initial_state=state,
            output_final_state=True,
        )  # fmt: skip
    except RuntimeError:
        if heads == q.shape[2]:
            raise
        return True  # callers repeat the keys themselves
    rule = getattr(ops, f"{op}_with_state")
    actual = rule(q, k, v, g, beta, qk_l2norm=True, initial_state=state)
    return all(draw.close(a, b) for a, b in zip(actual, stock, strict=True))


def _scans_heads(body: Callable[..., tuple[Tensor, Tensor]], draw: _Draw) -> bool:
    x, dt, a, d = draw(2, 37, 4, 6), draw(2, 37, 4), -draw(4).abs(), draw(4)
    b, c = draw(2, 37, 2, 8), draw(2, 37, 2, 8)
    options: dict[str, Any] = {
        "D": d,
        "dt_bias": draw(4),
        "dt_softplus": True,
        "dt_limit": (0.1, 2.0),
    }
    state = draw(2, 4, 6, 8)
    stock = body(
        x, dt, a, b, c, chunk_size=16, initial_states=state, return_final_states=True, **options
    )
    actual = ops.ssd_scan_with_state(x, dt, a, b, c, initial_state=state, chunk=16, **options)
    return all(draw.close(p, q) for p, q in zip(actual, stock, strict=True))


def _scans_channels(body: Callable[..., tuple[Tensor, Tensor]], draw: _Draw) -> bool:
    u, delta, z, a = draw(2, 6, 11), draw(2, 6, 11), draw(2, 6, 11), -draw(6, 4).abs()
    b, c, d, bias = draw(2, 4, 11), draw(2, 4, 11), draw(6), draw(6)
    options: dict[str, Any] = {"D": d, "delta_bias": bias, "delta_softplus": True}
    stock = body(u, delta, a, b, c, z=z, return_last_state=True, **options)
    actual = ops.selective_scan_with_state(u.mT, delta.mT, a, b.mT, c.mT, z=z.mT, **options)
    return draw.close(actual[0].mT, stock[0]) and draw.close(actual[1], stock[1])


def _does_nothing(body: Callable[..., Any], draw: _Draw) -> bool:
    parameters = inspect.signature(body).parameters.values()
    required = [p for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    return body(*[draw(2, 2) for _ in required]) is None


_PROBES: dict[str, Callable[[Any, _Draw], bool]] = {
    "causal_conv1d_fn": _convolves,
    "torch_chunk_gated_delta_rule": functools.partial(_follows_a_delta_rule, "gated_delta_rule"),
    "chunk_kimi_delta_attention": functools.partial(_follows_a_delta_rule, "kimi_delta_attention"),
    "mamba2_chunk_scan": _scans_heads,
    "mamba_selective_scan": _scans_channels,
    **dict.fromkeys(WHOLE, _does_nothing),
}


# --- recurrences and convolutions over a row of trees ---

# A recurrence runs level by level. The segments of a level are the rows of a call. Each starts from
# the final state of its parent, whose gradient is the sum over its branches. Padding tokens leave
# the state unchanged. A convolution is one call, in which every segment follows the last tokens of
# its path.

STILL = -1e4
"""A time step whose ``softplus`` is 0 in every dtype."""


class PerToken(NamedTuple):
    """A tensor ``(1, T, ...)`` of a recurrence.

    Attributes:
        tensor: The tensor; None if the call has none.
        filling: Its value at padding tokens, which leave the state unchanged.
    """

    tensor: Tensor | None
    filling: float = 0.0

    def of(self, call: ScanCall) -> Tensor | None:
        """Its tokens in the order of a call, ``(segments, longest, ...)``."""
        x = self.tensor
        if x is None:
            return None
        count = call.places.numel()
        if call.start is not None:
            return x[0, call.start : call.start + count].unflatten(0, call.places.shape)  # type: ignore[no-any-return]
        part: Tensor = x[0].index_select(0, call.places.flatten()).unflatten(0, call.places.shape)
        if call.mask is None:
            return part
        mask = call.mask.view(*call.mask.shape, *[1] * (part.ndim - 2))
        return torch.where(mask, part, self.filling)


Run = Callable[[Sequence[Any], Tensor | None, bool], tuple[Tensor, Tensor | None]]


def scan(tree: Tree, inputs: Sequence[PerToken], run: Run, *, equal: bool = False) -> Tensor:
    """The results ``(1, T, ...)`` of a recurrence along every path.

    Args:
        tree: The tree of the row.
        inputs: The inputs per token.
        run: From the inputs of a call, initial states, and whether final states are needed, to
            results and final states.
        equal: Whether segments with children must have no padding, which would change their state.
    """
    first = next(x.tensor for x in inputs if x.tensor is not None)
    calls, order = tree.scans(first.device, equal)
    results: list[Tensor] = []
    states: list[Tensor] = []
    for call in calls:
        state_before = None
        if call.parents is not None:
            all_states = torch.cat(states)
            # the gradient of an index is summed in a fixed order, unlike that of index_select
            state_before = (
                all_states[call.parents] if call.parent is None else all_states[call.parent][None]
            )
            state_before = state_before.expand(len(call.places), *state_before.shape[1:])
        y, state = run([x.of(call) for x in inputs], state_before, call.states)
        results.append(y.flatten(0, 1))
        if call.states and state is not None:
            states.append(state)
    y = torch.cat(results)
    return (y if order is None else y.index_select(0, order))[None]


def windowed(tree: Tree, x: Tensor, reach: int, run: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """The results ``(1, T, ...)`` of a function of every token and ``reach`` earlier tokens.

    Args:
        tree: The tree of the row.
        x: The tokens ``(1, T, ...)``.
        reach: The number of earlier tokens on its path that a token depends on.
        run: The function of tokens and ids of samples.
    """
    window = tree.window(x.device, reach)
    return run(x[:, window.places], window.ids).index_select(1, window.own)


def refuse_states(caller: str, refused: bool) -> None:
    """Raise for a call with states in a row of trees.

    Raises:
        PackingError: ``refused`` is True.
    """
    if refused:
        raise PackingError(
            f"{caller} got a cache, or what its operator does not take, with shared prefixes; pass "
            "use_cache=False"
        )


@dataclass(frozen=True)
class MixerSettings:
    """Options by operator; None for an operator that is off."""

    causal_conv1d: Options | None
    gated_delta_rule: Options | None
    gated_short_conv: Options | None
    kimi_delta_attention: Options | None
    selective_scan: Options | None
    ssd_scan: Options | None


class FusedMixer(Calling):
    """A module that calls operators for its convolution and its recurrence."""

    @staticmethod
    def find_calls(stock: type) -> list[Call]:
        """The calls of functions that operators replace."""
        return [call for call in mixer_calls(stock) if refusal(*call[1:]) is None]

    @staticmethod
    def served(name: str, target: Any, settings: Any) -> FunctionType:
        """The function that replaces a call; the original function if its operator is off."""
        op = SERVED[name]
        options = getattr(settings, op)
        if options is None:
            return with_name_and_options(_unchanged(target), f"stock_{name}", Options())
        return with_name_and_options(_BUILDERS[name](op, target, options), name, options)

    @staticmethod
    def new_method(method: Any, copy: FunctionType, settings: Any) -> FunctionType:
        """The forward of a gated convolution is one operator between two projections."""
        options = settings.gated_short_conv
        if options is None or method.__name__ != "forward":
            return copy
        return _gated(method, copy, options)


def _gated(method: Any, copy: FunctionType, options: Options) -> FunctionType:
    """A forward that calls ``gated_short_conv`` where the copied method would do just that."""
    code = reached.reached([method])
    if isinstance(code, str):  # it depends on what cannot be compared
        return copy
    places = tuple(place for place in code if place[1] not in SERVED)  # the copy compares those
    has_values, names = reached.reads_values(places), parameters_of(method)
    masked = masking(method)

    @constant_in_graphs
    def unchanged() -> bool:
        return reached.still_current(places)

    @functools.wraps(copy)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        inner, hidden_states = self.conv, arguments["hidden_states"]
        hooked = inner._forward_hooks or inner._forward_pre_hooks or hasattr(inner, "_hf_hook")
        by_parts = has_cache((), arguments) or hooked or _has_states(arguments)
        by_parts = by_parts or (has_values and torch.compiler.is_compiling()) or not unchanged()
        if by_parts or type(inner.weight).__name__ == "DTensor":
            return copy(self, *args, **kwargs)
        rows = self.in_proj(masked(hidden_states, arguments.get("attention_mask")))
        weight = inner.weight.squeeze(1)

        call = functools.partial(ops.gated_short_conv, seq_idx=arguments.get("seq_idx"))
        return self.out_proj(_convolve("gated_short_conv", options, call, rows, weight, inner.bias))

    return cast(FunctionType, forward)


def _convolve(
    op: str,
    options: Options,
    call: functools.partial[Any],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
) -> Tensor:
    """A convolution of ``(B, T, C)`` within samples, or along the paths of a row of trees."""
    tree, function = tree_of(call.keywords["seq_idx"]), call.func
    if tree is not None:

        def convolve_paths(
            x: Tensor, weight: Tensor, bias: Tensor | None, **options: Any
        ) -> Tensor:
            def convolve(rows: Tensor, ids: Tensor) -> Tensor:
                return function(rows, weight, bias, **{**options, "seq_idx": ids})  # type: ignore[no-any-return]

            return windowed(tree, x, weight.shape[-1] - 1, convolve)

        call = functools.partial(convolve_paths, **call.keywords)
    return _run(op, options, call, x, weight, bias)  # type: ignore[no-any-return]


def _unchanged(target: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(target)
    def unchanged(*args: Any, **kwargs: Any) -> Any:
        return target(*args, **kwargs)

    return unchanged


def _run(op: str, options: Options, call: functools.partial[Any], *rows: Any) -> Any:
    """An operator on the backend of the instance; on whole rows if ranks have shares of them."""
    function = functools.partial(run_bound, options, (op,))
    if shards.ranks() is None:
        return function(call, *rows)

    def run(*rows: Any, **options: Any) -> Any:
        return function(functools.partial(call.func, **options), *rows)

    return shards.spread(op, run, rows, call.keywords)


def _ids(seq_idx: Tensor | None, tokens: int) -> Tensor | None:
    """Ids of all tokens; tokens from a cache belong to the first sample."""
    if seq_idx is None or seq_idx.shape[1] == tokens or shards.ranks() is not None:
        return seq_idx
    return torch.cat([seq_idx[:, :1].expand(-1, tokens - seq_idx.shape[1]), seq_idx], 1)


def _convolution(op: str, stock: Callable[..., Any], options: Options) -> Callable[..., Any]:
    """``causal_conv1d_fn`` by the operator; calls with a state run the original function."""

    def served(
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        seq_idx: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        function_name = "silu" if activation == "swish" else activation
        if (
            _has_states(kwargs)
            or function_name not in (None, "silu")
            or type(hidden_states).__name__ == "DTensor"
        ):
            refuse_states(op, tree_of(seq_idx) is not None)
            options_of_call = kwargs if seq_idx is None else kwargs | {"seq_idx": seq_idx}
            return stock(  # type: ignore[no-any-return]
                hidden_states, weight, bias, activation=activation, **options_of_call
            )

        ids = _ids(seq_idx, hidden_states.shape[2])
        call = functools.partial(ops.causal_conv1d, activation=function_name, seq_idx=ids)
        return _convolve(op, options, call, hidden_states.mT, weight, bias).mT

    return served


_CONVOLUTION_STATES = ("initial_states", "return_final_states", "final_states_out")


def _has_states(kwargs: dict[str, Any]) -> bool:
    """Whether a call of a convolution has initial states, or returns final ones."""
    return any(name in kwargs for name in _CONVOLUTION_STATES)


def _delta_rule(op: str, stock: Callable[..., Any], options: Options) -> Callable[..., Any]:
    """A gated delta rule of transformers by the operator, along a tree if there is one."""

    def served(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        chunk_size: int = 64,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        seq_idx: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        tree = tree_of(seq_idx)
        if tree is not None:
            refuse_states(op, initial_state is not None or output_final_state)
            inputs = (query, key.to(query.dtype), value.to(query.dtype), g, beta)
            norm = {"qk_l2norm": use_qk_l2norm_in_kernel}
            return _recurrence_along(tree, op, options, inputs, norm), None
        packed = cu_seqlens is not None and seq_idx is None and len(query) == 1
        call = functools.partial(
            getattr(ops, f"{op}_with_state" if output_final_state else op),
            initial_state=initial_state,
            qk_l2norm=use_qk_l2norm_in_kernel,
            documents=_ids(seq_idx, query.shape[1]),
            cu_seqlens=cu_seqlens if packed else None,
        )
        rows = (query, key.to(query.dtype), value.to(query.dtype), g, beta)
        y = _run(op, options, call, *rows)
        return y if output_final_state else (y, None)

    return served


def _recurrence_along(
    tree: Tree,
    op: str,
    options: Options,
    rows: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    padding_value: float = 0.0,
    equal: bool = False,
) -> Tensor:
    """A recurrence along the paths of a row of trees; over ranks, of this rank's heads.

    Args:
        tree: The tree of the row.
        op: The operator.
        options: Its options.
        rows: Its positional arguments.
        kwargs: Its keyword arguments.
        padding_value: The second argument, as a time step, of padding tokens.
        equal: As for :func:`scan`.
    """
    axes = shards.AXES[op]
    letters: dict[Any, str] = {**dict(enumerate(axes.rows)), **axes.named}

    def scan_paths(*rows: Any, **kwargs: Any) -> Tensor:
        arguments: dict[Any, Any] = {**dict(enumerate(rows)), **kwargs}
        per_token = [key for key in arguments if "t" in letters.get(key, "")]

        def run(parts: Sequence[Any], state: Tensor | None, output_state: bool) -> Any:
            values = arguments | dict(zip(per_token, parts, strict=True))
            args = [values.pop(n) for n in range(len(rows))]
            function = getattr(ops, f"{op}_with_state" if output_state else op)
            call = functools.partial(function, initial_state=state, **values)
            y = run_bound(options, (op,), call, *args)
            return y if output_state else (y, None)

        inputs = [PerToken(arguments[key], padding_value if key == 1 else 0.0) for key in per_token]
        return scan(tree, inputs, run, equal=equal)

    return shards.spread(op, scan_paths, rows, kwargs)  # type: ignore[no-any-return]


def _saved_state(state: Tensor | None) -> Tensor | None:
    """A copy for backward, as in transformers' function: a cache overwrites its own tensor."""
    return state.clone() if state is not None and torch.is_grad_enabled() else state


def _heads_scan(op: str, stock: Callable[..., Any], options: Options) -> Callable[..., Any]:
    """The scan of Mamba-2 by ``ssd_scan``, along a tree if there is one."""

    def served(
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        chunk_size: int,
        D: Tensor | None = None,
        dt_bias: Tensor | None = None,
        initial_states: Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        return_final_states: bool = False,
        z: Tensor | None = None,
        seq_idx: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        tree = tree_of(seq_idx)
        if tree is not None:
            refuse_states(op, initial_states is not None or return_final_states)
            limits = {"dt_softplus": dt_softplus, "dt_limit": tuple(dt_limit), "chunk": chunk_size}
            options_of_call = {"D": D, "dt_bias": dt_bias, "z": z, **limits}
            padding_value = STILL if dt_softplus else 0.0
            rows = (hidden_states, dt, A, B, C)
            return _recurrence_along(
                tree,
                op,
                options,
                rows,
                options_of_call,
                padding_value=padding_value,
                equal=dt_limit[0] > 0,
            )
        function: Any = ops.ssd_scan_with_state if return_final_states else ops.ssd_scan
        call = functools.partial(
            function,
            D=D,
            z=z,
            dt_bias=dt_bias,
            dt_softplus=dt_softplus,
            dt_limit=tuple(dt_limit),
            initial_state=_saved_state(initial_states),
            chunk=chunk_size,
            cu_seqlens=None if seq_idx is not None else cu_seqlens,
            seq_idx=_ids(seq_idx, hidden_states.shape[1]),
        )
        return _run(op, options, call, hidden_states, dt, A, B, C)

    return served


def _channels_scan(op: str, stock: Callable[..., Any], options: Options) -> Callable[..., Any]:
    """The scan of Mamba by ``selective_scan``, along a tree if there is one."""

    def served(
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None = None,
        z: Tensor | None = None,
        delta_bias: Tensor | None = None,
        delta_softplus: bool = False,
        return_last_state: bool = False,
        seq_idx: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        tree, rows = tree_of(seq_idx), (hidden_states.mT, dt.mT, A, B.mT, C.mT)
        options_of_call: dict[str, Any] = {"D": D, "z": None if z is None else z.mT}
        options_of_call |= {"delta_bias": delta_bias, "delta_softplus": delta_softplus}
        if tree is not None:
            refuse_states(op, return_last_state)
            return _recurrence_along(
                tree,
                op,
                options,
                rows,
                options_of_call,
                padding_value=STILL if delta_softplus else 0.0,
            ).mT
        call = functools.partial(
            ops.selective_scan_with_state if return_last_state else ops.selective_scan,
            seq_idx=_ids(seq_idx, hidden_states.shape[2]),
            **options_of_call,
        )
        y = _run(op, options, call, *rows)
        return (y[0].mT, y[1]) if return_last_state else y.mT

    return served


def _nothing(op: str, stock: Callable[..., Any], options: Options) -> Callable[..., Any]:
    """A function that returns None, so that a mixer calls its parts."""

    def served(*args: Any, **kwargs: Any) -> None:
        return None

    return served


_BUILDERS: dict[str, Callable[[str, Callable[..., Any], Options], Callable[..., Any]]] = {
    "causal_conv1d_fn": _convolution,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _heads_scan,
    "mamba_selective_scan": _channels_scan,
    **dict.fromkeys(WHOLE, _nothing),
}


def serving(name: str, function: Callable[..., Any]) -> Callable[..., Any] | None:
    """The operator with the signature of a function; None if that computes something else.

    Args:
        name: The name of the function in modeling files, a key of ``SERVED``.
        function: The function, which also runs calls that the operator does not support.
    """
    if differs(name, function) is not None:
        return None
    return _BUILDERS[name](SERVED[name], function, Options())


# --- which modules ---


def find_mixers(model: ModelFacts, request: Request) -> Iterator[Change]:
    """Convolutions and recurrences of hybrids."""
    for path, module in model.of_class(lambda facts: mixer_calls(facts.module_class)):
        stock = unpatched_class(module)
        calls = mixer_calls(stock)
        settings = MixerSettings(*(request.get(op) for op in MIXER_OPS))
        overridden = conflict_of(module)
        reasons = {SERVED[details[1]]: overridden or refusal(*details) for _, *details in calls}
        if settings.gated_short_conv is not None and gates(module):
            reasons["gated_short_conv"] = reasons["causal_conv1d"]  # it includes the convolution
        else:
            settings = replace(settings, gated_short_conv=None)
        enabled = {
            op: reason for op, reason in reasons.items() if getattr(settings, op) is not None
        }
        yield from (Skipped(path, op, reason) for op, reason in enabled.items() if reason)
        served = sorted(op for op, reason in enabled.items() if not reason)
        if not served:
            yield Restore(path, module)
            continue
        slow = {op: without_kernels(op, module) for op in served}
        slower = "patched, but runs by the chunked PyTorch reference: "
        yield from (
            Skipped(path, op, slower + reason, False) for op, reason in slow.items() if reason
        )
        options_shown = [getattr(settings, op).shown() for op in served]
        swap = Swap(served[-1], stock, FusedMixer, settings)
        label = " + ".join(served)
        yield Replace(
            path,
            module,
            swap,
            label,
            {k: v for options in options_shown for k, v in options.items()},
        )
        renew(type(module))
