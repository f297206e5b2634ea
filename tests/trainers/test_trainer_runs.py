"""The table of trainers and how their runs are compared; the runs are `make test-trainers`."""

import json
import re
import subprocess
import sys
from dataclasses import replace

import pytest
import yaml

import tests.trainers.runs as table
from liger_multi import ops
from tests.trainers.runs import ROOT, Run, Trainer, driver, setting, trainers

STOCK = {(1, "loss"): 2.0, (1, "grad_norm"): 5.0, (2, "loss"): 1.0}


def test_trainer_table_is_consistent():
    for trainer in trainers().values():
        for run in trainer.runs.values():
            assert {*run.calls} <= {*ops.__all__}
            assert not run.resumes or run.resumes in trainer.runs
            used = re.findall(r"\{data\}/(\w+)", json.dumps({**trainer.options, **run.options}))
            assert {*used} <= {*setting.FORMATS}
        assert not {*trainer.not_run} & {*trainer.runs}


def test_curve_difference():
    ours = {**STOCK, (1, "grad_norm"): 5.0001}
    assert driver.difference(STOCK, ours) == pytest.approx(2e-5, rel=1e-3)
    with pytest.raises(driver.RunError, match=r"step 2, loss: 1\.0 and 1\.01"):
        driver.difference(STOCK, {**STOCK, (2, "loss"): 1.01})
    with pytest.raises(driver.RunError, match="without the switch"):
        driver.difference(STOCK, {k: v for k, v in STOCK.items() if k[0] == 1})
    with pytest.raises(driver.RunError, match="nothing to compare"):
        driver.difference({(1, "loss"): 0.0, (2, "loss"): 0.0}, {(1, "loss"): 0.0, (2, "loss"): 0})


def bench(tmp_path, monkeypatch, **trainer):
    """A bench whose runs start nothing and find the same numbers."""
    started = []
    monkeypatch.setattr(driver.Bench, "_started", lambda _, command, log: started.append(command))
    monkeypatch.setattr(driver, "curve", lambda _: STOCK)
    row = Trainer(install=(), switch={"use_it": True}, runs={}, **trainer)
    return driver.Bench("python", row, tmp_path), started


def test_switch_is_on_in_second_run_only(tmp_path, monkeypatch):
    runner, started = bench(tmp_path, monkeypatch, options={"model": "{model}", "many": [1, 2]})
    run = Run("some.module", calls=("rope",), arguments=("train",), options={"out": "{out}"})
    calls = tmp_path / "runs" / "a" / "with.calls.json"
    calls.parent.mkdir(parents=True)
    calls.write_text('{"rope": 3}')
    kept = driver.compared(runner, "a", run)
    assert kept == {
        "steps": 2,
        "logged": ["grad_norm", "loss"],
        "first": 2.0,
        "last": 1.0,
        "difference": 0.0,
        "calls": {"rope": 3},
    }
    _, stock, ours = started
    assert stock[:4] == ["tests.trainers.runs.launch", "-", "some.module", "train"]
    assert ours[:4] == ["tests.trainers.runs.launch", str(calls), "some.module", "train"]
    args = ["--model", f"{tmp_path}/model", "--many", "1", "2", "--out"]
    assert stock[4:] == [*args, f"{tmp_path}/runs/a/stock"]
    assert ours[4:] == [*args, f"{tmp_path}/runs/a/with", "--use_it", "True"]
    with pytest.raises(driver.RunError, match="rms_norm never called; called were rope"):
        driver.compared(runner, "a", replace(run, calls=("rms_norm", "rope")))


@pytest.mark.slow
def test_launch_serves_names_and_counts_calls(tmp_path):
    (tmp_path / "toy.py").write_text(
        "import sys, torch\n"
        "from liger_kernel.transformers.functional import liger_softmax\n"
        "assert sys.argv[1:] == ['--x', '1']\n"
        "liger_softmax(torch.ones(2, 3))\n"
    )
    command = [sys.executable, "-m", "tests.trainers.runs.launch", "calls.json", "toy", "--x", "1"]
    path = f"{ROOT}:{tmp_path}"
    subprocess.run(command, check=True, cwd=tmp_path, env={"PYTHONPATH": path, "RANK": "1"})
    assert not (tmp_path / "calls.json").exists()
    subprocess.run(command, check=True, cwd=tmp_path, env={"PYTHONPATH": path})
    assert json.loads((tmp_path / "calls.json").read_text()) == {"softmax": 1}


def test_results_cover_table():
    """What the page shows is of today's table."""
    kept = json.loads(table.RESULTS.read_text(encoding="utf-8"))
    assert {n: [*t.runs] for n, t in trainers().items() if t.runs} == {
        n: [*kept[n]["runs"]] for n in trainers() if n in kept
    }


def test_resumed_run_is_compared_after_checkpoint():
    ours = {(2, "loss"): 1.0}
    assert driver.continued(STOCK, ours) == ours
    with pytest.raises(driver.RunError, match="resumed at step 1, which is the first"):
        driver.continued(STOCK, STOCK)


def test_workflow_matrix_covers_trainers():
    jobs = yaml.safe_load((ROOT / ".github/workflows/update.yml").read_text(encoding="utf-8"))
    matrix = jobs["jobs"]["trainers"]["strategy"]["matrix"]["trainer"]
    assert matrix == [name for name, trainer in trainers().items() if trainer.runs]
