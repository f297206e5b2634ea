"""Every Triton kernel, compiled for eight accelerators: it fits, spills nothing, loads 16 bytes."""

import concurrent.futures
import functools
import multiprocessing
import os

import pytest

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("interpreted kernels cannot be compiled", allow_module_level=True)
pytest.importorskip("triton", reason="needs Triton's code generators")

from ci.static import TARGETS, kernels, report, static_cases
from ci.static_cases import calls


def _reports(arch):
    cases = static_cases(TARGETS[arch].info, calls())
    return [(c.name, c.label, c.streams, report(c, TARGETS[arch])) for c in cases]


@functools.cache
def _every_report():
    # one process a core: compiling is what this file waits for
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(mp_context=spawn) as pool:
        return dict(zip(TARGETS, pool.map(_reports, TARGETS), strict=True))


@pytest.mark.parametrize("arch", TARGETS)
def test_kernels_fit(arch):
    info = TARGETS[arch].info
    wrong = []
    for name, label, streams, facts in _every_report()[arch]:
        if facts.threads > info.max_threads:
            wrong.append(f"{name} ({label}): {facts.threads} threads, at most {info.max_threads}")
        if facts.shared > info.shared_bytes:
            wrong.append(f"{name} ({label}): {facts.shared} bytes, at most {info.shared_bytes}")
        if facts.spills:
            wrong.append(f"{name} ({label}): {facts.spills} bytes of spilled registers")
        if streams and facts.widest_load != 16:
            wrong.append(f"{name} ({label}): loads {facts.widest_load} bytes at a time, wanted 16")
    assert not wrong, "\n".join(wrong)


def test_every_kernel_has_a_case():
    assert set(kernels()) == {c.name for c in static_cases(TARGETS["sm90"].info, calls())}


def test_cases_are_real_launches():
    """A case carries what a launcher passed: the formula's numbers for that device."""
    small, large = (static_cases(TARGETS[arch].info, calls()) for arch in ("gfx90a", "sm90"))
    warps = [[case.options["num_warps"] for case in cases] for cases in (small, large)]
    assert warps[0] != warps[1]
    assert all(case.streams for case in large), [c.label for c in large if not c.streams]
