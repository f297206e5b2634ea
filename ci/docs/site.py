"""The sources of the site: the committed pages, and those that are made whole.

A page that is made whole is not committed. What links to it from a committed page names what it is
made of (a contract, a result, a script), which is there on any host of the repository;
:data:`MADE_OF` turns such a link into one to the page.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parent.parent.parent
DOCS = ROOT / "docs"
CONFIG = ROOT / "ci" / "mkdocs.yml"
NAV = "# operators"  # the line of the configuration that the operators' entries replace
# code, which has no links, or a link to a file
CODE_OR_LINK = re.compile(
    r"^```.*?^```|(!?)\[([^\]]*)\]\((?![a-z]+:|#)([^)\s]+)\)|`[^`\n]*`", re.DOTALL | re.MULTILINE
)
MADE_OF = {
    "README.md": "index.md",
    "liger_multi/ops": "ops/index.md",
    "ci/npu/levels.py": "ops/index.md",
    "liger_multi/nn": "nn.md",
    "benchmarks/README.md": "benchmarks.md",
    "benchmarks/README.md#results-of-the-suite": "verification.md",
    "benchmarks/README.md#training-curves": "convergence.md",
    "tests/sweep/results.json": "coverage.md",
    "ci/regressions.py": "regressions.md",
}


def contract(name: str) -> str:
    """The file of an operator's contract."""
    return f"liger_multi/ops/{name}.py"


def sources(operators: Iterable[str]) -> dict[str, str]:
    """The page of the site that is made of a file, by the file's path in the repository."""
    return MADE_OF | {contract(name): f"ops/{name}.md" for name in operators}


def linked(text: str, folder: str, known: Mapping[str, str]) -> str:
    """A committed page as a page of the site.

    Args:
        text: The page.
        folder: Its folder in the repository, from which its links lead.
        known: From :func:`sources`.
    """

    def changed(match: re.Match[str]) -> str:
        picture, shown, link = match.groups()
        if link is None:
            return match[0]
        file, _, anchor = link.partition("#")
        path = _normal(PurePosixPath(folder) / file)
        page = known.get(f"{path}#{anchor}") or known.get(path)
        if page is not None:
            return f"[{shown}]({page})"
        if path.startswith("docs/"):
            inside = path.removeprefix("docs/") + (f"#{anchor}" if anchor else "")
            return f"{picture}[{shown}]({inside})"
        return f"{shown} (`{path}`)"  # no page of the site

    return CODE_OR_LINK.sub(changed, text)


def _normal(path: PurePosixPath) -> str:
    """A path without ``..``."""
    parts: list[str] = []
    for part in path.parts:
        if part == ".." and parts:
            parts.pop()
        else:
            parts.append(part)
    return "/".join(parts)


def configuration(operators: Iterable[str]) -> str:
    """The configuration of the site, with one entry an operator; it stands beside ``docs``."""
    text = CONFIG.read_text(encoding="utf-8")
    found = re.findall(rf"^( *){NAV}$", text, re.MULTILINE)
    if len(found) != 1:
        raise SystemExit(f"ci/mkdocs.yml needs the line {NAV!r} once, where the operators go")
    lines = "\n".join(f"{found[0]}- {name}: ops/{name}.md" for name in operators)
    return re.sub(rf"^ *{NAV}$", lines, text, flags=re.MULTILINE)


def write(folder: Path, operators: Iterable[str], whole: Mapping[str, Callable[[], str]]) -> None:
    """Write ``mkdocs.yml`` and ``docs`` below a folder, in place of what is there.

    Args:
        folder: Where.
        operators: The public operators.
        whole: The pages that are made whole, by their path in the site.
    """
    names = list(operators)
    pages = folder / "docs"
    shutil.rmtree(pages, ignore_errors=True)
    known = sources(names)
    for path in sorted(DOCS.rglob("*")):
        name = path.relative_to(DOCS)
        if not path.is_file() or name.as_posix() in whole:
            continue
        target = pages / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".md":
            text = path.read_text(encoding="utf-8")
            target.write_text(linked(text, "docs", known), encoding="utf-8")
        else:
            shutil.copyfile(path, target)
    for made, make in whole.items():
        target = pages / made
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(make(), encoding="utf-8")
    (folder / "mkdocs.yml").write_text(configuration(names), encoding="utf-8")
