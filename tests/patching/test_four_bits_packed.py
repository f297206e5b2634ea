"""Weights in 4 bits as checkpoints of GPTQ, AWQ and modelopt keep them."""
# ruff: noqa: E402  (what needs transformers is imported after the skip)

import copy
import json

import pytest
import torch
from torch import nn

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
from safetensors.torch import save_file

from liger_multi.ops import QuantizedWeight, _quantized
from liger_multi.patching import patch, unpatch
from liger_multi.testing.bitwise import same_bits
from tests.models import assert_same_training, build
from tests.patching.test_four_bits import SIZES, called, loss_of, replaced, with_lora

__all__ = ["called"]  # a fixture
GROUP = 32
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def packed(codes, order=range(8)):
    """Eight adjacent codes of the last axis a word, the first of ``order`` in its lowest bits."""
    eights = codes.long().unflatten(-1, (-1, 8))
    words = sum(eights[..., code] << (4 * place) for place, code in enumerate(order))
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def words_of(codes, packing):
    """Words of codes (N, K)."""
    if packing == "gptq":
        return packed(codes).mT.contiguous()
    return packed(codes.mT, AWQ_ORDER).contiguous()


def parts(rows, columns, packing, seed=0, dtype=torch.bfloat16):
    """The tensors of a layer (N, K), and its numbers: exact for fp16, else rounded like scales."""
    g = torch.Generator().manual_seed(seed)
    groups = columns // GROUP
    codes, zeros = (torch.randint(16, s, generator=g) for s in ((rows, columns), (groups, rows)))
    scales = (torch.rand(groups, rows, generator=g) * 0.02 + 0.001).to(dtype)
    wide = torch.float32 if dtype == torch.float16 else dtype
    order = AWQ_ORDER if packing == "awq" else range(8)
    tensors = {"qweight": words_of(codes, packing), "qzeros": packed(zeros, order)}
    numbers = (codes - zeros.mT.repeat_interleave(GROUP, 1)).to(wide)
    numbers = numbers * scales.mT.repeat_interleave(GROUP, 1)
    return {**tensors, "scales": scales, "zeros": zeros}, numbers


