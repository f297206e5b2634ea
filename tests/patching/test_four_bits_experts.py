"""gpt-oss whose experts stay in MXFP4: loaded without kernels of a hub, trained, saved, merged."""
# ruff: noqa: E402  (what needs transformers is imported after the skip)

import copy
import json

import pytest
import torch

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
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
from liger_multi.ops import QuantizedWeight
from liger_multi.ops import _quantized as quantized
from liger_multi.patching import patch, unpatch
from tests.models import assert_same_training, batch, build

STACKS = ("gate_up_proj", "down_proj")
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_local_experts": 5}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint as OpenAI's: blocks and scales of the experts, rows of outputs."""
    path = tmp_path_factory.mktemp("gpt-oss")
    model = build("gpt_oss", **SIZES)
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


def with_lora(model):
    config = peft.LoraConfig(
        r=4,
        target_modules=["q_proj", "o_proj"],
        target_parameters=[f"mlp.experts.{name}" for name in STACKS],
    )
    torch.manual_seed(5)
    model = peft.get_peft_model(model, config)
    generator = torch.Generator().manual_seed(3)
    for name, p in model.named_parameters():
        if "lora_B" in name:
            p.data = torch.randn(p.shape, generator=generator) * 0.05
    return model


def loss_of(model):
    return model(**batch()).loss


def dense(model):
    """The same model with the numbers of its experts."""
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
    stacks = [p for n, p in ours.named_parameters() if n.endswith(STACKS)]
    assert len(stacks) == 4
    assert all(isinstance(p, QuantizedWeight) for p in stacks)
    own = dict(stock.named_parameters())
    for name, p in ours.named_parameters():
        numbers = p.dequantized() if isinstance(p, QuantizedWeight) else p
        assert torch.equal(numbers, own[name]), name
    with torch.no_grad():
        expected = loss_of(stock.eval())
        torch.testing.assert_close(loss_of(ours), expected, rtol=1e-5, atol=0)  # unpatched, too
        patch(ours)
        torch.testing.assert_close(loss_of(ours), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("limit", [None, 2 * 3 * 96 * 64 * 4], ids=["whole", "pieces"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_lora_steps(folder, limit, checkpointing, monkeypatch):
    if limit:
        monkeypatch.setattr(quantized, "PIECE_BYTES", limit)
    ours = loaded(folder)
    stock, ours = with_lora(dense(ours)), with_lora(ours)
    for model in (stock, ours):
        model.train()
        if checkpointing:
            model.enable_input_require_grads()
            model.gradient_checkpointing_enable({"use_reentrant": False})
    experts = []
    stock_op = ops.lora_moe

    def noted(x, weight, *args, **options):
        experts.append((weight.shape[0], isinstance(weight, QuantizedWeight)))
        return stock_op(x, weight, *args, **options)

    monkeypatch.setattr(ops, "lora_moe", noted)
    report = patch(ours, strict=True)
    assert report.count("fused_moe") == report.count("lora") - 4 == 2
    assert_same_training(stock, ours, loss_of, rtol=1e-4)
    assert set(experts) == {(5, True)}
    unpatch(ours)
    assert_same_training(stock, ours, loss_of, rtol=1e-4)


def test_nothing_of_16_bits_is_kept(folder):
    ours = with_lora(loaded(folder))
    patch(ours, strict=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        loss_of(ours)
    assert sum(isinstance(t, QuantizedWeight) for t in kept) == 4
    rest = [tuple(t.shape) for t in kept if not isinstance(t, QuantizedWeight)]
    assert (5, 64, 192) not in rest
    assert (5, 192, 64) not in rest


def test_it_saves_what_it_loaded(folder, tmp_path):
    model = loaded(folder)
    patch(model)
    model.save_pretrained(tmp_path)
    before = safetensors.load_file(folder / "model.safetensors")
    after = safetensors.load_file(next(tmp_path.glob("*.safetensors")))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[n], after[n].to(before[n].dtype)) for n in before)
    again = loaded(tmp_path)
    assert torch.equal(loss_of(again), loss_of(loaded(folder)))


def test_merging_back_says_the_error(folder):
    model = with_lora(loaded(folder))
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


@pytest.mark.parametrize("patched", [False, True])
def test_merging_all_adapters_back(folder, patched):
    """Stacks stay in 4 bits, and the loss moves by what rounding lost."""
    model = with_lora(loaded(folder))
    if patched:
        patch(model, strict=True)
    expected = float(loss_of(model).detach())
    errors = merge_adapters_mxfp4(model)
    assert len(errors) == 4
    assert all(0 < e.relative < 0.2 < e.of_update / e.relative for e in errors)
    assert sorted(e.path.rpartition(".")[2] for e in errors) == sorted(STACKS * 2)
    assert merge_adapters_mxfp4(model) == []
    merged = model.merge_and_unload()
    assert not [n for n, _ in merged.named_parameters() if "lora" in n]
    weights = [p for p in merged.parameters() if isinstance(p, QuantizedWeight)]
    assert len(weights) == 4
    assert float(loss_of(merged).detach()) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("patched", [False, True])
def test_merging_into_numbers(folder, patched):
    model = with_lora(loaded(folder))
    if patched:
        patch(model, strict=True)
    expected = loss_of(model)
    assert dequantize_weights(model) == 4
    assert dequantize_weights(model) == 0
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
