"""The table of reported defects: its tests exist, and fail without their fixes."""

import ast
import importlib.util
from pathlib import Path

import pytest

from ci import regressions

ROOT = Path(__file__).parents[2]
FIXES = [(case, fix) for case in regressions.CASES for fix in case.breaks]
IDS = [f"{case.number}-{case.breaks.index(fix)}" for case, fix in FIXES]


@pytest.mark.parametrize(("case", "fix"), FIXES, ids=IDS)
def test_the_tests_of_the_table_exist(case, fix):
    assert fix.names
    for name in fix.names:
        file, _, function = name.partition("::")
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        assert function in {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}, name


@pytest.mark.parametrize(("case", "fix"), FIXES, ids=IDS)
def test_the_fix_stands_where_the_table_says(case, fix):
    assert regressions.broken((ROOT / fix.file).read_text(encoding="utf-8"), fix)


def test_a_moved_fix_is_stale_and_not_skipped():
    fix = regressions.CASES[0].breaks[0]
    for text in ("nothing of it", fix.old * 2):
        with pytest.raises(regressions.StaleError, match=f"{text.count(fix.old)} times, not once"):
            regressions.broken(text, fix)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkout")
    regressions.checkout(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("case", "fix"), FIXES, ids=IDS)
def test_every_test_fails_without_its_fix(case, fix, checkout):
    if fix.environment and importlib.util.find_spec("triton") is None:
        pytest.skip("needs Triton's interpreter")
    assert regressions.survivors(checkout, fix) == []
