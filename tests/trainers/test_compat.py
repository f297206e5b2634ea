"""The import names of Liger-Kernel: they resolve, mean what they say there, and go away again."""

import importlib
import importlib.metadata
import importlib.util
import inspect
import subprocess
import sys
import types
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from liger_multi import ops, unpatch
from liger_multi.compat import liger_kernel as alias
from liger_multi.compat.liger_kernel import finder
from liger_multi.errors import PatchError


def named(path):
    """What a dotted name is, its modules imported."""
    parts = path.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            value = getattr(value, part)
        return value
    raise AssertionError(path)


# --- names ---


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
    subprocess.run([sys.executable, "-c", code], check=True)


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


# --- patching ---


def test_apply_signatures_show_flags(installed):
    """LLaMA-Factory and axolotl read them from there."""
    from liger_kernel.transformers import apply_liger_kernel_to_gemma2, apply_liger_kernel_to_llama
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    flags = inspect.signature(apply_liger_kernel_to_llama).parameters
    assert [*flags] == [
        "rope",
        "cross_entropy",
        "fused_linear_cross_entropy",
        "rms_norm",
        "swiglu",
        "model",
    ]
    assert flags["fused_linear_cross_entropy"].default is True
    assert flags["cross_entropy"].default is False
    assert "geglu" in inspect.signature(apply_liger_kernel_to_gemma2).parameters
    assert MODEL_TYPE_TO_APPLY_LIGER_FN["llama"] is apply_liger_kernel_to_llama
    assert len(MODEL_TYPE_TO_APPLY_LIGER_FN) == 53


def test_model_types_exist_in_transformers(installed):
    """Where a function names several, one at least."""
    from packaging.version import parse
    from transformers import CONFIG_MAPPING

    if parse(importlib.metadata.version("transformers")) < parse("5.23"):
        pytest.skip("some types are newer than this transformers")

    from liger_multi.compat.liger_kernel.models import MODELS

    lost = [name for name, (types_, _) in MODELS.items() if not {*types_} & {*CONFIG_MAPPING}]
    assert lost == []


def counts(model):
    from liger_multi.patching.swap import Patched, swapped

    ops = [swapped(m).op for m in model.modules() if isinstance(m, Patched)]
    return {op: ops.count(op) for op in sorted({*ops} - {"loss options"})}  # the model itself


EVERY = {"fused_linear_cross_entropy": 1, "rms_norm": 5, "rope": 2, "swiglu": 2}


def without(*ops_):
    return {op: n for op, n in EVERY.items() if op not in ops_}


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, EVERY),
        ({"rope": False, "swiglu": None}, without("rope", "swiglu")),
        ({"fused_linear_cross_entropy": False}, without("fused_linear_cross_entropy")),
        ({"rms_norm": "reference", "fused_linear_cross_entropy": {"chunk": 3}}, EVERY),
    ],
)
def test_flags_select_patches(installed, flags, expected):
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    from tests.models import build

    model = build()
    report = apply_liger_kernel_to_llama(model=model, **flags)
    assert counts(model) == expected
    assert not any(s.strict for s in report.skipped)
    options = {e.op: e.options for e in report.entries}
    if "rms_norm" in flags:
        assert options["rms_norm"] == {"backend": "reference"}
        assert options["fused_linear_cross_entropy"] == {"chunk": 3}


def test_positional_flags(installed):
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    from tests.models import build

    model = build()
    apply_liger_kernel_to_llama(False, False, True, False, model=model)
    assert counts(model) == without("rope", "rms_norm")


def test_swiglu_flag_rules_experts(installed):
    from liger_kernel.transformers import apply_liger_kernel_to_mixtral

    from tests.models import build

    model = build("mixtral")
    apply_liger_kernel_to_mixtral(model=model, swiglu=False)
    assert "fused_moe" not in counts(model)
    apply_liger_kernel_to_mixtral(model=model)
    assert counts(model)["fused_moe"] == 2


def test_class_level_call_patches_later_models(installed, tmp_path):
    from liger_kernel.transformers import apply_liger_kernel_to_llama
    from transformers import AutoModelForCausalLM

    from tests.models import build

    before = build()
    before.save_pretrained(tmp_path)
    apply_liger_kernel_to_llama(swiglu=False)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert counts(loaded) == without("swiglu")
    assert counts(before) == {}
    assert counts(build("qwen2")) == {}
    unpatch("llama")
    assert counts(build()) == {}
    apply_liger_kernel_to_llama()
    alias.uninstall()
    assert counts(build()) == {}
    assert counts(loaded) == without("swiglu")


@pytest.mark.parametrize("level", ["instance", "class"])
def test_unknown_option_error(installed, level):
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    from tests.models import build

    model = build() if level == "instance" else None
    with pytest.raises(PatchError, match=r"'swigl'; did you mean 'swiglu'"):
        apply_liger_kernel_to_llama(model=model, swigl=True)
    with pytest.raises(PatchError, match=r"'chunks'.*did you mean 'chunk'"):
        apply_liger_kernel_to_llama(model=model, fused_linear_cross_entropy={"chunks": 2})
    assert counts(model or build()) == {}


def test_replaced_functional_loss_raises(installed):
    """axolotl's token scaling does this; no patched model would call it."""
    from liger_kernel.transformers import apply_liger_kernel_to_llama, functional

    from tests.models import build

    functional.liger_fused_linear_cross_entropy = lambda *args, **kwargs: None
    model = build()
    with pytest.raises(PatchError, match="liger_fused_linear_cross_entropy was replaced"):
        apply_liger_kernel_to_llama(model=model)
    assert counts(model) == {}
    apply_liger_kernel_to_llama(model=model, fused_linear_cross_entropy=False)
    assert counts(model) == without("fused_linear_cross_entropy")


