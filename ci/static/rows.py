"""Which launches are compiled for which variant, and what came of it, compiled once.

Facts are cached by the source of a kernel and all that the compiler was told, a line each in
``.cache/static/<target>.jsonl``: they are written down as they come, so a run that was stopped goes
on where it was, and one after a change compiles what the change touched.
"""

from __future__ import annotations

import ast
import concurrent.futures
import dataclasses
import functools
import hashlib
import inspect
import json
import multiprocessing
import os
import re
import types
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.runtime.jit import JITFunction

from ci.kernel_source import statements
from ci.static import TARGETS, StaticCase, Target, Variant, report, static_cases, variants
from ci.static import code as static_code
from ci.static.code import Code

ROOT = Path(__file__).parent.parent.parent
CACHE = ROOT / ".cache" / "static"
# beside one launch of every kernel on every target, what the committed table has
SUITE_VARIANTS = {"gfx942": Variant(large=True), "gfx1100": Variant(aligned=False, large=True)}
# NVIDIA, and AMD with waves of 64 and of 32
# of one vendor, CDNA and RDNA by turns
FAMILIES = (("sm90", "sm80", "sm100"), ("gfx942", "gfx1100", "gfx90a", "gfx1201", "gfx950"))
CHUNK = 8  # rows that a process takes at a time
NOTHING = Code(0, 0, 0, 0, 0, {}, {}, 0, 0, (), 0, 0, 0)


class Row(NamedTuple):
    """One launch for one variant, and what its code uses, or why there is none."""

    case: StaticCase
    arch: str
    variant: Variant
    code: Code
    refused: str = ""


class Ask(NamedTuple):
    """Some rows of one target.

    Attributes:
        arch: The target.
        which: ``suite``, ``turn`` or ``full``, a function of this module.
        pattern: Of names of kernels.
        part: The number of a part, from 1, and the number of parts.
    """

    arch: str
    which: str
    pattern: str = ""
    part: tuple[int, int] = (1, 1)


def distinct(cases: Iterable[StaticCase]) -> list[StaticCase]:
    """Cases that the compiler can tell apart; the first of equals."""
    return list({case.identity: case for case in reversed(list(cases))}.values())[::-1]


@functools.cache
def launches(arch: str) -> tuple[StaticCase, ...]:
    """The distinct launches of all operators on one target."""
    from ci.static.cases import calls

    return tuple(distinct(static_cases(TARGETS[arch].info, calls())))


def full(arch: str) -> list[tuple[StaticCase, Variant]]:
    """Every launch in every variant."""
    return [(case, v) for case in launches(arch) for v in variants(TARGETS[arch])]


