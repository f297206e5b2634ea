"""Operators and modules: README's table, a list of all, a page for each, and one of modules."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

from benchmarks.tables import OPERATOR_FAMILIES
from ci.docs import NOTE, ROOT
from ci.docs.docstrings import listed, markdown, sections, signature, summary, text_table
from ci.npu import levels
from liger_multi import nn, ops
from liger_multi.dispatch import registry
from liger_multi.dispatch.backend import Backend
from liger_multi.dispatch.bitwise import PROPERTIES
from liger_multi.dispatch.op import OPS, replicated
from liger_multi.testing import samples
from liger_multi.testing.tolerance import TOLERANCES

DIRECTIONS = ("forward", "backward")

# --- operators and backends ---


def public_operators() -> dict[str, Callable[..., Any]]:
    """The public function of every operator, by name."""
    functions = {n: f for n in sorted(ops.__all__) if inspect.isfunction(f := getattr(ops, n))}
    return {n: f for n, f in functions.items() if f.__module__.endswith(f".{n}")}


def forms(name: str) -> list[Callable[..., Any]]:
    """The public function of an operator, and those of its contract that return more."""
    first = public_operators()[name]
    functions = [getattr(ops, n) for n in ops.__all__ if inspect.isfunction(getattr(ops, n))]
    return [first, *(f for f in functions if f.__module__ == first.__module__ and f is not first)]


def contract(name: str) -> str:
    """The file of an operator's contract."""
    return f"liger_multi/ops/{name}.py"


def by_family(operators: Iterable[str]) -> dict[str, list[str]]:
    """Operators by the title of their family, in the order of the families."""
    families: dict[str, list[str]] = {title: [] for title in OPERATOR_FAMILIES.values()}
    for name in operators:
        families[OPERATOR_FAMILIES[OPS[name].family]].append(name)
    return families


@cache
def backends() -> dict[str, Backend]:
    """The backends of this repository: the reference, layers that others share, and devices."""
    names = sorted(path.parent.name for path in (ROOT / "backends").glob("*/__init__.py"))
    packages = ["liger_multi.reference", *(f"liger_multi.backends.{name}" for name in names)]
    records = [importlib.import_module(package).BACKEND for package in packages]
    return {r.name: r for r in sorted(records, key=lambda record: record.device_type is not None)}


def directions(backend: str, op: str) -> tuple[str, ...]:
    """Which directions of an operator a backend implements by itself."""
    module = registry.module(backend, op)
    return tuple(name for name in DIRECTIONS if getattr(module, name, None) is not None)


def cell(backend: str, op: str) -> str:
    """What a backend has of an operator; of one that nobody ran, also the level that it reached."""
    text = _directions_or_parent(backend, op)
    return f"{text}, level {levels.level(op)}" if backend == "npu" else text


def _directions_or_parent(backend: str, op: str) -> str:
    own, record = directions(backend, op), backends()[backend]
    if own:
        return "yes" if own == DIRECTIONS else f"{own[0]} only"
    if not record.device_type:
        return "no"
    return f"by {next((p for p in record.parents if directions(p, op)), registry.REFERENCE)}"


# --- the table of the first page ---

SHARED_ROWS = {
    "LM head and cross entropy": ("divergences",),
    "rotary embeddings": ("embedding",),
    "mixtures of experts": ("residual streams",),
    "LoRA": ("FP8", "weights in 4 bits"),
}
"""Families that stand in the row of another one."""
KERNELS = {"triton": "Triton: NVIDIA, AMD", "npu": "Ascend"}


def operator_table() -> list[str]:
    """The operator table of the first page, in Markdown: a row per family, or a few of them."""
    lines, families = [], by_family(public_operators())
    for first, others in SHARED_ROWS.items():
        families[first] += [name for title in others for name in families.pop(title)]
    for first, names in families.items():
        title = ", ".join((first, *SHARED_ROWS.get(first, ())))
        counts = [sum(bool(directions(backend, name)) for name in names) for backend in KERNELS]
        cells = [f"{n} of {len(names)}" if n else "" for n in counts]
        cells = ["all" if n == len(names) else text for n, text in zip(counts, cells, strict=True)]
        links = ", ".join(f"[`{name}`]({contract(name)})" for name in names)
        lines.append([title, links, *cells])
    return text_table(("Operators", "", *KERNELS.values()), lines)


