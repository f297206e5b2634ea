"""Estimates are compared with measured steps, with figures of a card, and with arithmetic."""

import inspect
import itertools
import json
import os
import random

import pytest
import torch

pytest.importorskip("transformers")

import liger_multi
from benchmarks import store
from benchmarks.harness import tracked_peak
from benchmarks.memory import CPU, STORIES, Case
from liger_multi.cli.main import main
from liger_multi.dispatch.op import OPS
from liger_multi.memory import (
    compress_activations,
    estimate,
    measure,
    offload_activations,
)
from liger_multi.memory.recorder import Recorder, stored
from liger_multi.memory.setup import OPTIMIZERS, TrainingSetup
from liger_multi.memory.simulation import SCRATCH, MetaImplementations, Simulation, on_meta
from liger_multi.memory.sizes import SIZES, config_of
from tests.models import build


def small(model_name="dense"):
    return Case(model_name, 4, 128).config()


def model_of(model_name="dense", **options):
    return Case(model_name, 4, 128, "float32", **options).build("cpu")


HALF_LORA = Case(
    "dense", 4, 128, "bfloat16", lora=True
)  # of such models peft keeps adapters in fp32


def _slow(case):
    """Unpatched state space models loop over their tokens."""
    looping = case.model in ("delta", "scan", "heads_scan") and not case.patched
    return pytest.param(case, marks=pytest.mark.slow) if looping else case


@pytest.mark.parametrize("case", [*map(_slow, CPU), HALF_LORA], ids=str)
def test_estimate_near_measured_step(case):
    if case.lora:
        pytest.importorskip("peft")
    model = case.build("cpu")
    optimizer, step = case.step(model)
    step()
    peak = tracked_peak(model, optimizer, step)
    before = {name: p.clone() for name, p in model.state_dict().items()}
    estimated = estimate(model, 4, 128, dtype=case.dtype, optimizer="adamw_loop", device="cpu")
    assert estimated.peak_bytes == pytest.approx(peak, rel=0.01 if case.lora else 0.1)
    after = model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before), "left alone"
    assert next(model.parameters()).device.type == "cpu"
    again = case.estimated("cpu")
    assert (again.peak_bytes, again.title) == (estimated.peak_bytes, estimated.title)


FLOAT8 = {
    "trained": (False, {"smallest": 0}),
    "frozen": (True, {"smallest": 0, "frozen": True}),
    "checkpointed": (False, {"smallest": 0}),
}


@pytest.mark.parametrize("name", FLOAT8)
def test_float8_estimate_near_measured_step(name):
    """An FP8 base costs a byte per weight, and four bytes per row for its scale."""
    lora, options = FLOAT8[name]
    if lora:
        pytest.importorskip("peft")
    case = Case("dense", 4, 128, "bfloat16", lora=lora)
    model, patched = case.build("cpu"), {"linear_float8": options}
    again = name == "checkpointed"
    estimated = estimate(
        model,
        4,
        128,
        dtype="bfloat16",
        optimizer="adamw_loop",
        device="cpu",
        patched=patched,
        checkpointing=again,
    )
    liger_multi.patch(model, **patched)
    if again:
        model.train().gradient_checkpointing_enable({"use_reentrant": False})
    optimizer, step = case.step(model)
    for _ in range(2):  # from the second step on, norms return FP8 codes
        step()
    tensors = [t for p in model.parameters() for t in stored(p)]
    assert estimated.peak_bytes == pytest.approx(tracked_peak(model, optimizer, step), rel=0.1)
    assert estimated.parts["parameters"] == sum(t.nbytes for t in tensors)
    if lora:
        coded = [p for p in model.parameters() if len(stored(p)) == 2]
        saved = sum(p.numel() - 4 * p.shape[0] for p in coded)
        assert len(coded) > 7
        plain = case.build("cpu").parameters()
        assert estimated.parts["parameters"] == sum(p.nbytes for p in plain) - saved


