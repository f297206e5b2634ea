"""Models whose frozen weights other libraries keep in 4 bits: the steps of their own layers."""

# ruff: noqa: E402  (what needs transformers is imported after the skip)

import copy
import json
import textwrap
from pathlib import Path

import pytest
import torch
from torch import nn

peft = pytest.importorskip("peft")
safetensors = pytest.importorskip("safetensors.torch")

from liger_multi import ops
from liger_multi.errors import PatchError
from liger_multi.integrations import (
    dequantize_weights,
    load_mxfp4,
    merge_adapters_mxfp4,
    merge_mxfp4,
)
from liger_multi.integrations.mxfp4 import quantize_mxfp4
from liger_multi.ops import QuantizedWeight, _quantized as quantized
from liger_multi.patching import patch, unpatch
from liger_multi.patching.four_bits import quantized_weight
from tests.comparing import gradients, recorded
from tests.models import (
    STACKS,
    adapters,
    assert_same_training,
    build,
    loss_of,
    patched_ops,
    transformers,
    with_lora_on_experts,
)

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


def in_torchao(layer, format):
    pytest.importorskip("torchao")
    from torchao.prototype.mx_formats.mx_tensor import MXTensor
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor

    weight = layer.weight.detach()
    if format == "nvfp4":
        coded = NVFP4Tensor.to_nvfp4(weight, per_tensor_scale=torch.tensor(0.01))
    else:
        coded = MXTensor.to_mx(weight, format, 32)
    layer.weight = nn.Parameter(coded, requires_grad=False)
    return layer


LAYER = "base_model.model.model.layers.0.mlp.up_proj.base_layer"
FORMATS = {
    "nf4": lambda layer: in_bitsandbytes(layer, quant_type="nf4", compress_statistics=False),
    "nf4 nested": lambda layer: in_bitsandbytes(layer, quant_type="nf4"),
    "nf4 in words of bf16": lambda layer: in_bitsandbytes(
        layer, quant_type="nf4", quant_storage=torch.bfloat16
    ),
    "fp4": lambda layer: in_bitsandbytes(layer, quant_type="fp4", compress_statistics=False),
}
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def with_lora(model):
    return adapters(model, TARGETS, seed=5, std=0.05)


def kept_for_backward(model):
    """What autograd keeps of a step, as it is handed over."""
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        loss_of(model)
    return kept


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
@pytest.mark.parametrize("checkpointing", ["", "reentrant", "not reentrant"])
def test_lora_steps(format, checkpointing, called):
    stock, ours = pair(format)
    if checkpointing:
        for model in (stock, ours):
            model.enable_input_require_grads()
            model.gradient_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
    report = patch(ours, strict=True)
    assert report.count("four_bits") == 14
    assert format[:3] in str(report)
    assert "lora_mlp[silu]" in str(report)
    called.clear()
    assert_same_training(stock, ours, rtol=1e-4)
    assert {(name, True) for name in ("linear", "lora_mlp", "lora_qkv")} <= set(called)
    if not checkpointing:
        assert sorted(called) == sorted(
            [("linear", True), ("lora_mlp", True), ("lora_qkv", True)] * 2
        )


@pytest.mark.parametrize("tied", [False, True])
def test_a_head_in_four_bits(tied):
    """Also as the table of embeddings; its numbers are not kept, and generation reads them."""
    ours = build("llama", tied=tied, **SIZES)
    codes, scales = quantize_mxfp4(ours.lm_head.weight.detach())
    weight = QuantizedWeight(codes, scales, format="mxfp4", dtype=torch.float32)
    ours.lm_head.weight = nn.Parameter(weight, requires_grad=False)
    if tied:
        ours.model.embed_tokens.weight = ours.lm_head.weight
    stock = dense(ours)
    if tied:
        stock.model.embed_tokens.weight = stock.lm_head.weight
    assert patch(ours, strict=True).count("fused_linear_cross_entropy") == 1
    assert_same_training(stock, ours)
    kept = kept_for_backward(ours)
    assert not [t for t in kept if t.shape == weight.shape and type(t) is not QuantizedWeight]
    ids = torch.tensor([[4, 5, 6]])
    texts = [m.generate(ids, max_new_tokens=4, do_sample=False) for m in (stock, ours)]
    assert torch.equal(*texts)


