"""The committed pictures of results: ``python -m benchmarks.pictures [--all]``.

Each is drawn from what ``benchmarks/results`` holds today, into ``docs``; without ``--all`` only
those that show other numbers than the results have. A picture carries a digest of the numbers that
it was drawn from, so a stale one is found without drawing (:func:`stale`).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import statistics
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import convergence, store
from liger_multi.files import pictures

DOCS = store.ROOT / "docs"
LONG_NAMES = {
    "gpt-oss-20b-4-layers": "gpt-oss-20B (4 of 24 layers, eager attention)",
    "qwen3-30b-a3b-4-layers": "Qwen3-30B-A3B (4 of 48 layers)",
    "qwen2.5-vl-3b-8-layers": "Qwen2.5-VL-3B (8 + 8 layers, pictures)",
}
WHO = {"stock": "Hugging Face", "liger": "Liger-Kernel", "ours": "liger_multi"}
COLORS = {"stock": pictures.STOCK, "liger": pictures.LIGER, "ours": pictures.OURS}


class Picture(NamedTuple):
    """What is plotted, as plain data, and what draws it: data, file and digest."""

    data: Any
    draw: Callable[[Any, Path, str], None]


def named(model: str) -> str:
    """A model or a run as people write it: ``Llama-3.2-1B, 8 x 4096 tokens``."""
    name, _, size = model.partition(":")
    size, _, extra = size.partition("+")
    name = LONG_NAMES.get(name) or re.sub(r"(\d)b\b", r"\1B", name[:1].upper() + name[1:])
    sized = f"{name}, {size.replace('x', ' x ')} tokens" if size else name
    return f"{sized}, {extra}" if extra else sized


def peer(runs: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Who is compared, Liger-Kernel with the newest version that the runs had."""
    versions = sorted(run["versions"].get("liger-kernel", "") for run in runs)
    return {**WHO, "liger": f"{WHO['liger']} {versions[-1]}".strip()}


# --- bars ---

METRICS = (
    ("Peak memory of training [GiB], less is better", "GiB"),
    ("Speed [thousand tokens/s], more is better", "tokens"),
)


def headline() -> Picture:
    """Peak memory and speed of the runs that the first page shows."""
    from benchmarks.tables import performance

    runs = performance.shown_models()
    panels = {
        title: {
            named(run): {who: performance.number(rows[who], unit).rstrip("k") for who in WHO}
            for run, (_, rows) in runs.items()
        }
        for title, unit in METRICS
    }
    cards = sorted({store.device(data) for data, _ in runs.values()})
    dates = sorted(data["date"][:10] for data, _ in runs.values())
    days = " to ".join(dict.fromkeys((dates[0], dates[-1])))
    what = f"Training on one {' or '.join(cards)}, bfloat16, fused AdamW, {days}"
    return Picture(
        {"title": what, "who": peer(data for data, _ in runs.values()), "panels": panels}, bars
    )


def longest() -> Picture:
    """The longest sequences that train, a panel a model and card."""
    from benchmarks.tables import performance

    panels: dict[str, dict[str, dict[str, str]]] = {}
    newest_runs = performance.longest()
    for (model, limit), rows in sorted(newest_runs.items(), key=str):
        card = f"one {store.device(rows[0][0])}"
        card = f"within {limit:g} GB of {card}" if limit else f"on {card}"
        group = {row["provider"]: f"{row['longest']:,}" for _, row in rows}
        panels[f"{named(model)} {card}"] = {"": {who: group[who] for who in WHO if who in group}}
    what = "Longest training sequence [tokens], batch 1, checkpointing"
    runs = [data for rows in newest_runs.values() for data, _ in rows]
    return Picture({"title": what, "who": peer(runs), "panels": panels}, bars)


def bars(data: Mapping[str, Any], path: Path, plotted: str) -> None:
    """Panels side by side, in each a group of bars a run, with the numbers beside them."""
    panels = data["panels"]
    groups = max(len(panel) for panel in panels.values())
    with pictures.figure(path, 9.2, 1.15 + 1.15 * groups, plotted) as drawing:
        axes = drawing.subplots(1, len(panels), squeeze=False)[0]
        for axis, (title, panel) in zip(axes, panels.items(), strict=True):
            _bars(axis, panel, data["who"])
            axis.set_title(title)
        handles, labels = axes[0].get_legend_handles_labels()
        drawing.legend(handles, labels, loc="outside lower center", ncols=len(labels))
        drawing.suptitle(data["title"], x=0.012, ha="left", fontsize=12, fontweight="bold")


