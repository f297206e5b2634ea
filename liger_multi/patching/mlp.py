"""Gated MLPs: ``down(act(gate(x)) * up(x))``.

:func:`find_mlps` takes the facts of a model and yields a patch for every gated MLP.
:func:`mlp_names` finds the layers that may be gate, up and down. :func:`mlp_kind` compares a small
replica with every formula. A patched MLP (:class:`FusedMlp`) runs as one operator if its layers
only multiply, or calls an operator between its own layers.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import permutations
from typing import Any, cast

import torch
from torch import Tensor, nn

from liger_multi import ops
from liger_multi.checks import autocast_dtype
from liger_multi.modules.parameters import dtype_of, has, stored
from liger_multi.ops.linear import linear_of_mode
from liger_multi.patching import registered
from liger_multi.patching.evidence.facts import ModelFacts, has_features
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
from liger_multi.patching.evidence.signature import (
    PLAIN,
    Signature,
    bare_parts,
    cached_verdict,
    code_holds,
    globally_hooked,
    is_current,
    is_plain_linear,
    is_watched,
    signature_of,
)
from liger_multi.patching.float8.linear import (
    bare_float8,
    bare_frozen_float8,
    handed_out,
    hands_out,
    shared_codes,
    wide_dtype,
    wide_parts,
)
from liger_multi.patching.four_bits import bias_of, is_four_bit
from liger_multi.patching.kinds import MLP_KINDS, MLP_OPS, MlpKind, MlpNames
from liger_multi.patching.lora import Adapter, fits, one_adapter
from liger_multi.patching.options import REPORTED, MlpOptions, Request, run_bound
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
    unpatched_class,
)

# --- a patched MLP ---


@dataclass(frozen=True)
class MlpSettings:
    """The formula of an instance, and the names of its attributes.

    Attributes:
        spec: The gated activation.
        names: Names of the layers.
        inner: Name of the dropout before the last layer.
        outer: Name of the dropout after the last layer.
        numbers: Arguments of the operator, and the attributes with their values.
        options: Options of the patch call.
        lora: Whether the operator includes LoRA adapters on the layers.
        casts: Whether the input of the last layer is cast to the dtype of its weight, as in T5.
        signature: The signature at the probe; if it has changed, the original forward runs.
    """

    spec: MlpKind
    names: MlpNames
    inner: str | None = None
    outer: str | None = None
    numbers: tuple[tuple[str, str], ...] = ()
    options: MlpOptions = field(default_factory=MlpOptions)
    lora: bool = True
    casts: bool = False
    signature: Signature = field(default_factory=Signature)

    def shown(self, module: nn.Module) -> str:
        """The operator for the report."""
        is_fused = bool(self.spec.activation) and self.options.whole
        if is_fused and _all_layers(module, self.names, is_plain_linear):
            return f"gated_mlp[{self.spec.activation}]"
        if is_fused and _all_layers(module, self.names, bare_float8):
            return f"gated_mlp_float8[{self.spec.activation}]"
        if self.spec.activation and self.lora and _adapted(module, self.names):
            return f"lora_mlp[{self.spec.activation}]"
        op = self.spec.op if self.names.up else f"{self.spec.op}_packed"
        shown_options = [value for _, value in self.spec.options if isinstance(value, str)]
        details = ", ".join([*shown_options, "sparse"] if self.spec.sparse else shown_options)
        return f"{op}[{details}]" if details else op


class FusedMlp(Patched):
    """``down(act(gate(x)) * up(x))`` as one operator, or with one between the layers' own calls.

    The layers are called if they have adapters, hooks, or sharded or quantized weights.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The operators, or the original forward for calls of another form."""
        module_class = type(self)
        if not issubclass(module_class, FusedMlp):
            return cast(Tensor, module_class.forward(self, *args, **kwargs))
        settings: MlpSettings = module_class._liger_multi_swap.settings  # type: ignore[assignment]
        is_usual_call = len(args) == 1 and not kwargs and code_holds(module_class)
        if not is_usual_call or not serves(self, settings):
            return cast(Tensor, original(module_class)(self, *args, **kwargs))
        op = settings.spec.op
        names = ("gated_mlp", "gated_mlp_float8", "lora_mlp", op, f"{op}_packed")
        return run_bound(settings.options, names, apply_mlp, self, args[0], settings)  # type: ignore[no-any-return]


def serves(module: nn.Module, settings: MlpSettings) -> bool:
    """Whether the settings of an instance still hold, and no hooks on all modules exist."""
    return not globally_hooked() and is_current(module, settings.signature)


def apply_mlp(module: Any, x: Tensor, settings: MlpSettings) -> Tensor:
    """Run the operators with the weights of ``module``."""
    spec, names = settings.spec, settings.names
    if names.up is not None and spec.activation and _silent(module, settings.inner):
        result = _by_weights(module, x, settings)
        if result is not None:
            return _dropped(module, result, settings.outer)
    gate, down = getattr(module, names.gate), getattr(module, names.down)
    options = dict(spec.options)
    for name, attribute in settings.numbers:
        options[name] = getattr(module, attribute)
    if names.up is None:
        options.update(spec.packed)
        inner = getattr(ops, f"{spec.op}_packed")(gate(x), **options)
    else:
        first = sparse(gate(x), options.pop("sparsity")) if spec.sparse else gate(x)
        operator, operands = getattr(ops, spec.op), (first, getattr(module, names.up)(x))
        if hands_out(spec.op):
            inner = handed_out(module, spec.op, functools.partial(operator, *operands, **options))
        else:
            inner = operator(*operands, **options)
    inner = _dropped(module, inner, settings.inner)
    inner = _in_layer_dtype(down, inner) if settings.casts else inner
    return _dropped(module, cast(Tensor, down(inner)), settings.outer)


def sparse(gate: Tensor, sparsity: float) -> Tensor:
    """``relu(gate - mean - k * deviation)`` per row, which is 0 for a share ``sparsity`` of it.

    ``k`` is the quantile of the normal distribution at ``sparsity``, rounded to the dtype of gate
    as in transformers. Source: Gemma 3n's activation sparsity (arXiv:2506.06644).
    """
    quantile = (2 * torch.tensor(sparsity, dtype=torch.float32) - 1).erfinv() * 2.0**0.5
    deviation, mean = torch.std_mean(gate, -1, correction=0, keepdim=True)
    return torch.relu(gate - (mean + deviation * quantile.to(gate.dtype)))


def _by_weights(module: Any, x: Tensor, settings: MlpSettings) -> Tensor | None:
    """The MLP as one operator; None if the layers must be called."""
    names = settings.names
    layers = [module._modules[name] for name in names.all]
    parts = [bare_parts(layer) for layer in layers]
    if None in parts:
        if settings.options.whole and _all_layers(module, names, bare_float8):
            return _float8(x, layers, settings.spec.activation)
        low_rank = _adapted(module, names) if settings.lora else None
        if low_rank is None:
            return None
        layers = [getattr(layer, "base_layer", layer) for layer in layers]
        dtypes = [wide_dtype(layer, x.dtype) for layer in layers]
        if _one_dtype(x, *dtypes) and all(a is None or fits(x, a) for a in low_rank):
            return _with_adapters(x, layers, low_rank, settings.spec.activation)
        return None
    layer_parts: Any = parts
    (gate, gate_bias), (up, up_bias), (down, down_bias) = layer_parts
    if globally_hooked() or not _one_dtype(x, gate.dtype, up.dtype, down.dtype):
        return None
    if not settings.options.whole:
        operands = linear_of_mode(x, gate, gate_bias), linear_of_mode(x, up, up_bias)
        inner = getattr(ops, settings.spec.op)(*operands, **dict(settings.spec.options))
        return linear_of_mode(inner, down, down_bias)
    return ops.gated_mlp(
        x,
        gate,
        up,
        down,
        gate_bias=gate_bias,
        up_bias=up_bias,
        down_bias=down_bias,
        activation=settings.spec.activation,
    )


def _float8(x: Tensor, layers: Sequence[Any], activation: str) -> Tensor | None:
    """The MLP in FP8; None for inputs of another dtype."""
    if not _one_dtype(x, *[layer.weight.dtype for layer in layers]):
        return None
    weights, scales, codes = zip(*map(wide_parts, layers), strict=True)
    biases = [layer.bias for layer in layers]
    return ops.gated_mlp_float8(
        x,
        *weights,
        gate_bias=biases[0],
        up_bias=biases[1],
        down_bias=biases[2],
        activation=activation,
        gate_weight_scale=scales[0],
        up_weight_scale=scales[1],
        down_weight_scale=scales[2],
        gate_weight_codes=codes[0],
        up_weight_codes=codes[1],
        down_weight_codes=codes[2],
        quantized=shared_codes(x),
    )


def _with_adapters(
    x: Tensor, layers: list[Any], low_rank: list[Adapter | None], activation: str
) -> Tensor:
    loras = [None if a is None else ops.LoRA(a.a, a.b, a.scale) for a in low_rank]
    weights, scales, _ = zip(*(wide_parts(layer, x.dtype) for layer in layers), strict=True)
    biases = [bias_of(layer, x.dtype) for layer in layers]
    return ops.lora_mlp(
        x,
        *weights,
        *loras,
        gate_bias=biases[0],
        up_bias=biases[1],
        down_bias=biases[2],
        activation=activation,
        gate_weight_scale=scales[0],
        up_weight_scale=scales[1],
        down_weight_scale=scales[2],
        quantized=shared_codes(x) if any(scale is not None for scale in scales[:2]) else None,
    )


def _dropped(module: Any, x: Tensor, name: str | None) -> Tensor:
    return x if name is None else cast(Tensor, getattr(module, name)(x))


def _silent(module: Any, name: str | None) -> bool:
    """Whether a dropout is inactive and has no hooks."""
    if name is None:
        return True
    drop = getattr(module, name)
    rests = type(drop) is nn.Dropout and not (drop.training and drop.p)
    return rests and not is_watched(drop)


def _in_layer_dtype(down: Any, x: Tensor) -> Tensor:
    """``x`` in the dtype of a layer, which T5 keeps in fp32."""
    weight, dtype = stored(down), dtype_of(down)
    if weight is not None and type(weight) not in PLAIN:
        return x
    if dtype is None or not dtype.is_floating_point or dtype.itemsize < 2:
        return x
    return x if autocast_dtype(x.device.type) is not None else x.to(dtype)


def _all_layers(module: nn.Module, names: MlpNames, is_bare: Callable[[Any], bool]) -> bool:
    """Whether gate, up and down are plain layers, of the type that ``is_bare`` accepts."""
    if names.up is None or globally_hooked():
        return False
    return all(is_bare(module._modules[name]) for name in names.all)


def _adapted(module: nn.Module, names: MlpNames) -> list[Adapter | None] | None:
    """The adapters of frozen plain layers; None if a layer is another one, or none has adapters."""
    if names.up is None or globally_hooked():
        return None
    low_rank = []
    for name in names.all:
        layer: Any = module._modules[name]
        has_no_adapter = is_plain_linear(layer) or bare_frozen_float8(layer) or is_four_bit(layer)
        adapter = None if has_no_adapter else one_adapter(layer)
        if adapter is None and not (has_no_adapter and _frozen(layer)):
            return None
        low_rank.append(adapter)
    return low_rank if any(low_rank) else None


def _frozen(layer: nn.Module) -> bool:
    return not any(
        p is not None and p.requires_grad for p in (getattr(layer, "weight", None), layer.bias)
    )


def _one_dtype(x: Tensor, *dtypes: torch.dtype) -> bool:
    if type(x) is not Tensor:
        return False
    if autocast_dtype(x.device.type) is not None:
        return True
    return {x.dtype, *dtypes} == {x.dtype}


# --- which modules ---


def mlp_names(module: nn.Module) -> tuple[list[MlpNames], bool]:
    """Candidates for gate, up and down, and whether their names are known ones.

    There are none if the module has other parts than an activation and dropouts.
    """
    linears = {n: m for n, m in module._modules.items() if has_features(m)}
    if len(linears) not in (2, 3) or module._parameters:
        return [], False
    other_modules = [m for n, m in module._modules.items() if n not in linears and m is not None]
    acts = [m for m in other_modules if not isinstance(m, (nn.Dropout, nn.Identity))]
    if len(acts) > 1 or any(list(m.parameters()) or m._modules for m in acts):
        return [], False
    registered_names = [n for n in registered.rows_of(MlpNames) if set(n.all) == set(linears)]
    if registered_names:
        return registered_names, True
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
    up_fits = names.up is None or (
        (layers[names.up].in_features, layers[names.up].out_features)
        == (gate.in_features, gate.out_features)
    )
    return bool(gate.out_features == wide and up_fits and down.out_features == gate.in_features)


_verdicts: dict[Any, MlpSettings | str] = {}


def mlp_kind(module: nn.Module, candidates: list[MlpNames]) -> MlpSettings | str:
    """The settings of a module, or the reason why it stays as it is."""
    module_class, linears = unpatched_class(module), candidates[0].all
    drops = [n for n, m in module._modules.items() if isinstance(m, nn.Dropout)]
    signature = signature_of(module, module_class, (*linears, *drops))
    if isinstance(signature, str):
        return signature
    sizes = tuple(
        (m.in_features, m.out_features, has(m, "bias"))
        for m in (module._modules[name] for name in linears)
        if m is not None
    )
    other_classes = tuple((n, type(m)) for n, m in module._modules.items() if n not in linears)
    attributes = (sizes, other_classes, scalars(module), registered.generation(), tuple(candidates))
    probe = functools.partial(_measure_mlp, module, candidates)
    return cached_verdict(_verdicts, module_class, signature, attributes, probe, 1)


class _Marker(nn.Module):
    """Takes the place of a dropout; its effect on the output shows where it acts."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.tensor(0.5, dtype=torch.float32, device="cpu"))

    def forward(self, x: Tensor) -> Tensor:
        return 1.25 * x + self.bias


