"""What runs leave, of the suite and of benchmarks, and what is made of it.

What the repository keeps of runs of the suite can be read. Of benchmarks it keeps one file a card,
with the newest row of every measurement; of two that are held against each other, some differences
count as worse, and some are only noise. The search for the longest sequence begins at the end of a
line through two measurements. Patched models learn as stock ones do, and the bounds that say so
find bugs.
"""

import copy
import json
import math
import sys
from pathlib import Path

import pytest
import torch
import torch._inductor  # inner sessions forget what they import first, and it aborts twice

from benchmarks import convergence, recompute, store
from ci import results
from ci.docs import verification as docs_status
from liger_multi.cli import doctor  # noqa: F401, inner sessions forget what they import first
from liger_multi.dispatch.registry import backends

# --- what a run leaves ---

pytest_plugins = ["pytester"]
ROOT = Path(__file__).parents[2]
SUITE = """
import pytest

def test_passes(): pass

@pytest.mark.skip
def test_skipped(): pass

@pytest.mark.xfail(strict=True)
def test_expected(): assert False

def test_fails(): assert False
"""


@pytest.fixture
def run(pytester):
    """Run a small suite under this suite's hooks; the result that it left."""

    def run(text, *args):
        (pytester.path / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
        (pytester.path / "test_suite.py").write_text(text)
        file = pytester.path / "out" / "native.json"
        plugins = ("cacheprovider", "xdist", "randomly")
        options = (*(f"-pno:{name}" for name in plugins), "--results", str(file))
        pytester.runpytest_inprocess(*options, *args)
        (result,) = results.read(file.parent)
        return result

    return run


def test_a_run_leaves_its_counts_and_where_it_ran(run):
    result = run(SUITE)
    assert result.counts == {"passed": 1, "failed": 1, "skipped": 1, "xfailed": 1}
    assert not result.green
    assert (result.failures, result.part) == (["test_suite.py::test_fails"], "native")
    assert "reference" in result.backends
    assert result.device["device"] == "cpu"
    assert result.versions["torch"] == torch.__version__
    assert result.versions["python"] == ".".join(map(str, sys.version_info[:3]))
    assert result.date.endswith("+00:00")
    assert result.commit
    assert result.seconds > 0


@pytest.mark.slow
def test_green_runs_have_tests_and_no_failures(run):
    assert run(SUITE, "-k", "not fails").green
    assert not run(SUITE, "-k", "skipped").green


def test_kept_results_name_backends_that_exist():
    assert results.kept()
    for result in results.kept():
        assert set(result.backends) <= set(backends()), result
        assert set(result.counts) <= set(results.OUTCOMES), result
        assert {"torch", "python"} <= set(result.versions), result


def run_on(device, part, failed=0, date="2026-05-01"):
    counts = {"passed": 7, **({"failed": failed} if failed else {})}
    facts = {"device": device, "name": f"a {part} machine"}
    backends = [part, "reference"] if part != "native" else ["reference"]
    versions = {"torch": "2.13.0", "python": "3.12.1", "triton": "3.9.0"}
    return results.Result(
        part,
        backends,
        facts,
        versions,
        "abcdef0",
        date,
        counts,
        1.0,
        failures=["test_a", "test_b"][:failed],
    )


def test_verification_page_marks_untested_backends(monkeypatch):
    stored = [run_on("cpu", "native"), run_on("npu:0", "npu"), run_on("cpu", "interpreted", 1)]
    monkeypatch.setattr(results, "kept", lambda: stored)
    page = docs_status.page()
    rows = {line.split(" | ")[0].strip("| "): line for line in page.splitlines() if " | " in line}
    assert all(docs_status.NOT_RUN in rows[name] for name in ("cuda", "rocm"))
    assert "| npu | a npu machine | " in rows["npu"]
    assert "- interpreted, 2026-05-01, abcdef0: `test_a`." in page


# --- the store ---

CARD = {"name": "A Card 9000"}
FILES = [path for path in sorted(store.RESULTS.glob("*.json")) if path != results.KEPT]


def bench_run(run_type, hour, rows, **head):
    date = f"2026-01-01T{hour:02}:00:00+00:00"
    return {
        "kind": run_type,
        "date": date,
        "commit": f"c{hour}",
        "device": CARD,
        **head,
        "rows": rows,
    }


def timed(**speeds):
    return [{"run": "m:1x2", "variant": who, "tokens_per_second": s} for who, s in speeds.items()]


def stored(folder):
    return {
        (one["commit"], row["variant"]): row["tokens_per_second"]
        for one, row in store.rows("models", folder)
    }


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_newest_row_keeps_its_peers(tmp_path, order):
    runs = [
        bench_run("models", 1, timed(ours=1.0, liger=2.0, stock=3.0), limit_gb=None),
        bench_run("models", 2, timed(ours=4.0, liger=5.0), limit_gb=None),
        bench_run("models", 3, timed(ours=6.0), limit_gb=None),
    ]
    for place in order:
        (path,) = store.add([runs[place]], tmp_path)
    assert path.name == "a-card-9000.json"
    assert stored(tmp_path) == {
        ("c1", "ours"): 1.0,
        ("c1", "liger"): 2.0,
        ("c1", "stock"): 3.0,
        ("c2", "ours"): 4.0,
        ("c2", "liger"): 5.0,
        ("c3", "ours"): 6.0,
    }
    store.add(
        [bench_run("models", 4, timed(ours=7.0, liger=8.0, stock=9.0), limit_gb=None)], tmp_path
    )
    assert {commit for commit, _ in stored(tmp_path)} == {"c4"}


def test_what_is_measured_elsewhere_replaces_nothing(tmp_path):
    store.add([bench_run("models", 1, timed(ours=1.0), limit_gb=None)], tmp_path)
    store.add([bench_run("models", 2, timed(ours=2.0), limit_gb=16.0)], tmp_path)
    other = {
        **bench_run("models", 3, timed(ours=3.0), limit_gb=None),
        "device": {"name": "cpu-x86_64"},
    }
    (path,) = store.add([other], tmp_path)
    assert path.name == "cpu.json"
    assert sorted(stored(tmp_path).values()) == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("change", "text"),
    [({"kind": "speeds"}, "kind 'speeds'"), ({"date": "2026-01-01"}, "has the date '2026-01-01'")],
)
def test_a_run_that_cannot_be_ordered_is_refused(tmp_path, change, text):
    with pytest.raises(ValueError, match=text):
        store.add([bench_run("models", 1, timed(ours=1.0)) | change], tmp_path)
    assert not list(tmp_path.iterdir())


