"""Names that were replaced by the field's terms stay away, in code, files and pages."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).relative_to(ROOT).as_posix()
# what is gone, by what stands in its place
GONE = {
    "forward and backward": r"\bhalves\(|makes both halves|[Bb]oth halves (of (an|the) op|with|as)",
    "reference in fp64": r"(?i)\boracles?\b",
    "grouped GEMM": r"\bgrouped products?\b",
    "pass over the row, tile loop": r"\b(forward|query|key)_walk\b|\bis walked\b|\bare walked\b",
    "launch_config, ...Config": r"(?<!triton\.)(?<!triton, \")\bknobs\b|_knobs\b|Knobs\b",
    "Dispatch, TrainingPlan, BenchConfig, DemoConfig, ChunkSpec": r"\bclass Plan\b",
    "RowStats, DivergenceStats, RowOperand": r"\bclass Rows\b",
    "DeferredLogits": r"\b[Rr]ecipes?\b",
    "grad_target, grad_lse": r"\bshare_ptr\b",
    "empty_contiguous": r"(?<![\w.])(?<!def )room\(",
    "DivergenceSpec": r"\bGoal\b|\bgoal_of\b",
    "probe_context, skeleton": r"\blaboratory\b|(?<!\w)shell\(module",
    "meta implementations": r"\bstand_ins\b|\bStandIns\b|\bstand-ins?\b",
    "needs_argmax": r"\basks_for_winners\b",
    "Sinkhorn": r"[Ss]quash(?!ed)",
    "teacher, student": r"\btheirs_ptr\b|\bmine_ptr\b",
    "verification level": r"\brungs?\b|\bladder\b",
    "percent of peak": r"\broof_percent\b|\bof the roof\b|\broof\b",
    "pinned": r"\bbinding\b",
    "token-expert pairs": r"\bsorted_slots\b|\bslots of (a|the|every) token\b",
    "tile bounds": r"\bspans_ptr\b|_spans_kernel\b",
    "plain linear": r"\bis_bare\b",
    "conflicts": r"\bforeign_hook\b",
    "restore": r"\bbring_back\b",
    "as_source": r"\bunderstood\(",
    "KL divergence, Jensen-Shannon divergence": r"Kullback and\s+Leibler|Jensen and\s+Shannon",
    "variants": r"\b(its|their) kin\b",
    "American spelling": (
        r"(?i)\b\w*(recognis|normalis|quantis|summaris|initialis|generalis|materialis|optimis)(?!m|t)\w*"
        r"|(?i:\b(behaviour|colour|neighbour)\w*)"
    ),
}

# the same of words that name variants and result keys elsewhere: in sentences of pages, of scripts
# that measure, and of contracts
GONE_FROM_WORDS = {
    "unpatched, original, baseline": r"(?i)\bstock\b",
    "FP8, INT8": r"(?i)\b(8|eight) bits\b",
    "GEMM": r"(?i)\b(matrix products?|products alone|(dtype of|before) the products?)\b",
}
WORDS = (
    "docs/",
    "README.md",
    "CONTRIBUTING.md",
    "benchmarks/README.md",
    "examples/",
    "liger_multi/ops/",
)


def texts():
    """Every tracked text file but this one, the history and the results, by path."""
    found = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True
    ).stdout.split("\0")
    for name in found:
        path = ROOT / name
        skipped = name in ("", HERE, "CHANGELOG.md") or name.startswith("benchmarks/results/")
        if skipped or path.is_symlink() or not path.is_file():
            continue
        try:
            yield name, path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue


@pytest.fixture(scope="module")
def tracked():
    if not (ROOT / ".git").exists():
        pytest.skip("no git checkout")
    return dict(texts())


@pytest.mark.parametrize("new", GONE)
def test_no_old_name_is_left(tracked, new):
    pattern = re.compile(GONE[new])
    found = [
        f"{name}:{text.count(chr(10), 0, match.start()) + 1}: {match[0]}"
        for name, text in tracked.items()
        for match in pattern.finditer(text)
    ]
    found += [name for name in tracked if pattern.search(name)]
    assert not found, f"write {new}: {found[:20]}"


def sentences(text):
    """A page or a module without code, quotes of results and what is generated."""
    text = re.sub(r"<!-- (\w[\w-]*):\w+ -->.*?<!-- \1:end -->", "", text, flags=re.DOTALL)
    text = re.sub(r"^```.*?^```|^    \S.*?$", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"<!--.*?-->|`[^`\n]*`", "", text)


@pytest.mark.parametrize("new", GONE_FROM_WORDS)
def test_no_old_word_is_left_in_pages(tracked, new):
    pattern = re.compile(GONE_FROM_WORDS[new])
    found = [
        f"{name}: {match[0]}"
        for name, text in tracked.items()
        if name.startswith(WORDS)
        for match in pattern.finditer(sentences(text) if name.endswith(".md") else text)
    ]
    assert not found, f"write {new}: {found[:20]}"
