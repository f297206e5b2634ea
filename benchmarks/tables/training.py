"""Training beside others: LoRA, bases in 4 bits, shared prefixes, long rows, and the examples."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from benchmarks import long_context as long_rows, store
from benchmarks.tables import GIB, gib, measured, provenance, table

# --- LoRA, and bases in 4 bits ---

LORA_PARTS = {
    "mlp": "MLP of Llama-3-8B",
    "qkv": "q, k and v, three updates",
    "qkv as one": "q, k and v, one operator",
    "step": "a step of a small model",
}


def lora_layers() -> list[str]:
    """Time and memory of LoRA layers beside PEFT's, forward and backward."""
    layers: dict[tuple[str, str], dict[str, Any]] = {}
    runs = [r for r in store.read("lora") if store.device(r) == store.DEVICES["h100"]]
    for run in runs:
        for row in run["rows"]:
            layers.setdefault((row["part"], row["form"]), {})[row["variant"]] = row
    lines = []
    for (part, form), rows in sorted(
        layers.items(), key=lambda item: [*LORA_PARTS, item[0][0]].index(item[0][0])
    ):
        if part not in LORA_PARTS or not {"stock", "ours"} <= set(rows):
            continue
        cells = [f"{LORA_PARTS[part]}, {form.removesuffix(' adapters')}"]
        for who in ("stock", "ours"):
            cells += [f"{rows[who]['milliseconds']:#.3g}".rstrip(".")]
            cells += [f"{rows[who]['added_bytes'] / 2**20:,.0f}"]
        ratio = rows["ours"]["milliseconds"] / rows["stock"]["milliseconds"]
        lines.append([*cells, f"{ratio:.2f}"])
    heads = ["Part, adapters", "PEFT, ms", "added, MiB", "ours, ms", "added, MiB", "ours / PEFT"]
    return [measured(runs[-1]), "", *table(heads, lines)]


def four_bits() -> list[str]:
    """Steps and layers over a base in 4 bits beside others, and ``dequantize``, by run."""
    parts: list[str] = []
    for run in store.read("four-bits"):
        steps, rates = [], []
        ours = {
            row["work"]: row for row in run["rows"][::-1] if row["side"].startswith("liger_multi, ")
        }
        places = list(dict.fromkeys(row["work"] for row in run["rows"]))
        for row in sorted(run["rows"], key=lambda row: places.index(row["work"])):
            name = row["work"]
            if "of_copy" in row:
                shares = [row["of_copy"], row.get("of_equal_copy")]
                cells = ["" if share is None else f"{100 * share:.0f} %" for share in shares]
                cells = [f"{row['ms']:.4f}", f"{row['gb_per_s']:,.0f}", *cells]
                rates.append([name.removeprefix("dequantize "), *cells])
            elif row["peak_bytes"]:
                pair = [ours[name][key] / row[key] for key in ("ms", "peak_bytes")]
                ratio = "" if row is ours[name] else ", ".join(f"{r:.2f}" for r in pair)
                cells = [f"{row['ms']:#.4g}".rstrip("."), gib(row["peak_bytes"])]
                steps.append([name, row["side"], *cells, ratio])
        heads = ["Work", "Implementation", "ms", "peak, GiB", "first of ours / it: time, memory"]
        parts += [measured(run), "", *(table(heads, steps) if steps else [])]
        parts += [""] if steps else []
        heads = ["dequantize", "ms", "GB/s", "of a long copy's", "of a copy's of as many bytes"]
        parts += [*table(heads, rates), ""] if rates else []
    return parts[:-1]


# --- sequences ---

_VARIANTS = {"stock": "transformers", "unshared": "unshared, patched", "floor": "packed floor"}


