"""Configuration, the choice of a backend, autograd, and DTensors."""

import ast
import concurrent.futures
import contextlib
import copy
import functools
import inspect
import logging
import multiprocessing
import pickle
import sys
import textwrap
import threading
import types

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import liger_multi
from liger_multi import errors, ops
from liger_multi.dispatch import autograd, codegen, registry, resolve
from liger_multi.dispatch.backend import Backend
from liger_multi.dispatch.config import configure, current, forget
from liger_multi.dispatch.op import OPS, Op
from liger_multi.dispatch.registry import operators
from liger_multi.dispatch.resolve import plan_for
from liger_multi.dispatch.torch_ops import Primitive
from liger_multi.testing import samples
from liger_multi.testing.checks import grads, outputs
from liger_multi.testing.samples import of
from liger_multi.testing.tolerance import excess
from tests.comparing import recorded


def chosen(op="rms_norm", direction="forward", device="cpu"):
    return liger_multi.explain(op, device).chosen(op, direction)


# --- configuration ---


def test_auto_on_a_cpu_is_the_reference():
    assert chosen() == "reference"


def test_precedence(tmp_path, monkeypatch):
    file = tmp_path / "config.yaml"
    file.write_text("ops: {rms_norm: [reference], swiglu: [reference]}\nchunk_bytes: 3MiB\n")
    monkeypatch.setenv("LIGER_MULTI_CONFIG", str(file))
    configure(None)
    assert current().choice_in("rms_norm", ("cpu", "")).source == str(file)
    assert current().chunk_bytes == 3 * 2**20
    configure({"ops": {"rms_norm": "reference"}})
    assert current().choice_in("rms_norm", ("cpu", "")).source == "configure()"
    assert current().choice_in("swiglu", ("cpu", "")).source == str(file)
    with liger_multi.use(rms_norm="reference"):
        assert current().choice_in("rms_norm", ("cpu", "")).source == "use()"
    assert current().choice_in("rms_norm", ("cpu", "")).source == "configure()"


def test_globs_devices_and_defaults():
    configure(
        {
            "default": ["reference"],
            "ops": {"fused_linear_*": ["triton", "reference"], "rms_norm": ["reference"]},
            "devices": {"cuda": {"ops": {"rms_norm": ["triton", "reference"]}}},
        }
    )
    choose = lambda op, device: current().choice_in(op, (device, "")).order  # noqa: E731
    assert choose("fused_linear_cross_entropy", "cpu") == ("triton", "reference")
    assert choose("rms_norm", "cpu") == ("reference",)
    assert choose("rms_norm", "cuda") == ("triton", "reference")
    assert choose("swiglu", "cpu") == ("reference",)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"ops": {"rms_nrom": "reference"}}, "did you mean 'rms_norm'"),
        ({"ops": {"no_such_*": "reference"}}, "unknown operator"),
        ({"ops": {"rms_norm": "refrence"}}, "did you mean 'reference'"),
        ({"opps": {}}, "did you mean 'ops'"),
        ({"ops": {"rms_norm": 3}}, "got 3"),
        ({"ops": {"rms_norm": []}}, "got \\[\\]"),
        ({"ops": ["rms_norm"]}, "must be a mapping of operator names"),
        ({"devices": {"cuda": {"op": {}}}}, "did you mean 'ops'"),
        ({"ops": {"rms_norm": ["auto", "reference"]}}, "mixes 'auto'"),
        ({"chunk_bytes": "many"}, "got 'many'"),
    ],
)
def test_invalid_configurations(content, message):
    configure({"ops": {"rms_norm": "reference"}})
    before = current()
    with pytest.raises(errors.ConfigurationError, match=message):
        configure(content)
    assert current() is before


# --- choice ---


PINNED = {
    "npu": (torch.float32, "needs torch_npu", {}),
    "triton": (torch.float32, r"only under its interpreter \(TRITON_INTERPRET=1\)", {}),
    "triton, interpreted": (
        torch.float64,
        "and bfloat16, not float64",
        {"TRITON_INTERPRET": "1"},
    ),
}


