"""Estimates against steps that are measured, against figures of a card, and by their arithmetic."""

import dataclasses
import json

import pytest
import torch

import liger_multi
from liger_multi.cli.main import main
from liger_multi.memory import estimate, measure
from liger_multi.memory.estimation import OPTIMIZERS, _checkpoint
from liger_multi.memory.sizes import SIZES, config_of
from liger_multi.memory.simulation import on_meta
from memory_models import KINDS, model_of, step_of
from memory_models import config_of as small

BATCH, SEQUENCE = 4, 128
GIB = 2**30


def needs_grouped_experts(kind):
    if kind == "moe" and not hasattr(torch, "_grouped_mm"):
        pytest.skip("experts run in a loop here, which reads values")


@pytest.mark.parametrize("patched", [False, True], ids=["stock", "patched"])
@pytest.mark.parametrize("kind", KINDS)
def test_within_ten_percent_of_a_measured_step(kind, patched):
    needs_grouped_experts(kind)
    model = model_of(kind)
    if kind == "checkpointing":
        _checkpoint(model)
    if patched:
        liger_multi.patch(model)
    optimizer, step = step_of(model, BATCH, SEQUENCE)
    step()
    states = [t for s in optimizer.state.values() for t in s.values()]
    with measure("cpu", known=[*model.parameters(), *model.buffers(), *states]) as peak:
        step()
    before = {name: p.clone() for name, p in model.state_dict().items()}
    found = estimate(
        model, BATCH, SEQUENCE, dtype="float32", optimizer="adamw_loop", device="cpu"
    )  # fmt: skip
    assert found.peak_bytes == pytest.approx(peak.peak_bytes, rel=0.1)
    after = model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before), "left alone"
    assert next(model.parameters()).device.type == "cpu"


@pytest.mark.parametrize("kind", ["dense", "tied", "checkpointing"])
def test_a_configuration_gives_what_its_model_gives(kind):
    model = model_of(kind)
    checkpointing = kind == "checkpointing"
    found = [
        estimate(
            given,
            BATCH,
            SEQUENCE,
            dtype="float32",
            device="cpu",
            checkpointing=checkpointing,
            patched=True,
        )
        for given in (model, small(kind))
    ]
    assert found[0].peak_bytes == found[1].peak_bytes
    assert found[0].static_bytes == found[1].static_bytes
    assert found[0].title == found[1].title


# Largest allocated bytes of steps in bf16 (weights, gradients and states), SDPA, fused AdamW, on an
# NVIDIA H200 with torch 2.11 (2026-11-21, ci.bench_models), in GiB.
MEASURED = [
    ("qwen2-0.5b", 2, 128, False, False, 4.288),
    ("qwen2-0.5b", 2, 128, True, False, 4.031),
    ("qwen2-0.5b", 8, 256, False, False, 9.016),
    ("qwen2-0.5b", 8, 256, True, False, 5.106),
    ("qwen2-0.5b", 8, 512, True, False, 6.777),
    ("qwen2-0.5b", 16, 2048, False, False, 100.742),
    ("qwen2-0.5b", 16, 2048, True, False, 27.01),
    ("llama-3.2-1b", 8, 4096, False, False, 107.509),
    ("llama-3.2-1b", 8, 4096, True, False, 38.40),
    ("llama-3-8b", 2, 4096, False, True, 60.715),
]


@pytest.mark.parametrize(
    ("model", "batch", "sequence", "patched", "checkpointing", "gib"), MEASURED
)
def test_within_two_percent_of_a_card(model, batch, sequence, patched, checkpointing, gib):
    found = estimate(
        config_of(model, sequence), batch, sequence, patched=patched, checkpointing=checkpointing
    )
    assert found.peak_bytes / GIB == pytest.approx(gib, rel=0.02)


def count(kind="dense"):
    return sum(p.numel() for p in model_of(kind).parameters())


def static(**options):
    options = {"device": "cpu", "dtype": "bfloat16", **options}
    return estimate(small("dense"), 1, 8, **options)


def test_sixteen_bytes_a_parameter():
    n = count()
    assert static(dtype="bfloat16-mixed").static_bytes == 16 * n
    assert static(dtype="bfloat16").static_bytes == 8 * n
    assert static(dtype="float32").static_bytes == 16 * n
    assert static(dtype="bfloat16-autocast").static_bytes == 16 * n
    assert static(optimizer="sgd").static_bytes == 4 * n
    assert static(optimizer="sgd_momentum").static_bytes == 6 * n
    assert 6 * n < static(optimizer="adamw_8bit").static_bytes < 6.1 * n
    assert 4 * n < static(optimizer="adafactor").static_bytes < 4.2 * n


