"""What executes plans on an accelerator, on a CPU and with processes that only pretend."""

import argparse
import json
import sys
import time
from dataclasses import replace

import pytest
import torch

pytest.importorskip("transformers")

from benchmarks import plans
from benchmarks.memory_cases import Case as Small
from benchmarks.plan_runs import Case, Worker, executed
from liger_multi.memory import Candidate, Settings
from liger_multi.memory.planning.cost import CARDS
from liger_multi.memory.planning.predict import Predictor
from liger_multi.memory.planning.traces import Shapes

SETTINGS = Settings(sequence=64, micro_batch=2, chunk=64, recompute="full", layers=1)
CASE = Case("nothing", 64, 2, "1GiB")
MEASURED = {"measured_bytes": 100, "measured_seconds": 2.0, "loss": 1.0}


def pretending(code):
    """A worker that runs ``code`` once it has its candidate."""
    command = [sys.executable, "-c", f"import json, sys; given = sys.stdin.readline()\n{code}"]
    return Worker("cpu", command)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("raise MemoryError('of the host')", "MemoryError: of the host"),
        ("sys.exit('torch.OutOfMemoryError: tried to allocate 2 GiB')", "out of memory"),
        ("import os; os.kill(os.getpid(), 9)", "ended by signal 9"),
        ("import time; time.sleep(60)", "no end within 2 s"),
        ("pass", "no output"),
    ],
)
def test_a_failing_process_is_a_row(code, said):
    limit = 2 if "sleep" in code else 30
    assert pretending(code).run(CASE, SETTINGS, 1, limit)["failure"] == said


def test_a_process_gets_its_candidate():
    code = "print(json.dumps({'got': json.loads(given)}))"
    found = pretending(code).run(CASE, SETTINGS, 3, 30)
    assert found["got"] == [vars(CASE), SETTINGS.as_data(), 3]
    assert found["process_seconds"] > 0


def told(seconds, host=0):
    return Candidate(SETTINGS, 100, {}, seconds, host_bytes=host)


def given(**options):
    until = time.monotonic() + 60
    return argparse.Namespace(**{"steps": 1, "most": 3, "limit": 30, "until": until} | options)


def two_plans():
    data = {"case": vars(CASE), "plan_seconds": 1, "ways": 3, "fit": 3}
    candidates = [told(seconds).as_data() for seconds in (1.0, 2.0, 3.0)]
    return [{**data, "candidates": candidates}, {**data, "candidates": candidates[:1]}]


def test_rows_are_written_after_every_candidate():
    """In rounds over the cases; what failed has no order and stops nothing."""
    written = []
    codes = iter([f"print({json.dumps(json.dumps(MEASURED))})"] * 2 + ["raise ValueError('x')"] * 2)
    rows = plans.execute(
        two_plans(), lambda: pretending(next(codes)), given(),
        lambda rows: written.append([len(row["runs"]) for row in rows]),
    )  # fmt: skip
    assert written == [[1, 0], [1, 1], [2, 1], [3, 1]]
    assert [run.get("failure") for run in rows[0]["runs"]] == [None, *["ValueError: x"] * 2]
    assert rows[0]["runs"][0]["error_percent"] == 0
    assert rows[0]["order_agrees"]
    assert "candidates" not in rows[0]


def test_nothing_starts_when_the_time_is_over(capsys):
    late = given(until=time.monotonic() + 10, limit=30)
    rows = plans.execute(two_plans(), lambda: pretending("pass"), late, lambda rows: None)
    assert [row["runs"] for row in rows] == [[], []]
    assert "4 candidates are left" in capsys.readouterr().out


def test_which_candidates_are_executed():
    every = [told(float(i)) for i in range(9)]
    places = [int(one.seconds) for one in plans.chosen(every, 5)]
    assert places == [0, 8, 4, 2, 6]
    assert plans.chosen(every[:1], 5) == every[:1]
    assert plans.chosen([told(1.0), told(2.0, host=2**40)], 5) == [told(1.0)]
    assert plans.chosen([told(1.0, host=2**40)], 5) == []


def test_the_order_of_speeds():
    def run(*seconds):
        return {"predicted_seconds": seconds[0], "measured_seconds": seconds[1]}

    assert plans.in_order([run(1, 2), run(2, 3), run(2.05, 2.9), {"predicted_seconds": 1}])
    assert not plans.in_order([run(1, 2), run(2, 3), run(3, 2.5)])


def test_a_candidate_trains_on_a_cpu(tmp_path):
    """The half that executes, whole: peak as told, and nothing of the settings left out."""
    config = Small("dense", 2, 64).config()
    config.num_hidden_layers = 4
    config.save_pretrained(tmp_path)
    case = Case(str(tmp_path), 64, 2, "64MiB")
    predictor = Predictor(Shapes(case.config(), 64), CARDS["h200"], "cpu")
    one = predictor.predict(replace(SETTINGS, accumulation=2, tiles=2))
    found = executed(case, one.settings, 1, torch.device("cpu"))
    assert found["measured_bytes"] == pytest.approx(one.peak_bytes, rel=0.02)
    assert found["measured_seconds"] > 0
    assert 7 < found["loss"] < 8.5, "random weights, 1 999 classes"
