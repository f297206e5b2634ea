"""Findings as configuration: overrides as narrow as the failure, merged into a file of its owner.

The file keeps its text, with its comments: only the block ``quarantine`` is replaced, or added
at the end. The merged text is read again before it is written, and must say the same beside it.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch

from liger_multi.dispatch.config import Quarantine, current, parse
from liger_multi.dispatch.launch import device_info
from liger_multi.dispatch.registry import REFERENCE, chain, module, serving
from liger_multi.documents import read_yaml, yaml_of
from liger_multi.errors import ConfigurationError, shown_path
from liger_multi.testing.verify.cases import Case, Target
from liger_multi.testing.verify.run import Result, findings

KEY = "quarantine"
Sections = dict[str, dict[str, tuple[str, str]]]
"""By section and operator: the backend in its place, and the reason."""


def section_of(device: torch.device, dtype: str) -> str:
    """The narrowest section of a device; ``dtype`` empty for all dtypes."""
    arch = [] if device.type == "cpu" else [device_info(device).arch]
    return "/".join([device.type, *arch, *([dtype] if dtype else [])])


def failing(results: Iterable[Result]) -> dict[tuple[str, str], dict[str, list[Result]]]:
    """Findings of backends that calls can reach, by backend and operator, and by dtype.

    A broken promise counts for all dtypes, since it is checked in one; so do dtypes that all fail.
    """
    groups: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        if not result.target.interpreted and result.case.backend != REFERENCE:
            groups.setdefault((result.case.backend, result.case.op), []).append(result)
    failed = {}
    for key, group in groups.items():
        wrong = findings(group)
        dtypes = {r.case.dtype for r in group if r.case.check != "promises"}
        bad = {r.case.dtype for r in wrong}
        whole = bad >= dtypes or any(r.case.check == "promises" for r in wrong)
        by_dtype: dict[str, list[Result]] = {}
        for result in wrong:
            by_dtype.setdefault("" if whole else result.case.dtype, []).append(result)
        if wrong:
            failed[key] = by_dtype
    return failed


def alternatives(backend: str, op: str, device: torch.device) -> list[str]:
    """Backends that may take an operator over, in order; the reference is the last."""
    parents = [name for name in chain(backend) if name != backend and module(name, op)]
    own = module(backend, op) is not None
    others = [r.name for r in serving(device.type) if r.name != backend and module(r.name, op)]
    return list(dict.fromkeys([*(parents if own else []), *others, REFERENCE]))


def reason_of(results: Sequence[Result]) -> str:
    """Why, in one line of a comment."""
    first, more = results[0], len(results) - 1
    size = f", {first.worst:.3g} times the tolerance" if first.worst else ""
    others = f", and {more} others" if more else ""
    text = " ".join(first.text.split())[:120]
    return f"{first.verdict}: {first.case.name}{size}{others}; {text}".rstrip("; ")


def stand_ins(cases: Sequence[Case], backend: str) -> list[Case]:
    """Cases that failed, for another backend."""
    return [Case(c.op, backend, c.sample, c.dtype, c.check) for c in cases]


def kept(path: Path, checked: Iterable[str], device: torch.device) -> Sections:
    """What a file's quarantine holds of operators and devices that this run did not check."""
    old = quarantine_of(path)
    if old is None:
        return {}
    sections: Sections = {}
    names, mine = set(checked), section_of(device, "")
    reasons = _reasons(path.read_text(encoding="utf-8-sig"))
    for section, named in old.ops.items():
        for op, order in named.items():
            if op not in names or not _within(section, mine):
                reason = reasons.get((section, op), f"since {old.since}")
                sections.setdefault(section, {})[op] = (
                    order[0] if len(order) == 1 else f"[{', '.join(order)}]",
                    reason,
                )
    return sections


def _reasons(text: str) -> dict[tuple[str, str], str]:
    """The comments of a block that :func:`block` wrote, by section and operator."""
    reasons, section = {}, ""
    for before, line in itertools.pairwise(["", *text.splitlines()]):
        if match := re.fullmatch(r" {4}(\S+):", line):
            section = match[1]
        elif match := re.match(r" {6}(\w+): ", line):
            comment = before.strip()
            reasons[section, match[1]] = comment.removeprefix("# ") if comment[:1] == "#" else ""
    return reasons