def test_auto_model(installed):
    from liger_kernel.transformers import AutoLigerKernelForCausalLM
    from transformers import AutoModelForCausalLM

    from tests.models import build

    assert issubclass(AutoLigerKernelForCausalLM, AutoModelForCausalLM)
    model = AutoLigerKernelForCausalLM.from_config(build().config, swiglu=False)
    assert counts(model) == without("swiglu")


def test_all_flags_off(installed):
    """LLaMA-Factory does this with those that were not asked for, whatever their names."""
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    from tests.models import build

    model = build()
    apply = MODEL_TYPE_TO_APPLY_LIGER_FN[model.config.model_type]
    names = set(inspect.signature(apply).parameters) - {"model"}
    apply(model=model, **{name: name == "rms_norm" for name in names})
    assert counts(model) == {"rms_norm": 5}


def test_registered_apply_function(installed, caplog):
    from liger_kernel.transformers import (
        MODEL_TYPE_TO_APPLY_LIGER_FN,
        _apply_liger_kernel,
        _apply_liger_kernel_to_instance,
    )

    from tests.models import build

    calls, model = [], build()
    usual = MODEL_TYPE_TO_APPLY_LIGER_FN["llama"]
    MODEL_TYPE_TO_APPLY_LIGER_FN["llama"] = lambda **kwargs: calls.append(kwargs)
    try:
        _apply_liger_kernel("llama", rope=False)
        _apply_liger_kernel_to_instance(model, swiglu=False)
    finally:
        MODEL_TYPE_TO_APPLY_LIGER_FN["llama"] = usual
    assert calls == [{"rope": False}, {"model": model, "swiglu": False}]
    assert counts(model) == {}
    _apply_liger_kernel_to_instance(model, swiglu=False)
    assert counts(model) == without("swiglu")
    with caplog.at_level("INFO"):
        _apply_liger_kernel("nobody_has_this")
    assert "nobody_has_this" in caplog.text


def test_patch_module_helpers(installed):
    from liger_kernel.transformers import LigerSwiGLUMLP, monkey_patch
    from transformers.models.gemma.modeling_gemma import GemmaConfig, GemmaMLP, GemmaRMSNorm
    from transformers.models.llama.modeling_llama import LlamaConfig, LlamaMLP

    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2}
    norm, layer = GemmaRMSNorm(8, eps=0.1), torch.nn.LayerNorm(8, eps=0.1)
    swiglu, geglu = LlamaMLP(LlamaConfig(**sizes)), GemmaMLP(GemmaConfig(**sizes))
    modules = (norm, layer, swiglu, geglu)
    expected = [module(x) for module in modules]
    monkey_patch._patch_rms_norm_module(norm, offset=1.0, casting_mode="gemma")
    monkey_patch._patch_layer_norm_module(layer)
    monkey_patch._patch_swiglu_module(swiglu, LigerSwiGLUMLP)
    monkey_patch._patch_geglu_module(geglu)
    for module, right in zip(modules, expected):
        assert "forward" in vars(module)
        torch.testing.assert_close(module(x), right)
    assert (norm.offset, norm.variance_epsilon, norm.casting_mode) == (1.0, 0.1, "gemma")


# --- the trainer's own switch ---


def curve(model, place, **options):
    from tests.models import trainer

    trained = trainer(model, place, max_steps=2, **options)
    first = trained.evaluate()["eval_loss"]
    trained.train()
    steps = [entry["loss"] for entry in trained.state.log_history if "loss" in entry]
    return [first, *steps, trained.evaluate()["eval_loss"]]


@pytest.mark.slow
def test_trainer_use_liger_kernel(installed, tmp_path, monkeypatch):
    from tests.models import FusedCalls, pair

    pytest.importorskip("accelerate")
    fused = FusedCalls(monkeypatch)
    stock, ours = pair()
    expected = curve(stock, tmp_path)
    assert fused.count == 0
    config = {"fused_linear_cross_entropy": {"chunk": 5}, "rope": False}
    got = curve(ours, tmp_path, use_liger_kernel=True, liger_kernel_config=config)
    assert got == pytest.approx(expected, rel=1e-5)
    assert {call["chunk"] for call in fused.keywords} == {5}
    assert counts(ours) == without("rope")


def test_liger_kernel_config_unknown_option(installed, tmp_path):
    from tests.models import build

    pytest.importorskip("accelerate")
    with pytest.raises(PatchError, match="'rms_nrom'"):
        curve(build(), tmp_path, use_liger_kernel=True, liger_kernel_config={"rms_nrom": True})


# --- functions, modules and losses, against plain PyTorch ---


@pytest.fixture
def draw():
    generator = torch.Generator().manual_seed(0)

    def sample(*shape, grad=False):
        return torch.randn(*shape, generator=generator).requires_grad_(grad)

    return sample


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
def test_token_scaling_options(draw, name, reduction):
    """Tokens that are equally likely scale the whole loss; others each by its probability."""
    from liger_multi.compat.liger_kernel import functional

    target, options = torch.tensor([0, 4, -100, 2, 3, 1]), TOKEN_SCALED[name]
    call = functional.liger_fused_linear_cross_entropy
    x = draw(6, 4, grad=True)

    def run(weight, **more):
        loss = call(x, weight, target, reduction=reduction, **options, **more)
        parts = [loss] if isinstance(loss, torch.Tensor) else [loss.loss, loss.z_loss]
        return [*parts, *torch.autograd.grad(parts[0].sum(), x)], loss

    for a, b in zip(run(torch.zeros(5, 4), use_token_scaling=True)[0], run(torch.zeros(5, 4))[0]):
        torch.testing.assert_close(a, b / 5)
    if reduction == "none":
        w = draw(5, 4)
        (scaled, *_), loss = run(w, use_token_scaling=True)
        likely = F.softmax(x @ w.T, -1)[torch.arange(6), target.clamp_min(0)]
        torch.testing.assert_close(scaled, run(w)[0][0] * likely)
        if name == "all":
            assert loss.predicted_tokens is not None
            assert loss.token_accuracy is None


