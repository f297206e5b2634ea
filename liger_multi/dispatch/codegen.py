"""Generated Python for what runs at every call of an operator.

Which arguments are tensors, which of them backward reads and where its results go is known when an
operator is declared. The loops over these tables run once, here, and emit straight-line code: on
small tensors, such loops would take longer than the kernels.

Every piece of code first tests for unusual cases and leaves them to a slow path that handles every
case (``Op.slow_path``, ``Primitive.slow_path``, ``autograd.backward_slow_path``). Fast and slow
path have equal results, as ``tests/dispatch/test_dispatch.py`` checks for every operator. The call
of ``rms_norm`` is::

    def call(x, weight, eps, offset, casting):
        if (
            _compiler._is_compiling_flag
            or _tracing()
            or _transformed()
            or _forward_ad._current_level >= 0
            or (type(x) not in _PLAIN or _is_wrapped(x))
            or (weight is not None and (type(weight) not in _PLAIN or _is_wrapped(weight)))
        ):
            return _slow_path(x, weight, eps, offset, casting)
        if _grad_enabled():
            _needs_x = x.requires_grad
            _needs_weight = weight is not None and weight.requires_grad
            if _needs_x or _needs_weight:
                return _apply(x, weight, eps, offset, casting)
        return _forward(x, weight, eps, offset, casting)[0]
"""

from __future__ import annotations

import inspect
import linecache
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import increment_version

from liger_multi import _torch_private
from liger_multi.dispatch import bitwise
from liger_multi.dispatch.config import current

if TYPE_CHECKING:
    from liger_multi.dispatch.op import Op
    from liger_multi.dispatch.torch_ops import Primitive

PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
NAMES: dict[str, Any] = {
    "PLAIN": PLAIN,
    "autocast": _torch_private.is_any_autocast_enabled,
    "compiler": torch.compiler,
    "current": current,
    "follows_torch": bitwise.follows_torch,
    "forward_ad": _torch_private.forward_ad,
    "grad_enabled": torch.is_grad_enabled,
    "increment_version": increment_version,
    "is_legacy_batched": _torch_private.is_legacy_batched,
    "is_wrapped": _torch_private.is_functorch_wrapped,
    "modes": _torch_private.dispatch_mode_count,
    "profiled": _torch_private.profiler_enabled,
    "tracing": _torch_private.is_tracing,
    "transformed": _torch_private.transforms_active,
    "without_autocast": _torch_private.WithoutAutocast,
}
"""What the code may call, each with an underscore in front: no argument of a contract has one."""
COMPILING = f"_compiler.{_torch_private.IS_COMPILING}"
"""What ``torch.compiler.is_compiling()`` returns outside of TorchScript, without two calls."""


def compiled(source: str, name: str, names: Mapping[str, Any]) -> Callable[..., Any]:
    """Compile ``source`` and return its last function; tracebacks show its lines."""
    file, namespace = f"<liger_multi {name}>", {f"_{n}": v for n, v in {**NAMES, **names}.items()}
    linecache.cache[file] = (len(source), None, source.splitlines(True), file)
    old_names = set(namespace)
    exec(compile(source, file, "exec"), namespace)
    new_values = (value for n, value in namespace.items() if n not in old_names and n[0] != "_")
    return next(new_values)  # type: ignore[no-any-return]


def block(*lines: str | None) -> str:
    """An indented block of the lines that are there."""
    return textwrap.indent("\n".join(line for line in lines if line is not None), "    ")


def tuple_of(parts: Iterable[str]) -> str:
    """A tuple, also of one part or none."""
    parts = list(parts)
    return f"({parts[0]},)" if len(parts) == 1 else f"({', '.join(parts)})"


# --- the choice of a backend ---


def primitive_source(prim: Primitive, configured: bool = False) -> str:
    """Code of a direction: look the function up and call it.

    Args:
        prim: The direction.
        configured: Whether the caller hands in the configuration, before the arguments.
    """
    args, first = ", ".join(prim.params), prim.params[prim.anchor]
    watched = "_profiled() or _tracing() or _modes() or _Primitive.call is not _call"
    unusual = [f"{COMPILING} or {watched}"]
    for name in (prim.params[i] for i in prim.tensor_indices):
        test = f"type({name}) not in _PLAIN or {name}.is_neg()"
        unusual.append(f"({test})" if name == first else f"({name} is not None and ({test}))")
    return f"def {prim.direction}({'_config, ' * configured}{args}):\n" + block(
        "if (",
        block(" or\n".join(unusual)),
        "):",
        f"    return _slow_path({args})",
        None if configured else "_config = _current()",
        f"_device = {first}.device",
        "_mode = _config.deterministic",
        "if _mode is None:",
        "    _mode = _follows_torch()",
        f"_plan = _config.plans.get((_prim, _device, {first}.dtype, _mode))",
        "_module = _module_of_several(_device)",
        "if (",
        block(
            '_plan is None or _device.type == "meta" or',
            "(_module is not None and _module.current_device() != _device.index)",
        ),
        "):",
        f"    return _slow_path({args})",
        f"_run = _plan.direct or _plan.function({tuple_of(prim.params)})",
        "if _autocast():",
        "    with _without_autocast():",
        f"        return _run({args})",
        f"return _run({args})",
    )


