"""What every kernel costs on every target: compiled once, and a table that is judged and kept.

Which launches are compiled for which variant, and what came of it. Facts are cached by the source
of a kernel and all that the compiler was told, a line each in ``.cache/static/<target>.jsonl``:
they are written down as they come, so a run that was stopped goes on where it was, and one after a
change compiles what the change touched.

``ci/baseline.txt`` keeps what the suite compiles, a line for each kernel and target: a review sees
what a change costs. It says which Triton compiled it, and of which source the lines of a kernel are
made, so that the suite finds stale ones without compiling anything.
"""

from __future__ import annotations

import argparse
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
import sys
import time
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.runtime.jit import JITFunction

from ci import statements
from ci.static import (
    TARGETS,
    StaticCase,
    Target,
    Variant,
    code as static_code,
    descriptors as static_descriptors,
    kernels,
    missing,
    report,
    variants,
)
from ci.static.code import CORES, Code
from liger_multi.grouping import grouped

# --- rows ---

ROOT = Path(__file__).parent.parent.parent
CACHE = ROOT / ".cache" / "static"
# beside one launch of every kernel on every target, what the committed table has
SUITE_VARIANTS = {"gfx942": Variant(large=True), "gfx1100": Variant(aligned=False, large=True)}
# NVIDIA, CDNA and RDNA by turns
TURNS = ("sm90", "gfx942", "sm80", "gfx1100", "sm100", "gfx90a", "gfx1201", "gfx950")
CHUNK = 8  # rows that a process takes at a time
NOTHING = Code(
    0,
    registers=0,
    spills=0,
    shared=0,
    resident=0,
    loads={},
    stores={},
    unbounded_loads=0,
    unbounded_stores=0,
    matrix=(),
    instructions=0,
    swaps=0,
    narrow_atomics=0,
)


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
    from ci.static.cases import launched

    return tuple(distinct(launched(arch)))


def full(arch: str) -> list[tuple[StaticCase, Variant]]:
    """Every launch in every variant."""
    return [(case, v) for case in launches(arch) for v in variants(TARGETS[arch])]


