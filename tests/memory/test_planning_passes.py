"""Passes of all candidates are derived from few simulations, and equal simulated ones."""

from dataclasses import replace

import pytest

pytest.importorskip("transformers")

from benchmarks.memory import Case
from liger_multi.memory import Settings, plan
from liger_multi.memory.planning import passes
from liger_multi.memory.planning.cost import CARDS
from liger_multi.memory.planning.predict import Predictor
from liger_multi.memory.planning.shapes import Shapes

LENGTH = 128
BASE = Settings(sequence=LENGTH, precision="bf16", chunk=16 * LENGTH)
STOCK = {"patched": False, "chunk": None}


def config_of(model_name="dense", layers=5, **changes):
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
        predictor_of(config_of(model_name)),
        simulate_all(predictor_of(config_of(model_name))),
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
    config = config_of(num_attention_heads=16, num_key_value_heads=16, head_dim=8)
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
    config = config_of(num_attention_heads=16, num_key_value_heads=8, head_dim=8)
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
    short, full = (predictor_of(config_of(layers=12)) for _ in range(2))
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
    config = config_of(layers=layers, num_attention_heads=8, num_key_value_heads=8, head_dim=12)
    assert plan(config, **options).simulations <= most