@pytest.mark.parametrize("case", PINNED)
def test_a_pinned_backend_that_cannot_run_says_why(case, monkeypatch):
    dtype, reason, environment = PINNED[case]
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    x, name = torch.randn(2, 4, dtype=dtype), case.partition(",")[0]
    error = pytest.raises(errors.BackendUnavailableError, match=reason)
    with liger_multi.use(swiglu=name), error:
        ops.swiglu(x, x)
    with liger_multi.use(swiglu=[name, "reference"]):
        assert ops.swiglu(x, x).shape == x.shape


def test_unknown_devices_get_the_reference(monkeypatch):
    for device in ("meta", "mps", "xpu"):
        with monkeypatch.context() as patched:
            accelerator = functools.partial(lambda place, **_: place, torch.device(device))
            patched.setattr(torch.accelerator, "current_accelerator", accelerator)
            patched.setattr(torch.accelerator, "device_count", lambda: 1)
            assert chosen(device=device) == "reference"
    y = ops.rms_norm(torch.empty(3, 8, device="meta"), torch.empty(8, device="meta"))
    assert (y.device.type, y.shape) == ("meta", (3, 8))
    loss = ops.fused_linear_cross_entropy(
        torch.empty(4, 8, device="meta"),
        torch.empty(9, 8, device="meta"),
        torch.empty(4, dtype=torch.long, device="meta"),
    )
    assert loss.device.type == "meta"


def test_explain_names_every_backend_with_a_reason():
    report = liger_multi.explain("rms_norm", "cpu")
    assert {r.backend for r in report.rows} >= {"reference", "triton", "cuda", "rocm", "npu"}
    assert all(r.chosen or r.reason for r in report.rows)
    assert "needs torch_npu" in str(report)


@pytest.fixture
def plugin(monkeypatch):
    """A backend from outside the tree, with forward of rms_norm only, that refuses wide rows."""
    from liger_multi.reference.norms import rms_norm as reference

    calls = []
    package, module = types.ModuleType("toy_backend"), types.ModuleType("toy_backend.rms_norm")
    package.BACKEND, package.__path__ = Backend("toy", device_type="cpu"), []
    source = textwrap.dedent(
        """
        from typing import Optional
        from torch import Tensor

        def forward(
            x: Tensor, weight: Optional[Tensor], eps: float, offset: float, casting: str
        ) -> tuple[Tensor, Tensor]:
            calls.append("forward")
            return reference.forward(x, weight, eps, offset, casting)

        def supports(x):
            return f"takes rows up to 16, got {x.shape[-1]}" if x.shape[-1] > 16 else None
        """
    )
    module.calls, module.reference = calls, reference
    exec(source, vars(module))  # one namespace: Python 3.14 evaluates annotations later
    point = types.SimpleNamespace(name="toy", value="toy_backend")
    monkeypatch.setitem(sys.modules, "toy_backend", package)
    monkeypatch.setitem(sys.modules, "toy_backend.rms_norm", module)
    module.__spec__ = types.SimpleNamespace(
        name="toy_backend.rms_norm", submodule_search_locations=None
    )
    monkeypatch.setattr(registry.importlib.metadata, "entry_points", lambda group: [point])
    cached = (
        registry.packages,
        registry.backends,
        registry.unavailable,
        registry.module,
        resolve._implementation,
    )
    for function in cached:
        function.cache_clear()
    forget()
    yield calls
    monkeypatch.undo()
    for function in cached:
        function.cache_clear()
    forget()


def test_entry_point_backend_with_one_direction(plugin, caplog):
    ops.rms_norm(torch.randn(3, 8, requires_grad=True)).sum().backward()
    assert plugin == ["forward"]
    wide = torch.randn(3, 32)
    with caplog.at_level(logging.WARNING, "liger_multi"):
        ops.rms_norm(wide)
        ops.rms_norm(wide)
    assert plugin == ["forward"]
    messages = [
        r.getMessage() for r in caplog.records if "takes rows up to 16, got 32" in r.getMessage()
    ]
    assert len(messages) == 1, "a fall to the reference is said once"
    with (
        liger_multi.use(rms_norm="toy"),
        pytest.raises(errors.BackendUnavailableError, match="got 32"),
    ):
        ops.rms_norm(wide)


def wrong_signature(x: torch.Tensor, eps: float) -> torch.Tensor:
    return x


