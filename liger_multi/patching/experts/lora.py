"""LoRA on stacked experts (PEFT's ``target_parameters``) as one operator.

PEFT wraps the experts once for every parameter with an adapter. The forward of a wrapper adds the
adapters to the weights of all experts. A patched outermost wrapper (:class:`FusedExpertAdapters`)
calls ``ops.lora_moe`` with the frozen weights and the matrices of all adapters instead. Other
configurations run PEFT's forward. :func:`find_expert_adapters` yields the patches.

PEFT stores the adapters of all experts in two matrices, whose layout no attribute tells. So a
wrapper of the same class is built around a small parameter, and its result compared.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from liger_multi._torch_private import constant_in_graphs
from liger_multi.checks import autocast_dtype
from liger_multi.patching.evidence.facts import ModelFacts, home_of
from liger_multi.patching.evidence.probe import probe_context, random
from liger_multi.patching.evidence.signature import code_holds, is_watched
from liger_multi.patching.experts.find import looks_like_experts
from liger_multi.patching.experts.fused import (
    ExpertsKind,
    ExpertsSettings,
    FusedExperts,
    apply_experts,
    computes_in_weight_dtype,
    is_probed_call,
    routes_of,
)
from liger_multi.patching.experts.quantized import is_watched_by_others, stack_declared
from liger_multi.patching.lora import Adapter, adapters
from liger_multi.patching.options import Options, Request, run_bound
from liger_multi.patching.report import Skipped
from liger_multi.patching.swap import (
    Change,
    Patched,
    Replace,
    Restore,
    Swap,
    conflict_of,
    original,
    stock_class,
    stock_of,
)

_WRAPPER = ("peft.tuners.lora.layer", "ParamWrapper.forward")


def is_wrapper(module: nn.Module | None) -> bool:
    """Whether a module is PEFT's wrapper for an adapter of a parameter."""
    return _wraps(type(module))


@constant_in_graphs
def _wraps(module_class: Any) -> bool:
    return home_of(stock_of(module_class)) == _WRAPPER


def chain(outermost: nn.Module) -> tuple[list[Any], Any]:
    """The nested wrappers, the outermost first, and the module within."""
    wrappers, module = [], cast(Any, outermost)
    while is_wrapper(module):
        wrappers.append(module)
        module = module.base_layer
    return wrappers, module


def outermost_wrappers(model: ModelFacts) -> list[tuple[str, nn.Module]]:
    """The outermost wrappers around experts of transformers' interface."""
    wrappers = [
        entry
        for entry in model.of_class(lambda facts: home_of(facts.module_class) == _WRAPPER)
        if is_wrapper(entry[1])
    ]
    inner = {id(wrapper) for _, module in wrappers for wrapper in chain(module)[0][1:]}
    return [
        (path, module)
        for path, module in wrappers
        if id(module) not in inner and looks_like_experts(chain(module)[1])
    ]


# --- adapters ---


@dataclass(frozen=True)
class Factors:
    """The adapters of all experts by the name of their weight."""

    spec: ExpertsKind
    base: Any
    low_rank: dict[str, list[Adapter]]

    @property
    def shown(self) -> str:
        """The operator for the report."""
        return f"lora_moe[{self.spec.activation}]"

    def arguments(self) -> dict[str, Any]:
        """Arguments of the operator: a (E, r, in) and b (E, out, r) as views of PEFT's matrices."""
        experts = stack_declared(self.base, "down_proj").shape[0]
        arguments: dict[str, Any] = {}
        for layer, name in zip(("gate_up", "down"), self.spec.weights, strict=True):
            adapters = self.low_rank.get(name, [])
            parts = [_views(adapter, experts) for adapter in adapters]
            if len(parts) == 1:
                arguments |= dict(zip((f"{layer}_a", f"{layer}_b"), parts[0], strict=True))
                arguments[f"{layer}_scale"] = adapters[0].scale
            elif parts:
                scaled = [
                    b * adapter.scale for (_, b), adapter in zip(parts, adapters, strict=True)
                ]
                arguments[f"{layer}_a"] = torch.cat([a for a, _ in parts], 1)
                arguments[f"{layer}_b"] = torch.cat(scaled, 2)
        return arguments


def _views(adapter: Adapter, experts: int) -> tuple[Tensor, Tensor]:
    """PEFT's matrices per expert, the outer index of a's rows and the inner one of b's columns."""
    a, b = adapter.a, adapter.b
    rank = a.shape[0] // experts
    return a.view(experts, rank, -1), b.view(-1, rank, experts).permute(2, 0, 1)


