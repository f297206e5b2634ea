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
from tests.trainers.runs import ROOT, Run, Trainer, driver, launch, page, setting, trainers
from tests.trainers.runs import __main__ as command

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


def test_curve_is_longest_trainer_state(tmp_path):
    with pytest.raises(driver.RunError, match=r"no trainer_state\.json"):
        driver.curve(tmp_path)
    rows = [{"step": 1, "loss": 2.0, "epoch": 0.1}, {"step": 1, "eval_loss": 3.0}]
    for i, expected in enumerate((rows[:1], rows)):
        place = tmp_path / f"checkpoint-{i}"
        place.mkdir()
        (place / "trainer_state.json").write_text(json.dumps({"log_history": expected}))
    assert driver.curve(tmp_path) == {(1, "loss"): 2.0, (1, "eval_loss"): 3.0}


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


def test_resumed_run_starts_from_stock_run(tmp_path, monkeypatch):
    runner, started = bench(tmp_path, monkeypatch, written="yaml")
    calls = tmp_path / "runs" / "b-c" / "with.calls.json"
    calls.parent.mkdir(parents=True)
    calls.write_text("{}")
    driver.compared(runner, "b, c", Run("m", (), options={"from": "{before}/x"}, resumes="a"))
    assert len(started) == 2, "the setting and one run"
    (file,) = started[1][3:]
    expected = {"from": f"{tmp_path}/runs/a/stock/x", "use_it": True}
    assert yaml.safe_load((tmp_path / "runs" / "b-c" / "with.yaml").read_text()) == expected
    assert file.endswith("with.yaml")


def test_failed_run_shows_log_tail(tmp_path, monkeypatch):
    monkeypatch.setattr(driver.Bench, "__init__", lambda *_: None)
    bench = driver.Bench()
    bench.python, bench.folder, bench.environment = (
        sys.executable,
        tmp_path,
        {"PYTHONPATH": str(ROOT)},
    )
    with pytest.raises(driver.RunError, match="No module named no_such_trainer"):
        bench._started(["no_such_trainer"], tmp_path / "log")


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


def test_probe_calls_are_not_counted():
    from tests.models import build

    calls = launch.Counter()
    model = build()
    stock = ops.rms_norm
    try:
        ops.rms_norm = launch.counted(calls, "rms_norm", stock)
        import liger_multi

        liger_multi.patch(model)
        assert calls["rms_norm"] == 0
        model(input_ids=setting_ids())
        assert calls["rms_norm"] == 5
    finally:
        ops.rms_norm = stock


def setting_ids():
    import torch

    return torch.tensor([[5, 6, 7]])


def test_dialogues_are_deterministic():
    assert setting.dialogues() == setting.dialogues()
    assert len({d["answer"] for d in setting.dialogues()}) > setting.ROWS / 2
    rewards = setting.reward(["ab", "abc", [{"content": "x"}]])
    assert len({*rewards}) > 1


def test_trainer_table_page(tmp_path, monkeypatch):
    kept = {
        "versions": {"trl": "1.2", "torch": "3.4"},
        "runs": {
            "SFT": {"date": "2026-01-01", "difference": 3e-7, "calls": {"rope": 8}},
            "DPO": {"date": "2026-01-02", "difference": 5e-6, "calls": {"rms_norm": 1, "rope": 8}},
        },
    }
    file = tmp_path / "trainers.json"
    file.write_text(json.dumps({"trl": kept}))
    row = Trainer(install=(), switch={}, runs={}, not_run={"GRPO": "no engine"})
    monkeypatch.setattr(page, "RESULTS", file)
    monkeypatch.setattr(page, "trainers", lambda: {"trl": row})
    text = page.page(f"a {page.START} old {page.END} b")
    assert text.startswith(f"a {page.START}\n")
    assert text.endswith(f"{page.END} b")
    assert "| trl 1.2 | torch 3.4 | SFT; DPO | 5e-06 | `rms_norm`, `rope` | 2026-01-02 |" in text
    assert "| trl | GRPO | no engine |" in text
    with pytest.raises(SystemExit, match=r"docs/trainers\.md needs"):
        page.page("without markers")


def test_results_cover_table():
    """What the page shows is of today's table."""
    kept = json.loads(table.RESULTS.read_text(encoding="utf-8"))
    assert {n: [*t.runs] for n, t in trainers().items() if t.runs} == {
        n: [*kept[n]["runs"]] for n in trainers() if n in kept
    }


