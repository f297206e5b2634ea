"""Modules: constructors, state and results are those of the classes that they stand for."""

import copy
import inspect
import io
import pickle
import types

import pytest
import torch
import torch.nn.functional as F

import liger_multi
from liger_multi import losses, nn, ops
from tests import harness
from tests.comparing import assert_equal, assert_same_gradients, recorded, saved

HALF, WIDE = torch.bfloat16, torch.float32


def config(**changes):
    """The fields of a model's configuration that MLPs read."""
    fields = {"hidden_size": 16, "intermediate_size": 40, "mlp_bias": False, "hidden_act": "silu"}
    return types.SimpleNamespace(**{**fields, **changes})


GELU = config(hidden_act="gelu_pytorch_tanh")
target = torch.tensor([3, 0, -100, 10, 7, 7])


def leaf(*shape, dtype=WIDE):
    return torch.randn(shape).to(dtype).requires_grad_()


def ids(rows):
    tokens = torch.arange(5 * rows).view(rows, 5) % 11
    return tokens.masked_fill(tokens == 4, -100)


def answers(rows):
    """A head behind hidden states of answers, and their targets."""
    return losses.Head(leaf(rows, 5, 16), leaf(11, 16)), ids(rows)


def head():
    return leaf(6, 16), leaf(11, 16)


