"""Two benchmarks held against each other: what counts as worse, and what is only noise."""

import copy
import json

import pytest

from ci import compare, docs_benchmarks, measured

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
    return compare.main([*map(str, paths), *arguments])


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


def kept(folder, name, date, rows):
    folder.mkdir(exist_ok=True)
    data = FILE | {"rows": rows, "commit": name[-2:]} | ({"date": date} if date else {})
    (folder / f"{name}.json").write_text(json.dumps(data), encoding="utf-8")


def test_the_page_shows_the_newest_rows_whatever_files_are_called(tmp_path, monkeypatch):
    """They were sorted by what follows the day in their names."""
    folder = tmp_path / "benchmarks"
    liger = ROW | {"provider": "liger", "both_ms": 2.0}
    for name, hour, ms, rows in (
        ("card-2026-01-02", "23", 4.0, [liger]),
        ("card-2026-01-02-10", "09", 1.0, [liger]),
        ("card-2026-01-02-side-by-side", "10", 3.0, [liger]),
        ("card-2026-01-03", "05", 5.0, []),
    ):
        date = f"{name[5:15]}T{hour}:00:00+00:00"
        kept(folder, name, date, [ROW | {"both_ms": ms}, *rows])
    monkeypatch.setattr(measured, "ROOT", tmp_path)
    page = docs_benchmarks.page()
    assert "| 8x4 | ours | 5 | 1.00 | ████████████████████████ | 80 % | 16 |" in page
    # what was not measured again stands beside ours of its own run
    assert "| 8x4 | liger | 2 | 0.50 | ██████████ | 80 % | 16 |" in page
    assert "`card-2026-01-02.json`" in page
    assert "`card-2026-01-03.json`" in page
    assert "-side-by-side" not in page


@pytest.mark.parametrize("date", ["2026-01-02", "", "yesterday", "2026-01-02T10:00:00"])
def test_a_result_without_a_time_is_refused(tmp_path, date):
    kept(tmp_path, "card-2026-01-02", date, [ROW])
    with pytest.raises(ValueError, match=r"card-2026-01-02\.json has the date"):
        measured.read(folder=tmp_path)
