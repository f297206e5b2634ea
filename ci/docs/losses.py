"""The tables of the page of the losses, made of their sources."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
import textwrap
from collections.abc import Sequence
from typing import Any

PLACE = "<!-- losses:{} -->"
END = "<!-- losses:end -->"
FAMILIES = (
    ("Pairs against a reference", "dpo_loss", "DPOOptions", ("preference", "DPO")),
    ("Pairs without a reference", "cpo_loss", "CPOOptions", ("preference", "CPO")),
    ("Single answers", "kto_loss", "KTOOptions", ("preference", "KTO")),
    ("Policies", "policy_loss", "PolicyOptions", ("policy", "POLICY")),
    ("Sequences", "sequence_loss", "SequenceOptions", ("sequence", "SEQUENCE")),
    ("Several heads ahead", "mtp_loss", "SequenceOptions", None),
    ("Distillation", "distillation_loss", "DistillationOptions", ("distillation", "DIVERGENCES")),
)


def arguments(documented: Any) -> dict[str, str]:
    """The arguments of a docstring in Google's style, by name."""
    text = inspect.getdoc(documented) or ""
    body = re.split(r"^Args:\n", text, maxsplit=1, flags=re.MULTILINE)[1]
    body = textwrap.dedent(re.split(r"^\w+:\n", body, maxsplit=1, flags=re.MULTILINE)[0])
    found: dict[str, str] = {}
    for line in body.splitlines():
        match = re.match(r"(\w+): (.*)", line)
        if match:
            found[match[1]] = match[2]
        elif line.strip():
            found[list(found)[-1]] += f" {line.strip()}"
    return found


def rows(header: tuple[str, ...], lines: Sequence[tuple[str, ...]]) -> list[str]:
    """A table in Markdown."""
    made = [header, ("---",) * len(header), *lines]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in made]


def clean(text: str) -> str:
    """Docstring text as Markdown."""
    text = re.sub(r":\w+:`~?([^`]*)`", lambda m: f"`{m[1].rpartition('.')[2]}`", text)
    return text.replace("``", "`")


def options(kind: type) -> list[str]:
    """The table of a dataclass of options."""
    defaults = {f.name: f.default for f in dataclasses.fields(kind)}
    lines = [(f"`{n}`", f"`{defaults[n]!r}`", clean(t)) for n, t in arguments(kind).items()]
    return rows(("Option", "Default", "What"), lines)


def head() -> list[str]:
    """The table of what a head takes."""
    found = arguments(importlib.import_module("liger_multi.losses").Head)
    return rows(("Of a head", "What"), [(f"`{n}`", clean(t)) for n, t in found.items()])


def families() -> list[str]:
    """A section for every function: its arguments, loss types and options."""
    losses, out = importlib.import_module("liger_multi.losses"), []
    for title, name, kind, place in FAMILIES:
        function = getattr(losses, name)
        text = (inspect.getdoc(function) or "").split("Args:")[0].strip()
        out += [f"## {title}", "", f"`losses.{name}`: {clean(text)}", ""]
        given = [(f"`{n}`", clean(t)) for n, t in arguments(function).items() if n != "options"]
        out += [*rows(("Argument", "What"), given), ""]
        if place is None:
            out += ["Further options are those of `sequence_loss`.", ""]
            continue
        types = getattr(importlib.import_module(f"liger_multi.losses.{place[0]}"), place[1])
        what = "Divergence" if place[1] == "DIVERGENCES" else "Loss type"
        lines = [(f"`{n}`", str(formula.source)) for n, formula in types.items()]
        out += [*rows((what, "Source"), lines), "", *options(getattr(losses, kind)), ""]
    return out[:-1]


def page(old: str) -> str:
    """The page with current tables between its markers."""
    for name, make in (("head", head), ("families", families)):
        before, found, rest = old.partition(PLACE.format(name))
        _, end, after = rest.partition(END)
        if not found or not end:
            raise SystemExit(f"docs/losses.md needs {PLACE.format(name)} and {END} after it")
        old = "\n".join([before + found, "", *make(), "", END + after])
    return old
