"""Benchmarks of equal bits and of traces: what they find, keep and print."""

import math
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from benchmarks import bitwise, bitwise_models, bitwise_operators, store, traces
from benchmarks.tables import bitwise as bitwise_pages
from benchmarks.tables import traces as trace_pages
from benchmarks.traces import Span
from liger_multi.bench.measure import Clock
from liger_multi.dispatch.torch_ops import Primitive

# --- equal bits ---

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
    assert {row["variant"] for row in rows} == set(bitwise_pages.WHO)
    assert all(("both_ms" in row) != ("failure" in row) for row in rows), rows
    ours = {row["variant"]: row for row in rows}
    assert ours["deterministic"]["repeat"]
    assert ours["rows"]["repeat"]


# --- traces ---

STEP = [
    Span("_rms_norm_forward_kernel", 0, 5),
    Span("Memcpy DtoH (Device -> Pinned)", 6, 8),
    Span("nvjet_gemm", 28, 40),
    Span("_cross_entropy_forward_kernel", 40, 50),
    Span("nvjet_gemm", 50, 60),
    Span("_cross_entropy_forward_kernel", 61, 70),  # a second chunk, of the same head
    Span("_rms_norm_backward_kernel", 90, 95),
]


def test_idle_time_is_where_nothing_runs():
    assert traces.idle([]) == 0
    assert traces.idle([Span("a", 0, 10), Span("b", 2, 5), Span("c", 9, 12)]) == 0
    assert traces.idle([Span("c", 20, 21), Span("a", 0, 10), Span("b", 2, 5)]) == 10


def test_a_head_reaches_from_the_last_norm_to_the_first_loss():
    (head,) = traces.heads_of(STEP)
    assert head == STEP[:4]
    assert traces.idle(head) == 1 + 20
    assert len(traces.heads_of(STEP * 3)) == 3
    assert traces.heads_of(STEP[1:3]) == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["stalls", "tiny:2x32", "--steps", "1", "--forms", "accumulation,stage"],
        ["heads", "--shapes", "64x32x500", "--chunks", "auto,64KiB", "--rounds", "2"],
        ["operators", "--ops", "layer_norm", "--samples", "8192x4096", "--calls", "1"],
        ["adapters", "--parts", "qkv as one", "--rounds", "1"],
    ],
    ids=lambda case: case[0],
)
def test_a_trial_on_a_cpu(arguments, capsys):
    assert traces.main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    expected = {"stalls": 4, "heads": 5 + 2 * 4, "operators": 3, "adapters": 4}[arguments[0]]
    assert (
        len([line for line in lines if " us" in line or " ms" in line or "TB/s" in line])
        == expected
    )


def test_a_gemm_is_known_by_its_name():
    for name in ("nvjet_tst_128x256", "sm90_xmma_gemm_bf16", "cutlass_80_tensorop", "aten::mm"):
        assert traces.GEMM.search(name)
    for name in ("_cross_entropy_forward_kernel", "aten::mul", "elementwise_kernel"):
        assert not traces.GEMM.search(name)


CASE = SimpleNamespace(op="jsd", label="logits-8x9")
PEAK = SimpleNamespace(copy_bytes_per_second=3e12)
KERNELS = [Span("_jsd_kernel", 0, 8), Span("void at::reduce<int, 4>(int)", 9, 60)]
LINES = {
    "stalls": [f"new      m:8x512   step     {traces.stall_line(STEP, 1)}"],
    "heads": [
        traces.head_line("8x4x9 three GEMMs", [STEP], 0),
        traces.head_line("8x4x9 chunk=auto", [STEP], 30.0),
    ],
    "fusion": [f"8x4x9 {'GEMM of the logits':30} {traces.fusion_line([12.0, 11.9])}"],
    "operators": [
        traces.operator_line(CASE, "forward", [KERNELS], 2**20, PEAK),
        traces.operator_line(CASE, "backward", [KERNELS[:1]], 2**21, PEAK),
    ],
    "adapters": [f"qkv as one, fp32 adapters: {'PEFT':5} {traces.adapter_line([KERNELS], 2, 3.5)}"],
}


@pytest.mark.parametrize("name", LINES)
def test_the_page_has_every_line_that_is_printed(name):
    table = trace_pages.TABLES[name]
    rows = trace_pages.rows(table, [*LINES[name], "    12.0 us in 3: a kernel"])
    assert len(rows) == {"heads": 2}.get(name, 1)
    assert all(len(cells) == len(table.heads) for cells in rows)
    assert all(cells[-1] for cells in rows)
