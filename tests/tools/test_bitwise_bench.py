"""The benchmark of equal bits: what it finds, what it keeps, and the tables that are made of it."""

import json
import math
from unittest import mock

import pytest
import torch

from benchmarks import bitwise, bitwise_models, bitwise_operators, store
from benchmarks.tables import bitwise as pages
from liger_multi.bench.measure import Clock
from liger_multi.dispatch.torch_ops import Primitive

CPU = bitwise_operators.Place(torch.device("cpu"), torch.bfloat16, True, 0.02)
RUN = {
    "kind": "bitwise",
    "date": "2026-11-01T00:00:00+00:00",
    "commit": "abc",
    "tiny": False,
    "device": {"name": "NVIDIA H200"},
    "versions": {"torch": "2.11.0"},
}


@pytest.mark.slow
def test_a_trial_keeps_rows_of_every_process(tmp_path):
    file = tmp_path / "run.json"
    args = ["--device", "cpu", "--tiny", "--seconds", "0.02", "--ops", "rms_norm"]
    assert bitwise.main([*args, "--parts", "check,time", "--out", str(file)]) == 0
    (run,) = store.load(file)
    assert run["kind"] == "bitwise"
    assert run["tiny"]
    checks = [row for row in run["rows"] if row["part"] == "check"]
    assert {(row["direction"], row["variant"]) for row in checks} == {
        (direction, name)
        for direction in ("forward", "backward")
        for name in bitwise_operators.NAMES.values()
    }
    assert all(row["repeat"] and row["rows"] and not row["broken"] for row in checks), checks
    times = [row for row in run["rows"] if row["part"] == "time"]
    assert [row["variant"] for row in times] == list(bitwise_operators.NAMES.values())
    assert all(0 < row["forward_ms"] <= row["both_ms"] < math.inf for row in times), times


def test_a_process_that_ends_ends_no_other_name(monkeypatch):
    """A part that the child does not know makes it end at once."""
    options = bitwise.parse(["--device", "cpu", "--tiny"])
    messages = []
    jobs = bitwise.Jobs(options, lambda part, name, rows: messages.append((name, rows)))
    jobs.run("nothing", ["a", "b"])
    assert [name for name, _ in messages] == ["a", "b"]
    assert all("the process ended" in rows[0]["failure"] for _, rows in messages)


@pytest.mark.parametrize("broken", ["repeat", pytest.param("rows", marks=pytest.mark.slow)])
def test_a_broken_promise_is_found(broken):
    original, count = Primitive.call, iter(range(10**6))

    def wrong(prim, *args):
        out = original(prim, *args)
        if prim.op.name == "rms_norm" and prim.direction == "forward":
            by = next(count) if broken == "repeat" else out[0].shape[0]
            return out[0] + by, *out[1:]
        return out

    with mock.patch.object(Primitive, "call", wrong):
        rows = list(bitwise_operators.check("rms_norm", CPU))
    said = bitwise.broken(rows)
    assert f"rms_norm forward {broken} under rows by reference" in said
    assert not [text for text in said if "backward" in text]


@pytest.mark.slow
def test_gemms_have_a_time_or_a_reason():
    rows = list(bitwise_operators.gemms(CPU, Clock(CPU.device)))
    assert len(rows) == 2 * len(bitwise_operators.LAYERS) * len(bitwise_operators.GEMMS)
    assert all(("both_ms" in row) != ("failure" in row) for row in rows), rows
    assert all(row["rows"] is not None for row in rows if "both_ms" in row)


def test_a_step_has_every_variant():
    rows = list(bitwise_models.step(CPU))
    assert {row["variant"] for row in rows} == set(pages.WHO)
    assert all(("both_ms" in row) != ("failure" in row) for row in rows), rows
    ours = {row["variant"]: row for row in rows}
    assert ours["deterministic"]["repeat"]
    assert ours["rows"]["repeat"]


def row_of(part, name, variant, ms, **more):
    timed = {"forward_ms": ms / 3, "both_ms": ms, "both_spread_ms": 0.0}
    return {"part": part, "name": name, "shape": "8x4", "variant": variant, **timed, **more}


def test_tables_have_ratios_of_one_run(tmp_path, monkeypatch):
    rows = [
        row_of("time", name, variant, ms, family="norms")
        for name, times in (("rms_norm", (1.0, 1.0, 1.5)), ("layer_norm", (2.0, 2.5, 2.2)))
        for variant, ms in zip(("default", "deterministic", "rows"), times, strict=True)
    ]
    rows += [
        row_of("step", "llama", who, ms, tokens_per_second=8.0, repeat=True, rows=who == "rows")
        for who, ms in (("default", 100.0), ("rows", 120.0), ("baseline", 200.0))
    ]
    rows += [
        {
            "part": "step",
            "name": "llama",
            "shape": "8x4",
            "variant": "sgemm-bi",
            "failure": "not installed",
        }
    ]
    rows += [
        {
            "part": "training",
            "name": "llama",
            "shape": "100 steps",
            "repeat": True,
            "variant": "deterministic",
        }
    ]
    rows += [
        row_of("gemm", "head", who, ms, tflops=5.0, rows=True)
        for who, ms in (("library", 2.0), ("ours", 3.0))
    ]
    rows += [
        {
            "part": "check",
            "name": "rms_norm",
            "shape": "8x4",
            "variant": "rows",
            "direction": "forward",
            "backend": "triton",
            "repeat": True,
            "rows": False,
            "promised": ["repeat", "rows"],
            "broken": ["rows"],
        }
    ]
    store.add(
        [{**RUN, "rows": rows}, {**RUN, "tiny": True, "rows": rows[:1], "date": store.now()}],
        tmp_path,
    )
    monkeypatch.setattr(store, "RESULTS", tmp_path)
    text = "\n".join(pages.costs())
    assert "| norms | 2 | 1.12 | 1.25 | 1.30 | 1.50 | `1.10` |" in text
    assert '| patched, `deterministic="rows"` | 8 | 120 | 1.20 | - | yes | yes |' in text
    assert "failed: not installed" in text
    assert "| llama | 100 steps | NVIDIA H200 | yes |" in text
    said = "2 promises of operators were checked. Broken: `rows` of `rms_norm` forward"
    assert f"On NVIDIA H200, {said}, setting rows." in text
    assert json.loads((tmp_path / "nvidia-h200.json").read_text())["runs"]


def test_pages_say_that_nothing_was_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "RESULTS", tmp_path)
    assert pages.UNMEASURED[0] in pages.costs()