def test_store_merges_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "RESULTS", tmp_path / "results.json")
    row = Trainer(install=(), switch={}, runs={n: Run("m", ()) for n in ("a", "b")})
    command.store("x", row, {"versions": 1, "runs": {"b": 1, "gone": 2}})
    command.store("x", row, {"versions": 2, "runs": {"a": 3}})
    kept = json.loads((tmp_path / "results.json").read_text())
    assert kept == {"x": {"versions": 2, "runs": {"a": 3, "b": 1}}}
    assert [*kept["x"]["runs"]] == ["a", "b"]


def test_stored_runs_have_a_clean_commit(monkeypatch, capsys):
    monkeypatch.setattr(command, "commit", lambda *paths: f"abc without {paths[0]}")
    assert command.provenance()["commit"] == "abc without tests/trainers/runs/results.json"
    monkeypatch.setattr(command, "commit", lambda *paths: "abc+")
    monkeypatch.setattr(sys, "argv", ["tests.trainers.runs", "trl", "--store"])
    monkeypatch.setattr(command, "ran", lambda *_: pytest.fail("it ran"))
    with pytest.raises(SystemExit):
        command.main()
    assert "there are changes on abc+" in capsys.readouterr().err
    comparison = {"steps": 4}
    monkeypatch.undo()
    monkeypatch.setattr(command, "environment", lambda *_: "python")
    monkeypatch.setattr(command, "Bench", lambda *_: None)
    monkeypatch.setattr(command, "compared", lambda *_: comparison)
    monkeypatch.setattr(command, "versions", lambda *_: {})
    row = Trainer(install=(), switch={}, runs={"a": Run("m", ())})
    kept, failures = command.ran("x", row, ROOT, [], {"commit": "abc", "date": "1"})
    assert failures == 0
    assert kept["runs"] == {"a": {"commit": "abc", "date": "1", "steps": 4}}


def test_printed_curve(tmp_path):
    log = tmp_path / "log"
    log.write_text("step:  1  loss:  2.5 x\nother\nstep:  2  loss:  1e-3 x\n")
    pattern = r"step: +(?P<step>\d+) +loss: +(?P<loss>\S+)"
    assert driver.printed(log, pattern) == {(1, "loss"): 2.5, (2, "loss"): 1e-3}
    with pytest.raises(driver.RunError, match="no nothing in"):
        driver.printed(log, "nothing")


def test_resumed_run_is_compared_after_checkpoint():
    ours = {(2, "loss"): 1.0}
    assert driver.continued(STOCK, ours) == ours
    with pytest.raises(driver.RunError, match="resumed at step 1, which is the first"):
        driver.continued(STOCK, STOCK)


def test_option_formats(tmp_path, monkeypatch):
    assert [*driver.flags({"a": [], "b": [1, 2]})] == ["--a", "--b", "1", "2"]
    runner, started = bench(tmp_path, monkeypatch, written="assignments", printed="x")
    monkeypatch.setattr(driver, "printed", lambda log, pattern: {(1, pattern): str(log)})
    row, _ = runner.run("a", Run("m", (), options={"b.c": False}, processes=2), False)
    assert row == {(1, "x"): f"{tmp_path}/runs/a/stock.log"}
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    assert started[1] == [*torchrun, "tests.trainers.runs.launch", "-", "m", "b.c=False"]


def test_run_specific_switch(tmp_path, monkeypatch):
    runner, started = bench(tmp_path, monkeypatch)
    runner.environment = {}
    calls = tmp_path / "runs" / "a" / "with.calls.json"
    calls.parent.mkdir(parents=True)
    calls.write_text("{}")
    driver.compared(runner, "a", Run("m", (), switch={"plugin": "{package}/x"}))
    assert started[1][3:] == []
    assert started[2][3:] == ["--plugin", f"{ROOT}/liger_multi/x"]


def test_workflow_matrix_covers_trainers():
    jobs = yaml.safe_load((ROOT / ".github/workflows/update.yml").read_text(encoding="utf-8"))
    matrix = jobs["jobs"]["trainers"]["strategy"]["matrix"]["trainer"]
    assert matrix == [name for name, trainer in trainers().items() if trainer.runs]