def test_shards():
    n, world = count(), 8
    options = {"dtype": "bfloat16-mixed", "world": world}

    def of(**more):
        return static(**options, **more).static_bytes

    assert of() == 16 * n
    assert of(zero_stage=1) == pytest.approx((4 + 12 / world) * n, rel=1e-6)
    assert of(zero_stage=2) == pytest.approx((2 + 14 / world) * n, rel=1e-6)
    assert of(zero_stage=3) == pytest.approx(16 / world * n, rel=1e-6)
    assert of(fsdp=True) == of(zero_stage=3)


def test_offload_moves_states_to_the_host():
    n = count()
    for where in ("cpu", "nvme"):
        found = static(dtype="bfloat16-mixed", offload=where)
        assert (found.static_bytes, found.host_bytes) == (4 * n, 12 * n)
    found = static(
        dtype="bfloat16-mixed", offload="cpu", offload_parameters=True, zero_stage=3, world=2
    )
    assert (found.static_bytes, found.host_bytes) == (n, 7 * n)
    assert found.gathered_bytes > 0
    assert found.profile.at_peak["parameters"] == 0


def test_peaks_with_shards_hold_what_is_gathered():
    whole = static(world=4)
    sharded = static(world=4, fsdp=True)
    model = model_of("dense")
    block = sum(p.numel() * 2 for p in model.model.layers[0].parameters())
    outside = sum(p.numel() * 2 for p in model.parameters()) - 3 * block
    assert whole.gathered_bytes == 0
    assert sharded.gathered_bytes == 2 * block + outside + max(block, outside)
    assert sharded.peak_bytes < whole.peak_bytes


def test_frozen_parameters_cost_their_weights_only():
    found = estimate(model_of("lora"), 1, 8, device="cpu", dtype="float32")
    assert 0 < found.trained < 0.05 * found.total
    assert found.static_bytes == 4 * found.total + 12 * found.trained


def test_dynamic_bytes_grow_with_tokens_and_checkpointing_lowers_them():
    def dynamic(sequence, **options):
        return estimate(small("dense"), 2, sequence, device="cpu", **options).dynamic_bytes

    assert dynamic(128) > 1.9 * dynamic(64)
    assert dynamic(128, checkpointing=True) < dynamic(128)
    assert dynamic(128, attention="eager") > dynamic(128) + 3 * 2 * 6 * 128 * 128
    assert dynamic(128, attention="flash_attention_2") == dynamic(128)


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2)])
def test_saved_bytes_of_a_layer(dtype, size):
    found = estimate(small("dense"), 2, 64, dtype=dtype, device="cuda", patched=True)
    kept = found.profile.by("kind", "op", saved=True)
    assert kept["LlamaMLP", "gated_mlp.forward"] == 3 * 2 * (2 * 64) * 256 * size


def test_autocast_keeps_copies_of_weights():
    plain, autocast = (
        estimate(small("dense"), 2, 64, dtype=dtype, patched=patched)
        for dtype, patched in (("float32", True), ("bfloat16-autocast", True))
    )
    stock = estimate(small("dense"), 2, 64, dtype="bfloat16-autocast")
    assert autocast.static_bytes == plain.static_bytes
    saved = autocast.profile.by("kind", "op", saved=True)
    assert saved["LlamaMLP", "gated_mlp.forward"] == 3 * 2 * (2 * 64) * 256 * 2
    # each layer's weights once in 16 bits
    copies = [n for (_, op), n in stock.profile.by("kind", "op", saved=True).items()
              if op == "aten::_to_copy"]  # fmt: skip
    assert sum(copies) >= 2 * sum(
        p.numel() for n, p in model_of("dense").named_parameters() if "proj" in n
    )


def test_an_optimizers_temporaries():
    peaks = {
        name: estimate(small("dense"), 1, 8, optimizer=name).peak_bytes
        for name in ("adamw", "adamw_foreach", "adamw_loop")
    }
    n = 2 * count()
    assert peaks["adamw_foreach"] - peaks["adamw"] == pytest.approx(n, rel=0.2)
    assert peaks["adamw"] < peaks["adamw_loop"] < peaks["adamw_foreach"]


def test_chunks_follow_the_capacity():
    wide = dataclasses.replace if False else small("dense")
    wide.vocab_size = 50_000
    small_card, large = (
        estimate(wide, 8, 512, patched=True, capacity=capacity) for capacity in (600 * 2**20, None)
    )
    assert small_card.profile.largest["logits and loss"] < large.profile.largest["logits and loss"]


