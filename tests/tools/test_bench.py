"""The benchmark runner: what it writes, what it refuses, and its arithmetic; and two benchmarks."""

import contextlib
import dataclasses
import fnmatch
import gc
import importlib
import importlib.util
import json
import math
from types import SimpleNamespace

import pytest
import torch

from benchmarks import bitwise, long_context, ops as bench, store, traces
from benchmarks.tables import (
    bitwise as bitwise_pages,
    notes as trace_pages,
    training as measured_tables,
)
from benchmarks.traces import Span
from ci import results
from liger_multi import ops
from liger_multi.bench import (
    cases as bench_cases,
    measure as bench_measure,
    peers as bench_peers,
    providers as bench_providers,
    report as bench_report,
    runner as bench_runner,
)
from liger_multi.cli.main import main as command_line
from liger_multi.dispatch.registry import operators
from liger_multi.files import pictures
from liger_multi.testing import FORMULAS, samples

H200 = bench_cases.Ceilings(4.24e12, 690e12)
QUICK = ["--quick", "--device", "cpu", "--seconds", "0.05"]


@pytest.fixture(scope="module", autouse=True)
def few_objects():
    """Every provider begins with a collection of garbage, which looks through what others left."""
    gc.collect()
    gc.freeze()


def run(folder, *arguments):
    """The exit code, the result file and everything else in the folder."""
    code = bench.main([*QUICK, "--unchecked", "--output", str(folder), *arguments])
    (file,) = folder.glob("*.json")
    return code, json.loads(file.read_text()), sorted(p.name for p in folder.iterdir())


def rows_of(result, provider):
    return [r for r in result["rows"] if r["provider"] == provider]


@pytest.fixture
def planted(monkeypatch):
    """Put a formula for swiglu into the table of providers."""

    def plant(formula):
        monkeypatch.setitem(bench_peers.TABLE["swiglu"], "planted", formula)

    return plant


def test_a_quick_run_leaves_a_result_file_and_charts(tmp_path, capsys):
    code, result, files = run(
        tmp_path,
        *("--ops", "rms_norm,cross_entropy", "--samples", "8192x4096,8192x32000"),
        *("--providers", "ours,torch"),
    )
    assert code == 0
    assert {r["op"] for r in result["rows"]} == {"rms_norm", "cross_entropy"}
    assert len(result["rows"]) == 4
    for row in result["rows"]:
        assert row["status"] == "ok", row
        assert 0 < row["forward_ms"] <= row["both_ms"], row
        assert 0 < row["percent_of_peak"]["both"] < math.inf, row
        assert 0 < row["error"]["relative"] < 2**-7, row
        assert row["error"]["tolerances"] <= 1, row
        assert row["reference"] == "fp64"
        assert row["peak_bytes"] > row["extra_bytes"], row
        assert row["divisors"]["rows"] > 1, row
    assert result["device"]["type"] == "cpu"
    assert result["versions"]["torch"] == torch.__version__
    assert result["dtype"] == "bfloat16"
    assert {"commit", "date", "seconds"} <= set(result)
    assert min(result["ceilings"].values()) > 0
    stem = f"{bench_report.device_facts(torch.device('cpu'))['name']}-{result['date'][:10]}"
    stem = stem.replace("_", "-")
    assert files == [f"{stem}-cross_entropy.png", f"{stem}-rms_norm.png", f"{stem}.json"]
    for name in files[:2]:
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    shown = capsys.readouterr().out
    assert "scaled down" in shown
    assert "ours (reference)" in shown


def wrote(gate, up):
    result = torch.nn.functional.silu(gate) * up
    gate.data.mul_(2)
    return result


@pytest.mark.parametrize(
    "formula",
    [
        lambda gate, up: gate * up,
        lambda gate, up: torch.nn.functional.silu(gate) * up.detach() + 0 * up,
        wrote,
    ],
    ids=["result", "gradient alone", "writes its inputs"],
)
def test_a_wrong_provider_gets_no_time_and_spoils_nobody(tmp_path, planted, capsys, formula):
    planted(formula)
    _, result, _ = run(
        tmp_path,
        *("--ops", "swiglu", "--samples", "8192x8192", "--providers", "planted,torch,ours"),
    )
    (wrong,) = rows_of(result, "planted")
    assert wrong["status"] == "wrong"
    assert not {"both_ms", "forward_ms"} & set(wrong)
    assert [rows_of(result, n)[0]["status"] for n in ("torch", "ours")] == ["ok", "ok"]
    assert "wrong" in capsys.readouterr().out