# name: how to make it, inputs of a call, the operator that it calls with them
MODULES = {
    "RMSNorm": (lambda **f: nn.RMSNorm(16, 1e-5, **f), lambda: (leaf(3, 16),), "rms_norm"),
    "RMSNorm-options": (
        lambda **f: nn.RMSNorm(16, offset=0.5, casting="olmo", **f),
        lambda: (leaf(3, 16),),
        "rms_norm",
    ),
    "RMSNorm-plain": (
        lambda **f: nn.RMSNorm(16, elementwise_affine=False, **f),
        lambda: (leaf(3, 16),),
        "rms_norm",
    ),
    "GemmaRMSNorm": (lambda **f: nn.GemmaRMSNorm(16, **f), lambda: (leaf(3, 16),), "rms_norm"),
    "FusedAddRMSNorm": (
        lambda **f: nn.FusedAddRMSNorm(16, **f),
        lambda: (leaf(3, 16), leaf(3, 16)),
        "fused_add_rms_norm",
    ),
    "LayerNorm": (lambda **f: nn.LayerNorm(16, **f), lambda: (leaf(3, 16),), "layer_norm"),
    "LayerNorm-plain": (
        lambda **f: nn.LayerNorm([16], 1e-3, False, **f),
        lambda: (leaf(3, 16),),
        "layer_norm",
    ),
    "LayerNorm-weight": (
        lambda **f: nn.LayerNorm((16,), bias=False, **f),
        lambda: (leaf(3, 16),),
        "layer_norm",
    ),
    "SwiGLUMLP": (lambda **f: nn.SwiGLUMLP(config(), **f), lambda: (leaf(3, 16),), "swiglu"),
    "GEGLUMLP": (lambda **f: nn.GEGLUMLP(GELU, **f), lambda: (leaf(3, 16),), "geglu"),
    "Experts": (
        lambda **f: nn.Experts(config(num_experts=3), **f),
        lambda: (leaf(3, 16), torch.tensor([[0, 2], [1, 0], [2, 1]]), leaf(3, 2)),
        "fused_moe",
    ),
    "HyperConnection": (
        lambda **f: nn.HyperConnection(
            config(hc_mult=2, hc_sinkhorn_iters=3, hc_eps=1e-3, rms_norm_eps=1e-5), **f
        ),
        lambda: (leaf(3, 2, 16),),
        "hyper_connections",
    ),
    "PackedSwiGLUMLP": (
        lambda **f: nn.PackedSwiGLUMLP(config(mlp_bias=True), **f),
        lambda: (leaf(3, 16),),
        "swiglu_packed",
    ),
    "SwiGLUMLP-multipliers": (
        lambda **f: nn.SwiGLUMLP(config(mlp_multipliers=(0.5, 2.0)), **f),
        lambda: (leaf(3, 16),),
        "swiglu",
    ),
    "ClampedSwiGLUMLP": (
        lambda **f: nn.ClampedSwiGLUMLP(config(swiglu_limit=1.5), **f),
        lambda: (leaf(3, 16),),
        "swiglu_clamped",
    ),
    "GatedRMSNorm": (
        lambda **f: nn.GatedRMSNorm(16, **f),
        lambda: (leaf(3, 16), leaf(3, 16)),
        "gated_rms_norm",
    ),
    "GatedRMSNorm-options": (
        lambda **f: nn.GatedRMSNorm(
            16,
            1e-5,
            group_size=4,
            norm_before_gate=False,
            activation="sigmoid",
            offset=0.5,
            casting="olmo",
            **f,
        ),
        lambda: (leaf(3, 16), leaf(3, 16)),
        "gated_rms_norm",
    ),
    "ModulatedRMSNorm": (
        lambda **f: nn.ModulatedRMSNorm(16, **f),
        lambda: (leaf(3, 5, 16), leaf(3, 16), leaf(3, 16)),
        "modulated_rms_norm",
    ),
    "GroupNorm": (
        lambda **f: nn.GroupNorm(4, 16, 1e-3, **f),
        lambda: (leaf(3, 16, 5),),
        "group_norm",
    ),
    "GroupNorm-weight": (
        lambda **f: nn.GroupNorm(4, 16, bias=False, **f),
        lambda: (leaf(3, 16, 2, 2),),
        "group_norm",
    ),
    "DyT": (lambda **f: nn.DyT(16, **f), lambda: (leaf(3, 16),), "dyt"),
    "DyT-weight": (lambda **f: nn.DyT(16, 0.7, bias=False, **f), lambda: (leaf(3, 16),), "dyt"),
    "PolyNorm": (lambda **f: nn.PolyNorm(1e-3, **f), lambda: (leaf(3, 16),), "poly_norm"),
    "ReLUSquared": (lambda **f: nn.ReLUSquared(), lambda: (leaf(3, 16),), "relu_squared"),
    "TiledMLP": (
        lambda **f: nn.TiledMLP(nn.SwiGLUMLP(config(), **f)),
        lambda: (leaf(2, 7, 16),),
        "swiglu",
    ),
    "CrossEntropyLoss": (
        lambda: nn.CrossEntropyLoss(torch.rand(11) + 0.5, label_smoothing=0.1, z_loss=1e-3),
        lambda: (leaf(6, 11), target),
        "cross_entropy",
    ),
    "FusedLinearCrossEntropyLoss": (
        lambda: nn.FusedLinearCrossEntropyLoss(torch.rand(11) + 0.5, softcap=5.0, chunk=4),
        lambda: (*head(), target),
        "fused_linear_cross_entropy",
    ),
    "Softmax": (lambda: nn.Softmax(0), lambda: (leaf(3, 16),), "softmax"),
    "Sparsemax": (lambda: nn.Sparsemax(), lambda: (leaf(3, 16),), "sparsemax"),
    "Embedding": (
        lambda **f: nn.Embedding(11, 16, 0, scale=4.0, **f),
        lambda: (torch.tensor([3, 0, 10, 3]),),
        "embedding",
    ),
    "KLDivLoss": (
        lambda: nn.KLDivLoss(form="logits", temperature=0.5),
        lambda: (leaf(6, 11), torch.rand(6, 11), target),
        "kl_div",
    ),
    "JSDLoss": (
        lambda: nn.JSDLoss(0.2),
        lambda: (leaf(6, 11), torch.randn(6, 11), target),
        "jsd",
    ),
    "TVDLoss": (
        lambda: nn.TVDLoss(form="logits", reduction="sum"),
        lambda: (leaf(6, 11), torch.randn(6, 11), target),
        "tvd",
    ),
    "FusedLinearKLDivLoss": (
        lambda: nn.FusedLinearKLDivLoss(temperature=2.0, square_temperature=True),
        lambda: (*head(), torch.randn(6, 8), torch.randn(11, 8), target),
        "fused_linear_kl_div",
    ),
    "FusedLinearJSDLoss": (
        lambda: nn.FusedLinearJSDLoss(0.2, chunk=4),
        lambda: (*head(), torch.randn(6, 8), torch.randn(11, 8), target),
        "fused_linear_jsd",
    ),
    "FusedLinearTVDLoss": (
        lambda: nn.FusedLinearTVDLoss(vocabulary="common"),
        lambda: (*head(), torch.randn(6, 8), torch.randn(13, 8), target),
        "fused_linear_tvd",
    ),
    "DPOLoss": (
        lambda: nn.DPOLoss(loss_type=("ipo", "sft"), beta=0.3, metrics=("entropy",)),
        lambda: (*answers(4), torch.randn(4)),
        "fused_linear_log_prob",
    ),
    "CPOLoss": (lambda: nn.CPOLoss(beta=0.3), lambda: answers(4), "fused_linear_log_prob"),
    "SimPOLoss": (lambda: nn.SimPOLoss(gamma=0.3), lambda: answers(4), "fused_linear_log_prob"),
    "ORPOLoss": (lambda: nn.ORPOLoss(beta=0.3), lambda: answers(4), "fused_linear_log_prob"),
    "KTOLoss": (
        lambda: nn.KTOLoss(desirable_weight=1.5),
        lambda: (*answers(3), torch.tensor([True, False, True]), torch.randn(3), 0.1),
        "fused_linear_log_prob",
    ),
    "PolicyLoss": (
        lambda: nn.PolicyLoss(loss_type="sapo", passes="two"),
        lambda: (*answers(3), torch.tensor([1.0, -2.0, 0.5])),
        "fused_linear_log_prob",
    ),
    "SequenceLoss": (
        lambda: nn.SequenceLoss(loss_type="dft", z_loss=1e-3, passes="two"),
        lambda: answers(3),
        "fused_linear_log_prob",
    ),
    "MTPLoss": (
        lambda: nn.MTPLoss(0.5, passes="two"),
        lambda: ([answers(3)[0], answers(3)[0]], answers(3)[1]),
        "fused_linear_log_prob",
    ),
    "DistillationLoss": (
        lambda: nn.DistillationLoss(beta=0.2),
        lambda: (answers(3)[0], losses.Head(torch.randn(3, 5, 8), torch.randn(11, 8)), ids(3)),
        "fused_linear_jsd",
    ),
    "FusedLinearLogProb": (
        lambda: nn.FusedLinearLogProb(temperature=0.7, outputs=("log_prob", "entropy")),
        lambda: (*head(), target, leaf(11)),
        "fused_linear_log_prob",
    ),
}
every_module = pytest.mark.parametrize("name", MODULES)
with_parameters = pytest.mark.parametrize(
    "name", [n for n in MODULES if "Loss" not in n and "max" not in n][:-1]
)


