"""Which modules are gated MLPs: a small copy is compared with every formula."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations
from typing import Any, cast

import torch
from torch import Tensor, nn

from liger_multi.patching import registered
from liger_multi.patching.changes import Change, Replace, Restore
from liger_multi.patching.evidence.branches import Outcomes
from liger_multi.patching.evidence.probe import (
    MODES,
    Watch,
    differs_at_extremes,
    disagreement,
    linear,
    probe_context,
    random,
    scalars,
    set_mode,
    skeleton,
)
from liger_multi.patching.evidence.reached import Reached
from liger_multi.patching.evidence.signature import code_of, functions_of, signature_of
from liger_multi.patching.mlp import fused as mlp
from liger_multi.patching.mlp.fused import FusedMlp, MlpSettings
from liger_multi.patching.mlp.kinds import MLP_KINDS, MLP_OPS, MlpNames
from liger_multi.patching.options import TOLD, Request
from liger_multi.patching.report import Skipped
from liger_multi.patching.swap import Swap, conflict_of, stock_class, unpatched_class

# --- gated MLPs ---


def mlp_names(module: nn.Module) -> tuple[list[MlpNames], bool]:
    """Which layers may be gate, up and down, and whether their names say so.

    Nothing when the module has more than an activation and dropouts besides.
    """
    linears = {n: m for n, m in module._modules.items() if _is_linear(m)}
    if len(linears) not in (2, 3) or module._parameters:
        return [], False
    others = [m for n, m in module._modules.items() if n not in linears and m is not None]
    acts = [m for m in others if not isinstance(m, (nn.Dropout, nn.Identity))]
    if len(acts) > 1 or any(list(m.parameters()) or m._modules for m in acts):
        return [], False
    known = [n for n in registered.mlp_names() if set(n.all) == set(linears)]
    if known:
        return known, True
    candidates = []
    for order in permutations(linears):
        gate, up, down = order if len(order) == 3 else (order[0], None, order[1])
        names = MlpNames(gate, up, down)
        if _fit(module, names):
            candidates.append(names)
    return candidates, False


def _fit(module: nn.Module, names: MlpNames) -> bool:
    layers: Any = module._modules
    gate, down = layers[names.gate], layers[names.down]
    wide = 2 * down.in_features if names.up is None else down.in_features
    same = names.up is None or (
        (layers[names.up].in_features, layers[names.up].out_features)
        == (gate.in_features, gate.out_features)
    )
    return bool(gate.out_features == wide and same and down.out_features == gate.in_features)


def _is_linear(layer: nn.Module | None) -> bool:
    return isinstance(getattr(layer, "in_features", None), int) and isinstance(
        getattr(layer, "out_features", None), int
    )


_known: dict[Any, MlpSettings | str] = {}


def mlp_kind(module: nn.Module, candidates: list[MlpNames]) -> MlpSettings | str:
    """The kind of an instance, or the reason why it stays as it is."""
    module_class, linears = unpatched_class(module), candidates[0].all
    drops = [n for n, m in module._modules.items() if isinstance(m, nn.Dropout)]
    signature = signature_of(module, module_class, (*linears, *drops))
    if isinstance(signature, str):
        return signature
    sizes = tuple(
        (m.in_features, m.out_features, getattr(m, "bias", None) is not None)
        for m in (module._modules[name] for name in linears)
        if m is not None
    )
    others = tuple((n, type(m)) for n, m in module._modules.items() if n not in linears)
    attributes = (sizes, others, scalars(module), registered.generation())
    key = (module_class, code_of(module_class, signature), signature, tuple(candidates), attributes)
    verdict = _known.get(key)
    if verdict is None:
        taken = Outcomes(Reached(functions_of(module_class, signature)).functions)
        with taken.watched():
            verdict = _measure_mlp(module, candidates)
        if isinstance(verdict, MlpSettings) and (where := taken.one_sided(argument_count=1)):
            verdict = where
        _known[key] = verdict
    return verdict


class _Marker(nn.Module):
    """Stands where a dropout stands: what comes out shows where it acted."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.tensor(0.5, dtype=torch.float32, device="cpu"))

    def forward(self, x: Tensor) -> Tensor:
        return 1.25 * x + self.bias