# --- the list of all operators ---

OPERATORS_HEAD = """\
Every operator is a function of `liger_multi.ops` with a gradient:

```python
import torch
from liger_multi import nn, ops

x, weight = torch.randn(4, 8), torch.ones(8)
y = ops.rms_norm(x, weight)
```

| in the table | meaning |
|---|---|
| yes | the backend implements forward and backward |
| forward only, backward only | the next backend of its chain runs the other direction |
| by triton, by reference | that backend runs it on this backend's tensors |
| level | the [verification level](../ascend.md) of an operator that ran on no NPU |
"""
OPTIONS_HEAD = "An option of a public operator selects these, such as `inplace=True`.\n"


def operators_page() -> str:
    """The list of operators, and those without a page."""
    functions = public_operators()
    out = [NOTE, "", "# Operators", "", OPERATORS_HEAD]
    for title, names in by_family(functions).items():
        lines = [_operator_row(name, sections(functions[name])) for name in names]
        rows = text_table(("Operator", "What", *backends(), "Input dtypes"), lines)
        out += [f"## {title[0].upper()}{title[1:]}", "", *rows, ""]
    out += ["", "## Operators behind options", "", OPTIONS_HEAD, "```"]
    out += [line for name in sorted(OPS.keys() - functions) for line in _schemas(name)]
    return "\n".join([*out, "```", ""])


def _operator_row(name: str, text: dict[str, str]) -> list[str]:
    dtypes = re.search(r"(?:In: )?(.*?)\.(\s|$)", " ".join(text.get("Dtypes", "").split()))
    cells = [cell(backend, name) for backend in backends()]
    return [f"[`{name}`]({name}.md)", summary(text), *cells, dtypes[1] if dtypes else ""]


def _schemas(name: str) -> list[str]:
    return [f"liger_multi::{name}_{p.direction}{p.schema}" for p in OPS[name].primitives]


# --- the page of an operator ---

BITS = "[equal bits](../bitwise.md); a backend may promise less"
TOLERANCE = """\
The suite compares results and gradients of every backend with fp64 on the same rounded inputs. An
element may differ by its own size times the first number, plus the largest element times the
second."""


def operator_page(name: str) -> str:
    """The page of one operator."""
    op, text = OPS[name], sections(public_operators()[name])
    out = [NOTE, "", f"# {name}", "", markdown(text.pop("")), ""]
    out += ["```python", snippet(name), "```", "", "## Signature", ""]
    out += ["```python", *map(signature, forms(name)), "```", ""]
    for heading, body in text.items():
        shown = listed(body) if heading in ("Raises", "Args") else markdown(body)
        out += [f"## {heading}", "", shown, ""]
    out += ["## Equal bits", "", *promises(op), "", f"See {BITS}.", ""]
    out += ["## Backends", "", *[f"- {backend}: {cell(backend, name)}" for backend in backends()]]
    out += ["", "[Verification](../verification.md) has the devices of each backend.", ""]
    out += ["## Tolerance", "", TOLERANCE, "", *_tolerances(), ""]
    out += ["## torch.compile and DTensor", "", _compiled(op), "", _sharded(op), ""]
    return "\n".join([*out, "## Schema", "", "```", *_schemas(name), "```", ""])


def snippet(name: str) -> str:
    """A call of an operator that runs as it stands: the first sample of its contract."""
    sample = next(s for s in samples.of(name) if s.size == "small" and s.elements)
    code: dict[str, Any] = {tensor: tensor for tensor in sample.tensors}
    code |= {option: repr(value) for option, value in sample.options.items()}
    parameters = inspect.signature(public_operators()[name]).parameters.values()
    positional = [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY]
    arguments, in_order = [], True
    for at, (argument, value) in enumerate(
        samples.with_tuples(samples.adapted(name), code).items()
    ):
        if isinstance(value, tuple):
            value = f"ops.LoRA({', '.join(map(str, value))})"
        in_order &= argument not in sample.options and positional[at : at + 1] == [argument]
        arguments.append(value if in_order else f"{argument}={value}")
    lines = ["import torch", "from liger_multi import ops", ""]
    lines += [f"{tensor} = {_drawn(spec)}" for tensor, spec in sample.tensors.items()]
    return "\n".join([*lines, f"result = ops.{name}({', '.join(arguments)})"])


