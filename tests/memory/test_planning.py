"""Plans are compared with measured steps on a CPU and with full simulations; their files load.

The execution of plans on an accelerator is tested on a CPU, and with substitute processes.
"""

import argparse
import copy
import json
import subprocess
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.comparing import assert_same_gradients

pytest.importorskip("transformers")

import transformers

from benchmarks import long_context, plans, store as results
from benchmarks.configs import MODELS, Run as SeveralCards
from benchmarks.harness import tracked_peak
from benchmarks.memory import Case as Small
from benchmarks.plans import Case as Run, executed
from liger_multi import configure
from liger_multi.cli.main import main
from liger_multi.dispatch import config as configuration
from liger_multi.errors import ConfigurationError, PlanError
from liger_multi.memory import (
    Settings,
    Space,
    TrainingPlan,
    apply,
    estimate,
    load,
    plan,
    simulation,
    sizes,
)
from liger_multi.memory.planning import Candidate, search
from liger_multi.memory.planning.cost import CARDS, Traffic, card_of, step_seconds
from liger_multi.memory.planning.predict import Predictor
from liger_multi.memory.planning.result import deepspeed
from liger_multi.memory.planning.shapes import Shapes
from liger_multi.memory.planning.traces import Work
from liger_multi.memory.recorder import stored

# --- predictions ---

BATCH, LENGTH, LAYERS = 2, 128, 5
BASE = Settings(
    sequence=LENGTH, micro_batch=BATCH, precision="fp32", optimizer="adamw_loop", chunk=64
)
SMALL = Space(
    precisions=("fp32",),
    policies=("none", "full"),
    patched=(True,),
    offload=False,
    tiled=False,
    offload_states=(None,),
    layouts=((1, 1),),
)


def config_of(model_name="dense", layers=LAYERS):
    config = Small(model_name, BATCH, LENGTH).config()
    config.num_hidden_layers = layers
    return config


def model_of(model_name="dense", layers=LAYERS):
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(
        config_of(model_name, layers), dtype=torch.float32
    ).train()


@pytest.fixture(scope="module")
def predictor():
    """Shared: kinds of layers are simulated once."""
    return Predictor(Shapes(config_of(), LENGTH), CARDS["h200"], "cpu")


