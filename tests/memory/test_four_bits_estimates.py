"""Estimates and plans of a frozen base in 4 bits with adapters."""
# ruff: noqa: E402  (what needs PEFT is imported after the skip)

import json

import pytest
import torch

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

import liger_multi
from liger_multi.cli.main import main
from liger_multi.memory import estimate, profile
from liger_multi.memory.estimation import adapted_in_four_bits
from liger_multi.memory.recorder import stored
from liger_multi.ops import QuantizedWeight, _quantized
from tests.models import build

LLAMA = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
GPT_OSS = {"hidden_size": 128, "intermediate_size": 256, "num_local_experts": 4, "head_dim": 32}


def model_of(name, format, rank=4):
    sizes = {"llama": LLAMA, "gpt_oss": GPT_OSS}[name]
    return adapted_in_four_bits(build(name, **sizes).config, format, rank)


@pytest.mark.parametrize(
    ("format", "bits"),
    [("nf4", 4.5), ("fp4", 4.5), ("mxfp4", 4.25), ("nvfp4", 4.5), ("int4", 4.125)],
)
@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_bits_of_the_base(name, format, bits):
    model = model_of(name, format)
    weights = [p for p in model.parameters() if isinstance(p, QuantizedWeight)]
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert not any(p.requires_grad for p in weights)
    bytes_ = sum(t.nbytes for p in weights for t in stored(p))
    assert 8 * bytes_ == bits * sum(p.numel() for p in weights)
    stacks = sum(p.ndim == 3 for p in weights)
    layers = model.config.num_hidden_layers
    assert stacks == (2 * layers if name == "gpt_oss" else 0)
    others = {"llama": 7 * layers, "gpt_oss": 0 if format == "mxfp4" else 4 * layers}
    assert len(weights) - stacks == others[name]


def test_other_names_are_refused():
    with pytest.raises(ValueError, match=r"weights must be one of nf4, .* got 'nf5'"):
        model_of("llama", "nf5")


def test_numbers_of_one_piece_exist_at_a_time(monkeypatch):
    """Both stacks of a layer are opened one after the other, and by pieces where that is asked."""
    model = model_of("gpt_oss", "mxfp4")
    stack = 4 * 512 * 128 * 2

    def peak():
        result = estimate(model, 1, 8, patched=True, checkpointing=True)
        return result.profile.largest["temporaries"]

    whole = peak()
    assert stack < whole < 1.4 * stack
    monkeypatch.setattr(_quantized, "PIECE_BYTES", stack // 4)
    assert peak() < whole - stack / 2


def filled(model):
    """The same model with values, in fp32 on a CPU."""
    for module in model.modules():
        for values in (module._parameters, module._buffers):
            for name, value in values.items():
                if isinstance(value, QuantizedWeight):
                    stored_ = value.detach().to(dtype=torch.float32)
                    stored_ = stored_.mapped(lambda t: torch.ones_like(t, device="cpu"))
                    values[name] = torch.nn.Parameter(stored_, requires_grad=False)
                elif isinstance(value, torch.nn.Parameter):
                    ones = torch.full(value.shape, 0.01)
                    values[name] = torch.nn.Parameter(ones, requires_grad=value.requires_grad)
                elif value is not None:
                    values[name] = torch.ones(value.shape, dtype=value.dtype)
    return model.train()


@pytest.mark.parametrize("patched", [False, True])
def test_estimates_are_what_a_cpu_measures(patched):
    """The same model with weights, on a CPU, against its shapes."""
    model = model_of("llama", "nf4")
    predicted = estimate(model, 2, 32, dtype="float32", device="cpu", patched=patched)
    real = filled(model)
    if patched:
        liger_multi.patch(real)
    ids = torch.randint(64, (2, 32))
    measured = profile(lambda: real(input_ids=ids, labels=ids).loss.backward(), model=real)
    assert predicted.profile.peak_bytes == pytest.approx(measured.peak_bytes, rel=0.15)


GPUS = {"bf16": ["--gpu", "h100:16GiB", "--precision", "bf16"], "fp16": ["--gpu", "16GiB"]}


@pytest.mark.slow
@pytest.mark.parametrize("precision", GPUS)  # a card that is known by its memory has no bf16
def test_command_lines(precision, tmp_path, capsys):
    config = build("gpt_oss", **GPT_OSS).config
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config.to_dict()))
    options = [str(file), "--weights", "mxfp4", "--rank", "4"]
    assert main(["estimate", *options, "--sequence", "16", "--patched", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert 0 < data["trained"] < data["parameters"] / 4
    args = [*GPUS[precision], "--seq", "16", "--data-parallel"]
    assert main(["plan", *options, *args, "--no-cache", "--no-limits", "--json"]) == 0
    plans = json.loads(capsys.readouterr().out)["candidates"]
    assert {plan["settings"]["precision"] for plan in plans} >= {precision}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "fits"),
    [
        ("gpt-oss-20b --weights mxfp4 --rank 8 --sequence 2048", True),
        ("gpt-oss-20b --weights mxfp4 --rank 16 --sequence 2048", False),
        ("llama-3-8b --weights nf4 --rank 16 --sequence 16384", True),
    ],
)
def test_a_card_of_16_gib(command, fits, capsys):
    """What the page says of it."""
    args = ["estimate", *command.split(), "--checkpointing", "--patched", "--json"]
    assert main(args) == 0
    assert (json.loads(capsys.readouterr().out)["peak_bytes"] < 16 * 2**30) == fits