def test_before_the_adapters(called):
    stock, ours = pair("nf4", adapters=False)
    patch(ours, strict=True)
    stock, ours = with_lora(stock), with_lora(ours)
    assert_same_training(stock, ours, rtol=1e-4)
    assert patch(ours, strict=True).count("lora") == 14
    called.clear()
    assert_same_training(stock, ours, rtol=1e-4)
    assert ("lora_mlp", True) in called


def test_unpatch_and_checkpoints():
    stock, ours = pair("nf4 nested")
    patch(ours, strict=True)
    torch.testing.assert_close(ours.state_dict(), stock.state_dict(), rtol=0, atol=0)
    unpatch(ours)
    assert not patched_ops(ours)
    assert_same_training(stock, ours, rtol=0)


@pytest.mark.parametrize("part", ["codes", "absmax", "offset"])
def test_writes_between_forward_and_backward_raise(part):
    _, ours = pair("nf4 nested")
    patch(ours, strict=True)
    loss, weight = loss_of(ours), ours.get_submodule(LAYER).weight
    written = {"codes": weight, "absmax": weight.quant_state.absmax}
    with torch.no_grad():
        written.get(part, weight.quant_state.offset).zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    loss_of(ours).backward()


def adapted_twice():
    """Two adapters, one of them with the scale of rsLoRA."""
    base = replaced(build("llama", **SIZES), FORMATS["nf4 nested"])
    base.is_loaded_in_4bit = True
    stock = adapters(base, TARGETS, seed=5, std=0.05, name="first")
    config = peft.LoraConfig(target_modules=TARGETS, r=2, init_lora_weights=False, use_rslora=True)
    stock.add_adapter("second", config)
    return stock, copy.deepcopy(stock)


def test_adapters_that_are_switched():
    """Each, both, none and merged; PEFT merges into NF4, and takes it back."""
    stock, ours = adapted_twice()
    assert patch(ours, strict=True).count("lora") == 14
    for names in ("second", "first", ["first", "second"]):
        for model in (stock, ours):
            model.base_model.set_adapter(names)
        assert_same_training(stock, ours, rtol=1e-4)
    changes = ("disable_adapter_layers", "enable_adapter_layers", "merge_adapter")
    for change in (*changes, "unmerge_adapter"):
        for model in (stock, ours):
            getattr(model.base_model, change)()
        with torch.no_grad():
            torch.testing.assert_close(loss_of(ours), loss_of(stock), rtol=1e-4, atol=0)


def test_dora():
    """It runs PEFT's forward over our layers."""
    base = replaced(build("llama", **SIZES), FORMATS["nf4"])
    base.is_loaded_in_4bit = True
    stock = adapters(base, TARGETS, use_dora=True)
    ours = copy.deepcopy(stock)
    assert patch(ours).count("four_bits") == 14
    assert_same_training(stock, ours, rtol=3e-4)