def measured(settings, model):
    """The peak of a real step, from its live storages."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, foreach=False)
    ids = torch.randint(1999, (settings.micro_batch, LENGTH))

    def step():
        for _ in range(settings.accumulation):
            model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    with apply(settings, model):
        step()
        return tracked_peak(model, optimizer, step)


WAYS = {
    "patched": {},
    "stock": {"patched": False, "chunk": None},
    "full": {"recompute": "full", "layers": LAYERS},
    "norms_and_mlp of some": {"recompute": "norms_and_mlp", "layers": 2},
    "keep_attention, stock": {
        "recompute": "keep_attention",
        "layers": LAYERS,
        "patched": False,
        "chunk": None,
    },
    "tiles": {"tiles": 4, "micro_batch": 4},
    "accumulation": {"accumulation": 2},
}


@pytest.mark.parametrize("name", WAYS)
def test_prediction_near_measured_step(predictor, name):
    settings = replace(BASE, **WAYS[name])
    predicted = predictor.predict(settings).peak_bytes
    assert predicted == pytest.approx(measured(settings, model_of()), rel=0.1)


@pytest.mark.parametrize("name", ["patched", "stock", "full", "tiles"])
def test_prediction_from_few_layers(predictor, name):
    """The extrapolation is exact: memory and work are those of all layers."""
    settings = replace(BASE, **WAYS[name])
    short = predictor.predict(settings)
    full = Predictor(Shapes(config_of(), LENGTH), CARDS["h200"], "cpu")
    full.shapes.facts.uniform = False
    expected = full.predict(settings)
    assert (short.peak_bytes, short.parts) == (expected.peak_bytes, expected.parts)
    assert short.seconds == pytest.approx(expected.seconds, rel=1e-9)
    assert len(predictor.traces(settings)[0].body.layers) < LAYERS


def test_host_bytes_from_few_layers():
    """What is sent around the layers is counted once."""
    settings = replace(BASE, recompute="full", layers=LAYERS, micro_batch=64)
    settings = replace(settings, offload_activations=True)
    predicted = Predictor(Shapes(config_of(), LENGTH), CARDS["h200"], "cpu").predict(settings)
    model = model_of()
    ids = torch.randint(1999, (settings.micro_batch, LENGTH))
    with apply(settings, model) as applied:
        model(input_ids=ids, labels=ids)
    assert predicted.host_bytes == applied.offload.offloaded_bytes > 0


LONG_ROWS = [row for _, row in results.rows("long-context") if row["part"] == "step"]


@pytest.mark.slow
@pytest.mark.parametrize("row", LONG_ROWS, ids=lambda row: f"{row['model']}-{row['tokens']}")
def test_prediction_near_measured_steps_of_ranks(row):
    predicted = long_context.planned(row)
    assert predicted["planned_bytes"] == pytest.approx(row["planned_bytes"], rel=0.01), "the page"
    assert predicted["planned_bytes"] == pytest.approx(row["peak_bytes"], rel=0.05)
    if row["host_bytes_per_card"]:
        expected = row["host_bytes_per_card"]
        assert predicted["planned_host_bytes"] == pytest.approx(expected, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cards", "row"),
    [(row["cards"], row) for _, row in results.rows("several-cards") if row["variant"] == "ours"],
    ids=lambda value: str(value["run"]) if isinstance(value, dict) else str(value),
)
def test_prediction_near_measured_steps_of_fsdp2(cards, row):
    run = SeveralCards.parse(row["run"])
    settings = Settings(
        sequence=run.tokens,
        micro_batch=run.batch,
        precision="amp",
        recompute="full" if run.checkpointing else "none",
        layers=MODELS[run.model][1]["num_hidden_layers"],
        spread="fsdp2",
        data=cards,
    )
    shapes = Shapes(sizes.config_of(run.model, run.tokens), run.tokens)
    predicted = Predictor(shapes, CARDS["h200"]).predict(settings)
    assert predicted.peak_bytes == pytest.approx(row["peak_bytes"], rel=0.05)


@pytest.mark.parametrize("precision", ["bf16", "amp"])
def test_prediction_equals_estimate(precision):
    config = config_of(layers=6)
    settings = replace(BASE, precision=precision, optimizer="adamw", chunk=BATCH * LENGTH)
    predicted = Predictor(Shapes(config, LENGTH), CARDS["h200"]).predict(settings)
    options = {"dtype": settings.dtype, "patched": {"fused_linear_cross_entropy": {"chunk": 256}}}
    assert predicted.peak_bytes == estimate(config, BATCH, LENGTH, **options).peak_bytes


def test_shards_and_states_elsewhere(predictor):
    base = replace(BASE, precision="amp", data=4, optimizer="adamw")
    predictions = {
        spread: predictor.predict(replace(base, spread=spread))
        for spread in ("ddp", "zero1", "zero2", "zero3")
    }
    assert predictions["ddp"].peak_bytes > predictions["zero1"].peak_bytes
    count = sum(p.numel() for p in model_of().parameters())
    assert predictions["ddp"].parts["other"] >= 4 * count, "buckets"
    assert predictions["zero1"].parts["optimizer states"] == 3 * count
    full, share = (predictions[n].parts["parameters"] for n in ("zero2", "zero3"))
    assert share == pytest.approx(full / 4, rel=0.01)
    assert predictions["zero3"].parts["gathered and workspace"] > 0
    away = predictor.predict(replace(base, spread="zero2", offload_states="cpu"))
    assert away.peak_bytes < predictions["zero2"].peak_bytes
    assert away.host_bytes == 3 * count
    assert away.seconds > predictions["zero2"].seconds


def test_layouts_divide_what_a_device_holds(predictor):
    one = predictor.predict(BASE)
    halves = predictor.predict(replace(BASE, tensor=2))
    stages = predictor.predict(replace(BASE, pipeline=2, accumulation=4))
    assert halves.peak_bytes < one.peak_bytes
    assert stages.parts["parameters"] < one.parts["parameters"]
    more = predictor.predict(replace(BASE, pipeline=2, accumulation=8))
    assert more.tokens_per_second > stages.tokens_per_second, "a smaller part of it is filling"


@pytest.fixture(scope="module")
def small_plan():
    return plan(config_of(), "48MiB", 1, 8, LENGTH, device="cpu", space=SMALL, headroom=0)


def test_the_fastest_that_fits(small_plan):
    assert small_plan.best.fits
    assert small_plan.best.relative == 1
    assert small_plan.best.settings.sequences == 8
    fitting = small_plan.fitting
    assert [c.relative for c in fitting] == sorted(c.relative for c in fitting)
    assert all(c.peak_bytes <= small_plan.budget_bytes for c in fitting)
    assert small_plan.largest_batch >= small_plan.best.settings.micro_batch
    assert small_plan.longest_sequence >= LENGTH
    settings = replace(small_plan.best.settings, micro_batch=small_plan.largest_batch)
    assert (
        Predictor(Shapes(config_of(), LENGTH), CARDS["h200"], "cpu")
        .predict(settings, small_plan.budget_bytes)
        .fits
    )


def test_text_data_and_picture(small_plan, tmp_path):
    text = str(small_plan)
    for word in ("largest micro-batch", "longest sequence", "peak", "time", "nearest in memory"):
        assert word in text
    again = TrainingPlan.from_data(json.loads(json.dumps(small_plan.as_data())))
    assert again == small_plan
    assert isinstance(again.best, Candidate)
    pytest.importorskip("matplotlib")
    small_plan.draw(tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes()[:4] == b"\x89PNG"


def test_fewest_layers_recompute():
    """With slightly too little memory, a few layers are recomputed, not all."""
    predictor = Predictor(Shapes(config_of(), LENGTH), CARDS["h200"], "cpu")
    settings = replace(BASE, micro_batch=8, chunk=1024)
    peak = predictor.predict(settings).peak_bytes
    space = replace(SMALL, policies=("full",))
    training_plan = plan(
        config_of(),
        peak - 2**19,
        1,
        8,
        LENGTH,
        device="cpu",
        space=space,
        headroom=0,
        limits=False,
        optimizer="adamw_loop",
    )
    some = [c for c in training_plan.fitting if c.settings.micro_batch == 8]
    assert some
    assert 0 < some[0].settings.layers < LAYERS


def test_a_batch_in_one_pass_has_no_gradients_that_wait():
    """It needs less than its parts one after the other, where gradients are most of the memory."""
    length = 32
    predictor = Predictor(Shapes(config_of(), length), CARDS["h200"], "cpu")
    policy = {"recompute": "full", "layers": LAYERS}
    settings = replace(BASE, sequence=length, micro_batch=2, chunk=64, **policy)
    peak = predictor.predict(settings).peak_bytes
    parts = replace(settings, micro_batch=1, accumulation=2)
    assert predictor.predict(parts).peak_bytes > peak
    training_plan = plan(
        config_of(),
        peak,
        1,
        2,
        length,
        device="cpu",
        space=replace(SMALL, policies=("full",)),
        headroom=0,
        limits=False,
        optimizer="adamw_loop",
    )
    best = training_plan.best.settings
    assert (best.micro_batch, best.accumulation) == (2, 1)


def test_a_batch_that_is_no_power_of_two_is_tried_in_one_pass():
    training_plan = plan(
        config_of(), "64MiB", 1, 3, 32, device="cpu", space=SMALL, headroom=0, limits=False
    )
    assert (training_plan.best.settings.micro_batch, training_plan.best.settings.accumulation) == (
        3,
        1,
    )


def test_refuses_with_the_nearest():
    with pytest.raises(PlanError, match=r"nothing fits into 2\.0 MiB.*nearest plan") as raised:
        plan(config_of(), "2MiB", 1, 2, LENGTH, device="cpu", space=SMALL, headroom=0)
    nearest = raised.value.nearest
    assert nearest.peak_bytes > 2 * 2**20
    assert nearest.peak_bytes == min(c.peak_bytes for c in raised.value.plan.candidates)
    assert "Nothing fits" in str(raised.value.plan)


# --- few simulations ---


@pytest.mark.parametrize("changes", [{"chunk": LENGTH}, {"offload_activations": True}], ids=str)
def test_nonlinear_sizes_are_simulated(changes):
    settings = replace(BASE, **changes)
    some = Predictor(Shapes(config_of(), LENGTH), CARDS["h200"])
    counts = []
    for n in (4, 6, 16):
        some.predict(replace(settings, micro_batch=n))
        counts.append(some.simulations)
    assert counts[0] < counts[1] < counts[2]


def test_cached_operator_results(monkeypatch):
    settings = replace(BASE, precision="amp")
    monkeypatch.setattr(simulation, "_ANSWERS", {})
    first, again = (
        Predictor(Shapes(config_of(), LENGTH), CARDS["h200"]).predict(settings) for _ in range(2)
    )
    assert simulation._ANSWERS
    monkeypatch.setattr(simulation, "_MOST_ANSWERS", 0)
    monkeypatch.setattr(simulation, "_ANSWERS", {})
    asked = Predictor(Shapes(config_of(), LENGTH), CARDS["h200"]).predict(settings)
    assert not simulation._ANSWERS
    assert first == again == asked


def test_simulated_results_of_views_and_scalars(monkeypatch):
    monkeypatch.setattr(simulation, "_ANSWERS", {})
    x = torch.empty(4, 6, device="meta")
    view = torch.ops.aten.view.default
    for _ in range(2):
        result = simulation.run_on_meta(view, (x, [6, 4]), {})
        assert result.untyped_storage()._cdata == x.untyped_storage()._cdata
    add = torch.ops.aten.add.Tensor
    dtypes = [simulation.run_on_meta(add, (x, n), {}).dtype for n in (1, 1.0, True)]
    ints = torch.empty(2, device="meta", dtype=torch.int64)
    assert dtypes == [torch.float32] * 3
    assert simulation.run_on_meta(add, (ints, 1), {}).dtype == torch.int64
    assert simulation.run_on_meta(add, (ints, 1.0), {}).dtype == torch.float32, "1 == 1.0"


# --- positions and ties ---


@pytest.mark.slow
def test_positions_cap_the_longest_sequence():
    """A plan proposed a sequence of 6,068,224 tokens for a model with 32,768 positions."""
    config = config_of()
    config.max_position_embeddings = 1000
    options = {"device": "cpu", "space": SMALL, "headroom": 0, "optimizer": "adamw_loop"}
    training_plan = plan(config, "1GiB", 1, 2, LENGTH, **options)
    assert training_plan.longest_sequence == training_plan.most_sequence == 1000
    assert any("max_position_embeddings: 1,000" in note for note in training_plan.notes)
    training_plan = plan(config, "1GiB", 1, 1, 1100, **options, limits=False)
    assert "has 1,000 positions" in training_plan.notes[0], "what was asked for is not cut"
    assert training_plan.best.settings.sequence == 1100


def test_rank_of_equal_times():
    def one(precision, relative, fits=True):
        settings = replace(BASE, precision=precision)
        return Candidate(settings, 100, {}, relative, relative, fits=fits)

    some = [
        one("bf16", 1.0),
        one("amp", 1.001),
        one("fp32", 1.3),
        one("bf16", 1.3),
        one("bf16", 9.0, False),
    ]
    order = [c.settings.precision for c in sorted(some, key=search._rank_shown)]
    assert order == ["amp", "bf16", "fp32", "bf16", "bf16"]


# --- files ---


def written(tmp_path, **changes):
    chosen = Candidate(replace(BASE, **changes), 10)
    devices = chosen.settings.data * chosen.settings.tensor
    one = TrainingPlan("llama", 5, "card", 100, 90, devices, None, [chosen], compression=True)
    one.layer_class, one.vocabulary = "LlamaDecoderLayer", 1999
    return {path.name: path for path in one.write(tmp_path)}, chosen.settings


SPREADS = [
    {"precision": "amp"},
    {"precision": "fp16", "spread": "ddp", "data": 4},
    {"precision": "bf16", "spread": "fsdp2", "data": 4, "offload_states": "cpu"},
    {"precision": "amp", "spread": "zero3", "data": 4},
    {"precision": "fp16", "spread": "zero2", "data": 2, "offload_states": "cpu"},
    {"precision": "bf16", "spread": "fsdp2", "data": 2, "tensor": 2},
]


@pytest.mark.parametrize("changes", SPREADS, ids=lambda c: "-".join(map(str, c.values())))
def test_written_files_load(tmp_path, changes):
    files, settings = written(tmp_path, **changes)
    assert load(files["plan.yaml"]) == settings
    assert configuration.load(files["liger_multi.yaml"]).chunk_bytes >= 64 * 1999 * 2
    pytest.importorskip("accelerate")
    from accelerate.commands.config.config_args import load_config_from_file

    kwargs = json.loads(files["training_arguments.json"].read_text())
    kwargs["output_dir"] = str(tmp_path / "out")
    if kwargs["bf16"] or kwargs["fp16"]:
        kwargs["use_cpu"] = True  # where this is tested
    shell = ["bash", "-c", f"source {files['environment.sh']}; echo $PYTORCH_CUDA_ALLOC_CONF"]
    assert subprocess.check_output(shell, text=True) == "expandable_segments:True\n"
    arguments = transformers.TrainingArguments(**kwargs)
    assert arguments.per_device_train_batch_size == settings.micro_batch
    accelerate_config = load_config_from_file(str(files["accelerate.yaml"]))
    assert accelerate_config.num_processes == settings.data * settings.tensor
    distributed_types = {
        "fsdp2": "FSDP",
        "zero2": "DEEPSPEED",
        "zero3": "DEEPSPEED",
        "ddp": "MULTI_GPU",
    }
    assert str(accelerate_config.distributed_type.value) == distributed_types.get(
        settings.spread, "NO"
    )
    if settings.spread == "fsdp2":
        assert accelerate_config.fsdp_config["fsdp_version"] == 2
        assert accelerate_config.fsdp_config["fsdp_offload_params"] == bool(settings.offload_states)
    assert ("deepspeed.json" in files) == settings.spread.startswith("zero")


@pytest.mark.parametrize("changes", [c for c in SPREADS if "zero" in str(c)], ids=str)
def test_deepspeed_takes_its_file(changes):
    config = pytest.importorskip("deepspeed.runtime.config")
    settings = replace(BASE, **changes)
    data = deepspeed(settings, settings.data, compression=True)
    one = {**data, "train_batch_size": settings.micro_batch}  # of this process
    loaded = config.DeepSpeedConfig(one)
    assert loaded.zero_config.stage == settings.level
    assert loaded.zero_config.zero_quantized_weights == (settings.level == 3)


def test_compression_is_offered_by_name():
    settings = replace(BASE, spread="zero3", data=4, precision="amp")
    plain, asked = (deepspeed(settings, 4, c)["zero_optimization"] for c in (False, True))
    assert "zero_quantized_weights" not in plain
    assert asked["zero_quantized_gradients"]
    assert asked["zero_hpz_partition_size"] == 4


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("settings: {layer: 3}\nversion: 1", "did you mean 'layers'"),
        ("settings: {layers: many}\nversion: 1", "layers in .* must be int, got 'many'"),
        ("settings: {spread: zero4}\nversion: 1", "unknown spread"),
        ("settings: {}\nversion: 7", "has version 7, this is 1"),
        ("settings: {}\nversions: 1", "did you mean 'version'"),
        ("- 1", "no mapping of settings"),
        ("a: [", "is not YAML"),
    ],
)
def test_wrong_files(tmp_path, content, message):
    path = tmp_path / "plan.yaml"
    path.write_text(content)
    with pytest.raises(ConfigurationError, match=message):
        load(path)


# --- applied ---


def test_applied_and_taken_back():
    model = model_of(layers=3)
    before, classes = copy.deepcopy(model.state_dict()), [type(m) for m in model.modules()]
    ids = torch.randint(1999, (2, LENGTH))
    model(input_ids=ids, labels=ids).loss.backward()
    stock = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    settings = replace(BASE, recompute="full", layers=2, tiles=3, attention="eager")
    handle = apply(settings, model)
    assert model.config._attn_implementation == "eager"
    assert len(handle.done) == 4
    assert list(model.state_dict()) == list(before), "names stay"
    model(input_ids=ids, labels=ids).loss.backward()
    assert_same_gradients([p.grad for p in model.parameters()], stock)
    handle.undo()
    handle.undo()
    assert [type(m) for m in model.modules()] == classes
    assert not any("forward" in m.__dict__ for m in model.modules())
    assert model.config._attn_implementation == "sdpa"
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_failed_apply_restores_model():
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="no list of layers"):
        apply(replace(BASE, patched=False, tiles=2), model)
    with pytest.raises(TypeError, match="expected a Plan, a Candidate or Settings, got str"):
        apply("plan.yaml", model)


class _Coded(nn.Module):
    """A frozen linear layer of 8 bits, dequantized for every GEMM."""

    def __init__(self, layer):
        super().__init__()
        self.out_features, self.in_features = layer.weight.shape
        self.weight = nn.Parameter(
            torch.zeros(layer.weight.shape, dtype=torch.int8), requires_grad=False
        )

    def forward(self, x):
        return _CodedProduct.apply(x, self.weight)


class _CodedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.weight = weight
        return x @ weight.to(x.dtype).T

    @staticmethod
    def backward(ctx, dy):
        return dy @ ctx.weight.to(dy.dtype), None


def test_frozen_heads_of_few_bits():
    model = model_of()
    model.lm_head = _Coded(model.lm_head)
    shapes = Shapes(model, LENGTH)
    assert shapes.quantized == 1999 * 96
    predicted = Predictor(shapes, CARDS["h200"], "cpu").predict(
        replace(BASE, patched=False, chunk=None)
    )
    measured_bytes = measured(replace(BASE, patched=False, chunk=None), model)
    assert predicted.peak_bytes == pytest.approx(measured_bytes, rel=0.1)
    assert type(model.lm_head) is _Coded, "left alone"


# --- cards, times, words ---


def test_cards():
    assert card_of("h200")[0].name == "NVIDIA H200"
    assert card_of("H200:24GiB")[1] == 24 * 2**30
    card, size = card_of("24GiB")
    assert (card.guessed, size, card.name) == (True, 24 * 2**30, "NVIDIA L4")
    with pytest.raises(ValueError, match=r"did you mean 'h200'.*or a size"):
        card_of("h20")
    with pytest.raises(ValueError, match="byte count in memory"):
        card_of("24furlongs")


def test_times_grow_with_what_is_done():
    card, work = CARDS["h200"], Work({2: 1e15}, 1e9, 10)
    plain = step_seconds(work, 0, Traffic(), card)
    assert plain == pytest.approx(1e15 / (0.65 * 989e12) + 1e9 / (0.8 * 4.8e12))
    assert step_seconds(Work({4: 1e15}), 0, Traffic(), card) > 10 * plain
    assert step_seconds(work, 1e12, Traffic(), card) > plain
    assert step_seconds(work, 0, Traffic(overlapped=1e9), card) == plain, "hidden"
    assert step_seconds(work, 0, Traffic(waited=1e12), card) > plain
    assert step_seconds(work, 0, Traffic(host=1e12), card) > plain
    assert step_seconds(work, 0, Traffic(), card, 4) == pytest.approx(4 * plain)
    assert step_seconds(Work({}, 0, 1e6), 0, Traffic(), card) == pytest.approx(30)


def test_limits_are_searched_with_few_chunks():
    """A search over 65 536 short sequences, with chunks that fit two of them, did not end."""
    short = Settings(sequence=8, micro_batch=2, chunk=16)
    assert search._coarser(short) == short
    for long in (replace(short, micro_batch=65536), replace(short, sequence=10**6)):
        rows = long.micro_batch * long.sequence
        assert rows / search._coarser(long).chunk <= search.MOST_CHUNKS
    assert search._coarser(replace(short, chunk=None)).chunk is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"devices": 0}, "devices must be a positive integer, got 0"),
        (
            {"batch": 3, "devices": 2, "space": Space(layouts=((1, 1),))},
            "batch=3 cannot be divided over 2 devices",
        ),
        ({"precision": "fp4"}, "unknown precision 'fp4'"),
        ({"precision": "fp8", "memory": "a100-80gb"}, "FP8 GEMMs, got NVIDIA A100 80GB.*'bf16'"),
        ({"precision": "fp8", "memory": "v100"}, "FP8 GEMMs, got NVIDIA V100 SXM2.*'fp16'"),
        ({"precision": "fp8", "device": "cpu"}, "FP8 GEMMs, got device='cpu'"),
        ({"optimizer": "adam"}, "did you mean 'adamw'"),
        ({"headroom": 1}, "share from 0 to below 1, got 1"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ValueError, match=message):
        plan(config_of(), **{"memory": "24GiB", "sequence": 8, **options})


# --- FP8 ---

WIDE = Space(
    precisions=("bf16", "fp8"),
    policies=("none",),
    patched=(True,),
    offload=False,
    tiled=False,
    offload_states=(None,),
    layouts=((1, 1),),
)


def wide_config(layers=4):
    config = config_of(layers=layers)
    for name, value in {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "max_position_embeddings": 4096,
    }.items():
        setattr(config, name, value)
    return config


def ways(training_plan):
    return {
        c.settings.precision: c for c in training_plan.candidates if c.settings.micro_batch == 2
    }


def test_fp8_is_planned_and_estimated():
    """GEMMs at the FP8 rate outweigh the bytes that rounding moves; the peak equals estimate's."""
    training_plan = plan(wide_config(), "h200", batch=2, sequence=4096, space=WIDE, limits=False)
    by_precision = ways(training_plan)
    assert training_plan.best.settings.precision == "fp8"
    assert 0.65 < by_precision["fp8"].seconds / by_precision["bf16"].seconds < 0.95
    patched = {
        "linear_float8": True,
        "fused_linear_cross_entropy": {"chunk": by_precision["fp8"].settings.chunk},
    }
    estimated = estimate(
        wide_config(), 2, 4096, dtype="bfloat16", optimizer="adamw", patched=patched
    )
    assert by_precision["fp8"].peak_bytes == estimated.peak_bytes
    assert any("FP8" in note for note in training_plan.notes)
    assert "patched, fp8" in str(training_plan)


