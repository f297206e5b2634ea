"""Profiles, comparisons and estimates as pages of tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from liger_multi.memory.measure import format_bytes
from liger_multi.memory.recorder import CATEGORIES
from liger_multi.page import Page

if TYPE_CHECKING:
    from liger_multi.memory.breakdown import Comparison, Profile
    from liger_multi.memory.estimation import Estimate

ROWS = 10  # of a list of origins


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "-"


def profile_page(profile: Profile) -> Page:
    """One step: what was held at the peak, and what forward kept."""
    page, peak = Page(), profile.peak_bytes
    where = " in ".join(part for part in (profile.peak_op, profile.peak_module) if part)
    facts = [
        ("peak", format_bytes(peak)),
        ("reached", f"{profile.peak_phase}: {where}" if where else profile.peak_phase),
        ("seen by", f"{profile.method} on {profile.device}"),
    ]
    facts += [(name, format_bytes(size)) for name, size in profile.allocator.items()]
    page.add(f"Memory of {profile.title}", facts)
    rows = [
        (name, format_bytes(size), _share(size, peak), format_bytes(profile.largest[name]))
        for name, size in profile.at_peak.items()
        if size or profile.largest[name]
    ]
    page.add("By category", rows, ("category", "at the peak", "share", "own largest"))
    _origins(page, profile, peak)
    return page


def _origins(page: Page, profile: Profile, peak: int) -> None:
    held = list(profile.by("category", "kind", "op").items())
    page.add(
        "Held at the peak by",
        [
            (category, kind or "-", op or "-", format_bytes(size), _share(size, peak))
            for (category, kind, op), size in held[:ROWS]
        ],
        ("category", "module", "operator", "bytes", "share"),
    )
    kept = list(profile.by("kind", "op", saved=True).items())
    total = sum(size for _, size in kept)
    page.add(
        "Kept by forward for backward",
        [
            (kind or "-", op or "-", format_bytes(size), _share(size, total))
            for (kind, op), size in kept[:ROWS]
        ],
        ("module", "operator", "bytes", "share"),
    )


def comparison_page(both: Comparison) -> Page:
    """Two steps beside each other."""
    page = Page()
    a, b = both.first, both.second

    def row(name: str, x: int, y: int) -> Sequence[str]:
        ratio = f"{y / x:.2f}" if x else "-"
        return name, format_bytes(x), format_bytes(y), format_bytes(y - x), ratio

    rows = [row("peak", a.peak_bytes, b.peak_bytes)]
    rows += [
        row(f"  {name}", a.at_peak.get(name, 0), b.at_peak.get(name, 0)) for name in CATEGORIES
    ]
    kept = [sum(p.by("kind", saved=True).values()) for p in (a, b)]
    rows.append(row("kept by forward", *kept))
    for kind in dict.fromkeys(k for p in (a, b) for k in p.by("kind", saved=True)):
        sizes = [p.by("kind", saved=True).get(kind, 0) for p in (a, b)]
        rows.append(row(f"  {kind[0] or '-'}", *sizes))
    page.add("Peak memory and where it goes", rows, ("", a.title, b.title, "difference", "ratio"))
    return page


def estimate_page(made: Estimate) -> Page:
    """A prediction: static, dynamic, peak."""
    page = Page()
    trained = f"{made.trained / 1e6:,.1f} M trained of {made.total / 1e6:,.1f} M parameters"
    rows = [("model", trained)]
    rows += [(f"static: {name}", format_bytes(size)) for name, size in made.parts.items()]
    rows.append(("static", format_bytes(made.static_bytes)))
    if made.host_bytes:
        rows.append(("on the host instead", format_bytes(made.host_bytes)))
    rows.append(("dynamic, at its own peak", format_bytes(made.dynamic_bytes)))
    for name in CATEGORIES[3:]:
        if made.profile.largest.get(name):
            rows.append((f"  {name}, largest", format_bytes(made.profile.largest[name])))
    if made.gathered_bytes:
        rows.append(("shards of others, for a while", format_bytes(made.gathered_bytes)))
    if made.workspace_bytes:
        rows.append(("workspace of products", format_bytes(made.workspace_bytes)))
    rows.append(("peak of a device", format_bytes(made.peak_bytes)))
    page.add(f"Estimate for {made.title}", rows)
    peak = [
        (name, format_bytes(size), _share(size, made.peak_bytes))
        for name, size in made.profile.at_peak.items()
        if size
    ]
    page.add(f"At the peak ({made.profile.peak_phase})", peak, ("category", "bytes", "share"))
    return page
