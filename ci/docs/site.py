"""The site: which pages it has, where their links lead, and the list of pages.

What links to a page of the site from a committed page names what that page is made of (a contract,
a result, a script), which is there on any host of the repository. :data:`MADE_OF` turns such a link
into one to the page.
"""

from __future__ import annotations

import posixpath
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path, PurePosixPath

from benchmarks.tables import curves
from ci.docs import NOTE, ROOT, api, losses, verification
from ci.docs.api import public_operators
from ci.docs.docstrings import text_table
from ci.docs.tables import DOCS
from tests.sweep import page as coverage

# --- pages ---

TASKS = (
    ("Fine-tune a model", "`liger_multi.patch(model)`", "docs/patching.md"),
    ("Use the Trainer, TRL, Lightning or accelerate", "`TrainerCallback()`", "docs/trainers.md"),
    ("Use axolotl, LLaMA-Factory, ms-swift, verl", "a plugin", "docs/trainers.md#plugins"),
    ("Use LoRA or QLoRA", "patch the model of PEFT", "docs/peft.md"),
    ("Multiply in FP8, or keep a frozen base in it", "`linear_float8`", "docs/fp8.md"),
    ("Train on a frozen base in 4 bits", "`load_mxfp4`, bitsandbytes", "docs/four-bits.md"),
    ("Read logits of a patched model", "`outputs.logits`", "docs/logits.md"),
    ("Use our attention", '`attn_implementation="liger_multi"`', "docs/attention.md"),
    ("Find out why a module was skipped", "`print(report)`", "docs/recognition.md"),
    ("Use FSDP2, DeepSpeed or tensor parallelism", "patch, then shard", "docs/distributed.md"),
    ("Train with DPO, KTO, GRPO or distillation", "`liger_multi.losses`", "docs/losses.md"),
    ("Plan what fits", "`liger-multi plan config.json --gpu 24GiB`", "docs/planning.md"),
    ("Estimate and measure memory", "`liger-multi estimate config.json`", "docs/memory.md"),
    ("Recompute or offload activations", "`liger_multi.memory`", "docs/recompute.md"),
    ("Start from a script", "`python examples/finetune.py --tiny`", "examples/README.md"),
    ("Run on AMD", "PyTorch for ROCm first", "docs/rocm.md"),
    ("Run on Ascend", "CANN and torch_npu first", "docs/ascend.md"),
    ("Override a backend in YAML", "`LIGER_MULTI_CONFIG=file.yaml`", "docs/configuration.md"),
    ("Find out why a backend was chosen", "`liger-multi explain rms_norm`", "docs/dispatch.md"),
    ("Get the same bits in every run or batch", "`deterministic`", "docs/bitwise.md"),
    ("Find the first operator that differs", "`liger-multi bisect FILE.py`", "docs/bisect.md"),
    ("Write a model with modules", "`liger_multi.nn`", "liger_multi/nn"),
    ("Call operators", "`liger_multi.ops`", "liger_multi/ops"),
    ("Check whether a model is supported", "list of models", "tests/sweep/results.json"),
    ("See speed and memory", "tables with peers", "docs/performance.md"),
    ("See what ran on which device", "results", "benchmarks/README.md#results-of-the-suite"),
    ("Add an operator", "three files", "docs/extending.md"),
    ("Add or test a backend", "`python -m liger_multi.testing`", "docs/backends.md"),
    ("Learn the terms", "operator, backend, reference", "docs/concepts.md"),
)
"""What people come for, how it begins, and what the page is made of that says more."""
FIRST = re.compile(r"^(?=!\[|## )", re.MULTILINE)  # the first picture or heading of README


def front() -> str:
    """The site's first page: README with the tasks before its first picture or section."""
    rows = text_table(
        ("I want to", "Start with"), [(f"[{task}]({page})", start) for task, start, page in TASKS]
    )
    tasks = "\n".join(["## Find your task", "", *rows, "", ""])
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    return NOTE + "\n\n" + linked(FIRST.sub(lambda _: tasks, readme, count=1), "")


def committed(path: str) -> str:
    """A committed page as a page of the site."""
    text = (ROOT / path).read_text(encoding="utf-8")
    return linked(text, str(PurePosixPath(path).parent))


