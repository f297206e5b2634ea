"""One operator of one backend against its formula in fp64, without pytest.

Inputs are drawn in the dtype under test, so that both sides start from the same rounded numbers.
Outputs and gradients are compared with the tolerances of :mod:`liger_multi.testing.tolerance`.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from liger_multi import ops
from liger_multi._torch_private import tensor_constructors
from liger_multi.dispatch.bitwise import as_tuple
from liger_multi.dispatch.config import use
from liger_multi.dispatch.op import OPS
from liger_multi.dispatch.registry import REFERENCE, backends, chain, module, operators, unavailable
from liger_multi.dispatch.torch_ops import Primitive
from liger_multi.errors import BackendUnavailableError, check_name
from liger_multi.testing import samples
from liger_multi.testing.samples import Sample, declared
from liger_multi.testing.tolerance import excess

# --- memory that shows when it is read unwritten, and when a kernel leaves its tensors ---

# Uninitialized memory holds NaN. Inputs stand between guards of the same values: what reads past
# the end of a tensor meets NaN, or an index that no tensor has, and what writes there is found.

GUARD_BYTES = 4096
"""Of each guard: tensors keep the alignment that PyTorch gives them."""

_EMPTY: dict[Any, tuple[str, ...]] = {
    torch: ("empty", "empty_like", "empty_strided", "empty_permuted"),
    torch.Tensor: ("new_empty", "new_empty_strided"),
}


def poison_value(dtype: torch.dtype) -> float | int | bool | None:
    """What uninitialized memory of a dtype holds under test: NaN, the largest integer, or True."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    if dtype is torch.bool:
        return True
    try:
        return torch.iinfo(dtype).max
    except TypeError:
        return None  # quantized and sub-byte dtypes cannot be filled