# --- the call ---


def call_source(op: Op) -> str:
    """Code of an operator's call, without the ``needs_*`` flags."""
    inputs = [name for name in op.fwd.params if not name.startswith("needs_")]
    tensors = [op.fwd.params[i] for i in op.fwd.tensor_indices]
    transforms = "_tracing() or _transformed() or _forward_ad._current_level >= 0"
    unusual, needs = [f"{COMPILING} or {transforms}"], []
    for name in tensors:
        optional = "" if name == op.fwd.params[op.fwd.anchor] else f"{name} is not None and "
        unusual.append(f"({optional}(type({name}) not in _PLAIN or _is_wrapped({name})))")
        needs.append(f"    _needs_{name} = {optional}{name}.requires_grad")
    flags = [name for name in op.fwd.params if name.startswith("needs_")]
    args = ", ".join(inputs)
    with_grad = ", ".join([*inputs, *(f"_{name}" for name in flags)])
    without_grad = ", ".join([*inputs, *("False" for _ in flags)])
    visible = "[0]" if len(op.visible) == 1 else f"[:{len(op.visible)}]"
    return f"def call({args}):\n" + block(
        "if (",
        block(" or\n".join(unusual)),
        "):",
        f"    return _slow_path({args})",
        "if _grad_enabled():",
        *needs,
        f"    if {' or '.join(f'_needs_{name}' for name in tensors)}:",
        f"        return _apply({with_grad}){visible if op.edges else ''}",
        f"return _forward({without_grad}){visible if len(op.fwd.returns) > 1 else ''}",
    )


# --- forward and backward for autograd ---


def _saved_values(op: Op, name: str, value: str) -> str:
    """What is saved for an argument of backward: where its values are not read, no version of it.

    Autograd refuses a backward pass whose saved tensors were written since, read or not.
    """
    readers = op.values_for.get(name)
    if readers is None:
        return value
    condition = " or ".join(f"({x} is not None and {x}.requires_grad)" for x in readers.split())
    return f"{value} if {value} is None or {condition} or {COMPILING} else {value}.data"


def forward_source(op: Op, saved: list[str], plain: list[str], not_saved: list[str] | None) -> str:
    """Code that runs forward and keeps what backward reads.

    Args:
        op: The operator.
        saved: Names of the tensors that backward reads.
        plain: Names of the other arguments, and ``x_dtype`` for a dtype.
        not_saved: Arguments of the function that names tensors which are not saved after all.
    """
    params, returns = op.fwd.params, op.fwd.returns
    outs = {name: f"_{name}" for name in returns}  # an output may have the name of an argument
    tensors = [_saved_values(op, n, n) if n in params else outs[n] for n in saved]
    if not_saved is not None:
        saved_tensors = zip(saved, tensors, strict=True)
        tensors = [f"None if {name!r} in _unsaved else {t}" for name, t in saved_tensors]
    dtype = "None if {0} is None else {0}.dtype"
    values = [n if n in params else dtype.format(n.removesuffix("_dtype")) for n in plain]
    non_differentiable = ", ".join(outs[n] for n in op.non_differentiable)
    targets = tuple_of(outs.values()) if len(outs) > 1 else outs[returns[0]]
    results = [outs[n] for n in (*op.visible, *op.edges)]
    return f"def forward(ctx, {', '.join(params)}):\n" + block(
        "_config = _current()",
        f"{targets} = _run_forward(_config, {', '.join(params)})",
        # views that an autograd.Function returns cannot be written to
        *(f"if {y}._is_view():\n    {y} = {y}.detach()" for y in results),
        f"_increment_version({op.inplace})" if op.inplace else None,
        None if not_saved is None else f"_unsaved = _not_saved({', '.join(not_saved)})",
        f"ctx.save_for_backward({', '.join(tensors)})",
        f"ctx.plain = {tuple_of(values)}",
        "ctx.set_materialize_grads(False)",
        f"ctx.mark_non_differentiable({non_differentiable})" if non_differentiable else None,
        "ctx.configuration = _config",
        f"return {results[0] if len(results) == 1 else tuple_of(results)}",
    )


