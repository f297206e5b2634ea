"""Models whose frozen weights other libraries keep in 4 bits: the steps of their own layers."""
# ruff: noqa: E402  (what needs transformers is imported after the skip)

import copy

import pytest
import torch
from torch import nn

peft = pytest.importorskip("peft")
pytest.importorskip("transformers")

from liger_multi import ops
from liger_multi.errors import PatchError
from liger_multi.ops import QuantizedWeight
from liger_multi.patching import patch, unpatch
from liger_multi.patching.four_bits import quantized_weight
from tests.models import assert_same_training, batch, build

# rows of whole blocks: bitsandbytes 0.50 decodes others wrongly on a CPU, not on a GPU
SIZES = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16}


def replaced(model, make):
    """The model with ``make(layer)`` in the place of every linear layer but the head."""
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if type(layer) is nn.Linear and name != "lm_head":
                setattr(parent, name, make(layer))
    return model


def in_bitsandbytes(layer, **options):
    bnb = pytest.importorskip("bitsandbytes")
    made = bnb.nn.Linear4bit(
        layer.in_features,
        layer.out_features,
        bias=layer.bias is not None,
        compute_dtype=torch.float32,
        **options,
    )
    made.load_state_dict(layer.state_dict())
    return made.to("cpu")


def in_torchao(layer):
    pytest.importorskip("torchao")
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor

    coded = NVFP4Tensor.to_nvfp4(layer.weight.detach(), per_tensor_scale=torch.tensor(0.01))
    layer.weight = nn.Parameter(coded, requires_grad=False)
    return layer


FORMATS = {
    "nf4": lambda layer: in_bitsandbytes(layer, quant_type="nf4", compress_statistics=False),
    "nf4 nested": lambda layer: in_bitsandbytes(layer, quant_type="nf4"),
    "fp4": lambda layer: in_bitsandbytes(layer, quant_type="fp4", compress_statistics=False),
}
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def with_lora(model):
    torch.manual_seed(5)
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=TARGETS))
    generator = torch.Generator().manual_seed(3)
    for name, p in model.named_parameters():
        if "lora_B" in name:
            p.data = torch.randn(p.shape, generator=generator) * 0.05
    return model


def loss_of(model):
    return model(**batch()).loss


@pytest.fixture
def called(monkeypatch):
    """Operators that were called, and whether with a weight in 4 bits."""
    names = []
    for name in ("linear", "lora_mlp", "lora_qkv"):
        stock = getattr(ops, name)

        def noted(*args, stock=stock, name=name, **options):
            values = [*args, *options.values()]
            names.append((name, any(isinstance(v, QuantizedWeight) for v in values)))
            return stock(*args, **options)

        monkeypatch.setattr(ops, name, noted)
    return names


def pair(format, adapters=True):
    stock = replaced(build("llama", **SIZES), FORMATS[format])
    stock.is_loaded_in_4bit = True  # as from_pretrained says it to PEFT
    stock = with_lora(stock) if adapters else stock
    return stock, copy.deepcopy(stock)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_lora_steps(format, checkpointing, called):
    stock, ours = pair(format)
    if checkpointing:
        for model in (stock, ours):
            model.enable_input_require_grads()
            model.gradient_checkpointing_enable({"use_reentrant": False})
    report = patch(ours, strict=True)
    assert report.count("four_bits") == 14
    assert format[:3] in str(report)
    assert "lora_mlp[silu]" in str(report)
    called.clear()
    assert_same_training(stock, ours, loss_of, rtol=1e-4)
    assert {(name, True) for name in ("linear", "lora_mlp", "lora_qkv")} <= set(called)
    if not checkpointing:
        assert sorted(called) == sorted(
            [("linear", True), ("lora_mlp", True), ("lora_qkv", True)] * 2
        )


def test_before_the_adapters(called):
    stock, ours = pair("nf4", adapters=False)
    patch(ours, strict=True)
    stock, ours = with_lora(stock), with_lora(ours)
    assert_same_training(stock, ours, loss_of, rtol=1e-4)
    assert patch(ours, strict=True).count("lora") == 14
    called.clear()
    assert_same_training(stock, ours, loss_of, rtol=1e-4)
    assert ("lora_mlp", True) in called


