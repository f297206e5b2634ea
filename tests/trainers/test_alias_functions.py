"""The ``Liger*Function`` classes: values and gradients against formulas in fp64.

Liger-Kernel's own tests (``make test-liger``) run its modules and losses in all their forms.
"""

import importlib
import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from liger_multi.compat.liger_kernel import functional, modules, op_functions
from liger_multi.compat.liger_kernel.signatures import NAMES
from liger_multi.testing import FORMULAS
from tests import harness, processes

TARGET = torch.tensor([1, -100, 3, 4, 10, 0])
VALID = TARGET != -100


def function(name):
    return getattr(op_functions, name)


def draw(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(shape, generator=generator)


R = draw()


def log_probs(*shape):
    return R(*shape).log_softmax(-1)


# --- what a class computes, by the formulas of our operators or of PyTorch ---

f = SimpleNamespace(**FORMULAS)


def four(output):
    """Liger's outputs of a loss, of which the loss alone has a gradient."""
    loss, *rest = (getattr(output, name) for name in NAMES)
    return loss, *(None if value is None else value.detach() for value in rest)


def scaled(x, w, t, ids):
    out = f.fused_linear_log_prob(x, w, t, temperature=0.7, outputs=("log_prob", "entropy"))
    chosen = (x @ w.T / 0.7).log_softmax(-1)[:, ids]
    return -out.log_prob, out.entropy, torch.where(VALID[:, None], chosen, 0)


def kl_of_head(x, w, p, labels=True, divide=1.0):
    rows = F.kl_div((x @ w.T / 1.5).log_softmax(-1), p, reduction="none").sum(-1)
    return (rows[VALID] if labels else rows).mean() / divide


def mlp(x, gate, up, down, first=1.0, last=1.0):
    return (F.silu(x @ gate.T * first) * (x @ up.T)) @ down.T * last


def coefficients(x, phi, b, *alphas):
    flat = x.flatten(-2)
    parts = (flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + 1e-6)) @ phi
    n = x.shape[-2]
    pre, post, mix = (
        a * m + c for a, m, c in zip(alphas, parts.split([n, n, n * n], -1), b.split([n, n, n * n]))
    )
    mix = mix.unflatten(-1, (n, n)).softmax(-1) + 1e-6
    mix = mix / (mix.sum(-2, keepdim=True) + 1e-6)
    for _ in range(19):
        mix = mix / (mix.sum(-1, keepdim=True) + 1e-6)
        mix = mix / (mix.sum(-2, keepdim=True) + 1e-6)
    return pre.sigmoid() + 1e-3, 2 * post.sigmoid(), mix


