"""Patched models learn as stock ones do, and the bounds that say so find bugs."""

import json
import math

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("tokenizers")

from benchmarks import convergence, store

RUNS = store.read("convergence")
CPU = torch.device("cpu")
SHARE = ("llama", "gemma2", "qwen3_moe", "glm4")  # norms, offsets, experts, packed layers


def trained(case, providers):
    ids = convergence.text(case)
    found = {provider: convergence.train(case, provider, ids, CPU) for provider in providers}
    return {"dtype": case.dtype, "curves": found}


def made(shift, controls=(1e-4, 2e-4), steps=40):
    """Curves that fall, where another one is off by ``shift(step)``, relative."""
    stock = [5 - 0.05 * step for step in range(steps)]

    def curve(off):
        values = [x * (1 + off(step)) for step, x in enumerate(stock)]
        return {"loss": values, "gradient_norm": values}

    found = {"stock": curve(lambda _: 0.0), "ours": curve(shift)}
    for number, size in enumerate(controls):
        found[f"control-{number + 1}"] = curve(lambda step, size=size: size * (-1) ** step)
    return {"dtype": "bfloat16", "curves": found}


def test_curve_as_near_as_controls_is_within_bounds():
    found = convergence.judge(made(lambda step: 3.9 * 2e-4 * (-1) ** step))
    assert found.good
    assert found.beyond is None
    assert found.shares["loss"] == pytest.approx(3.9 / 4, rel=0.01)


@pytest.mark.parametrize(
    ("shift", "beyond"),
    [
        (lambda step: 4.1 * 2e-4, 10),
        (lambda step: 1e-2 * (step > 19), 21),
        (lambda step: math.nan if step == 29 else 0.0, 30),
    ],
    ids=["farther", "later", "nan"],
)
def test_curve_that_leaves_is_found(shift, beyond):
    found = convergence.judge(made(shift))
    assert not found.good
    assert found.beyond == beyond


def test_end_elsewhere_is_found_where_controls_are_chaotic():
    found = convergence.judge(made(lambda step: 0.011, controls=(0.1,)))
    assert found.beyond is None
    assert found.final == pytest.approx(0.011)
    assert not found.good


def test_ours_is_within_bounds_and_a_wrong_gradient_is_not(tmp_path):
    case = convergence.Case("llama", "float32", 2, 24, 14)
    row = trained(case, ("stock", "control-1", "control-2", "ours", "bug-gradient"))
    assert convergence.judge(row).good
    assert not convergence.judge(row, "bug-gradient").good
    row |= {"model": "llama", "steps": case.steps}
    data = {"kind": "convergence", "date": store.now(), "device": {"name": "cpu"}}
    data |= {"batch": case.batch, "tokens": case.tokens}
    (path,) = store.add([{**data, "rows": [row]}], tmp_path)
    given = ["--of", str(path), "--draw", str(tmp_path / "curves.png")]
    assert store.newest_of("convergence", path)["rows"] == json.loads(json.dumps([row]))
    assert convergence.main(given) == 0
    assert (tmp_path / "curves.png").stat().st_size > 10_000


@pytest.mark.parametrize("run", RUNS, ids=[store.card(run) for run in RUNS])
def test_committed_curves_are_within_bounds(run):
    for row in run["rows"]:
        found = convergence.judge(row)
        assert found.good, f"{row['model']} {row['dtype']}: {found}"
        assert row["steps"] >= 100


def test_ten_architectures_are_committed():
    rows = [row for run in RUNS if store.card(run) == "cpu" for row in run["rows"]]
    for dtype in ("float32", "bfloat16"):
        assert len({row["model"] for row in rows if row["dtype"] == dtype}) >= 10


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", SHARE)
def test_curves_stay_within_bounds(model, dtype):
    case = convergence.Case(model, dtype, 4, 32, 120)
    row = trained(case, ("stock", "control-1", "control-2", "ours"))
    found = convergence.judge(row)
    assert found.good, found
    losses = row["curves"]["ours"]["loss"]
    assert losses[-1] < losses[0] - 0.5  # it has learnt


@pytest.mark.slow
@pytest.mark.parametrize("bug", convergence.BUGS)
def test_bugs_are_beyond_the_bounds(bug):
    case = convergence.Case("llama", "float32", 4, 32, 40)
    row = trained(case, ("stock", "control-1", "control-2", bug))
    assert not convergence.judge(row, bug).good
