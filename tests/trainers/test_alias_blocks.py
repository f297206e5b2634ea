"""Blocks and losses of the import names, against formulas of PyTorch."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from liger_multi.compat.liger_kernel import (
    block_modules,
    functional,
    losses,
    modules,
)

CONFIG = SimpleNamespace(
    hidden_size=8, intermediate_size=12, hidden_act="silu", mlp_multipliers=(2.0, 3.0)
)


def same(actual, expected, *inputs):
    """Values and gradients of a non-uniform sum."""
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    upstream = torch.linspace(-1, 1, expected.numel()).view(expected.shape)
    for a, b in zip(
        *(torch.autograd.grad(x, inputs, upstream, retain_graph=True) for x in (actual, expected))
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


MLPS = {
    "LigerMLP": (1.0, 1.0),
    "LigerFalconH1MLP": (2.0, 3.0),
    "LigerSwiGLUMLPForMuseGlimmer": (1.0, 1.0),
}


@pytest.mark.parametrize("name", MLPS)
def test_mlps(name):
    torch.manual_seed(0)
    mlp, (gate, down) = getattr(modules, name)(CONFIG), MLPS[name]
    x = torch.randn(2, 3, 8, requires_grad=True)
    expected = mlp.down_proj(F.silu(mlp.gate_proj(x) * gate) * mlp.up_proj(x) * down)
    assert [n for n, _ in mlp.named_parameters()] == [
        "gate_proj.weight",
        "up_proj.weight",
        "down_proj.weight",
    ]
    same(mlp(x), expected, x, *mlp.parameters())


def test_mlp_activation_error():
    other = SimpleNamespace(**{**vars(CONFIG), "hidden_act": "gelu"})
    with pytest.raises(ValueError, match="Activation function gelu not supported"):
        modules.LigerMLP(other)


def test_norms_of_muse_glimmer():
    x = torch.randn(2, 16, requires_grad=True)
    plain = modules.LigerRMSNormForMuseGlimmer(with_scale=False)
    same(plain(x), F.rms_norm(x, (16,), eps=1e-6), x)
    centered = modules.LigerRMSNormForMuseGlimmerTextCentered(16)
    assert torch.equal(centered.weight, torch.zeros(16))
    same(centered(x), F.rms_norm(x, (16,), eps=1e-6), x)
    with pytest.raises(TypeError, match="dim must be an integer, got None"):
        modules.LigerRMSNormForMuseGlimmer()


@pytest.mark.parametrize("bias", [True, False])
def test_multi_token_attention(bias):
    torch.manual_seed(0)
    attention = block_modules.LigerMultiTokenAttention(2, 2, 3, padding=1, bias=bias)
    scores = torch.randn(1, 2, 5, 5, requires_grad=True)
    causal = torch.ones(5, 5).tril().bool()
    likely = scores.masked_fill(~causal, float("-inf")).softmax(-1)
    expected = F.conv2d(likely, attention.weight, attention.bias, padding=1).masked_fill(~causal, 0)
    same(attention(scores), expected, scores, attention.weight)
    assert (attention.kernel_size, attention.padding) == ((3, 3), (1, 1))
    assert (attention.bias is not None) == bias


def test_neighborhood_attention_layer():
    torch.manual_seed(0)
    layer = block_modules.LigerFusedNeighborhoodAttentionLayer(8, 2, kernel_size=3)
    x = torch.randn(2, 6, 8, requires_grad=True)
    attention, normed = layer.attention, layer.layer_norm(x)
    q, k, v = (
        getattr(attention, n)(normed).view(2, 6, 2, 4).transpose(1, 2)
        for n in ("q_proj", "k_proj", "v_proj")
    )
    near = (torch.arange(6)[:, None] - torch.arange(6)).abs() <= 1
    actual = F.scaled_dot_product_attention(q, k, v, near).transpose(1, 2).reshape(2, 6, 8)
    same(layer(x), x + attention.out_proj(actual), x, *layer.parameters())
    with pytest.raises(NotImplementedError, match=r"attention_mask is not served, got \(2, 6\)"):
        layer(x, torch.ones(2, 6))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [((9, 2), "9.*divisible.*2"), ((8, 2, 4), "must be odd"), ((8, 2, 3, 0), "must be positive")],
)
def test_neighborhood_attention_errors(arguments, said):
    with pytest.raises(ValueError, match=said):
        block_modules.LigerFusedNeighborhoodAttention(*arguments)


def test_neighborhood_attention_dropout():
    layer = block_modules.LigerFusedNeighborhoodAttentionLayer(8, 2, 3, dropout=0.5)
    x = torch.randn(1, 4, 8)
    assert not torch.equal(layer(x), layer(x))
    assert torch.equal(layer.eval()(x), layer(x))


def test_embedding():
    embedding = block_modules.LigerEmbedding(5, 3, padding_idx=1)
    ids = torch.tensor([[0, 1], [4, 0]])
    actual = embedding(ids)
    assert torch.equal(actual, F.embedding(ids, embedding.weight))
    actual.sum().backward()
    assert embedding.weight.grad[:, 0].tolist() == [2.0, 0.0, 0.0, 0.0, 1.0]


def test_hyper_connections_around_a_layer():
    torch.manual_seed(0)
    layer = block_modules.LigerMHC(
        nn.Linear(8, 8), hc=2, c=8, phi_dtype=torch.float32, allow_fp32=True
    )
    x = torch.randn(3, 2, 8, requires_grad=True)
    pre, post, mix = functional.liger_mhc_coeffs(
        x, layer.phi, layer.b, layer.alpha_pre, layer.alpha_post, layer.alpha_res, allow_fp32=True
    )
    f_out = layer.layer((pre.unsqueeze(-1) * x).sum(-2))
    expected = mix @ x + post.unsqueeze(-1) * f_out.unsqueeze(-2)
    assert expected.shape == x.shape
    actual = layer(x)
    same(actual, expected, x, *layer.parameters())
    again, inside = functional.liger_mhc_apply(x, f_out, pre, post, mix, return_x_in=True)
    torch.testing.assert_close(again, actual)
    torch.testing.assert_close(inside, (pre.unsqueeze(-1) * x).sum(-2))
    with pytest.raises(AssertionError, match="allow_fp32=True takes it"):
        block_modules.LigerMHC(nn.Linear(8, 8), hc=2, c=8)(x)
    with pytest.warns(UserWarning, match="hc=17 is large"):
        block_modules.LigerMHC(nn.Identity(), hc=17, c=8)


# --- losses ---

LABELS = torch.tensor([1, 2, -100, 3])
KEPT = LABELS != -100


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"reduction": "mean"}, "reduction 'mean'; known: none"),
        ({"label_smoothing": 1.0}, r"label_smoothing must be in \[0, 1\), got 1.0"),
        ({"label_smoothing_formula": "q"}, "label_smoothing_formula.*'q'"),
        ({"label_smoothing_mode": "q"}, "label_smoothing_mode.*'q'"),
    ],
)
def test_vocab_parallel_option_errors(options, said):
    with pytest.raises(ValueError, match=said):
        losses.LigerVocabParallelCrossEntropy(**options)


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
    torch.manual_seed(0)
    x, w = torch.randn(4, 8, requires_grad=True), torch.randn(6, 8, requires_grad=True)
    expected = F.cross_entropy(x @ w.T, LABELS, reduction="sum") / (items or 3)
    actual = losses.fixed_fused_linear_cross_entropy(x, w, LABELS, items, unknown=1)
    same(actual, expected, x, w)
    more = losses.fixed_fused_linear_cross_entropy(x, w, LABELS, items, return_token_accuracy=True)
    torch.testing.assert_close(more.loss, actual)
    assert more.token_accuracy is not None


# --- rotary embeddings ---


def test_gpt_oss_and_llama4_rope():
    torch.manual_seed(0)
    q, k = torch.randn(1, 2, 5, 8, requires_grad=True), torch.randn(1, 1, 5, 8)
    cos, sin = torch.randn(1, 5, 4), torch.randn(1, 5, 4)
    first, second = q.chunk(2, -1)
    expected = torch.cat(
        (
            first * cos[:, None] - second * sin[:, None],
            second * cos[:, None] + first * sin[:, None],
        ),
        -1,
    )
    same(functional.liger_rotary_pos_emb_gpt_oss(q, k, cos, sin)[0], expected, q)
    angles = torch.polar(torch.ones(5, 4), torch.randn(5, 4))
    x = torch.randn(1, 5, 2, 8, requires_grad=True)
    turned = torch.view_as_complex(x.view(1, 5, 2, 4, 2)) * angles[:, None]
    for freqs in (angles, angles[:, None]):  # as a model has them: with an axis of heads
        actual, _ = functional.liger_llama4_vision_rotary_pos_emb(x, x, freqs)
        same(actual, torch.view_as_real(turned).flatten(3), x)
