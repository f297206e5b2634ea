"""Limits and rank of candidates: sizes with units, the host's memory, order."""

import contextlib
import json
from dataclasses import replace

import pytest
import torch

pytest.importorskip("transformers")

from benchmarks.memory import Case
from liger_multi.cli.main import main
from liger_multi.dispatch.config import parse_bytes
from liger_multi.errors import ConfigurationError, PlanError
from liger_multi.memory import Settings, Space, TrainingPlan, plan
from liger_multi.memory.planning import Candidate, cost, passes
from liger_multi.memory.planning.cost import CARDS, card_of
from liger_multi.memory.planning.predict import Predictor
from liger_multi.memory.planning.result import plan_page
from liger_multi.memory.planning.shapes import Shapes

SIZES = {
    "24GB": 24 * 10**9,
    "24 gb": 24 * 10**9,
    "24G": 24 * 10**9,
    "80GB": 80 * 10**9,
    "24GiB": 24 * 2**30,
    "24Gi": 24 * 2**30,
    "1.5TB": 15 * 10**11,
    "512M": 512 * 10**6,
    "16kB": 16_000,
    "1TiB": 2**40,
}


def config_of(**changes):
    from transformers import LlamaConfig

    sizes = {
        "hidden_size": 64,
        "intermediate_size": 172,
        "num_hidden_layers": 4,
        "vocab_size": 512,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
    }
    return LlamaConfig(**{**sizes, **changes})


@pytest.mark.parametrize("text", SIZES)
def test_units_of_bytes(text):
    assert parse_bytes(text, "x") == SIZES[text]
    if SIZES[text] > 2**20:
        assert card_of(text)[1] == card_of(f"h100:{text}")[1] == SIZES[text]


@pytest.mark.parametrize("size", ["24", 24, "h100:24", "80", "4096"])
def test_a_size_without_its_unit_is_refused(size):
    with pytest.raises(ConfigurationError, match=r"is \d+ bytes; did you mean '\d+GiB' or '\d+GB'"):
        card_of(size)


def test_bytes_without_a_unit_that_are_a_size():
    assert card_of(24 * 2**30)[1] == card_of(str(24 * 2**30))[1] == 24 * 2**30


@pytest.mark.parametrize("option", ["--gpu", "--host-memory"])
def test_the_command_refuses_a_size_without_its_unit(capsys, option):
    sizes = {"--gpu": "24GB", option: "24"}
    argv = [word for pair in sizes.items() for word in pair]
    assert main(["plan", "qwen2-0.5b", *argv]) == 2
    assert "'24GiB' or '24GB'" in capsys.readouterr().err


def test_an_estimate_refuses_a_capacity_without_its_unit(capsys):
    assert main(["estimate", "qwen2-0.5b", "--capacity", "24"]) == 2
    assert "'24GiB' or '24GB'" in capsys.readouterr().err


# --- the host's memory ---


