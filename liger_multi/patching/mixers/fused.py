"""Mixers of hybrid models: their convolutions and recurrences go to operators."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor

from liger_multi._torch_private import constant_in_graphs
from liger_multi.arguments import has_cache, parameters_of
from liger_multi.patching import shards
from liger_multi.patching.calling import Call, Calling, named
from liger_multi.patching.evidence import reached
from liger_multi.patching.mixers.calls import SERVED, WHOLE, differs, masking, mixer_calls, refusal
from liger_multi.patching.mixers.levels import (
    STILL,
    PerToken,
    Run,
    refuse_states,
    scan,
    windowed,
)
from liger_multi.patching.options import Options, run_bound
from liger_multi.patching.packing.tree import tree_of


@dataclass(frozen=True)
class MixerSettings:
    """Options of the operators that serve a mixer; None for one that is off."""

    causal_conv1d: Options | None
    gated_delta_rule: Options | None
    gated_short_conv: Options | None
    kimi_delta_attention: Options | None
    selective_scan: Options | None
    ssd_scan: Options | None


class FusedMixer(Calling):
    """A module whose convolution and recurrence go to operators."""

    @staticmethod
    def find_calls(stock: type) -> list[Call]:
        """The calls of functions that operators stand for."""
        return [call for call in mixer_calls(stock) if refusal(*call[1:]) is None]

    @staticmethod
    def served(name: str, called: Any, settings: Any) -> FunctionType:
        """The function that replaces a call; the original function where its operator is off."""
        op = SERVED[name]
        options = getattr(settings, op)
        if options is None:
            return named(_left(called), f"stock_{name}", Options())
        return named(_BUILDERS[name](op, called, options), name, options)

    @staticmethod
    def whole(method: Any, copy: FunctionType, settings: Any) -> FunctionType:
        """The forward of a gated convolution is one operator between two projections."""
        options = settings.gated_short_conv
        if options is None or method.__name__ != "forward":
            return copy
        return _gated(method, copy, options)


def _gated(method: Any, copy: FunctionType, options: Options) -> FunctionType:
    from liger_multi import ops

    code = reached.reached([method])
    if isinstance(code, str):  # what it does may change in ways that nothing tells
        return copy
    places = tuple(place for place in code if place[1] not in SERVED)  # the copy follows those
    reads, names = reached.reads_values(places), parameters_of(method)
    masked = masking(method)

    @constant_in_graphs
    def unchanged() -> bool:
        return reached.holds(places)

    @functools.wraps(copy)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        inner, hidden_states = self.conv, arguments["hidden_states"]
        hooked = inner._forward_hooks or inner._forward_pre_hooks or hasattr(inner, "_hf_hook")
        by_parts = has_cache((), arguments) or hooked or _has_states(arguments)
        by_parts = by_parts or (reads and torch.compiler.is_compiling()) or not unchanged()
        if by_parts or type(inner.weight).__name__ == "DTensor":
            return copy(self, *args, **kwargs)
        rows = self.in_proj(masked(hidden_states, arguments.get("attention_mask")))
        weight = inner.weight.squeeze(1)

        def convolve(rows: Tensor, ids: Tensor | None) -> Tensor:
            call = functools.partial(ops.gated_short_conv, seq_idx=ids)
            y: Tensor = _run("gated_short_conv", options, call, rows, weight, inner.bias)
            return y

        return self.out_proj(_along(arguments.get("seq_idx"), rows, weight, convolve))

    return cast(FunctionType, forward)


def _along(
    ids: Tensor | None,
    x: Tensor,
    weight: Tensor,
    convolve: Callable[[Tensor, Tensor | None], Tensor],
) -> Tensor:
    """A convolution ``(B, T, C)`` along samples, or along the paths of a row of trees."""
    tree = tree_of(ids)
    if tree is None:
        return convolve(x, ids)
    return windowed(tree, x, weight.shape[-1] - 1, convolve)


def _left(called: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(called)
    def left(*args: Any, **kwargs: Any) -> Any:
        return called(*args, **kwargs)

    return left


def _run(op: str, options: Options, call: functools.partial[Any], *rows: Any) -> Any:
    """An operator on the backend of the instance; on whole rows, where ranks have shares."""
    function = functools.partial(run_bound, options, (op,))
    if shards.ranks() is None:
        return function(call, *rows)

    def run(*rows: Any, **named: Any) -> Any:
        return function(functools.partial(call.func, **named), *rows)

    return shards.spread(op, run, rows, call.keywords)


def _ids(seq_idx: Tensor | None, tokens: int) -> Tensor | None:
    """Ids of all tokens: what a cache put before them belongs to the first sample."""
    if seq_idx is None or seq_idx.shape[1] == tokens or shards.ranks() is not None:
        return seq_idx
    before = seq_idx[:, :1].expand(-1, tokens - seq_idx.shape[1])
    return torch.cat([before, seq_idx], 1)


def _convolution(op: str, stock: Callable[..., Any], options: Options) -> Callable[..., Any]:
    from liger_multi import ops

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
            result: Tensor = stock(
                hidden_states, weight, bias, activation=activation, **options_of_call
            )
            return result

        def convolve(rows: Tensor, ids: Tensor | None) -> Tensor:
            call = functools.partial(ops.causal_conv1d, activation=function_name, seq_idx=ids)
            y: Tensor = _run(op, options, call, rows, weight, bias)
            return y

        ids = _ids(seq_idx, hidden_states.shape[2])
        return _along(ids, hidden_states.mT, weight, convolve).mT

    return served


_CONVOLUTION_STATES = ("initial_states", "return_final_states", "final_states_out")


def _has_states(kwargs: dict[str, Any]) -> bool:
    """Whether a convolution is given states, or asked for them."""
    return any(name in kwargs for name in _CONVOLUTION_STATES)


def _delta_rule(op: str, stock: Callable[..., Any], options: Options) -> Callable[..., Any]:
    from liger_multi import ops

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
            norm = {"qk_l2norm": use_qk_l2norm_in_kernel}
            run = _from_state(op, options, lambda *rows: (rows, norm))
            inputs = (query, key.to(query.dtype), value.to(query.dtype), g, beta)
            return scan(tree, [*map(PerToken, inputs)], run), None
        many = cu_seqlens is not None and seq_idx is None and len(query) == 1
        call = functools.partial(
            getattr(ops, f"{op}_with_state" if output_final_state else op),
            initial_state=initial_state,
            qk_l2norm=use_qk_l2norm_in_kernel,
            documents=_ids(seq_idx, query.shape[1]),
            cu_seqlens=cu_seqlens if many else None,
        )
        rows = (query, key.to(query.dtype), value.to(query.dtype), g, beta)
        y = _run(op, options, call, *rows)
        return y if output_final_state else (y, None)

    return served


Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def _from_state(op: str, options: Options, arguments: Callable[..., Arguments]) -> Run:
    """One call of a recurrence over a tree; its arguments follow from the tensors per token."""
    from liger_multi import ops

    def run(rows: Sequence[Any], state: Tensor | None, output_state: bool) -> Any:
        args, kwargs = arguments(*rows)
        function = getattr(ops, f"{op}_with_state" if output_state else op)
        call = functools.partial(function, initial_state=state, **kwargs)
        y = run_bound(options, (op,), call, *args)
        return y if output_state else (y, None)

    return run


def _kept(state: Tensor | None) -> Tensor | None:
    """A copy for backward, which transformers' function makes too: a cache writes over its own."""
    return state.clone() if state is not None and torch.is_grad_enabled() else state


