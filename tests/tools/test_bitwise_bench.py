"""The benchmark of equal bits: what it finds, what it keeps, and the tables that are made of it."""

import math
from unittest import mock

import pytest
import torch

from benchmarks import bitwise, bitwise_models, bitwise_operators, store
from benchmarks.tables import bitwise as pages
from liger_multi.bench.measure import Clock
from liger_multi.dispatch.torch_ops import Primitive

CPU = bitwise_operators.Place(torch.device("cpu"), torch.bfloat16, True, 0.02)


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