def _measure_mlp(module: nn.Module, candidates: list[MlpNames]) -> MlpSettings | str:
    """The settings of the formula that agrees with a small replica, or why none does."""
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
                verdict = _differs_anywhere(replica, x, settings, generator) or _narrow(
                    replica, x, settings
                )
                if isinstance(verdict, str):
                    return f"{module_class.__name__} is no {settings.spec.formula}: {verdict}"
                settings = verdict
    except Exception as error:  # of any forward, which then is another formula
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
    """The first formula with the same output as a replica."""
    set_mode(replica, False)
    stock = replica.forward(x)
    for settings in _settings(module, candidates) if isinstance(stock, Tensor) else ():
        actual = apply_mlp(replica, x, settings)
        if _close(stock, actual):
            return settings
    return None


def _differs_anywhere(
    replica: nn.Module, x: Tensor, settings: MlpSettings, generator: torch.Generator
) -> str | None:
    """How a replica differs in any mode, form of a call or dtype; or None."""

    def stock(x: Tensor) -> Any:
        return replica.forward(x)

    def formula(x: Tensor) -> Tensor:
        return apply_mlp(replica, x, settings)

    difference = disagreement(replica, stock, formula, [x], _close, generator)
    if difference:
        return difference
    difference = differs_at_extremes(replica, stock, formula, [x], generator)
    if difference:
        return difference
    with torch.no_grad():
        for shape in ((6, 24), (1, 2, 3, 24)):
            with contextlib.suppress(RuntimeError, ValueError, IndexError):  # it takes no such rank
                if not _close(stock(x.view(shape)), formula(x.view(shape))):
                    return f"its output differs for {len(shape)} axes"
        with torch.autocast("cpu", torch.bfloat16):
            if not _near_mlp(stock(x), formula(x)):
                return "its output differs under autocast"
        hooks = [_shifted(cast(nn.Module, replica._modules[n])) for n in settings.names.all]
        agree = _close(stock(x), formula(x))
        for hook in hooks:
            hook.remove()
        if not agree:
            return "it does not call its layers"
    return None


