"""patch, unpatch, patched, the report: what is recognized, refused, and that all comes back."""

# ruff: noqa: E402  (what needs transformers is imported after the skip)

import contextlib
import copy
import functools
import os
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

transformers = pytest.importorskip("transformers")

from transformers.models.llama.modeling_llama import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaMLP,
    LlamaRMSNorm,
)

from liger_multi import patching
from liger_multi.dispatch.torch_ops import Primitive
from liger_multi.errors import ConfigurationError, PatchError
from liger_multi.patching import (
    MlpNames,
    NormKind,
    PatchReport,
    Replacement,
    mlp as find_mlps,
    norms as find_norms,
    patch,
    patched,
    real_logits,
    register,
    rotary,
    unpatch,
    unregister,
)
from liger_multi.patching.experts import find as find_experts
from liger_multi.patching.head.protocol import LazyLogits
from liger_multi.testing.bitwise import STEPS, batches, digest, train, train_twice
from tests import harness
from tests.models import (
    ARCHITECTURES,
    HEADLESS,
    KINDS,
    VOCABULARY,
    adapters,
    assert_same_training,
    assert_unpatched,
    batch,
    build,
    loss_of,
    pair,
    trainer,
)
from tests.patching.test_norms import equal, patched_module


def state(model):
    """Everything of every module that a patch might touch."""
    return [(type(m), {k: id(v) for k, v in vars(m).items()}) for m in model.modules()]


def forget_probes():
    for module in (find_norms, find_mlps, rotary):
        module._verdicts.clear()
    find_experts._known_experts.clear()


@pytest.mark.parametrize("model_type", KINDS)
def test_unpatch_brings_the_very_same_back(model_type):
    model = build(model_type)
    before, keys = state(model), list(model.state_dict())
    patch(model)
    assert list(model.state_dict()) == keys
    assert [attributes for _, attributes in state(model)] == [held for _, held in before]
    assert [type(m).__name__ for m in model.modules()] == [stock.__name__ for stock, _ in before]
    assert isinstance(model.lm_head, nn.Linear)
    assert {e.status for e in unpatch(model).entries} == {"restored"}
    assert state(model) == before
    assert unpatch(model).entries == []


def test_changed_options_take_effect():
    model = build()
    first, classes = patch(model), [type(m) for m in model.modules()]
    assert {e.status for e in first.entries} == {"patched"}
    assert {e.status for e in patch(model).entries} == {"already patched"}
    assert [type(m) for m in model.modules()] == classes
    report = patch(
        model, rms_norm=False, swiglu="reference", fused_linear_cross_entropy={"chunk": 3}
    )
    assert {(e.op, e.status) for e in report.entries} == {
        ("rms_norm", "restored"),
        ("swiglu", "options changed"),
        ("rope", "already patched"),
        ("packing", "already patched"),
        ("fused_linear_cross_entropy", "options changed"),
    }
    assert type(model.model.norm) is LlamaRMSNorm
    assert type(model.model.layers[0].mlp)._liger_multi_swap.settings.options.backend == "reference"
    patch(model, fused_linear_cross_entropy=False)
    assert type(model.lm_head) is nn.Linear


def test_patched_blocks_nest_and_survive_exceptions():
    model = build()
    before = state(model)
    with patched(model) as report:
        assert isinstance(report, PatchReport)
        outer = state(model)
        with (
            contextlib.suppress(ZeroDivisionError),
            patched(model, rms_norm=False, fused_linear_cross_entropy={"chunk": 2}),
        ):
            assert type(model.model.norm) is LlamaRMSNorm
            raise ZeroDivisionError
        assert state(model) == outer
    assert state(model) == before


def test_strict_raises_and_leaves_the_model_as_it_was():
    model = build()
    model.model.norm.forward = functools.partial(LlamaRMSNorm.forward, model.model.norm)
    before = state(model)
    with pytest.raises(PatchError, match="other code replaced its forward"):
        patch(model, strict=True)
    assert state(model) == before
    report = patch(model)
    assert [(s.path, s.op) for s in report.skipped] == [("model.norm", "rms_norm")]
    assert report.count("rms_norm") == 4