def build(name, **factory):
    """A module with random parameters, and inputs for it."""
    module, inputs = MODULES[name][0](**factory), MODULES[name][1]()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    return module, inputs


def run(module, inputs):
    """Results and gradients of inputs and parameters; a norm's of its plain sum would be zero."""
    results = tensors(module(*inputs))
    leaves = [t for t in (*tensors(inputs), *module.parameters()) if t.requires_grad]
    reached = [r for r in results if r.requires_grad]
    upstream = [torch.linspace(0.5, 1, r.numel()).view(r.shape).to(r.dtype) for r in reached]
    return [*results, *torch.autograd.grad(reached, leaves, upstream)]


def tensors(value):
    """The tensors in what a module takes or gives."""
    if isinstance(value, losses.Head):
        value = (value.hidden, value.weight, value.bias)
    if isinstance(value, tuple | list):
        return [t for part in value for t in tensors(part)]
    return [value] if isinstance(value, torch.Tensor) else []


def same(left, right):
    for a, b in zip(left, right, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


# --- the classes they stand for ---


def transformers_class(family, name, size_or_config):
    module = pytest.importorskip(f"transformers.models.{family}.modeling_{family}")
    return getattr(module, name)(size_or_config)


STOCK = {
    "RMSNorm-llama": (lambda: nn.RMSNorm(16), ("llama", "LlamaRMSNorm", 16)),
    "RMSNorm-olmo2": (lambda: nn.RMSNorm(16, casting="olmo"), ("olmo2", "Olmo2RMSNorm", 16)),
    "GemmaRMSNorm": (lambda: nn.GemmaRMSNorm(16), ("gemma", "GemmaRMSNorm", 16)),
    "SwiGLUMLP": (lambda: nn.SwiGLUMLP(config()), ("llama", "LlamaMLP", config())),
    "SwiGLUMLP-bias": (
        lambda: nn.SwiGLUMLP(config(mlp_bias=True)),
        ("llama", "LlamaMLP", config(mlp_bias=True)),
    ),
    "GEGLUMLP": (lambda: nn.GEGLUMLP(GELU), ("gemma", "GemmaMLP", GELU)),
    "GEGLUMLP-exact": (
        lambda: nn.GEGLUMLP(config(hidden_activation="gelu")),
        ("gemma2", "Gemma2MLP", config(hidden_activation="gelu")),
    ),
    "PackedSwiGLUMLP": (lambda: nn.PackedSwiGLUMLP(config()), ("phi3", "Phi3MLP", config())),
    "SwiGLUMLP-multipliers": (
        lambda: nn.SwiGLUMLP(config(mlp_multipliers=(0.3, 1.7))),
        ("falcon_h1", "FalconH1MLP", config(mlp_multipliers=(0.3, 1.7))),
    ),
    "ClampedSwiGLUMLP": (
        lambda: nn.ClampedSwiGLUMLP(config(swiglu_limit=0.75)),
        ("deepseek_v4", "DeepseekV4MLP", config(swiglu_limit=0.75)),
    ),
    "RMSNorm-centered": (
        lambda: nn.RMSNorm(16, casting="olmo", offset=1.0),
        ("muse_spark", "MuseSparkTextCenteredRMSNorm", 16),
    ),
}


@pytest.mark.parametrize("dtypes", [(HALF, HALF), (HALF, WIDE), (WIDE, WIDE)])
@pytest.mark.parametrize("name", STOCK)
def test_state_and_results_are_those_of_transformers(name, dtypes):
    """State goes both ways; forward is equal in bits, gradients in fp32 within rounding."""
    make, stock = STOCK[name]
    if "MLP" in name and dtypes[0] != dtypes[1]:
        pytest.skip("linear layers take one dtype")
    ours, theirs = make().to(dtypes[1]), transformers_class(*stock).to(dtypes[1])
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    ours.load_state_dict(theirs.state_dict())
    inputs = [(torch.randn(3, 5, 16).to(dtypes[0])).requires_grad_() for _ in range(2)]
    inputs[1].data.copy_(inputs[0].data)
    (y, *grads), (right, *others) = run(ours, inputs[:1]), run(theirs, inputs[1:])
    same([y], [right])
    if dtypes[0] == WIDE:
        assert_same_gradients(grads, others)
    again = transformers_class(*stock).to(dtypes[1])
    again.load_state_dict(ours.state_dict())
    same(again.state_dict().values(), theirs.state_dict().values())


@pytest.mark.parametrize(
    "arguments", [(16,), ([16], 1e-3), ((16,), 1e-5, False), (16, 1e-5, True, False)]
)
def test_layer_norm_is_that_of_torch(arguments):
    ours, theirs = nn.LayerNorm(*arguments), torch.nn.LayerNorm(*arguments)
    assert isinstance(ours, torch.nn.LayerNorm)
    assert repr(ours) == repr(theirs)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter)
    ours.load_state_dict(theirs.state_dict())
    x = leaf(3, 5, 16)
    (y, *grads), (right, *others) = run(ours, (x,)), run(theirs, (x,))
    same([y], [right])
    assert_same_gradients(grads, others)