# --- what is committed ---


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_a_committed_file_has_nothing_old(path):
    """It is what its own runs, merged once more, would be: a row a line, and no older row."""
    again = store.text(store.merge([], store.load(path))).splitlines()
    for line, other in zip(path.read_text(encoding="utf-8").splitlines(), again, strict=True):
        assert line[:200] == other[:200]
        assert len(line) == len(other)
    assert {store.path_of(one) for one in store.load(path)} == {path}


def suite(part, day, failed=0):
    counts = {"passed": 3, **({"failed": failed} if failed else {})}
    facts = {"device": "cpu", "name": "a machine"}
    return results.Result(part, [], facts, {}, "abc", f"2026-01-0{day}", counts, 1.0)


def test_suite_keeps_newest_and_last_green_result(tmp_path):
    path = tmp_path / "suites.json"
    results.keep("card", [suite("native", 1), suite("cuda", 1), suite("cuda", 2)], path)
    results.keep("card", [suite("native", 4), suite("cuda", 3, failed=1)], path)
    parts = {(one.part, one.date[-1]) for one in results.kept(path)}
    assert parts == {("native", "4"), ("cuda", "3"), ("cuda", "2")}
    results.keep("other", [suite("native", 2)], path)
    assert len(path.read_text().splitlines()) == 4 + 2 * 2 + 2, "a line a result"
    results.keep("card", [suite("cuda", 5)], path)
    parts = {(one.part, one.date[-1]) for one in results.suites(path)["card"]}
    assert parts == {("native", "4"), ("cuda", "5")}


def test_committed_suites_have_nothing_old(tmp_path):
    path = tmp_path / "suites.json"
    for name, ours in results.suites(results.KEPT).items():
        results.keep(name, ours, path)
    assert path.read_text(encoding="utf-8") == results.KEPT.read_text(encoding="utf-8")


# --- two benchmarks ---

ROW = {
    "op": "rms_norm",
    "sample": "8x4",
    "provider": "ours",
    "divisors": {},
    "both_ms": 1.0,
    "both_spread_ms": 0.01,
    "percent_of_peak": {"both": 80.0},
    "extra_bytes": 2**24,
    "error": {"tolerances": 0.5},
}
FILE = {
    "device": {"name": "a card"},
    "dtype": "bfloat16",
    "ceilings": {},
    "commit": "abc",
    "versions": {"torch": "2"},
    "rows": [ROW],
}


def timed_run(tmp_path, change, arguments=()):
    new = copy.deepcopy(FILE)
    change(new)
    paths = [tmp_path / "old.json", tmp_path / "new.json"]
    for path, data in zip(paths, (FILE, new), strict=True):
        path.write_text(json.dumps(data), encoding="utf-8")
    return store.main(["compare", *map(str, paths), *arguments])


