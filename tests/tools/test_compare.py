"""Two benchmarks held against each other: what counts as worse, and what is only noise."""

import copy
import json

import pytest

from benchmarks import store
from ci.docs import benchmarks as docs_benchmarks

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


def run(tmp_path, change, arguments=()):
    new = copy.deepcopy(FILE)
    change(new)
    paths = [tmp_path / "old.json", tmp_path / "new.json"]
    for path, data in zip(paths, (FILE, new), strict=True):
        path.write_text(json.dumps(data), encoding="utf-8")
    return store.main(["compare", *map(str, paths), *arguments])


def row(**fields):
    return lambda data: data["rows"][0].update(fields)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda data: None, 0),
        (row(both_ms=1.5), 0),  # the same share of a slower device's peak
        (row(percent_of_peak={"both": 76.0}), 0),  # x 1.05, inside of margin and spreads
        (row(percent_of_peak={"both": 70.0}), 1),
        (row(percent_of_peak={"both": 70.0}, both_spread_ms=0.1), 0),  # a noisy run
        (row(percent_of_peak={}, both_ms=1.2), 1),
        (row(extra_bytes=2**24 + 2**19), 0),
        (row(extra_bytes=2**25), 1),
        (row(error={"tolerances": 1.2}), 1),
    ],
)
def test_worse_is_beyond_the_noise(tmp_path, capsys, change, code):
    assert run(tmp_path, change) == code
    assert ("WORSE" in capsys.readouterr().out) == bool(code)


def test_what_cannot_be_compared_is_said(tmp_path, capsys):
    def other(data):
        data["device"] = {"name": "another card"}

    with pytest.raises(SystemExit):
        run(tmp_path, other)
    assert "'a card' and 'another card'" in capsys.readouterr().err
    assert run(tmp_path, other, ["--across"]) == 0
    with pytest.raises(SystemExit):
        run(tmp_path, row(provider="liger"))
    assert "share no row of 'ours'" in capsys.readouterr().err


def taken(commit, date, rows):
    return {"kind": "operators", **FILE, "rows": rows, "commit": commit, "date": date}


def test_the_page_shows_the_newest_rows_in_whatever_order_they_are_kept(tmp_path, monkeypatch):
    """They were sorted by what follows the day in their names."""
    liger = ROW | {"provider": "liger", "both_ms": 2.0}
    for commit, moment, ms, rows in (
        ("aa", "2026-01-02T23", 4.0, [liger]),
        ("bb", "2026-01-03T05", 5.0, []),
        ("cc", "2026-01-02T10", 3.0, [liger]),
        ("dd", "2026-01-02T09", 1.0, [liger]),
    ):
        run = taken(commit, f"{moment}:00:00+00:00", [ROW | {"both_ms": ms}, *rows])
        (path,) = store.add([run], tmp_path)
    assert [run["commit"] for run in store.load(path)] == ["aa", "bb"]
    monkeypatch.setattr(store, "RESULTS", tmp_path)
    page = docs_benchmarks.page()
    assert "| 8x4 | ours | 5 | 1.00 | ████████████████████████ | 80 % | 16 |" in page
    # what was not measured again stands beside ours of its own run
    assert "| 8x4 | liger | 2 | 0.50 | ██████████ | 80 % | 16 |" in page
    assert "Measured 2026-01-02, aa (torch 2); 2026-01-03, bb (torch 2)." in page


@pytest.mark.parametrize("date", ["2026-01-02", "", "yesterday", "2026-01-02T10:00:00"])
def test_a_result_without_a_time_is_refused(tmp_path, date):
    (tmp_path / "a-card.json").write_text(store.text([taken("aa", date, [ROW])]))
    with pytest.raises(ValueError, match=r"a-card\.json has the date"):
        store.read("operators", tmp_path)
    with pytest.raises(ValueError, match="has the date"):
        store.add([taken("aa", date, [ROW])], tmp_path)