def _drawn(spec: samples.Tensor) -> str:
    """Code that draws a tensor of a sample."""
    shape = ", ".join(map(str, spec.shape))
    dtype = f", dtype={spec.dtype}" if spec.dtype is not None else ""
    if spec.classes:
        least = f"{spec.least}, " * bool(spec.least)
        return f"torch.randint({least}{spec.classes}, {spec.shape}{dtype})"
    if spec.positive:
        return f"torch.rand({shape}{dtype}) + 0.5"
    if spec.negative:
        return f"-torch.randn({shape}{dtype}).abs()"
    return f"torch.randn({shape}{dtype}{', requires_grad=True' * spec.grad})"


def promises(op: Any) -> list[str]:
    """A table of what an operator promises of bits, by direction and property."""
    since = {"": "always", "deterministic": "`deterministic=True`", "rows": '`"rows"`'}
    reasons: dict[str, str] = {}
    lines = []
    for direction in DIRECTIONS:
        promise = getattr(op.bitwise, direction)
        lines.append((direction, *(since.get(promise.since(n), "no") for n in PROPERTIES)))
        reasons |= {n: why for n, why in promise.because.items() if n not in promise.always}
    notes = [f"- `{name}`: {why}." for name, why in sorted(reasons.items())]
    return [*text_table(("", *PROPERTIES), lines), "", *notes]


def _tolerances() -> list[str]:
    lines = [
        (str(dtype).removeprefix("torch."), f"{t.relative:.2g}", f"{t.of_largest:.2g}", t.reason)
        for dtype, t in TOLERANCES.items()
    ]
    return text_table(("dtype", "of its own size", "of the largest", "reason"), lines)


def _compiled(op: Any) -> str:
    if op.compile == "trace":
        return (
            "`torch.compile` traces the reference and fuses it with its neighbors, unless a "
            "configuration pins a backend."
        )
    return "One opaque call in the graph of `torch.compile`. The backend is chosen when it runs."


def _sharded(op: Any) -> str:
    if not op.rowwise:
        return "DTensors are refused. Pass local or full tensors."
    rows = ", ".join(f"`{name}`" for name in op.fwd.params if name in op.bitwise.batched)
    full = ", ".join(f"`{name}`" for name in replicated(op))
    text = f"DTensors: {rows} may be sharded on any axis but the last."
    return f"{text} Every rank has all of {full}." if full else text


# --- the page of modules ---

MODULES_HEAD = """\
```python
import torch
from liger_multi import nn

norm = nn.RMSNorm(64, eps=1e-6)
y = norm(torch.randn(2, 64))
```

For a Hugging Face model, use [`liger_multi.patch`](patching.md) instead.
"""


def modules_page() -> str:
    """The page with every module."""
    modules = {name: getattr(nn, name) for name in nn.__all__}
    texts, lines = {name: sections(module) for name, module in modules.items()}, []
    for name, text in texts.items():
        like, op = " ".join(text["Like"].split()), text["Operator"]
        link = f"[`{op}`](ops/{op}.md)" if op in public_operators() else op
        lines.append([f"[`{name}`](#{name.lower()})", summary(text), like, link])
    out = [NOTE, "", "# Modules", "", inspect.getdoc(nn) or "", "", MODULES_HEAD]
    out += [*text_table(("Module", "What", "Like", "Operator"), lines), ""]
    for name, text in texts.items():
        make = signature(modules[name].__init__).removesuffix(" -> None")
        code = [make.replace("__init__", name, 1), signature(modules[name].forward)]
        code = [text.replace("(\n    self,\n", "(\n", 1) for text in code]
        out += [f"## {name}", "", "```python", *code, "```", "", listed(text["Args"]), ""]
    return "\n".join(out)