@pytest.mark.parametrize("count", [None, 7.0])
def test_causal_lm_loss_matches_transformers(draw, count):
    from transformers.loss.loss_utils import ForCausalLMLoss

    from liger_multi.compat.liger_kernel.losses import LigerForCausalLMLoss

    hidden, weight = draw(2, 5, 8), draw(11, 8)
    labels = torch.tensor([[1, 2, -100, 4, 5], [6, -100, 8, 9, 10]])
    more = {} if count is None else {"num_items_in_batch": count}
    expected = ForCausalLMLoss(hidden @ weight.T, labels, 11, **more)
    got = LigerForCausalLMLoss(hidden, weight, labels, hidden_size=8, cu_seq_lens_q=None, **more)
    torch.testing.assert_close(got, expected)
    moved = F.pad(labels, (0, 1), value=-100)[:, 1:]
    got = LigerForCausalLMLoss(hidden, weight, None, 8, shift_labels=moved, **more)
    torch.testing.assert_close(got, expected)


NORMS = {
    "LigerRMSNorm": "LlamaRMSNorm",
    "LigerRMSNormForGemma": "GemmaRMSNorm",
    "LigerRMSNormForGemma2": "Gemma2RMSNorm",
    "LigerRMSNormForGemma3": "Gemma3RMSNorm",
}


@pytest.mark.parametrize("name", NORMS)
def test_norms_match_transformers(draw, name):
    from liger_multi.compat.liger_kernel import modules

    stock = NORMS[name]
    family = stock.removesuffix("RMSNorm").lower()
    module_class = getattr(named(f"transformers.models.{family}.modeling_{family}"), stock)
    expected, got = module_class(8), getattr(modules, name)(8)
    got.load_state_dict(expected.state_dict())
    x = draw(3, 8).bfloat16()
    assert torch.equal(got.bfloat16()(x), expected.bfloat16()(x))


def test_casting_modes(draw):
    from liger_multi.compat.liger_kernel import modules

    x = draw(3, 8)
    for none in ("none", -1):  # in fp32 nothing is rounded
        norm = modules.LigerRMSNorm(8, casting_mode=none, in_place=False)
        assert torch.equal(norm(x), modules.LigerRMSNorm(8)(x))
        assert (norm.casting_mode, norm.in_place, norm.row_mode) == (none, False, None)
    with pytest.raises(ValueError, match=r"'llama' \(0\), .*got 'gama'"):
        modules.LigerRMSNorm(8, casting_mode="gama")
    with pytest.raises(ValueError, match="init_fn must be"):
        modules.LigerRMSNorm(8, init_fn="normal")


MLPS = {
    "LigerSwiGLUMLP": "llama.Llama",
    "LigerPhi3SwiGLUMLP": "phi3.Phi3",
    "LigerGEGLUMLP": "gemma2.Gemma2",
    "LigerQwen3MoeSwiGLUMLP": "qwen3_moe.Qwen3Moe",
    "LigerTiledSwiGLUMLP": "llama.Llama",
    "LigerTiledGEGLUMLP": "gemma2.Gemma2",
}


@pytest.mark.parametrize("name", MLPS)
def test_mlps_match_transformers(draw, name):
    from liger_multi.compat.liger_kernel import modules

    family, _, prefix = MLPS[name].partition(".")
    home = named(f"transformers.models.{family}.modeling_{family}")
    config = getattr(named("transformers"), f"{prefix}Config")(
        hidden_size=8, intermediate_size=12, num_attention_heads=2, num_key_value_heads=2
    )
    expected, got = getattr(home, f"{prefix}MLP")(config), getattr(modules, name)(config)
    got.load_state_dict(expected.state_dict())
    x = draw(2, 3, 8)
    torch.testing.assert_close(got(x), expected(x))


