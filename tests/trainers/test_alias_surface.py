"""Names of liger-kernel: installed and taken away, and what trainers import of it is served."""

import copy
import importlib.metadata
import importlib.util
import inspect
import os
import pickle
import re
import sys
import types
import warnings
from fnmatch import fnmatchcase
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
import yaml

import liger_multi
from liger_multi.compat import liger_kernel as alias
from liger_multi.compat.liger_kernel import finder, functional, helpers, op_functions
from liger_multi.dispatch.config import current
from tests import harness
from tests.trainers import liger_suite

TRAINERS = yaml.safe_load(Path(__file__).with_name("alias_names.yaml").read_text())
SOURCE = os.environ.get("LIGER_KERNEL_SOURCE")

PARTS = "parts of kernels; operators are whole here, and launch tables stand beside ours"
SKIPPED = {
    "ops.backends.*": "sets of operators; backends are chosen by liger_multi.configure",
    "ops.configure*": "buffers of kernels for several hosts, which no operator here has",
    "ops.utils.*": PARTS,
    "ops.*_forward": PARTS,
    "ops.*_backward": PARTS,
    "ops.*_fwd": PARTS,
    "ops.*_bwd": PARTS,
    "ops.*_triton": PARTS,
    "ops.*kernel*": PARTS,
    "ops.mlp.*": PARTS,
    "ops.*.get_num_warps": PARTS,
    "ops.fused_moe*": PARTS,
    "triton.monkey_patch.LigerTritonFileCacheManager": "Triton's own cache is used",
    "ops.experimental.mm_int8int2*": "an experiment, whose own tests are skipped",
    "transformers.moe*": "needs liger_cute_kernels, a package of its own",
    "testing*": "test helpers of the package itself",
}
"""Patterns of names below the package that are not served, with the reason."""

APPLY = "transformers.*apply_liger_kernel_to_"
OTHERWISE = {
    f"{APPLY}*.call: rope=True, not False": "no kernel there, or another form of it; here there is",
    f"{APPLY}gemma4.call: layer_norm=True, not False": "of towers, where there are such norms",
    f"{APPLY}*.call: swiglu=True, not False": "of experts; here they have an operator",
    f"{APPLY}granite.call: cross_entropy=False, not True": "the fused loss is on, which it has not",
    f"{APPLY}granite.call: fused_linear_cross_entropy=True, not False": "as above",
    "chunked_loss.*.chunk_forward: not there": "logits of all rows are never held",
    "chunked_loss.*Function.*_loss_fn: not there": "one operator; the base class takes a loss",
}
"""Patterns of differences on purpose: a name, what of it, and how it differs; with the reason."""


def served(name):
    """What stands under a dotted name; None where nothing does."""
    path = f"{finder.NAME}.{name}".rstrip(".")
    for module, rest in ((path, ""), path.rpartition(".")[::2]):
        try:
            owner = importlib.import_module(module)
        except ModuleNotFoundError:
            continue
        if not rest or getattr(owner, rest, None) is not None:
            return getattr(owner, rest) if rest else owner
    return None


def matching(name, table):
    return [p for p in table if fnmatchcase(name, p)]


def differs(ours, real):
    """How a function cannot be called as the package's."""
    if real is None:
        return []
    if ours is None:
        return ["not there"]
    several = {parameter_kind for _, parameter_kind, _ in ours} & {"VAR_POSITIONAL", "VAR_KEYWORD"}
    ours, reasons = [p for p in ours if not p[1].startswith("VAR")], []
    for i, (name, parameter_kind, default) in enumerate(
        p for p in real if not p[1].startswith("VAR")
    ):
        mine = ours[i] if i < len(ours) and ours[i][0] == name else None
        if mine is None and parameter_kind == "KEYWORD_ONLY":
            mine = next((p for p in ours if p[0] == name), None)
        if mine is None and len(several) == 2:
            continue
        if mine is None:
            reasons.append(f"no {name}")
        elif parameter_kind != "KEYWORD_ONLY" and mine[1] == "KEYWORD_ONLY":
            reasons.append(f"{name} has no position")
        elif default is not None and "<" not in default and mine[2] != default:
            reasons.append(f"{name}={mine[2]}, not {default}")
    more = [name for name, _, default in ours if default is None]
    more = [name for name in more if name not in {p[0] for p in real}]
    return [*reasons, *(f"needs {name}" for name in more)]