@pytest.mark.parametrize(
    ("ops", "message"),
    [
        ({"rmsnorm": True}, "unknown patch key 'rmsnorm'; did you mean 'rms_norm'"),
        ({"fused_linear_cross_entropy": {"chunks": 3}}, "did you mean 'chunk'"),
        ({"rms_norm": {"eps": 3}}, "unknown option of rms_norm 'eps'"),
        (
            {"swiglu": 3},
            "swiglu must be True, False, a backend's name or a mapping of options, got 3",
        ),
        ({"fused_linear_cross_entropy": {"chunk": 0}}, "chunk must be .* got 0"),
        (
            {"fused_linear_cross_entropy": {"z_loss": -1.0}},
            "z_loss must be a number >= 0, got -1.0",
        ),
        ({"fused_linear_cross_entropy": {"accumulate": torch.int32}}, "accumulate must be"),
        ({"cross_entropy": {"validate": "yes"}}, "validate must be True or False"),
        ({"geglu": {"whole": 1}}, "geglu: whole must be True or False, got 1"),
        ({"swiglu_clamped": {"whole": True}}, "unknown option of swiglu_clamped 'whole'"),
    ],
)
def test_bad_options(ops, message):
    model = build()
    before = state(model)
    with pytest.raises(PatchError, match=message):
        patch(model, **ops)
    assert state(model) == before


@pytest.mark.parametrize(
    ("call", "target", "options", "error", "message"),
    [
        (patch, None, {"rms_norm": "referenc"}, ConfigurationError, "referenc"),
        (patch, "lama", {}, PatchError, "unknown model type 'lama'; did you mean 'llama'"),
        (unpatch, "llama", {}, PatchError, "model type 'llama' is not patched"),
        (patch, 3, {}, TypeError, "expected a model"),
        (unpatch, 3, {}, TypeError, "expected a model"),
        (lambda target: patched(target).__enter__(), 3, {}, TypeError, "expected a model"),
    ],
)
def test_bad_backend_and_model(call, target, options, error, message):
    with pytest.raises(error, match=message):
        call(build() if target is None else target, **options)


def test_model_type_patches_later_instances(tmp_path):
    post_init = transformers.PreTrainedModel.post_init
    build("llama").save_pretrained(tmp_path)
    report = patch("llama", rms_norm=False)
    try:
        assert "llama" in str(report)
        ours = build("llama")
        assert type(ours.lm_head) is not nn.Linear
        assert type(ours.model.norm) is LlamaRMSNorm
        assert type(build("qwen2").lm_head) is nn.Linear
        patch("llama", swiglu=False)
        loaded = LlamaForCausalLM.from_pretrained(tmp_path)
        assert type(loaded.lm_head) is not nn.Linear
        assert type(loaded.model.norm) is not LlamaRMSNorm
        assert type(loaded.model.layers[0].mlp) is LlamaMLP
    finally:
        unpatch("llama")
    assert transformers.PreTrainedModel.post_init is post_init
    stock = build("llama")
    assert type(stock.lm_head) is nn.Linear
    assert_same_training(stock, ours)
    unpatch(ours)
    assert type(ours.lm_head) is nn.Linear