def shared_prefixes() -> list[str]:
    """A step with shared prefixes beside the same step without, and beside the packed floor."""
    groups: dict[tuple[str, str], dict[str, Any]] = {}
    runs = store.read("shared-prefixes")
    for run in runs:
        for row in run["rows"]:
            groups.setdefault((row["model"], row["shape"]), {})[row["variant"]] = row
    if not runs:
        return []
    lines = []
    for (model, shape), rows in groups.items():
        cells = [model, shape.replace("x", ", ")]
        for who in (*_VARIANTS, "ours"):
            row = rows.get(who, {})
            cells += [_milliseconds(row), _peak(row), f"{row.get('tokens_per_second', 0):,.0f}"]
        for base in ("unshared", "floor"):
            ours, other = rows.get("ours", {}), rows.get(base, {})
            both = "milliseconds" in ours and "milliseconds" in other
            pair = ("milliseconds", "peak_bytes")
            cells.append(", ".join(f"{ours[k] / other[k]:.2f}" for k in pair) if both else "")
        lines.append([cell if cell != "0" else "" for cell in cells])
    units = [f"{who}, {unit}" for who in (*_VARIANTS.values(), "tree") for unit in _UNITS]
    heads = ["Model", "G, P, R", *units, "tree / unshared", "tree / floor"]
    said = (
        "Forward and backward in bf16 with log-probabilities of the answers; medians. Ratios are "
        "those of time and of memory. Tokens are those of the unshared batch."
    )
    return [said, "", measured(runs[-1]), "", *table(heads, lines)]


_UNITS = ("ms", "GiB", "tokens/s")


def _milliseconds(row: Mapping[str, Any]) -> str:
    return f"{row['milliseconds']:.0f}" if "milliseconds" in row else row.get("failed", "")[:13]


def _peak(row: Mapping[str, Any]) -> str:
    return gib(row["peak_bytes"]) if "peak_bytes" in row else ""


PUBLISHED = {"cards": 8, "tokens": 2**20, "seconds": 380.0, "peak_bytes": 56.2e9}
"""Release notes of TRL 1.13: Qwen3-8B on 8 H100s, layers computed again, ring attention."""


def _published() -> list[str]:
    """TRL's run as a row; with attention computed again, that is 4.5 times its forward."""
    sizes = long_rows.MODELS["qwen3-8b"][1]
    config = SimpleNamespace(**sizes)
    config.get_text_config = lambda: config
    layers, tokens, seconds = sizes["num_hidden_layers"], PUBLISHED["tokens"], PUBLISHED["seconds"]
    count = long_rows.operations(config, int(tokens), layers, 4.5)
    return [
        "qwen3-8b, TRL 1.13, published",
        f"{PUBLISHED['cards']} x H100",
        f"{tokens:,}",
        "host",
        str(layers),
        f"{seconds:.1f}",
        f"{tokens / seconds:,.0f}",
        f"{count / seconds / PUBLISHED['cards'] / 1e12:.0f}",
        gib(PUBLISHED["peak_bytes"]),
        *["-"] * 3,
    ]


def long_context() -> list[str]:
    """Steps with one long row over several cards, and ways to keep activations."""
    pairs = store.rows("long-context")
    steps = [(run, row) for run, row in pairs if row["part"] == "step"]
    variants = [row for _, row in pairs if row["part"] == "variant"]
    lines = [
        [
            row["model"] + (" in FP8" if row["variant"] == "float8" else ""),
            f"{row['cards']} x {store.short(run)}",
            f"{row['tokens']:,}",
            "host" if row["host_bytes_per_card"] else "card",
            str(row["layers"]),
            f"{row['seconds_all_layers']:.1f}",
            f"{row['tokens_per_second']:,.0f}",
            f"{row['tflops_per_card']:.0f}",
            gib(row["peak_bytes"]),
            gib(row["planned_bytes"]) if "planned_bytes" in row else "-",
            f"{row['host_bytes_all_layers'] / GIB:.0f}" if row["host_bytes_per_card"] else "-",
            f"{row['exposed_percent']:.3f}" if row["host_bytes_per_card"] else "-",
        ]
        for run, row in steps
    ]
    others = [
        [
            row["model"],
            str(row["cards"]),
            row["variant"],
            f"{row['tokens']:,}",
            str(row["layers"]),
            f"{row['seconds']:.2f}",
            gib(row["peak_bytes"]),
            gib(row["host_bytes_per_card"]),
            f"{row['exposed_percent']:.3f}",
        ]
        for row in variants
    ]
    if not pairs:
        return ["Not measured yet."]
    said = (
        "A step of the whole model is extrapolated where fewer layers ran; the peak is of those. "
    )
    said += "Host: of all cards. Exposed: the share of the step that waits for copies."
    first = ["Model", "Cards", "Tokens", "Activations on the", "Layers run", "s a step", "tokens/s"]
    first += ["TFLOP/s a card", "GiB a card", "planned", "host GiB", "exposed, %"]
    second = ["Model", "Cards", "Activations", "Tokens", "Layers", "s", "GiB a card"]
    second += ["host GiB a card", "exposed, %"]
    parts = [table(first, [*lines, _published()]), table(second, others)]
    shown = [
        said,
        "",
        provenance(run for run, _ in pairs),
        "",
        *parts[0],
        *([""] + parts[1] if others else []),
    ]
    if (store.ROOT / "docs" / "longest-by-cards.png").exists():
        shown += ["", "![Longest planned row by cards, and measured ones](longest-by-cards.png)"]
    return shown


