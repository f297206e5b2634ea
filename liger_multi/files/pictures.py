"""One look for every picture: colors, type and a PNG that is the same each time (needs matplotlib).

The colors are told apart by people who see few of them: after Okabe and Ito, "Color universal
design". The background is a light gray that stands on white pages and on dark ones, because a PNG
with a transparent background has no text color that reads on both.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from liger_multi.errors import require_packages
from liger_multi.files.documents import write_whole

STOCK, LIGER, OURS, ALARM = "#8c959f", "#e69f00", "#0072b2", "#d55e00"
PARTS = (
    "#0072b2",
    "#cc79a7",
    "#56b4e9",
    "#009e73",
    "#d55e00",
    "#e69f00",
    "#afb8c1",
    "#59636e",
)
"""Of what lies in memory, in the order of its categories."""
INK, SOFT, GRID, PAPER = "#1f2328", "#59636e", "#d8dee4", "#f6f8fa"
DPI = 150
SHADES = 64  # colors of a file
STYLE: dict[str, Any] = {
    "font.size": 10,
    "text.color": INK,
    "figure.facecolor": PAPER,
    "savefig.facecolor": PAPER,
    "axes.facecolor": PAPER,
    "axes.edgecolor": STOCK,
    "axes.labelcolor": INK,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "legend.frameon": False,
    "figure.constrained_layout.w_pad": 0.12,
    "figure.constrained_layout.h_pad": 0.1,
}


@contextlib.contextmanager
def figure(
    path: Path, width: float, height: float, plotted: str = "", dpi: int = DPI
) -> Iterator[Any]:
    """A figure to draw on, written as a PNG when the block ends.

    Args:
        path: The file.
        width: Of the picture, in inches.
        height: Likewise.
        plotted: What stands in the file as its text ``Plotted``.
        dpi: Dots per inch.

    Raises:
        MissingPackageError: No matplotlib.
    """
    require_packages("a picture", ["matplotlib"], "cli")
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from PIL import Image, PngImagePlugin

    with matplotlib.rc_context(STYLE):
        fig = Figure(figsize=(width, height), dpi=dpi, layout="constrained")
        FigureCanvasAgg(fig)
        yield fig
        raw = io.BytesIO()
        fig.savefig(raw, format="png")
    text = PngImagePlugin.PngInfo()
    if plotted:
        text.add_text("Plotted", plotted)
    quantized = (
        Image.open(raw)
        .convert("RGB")
        .quantize(SHADES, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    )
    small = io.BytesIO()
    quantized.save(small, format="png", optimize=True, pnginfo=text)
    write_whole(path, small.getvalue())
