"""Every Triton kernel, compiled for eight accelerators: it fits, spills nothing, loads 16 bytes."""

import dataclasses
import os
import re
from functools import partial

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("interpreted kernels cannot be compiled", allow_module_level=True)
pytest.importorskip("triton", reason="needs Triton's code generators")

import triton
import triton.language as tl

from ci.sources import statements, text_of
from ci.static import (
    TARGETS,
    StaticCase,
    Variant,
    baseline,
    build,
    judge,
    kernels,
    launch as static_launch,
    lower,
    missing,
    patterns,
    selection,
    static_cases,
    variants,
)
from ci.static.cases import calls, start
from ci.static.code import CORES, Code, resident
from ci.static.descriptors import misread
from ci.static.judge import failures, verdicts
from ci.static.patterns import TRANSPOSED, chained_dots, problems, problems_of, read
from ci.static.rows import Row, rows_of, to_code
from ci.static.selection import TURNS, full, launches, suite, turn
from ci.static.store import Store
from liger_multi.backends.triton.attention import attention
from liger_multi.backends.triton.common.rows import add_dot, sigmoid
from liger_multi.backends.triton.rope import rms_norm_rope
from liger_multi.dispatch import launch
from liger_multi.dispatch.bitwise import RowAxes, promised
from liger_multi.dispatch.registry import module, operators
from liger_multi.patching.attention import interface
from liger_multi.reference.common.strict import in_mode
from liger_multi.testing import samples
from liger_multi.testing.bitwise import Call, selected
from liger_multi.testing.verify.cases import Target, cases
from tests.ops.test_contracts import recorded

ARCHS = [arch for arch in TARGETS if missing(TARGETS[arch]) is None]
BESIDE = re.compile(r"#loc.*|loc\(.*|, inputPrecision = \w+")  # what no pattern depends on


@pytest.fixture(
    scope="module",
    params=["turn", pytest.param("suite", marks=pytest.mark.slow)],
    ids=["by turns", "everywhere"],
)
def rows(request):
    """What the tests compile; cached by the source of each kernel."""
    return rows_of(ARCHS, request.param)


@pytest.mark.parametrize("arch", TARGETS)
def test_kernels_fit(arch, rows):
    if missing(TARGETS[arch]):
        pytest.skip(missing(TARGETS[arch]))
    mine = [row for row in rows if row.arch == arch]
    assert mine
    assert not verdicts(mine), "\n".join(verdicts(mine))


def test_front_end_of_an_older_triton():
    """Where code is not judged, every kernel still passes Triton's front end."""
    if not missing(TARGETS["sm90"]):
        pytest.skip("this Triton compiles every kernel in the tests above")
    first = {case.name: case for case in reversed(launches("sm90"))}
    for case in first.values():
        lower(case, TARGETS["sm90"])


def test_every_kernel_has_its_turn():
    mine = [{case.name for case, _ in turn(arch)} for arch in TURNS]
    assert sorted(name for names in mine for name in names) == sorted(kernels())
    assert all(mine)
    assert set(TURNS) == set(TARGETS)


def test_every_kernel_has_a_case():
    assert set(kernels()) == {c.name for c in launches("sm90")}, "add COMPILE_SAMPLES"


def test_every_kernel_has_its_rows():
    """The committed table has the rows of today's kernels and launches."""
    stale = baseline.stale()
    said = "\n".join(f"{name}: {why}" for name, why in stale.items())
    assert not stale, f"run `make static ARGS=--write`:\n{said}"


def test_the_committed_table_has_every_target_and_variant():
    blocks = selection.kept()
    assert set(blocks) == set(kernels())
    for arch in TARGETS:
        for name in kernels():
            expected = {(c.identity, v) for c, v in suite(arch) if c.name == name}
            lines = [line for line in blocks[name][1:] if selection.label_of([line], arch)]
            assert len(lines) == len({identity for identity, _ in expected}), f"{name} on {arch}"
            assert sum(line.count(";") for line in lines) == len(expected) - len(lines)


def test_the_suite_has_every_kernel_on_every_target():
    for arch in TARGETS:
        pairs = suite(arch)
        assert {case.name for case, variant in pairs if variant == Variant()} == set(kernels())
        assert len({(case.identity, variant) for case, variant in pairs}) == len(pairs)
    assert {v.large for _, v in suite("gfx942")} == {v.large for _, v in suite("gfx1100")}
    assert {v.aligned for _, v in suite("gfx1100")} == {True, False}
    assert {v for _, v in full("gfx942")} == set(variants(TARGETS["gfx942"]))