def test_unpatch_and_checkpoints():
    stock, ours = pair("nf4 nested")
    patch(ours, strict=True)
    before, after = stock.state_dict(), ours.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[n], after[n]) for n in before)
    unpatch(ours)
    assert not any(hasattr(type(m), "_liger_multi_swap") for m in ours.modules())
    assert_same_training(stock, ours, loss_of, rtol=0)


def test_nothing_of_16_bits_is_kept():
    """Between forward and backward there are codes, of every layer."""
    _, ours = pair("nf4")
    patch(ours, strict=True)
    largest = max(p.numel() * 2 for n, p in ours.named_parameters() if "base_layer" in n)
    shapes = set()
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: shapes.add((type(t), tuple(t.shape))) or t, lambda t: t
    ):
        loss_of(ours)
    assert any(kind is QuantizedWeight for kind, _ in shapes)
    wide = {s for kind, s in shapes if kind is not QuantizedWeight and s == (64, 64)}
    assert largest == 64 * 64
    assert not wide


def test_merging_keeps_the_patch():
    stock, ours = pair("nf4")
    patch(ours, strict=True)
    stock, ours = stock.merge_and_unload(), ours.merge_and_unload()
    with torch.no_grad():
        torch.testing.assert_close(loss_of(ours), loss_of(stock), rtol=1e-4, atol=0)


def test_evaluation_with_another_dtype_is_the_owner_s():
    stock, ours = pair("nf4", adapters=False)
    patch(ours, strict=True)
    layer, other = ours.model.layers[0].mlp.up_proj, stock.model.layers[0].mlp.up_proj
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    assert torch.equal(layer(x), other(x))
    for hook in (None, lambda *_: None):
        handle = layer.register_forward_hook(hook) if hook else None
        x = torch.randn(3, 64)
        torch.testing.assert_close(layer(x), other(x))
        _ = handle and handle.remove()


def test_torchao(called):
    stock = build("llama", **SIZES)
    for layer in (stock.model.layers[0].mlp.up_proj, stock.model.layers[1].self_attn.o_proj):
        in_torchao(layer)
    stock.model.layers[1].self_attn.o_proj.weight.is_swizzled_scales = True
    report = patch(stock)
    assert report.count("four_bits") == 1
    assert "nvfp4" in str(report)
    assert any("order of a device" in s.reason for s in report.skipped)
    layer = stock.model.layers[0].mlp.up_proj
    x = torch.randn(3, 64, requires_grad=True)
    y = layer(x)
    assert called[-1] == ("linear", True)
    torch.testing.assert_close(y, x @ layer.weight.dequantize(torch.float32).T)


def in_compressed_tensors(model, scheme, ignore=("lm_head",)):
    """The model as transformers loads it, packed, with a hook that would unpack it."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors import compressors, quantization

    how = quantization.preset_name_to_scheme(scheme, ["Linear"])
    if scheme.startswith("W4"):
        how.weights.group_size = 32
    config = quantization.QuantizationConfig(config_groups={"all": how}, ignore=list(ignore))
    quantization.apply_quantization_config(model, config)
    for name, p in model.named_parameters():
        if name.endswith("zero_point"):
            p.data.copy_(torch.full(p.shape, 3 if scheme.endswith("ASYM") else 0))
        elif name.endswith("global_scale"):
            p.data.fill_(64.0)
        elif name.endswith("weight_scale"):
            rows = torch.arange(p.numel()).view(p.shape) % 3 + 1
            size = 1.0 if scheme.startswith("NV") else 2.0**-6
            p.data.copy_(size * (2.0**rows if "MX" in scheme else rows))
    compressors.ModelCompressor(quantization_config=config).compress_model(model)
    return model


@pytest.mark.parametrize("scheme", ["NVFP4A16", "MXFP4A16", "W4A16", "W4A16_ASYM"])
def test_compressed_tensors(scheme, called):
    """Packed layers stay packed, and train as the owner's do once it has unpacked them."""
    stock = in_compressed_tensors(build("llama", **SIZES).bfloat16(), scheme)
    ours = copy.deepcopy(stock)
    report = patch(ours, strict=True)
    assert report.count("four_bits") == 14
    layer = ours.model.layers[0].mlp.up_proj
    packed = layer.weight_packed
    ours = with_lora(ours)
    stock.ct_decompress_hook  # noqa: B018  (as transformers leaves the model)
    loss_of(stock)
    assert not hasattr(stock, "ct_decompress_hook")
    dense = stock.model.layers[0].mlp.up_proj.weight
    assert torch.equal(layer.weight.dequantized(), dense)
    stock = with_lora(stock)
    called.clear()
    patch(ours, strict=True)
    assert_same_training(stock, ours, loss_of, rtol=0.03)
    assert {("linear", True), ("lora_mlp", True), ("lora_qkv", True)} <= set(called)
    assert layer.weight_packed is packed
    assert "weight" not in layer._parameters
    # the owner's again: it unpacks at the next forward
    unpatch(ours)
    torch.testing.assert_close(loss_of(ours), loss_of(stock), rtol=1e-2, atol=0)
    assert "weight" in layer._parameters