def whole_pages() -> dict[str, Callable[[], str]]:
    """Every page that is written for the site, by its path there."""
    pages: dict[str, Callable[[], str]] = {
        "index.md": front,
        "ops/index.md": api.operators_page,
        "convergence.md": curves.page,
        "coverage.md": coverage.page,
        "examples.md": partial(committed, "examples/README.md"),
        "loss-options.md": losses.page,
        "nn.md": api.modules_page,
        "verification.md": verification.page,
        "benchmarks.md": partial(committed, "benchmarks/README.md"),
    }
    return pages | {
        f"ops/{name}.md": partial(api.operator_page, name) for name in public_operators()
    }


def all_pages() -> dict[str, Callable[[], str]]:
    """Those, and every page of ``docs``."""
    pages = {path.name: partial(committed, f"docs/{path.name}") for path in DOCS.glob("*.md")}
    return {**pages, **whole_pages()}


# --- links ---

# code, which has no links, or a link to a file
CODE_OR_LINK = re.compile(
    r"^```.*?^```|(!?)\[([^\]]*)\]\((?![a-z]+:|#)([^)\s]+)\)|`[^`\n]*`", re.DOTALL | re.MULTILINE
)
MADE_OF = {
    "README.md": "index.md",
    "liger_multi/ops": "ops/index.md",
    "ci/npu/levels.py": "ops/index.md",
    "liger_multi/losses": "loss-options.md",
    "liger_multi/losses/distillation.py": "loss-options.md",
    "liger_multi/losses/policy.py": "loss-options.md",
    "liger_multi/losses/preference.py": "loss-options.md",
    "liger_multi/losses/sequence.py": "loss-options.md",
    "liger_multi/nn": "nn.md",
    "benchmarks/README.md": "benchmarks.md",
    "benchmarks/README.md#results-of-the-suite": "verification.md",
    "benchmarks/README.md#training-curves": "convergence.md",
    "tests/sweep/results.json": "coverage.md",
    "examples/README.md": "examples.md",
}
"""The page of the site by what it is made of; operators have theirs by their contracts."""


def linked(text: str, folder: str) -> str:
    """A committed page as a page of the site.

    Args:
        text: The page.
        folder: Its folder in the repository, from which its links lead.
    """
    known = MADE_OF | {api.contract(name): f"ops/{name}.md" for name in public_operators()}

    def changed(match: re.Match[str]) -> str:
        picture, shown, link = match.groups()
        if link is None:
            return match[0]
        file, _, anchor = link.partition("#")
        path = posixpath.normpath(posixpath.join(folder, file))
        page = known.get(f"{path}#{anchor}") or known.get(path)
        if page is not None:
            return f"[{shown}]({page})"
        if path.startswith("docs/"):
            inside = path.removeprefix("docs/") + (f"#{anchor}" if anchor else "")
            return f"{picture}[{shown}]({inside})"
        return f"{shown} (`{path}`)"  # no page of the site

    return CODE_OR_LINK.sub(changed, text)


# --- files ---

THEME = ROOT / "ci" / "site"  # the configuration of mkdocs, and the stylesheet
NAV = "# operators"  # the line of the configuration that the operators' entries replace


def configuration() -> str:
    """The configuration of the site, with one entry an operator; it stands beside ``docs``."""
    text = (THEME / "mkdocs.yml").read_text(encoding="utf-8")
    before, indent, after = re.split(rf"^( *){NAV}$", text, maxsplit=1, flags=re.MULTILINE)
    lines = []
    for title, names in api.by_family(public_operators()).items():
        lines += [f"- {title[0].upper()}{title[1:]}:"]
        lines += [f"    - {name}: ops/{name}.md" for name in names]
    return before + "\n".join(indent + line for line in lines) + after


def build(folder: Path) -> None:
    """Write ``mkdocs.yml`` and ``docs`` below a folder, in place of what is there."""
    pages = folder / "docs"
    shutil.rmtree(pages, ignore_errors=True)
    shutil.copytree(DOCS, pages, ignore=shutil.ignore_patterns("*.md"))
    shutil.copyfile(THEME / "site.css", pages / "site.css")
    for name, build_page in all_pages().items():
        target = pages / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(build_page(), encoding="utf-8")
    (folder / "mkdocs.yml").write_text(configuration(), encoding="utf-8")