@pytest.mark.parametrize("compress", [None, "float8"])
@pytest.mark.parametrize("away", [pytest.param(False, marks=pytest.mark.slow), True])
def test_activations_that_wait_elsewhere(away, compress):
    """On a CPU the host's copies are measured with the rest."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 8, "head_dim": 64}
    sizes |= {"max_position_embeddings": 2048, "tied": False}
    model = build(**sizes).train()
    model.set_attn_implementation("sdpa")
    options = {"device": "cpu", "dtype": "float32", "optimizer": "none", "checkpointing": True}
    options |= {"offload_activations": away, "compress": compress, "patched": True}
    estimated = estimate(model, 1, 2048, **options)
    plain = estimate(model, 1, 2048, **{**options, "compress": None})
    assert (estimated.host_bytes > 0) == away
    if compress:
        inputs = 7 * 2048 * 256 * 4  # of layers, but for the first one
        expected = plain.host_bytes - inputs + (inputs // 4) * (1 + 4 / 256)
        assert not away or estimated.host_bytes == expected
        assert estimated.peak_bytes < plain.peak_bytes
    liger_multi.patch(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    if away:
        offload_activations(model, compress=compress)
    elif compress:
        compress_activations(model, compress)
    ids = torch.arange(2048)[None] % 200
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        with measure("cpu", known=[*model.parameters(), *model.buffers()]) as peak:
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    assert estimated.peak_bytes == pytest.approx(peak.peak_bytes, rel=0.04 if away else 0.01)


def test_float8_layers_saved_bytes():
    """Scales of weights until backward, and the FP8 codes of the last rounded input."""
    model = model_of()
    layers = [m for n, m in model.named_modules() if "layers" in n and hasattr(m, "in_features")]
    estimates = []
    for on in (False, {"smallest": 0}):
        patched = {"linear_float8": on, "swiglu": {"whole": False}}
        options = {"dtype": "bfloat16", "optimizer": "sgd", "device": "cuda", "patched": patched}
        estimates.append(estimate(model, 4, 128, **options))
    plain, eight = estimates
    assert eight.static_bytes == plain.static_bytes
    saved_bytes = sum(4 * m.out_features for m in layers) + 4 * 128 * (layers[-1].in_features + 4)
    assert eight.peak_bytes - plain.peak_bytes == saved_bytes


@pytest.mark.parametrize("is_coded", [False, True])
def test_float8_codes_live_during_gemm(is_coded):
    """Those of x and the weight besides the output; those of dy and the weight besides dx."""
    op, (rows, width, out) = OPS["linear_float8"], (64, 32, 48)
    x = torch.empty(rows, width, dtype=torch.bfloat16, device="meta")
    dtype = torch.float8_e4m3fn if is_coded else torch.bfloat16
    weight = torch.empty(out, width, dtype=dtype, device="meta")
    scale = torch.empty(out, device="meta") if is_coded else None
    recorder = Simulation("cuda", None, torch.nn.Module(), None, 1)
    with recorder.surroundings():
        for t in (x, weight, scale):
            if t is not None:
                recorder.see(t, is_output=False)
        held_bytes = sum(size for _, size in recorder.events)
        result = recorder.run_operator(
            op.fwd, (x, weight, None, scale, None, None, None, True, False)
        )
        del result
        forward = max(itertools.accumulate(size for _, size in recorder.events)) - held_bytes
        dy, own = x.new_empty(rows, out), torch.empty(out, device="meta")
        before = len(recorder.events)
        recorder.run_operator(
            op.bwd, (dy, None, weight, scale, None, own, x.dtype, True, False, False)
        )
    gradient = max(itertools.accumulate(size for _, size in recorder.events[before:]))
    codes = 0 if is_coded else (width + 4) * out  # of the weight, with their scales
    assert forward == rows * (width + 4) + codes + 2 * rows * out
    # codes and scales of dy, transposed codes of the weight, a scale per column
    assert gradient == rows * (out + 4) + (out + 4) * width + 2 * rows * width


@pytest.mark.parametrize("model_name", ["dense", "tied", "gqa"])
def test_estimate_of_configuration_equals_model(model_name):
    options = {"dtype": "float32", "device": "cpu", "checkpointing": True, "patched": True}
    estimates = [
        estimate(source, 4, 128, **options) for source in (model_of(model_name), small(model_name))
    ]
    assert estimates[0].peak_bytes == estimates[1].peak_bytes
    assert estimates[0].static_bytes == estimates[1].static_bytes
    assert estimates[0].title == estimates[1].title


def committed():
    """Rows of devices with their name."""
    for run, row in store.rows("memory"):
        if store.card(run) != "cpu":
            case = Case(**row["case"])
            marks = [pytest.mark.slow] if case.batch * case.sequence > 4096 else []
            yield pytest.param(store.device(run), row, id=str(case), marks=marks)


@pytest.mark.parametrize(("device", "row"), list(committed()))
def test_estimate_near_device_measurement(device, row):
    case = Case(**row["case"])
    estimated = case.estimated("cuda").peak_bytes
    if "failure" in row:
        assert estimated > case.limit_gb * 1e9, f"{device} ran {row['failure']}"
    else:
        assert estimated == pytest.approx(row["measured_bytes"], rel=0.1)
        assert estimated == pytest.approx(row["estimated_bytes"], rel=0.01), "what the page says"


def test_page_numbers_equal_estimates():
    rows = [row for _, row in store.rows("memory-estimates")]
    assert [(r["model"], r["batch"], r["sequence"]) for r in rows] == [s[:3] for s in STORIES]
    row = rows[0]
    estimated = estimate(config_of(row["model"]), row["batch"], row["sequence"]).as_data()
    for name in ("static_bytes", "dynamic_bytes", "peak_bytes"):
        assert row["stock"][name] == pytest.approx(estimated[name], rel=0.01)


def count():
    return sum(p.numel() for p in model_of().parameters())


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
        estimated = static(dtype="bfloat16-mixed", offload=where)
        assert (estimated.static_bytes, estimated.host_bytes) == (4 * n, 12 * n)
    estimated = static(
        dtype="bfloat16-mixed", offload="cpu", offload_parameters=True, zero_stage=3, world=2
    )
    assert (estimated.static_bytes, estimated.host_bytes) == (n, 7 * n)
    assert estimated.gathered_bytes > 0
    assert estimated.profile.at_peak["parameters"] == 0


def test_sharded_peak_includes_gathered():
    replicated = static(world=4)
    sharded = static(world=4, fsdp=True)
    model = model_of("dense")
    block = sum(p.numel() * 2 for p in model.model.layers[0].parameters())
    outside = sum(p.numel() * 2 for p in model.parameters()) - 3 * block
    assert replicated.gathered_bytes == 0
    summed = 2 * block  # in fp32
    head = model.lm_head.weight.numel() * 2 * 3 // 4  # its gradient, less a shard
    assert sharded.gathered_bytes == outside + 2 * block + summed + head
    assert static(world=4, zero_stage=3).gathered_bytes == 2 * block + 2 * outside
    assert sharded.peak_bytes < replicated.peak_bytes


def test_shards_of_fsdp2_are_fp32_weights():
    """ZeRO has 16-bit weights beside fp32 copies; the sum is the same."""
    n = count()
    parts = {"fsdp": {"fsdp": True}, "zero": {"zero_stage": 3}}
    parts = {
        name: static(dtype="bfloat16-mixed", world=2, **options).parts
        for name, options in parts.items()
    }
    assert list(parts["zero"].values()) == [n, n, 6 * n]
    assert list(parts["fsdp"].values()) == [2 * n, 2 * n, 4 * n]


def test_gradients_outside_of_layers_are_summed_after_backward():
    """The highest moment of few tokens: sums in fp32, beside all shards."""
    model = model_of("dense")
    outside = sum(p.numel() for p in model.parameters())
    block = sum(p.numel() for p in model.model.layers[0].parameters())
    outside -= 3 * block
    estimated = static(dtype="bfloat16-mixed", world=2, fsdp=True)
    ending = 4 * (outside + block)  # 16-bit gradients are as large as their shards in fp32
    assert estimated.peak_bytes == pytest.approx(8 * count() + ending, rel=0.01)


def test_frozen_parameters_cost_their_weights_only():
    pytest.importorskip("peft")
    estimated = estimate(model_of(lora=True), 1, 8, device="cpu", dtype="float32")
    assert 0 < estimated.trained < 0.05 * estimated.total
    assert estimated.static_bytes == 4 * estimated.total + 12 * estimated.trained


def test_dynamic_bytes_with_tokens_and_checkpointing():
    def dynamic(sequence, **options):
        return estimate(small("dense"), 2, sequence, device="cpu", **options).dynamic_bytes

    assert dynamic(128) > 1.9 * dynamic(64)
    assert dynamic(128, checkpointing=True) < dynamic(128)
    assert dynamic(128, attention="eager") > dynamic(128) + 3 * 2 * 6 * 128 * 128
    assert dynamic(128, attention="flash_attention_2") == dynamic(128)


def test_grouped_heads_unfused_attention_in_fp32():
    """PyTorch computes unfused attention, and keeps rows x columns of every head."""

    def attention_bytes(model_name, dtype="float32"):
        estimated = estimate(small(model_name), 2, 128, dtype=dtype, device="cuda")
        saved = estimated.profile.by("kind", "op", saved=True)
        return sum(size for (module_class, _), size in saved.items() if "Attention" in module_class)

    square = 3 * 2 * 6 * 128 * 128 * 4  # layers x batch x heads
    assert attention_bytes("gqa") > square > attention_bytes("dense")
    assert attention_bytes("gqa", "bfloat16") < attention_bytes("dense", "bfloat16")


def test_grouped_heads_key_gradient_per_head():
    """16 512 bytes per token of Llama-3.2-1B besides operands and results (measured on an H200)."""
    tokens, heads, size = 4096, 32, 64
    recorder = Recorder("meta")

    def operand(groups):
        tensor = torch.empty(1, groups, tokens, size, dtype=torch.bfloat16, device="meta")
        return tensor.requires_grad_()

    q, k, v = operand(heads), operand(8), operand(8)
    with recorder.recording(), MetaImplementations(recorder, "cuda"):
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        before = len(recorder.events)
        y.backward(torch.empty_like(y))
    sizes = [size for _, size in recorder.events[before:] if size > 0]
    live = itertools.accumulate(size for _, size in recorder.events[before:])
    results = 2 * size * tokens * (heads + 2 * 8)
    upstream = 2 * size * tokens * heads
    assert max(sizes) == 4 * size * tokens * heads
    assert max(live) - results - upstream == 16512 * tokens


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2)])
def test_saved_bytes_of_a_layer(dtype, size):
    def saved(whole):
        options = {"patched": {"swiglu": {"whole": whole}}, "dtype": dtype, "device": "cuda"}
        return estimate(small("dense"), 2, 64, **options).profile.by("kind", "op", saved=True)

    inner = 3 * (2 * 64) * 256 * size
    assert saved(True)["LlamaMLP", "gated_mlp.forward"] == 2 * inner
    steps = saved(False)
    assert steps["LlamaMLP", "swiglu.forward"] == inner, "the product, kept for the last layer"


def test_autocast_keeps_copies_of_weights():
    plain, autocast = (
        estimate(small("dense"), 2, 64, dtype=dtype, patched=True)
        for dtype in ("float32", "bfloat16-autocast")
    )
    stock = estimate(small("dense"), 2, 64, dtype="bfloat16-autocast")
    assert autocast.static_bytes == plain.static_bytes
    saved = autocast.profile.by("kind", "op", saved=True)
    assert saved["LlamaMLP", "gated_mlp.forward"] == 3 * 2 * (2 * 64) * 256 * 2
    # a 16-bit copy of each layer's weights
    copies = [
        n
        for (_, op), n in stock.profile.by("kind", "op", saved=True).items()
        if op == "aten::_to_copy"
    ]
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
    wide = small()
    wide.vocab_size = 50_000
    small_card, large = (
        estimate(wide, 8, 512, patched=True, capacity=capacity) for capacity in (600 * 2**20, None)
    )
    assert small_card.profile.largest["logits and loss"] < large.profile.largest["logits and loss"]


def test_float8_head_weight_layouts():
    wide, head_bytes = small(), []
    wide.vocab_size = 50_000
    for products in ("exact", "float8_logits", "float8"):
        liger_multi.configure({"head_gemms": products})
        case = estimate(wide, 4, 128, dtype="bfloat16", patched=True, capacity=2**40)
        head_bytes.append(case.profile.largest["logits and loss"])
    liger_multi.configure(None)
    exact, one, both = head_bytes
    weight = wide.vocab_size * wide.hidden_size
    assert one - exact == pytest.approx(weight, rel=0.01)
    assert both - one >= weight


def test_text_and_data():
    estimated = static(dtype="bfloat16-mixed", zero_stage=3, world=8, offload="cpu")
    text = str(estimated)
    for word in ("static: parameters", "dynamic", "peak of a device", "ZeRO-3 on 8 devices"):
        assert word in text
    data = json.loads(json.dumps(estimated.as_data()))
    assert data["peak_bytes"] == estimated.peak_bytes
    assert data["static"]["optimizer states"] == 0
    pytest.importorskip("rich")
    assert estimated.__rich__() is not None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "bf17"}, r"unknown dtype 'bf17'.*known"),
        ({"optimizer": "adam"}, "did you mean 'adamw'"),
        ({"zero_stage": 4}, "must be 0, 1, 2 or 3, got 4"),
        ({"zero_stage": 2, "fsdp": True}, "give it or zero_stage=2, not both"),
        ({"world": 0}, "world must be a positive integer, got 0"),
        ({"offload": "disk"}, "None, 'cpu' or 'nvme', got 'disk'"),
        ({"offload_parameters": True}, "zero_stage=3 or fsdp=True"),
        ({"attention": "linear"}, "'sdpa', 'flash_attention_2' or 'eager', got 'linear'"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ValueError, match=message):
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


@pytest.mark.parametrize("device", ["gpu", "cuda:77"])
def test_a_device_that_is_absent(capsys, device):
    assert main(["memory-demo", "--device", device]) == 2
    assert f"cannot use --device {device}: " in capsys.readouterr().err


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
    ("argv", "message"),
    [
        (["nowhere"], "unknown model 'nowhere'"),
        (["llama-3-8b", "--batch", "0"], "batch must be a positive integer, got 0"),
        (["llama-3-8b", "--capacity", "much"], "a byte count in --capacity"),
    ],
)
def test_wrong_commands(argv, message, capsys):
    assert main(["estimate", *argv]) == 2
    assert message in capsys.readouterr().err


def test_optimizers_are_complete():
    assert {o.temporaries for o in OPTIMIZERS.values()} == {"none", "all", "largest"}


@pytest.mark.slow
def test_the_memory_demo(tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_DISABLE_TELEMETRY"):
        monkeypatch.setenv(name, os.environ.get(name, "1"))
    state = random.getstate()
    assert main(["memory-demo", "--quick", "--device", "cpu", "--output", str(tmp_path)]) == 0
    random.setstate(state)
    text = capsys.readouterr().out
    for word in (
        "Memory of qwen2 unpatched",
        "Memory of qwen2 patched",
        "Peak memory and where",
        "kept",
    ):
        assert word in text
    stock, patched = (
        json.loads((tmp_path / f"{name}.json").read_text()) for name in ("unpatched", "patched")
    )
    assert patched["peak_bytes"] < 0.6 * stock["peak_bytes"]
    assert (tmp_path / "memory.png").read_bytes()[:4] == b"\x89PNG"


def test_estimate_with_setup():
    """Alone, and with keywords that change it."""
    sharded = TrainingSetup(dtype="bfloat16-mixed", zero_stage=3, world=8)
    by_name = estimate(small(), 2, 16, dtype="bfloat16-mixed", zero_stage=3, world=8)
    assert estimate(small(), 2, 16, sharded).as_data() == by_name.as_data()
    fewer = estimate(small(), 2, 16, dtype="bfloat16-mixed", zero_stage=3, world=2)
    assert estimate(small(), 2, 16, sharded, world=2).as_data() == fewer.as_data()
    assert sharded.world == 8


def test_invalid_setup():
    with pytest.raises(ValueError, match="must be 0, 1, 2 or 3, got 4"):
        TrainingSetup(zero_stage=4)
    with pytest.raises(TypeError, match="setup must be a TrainingSetup, got"):
        estimate(small(), 1, 8, "bfloat16")
    with pytest.raises(TypeError, match="unexpected keyword argument 'optimizr'"):
        estimate(small(), 1, 8, optimizr="sgd")


# --- what kernels of linear attention allocate ---


def _meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def _delta(channels=()):
    rows, gates = _meta(2, 1000, 4, 128), _meta(2, 1000, 4, *channels, dtype=torch.float32)
    return {
        "q": rows,
        "k": rows.clone(),
        "v": rows.clone(),
        "g": gates,
        "scale": 1.0,
        "beta": _meta(2, 1000, 4),
        "qk_l2norm": True,
        "output_final_state": False,
    }


def _numbers(*shape):
    return _meta(*shape, dtype=torch.float32)


EXPERTS = {
    "x": _meta(8192, 2048),
    "gate_up_weight": _meta(128, 1536, 2048),
    "down_weight": _meta(128, 2048, 768),
    "index": torch.empty(8192, 8, dtype=torch.int64, device="meta"),
    "routing": _meta(8192, 8),
    "gate_up": _meta(65536, 1536),
    "order": torch.empty(65536, dtype=torch.int32, device="meta"),
    "offsets": torch.empty(129, dtype=torch.int32, device="meta"),
    "activation": "silu",
    "limit": 7.0,
    "alpha": 1.702,
    "up_offset": 1.0,
    "interleaved": False,
    "transposed": False,
    "y_dtype": torch.bfloat16,
}
ADAPTERS = {
    "gate_up_a": _meta(128, 16, 2048),
    "gate_up_b": _meta(128, 1536, 16),
    "down_a": _meta(128, 16, 768),
    "down_b": _meta(128, 2048, 16),
    "gate_up_scale": 2.0,
    "down_scale": 2.0,
}
KERNELS = {
    "causal_conv1d": {
        "x": _meta(2, 8192, 4096),
        "weight": _meta(4096, 4),
        "bias": _meta(4096),
        "activation": "silu",
    },
    "fused_moe": EXPERTS,
    "gated_delta_rule": _delta(),
    "gated_short_conv": {"x": _meta(2, 8192, 6144), "weight": _meta(2048, 3)},
    "kimi_delta_attention": _delta((128,)),
    "lora_moe": EXPERTS | ADAPTERS,
    "ssd_scan": {
        "x": _meta(2, 1000, 16, 64),
        "dt": _meta(2, 1000, 16),
        "A": _numbers(16),
        "B": _meta(2, 1000, 2, 128),
        "C": _meta(2, 1000, 2, 128),
        "D": _numbers(16),
        "z": _meta(2, 1000, 16, 64),
        "dt_bias": _numbers(16),
        "dt_softplus": True,
        "dt_min": 0.0,
        "dt_max": 1.0,
        "chunk": 256,
        "output_final_state": False,
    },
    "selective_scan": {
        "u": _meta(2, 8192, 8192),
        "delta": _meta(2, 8192, 8192),
        "A": _numbers(8192, 16),
        "B": _meta(2, 8192, 16),
        "C": _meta(2, 8192, 16),
        "D": _numbers(8192),
        "z": _meta(2, 8192, 8192),
        "delta_bias": _numbers(8192),
        "delta_softplus": True,
        "output_final_state": False,
        "states": _numbers(2, 32, 16, 8192),
    },
}


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("name", KERNELS)
def test_scratch_of_launchers(name, direction):
    """Within 5 %, besides results: sizes that depend on the number of cores are left out."""
    pytest.importorskip("triton")
    from ci.static import TARGETS, recorded
    from liger_multi.dispatch import registry
    from liger_multi.dispatch.launch import simulate

    tensors = KERNELS[name]
    launcher = getattr(registry.module("triton", name), direction)
    parameters = inspect.signature(launcher).parameters
    arguments = {n: True if n.startswith("needs_") else tensors.get(n) for n in parameters}
    if direction == "backward":
        like = next(tensors[n] for n in ("v", "x", "u") if n in tensors)
        like = like[..., : len(tensors["weight"])] if "weight" in tensors else like
        arguments |= {"dy": torch.empty_like(like)}
    inputs = [t for t in arguments.values() if isinstance(t, torch.Tensor)]
    with simulate(TARGETS["sm90"].info), recorded("", []), measure("meta", known=inputs) as peak:
        results = launcher(**arguments)
    with measure("meta", known=[*inputs, *results]) as guess:
        kept = SCRATCH[name](arguments)
    assert guess.peak_bytes == pytest.approx(peak.peak_bytes, rel=0.05)
    scratch = [sum(t.nbytes for t in kept), peak.peak_bytes - sum(t.nbytes for t in results)]
    scratch[1] -= peak.start_bytes
    assert scratch[0] == pytest.approx(scratch[1], rel=0.15)