def test_gemms_in_float8():
    """Those of a dense base that is kept in FP8: numbers are rounded once more, to the same rows.

    Against GEMMs in the dtype of the weight, the loss moves by less than 1 %, all gradients
    together by less than 15 %.
    """
    exact, ours = pair("nf4")
    dense = build("llama", **SIZES)
    for one, other in zip(layers(exact), layers(dense), strict=True):
        other.weight.data = ops_numbers(one)
    dense = with_lora(dense)
    patch(dense, strict=True, linear_float8={"frozen": True, "smallest": 0})
    patch(exact, strict=True)
    report = patch(ours, strict=True, four_bits={"compute": "float8", "smallest": 0})
    assert "float8" in str(report)
    assert_same_training(dense, ours, loss_of, rtol=1e-4)
    losses = [loss_of(model) for model in (exact, ours)]
    losses[0].backward()
    assert 0 < abs(float(losses[1].detach() / losses[0].detach()) - 1) < 0.01
    sides = [
        [p.grad.flatten() for p in m.parameters() if p.grad is not None] for m in (exact, ours)
    ]
    one, other = (torch.cat(side) for side in sides)
    assert float((one - other).norm()) < 0.15 * float(one.norm())
    with pytest.raises(PatchError, match="compute must be 'bfloat16' or 'float8'"):
        patch(ours, four_bits={"compute": "int8"})


def ops_numbers(layer):
    return quantized_weight(layer).dequantized()


def layers(model):
    """Linear layers that are in 4 bits, and the same of a dense model, in order."""
    for name, module in model.named_modules():
        named = name.endswith(("_proj", "_proj.base_layer")) and hasattr(module, "in_features")
        if named and not hasattr(module, "base_layer"):
            yield module


def test_some_packed_layers_are_the_owner_s():
    """The hook unpacks those, and no others."""
    stock = in_compressed_tensors(build("llama", **SIZES).bfloat16(), "W4A16")
    ours = copy.deepcopy(stock)
    left = ours.model.layers[0].mlp.up_proj
    left.register_buffer("weight_g_idx", torch.zeros(64))
    report = patch(ours)
    assert report.count("four_bits") == 13
    assert any("in another order" in s.reason for s in report.skipped)
    del left._buffers["weight_g_idx"]
    with torch.no_grad():
        torch.testing.assert_close(loss_of(ours), loss_of(stock), rtol=1e-2, atol=0)
    assert "weight" in left._parameters
    assert "weight" not in ours.model.layers[1].mlp.up_proj._parameters
    with pytest.raises(RuntimeError, match="same dtype"):  # as the owner's
        ours.model.layers[1].mlp.up_proj(torch.randn(3, 64))


class Packed(nn.Module):
    """A layer of GPTQ or AWQ."""

    def __init__(self):
        super().__init__()
        self.in_features = self.out_features = 64
        self.register_buffer("qweight", torch.zeros(8, 64, dtype=torch.int32))

    def forward(self, x):
        return x


def test_other_formats_are_named_and_left():
    model = build("llama", **SIZES)
    model.model.layers[0].mlp.up_proj = Packed()
    report = patch(model)
    assert any(
        s.op == "four_bits" and "Packed keeps its own call" in s.reason for s in report.skipped
    )
    assert report.count("four_bits") == 0
