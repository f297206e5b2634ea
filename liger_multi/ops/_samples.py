"""Samples shared by operators over rows: shapes, strides, limits, frozen inputs, real sizes."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from liger_multi.testing.samples import Sample, Tensor as T

BuildTensors = Callable[..., dict[str, T]]
Options = Mapping[str, Any]
LAYOUTS = {n: n for n in ("sliced", "transposed", "expanded")} | {"row-gaps": "rows"}
NONE: Options = {}
# rows of norms: a program or several have one
ROWS = {
    "one-row": (1, 257),
    "one-axis": (48,),
    "one-column": (9, 1),
    "no-rows": (0, 64),
    "sliced": (6, 32),
    "transposed": (2, 16, 24),
    "row-gaps": (3, 4, 64),
    "expanded": (5, 64),
    "many-tiny-rows": (1100, 8),
    "past-65535-rows": (65537, 2),
    "past-65536-columns": (2, 65600),
}
# rows of elementwise operators: a program has a piece of one
PIECES = {
    "odd-width": (4, 37),
    "one-row": (1, 200),
    "one-axis": (31,),
    "no-rows": (0, 16),
    "sliced": (4, 24),
    "transposed": (2, 8, 12),
    "row-gaps": (2, 3, 64),
    "expanded": (5, 24),
    "past-65535-rows": (65537, 2),
    "past-65536-columns": (2, 65600),
}
# the same shapes for packed projections, whose rows hold both halves
HALVES = {
    "odd-half": (4, 74),
    "one-row": (1, 400),
    "one-axis": (62,),
    "no-rows": (0, 16),
    "sliced": (4, 48),
    "transposed": (2, 8, 12),
    "row-gaps": (2, 3, 64),
    "past-65535-rows": (65537, 4),
}


def usual(
    build: BuildTensors,
    shapes: Mapping[str, tuple[int, ...]],
    options: Options = NONE,
    *,
    but: Mapping[str, Options] = NONE,
    omitted: str = "",
) -> list[Sample]:
    """A sample of every shape, from ``build(*shape, layout=...)``.

    Args:
        build: Makes the tensors.
        shapes: Shapes by the name of the sample, which also says the strides.
        options: Of every sample.
        but: Options of single samples in their place.
        omitted: Names of shapes that are left out.
    """
    return [
        Sample(
            name,
            build(*shape, layout=LAYOUTS.get(name, "contiguous")),
            but.get(name, options),
            "thin" if name.startswith("past-") else "small",
            "wide rows" if (shapes is ROWS and name == "past-65536-columns") else "",
        )
        for name, shape in shapes.items()
        if name not in omitted.split()
    ]


def frozen(tensors: Mapping[str, T], *names: str) -> dict[str, T]:
    """The same tensors, of which the named ones get no gradient."""
    return {n: dataclasses.replace(t, grad=False) if n in names else t for n, t in tensors.items()}


def each_frozen(tensors: Mapping[str, T], names: str, options: Options = NONE) -> list[Sample]:
    """A sample for every name, of which that tensor gets no gradient."""
    return [Sample(f"frozen-{n}", frozen(tensors, n), options) for n in names.split()]


def bench(build: BuildTensors, sizes: str, options: Options = NONE) -> list[Sample]:
    """Samples of real sizes, such as ``8192x4096``."""
    shapes = [tuple(map(int, size.split("x"))) for size in sizes.split()]
    return [
        Sample(name, build(*shape), options, "bench")
        for name, shape in zip(sizes.split(), shapes, strict=True)
    ]