def _measure_mlp(module: nn.Module, candidates: list[MlpNames]) -> MlpSettings | str:
    """Compare a small replica with every formula; the one that agrees, or the reason why not."""
    fitting = [names for names in candidates if _fit(module, names)]
    if not fitting:
        return "its layers do not fit together as gate, up and down"
    module_class, watch = unpatched_class(module), Watch()
    try:
        with probe_context() as generator:
            replica, x = _replica_mlp(module, fitting[0], generator)
            with watch.over(replica):
                for training, grad in MODES:
                    set_mode(replica, training)
                    with torch.set_grad_enabled(grad):
                        replica.forward(x * 1)
            if watch.written:
                return f"its forward sets its {', '.join(sorted(watch.written))}"
            settings = _formula(replica, x, module, fitting)
            if settings is not None:
                verdict = _tried(replica, x, settings, generator) or _narrow(replica, x, settings)
                if isinstance(verdict, str):
                    return f"{module_class.__name__} is no {settings.spec.formula}: {verdict}"
                settings = verdict
    except Exception as error:  # somebody's forward: failing, it is not this kind of module
        return f"its forward failed on a replica: {type(error).__name__}: {error}"
    if settings is None:
        formulas = " nor ".join(f"down({f})" for f in dict.fromkeys(k.formula for k in MLP_KINDS))
        return f"{module_class.__name__} computes neither {formulas}"
    drops = [name for name in (settings.inner, settings.outer) if name]
    signature = signature_of(module, module_class, (*settings.names.all, *drops), watch.read)
    return signature if isinstance(signature, str) else replace(settings, signature=signature)


@torch.no_grad()
def _formula(
    replica: nn.Module, x: Tensor, module: nn.Module, candidates: list[MlpNames]
) -> MlpSettings | None:
    """The first formula with the output of a replica."""
    set_mode(replica, False)
    stock = replica.forward(x)
    for settings in _settings(module, candidates) if isinstance(stock, Tensor) else ():
        ours = mlp.apply_mlp(replica, x, settings)
        if _close(stock, ours):
            return settings
    return None


def _tried(
    replica: nn.Module, x: Tensor, settings: MlpSettings, generator: torch.Generator
) -> str | None:
    """What else a replica does, in any mode, form of a call and dtype."""

    def stock(x: Tensor) -> Any:
        return replica.forward(x)

    def ours(x: Tensor) -> Tensor:
        return mlp.apply_mlp(replica, x, settings)

    difference = disagreement(replica, stock, ours, [x], _close, generator)
    if difference:
        return difference
    difference = differs_at_extremes(replica, stock, ours, [x], generator)
    if difference:
        return difference
    with torch.no_grad():
        for shape in ((6, 24), (1, 2, 3, 24)):
            with contextlib.suppress(RuntimeError, ValueError, IndexError):  # it takes no such rank
                if not _close(stock(x.view(shape)), ours(x.view(shape))):
                    return f"its output differs for {len(shape)} axes"
        with torch.autocast("cpu", torch.bfloat16):
            if not _near_mlp(stock(x), ours(x)):
                return "its output differs under autocast"
        hooks = [_shifted(cast(nn.Module, replica._modules[n])) for n in settings.names.all]
        agree = _close(stock(x), ours(x))
        for hook in hooks:
            hook.remove()
        if not agree:
            return "it does not call its layers"
    return None


@torch.no_grad()
def _narrow(replica: nn.Module, x: Tensor, settings: MlpSettings) -> MlpSettings | str:
    """The settings with what bf16 shows, or what differs there."""
    x, down = x.bfloat16(), cast(Any, replica._modules[settings.names.down])
    wide = dict(down._parameters)
    for layer in replica.modules():
        for name, p in layer._parameters.items():
            layer._parameters[name] = None if p is None else nn.Parameter(p.bfloat16())
    if not _near_mlp(replica.forward(x), mlp.apply_mlp(replica, x, settings)):
        return "its output differs in bf16"
    down._parameters.update(wide)
    try:
        stock = replica.forward(x)
    except RuntimeError:  # two dtypes, as in most models
        return settings
    settings = replace(settings, casts=True)
    return (
        settings if _near_mlp(stock, mlp.apply_mlp(replica, x, settings)) else "it casts otherwise"
    )