def unknown_argument(half: str) -> str | None:
    return "never"


@pytest.mark.parametrize(
    ("name", "function", "message"),
    [
        ("forward", wrong_signature, "its contract is"),
        # it would never be called, and the backend would run what it does not support
        ("supports", unknown_argument, "unknown argument of .*unknown_argument 'half'"),
    ],
)
def test_functions_that_break_the_contract_are_refused(plugin, name, function, message):
    setattr(sys.modules["toy_backend.rms_norm"], name, function)
    with pytest.raises(errors.ContractError, match=message):
        ops.rms_norm(torch.randn(3, 8))


@pytest.mark.parametrize(
    ("op", "files", "module_name"),
    [
        ("rms_norm", {"rms_norm/__init__.py": "forward = 1\n"}, "rms_norm"),
        (
            "rms_norm",
            {"norms/__init__.py": "", "norms/rms_norm.py": "", "rms_norm.py": ""},
            "norms.rms_norm",
        ),
        ("rms_norm", {"norms/__init__.py": "", "rms_norm.py": "backward = 1\n"}, None),
        ("attention", {"attention/__init__.py": ""}, None),
        ("attention", {"attention.py": "forward = 1\n"}, "attention"),
        ("neighborhood_attention", {"attention.py": "import absent_package\n"}, None),
        (
            "neighborhood_attention",
            {"attention/__init__.py": "", "attention/attention.py": "import absent_package\n"},
            None,
        ),
    ],
)
def test_module_paths_of_operators(op, files, module_name, tmp_path, monkeypatch):
    """In a family or without one, as a file or as a folder; other modules stay unloaded."""
    for name, text in {"__init__.py": "", **files}.items():
        file = tmp_path / "placed_backend" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "packages", lambda: {"placed": "placed_backend"})
    try:
        module = registry.module.__wrapped__("placed", op)
        assert getattr(module, "__name__", None) == (
            module_name and f"placed_backend.{module_name}"
        )
    finally:
        for name in [n for n in sys.modules if n.partition(".")[0] == "placed_backend"]:
            del sys.modules[name]


def test_an_exception_inside_a_kernel_propagates(plugin):
    def forward(
        x: torch.Tensor, weight: torch.Tensor | None, eps: float, offset: float, casting: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        raise ZeroDivisionError("inside")

    sys.modules["toy_backend.rms_norm"].forward = forward
    with pytest.raises(ZeroDivisionError, match="inside"):
        ops.rms_norm(torch.randn(3, 8))


# --- autograd ---


def test_backward_uses_the_configuration_of_its_forward(monkeypatch):
    source = lambda: (current().choice_in("rms_norm", ("cpu", "")).source, resolve.mode_in_force())  # noqa: E731
    # of the class: monkeypatch would leave the bound method on an instance, past all recorders
    observed = recorded(
        monkeypatch, Primitive, "call", lambda prim, *_: (prim.op.name, prim.direction, *source())
    )
    x = torch.randn(3, 8, requires_grad=True)
    with liger_multi.use(rms_norm="reference", deterministic="rows"):
        y = ops.rms_norm(x)
    y.sum().backward()
    assert observed == [("rms_norm", way, "use()", "rows") for way in ("forward", "backward")]


class Nested(torch.autograd.Function):
    """A backward in a backward, ``depth`` times: autograd then takes a thread of its own."""

    @staticmethod
    def forward(ctx, x, depth, observed):
        ctx.depth, ctx.observed = depth, observed
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        if ctx.depth:
            with torch.enable_grad():
                inner = Nested.apply(grad.detach().requires_grad_(), ctx.depth - 1, ctx.observed)
                inner.sum().backward()
        else:
            source = current().choice_in("rms_norm", ("cpu", "")).source
            ctx.observed.append((threading.get_ident(), source))
        return grad, None, None


def sources_in_threads():
    """Whether a backward ran in this thread, and its configuration, in a scope and outside."""
    observed, x = [], torch.ones(1, requires_grad=True)
    y = Nested.apply(x, 100, observed)
    with liger_multi.use(rms_norm="reference"):
        y.sum().backward()
    Nested.apply(x, 100, observed).sum().backward()
    return [(thread == threading.get_ident(), source) for thread, source in observed]


@pytest.mark.slow
def test_scope_in_autograd_threads():
    """As the backward of a compiled forward does on a device.

    In another process: where autograd has started a thread, no later fork can differentiate.
    """
    fresh = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, fresh) as pool:
        sources = pool.submit(sources_in_threads).result()
    assert sources == [(False, "use()"), (False, "default")]