def backward_source(op: Op) -> str:
    """Code that runs backward where an upstream gradient arrives, once."""
    upstream = [f"d{name}" for name in (*op.visible, *op.edges)]
    batched = [f"({d} is not None and _is_legacy_batched({d}))" for d in upstream]
    none = tuple_of(["None"] * len(op.fwd.params))
    return f"def backward(ctx, {', '.join(upstream)}):\n" + block(
        f"if {' and '.join(f'{d} is None' for d in upstream)}:",
        f"    return {none}",
        "_saved, _config = ctx.saved_tensors, _current()",
        "if (",
        f"    _grad_enabled() or {COMPILING} or ctx.configuration is not _config or",
        f"    {' or '.join(batched)}",
        "):",
        f"    return _slow_path(ctx, {tuple_of(upstream)}, _saved)",
        f"return _gradients(ctx, {tuple_of(upstream)}, _saved, _config)",
    )


def gradients_source(
    op: Op, origins: list[tuple[str, str]], saved: list[str], plain: list[str]
) -> str:
    """Code of one gradient or None for every argument of forward.

    Args:
        op: The operator.
        origins: Where every argument of backward comes from, and under which name.
        saved: Names of the tensors that backward reads.
        plain: Names of the other arguments, and ``x_dtype`` for a dtype.
    """
    params = op.fwd.params
    ups = {name: f"_up{i}" for i, name in enumerate((*op.visible, *op.edges))}
    tensors = {name: f"_saved{i}" for i, name in enumerate(saved)}
    values = {name: f"_value{i}" for i, name in enumerate(plain)}
    flags = {name: f"_needs[{params.index(name)}]" for name in params}
    by_origin = {"grad": ups, "tensor": tensors, "value": values, "flag": flags}
    by_origin["dtype"] = {name: values.get(f"{name}_dtype", "") for name in params}
    backward_args = ", ".join(by_origin[origin][name] for origin, name in origins)
    lines = [f"{tuple_of(ups.values())} = ups"]
    lines += [f"{tuple_of(tensors.values())} = saved"] * bool(tensors)
    lines += [f"{tuple_of(values.values())} = ctx.plain"] * bool(values)
    lines += ["_needs = ctx.needs_input_grad"]
    if op.inplace:
        buffer = tensors[op.inplace]
        results = [f"{buffer}.detach()" if name == op.inplace else "None" for name in params]
        lines += [f"_run_backward(config, {backward_args})", f"_increment_version({buffer})"]
        lines += [f"return {tuple_of(results)}"]
        return "def gradients(ctx, ups, saved, config):\n" + block(*lines)
    grads = {name: f"_{name}" for name in op.bwd.returns}
    lines += [f"{', '.join(grads.values())} = _run_backward(config, {backward_args})"]
    smooth = [ups[n] for n in op.visible if n not in op.non_differentiable]
    if len(ups) > 1 and smooth:  # an input that no upstream gradient reaches has an empty gradient
        lines += [f"if {' or '.join(f'{d} is None' for d in smooth)}:"]
        lines += [f"    {g} = None if {g}.shape == (0,) else {g}" for g in grads.values()]
    results = []
    for name in params:
        owner = op.same_grad_as.get(name, name)
        g = ups[op.identity_grads[name]] if name in op.identity_grads else grads.get(f"d{owner}")
        if g is None:
            results.append("None")
            continue
        test = flags[name]
        if owner != name or name in op.same_grad_as.values():
            test += f" and {g} is not None"
            g += f".to({values[f'{name}_dtype']})"
        results.append(f"{g} if {test} else None")
    lines += [f"return {tuple_of(results)}"]
    return "def gradients(ctx, ups, saved, config):\n" + block(*lines)


# --- all of it ---


@dataclass(frozen=True)
class JoiningCode:
    """Code of an operator's ``autograd.Function``: forward, backward, and what that calls."""

    forward: str
    backward: str
    gradients: str


def joining_code(op: Op, origins: list[tuple[str, str]]) -> JoiningCode:
    """The code that joins forward and backward.

    Args:
        op: The operator.
        origins: Where every argument of backward comes from, and under which name.
    """
    names: dict[str, list[str]] = {"dtype": [], "value": [], "tensor": []}
    for origin, name in dict.fromkeys(origins):
        names.setdefault(origin, []).append(name)
    same_dtype_inputs = {*op.same_grad_as, *op.same_grad_as.values()}
    dtypes = [n for n in op.fwd.params if n in same_dtype_inputs or n in names["dtype"]]
    plain = [*names["value"], *(f"{n}_dtype" for n in dtypes)]
    saved = names["tensor"]
    not_saved = list(inspect.signature(op.not_saved).parameters) if op.not_saved else None
    return JoiningCode(
        forward_source(op, saved, plain, not_saved),
        backward_source(op),
        gradients_source(op, origins, saved, plain),
    )