def test_every_exception_is_of_a_kernel():
    cases = [case for arch in ("gfx942", "gfx1100") for case in launches(arch)]
    for prefix, (which, reason) in judge.ADDRESSED.items():
        assert any(case.name.startswith(prefix) and which(case) for case in cases), prefix
        assert reason


def test_what_gathers_may_load_but_not_store_by_64_bits():
    case = next(c for c in launches("gfx942") if c.name == "_moe_up_kernel")
    for access, wrong in (("loads", 0), ("stores", 1)):
        code = dataclasses.replace(GOOD, **{f"unbounded_{access}": 3})
        assert len(failures(Row(case, "gfx942", Variant(large=True), code))) == wrong


def test_static_store_after_an_interrupted_write(tmp_path):
    """A run that was stopped, in the middle of a line even, goes on where it was."""
    path, facts = tmp_path / "cache" / "gfx942.jsonl", dataclasses.asdict(GOOD)
    Store(path).keep("one", facts)
    with path.open("a") as file:
        file.write('\n["half", {"thr')
    Store(path).keep("two", facts)
    assert set(Store(path)) == {"one", "two"}
    assert to_code(Store(path)["two"]) == GOOD


def test_what_does_not_compile_is_a_failure():
    row = Row(CASE, "gfx942", Variant(), GOOD, "PassManager::run failed")
    assert failures(row) == ["does not compile: PassManager::run failed"]


def test_a_tile_smaller_than_its_threads_need_not_load_16_bytes():
    case = dataclasses.replace(CASE, signature={"x": "*bf16"}, constants={"BLOCK": 256})
    assert judge.streamed(case, dataclasses.replace(GOOD, threads=32)) == 16
    assert judge.streamed(case, dataclasses.replace(GOOD, threads=64)) == 8
    assert judge.streamed(CASE, GOOD) == 16


def test_cases_are_real_launches():
    """A case carries what a launcher passed: the formula's numbers for that device."""
    small, large = (static_cases(TARGETS[arch].info, calls()) for arch in ("gfx90a", "sm90"))
    warps = [[case.options["num_warps"] for case in cases] for cases in (small, large)]
    assert warps[0] != warps[1]
    # sums of a few numbers a row, index heads of narrow keys, groups of odd widths, chunks of
    # logits that begin anywhere and rows of the gates of four heads: vectors of 16 bytes are not
    # demanded of them
    narrow = {case.name for case in large if not case.streams}
    assert narrow == {
        "_sum_partials_kernel",
        "_group_norm_means_kernel",
        "_group_norm_statistics_kernel",
        "_indexer_scores_kernel",
        "_indexer_all_scores_kernel",
        "_indexer_backward_kernel",
        "_cross_entropy_forward_kernel",
        "_divergence_forward_kernel",
        "_log_prob_gradient_kernel",
        "_delta_rule_forward_kernel",
        "_delta_rule_reverse_kernel",
        "_kimi_delta_keys_kernel",
    }
    assert all(case.options["enable_fp_fusion"] is True for case in large)


# --- the judge ---

GOOD = Code(
    threads=256,
    registers=64,
    spills=0,
    shared=0,
    resident=2048,
    loads={16: 4},
    stores={16: 2},
    unbounded_loads=0,
    unbounded_stores=0,
    matrix=(),
    instructions=300,
    swaps=0,
    narrow_atomics=0,
)
CASE = StaticCase("a call", calls, {}, {}, (), (), {}, True)