@pytest.mark.parametrize("width", [41, 3, 1])
def test_rope_odd_head_dim(width):
    """As in Liger-Kernel, for angles of a model, which are one channel wider."""
    from liger_multi.compat.liger_kernel import functional as f
    from liger_multi.compat.liger_kernel.op_functions import LigerRopeFunction

    torch.manual_seed(0)
    q, k = torch.randn(2, 4, 7, width), torch.randn(2, 2, 7, width)
    angle = torch.randn(1, 7, (width + 1) // 2).repeat(1, 1, 2)
    assert angle.shape[-1] == width + 1
    leaves = [x.requires_grad_() for x in (q, k)]
    pairs = width // 2
    cos, sin = angle.cos(), angle.sin()
    for run in (f.liger_rotary_pos_emb, LigerRopeFunction.apply):
        turned = run(q, k, cos, sin)
        up = [torch.randn_like(x) for x in leaves]
        expected = [
            torch.cat(
                (
                    x[..., :pairs] * cos[..., :pairs]
                    - x[..., pairs : 2 * pairs] * sin[..., :pairs],
                    x[..., pairs : 2 * pairs] * cos[..., :pairs]
                    + x[..., :pairs] * sin[..., :pairs],
                    x[..., 2 * pairs :],
                ),
                -1,
            )
            for x in leaves
        ]
        torch.testing.assert_close(list(turned[:2]), expected)
        torch.testing.assert_close(
            torch.autograd.grad(turned[:2], leaves, up), torch.autograd.grad(expected, leaves, up)
        )


@pytest.mark.parametrize("weight", [True, False])
@pytest.mark.parametrize(("offset", "casting"), [(1.0, "gemma"), (0.0, "llama")])
@pytest.mark.parametrize("shape", [(2, 128, 512), (5, 123, 123)])
def test_modulated_norm_bf16_gradient(shape, offset, casting, weight):
    """In bf16, where norm and product are rounded before hundreds of rows are added up."""
    from liger_multi.compat.liger_kernel import functional as f

    torch.manual_seed(0)
    x, up = (torch.randn(shape, dtype=torch.bfloat16) for _ in range(2))
    ours, theirs = (
        (torch.randn(shape[-1], generator=torch.Generator().manual_seed(1)) * 0.1)
        .bfloat16()
        .requires_grad_()
        for _ in range(2)
    )
    w = torch.randn(shape[-1]).bfloat16() if weight else None
    f.liger_modulated_rms_norm(x, w, ours, None, 1e-6, offset, casting).backward(up)
    n = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
    if casting == "llama":
        n = n.bfloat16()
    if weight:
        n = n * (offset + (w.float() if casting == "gemma" else w))
    (n.bfloat16() * (1 + theirs)).backward(up)
    torch.testing.assert_close(ours.grad, theirs.grad, atol=0.1, rtol=0.02)


def test_rope_is_out_of_place(draw):
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import apply_rotary_pos_emb_vision

    from liger_multi.compat.liger_kernel import functional as f

    q, k, angle = draw(2, 4, 5, 8), draw(2, 2, 5, 8), draw(2, 5, 8)
    cos, sin = angle.cos(), angle.sin()
    before = q.clone()
    for got, expected in zip(
        f.liger_rotary_pos_emb(q, k, cos, sin), apply_rotary_pos_emb(q, k, cos, sin), strict=True
    ):
        torch.testing.assert_close(got, expected)
    assert torch.equal(q, before)
    q, k, angle = draw(5, 4, 8).bfloat16(), draw(5, 4, 8).bfloat16(), draw(5, 8)
    for got, expected in zip(
        f.liger_rotary_pos_emb_vision(q, k, angle.cos(), angle.sin()),
        apply_rotary_pos_emb_vision(q, k, angle.cos(), angle.sin()),
        strict=True,
    ):
        assert got.dtype == torch.bfloat16
        torch.testing.assert_close(got, expected)


# --- chunked losses, against the formulas on log-probabilities of whole logits ---


class Batch:
    """Hidden states, heads and targets, with the log-probabilities that belong to them."""

    def __init__(self, draw, rows=4):
        self.hidden, self.weight = draw(rows, 5, 8, grad=True), draw(11, 8, grad=True)
        self.bias = draw(11)
        self.ref_hidden, self.ref_weight = draw(rows, 5, 8), draw(11, 8)
        g = torch.Generator().manual_seed(1)
        self.target = torch.randint(11, (rows, 5), generator=g)
        self.target[:, 0] = -100
        self.target[1, 3:] = -100
        self.mask = self.target != -100
        self.logits = self.hidden @ self.weight.T + self.bias
        self.own = self.each(self.logits)
        self.ref = self.each(self.ref_hidden @ self.ref_weight.T)
        self.nll = -self.own[: rows // 2].sum() / self.mask[: rows // 2].sum()

    def each(self, logits, temperature=1.0):
        ids = self.target.clamp(min=0).unsqueeze(-1)
        log_prob = (logits / temperature).log_softmax(-1).gather(-1, ids).squeeze(-1)
        return log_prob * self.mask

    def same(self, got, expected):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
        inputs = (self.hidden, self.weight)
        for a, b in zip(
            torch.autograd.grad(got, inputs, retain_graph=True),
            torch.autograd.grad(expected, inputs, retain_graph=True),
            strict=True,
        ):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.fixture
def pairs(draw):
    return Batch(draw)


def mean_logits(batch, rows):
    """Over padding too, as Liger-Kernel reports it."""
    return batch.logits[rows].mean()


@pytest.mark.parametrize("loss_type", ["sigmoid", "apo_zero"])
def test_dpo(pairs, loss_type):
    from liger_multi.compat.liger_kernel.chunked.preference import LigerFusedLinearDPOLoss

    b = pairs
    loss = LigerFusedLinearDPOLoss(beta=0.3, loss_type=loss_type, compute_nll_loss=True, alpha=0.5)
    got, aux = loss(b.weight, b.hidden, b.target, b.bias, b.ref_hidden, b.ref_weight)
    chosen, rejected = (0.3 * (b.own - b.ref).sum(-1)).chunk(2)
    each = {
        "sigmoid": -F.logsigmoid(chosen - rejected),
        "apo_zero": torch.sigmoid(-chosen) + torch.sigmoid(rejected),
    }[loss_type]
    b.same(got, each.mean() + 0.5 * b.nll)
    sums = b.own.sum(-1).chunk(2)
    expected = (
        *sums,
        mean_logits(b, slice(2)),
        mean_logits(b, slice(2, 4)),
        b.nll,
        chosen,
        rejected,
    )
    for a, w in zip(aux, expected, strict=True):
        torch.testing.assert_close(a, w, rtol=1e-5, atol=1e-6)


def test_cpo_and_simpo_and_orpo(pairs):
    from liger_multi.compat.liger_kernel.chunked import preference

    b = pairs
    total, count = b.own.sum(-1), b.mask.sum(-1)
    chosen, rejected = total.chunk(2)
    got, _ = preference.LigerFusedLinearCPOLoss(beta=0.3, alpha=0.5, label_smoothing=0.1)(
        b.weight, b.hidden, b.target, b.bias
    )
    x = 0.3 * (chosen - rejected)
    each = -0.9 * F.logsigmoid(x) - 0.1 * F.logsigmoid(-x)
    b.same(got, each.mean() + 0.5 * b.nll)
    chosen, rejected = (total / count).chunk(2)
    got, _ = preference.LigerFusedLinearSimPOLoss(beta=2.0, gamma=0.4, compute_nll_loss=False)(
        b.weight, b.hidden, b.target, b.bias
    )
    b.same(got, -F.logsigmoid(2 * (chosen - rejected) - 0.4).mean())
    got, aux = preference.LigerFusedLinearORPOLoss(beta=0.3)(b.weight, b.hidden, b.target, b.bias)
    odds = (chosen - rejected) - torch.log1p(-chosen.exp()) + torch.log1p(-rejected.exp())
    b.same(got, b.nll - 0.3 * F.logsigmoid(odds).mean())
    torch.testing.assert_close(aux[-1], odds.mean(), rtol=1e-5, atol=1e-6)


def test_kto(pairs):
    from liger_multi.compat.liger_kernel.chunked.preference import LigerFusedLinearKTOLoss

    b, liked = pairs, torch.tensor([True, False, False, True])
    got, aux = LigerFusedLinearKTOLoss(beta=0.3, use_ref_model=True)(
        b.hidden,
        b.weight,
        b.target,
        b.bias,
        liked,
        b.ref_hidden,
        b.ref_weight,
        kl=torch.tensor(0.2),
    )
    ratio = (b.own - b.ref).sum(-1)
    sign = torch.where(liked, 1.0, -1.0)
    b.same(got, (1 - torch.sigmoid(0.3 * sign * (ratio - 0.2))).mean())
    torch.testing.assert_close(aux[0], b.own.sum(-1)[liked].sum())
    torch.testing.assert_close(aux[5], 0.3 * ratio[~liked].sum())


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "bnpo", "dr_grpo"])
@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_grpo(pairs, loss_type, beta):
    from liger_multi.compat.liger_kernel.chunked.policy import LigerFusedLinearGRPOLoss

    b, advantages = pairs, torch.tensor([1.0, -0.5, 0.3, -1.0])
    old = (b.each(b.logits, 0.9) + 0.3 * b.ref).detach()
    loss = LigerFusedLinearGRPOLoss(
        beta=beta, loss_type=loss_type, temperature=0.9, max_completion_length=7, epsilon_high=0.3
    )
    got, metrics = loss(
        b.hidden,
        b.weight,
        b.target.clamp(min=0),
        b.mask.long(),
        advantages,
        b.bias,
        old_per_token_logps=old,
        ref_per_token_logps=b.ref if beta else None,
    )
    own = b.each(b.logits, 0.9)
    ratio, a = (own - old).exp(), advantages.unsqueeze(1)
    each = -torch.minimum(ratio * a, ratio.clamp(0.8, 1.3) * a)
    gap = b.ref - own
    each = (each + beta * (gap.exp() - gap - 1)) * b.mask
    count = b.mask.sum(-1)
    expected = {
        "grpo": (each.sum(-1) / count).mean(),
        "bnpo": each.sum() / count.sum(),
        "dapo": each.sum() / count.sum(),
        "dr_grpo": each.sum() / (4 * 7),
    }[loss_type]
    b.same(got, expected)
    clipped = ((ratio < 0.8) & (a < 0)) | ((ratio > 1.3) & (a > 0))
    torch.testing.assert_close(metrics[-1], (clipped & b.mask).sum() / count.sum())
    assert len(metrics) == (2 if beta else 1)


