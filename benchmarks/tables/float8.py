"""FP8: training curves, speed and traces of layers, and heads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from benchmarks import store
from benchmarks.linear_float8 import KERNELS
from benchmarks.tables import GIB, measured, table

PARTS = {
    "linear": "one layer, weight {name}",
    "mlp": "a gated MLP, weights {name}",
    "adapters": "{name} over a frozen base",
    "layer": "a decoder layer of {name}",
    "small": "a step of {name}",
    "model": "a step of {name}, checkpointed",
    "gradients": "forward and backward of {name}, checkpointed, no optimizer",
    "accumulated": "a step of {name}, checkpointed, 4 micro-batches",
    "lora": "a step of LoRA on {name}, checkpointed",
}
"""Parts of the speed benchmark, and how the page calls a row of one."""
LAST, FINAL, NORM = 100, 0.01, 0.10
"""Bounds of training in FP8, stated before any run.

Over the seeds of a learning rate, the mean loss of the last steps may be so much above that of bf16
(published runs find 0.25 %, DeepSeek-V3, and one other seed moves a run of this length by about
1 %), and the median norm of the gradient may differ by so much.
"""
OURS = ("ours", "float8")
PEERS = ("torchao", "peft", "apart", "layers", "kept")
Row = Mapping[str, Any]


def _table(heads: Sequence[str], lines: Iterable[Iterable[str]]) -> str:
    return "\n".join(table(heads, lines))


def _said(run: Mapping[str, Any]) -> str:
    return f"{store.device(run)}, torch {run['versions']['torch']}, {run['date'][:10]}:"


def curves() -> str:
    """The verdicts of the newest run on every card."""
    newest = {store.device(run): run for run in store.read("float8-convergence")}
    parts = []
    for run in newest.values():
        heads = ["trained", "learning rate", "last loss, bf16", "FP8", "difference", "seeds"]
        heads += ["gradient norm", "in bounds"]
        lines = [
            [
                "adapters" if one["lora"] else "all weights",
                f"{one['rate']:g}",
                f"{one['bf16']:.4f}",
                f"{one['float8']:.4f}",
                f"{100 * one['above']:+.2f} %",
                "-" if one["lora"] else f"{100 * one['seeds_apart']:.2f} %",
                f"{100 * one['norms_apart']:+.1f} %",
                "yes" if one["good"] else "**no**",
            ]
            for one in run["verdicts"]
        ]
        size = f"{run['steps']} steps of {run['batch']} x {run['tokens']} tokens, "
        parts.append(f"{size}{_said(run)}\n\n{_table(heads, lines)}")
    bounds = (
        f"In bounds: the mean loss of the last {LAST} steps is at most {100 * FINAL:g} % above "
        f"that of bf16, and the median gradient norm differs by at most {100 * NORM:g} %."
    )
    return "\n\n".join([bounds, *parts]) if parts else ""


def _line(run: Mapping[str, Any], row: Row) -> list[str] | None:
    """A row of ours beside bf16 in the same run."""
    same = [
        r
        for r in run["rows"]
        if (r["part"], r["name"], r["shape"]) == (row["part"], row["name"], row["shape"])
    ]
    base = next((r for r in same if r["variant"] == "bf16"), None)
    if base is None:
        return None
    peer = min(
        (r for r in same if r["variant"] in PEERS),
        key=lambda r: PEERS.index(r["variant"]),
        default=None,
    )
    peak_bytes = [r.get("held_bytes", 0) + r["extra_bytes"] for r in (base, row)]
    errors = row.get("error", {})
    return [
        PARTS[row["part"]].format(name=row["name"]),
        row["shape"],
        f"{base['both_ms']:.2f}",
        f"{row['both_ms']:.2f}",
        f"{row['both_ms'] / base['both_ms']:.2f}",
        f"{row['row_ms'] / base['row_ms']:.2f}" if "row_ms" in row and "row_ms" in base else "-",
        "-" if peer is None else f"{peer['both_ms']:.2f} ({peer['variant']})",
        *(f"{n / 2**20:,.0f}" for n in peak_bytes),
        " / ".join(f"{100 * errors[k]:.1f} %" for k in ("y", "dx") if k in errors) or "-",
    ]


def speed() -> str:
    """Times of the newest rows on every card."""
    newest: dict[tuple[str, ...], tuple[Mapping[str, Any], Row]] = {}
    for run, row in store.rows("linear-float8"):
        if row["variant"] in OURS:
            newest[store.device(run), row["part"], row["name"], row["shape"]] = run, row
    parts = []
    for card in dict.fromkeys(key[0] for key in newest):
        runs = [(run, row) for key, (run, row) in newest.items() if key[0] == card]
        heads = ["", "shape", "bf16 ms", "FP8 ms", "ratio", "in a row", "peer ms"]
        heads += ["bf16 MiB", "FP8 MiB", "error of y / dx"]
        lines = [line for run, row in runs if (line := _line(run, row)) is not None]
        parts.append(f"{_said(runs[-1][0])}\n\n{_table(heads, lines)}")
    return "\n\n".join(parts)


def traces() -> str:
    """Device time by kind of kernel, of the newest traced layers and steps on every card."""
    newest: dict[tuple[str, ...], tuple[Mapping[str, Any], Row]] = {}
    for run, row in store.rows("linear-float8"):
        if row.get("trace_ms") and row["variant"] != "layers":
            newest[store.device(run), row["part"], row["name"], row["variant"]] = run, row
    parts = []
    for card in dict.fromkeys(key[0] for key in newest):
        runs = [each for key, each in newest.items() if key[0] == card]
        heads, lines = ["", "variant", *KERNELS, "all kernels", "wall"], []
        for _, each in runs:
            spent = [each["trace_ms"][group] for group in KERNELS]
            cells = [f"{ms:.1f}" for ms in (*spent, sum(spent), each["both_ms"])]
            lines.append([PARTS[each["part"]].format(name=each["name"]), each["variant"], *cells])
        parts.append(f"Milliseconds, {_said(runs[-1][0])}\n\n{_table(heads, lines)}")
    return "\n\n".join(parts)


HEADS = {
    "exact": "none",
    "float8_logits": "logits (`float8_logits`)",
    "float8": "logits and gradient of hidden (`float8`)",
}


def heads() -> list[str]:
    """Time, peak and errors of the loss on an LM head, by the GEMMs that run in FP8."""
    run = store.read("float8")[-1]
    heads = ["rows x width x classes", "GEMMs in FP8", "ms", "time / exact", "peak, GiB"]
    heads += ["loss off by, %", "gradient of hidden, %", "gradient of weight, %"]
    lines, parts = [], []
    for row in run["rows"]:
        shape, exact = "x".join(map(str, row["shape"])), row["exact"]["seconds"]
        for who, title in HEADS.items():
            one = row[who]
            cells = [shape, title, f"{1e3 * one['seconds']:.1f}", f"{one['seconds'] / exact:.2f}"]
            errors = (one["error"][name] for name in ("loss", "hidden_gradient", "weight_gradient"))
            cells += [f"{one['peak_bytes'] / GIB:.1f}", *(f"{100 * x:.2g}" for x in errors)]
            lines.append(cells)
        spent = row["parts"]
        ratios = (
            spent[f"{gemm} in 8 bits"] / spent[f"{gemm} exact"] for gemm in ("logits", "gradient")
        )
        rounding = f"{1e3 * spent['round gradient of logits']:.2f}"
        parts.append([shape, *(f"{ratio:.2f}" for ratio in ratios), rounding])
    heads_of_parts = ["parts of the loss", "GEMM of logits, FP8 / exact"]
    heads_of_parts += ["GEMM of the gradient, FP8 / exact", "rounding the gradient of logits, ms"]
    tables = [*table(heads, lines), "", *table(heads_of_parts, parts)]
    return [measured(run), "", *tables]


TABLES: dict[str, Callable[[], str | list[str]]] = {
    "float8-curves": curves,
    "float8-speed": speed,
    "float8-traces": traces,
    "float8-heads": heads,
}