@pytest.mark.parametrize(
    ("change", "variant", "said"),
    [
        ({"threads": 2048}, Variant(), "2048 threads, at most 1024"),
        ({"shared": 65537}, Variant(), "65537 bytes on chip, at most 65536"),
        ({"spills": 8}, Variant(large=True), "8 bytes of spilled registers"),
        ({"loads": {8: 2, 2: 9}}, Variant(), "loads 8 bytes at a time, wanted 16"),
        ({"loads": {}}, Variant(large=True), "loads 0 bytes"),
        ({"loads": {2: 8}}, Variant(aligned=False), ""),
        ({"swaps": 1}, Variant(), "1 compare-and-swap"),
        ({"narrow_atomics": 2}, Variant(), "2 atomic operations on 16 bits"),
        ({"misread": 2}, Variant(), "2 GEMMs with kernel arguments in descriptors"),
        ({"unbounded_loads": 3}, Variant(large=True), "3 16-byte loads lost"),
        ({"unbounded_stores": 3}, Variant(large=True), "3 16-byte stores lost"),
        ({"unbounded_loads": 3, "unbounded_stores": 3}, Variant(), ""),
        ({}, Variant(), ""),
    ],
)
def test_what_a_row_must_not_have(change, variant, said):
    problems = failures(Row(CASE, "gfx942", variant, dataclasses.replace(GOOD, **change)))
    assert len(problems) == bool(said)
    assert said in "".join(problems)


LOOP = """
    /*0010*/                   ULDC.64 UR4, c[0x0][0x210] ;
    /*0020*/                   UMOV UR6, 0x400 ;
    /*0030*/                   USHF.R.U32.HI UR7, URZ, 0x4, UR6 ;
{before}
.L_x_1:
    /*0050*/                   UIADD3 UR8, UP0, {low}, 0x20, URZ ;
    /*0060*/                   UIADD3.X UR9, URZ, 0x40000040, URZ, UP0, !UPT ;
    /*0070*/                   UMOV UR10, UR8 ;
    /*0080*/                   UMOV UR11, UR9 ;
    /*0090*/                   HGMMA.64x16x16.F32.BF16 R24, {left}gdesc[UR8].tnspB, R24, gsb0 ;
    /*00a0*/                   UMOV UR4, UR7 ;
    /*00b0*/              @P0 BRA `(.L_x_1) ;
    /*00c0*/                   EXIT ;
"""


@pytest.mark.parametrize(
    ("before", "low", "left", "wrong"),
    [
        ("", "UR4", "", (0x90,)),  # the first turn reads what the argument left
        ("/*0040*/ UMOV UR4, UR7 ;", "UR4", "", ()),
        ("/*0040*/ @UP1 UMOV UR4, UR7 ;", "UR4", "", (0x90,)),
        ("", "UR7", "", ()),
        ("", "UR20", "", (0x90,)),  # nothing was ever written there
        ("", "UR4", "R8, ", (0x90,)),
    ],
)
def test_static_sees_arguments_in_descriptors(before, low, left, wrong):
    assert misread(LOOP.format(before=before, low=low, left=left)) == wrong


def test_the_descriptor_of_a_factor_in_registers_is_not_read():
    text = LOOP.format(before="/*0040*/ UMOV UR20, UR7 ;", low="UR20", left="R8, ")
    assert misread(text) == ()
    assert misread(text.replace("UMOV UR10, UR8", "UMOV UR12, UR8")) == (0x90,)
    half = text.replace("UMOV UR10, UR8", "UMOV UR10, UR20")
    assert misread(half.replace("UIADD3 UR8, UP0, UR20", "UIADD3 UR8, UP0, UR4")) == ()


# --- patterns that compilers get wrong ---


VENDORS = {target.gpu.backend: arch for arch, target in reversed(TARGETS.items())}
"""The first target of each vendor."""


@pytest.mark.parametrize("vendor", VENDORS)
def test_no_launch_has_a_pattern_that_compilers_get_wrong(vendor):
    if missing(TARGETS[VENDORS[vendor]]):
        pytest.skip(missing(TARGETS[VENDORS[vendor]]))
    assert not problems_of(vendor)


@pytest.mark.parametrize("arch", ARCHS)
def test_what_is_read_is_the_same_on_all_targets_of_a_vendor(arch):
    """In a kernel of ours with dots, and in the planted one."""
    attention = next(c for c in launches("sm90") if c.name == "_attention_backward_keys_kernel")
    first = TARGETS[VENDORS[TARGETS[arch].gpu.backend]]
    for case in (attention, planted("chained")):
        texts = (BESIDE.sub("", lower(case, target)) for target in (TARGETS[arch], first))
        assert len(set(texts)) == 1


def test_transposed_dots_are_of_kernels_that_have_them():
    assert TRANSPOSED.keys() <= kernels().keys()
    assert all(re.search(r"Triton \d+\.\d+ and ptxas", why) for why in TRANSPOSED.values())


