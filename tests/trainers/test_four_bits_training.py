"""Trainers on gpt-oss whose experts stay in MXFP4, with adapters on attention and experts."""

import copy

import pytest
import torch
from torch import nn

import liger_multi
from liger_multi import ops
from liger_multi.integrations.mxfp4 import quantize_mxfp4
from tests.models import arguments, build, rows, tokenizer
from tests.patching.test_four_bits import STACKS, with_lora_on_experts

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
trl = pytest.importorskip("trl")
safetensors = pytest.importorskip("safetensors.torch")
pytest.importorskip("datasets")


def model_of(words):
    """A model with codes; the base of one with the numbers of these codes."""
    ids = {"pad_token_id": words.pad_token_id, "eos_token_id": words.eos_token_id}
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_local_experts": 4}
    model = build("gpt_oss", vocab_size=len(words), **ids, **sizes)
    dense = copy.deepcopy(model)
    for one, other in zip(model.modules(), dense.modules(), strict=True):
        for name in STACKS:
            if isinstance(one._parameters.get(name), nn.Parameter):
                codes, scales = quantize_mxfp4(one._parameters[name].mT)
                weight = ops.QuantizedWeight(
                    codes, scales, format="mxfp4", dtype=torch.float32, turned=True
                )
                one._parameters[name] = nn.Parameter(weight, requires_grad=False)
                numbers = weight.dequantized().contiguous()
                other._parameters[name] = nn.Parameter(numbers, requires_grad=False)
    return model, dense


def reward(completion_ids, **_):
    return [float(sum(ids) % 7) for ids in completion_ids]


KINDS = {
    "SFT": ("completion", {"max_length": 32}, {}),
    "GRPO": (
        "prompt",
        {"num_generations": 4, "max_completion_length": 6, "per_device_train_batch_size": 4},
        {"reward_funcs": reward},
    ),
}


def losses(name, model, tmp_path):
    if name == "plain":
        return plain_losses(model, tmp_path)
    data, options, call = KINDS[name]
    options = {**options, "max_steps": 3, "gradient_checkpointing": name == "SFT"}
    config = getattr(trl, f"{name}Config")(**arguments(tmp_path, **options))
    trainer = getattr(trl, f"{name}Trainer")(
        model, args=config, train_dataset=rows(data, 8), processing_class=tokenizer(), **call
    )
    torch.manual_seed(5)
    trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def plain_losses(model, tmp_path):
    """Those of the Trainer of transformers, which saves the adapters and no codes."""
    words = torch.randint(3, 20, (8, 16), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": row, "labels": row} for row in words]
    options = transformers.TrainingArguments(**arguments(tmp_path, max_steps=3))
    trainer = transformers.Trainer(model, options, train_dataset=data)
    torch.manual_seed(5)
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    saved = safetensors.load_file(tmp_path / "saved" / "adapter_model.safetensors")
    assert saved
    assert all("lora_" in key for key in saved)
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*KINDS, "plain"])
def test_trainers(name, tmp_path):
    """The losses of every step are those of the numbers, unpatched."""
    ours, stock = (with_lora_on_experts(model) for model in model_of(tokenizer()))
    assert liger_multi.patch(ours).count("fused_moe") == 2
    expected = losses(name, stock, tmp_path / "stock")
    assert losses(name, ours, tmp_path / "ours") == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert len(set(expected)) > 1
    assert len([p for p in ours.parameters() if isinstance(p, ops.QuantizedWeight)]) == 4