def test_of_several_outputs_a_wrong_gradient_of_one_is_enough(tmp_path, monkeypatch):
    def second_alone(x, residual, weight):
        y, total = FORMULAS["fused_add_rms_norm"](x, residual, weight)
        return y + 0 * total, total.detach() + 0 * x

    monkeypatch.setitem(bench_peers.TABLE["fused_add_rms_norm"], "planted", second_alone)
    code, result, _ = run(
        tmp_path, "--ops", "fused_add_rms_norm", "--providers", "planted,ours,torch,aten"
    )
    assert code == 0
    status = {row["provider"]: row["status"] for row in result["rows"]}
    assert status == {"planted": "wrong", "ours": "ok", "torch": "ok", "aten": "ok"}


@pytest.mark.parametrize(
    ("failure", "status"),
    [
        (torch.OutOfMemoryError("tried to allocate 9 TiB"), "out of memory"),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried"), "out of memory"),
        (RuntimeError("no kernel image"), "failed"),
    ],
)
def test_a_failing_provider_stops_nobody_else(tmp_path, planted, failure, status):
    def fail(gate, up):
        raise failure

    planted(fail)
    _, result, files = run(
        tmp_path, "--ops", "swiglu", "--samples", "8192x8192", "--providers", "planted,ours"
    )
    (row,) = rows_of(result, "planted")
    assert row["status"] == status
    assert "both_ms" not in row
    assert rows_of(result, "ours")[0]["status"] == "ok"
    assert len(files) == 2


def test_a_wrong_result_of_ours_fails_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(ops, "swiglu", lambda gate, up: gate * up)
    code, _, files = run(
        tmp_path, "--ops", "swiglu", "--samples", "8192x8192", "--providers", "ours"
    )
    assert code == 1
    assert len(files) == 1  # nothing to draw


def test_an_interrupted_run_leaves_nothing(tmp_path, planted):
    def interrupt(gate, up):
        raise KeyboardInterrupt

    planted(interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, "--ops", "swiglu", "--samples", "8192x8192", "--providers", "planted")
    assert list(tmp_path.iterdir()) == []


def test_a_stopped_run_keeps_the_samples_that_are_done(tmp_path, planted):
    def stop_at_the_second(gate, up):
        if gate.shape[-1] == 11008:
            raise KeyboardInterrupt
        return torch.nn.functional.silu(gate) * up

    planted(stop_at_the_second)
    file = tmp_path / "run.json"
    arguments = ["--ops", "swiglu", "--samples", "8192x8192,8192x11008", "--providers", "planted"]
    with pytest.raises(KeyboardInterrupt):
        bench.main([*QUICK, "--unchecked", "--out", str(file), *arguments])
    (stored,) = store.load(file)
    assert [(row["sample"].split()[0], row["status"]) for row in stored["rows"]] == [
        ("8192x8192", "ok")
    ]


def test_a_picture_that_cannot_be_finished_is_not_left(tmp_path):
    path = tmp_path / "picture.png"
    path.write_text("before")
    with pytest.raises(TypeError), pictures.figure(path, 2.0, 2.0) as drawing:
        drawing.subplots(rows=1)
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


# --- the project's runner refuses on a red suite ---


def suite_of(passed, failed):
    def tests(plan):
        counts = {"passed": passed, "failed": failed}
        return results.Result("bench", ["reference"], {}, {}, "abc", "2026-01-01", counts, 1.0)

    return tests


SWIGLU = ["--ops", "swiglu", "--samples", "8192x8192", "--providers", "ours"]


@pytest.mark.parametrize(("passed", "failed"), [(5, 1), (0, 0)])
def test_nothing_is_timed_on_a_red_suite(tmp_path, capsys, passed, failed):
    arguments = [*QUICK, *SWIGLU, "--output", str(tmp_path)]
    assert bench.main(arguments, suite_of(passed, failed)) == bench.RED
    assert "refused: the suite is red here" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_bench_result_keeps_suite_outcome(tmp_path):
    assert bench.main([*QUICK, *SWIGLU, "--output", str(tmp_path)], suite_of(5, 0)) == 0
    (file,) = tmp_path.glob("*.json")
    assert json.loads(file.read_text())["suite"]["counts"]["passed"] == 5
    _, unchecked, _ = run(tmp_path / "other", *SWIGLU)
    assert unchecked["suite"] is None