@triton.jit
def _planted_kernel(a_ptr, b_ptr, out_ptr, count, FORM: tl.constexpr):
    """Two dots in a loop, in one of several forms."""
    at = tl.arange(0, 64)[:, None] * 64 + tl.arange(0, 64)[None, :]
    total = tl.zeros([64, 64], tl.float32)
    second = total
    for _ in tl.range(0, count):
        a, b = tl.load(a_ptr + at), tl.load(b_ptr + at)
        if FORM == "chained":
            total = tl.dot(b, a, tl.dot(a, b, total))
        elif FORM == "added":
            total += tl.dot(a, b)
            total += tl.dot(b, a)
        elif FORM == "in a branch":
            if count > 3:
                total = tl.dot(a, b, total)
            total = tl.dot(b, a, total)
        elif FORM == "unrolled":
            for _turn in tl.static_range(2):
                total = tl.dot(a, b, total)
        elif FORM == "transposed":
            s = tl.dot(a, b) * 0.5
            total = tl.dot(tl.trans(s.to(a.dtype)), b, total)
        elif FORM == "two accumulators":
            total, second = tl.dot(a, b, total), tl.dot(b, a, second)
        elif FORM == "zeros":
            total = add_dot(b, a, tl.dot(a, b, total))
        elif FORM == "loops":
            for _turn in tl.range(0, count):
                total = tl.dot(a, b, total)
            for _turn in tl.range(0, count):
                total = tl.dot(b, a, total)
        a_ptr += 4096
    if FORM == "straight":
        a, b = tl.load(a_ptr + at), tl.load(b_ptr + at)
        total = tl.dot(b, a, tl.dot(a, b, total))
    tl.store(out_ptr + at, total + second)


def planted(form):
    """A launch of the planted kernel."""
    signature = dict.fromkeys(("a_ptr", "b_ptr"), "*bf16") | {"out_ptr": "*fp32", "count": "i32"}
    signature |= {"FORM": "constexpr"}
    options = {"num_warps": 4, "enable_fp_fusion": True}
    return StaticCase("", _planted_kernel, signature, {"FORM": form}, (), (), options, False)


@pytest.mark.parametrize(
    ("form", "said"),
    [
        ("chained", "chains dots"),
        ("added", "chains dots"),
        ("in a branch", "chains dots"),
        ("unrolled", "chains dots"),
        ("transposed", "the transpose of a dot"),
        ("two accumulators", ""),
        ("zeros", ""),
        ("loops", ""),
        ("straight", ""),
    ],
)
@pytest.mark.parametrize("arch", ARCHS)
def test_planted_patterns_are_found(form, said, arch):
    case = planted(form)
    reported = problems(case, arch, read(lower(case, TARGETS[arch])))
    said = "" if form == "transposed" and arch != "sm90" else said
    assert len(reported) == bool(said)
    assert said in "".join(reported)


@triton.jit
def _overwriting_kernel(x_ptr, y_ptr, SIZE: tl.constexpr, FORM: tl.constexpr):
    """Numbers are read by the threads that compute with them, and then written over."""
    at = tl.arange(0, SIZE)
    ours = x_ptr + at
    if FORM == "scalar":
        number = tl.load(x_ptr)
        tl.store(x_ptr, number + 1)
        tl.store(y_ptr + at, number + at)
    elif FORM == "flag":
        if tl.load(x_ptr) == 0:
            return
        tl.store(x_ptr, 1.0)
    else:
        number = tl.load(ours)
        if FORM == "barrier":
            tl.debug_barrier()
        tl.store(y_ptr + at if FORM == "elsewhere" else x_ptr + at, number + 1)
        if FORM != "added":
            tl.store(y_ptr + SIZE + at[:, None] * SIZE + at[None, :], number[:, None] + at[None, :])


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    ("form", "size", "width"),
    [
        ("plain", 32, 32),
        ("plain", 128, 64),
        ("plain", 256, 128),
        ("scalar", 32, 32),
        ("added", 32, 128),
        ("barrier", 32, 128),
        ("elsewhere", 32, 128),
        ("flag", 32, 128),
    ],
)
def test_stores_to_what_is_being_read_are_found(form, size, width, arch):
    """Where four warps of a target's width are more threads than elements; 128: nowhere."""
    signature = {"x_ptr": "*fp32", "y_ptr": "*fp32", "SIZE": "constexpr", "FORM": "constexpr"}
    constants, options = {"SIZE": size, "FORM": form}, {"num_warps": 4}
    case = StaticCase("", _overwriting_kernel, signature, constants, (), (), options, False)
    said = problems(case, arch, read(lower(case, TARGETS[arch])))
    expected = ["overwrites what is being read"] * (TARGETS[arch].info.warp_size >= width)
    assert [text.partition(":")[0] for text in said] == expected