def test_configuration_change_recompiles():
    compiled = torch.compile(lambda x: ops.rms_norm(x), backend="aot_eager", fullgraph=True)
    x = torch.randn(3, 8)
    compiled(x)
    configure({"ops": {"rms_norm": "npu"}})
    with pytest.raises(errors.BackendUnavailableError, match="needs torch_npu"):
        compiled(x)


def test_inplace_refuses_leaves_and_strides():
    t = torch.randint(8, (4,))
    with pytest.raises(ValueError, match="must come from an operation, got a leaf"):
        ops.cross_entropy(torch.randn(4, 8, requires_grad=True), t, inplace=True)
    wide = torch.randn(2, 3, 8, requires_grad=True) * 1
    with pytest.raises(ValueError, match="can be viewed as"):
        ops.cross_entropy(wide.transpose(0, 1), torch.randint(8, (3, 2)), inplace=True)


def test_functorch_transform_error():
    with pytest.raises(errors.TransformError, match="does not support functorch transforms"):
        torch.func.grad(lambda x: ops.rms_norm(x).sum())(torch.randn(3, 8))
    x = torch.randn(3, 8, requires_grad=True)
    with pytest.raises(errors.TransformError, match="does not support functorch transforms"):
        torch.autograd.grad(ops.rms_norm(x), x, torch.randn(5, 3, 8), is_grads_batched=True)
    with pytest.raises(errors.TransformError, match="vmap"):
        torch.func.vmap(lambda x: ops.rms_norm(x))(torch.randn(3, 2, 8))


@pytest.mark.parametrize("trained", [False, True])
def test_a_tangent_is_not_lost(trained):
    """Kernels have no forward-mode derivative; a missing tangent would read as zero."""
    x = torch.randn(3, 8).requires_grad_(trained)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones(3, 8))
        with pytest.raises(errors.TransformError, match="forward-mode derivatives"):
            ops.rms_norm(dual)
        with pytest.raises(errors.TransformError, match="forward-mode derivatives"):
            ops.rms_norm(torch.randn(3, 8), dual[0])
        assert ops.rms_norm(x).requires_grad is trained


@pytest.mark.parametrize("profiled", [False, True])
def test_backends_get_resolved_negations(monkeypatch, profiled):
    """Kernels read memory. The imaginary part of a conjugate is a view with a bit for the sign."""
    x = torch.view_as_complex(torch.randn(3, 8, 2)).conj().imag.requires_grad_()
    op, observed = OPS["rms_norm"], []

    def noted(run, *args):
        observed.extend(a.is_neg() for a in args if isinstance(a, torch.Tensor))
        return run(*args)

    for prim in op.primitives:
        plan = plan_for(prim, x)
        monkeypatch.setattr(plan, "direct", functools.partial(noted, plan.direct))
    with torch.profiler.profile() if profiled else contextlib.nullcontext():
        y = ops.rms_norm(x)
        z = torch.complex(torch.zeros_like(y), y).conj()
        z.imag.square().sum().backward()
    assert x.is_neg()
    assert len(observed) == 4
    assert not any(observed)
    other = x.detach().clone().requires_grad_()
    ops.rms_norm(other).square().sum().backward()
    assert torch.equal(x.grad, other.grad)


def test_no_function_where_nothing_needs_a_gradient(monkeypatch):
    def never(*args):
        raise AssertionError("a graph node for nobody")

    op = OPS["rms_norm"]
    names = {"slow_path": op.slow_path, "apply": never, "forward": op.fwd.run}
    watched = codegen.compiled(codegen.call_source(op), "rms_norm call, watched", names)
    monkeypatch.setattr(op, "run", watched)
    x = torch.randn(3, 8, requires_grad=True)
    with pytest.raises(AssertionError, match="for nobody"):
        ops.rms_norm(x)
    with torch.no_grad():
        assert ops.rms_norm(x).grad_fn is None
    assert ops.rms_norm(x.detach()).grad_fn is None