@pytest.mark.slow
def test_the_suite_is_that_of_the_operators():
    plan, _ = bench.parse([*QUICK, "--ops", "swiglu", "--samples", "8192x8192"])
    bench_case = bench.suite(plan)
    assert bench_case.green
    assert bench_case.device["device"] == "cpu"
    with_every = len([s for s in samples.of("swiglu") if s.size != "bench"])
    assert bench_case.counts["passed"] >= with_every


# --- the command of the package ---


def test_the_command_prints_and_leaves_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    arguments = [*QUICK, "--ops", "rms_norm", "--samples", "8192x4096"]
    assert command_line(["bench", *arguments]) == 0
    shown = capsys.readouterr().out
    assert "ours (reference)" in shown
    assert "float32" in shown, "the dtype of models on a CPU"
    assert " torch " in shown
    assert not list(tmp_path.iterdir())


def test_bench_command_writes_to_output(tmp_path, capsys):
    arguments = [*QUICK, *SWIGLU, "--dtype", "bf16", "--output", str(tmp_path / "out")]
    assert command_line(["bench", *arguments]) == 0
    assert sorted(p.suffix for p in (tmp_path / "out").iterdir()) == [".json", ".png"]
    (file,) = (tmp_path / "out").glob("*.json")
    result = json.loads(file.read_text())
    assert result["dtype"] == "bfloat16"
    assert result["rows"][0]["error"]["tolerances"] <= 1


@pytest.mark.parametrize("op", bench_cases.LONG)
def test_the_reference_in_fp64_is_the_formula(op):
    small = [s for s in samples.of(op) if s.size == "small"]
    for name in [s.name for s in small if all(0 not in t.shape for t in s.tensors.values())][:6]:
        bench_case = case(op, name)
        tensors = bench_cases.draw(bench_case.sample, torch.device("cpu"), torch.float64)
        options = bench_case.sample.options
        expected = bench_cases.differentiable(FORMULAS[op](**tensors, **options))
        got = bench_cases.reference(bench_case, tensors)
        floats = [t for t in tensors.values() if t.requires_grad]
        gradients = (torch.autograd.grad([r.sum() for r in x], floats) for x in (got, expected))
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-11)


# --- arithmetic ---


def case(op, name):
    return bench_cases.Case(op, next(s for s in samples.of(op) if s.name == name), {})


@pytest.mark.parametrize(
    ("op", "name", "both_ms", "percent"),
    [
        # 5 passes over 8192 x 4096 bf16 at 4.24 TB/s are 0.0791 ms
        ("rms_norm", "8192x4096", 0.1583, 50.0),
        ("fused_add_rms_norm", "8192x4096", 0.1266, 100.0),
        ("swiglu", "8192x14336", 0.4432, 100.0),
        ("swiglu_packed", "8192x14336", 0.4432, 100.0),
        ("cross_entropy", "8192x128256", 0.9913, 100.0),
        # 5 passes over 8192 x 32000 are 0.6183 ms; a gradient that needs no student reads one less
        ("jsd", "8192x32000", 0.8244, 75.0),
        ("tvd", "logits-8192x32000", 0.6183, 100.0),
        ("kl_div", "logits-8192x32000", 0.6183, 100.0),
        ("kl_div", "8192x32000", 0.4946, 100.0),
        ("jsd_inplace", "8192x32000", 0.3710, 100.0),
        # 4.5 passes over 16 x 2048 x 2048 are 0.1425 ms: what is past the diagonal is not read
        ("multi_token_attention", "1x16x2048", 0.1425, 100.0),
        # 6 x 8192 x 4096 x 128256 operations at 690 TFLOP/s are 37.4 ms
        ("fused_linear_cross_entropy", "8192x4096x128256", 37.42, 100.0),
    ],
)
def test_percent_of_the_roof(op, name, both_ms, percent):
    work = case(op, name).work(torch.bfloat16)
    assert H200.percent(work, 1.0, both_ms)["both"] == pytest.approx(percent, rel=2e-3)


def test_the_slower_limit_is_the_roof():
    peak = bench_cases.Ceilings(1e9, 1e12)
    assert peak.floor_ms(1e9, 0) == 1000
    assert peak.floor_ms(1e6, 1e12) == 1000
    assert peak.percent(None, 1.0, 1.0) == {}