@pytest.mark.parametrize("shape", [(7, 90), (5, 33), (1, 64), (3, 65), (9, 1000)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rows_that_end_within_a_block(shape, dtype):
    """Numbers by the formula of the format; odd rows are the owner's, whose CPU kernel errs."""
    bnb = pytest.importorskip("bitsandbytes")
    rows, columns = shape
    layer = bnb.nn.Linear4bit(columns, rows, False, compute_dtype=dtype, quant_type="nf4")
    layer.weight.data = torch.randn(shape).to(dtype)
    layer = nn.ModuleDict({"layer": layer.to("cpu")})["layer"]
    weight = quantized_weight(layer)
    if columns % 2:
        assert "end within a byte" in weight
        return
    codes, absmax = layer.weight.flatten(), layer.weight.quant_state
    scales = absmax.state2.code[absmax.absmax.long()]
    scales = scales * absmax.state2.absmax.repeat_interleave(256)[: len(scales)] + absmax.offset
    codes = torch.stack([codes >> 4, codes & 15], -1).flatten().long()
    numbers = absmax.code[codes] * scales.repeat_interleave(64)[: codes.numel()]
    assert torch.equal(weight.dequantized(), numbers.to(dtype).view(shape))


def test_nothing_of_16_bits_is_kept():
    """Between forward and backward there are codes, of every layer."""
    _, ours = pair("nf4")
    patch(ours, strict=True)
    largest = max(p.numel() * 2 for n, p in ours.named_parameters() if "base_layer" in n)
    kept = kept_for_backward(ours)
    assert any(isinstance(t, QuantizedWeight) for t in kept)
    assert largest == 64 * 64
    assert not [t for t in kept if not isinstance(t, QuantizedWeight) and t.shape == (64, 64)]


CHECKPOINTS = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}


@pytest.fixture
def checkpoint(tmp_path):
    """A model as its author saved it, in 16 bits."""
    pytest.importorskip("bitsandbytes")
    build("llama", **CHECKPOINTS).bfloat16().save_pretrained(tmp_path / "dense")
    return tmp_path / "dense"


def test_what_the_page_starts_with(checkpoint, capsys, called):
    """Its first lines, with a tiny checkpoint: loaded, adapted, patched; and a step."""
    text = (Path(__file__).parents[2] / "docs" / "four-bits.md").read_text(encoding="utf-8")
    lines = text.split("\n\n    ", 1)[1].split("\n\ngpt-oss")[0]
    code = textwrap.dedent(f"    {lines}").replace("Qwen/Qwen2.5-7B", str(checkpoint))
    assert str(checkpoint) in code
    assert code.count("\n") < 16
    names = {}
    exec(compile(code, "four-bits.md", "exec"), names)
    assert capsys.readouterr().out.count("nf4, 4.") == 7  # of every kind of layer
    loss_of(names["model"]).backward()
    assert {("lora_mlp", True), ("lora_qkv", True)} <= set(called)
    assert all(p.grad is not None for p in names["model"].parameters() if p.requires_grad)


@pytest.mark.parametrize("nested", [False, True])
def test_saved_by_transformers(checkpoint, tmp_path, nested):
    """``save_pretrained`` of a patched model and ``from_pretrained`` have every bit."""
    config = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=nested
    )
    load = transformers.AutoModelForCausalLM.from_pretrained
    first = load(checkpoint, quantization_config=config, dtype=torch.float32)
    assert patch(first, strict=True).count("four_bits") == 14
    first.save_pretrained(tmp_path / "codes")
    second = load(tmp_path / "codes", dtype=torch.float32)
    patch(second, strict=True)
    before, after = first.state_dict(), second.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    with torch.no_grad():
        assert torch.equal(loss_of(second), loss_of(first))


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


@pytest.mark.parametrize(
    ("format", "shown"),
    [("nvfp4", "nvfp4, 4.5"), (torch.float4_e2m1fn_x2, "mxfp4, 4.25 bits")],
)
def test_torchao(format, shown, called):
    model = build("llama", **SIZES)
    first, second = model.model.layers
    layer, wide = first.mlp.up_proj, first.mlp.gate_proj
    for one in (layer, second.self_attn.o_proj):
        in_torchao(one, format)
    in_torchao(wide, torch.float8_e4m3fn)
    second.self_attn.o_proj.weight.is_swizzled_scales = True
    report = patch(model)
    assert report.count("four_bits") == 1
    assert shown in str(report)
    reasons = {s.path: s.reason for s in report.skipped if s.op == "four_bits"}
    assert "order of a device" in reasons["model.layers.1.self_attn.o_proj"]
    assert "torch.float8_e4m3fn" in reasons["model.layers.0.mlp.gate_proj"]
    x = torch.randn(3, 64, requires_grad=True)
    y, numbers = layer(x), layer.weight.dequantize(torch.float32)
    torch.testing.assert_close(y, x @ numbers.T)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], numbers.sum(0).expand(3, -1))
    assert called[-1] == ("linear", True)


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
    assert patch(ours, strict=True).count("four_bits") == 14
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
    assert_same_training(stock, ours, rtol=0.03)
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
        other.weight.data = quantized_weight(one).dequantized()
    dense = with_lora(dense)
    patch(dense, strict=True, linear_float8={"frozen": True, "smallest": 0})
    patch(exact, strict=True)
    assert "float8" in str(patch(ours, strict=True, four_bits={"compute": "float8", "smallest": 0}))
    assert_same_training(dense, ours, rtol=1e-4)
    losses = [loss_of(model) for model in (exact, ours)]
    losses[0].backward()
    assert 0 < abs(float(losses[1].detach() / losses[0].detach()) - 1) < 0.01
    one, other = (
        torch.cat([g.flatten() for g in gradients(model).values()]) for model in (exact, ours)
    )
    assert float((one - other).norm()) < 0.15 * float(one.norm())
    with pytest.raises(PatchError, match="compute must be 'bfloat16' or 'float8'"):
        patch(ours, four_bits={"compute": "int8"})


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