def factors(outermost: nn.Module) -> Factors | str:
    """The active adapters around patched experts, or why PEFT must run them."""
    wrappers, base = chain(outermost)
    watched = any(is_watched(m) for m in wrappers[1:]) or is_watched_by_others(base)
    if not isinstance(base, FusedExperts) or watched:
        return "its experts are not patched, or something stands around them"
    spec = cast(ExpertsSettings, type(base)._liger_multi_swap.settings).spec
    is_other_layout = spec.form in ("identity", "shared")
    if is_other_layout or bool(getattr(base, "is_transposed", False)) != spec.transposed:
        return "PEFT reads the layout of its experts in another way"
    by_name: dict[str, list[Adapter]] = {}
    for wrapper in wrappers:
        name, low_rank = wrapper.parameter_name, adapters(wrapper)
        if isinstance(low_rank, str):
            return f"{name}: {low_rank}"
        if name not in spec.weights or name in by_name:
            return f"its parameter {name} is none of {' and '.join(spec.weights)}"
        if len({t.dtype for adapter in low_rank for t in adapter[:2]}) > 1:
            return f"{name}: its factors have several dtypes"
        by_name[name] = low_rank
    parts = [stack_declared(base, name) for name in spec.parameters]
    if any(isinstance(part, Tensor) and part.requires_grad for part in parts):
        return "its experts are trained as well"
    wrapper = cast(Any, stock_of(type(wrappers[0])))
    return _layout(wrapper, spec.transposed) or Factors(spec, base, by_name)


@constant_in_graphs
def _layout(wrapper: Any, transposed: bool) -> str:
    """Why :func:`_views` does not read the matrices of a class of wrappers, or ""."""
    return _measured(wrapper, transposed)


@functools.cache
def _measured(wrapper: Any, transposed: bool) -> str:
    """The verdict of :func:`_layout`, apart from it: Dynamo traces into cached functions."""
    import peft

    experts, shape = 3, (4, 5)
    config = peft.LoraConfig(r=2, lora_alpha=3)
    try:
        with probe_context() as generator:
            base = nn.Module()
            base.register_parameter("weight", nn.Parameter(random(generator, experts, *shape)))
            base.is_transposed = transposed  # type: ignore[assignment]
            wrapped = wrapper(base, "probe", "weight", config=config, r=2, lora_alpha=3)
            a, b = (cast(Any, side["probe"]) for side in (wrapped.lora_A, wrapped.lora_B))
            a.weight, b.weight = (
                nn.Parameter(random(generator, *layer.weight.shape)) for layer in (a, b)
            )
            adapter = Adapter(a.weight, b.weight, wrapped.scaling["probe"])
            first, second = _views(adapter, experts)
            expected = adapter.scale * (second @ first)
            actual = wrapped.get_delta_weight("probe")
            agrees = torch.allclose(actual, expected.mT if transposed else expected, atol=1e-5)
    except Exception as error:  # of another version of PEFT
        return f"PEFT's {wrapper.__name__} failed on a small copy: {type(error).__name__}: {error}"
    return "" if agrees else f"PEFT's {wrapper.__name__} lays its factors out in another way"


# --- the module ---


class FusedExpertAdapters(Patched):
    """Experts with adapters, which are not added to the weights."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The operator, or PEFT's forward for other forms of a call."""
        module_class = type(self)
        if not issubclass(module_class, FusedExpertAdapters):
            return cast(Tensor, module_class.forward(self, x, *args, **kwargs))
        verdict = factors(self) if code_holds(module_class) else ""
        routes = None
        if isinstance(verdict, Factors) and _serves(verdict, x):
            routes = routes_of(verdict.base, verdict.spec, x, (*args, *kwargs.values()))
        if isinstance(verdict, str) or routes is None:
            return cast(Tensor, original(module_class)(self, x, *args, **kwargs))
        options = cast(Options, module_class._liger_multi_swap.settings)
        bound = (verdict.base, verdict.spec, x, *routes, verdict.arguments())
        return cast(Tensor, run_bound(options, ("fused_moe", "lora_moe"), apply_experts, *bound))


def _serves(low_rank: Factors, x: Tensor) -> bool:
    """Whether the experts are unchanged, and the operator supports the dtypes."""
    base = low_rank.base
    if not code_holds(type(base)) or not is_probed_call(base, low_rank.spec, x):
        return False
    device_type = x.device.type
    if autocast_dtype(device_type) is not None and not computes_in_weight_dtype(base, device_type):
        return True
    dtypes = [adapter.a.dtype for adapters in low_rank.low_rank.values() for adapter in adapters]
    weight_bytes = stack_declared(base, "down_proj").dtype.itemsize
    return all(dtype.itemsize >= weight_bytes for dtype in dtypes)


def find_expert_adapters(model: ModelFacts, request: Request) -> Iterator[Change]:
    """PEFT's wrappers around stacked experts, which were patched before."""
    options = None if request.get("fused_moe") is None else request.get("lora")
    for path, module in outermost_wrappers(model):
        if options is None:
            yield Restore(path, module)
            continue
        verdict = conflict_of(module) or factors(module)
        if isinstance(verdict, str):
            yield Restore(path, module)
            yield Skipped(path, "lora", verdict)
            continue
        swap = Swap("lora", stock_class(module), FusedExpertAdapters, options)
        yield Replace(path, module, swap, verdict.shown, options.shown())