def test_every_operator_has_work_and_a_plain_formula():
    for op in operators():
        sample = next(s for s in samples.of(op) if s.size == "bench")
        assert bench_cases.Case(op, sample, {}).work(torch.bfloat16).both_bytes > 0, op
    assert set(operators()) == set(bench_peers.TABLE)
    assert all("torch" in formulas for formulas in bench_peers.TABLE.values())


@pytest.mark.parametrize("op", operators())
def test_scaled_samples_fit_and_keep_their_form(op):
    for bench_case in bench_cases.cases(op, "*", torch.bfloat16, (16e6, 2e10)):
        shapes, full = bench_case.shapes, case(op, bench_case.sample.name).shapes
        for name in shapes:
            assert len(shapes[name]) == len(full[name])
        rows = {shapes[n][0] for n in bench_case.row_tensors}
        assert len(rows) == 1, "rows must stay equal"
        # where one row is left, the weights of a model are what they are
        whole = bench_case.sample.is_whole
        assert bench_case.sample.elements * 2 <= 16e6 or rows == {1} or whole
        assert not whole or not bench_case.divisors
        specs = next(s for s in samples.of(op) if s.name == bench_case.sample.name).tensors
        for name, spec in bench_case.sample.tensors.items():
            if spec.dtype is not None:
                assert spec.classes == specs[name].classes, "codes are no vocabulary"
        if "weight" in shapes:
            assert shapes["weight"][-1] == full["weight"][-1], "widths are not rows"