@pytest.mark.parametrize("loss_type", ["JSD", "CosineSimilarity"])
def test_distillation(pairs, loss_type):
    from liger_multi.compat.liger_kernel.chunked import distillation

    b = pairs
    loss = getattr(distillation, f"LigerFusedLinear{loss_type}Loss")(
        0.4, 0.6, beta=0.3, temperature=2.0, return_soft_hard_loss=True
    )
    got, soft, hard = loss(
        b.hidden, b.weight, b.ref_hidden, b.ref_weight, b.target.reshape(-1), b.bias
    )
    x, y = b.logits / 2, b.ref_hidden @ b.ref_weight.T / 2
    if loss_type == "JSD":
        q, p = x.log_softmax(-1), y.log_softmax(-1)
        m = torch.logaddexp(p + torch.tensor(0.3).log(), q + torch.tensor(0.7).log())
        kl = [F.kl_div(m, s, log_target=True, reduction="none").sum(-1) for s in (p, q)]
        each, factor = 0.3 * kl[0] + 0.7 * kl[1], 1.0
    else:
        each, factor = 1 - F.cosine_similarity(x, y, dim=-1), 0.3
    expected = each[b.mask].mean()
    label = -b.own.sum() / b.mask.sum()
    b.same(got, 0.4 * label + 0.6 * factor * expected)
    torch.testing.assert_close(soft, factor * expected)
    torch.testing.assert_close(hard, label)


# --- what Liger-Kernel does otherwise than this library's own losses ---


def test_dpo_sigmoid_ignores_label_smoothing(pairs):
    from liger_multi.compat.liger_kernel.chunked.preference import LigerFusedLinearDPOLoss

    b = pairs
    got, _ = LigerFusedLinearDPOLoss(beta=0.3, label_smoothing=0.2, use_ref_model=False)(
        b.weight, b.hidden, b.target, b.bias
    )
    chosen, rejected = b.own.sum(-1).chunk(2)
    b.same(got, -F.logsigmoid(0.3 * (chosen - rejected)).mean())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_type": "nothing"}, "^Unsupported loss_type: nothing"),
        ({"loss_type": "exo_pair"}, "^label_smoothing must be > 0 for loss_type='exo_pair'"),
        ({"loss_type": "robust", "label_smoothing": 0.5}, r"lie in \[0.0, 0.5\) .*'robust'"),
    ],
)
@pytest.mark.parametrize("loss_type", [ValueError, AssertionError])
def test_dpo_option_errors(options, message, loss_type):
    from liger_multi.compat.liger_kernel.chunked.preference import LigerFusedLinearDPOLoss

    with pytest.raises(loss_type, match=message):
        LigerFusedLinearDPOLoss(**options)