@torch.no_grad()
def _narrow(replica: nn.Module, x: Tensor, settings: MlpSettings) -> MlpSettings | str:
    """The settings with ``casts``, or how a replica differs in bf16."""
    x, down = x.bfloat16(), cast(Any, replica._modules[settings.names.down])
    wide = dict(down._parameters)
    for layer in replica.modules():
        for name, p in layer._parameters.items():
            layer._parameters[name] = None if p is None else nn.Parameter(p.bfloat16())
    if not _near_mlp(replica.forward(x), apply_mlp(replica, x, settings)):
        return "its output differs in bf16"
    down._parameters.update(wide)
    try:
        stock = replica.forward(x)
    except RuntimeError:  # two dtypes, as in most models
        return settings
    settings = replace(settings, casts=True)
    return settings if _near_mlp(stock, apply_mlp(replica, x, settings)) else "it casts otherwise"


def _shifted(layer: nn.Module) -> Any:
    return layer.register_forward_hook(lambda module, args, output: output * 1.25 + 0.125)


def _near_mlp(stock: Tensor, actual: Tensor) -> bool:
    """Within the roundings of bf16."""
    bound = 2**-5 * stock.abs().amax(-1, keepdim=True)
    return stock.dtype == actual.dtype and bool(((stock - actual).abs() <= bound).all())


