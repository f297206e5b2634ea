"""Rows: what the machine code of launches uses, compiled once by one process a core."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import multiprocessing
import os
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from ci.static import TARGETS, StaticCase, Variant, code as static_code, descriptors, report
from ci.static.code import Code
from ci.static.selection import Request
from ci.static.store import key_of, store

CHUNK = 8  # rows that a process takes at a time
EVERY = 15.0  # seconds between two lines about progress
NOTHING = Code(0, 0, 0, 0, 0, {}, {}, 0, 0, (), 0, 0, 0)


class Row(NamedTuple):
    """One launch for one variant, and what its code uses, or why there is none."""

    case: StaticCase
    arch: str
    variant: Variant
    code: Code
    refused: str = ""


def rows_of(archs: Iterable[str], selection: str, pattern: str = "") -> list[Row]:
    """Rows of several targets; what nobody has compiled yet is compiled."""
    requests = [Request(arch, selection, pattern) for arch in archs]
    refused, rows = _compile_missing(requests), []
    for request in requests:
        for case, variant in request.pairs():
            key = _key(request.arch, case, variant)
            code = NOTHING if key in refused else to_code(store(request.arch)[key])
            rows.append(Row(case, request.arch, variant, code, refused.get(key, "")))
    return rows


def facts_of(arch: str, case: StaticCase) -> Code:
    """Facts of one launch, from the store where it is known."""
    key = _key(arch, case, Variant())
    if key not in store(arch):
        store(arch).keep(key, dataclasses.asdict(report(case, TARGETS[arch])))
    return to_code(store(arch)[key])


def to_code(facts: dict[str, Any]) -> Code:
    """Facts as JSON keeps them."""
    widths = {k: {int(w): n for w, n in facts[k].items()} for k in ("loads", "stores")}
    return Code(**{**facts, **widths, "matrix": tuple(facts["matrix"])})


def _key(arch: str, case: StaticCase, variant: Variant) -> str:
    return key_of(case, (static_code, descriptors), str(TARGETS[arch].gpu), variant)


def pool(workers: int | None = None) -> concurrent.futures.ProcessPoolExecutor:
    """Processes that share nothing with this one."""
    context = multiprocessing.get_context("spawn")
    return concurrent.futures.ProcessPoolExecutor(workers, mp_context=context)


def _compile_missing(requests: Sequence[Request]) -> dict[str, str]:
    """Compile what the stores lack; why some launches do not compile, by key."""
    chunks, refused = _missing(requests), dict[str, str]()
    begin = said = time.monotonic()
    if not chunks:
        return refused
    with pool(min(os.cpu_count() or 1, len(chunks))) as workers:
        futures = {workers.submit(_compiled, *chunk): chunk[0].arch for chunk in chunks}
        for done, future in enumerate(concurrent.futures.as_completed(futures), 1):
            for key, result in future.result():
                if isinstance(result, str):
                    refused[key] = result
                else:
                    store(futures[future]).keep(key, result)
            now = time.monotonic()
            if now - said >= EVERY or done == len(chunks):
                said, part = now, f"{done} of {len(chunks)} chunks of {CHUNK} rows"
                print(f"compiled {part}, {now - begin:.0f} s", file=sys.stderr, flush=True)
    return refused


def _missing(requests: Iterable[Request]) -> list[tuple[Request, list[int]]]:
    """Which of the pairs of requests are in no store, in chunks."""
    chunks = []
    for request in requests:
        known = store(request.arch)
        keys = [_key(request.arch, *pair) for pair in request.pairs()]
        places = [i for i, key in enumerate(keys) if key not in known]
        chunks += [(request, places[at : at + CHUNK]) for at in range(0, len(places), CHUNK)]
    return chunks


def _compiled(request: Request, places: Iterable[int]) -> list[tuple[str, dict[str, Any] | str]]:
    """Facts of some pairs of a request by key, or why the compiler made none.

    Jitted functions do not travel between processes, so each makes its own pairs.
    """
    pairs = request.pairs()
    return [(_key(request.arch, *pairs[i]), _facts(request.arch, *pairs[i])) for i in places]


def _facts(arch: str, case: StaticCase, variant: Variant) -> dict[str, Any] | str:
    try:
        return dataclasses.asdict(report(case, TARGETS[arch], variant))
    except Exception as error:  # one failure is a row of the report
        return " ".join(f"{type(error).__name__}: {error}".split())[:400]