@pytest.mark.parametrize("shape", [(11,), (6, 11), (6, 11, 4), (2, 11, 3, 4)])
@pytest.mark.parametrize(
    "options",
    [{}, {"reduction": "none"}, {"reduction": "sum"}, {"label_smoothing": 0.2, "ignore_index": 3}],
)
def test_cross_entropy_loss_is_that_of_torch(shape, options):
    """Classes on axis 1 of more than two, and none but classes on one axis."""
    logits, rows = leaf(*shape), (*shape[:1], *shape[2:]) if len(shape) > 1 else ()
    ids, weight = torch.randint(11, rows), torch.rand(11) + 0.5
    ours, theirs = (
        module_class(weight, **options)
        for module_class in (nn.CrossEntropyLoss, torch.nn.CrossEntropyLoss)
    )
    ours.load_state_dict(theirs.state_dict())
    torch.testing.assert_close([*run(ours, (logits, ids))], [*run(theirs, (logits, ids))])


def test_deprecated_reduction_arguments_of_torch():
    with pytest.warns(UserWarning, match="reduction='sum'"):
        assert nn.CrossEntropyLoss(size_average=False).reduction == "sum"


@pytest.mark.parametrize("stock", [torch.nn.LayerNorm, torch.nn.CrossEntropyLoss])
def test_signatures_of_torch_are_kept(stock):
    ours = inspect.signature(getattr(nn, stock.__name__)).parameters
    theirs = inspect.signature(stock).parameters
    positional = [p for p in ours.values() if p.kind is not p.KEYWORD_ONLY]
    assert [(p.name, p.default) for p in positional] == [
        (p.name, p.default) for p in theirs.values()
    ]