def compressed_activations() -> list[str]:
    """Losses with activations that wait in a byte, and errors of gradients by layer."""
    pairs = store.rows("compressed-activations")
    if not pairs:
        return ["Not measured yet."]
    run, row = pairs[-1]
    steps = [1, *range(row["steps"] // 6, row["steps"] + 1, row["steps"] // 6)]
    named = {"kept": row["dtype"], "compressed": "a byte", "seed": "other weights at the start"}

    def mean(curve: Sequence[float], step: int) -> str:
        """Of the ten steps that end with this one."""
        some = curve[max(0, step - 10) : step]
        return f"{sum(some) / len(some):.4f}"

    losses = [
        [text, *(mean(row["losses"][name], step) for step in steps)] for name, text in named.items()
    ]
    errors = [[layer, f"{100 * error:.2f}"] for layer, error in row["gradients"].items()]
    size = f"{row['batch']} x {row['tokens']} tokens a step"
    said = (
        f"Mean loss of the last ten steps, {row['model']} of {row['layers']} layers, {size} of "
        f"Python's sources, `keep_attention` (`python -m benchmarks.compressed --store`)."
    )
    curves = table(["loss at step", *map(str, steps)], losses)
    after = f"Relative errors of the gradients of one batch after {row['steps']} steps:"
    by_layer = table(["parameters of", "error, %"], errors)
    return [said, "", measured(run), "", *curves, "", after, "", *by_layer]


# --- examples ---

COMMAND = re.compile(r"^ {4}(\S.*)", re.M)


def script(name: str) -> tuple[str, str, str]:
    """What a script shows, and its commands for a CPU and for GPUs, from its first lines."""
    source = (store.ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8")
    doc = ast.get_docstring(ast.parse(source)) or ""
    tiny, gpu = (" ".join(command.split()) for command in COMMAND.findall(doc))
    return doc.partition("\n")[0], tiny, gpu


def examples() -> list[str]:
    """A table of the scripts with what they took, and one of their commands for GPUs."""
    newest = {row["example"]: (run, row) for run, row in store.rows("examples")}
    lines, commands = [], []
    for name, (_, row) in sorted(newest.items()):
        shows, tiny, gpu = script(name)
        numbers = (row["seconds"], row["processor_seconds"], row["peak_bytes"] / 2**20)
        lines.append((f"[`{tiny}`]({name}.py)", shows, *(f"{n:.0f}" for n in numbers)))
        commands.append(f"    {gpu}")
    runs = [run for run, _ in newest.values()]
    loads = sorted(row["load"] for _, row in newest.values())
    run = max(runs, key=store.moment)
    said = f"Measured on {run['device']['cores']} CPU cores, torch {run['versions']['torch']}, "
    said += f"{run['date'][:10]}, other work beside (load average before each: {loads[0]} to "
    said += f"{loads[-1]}), which lengthens the first time and not the second:"
    gpus = "On GPUs; these commands have not been run on one:"
    heads = ("on a CPU", "shows", "time, s", "CPU time, s", "peak, MiB")
    return [said, "", *table(heads, lines), "", gpus, "", *commands]


TABLES: dict[str, Callable[[], list[str]]] = {
    "lora-layers": lora_layers,
    "four-bits": four_bits,
    "shared-prefixes": shared_prefixes,
    "long-context": long_context,
    "compressed-activations": compressed_activations,
    "examples": examples,
}