def suite(arch: str) -> list[tuple[StaticCase, Variant]]:
    """A launch of every kernel, from the middle of them; on some targets in another variant too."""
    found = []
    for name in dict.fromkeys(case.name for case in launches(arch)):
        mine = [case for case in launches(arch) if case.name == name]
        middle = mine[len(mine) // 2]
        found.append((middle, Variant()))
        if arch in SUITE_VARIANTS:
            found.append((middle, SUITE_VARIANTS[arch]))
    return found


def turn(arch: str) -> list[tuple[StaticCase, Variant]]:
    """What `make test` compiles of :func:`suite`: a kernel on one target of each vendor."""
    family = next((f for f in FAMILIES if arch in f), (arch,))
    names = sorted({case.name for case, _ in suite(arch)})
    mine = set(names[family.index(arch) :: len(family)])
    return [(case, variant) for case, variant in suite(arch) if case.name in mine]


def wanted(ask: Ask) -> list[tuple[StaticCase, Variant]]:
    """The launches and variants that are asked for."""
    pairs = {"full": full, "suite": suite, "turn": turn}[ask.which](ask.arch)
    number, parts = ask.part
    return [p for p in pairs if re.search(ask.pattern, p[0].name)][number - 1 :: parts]


# --- what a kernel is made of ---


def parts_of(kernel: Any) -> dict[str, str]:
    """A kernel's statements, those of the package's functions that it calls, and its constants."""
    parts: dict[str, str] = {}
    left = [kernel]
    while left:
        function = left.pop()
        where = f"{function.fn.__module__}.{function.__name__}"
        if where in parts:
            continue
        parts[where] = statements(function.src)
        for used in set(re.findall(r"\b[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*", parts[where])):
            other = _meant(function, used)
            if isinstance(other, JITFunction):
                left.append(other)
            elif isinstance(other, triton.language.constexpr):
                parts[f"{where}: {used}"] = repr(other.value)
            elif hasattr(other, "__triton_builtin__"):  # what the compiler runs itself
                parts[f"{where}: {used}"] = statements(inspect.getsource(other))
    return parts


def text_of(kernel: Any) -> str:
    """The parts of a kernel as one text, the same wherever its files stand."""
    named = []
    for key, text in parts_of(kernel).items():
        where, _, used = key.partition(": ")
        named.append((where.rpartition(".")[2], used, text))
    return repr(sorted(named))


def _meant(function: Any, used: str) -> Any:
    """What a name with dots is in a jitted function; None of Triton's own modules."""
    first, *rest = used.split(".")
    found = function.fn.__globals__.get(first)
    while isinstance(found, types.ModuleType):
        if not rest or not found.__name__.startswith("liger_multi"):
            return None
        found = getattr(found, rest.pop(0), None)
    return found


# --- compiling, once ---


@functools.cache
def _reader() -> str:
    """What the facts depend on beside the kernel: the compiler and the code that reads them."""
    tree = ast.dump(ast.parse(Path(static_code.__file__).read_text(encoding="utf-8")))
    return f"{triton.__version__} {hashlib.sha256(tree.encode()).hexdigest()}"


@functools.cache
def _source(kernel: Any) -> str:
    return text_of(kernel)


def formulas(case: StaticCase) -> tuple[str, ...]:
    """The sources of jitted functions among the constants of a launch."""
    given = case.constants.values()
    return tuple(_source(value) for value in given if isinstance(value, JITFunction))


def _key(case: StaticCase, target: Target, variant: Variant) -> str:
    sources = (_source(case.kernel), *formulas(case))
    told = (_reader(), *sources, case.identity, str(target.gpu), variant)
    return hashlib.sha256(repr(told).encode()).hexdigest()


@functools.cache
def _known(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if file.exists():
        for line in file.read_text(encoding="utf-8").splitlines():
            try:
                key, facts = json.loads(line)
            except ValueError:  # somebody was stopped while writing
                continue
            found[key] = facts
    return found


def known(arch: str) -> dict[str, Any]:
    """Facts of one target by their keys."""
    return _known(CACHE / f"{arch}.jsonl")


def _store(arch: str, key: str, facts: dict[str, Any]) -> None:
    known(arch)[key] = facts
    CACHE.mkdir(parents=True, exist_ok=True)
    # a line break first: half a line of somebody who was stopped spoils no other
    text = "\n" + json.dumps([key, facts])
    with (CACHE / f"{arch}.jsonl").open("ab", buffering=0) as file:
        file.write(text.encode())


def _to_code(facts: dict[str, Any]) -> Code:
    widths = {k: {int(w): n for w, n in facts[k].items()} for k in ("loads", "stores")}
    return Code(**{**facts, **widths, "matrix": tuple(facts["matrix"])})


def facts_of(arch: str, case: StaticCase) -> Code:
    """Facts of one launch, from the cache where it is known."""
    key = _key(case, TARGETS[arch], Variant())
    if key not in known(arch):
        _store(arch, key, dataclasses.asdict(report(case, TARGETS[arch])))
    return _to_code(known(arch)[key])


def compiled(ask: Ask, places: Sequence[int]) -> list[tuple[int, dict[str, Any] | str]]:
    """Facts of some of the rows asked for, or why the compiler made none."""
    pairs, found = wanted(ask), []
    for i in places:
        result: dict[str, Any] | str
        try:
            result = dataclasses.asdict(report(pairs[i][0], TARGETS[ask.arch], pairs[i][1]))
        except Exception as error:  # one failure is a row of the report
            result = " ".join(f"{type(error).__name__}: {error}".split())[:400]
        found.append((i, result))
    return found


def pool(jobs: int | None = None) -> concurrent.futures.ProcessPoolExecutor:
    """Processes that share nothing with this one."""
    context = multiprocessing.get_context("spawn")
    return concurrent.futures.ProcessPoolExecutor(jobs, mp_context=context)


def _missing(asks: Iterable[Ask]) -> list[tuple[Ask, list[int]]]:
    """What of the rows asked for is not in the cache, in chunks."""
    chunks = []
    for ask in asks:
        have, target = known(ask.arch), TARGETS[ask.arch]
        places = [
            i for i, pair in enumerate(wanted(ask)) if _key(pair[0], target, pair[1]) not in have
        ]
        chunks += [(ask, places[at : at + CHUNK]) for at in range(0, len(places), CHUNK)]
    return chunks


def rows_of(
    archs: Sequence[str], which: str, pattern: str = "", part: tuple[int, int] = (1, 1),
    jobs: int | None = None, heard: Callable[[int, int], None] = lambda done, of: None,
) -> list[Row]:  # fmt: skip
    """Rows of several targets; those that nobody has compiled yet by one process a core.

    ``heard`` is told how many rows were compiled, and of how many, whenever some were.
    """
    asks = [Ask(arch, which, pattern, part) for arch in archs]
    chunks, refused = _missing(asks), {}
    count, done = sum(len(places) for _, places in chunks), 0
    if chunks:
        heard(0, count)
        with pool(min(jobs or os.cpu_count() or 1, len(chunks))) as workers:
            waiting = {workers.submit(compiled, *chunk): chunk[0] for chunk in chunks}
            for future in concurrent.futures.as_completed(waiting):
                ask = waiting[future]
                pairs = wanted(ask)  # jitted functions do not travel
                for i, result in future.result():
                    key = _key(pairs[i][0], TARGETS[ask.arch], pairs[i][1])
                    if isinstance(result, str):
                        refused[key] = result
                    else:
                        _store(ask.arch, key, result)
                    done += 1
                heard(done, count)
    found = []
    for ask in asks:
        for case, variant in wanted(ask):
            key = _key(case, TARGETS[ask.arch], variant)
            code = NOTHING if key in refused else _to_code(known(ask.arch)[key])
            found.append(Row(case, ask.arch, variant, code, refused.get(key, "")))
    return found