@pytest.mark.parametrize("model_type", KINDS)
def test_every_model_type_is_patched_as_its_instances_are(model_type):
    known = ARCHITECTURES[model_type]
    stock = build(model_type)
    with patched(model_type, strict=True) as report:
        ours = build(model_type)
    assert {e.op for e in report.entries} == {
        *("rms_norm", "layer_norm", "gated_rms_norm", "poly_norm", "dyt", "relu_squared"),
        *("swiglu", "geglu", "swiglu_clamped", "fused_moe", "rope", "rms_norm_rope", "lora"),
        *("causal_conv1d", "gated_delta_rule", "gated_short_conv", "kimi_delta_attention"),
        *("selective_scan", "ssd_scan", "sparse_attention"),
        *("fused_linear_cross_entropy", "four_bits", "packing"),
    }
    assert ours.config.model_type == model_type
    again = patch(ours, strict=True)
    assert {op: again.count(op) for op in known.every} == known.every
    assert {e.status for e in again.entries} == {"already patched"}
    assert [type(m) for m in build(model_type).modules()] == [type(m) for m in stock.modules()]
    assert_unpatched(ours, stock)


def test_strict_model_types_raise_in_the_constructor(monkeypatch):
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: self.down_proj(self.up_proj(x)))
    with patched("llama", strict=True), pytest.raises(PatchError, match="LlamaMLP"):
        build("llama")
    with patched("llama"), pytest.warns(UserWarning, match="LlamaMLP computes neither"):
        assert type(build("llama").lm_head) is not nn.Linear
    with patched("llama", swiglu=False, geglu=False, strict=True):
        transformers.LlamaModel(build("llama").config)  # a model that has no head, by design


def test_strict_requires_named_operators():
    """A default finds what there is; a name that finds nothing is a mistake."""
    report = patch(build("mixtral"), strict=True)
    assert {s.op for s in report.skipped} == {"swiglu", "geglu"}
    said = "no module of this kind (its experts, MixtralExperts, are not patched)"
    assert said not in str(report)
    assert said in str(patch(build("mixtral"), strict=True, fused_moe=False))
    assert not patch(build("llama"), strict=True).skipped
    for model_type, op in (("mixtral", "swiglu"), ("llama", "geglu"), ("gemma", "swiglu")):
        with pytest.raises(PatchError, match=f"{op}.*no module of this kind"):
            patch(build(model_type), strict=True, **{op: True})


def test_a_forward_of_its_own_class_is_nobodys_replacement():
    """What transformers 5.0 leaves behind when it has captured outputs; it kept a patch alive."""
    stock, ours = build(), build()
    for model in (stock, ours):
        for module in model.modules():
            module.forward = module.forward
    assert patch(ours, strict=True).count("rope") == 2
    assert_same_training(stock, ours)
    for module in ours.modules():
        module.forward = module.forward
    assert_unpatched(ours, stock)
    for module in ours.modules():
        held = vars(module).get("forward")
        assert held is None or held.__func__ is type(module).forward


def test_models_built_on_meta_are_recognized():
    with torch.device("meta"):
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=99,
                hidden_size=32,
                intermediate_size=48,
                num_hidden_layers=1,
                num_attention_heads=2,
            )
        )
    patch(model, strict=True)
    model.to_empty(device="cpu")
    assert type(model.lm_head) is not nn.Linear