def _close(stock: Tensor, actual: Tensor) -> bool:
    """Whether rows agree relative to their largest number: large rows hide the form of gelu."""
    bound = 1e-5 * stock.abs().amax(-1, keepdim=True) + 1e-6
    return stock.shape == actual.shape and bool(((stock - actual).abs() <= bound).all())


def _replica_mlp(
    module: nn.Module, names: MlpNames, generator: torch.Generator
) -> tuple[nn.Module, Tensor]:
    """A small copy, and an input with rows that are large enough to be clamped."""
    layers: dict[str, Any] = {name: module._modules[name] for name in names.all}
    hidden, inner = layers[names.gate].in_features, layers[names.down].in_features
    small_inner = (
        24 if inner == hidden else 12 if 2 * inner == hidden else 48 if inner == 2 * hidden else 40
    )
    sizes = {2 * inner: 2 * small_inner, inner: small_inner, hidden: 24}
    replica = skeleton(module, sizes)
    for name, m in module._modules.items():
        if m is not None and name in layers:
            bias = has(m, "bias")
            inputs, outputs = (sizes[getattr(layers[name], f)] for f in _FEATURES)
            replica._modules[name] = linear(generator, inputs, outputs, bias)
        elif isinstance(m, nn.Dropout):
            replica._modules[name] = _Marker()
        elif m is not None:
            replica._modules[name] = skeleton(m)  # the activation, without its hooks
    return replica, random(generator, 2, 3, 24) * torch.tensor([[1.0], [0.3], [12.0]])


