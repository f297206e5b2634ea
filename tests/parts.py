"""What of the suite runs together: on one worker of ``-n``, and in one part of ``--part i/n``.

A unit is a file, whose module fixtures are then made once; a file of samples has no such fixtures
and is one unit per operator, as is a test that takes longest in its file. Units go out with the
longest first, by the times of ``seconds.json``, which ``--record-seconds`` writes. A unit without a
time counts by its tests.
"""

import json
from collections import Counter
from pathlib import Path

import pytest

from tests import harness

SECONDS = Path(__file__).parent / "seconds.json"
BY_PARAMETER = (
    *("test_ops.py", "test_contracts.py", "test_autograd_rules.py"),
    "test_npu.py::test_kernels_compile_as_listed",
)
A_TEST = 0.05


def unit(nodeid):
    """The unit of a test."""
    path, _, name = nodeid.partition("::")
    file, (test, _, values) = path.rpartition("/")[2], name.partition("[")
    if not {file, f"{file}::{test}"}.isdisjoint(BY_PARAMETER):
        return f"{file}[{values.partition('-')[0].removesuffix(']')}]"
    return file


def run_name(config):
    """What times are recorded under: kernels that are interpreted take others, as do slow tests."""
    kind = "interpreted" if harness.interpreted() else "native"
    return f"{kind} {config.getoption('markexpr')}".strip()


def recorded():
    """Seconds by run and unit."""
    return json.loads(SECONDS.read_text(encoding="utf-8")) if SECONDS.exists() else {}


def weights(nodeids, config):
    """Seconds by unit, the longest first."""
    counts = Counter(map(unit, nodeids))
    known = recorded().get(run_name(config), {})
    found = {name: known.get(name, count * A_TEST) for name, count in counts.items()}
    return dict(sorted(found.items(), key=lambda pair: (-pair[1], pair[0])))


def shares(seconds, count):
    """The part of every unit, from 1: each goes where the least is so far."""
    totals, found = [0.0] * count, {}
    for name, each in seconds.items():
        part = min(range(count), key=totals.__getitem__)
        totals[part] += each
        found[name] = part + 1
    return found


def parse(text):
    """Part and count of ``2/4``; without a text, all of one."""
    if not text:
        return 1, 1
    part, _, count = text.partition("/")
    if not (part.isdigit() and count.isdigit() and 1 <= int(part) <= int(count)):
        raise pytest.UsageError(f"--part {text}: expected i/n, with i from 1 to n")
    return int(part), int(count)


def select(config, items):
    """Keep the units of one part, and put the longest first."""
    seconds = weights([item.nodeid for item in items], config)
    if not config.pluginmanager.hasplugin("randomly"):
        order = {name: index for index, name in enumerate(seconds)}
        items.sort(key=lambda item: order[unit(item.nodeid)])
    part, count = parse(config.getoption("--part"))
    found = shares(seconds, count)
    config.hook.pytest_deselected(items=[i for i in items if found[unit(i.nodeid)] != part])
    items[:] = [item for item in items if found[unit(item.nodeid)] == part]


class Recorder:
    """Writes what every unit took."""

    def __init__(self, config):
        self.config, self.seconds = config, Counter()

    def pytest_runtest_logreport(self, report):
        self.seconds[unit(report.nodeid)] += report.duration

    def pytest_sessionfinish(self):
        every = recorded()
        found = {n: round(s, 1) for n, s in sorted(self.seconds.items()) if s >= 0.5}
        every[run_name(self.config)] = every.get(run_name(self.config), {}) | found
        text = json.dumps(dict(sorted(every.items())), indent=1, sort_keys=True)
        SECONDS.write_text(text + "\n", encoding="utf-8")


def scheduler(config, log):
    """A worker takes a unit at a time, in the order of the items; for xdist."""
    from xdist.scheduler import LoadScopeScheduling

    class Units(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return unit(nodeid)

    config.option.loadscopereorder = False
    return Units(config, log)