def timed_row(**fields):
    return lambda data: data["rows"][0].update(fields)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda data: None, 0),
        (timed_row(both_ms=1.5), 0),  # the same share of a slower device's peak
        (timed_row(percent_of_peak={"both": 76.0}), 0),  # x 1.05, inside of margin and spreads
        (timed_row(percent_of_peak={"both": 70.0}), 1),
        (timed_row(percent_of_peak={"both": 70.0}, both_spread_ms=0.1), 0),  # a noisy run
        (timed_row(percent_of_peak={}, both_ms=1.2), 1),
        (timed_row(extra_bytes=2**24 + 2**19), 0),
        (timed_row(extra_bytes=2**25), 1),
        (timed_row(error={"tolerances": 1.2}), 1),
    ],
)
def test_worse_is_beyond_the_noise(tmp_path, capsys, change, code):
    assert timed_run(tmp_path, change) == code
    assert ("WORSE" in capsys.readouterr().out) == bool(code)


# --- the longest sequence ---


@pytest.mark.parametrize("room", [90_000, 110_000, 300_000, 1_000_000])
def test_extrapolated_length_after_a_change_of_slope(room):
    """Short lengths peak at another moment, whose line has a third of the slope."""
    asked = []

    def peak(tokens):
        asked.append(tokens)
        return max(60_000 + tokens, 20_000 + 3 * tokens)

    assert peak(recompute.extrapolated(peak, room)) == pytest.approx(room, rel=0.02)
    assert len(asked) < 9


# --- training curves ---

RUNS = store.read("convergence")
CPU = torch.device("cpu")
SHARE = ("llama", "gemma2", "qwen3_moe", "glm4")  # norms, offsets, experts, packed layers


def trained_curves(case, providers):
    pytest.importorskip("transformers")
    pytest.importorskip("tokenizers")
    ids = convergence.text(case)
    curves = {provider: convergence.train(case, provider, ids, CPU) for provider in providers}
    return {"dtype": case.dtype, "curves": curves}


def made_curves(shift, controls=(1e-4, 2e-4), steps=40):
    """Curves that fall, where another one is off by ``shift(step)``, relative."""
    stock = [5 - 0.05 * step for step in range(steps)]

    def curve(off):
        values = [x * (1 + off(step)) for step, x in enumerate(stock)]
        return {"loss": values, "gradient_norm": values}

    curves = {"stock": curve(lambda _: 0.0), "ours": curve(shift)}
    for number, size in enumerate(controls):
        curves[f"control-{number + 1}"] = curve(lambda step, size=size: size * (-1) ** step)
    return {"dtype": "bfloat16", "curves": curves}


def test_curve_as_near_as_controls_is_within_bounds():
    verdict = convergence.judge(made_curves(lambda step: 3.9 * 2e-4 * (-1) ** step))
    assert verdict.good
    assert verdict.beyond is None
    assert verdict.shares["loss"] == pytest.approx(3.9 / 4, rel=0.01)


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
    verdict = convergence.judge(made_curves(shift))
    assert not verdict.good
    assert verdict.beyond == beyond


def test_end_elsewhere_is_found_where_controls_are_chaotic():
    verdict = convergence.judge(made_curves(lambda step: 0.011, controls=(0.1,)))
    assert verdict.beyond is None
    assert verdict.final == pytest.approx(0.011)
    assert not verdict.good


@pytest.mark.slow
def test_convergence_bounds_reject_a_wrong_gradient(tmp_path):
    case = convergence.Case("llama", "float32", 2, 24, 14)
    row = trained_curves(case, ("stock", "control-1", "control-2", "ours", "bug-gradient"))
    assert convergence.judge(row).good
    assert not convergence.judge(row, "bug-gradient").good
    row |= {"model": "llama", "steps": case.steps}
    data = {"kind": "convergence", "date": store.now(), "device": {"name": "cpu"}}
    data |= {"batch": case.batch, "tokens": case.tokens}
    (path,) = store.add([{**data, "rows": [row]}], tmp_path)
    args = ["--of", str(path), "--draw", str(tmp_path / "curves.png")]
    assert store.newest_of("convergence", path)["rows"] == json.loads(json.dumps([row]))
    assert convergence.main(args) == 0
    assert (tmp_path / "curves.png").stat().st_size > 10_000


@pytest.mark.parametrize("run", RUNS, ids=[store.card(run) for run in RUNS])
def test_committed_curves_are_within_bounds(run):
    for row in run["rows"]:
        verdict = convergence.judge(row)
        assert verdict.good, f"{row['model']} {row['dtype']}: {verdict}"
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
    row = trained_curves(case, ("stock", "control-1", "control-2", "ours"))
    verdict = convergence.judge(row)
    assert verdict.good, verdict
    losses = row["curves"]["ours"]["loss"]
    assert losses[-1] < losses[0] - 0.5  # it has learnt


@pytest.mark.slow
@pytest.mark.parametrize("bug", convergence.BUGS)
def test_bugs_are_beyond_the_bounds(bug):
    case = convergence.Case("llama", "float32", 4, 32, 40)
    row = trained_curves(case, ("stock", "control-1", "control-2", bug))
    assert not convergence.judge(row, bug).good