@pytest.mark.slow
def test_fp8_keeps_a_frozen_base_in_half_of_the_memory():
    peft = pytest.importorskip("peft")
    with torch.device("meta"):
        base = transformers.AutoModelForCausalLM.from_config(
            wide_config(3), dtype=torch.bfloat16
        ).train()
        model = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules="all-linear"))
    by_precision = ways(plan(model, "h200", batch=2, sequence=4096, space=WIDE, limits=False))
    assert by_precision["fp8"].seconds < by_precision["bf16"].seconds
    parts = {name: c.parts["parameters"] for name, c in by_precision.items()}
    assert parts["fp8"] < 0.56 * parts["bf16"]
    # what the plan applies, and what that holds
    with apply(by_precision["fp8"], model):
        parameter_bytes = sum(t.nbytes for p in model.parameters() for t in stored(p))
    standing = sum(b.nbytes for b in model.buffers())
    assert parameter_bytes <= parts["fp8"] <= parameter_bytes + standing
    assert not any(hasattr(p, "codes") for p in model.parameters())


def test_fp8_of_several_devices():
    """Divided layers stay in 16 bits, and engines with fp32 copies have no such precision."""
    space = replace(WIDE, layouts=None)
    training_plan = plan(
        wide_config(),
        "h200",
        2,
        batch=2,
        sequence=128,
        space=replace(space, precisions=("fp8",)),
        limits=False,
    )
    assert {c.settings.tensor for c in training_plan.candidates} == {1}
    assert {c.settings.spread for c in training_plan.candidates} <= {"none", "ddp", "fsdp2"}
    assert {"ddp", "fsdp2"} <= {c.settings.spread for c in training_plan.candidates}