def test_generated_source_in_docstring():
    _, _, shown = codegen.__doc__.partition("is::")
    runs = inspect.getsource(OPS["rms_norm"].run)
    parts = [ast.dump(ast.parse(textwrap.dedent(code))) for code in (shown, runs)]
    assert parts[0] == parts[1]


@pytest.mark.skipif(
    not hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks"),
    reason="this PyTorch cannot be asked whether it checkpoints (liger_multi.checks.in_checkpoint)",
)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_checkpointing_skips_last_gemm(activation):
    """It stops once it has the input of ``down``, which a single operator would hide."""
    from torch.utils.flop_counter import FlopCounterMode

    x, *weights = torch.randn(3, 4, 8), torch.randn(6, 8), torch.randn(6, 8), torch.randn(5, 6)
    weights = [w.requires_grad_() for w in (x, *weights)]
    mlp = lambda *w: ops.gated_mlp(*w, activation=activation)  # noqa: E731
    expected = torch.autograd.grad(mlp(*weights).pow(2).sum(), weights)
    counter = FlopCounterMode(display=False)
    with counter:
        output = checkpoint(mlp, *weights, use_reentrant=False)
        gradients = torch.autograd.grad(output.pow(2).sum(), weights)
    product, last = 2 * 12 * 8 * 6, 2 * 12 * 6 * 5
    assert counter.get_total_flops() == (2 + 2 + 4) * product + (1 + 2) * last
    torch.testing.assert_close([*expected], [*gradients])