@pytest.mark.parametrize("packing", ["gptq", "awq"])
def test_words(packing, monkeypatch):
    """The bits of ``(code - zero) * scale``; parts, transposes and copies are the weight's."""
    tensors, numbers = parts(48, 96, packing)
    zeros, scales = tensors["zeros"].mT.to(torch.uint8), tensors["scales"].mT
    codes = tensors["qweight"]
    weight = QuantizedWeight(codes, scales, format="int4", zeros=zeros, packing=packing)
    assert weight.shape == numbers.shape
    assert weight.all_rows == 48
    assert same_bits(weight.dequantized(), numbers)
    assert same_bits(weight.mT.dequantized().contiguous(), numbers.mT.contiguous())
    assert same_bits(copy.deepcopy(weight)[8:24].dequantized(), numbers[8:24])
    assert same_bits(weight[3:5].clone(), numbers[3:5])
    assert same_bits(weight.numbers_at(torch.tensor([40, 7])), numbers[[40, 7]])
    assert weight[5].shape == (96,)
    monkeypatch.setattr(_quantized, "PIECE_BYTES", numbers.nbytes // 3)
    for one, right in ((weight, numbers), (weight.mT, numbers.mT)):
        pieces = one.pieces()
        assert len(pieces) > 2
        assert same_bits(torch.cat([p.dequantized() for p in pieces]), right.contiguous())


def test_unknown_packings_are_refused():
    with pytest.raises(ValueError, match="packing"):
        QuantizedWeight(torch.zeros(2, 8), torch.zeros(8, 1), format="int4", packing="marlin")


# --- layers of gptqmodel ---


def stand_in(module, name):
    """A class under the name of one of gptqmodel's, which dequantizes by PyTorch."""

    def init(self, rows, columns, packing, seed, bias, dtype=torch.bfloat16):
        nn.Module.__init__(self)
        tensors, self.numbers = parts(rows, columns, packing, seed, dtype)
        del tensors["zeros"]
        for key, value in tensors.items():
            self.register_buffer(key, value)
        if packing == "gptq":
            self.register_buffer("g_idx", torch.arange(columns, dtype=torch.int32) // GROUP)
        self.register_buffer("bias", bias)
        self.in_features, self.out_features, self.bits = columns, rows, 4
        self.adapter, self.online_full_had, self.online_partial_had = None, False, False

    def forward(self, x):
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return nn.functional.linear(x, self.numbers.to(x.dtype), bias)

    forward.__module__, forward.__qualname__ = module, f"{name}.forward"
    body = {"__init__": init, "forward": forward, "__module__": module}
    return type(name, (nn.Module,), body)


_QLINEAR = "gptqmodel.nn_modules.qlinear"
LAYERS = {
    "gptq": stand_in(f"{_QLINEAR}.torch", "TorchLinear"),
    "awq": stand_in(f"{_QLINEAR}.torch_awq", "AwqTorchLinear"),
}


def in_words(packing, dtype=torch.bfloat16, scales=torch.bfloat16):
    layers = iter(range(1000))

    def make(layer):
        bias = None if next(layers) % 2 else torch.ones(layer.out_features).to(scales)
        sizes = layer.out_features, layer.in_features
        return LAYERS[packing](*sizes, packing, next(layers), bias, scales)

    return replaced(build("llama", **SIZES).to(dtype), make)


@pytest.mark.parametrize("packing", LAYERS)
def test_layers(packing, called):
    stock = in_words(packing)
    ours = copy.deepcopy(stock)
    before = ours.state_dict()
    report = patch(ours, strict=True)
    assert report.count("four_bits") == 14
    assert "int4, 4.75 bits" in str(report)
    called.clear()
    assert_same_training(stock, ours, loss_of, rtol=0.03)
    assert called.count(("linear", True)) == len(called) > 13
    after = ours.state_dict()
    assert all(
        after[name] is not None and torch.equal(after[name], before[name]) for name in before
    )
    unpatch(ours)
    assert_same_training(stock, ours, loss_of, rtol=0)


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 2e-5), (torch.bfloat16, 0.03)])
@pytest.mark.parametrize("packing", LAYERS)
def test_scales_in_fp16(packing, dtype, rtol, called):
    """gptqmodel has fp16 scales and biases beside a model of any dtype, and follows the input."""
    stock = in_words(packing, dtype, torch.float16)
    ours = copy.deepcopy(stock)
    assert patch(ours, strict=True).count("four_bits") == 14
    called.clear()
    assert_same_training(stock, ours, loss_of, rtol=rtol)
    assert called.count(("linear", True)) == len(called) > 13
    up = [m.model.layers[0].mlp.up_proj for m in (ours, stock)]
    wide = torch.ones(2, 64, dtype=torch.float64)  # no dtype of the operator
    assert torch.equal(up[0](wide), up[1](wide))
    with torch.autocast("cpu", torch.bfloat16):
        called.clear()
        assert_same_training(stock, ours, loss_of, rtol=0.03)
    assert ("linear", True) in called


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: m.g_idx.copy_(m.g_idx.flip(0)), "another order"),
        (lambda m: setattr(m, "bits", 8), "in 8 bits"),
        (lambda m: setattr(m, "adapter", object()), "an adapter of its own"),
        (lambda m: setattr(m, "in_features", 60), "padded"),
        (lambda m: delattr(m, "qzeros"), "lacks scales or zeros"),
        (lambda m: setattr(type(m), "__module__", f"{_QLINEAR}.marlin"), "own call"),
    ],
)
def test_layers_that_are_left(change, reason, monkeypatch):
    monkeypatch.setattr(LAYERS["gptq"], "__module__", LAYERS["gptq"].__module__)
    model = in_words("gptq")
    layer = model.model.layers[0].mlp.up_proj
    patch(model)
    if reason == "own call":
        unpatch(model)
    change(layer)
    report = patch(model)
    lines = [s for s in report.skipped if s.path.endswith("0.mlp.up_proj") and reason in s.reason]
    assert lines, report
    assert torch.isfinite(layer(torch.randn(2, 64).bfloat16())).all()


def numbered(make):
    """A model with ``make(layer, seed)`` in the place of linear layers."""
    seeds = iter(range(100))
    return replaced(build("llama", **SIZES).bfloat16(), lambda layer: make(layer, next(seeds)))