def test_the_memory_of_this_host(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert cost.host_bytes(None) == 128 * 2**30
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    monkeypatch.setattr(cost, "CONTAINER_LIMIT", tmp_path / "memory.max")
    machine_bytes = cost.host_bytes(None)
    (tmp_path / "memory.max").write_text("max\n")
    assert cost.host_bytes(None) == machine_bytes
    (tmp_path / "memory.max").write_text(f"{2**30}\n")
    assert cost.host_bytes(None) == 2**28
    assert cost.host_bytes("64GB") == 64 * 10**9
    with pytest.raises(ConfigurationError, match="'64GiB' or '64GB'"):
        cost.host_bytes("64")


SPACE = Space(
    precisions=("amp",), policies=("none",), patched=(True,), tiled=False, layouts=((1, 1),)
)


@pytest.fixture(scope="module")
def simulations(tmp_path_factory):
    """A cache folder for this file: simulations of one plan serve the next."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LIGER_MULTI_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def test_the_host_limits_what_is_offloaded():
    """Every candidate that fits stays within the memory of the device and of the host."""
    config = config_of(num_hidden_layers=2)
    wide = plan(config, "1GiB", 1, 32, 512, space=SPACE, limits=False)
    most = max(c.host_bytes for c in wide.fitting)
    assert most > 2**21
    narrow = plan(config, "1GiB", 1, 32, 512, space=SPACE, limits=False, host_memory=most // 2)
    assert all(c.host_bytes <= narrow.host_memory_bytes < most // 2 for c in narrow.fitting)
    assert narrow.fitting
    assert any(c.host_bytes for c in narrow.fitting), "fewer sequences at a time are kept there"
    assert narrow.nearest.host_bytes <= narrow.host_memory_bytes


def test_host_memory_limits_fit():
    space = replace(SPACE, offload=False, offload_states=("cpu",))
    training_plan = plan(config_of(), "1GiB", 1, 4, 512, space=space, limits=False)
    assert training_plan.best.host_bytes > 2**21
    with pytest.raises(PlanError, match=r"MiB of the host for each device.* MiB on the host"):
        plan(config_of(), "1GiB", 1, 4, 512, space=space, limits=False, host_memory="2MiB")


def test_states_on_a_disk_take_no_memory_of_the_host():
    space = replace(SPACE, offload=False, offload_states=("nvme",))
    training_plan = plan(
        config_of(), "1GiB", 1, 4, 512, space=space, limits=False, host_memory="2MiB"
    )
    assert training_plan.best.host_bytes == 0


def test_the_table_shows_the_hosts_memory(capsys, tmp_path, simulations):
    config_of().save_pretrained(tmp_path)
    argv = [
        "plan",
        str(tmp_path),
        "--gpu",
        "1GB",
        "--batch",
        "1",
        "--seq",
        "64",
        "--no-limits",
        "--data-parallel",
        "--precision",
        "bf16",
    ]
    assert main([*argv, "--host-memory", "64MB", "--headroom", "0"]) == 0
    output = capsys.readouterr().out
    header = next(line for line in output.splitlines() if line.strip().startswith("way"))
    assert "on the host" in header
    assert "may be used of the host, each  61.0 MiB" in output
    assert main([*argv, "--host-memory", "64MB", "--headroom", "0", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["host_memory_bytes"] == 64 * 10**6


# --- what ranks first ---


@pytest.mark.parametrize(
    ("precisions", "devices", "optimizer"),
    [
        (("amp",), 1, "adamw"),
        (("bf16", "amp", "fp32"), 4, "adamw"),
        (("fp16", "fp32"), 1, "sgd"),
        (("amp", "bf16"), 4, "sgd"),
    ],
)
def test_offloaded_states_rank_lower(simulations, precisions, devices, optimizer):
    space = replace(SPACE, precisions=precisions, policies=("none", "full"))
    training_plan = plan(
        config_of(),
        "24GB",
        devices,
        None,
        512,
        space=space,
        limits=False,
        optimizer=optimizer,
        cache=True,
    )
    places = {}
    for place, one in enumerate(training_plan.fitting):
        s = one.settings
        places[replace(s, micro_batch=1, layers=bool(s.layers), chunk=None)] = place
    moved = [way for way in places if way.offload_states]
    assert moved
    for way in moved:
        assert places[replace(way, offload_states=None)] < places[way], way
    shown = [one.relative for one in training_plan.fitting]
    assert shown[0] == pytest.approx(1, abs=0.006)
    assert [round(x, 2) for x in shown] == sorted(round(x, 2) for x in shown)


@pytest.mark.parametrize("precisions", [("bf16", "amp", "fp32"), ("amp",), ("fp16",)])
def test_a_small_model_is_not_sharded(simulations, precisions):
    space = replace(SPACE, precisions=precisions)
    training_plan = plan(config_of(), "24GB", 4, None, 512, space=space, limits=False, cache=True)
    assert training_plan.best.settings.spread == "ddp"
    assert training_plan.best.settings.offload_states is None


def test_a_large_model_is_sharded():
    space = replace(SPACE, spreads=("ddp", "zero1", "zero3"), offload=False)
    training_plan = plan(config_of(), "16MiB", 4, 4, 64, space=space, limits=False, device="cpu")
    assert {c.settings.spread for c in training_plan.fitting} >= {"zero1", "zero3"}


def test_page_without_offloading():
    space = replace(SPACE, offload=False, offload_states=(None,))
    training_plan = plan(config_of(), "1GiB", 1, 4, 512, space=space, limits=False)
    assert {row[4] for row in plan_page(training_plan).sections[1].rows} == {"-"}


def test_picture_labels_fit(tmp_path, monkeypatch):
    """Labels of the longest candidates and of the axis lie within the picture."""
    pictures = pytest.importorskip("liger_multi.pictures")
    pytest.importorskip("matplotlib")
    labels = []

    @contextlib.contextmanager
    def watched(*args, **options):
        with pictures.figure(*args, **options) as figure:
            yield figure
            figure.draw_without_rendering()
            (axis,) = figure.axes
            for label in (axis.xaxis.label, *axis.get_yticklabels(), axis.title):
                box = label.get_window_extent()
                labels.append(label.get_text())
                assert box.x0 >= 0, label
                assert box.x1 <= figure.bbox.x1, label
                assert box.y0 >= 0, label

    monkeypatch.setattr("liger_multi.memory.planning.result.figure", watched)
    way = Settings(
        recompute="norms_and_mlp",
        layers=80,
        tiles=16,
        offload_activations=True,
        spread="fsdp2",
        offload_states="cpu",
        tensor=4,
        pipeline=4,
        data=64,
        micro_batch=32,
        accumulation=64,
    )
    ways = [Candidate(replace(way, data=n), 2**36, {"parameters": 2**36}) for n in range(1, 13)]
    training_plan = TrainingPlan("llama", 80, "card", 2**36, 2**36, 64, None, ways)
    training_plan.draw(tmp_path / "plan.png")
    assert any("DP 12" in text for text in labels), "the end of a way is there"
    assert any("dashed: the budget" in text for text in labels)


# Passes of all candidates are derived from few simulations, and equal simulated ones.


LENGTH = 128
BASE = Settings(sequence=LENGTH, precision="bf16", chunk=16 * LENGTH)
STOCK = {"patched": False, "chunk": None}


def config_for_passes(model_name="dense", layers=5, **changes):
    config = Case(model_name, 2, LENGTH).config()
    data = {name: value for name, value in config.to_dict().items() if name != "layer_types"}
    return type(config)(**{**data, "num_hidden_layers": layers, **changes})


def predictor_of(config):
    return Predictor(Shapes(config, LENGTH), CARDS["h200"])


def same(actual, expected):
    assert (actual.peak_bytes, actual.parts, actual.host_bytes) == (
        expected.peak_bytes,
        expected.parts,
        expected.host_bytes,
    )
    assert actual.seconds == pytest.approx(expected.seconds, rel=1e-12)


@pytest.fixture
def simulate_all(monkeypatch):
    """Nothing is derived, and every head is simulated with its own layers."""

    def start(predictor):
        simulated = predictor.passes
        monkeypatch.setattr(
            simulated,
            "_trace",
            lambda settings, recompute: passes.Trace(
                *simulated._simulate(settings, recompute, simulated.shapes.depth)
            ),
        )
        return predictor

    return start


# --- layers and heads ---

WAYS = {
    "plain": {},
    "autocast": {"precision": "amp"},
    "stock": STOCK,
    "recomputed": {"recompute": "norms_and_mlp", "layers": 2},
    "recomputed, autocast": {"recompute": "keep_attention", "layers": 3, "precision": "amp"},
    "recomputed, stock": {"recompute": "full", "layers": 5, "precision": "amp", **STOCK},
    "tiles": {"tiles": 2},
    "offloaded": {"offload_activations": True},
}


@pytest.mark.parametrize("model_name", ["dense", "moe", "tied"])
@pytest.mark.parametrize("way", WAYS)
def test_derived_passes_equal_simulated(simulate_all, model_name, way):
    """Other numbers of sequences and other chunks, derived from simulated layers."""
    if model_name == "moe" and way == "tiles":
        pytest.skip("experts do not run in tiles")
    settings = replace(BASE, **WAYS[way])
    some, every = (
        predictor_of(config_for_passes(model_name)),
        simulate_all(predictor_of(config_for_passes(model_name))),
    )
    for micro in (1, 4, 12, 16):
        some.predict(replace(settings, micro_batch=micro))
    for micro in (8, 16):
        same(*(p.predict(replace(settings, micro_batch=micro)) for p in (some, every)))
    before = some.simulations
    if settings.patched:
        for micro, chunk in ((1, 64), (4, LENGTH), (8, 3 * LENGTH)):
            few = replace(settings, micro_batch=micro, chunk=chunk)
            same(some.predict(few), every.predict(few))
        assert some.simulations <= before + 6, "a head for each, of one layer"


@pytest.mark.parametrize("changes", [{}, {"precision": "amp"}, STOCK, {"recompute": "full"}])
def test_tensor_parallelism_between_two_degrees(simulate_all, changes):
    config = config_for_passes(num_attention_heads=16, num_key_value_heads=16, head_dim=8)
    settings = replace(BASE, micro_batch=2, layers=5 * ("recompute" in changes), **changes)
    some, every = predictor_of(config), simulate_all(predictor_of(config))
    some.passes.tensors = (1, 8)
    some.predict(settings)
    some.predict(replace(settings, tensor=8))
    before = some.simulations
    for tensor in (2, 4):
        one = replace(settings, tensor=tensor)
        same(some.predict(one), every.predict(one))
    assert some.simulations == before


def test_unlike_tensor_parallel_passes_are_simulated(simulate_all):
    """With one key head per device, PyTorch's fp32 attention needs no copies."""
    config = config_for_passes(num_attention_heads=16, num_key_value_heads=8, head_dim=8)
    settings = replace(BASE, micro_batch=2, precision="fp32")
    some, every = predictor_of(config), simulate_all(predictor_of(config))
    some.passes.tensors = (1, 8)
    for tensor in (1, 2, 4, 8):
        one = replace(settings, tensor=tensor)
        same(some.predict(one), every.predict(one))
    assert some.simulations >= 4


@pytest.mark.parametrize("policy", ["full", "norms_and_mlp", "keep_attention"])
def test_casts_freed_after_forward(policy):
    """Only those of the simulated layers were freed; the others stayed until backward."""
    settings = replace(BASE, micro_batch=2, precision="amp", recompute=policy, layers=12)
    short, full = (predictor_of(config_for_passes(layers=12)) for _ in range(2))
    full.shapes.facts.uniform = False
    same(short.predict(settings), full.predict(settings))
    assert len(short.traces(settings)[0].body.layers) == 3


def test_recomputed_layer_work():
    """Its sums were taken for sums of gradients: GPT-2 under autocast raised a CheckpointError."""
    from transformers import GPT2Config

    sizes = {"n_layer": 4, "n_embd": 64, "n_head": 4, "vocab_size": 1000}
    config = GPT2Config(**sizes, bos_token_id=None, eos_token_id=None)
    predictor = predictor_of(config)
    plain = predictor.predict(replace(BASE, micro_batch=4, precision="amp"))
    for policy in ("norms", "norms_and_mlp", "keep_attention"):
        settings = replace(BASE, micro_batch=4, precision="amp", recompute=policy, layers=4)
        assert predictor.predict(settings).peak_bytes < plain.peak_bytes


# --- number of simulations ---


@pytest.mark.parametrize(
    ("layers", "options", "most"),
    [
        (2, {"memory": "80MiB", "sequence": 64}, 84),
        pytest.param(2, {"memory": "24GiB", "sequence": 64}, 70, marks=pytest.mark.slow),
        pytest.param(
            6,
            {"memory": "200MiB", "sequence": 128, "devices": 4, "limits": False},
            90,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_plan_needs_few_simulations(layers, options, most):
    """There were 125, 67 and 114 before layers and heads were simulated separately."""
    config = config_for_passes(
        layers=layers, num_attention_heads=8, num_key_value_heads=8, head_dim=12
    )
    assert plan(config, **options).simulations <= most
