"""Curves of training runs: the bounds that they are held against, verdicts, and pictures.

A row of a result file names what was trained, and has the curves of every provider.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# --- the bounds, stated before any run ---
#
# Training amplifies rounding: two right programs part, and how fast depends on model, data and
# rate. So a patched curve is held against controls and not against a number: stock runs whose
# weights start off by at most one unit in the last place of the dtype, and whose gradients are off
# by as much in every step. Distance is the root of the mean square of the relative differences from
# stock, over all steps so far, of the loss and of the gradient's norm. In every step from EARLIEST
# on (one difference alone may be near zero by chance) a patched curve may be FACTOR times as far as
# the farthest control: a patched layer rounds at some ten other places in each direction, where a
# control is rounded once, and independent errors add as a root, so 4 and not 16. FLOOR is what a
# sum in fp32 in another order makes of a loss, where controls happen to agree.
FACTOR, FLOOR, EARLIEST = 4.0, 8 * torch.finfo(torch.float32).eps, 10
# Chaos must not hide a curve that ends elsewhere: the mean loss of the last LAST steps. Nobody can
# tell runs apart by a thousandth, and other weights at the start move it by about a hundredth.
LAST, FINAL = 20, {"float32": 1e-3, "bfloat16": 1e-2}

CURVES = ("loss", "gradient_norm")
Curves = dict[str, list[float]]


def distance(curve: Sequence[float], stock: Sequence[float]) -> Tensor:
    """Root of the mean square of the relative differences, over all steps so far."""
    ratio = torch.tensor(curve, dtype=torch.float64) / torch.tensor(stock, dtype=torch.float64)
    square = (ratio - 1).square()
    return (square.cumsum(0) / torch.arange(1, len(square) + 1)).sqrt()


def allowed(curves: Mapping[str, Curves], name: str) -> Tensor:
    """How far a curve may be from stock in each step, from how far controls are."""
    controls = [c[name] for provider, c in curves.items() if provider.startswith("control")]
    farthest = torch.stack([distance(c, curves["stock"][name]) for c in controls]).amax(0)
    return FACTOR * farthest + FLOOR


@dataclass(frozen=True)
class Verdict:
    """How a curve stands to stock's.

    Attributes:
        shares: Largest part of the allowed distance that is used, for each of CURVES.
        final: Difference of the last losses' mean, relative to stock's.
        beyond: First step that is out of bounds, if one is.
        good: Whether every bound holds.
    """

    shares: dict[str, float]
    final: float
    beyond: int | None
    good: bool


def final(curves: Mapping[str, Curves], provider: str) -> float:
    """Difference of the last losses' mean, relative to stock's."""
    one, stock = (sum(curves[p]["loss"][-LAST:]) for p in (provider, "stock"))
    return one / stock - 1


def judge(row: Mapping[str, Any], provider: str = "ours") -> Verdict:
    """Hold one provider's curves against the bounds."""
    curves, shares, beyond = row["curves"], {}, []
    for name in CURVES:
        used = distance(curves[provider][name], curves["stock"][name]) / allowed(curves, name)
        used = used[EARLIEST - 1 :]
        shares[name] = used.amax().item()
        beyond += (~(used <= 1)).nonzero().flatten().tolist()[:1]  # NaN is beyond too
    last = final(curves, provider)
    good = not beyond and abs(last) <= FINAL[row["dtype"]]
    return Verdict(shares, last, min(beyond) + EARLIEST if beyond else None, good)


# --- pictures ---

COLORS = {
    "stock": "#c2571a", "ours": "#0b6e69", "liger": "#5b4bb0", "control-1": "#9aa3ad",
    "seed": "#d8b25c",
}  # fmt: skip


def draw(data: Mapping[str, Any], path: Path) -> None:
    """A panel a model: losses, and below them how far from stock, with what is allowed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    from liger_multi.demo.display import STYLE

    models = list(dict.fromkeys(row["model"] for row in data["rows"]))
    across = min(4, len(models))
    down = -(-len(models) // across)
    with matplotlib.rc_context({**STYLE, "font.size": 8}):
        figure = Figure(figsize=(max(6.4, 3.4 * across), 3.6 * down), dpi=110, layout="constrained")
        axes = figure.subplots(2 * down, across, squeeze=False, height_ratios=[3, 2] * down)
        for axis in axes.flat:
            axis.set_visible(False)
        for i, model in enumerate(models):
            pair = [axes[2 * (i // across) + k, i % across] for k in (0, 1)]
            _panel(pair, model, [row for row in data["rows"] if row["model"] == model])
            if i == 0:
                figure.legend(loc="outside upper right", ncols=3)
                pair[0].set_ylabel("loss")
                pair[1].set_ylabel("distance from stock")
        figure.suptitle(_title(data), x=0.01, ha="left", fontsize=10)
        figure.savefig(path)


def _title(data: Mapping[str, Any]) -> str:
    dtypes = " and ".join(dict.fromkeys(row["dtype"] for row in data["rows"]))
    steps = data["rows"][0]["steps"]
    what = "below: distance of the loss so far, and (dots) what the controls allow"
    return f"{data['device']['name']}, {dtypes}, {steps} steps on Python's sources\n{what}"


def _panel(pair: Sequence[Any], model: str, rows: Sequence[Mapping[str, Any]]) -> None:
    above, below = pair
    above.set_visible(True)
    below.set_visible(True)
    above.set_title(model, loc="left", fontweight="bold", fontsize=9)
    below.set_yscale("log")
    for row in rows:
        style = "-" if row["dtype"] == "float32" or len(rows) == 1 else (0, (2, 1.5))
        label = "" if style == "-" else ", bf16"
        curves = row["curves"]
        steps = range(1, row["steps"] + 1)
        for name in ("seed", "stock", "liger", "ours"):
            if name in curves:
                wide = 3.5 if name == "stock" else 1.1
                dim = 0.35 if name in ("stock", "seed") else 1.0
                look = {"color": COLORS[name], "lw": wide, "alpha": dim, "ls": style}
                above.plot(steps, curves[name]["loss"], label=f"{name}{label}", **look)
        for name in ("liger", "ours"):
            if name in curves:
                far = distance(curves[name]["loss"], curves["stock"]["loss"])
                below.plot(steps, far.clamp(min=1e-9), color=COLORS[name], lw=1.4, ls=style)
        bound = allowed(curves, "loss")[EARLIEST - 1 :]
        below.plot(steps[EARLIEST - 1 :], bound, color="#b3261e", lw=0.9, ls=(0, (1, 1)))
