"""Losses: a table of them, one of what their heads take, and the page of all options."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Mapping
from typing import Any

from ci.docs import NOTE
from ci.docs.docstrings import arguments, markdown, text_table
from liger_multi import losses

FAMILIES = (
    ("Preference pairs with a reference", "dpo_loss", "DPOOptions", "preference.DPO"),
    ("Preference pairs without a reference", "cpo_loss", "CPOOptions", "preference.CPO"),
    ("Unpaired preferences", "kto_loss", "KTOOptions", "preference.KTO"),
    ("Policies", "policy_loss", "PolicyOptions", "policy.POLICY"),
    ("Sequences", "sequence_loss", "SequenceOptions", "sequence.SEQUENCE"),
    ("Multi-token prediction", "mtp_loss", "", ""),
    ("Distillation", "distillation_loss", "DistillationOptions", "distillation.DIVERGENCES"),
)
"""Title, function, its options, and where its formulas stand; none: those of `sequence_loss`."""


def formulas(where: str) -> Mapping[str, Any]:
    """The formulas of a family, by the name of the loss type."""
    module, _, name = where.partition(".")
    return getattr(importlib.import_module(f"liger_multi.losses.{module}"), name)  # type: ignore[no-any-return]


def head() -> list[str]:
    """The table of what a head takes."""
    return _named(("Of a head", "What"), arguments(losses.Head))


def families() -> list[str]:
    """The table of all functions: what each is for, and its loss types."""
    lines = []
    for title, name, _, where in FAMILIES:
        file = getattr(losses, name).__module__.replace(".", "/")
        types = ", ".join(f"`{n}`" for n in formulas(where)) if where else "as `sequence_loss`"
        lines.append((title, f"[`{name}`](../{file}.py)", types))
    return text_table(("Losses", "Function", "Loss types"), lines)


def page() -> str:
    """The page with a section for every function: its arguments, loss types and options."""
    out = [NOTE, "", "# Loss options", "", "How to use them: [losses](losses.md).", ""]
    for title, name, options, where in FAMILIES:
        function = getattr(losses, name)
        text = (inspect.getdoc(function) or "").split("Args:")[0].strip()
        out += [f"## {title}", "", f"`losses.{name}`: {markdown(text)}", ""]
        texts = {n: t for n, t in arguments(function).items() if n != "options"}
        out += [*_named(("Argument", "What"), texts), ""]
        if not where:
            out += ["Further options are those of `sequence_loss`.", ""]
            continue
        what = "Divergence" if where.endswith("DIVERGENCES") else "Loss type"
        sources = {n: str(formula.source) for n, formula in formulas(where).items()}
        out += [*_named((what, "Source"), sources), "", *_options(getattr(losses, options)), ""]
    return "\n".join(out)


def _named(heads: tuple[str, str], texts: Mapping[str, str]) -> list[str]:
    return text_table(heads, [(f"`{name}`", text) for name, text in texts.items()])


def _options(options: type) -> list[str]:
    """The table of a dataclass of options."""
    defaults = {f.name: f.default for f in dataclasses.fields(options)}
    lines = [(f"`{n}`", f"`{defaults[n]!r}`", t) for n, t in arguments(options).items()]
    return text_table(("Option", "Default", "What"), lines)