def _heads_scan(op: str, stock: Callable[..., Any], options: Options) -> Callable[..., Any]:
    from liger_multi import ops

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
            more = {"D": D, "dt_bias": dt_bias, **limits}
            run = _from_state(
                op, options, lambda x, dt, B, C, z: ((x, dt, A, B, C), {"z": z, **more})
            )
            steps = PerToken(dt, STILL if dt_softplus else 0.0)
            rows = [PerToken(hidden_states), steps, PerToken(B), PerToken(C), PerToken(z)]
            return scan(tree, rows, run, equal=dt_limit[0] > 0)
        function: Any = ops.ssd_scan_with_state if return_final_states else ops.ssd_scan
        call = functools.partial(
            function,
            D=D,
            z=z,
            dt_bias=dt_bias,
            dt_softplus=dt_softplus,
            dt_limit=tuple(dt_limit),
            initial_state=_kept(initial_states),
            chunk=chunk_size,
            cu_seqlens=None if seq_idx is not None else cu_seqlens,
            seq_idx=_ids(seq_idx, hidden_states.shape[1]),
        )
        return _run(op, options, call, hidden_states, dt, A, B, C)

    return served


def _channels_scan(op: str, stock: Callable[..., Any], options: Options) -> Callable[..., Any]:
    from liger_multi import ops

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
        tree = tree_of(seq_idx)
        if tree is not None:
            refuse_states(op, return_last_state)
            more = {"D": D, "delta_bias": delta_bias, "delta_softplus": delta_softplus}
            run = _from_state(
                op, options, lambda u, dt, B, C, z: ((u, dt, A, B, C), {"z": z, **more})
            )
            steps = PerToken(dt.mT, STILL if delta_softplus else 0.0)
            inputs = [PerToken(hidden_states.mT), steps, PerToken(B.mT), PerToken(C.mT)]
            return scan(tree, [*inputs, PerToken(None if z is None else z.mT)], run).mT
        call = functools.partial(
            ops.selective_scan_with_state if return_last_state else ops.selective_scan,
            D=D,
            z=None if z is None else z.mT,
            delta_bias=delta_bias,
            delta_softplus=delta_softplus,
            seq_idx=_ids(seq_idx, hidden_states.shape[2]),
        )
        rows = (hidden_states.mT, dt.mT, A, B.mT, C.mT)
        y = _run(op, options, call, *rows)
        return (y[0].mT, y[1]) if return_last_state else y.mT

    return served


def _nothing(op: str, stock: Callable[..., Any], options: Options) -> Callable[..., Any]:
    """In place of a function that does all of a mixer: the mixer then goes on by its parts."""

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


def serving(name: str, called: Callable[..., Any]) -> Callable[..., Any] | None:
    """The operator in the form of a function over all tokens; None where that computes another.

    Args:
        name: What modeling files call the function, a name of ``SERVED``.
        called: The function, which also runs what the operator does not take.
    """
    if differs(name, called) is not None:
        return None
    return _BUILDERS[name](SERVED[name], called, Options())