@pytest.mark.slow
def test_the_command(tmp_path, capsys):
    config_of(layers=4).save_pretrained(tmp_path)
    argv = [
        "plan",
        str(tmp_path),
        "--gpu",
        "80MiB",
        "--seq",
        "64",
        "--batch",
        "1",
        "--headroom",
        "0",
        "--precision",
        "bf16",
        "--no-limits",
        "--data-parallel",
    ]
    out = tmp_path / "files"
    assert main([*argv, "--write", str(out), "--picture", str(tmp_path / "plan.png")]) == 0
    captured = capsys.readouterr()
    assert "Ways, the fastest that fits first" in captured.out
    assert "plan.yaml" in captured.err
    assert load(out / "plan.yaml").sequence == 64
    configure(out / "liger_multi.yaml")
    configure(None)
    argv[3] = "1MiB"
    assert main([*argv, "--json"]) == 1
    captured = capsys.readouterr()
    assert "nothing fits" in captured.err
    assert not json.loads(captured.out)["candidates"][0]["fits"]
    assert main(["plan", "llama-3-8b", "--gpu", "h20"]) == 2


# --- execution ---

SETTINGS = Settings(sequence=64, micro_batch=2, chunk=64, recompute="full", layers=1)
CASE = Run("nothing", 64, 2, "1GiB")