# gpt-oss whose experts stay in MXFP4: loaded without kernels of a hub, trained, saved, merged.


EXPERT_SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_local_experts": 5}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint as OpenAI's: blocks and scales of the experts, rows of outputs."""
    path = tmp_path_factory.mktemp("gpt-oss")
    model = build("gpt_oss", **EXPERT_SIZES)
    state = {}
    for name, tensor in model.state_dict().items():
        if name.endswith(STACKS):
            codes, scales = quantize_mxfp4(tensor.mT)
            state |= {f"{name}_blocks": codes.unflatten(-1, (-1, 16)), f"{name}_scales": scales}
        else:
            state[name] = tensor
    state = {n: t.contiguous().clone() for n, t in state.items()}
    safetensors.save_file(state, path / "model.safetensors", metadata={"format": "pt"})
    config = {**model.config.to_dict(), "quantization_config": {"quant_method": "mxfp4"}}
    config["architectures"] = ["GptOssForCausalLM"]
    (path / "config.json").write_text(json.dumps(config))
    return path


def loaded(folder):
    return load_mxfp4(folder, dtype=torch.float32)


def dense(model):
    model = copy.deepcopy(model)
    for module in model.modules():
        for name, p in list(module._parameters.items()):
            if isinstance(p, QuantizedWeight):
                numbers = p.dequantized().contiguous()
                module._parameters[name] = torch.nn.Parameter(numbers, requires_grad=False)
    return model