# --- every module ---


def test_every_module_is_here():
    assert {n.partition("-")[0] for n in MODULES} == set(nn.__all__)


@every_module
def test_a_module_calls_its_operator_with_all_its_options(name, monkeypatch):
    """Options at other values than their defaults reach the operator under their names."""
    module, inputs = build(name)
    signature = inspect.signature(getattr(ops, MODULES[name][2]))
    calls = recorded(monkeypatch, ops, MODULES[name][2], signature.bind)
    module(*inputs)
    observed = calls[-1].arguments
    for option in inspect.signature(type(module)).parameters:
        if hasattr(module, option) and option in signature.parameters:
            value = getattr(module, option)
            assert observed[option] is value or observed[option] == value, option


LOSS_OPTIONS = {
    "reduction": "sum",
    "label_smoothing": 0.1,
    "ignore_index": 3,
    "z_loss": 0.01,
    "softcap": 3.0,
    "inplace": True,
    "validate": True,
    "outputs": ("lse",),
    "logit_scale": 0.5,
    "chunk": 2,
    "accumulate": torch.float64,
    "compact": False,
    "temperature": 0.5,
}


@pytest.mark.parametrize(
    ("module", "op"),
    [
        (nn.CrossEntropyLoss, "cross_entropy"),
        (nn.FusedLinearCrossEntropyLoss, "fused_linear_cross_entropy"),
        (nn.FusedLinearLogProb, "fused_linear_log_prob"),
    ],
)
def test_losses_have_and_hand_on_every_option_of_the_operator(module, op, monkeypatch):
    options = [
        n
        for n, p in inspect.signature(getattr(ops, op)).parameters.items()
        if p.kind is p.KEYWORD_ONLY and n != "class_weight"
    ]
    inputs = {n: LOSS_OPTIONS[n] for n in options}
    observed = {}
    monkeypatch.setattr(ops, op, lambda *args, **kwargs: observed.update(kwargs))
    loss = module(**inputs)
    loss(*([leaf(6, 11), target] if op == "cross_entropy" else [*head(), target]))
    assert {n: observed[n] for n in options} == inputs
    assert set(inputs) <= set(vars(loss)), "attributes have the names of arguments"


@every_module
def test_copies_and_pickles_compute_the_same(name):
    module, inputs = build(name)
    right = run(module, inputs)
    same(run(copy.deepcopy(module), inputs), right)
    same(run(pickle.loads(pickle.dumps(module)), inputs), right)
    saved = io.BytesIO()
    torch.save(module.state_dict(), saved)
    saved.seek(0)
    other = MODULES[name][0]()
    other.load_state_dict(torch.load(saved, weights_only=True))
    same(run(other, inputs), right)


@every_module
def test_one_graph_under_the_compiler(name):
    module, inputs = build(name)
    right = run(module, inputs)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close([*run(compiled, inputs)], [*right], rtol=1e-5, atol=1e-6)


@with_parameters
def test_device_and_dtype_of_the_parameters(name):
    module = MODULES[name][0](device="meta", dtype=HALF)
    assert {(p.device.type, p.dtype) for p in module.parameters()} <= {("meta", HALF)}
    with torch.device("meta"):
        assert {p.device.type for p in MODULES[name][0]().parameters()} <= {"meta"}
    assert {p.dtype for p in MODULES[name][0]().parameters()} <= {WIDE}


CONDITIONED = ("GatedRMSNorm", "ModulatedRMSNorm", "GroupNorm", "PolyNorm")


@pytest.mark.parametrize(
    "name", [n for n in MODULES if "Norm" in n and n.partition("-")[0] not in CONDITIONED]
)
def test_reset_makes_a_norm_that_only_normalizes(name):
    module, inputs = build(name)
    module.reset_parameters()
    fresh = MODULES[name][0]()
    same(module.state_dict().values(), fresh.state_dict().values())
    y = module(*inputs)
    y = y if isinstance(y, torch.Tensor) else y.y
    torch.testing.assert_close(y.square().mean(-1), torch.ones(3), rtol=2e-3, atol=0)