def angles(*shape):
    return torch.cat([R(*shape[:-1], shape[-1] // 2)] * 2, -1)


# --- cases: a class, its arguments, and the same of those that are tensors ---

A, M, FREQS = angles(1, 6, 8), angles(3, 2, 6, 8), torch.polar(torch.ones(6, 4), R(6, 4))
INDEX = torch.tensor([[0, 1], [1, 2], [2, 0], [0, 2], [1, 0]])
IDS = torch.tensor([0, 3, 3])
FEW = torch.tensor([[0, 3], [3, 6]])

CASES = {
    "LigerCrossEntropyFunction": (
        (R(6, 11), TARGET, None, -100, 0.1, 0.1, "mean", 5.0, True, True, True),
        lambda z, t: four(
            f.cross_entropy(
                z, t, z_loss=0.1, label_smoothing=0.1, softcap=5.0, outputs=tuple(NAMES[1:])
            )
        ),
    ),
    "LigerJSDFunction": (
        (log_probs(6, 11), log_probs(6, 11), TARGET, 0.3),
        lambda q, p, t: f.jsd(q, p, t, beta=0.3),
    ),
    "LigerKLDivLossFunction": (
        (log_probs(6, 11), log_probs(6, 11).exp()),
        lambda q, p: F.kl_div(q, p, reduction="batchmean"),
    ),
    "LigerKLDivLossFunction none": (
        (log_probs(6, 11), log_probs(6, 11), "none", True),
        lambda q, p: F.kl_div(q, p, reduction="none", log_target=True),
    ),
    "LigerTVDLossFunction": (
        (log_probs(6, 11).exp(), log_probs(6, 11).exp(), TARGET),
        lambda p, q, t: f.tvd(p, q, t),
    ),
    "LigerTVDLossFunction none": (
        (log_probs(6, 11).exp(), log_probs(6, 11).exp(), None, "none"),
        lambda p, q: 0.5 * (p - q).abs(),
    ),
    "LigerFusedCETVDFunction": (
        (R(6, 11), R(6, 11), TARGET),
        lambda z, y, t: (
            f.cross_entropy(z, t, reduction="none"),
            f.tvd(z, y, t, form="logits", reduction="none"),
        ),
    ),
    "LigerVocabParallelCEFunction": (
        (R(3, 2, 11), TARGET.reshape(3, 2), None, -100, 0.1, "pytorch", "global"),
        lambda z, t: f.cross_entropy(z, t, label_smoothing=0.1, reduction="none"),
    ),
    "LigerVocabParallelCEFunction megatron": (
        (R(3, 2, 11), TARGET.reshape(3, 2), None, -100, 0.1, "megatron", "partition"),
        lambda z, t: f.cross_entropy(z, t, label_smoothing=0.11, reduction="none"),
    ),
    "LigerFusedLinearCrossEntropyFunction": (
        (R(6, 8), R(11, 8), TARGET, R(11), None, -100, 0.1, 0.1, "sum", None, True),
        lambda x, w, t, b: four(
            f.fused_linear_cross_entropy(
                x, w, t, b, z_loss=0.1, label_smoothing=0.1, reduction="sum", outputs=("z_loss",)
            )
        ),
    ),
    "LigerFusedLinearScaledCrossEntropyFunction": (
        (R(6, 8), R(11, 8), TARGET, 0.7, -100, 1, True, IDS),
        scaled,
    ),
    "LigerFusedLinearScaledCrossEntropyFunction alone": (
        (R(6, 8), R(11, 8), TARGET),
        lambda x, w, t: -f.fused_linear_log_prob(x, w, t, outputs=("log_prob",)).log_prob,
    ),
    "LigerFusedLinearJSDFunction": (
        (R(6, 8), R(11, 8), R(6, 5), R(11, 5), TARGET, 0.3, -100, 2.0),
        lambda x, w, y, v, t: f.fused_linear_jsd(x, w, y, v, t, beta=0.3, temperature=2.0),
    ),
    "LigerFusedLinearKLDivFunction": (
        (R(6, 8), R(11, 8), log_probs(6, 11).exp(), TARGET, "batchmean", -100, 1.5),
        lambda x, w, p, t: kl_of_head(x, w, p),
    ),
    "LigerFusedLinearKLDivFunction mean": (
        (R(6, 8), R(11, 8), log_probs(6, 11).exp(), None, "mean", 0, 1.5),
        lambda x, w, p: kl_of_head(x, w, p, False, 11),
    ),
    "LigerRMSNormFunction": (
        (R(3, 4, 8), R(8), 1e-5, 1.0, "gemma"),
        lambda x, w: f.rms_norm(x, w, 1e-5, offset=1.0, casting="gemma"),
    ),
    "LigerFusedAddRMSNormFunction": (
        (R(3, 4, 8), R(3, 4, 8), R(8), 1e-5),
        lambda x, r, w: f.fused_add_rms_norm(x, r, w, 1e-5),
    ),
    "LigerModulatedRMSNormFunction": (
        (R(2, 3, 8), R(8), R(2, 8), R(2, 8), 1e-5),
        lambda x, w, a, b: f.modulated_rms_norm(x, a, b, w, 1e-5),
    ),
    "LigerLayerNormFunction": (
        (R(3, 4, 8), R(8), R(8), 1e-5),
        lambda x, w, b: F.layer_norm(x, (8,), w, b, 1e-5),
    ),
    "LigerGroupNormFunction": (
        (R(2, 6, 8), R(6), R(6), 6, 3, 1e-5),
        lambda x, w, b: F.group_norm(x, 3, w, b, 1e-5),
    ),
    "LigerPolyNormFunction": (
        (R(3, 4, 8), R(3), torch.tensor(0.5)),
        lambda x, w, b: f.poly_norm(x, w, b.reshape(1)),
    ),
    "LigerDyTFunction": ((R(3, 8), R(1), R(8), R(8)), f.dyt),
    "LigerReLUSquaredFunction": ((R(3, 8),), f.relu_squared),
    "LigerSoftmaxFunction": ((R(3, 8),), f.softmax),
    "LigerSparsemaxFunction": ((R(3, 8), -1), f.sparsemax),
    "LigerSiLUMulFunction": (
        (R(3, 8), R(3, 8), 1.5, 0.7),
        lambda a, b: F.silu(1.5 * a) * b * 0.7,
    ),
    "LigerGELUMulFunction": ((R(3, 8), R(3, 8)), f.geglu),
    "LigerFusedGateUpSiLUMulFunction": ((R(3, 16),), f.swiglu_packed),
    "LigerRopeFunction": (
        (R(2, 4, 6, 16), R(2, 2, 6, 16), A.cos(), A.sin(), None, 1, 8),
        lambda q, k, c, s: f.rope(q, k, c, s, rotary_dim=8),
    ),
    "LigerQwen2VLMRopeFunction": (
        (R(2, 4, 6, 8), R(2, 2, 6, 8), M.cos(), M.sin(), [1, 1, 2]),
        lambda q, k, c, s: f.rope_multimodal(q, k, c, s, [1, 1, 2]),
    ),
    "LigerLlama4RopeFunction": (
        (R(2, 6, 4, 8), R(2, 6, 2, 8), FREQS),
        lambda q, k, freqs: f.rope_complex(q, k, torch.view_as_real(freqs)),
    ),
    "LigerMLPFunction": ((R(3, 8), R(12, 8), R(12, 8), R(8, 12)), mlp),
    "LigerMLPFunction multiplied": (
        (R(3, 8), R(12, 8), R(12, 8), R(8, 12), 1.5, 0.5),
        lambda *tensors: mlp(*tensors, 1.5, 0.5),
    ),
    "LigerFusedMoEFunction": (
        (R(5, 8), R(3, 8, 8), R(3, 8, 4), INDEX, R(5, 2).softmax(-1)),
        f.fused_moe,
    ),
    "LigerMHCCoeffsFunction": (
        (
            *(R(3, 4, 8), R(32, 24) * 0.1, R(24), R(1)[0], R(1)[0], R(1)[0]),
            *(True, 20, 1e-6, 1e-3, 1e-6, 2.0),
        ),
        coefficients,
    ),
    "LigerMHCPreFunction": ((R(3, 4, 8), R(3, 4)), f.hyper_connections_pre),
    "LigerMHCPostResFunction": (
        (R(3, 4, 8), R(3, 8), R(3, 4), R(3, 4, 4)),
        lambda x, out, post, mix: post.unsqueeze(-1) * out.unsqueeze(-2) + mix @ x,
    ),
    "LigerAttnResFunction": ((R(3, 2, 4, 8), R(8), R(8), 1e-6), f.attention_residuals),
    "LigerMultiTokenAttentionFunction": (
        (R(2, 2, 8, 8), R(2, 2, 3, 3), R(2), 1, 1),
        lambda scores, w, b: f.multi_token_attention(scores, w, b, padding=1),
    ),
    "LigerFusedNeighborhoodAttentionFunction": (
        (R(2, 2, 16, 8), R(2, 2, 16, 8), R(2, 2, 16, 8), 5),
        lambda q, k, v: f.neighborhood_attention(q, k, v, 5),
    ),
    "LigerEmbeddingFunction": ((R(7, 8), FEW), lambda w, i: w[i]),
}

CONSTANT = {  # arguments that get no gradient, as there
    "LigerJSDFunction": (1,),
    "LigerKLDivLossFunction": (1,),
    "LigerTVDLossFunction": (1,),
    "LigerFusedCETVDFunction": (1,),
    "LigerFusedLinearJSDFunction": (2, 3),
    "LigerFusedLinearKLDivFunction": (2,),
    "LigerRopeFunction": (2, 3),
    "LigerQwen2VLMRopeFunction": (2, 3),
}


def leaves(args, dtype):
    return [
        a.to(dtype, copy=True).requires_grad_()
        if isinstance(a, torch.Tensor) and a.is_floating_point()
        else a
        for a in args
    ]


def gradients(outputs, inputs):
    seeds = draw(1)
    outs = [o for o in outputs if o is not None and o.requires_grad]
    total = sum((o * seeds(*o.shape).to(o.dtype)).sum() for o in outs)
    leaves = [x for x in inputs if isinstance(x, torch.Tensor) and x.requires_grad]
    return torch.autograd.grad(total, leaves, allow_unused=True)


def several(x):
    return x if isinstance(x, tuple) else (x,)


@pytest.mark.parametrize("case", CASES)
def test_functions_match_formulas(case):
    args, formula = CASES[case]
    name = case.split()[0]
    ours, wide = leaves(args, torch.float32), leaves(args, torch.float64)
    got = several(function(name).apply(*ours))
    expected = several(formula(*(x for x in wide if isinstance(x, torch.Tensor))))
    torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-6, check_dtype=False)
    constant = {id(ours[i]) for i in CONSTANT.get(name, ())}
    inputs = [x for x in ours if isinstance(x, torch.Tensor) and x.requires_grad]
    for x, mine, exact in zip(inputs, gradients(got, ours), gradients(expected, wide)):
        if id(x) in constant:
            assert mine is None
        else:
            torch.testing.assert_close(mine.double(), exact, rtol=1e-4, atol=1e-5)


def test_classes_of_ops():
    assert all(issubclass(function(name), torch.autograd.Function) for name in CLASSES)
    shown = {case.split()[0] for case in CASES}
    apart = {"LigerTiledMLPFunction", "LigerFusedLinearScaledCrossEntropyTPFunction"}
    assert shown | apart == CLASSES


CLASSES = {f"Liger{name}Function" for name in op_functions.CLASSES}
MODULES = {  # options, the class of the same case, its arguments that are parameters, and the call
    "LigerLayerNorm": ((8, 1e-5), "LayerNorm", (1, 2), lambda m, x, *_: m(x)),
    "LigerGroupNorm": ((6, 3, 1e-5), "GroupNorm", (1, 2), lambda m, x, *_: m(x)),
    "LigerPolyNorm": ((), "PolyNorm", (1, 2), lambda m, x, *_: m(x)),
    "LigerDyT": ((8,), "DyT", (1, 2, 3), lambda m, x, *_: m(x)),
    "LigerFusedAddRMSNorm": ((8, 1e-5), "FusedAddRMSNorm", (2,), lambda m, x, r, *_: m(x, r)),
    "LigerModulatedRMSNorm": (
        (8, 1e-5),
        "ModulatedRMSNorm",
        (1,),
        lambda m, x, w, a, b, *_: m(x, a, b),
    ),
    "LigerMultiTokenAttention": (
        (2, 2, 3, 1, 1),
        "MultiTokenAttention",
        (1, 2),
        lambda m, scores, *_: m(scores),
    ),
    "LigerEmbedding": ((7, 8), "Embedding", (0,), lambda m, w, ids: m(ids)),
    "LigerSoftmax": ((), "Softmax", (), lambda m, x: m(x)),
    "LigerSparsemax": ((-1,), "Sparsemax", (), lambda m, x, *_: m(x)),
    "LigerReLUSquared": ((), "ReLUSquared", (), lambda m, x: m(x)),
    "LigerCrossEntropyLoss": (
        (None, -100, 0.1, 0.1, "mean", 5.0, True, True, True),
        "CrossEntropy",
        (),
        lambda m, x, t, *_: tuple(vars(m(x, t)).values()),
    ),
    "LigerFusedLinearCrossEntropyLoss": (
        (None, -100, 0.1, 0.1, "sum", None, True),
        "FusedLinearCrossEntropy",
        (),
        lambda m, x, w, t, b, *_: tuple(vars(m(w, x, t, b)).values()),
    ),
    "LigerFusedLinearJSD": ((0.3, -100, 2.0), "FusedLinearJSD", (), lambda m, *args: m(*args[:5])),
    "LigerJSD": ((0.3,), "JSD", (), lambda m, q, p, t, *_: m(q, p, t)),
    "LigerKLDIVLoss": ((1e-10, None, None, "batchmean"), "KLDivLoss", (), lambda m, q, p: m(q, p)),
    "LigerTVDLoss": ((), "TVDLoss", (), lambda m, p, q, t: m(p, q, t)),
    "LigerFusedLinearKLDivLoss": (
        ("batchmean", -100, 1.5),
        "FusedLinearKLDiv",
        (),
        lambda m, x, w, p, t, *_: m(x, w, p, t),
    ),
    "LigerFusedCETVDLoss": ((), "FusedCETVD", (), lambda m, *args: m(*args)),
    "LigerVocabParallelCrossEntropy": (
        (-100, 0.1),
        "VocabParallelCE",
        (),
        lambda m, z, t, *_: m(z, t),
    ),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules_and_classes_agree(name):
    options, short, places, call = MODULES[name]
    case = f"Liger{short}Function"
    args = leaves(CASES[case][0], torch.float32)
    module = getattr(modules, name)(*options)
    expected = several(function(case).apply(*args))
    with torch.no_grad():
        for parameter, place in zip(module.parameters(), places, strict=True):
            parameter.copy_(args[place])
    torch.testing.assert_close(several(call(module, *args)), expected)


TRACED_FIRST = (
    "LigerRMSNormFunction",
    "LigerSiLUMulFunction",
    "LigerCrossEntropyFunction",
    "LigerFusedLinearCrossEntropyFunction",
    "LigerFusedLinearScaledCrossEntropyFunction",
    "LigerMLPFunction",
    "LigerFusedLinearKLDivFunction",
)
TRACED = [
    pytest.param(case, marks=[] if case.split()[0] in TRACED_FIRST else pytest.mark.slow)
    for case in CASES
]


@pytest.mark.parametrize("case", TRACED)
def test_functions_compile_to_one_graph(case):
    """One graph, with the gradients of eager mode."""
    name, (args, _) = case.split()[0], CASES[case]
    eager, compiled = leaves(args, torch.float32), leaves(args, torch.float32)
    apply = function(name).apply
    actual = several(
        torch.compile(lambda *x: apply(*x), backend="eager", fullgraph=True)(*compiled)
    )
    expected = several(apply(*eager))
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(gradients(actual, compiled), gradients(expected, eager))


# --- what is not a formula ---


Z, X, W = R(6, 11).bfloat16(), R(6, 8).bfloat16(), R(11, 8).bfloat16()
Q, P = (log_probs(6, 11).bfloat16() for _ in range(2))
LOW, WIDE = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("name", "arguments", "dtypes"),
    [
        ("CrossEntropy", (Z, TARGET, None, -100, 0.1, 0.0, "mean", None, True), [LOW, LOW]),
        ("JSD", (Q, P), [LOW]),
        ("KLDivLoss", (Q, P, "none", True), [WIDE]),
        ("TVDLoss", (Q.exp(), P.exp(), None, "none"), [WIDE]),
        (
            "FusedLinearCrossEntropy",
            (X, W, TARGET, None, None, -100, 0.1, 0.0, "mean", None, True),
            [WIDE, LOW],
        ),
        ("FusedLinearScaledCrossEntropy", (X, W, TARGET), [WIDE]),
        ("ModulatedRMSNorm", (X, R(8).bfloat16(), R(8), R(8), 1e-6), [LOW]),
    ],
)
def test_dtypes_of_16_bit_inputs(name, arguments, dtypes):
    outputs = several(function(f"Liger{name}Function").apply(*arguments))
    assert [y.dtype for y in outputs if y is not None] == dtypes


def test_cross_entropy_function_may_overwrite_logits():
    x = R(6, 11).requires_grad_()
    logits, leaf = x * 1, x.detach().clone().requires_grad_()
    kept, places = logits.detach().clone(), logits.data_ptr()
    loss = function("LigerCrossEntropyFunction").apply(logits, TARGET)[0]
    assert logits.data_ptr() == places
    assert not torch.equal(logits.detach(), kept)
    loss.backward()
    function("LigerCrossEntropyFunction").apply(leaf, TARGET)[0].backward()
    assert torch.equal(leaf.detach(), kept)
    torch.testing.assert_close(x.grad, leaf.grad)


NARROW = [*CASES["LigerMHCCoeffsFunction"][0]]
NARROW[6] = False  # allow_fp32
SCALED = (R(6, 8), R(11, 8), TARGET, 1.0, -100, 1, False)
ERRORS = [
    (
        *("LigerFusedLinearScaledCrossEntropyFunction", (*SCALED, torch.tensor([11]))),
        *(ValueError, r"selected_token_ids must lie in \[0, 11\), got \[11\]"),
    ),
    (
        *("LigerFusedLinearScaledCrossEntropyFunction", (*SCALED, torch.tensor([[1], [2]]))),
        *(ValueError, r"of shape \(K,\), got .*\(2, 1\)"),
    ),
    ("LigerMHCCoeffsFunction", NARROW, AssertionError, "allow_fp32"),
]


@pytest.mark.parametrize(("name", "args", "error", "text"), ERRORS)
def test_argument_errors(name, args, error, text):
    with pytest.raises(error, match=text):
        function(name).apply(*args)


def test_tiled_mlp_equals_mlp():
    layer = torch.nn.Sequential(torch.nn.Linear(4, 9), torch.nn.SiLU(), torch.nn.Linear(9, 4))
    calls = []

    def run(module, x):
        calls.append(x.shape[-2])
        return module(x)

    x = R(2, 10, 4).requires_grad_()
    expected = torch.autograd.grad(layer(x).square().sum(), [x, *layer.parameters()])
    for call, pieces in (
        (lambda: function("LigerTiledMLPFunction").apply(run, layer, x, 4), [3, 3, 3, 1]),
        (lambda: op_functions.apply_tiled_mlp(run, layer, x), [4, 4, 2]),
        (lambda: op_functions.apply_tiled_mlp(run, layer, x, 2, list(layer.parameters())), [5, 5]),
    ):
        calls.clear()
        got = torch.autograd.grad(call().square().sum(), [x, *layer.parameters()])
        assert calls[: len(pieces)] == pieces
        torch.testing.assert_close([*got], [*expected])


# --- a vocabulary of two processes ---

RANKS = """
import sys, torch, torch.distributed as dist
import torch.nn.functional as F
from liger_multi.compat.liger_kernel import functional, op_functions

rank, meeting = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
group = dist.group.WORLD
g = torch.Generator().manual_seed(0)
hidden, weight = (torch.randn(*s, generator=g) for s in ((5, 6), (12, 6)))
target, part = torch.tensor([0, 7, -100, 11, 3]), slice(6 * rank, 6 * rank + 6)
valid = target != -100

wide = [x.double().requires_grad_() for x in (hidden, weight)]
z = wide[0] @ wide[1].T / 0.7
entropy = torch.where(valid, -(z.softmax(-1) * z.log_softmax(-1)).sum(-1), 0)
right = F.cross_entropy(z, target, reduction="none"), entropy
ours = [x.clone().requires_grad_() for x in (hidden, weight[part])]
tp = op_functions.LigerFusedLinearScaledCrossEntropyTPFunction
got = tp.apply(*ours, target, group, 0.7, -100, 1, True)
(right[0].sum() + 0.3 * right[1].sum()).backward()
(got[0].sum() + 0.3 * got[1].sum()).backward()
for a, b in zip((*got, ours[0].grad, ours[1].grad), (*right, wide[0].grad, wide[1].grad[part])):
    torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)
assert isinstance(tp.apply(*ours, target, group), torch.Tensor)
function = functional.liger_fused_linear_scaled_cross_entropy_tp
for a, b in zip(function(*ours, target, group, 0.7, return_entropy=True), got):
    assert torch.equal(a, b)

def apply(z, ids, *options):
    of_ranks = op_functions.LigerVocabParallelCEFunction.apply
    return of_ranks(z.unsqueeze(1), ids.unsqueeze(1), *options).squeeze(1)


# a partition smooths over a rank's own classes, as Megatron-Core does
for formula, mode, classes in (
    ("pytorch", "global", 12), ("megatron", "global", 12),
    ("pytorch", "partition", 6), ("megatron", "partition", 6),
):
    share = 0.1 * (classes / (classes - 1) if formula == "megatron" else 1)
    whole = (hidden @ weight.T).double().requires_grad_()
    p = whole.log_softmax(-1)
    nll = F.nll_loss(p, target, reduction="none")
    smooth = p.mean(-1) if mode == "global" else p[:, part].mean(-1)
    right = torch.where(target == -100, 0, (1 - share) * nll - share * smooth)
    mine = (hidden @ weight.T)[:, part].clone().requires_grad_()
    got = apply(mine, target, group, -100, 0.1, formula, mode)
    right.sum().backward()
    got.sum().backward()
    torch.testing.assert_close(got.double(), right, rtol=1e-5, atol=1e-5)
    # a rank's loss reaches its own logits only through its own classes and the normalizer
    torch.testing.assert_close(mine.grad.double(), whole.grad[:, part], rtol=1e-5, atol=1e-5)
torch.testing.assert_close(
    apply(mine, target, group, -100, 0.0, "megatron", "partition").double(),
    F.cross_entropy(whole, target, reduction="none"), rtol=1e-5, atol=1e-5,
)
outside = apply(mine, target.masked_fill(target == 7, 12), group, -100, 0.0, "megatron", "global")
assert outside[target == 7].eq(0).all() and outside[target > 7].gt(0).all()
"""


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="no torch.distributed")
def test_vocab_parallel_losses_on_two_ranks(tmp_path):
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    every = [[str(rank), str(tmp_path / "meeting")] for rank in range(2)]
    for code, text in processes.run(script, tmp_path, every, {}, 120, False):
        assert code == 0, text


MIXED = {
    "rms_norm": lambda f, x, w: f.liger_rms_norm(x, w, 1e-5),
    "rms_norm of gemma": lambda f, x, w: f.liger_rms_norm(x, w, 1e-5, 1.0, "gemma"),
    "modulated_rms_norm": lambda f, x, w: f.liger_modulated_rms_norm(x, None, w, w),
    "layer_norm": lambda f, x, w: f.liger_layer_norm(x, w, w, 1e-5),
    "poly_norm": lambda f, x, w: f.liger_poly_norm(x, w[:3], w[0]),
    "fused_add_rms_norm": lambda f, x, w: f.liger_fused_add_rms_norm(x, x, w, 1e-5),
    "swiglu": lambda f, x, w: f.liger_swiglu(x, w.expand(3, 8)),
    "geglu": lambda f, x, w: f.liger_geglu(x, w.expand(3, 8)),
    "rope": lambda f, x, w: f.liger_rope(x.view(1, 1, 3, 8), x.view(1, 1, 3, 8), *ANGLES),
    "rms_norm module": lambda f, x, w: modules.LigerRMSNorm(8)(x),
    "gemma module": lambda f, x, w: modules.LigerRMSNormForGemma3(8)(x),
    "fused_add_rms_norm module": lambda f, x, w: modules.LigerFusedAddRMSNorm(8)(x, x),
    "poly_norm module": lambda f, x, w: modules.LigerPolyNorm()(x),
}
ANGLES = torch.ones(1, 3, 8), torch.zeros(1, 3, 8)


@pytest.mark.parametrize("name", MIXED)
def test_output_dtype_with_fp32_weights(name):
    """As Liger-Kernel's kernels write them, where PyTorch's types would promote."""
    x, w = R(3, 8).bfloat16().requires_grad_(), R(8).requires_grad_()
    actual = MIXED[name](functional, x, w)
    actual = actual if isinstance(actual, tuple) else (actual,)
    assert {y.dtype for y in actual} == {torch.bfloat16}
    sum(y.float().square().sum() for y in actual).backward()
    assert x.grad.dtype == torch.bfloat16
    assert w.grad is None or w.grad.dtype == torch.float32


# --- blocks, losses and rotary embeddings against their formulas ---


GELU = SimpleNamespace(hidden_size=8, intermediate_size=12, hidden_act="gelu")
WIDE_STREAMS = torch.randn(3, 2, 8)


WRONG = [
    (
        lambda: modules.LigerMLP(GELU),
        *(ValueError, "Activation function gelu not supported"),
    ),
    (
        lambda: modules.LigerMHC(nn.Linear(8, 8), hc=2, c=8)(WIDE_STREAMS),
        *(AssertionError, "allow_fp32=True takes it"),
    ),
    (
        lambda: modules.LigerFusedNeighborhoodAttentionLayer(8, 2, kernel_size=3)(
            torch.randn(2, 6, 8), torch.ones(2, 6)
        ),
        *(NotImplementedError, r"Attention mask is not yet supported, got \(2, 6\)"),
    ),
    (
        lambda: modules.LigerFusedNeighborhoodAttention(9, 2),
        *(ValueError, "9.*divisible.*2"),
    ),
    (
        lambda: modules.LigerFusedNeighborhoodAttention(8, 2, 4),
        *(ValueError, "must be odd"),
    ),
    *(
        (
            lambda sizes=sizes: modules.LigerFusedNeighborhoodAttention(8, 2, *sizes),
            *(ValueError, "must be positive"),
        )
        for sizes in ((3, 0), (0, 1))
    ),
    (
        lambda: modules.LigerFusedCETVDLoss()(R(1, 3, 5), R(1, 3, 5), torch.arange(3)),
        *(ValueError, r"must be 2D .*got \(1, 3, 5\)"),
    ),
    (
        lambda: functional.liger_fused_linear_kl_div(R(3, 5), R(4, 5), R(3, 4), reduction="q"),
        *(ValueError, "reduction must be one of .*Got: q"),
    ),
    (
        lambda: modules.LigerVocabParallelCrossEntropy()(R(3, 5), torch.arange(3)),
        *(ValueError, r"must be 3-D .*got \(3, 5\)"),
    ),
    (
        lambda: modules.LigerRMSNormForMuseGlimmer(),
        *(TypeError, "dim must be an integer, got None"),
    ),
    (
        lambda: modules.LigerRMSNorm(8, casting_mode="gama"),
        *(ValueError, r"'llama' \(0\), .*got 'gama'"),
    ),
    (lambda: modules.LigerRMSNorm(8, init_fn="normal"), ValueError, "init_fn must be"),
    (
        lambda: modules.LigerVocabParallelCrossEntropy(reduction="mean"),
        *(ValueError, "reduction must be 'none', got 'mean'"),
    ),
    (
        lambda: modules.LigerVocabParallelCrossEntropy(label_smoothing=1.0),
        *(ValueError, r"label_smoothing must be in \[0, 1\), got 1.0"),
    ),
    (
        lambda: modules.LigerVocabParallelCrossEntropy(label_smoothing_formula="q"),
        *(ValueError, "label_smoothing_formula.*'q'"),
    ),
    (
        lambda: modules.LigerVocabParallelCrossEntropy(label_smoothing_mode="q"),
        *(ValueError, "label_smoothing_mode.*'q'"),
    ),
]
test_errors_of_blocks_and_losses = harness.refuses(WRONG)


def test_vocab_parallel_target_outside_costs_nothing():
    """Megatron-Core has labels of -1 where its loss mask is 0; a NaN or an error would stay."""
    logits, target = R(3, 2, 5).requires_grad_(), torch.tensor([[0, -1], [5, 4], [-100, 2]])
    loss = modules.LigerVocabParallelCrossEntropy(label_smoothing=0.1)(logits, target)
    inside = target.masked_fill((target < 0) | (target > 4), -100).flatten()
    expected = F.cross_entropy(
        logits.flatten(0, 1), inside, label_smoothing=0.1, reduction="none"
    ).view(3, 2)
    torch.testing.assert_close(loss, expected)
    loss.sum().backward()
    assert logits.grad[[0, 1, 2], [1, 0, 0]].eq(0).all()


def test_many_streams_warn():
    with pytest.warns(UserWarning, match="hc=17 is large"):
        modules.LigerMHC(nn.Identity(), hc=17, c=8)


def test_multi_token_attention_starts_as_liger():
    """A weight as a convolution's and a bias of zeros, from the same draws of the generator."""
    torch.manual_seed(0)
    module = modules.LigerMultiTokenAttention(4, 6, 3, groups=2)
    torch.manual_seed(0)
    expected = nn.init.kaiming_uniform_(torch.empty(6, 2, 3, 3), a=math.sqrt(5))
    assert torch.equal(module.weight, expected)
    nn.init.ones_(module.bias)
    module.reset_parameters()
    assert module.bias.eq(0).all()
    assert modules.LigerMultiTokenAttention(4, 6, 3, bias=False).bias is None


def test_neighborhood_attention_configuration():
    options = modules.LigerFusedNeighborhoodAttentionConfig(64, 4, scale=0.5).to_dict()
    assert (options["hidden_size"], options["scale"], len(options)) == (64, 0.5, 8)
    assert modules.LigerFusedNeighborhoodAttentionConfig(**options).to_dict() == options


def test_norms_of_muse_glimmer():
    x, centered = torch.randn(2, 16), modules.LigerRMSNormForMuseGlimmerTextCentered(16)
    assert torch.equal(centered.weight, torch.zeros(16))
    for norm in (modules.LigerRMSNormForMuseGlimmer(with_scale=False), centered):
        torch.testing.assert_close(norm(x), F.rms_norm(x, (16,), eps=1e-6))


def test_embedding_padding_gets_no_gradient():
    embedding = modules.LigerEmbedding(5, 3, padding_idx=1)
    embedding(torch.tensor([[0, 1], [4, 0]])).sum().backward()
    assert embedding.weight.grad[:, 0].tolist() == [2.0, 0.0, 0.0, 0.0, 1.0]


# --- losses ---

LABELS = torch.tensor([1, 2, -100, 3])


def test_expert_parameter_order():
    """An optimizer's state is restored by the order of parameters."""
    config = SimpleNamespace(hidden_size=4, intermediate_size=6, hidden_act="silu")
    mlp = modules.LigerBlockSparseTop2MLP(config)
    assert [n for n, _ in mlp.named_parameters()] == ["w1.weight", "w2.weight", "w3.weight"]


def test_cross_entropy_output_is_a_mutable_dataclass():
    actual = functional.liger_cross_entropy(torch.randn(4, 6), LABELS, return_token_accuracy=True)
    assert not isinstance(actual, tuple)
    actual.loss = actual.loss / 2
    assert {*vars(actual)} == {"loss", "z_loss", "token_accuracy", "predicted_tokens"}
    assert actual.z_loss is None
    assert actual.predicted_tokens is None


@pytest.mark.parametrize("items", [None, 7.0])
def test_fixed_fused_linear_cross_entropy_items(items):
    x, w = torch.randn(4, 8, requires_grad=True), torch.randn(6, 8)
    expected = F.cross_entropy(x @ w.T, LABELS, reduction="sum") / (items or 3)
    actual = modules.fixed_fused_linear_cross_entropy(x, w, LABELS, items, unknown=1)
    more = modules.fixed_fused_linear_cross_entropy(x, w, LABELS, items, return_token_accuracy=True)
    torch.testing.assert_close((actual, more.loss), (expected, expected))
    torch.testing.assert_close(*(torch.autograd.grad(y, x) for y in (actual, expected)))
    assert more.token_accuracy is not None


# --- rotary embeddings ---


# --- against transformers and plain PyTorch ---


def named(path):
    """What stands under a dotted name of transformers."""
    return importlib.import_module(f"transformers.models.{path}.modeling_{path}")


TOKEN_SCALED = {
    "weights": {"ce_weight": torch.tensor([0.5, 2.0, 1.0, 3.0, 0.1])},
    "smoothed": {"label_smoothing": 0.2},
    "squares": {"lse_square_scale": 0.1},
    "all": {
        "ce_weight": torch.tensor([0.5, 2.0, 1.0, 3.0, 0.1]),
        "label_smoothing": 0.2,
        "lse_square_scale": 0.1,
        "return_z_loss": True,
        "return_predicted_tokens": True,
    },
}


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", TOKEN_SCALED)
def test_token_scaling_options(name, reduction):
    """Tokens that are equally likely scale the whole loss; others each by its probability."""
    target, options = torch.tensor([0, 4, -100, 2, 3, 1]), TOKEN_SCALED[name]
    call = functional.liger_fused_linear_cross_entropy
    x = R(6, 4).requires_grad_()

    def run(weight, **more):
        loss = call(x, weight, target, reduction=reduction, **options, **more)
        parts = [loss] if isinstance(loss, torch.Tensor) else [loss.loss, loss.z_loss]
        return [*parts, *torch.autograd.grad(parts[0].sum(), x)], loss

    torch.testing.assert_close(
        [*run(torch.zeros(5, 4), use_token_scaling=True)[0]],
        [b / 5 for b in run(torch.zeros(5, 4))[0]],
    )
    if reduction == "none":
        w = R(5, 4)
        (scaled, *_), loss = run(w, use_token_scaling=True)
        likely = F.softmax(x @ w.T, -1)[torch.arange(6), target.clamp_min(0)]
        torch.testing.assert_close(scaled, run(w)[0][0] * likely)
        if name == "all":
            assert loss.predicted_tokens is not None
            assert loss.token_accuracy is None


@pytest.mark.parametrize("count", [None, 7.0])
def test_causal_lm_loss_matches_transformers(count):
    from transformers.loss.loss_utils import ForCausalLMLoss

    hidden, weight = R(2, 5, 8), R(11, 8)
    labels = torch.tensor([[1, 2, -100, 4, 5], [6, -100, 8, 9, 10]])
    more = {} if count is None else {"num_items_in_batch": count}
    expected = ForCausalLMLoss(hidden @ weight.T, labels, 11, **more)
    got = modules.LigerForCausalLMLoss(
        hidden, weight, labels, hidden_size=8, cu_seq_lens_q=None, **more
    )
    torch.testing.assert_close(got, expected)
    moved = F.pad(labels, (0, 1), value=-100)[:, 1:]
    got = modules.LigerForCausalLMLoss(hidden, weight, None, 8, shift_labels=moved, **more)
    torch.testing.assert_close(got, expected)


NORMS = {
    "LigerRMSNorm": "LlamaRMSNorm",
    "LigerRMSNormForGemma": "GemmaRMSNorm",
    "LigerRMSNormForGemma2": "Gemma2RMSNorm",
    "LigerRMSNormForGemma3": "Gemma3RMSNorm",
}


@pytest.mark.parametrize("name", NORMS)
def test_norms_match_transformers(name):
    stock = NORMS[name]
    family = stock.removesuffix("RMSNorm").lower()
    expected, got = getattr(named(family), stock)(8), getattr(modules, name)(8)
    got.load_state_dict(expected.state_dict())
    x = R(3, 8).bfloat16()
    assert torch.equal(got.bfloat16()(x), expected.bfloat16()(x))


def test_casting_modes():
    x = R(3, 8)
    for none in ("none", -1):  # in fp32 nothing is rounded
        norm = modules.LigerRMSNorm(8, casting_mode=none, in_place=False)
        assert torch.equal(norm(x), modules.LigerRMSNorm(8)(x))
        assert (norm.casting_mode, norm.in_place, norm.row_mode) == (none, False, None)


STOCK_MLPS = {
    "LigerSwiGLUMLP": "llama.Llama",
    "LigerMLP": "llama.Llama",
    "LigerSwiGLUMLPForMuseGlimmer": "llama.Llama",
    "LigerFalconH1MLP": "falcon_h1.FalconH1",
    "LigerPhi3SwiGLUMLP": "phi3.Phi3",
    "LigerGEGLUMLP": "gemma2.Gemma2",
    "LigerQwen3MoeSwiGLUMLP": "qwen3_moe.Qwen3Moe",
    "LigerTiledSwiGLUMLP": "llama.Llama",
    "LigerTiledGEGLUMLP": "gemma2.Gemma2",
}


@pytest.mark.parametrize("name", STOCK_MLPS)
def test_mlps_match_transformers(name):
    family, _, prefix = STOCK_MLPS[name].partition(".")
    home = named(family)
    config = getattr(home, f"{prefix}Config")(
        hidden_size=8, intermediate_size=12, num_attention_heads=2, num_key_value_heads=2
    )
    expected, got = getattr(home, f"{prefix}MLP")(config), getattr(modules, name)(config)
    got.load_state_dict(expected.state_dict())
    x = R(2, 3, 8)
    torch.testing.assert_close(got(x), expected(x))


ROPES = {
    "liger_rotary_pos_emb": ("llama", "apply_rotary_pos_emb", ((2, 4, 5, 8), (2, 2, 5, 8))),
    "liger_rotary_pos_emb_vision": (
        "qwen2_5_vl",
        "apply_rotary_pos_emb_vision",
        ((5, 4, 8), (5, 4, 8)),
    ),
    "liger_rotary_pos_emb_gpt_oss": ("gpt_oss", "apply_rotary_pos_emb", ((1, 2, 5, 8),) * 2),
}


@pytest.mark.parametrize("name", ROPES)
def test_ropes_match_transformers_out_of_place(name):
    family, stock, shapes = ROPES[name]
    half = 4 if family == "gpt_oss" else 8
    angle = R(5, half) if family == "qwen2_5_vl" else R(shapes[0][0], 5, half)
    q, k = (R(*shape).to(LOW if family == "qwen2_5_vl" else WIDE) for shape in shapes)
    before = q.clone()
    expected = getattr(named(family), stock)(q, k, angle.cos(), angle.sin())
    torch.testing.assert_close(getattr(functional, name)(q, k, angle.cos(), angle.sin()), expected)
    assert torch.equal(q, before)


def test_llama4_vision_angles_may_have_an_axis_of_heads():
    x = R(1, 5, 2, 8)
    expected = f.rope_complex(x, x, torch.view_as_real(FREQS[:5]))
    for freqs in (FREQS[:5], FREQS[:5, None]):
        torch.testing.assert_close(
            functional.liger_llama4_vision_rotary_pos_emb(x, x, freqs), expected
        )


@pytest.mark.parametrize("width", [41, 3, 1])
def test_rope_odd_head_dim(width):
    """As in Liger-Kernel, for angles of a model, which are one channel wider."""
    q, k = R(2, 4, 7, width), R(2, 2, 7, width)
    angle, pairs = R(1, 7, (width + 1) // 2).repeat(1, 1, 2), width // 2
    assert angle.shape[-1] == width + 1
    cos, sin = angle.cos(), angle.sin()
    for run in (functional.liger_rotary_pos_emb, function("LigerRopeFunction").apply):
        for x, turned in zip((q, k), run(q, k, cos, sin)):
            first, second, rest = x.split([pairs, pairs, width - 2 * pairs], -1)
            c, s = cos[..., :pairs], sin[..., :pairs]
            expected = torch.cat((first * c - second * s, second * c + first * s, rest), -1)
            torch.testing.assert_close(turned, expected)


@pytest.mark.parametrize(
    ("name", "inputs", "retired", "text"),
    [
        ("cross_entropy", (R(3, 4), IDS), {"reduce": False}, "reduce=False change nothing"),
        (
            *("kl_div", (log_probs(3, 4), log_probs(3, 4).exp())),
            *({"size_average": False}, "size_average=False"),
        ),
    ],
)
def test_retired_arguments_warn(name, inputs, retired, text):
    call = getattr(functional, f"liger_{name}")
    with pytest.warns(DeprecationWarning, match=text):
        loss = call(*inputs, **retired)
    assert torch.equal(loss, call(*inputs))


def test_selective_log_softmax_uses_last_ids():
    logits, ids = R(2, 4, 6), torch.tensor([[5, 1, 2, 3], [4, 0, 5, 1]])
    mask = torch.tensor([[0, 1, 1, 0], [1, 1, 1, 1]])
    expected = functional.fused_selective_log_softmax(logits, ids[:, 1:], mask=mask[:, 1:])
    assert torch.equal(functional.fused_selective_log_softmax(logits, ids, mask=mask), expected)
    with pytest.raises(ValueError, match="have fewer than L"):
        functional.fused_selective_log_softmax(logits, ids[:, :2])


ATTRIBUTES = {
    "LigerRMSNorm": "hidden_size variance_epsilon offset casting_mode in_place row_mode",
    "LigerFusedAddRMSNorm": "variance_epsilon offset casting_mode in_place",
    "LigerModulatedRMSNorm": "variance_epsilon offset casting_mode in_place",
    "LigerLayerNorm": "hidden_size variance_epsilon impl mode",
    "LigerPolyNorm": "variance_epsilon in_place",
    "LigerTiledSwiGLUMLP": "config hidden_size intermediate_size num_shards",
}


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_module_attributes(name):

    config = SimpleNamespace(hidden_size=8, intermediate_size=16, hidden_act="silu")
    args = {"LigerPolyNorm": (), "LigerTiledSwiGLUMLP": (config, 2)}.get(name, (8,))
    module = getattr(modules, name)(*args)
    assert [n for n in ATTRIBUTES[name].split() if not hasattr(module, n)] == []