def test_the_merge_of_attention_parts_needs_its_barrier(monkeypatch):
    monkeypatch.setattr(patterns, "BARRIER", re.compile("$^"))
    case = next(c for c in launches("sm90") if c.name == "_attention_merge_kernel")
    said = problems(case, "sm90", read(lower(case, TARGETS["sm90"])))
    assert len(said) == 1
    assert said[0].startswith("overwrites")


def test_launches_for_what_is_not_finite_may_spill():
    spilled = dataclasses.replace(GOOD, spills=8)
    rare = dataclasses.replace(CASE, constants={**CASE.constants, "ISOLATED": True})
    usual = dataclasses.replace(CASE, constants={**CASE.constants, "ISOLATED": False})
    wrong = [failures(Row(case, "sm90", Variant(), spilled)) for case in (rare, usual)]
    assert wrong == [[], ["8 bytes of spilled registers"]]


def test_registers_that_unaligned_arguments_spill_are_shown():
    spilled = dataclasses.replace(GOOD, spills=8)
    rows = [Row(CASE, "sm90", Variant(aligned), spilled) for aligned in (True, False)]
    assert [len(failures(row)) for row in rows] == [1, 0]
    assert "8 B spilled" in baseline.line(rows[1])


@pytest.mark.parametrize(
    ("arch", "threads", "warp", "registers", "shared", "expected"),
    [
        ("gfx942", 256, 64, 64, 0, 2048),  # 8 waves a SIMD
        ("gfx942", 256, 64, 65, 0, 1792),  # 72 registers are granted: 7 waves
        ("gfx942", 256, 64, 512, 0, 256),
        ("gfx942", 1024, 64, 128, 40_000, 1024),
        ("gfx950", 1024, 64, 64, 40_000, 2048),
        ("gfx1100", 256, 32, 96, 0, 2048),  # 16 waves a SIMD
        ("gfx1100", 1024, 32, 97, 0, 1024),  # 12 waves a SIMD, but whole programs
        ("sm90", 256, 32, 32, 0, 2048),
        ("sm90", 256, 32, 255, 0, 256),
        ("sm90", 128, 32, 32, 100_000, 256),
    ],
)
def test_threads_that_a_core_holds(arch, threads, warp, registers, shared, expected):
    assert resident(CORES[arch], threads, warp, registers, shared) == expected


def test_the_compiler_of_amd_counts_the_same_waves(tmp_path):
    """LLVM writes its own count into the assembly; it does not know the size of a program."""
    if missing(TARGETS["gfx942"]):
        pytest.skip(missing(TARGETS["gfx942"]))
    from ci.static.code import read

    visited = set()
    for arch in ("gfx942", "gfx1100"):
        info = TARGETS[arch].info
        for name in ("_rms_norm_backward_kernel", "_gated_forward_kernel"):
            case = next(case for case in launches(arch) if case.name == name)
            compiled = build(case, TARGETS[arch], Variant())
            waves = int(re.search(r"; Occupancy: (\d+)", compiled.asm["amdgcn"])[1])
            code = read(compiled, arch, info.warp_size)
            alone = resident(CORES[arch], info.warp_size, info.warp_size, code.registers, 0)
            assert alone // info.warp_size // CORES[arch].slots == waves
            visited.add(waves)
    assert len(visited) > 1


def test_static_page_lists_differences():
    case = dataclasses.replace(CASE, kernel=next(iter(kernels().values())))
    other = dataclasses.replace(GOOD, registers=70, instructions=400, spills=4)
    rows = [Row(case, "gfx942", Variant(), GOOD), Row(case, "gfx942", Variant(False), other)]
    text = baseline.page({case.name: baseline.block(case.name, rows)})
    first = (
        f"  gfx942  {'a call':<48}  256 threads    64 registers   100 %       0 B  ld 16x4  st 16x2"
    )
    rest = "300 instructions; unaligned 70 r, 100 %, 400 i, 4 B spilled"
    named = f"{case.name} {baseline.sources(case.name)}"
    assert text.splitlines()[1:] == ["", named, f"{first}  {rest}"]


