"""Checkpoints of models whose weights are codes: saved, loaded, and read by other libraries."""
# ruff: noqa: E402  (what needs transformers is imported after the skip)

import copy

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")
from safetensors.torch import load_file

from liger_multi.integrations import dequantize_weights, export_codes
from liger_multi.integrations.codes import layout_of
from liger_multi.integrations.mxfp4 import quantize_mxfp4
from liger_multi.ops import QuantizedWeight
from liger_multi.patching import patch, unpatch
from liger_multi.testing.bitwise import same_bits
from tests.models import adapters, assert_same_training, build
from tests.patching.test_four_bits import SIZES, loss_of, replaced
from tests.patching.test_four_bits_packed import parts

N, K = 40, 64


def drawn(*shape, low=0, high=256, seed=0):
    g = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randint(low, high, shape, generator=g, dtype=torch.uint8)


def e4m3(n, k):
    return drawn(n, k // 16, low=40, high=60).view(torch.float8_e4m3fn)


def int4(n, k, **more):
    scales = (drawn(n, k // 32).float() / 2**15).bfloat16()
    return QuantizedWeight(drawn(n, k // 2), scales, format="int4", **more)


def in_words(n, k, packing):
    tensors, _ = parts(n, k, packing)
    zeros, scales = tensors["zeros"].mT.to(torch.uint8), tensors["scales"].mT
    codes = tensors["qweight"]
    return QuantizedWeight(codes, scales, format="int4", zeros=zeros, packing=packing)


def nested(n, k):
    tables = {
        "scale_levels": torch.linspace(-1, 1, 256),
        "scale_absmax": torch.full((-(-n * k // 64 // 256),), 0.02),
        "scale_offset": torch.tensor(0.03),
    }
    return QuantizedWeight(drawn(n, k // 2), drawn(n * k // 64), format="nf4", **tables)


def stack(n, k):
    codes, scales = quantize_mxfp4(torch.randn(3, n, k, generator=torch.Generator().manual_seed(n)))
    return QuantizedWeight(codes, scales, format="mxfp4", transposed=True)


WEIGHTS = {
    "nvfp4": lambda n, k: QuantizedWeight(drawn(n, k // 2), e4m3(n, k), format="nvfp4"),
    "nvfp4-divides": lambda n, k: QuantizedWeight(
        drawn(n, k // 2),
        e4m3(n, k),
        format="nvfp4",
        global_scale=torch.tensor([40.0]),
        divides=True,
    ),
    "nvfp4-multiplies": lambda n, k: QuantizedWeight(
        drawn(n, k // 2), e4m3(n, k), format="nvfp4", global_scale=torch.tensor([0.02])
    ),
    "mxfp4": lambda n, k: QuantizedWeight(
        drawn(n, k // 2), drawn(n, k // 32, low=116, high=121), format="mxfp4"
    ),
    "int4": int4,
    "int4-zeros": lambda n, k: int4(n, k, zeros=drawn(n, k // 32, high=16)),
    "nf4": lambda n, k: QuantizedWeight(
        drawn(n, k // 2), drawn(n * k // 64).float() / 2**14, format="nf4"
    ),
    "nf4-nested": nested,
    "gptq": lambda n, k: in_words(n, k, "gptq"),
    "awq": lambda n, k: in_words(n, k, "awq"),
    "stack": stack,
}
NAMES = {
    "nvfp4": {"weight_packed", "weight_scale", "weight_global_scale"},
    "nvfp4-divides": {"weight_packed", "weight_scale", "weight_global_scale"},
    "nvfp4-multiplies": {"weight", "weight_scale", "weight_scale_2"},
    "mxfp4": {"weight_packed", "weight_scale"},
    "int4": {"weight_packed", "weight_scale", "weight_shape"},
    "int4-zeros": {"weight_packed", "weight_scale", "weight_shape", "weight_zero_point"},
    "nf4": {"weight.codes", "weight.scales"},
    "gptq": {"weight.codes", "weight.scales", "weight.zeros"},
    "stack": {"weight_blocks", "weight_scales"},
}


def holder(weight):
    module = nn.Module()
    module.weight = nn.Parameter(weight, requires_grad=False)
    return module


def emptied(weight):
    """A weight like another one, of other codes and scales."""
    changed = weight.mapped(torch.clone)
    for tensor in changed.tensors:
        bytes_ = tensor.is_contiguous() and tensor.ndim > 0  # not every dtype can be filled
        (tensor.view(torch.uint8) if bytes_ else tensor).zero_()
    return changed


@pytest.mark.parametrize("name", WEIGHTS)
def test_state_of_a_layer(name):
    """Plain tensors under the owner's names, and every bit back; also into a copy, and twice."""
    module = nn.ModuleDict({"a": holder(WEIGHTS[name](N, K))})
    assert export_codes(module) == export_codes(module) == 1
    state = module.state_dict()
    assert all(type(t) is torch.Tensor for t in state.values())
    assert {n.removeprefix("a.") for n in state} == NAMES.get(name, {n[2:] for n in state})
    weight = module["a"].weight
    other = copy.deepcopy(module)
    for assign in (False, True):
        other["a"].weight = nn.Parameter(emptied(weight), requires_grad=False)
        assert not same_bits(other["a"].weight.dequantized(), weight.dequantized())
        assert str(other.load_state_dict(state, assign=assign)) == "<All keys matched successfully>"
        assert same_bits(other["a"].weight.dequantized(), weight.dequantized())
        assert all(same_bits(t, state[n]) for n, t in other.state_dict().items())
    lacking = dict(list(state.items())[1:])
    with pytest.raises(RuntimeError, match="Missing key"):
        other.load_state_dict(lacking)


@pytest.mark.parametrize(("name", "shape"), [("mxfp4", (N, K)), ("nvfp4", (N, K // 2))])
def test_weights_of_another_form(name, shape):
    """A checkpoint of other codes changes no weight, also where keys are not compared."""
    theirs, ours = (
        nn.ModuleDict({"a": holder(WEIGHTS[n](*s))}) for n, s in (("int4", (N, K)), (name, shape))
    )
    if name == "nvfp4":
        theirs["a"] = holder(WEIGHTS[name](N, K))
    export_codes(theirs)
    export_codes(ours)
    before = ours["a"].weight.dequantized()
    with pytest.raises(RuntimeError, match="the checkpoint has"):
        ours.load_state_dict(theirs.state_dict(), strict=False)
    assert same_bits(ours["a"].weight.dequantized(), before)


def test_names_are_those_of_the_layout():
    """Numbers of another dtype than their scales', of other blocks, or turned, are kept apart."""
    plain = int4(N, K)
    for weight in (plain.changed(dtype=torch.float32), plain.mT, int4(N, K - 4)):
        assert set(layout_of(weight).names) >= {".codes", ".scales"}


def of(name):
    seeds = iter(range(100))

    def make(layer):
        layer.weight = nn.Parameter(
            WEIGHTS[name](layer.out_features, layer.in_features), requires_grad=False
        )
        next(seeds)
        return layer

    return make


@pytest.mark.parametrize("name", [n for n in WEIGHTS if n != "stack"])
def test_models(name, tmp_path):
    """``save_pretrained`` of a patched model writes safetensors; another model loads them."""
    ours = replaced(build("llama", **SIZES).bfloat16(), of(name))
    empty = copy.deepcopy(ours)
    for module in empty.modules():
        if isinstance(module._parameters.get("weight"), QuantizedWeight):
            module.weight = nn.Parameter(emptied(module.weight), requires_grad=False)
    patch(ours, strict=True)
    assert export_codes(ours) == export_codes(empty) == 14
    ours.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    assert sum(t.nbytes for t in state.values()) < 0.7 * sum(
        p.numel() * 2 for p in ours.parameters()
    )
    empty.load_state_dict(state, strict=not ours.config.tie_word_embeddings)
    patch(empty)
    assert_same_training(ours, empty, loss_of, rtol=0)
    unpatch(ours)
    assert {n: t.shape for n, t in ours.state_dict().items()}.keys() >= state.keys()


@pytest.mark.parametrize("safe", [False, True])
def test_adapters_are_not_merged_into_codes(safe):
    """PEFT adds to ``weight.data``: an error, and no merged model without its adapters."""
    ours = adapters(replaced(build("llama", **SIZES).bfloat16(), of("mxfp4")), ["q_proj"])
    patch(ours)
    before = loss_of(ours)
    with pytest.raises(TypeError, match="dequantize_weights"):
        ours.merge_and_unload(safe_merge=safe)
    weight = ours.base_model.model.model.layers[0].self_attn.q_proj.base_layer.weight
    with pytest.raises(TypeError, match="writes to a frozen weight"):
        weight.data = weight.dequantized()
    assert same_bits(loss_of(ours), before)
    assert dequantize_weights(ours) == 14
    merged = ours.merge_and_unload(safe_merge=safe)
    torch.testing.assert_close(loss_of(merged), before, rtol=0.01, atol=0)


# compressed-tensors 0.20.1 expects zeros of a byte where its own checkpoints have words
LOADED = ["nvfp4", "nvfp4-divides", "nvfp4-multiplies", "mxfp4", "int4"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", LOADED)
def test_loaded_by_compressed_tensors(name, tmp_path):
    """``from_pretrained`` through the owner's library has the same numbers, and trains patched."""
    pytest.importorskip("compressed_tensors")
    ours = replaced(build("llama", **SIZES).bfloat16(), of(name))
    export_codes(ours)
    ours.save_pretrained(tmp_path)
    if name == "nvfp4-multiplies":  # modelopt's, which transformers does not load
        assert getattr(ours.config, "quantization_config", None) is None
        return
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert patch(loaded, strict=True).count("four_bits") == 14
    patch(ours)
    for path, module in ours.named_modules():
        if isinstance(module._parameters.get("weight"), QuantizedWeight):
            read = loaded.get_submodule(path).weight
            assert same_bits(read.dequantized(), module.weight.dequantized())
    ours.model.rotary_emb = copy.deepcopy(loaded.model.rotary_emb)  # of ours, angles are bf16
    assert_same_training(ours, loaded, loss_of, rtol=0)