@pytest.mark.parametrize("package", TRAINERS)
def test_imports_of_trainers_resolve(installed, package):
    lost = [
        f"{module}.{name}".lstrip(".")
        for module, names in TRAINERS[package].items()
        for name in names.split()
        if served(f"{module}.{name}".lstrip(".")) is None
    ]
    assert lost == []


@pytest.mark.skipif(SOURCE is None, reason="LIGER_KERNEL_SOURCE: make test-liger sets it")
def test_public_names_and_signatures_of_the_package(installed):
    real = liger_suite.surface_of(SOURCE)
    lost = [name for name in real if served(name) is None]
    assert [n for n in lost if not matching(n, SKIPPED)] == []
    assert set(SKIPPED) - {p for n in lost for p in matching(n, SKIPPED)} == set()
    wrong = []
    for name in real.keys() - set(lost):
        here = liger_suite.entry(served(name)) if real[name] else {}
        for role, there in real[name].items():
            wrong += [f"{name}.{role}: {reason}" for reason in differs(here.get(role), there)]
    assert [difference for difference in wrong if not matching(difference, OTHERWISE)] == []
    assert set(OTHERWISE) - {p for n in wrong for p in matching(n, OTHERWISE)} == set()


# --- what install does ---

OF_TRL = {"LigerORPOTrainer"}  # derives from a class of TRL


