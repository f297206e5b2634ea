"""Findings as configuration: overrides as narrow as the failure, merged into a file of its owner.

The file keeps its text, with its comments: only the block ``quarantine`` is replaced, or added
at the end. The merged text is read again before it is written, and must say the same beside it.
"""

from __future__ import annotations

import codecs
import itertools
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from liger_multi.dispatch.config import Quarantine, current, parse
from liger_multi.dispatch.launch import device_info
from liger_multi.dispatch.registry import REFERENCE, chain, module, serving
from liger_multi.errors import ConfigurationError, shown_path
from liger_multi.files.documents import read_yaml, write_whole, yaml_of
from liger_multi.grouping import grouped
from liger_multi.testing.verify.cases import Case, Target
from liger_multi.testing.verify.run import FINDINGS, Result, findings

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
    groups = grouped(
        ((r.case.backend, r.case.op), r)
        for r in results
        if not r.target.interpreted and r.case.backend != REFERENCE
    )
    failed = {}
    for key, group in groups.items():
        failures = findings(group)
        dtypes = {r.case.dtype for r in group if r.case.check != "promises"}
        failed_dtypes = {r.case.dtype for r in failures}
        is_every_dtype = failed_dtypes >= dtypes or any(
            r.case.check == "promises" for r in failures
        )
        if failures:
            failed[key] = grouped(("" if is_every_dtype else r.case.dtype, r) for r in failures)
    return failed


def alternatives(backend: str, op: str, device: torch.device) -> list[str]:
    """Backends that may take an operator over, in order; the reference is the last."""
    parents = [name for name in chain(backend) if name != backend and module(name, op)]
    has_module = module(backend, op) is not None
    other_backends = [
        r.name for r in serving(device.type) if r.name != backend and module(r.name, op)
    ]
    return list(dict.fromkeys([*(parents if has_module else []), *other_backends, REFERENCE]))


def reason_of(results: Sequence[Result]) -> str:
    """Why, in one line of a comment."""
    first, count = results[0], len(results) - 1
    size = f", {first.worst:.3g} times the tolerance" if first.worst else ""
    others_text = f", and {count} others" if count else ""
    text = " ".join(first.text.split())[:120]
    return f"{first.verdict}: {first.case.name}{size}{others_text}; {text}".rstrip("; ")


def stand_ins(cases: Sequence[Case], backend: str) -> list[Case]:
    """Cases that failed, for another backend."""
    return [Case(c.op, backend, c.sample, c.dtype, c.check) for c in cases]


def unchecked(path: Path, checked: Iterable[str], device: torch.device) -> Sections:
    """What a file's quarantine holds of operators and devices that this run did not check."""
    old = quarantine_of(path)
    if old is None:
        return {}
    sections: Sections = {}
    names, device_section = set(checked), section_of(device, "")
    reasons = _reasons(path.read_text(encoding="utf-8-sig"))
    for section, orders in old.ops.items():
        for op, order in orders.items():
            if op not in names or not _is_of_device(section, device_section):
                reason = reasons.get((section, op), f"since {old.since}")
                sections.setdefault(section, {})[op] = (
                    order[0] if len(order) == 1 else f"[{', '.join(order)}]",
                    reason,
                )
    return sections


def _reasons(text: str) -> dict[tuple[str, str], str]:
    """The comments of a block that :func:`block` wrote, by section and operator."""
    reasons, section = {}, ""
    for previous, line in itertools.pairwise(["", *text.splitlines()]):
        if match := re.fullmatch(r" {4}(\S+):", line):
            section = match[1]
        elif match := re.match(r" {6}(\w+): ", line):
            comment = previous.strip()
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
        (op, dtype): (failures, alternatives(backend, op, device))
        for (backend, op), by_dtype in failing(results).items()
        for dtype, failures in by_dtype.items()
    }
    while pending:
        groups = {
            key: (
                Target(backends[0], str(device)),
                stand_ins([r.case for r in failures], backends[0]),
            )
            for key, (failures, backends) in pending.items()
        }
        right = {r.case for r in run(list(groups.values())) if r.verdict == "right"}
        for key, (target, names_of_cases) in groups.items():
            failures, (replacement, *backends) = pending.pop(key)
            is_right = right.issuperset(names_of_cases)
            if is_right or not backends:
                reason = reason_of(failures) + (
                    "" if is_right else f"; {replacement} did not pass either"
                )
                section = section_of(device, key[1])
                sections.setdefault(section, {})[key[0]] = (target.backend, reason)
            else:
                pending[key] = (failures, backends)
    return sections


def _is_of_device(section: str, device_section: str) -> bool:
    """Whether a section is of this device: of its type, and its architecture if it names one."""
    return (
        section == device_section
        or section.startswith(f"{device_section}/")
        or device_section.startswith(f"{section}/")
    )


def lifted(results: Sequence[Result], device: torch.device) -> list[tuple[str, str, str]]:
    """What the quarantines in force hold on this device: section, operator, and today's verdict."""
    rows = []
    failed = failing(results)
    checked = {r.case.op for r in results if not r.target.interpreted}
    for _, quarantine in current().quarantined:
        for section, ops in quarantine.ops.items():
            if not _is_of_device(section, section_of(device, "")):
                continue
            for op in ops:
                failed_dtypes = [
                    d for (_, name), dtypes in failed.items() if name == op for d in dtypes
                ]
                is_failing = any(not d or d == section.split("/")[-1] for d in failed_dtypes) or (
                    failed_dtypes and "/" not in section
                )
                verdict = (
                    "stays: it is still wrong" if is_failing else "right now: it would be lifted"
                )
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
    for section, orders in sorted(sections.items()):
        lines.append(f"    {section}:")
        for op, (backend, reason) in sorted(orders.items()):
            lines += [f"      # {' '.join(reason.split())}", f"      {op}: {backend}"]
    return "\n".join(lines) + "\n"