_FEATURES = ("in_features", "out_features")


def _settings(module: nn.Module, candidates: list[MlpNames]) -> Iterator[MlpSettings]:
    """All formulas, roles of layers and places of dropouts that a module may have."""
    drops = [n for n, m in module._modules.items() if isinstance(m, nn.Dropout)]
    dropout_names: dict[int, list[tuple[str | None, str | None]]] = {
        0: [(None, None)],
        1: [(drops[0], None), (None, drops[0])] if drops else [],
        2: [(drops[0], drops[1]), (drops[1], drops[0])] if len(drops) == 2 else [],
    }
    floats = [n for n, v in vars(module).items() if isinstance(v, float)]
    for names in candidates:
        for spec in registered.rows_of(MlpKind):
            if spec.sparse and names.up is None:
                continue
            numbers = tuple(
                (number, next((n for n in floats if number in n), "")) for number in spec.numbers
            )
            if all(attribute for _, attribute in numbers):
                for inner, outer in dropout_names.get(len(drops), []):
                    yield MlpSettings(spec, names, inner, outer, numbers)


def find_mlps(model: ModelFacts, request: Request) -> Iterator[Change]:
    """Gated MLPs."""
    for path, module in model.with_linears(2, 3):
        candidates, is_known_layout = mlp_names(module)
        if not candidates:
            continue
        choices = {op: request.enabled[op] for op in MLP_OPS if op in request.enabled}
        if not choices:
            yield Restore(path, module)
            continue
        verdict = conflict_of(module) or mlp_kind(module, candidates)
        if isinstance(verdict, str):
            reported = [op for op in choices if op in REPORTED or op in request.named]
            if is_known_layout and reported:
                yield Skipped(path, reported[0], verdict)
        elif verdict.spec.op not in choices:
            yield Restore(path, module)
        else:
            lora = request.get("lora") is not None
            settings = replace(verdict, options=choices[verdict.spec.op], lora=lora)
            swap = Swap(verdict.spec.op, stock_class(module), FusedMlp, settings)
            yield Replace(path, module, swap, settings.shown(module), settings.options.shown())