@pytest.mark.parametrize(
    ("module", "text"),
    [
        (nn.RMSNorm(8), "RMSNorm((8,), eps=1e-06)"),
        (
            nn.RMSNorm(8, 1e-5, casting="olmo", offset=1.0, elementwise_affine=False),
            "RMSNorm((8,), eps=1e-05, offset=1.0, casting='olmo', elementwise_affine=False)",
        ),
        (nn.GemmaRMSNorm(8), "GemmaRMSNorm((8,), eps=1e-06)"),
        (nn.FusedAddRMSNorm(8), "FusedAddRMSNorm((8,), eps=1e-06)"),
        (nn.CrossEntropyLoss(), "CrossEntropyLoss()"),
        (
            nn.CrossEntropyLoss(torch.ones(3), reduction="sum", z_loss=0.1),
            "CrossEntropyLoss(reduction='sum', z_loss=0.1)",
        ),
        (
            nn.FusedLinearCrossEntropyLoss(chunk="1GiB", softcap=30.0),
            "FusedLinearCrossEntropyLoss(softcap=30.0, chunk='1GiB')",
        ),
        (nn.FusedLinearLogProb(temperature=2.0), "FusedLinearLogProb(temperature=2.0)"),
    ],
)
def test_repr_says_what_was_chosen(module, text):
    assert repr(module) == text


def test_gemmas_name_of_eps_is_the_same_number():
    norm = nn.GemmaRMSNorm(8, eps=0.25)
    assert norm.eps == norm.variance_epsilon == 0.25
    norm.eps = 4.0
    torch.testing.assert_close(norm(torch.ones(2, 8)), torch.full((2, 8), 5**-0.5))


def test_class_weights_follow_the_module():
    for module_class, name in (
        (nn.CrossEntropyLoss, "weight"),
        (nn.FusedLinearCrossEntropyLoss, "class_weight"),
    ):
        loss = module_class(torch.ones(11)).to(torch.float64)
        assert getattr(loss, name).dtype == torch.float64
        assert set(loss.state_dict()) == {name}
        assert set(module_class().state_dict()) == set()


def test_statistics_beside_the_loss():
    out = nn.CrossEntropyLoss(outputs=("lse",))(leaf(6, 11), target)
    assert isinstance(out, ops.CrossEntropyOutput)
    assert out.lse.shape == (6,)


def test_a_residual_block_of_modules_is_that_of_transformers():
    """Two sublayers with a stream between them: the sum is handed on, not computed twice."""
    stock = [transformers_class("llama", "LlamaRMSNorm", 16) for _ in range(2)]
    first, second = nn.RMSNorm(16), nn.FusedAddRMSNorm(16)
    mlp = torch.nn.Linear(16, 16, bias=False)
    for ours, theirs in zip((first, second), stock, strict=True):
        torch.nn.init.normal_(theirs.weight)
        ours.load_state_dict(theirs.state_dict())
    x = leaf(3, 5, 16)
    y, stream = second(mlp(first(x)), x)
    ours = stream + mlp(y)
    middle = x + mlp(stock[0](x))
    right = middle + mlp(stock[1](middle))
    assert torch.equal(ours, right)
    (dx,), (expected,) = (torch.autograd.grad(out.square().sum(), x) for out in (ours, right))
    torch.testing.assert_close(dx, expected, rtol=1e-4, atol=1e-4)


# --- bad arguments ---