def test_it_is_the_model_that_transformers_dequantizes(folder):
    config = transformers.Mxfp4Config(dequantize=True)
    stock = transformers.AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=config, dtype=torch.float32
    ).float()  # transformers 5.17 leaves the experts in bfloat16
    ours = loaded(folder)
    coded = {n: p for n, p in ours.named_parameters() if isinstance(p, QuantizedWeight)}
    assert len([name for name in coded if name.endswith(STACKS)]) == 4
    numbers = dict(ours.named_parameters()) | {n: p.dequantized() for n, p in coded.items()}
    assert all(torch.equal(numbers[name], own) for name, own in stock.named_parameters())
    with torch.no_grad():
        expected = loss_of(stock.eval())
        torch.testing.assert_close(loss_of(ours), expected, rtol=1e-5, atol=0)  # unpatched, too
        patch(ours)
        torch.testing.assert_close(loss_of(ours), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("limit", [None, 2 * 3 * 96 * 64 * 4], ids=["whole", "pieces"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_lora_steps_of_experts(folder, limit, checkpointing, monkeypatch):
    if limit:
        monkeypatch.setattr(quantized, "PIECE_BYTES", limit)
    ours = loaded(folder)
    stock, ours = with_lora_on_experts(dense(ours)), with_lora_on_experts(ours)
    for model in (stock, ours):
        model.train()
        if checkpointing:
            model.enable_input_require_grads()
            model.gradient_checkpointing_enable({"use_reentrant": False})
    experts = recorded(monkeypatch, ops, "lora_moe", lambda x, w, *_, **__: (len(w), type(w)))
    report = patch(ours, strict=True)
    assert report.count("fused_moe") == report.count("lora") - 4 == 2
    assert_same_training(stock, ours, rtol=1e-4)
    assert set(experts) == {(5, QuantizedWeight)}
    unpatch(ours)
    assert_same_training(stock, ours, rtol=1e-4)


def test_nothing_of_16_bits_is_kept_of_experts(folder):
    ours = with_lora_on_experts(loaded(folder))
    patch(ours, strict=True)
    kept = kept_for_backward(ours)
    assert sum(isinstance(t, QuantizedWeight) for t in kept) == 4
    rest = {tuple(t.shape) for t in kept if not isinstance(t, QuantizedWeight)}
    assert not rest & {(5, 64, 192), (5, 192, 64)}


def test_it_saves_what_it_loaded(folder, tmp_path):
    model = loaded(folder)
    patch(model)
    model.save_pretrained(tmp_path)
    before = safetensors.load_file(folder / "model.safetensors")
    after = safetensors.load_file(next(tmp_path.glob("*.safetensors")))
    torch.testing.assert_close(after, before, rtol=0, atol=0, check_dtype=False)
    assert torch.equal(loss_of(loaded(tmp_path)), loss_of(loaded(folder)))


def test_merging_back_says_the_error(folder):
    model = with_lora_on_experts(loaded(folder))
    wrapper = next(m for m in model.modules() if getattr(m, "parameter_name", "") == STACKS[0])
    weight = wrapper.get_base_layer()._parameters[STACKS[0]]
    delta = wrapper.get_delta_weight("default").detach()
    expected = weight.dequantized() + delta
    error = merge_mxfp4(weight, delta, "layer")
    actual = (weight.dequantized() - expected).norm() / expected.norm()
    assert error.path == "layer"
    assert error.relative == pytest.approx(float(actual), rel=1e-4)
    assert 0 < error.relative < 0.2
    assert error.of_update > error.relative
    with pytest.raises(ValueError, match="needs a weight in mxfp4"):
        merge_mxfp4(weight, delta[0])


def adapted(folder, patched):
    model = with_lora_on_experts(loaded(folder))
    if patched:
        patch(model, strict=True)
    return model, loss_of(model).detach()


@pytest.mark.parametrize("patched", [False, True])
def test_merging_all_adapters_back(folder, patched):
    """Stacks stay in 4 bits, and the loss moves by what rounding lost."""
    model, expected = adapted(folder, patched)
    errors = merge_adapters_mxfp4(model)
    assert len(errors) == 4
    assert all(0 < e.relative < 0.2 < e.of_update / e.relative for e in errors)
    assert sorted(e.path.rpartition(".")[2] for e in errors) == sorted(STACKS * 2)
    assert merge_adapters_mxfp4(model) == []
    merged = model.merge_and_unload()
    assert not [n for n, _ in merged.named_parameters() if "lora" in n]
    assert len([p for p in merged.parameters() if isinstance(p, QuantizedWeight)]) == 4
    torch.testing.assert_close(loss_of(merged), expected, rtol=0.02, atol=0)


@pytest.mark.parametrize("patched", [False, True])
def test_merging_into_numbers(folder, patched):
    model, expected = adapted(folder, patched)
    assert [dequantize_weights(model) for _ in "ab"] == [4, 0]
    torch.testing.assert_close(loss_of(model), expected, rtol=1e-5, atol=0)
    merged = model.merge_and_unload()
    assert not [n for n, _ in merged.named_parameters() if "lora" in n]
    torch.testing.assert_close(loss_of(merged), expected, rtol=1e-4, atol=0)


def test_rounding_to_mxfp4():
    """The nearest code, ties to the even one, and numbers that are codes keep their bits."""
    codes = torch.arange(256, dtype=torch.uint8).view(16, 16)
    codes[:, 0] |= 7  # the largest number of a block decides its scale
    scales = torch.randint(100, 140, (16, 1), dtype=torch.uint8)
    numbers = ops.dequantize(codes, scales, format="mxfp4", dtype=torch.float32)
    again = ops.dequantize(*quantize_mxfp4(numbers), format="mxfp4", dtype=torch.float32)
    assert torch.equal(again, numbers)
    x = torch.tensor([6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 7.9, -0.3] + [0.0] * 22)
    y = ops.dequantize(*quantize_mxfp4(x[None]), format="mxfp4", dtype=torch.float32)[0, :10]
    assert y.tolist() == [6, 0, 1, 1, 2, 2, 4, 4, 6, -0.5]
    with pytest.raises(ValueError, match="multiple of 32"):
        quantize_mxfp4(torch.zeros(3, 33))


def test_experts_of_hub_kernels_are_named():
    """What transformers has where those kernels are installed, which only infer."""
    module = pytest.importorskip("transformers.integrations.mxfp4")
    model = build("gpt_oss", **EXPERT_SIZES)
    for layer in model.model.layers:
        layer.mlp.experts = module.Mxfp4GptOssExperts(model.config)
    reasons = [s.reason for s in patch(model).skipped if s.op == "fused_moe"]
    assert len(reasons) == 2
    assert all("load_mxfp4 loads the same codes" in reason for reason in reasons)


def test_other_checkpoints_are_refused(folder, tmp_path):
    state = safetensors.load_file(folder / "model.safetensors")
    plain = {n: t for n, t in state.items() if not n.endswith(("_blocks", "_scales"))}
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    safetensors.save_file(plain, tmp_path / "model.safetensors")
    with pytest.raises(PatchError, match="nothing in MXFP4"):
        loaded(tmp_path)
    del state["model.layers.0.self_attn.sinks"]
    safetensors.save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(PatchError, match=r"lacks model\.layers\.0\.self_attn\.sinks"):
        loaded(tmp_path)