def test_part_of_a_baseline_needs_the_same_triton(tmp_path, monkeypatch):
    for reader in (baseline, selection):
        monkeypatch.setattr(reader, "BASELINE", tmp_path / "baseline.txt")
    names = sorted(kernels())[:2]

    def rows(*chosen, registers=64):
        code = dataclasses.replace(GOOD, registers=registers)
        cases = [dataclasses.replace(CASE, kernel=kernels()[name]) for name in chosen]
        return [Row(case, arch, Variant(), code) for arch in TARGETS for case in cases]

    baseline.write_baseline(rows(*names))
    baseline.write_baseline(rows(names[0], registers=65))
    kept = selection.kept()
    assert [" 65 registers" in kept[name][1] for name in names] == [True, False]
    assert set(baseline.stale()) == set(kernels()) - set(names)
    monkeypatch.setattr(baseline.triton, "__version__", "0.0.1")
    with pytest.raises(ValueError, match=r"this is 0\.0\.1: write every kernel"):
        baseline.write_baseline(rows(names[0]))


def test_a_changed_source_or_launch_makes_a_table_stale(monkeypatch):
    name = "_gated_forward_kernel"
    before, source = baseline.sources(name), sigmoid.src
    write = getattr(sigmoid, "_unsafe_update_src", None) or partial(setattr, sigmoid, "src")

    def update(text):
        write(text)
        text_of.cache_clear()

    try:
        update(source + "    # no comment of a helper two calls below the kernel\n")
        assert baseline.sources(name) == before
        update(source + "    1 + 1\n")
        assert baseline.sources(name) != before
    finally:
        update(source)
    assert baseline.sources(name) == before
    monkeypatch.setattr(baseline, "_facts", lambda: {name: "another launch"})
    assert baseline.sources(name) != before


def test_words_and_places_make_no_table_stale(monkeypatch):
    plain = "def f(x, N):\n    y = x * 2\n    return y + N\n"
    worded = 'def f(x, N):\n    """Doubled."""\n    # why\n    y = (x * 2)\n    return y + N\n'
    assert statements(worded) == statements(plain)
    assert statements(plain.replace("2", "3")) != statements(plain)
    assert statements('def f():\n    """Nothing."""\n') == statements("def f():\n    pass\n")

    name = "_gated_forward_kernel"
    before = baseline.sources(name)
    monkeypatch.setattr(kernels()[name].fn, "__module__", "liger_multi.backends.triton.moved")
    text_of.cache_clear()
    assert baseline.sources(name) == before


# --- launch tables of the model ---


def test_the_model_wants_more_threads_and_no_less_of_anything():
    mine = dataclasses.replace(GOOD, resident=512)
    more = dataclasses.replace(GOOD, resident=1024)
    assert static_launch.better(mine, more)
    for worse in (
        {"resident": 640},
        {"spills": 4},
        {"loads": {8: 16}},
        {"loads": {16: 1}},
        {"stores": {8: 4}},
    ):
        assert not static_launch.better(mine, dataclasses.replace(more, **worse)), worse


def test_the_model_counts_no_threads_that_a_launch_has_not():
    from liger_multi.backends.triton.norms.row_config import BackwardConfig, RowConfig

    info = TARGETS["gfx942"].info
    for programs, expected in ((304, 256), (305, 512), (10**6, 2048)):
        config = BackwardConfig(1, 4096, 4, programs, 1)
        assert static_launch.limited(GOOD, config, info).resident == expected
    assert static_launch.limited(GOOD, RowConfig(1, 4096, 4), info) == GOOD