def dense(packing):
    """A maker of layers with the numbers in 16 bits."""

    def make(layer, seed):
        _, numbers = parts(layer.out_features, layer.in_features, packing, seed)
        own = nn.Linear(layer.in_features, layer.out_features, False, dtype=torch.bfloat16)
        own.weight = nn.Parameter(numbers, requires_grad=False)
        return own

    return make


def of_gptqmodel(packing):
    """A maker of the package's own layers, which have no call for fp32."""
    pytest.importorskip("gptqmodel")
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.nn_modules.qlinear.torch_awq import AwqTorchLinear

    layer_class = {"gptq": TorchLinear, "awq": AwqTorchLinear}[packing]

    def make(layer, seed):
        own = layer_class(
            bits=4,
            group_size=GROUP,
            sym=False,
            desc_act=False,
            in_features=layer.in_features,
            out_features=layer.out_features,
            register_buffers=True,
            dtype=torch.bfloat16,
        )
        tensors, _ = parts(layer.out_features, layer.in_features, packing, seed)
        for name in ("qweight", "qzeros", "scales"):
            setattr(own, name, tensors[name])
        own.optimized = True  # its compiler would take minutes
        own.post_init()
        return own

    return make


@pytest.mark.parametrize("packing", LAYERS)
def test_lora_on_layers_of_gptqmodel(packing, called):
    """The steps of PEFT over the numbers; its layers for AWQ round twice more in 16 bits."""
    owner = numbered(of_gptqmodel(packing))
    owner.quantization_method = packing
    stock, owner = with_lora(numbered(dense(packing))), with_lora(owner)
    ours = copy.deepcopy(owner)
    report = patch(ours, strict=True)
    assert report.count("four_bits") == report.count("lora") == 14
    called.clear()
    assert_same_training(stock, ours, loss_of, rtol=0.03)
    assert {("linear", True), ("lora_mlp", True), ("lora_qkv", True)} <= set(called)
    with torch.no_grad():
        torch.testing.assert_close(loss_of(ours), loss_of(owner), rtol=0.01, atol=0)


# --- checkpoints as transformers loads them ---

LOADED = {
    "gptq": {"desc_act": False, "sym": False, "checkpoint_format": "gptq_v2"},
    "awq": {"zero_point": True, "version": "gemm", "modules_to_not_convert": ["lm_head"]},
}
BACKENDS = {"gptq": "torch", "awq": "torch_awq"}


def checkpoint(packing, folder):
    """Write a checkpoint of a model in words; the model with the numbers of its layers."""
    model = build("llama", **SIZES)
    state = dict(model.state_dict())
    layers = [n for n, m in model.named_modules() if type(m) is nn.Linear and n != "lm_head"]
    for seed, name in enumerate(layers):
        layer = model.get_submodule(name)
        shape = layer.out_features, layer.in_features
        tensors, layer.weight.data = parts(*shape, packing, seed, torch.float16)
        layer.requires_grad_(False)
        del tensors["zeros"], state[f"{name}.weight"]
        if packing == "gptq":
            tensors["g_idx"] = torch.arange(layer.in_features, dtype=torch.int32) // GROUP
        state |= {f"{name}.{key}": value for key, value in tensors.items()}
    folder.mkdir(exist_ok=True)
    save_file({n: t.contiguous() for n, t in state.items()}, folder / "model.safetensors")
    scheme = {"quant_method": packing, "bits": 4, "group_size": GROUP, **LOADED[packing]}
    config = {**model.config.to_dict(), "quantization_config": scheme}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return model