def replaced(
    results: Iterable[Result],
    device: torch.device,
    run: Callable[[list[tuple[Target, list[Case]]]], list[Result]],
) -> Sections:
    """An override for everything that failed, to the first backend that is right in its place.

    Args:
        results: What was found.
        device: Where.
        run: Runs cases of other backends.
    """
    sections: Sections = {}
    pending = {
        (op, dtype): (wrong, alternatives(backend, op, device))
        for (backend, op), by_dtype in failing(results).items()
        for dtype, wrong in by_dtype.items()
    }
    while pending:
        groups = {
            key: (Target(others[0], str(device)), stand_ins([r.case for r in wrong], others[0]))
            for key, (wrong, others) in pending.items()
        }
        right = {r.case for r in run(list(groups.values())) if r.verdict == "right"}
        for key, (target, again) in groups.items():
            wrong, (other, *others) = pending.pop(key)
            is_right = right.issuperset(again)
            if is_right or not others:
                reason = reason_of(wrong) + ("" if is_right else f"; {other} did not pass either")
                section = section_of(device, key[1])
                sections.setdefault(section, {})[key[0]] = (target.backend, reason)
            else:
                pending[key] = (wrong, others)
    return sections


def _within(section: str, mine: str) -> bool:
    """Whether a section is of this device: of its type, and its architecture if it names one."""
    return section == mine or section.startswith(f"{mine}/") or mine.startswith(f"{section}/")


def lifted(results: Sequence[Result], device: torch.device) -> list[tuple[str, str, str]]:
    """What the quarantines in force hold on this device: section, operator, and today's verdict."""
    rows = []
    failed = failing(results)
    checked = {r.case.op for r in results if not r.target.interpreted}
    for _, quarantine in current().quarantined:
        for section, named in quarantine.ops.items():
            if not _within(section, section_of(device, "")):
                continue
            for op in named:
                wrong = [d for (_, name), dtypes in failed.items() if name == op for d in dtypes]
                stays = any(not d or d == section.split("/")[-1] for d in wrong) or (
                    wrong and "/" not in section
                )
                verdict = "stays: it is still wrong" if stays else "right now: it would be lifted"
                rows.append((section, op, verdict if op in checked else "was not checked"))
    return rows


def block(sections: Sections, since: str, made_with: str) -> str:
    """The block as YAML; empty without overrides."""
    if not sections:
        return ""
    quoted = [text.replace("\\", "\\\\").replace('"', '\\"') for text in (since, made_with)]
    lines = [
        f"{KEY}:",
        "  # Written by `liger-multi verify --quarantine`; a later run lifts what is right then.",
        f'  since: "{quoted[0]}"',
        f'  made_with: "{quoted[1]}"',
        "  ops:",
    ]
    for section, named in sorted(sections.items()):
        lines.append(f"    {section}:")
        for op, (backend, reason) in sorted(named.items()):
            lines += [f"      # {' '.join(reason.split())}", f"      {op}: {backend}"]
    return "\n".join(lines) + "\n"


def merged(text: str, new: str, name: str) -> str:
    """A configuration's text with another block; everything else stays as it is.

    Raises:
        ConfigurationError: The text is no configuration, or not of a form in which a block can be
            replaced (a mapping in braces, for one).
    """
    import yaml

    before = yaml_of(text, name)
    if before is not None and not isinstance(before, Mapping):
        raise ConfigurationError(f"{shown_path(name)} is no mapping, so that nothing can be added")
    lines = text.splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines[-1] += "\n"
    root = yaml.compose(text, Loader=yaml.BaseLoader) if before else None
    start = stop = len(lines)
    for key, value in root.value if root else ():
        if key.value == KEY:
            start, stop = key.start_mark.line, min(value.end_mark.line, len(lines))
            stop = max(stop, start + 1)
            while (
                stop > start + 1
                and lines[stop - 1].strip()[:1] in ("", "#")
                and (not lines[stop - 1].startswith((" ", "\t")))
            ):
                stop -= 1  # blank lines and comments before the next key are the owner's
    gap = "\n" if new and start == len(lines) and "".join(lines).strip() else ""
    result = "".join([*lines[:start], gap + new, *lines[stop:]])
    after = yaml_of(result, name) or {}
    beside = [{k: v for k, v in content.items() if k != KEY} for content in (before or {}, after)]
    if beside[0] != beside[1] or after.get(KEY) != (yaml_of(new, name) or {}).get(KEY):
        raise ConfigurationError(
            f"{shown_path(name)} is of a form in which no block can be added without changing the "
            "rest; name another file for --quarantine"
        )
    parse(after, name)
    return result


def quarantine_of(path: Path) -> Quarantine | None:
    """The quarantine that a file holds; None without a file.

    Raises:
        ConfigurationError: The file is no configuration.
    """
    return (
        parse(read_yaml(path, "the configuration") or {}, str(path)).quarantine
        if path.exists()
        else None
    )


def write(path: Path, new: str) -> bool:
    """Merge a block into a file, or make the file; whether anything was written."""
    text = path.read_text(encoding="utf-8-sig") if path.exists() else ""
    result = merged(text, new, str(path))
    if result == text:
        return False
    place = path.resolve()
    part = place.with_name(f".{place.name}.part")
    part.write_text(result, encoding="utf-8")
    if place.exists():
        part.chmod(place.stat().st_mode & 0o777)
    os.replace(part, place)
    return True