def candidate(seconds, host=0):
    return Candidate(SETTINGS, 100, {}, seconds, host_bytes=host)


def test_a_row_of_executed_candidates(monkeypatch):
    """A failed candidate has no rank and does not stop the others."""
    measured = {"measured_bytes": 100, "measured_seconds": 2.0, "loss": 1.0}
    answers = iter([measured, {"failure": "out of memory"}])
    monkeypatch.setattr(plans.harness, "child", lambda *_, **__: next(answers))
    options = argparse.Namespace(most=2, steps=1, device="cpu")
    training_plan = SimpleNamespace(candidates=[1, 2, 3], fitting=[candidate(1.0), candidate(2.0)])
    row = plans.execute(CASE, training_plan, options)
    assert [run.get("failure") for run in row["runs"]] == [None, "out of memory"]
    assert row["runs"][0]["error_percent"] == 0
    assert row["order_agrees"]
    assert (row["ways"], row["fit"]) == (3, 2)


def test_which_candidates_are_executed():
    every = [candidate(float(i)) for i in range(9)]
    places = [int(one.seconds) for one in plans.chosen(every, 5)]
    assert places == [0, 8, 4, 2, 6]
    assert plans.chosen(every[:1], 5) == every[:1]
    assert plans.chosen([candidate(1.0), candidate(2.0, host=2**40)], 5) == [candidate(1.0)]
    assert plans.chosen([candidate(1.0, host=2**40)], 5) == []


def test_the_order_of_speeds():
    def run(*seconds):
        return {"predicted_seconds": seconds[0], "measured_seconds": seconds[1]}

    assert plans.in_order([run(1, 2), run(2, 3), run(2.05, 2.9), {"predicted_seconds": 1}])
    assert not plans.in_order([run(1, 2), run(2, 3), run(3, 2.5)])


@pytest.mark.slow
def test_a_candidate_trains_on_a_cpu(tmp_path):
    """Execution reaches the predicted peak, and applies all settings."""
    config = Small("dense", 2, 64).config()
    config.num_hidden_layers = 4
    config.save_pretrained(tmp_path)
    case = Run(str(tmp_path), 64, 2, "64MiB")
    predictor = Predictor(Shapes(case.config(), 64), CARDS["h200"], "cpu")
    one = predictor.predict(replace(SETTINGS, accumulation=2, tiles=2))
    result = executed(case, one.settings, 1, torch.device("cpu"))
    assert result["measured_bytes"] == pytest.approx(one.peak_bytes, rel=0.02)
    assert result["measured_seconds"] > 0
    assert 7 < result["loss"] < 8.5, "random weights, 1 999 classes"