BAD = [
    (lambda: nn.RMSNorm(0), ValueError, "RMSNorm: hidden_size must be at least 1, got 0"),
    (lambda: nn.RMSNorm([16]), TypeError, "hidden_size must be an integer, got list"),
    (lambda: nn.RMSNorm(8, -1.0), ValueError, "eps must be at least 0, got -1.0"),
    (lambda: nn.RMSNorm(8, None), TypeError, "eps must be a number, got NoneType"),
    (lambda: nn.RMSNorm(8, casting="lama"), ValueError, "did you mean 'llama'"),
    (lambda: nn.FusedAddRMSNorm(8, offset="1"), TypeError, "FusedAddRMSNorm: offset"),
    (lambda: nn.RMSNorm(8)(torch.ones(2, 7)), ValueError, r"must be 8, got .*\(2, 7\)"),
    (
        lambda: nn.RMSNorm(8, elementwise_affine=False)(torch.ones(2, 7)),
        ValueError,
        "RMSNorm: the last axis of the input must be 8",
    ),
    (lambda: nn.LayerNorm((4, 8)), ValueError, r"last axis only, got normalized_shape \(4, 8\)"),
    (lambda: nn.LayerNorm(()), ValueError, r"got normalized_shape \(\)"),
    (lambda: nn.LayerNorm("8"), TypeError, "an integer or a sequence of one, got str"),
    (lambda: nn.LayerNorm(8, True), TypeError, "eps must be a number, got bool"),
    (lambda: nn.LayerNorm(8, 1e-5, False)(torch.ones(2, 7)), ValueError, "must be 8"),
    (
        lambda: nn.SwiGLUMLP(config(hidden_act="gelu")),
        ValueError,
        "SwiGLUMLP: unknown activation 'gelu'.*silu",
    ),
    (lambda: nn.PackedSwiGLUMLP(GELU), ValueError, "unknown activation 'gelu_pytorch_tanh'"),
    (lambda: nn.GEGLUMLP(config()), ValueError, "unknown activation 'silu'.*gelu"),
    (lambda: nn.SwiGLUMLP(16), TypeError, "config must be the configuration of a model.*int 16"),
    (lambda: nn.SwiGLUMLP(config(), 0), ValueError, "intermediate_size must be at least 1"),
    (lambda: nn.CrossEntropyLoss(reduction="avg"), ValueError, "unknown reduction 'avg'"),
    (lambda: nn.CrossEntropyLoss(label_smoothing=2.0), ValueError, r"in \[0, 1\], got 2.0"),
    (lambda: nn.CrossEntropyLoss(outputs=("entrpy",)), ValueError, "did you mean 'entropy'"),
    (lambda: nn.CrossEntropyLoss(ignore_index=0.5), TypeError, "ignore_index must be an integer"),
    (
        lambda: nn.CrossEntropyLoss()(torch.ones(2, 3, 5), torch.zeros(2, 3).long()),
        ValueError,
        r"classes are axis 1, as in PyTorch.*target of shape \(2, 5\), got \(2, 3\)",
    ),
    (
        lambda: nn.CrossEntropyLoss()(torch.ones(2, 3), torch.ones(2, 3) / 3),
        TypeError,
        "integer class ids",
    ),
    (lambda: nn.FusedLinearCrossEntropyLoss(chunk=0), ValueError, "chunk must be 'auto'"),
    (lambda: nn.FusedLinearCrossEntropyLoss(softcap=0), ValueError, "softcap must be above 0"),
    (lambda: nn.FusedLinearLogProb(temperature=0.0), ValueError, "temperature must be above 0"),
    (lambda: nn.FusedLinearLogProb(outputs=("lsa",)), ValueError, "did you mean 'lse'"),
]


test_bad_arguments_are_named = harness.refuses(BAD)


def test_backends_are_chosen_as_for_operators():
    with (
        liger_multi.use(rms_norm="npu"),
        pytest.raises(liger_multi.errors.BackendUnavailableError, match="npu"),
    ):
        nn.RMSNorm(8)(torch.ones(2, 8))


# --- modules of operators ---


@pytest.mark.slow
def test_modules_load_beside_an_operator_that_somebody_wrapped():
    """Modules load when they are first asked for; their signatures are those of the contracts."""
    code = """
import liger_multi
from liger_multi import ops
real = ops.jsd
ops.jsd = lambda *args, **options: real(*args, **options)
assert liger_multi.nn.JSDLoss(0.3, form="logits").beta == 0.3
"""
    harness.python("-c", code)


# The linear layer: PyTorch's own by default, to the bit, and with independent rows on request.


DTYPES = (torch.float32, torch.bfloat16)
SHAPES = [(37, 64), (3, 17, 64), (1, 64), (64,), (2, 3, 5, 64), (1500, 64), (0, 64)]


def layer(shape, dtype, bias):
    generator = torch.Generator().manual_seed(0)
    sizes = [shape, (96, shape[-1]), *([(96,)] if bias else [])]
    return [torch.randn(s, generator=generator).to(dtype).requires_grad_() for s in sizes]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_it_equals_pytorch_to_the_bit(dtype, shape, bias):
    inputs = layer(shape, dtype, bias)
    right, actual = F.linear(*inputs), ops.linear(*inputs)
    assert torch.equal(actual, right)
    dy = torch.randn(right.shape).to(dtype)
    assert_equal(torch.autograd.grad(actual, inputs, dy), torch.autograd.grad(right, inputs, dy))