def test_measured_entries_stay(tmp_path, monkeypatch):
    import yaml

    monkeypatch.setattr(static_launch, "ROOT", tmp_path)
    entry = {"when": {"cols": [1, 8]}, "config": {"rows": 2}}
    model = {**entry, "source": f"{static_launch.MODEL}: a, b"}
    measured = {**entry, "source": "measured on a card: 4 -> 3 us"}
    info = TARGETS["gfx942"].info
    path = static_launch.write(info, {"x.forward": [model]})
    assert yaml.safe_load(path.read_text())["entries"] == {"x.forward": [model]}
    static_launch.write(info, {"x.forward": [measured]})  # measured on a card for the same shapes
    assert yaml.safe_load(path.read_text())["entries"] == {"x.forward": [measured]}
    other = {**model, "when": {"cols": [9, 16]}}
    static_launch.write(info, {"x.forward": [other]})
    entries = yaml.safe_load(path.read_text())
    assert entries["entries"] == {"x.forward": [measured, other]}
    static_launch.write(info, {})  # the model has nothing to say any more
    assert yaml.safe_load(path.read_text())["entries"] == {"x.forward": [measured]}
    assert entries["device"] == {"warp_size": 64, "shared_bytes": 65536}


REDUCES = re.compile(
    r"tl\.(sum|max|min|argmax|dot|reduce|cumsum|associative_scan|sort|atomic_\w+)\b"
)
"""What a kernel has whose numbers meet others of their row."""
FREE = {
    "_dyt_forward": "elementwise; the sums of its helpers are for backward",
    "_embedding": "copies rows, or adds those of a list in its order",
    "_cross_entropy_reduce_kernel": "a sum over rows",
    "_sum_partials_kernel": "a sum over rows",
    **dict.fromkeys(
        ("_rms_norm_backward", "_layer_norm_backward", "_group_norm_moments"),
        "their number masks whole rows alone; without the masks, the compiler saves registers",
    ),
    "_selective_scan_backward": "a tuple has the number of sequences, which the last loop is over",
}
"""Kernels that reduce, and are compiled by the number of rows though the bits do not follow it."""
STEPS = re.compile(r"stride|step|^begin$|^each$|^sizes\.0$")
"""What leads to another sequence, block or part. In odd samples, 16 divides some multiples."""


def _compiled(run, args):
    """The kernels that reduce, with what a compiler is told of each beside dtypes and steps."""
    inputs = [a.detach().to("meta") if isinstance(a, torch.Tensor) else a for a in args]
    cases = static_cases(TARGETS["sm90"].info, {"": partial(run, *inputs)})

    def rest(names):
        return [n for n in names if not STEPS.search(str(n))]

    return {
        str((c.name, [(n, c.constants[n]) for n in rest(c.constants)], rest(c.aligned), c.options))
        for c in cases
        if REDUCES.search(text_of(c.kernel)) and not c.name.startswith(tuple(FREE))
    }


@pytest.mark.parametrize("op", [op for op in operators() if module("triton", op) is not None])
def test_kernels_of_promised_rows_do_not_follow_their_number(op):
    """Another tile or number of warps adds the numbers of a row in another order.

    So may a number of rows that the compiler knows to be 1, or a multiple of 16.
    """
    served = module("triton", op)
    for sample in (s for s in samples.of(op) if s.size == "small"):
        for prim, args in recorded(op, sample, torch.device("cpu")):
            axes = RowAxes(prim.op.bitwise, dict(zip(prim.params, args, strict=True)))
            run = getattr(served, prim.direction, None)
            if run is None or not axes.count or "rows" not in promised("triton", prim).always:
                continue
            call = Call(prim, args, "triton")
            launched = [
                _compiled(run, selected(axes, call, torch.zeros(rows, dtype=torch.long)))
                for rows in (1, 2, 16, 67)
            ]
            for one in launched:  # many rows may run in parts, of which one begins anywhere
                assert one <= launched[-1], (sample.name, prim.direction)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("item", [2, 4])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_tiles_of_keys_follow_neither_the_mask_nor_the_queries(dim, item, arch):
    """One query of a cache has no mask, a causal one or a range; a sequence has another of them."""
    sizes = {"keys": attention.MANY, "dim": dim, "value_dim": dim, "item": item}
    shapes = [{"queries": attention.MANY, **sizes, "ranges": n} for n in (0, 2)]
    for extra in (0, 1):
        with launch.simulate(TARGETS[arch].info):
            configs = [
                launch.launch_config(
                    "attention.forward",
                    attention.forward_config,
                    torch.device("meta"),
                    extra=extra,
                    **shape,
                )
                for shape in shapes
            ]
        assert len({(k.block_m, k.block_n, k.num_warps) for k in configs}) == 1, configs
        assert interface.TILE % configs[0].block_n == 0


