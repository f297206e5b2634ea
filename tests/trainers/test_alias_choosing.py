"""Choosing an implementation by the names of Liger-Kernel."""

import inspect
import types
import warnings
from types import SimpleNamespace

import pytest
import torch

import liger_multi
from liger_multi.compat import liger_kernel as alias
from liger_multi.compat.liger_kernel import choosing, functional, helpers, op_functions
from liger_multi.dispatch.config import current

LOGITS = torch.tensor([[1.0, 2.0, 3.0], [0.0, 1.0, 0.0]])


@pytest.fixture(autouse=True)
def nothing_chosen(monkeypatch):
    for name in ("LIGER_KERNEL_IMPL", "LIGER_KERNEL_STRICT", "LIGER_KERNEL_IMPL_SOFTMAX"):
        monkeypatch.delenv(name, raising=False)
    yield
    choosing.set_impl(None)


def test_available_impls_on_cpu():
    assert choosing.available_impls("softmax", "cpu") == ["pytorch"]
    assert choosing.all_impls("softmax") == ["nvidia-triton", "ascend-triton", "pytorch"]
    assert choosing.all_impls("nothing") == choosing.available_impls("nothing") == []
    assert [impl.impl_name for impl in choosing.list_registered("rope")] == [*choosing.BACKENDS]
    assert choosing.get_registered("rope", "nvidia-cutile") is None
    assert "cuda" in choosing.get_discovery_failures() or torch.cuda.is_available()


def test_available_impls_on_device(monkeypatch):
    monkeypatch.setattr(choosing.registry, "unavailable", lambda name: None)
    assert choosing.available_impls("softmax", "cuda") == ["nvidia-triton", "pytorch"]
    assert choosing.resolve_impl("softmax", device="cuda").impl_name == "nvidia-triton"
    assert choosing.resolve_impl("softmax", "triton", "cuda").impl_name == "nvidia-triton"


def chosen_backend():
    return current().choice_in("softmax", ("cpu", "")).order


def test_set_impl_pytorch_configures_reference():
    liger_multi.configure(None)
    choosing.set_impl("triton")
    assert choosing.get_impl() == "nvidia-triton"
    assert chosen_backend() == ("auto",)
    choosing.set_impl("pytorch")
    assert chosen_backend() == ("reference",)
    choosing.set_impl(None)
    assert choosing.get_impl() is None
    assert chosen_backend() == ("auto",)


def test_set_impl_keeps_user_configuration():
    try:
        liger_multi.configure({"default": "reference"})
        choosing.set_impl("triton")
        choosing.set_impl(None)
        assert chosen_backend() == ("reference",)
    finally:
        liger_multi.configure(None)


def test_impl_argument_scope(monkeypatch):
    calls = []
    monkeypatch.setattr(
        functional.ops, "rms_norm", lambda x, *_, **__: calls.append(chosen_backend()) or x
    )
    monkeypatch.setattr(choosing.registry, "unavailable", lambda name: None)
    monkeypatch.setattr(choosing, "available_impls", lambda *_: ["nvidia-triton", "pytorch"])
    op_functions.rms_norm(LOGITS, None)
    op_functions.rms_norm(LOGITS, None, impl="pytorch")
    op_functions.rms_norm(LOGITS, None, backend="pytorch")
    choosing.set_impl("pytorch")
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
    choosing.set_impl(chosen)
    with pytest.warns(choosing.LigerImplFallbackWarning, match=f"{expected}' is not available"):
        actual = op_functions.softmax(LOGITS, impl=argument)
    assert torch.equal(actual, functional.liger_softmax(LOGITS))
    monkeypatch.setenv("LIGER_KERNEL_STRICT", "1")
    with pytest.raises(choosing.ImplNotAvailableError, match=expected):
        op_functions.softmax(LOGITS, impl=argument)


def test_unknown_impl_errors():
    with pytest.raises(choosing.BackendNotAvailableError, match="No 'nope' implementation"):
        op_functions.softmax(LOGITS, impl="nope")
    with pytest.raises(choosing.NoImplAvailableError, match=r"op 'nope'\. Operators: rms_norm"):
        op_functions.dispatch("nope", LOGITS)
    with pytest.raises(choosing.ImplNotAvailableError, match=r"op 'nope'\. Registered: <none>"):
        op_functions.dispatch("nope", LOGITS, impl="triton")
    with pytest.raises(ValueError, match="mode must be 'default', got 'fast'"):
        op_functions.softmax(LOGITS, mode="fast")
    with pytest.raises(NotImplementedError, match="docs/extending"):
        choosing.register_impl("softmax", impl_name="mine")
    with pytest.raises(NotImplementedError, match="docs/extending"):
        choosing.declare_op_locations("softmax", [])


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
    assert sorted(CALLS) == sorted(op_functions.FUNCTIONS) == sorted(choosing.OPERATORS)
    assert {*choosing.OPERATORS} <= {*liger_multi.ops.__all__}


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
    with pytest.warns(choosing.LigerImplFallbackWarning, match="every operator: 'nvidia-cutile'"):
        alias.install()
    alias.uninstall()
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
    expected = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}
    assert helpers.infer_comm_backend() == expected[device]
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
        ("gfx942", "gfx942"),
    ],
)
def test_infer_device_arch(monkeypatch, arch, name):
    monkeypatch.setattr(helpers, "infer_device", lambda: "cuda")
    monkeypatch.setattr(helpers, "device_info", lambda _: SimpleNamespace(arch=arch))
    assert helpers.infer_device_arch() == name
    monkeypatch.setattr(helpers, "infer_device", lambda: "npu")
    assert helpers.infer_device_arch() == "npu"


def test_launch_settings():
    assert helpers.calculate_settings(1000) == (1024, 4)
    assert helpers.calculate_settings(1025) == (2048, 8)
    assert helpers.calculate_settings(8192) == (8192, 16)
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

    run = helpers._FSDPForwardRedirection()
    got = run(wrapper, method, wrapper.module, torch.tensor(1.0))
    torch.testing.assert_close(got, wrapper.module.weight.sum() + 1)
    assert calls == [True]
    assert "forward" not in vars(wrapper.module)

    def wrong(module, x):
        raise KeyError("inside")

    with pytest.raises(KeyError, match="inside"):
        run(wrapper, wrong, wrapper.module, torch.tensor(1.0))
    assert "forward" not in vars(wrapper.module)
    assert isinstance(wrapper.module.forward, types.MethodType)