@functools.cache
def suite(arch: str) -> tuple[tuple[StaticCase, Variant], ...]:
    """A launch of every kernel; on some targets in another variant too.

    It is the launch that the committed table has, so that a new sample changes no other line; of a
    new kernel it is the one in the middle.
    """
    pairs, blocks = [], kept()
    for name in dict.fromkeys(case.name for case in launches(arch)):
        own = [case for case in launches(arch) if case.name == name]
        label = label_of(blocks.get(name, ()), arch)
        chosen = next((case for case in own if case.label == label), own[len(own) // 2])
        pairs.append((chosen, Variant()))
        if arch in SUITE_VARIANTS:
            pairs.append((chosen, SUITE_VARIANTS[arch]))
    return tuple(pairs)


def turn(arch: str) -> list[tuple[StaticCase, Variant]]:
    """What `make test` compiles of :func:`suite`: a kernel on one target.

    The baseline holds every kernel on every target, and has to be of today's sources.
    """
    names = sorted({case.name for case, _ in suite(arch)})
    mine = set(names[TURNS.index(arch) :: len(TURNS)])
    return [(case, variant) for case, variant in suite(arch) if case.name in mine]


def requested(ask: Ask) -> list[tuple[StaticCase, Variant]]:
    """The launches and variants that are asked for."""
    choices: dict[str, Callable[[str], Sequence[tuple[StaticCase, Variant]]]]
    choices = {"full": full, "suite": suite, "turn": turn}
    pairs = choices[ask.which](ask.arch)
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
    value = function.fn.__globals__.get(first)
    while isinstance(value, types.ModuleType):
        if not rest or not value.__name__.startswith("liger_multi"):
            return None
        value = getattr(value, rest.pop(0), None)
    return value


# --- compiling, once ---


@functools.cache
def _reader() -> str:
    """What the facts depend on beside the kernel: the compiler and the code that reads them."""
    files = (static_code.__file__, static_descriptors.__file__)
    trees = [ast.dump(ast.parse(Path(file).read_text(encoding="utf-8"))) for file in files]
    return f"{triton.__version__} {hashlib.sha256(repr(trees).encode()).hexdigest()}"


@functools.cache
def _source(kernel: Any) -> str:
    return text_of(kernel)


def formulas(case: StaticCase) -> tuple[str, ...]:
    """The sources of jitted functions among the constants of a launch."""
    constants = case.constants.values()
    return tuple(_source(value) for value in constants if isinstance(value, JITFunction))


def _key(case: StaticCase, target: Target, variant: Variant) -> str:
    sources = (_source(case.kernel), *formulas(case))
    parts = (_reader(), *sources, case.identity, str(target.gpu), variant)
    return hashlib.sha256(repr(parts).encode()).hexdigest()


@functools.cache
def _known(file: Path) -> dict[str, Any]:
    facts_by_key: dict[str, Any] = {}
    if file.exists():
        for line in file.read_text(encoding="utf-8").splitlines():
            try:
                key, facts = json.loads(line)
            except ValueError:  # somebody was stopped while writing
                continue
            facts_by_key[key] = facts
    return facts_by_key


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
    pairs, outcomes = requested(ask), []
    for i in places:
        result: dict[str, Any] | str
        try:
            result = dataclasses.asdict(report(pairs[i][0], TARGETS[ask.arch], pairs[i][1]))
        except Exception as error:  # one failure is a row of the report
            result = " ".join(f"{type(error).__name__}: {error}".split())[:400]
        outcomes.append((i, result))
    return outcomes


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
            i for i, pair in enumerate(requested(ask)) if _key(pair[0], target, pair[1]) not in have
        ]
        chunks += [(ask, places[at : at + CHUNK]) for at in range(0, len(places), CHUNK)]
    return chunks


def rows_of(
    archs: Sequence[str],
    which: str,
    pattern: str = "",
    part: tuple[int, int] = (1, 1),
    jobs: int | None = None,
    heard: Callable[[int, int], None] = lambda done, of: None,
) -> list[Row]:
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
                pairs = requested(ask)  # jitted functions do not travel
                for i, result in future.result():
                    key = _key(pairs[i][0], TARGETS[ask.arch], pairs[i][1])
                    if isinstance(result, str):
                        refused[key] = result
                    else:
                        _store(ask.arch, key, result)
                    done += 1
                heard(done, count)
    rows = []
    for ask in asks:
        for case, variant in requested(ask):
            key = _key(case, TARGETS[ask.arch], variant)
            code = NOTHING if key in refused else _to_code(known(ask.arch)[key])
            rows.append(Row(case, ask.arch, variant, code, refused.get(key, "")))
    return rows


# --- the table ---

BASELINE = ROOT / "ci" / "baseline.txt"
ARCH = 8
LABEL = 48  # width of what made a launch, in a line of the baseline
BYTES = {"*bf16": 2, "*fp16": 2, "*fp32": 4, "*i32": 4, "*i64": 8}


def _has_tensor(name: str) -> Callable[[StaticCase], bool]:
    return lambda case: case.signature.get(name, "")[:1] == "*"


def _above(name: str, most: int) -> Callable[[StaticCase], bool]:
    return lambda case: case.constant(name, 1) > most


def _any(case: StaticCase) -> bool:
    return True


# kernels, by how their names begin, whose launches may load from tensors of more than 2 GiB by 64
# bits a thread: which of the launches, and why. Nothing may store so.
ADDRESSED = {
    "_embedding_": (_above("ROWS", 1), "each row of a tile stands where an index in memory says"),
    "_rope_angles_": (
        _above("GRIDS", 1),
        "each pair of channels has its grid's angles, tensors apart",
    ),
    "_moe_up_": (
        _has_tensor("order_ptr"),
        "tokens of a tile stand where the order of pairs says",
    ),
    "_moe_bias_gradient_": (_has_tensor("routing_ptr"), "likewise"),
    "_moe_combine_": (_above("TOP_K", 3), "the rows of a token's pairs, 4 numbers for all threads"),
    "_grouped_product_": (
        _any,
        "likewise; without an order, pointers pass by strides of the caller's",
    ),
    "_grouped_weight_": (_any, "likewise, on one side or the other"),
    "_grouped_update_": (_any, "a factor of an adapter has strides of the caller's"),
    "_sparse_attention_": (
        _any,
        "listed keys stand where lists say, heads by strides",
    ),
    "_indexer_scores_": (_any, "likewise"),
    "_indexer_backward_": (_any, "likewise"),
    "_delta_rule_pairs_": (_any, "four tensors advance by columns in one loop"),
}
# kernels, by how their names begin, that may spill: bytes of a thread at most by target, and why
SPILLED = {
    "_ssd_pairs_": (
        {"sm90": 560, "sm100": 16},
        "4 warps, which spill, take half of the time of 8 on an H200; see launch/sm90.yaml",
    ),
    "_ssd_groups_": (
        {"sm90": 640, "sm80": 8},
        "sums of 64 tokens by 128 states stay in registers; see launch/sm90.yaml",
    ),
    "_mixes_backward_": (
        {"sm90": 16},
        "16 rows by 256 columns take 0.85 of the time of what fits; see launch/sm90.yaml",
    ),
    "_attention_backward_keys_": (
        {"sm90": 64},
        "plain causal masks, heads of 128: 4.6 ms in place of 5.8 on an H100; see launch/sm90.yaml",
    ),
    "_kimi_delta_scores_": (
        {"sm90": 48},
        "4 warps take three quarters of the time of 8 on an H100; see launch/sm90.yaml",
    ),
    "_sparse_attention_forward_": (
        {"sm90": 296, "gfx90a": 12, "gfx942": 12},
        "64 by 64 take a third of the time of 32 by 32 on an H100; three registers of a wave of 64",
    ),
    "_sparse_attention_backward_": ({"sm90": 1712}, "likewise, two fifths of the time"),
    "_selective_scan_backward_": (
        {"sm90": 88},
        "packed rows; four tokens a step take 3.0 ms, and two 3.4 on an H100; see launch/sm90.yaml",
    ),
}
# kernels, by how their names begin, that read a few numbers and stream nothing in
NOT_READ = ("_zero_groups_", "_sinkhorn_", "_multi_token_zero_", "_ssd_gates_", "_ssd_steps_")


# --- judging ---


def streamed(case: StaticCase, code: Code) -> int:
    """Bytes a thread that a streaming kernel loads at a time: 16, or all that its tile has."""
    widths = [
        BYTES.get(type_name, 16) for type_name in case.signature.values() if type_name[0] == "*"
    ]
    tile = case.constant("ROWS", 1) * case.constant("BLOCK", 2**20)
    return max(1, min(16, tile * min(widths, default=16) // code.threads))


def failures(row: Row) -> list[str]:
    """What a row must not have."""
    case, info, code = row.case, TARGETS[row.arch].info, row.code
    if row.refused:
        return [f"does not compile: {row.refused}"]
    wrong = []
    if code.threads > info.max_threads:
        wrong.append(f"{code.threads} threads, at most {info.max_threads}")
    if code.shared > info.shared_bytes:
        wrong.append(f"{code.shared} bytes on chip, at most {info.shared_bytes}")
    # formulas do not know alignment, and accesses of 2 bytes take the registers of some launches:
    # the table shows what those spill
    if code.spills > may_spill(case, row.arch) and row.variant.aligned:
        wrong.append(f"{code.spills} bytes of spilled registers")
    required = streamed(case, code)
    reads = not case.name.startswith(NOT_READ)
    if reads and case.streams and row.variant.aligned and code.widest_load < required:
        wrong.append(f"loads {code.widest_load} bytes at a time, wanted {required}")
    if code.swaps:
        wrong.append(f"{code.swaps} compare-and-swap instructions")
    if code.narrow_atomics:
        wrong.append(f"{code.narrow_atomics} atomic operations on 16 bits")
    if code.misread:
        wrong.append(f"{code.misread} GEMMs with kernel arguments in descriptors")
    if row.variant.large and code.unbounded_stores:
        wrong.append(f"{code.unbounded_stores} 16-byte stores lost their buffer operation")
    if row.variant.large and code.unbounded_loads and not addressed(case):
        wrong.append(f"{code.unbounded_loads} 16-byte loads lost their buffer operation")
    return wrong


def may_spill(case: StaticCase, arch: str) -> int:
    """Bytes of a thread that a launch may spill: any, if it is for what is not finite alone."""
    if case.constants.get("ISOLATED"):
        return sys.maxsize
    limits = (
        most.get(arch, 0) for name, (most, _) in SPILLED.items() if case.name.startswith(name)
    )
    return next(limits, 0)


def addressed(case: StaticCase) -> bool:
    """Whether a launch gathers, so that its loads have no common base."""
    return any(case.name.startswith(name) and which(case) for name, (which, _) in ADDRESSED.items())


def verdicts(rows: Iterable[Row]) -> list[str]:
    """One line a failure."""
    return [
        f"{row.arch} {row.case.name} ({row.case.label}, {row.variant.name}): {text}"
        for row in rows
        for text in failures(row)
    ]


# --- writing ---


def occupancy(row: Row) -> int:
    """Threads that a core holds, in percent of what it could."""
    return round(100 * row.code.resident / CORES[row.arch].threads)


def _widths(widths: dict[int, int]) -> str:
    return " ".join(f"{width}x{count}" for width, count in widths.items()) or "-"


def line(row: Row) -> str:
    """One row in full."""
    code = row.code
    facts = [
        f"{code.threads:>5} threads",
        f"{code.registers:>4} registers",
        f"{occupancy(row):>4} %",
        f"{code.shared:>6} B",
        f"ld {_widths(code.loads)}",
        f"st {_widths(code.stores)}",
        f"{code.instructions} instructions",
        *[f"mma {name}" for name in code.matrix],
        *_bad(code),
    ]
    return "  ".join(facts)


def _bad(code: Code) -> list[str]:
    said = [f"{code.spills} B spilled"] if code.spills else []
    said += [f"{code.swaps} swaps"] if code.swaps else []
    said += [f"{code.narrow_atomics} 16-bit atomics"] if code.narrow_atomics else []
    lost = {"loads": code.unbounded_loads, "stores": code.unbounded_stores}
    return said + [f"{count} unbounded {what}" for what, count in lost.items() if count]


def _short(row: Row) -> str:
    """A variant beside the first: what usually differs."""
    facts = [f"{row.code.registers} r", f"{occupancy(row)} %", f"{row.code.instructions} i"]
    return f"{row.variant.name} {', '.join([*facts, *_bad(row.code)])}"


def block(name: str, rows: Sequence[Row]) -> list[str]:
    """The lines of one kernel in the baseline: its source, then a line a target and launch."""
    launches = grouped(((row.arch, row.case.label, row.case.identity), row) for row in rows)
    out = [f"{name} {sources(name)}"]
    for (arch, label, _), (first, *others) in launches.items():
        facts = "; ".join([line(first), *map(_short, others)])
        out.append(f"  {arch:<{ARCH}}{label + ' ':<{LABEL}}{facts}")
    return out


def page(blocks: Mapping[str, Sequence[str]]) -> str:
    """The baseline, of the lines of its kernels."""
    out = [f"# triton {triton.__version__}: made by `make static ARGS=--write`"]
    for name in sorted(blocks):
        out += ["", *blocks[name]]
    return "\n".join(out) + "\n"


def label_of(lines: Sequence[str], arch: str) -> str:
    """What made the launch of a kernel on a target; empty without one."""
    matches = (re.match(rf"  {arch} +(\S.*?) +\d+ threads ", text) for text in lines)
    return next((match[1] for match in matches if match), "")


def kept() -> dict[str, list[str]]:
    """The lines of every kernel in the kept baseline."""
    text = BASELINE.read_text(encoding="utf-8") if BASELINE.exists() else ""
    parts = [part.strip("\n").split("\n") for part in text.split("\n\n")[1:]]
    return {lines[0].partition(" ")[0]: lines for lines in parts}


def compiled_by() -> str:
    """The Triton that compiled the kept baseline; empty without one."""
    text = BASELINE.read_text("utf-8") if BASELINE.exists() else ""
    match = re.match(r"# triton (\S+): ", text)
    return match[1] if match else ""


@functools.cache
def _facts() -> dict[str, str]:
    """For every kernel, the launches of its baseline."""
    texts = (
        (case.name, " ".join([arch, case.label, case.identity, variant.name, *formulas(case)]))
        for arch in TARGETS
        for case, variant in suite(arch)
    )
    return {name: "\n".join(lines) for name, lines in grouped(texts).items()}


def sources(name: str) -> str:
    """A hash of a kernel's statements, of those that it calls, and of its launches."""
    text = text_of(kernels()[name]) + _facts().get(name, "")
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def stale() -> dict[str, str]:
    """Kernels whose baseline is absent or of another source, and baselines of no kernel."""
    blocks, reasons = kept(), dict[str, str]()
    for name in sorted(kernels()):
        lines = blocks.get(name, [""])
        absent = [arch for arch in TARGETS if not label_of(lines, arch)]
        if absent:
            reasons[name] = f"absent for {', '.join(absent)}"
        elif lines[0] != f"{name} {sources(name)}":
            reasons[name] = "of another source or other launches"
    return reasons | dict.fromkeys(blocks.keys() - kernels(), "of a kernel that is no more")


def write_baseline(rows: Sequence[Row]) -> None:
    """Write the lines of the kernels that have rows; remove those of kernels that are gone.

    Raises:
        ValueError: Lines that stay were compiled by another Triton.
    """
    names = {row.case.name for row in rows}
    stay = {n: b for n, b in kept().items() if n in kernels() and n not in names}
    if stay and compiled_by() != triton.__version__:
        raise ValueError(
            f"{BASELINE.name} is of triton {compiled_by()}, this is {triton.__version__}: "
            "write every kernel, without --kernel"
        )
    blocks = {name: block(name, [r for r in rows if r.case.name == name]) for name in names}
    BASELINE.write_text(page({**stay, **blocks}), encoding="utf-8")
    print(f"wrote {BASELINE.relative_to(ROOT)}")


def write_table(arch: str) -> str:
    """Write the launch table of one architecture from the static model."""
    from ci.static.cases import calls
    from ci.static.launch import entries, write

    chosen = {label: call for label, call in calls().items() if "float32" not in label}
    return str(write(TARGETS[arch].info, entries(arch, chosen, facts_of)).relative_to(ROOT))


def _part(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise argparse.ArgumentTypeError(f"wants a part such as 1/4, got {text!r}")
    return int(match[1]), int(match[2])


def _progress(every: float) -> Callable[[int, int], None]:
    """Say on the terminal how far the compilers are, every so many seconds."""
    began = said = time.monotonic()

    def heard(done: int, of: int) -> None:
        nonlocal said
        now = time.monotonic()
        if done in (0, of) or now - said >= every:
            said = now
            print(f"compiled {done} of {of} rows, {now - began:.0f} s", file=sys.stderr, flush=True)

    return heard


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m ci.static", description=main.__doc__)
    parser.add_argument(
        "--full",
        action="store_true",
        help="every launch in every variant (hours of a core; stopped, it goes on where it was)",
    )
    parser.add_argument("--write", action="store_true", help="rewrite ci/baseline.txt")
    parser.add_argument("--target", action="append", choices=TARGETS, help="default: all")
    parser.add_argument("--kernel", default="", help="only kernels whose name has this pattern")
    parser.add_argument(
        "--part", type=_part, default=(1, 1), metavar="I/N", help="only every Nth row, from the Ith"
    )
    parser.add_argument("--jobs", type=int, help="processes; default: one a core")
    parser.add_argument(
        "--store", type=Path, help="write the table to this file; with --full, print failures alone"
    )
    parser.add_argument("--failures", type=Path, help="write the failures to this file")
    parser.add_argument(
        "--tables",
        action="store_true",
        help="write the launch tables of the "
        "targets that nobody measured on, by a static model (minutes)",
    )
    options = parser.parse_args()
    some = options.full or options.part != (1, 1) or options.target
    if options.write and some:
        parser.error(
            "ci/baseline.txt has what the suite compiles, for all targets: without --full, "
            "--part and --target"
        )
    return options


def _write_lines(path: Path | None, lines: Sequence[str]) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"{text}\n" for text in lines), encoding="utf-8")


def main() -> int:
    """Compile every Triton kernel for every target; print, judge and keep what it costs."""
    options = _options()
    archs = [arch for arch in options.target or TARGETS if missing(TARGETS[arch]) is None]
    absent = [arch for arch in options.target or TARGETS if arch not in archs]
    for arch in absent:
        print(f"{arch}: {missing(TARGETS[arch])}")
    if options.tables:
        chosen = [a for a in archs if TARGETS[a].gpu.backend == "hip"]
        with pool(options.jobs) as workers:
            for path in workers.map(write_table, chosen):
                print(f"wrote {path}")
        return 0
    which = "full" if options.full else "suite"
    heard = _progress(15.0)
    rows = rows_of(archs, which, options.kernel, options.part, options.jobs, heard)
    wrong = verdicts(rows)
    if options.write:
        if absent or any(row.refused for row in rows):
            print("\n".join([*wrong, "wrote nothing: some rows are missing"]))
            return 1
        write_baseline(rows)
    table = [
        f"{r.case.name:<44}{r.case.label:<40}{r.variant.name:<17}{r.arch:<8}{line(r)}" for r in rows
    ]
    _write_lines(options.store, table)
    _write_lines(options.failures, wrong)
    if not options.write and not (options.full and options.store):
        print("\n".join([*table, ""]))
    print("\n".join(wrong))
    print(
        f"{len(rows)} compiled launches of {len({r.case.name for r in rows})} kernels for "
        f"{len(archs)} targets, {len(wrong)} failures"
    )
    return 1 if wrong or absent else 0