def test_selective_checkpointing_operator_names():
    from torch.utils.checkpoint import (
        CheckpointPolicy,
        checkpoint,
        create_selective_checkpoint_contexts,
    )

    observed = []

    def policy(ctx, op, *args, **kwargs):
        observed.append(str(op))
        return (
            CheckpointPolicy.MUST_SAVE
            if "liger_multi" in str(op)
            else CheckpointPolicy.PREFER_RECOMPUTE
        )

    x, w = torch.randn(5, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    context = lambda: create_selective_checkpoint_contexts(policy)  # noqa: E731
    y = checkpoint(lambda a: ops.rms_norm(a, w), x, use_reentrant=False, context_fn=context)
    torch.testing.assert_close(
        torch.autograd.grad(y.sum(), x), torch.autograd.grad(ops.rms_norm(x, w).sum(), x)
    )
    assert "liger_multi.rms_norm_forward.default" in observed


def test_profilers_see_named_operators():
    with torch.profiler.profile() as profile:
        ops.rms_norm(torch.randn(3, 8))
    assert any("liger_multi::rms_norm_forward" in e.key for e in profile.key_averages())


def test_autocast_of_fused_linear_loss_and_norms():
    x, w = torch.randn(6, 16, requires_grad=True), torch.randn(11, 16, requires_grad=True)
    t = torch.randint(11, (6,))
    with torch.autocast("cpu", torch.bfloat16):
        stock = torch.nn.functional.cross_entropy((x @ w.t()).float(), t)
        ours = ops.fused_linear_cross_entropy(x, w, t)
        assert ops.rms_norm(x).dtype == torch.float32
    torch.testing.assert_close(ours, stock, rtol=1e-4, atol=1e-4)
    assert not torch.equal(ours, ops.fused_linear_cross_entropy(x, w, t)), (
        "autocast changed nothing"
    )
    grads = torch.autograd.grad(ours, (x, w))
    for a, b in zip(grads, torch.autograd.grad(stock, (x, w)), strict=True):
        assert a.dtype == torch.float32
        assert excess(a, b, torch.bfloat16) <= 1
    with torch.autocast(
        "cpu", torch.bfloat16
    ):  # mixed inputs, as an adapter's fp32 hidden states over a bf16 head
        ops.fused_linear_cross_entropy(x, w.bfloat16(), t).backward()


def test_contract_mistakes_are_found_when_declared():
    op = Op("toy_contract")
    try:

        @op.forward(returns="y")
        def forward(x: torch.Tensor) -> torch.Tensor:
            return x

        with pytest.raises(
            errors.ContractError, match="'mean' is no gradient, input, output or flag"
        ):
            op.backward(reads="dy mean", returns="dx")
        with pytest.raises(errors.ContractError, match="'dmean', which is no gradient of an input"):
            op.backward(reads="dy x", returns="dmean")
    finally:
        del OPS["toy_contract"]


def test_results_pickle_and_copy():
    out = ops.cross_entropy_with_outputs(
        torch.randn(4, 8), torch.randint(8, (4,)), outputs=("lse",)
    )
    assert torch.equal(pickle.loads(pickle.dumps(out)).lse, copy.deepcopy(out).lse)


# --- DTensors ---


@pytest.fixture
def mesh(one_process):
    """A mesh of this process alone."""
    return torch.distributed.device_mesh.init_device_mesh("cpu", (1,))


@pytest.mark.parametrize("op", ["hyper_connections", "hyper_connections_pre", "layer_norm"])
def test_outputs_with_rows_are_sharded(mesh, op):
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    sample = next(s for s in of(op) if s.size == "small")
    tensors = sample.make(torch.device("cpu"), torch.float32)
    placements = {n: Shard(0) if n in OPS[op].bitwise.batched else Replicate() for n in tensors}
    sharded = {n: distribute_tensor(t, mesh, [placements[n]]) for n, t in tensors.items()}
    result = getattr(ops, op)(**sharded, **sample.options)
    outputs = result if isinstance(result, tuple) else (result,)
    assert [y.placements for y in outputs] == [(Shard(0),)] * len(outputs)


# The generated call path of every operator has the results of the slow path.


GENERATED = ("run", "run_configured", "function", "apply")


def fail(*args):
    raise AssertionError("a plain call takes the slow path")


@pytest.fixture
def owners(op):
    """An operator, its forward and its backward, whose code the test replaces."""
    parts = (OPS[op], *OPS[op].primitives)
    before = [dict(vars(part)) for part in parts]
    yield parts
    for part, attributes in zip(parts, before, strict=True):
        vars(part).clear()
        vars(part).update(attributes)


def forget_parts(parts):
    """Drop generated code; the next call writes it again."""
    for part in parts:
        for name in GENERATED:
            vars(part).pop(name, None)


def run(op, sample, tensors):
    """The operator, in the configuration in force."""
    args = dict(tensors)
    if sample.options.get("inplace"):  # what is overwritten must come from an operation
        args[OPS[op].inplace] = args[OPS[op].inplace] * 1
    return outputs(samples.call(op, **args, **sample.options))


def results(op, sample, device, **choice):
    """Every output and gradient; ``choice`` configures forward, but not backward."""
    tensors = sample.make(device, torch.float32)
    with liger_multi.use(**choice) if choice else contextlib.nullcontext():
        smooth, other = run(op, sample, tensors)
    values = {**other, **{n: y.detach().clone() for n, y in smooth.items()}}
    with torch.no_grad():
        alone, _ = run(op, sample, sample.make(device, torch.float32))
    values |= {f"{n} without autograd": y for n, y in alone.items()}
    upstream = {n: torch.linspace(-1, 1, y.numel()).to(y).view_as(y) for n, y in smooth.items()}
    gradients = grads(smooth, tensors, upstream)
    return values | {f"gradient of {n}": g for n, g in gradients.items()}


@pytest.mark.parametrize("op", operators())
def test_generated_code_equals_slow_path(op, owners, device, monkeypatch):
    contract, *directions = owners
    sample = next(s for s in samples.of(op) if s.size == "small")
    results(op, sample, device)  # the first call on a device chooses backends, on the slow path
    with monkeypatch.context() as patch:
        forget_parts(owners)
        for part in owners:
            patch.setattr(part, "slow_path", fail)
        patch.setattr(autograd, "backward_slow_path", fail)
        generated = results(op, sample, device)
    forget_parts(owners)
    contract.run = contract.slow_path
    for prim in directions:
        prim.run = prim.slow_path
        prim.run_configured = lambda _, *args, prim=prim: prim.slow_path(*args)
    slow = results(op, sample, device, default="auto")  # of another configuration than backward
    torch.testing.assert_close(generated, slow, rtol=0, atol=0, equal_nan=True)