def test_table_names_resolve(installed):
    for path, served in finder.TREE.items():
        module = importlib.import_module(f"liger_kernel.{path}".rstrip("."))
        assert set(served) | set(finder.LAZY.get(path, {})) <= set(module.__all__)
        names = set(module.__all__) - (set() if importlib.util.find_spec("trl") else OF_TRL)
        assert all(getattr(module, name) is not None for name in names)
        assert module.__spec__ is not None


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("liger_kernel") is not None, reason="the real package is installed"
)
def test_import_is_lazy():
    code = (
        "import sys, liger_multi.compat.liger_kernel as a; a.install(); import liger_kernel\n"
        "assert liger_kernel.__version__\n"
        "heavy = {'transformers', 'trl', 'triton', 'peft'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    harness.python("-c", code)


def test_install_needs_force_over_real_package(tmp_path, monkeypatch):
    package = tmp_path / "liger_kernel"
    package.mkdir()
    (package / "__init__.py").write_text("__version__ = '0.8.5'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        with pytest.raises(ImportError, match=r"liger_kernel is installed .*force=True"):
            alias.install()
        assert not alias.installed()
        real = importlib.import_module("liger_kernel")
        with pytest.raises(ImportError, match="liger_kernel is installed"):
            alias.install()
        alias.install(force=True)
        alias.install()  # twice is once
        assert importlib.import_module("liger_kernel").__version__ == finder.VERSION
        assert importlib.metadata.version("liger-kernel") == finder.VERSION
        alias.uninstall()
        alias.uninstall()
        assert importlib.import_module("liger_kernel").__file__ == real.__file__
    finally:
        alias.uninstall()
        sys.modules.pop("liger_kernel", None)


# --- choosing an implementation ---


LOGITS = torch.tensor([[1.0, 2.0, 3.0], [0.0, 1.0, 0.0]])


@pytest.fixture(autouse=True)
def nothing_chosen(monkeypatch):
    for name in ("LIGER_KERNEL_IMPL", "LIGER_KERNEL_STRICT", "LIGER_KERNEL_IMPL_SOFTMAX"):
        monkeypatch.delenv(name, raising=False)
    yield
    op_functions.set_impl(None)


def test_available_impls_on_cpu():
    assert op_functions.available_impls("softmax", "cpu") == ["pytorch"]
    assert op_functions.all_impls("softmax") == ["nvidia-triton", "ascend-triton", "pytorch"]
    assert op_functions.all_impls("nothing") == op_functions.available_impls("nothing") == []
    assert [impl.impl_name for impl in op_functions.list_registered("rope")] == [
        *op_functions.BACKENDS
    ]
    assert op_functions.get_registered("rope", "nvidia-cutile") is None
    assert "cuda" in op_functions.get_discovery_failures() or torch.cuda.is_available()


def test_available_impls_on_device(monkeypatch):
    monkeypatch.setattr(op_functions.registry, "unavailable", lambda name: None)
    assert op_functions.available_impls("softmax", "cuda") == ["nvidia-triton", "pytorch"]
    assert op_functions.resolve_impl("softmax", device="cuda").impl_name == "nvidia-triton"
    assert op_functions.resolve_impl("softmax", "triton", "cuda").impl_name == "nvidia-triton"


def chosen_backend():
    return current().choice_in("softmax", ("cpu", "")).order


def test_set_impl_pytorch_configures_reference():
    liger_multi.configure(None)
    op_functions.set_impl("triton")
    assert op_functions.get_impl() == "nvidia-triton"
    assert chosen_backend() == ("auto",)
    op_functions.set_impl("pytorch")
    assert chosen_backend() == ("reference",)
    op_functions.set_impl(None)
    assert op_functions.get_impl() is None
    assert chosen_backend() == ("auto",)
    liger_multi.configure({"default": "reference"})  # what the user chose stays
    op_functions.set_impl("triton")
    op_functions.set_impl(None)
    assert chosen_backend() == ("reference",)


def test_impl_argument_scope(monkeypatch):
    calls = []
    monkeypatch.setattr(
        functional.ops, "rms_norm", lambda x, *_, **__: calls.append(chosen_backend()) or x
    )
    monkeypatch.setattr(op_functions.registry, "unavailable", lambda name: None)
    monkeypatch.setattr(op_functions, "available_impls", lambda *_: ["nvidia-triton", "pytorch"])
    op_functions.rms_norm(LOGITS, None)
    op_functions.rms_norm(LOGITS, None, impl="pytorch")
    op_functions.rms_norm(LOGITS, None, backend="pytorch")
    op_functions.set_impl("pytorch")
    op_functions.rms_norm(LOGITS, None, impl="triton")
    op_functions.rms_norm(LOGITS, None)
    reference, auto = ("reference",), ("auto",)
    assert calls == [auto, reference, reference, auto, reference]


@pytest.mark.parametrize(
    ("variable", "argument", "chosen", "expected"),
    [
        ({}, None, "cutedsl", "nvidia-cutedsl"),
        ({"LIGER_KERNEL_IMPL": "cutile"}, None, "cutedsl", "nvidia-cutile"),
        (
            {"LIGER_KERNEL_IMPL": "cutile", "LIGER_KERNEL_IMPL_SOFTMAX": "cutedsl"},
            None,
            None,
            "nvidia-cutedsl",
        ),
        ({"LIGER_KERNEL_IMPL_SOFTMAX": "cutedsl"}, "cutile", None, "nvidia-cutile"),
    ],
)
def test_absent_impl_precedence_and_fallback(monkeypatch, variable, argument, chosen, expected):
    for name, value in variable.items():
        monkeypatch.setenv(name, value)
    op_functions.set_impl(chosen)
    with pytest.warns(op_functions.LigerImplFallbackWarning, match=f"{expected}' is not available"):
        actual = op_functions.softmax(LOGITS, impl=argument)
    assert torch.equal(actual, functional.liger_softmax(LOGITS))
    monkeypatch.setenv("LIGER_KERNEL_STRICT", "1")
    with pytest.raises(op_functions.ImplNotAvailableError, match=expected):
        op_functions.softmax(LOGITS, impl=argument)


@pytest.mark.parametrize(
    ("call", "args", "options", "error", "message"),
    [
        (
            *(op_functions.softmax, (LOGITS,), {"impl": "nope"}),
            *(op_functions.BackendNotAvailableError, "No 'nope' implementation"),
        ),
        (
            *(op_functions.dispatch, ("nope", LOGITS), {}),
            *(op_functions.NoImplAvailableError, r"op 'nope'\. Operators: rms_norm"),
        ),
        (
            *(op_functions.dispatch, ("nope", LOGITS), {"impl": "triton"}),
            *(op_functions.ImplNotAvailableError, r"op 'nope'\. Registered: <none>"),
        ),
        (
            *(op_functions.softmax, (LOGITS,), {"mode": "fast"}),
            *(ValueError, "mode must be 'default', got 'fast'"),
        ),
        (
            *(op_functions.register_impl, ("softmax",), {"impl_name": "mine"}),
            *(NotImplementedError, "docs/extending"),
        ),
        (
            *(op_functions.declare_op_locations, ("softmax", []), {}),
            *(NotImplementedError, "docs/extending"),
        ),
    ],
)
def test_unknown_impl_errors(call, args, options, error, message):
    with pytest.raises(error, match=message):
        call(*args, **options)


@pytest.mark.parametrize(
    ("needs", "arch", "reason"),
    [
        ({}, None, None),
        ({"modules": ["sys"], "predicate": lambda: True}, None, None),
        ({"modules": ["no_such_module"]}, None, "'no_such_module' is not importable"),
        ({"requires_cuda": True}, None, "no CUDA device"),
        ({"min_cc": (9, 0), "max_cc": (9, 0)}, "sm90", None),
        ({"requires_cuda": True}, "gfx942", None),
        ({"min_cc": (10, 0)}, "sm90", r"sm90 is not in sm100\.\."),
        ({"max_cc": (9, 0)}, "sm100", r"sm100 is not in \.\.sm90"),
        ({"min_cc": (8, 0)}, "gfx942", r"gfx942 is not in sm80\.\."),
        ({"predicate": lambda: False}, None, "predicate is False"),
        ({"predicate": lambda: 1 / 0}, None, "predicate raised ZeroDivisionError"),
    ],
)
def test_capability(monkeypatch, needs, arch, reason):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: arch is not None)
    monkeypatch.setattr(op_functions, "device_info", lambda _: SimpleNamespace(arch=arch))
    capability = op_functions.Capability(**needs)
    actual = capability.reason_if_unsatisfied()
    assert capability.is_satisfied() == (reason is None)
    assert re.search(reason, actual) if reason else actual is None


def test_impl_is_callable():
    impl = op_functions.get_registered("softmax", "pytorch")
    assert impl.backend == "pytorch"
    assert torch.equal(impl.call(LOGITS), LOGITS.softmax(-1))
    of_class = op_functions.OpImpl("x", "mine", autograd_function=op_functions.LigerSoftmaxFunction)
    assert torch.equal(of_class.call(LOGITS, mode="default"), LOGITS.softmax(-1))
    with pytest.raises(TypeError, match=r"autograd_function registration.*\['dim'\]"):
        of_class.call(LOGITS, dim=1)
    with pytest.raises(RuntimeError, match="has no callable"):
        op_functions.OpImpl("x", "mine").call(LOGITS)


X, W = torch.randn(4, 6), torch.rand(6)
Q = torch.randn(1, 2, 4, 6)
ANGLES = torch.randn(1, 4, 6)
HEAD = torch.randn(5, 6)
TARGET = torch.tensor([1, 2, -100, 4])
CALLS = {
    "rms_norm": ((X, W), "liger_rms_norm", (X, W, 1e-6)),
    "layer_norm": ((X, W, W), "liger_layer_norm", (X, W, W, 1e-6)),
    "fused_add_rms_norm": ((X, X, W), "liger_fused_add_rms_norm", (X, X, W, 1e-6)),
    "jsd": ((X.log_softmax(-1), X.flip(0).log_softmax(-1)), "liger_jsd", None),
    "kl_div": ((X.log_softmax(-1), X.softmax(-1).flip(0)), "liger_kl_div", None),
    "softmax": ((X,), "liger_softmax", None),
    "swiglu": ((X, X), "liger_swiglu", None),
    "geglu": ((X, X), "liger_geglu", None),
    "rope": ((Q, Q, ANGLES, ANGLES), "liger_rope", None),
    "cross_entropy": ((X, TARGET), "liger_cross_entropy", None),
    "fused_linear_cross_entropy": ((X, HEAD, TARGET), "liger_fused_linear_cross_entropy", None),
    "fused_linear_jsd": ((X, HEAD, X.flip(0), HEAD), "liger_fused_linear_jsd", None),
}


@pytest.mark.parametrize("name", CALLS)
def test_functional_dispatch_matches(name):
    args, same, arguments = CALLS[name]
    actual = op_functions.dispatch(name, *args, impl="pytorch")
    if name.endswith("cross_entropy"):  # four results, as of the autograd function
        actual, *others = actual
        assert others == [None, None, None]
    more = {"reduction": "batchmean"} if name == "kl_div" else {}
    torch.testing.assert_close(actual, getattr(functional, same)(*(arguments or args), **more))
    assert "impl" in inspect.signature(op_functions.FUNCTIONS[name]).parameters


def test_functional_covers_operators():
    assert sorted(CALLS) == sorted(op_functions.FUNCTIONS) == sorted(op_functions.OPERATORS)
    assert {*op_functions.OPERATORS} <= {*liger_multi.ops.__all__}


def test_top_level_set_impl(installed):
    import liger_kernel

    liger_kernel.set_impl("triton")
    assert liger_kernel.get_impl() == liger_kernel.get_backend() == "nvidia-triton"
    assert torch.equal(liger_kernel.functional.softmax(LOGITS, impl="pytorch"), LOGITS.softmax(-1))
    import liger_kernel.backends.dispatch

    assert callable(liger_kernel.backends.dispatch)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = liger_kernel.nothing


def test_impl_variable_at_install(installed, monkeypatch):
    alias.uninstall()
    liger_multi.configure(None)
    monkeypatch.setenv("LIGER_KERNEL_IMPL", "cutile")
    with pytest.warns(
        op_functions.LigerImplFallbackWarning, match="every operator: 'nvidia-cutile'"
    ):
        alias.install()
    alias.uninstall()
    with monkeypatch.context() as strict:
        strict.setenv("LIGER_KERNEL_STRICT", "1")
        with pytest.raises(op_functions.ImplNotAvailableError, match="'nvidia-cutile'"):
            alias.install()
    assert not alias.installed()
    monkeypatch.setenv("LIGER_KERNEL_IMPL", "pytorch")
    alias.install()
    assert chosen_backend() == ("reference",)
    alias.uninstall()
    assert chosen_backend() == ("auto",)
    monkeypatch.setenv("LIGER_KERNEL_IMPL", "triton")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        alias.install()


# --- what stands beside them ---


def test_helpers(capsys):
    device = helpers.infer_device()
    assert helpers.infer_comm_backend() == {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}[device]
    if device == "cpu":
        with pytest.raises(RuntimeError, match="Unsupported device: cpu"):
            helpers.get_total_gpu_memory()
    else:
        assert helpers.get_total_gpu_memory() > 1
    below = helpers.transformers_version_dispatch(
        "999", lambda x: ("before", x), lambda x: ("after", x), (1,), (2,)
    )
    above = helpers.transformers_version_dispatch(
        "1", lambda **_: None, lambda x: ("after", x), after_kwargs={"x": 3}
    )
    assert (below, above) == (("before", 1), ("after", 3))
    assert helpers.is_hip() == (torch.version.hip is not None)
    assert helpers.is_transformers_available()
    helpers.print_env_report()
    assert "torch" in capsys.readouterr().out


FAMILIES = {"ascend910": "npu", "ascend310": "npu", "pvc": "xpu", "arc": "xpu"}


@pytest.mark.parametrize(
    ("arch", "name"),
    [
        ("sm75", "volta_turing"),
        ("sm89", "ampere_ada"),
        ("sm90", "hopper"),
        ("sm100", "blackwell"),
        ("sm103", "blackwell_ultra"),
        ("sm120", "blackwell_consumer"),
        ("sm61", "sm_61"),
        ("sm87", "sm_87"),
        ("gfx90a", "cdna2"),
        ("gfx942", "cdna3"),
        ("gfx1101", "rdna3"),
        ("gfx1200", "gfx1200"),
        ("Ascend910B3", "ascend910"),
        ("Ascend310P3", "ascend310"),
        ("Ascend950", "npu"),
        ("Intel(R) Data Center GPU Max 1550", "pvc"),
        ("Intel(R) Arc(TM) A770 Graphics", "arc"),
        ("Some other", "xpu"),
    ],
)
def test_infer_device_arch(monkeypatch, installed, arch, name):
    utils = importlib.import_module("liger_kernel.utils")
    device_type = next((d for d in ("npu", "xpu") if d in (name, FAMILIES.get(name))), "cuda")
    number = arch.removeprefix("sm")
    properties = SimpleNamespace(gcnArchName=f"{arch}:xnack-", name=arch)
    module = SimpleNamespace(
        get_device_capability=lambda _: (int(number[:-1]), int(number[-1])),
        get_device_properties=lambda _: properties,
    )
    monkeypatch.setattr(torch.version, "hip", "6.0" if arch.startswith("gfx") else None)
    monkeypatch.setattr(torch, device_type, module, raising=False)
    monkeypatch.setattr(utils, "infer_device", lambda: device_type)
    assert helpers.infer_device_arch.__wrapped__() == name  # without its cache
    monkeypatch.delattr(module, "get_device_properties")
    monkeypatch.delattr(module, "get_device_capability")
    assert helpers.infer_device_arch.__wrapped__() == device_type
    monkeypatch.setattr(utils, "infer_device", lambda: "cpu")
    assert helpers.infer_device_arch.__wrapped__() == "cpu"


def test_launch_settings():
    settings = {1000: (1024, 4), 1025: (2048, 8), 8192: (8192, 16)}
    assert {n: helpers.calculate_settings(n) for n in settings} == settings
    assert helpers.calculate_settings(65536)[0] == 65536
    with pytest.raises(RuntimeError, match="65537"):
        helpers.calculate_settings(65537)
    assert helpers.compare_version("torch", lambda a, b: a >= b, "2.0")
    assert not helpers.compare_version("no-such-package-here", lambda a, b: True, "1")


def test_ensure_contiguous():
    calls = helpers.ensure_contiguous(
        lambda ctx, x, *, y, n: (x.is_contiguous(), y.is_contiguous(), n)
    )
    strided = torch.ones(3, 4).T
    assert calls(None, strided, y=strided, n=2) == (True, True, 2)


def test_fsdp_forward_redirection():
    class Wrapper(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.module, self.inside = inner, False

        def forward(self, *args):
            self.inside = True
            try:
                return self.module(*args)
            finally:
                self.inside = False

    wrapper = Wrapper(torch.nn.Linear(2, 2))
    calls = []

    def method(module, x):
        calls.append(wrapper.inside)
        return module.weight.sum() + x

    run, one = helpers._FSDPForwardRedirection(), torch.tensor(1.0)
    got = run(wrapper, method, wrapper.module, one)
    torch.testing.assert_close(got, wrapper.module.weight.sum() + 1)
    assert calls == [True]
    assert "forward" not in vars(wrapper.module)

    def wrong(module, x):
        raise KeyError("inside")

    with pytest.raises(KeyError, match="inside"):
        run(wrapper, wrong, wrapper.module, one)
    assert "forward" not in vars(wrapper.module)
    assert isinstance(wrapper.module.forward, types.MethodType)


# --- Megatron ---


RMS = SimpleNamespace(normalization="RMSNorm", sequence_parallel=True)
LAYER = SimpleNamespace(normalization="LayerNorm")


@pytest.fixture
def names():
    alias.install(force=True)
    yield importlib.import_module("liger_kernel.megatron")
    alias.uninstall()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("centered", [False, True])
def test_megatron_norm_matches_torch(names, centered, dtype):
    norm = names.LigerMegatronRMSNorm(RMS, 8, eps=1e-3, zero_centered_gamma=centered).to(dtype)
    assert norm.weight.sequence_parallel is True
    assert norm.weight.eq(0.0 if centered else 1.0).all()
    with torch.no_grad():
        norm.weight.add_(torch.linspace(-0.5, 0.5, 8).to(dtype))
    x = torch.randn(5, 3, 8).to(dtype).requires_grad_()
    wide, weight = (t.detach().double().requires_grad_() for t in (x, norm.weight))
    expected = F.rms_norm(wide, (8,), weight + centered, 1e-3)
    up = torch.randn(5, 3, 8)
    expected.backward(up.double())
    y = norm(x)
    y.backward(up.to(dtype))
    assert y.dtype == dtype
    near = {"rtol": 2e-2, "atol": 3e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    for ours, exact in ((y, expected), (x.grad, wide.grad), (norm.weight.grad, weight.grad)):
        torch.testing.assert_close(ours.double(), exact, **near)


def test_megatron_norm_copies_and_state(names):
    norm = names.LigerMegatronRMSNorm(RMS, (8,))
    assert [*norm.state_dict()] == ["weight"]
    for again in (copy.deepcopy(norm), pickle.loads(pickle.dumps(norm))):
        assert again.load_state_dict(norm.state_dict())
        assert torch.equal(again(torch.ones(2, 8)), norm(torch.ones(2, 8)))
    assert names.LigerMegatronRMSNorm(SimpleNamespace(), 8).weight.sequence_parallel is False
    assert names.LigerMegatronRMSNorm(
        SimpleNamespace(layernorm_zero_centered_gamma=True), 8
    ).zero_centered_gamma
    with pytest.raises(ValueError, match=r"must be 'RMSNorm', got 'LayerNorm'"):
        names.LigerMegatronRMSNorm(LAYER, 8)


def test_megatron_swiglu_fallback(names, caplog):
    x = torch.randn(4, 2, 12, requires_grad=True)
    gate, up = x.chunk(2, -1)
    mlp = names.LigerMegatronSwiGLU(lambda *args: args)
    torch.testing.assert_close(mlp(x), F.silu(gate) * up)
    torch.testing.assert_close(mlp(x[0]), (F.silu(gate) * up)[0])
    bias = torch.ones(12)
    assert mlp(x, bias) == (x, bias, False, False)
    with caplog.at_level("INFO"):
        for _ in range(2):
            assert mlp(x, None, False, True) == (x, None, False, True)
    assert [r.getMessage() for r in caplog.records if "falling back" in r.msg] == [
        "LigerMegatronSwiGLU is falling back to fallback_impl for cpu_offload_input"
    ]
    alone = names.LigerMegatronSwiGLU()
    with pytest.raises(RuntimeError, match="fp8_input_store is not served"):
        alone(x, fp8_input_store=True)
    with pytest.raises(ValueError, match=r"must be 2D .*got \(12,\)"):
        alone(x[0, 0])


def test_megatron_cross_entropy_defaults(names):
    loss = names.LigerMegatronCrossEntropy(label_smoothing=0.1)
    shown = "label_smoothing_formula='megatron', label_smoothing_mode='partition')"
    assert repr(loss).endswith(shown)
    logits, target = torch.randn(3, 2, 11), torch.randint(11, (3, 2))
    expected = F.cross_entropy(
        logits.flatten(0, 1), target.flatten(), reduction="none", label_smoothing=0.1 * 11 / 10
    )
    torch.testing.assert_close(loss(logits, target).flatten(), expected)
    with pytest.raises(ValueError, match="reduction must be 'none'"):
        names.LigerMegatronCrossEntropy(reduction="mean")


# --- what is put into Megatron-Core's places ---


def module(monkeypatch, name, **names):
    """A module of a Megatron-Core that has these names."""
    module = ModuleType(f"megatron.core.{name}" if name else "megatron.core")
    module.__path__ = []
    vars(module).update(names)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


class Norm:
    """As Megatron-Core's: a class whose call makes a norm of PyTorch."""

    def __new__(cls, config, hidden_size, eps=1e-5, **_):
        return torch.nn.LayerNorm(hidden_size, eps)


class Provider:
    """A specification with Megatron-Core's norms."""

    def layer_norm(self, rms_norm=False, for_qk=False):
        return ("its own", rms_norm, for_qk)


class Function(torch.autograd.Function):
    """The fused activation, with a mark."""

    @staticmethod
    def forward(ctx, input, fp8_input_store, cpu_offload_input):
        return input * 0


@pytest.fixture
def megatron(monkeypatch):
    """Modules with the places of Megatron-Core, and one that has them under names of its own."""
    monkeypatch.setitem(sys.modules, "megatron", ModuleType("megatron"))
    module(monkeypatch, "")
    for package in ("transformer", "models", "fusions", "tensor_parallel"):
        module(monkeypatch, package)

    def fused(vocab_parallel_logits, target, tp_group):
        return "fused"

    def plain(vocab_parallel_logits, target, label_smoothing=0.0):
        return "plain"

    def get_group(check_initialized=True):
        assert not check_initialized, "there are no parallel groups"

    module(monkeypatch, "transformer.torch_norm", WrappedTorchNorm=Norm)
    module(monkeypatch, "models.backends", LocalSpecProvider=type("Local", (Provider,), {}))
    module(monkeypatch, "fusions.fused_cross_entropy", fused_vocab_parallel_cross_entropy=fused)
    module(monkeypatch, "fusions.fused_bias_swiglu", SwiGLUFunction=Function)
    module(monkeypatch, "tensor_parallel.cross_entropy", vocab_parallel_cross_entropy=plain)
    module(monkeypatch, "parallel_state", get_tensor_model_parallel_group=get_group)
    return module(monkeypatch, "user", LNImpl=Norm, loss=plain, fast=fused, act=Function)


def test_megatron_names_replaced_and_restored(names, megatron):
    before = dict(vars(megatron))
    local = sys.modules["megatron.core.models.backends"].LocalSpecProvider
    own = local.layer_norm
    names.apply_liger_kernel_to_megatron(rms_norm=True, cross_entropy=True, swiglu=True)
    for name in ("LNImpl", "loss", "fast", "act"):
        assert getattr(megatron, name).__wrapped__ is before[name]
        assert getattr(megatron, name).__liger_patched__
    assert local.layer_norm.__wrapped__ is own
    once = dict(vars(megatron))
    names.apply_liger_kernel_to_megatron(rms_norm=True, cross_entropy=True, swiglu=True)
    assert vars(megatron) == once

    assert isinstance(megatron.LNImpl(RMS, 8), names.LigerMegatronRMSNorm)
    assert isinstance(megatron.LNImpl(LAYER, 8, eps=0.5), torch.nn.LayerNorm)
    assert local().layer_norm(rms_norm=True) is names.LigerMegatronRMSNorm
    assert local().layer_norm(for_qk=True) == ("its own", False, True)

    logits, target = torch.randn(3, 2, 11), torch.randint(11, (3, 2))
    flat = logits.flatten(0, 1), target.flatten()
    for module, share in (
        (megatron.fast(logits, target, None), 0.0),
        (megatron.loss(logits, target), 0.0),
        (megatron.loss(logits, target, 0.1), 0.1 * 11 / 10),
    ):
        expected = F.cross_entropy(*flat, reduction="none", label_smoothing=share)
        torch.testing.assert_close(module.flatten(), expected)

    x = torch.randn(4, 12)
    gate, up = x.chunk(2, -1)
    torch.testing.assert_close(megatron.act.apply(x, False, False), F.silu(gate) * up)
    assert megatron.act.apply(x, True, False).eq(0).all()

    late = ModuleType("megatron.core.late")  # a module that is imported after the call
    late.norm = sys.modules["megatron.core.transformer.torch_norm"].WrappedTorchNorm
    sys.modules[late.__name__] = late
    alias.uninstall()
    del sys.modules[late.__name__]
    assert late.norm is Norm
    assert {**vars(megatron)} == before
    assert local.layer_norm is own


def test_megatron_imported_again_is_patched_again(names, megatron, caplog):
    """Whether it was done is asked of what stands there."""
    asked = {"rms_norm": False, "cross_entropy": True, "swiglu": True}
    names.apply_liger_kernel_to_megatron(**asked)
    for name in ("fusions.fused_cross_entropy", "fusions.fused_bias_swiglu"):
        module, again = sys.modules[f"megatron.core.{name}"], ModuleType(name)
        vars(again).update({k: getattr(v, "__wrapped__", v) for k, v in vars(module).items()})
        sys.modules[f"megatron.core.{name}"] = again
    megatron.act, megatron.fast = Function, megatron.fast.__wrapped__
    names.apply_liger_kernel_to_megatron(**asked)
    assert megatron.act is not Function
    assert "Could not find" not in caplog.text


def test_megatron_loss_class_of_the_user(names, megatron, monkeypatch, caplog):
    """A subclass in the public module is what the functions call; who calls them is looked for."""
    made = []

    class Mine(names.LigerMegatronCrossEntropy):
        def __init__(self, **options):
            super().__init__(**options)
            made.append(options)

    public = importlib.import_module("liger_kernel.megatron.cross_entropy")
    monkeypatch.setattr(public, "LigerMegatronCrossEntropy", Mine)
    megatron.fast = other = lambda *_: "another framework's"
    names.apply_liger_kernel_to_megatron(rms_norm=False, cross_entropy=True)
    assert megatron.fast is other
    assert "Could not find where this Megatron version calls" in caplog.text
    megatron.loss(torch.randn(3, 2, 11), torch.randint(11, (3, 2)))
    assert made == [{}, {}]
    megatron.loss(torch.randn(3, 2, 11), torch.randint(11, (3, 2)), 0.0)
    assert made == [{}, {}, {"label_smoothing": 0.0}]


def test_megatron_replaces_only_requested(names, megatron):
    before = dict(vars(megatron))
    names.apply_liger_kernel_to_megatron()
    assert {name for name in before if vars(megatron)[name] is not before[name]} == {"LNImpl"}


@pytest.mark.skipif(importlib.util.find_spec("megatron"), reason="Megatron-Core is installed")
@pytest.mark.parametrize("part", ["rms_norm", "cross_entropy", "swiglu"])
def test_missing_megatron_error(names, part):
    asked = {"rms_norm": False, part: True}
    with pytest.raises(ImportError, match=r"pip install megatron-core"):
        names.apply_liger_kernel_to_megatron(**asked)
    names.apply_liger_kernel_to_megatron(rms_norm=False)


def test_missing_megatron_attribute_error(names, megatron, monkeypatch):
    monkeypatch.delattr(sys.modules["megatron.core.fusions.fused_bias_swiglu"], "SwiGLUFunction")
    with pytest.raises(ImportError, match=r"no megatron\.core\.fusions\.fused_bias_swiglu\.SwiGLU"):
        names.apply_liger_kernel_to_megatron(rms_norm=False, swiglu=True)