def merged(text: str, new: str, name: str) -> str:
    """A configuration's text with another block; everything else stays as it is.

    Raises:
        ConfigurationError: The text is no configuration, or not of a form in which a block can be
            replaced (an anchor in it that other keys refer to, for one).
    """
    old_content = yaml_of(text, name)
    if old_content is not None and not isinstance(old_content, Mapping):
        raise ConfigurationError(f"{shown_path(name)} is no mapping, so that nothing can be added")
    refusal = (
        f"{shown_path(name)} is of a form in which no block can be added without changing the "
        "rest; name another file for --quarantine"
    )
    result = _with_block(text, new)
    try:
        result_content = yaml_of(result, name) or {}
    except ConfigurationError as error:
        raise ConfigurationError(refusal) from error
    other_keys = [
        {k: v for k, v in content.items() if k != KEY}
        for content in (old_content or {}, result_content)
    ]
    if other_keys[0] != other_keys[1] or result_content.get(KEY) != (yaml_of(new, name) or {}).get(
        KEY
    ):
        raise ConfigurationError(refusal)
    parse(result_content, name)
    return result


def _with_block(text: str, new: str) -> str:
    """The text with the block in place of the old one, or at the end of its document."""
    import yaml

    original, line_end = text, "\r\n" if "\r\n" in text else "\n"
    if text and text[-1] not in "\r\n":
        text += line_end
    root: Any = yaml.compose(text, Loader=yaml.BaseLoader)
    if isinstance(root, yaml.ScalarNode):  # a document of null
        text, root = text[: root.start_mark.index] + text[root.end_mark.index :], None
    pairs = root.value if root else []
    old = next((pair for pair in pairs if pair[0].value == KEY), None)
    if not new and old is None:
        return original
    if root and root.flow_style:
        return _in_braces(text, new, root, old, line_end)
    lines = text.splitlines(keepends=True)
    indent = " " * root.start_mark.column if root else ""
    if old:
        start, stop = _line_range(lines, *old)
        comments = _owners_comments(lines[start:stop])
        new = new.replace("\n", f"\n{comments}", 1) if new else comments.replace("  #", "#")
    else:
        start = stop = _document_end(text, len(lines))
        new = "\n" + new if new and "".join(lines[:start]).strip() else new
    new = textwrap.indent(new, indent).replace("\n", line_end)
    return "".join([*lines[:start], new, *lines[stop:]])


def _document_end(text: str, count: int) -> int:
    """The line at which a document ends: that of ``...``, or behind the last one."""
    import yaml

    for event in yaml.parse(text, Loader=yaml.BaseLoader):
        if isinstance(event, yaml.DocumentEndEvent) and event.explicit:
            mark: Any = event.start_mark
            return int(mark.line)
    return count


def _line_range(lines: Sequence[str], key: Any, value: Any) -> tuple[int, int]:
    """The lines of a key and its value; comments before the next key are that key's."""
    start: int = key.start_mark.line
    if getattr(value, "flow_style", True):  # in braces, or a scalar: the mark is on its last line
        return start, max(start, value.end_mark.line) + 1
    stop = max(value.end_mark.line, start + 1)
    column = key.start_mark.column
    while stop > start + 1:
        stripped = lines[stop - 1].lstrip()
        if stripped[:1] not in ("", "#") or (
            stripped and len(lines[stop - 1]) - len(stripped) > column
        ):
            break
        stop -= 1
    return start, stop


def _owners_comments(lines: Sequence[str]) -> str:
    """The comments of a block that :func:`block` did not write, for the beginning of the next."""
    prefixes = ("Written by `liger-multi", "since ", *(f"{verdict}: " for verdict in FINDINGS))
    comments = [line.strip() for line in lines if line.lstrip().startswith("#")]
    return "".join(
        f"  {comment}\n" for comment in comments if not comment.lstrip("# ").startswith(prefixes)
    )


def _in_braces(text: str, new: str, root: Any, old: Any, line_end: str) -> str:
    """The same for a mapping in braces, where the block has braces and commas too."""
    block_lines: list[str] = []
    indents: list[int] = []
    for line in new.splitlines():
        indent = len(line) - len(line.lstrip())
        while indents and indent <= indents[-1]:
            block_lines.append(" " * indents.pop() + "},")
        comment = line.lstrip().startswith("#")
        indents += [indent] if line.endswith(":") and not comment else []
        block_lines.append(line + ("" if comment else " {" if indents[-1:] == [indent] else ","))
    block_lines += [" " * indent + "}," for indent in reversed(indents)]
    inserted = "".join(line + line_end for line in block_lines)
    if old is None:
        start = stop = root.end_mark.index - 1
        last = root.value[-1][1].end_mark.index if root.value else None
        comma = "," if last is not None and "," not in text[last:start].split("#")[0] else ""
        return text[:start] + (comma + line_end + inserted if new else "") + text[stop:]
    start, tail = old[0].start_mark.index, text[old[1].end_mark.index :].removeprefix(",")
    return text[:start] + inserted.removesuffix(line_end) + tail


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
    """Merge a block into a file, or make the file; whether anything was written.

    Raises:
        ConfigurationError: The file is no configuration, or of another form.
        OSError: It cannot be written; it is then as it was.
    """
    data = path.read_bytes() if path.exists() else b""
    mark, text = codecs.BOM_UTF8 * data.startswith(codecs.BOM_UTF8), data.decode("utf-8-sig")
    result = merged(text, new, str(path))
    if result == text:
        return False
    write_whole(path, mark + result.encode())
    return True