@pytest.mark.parametrize("width", [64, 128])
def test_rms_norm_rope_launch_is_equal_for_one_token(width):
    """The sum over a head follows the tile, which a short sequence would not fill."""
    forward = rms_norm_rope.forward
    weight, more = torch.empty(width, device="meta"), (1e-6, 0.0, "llama", "llama", 1, "0213")

    def tile(seq):
        x = torch.empty(1, seq, 4, width, device="meta", dtype=torch.bfloat16).transpose(1, 2)
        angles = torch.empty(2, 1, seq, width, device="meta", dtype=torch.bfloat16)
        run = partial(forward, x, weight.bfloat16(), *angles, *more)
        (case,) = static_cases(TARGETS["sm90"].info, {"": run})
        return {n: v for n, v in case.constants.items() if str(n).isupper()}, case.options

    assert tile(1) != tile(200)
    with in_mode("rows", None):
        assert all(tile(seq) == tile(200) for seq in (1, 2, 16))


@pytest.mark.parametrize("arch", [arch for arch in ("sm90", "gfx942") if arch in ARCHS])
@pytest.mark.parametrize("op", [op for op in operators() if module("triton", op) is not None])
def test_every_sample_compiles(op, arch):
    """Up to Triton's own form. An interpreter lets a name have two types, and None be a pointer.

    Frozen tensors and absent options among them, with what kernels do for each vendor alone.
    """
    served, visited = module("triton", op), set()
    for sample in (s for s in samples.of(op) if s.size == "small"):
        for prim, args in recorded(op, sample, torch.device("cpu")):
            run = getattr(served, prim.direction, None)
            if run is None:
                continue
            inputs = [a.detach().to("meta") if isinstance(a, torch.Tensor) else a for a in args]
            launches = static_cases(TARGETS[arch].info, {sample.name: partial(run, *inputs)})
            for case in launches:
                key = (case.kernel, str(case.signature), str(case.constants))
                if key not in visited:
                    assert not chained_dots(lower(case, TARGETS[arch]))
                visited.add(key)
    assert visited or op in ("linear", "lora_update")  # these run by the library's GEMMs


@pytest.mark.skipif("sm90" not in ARCHS, reason=str(missing(TARGETS["sm90"])))
@pytest.mark.parametrize("op", [op for op in operators() if module("triton", op) is not None])
def test_a_quick_verification_starts_what_small_samples_start(op):
    """The samples that `liger-multi verify --quick` takes reach every kernel that others reach."""
    served, quick, all_samples = module("triton", op), set(), set()
    chosen = {c.sample for c in cases(Target("triton", "cpu"), op, "quick")[op]}
    for sample in (s for s in samples.of(op) if s.size == "small"):
        for prim, args in recorded(op, sample, torch.device("cpu")):
            run = getattr(served, prim.direction, None)
            if run is not None:
                inputs = [a.detach().to("meta") if isinstance(a, torch.Tensor) else a for a in args]
                launches = static_cases(TARGETS["sm90"].info, {sample.name: partial(run, *inputs)})
                names = {case.name for case in launches}
                all_samples |= names
                quick |= names if sample.name in chosen else set()
    assert quick == all_samples


@pytest.mark.slow
@pytest.mark.skipif("sm90" not in ARCHS, reason=str(missing(TARGETS["sm90"])))
def test_a_quick_verification_starts_every_kernel():
    """On a card: by samples, by promises, by entries of a launch table, and by a head in 8 bits."""
    started = set()
    for op, chosen in cases(Target("triton", "cuda:0"), "*", "quick").items():
        by_name = {s.name: s for s in samples.of(op)}
        named = {(c.sample, getattr(torch, c.dtype)) for c in chosen if c.check == "result"}
        starts = {
            f"{name} {dtype}": partial(start, op, by_name[name], dtype) for name, dtype in named
        }
        started |= {case.name for case in static_cases(TARGETS["sm90"].info, starts)}
    others = set(kernels()) - started
    assert others == {
        "_gemm_by_rows_kernel",  # promises of bits
        "_largest_kernel",
        "_round_8_bits_kernel",
        "_round_both_ways_kernel",
        "_selective_scan_team_kernel",  # BY_TABLE
    }