def test_preference_metrics_are_detached(pairs):
    from liger_multi.compat.liger_kernel.chunked.preference import LigerFusedLinearCPOLoss

    b = pairs
    _, aux = LigerFusedLinearCPOLoss(compute_nll_loss=False)(b.weight, b.hidden, b.target, b.bias)
    assert not any(x.requires_grad for x in aux)
    assert aux[4] == 0
    _, aux = LigerFusedLinearCPOLoss()(b.weight, b.hidden, b.target, b.bias)
    torch.testing.assert_close(aux[4], b.nll.detach())


def test_orpo_nll_target(pairs):
    """The NLL is of those labels, rewards and log-odds of the targets, also where both count."""
    from liger_multi.compat.liger_kernel.chunked.preference import LigerFusedLinearORPOLoss

    b, labels = pairs, (pairs.target + 3) % 11
    labels[:, -1] = -100

    def means(of):
        own = b.logits.log_softmax(-1).gather(-1, of.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        return own * (of != -100), of != -100

    own, counts = means(labels)
    nll = -own[:2].sum() / counts[:2].sum()
    own, counts = means(b.target)
    sequences = own.sum(1) / counts.sum(1)
    odds = sequences - torch.log1p(-sequences.exp())
    ratio = F.logsigmoid(odds[:2] - odds[2:])
    expected = nll - 0.1 * ratio.mean()
    for rows in (labels, labels[:2]):
        loss, aux = LigerFusedLinearORPOLoss()(b.weight, b.hidden, b.target, b.bias, rows)
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(aux[4], nll.detach())
        torch.testing.assert_close(aux[7], ratio.mean().detach())
        torch.testing.assert_close(aux[8], (odds[:2] - odds[2:]).mean().detach())
        leaves = (b.hidden, b.weight)
        torch.testing.assert_close(
            torch.autograd.grad(loss, leaves),
            torch.autograd.grad(expected, leaves, retain_graph=True),
        )


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dapo", "cispo", "sapo"])
def test_functional_grpo_positional_arguments(pairs, loss_type):
    """Temperatures of SAPO stand before that of the logits; other losses do not read them."""
    from liger_multi.compat.liger_kernel.chunked.functions import liger_fused_linear_grpo
    from liger_multi.compat.liger_kernel.chunked.policy import LigerFusedLinearGRPOLoss

    b = pairs
    ids, mask, advantages = b.target.clamp(min=0), b.mask.float(), torch.tensor([1.0, -2, 0.5, -1])
    before, after = (b.hidden, b.weight, ids, mask, advantages, b.bias, b.ref, b.own.detach()), ()
    first = (*before, None, None, None, 0.04, 0.2, 0.2, loss_type, 10, "token")
    for pos, neg, temperature in ((1.0, False, True), (-1.0, 0.5, 2.0), (1.0, 1.05, 0.7)):
        after = (pos, neg, temperature, False, True, 1)
        if loss_type == "sapo" and min(pos, neg) <= 0:
            with pytest.raises(ValueError, match="sapo_temperature must be > 0"):
                liger_fused_linear_grpo(*first, *after)
            continue
        module = LigerFusedLinearGRPOLoss(
            loss_type=loss_type, max_completion_length=10, temperature=float(temperature)
        )
        got, expected = liger_fused_linear_grpo(*first, *after), module(*before)
        torch.testing.assert_close(got, expected)
    with pytest.raises(ValueError, match="sapo_temperature_neg must be positive"):
        LigerFusedLinearGRPOLoss(sapo_temperature_neg=0.0)


@pytest.mark.parametrize("loss_type", ["cispo", "sapo", "vespo"])
def test_token_losses_reject_sequence_level(pairs, loss_type):
    from liger_multi.compat.liger_kernel.chunked.policy import LigerFusedLinearGRPOLoss
    from liger_multi.compat.liger_kernel.grpo import triton_grpo_loss

    b, ids = pairs, pairs.target.clamp(min=0)
    advantages, mask = torch.randn(4), b.mask.float()
    words = "Sequence-level importance sampling is not supported|requires importance_sampling_leve"
    with pytest.raises(ValueError, match=words):
        triton_grpo_loss(
            torch.randn(4, 6, 11),
            b.own.detach(),
            None,
            ids,
            advantages,
            mask,
            beta=0.0,
            importance_sampling_level="sequence",
            loss_type=loss_type,
            reduce=True,
        )
    loss = LigerFusedLinearGRPOLoss(
        beta=0.0, loss_type=loss_type, use_ref_model=False, importance_sampling_level="sequence"
    )
    with pytest.raises(ValueError, match=words):
        loss(b.hidden, b.weight, ids, mask, advantages)


def test_cross_entropy_target_out_of_bounds(monkeypatch):
    """They raise on every device, as Liger-Kernel's assertion does, which people catch."""
    from liger_multi.compat.liger_kernel import functional, losses
    from liger_multi.compat.liger_kernel.op_functions import LigerCrossEntropyFunction

    logits, target = torch.randn(4, 11, requires_grad=True), torch.tensor([1, -100, 11, 3])
    calls = (
        losses.LigerCrossEntropyLoss(),
        functional.liger_cross_entropy,
        lambda x, t: LigerCrossEntropyFunction.apply(x, t, None),
    )
    for call in calls:
        for error in (AssertionError, IndexError):
            with pytest.raises(error, match="out of bounds"):
                call(logits, target)
    asked = []
    stock = ops.cross_entropy
    monkeypatch.setattr(
        ops, "cross_entropy", lambda *a, **k: asked.append(k["validate"]) or stock(*a, **k)
    )
    functional.liger_cross_entropy(logits, target.clamp(max=10))
    assert asked == [True]  # what a device asks for its sync


def test_kto_logit_sums_include_padding(pairs):
    from liger_multi.compat.liger_kernel.chunked.preference import LigerFusedLinearKTOLoss

    b, liked = pairs, torch.tensor([True, False, False, True])
    _, aux = LigerFusedLinearKTOLoss()(b.hidden, b.weight, b.target, b.bias, liked)
    expected = [b.logits[liked].sum().detach(), b.logits[~liked].sum().detach()]
    torch.testing.assert_close([*aux[2:4]], expected, rtol=1e-5, atol=1e-4)


def policy_of(b, terms=(), **options):
    from liger_multi.compat.liger_kernel.chunked.policy import LigerFusedLinearGRPOLoss

    call = dict(terms)
    return LigerFusedLinearGRPOLoss(**options)(
        b.hidden,
        b.weight,
        b.target.clamp(min=0),
        b.mask.long(),
        torch.tensor([1.0, -0.5, 0.3, -1.0]),
        b.bias,
        **call,
    )


@pytest.mark.parametrize("terms", [{}, {"ref_per_token_logps": 3.0}])
def test_grpo_without_reference(pairs, terms):
    b = pairs
    terms = {k: torch.full(b.target.shape, v) for k, v in terms.items()}
    plain, _ = policy_of(b, beta=0.0, use_ref_model=False)
    got, (kl, _) = policy_of(b, terms, beta=0.5, use_ref_model=False)
    b.same(got, plain)
    assert kl == 0
    with pytest.raises(ValueError, match="ref_per_token_logps or ref_input must be provided"):
        policy_of(b, beta=0.5)


def test_vespo_sequence_ratio_counts_once(draw):
    from liger_multi.compat.liger_kernel.chunked.policy import get_gamma_weights

    log_ratio, mask = draw(3, 4) / 4, torch.tensor([[1, 1, 1, 0], [0, 1, 1, 1], [1, 1, 0, 0]])
    advantages, ratio = torch.tensor([1.0, -1.0, 0.0]), torch.tensor([[0.5], [2.0], [1.5]])
    w = ((log_ratio * mask).sum(-1, keepdim=True)).exp() * ratio
    k, rate = torch.tensor([[2.0], [3.0], [2.0]]), torch.tensor([[3.0], [2.0], [3.0]])
    got = get_gamma_weights(advantages, log_ratio, mask, ratio)
    torch.testing.assert_close(got, w**k * (rate * (1 - w)).exp())


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("LigerCrossEntropyLoss", {"label_smoothing": 2.0}),
        ("LigerFusedLinearCrossEntropyLoss", {"reduction": "x"}),
        ("LigerCrossEntropyLoss", {"softcap": -1.0}),
        ("LigerFusedLinearJSD", {"temperature": 0.0}),
    ],
)
def test_loss_option_errors(name, options):
    from liger_multi.compat.liger_kernel import losses as module

    for error in (ValueError, AssertionError):
        with pytest.raises(error, match=next(iter(options))):
            getattr(module, name)(**options)