def _bars(axis: Any, panel: Mapping[str, Mapping[str, str]], who: Mapping[str, str]) -> None:
    middles, names = [], []
    for at, (name, group) in enumerate(panel.items()):
        first = at * (len(who) + 1.2)
        for i, (one, label) in enumerate(who.items()):
            shown = group[one]
            wide = float(shown.replace(",", ""))
            axis.barh(first + i, wide, 0.86, color=COLORS[one], label="" if at else label)
            weight = "bold" if one == "ours" else "normal"
            axis.annotate(f" {shown}", (wide, first + i), va="center", fontweight=weight)
        axis.annotate(f" {name}", (0, first - 0.62), va="bottom", color=pictures.SOFT)
        middles += [first + i for i in range(len(who))]
        names += [name]
    axis.set_ylim(max(middles) + 0.6, min(middles) - (1.3 if any(names) else 0.6))
    axis.set_yticks([])
    axis.margins(x=0.16)
    axis.grid(visible=False)
    axis.spines["bottom"].set_visible(False)
    axis.set_xticks([])


# --- the roofline ---

BOUNDS = {
    "bandwidth": "Bound by bandwidth [% of the peak of a large copy]",
    "GEMMs": "Bound by GEMMs [% of the peak of a large GEMM]",
}


def bounds(peaks: Mapping[str, float]) -> dict[tuple[str, str], str]:
    """What bounds an operator at each of its samples: the slower of least bytes and operations."""
    import torch

    from liger_multi.bench.cases import cases

    limits = {}
    for case in cases("*", "*", torch.bfloat16, None):
        work = case.work(torch.bfloat16)
        if work is not None:
            moved = work.both_bytes / peaks["copy_bytes_per_second"]
            multiplied = work.both_operations / peaks["matmul_operations_per_second"]
            limits[case.op, case.sample.name] = "GEMMs" if multiplied > moved else "bandwidth"
    return limits


def roofline() -> Picture:
    """What share of the peak each operator reaches, forward and backward, at each sample.

    Samples that were measured once, and that the operator has no more, are left out.
    """
    points: dict[tuple[str, str], dict[str, float]] = {}
    device = store.DEVICES["h100"]
    runs = [run for run in store.read("operators") if store.device(run) == device]
    peaks = [run["ceilings"] for run in runs if run["ceilings"]][-1]
    for run in runs:
        for row in run["rows"]:
            share = (row.get("percent_of_peak") or {}).get("both")
            if share and row["provider"] in WHO:
                points.setdefault((row["op"], row["sample"]), {})[row["provider"]] = round(share, 1)
    panels: dict[str, dict[str, dict[str, list[float]]]] = {name: {} for name in BOUNDS}
    bound = bounds(peaks)
    for (op, sample), shares in points.items():
        if "ours" in shares and (op, sample) in bound:
            row = panels[bound[op, sample]].setdefault(op, {})
            for who, share in shares.items():
                row.setdefault(who, []).append(share)
    return Picture({"device": device, "who": peer(runs), "panels": panels}, dots)


def dots(data: Mapping[str, Any], path: Path, plotted: str) -> None:
    """A line an operator, a dot a shape; the peak is the line on the right."""
    heights = [len(panel) + 1.5 for panel in data["panels"].values()]
    # in fewer dots than others: a page's picture has at most 80 kB
    dpi = pictures.DPI * 9 // 10
    with pictures.figure(path, 9.2, 1.2 + 0.235 * sum(heights), plotted, dpi) as drawing:
        axes = drawing.subplots(len(heights), 1, squeeze=False, height_ratios=heights, sharex=True)
        for axis, (name, panel) in zip(axes[:, 0], data["panels"].items(), strict=True):
            order = sorted(panel, key=lambda op: statistics.median(panel[op]["ours"]))
            for who in ("liger", "ours"):
                points = [(x, y) for y, op in enumerate(order) for x in panel[op].get(who, ())]
                xs, ys = zip(*points, strict=True) if points else ((), ())
                look = {"ours": ("o", 46), "liger": ("D", 24)}[who]
                axis.scatter(
                    xs,
                    ys,
                    marker=look[0],
                    s=look[1],
                    color=COLORS[who],
                    label=data["who"][who],
                    edgecolor=pictures.PAPER,
                    linewidth=0.6,
                    zorder=3,
                )
            for y, op in enumerate(order):
                best = max(panel[op]["ours"])
                axis.plot([0, best], [y, y], color=pictures.GRID, lw=3, zorder=1)
            axis.axvline(100, color=pictures.INK, lw=1.2)
            axis.set_yticks(range(len(order)), order, fontsize=9)
            axis.set_ylim(-0.7, len(order) - 0.3)
            axis.set_xlim(0, 104)
            axis.grid(axis="y", visible=False)
            axis.tick_params(labelbottom=True)
            axis.set_title(BOUNDS[name])
        handles, labels = axes[0, 0].get_legend_handles_labels()
        drawing.legend(handles[::-1], labels[::-1], loc="outside lower center", ncols=2)
        title = (
            f"Operators on one {data['device']}, bfloat16, forward and backward: one dot per shape"
        )
        drawing.suptitle(title, x=0.012, ha="left", fontsize=12, fontweight="bold")


# --- long rows ---