def _shifted(layer: nn.Module) -> Any:
    return layer.register_forward_hook(lambda module, args, output: output * 1.25 + 0.125)


def _near_mlp(stock: Tensor, ours: Tensor) -> bool:
    """Within the roundings of bf16."""
    bound = 2**-5 * stock.abs().amax(-1, keepdim=True)
    return stock.dtype == ours.dtype and bool(((stock - ours).abs() <= bound).all())


def _close(stock: Tensor, ours: Tensor) -> bool:
    """Every row for itself: in a large one the forms of gelu agree."""
    bound = 1e-5 * stock.abs().amax(-1, keepdim=True) + 1e-6
    return stock.shape == ours.shape and bool(((stock - ours).abs() <= bound).all())


def _replica_mlp(
    module: nn.Module, names: MlpNames, generator: torch.Generator
) -> tuple[nn.Module, Tensor]:
    """A small copy and an input, of which some rows are large enough to be clamped."""
    layers: dict[str, Any] = {name: module._modules[name] for name in names.all}
    hidden, inner = layers[names.gate].in_features, layers[names.down].in_features
    small_inner = (
        24 if inner == hidden else 12 if 2 * inner == hidden else 48 if inner == 2 * hidden else 40
    )
    sizes = {2 * inner: 2 * small_inner, inner: small_inner, hidden: 24}
    replica = skeleton(module, sizes)
    for name, m in module._modules.items():
        if name in layers:
            bias = getattr(m, "bias", None) is not None
            inputs, outputs = (sizes[getattr(layers[name], f)] for f in _FEATURES)
            replica._modules[name] = linear(generator, inputs, outputs, bias)
        elif isinstance(m, nn.Dropout):
            replica._modules[name] = _Marker()
        elif m is not None:
            replica._modules[name] = skeleton(m)  # the activation, without its hooks
    return replica, random(generator, 2, 3, 24) * torch.tensor([[1.0], [0.3], [12.0]])


_FEATURES = ("in_features", "out_features")


def _settings(module: nn.Module, candidates: list[MlpNames]) -> Iterator[MlpSettings]:
    """What the module may compute: every formula, by the layers' roles and places of dropouts."""
    drops = [n for n, m in module._modules.items() if isinstance(m, nn.Dropout)]
    places: dict[int, list[tuple[str | None, str | None]]] = {
        0: [(None, None)],
        1: [(drops[0], None), (None, drops[0])] if drops else [],
        2: [(drops[0], drops[1]), (drops[1], drops[0])] if len(drops) == 2 else [],
    }
    floats = [n for n, v in vars(module).items() if isinstance(v, float)]
    for names in candidates:
        for spec in registered.mlp_kinds():
            if spec.sparse and names.up is None:
                continue
            numbers = tuple(
                (number, next((n for n in floats if number in n), "")) for number in spec.numbers
            )
            if all(attribute for _, attribute in numbers):
                for inner, outer in places.get(len(drops), []):
                    yield MlpSettings(spec, names, inner, outer, numbers)


def find_mlps(model: nn.Module, request: Request) -> Iterator[Change]:
    """Gated MLPs."""
    for path, module in model.named_modules():
        candidates, named = mlp_names(module)
        if not candidates:
            continue
        choices = {op: request.enabled[op] for op in MLP_OPS if op in request.enabled}
        if not choices:
            yield Restore(path, module)
            continue
        verdict = conflict_of(module) or mlp_kind(module, candidates)
        if isinstance(verdict, str):
            reported = [op for op in choices if op in TOLD or op in request.named]
            if named and reported:
                yield Skipped(path, reported[0], verdict)
        elif verdict.spec.op not in choices:
            yield Restore(path, module)
        else:
            lora = request.get("lora") is not None
            settings = replace(verdict, options=choices[verdict.spec.op], lora=lora)
            swap = Swap(verdict.spec.op, stock_class(module), FusedMlp, settings)
            yield Replace(path, module, swap, settings.shown(module), settings.options.shown())