# --- losses of one's own, on the base classes ---


def test_custom_preference_loss(pairs):
    from liger_multi.compat.liger_kernel.chunked.bases import LigerFusedLinearPreferenceBase as Base

    class Own(Base):
        @staticmethod
        def preference_loss_fn(chosen, rejected, target, beta=0.1, gamma=0.0):
            gap = (chosen - rejected - gamma).square()
            return beta * gap.sum() / (target.shape[0] // 2), gap.mean(), chosen

        @classmethod
        def forward(cls, ctx, x, w, t, bias):
            return super().forward(
                cls=cls,
                ctx=ctx,
                _input=x,
                weight=w,
                target=t,
                bias=bias,
                beta=0.3,
                gamma=0.2,
                alpha=0.5,
                average_log_prob=False,
            )

        @staticmethod
        def backward(ctx, *grad_output):
            return Base.backward(ctx, grad_output)[:4]

    b = pairs
    got, aux = Own.apply(b.hidden, b.weight, b.target, b.bias)
    chosen, rejected = b.own.sum(-1).chunk(2)
    gap = (chosen - rejected - 0.2).square()
    b.same(2 * got, 2 * (0.3 * gap.mean() + 0.5 * b.nll))
    torch.testing.assert_close(aux[5], gap.sum().detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(aux[6], chosen.detach())


def test_custom_distillation_loss_bounds_memory():
    from torch.utils._python_dispatch import TorchDispatchMode

    from liger_multi.compat.liger_kernel.chunked.bases import (
        LigerFusedLinearDistillationBase as Base,
    )

    class Own(Base):
        @staticmethod
        def distillation_loss_fn(student, teacher, target=None, ignore_index=None, beta=0.5):
            gap = (student.softmax(-1) - teacher.softmax(-1)).square().sum(-1)
            return gap[target != ignore_index].sum()

        @classmethod
        def forward(cls, ctx, x, w, tx, tw, t):
            return super().forward(
                cls=cls,
                ctx=ctx,
                student_input=x,
                student_weight=w,
                teacher_input=tx,
                teacher_weight=tw,
                target=t,
                temperature=2.0,
                return_soft_hard_loss=True,
            )

        @staticmethod
        def backward(ctx, *grad_output):
            return Base.backward(ctx, *grad_output)[:5]

    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                self.elements = max(self.elements, out.numel())
            return out

    rows, classes = 2048, 2048
    g = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 8, generator=g).requires_grad_()
    w = torch.randn(classes, 8, generator=g).requires_grad_()
    tx, tw = torch.randn(rows, 4, generator=g), torch.randn(classes, 4, generator=g)
    t = torch.randint(classes, (rows,), generator=g)
    t[::3] = -100
    with Largest() as calls:
        got, soft, hard = Own.apply(x, w, tx, tw, t)
        gradients = torch.autograd.grad(got, (x, w))
    assert calls.elements <= rows * classes // 2
    z, y, valid = x @ w.T, tx @ tw.T, t != -100
    gap = ((z / 2).softmax(-1) - (y / 2).softmax(-1)).square().sum(-1)[valid].mean()
    label = F.cross_entropy(z, t)
    torch.testing.assert_close((soft, hard), (gap.detach(), label.detach()))
    expected = torch.autograd.grad(0.5 * gap + 0.5 * label, (x, w))
    torch.testing.assert_close(gradients, expected, rtol=1e-4, atol=1e-6)


def test_subclass_of_sealed_function_raises():
    from liger_multi.compat.liger_kernel.chunked.functions import LigerFusedLinearDPOFunction

    with pytest.raises(TypeError, match="derive from LigerFusedLinearPreferenceBase"):

        class Own(LigerFusedLinearDPOFunction):
            @staticmethod
            def preference_loss_fn(*args):
                return 0.0


def test_functional_simpo_argument_order(pairs):
    from liger_multi.compat.liger_kernel.chunked import functions, preference

    b = pairs
    got, _ = functions.liger_fused_linear_simpo(b.hidden, b.weight, b.target, b.bias, -100, 2.0)
    expected, _ = preference.LigerFusedLinearSimPOLoss(beta=2.0, compute_nll_loss=False)(
        b.weight, b.hidden, b.target, b.bias
    )
    b.same(got, expected)


# --- helpers ---


def test_launch_settings():
    from liger_multi.compat.liger_kernel.helpers import calculate_settings, compare_version

    assert calculate_settings(1000) == (1024, 4)
    assert calculate_settings(1025) == (2048, 8)
    assert calculate_settings(8192) == (8192, 16)
    assert calculate_settings(65536)[0] == 65536
    with pytest.raises(RuntimeError, match="65537"):
        calculate_settings(65537)
    assert compare_version("torch", lambda a, b: a >= b, "2.0")
    assert not compare_version("no-such-package-here", lambda a, b: True, "1")


def test_ensure_contiguous():
    from liger_multi.compat.liger_kernel.helpers import ensure_contiguous

    calls = ensure_contiguous(lambda ctx, x, *, y, n: (x.is_contiguous(), y.is_contiguous(), n))
    strided = torch.ones(3, 4).T
    assert calls(None, strided, y=strided, n=2) == (True, True, 2)


def test_fsdp_forward_redirection():
    from liger_multi.compat.liger_kernel.helpers import _FSDPForwardRedirection

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

    run = _FSDPForwardRedirection()
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


def test_base_class_double_backward_raises():
    """They are made in forward: a second derivative would silently lack most of itself."""
    from liger_multi.compat.liger_kernel.chunked.functions import LigerFusedLinearORPOFunction
    from liger_multi.errors import DoubleBackwardError

    hidden = torch.randn(4, 5, 8, requires_grad=True)
    weight = torch.randn(11, 8, requires_grad=True)
    target = torch.randint(0, 11, (4, 5))
    loss = LigerFusedLinearORPOFunction.apply(hidden, weight, target)[0]
    (gradient,) = torch.autograd.grad(loss, hidden, create_graph=True)
    with pytest.raises(DoubleBackwardError):
        torch.autograd.grad(gradient.square().sum(), weight)


# --- dtypes, errors and arguments as in the package ---


def test_retired_arguments_warn(draw):
    from liger_multi.compat.liger_kernel import functional as f

    x, target = draw(3, 4), torch.tensor([1, 2, 3])
    with pytest.warns(DeprecationWarning, match="reduce=False change nothing"):
        loss = f.liger_cross_entropy(x, target, reduce=False)
    assert torch.equal(loss, f.liger_cross_entropy(x, target))
    student, teacher = x.log_softmax(-1), draw(3, 4).softmax(-1)
    with pytest.warns(DeprecationWarning, match="size_average=False"):
        loss = f.liger_kl_div(student, teacher, size_average=False)
    assert torch.equal(loss, f.liger_kl_div(student, teacher))


def test_selective_log_softmax_uses_last_ids(draw):
    from liger_multi.compat.liger_kernel import functional as f

    logits, ids = draw(2, 4, 6), torch.tensor([[5, 1, 2, 3], [4, 0, 5, 1]])
    mask = torch.tensor([[0, 1, 1, 0], [1, 1, 1, 1]])
    expected = f.fused_selective_log_softmax(logits, ids[:, 1:], mask=mask[:, 1:])
    assert torch.equal(f.fused_selective_log_softmax(logits, ids, mask=mask), expected)
    with pytest.raises(ValueError, match="have fewer than L"):
        f.fused_selective_log_softmax(logits, ids[:, :2])


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

    from liger_multi.compat.liger_kernel import modules

    config = SimpleNamespace(hidden_size=8, intermediate_size=16, hidden_act="silu")
    args = {"LigerPolyNorm": (), "LigerTiledSwiGLUMLP": (config, 2)}.get(name, (8,))
    module = getattr(modules, name)(*args)
    assert [n for n in ATTRIBUTES[name].split() if not hasattr(module, n)] == []