def loaded(packing, folder):
    schemes = {"gptq": transformers.GPTQConfig(4, backend=BACKENDS["gptq"])}
    schemes["awq"] = transformers.AwqConfig(4, backend=BACKENDS["awq"])
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, quantization_config=schemes[packing], device_map={"": "cpu"}
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("packing", LOADED)
def test_loaded_by_transformers(packing, tmp_path, called):
    """``from_pretrained`` by gptqmodel and optimum, LoRA, unpatching, and saving again."""
    for package in ("gptqmodel", "optimum"):
        pytest.importorskip(package)
    stock = checkpoint(packing, tmp_path / "first").requires_grad_(False)
    ours = loaded(packing, tmp_path / "first")
    words = {n: t.clone() for n, t in ours.state_dict().items()}
    assert words["model.layers.0.mlp.up_proj.scales"].dtype == torch.float16
    with torch.no_grad():
        owner = loss_of(ours)
    assert patch(ours, strict=True).count("four_bits") == 14
    stock, ours = with_lora(stock), with_lora(ours)
    ours.load_state_dict(
        {n: t for n, t in stock.state_dict().items() if "lora_" in n}, strict=False
    )
    report = patch(ours, strict=True)
    assert report.count("four_bits") == report.count("lora") == 14
    called.clear()
    assert_same_training(stock, ours, loss_of, rtol=2e-5)
    assert {("linear", True), ("lora_mlp", True), ("lora_qkv", True)} <= set(called)
    unpatch(ours)
    base = ours.unload()
    base.save_pretrained(tmp_path / "second")
    again = loaded(packing, tmp_path / "second")
    saved = again.state_dict()
    assert saved.keys() == words.keys()
    assert all(same_bits(saved[name], words[name]) for name in words)
    with torch.no_grad():
        assert same_bits(loss_of(base), owner)
        assert same_bits(loss_of(again), owner)


# --- modelopt ---


def nvfp4_parts(rows, columns, seed=0):
    g = torch.Generator().manual_seed(seed)
    codes = torch.randint(256, (rows, columns // 2), generator=g, dtype=torch.uint8)
    scales = (torch.rand(rows, columns // 16, generator=g) + 0.5).to(torch.float8_e4m3fn)
    return codes, scales, torch.tensor(0.02)


def exported(layer):
    """A linear layer with the tensors of a checkpoint of modelopt."""
    codes, scales, one = nvfp4_parts(*layer.weight.shape, seed=layer.weight.shape[0])
    layer.weight = nn.Parameter(codes, requires_grad=False)
    layer.register_buffer("weight_scale", scales)
    layer.register_buffer("weight_scale_2", one)
    return layer


def numbers_of(layer):
    codes, scales, one = nvfp4_parts(layer.out_features, layer.in_features, layer.out_features)
    weight = QuantizedWeight(codes, scales, format="nvfp4", global_scale=one)
    plain = nn.Linear(layer.in_features, layer.out_features, False, dtype=torch.bfloat16)
    plain.weight = nn.Parameter(weight.dequantized(), requires_grad=False)
    return plain


def test_checkpoints_of_modelopt(called):
    """``weight``, ``weight_scale`` and ``weight_scale_2``, which multiplies."""
    model = build("llama", **SIZES).bfloat16()
    stock = replaced(copy.deepcopy(model), numbers_of)
    ours = replaced(model, exported)
    report = patch(ours, strict=True)
    assert report.count("four_bits") == 14
    assert "nvfp4, 4.5" in str(report)
    called.clear()
    assert_same_training(stock, ours, loss_of, rtol=0.03)
    assert ("linear", True) in called
    layer = ours.model.layers[0].mlp.up_proj
    assert layer.state_dict()["weight"].dtype == torch.uint8
    stock, ours = with_lora(stock), with_lora(ours)
    assert patch(ours, strict=True).count("lora") == 14
    assert_same_training(stock, ours, loss_of, rtol=0.03)
    assert ("lora_mlp", True) in called


def test_layers_of_modelopt(called):
    quantization = pytest.importorskip("modelopt.torch.quantization")

    def compressed(inputs):
        model = build("llama", **SIZES).bfloat16()
        config = copy.deepcopy(quantization.W4A16_NVFP4_CFG)
        quantization.quantize(model, config, lambda m: None)
        quantization.compress(model)
        if inputs:
            model.model.layers[0].mlp.up_proj.input_quantizer.enable()
        return model

    stock, ours = compressed(False), compressed(True)
    report = patch(ours)
    assert report.count("four_bits") == 13
    assert any("rounds or scales its inputs" in s.reason for s in report.skipped)
    ours.model.layers[0].mlp.up_proj.input_quantizer.disable()
    assert patch(ours).count("four_bits") == 14
    called.clear()
    assert_same_training(stock, ours, loss_of, rtol=0.03)
    assert ("linear", True) in called
    unpatch(ours)
    assert_same_training(stock, ours, loss_of, rtol=0)