def by_cards() -> Picture | None:
    """The longest rows that plans predict, by cards, and those that ran."""
    from benchmarks.tables.training import PUBLISHED

    planned: dict[str, dict[int, int]] = {}
    for _, row in store.rows("longest-by-cards"):
        planned.setdefault(row["card"].upper(), {})[row["cards"]] = row["tokens"]
    ran: dict[int, int] = {}
    for _, row in store.rows("long-context"):
        if row["part"] == "step" and row["model"] == "qwen3-8b":
            ran[row["cards"]] = max(row["tokens"], ran.get(row["cards"], 0))
    peer = {PUBLISHED["cards"]: PUBLISHED["tokens"]}
    return Picture({"planned": planned, "ran": ran, "peer": peer}, _by_cards) if planned else None


def _by_cards(data: Mapping[str, Any], path: Path, plotted: str) -> None:
    with pictures.figure(path, 7.2, 3.6, plotted) as drawing:
        axis = drawing.subplots()
        looks = {"H100": (pictures.SOFT, "o--"), "H200": (pictures.OURS, "o-")}
        for card, points in data["planned"].items():
            some = {int(cards): tokens for cards, tokens in points.items() if tokens}
            color, look = looks[card]
            axis.plot(list(some), list(some.values()), look, color=color, label=f"{card}, planned")
        for name, color, what in (
            ("ran", pictures.ALARM, "ran here"),
            ("peer", pictures.LIGER, "TRL"),
        ):
            points = data[name].items()
            xs, ys = zip(*((int(x), y) for x, y in points), strict=True) if points else ((), ())
            axis.scatter(xs, ys, color=color, zorder=3, marker="D", label=what)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log", base=2)
        cards = sorted({int(n) for points in data["planned"].values() for n in points})
        axis.set_xticks(cards, [str(n) for n in cards])
        rows = [2**n for n in range(17, 24)]
        axis.set_yticks(rows, [f"{n // 1024:,}k" for n in rows])
        axis.set_xlabel("cards")
        axis.legend(loc="lower right")
        title = "Longest row of Qwen3-8B [tokens], AdamW in fp32, 128 GiB of host a card"
        drawing.suptitle(title, x=0.012, ha="left", fontsize=12, fontweight="bold")


# --- what other modules draw ---


def plan_example() -> Picture:
    """The plan that the page of plans explains."""
    from liger_multi.memory import TrainingPlan
    from liger_multi.memory.planning.result import draw_candidates

    run = store.read("plan-example")[-1]

    def draw(data: Any, path: Path, plotted: str) -> None:
        draw_candidates(TrainingPlan.from_data(data), path, plotted)

    return Picture({**run["plan"], "candidates": run["rows"]}, draw)


def timeline() -> Picture | None:
    """Memory over a step, unpatched and patched, if the newest profiles kept their timelines."""
    from liger_multi.memory.breakdown import Profile, draw_timelines

    profiles = store.read("memory-profile")
    run = [one for one in profiles if store.device(one) == store.QUOTED_DEVICE][-1]

    def draw(data: Any, path: Path, plotted: str) -> None:
        named = [{**row, "title": row["title"].replace("stock", "unpatched")} for row in data]
        draw_timelines([Profile.from_data(row) for row in named], path, plotted)

    return Picture(run["rows"], draw) if all(row["timeline"] for row in run["rows"]) else None


def curves() -> Iterator[tuple[str, Picture]]:
    """Training curves of every device."""
    for run in store.read("convergence"):
        if not any(name.startswith("bug") for row in run["rows"] for name in row["curves"]):
            shown = {name: run[name] for name in ("device", "rows")}
            yield f"convergence-{store.card(run)}.png", Picture(shown, convergence.draw)


# --- all of them ---


def known() -> dict[str, Picture]:
    """Every picture that is drawn from results, by its name in ``docs``."""
    contents = {
        "headline.png": headline(),
        "longest.png": longest(),
        "roofline.png": roofline(),
        "longest-by-cards.png": by_cards(),
        "plan-example.png": plan_example(),
        "memory-timeline-h200.png": timeline(),
        **dict(curves()),
    }
    return {name: picture for name, picture in contents.items() if picture is not None}


def digest(data: Any) -> str:
    """Of plain data, the same on every machine."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]


def carried(path: Path) -> str:
    """The digest that a picture carries, or nothing."""
    content, at = path.read_bytes() if path.exists() else b"", 8
    while at < len(content):
        size, chunk_type = struct.unpack(">I4s", content[at : at + 8])
        key, _, text = content[at + 8 : at + 8 + size].partition(b"\0")
        if (chunk_type, key) == (b"tEXt", b"Plotted"):
            return text.decode()
        at += 12 + size
    return ""


def stale(folder: Path = DOCS) -> list[str]:
    """The pictures that show something else than the results."""
    contents = known()
    return [name for name in contents if carried(folder / name) != digest(contents[name].data)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw what is stale."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pictures", description=__doc__)
    parser.add_argument("--all", action="store_true", help="also those that are current")
    parser.add_argument("--into", type=Path, default=DOCS, metavar="FOLDER")
    options = parser.parse_args(arguments)
    contents = known()
    for name in contents if options.all else stale(options.into):
        picture = contents[name]
        picture.draw(picture.data, options.into / name, digest(picture.data))
        print(f"drew {options.into / name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