@pytest.mark.parametrize("name", ["nf4", "mxfp4", "int4", "double-quantized", "14336x4096-*"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_in_four_bits_are_right(name, dtype):
    """Some have no input that gets a gradient; results have the dtype that a sample asks for."""
    named = [s for s in samples.of("dequantize") if fnmatch.fnmatchcase(s.name, name)]
    for sample in (s for s in named if not s.is_whole):
        bench_case = bench_cases.scaled("dequantize", sample, dtype.itemsize, 1e6, 1e9)
        device = torch.device("cpu")
        tensors = bench_cases.draw(bench_case.sample, device, dtype)
        douts = bench_cases.upstream(bench_case, device, dtype)
        expected = bench_cases.truth(bench_case, tensors, douts, torch.float64)
        ours = bench_providers.find("ours", bench_case, device, dtype)
        row = bench_runner._checked(bench_case, ours, tensors, douts, expected, dtype)
        assert row["status"] == "ok", row
        assert expected.grads.keys() == {n for n, t in tensors.items() if t.requires_grad}


def test_truth_in_chunks_is_truth(monkeypatch):
    """The reference in fp64 gives the same however many rows it takes at a time."""
    for op, name in (
        ("cross_entropy", "quarter-ignored"),
        ("fused_linear_cross_entropy", "mean"),
        ("fused_add_rms_norm", "row-gaps"),
        ("fused_moe", "sentinels"),
    ):
        bench_case = case(op, name)
        tensors = bench_cases.draw(bench_case.sample, torch.device("cpu"), torch.bfloat16)
        douts = bench_cases.upstream(bench_case, torch.device("cpu"), torch.bfloat16)
        whole = bench_cases.truth(bench_case, tensors, douts, torch.float64)
        monkeypatch.setattr(bench_cases, "ORACLE_BYTES", 3 * 50 * 8)
        parts = bench_cases.truth(bench_case, tensors, douts, torch.float64)
        monkeypatch.undo()
        torch.testing.assert_close(parts.results, whole.results)
        torch.testing.assert_close(parts.grads, whole.grads)


def test_truth_of_experts_takes_few_rows_at_a_time():
    """A token has a row for each of its experts: one chunk would take the whole card."""
    (bench_case,) = bench_cases.cases("fused_moe", "32768x2048*", torch.bfloat16, None)
    assert bench_cases._widest(bench_case) == 8 * 2048


def test_inputs_follow_the_sample():
    """Decays that grow make every state infinite; rounded scores select other keys."""
    specs = {"A": samples.Tensor((64,), negative=True), "q": samples.Tensor((64,), integers=True)}
    tensors = bench_cases.draw(samples.Sample("x", specs), torch.device("cpu"), torch.bfloat16)
    assert (tensors["A"] <= 0).all()
    assert torch.equal(tensors["q"], tensors["q"].round())


@pytest.mark.parametrize(
    ("op", "status"), [("fused_linear_tvd", "ok"), ("fused_linear_jsd", "wrong")]
)
def test_where_a_rounding_turns_a_sign_the_norm_decides(op, status):
    """One element of 4096 with the other sign is 3 % of the norm, and far beyond the tolerance."""
    bench_case = bench_cases.Case(op, samples.of(op)[0], {})
    x, turned = torch.ones(4096, requires_grad=True), torch.ones(4096)
    turned[7] = -1
    provider = bench_providers.Provider("known", lambda x: (x * turned).sum())
    expected = bench_cases.Truth((turned.sum().double(),), {"x": torch.ones(4096).double()}, "fp64")
    row = bench_runner._checked(
        bench_case, provider, {"x": x}, (torch.ones(()),), expected, torch.bfloat16
    )
    assert row["status"] == status


def test_equal_infinities_are_no_error():
    exact = torch.tensor([1.0, -torch.inf, 2.0], dtype=torch.float64)
    assert bench_cases.error(exact.float(), exact, torch.float32) == (0.0, 0.0)
    worst, relative = bench_cases.error(exact.float() * 2, exact, torch.float32)
    assert worst > 1
    assert relative == pytest.approx(1.0)


@pytest.mark.parametrize("name", ["ours-512MiB", "ours-lean", "torch-fused"])
def test_ours_with_a_smaller_chunk_is_ours(name):
    bench_case = case("fused_linear_cross_entropy", "mean")
    device = torch.device("cpu")
    tensors = bench_cases.draw(bench_case.sample, device, torch.float32)
    less = bench_providers.find(name, bench_case, device, torch.float32)
    if name == "torch-fused" and not hasattr(torch.nn, "LinearCrossEntropyOptions"):
        assert less == f"torch {torch.__version__} has no chunked linear_cross_entropy"
        return
    ours = bench_providers.find("ours", bench_case, device, torch.float32)
    torch.testing.assert_close(less.call(**tensors), ours.call(**tensors))


@pytest.mark.parametrize(
    ("op", "name", "provider"),
    [
        *(("fused_moe", "wider", name) for name in sorted(bench_peers.EXPERTS)),
        ("gated_delta_rule", "qwen3-next", "transformers"),
        ("kimi_delta_attention", "kimi-linear", "transformers"),
        ("selective_scan", "mamba", "transformers"),
        ("ssd_scan", "mamba2", "transformers"),
    ],
)
def test_functions_of_transformers_are_ours(op, name, provider):
    pytest.importorskip("transformers")
    bench_case, device = case(op, name), torch.device("cpu")
    tensors = bench_cases.draw(bench_case.sample, device, torch.float32)
    peer = bench_providers.find(provider, bench_case, device, torch.float32)
    if function := bench_peers.missing(op):  # of older versions
        assert peer == f"the installed transformers has no {function}"
        pytest.skip(peer)
    expected = FORMULAS[op](**tensors, **bench_case.sample.options)
    torch.testing.assert_close(peer.call(**tensors), expected)


def test_grouped_experts_with_adapters_are_ours():
    bench_case = case("lora_moe", "wider-rank-40")
    device = torch.device("cpu")
    tensors = bench_cases.draw(bench_case.sample, device, torch.bfloat16)
    eager = bench_providers.find("torch", bench_case, device, torch.bfloat16)
    wide = {n: t.double() if t.is_floating_point() else t for n, t in tensors.items()}
    expected = FORMULAS["lora_moe"](**wide)
    # weights with what adapters add are rounded, which the formula does not
    assert (eager.call(**tensors) - expected).norm() <= 1e-2 * expected.norm()


def test_errors_in_pieces_use_the_largest_value_of_all(monkeypatch):
    from liger_multi.testing.tolerance import excess

    exact = torch.tensor([100.0, 1e-3, 2e-3, -3.0], dtype=torch.float64)
    got = exact + 0.3
    pieces = bench_cases._pieces
    monkeypatch.setattr(bench_cases, "_pieces", lambda a, b: pieces(a, b, size=1))
    worst, relative = bench_cases.error(got, exact, torch.bfloat16)
    assert worst == pytest.approx(excess(got, exact, torch.bfloat16))
    assert relative == pytest.approx(float((got - exact).norm() / exact.norm()))


def test_memory_of_a_known_call():
    """A formula that holds one tensor beside its inputs, result and gradients."""
    shape = (64, 256)
    tensors = {n: torch.randn(shape, requires_grad=True) for n in ("gate", "up")}
    provider = bench_providers.Provider("known", lambda gate, up: gate * up)
    runner = bench_measure.Runner.make(provider, tensors, (torch.randn(shape),))
    extra, peak = bench_measure.memory_bytes(runner, 0, torch.device("cpu"))
    size = 64 * 256 * 4
    assert (extra, peak) == (size, 5 * size)  # the result; two inputs, it, and two gradients
    assert bench_measure.memory_bytes(runner, size, torch.device("cpu"))[0] == 0


def test_whoever_overwrites_works_on_copies():
    tensors = {"x": torch.randn(8, requires_grad=True)}
    before = tensors["x"].detach().clone()

    def overwrite(x):
        result = (x * 2).sum()
        x.data.zero_()
        return result

    provider = bench_providers.Provider("overwrites", overwrite, overwrites=True)
    runner = bench_measure.Runner.make(provider, tensors, (torch.ones(()),))
    (first,), (second,) = runner.both()[0], runner.both()[0]
    assert torch.equal(first, second)
    assert torch.equal(tensors["x"].detach(), before)


@pytest.mark.parametrize("style", ["half", "interleaved"])
def test_both_channels_of_a_pair_turn_by_one_angle(style):
    """Peers read half of cos and sin: with angles of each channel's own, they were called wrong."""
    sample = next(
        s
        for s in samples.of("rope")
        if s.size == "bench" and s.options.get("style", "half") == style
    )
    tensors = {
        name: dataclasses.replace(t, shape=(*t.shape[:-2], 4, 8))
        for name, t in sample.tensors.items()
    }
    small = dataclasses.replace(sample, tensors=tensors)
    drawn = bench_cases.draw(small, torch.device("cpu"), torch.float32)
    for angles in (drawn["cos"], drawn["sin"]):
        pairs = angles.unflatten(-1, (4, 2) if style == "interleaved" else (2, 4))
        a, b = pairs.unbind(-1 if style == "interleaved" else -2)
        assert torch.equal(a, b)
        assert a.unique().numel() == a.numel()
    few = torch.randn(4, 4)
    assert bench_cases.of_pairs(few, drawn["q"], style) is few


def test_a_peer_may_write_into_what_is_in_place(monkeypatch):
    """It was called wrong for what the operator itself does."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    for op, overwrites in (("cross_entropy", False), ("cross_entropy_inplace", True)):
        (case,) = bench_cases.cases(op, "8192x32000", torch.bfloat16, None)
        peer = bench_providers.find("quack", case, torch.device("cpu"), torch.bfloat16)
        assert peer.overwrites is overwrites


def test_a_peer_that_cannot_run_says_why(monkeypatch):
    monkeypatch.delenv(bench_providers.CHOICE, raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (case,) = bench_cases.cases("rms_norm", "8192x4096", torch.bfloat16, None)
    device = torch.device("cuda")
    assert bench_providers.find("quack", case, device, torch.bfloat16) == "quack is not installed"
    text = bench_providers.find("liger-cute", case, device, torch.bfloat16)
    assert text == "runs in processes with LIGER_KERNEL_IMPL=cutedsl"
    text = bench_providers.find("liger-hopper", case, device, torch.bfloat16)
    assert text == "has no such operator"
    monkeypatch.setenv(bench_providers.CHOICE, "cutedsl")  # Liger reads it when it is imported
    text = bench_providers.find("liger", case, device, torch.bfloat16)
    assert text == "runs in processes without LIGER_KERNEL_IMPL"


# Benchmarks of equal bits and of traces: what they find, keep and print.


# --- equal bits ---


@pytest.mark.slow
def test_a_trial_keeps_rows_of_operators_and_of_a_step(tmp_path):
    file = tmp_path / "run.json"
    args = ["--device", "cpu", "--tiny", "--seconds", "0.02", "--ops", "rms_norm"]
    assert bitwise.main([*args, "--out", str(file)]) == 0
    (run,) = store.load(file)
    assert run["kind"] == "bitwise"
    assert run["tiny"]
    times = [row for row in run["rows"] if row["part"] == "time"]
    assert [row["variant"] for row in times] == list(bitwise.NAMES.values())
    assert all(0 < row["forward_ms"] <= row["both_ms"] < math.inf for row in times), times
    steps = {row["variant"]: row for row in run["rows"] if row["part"] == "step"}
    assert set(steps) == set(bitwise_pages.WHO) - {"sgemm-bi"}
    assert steps["deterministic"]["repeat"]
    assert steps["rows"]["repeat"]


# --- traces ---


def test_a_trial_on_a_cpu(capsys):
    asked = ["--samples", "8192x4096", "--calls", "1", "--providers", "ours,aten,flex"]
    assert traces.main(["--ops", "layer_norm", *asked]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len([line for line in lines if " us" in line or "TB/s" in line]) == 5
    assert lines[-1].endswith(" by flex: has no such operator")
    table = trace_pages.NOTES["peers"]
    rows = trace_pages.rows(table, lines)
    assert [(row[0], row[2]) for row in rows] == [("layer_norm", "ours"), ("layer_norm", "aten")]
    assert {len(row) for row in rows} == {len(table.heads)}


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--providers", "ours,nobody"], "unknown provider 'nobody'"),
        (["--ops", "nobodys"], "unknown operator 'nobodys'"),
        (["--calls", "0"], "--calls must be positive, got 0"),
    ],
)
def test_command_lines_of_traces_that_are_refused(arguments, error, capsys):
    with pytest.raises(SystemExit):
        traces.main(arguments)
    assert error in capsys.readouterr().err


def test_an_operator_without_gradients_is_traced_forward():
    runner = SimpleNamespace(
        provider=SimpleNamespace(scope=contextlib.nullcontext),
        prepare=lambda: torch.ones(3),
        forward=torch.exp,
        leaves={},
    )
    kernels = traces.traced(runner, SimpleNamespace(cpu=True, device=torch.device("cpu")))
    assert [span.name for span in kernels.pop("forward")] == ["aten::exp"]
    assert not kernels


def test_a_peer_that_fails_is_a_line_of_the_traces(monkeypatch, capsys):
    asked = ["--ops", "layer_norm", "--samples", "8192x4096", "--calls", "1", "--providers"]
    monkeypatch.setattr(traces, "traced", lambda *_: 1 / 0)
    assert traces.main([*asked, "aten"]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.endswith(" by aten: failed: ZeroDivisionError: division by zero")
    with pytest.raises(ZeroDivisionError):
        traces.main([*asked, "ours"])


def test_the_page_has_every_line_that_is_printed():
    case = SimpleNamespace(op="jsd", label="logits-8x9")
    peak = SimpleNamespace(copy_bytes_per_second=3e12)
    kernels = [Span("_jsd_kernel", 0, 8), Span("void at::reduce<int, 4>(int)", 9, 60)]
    lines = [
        traces.operator_line(case, "ours", "forward", [kernels], 2**20, peak),
        traces.operator_line(case, "ours", "backward", [kernels[:1]], 2**21, peak),
    ]
    for name in ("operators", "peers"):
        table = trace_pages.NOTES[name]
        (cells,) = trace_pages.rows(table, [*lines, "    12.0 us in 3: a kernel"])
        assert cells[:2] == ["jsd", "logits-8x9"]
        assert len(cells) == len(table.heads)
        assert cells[-1]


# --- long rows ---


@pytest.mark.slow
def test_long_rows_on_two_processes(tmp_path, monkeypatch):
    """Every part runs with gloo, is right, and has its row in the table."""
    file = tmp_path / "out.json"
    options = ["--ranks", "2", "--device", "cpu", "--lengths", "512", "1024", "--out", str(file)]
    long_context.main([*options, "--parts", "correct", "dense", "variants", "--seconds", "280"])
    (run,) = store.load(file)
    parts = {part: [r for r in run["rows"] if r["part"] == part] for part in ("step", "variant")}
    correct = [row for row in run["rows"] if row["part"] == "correct"]
    assert len(correct) == 6
    assert all(row["right"] for row in correct), correct
    assert [row["tokens"] for row in parts["step"]] == [512, 1024]
    sent = {row["variant"]: row["host_bytes_per_card"] for row in parts["variant"]}
    assert list(sent) == list(long_context.VARIANTS)
    assert sent["keep_attention, offload"] > 2 * sent["keep_attention, offload, float8"]
    assert sent["keep_attention, offload"] > sent["full, offload"] > sent["full"] == 0
    monkeypatch.setattr(
        measured_tables.store, "rows", lambda suite: [(run, r) for r in run["rows"]]
    )
    lines = measured_tables.long_context()
    assert len([line for line in lines if line.startswith("| qwen3-8b | 2 x ")]) == 2
    assert len([line for line in lines if "keep_attention" in line]) == 3