def test_models_of_fake_tensors_are_recognized():
    """Probes compared fake numbers, which raised, and remembered that as a refusal."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    forget_probes()
    with FakeTensorMode():
        patch(build("gemma"), strict=True)
    patch(build("gemma"), strict=True)


def test_probes_leave_the_random_state_and_the_module_alone():
    forget_probes()
    model = build("qwen3")
    calls = []
    for module in model.modules():
        module.register_forward_hook(lambda *args: calls.append(args))
    torch.manual_seed(5)
    before = torch.get_rng_state()
    with torch.no_grad():
        patch(model, strict=True)
    assert torch.equal(torch.get_rng_state(), before)
    assert calls == []


def test_unpatch_refuses_where_the_class_is_no_longer_ours():
    model = build(patching={})
    before = state(model)
    norm = model.model.norm
    ours = type(norm)
    norm.__class__ = type("FSDPLlamaRMSNorm", (ours,), {})
    with pytest.raises(PatchError, match=r"'model\.norm'.*FSDPLlamaRMSNorm"):
        unpatch(model)
    assert patch(model).count("rms_norm") == 5  # an equal patch below the wrapper counts
    assert "on top of an earlier patch" in patch(model, rms_norm="reference").skipped[0].reason
    patch(model)
    norm.__class__ = ours
    assert state(model) == before
    unpatch(model)
    with pytest.raises(PatchError, match="swapped again"), patched(model):
        norm.__class__ = type("FSDPLlamaRMSNorm", (type(norm),), {})


@pytest.mark.slow
def test_import_pulls_neither_transformers_nor_rich():
    code = (
        "import sys, liger_multi\n"
        "before = set(sys.modules)\n"
        "import liger_multi.patching\n"
        "from torch import nn\n"
        "str(liger_multi.patch(nn.Sequential(nn.Linear(2, 2))))\n"
        "heavy = {'transformers', 'rich', 'peft', 'accelerate'} & set(sys.modules)\n"
        "heavy |= {'triton', 'torch._dynamo'} & (set(sys.modules) - before)\n"
        "sys.exit(', '.join(heavy) or 0)"
    )
    harness.python("-c", code)


def flux():
    diffusers = pytest.importorskip("diffusers")
    sizes = {"attention_head_dim": 16, "num_attention_heads": 2, "joint_attention_dim": 32}
    model = diffusers.FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        axes_dims_rope=[4, 4, 8],
        pooled_projection_dim=32,
        **sizes,
    )
    inputs = {
        "hidden_states": torch.randn(1, 4, 4),
        "encoder_hidden_states": torch.randn(1, 3, 32),
        "pooled_projections": torch.randn(1, 32),
        "timestep": torch.tensor([1.0]),
        "img_ids": torch.zeros(4, 3),
        "txt_ids": torch.zeros(3, 3),
    }
    return model, lambda m: m(**inputs).sample.pow(2).sum()


class Encoder(nn.Module):
    """A module of sentence-transformers, around a BERT."""

    def __init__(self):
        super().__init__()
        self.auto_model = transformers.BertModel(
            transformers.BertConfig(
                hidden_size=32,
                num_hidden_layers=2,
                num_attention_heads=2,
                intermediate_size=48,
                vocab_size=99,
                hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
            )
        )

    def forward(self, features):
        out = self.auto_model(input_ids=features["input_ids"]).last_hidden_state
        return {**features, "sentence_embedding": out.mean(1)}


def sentences():
    library = pytest.importorskip("sentence_transformers")
    inputs = {"input_ids": torch.arange(12).view(2, 6)}
    model = library.SentenceTransformer(modules=[Encoder()], device="cpu")
    return model, lambda m: m(inputs)["sentence_embedding"].pow(3).sum()


def vision(**layers):
    timm = pytest.importorskip("timm", exc_type=ImportError)
    sizes = {"img_size": 16, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
    layers = {option: getattr(timm.layers, name) for option, name in layers.items()}
    model = timm.models.VisionTransformer(**sizes, num_classes=5, **layers)
    pixels = torch.randn(2, 3, 16, 16)
    return model, lambda m: m(pixels).pow(2).sum()


LIBRARIES = {
    "diffusers": (flux, {"layer_norm": 6, "rms_norm": 6}),
    "sentence-transformers": (sentences, {"layer_norm": 5}),
    "timm": (vision, {"layer_norm": 5}),
    # it says SwiGLU, and takes GELU
    "timm, gated": (
        lambda: vision(mlp_layer="SwiGLU", norm_layer="RmsNorm"),
        {"rms_norm": 5, "geglu": 2},
    ),
}


@pytest.mark.parametrize("library", LIBRARIES)
def test_models_of_other_libraries(library):
    make, counts = LIBRARIES[library]
    torch.manual_seed(0)
    stock, run = make()
    ours = copy.deepcopy(stock)
    report = patch(ours, **HEADLESS)
    assert {op: report.count(op) for op in ("layer_norm", "rms_norm", "geglu")} == {
        "layer_norm": 0,
        "rms_norm": 0,
        "geglu": 0,
        **counts,
    }
    assert_same_training(stock, ours, run)


# --- training under deterministic=True ---

REPEATED = ("llama", "qwen3_moe")


def maker(model_type, checkpointing, device="cpu"):
    def make():
        model = build(model_type, patching={}).to(device)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        return model

    return make


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
@pytest.mark.parametrize("model_type", REPEATED)
def test_a_repeated_run_has_equal_bits(model_type, checkpointing, device):
    first, second = train_twice(
        maker(model_type, checkpointing, device), lambda: batches(VOCABULARY, device)
    )
    assert first == second
    assert first.last < first.first, f"nothing was learnt in {STEPS} steps"


@pytest.mark.parametrize("model_type", REPEATED)
def test_nondeterministic_operator_is_reported(model_type, monkeypatch):
    """The last bit of some elements of a norm, at random in every call."""
    maker(model_type, False)()  # recognizes the norms, which probes of such a norm would not
    original, generator = Primitive.call, torch.Generator()

    def drifting(prim, *args):
        output = original(prim, *args)
        if (prim.op.name, prim.direction) != ("rms_norm", "forward"):
            return output
        y, rstd = output
        generator.manual_seed(int.from_bytes(os.urandom(6), "little"))
        flips = torch.rand(y.shape, generator=generator) < 0.1
        return torch.where(flips, y * (1 + torch.finfo(y.dtype).eps), y), rstd

    monkeypatch.setattr(Primitive, "call", drifting)
    first, second = train_twice(
        maker(model_type, False), lambda: batches(VOCABULARY, "cpu", steps=3)
    )
    assert first.parameters != second.parameters


def test_a_digest_sees_one_bit_and_the_order():
    x, y = torch.ones(3), torch.tensor([1.0, 1.0, 1.0 + torch.finfo(torch.float32).eps])
    assert digest([x, y]) == digest([x.clone(), y.clone()])
    assert digest([x, y]) != digest([y, x])
    assert digest([x]) != digest([y])
    assert digest([torch.zeros(1)]) != digest([-torch.zeros(1)])


def test_batches_are_the_same_in_every_run():
    first, second = (list(batches(50, "cpu", steps=4)) for _ in range(2))
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def test_weights_change_the_digest():
    digests = [train(build(seed=s), batches(VOCABULARY, "cpu", steps=2)) for s in (0, 1)]
    assert digests[0].parameters != digests[1].parameters


# --- what users add: probes, names and kinds ---


class Ours(nn.Module):
    """A module that no probe of the library knows."""

    def __init__(self):
        super().__init__()
        self.scale = 3.0

    def forward(self, x):
        return x * self.scale


def twice(module, stock, x):
    return stock(x) + 0 * x


def probe(module):
    if not isinstance(module, Ours):
        return None
    return Replacement(twice, "twice") if module.scale == 3.0 else "its scale is another"


@pytest.fixture
def registered():
    added = []

    def add(item, name=None):
        register(item, name)
        added.append(name or item)

    yield add
    for item in added:
        unregister(item)


def test_a_probe_of_a_user(registered):
    registered(probe, "twice")
    model = nn.Sequential(Ours(), Ours(), nn.LayerNorm(4))
    model[1].scale = 2.0
    report = patch(model, fused_linear_cross_entropy=False)
    assert [(e.op, e.path, e.replaced_by) for e in report.entries if e.op == "twice"] == [
        ("twice", "0", "twice")
    ]
    assert [(s.path, s.reason) for s in report.skipped if s.op == "twice"] == [
        ("1", "its scale is another")
    ]
    assert torch.equal(model[0](torch.ones(4)), torch.full((4,), 3.0))
    for twin in (copy.deepcopy(model[0]), pickle.loads(pickle.dumps(model[0]))):
        assert type(twin) is type(model[0])
    patch(model, twice=False, fused_linear_cross_entropy=False)
    assert type(model[0]) is Ours


def test_names_of_a_user(registered):
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.p, self.q, self.r = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            return self.r(F.relu(self.p(x)) * self.q(x))

    module = Attention()
    assert not any("Attention computes" in reason for reason in patched_module(module)[1])
    registered(MlpNames("p", "q", "r"))
    assert any("Attention computes neither" in reason for reason in patched_module(module)[1])


class Doubled(nn.Module):
    """An RMSNorm that adds two to its weight."""

    def __init__(self):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.randn(24)), 1e-6

    def forward(self, x):
        n = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return (n * (2.0 + self.weight.float())).to(x.dtype)


def test_a_kind_of_a_user(registered):
    module = Doubled()
    assert "Doubled is no RMSNorm" in patched_module(module)[1][0]
    registered(NormKind("two more", options=(("casting", "gemma"), ("offset", 2.0))))
    stock = copy.deepcopy(module)
    assert patched_module(module)[0] == ["rms_norm[two more]"]
    equal(stock, module, torch.randn(3, 24))


def test_the_example_of_the_page_runs():
    page = Path(__file__).parents[2] / "docs" / "recognition.md"
    section = page.read_text(encoding="utf-8").split("## Custom modules")[1].partition("\n## ")[0]
    actual = re.findall(r"^```python\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
    assert len(actual) == 2
    namespace = {"__name__": "page"}
    for block in actual:
        exec(compile(block, "recognition.md", "exec"), namespace)


def test_invalid_registrations():
    for item, name in ((probe, None), (probe, "rms_norm"), (3, "three")):
        with pytest.raises(PatchError):
            register(item, name)
    with pytest.raises(PatchError, match="not registered"):
        unregister("nobody")
    assert "twice" not in patching.registered.probes()


# --- what stands around a patched model: adapters, trainers, parallelism ---


def test_accelerate_convert_outputs_to_fp32(fused):
    operations = pytest.importorskip("accelerate.utils.operations")
    stock, ours = pair("llama", dtype=torch.bfloat16, patching={})
    for model in (stock, ours):
        model.forward = operations.convert_outputs_to_fp32(model.forward)
    outs = [m(**batch()) for m in (stock, ours)]
    assert outs[1].logits.dtype == torch.float32
    torch.testing.assert_close(real_logits(outs[1].logits), outs[0].logits, rtol=0, atol=0)
    torch.testing.assert_close(outs[1].loss, outs[0].loss, rtol=1e-3, atol=0)
    assert fused.count == 1


ADAPTED = {
    "layers": ({"targets": ["q_proj", "v_proj", "gate_proj", "down_proj"]}, "lora_", 1),
    "head": ({"targets": ["q_proj", "lm_head"]}, "lm_head.lora_A", 0),
    "saved head": ({"targets": ["q_proj"], "modules_to_save": ["lm_head"]}, "modules_to_save", 1),
}
"""Adapters, what they train, and calls of the fused loss before the next patch."""


@pytest.mark.parametrize("order", ["patch first", "adapter first", "inside"])
@pytest.mark.parametrize("case", ADAPTED)
@pytest.mark.filterwarnings("ignore::UserWarning:peft")
def test_adapters_train_as_without_a_patch(case, order, fused):
    config, trained, count = ADAPTED[case]
    stock, ours = pair("llama", tied=False, patching={} if order == "patch first" else None)
    stock, ours = (adapters(m, task_type="CAUSAL_LM", **config) for m in (stock, ours))
    if order == "adapter first":
        assert patch(ours, strict=True).count("fused_linear_cross_entropy")
    if order == "inside":
        patch(ours.base_model.model, strict=True)
    assert_same_training(stock, ours)
    assert fused.count == count
    assert all(p.grad.any() for n, p in ours.named_parameters() if trained in n)
    assert_unpatched(ours, stock)


def losses(trainer):
    trainer.train()
    return np.array([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])


@pytest.mark.parametrize(
    "arguments",
    [{}, {"bf16": True}, {"gradient_checkpointing": True}],
    ids=["fp32", "bf16", "checkpointing"],
)
def test_trainer(arguments, tmp_path, fused):
    stock, ours = pair("llama", patching={})
    expected, got = (losses(trainer(m, tmp_path, **arguments)) for m in (stock, ours))
    assert np.allclose(got, expected, rtol=2e-2 if "bf16" in arguments else 1e-4)
    assert expected[0] != expected[-1]
    assert fused.count == 3


def test_trainer_accumulation_of_uneven_lengths(tmp_path):
    weights = []
    for size, accumulate in ((4, 1), (1, 4), (2, 2)):
        model = build("llama", patching={})
        trainer(
            model,
            tmp_path,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=accumulate,
            max_steps=2,
            optim="sgd",
            learning_rate=0.5,
        ).train()
        weights.append(model.lm_head.weight.detach())
    for other in weights[1:]:
        torch.testing.assert_close(other, weights[0], rtol=1e-4, atol=1e-5)


def test_trainer_metrics_get_real_logits(tmp_path):
    observed = []

    def metrics(prediction):
        observed.append(prediction.predictions)
        return {
            "accuracy": float(
                (prediction.predictions.argmax(-1)[:, :-1] == prediction.label_ids[:, 1:]).mean()
            )
        }

    results = []
    for model in pair("llama"):
        if observed:
            patch(model)
        results.append(trainer(model, tmp_path, compute_metrics=metrics).evaluate())
    assert isinstance(observed[1], np.ndarray)
    assert observed[1].shape == (4, 14, VOCABULARY)
    np.testing.assert_allclose(observed[1], observed[0], rtol=1e-4, atol=1e-5)
    assert results[1]["eval_accuracy"] == results[0]["eval_accuracy"]
    assert results[1]["eval_loss"] == pytest.approx(results[0]["eval_loss"], rel=1e-5)


@pytest.mark.parametrize("unused", [False, True])
def test_distributed_data_parallel(one_process, unused, fused):
    stock, ours = pair("llama", patching={})
    wrapped = nn.parallel.DistributedDataParallel(ours, find_unused_parameters=unused)
    assert_same_training(stock, ours, lambda m: loss_of(wrapped if m is ours else m))
    assert fused.count == 1
    ids = batch()["input_ids"]
    run = lambda m: (wrapped if m is ours else m)(input_ids=ids).logits.softmax(-1).pow(2).sum()  # noqa: E731
    assert_same_training(stock, ours, run, rtol=1e-4)


@pytest.mark.parametrize("plan", ["root", "layers", "head"])
def test_fsdp2(one_process, plan, fused):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    stock, ours = pair("llama", tied=False, patching={})
    mesh = init_device_mesh("cpu", (1,))
    if plan != "root":
        for layer in ours.model.layers:
            fully_shard(layer, mesh=mesh)
    if plan == "head":
        fully_shard(ours.lm_head, mesh=mesh)
    fully_shard(ours, mesh=mesh)
    assert_same_training(stock, ours)
    assert fused.count == 1
    if plan == "head":
        with pytest.raises(PatchError, match="FSDP"):
            unpatch(ours)


def test_a_frozen_reference_model_of_patched_copies():
    policy = build("llama", patching={})
    reference = copy.deepcopy(policy).eval()
    ids = batch()["input_ids"]
    with torch.no_grad():
        expected = reference(input_ids=ids).logits
    assert isinstance(expected, LazyLogits)
    out = policy(input_ids=ids)
    divergence = F.kl_div(
        F.log_softmax(out.logits, -1), F.log_softmax(expected, -1), log_target=True, reduction="sum"
    )
    assert abs(divergence.item()) < 1e-4
    divergence.backward()
    assert not expected.requires_grad
