"""The committed results: one file a card, with the newest row of every measurement."""

import json

import pytest

from benchmarks import store
from ci import figures, results

CARD = {"name": "A Card 9000"}
FILES = [path for path in sorted(store.RESULTS.glob("*.json")) if "suite-" not in path.name]


def run(kind, hour, rows, **head):
    date = f"2026-01-01T{hour:02}:00:00+00:00"
    return {"kind": kind, "date": date, "commit": f"c{hour}", "device": CARD, **head, "rows": rows}


def timed(**speeds):
    return [{"run": "m:1x2", "variant": who, "tokens_per_second": s} for who, s in speeds.items()]


def stored(folder):
    return {
        (one["commit"], row["variant"]): row["tokens_per_second"]
        for one, row in store.rows("models", folder)
    }


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_the_newest_row_stays_with_what_it_was_compared_with(tmp_path, order):
    runs = [
        run("models", 1, timed(ours=1.0, liger=2.0, stock=3.0), limit_gb=None),
        run("models", 2, timed(ours=4.0, liger=5.0), limit_gb=None),
        run("models", 3, timed(ours=6.0), limit_gb=None),
    ]
    for place in order:
        (path,) = store.add([runs[place]], tmp_path)
    assert path.name == "a-card-9000.json"
    assert stored(tmp_path) == {
        ("c1", "ours"): 1.0, ("c1", "liger"): 2.0, ("c1", "stock"): 3.0,
        ("c2", "ours"): 4.0, ("c2", "liger"): 5.0, ("c3", "ours"): 6.0,
    }  # fmt: skip
    store.add([run("models", 4, timed(ours=7.0, liger=8.0, stock=9.0), limit_gb=None)], tmp_path)
    assert {commit for commit, _ in stored(tmp_path)} == {"c4"}


def test_what_is_measured_elsewhere_replaces_nothing(tmp_path):
    store.add([run("models", 1, timed(ours=1.0), limit_gb=None)], tmp_path)
    store.add([run("models", 2, timed(ours=2.0), limit_gb=16.0)], tmp_path)
    other = {**run("models", 3, timed(ours=3.0), limit_gb=None), "device": {"name": "cpu-x86_64"}}
    (path,) = store.add([other], tmp_path)
    assert path.name == "cpu.json"
    assert sorted(stored(tmp_path).values()) == [1.0, 2.0, 3.0]


def test_a_run_that_grows_is_written_again(tmp_path):
    rows = timed(ours=1.0, liger=2.0)
    for count in (1, 2):
        store.add([run("models", 1, rows[:count], limit_gb=None)], tmp_path)
    assert len(store.rows("models", tmp_path)) == 2
    assert len(store.read("models", tmp_path)) == 1


def test_a_search_that_nothing_stopped_leaves_the_older_end(tmp_path):
    def searched(longest, failed):
        row = {"model": "m", "provider": "ours", "longest": longest, "shortest_failed": failed}
        return [row]

    store.add([run("longest", 1, searched(8, 9), limit_gb=None)], tmp_path)
    store.add([run("longest", 2, searched(10, None), limit_gb=None)], tmp_path)
    assert [row["longest"] for _, row in store.rows("longest", tmp_path)] == [8, 10]
    store.add([run("longest", 3, searched(11, 12), limit_gb=None)], tmp_path)
    assert [row["longest"] for _, row in store.rows("longest", tmp_path)] == [11]


@pytest.mark.parametrize(
    ("change", "said"),
    [({"kind": "speeds"}, "kind 'speeds'"), ({"date": "2026-01-01"}, "has the date '2026-01-01'")],
)
def test_a_run_that_cannot_be_ordered_is_refused(tmp_path, change, said):
    with pytest.raises(ValueError, match=said):
        store.add([run("models", 1, timed(ours=1.0)) | change], tmp_path)
    assert not list(tmp_path.iterdir())