def _poisoned(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def empty(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = original(*args, **kwargs)
        value = poison_value(tensor.dtype)
        if value is not None and tensor.numel():
            with torch.no_grad():
                tensor.fill_(value)
        return tensor

    empty.__name__ = original.__name__
    empty.__wrapped__ = original  # type: ignore[attr-defined]
    return empty


def poison_empty() -> None:
    """Fill whatever the ``empty`` family returns, for the rest of the process; idempotent."""
    # cached there: contexts such as torch.device("meta") know the functions that are replaced here
    constructors = tensor_constructors()
    if constructors is not None:
        constructors()
    for owner, names in _EMPTY.items():
        for name in names:
            original = getattr(owner, name)
            if not hasattr(original, "__wrapped__"):
                setattr(owner, name, _poisoned(original))


def guarded(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides between two guards of :func:`poison_value`."""
    spans = zip(tensor.shape, tensor.stride(), strict=True)
    extent = 1 + sum((size - 1) * stride for size, stride in spans) if tensor.numel() else 0
    value, pad = poison_value(tensor.dtype), GUARD_BYTES // tensor.element_size()
    if value is None:
        return tensor
    memory = torch.full((extent + 2 * pad,), value, dtype=tensor.dtype, device=tensor.device)
    source = tensor.detach().as_strided((extent,), (1,)) if extent else tensor.detach().view(-1)
    memory[pad : pad + extent] = source
    copy = memory.as_strided(tensor.shape, tensor.stride(), pad)
    return copy.requires_grad_(tensor.requires_grad)


def overwritten(tensor: torch.Tensor) -> bool:
    """Whether a guard of :func:`guarded` has changed."""
    value, pad = poison_value(tensor.dtype), tensor.storage_offset()
    if value is None or not pad:
        return False
    count = tensor.untyped_storage().nbytes() // tensor.element_size()
    memory = tensor.detach().as_strided((count,), (1,), 0)
    extent = memory.numel() - 2 * pad
    guards = torch.cat([memory[:pad], memory[pad + extent :]])
    return not bool((guards.isnan() if guards.is_floating_point() else guards == value).all())


# --- the plain PyTorch formula of every operator ---

# A formula takes the parts of adapters by name, as samples have them.

Formula = Callable[..., Any]

FORMULAS: dict[str, Formula] = {op: declared(op, "formula") for op in operators()}
"""Formulas by operator; forms that an option chooses have the formula of the public function."""


# --- where a backend can be tested ---


def interpreted() -> bool:
    """Whether Triton kernels run on CPU tensors in this process."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def accelerator() -> torch.device | None:
    """The device type of this machine's accelerator, or None; touches no driver context."""
    if not torch.accelerator.is_available():
        return None
    return torch.device(torch.accelerator.current_accelerator())  # type: ignore[arg-type]


def device_of(backend: str) -> torch.device | None:
    """Where a backend's tests put their tensors, or None if this machine has no such device.

    The reference stands on the CPU; a suite may put it on the device of another backend.
    """
    if backend == REFERENCE:
        return torch.device("cpu")
    device_type = backends()[backend].device_type
    if device_type is None:
        return torch.device("cpu") if interpreted() else accelerator()
    if device_type == "cpu":
        return torch.device(device_type)
    device = accelerator()
    return torch.device(device_type) if device is not None and device.type == device_type else None


def refusal(backend: str) -> str | None:
    """Why a backend cannot be tested on this machine, or None."""
    reason = unavailable(backend)
    if reason is None and device_of(backend) is None:
        reason = "this machine has no device for it (kernels on a CPU need TRITON_INTERPRET=1)"
    return reason


# --- against the formula ---

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
Named = Mapping[str, Tensor]
Order = str | Sequence[str]
"""A backend, or backends in the order in which they are asked."""


class WrongResultError(AssertionError):
    """A result that differs from the formula by more than the tolerance.

    Attributes:
        worst: The largest error in units of the tolerance.
    """

    def __init__(self, message: str, worst: float) -> None:
        super().__init__(message)
        self.worst = worst


def inputs(sample: Sample, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors of a sample between guards (:func:`poison_empty`)."""
    return {name: guarded(t) for name, t in sample.make(device, dtype).items()}


@contextlib.contextmanager
def by_the_rules() -> Iterator[None]:
    """Compare shape and dtype of what backends return with the operator's rule, within a block.

    Autograd would cast a gradient of another dtype without a word.

    Raises:
        AssertionError: They differ; the message names the output.
    """
    original = Primitive.call

    def call_and_compare(prim: Primitive, *args: Any) -> Any:
        result = original(prim, *args)
        meta = [a.detach().to("meta") if isinstance(a, Tensor) else a for a in args]
        for name, output, rule in zip(
            prim.returns, as_tuple(result), as_tuple(prim.fake(*meta)), strict=True
        ):
            agrees = (output.dtype, output.shape) == (rule.dtype, rule.shape)
            actual, expected = (f"{t.dtype} {tuple(t.shape)}" for t in (output, rule))
            call_name = f"{prim.op.name}.{prim.direction}"
            message = f"{call_name} returns {name} as {actual}, not {expected}"
            _require(agrees or not rule.numel(), message)
        return result

    with mock.patch.object(Primitive, "call", call_and_compare):
        yield


def call(op: str, tensors: Named, options: Mapping[str, Any], **order: Order) -> Any:
    """Run the public operator; what it may overwrite comes from an operation, as it must."""
    arguments = dict(tensors)
    if options.get("inplace"):
        overwritten: Any = OPS[op].inplace
        arguments[overwritten] = arguments[overwritten] * 1
    with use(**order):  # type: ignore[arg-type]
        return samples.call(op, **arguments, **options)


def outputs(result: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What a call returned by name: outputs that have gradients, and the others."""
    if isinstance(result, Tensor):
        return {"result": result}, {}
    names = getattr(result, "_fields", None) or [f"output{i}" for i in range(len(result))]
    pairs = {n: t for n, t in zip(names, result, strict=True) if isinstance(t, Tensor)}
    if "loss" in pairs:  # of a loss, nothing else is differentiable
        return {"result": pairs.pop("loss")}, pairs
    smooth = {n: t for n, t in pairs.items() if t.is_floating_point()}
    return smooth, {n: t for n, t in pairs.items() if n not in smooth}


def grads(
    result: Named, tensors: Named, upstream: Mapping[str, Tensor | None], retain_graph: bool = False
) -> dict[str, Tensor | None]:
    """Gradients of the outputs for one upstream gradient each; None leaves an output unused."""
    leaves = {n: t for n, t in tensors.items() if t.requires_grad}
    grad_outputs = {
        n: up for n, up in upstream.items() if up is not None and result[n].requires_grad
    }
    if not leaves or not grad_outputs:
        return {}
    gradients = torch.autograd.grad(
        [result[n] for n in grad_outputs],
        list(leaves.values()),
        [up.to(result[n]) for n, up in grad_outputs.items()],
        retain_graph=retain_graph,
        allow_unused=True,
    )
    return dict(zip(leaves, gradients, strict=True))


@dataclass(frozen=True)
class Exact:
    """What the formula gives in fp64 for one sample.

    Attributes:
        result: Outputs that have gradients.
        others: The other outputs.
        upstream: The upstream gradient of every output in ``result``, drawn in the dtype of the
            test: an operator that rounds it again must round the same number.
        gradients: From the names of the outputs that are used to the gradients of the inputs.
    """

    result: Named
    others: Named
    upstream: Named
    gradients: Callable[[tuple[str, ...]], Mapping[str, Tensor | None]]


@functools.cache
def reference_device(device: torch.device) -> torch.device:
    """Where formulas run: on the device under test, or on the CPU where that has no fp64."""
    try:
        torch.ones(1, dtype=torch.float64, device=device)
    except (RuntimeError, TypeError):
        return torch.device("cpu")
    return device


@functools.lru_cache(maxsize=8)
def exact(op: str, name: str, dtype: torch.dtype, device: torch.device) -> Exact:
    """Run a formula in fp64 on inputs of one sample that were drawn in ``dtype``."""
    sample = next(s for s in samples.of(op) if s.name == name)
    target, wide = reference_device(device), {}
    for key, t in sample.make(device, dtype).items():
        copied = t.detach().to(target)
        smooth = t.is_floating_point()
        wide[key] = copied.double().requires_grad_(t.requires_grad) if smooth else copied
    result, other_outputs = outputs(FORMULAS[op](**wide, **sample.options))
    generator = torch.Generator().manual_seed(1)
    upstream = {
        n: torch.randn(t.shape, generator=generator, dtype=torch.float64).to(dtype).to(t)
        for n, t in result.items()
    }

    def gradients(used: tuple[str, ...]) -> dict[str, Tensor | None]:
        used_upstream = {n: up if n in used else None for n, up in upstream.items()}
        return grads(result, wide, used_upstream, retain_graph=len(result) > 1)

    if len(result) > 1:
        return Exact(result, other_outputs, upstream, functools.lru_cache(maxsize=4)(gradients))
    right = gradients(tuple(result))  # frees the graph
    detached = {n: t.detach() for n, t in result.items()}
    return Exact(detached, other_outputs, upstream, lambda used_outputs: right)


def _coarser(a: torch.dtype, b: torch.dtype) -> torch.dtype:
    """The dtype with fewer digits: a float32 weight of float64 rows has a float32 gradient."""
    return max(a, b, key=lambda d: torch.finfo(d).eps)


def _require(condition: bool, text: str) -> None:
    """An assertion that ``python -O`` does not remove."""
    if not condition:
        raise AssertionError(text)


def _gradient_errors(
    gradients: Mapping[str, Tensor | None],
    right: Mapping[str, Tensor | None],
    tensors: Named,
    dtype: torch.dtype,
) -> dict[str, float]:
    errors = {}
    for name, grad in gradients.items():
        expected = right.get(name)
        if grad is None:
            _require(expected is None or not expected.any(), f"no gradient of {name}")
            continue
        _require(grad.dtype == tensors[name].dtype, f"the gradient of {name} is {grad.dtype}")
        expected = torch.zeros_like(grad) if expected is None else expected
        errors[f"d{name}"] = excess(grad.to(expected.device), expected, _coarser(dtype, grad.dtype))
    return errors


def _code_errors(op: str, result: Any, tensors: Named, sample: Sample) -> dict[str, float]:
    """Bytes of codes and scales that are not those of the result rounded by itself."""
    codes = getattr(result, "quantized", None)
    if codes is None:
        return {}
    y = result.y
    if y is None:
        y = call(op, tensors, {**sample.options, "outputs": ("y", "quantized")}).y
    y = y.detach()
    with use(linear_float8=REFERENCE):
        layer = ops.linear_float8_with_codes(y, y.new_zeros(1, y.shape[-1]))
    pairs = zip(codes, layer.quantized, strict=True)
    bits = ([t.reshape(-1).view(torch.uint8) for t in pair] for pair in pairs)
    return dict(zip(("codes", "scale"), (float((a != b).sum()) for a, b in bits), strict=True))


def _run_backward_by(op: str, backend: Order, result: Named) -> None:
    """Let another backend run backward: forward recorded the configuration it was called in."""
    node: Any = next((t.grad_fn for t in result.values()), None)
    while node is not None and not hasattr(node, "configuration"):
        node = node.next_functions[0][0] if node.next_functions else None
    if node is not None:
        node.configuration = node.configuration.scoped({op: backend})


def compare(
    op: str,
    sample: Sample,
    dtype: torch.dtype,
    device: torch.device,
    forward: Order,
    backward: Order | None = None,
    used_outputs: tuple[str, ...] | None = None,
) -> dict[str, float]:
    """Compare one call and its gradients with the formula in fp64.

    Args:
        op: Name of the operator.
        sample: Its inputs.
        dtype: Dtype of the inputs whose dtype the sample leaves open.
        device: Where the tensors stand.
        forward: The backend that runs forward.
        backward: The backend that runs backward; that of forward where None.
        used_outputs: Outputs that get an upstream gradient; all where None.

    Returns:
        The errors of outputs and gradients in units of the tolerance.

    Raises:
        AssertionError: An output or gradient is wrong or has another shape or dtype, or an input,
            or memory beside it, was written to. The message has the errors in units of the
            tolerance.
        BackendUnavailableError: A backend refused the call; the message has its reason.
    """
    with by_the_rules():
        return _compared(op, sample, dtype, device, forward, backward, used_outputs)


def _compared(
    op: str,
    sample: Sample,
    dtype: torch.dtype,
    device: torch.device,
    forward: Order,
    backward: Order | None,
    used_outputs: tuple[str, ...] | None,
) -> dict[str, float]:
    """What :func:`compare` does under the rules."""
    right = exact(op, sample.name, dtype, device)
    tensors = inputs(sample, device, dtype)
    originals = {n: t.detach().clone() for n, t in tensors.items()}
    output = call(op, tensors, sample.options, **{op: forward})
    result, other_outputs = outputs(output)
    names_text = f"outputs: {sorted(result)}, {sorted(right.result)}"
    _require(set(result) == set(right.result), names_text)
    _require(set(right.others) <= set(other_outputs), f"beside them: {sorted(other_outputs)}")
    if backward is not None:
        _run_backward_by(op, backward, result)
    errors = _code_errors(op, output, tensors, sample)
    for name, expected in right.result.items():
        actual = result[name].detach().to(expected.device)
        errors[name] = excess(actual, expected.detach(), _coarser(dtype, actual.dtype))
    for name, expected in right.others.items():
        actual = other_outputs[name].to(expected.device)
        _require(not actual.requires_grad, f"{name} requires a gradient")
        smooth = expected.is_floating_point()
        errors[name] = (
            excess(actual, expected, dtype) if smooth else float((actual != expected).sum())
        )
    used_outputs = tuple(right.result) if used_outputs is None else used_outputs
    used_upstream = {n: up if n in used_outputs else None for n, up in right.upstream.items()}
    gradients = grads(result, tensors, used_upstream)
    errors |= _gradient_errors(gradients, right.gradients(used_outputs), tensors, dtype)
    worst = max(errors.values(), default=0.0)
    if not all(error <= 1 for error in errors.values()):  # no NaN is
        raise WrongResultError(f"errors in units of the tolerance: {errors}", worst)
    for name, tensor in tensors.items():
        unchanged = torch.equal(tensor.detach(), originals[name])
        _require(unchanged, f"{name} of the caller was written to")
        _require(not overwritten(tensor), f"memory beside {name} of the caller was written to")
    return errors


# --- what a backend has to be compared in ---


def dtypes_of(sample: Sample, backend: str) -> tuple[torch.dtype, ...]:
    """Dtypes that a sample is compared in; one that reaches a limit, in float32 alone."""
    if sample.size == "thin":
        return DTYPES[:1]
    return DTYPES + ((torch.float64,) if backend == REFERENCE else ())


def has_several_outputs(op: str) -> bool:
    """Whether an operator has more outputs with gradients than one."""
    forward = OPS[op]
    visible = {*forward.fwd.returns} - {*forward.residuals, *forward.non_differentiable}
    return len(visible) > 1 and "loss" not in visible


def implemented(backend: str, op: str) -> tuple[str, ...]:
    """Which of forward and backward a backend has, itself or from a parent."""
    modules = [module(name, op) for name in chain(backend)]
    return tuple(
        p.direction for p in OPS[op].primitives if any(hasattr(m, p.direction) for m in modules)
    )


def runs(backend: str, op: str) -> tuple[str, str]:
    """The backends of forward and of backward: the reference where this one has only the other."""
    has = implemented(backend, op)
    first, second = (
        backend if direction in has else REFERENCE for direction in ("forward", "backward")
    )
    return first, second


@dataclass
class Outcome:
    """What :func:`check_operator` has done.

    Attributes:
        compared: Number of calls that were compared.
        refused: Reasons of the backend by the call that it refused.
    """

    compared: int = 0
    refused: dict[str, str] = field(default_factory=dict)


def check_operator(
    op: str,
    backend: str,
    device: torch.device | str | None = None,
    dtypes: Sequence[torch.dtype] = DTYPES,
    sample: str = "*",
) -> Outcome:
    """Compare one operator of a backend with its formula in fp64, over all samples.

    Args:
        op: Name of the operator, as in ``liger_multi.ops``.
        backend: Name of the backend, in this package or from an entry point.
        device: Where the tensors stand; the backend's own device where None.
        dtypes: Dtypes of the inputs.
        sample: Glob over the names of samples.

    Returns:
        How many calls were compared, and which were refused with which reason.

    Raises:
        ValueError: The operator or backend is unknown, or the backend does not implement it.
        RuntimeError: The backend cannot run on this machine.
        AssertionError: A result, gradient or input is wrong; the message names the sample.
    """
    check_name(ValueError, "operator", op, operators(), "liger-multi explain")
    check_name(ValueError, "backend", backend, backends())
    if not implemented(backend, op):
        raise ValueError(f"{backend} does not implement {op}")
    reason = None if device is not None else refusal(backend)
    target = device_of(backend) if device is None else torch.device(device)
    if reason is not None or target is None:
        raise RuntimeError(f"{backend} cannot run on this machine: {reason}")
    outcome, (first, second) = Outcome(), runs(backend, op)
    for candidate in samples.of(op):
        if candidate.size == "bench" or not fnmatch.fnmatchcase(candidate.name, sample):
            continue
        for dtype in dtypes if candidate.size == "small" else DTYPES[:1]:
            name = f"{op} of {backend}, {candidate.name}, {dtype}"
            try:
                compare(op, candidate, dtype, target, first, second)
            except BackendUnavailableError as refused:
                outcome.refused[name] = str(refused)
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from error
            else:
                outcome.compared += 1
    return outcome