@pytest.mark.parametrize("inputs", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mode", [False, "rows"])
def test_autocast_has_the_dtype_of_pytorch(inputs, mode):
    x, weight, bias = layer((4, 64), inputs, True)
    with torch.autocast("cpu", torch.bfloat16), liger_multi.use(deterministic=mode):
        right, actual = F.linear(x, weight, bias), ops.linear(x, weight, bias)
    assert actual.dtype == right.dtype
    torch.testing.assert_close(actual, right)
    grads = torch.autograd.grad(actual.sum(), (x, weight, bias))
    assert [g.dtype for g in grads] == [inputs] * 3


def test_two_dtypes_raise_as_they_do_in_pytorch():
    x, weight, bias = layer((4, 64), torch.float32, True)
    for wrong in ((x.bfloat16(), weight, bias), (x, weight.bfloat16(), bias)):
        with pytest.raises(RuntimeError):
            F.linear(*wrong)
        with pytest.raises(TypeError, match="one dtype is needed"):
            ops.linear(*wrong)


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        ({"x": torch.ones(2, 3, dtype=torch.int64)}, TypeError, "x must be a floating-point"),
        ({"x": torch.ones(2, 4)}, ValueError, "the last axis of x must be K = 3"),
        ({"x": torch.ones(())}, ValueError, "the last axis of x must be K = 3"),
        ({"weight": torch.ones(3)}, ValueError, r"weight must have shape \(N, K\)"),
        ({"bias": torch.ones(1)}, ValueError, r"bias must have shape \(5,\)"),
        ({"weight": torch.ones(5, 3, device="meta")}, ValueError, "one device"),
    ],
)
def test_wrong_arguments(wrong, error, text):
    inputs = {"x": torch.ones(2, 3), "weight": torch.ones(5, 3), "bias": torch.ones(5)}
    with pytest.raises(error, match=text):
        ops.linear(**{**inputs, **wrong})


def test_only_what_a_gradient_needs_is_kept():
    x, weight, bias = layer((4, 64), torch.float32, True)
    for inputs in (
        (x, weight, bias),
        (x.detach(), weight, bias),
        (x, weight.detach(), bias),
        (x.detach(), weight.detach(), bias),
    ):
        y, kept = saved(lambda inputs=inputs: ops.linear(*inputs))
        shapes = sorted(tuple(t.shape) for t in kept if t.numel())
        expected = [tuple(x.shape)] * inputs[1].requires_grad
        expected += [tuple(weight.shape)] * inputs[0].requires_grad
        assert shapes == sorted(expected)
        assert len(torch.autograd.grad(y.sum(), [t for t in inputs if t.requires_grad])) > 0


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_rows_are_independent_on_request(dtype):
    """Also of the batch's form, and of what stands in the other rows."""
    x, weight, bias = layer((4, 9, 64), dtype, True)
    dy = torch.randn(4, 9, 96).to(dtype)
    with liger_multi.use(deterministic="rows"):
        y = ops.linear(x, weight, bias)
        (dx,) = torch.autograd.grad(y, x, dy)
        for part in (slice(0, 1), slice(1, 3), slice(3, 4)):
            alone = x[part].detach().requires_grad_()
            output = ops.linear(alone, weight, bias)
            assert torch.equal(output, y[part])
            assert torch.equal(torch.autograd.grad(output, alone, dy[part])[0], dx[part])
        assert torch.equal(ops.linear(x.flatten(0, 1), weight, bias), y.flatten(0, 1))
        assert torch.equal(ops.linear(x[2, 3], weight, bias), y[2, 3])


def test_a_compiled_layer_is_pytorchs_gemm():
    """No call that the compiler cannot look into, unless rows must be independent."""
    x, weight, bias = layer((4, 64), torch.float32, True)

    def graph(mode):
        torch._dynamo.reset()
        graphs = []

        def backend(module, _):
            graphs.append(str(module.graph))
            return module

        from torch._dynamo.backends.common import aot_autograd

        compiled = torch.compile(
            ops.linear, backend=aot_autograd(fw_compiler=backend), fullgraph=True
        )
        with liger_multi.use(deterministic=mode):
            y = compiled(x, weight, bias)
        torch.testing.assert_close(y, F.linear(x, weight, bias))
        return graphs[0]

    assert "liger_multi" not in graph(False)
    assert "addmm" in graph(False)
    assert "liger_multi.linear_forward" in graph("rows")