def test_text_and_data():
    found = static(dtype="bfloat16-mixed", zero_stage=3, world=8, offload="cpu")
    text = str(found)
    for word in ("static: parameters", "dynamic", "peak of a device", "ZeRO-3 on 8 devices"):
        assert word in text
    data = json.loads(json.dumps(found.as_data()))
    assert data["peak_bytes"] == found.peak_bytes
    assert data["static"]["optimizer states"] == 0
    pytest.importorskip("rich")
    assert found.__rich__() is not None


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"dtype": "bf16"}, r"unknown dtype 'bf16'.*known"),
        ({"optimizer": "adam"}, "did you mean 'adamw'"),
        ({"zero_stage": 4}, "must be 0, 1, 2 or 3, got 4"),
        ({"zero_stage": 2, "fsdp": True}, "give it or zero_stage=2, not both"),
        ({"world": 0}, "world must be a positive integer, got 0"),
        ({"offload": "disk"}, "None, 'cpu' or 'nvme', got 'disk'"),
        ({"offload_parameters": True}, "zero_stage=3 or fsdp=True"),
        ({"attention": "linear"}, "'sdpa', 'flash_attention_2' or 'eager', got 'linear'"),
    ],
)
def test_wrong_options(options, said):
    with pytest.raises(ValueError, match=said):
        static(**options)


def test_wrong_things():
    with pytest.raises(
        TypeError, match="expected a Hugging Face configuration or a model, got str"
    ):
        estimate("llama", 1, 8)
    with pytest.raises(ValueError, match="batch must be a positive integer, got 0"):
        estimate(small("dense"), 0, 8)


def test_a_copy_on_the_meta_device_keeps_ties_and_patches():
    model = model_of("tied")
    liger_multi.patch(model)
    copy = on_meta(model, torch.bfloat16)
    assert copy.lm_head.weight is copy.model.embed_tokens.weight
    assert {p.device.type for p in copy.parameters()} == {"meta"}
    assert {p.dtype for p in copy.parameters()} == {torch.bfloat16}
    assert [type(m) for m in copy.modules()] == [type(m) for m in model.modules()]
    assert {p.device.type for p in model.parameters()} == {"cpu"}


def test_every_published_size_has_a_configuration(tmp_path):
    for name in SIZES:
        assert config_of(name).num_hidden_layers == SIZES[name][1]["num_hidden_layers"]
    small("dense").save_pretrained(tmp_path)
    for place in (tmp_path, tmp_path / "config.json"):
        assert config_of(place).hidden_size == 96
    with pytest.raises(ValueError, match=r"did you mean 'llama-3-8b'.*config.json"):
        config_of("llama-3-8")


def test_the_command(tmp_path, capsys):
    small("dense").save_pretrained(tmp_path)
    argv = ["estimate", str(tmp_path), "--batch", "2", "--sequence", "64", "--patched"]
    assert main(argv) == 0
    text = capsys.readouterr().out
    assert "Estimate for llama 2 x 64, bfloat16, adamw, patched" in text
    assert main([*argv, "--json", "--capacity", "80GiB"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["fits"]
    assert data["peak_bytes"] > data["static_bytes"] * 0.5
    assert main([*argv, "--capacity", "1MiB"]) == 1
    assert "Too large" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["nowhere"], "unknown model 'nowhere'"),
        (["llama-3-8b", "--batch", "0"], "batch must be a positive integer, got 0"),
        (["llama-3-8b", "--capacity", "much"], "a byte count in --capacity"),
    ],
)
def test_wrong_commands(argv, said, capsys):
    assert main(["estimate", *argv]) == 2
    assert said in capsys.readouterr().err


def test_optimizers_are_complete():
    assert {o.temporaries for o in OPTIMIZERS.values()} == {"none", "all", "largest"}


@pytest.mark.parametrize("quick", [True])
def test_the_memory_demo(quick, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    argv = ["memory-demo", "--device", "cpu", "--output", str(tmp_path)]
    assert main([*argv, "--quick"] if quick else argv) == 0
    text = capsys.readouterr().out
    for word in (
        "Memory of qwen2 stock",
        "Memory of qwen2 patched",
        "Peak memory and where",
        "kept",
    ):
        assert word in text
    stock, patched = (
        json.loads((tmp_path / f"{name}.json").read_text()) for name in ("stock", "patched")
    )
    assert patched["peak_bytes"] < 0.6 * stock["peak_bytes"]
    assert (tmp_path / "memory.png").read_bytes()[:4] == b"\x89PNG"