def test_files_of_another_machine_are_merged(tmp_path, capsys):
    (tmp_path / "mine.json").write_text(store.text([run("models", 1, timed(ours=1.0))]))
    bench = run("operators", 1, [{"op": "x", "sample": "y", "provider": "ours"}], ceilings={})
    del bench["kind"]  # as `liger-multi bench --output` writes it
    (tmp_path / "bench.json").write_text(json.dumps(bench))
    files = [str(tmp_path / name) for name in ("mine.json", "bench.json")]
    assert store.main([*files, "--into", str(tmp_path / "out")]) == 0
    (path,) = (tmp_path / "out").iterdir()
    assert [one["kind"] for one in store.load(path)] == ["operators", "models"]
    (tmp_path / "bad.json").write_text("[]")
    with pytest.raises(SystemExit):
        store.main([str(tmp_path / "bad.json")])
    assert "is no file of results" in capsys.readouterr().err


def test_what_a_command_printed_is_kept_as_notes(tmp_path, capsys):
    text = tmp_path / "out.txt"
    text.write_text("a step takes 1.5 ms\n\nand 2 GiB  \n")
    given = ["--notes", "steps", "--device", "A Card", "--into", str(tmp_path)]
    assert store.main([str(text), *given]) == 0
    assert figures.lines("a-card", "steps", tmp_path) == ["a step takes 1.5 ms", "and 2 GiB"]
    text.write_text("a step takes 1.4 ms")
    run = {**store.notes(text, "steps", "A Card", "abc"), "date": "2126-01-01T00:00:00+00:00"}
    store.add([run], tmp_path)
    assert figures.lines("a-card", "steps", tmp_path) == ["a step takes 1.4 ms"]
    with pytest.raises(SystemExit):
        store.main([str(text), "--notes", "steps"])
    assert "--notes wants one file, and --device" in capsys.readouterr().err


def test_the_commit_is_short(monkeypatch):
    for given, shown in (("ab" * 20 + "+", "abababa+"), ("unknown", "unknown")):
        monkeypatch.setenv("COMMIT", given)
        assert store.commit() == shown


# --- what is committed ---


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_a_committed_file_has_nothing_old(path):
    """It is what its own runs, merged once more, would be: a row a line, and no older row."""
    again = store.text(store.merge([], store.load(path))).splitlines()
    for line, other in zip(path.read_text(encoding="utf-8").splitlines(), again, strict=True):
        assert line[:200] == other[:200]
        assert len(line) == len(other)
    assert {store.path_of(one) for one in store.load(path)} == {path}


def test_results_are_few_files():
    files = [path for path in store.RESULTS.rglob("*") if path.is_file()]
    assert all(path.suffix == ".json" for path in files)
    files += [*(store.ROOT / "ci" / "baseline").iterdir(), *(store.ROOT / "tests").rglob("*.json")]
    assert len(files) <= 25


def suite(part, day, failed=0):
    counts = {"passed": 3, **({"failed": failed} if failed else {})}
    facts = {"device": "cpu", "name": "a machine"}
    return results.Result(part, [], facts, {}, "abc", f"2026-01-0{day}", counts, 1.0)


def test_a_suite_keeps_the_newest_result_of_a_part_and_the_green_one_before_a_red_one(tmp_path):
    results.keep("card", [suite("native", 1), suite("cuda", 1), suite("cuda", 2)], tmp_path)
    path = results.keep("card", [suite("native", 4), suite("cuda", 3, failed=1)], tmp_path)
    found = {(one.part, one.date[-1]) for one in results.kept(tmp_path)}
    assert found == {("native", "4"), ("cuda", "3"), ("cuda", "2")}
    assert len(path.read_text().splitlines()) == 5, "a line a result"
    results.keep("card", [suite("cuda", 5)], tmp_path)
    assert {(one.part, one.date[-1]) for one in results.kept(tmp_path)} == {
        ("native", "4"), ("cuda", "5"),
    }  # fmt: skip


def test_committed_suites_have_nothing_old(tmp_path):
    for path in store.RESULTS.glob("suite-*.json"):
        again = results.keep(path.stem.removeprefix("suite-"), results._load(path), tmp_path)
        assert again.read_text(encoding="utf-8") == path.read_text(encoding="utf-8")
