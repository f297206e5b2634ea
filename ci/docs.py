"""Pages made of contracts, modules and results: ``python -m ci.docs [--check] [--site FOLDER]``.

Committed pages have tables between two markers (:func:`filled`), which ``make docs`` fills. One
page an operator, the modules, the site's first page and list of pages, and what
:mod:`ci.verification` says are written with the site, which mkdocs builds. What links to such a
page from a committed page names what it is made of (a contract, a result, a script), which is there
on any host of the repository; :data:`MADE_OF` turns such a link into one to the page.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import difflib
import importlib
import inspect
import itertools
import posixpath
import re
import shutil
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from benchmarks.tables import (
    OPERATOR_FAMILIES,
    bitwise,
    float8,
    measured,
    performance,
    table,
    traces,
)
from ci import verification
from ci.npu import levels
from liger_multi import losses, nn, ops
from liger_multi.dispatch import registry
from liger_multi.dispatch.bitwise import PROPERTIES
from liger_multi.dispatch.op import OPS, replicated
from liger_multi.testing import samples
from liger_multi.testing.tolerance import TOLERANCES
from tests.sweep import page as coverage
from tests.trainers import runs

# --- pages ---

ROOT = Path(__file__).parent.parent
NOTE = "<!-- generated; edit the operators' docstrings instead -->"
DIRECTIONS = ("forward", "backward")
HEADING = re.compile(r"^([A-Z][A-Za-z ]*):$")


def public_operators() -> dict[str, Callable[..., Any]]:
    """The public function of every operator, by name."""
    functions = {n: f for n in ops.__all__ if inspect.isfunction(f := getattr(ops, n))}
    return {n: functions[n] for n in sorted(functions) if functions[n].__module__.endswith(f".{n}")}


def forms(name: str) -> list[Callable[..., Any]]:
    """The public function of an operator, and those of its contract that return more."""
    first = public_operators()[name]
    functions = [getattr(ops, n) for n in ops.__all__ if inspect.isfunction(getattr(ops, n))]
    return [first, *(f for f in functions if f.__module__ == first.__module__ and f is not first)]


def backend_folders() -> dict[str, Path]:
    """The folder of every backend in this repository, the reference and the shared layers first."""
    folders = {p.parent.name: p.parent for p in sorted((ROOT / "backends").glob("*/__init__.py"))}
    shared = [name for name in folders if not _record(name).device_type]
    order = ["reference", *shared, *[name for name in folders if name not in shared]]
    return {name: folders.get(name, ROOT / "reference") for name in order}


def _record(backend: str) -> Any:
    return importlib.import_module(f"liger_multi.backends.{backend}").BACKEND


def directions(backend: str, op: str) -> tuple[str, ...]:
    """Which directions of an operator a backend implements by itself."""
    module = registry.module(backend, op)
    return tuple(name for name in DIRECTIONS if getattr(module, name, None) is not None)


def cell(backend: str, op: str, folders: dict[str, Path]) -> str:
    """What a backend has of an operator; of one that nobody ran, also the level that it reached."""
    text = directions_or_parent(backend, op, folders)
    return f"{text}, level {levels.level(op)}" if backend == "npu" else text


def directions_or_parent(backend: str, op: str, folders: dict[str, Path]) -> str:
    """A backend's own directions, or the backend that serves them."""
    own = directions(backend, op)
    if own == DIRECTIONS:
        return "yes"
    if own:
        return f"{own[0]} only"
    if backend == "reference" or not _record(backend).device_type:
        return "no"
    lines = [parent for parent in _record(backend).parents if directions(parent, op)]
    return f"by {lines[0] if lines else 'reference'}"


def by_family(operators: Iterable[str]) -> dict[str, list[str]]:
    """Operators by the title of their family, in the order of the families."""
    families: dict[str, list[str]] = {title: [] for title in OPERATOR_FAMILIES.values()}
    for name in operators:
        families[OPERATOR_FAMILIES[OPS[name].family]].append(name)
    return families


SHARED_ROWS = {
    "LM head and cross entropy": ("divergences",),
    "rotary embeddings": ("embedding",),
    "mixtures of experts": ("residual streams",),
    "LoRA": ("FP8", "weights in 4 bits"),
}
"""Families that stand in the row of another one in the first page's table."""


def operator_table() -> list[str]:
    """The operator table of the first page, in Markdown: a row per family, or a few of them."""
    kernels = {"triton": "Triton: NVIDIA, AMD", "npu": "Ascend"}
    lines, families = [], by_family(public_operators())
    for first, others in SHARED_ROWS.items():
        families[first] += [name for title in others for name in families.pop(title)]
    for first, names in families.items():
        title = ", ".join((first, *SHARED_ROWS.get(first, ())))
        cells = []
        for backend in kernels:
            own = [name for name in names if directions(backend, name)]
            cells.append("all" if own == names else f"{len(own)} of {len(names)}" if own else "")
        listed = ", ".join(f"[`{name}`]({contract(name)})" for name in names)
        lines.append([title, listed, *cells])
    return text_table(("Operators", "", *kernels.values()), lines)


def family_tables() -> str:
    """A table of operators for every family, with every backend and the dtypes."""
    folders, text = backend_folders(), ""
    for family, title in OPERATOR_FAMILIES.items():
        lines = [
            _operator_row(name, sections(function), folders)
            for name, function in public_operators().items()
            if OPS[name].family == family
        ]
        rows = text_table(("Operator", "What", *folders, "Input dtypes"), lines)
        text += "\n".join([f"## {title[0].upper()}{title[1:]}", "", *rows, "", ""])
    return text


def _operator_row(name: str, text: dict[str, str], folders: dict[str, Path]) -> list[str]:
    dtypes = re.search(r"(?:In: )?(.*?)\.(\s|$)", " ".join(text.get("Dtypes", "").split()))
    cells = [cell(backend, name, folders) for backend in folders]
    return [f"[`{name}`]({name}.md)", summary(text), *cells, dtypes[1] if dtypes else ""]


def text_table(heads: Sequence[str], lines: Iterable[Sequence[str]]) -> list[str]:
    """A table in Markdown whose cells are text of docstrings."""
    return table(heads, [[markdown(c).replace("|", "\\|") for c in line] for line in lines])


def sections(function: Callable[..., Any]) -> dict[str, str]:
    """A docstring's sections by heading; the summary stands under the empty name."""
    lines = (inspect.getdoc(function) or "").splitlines()
    sections: dict[str, list[str]] = {"": []}
    current = ""
    for line in lines:
        heading = HEADING.match(line)
        if heading:
            current = heading[1]
            sections[current] = []
        else:
            sections[current].append(line)
    return {k: textwrap.dedent("\n".join(v)).strip() for k, v in sections.items()}


def summary(text: dict[str, str]) -> str:
    """The first paragraph of a docstring's sections in one line, as a cell of a table wants it."""
    return " ".join(text[""].partition("\n\n")[0].split())


def signature(function: Callable[..., Any]) -> str:
    """The call as the source writes it, one argument a line."""
    node = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    assert isinstance(node, ast.FunctionDef)
    arguments = re.sub(r", (?=\w+: |\*)", ",\n    ", ast.unparse(node.args))
    arguments = re.sub(r"(: [^=\n]+)=", r"\1 = ", arguments)
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"{node.name}(\n    {arguments},\n){returns}"


def markdown(text: str) -> str:
    """Docstring text as Markdown: code marks, and references by their last name."""
    text = re.sub(r":\w+:`~?([^`]*)`", lambda match: f"`{match[1].rpartition('.')[2]}`", text)
    return text.replace("``", "`")


def operator_page(name: str) -> str:
    """The page of one operator."""
    op, folders = OPS[name], backend_folders()
    text = sections(public_operators()[name])
    out = [NOTE, "", f"# {name}", "", markdown(text.pop("")), ""]
    out += ["```python", snippet(name), "```", "", "## Signature", ""]
    out += ["```python", *map(signature, forms(name)), "```", ""]
    for heading, body in text.items():
        if heading in ("Raises", "Args"):
            body = re.sub(r"^(\w+): ", r"- \1: ", body, flags=re.MULTILINE)
        out += [f"## {heading}", "", markdown(body), ""]
    out += ["## Equal bits", "", *promises(op), "", f"See {BITS}.", ""]
    out += ["## Backends", ""]
    out += [f"- {backend}: {cell(backend, name, folders)}" for backend in folders]
    out += ["", "[Verification](../verification.md) has the devices of each backend.", ""]
    out += ["## Tolerance", "", TOLERANCE, "", *_tolerances(), ""]
    out += ["## torch.compile and DTensor", "", _compiled(op), "", _sharded(op), ""]
    return "\n".join([*out, "## Schema", "", "```", *_schemas(op), "```", ""])


def snippet(name: str) -> str:
    """A call of an operator that runs as it stands: the first sample of its contract."""
    sample = next(s for s in samples.of(name) if s.size == "small" and s.elements)
    parameters = inspect.signature(public_operators()[name]).parameters
    free = [p.name for p in parameters.values() if p.kind is not p.KEYWORD_ONLY]
    free = ["" if n in sample.options else n for n in free]  # options are named in any case
    values = {tensor: tensor for tensor in sample.tensors}
    values |= {option: repr(value) for option, value in sample.options.items()}
    values = {n: written(v) for n, v in samples.with_tuples(samples.adapted(name), values).items()}
    ordered = sum(
        1 for _ in itertools.takewhile(lambda pair: len(set(pair)) == 1, zip(values, free))
    )
    lines = ["import torch", "from liger_multi import ops", ""]
    lines += [f"{tensor} = {drawn(spec)}" for tensor, spec in sample.tensors.items()]
    arguments = [v if at < ordered else f"{n}={v}" for at, (n, v) in enumerate(values.items())]
    return "\n".join([*lines, f"result = ops.{name}({', '.join(arguments)})"])


def written(value: Any) -> str:
    """Code of an argument, which is code itself, or that of an adapter's parts."""
    return f"ops.LoRA({', '.join(map(str, value))})" if isinstance(value, tuple) else value


def drawn(spec: Any) -> str:
    """Code that draws a tensor of a sample."""
    shape = ", ".join(map(str, spec.shape))
    dtype = f", dtype={spec.dtype}" if spec.dtype is not None else ""
    if spec.classes:
        least = f"{spec.least}, " * bool(spec.least)
        return (
            f"torch.randint({least}{spec.classes}, ({shape}{',' * (len(spec.shape) == 1)}){dtype})"
        )
    if spec.positive:
        return f"torch.rand({shape}{dtype}) + 0.5"
    if spec.negative:
        return f"-torch.randn({shape}{dtype}).abs()"
    return f"torch.randn({shape}{dtype}{', requires_grad=True' * spec.grad})"


BITS = "[equal bits](../bitwise.md); a backend may promise less"
TOLERANCE = """\
The suite compares results and gradients of every backend with fp64 on the same rounded inputs. An
element may differ by its own size times the first number, plus the largest element times the
second."""


def _tolerances() -> list[str]:
    lines = [
        (str(dtype).removeprefix("torch."), f"{t.relative:.2g}", f"{t.of_largest:.2g}", t.reason)
        for dtype, t in TOLERANCES.items()
    ]
    return text_table(("dtype", "of its own size", "of the largest", "reason"), lines)


def promises(op: Any) -> list[str]:
    """A table of what an operator promises of bits, by direction and property."""
    since = {"": "always", "deterministic": "`deterministic=True`", "rows": '`"rows"`'}
    reasons: dict[str, str] = {}
    lines = []
    for direction in DIRECTIONS:
        promise = getattr(op.bitwise, direction)
        cells = [since.get(promise.since(name), "no") for name in PROPERTIES]
        lines.append((direction, *cells))
        reasons |= {n: why for n, why in promise.because.items() if n not in promise.always}
    listed = [f"- `{name}`: {why}." for name, why in sorted(reasons.items())]
    return [*text_table(("", *PROPERTIES), lines), "", *listed]


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
    whole = ", ".join(f"`{name}`" for name in replicated(op))
    said = f"DTensors: {rows} may be sharded on any axis but the last."
    return f"{said} Every rank has all of {whole}." if whole else said


OPERATORS_HEAD = """\
Every operator is a function of `liger_multi.ops` with a gradient:

```python
import torch
from liger_multi import ops

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
    out = [NOTE, "", "# Operators", "", OPERATORS_HEAD, family_tables()]
    others = sorted(set(OPS) - set(public_operators()))
    if others:
        out += ["## Operators behind options", "", OPTIONS_HEAD, "```"]
        out += [line for name in others for line in _schemas(OPS[name])] + ["```", ""]
    return "\n".join(out)


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
    texts = {name: sections(module) for name, module in modules.items()}
    lines = []
    for name, text in texts.items():
        like, op = " ".join(text["Like"].split()), text["Operator"]
        link = f"[`{op}`](ops/{op}.md)" if op in public_operators() else op
        lines.append([f"[`{name}`](#{name.lower()})", summary(text), like, link])
    out = [NOTE, "", "# Modules", "", inspect.getdoc(nn) or "", "", MODULES_HEAD]
    out += [*text_table(("Module", "What", "Like", "Operator"), lines), ""]
    for name, text in texts.items():
        arguments = re.sub(r"^(\w+): ", r"- \1: ", text["Args"], flags=re.MULTILINE)
        make, call = signature(modules[name].__init__), signature(modules[name].forward)
        code = [
            text.replace(f"{title}(\n    self,\n", f"{shown}(\n", 1)
            for title, shown, text in (
                ("__init__", name, make.removesuffix(" -> None")),
                ("forward", "forward", call),
            )
        ]
        out += [f"## {name}", "", "```python", *code, "```", "", markdown(arguments), ""]
    return "\n".join(out)


def _schemas(op: Any) -> list[str]:
    return [f"liger_multi::{op.name}_{p.direction}{p.schema}" for p in op.primitives]


TASKS = (
    ("Fine-tune a model", "`liger_multi.patch(model)`", "docs/patching.md"),
    ("Use the Trainer, TRL, Lightning or accelerate", "`TrainerCallback()`", "docs/trainers.md"),
    ("Use axolotl, LLaMA-Factory, ms-swift, verl", "a plugin", "docs/trainers.md#plugins"),
    ("Use LoRA or QLoRA", "patch the model of PEFT", "docs/peft.md"),
    ("Multiply in FP8, or keep a frozen base in it", "`linear_float8`", "docs/fp8.md"),
    ("Train on a frozen base in 4 bits", "`load_mxfp4`, bitsandbytes", "docs/four-bits.md"),
    ("Read logits of a patched model", "`outputs.logits`", "docs/logits.md"),
    ("Use our attention", '`attn_implementation="liger_multi"`', "docs/attention.md"),
    ("Find out why a module was skipped", "`print(report)`", "docs/recognition.md"),
    ("Use FSDP2, DeepSpeed or tensor parallelism", "patch, then shard", "docs/distributed.md"),
    ("Train with DPO, KTO, GRPO or distillation", "`liger_multi.losses`", "docs/losses.md"),
    ("Plan what fits", "`liger-multi plan config.json --gpu 24GiB`", "docs/planning.md"),
    ("Estimate and measure memory", "`liger-multi estimate config.json`", "docs/memory.md"),
    ("Recompute or offload activations", "`liger_multi.memory`", "docs/recompute.md"),
    ("Start from a script", "`python examples/finetune.py --tiny`", "examples/README.md"),
    ("Run on AMD", "PyTorch for ROCm first", "docs/rocm.md"),
    ("Run on Ascend", "CANN and torch_npu first", "docs/ascend.md"),
    ("Override a backend in YAML", "`LIGER_MULTI_CONFIG=file.yaml`", "docs/configuration.md"),
    ("Find out why a backend was chosen", "`liger-multi explain rms_norm`", "docs/dispatch.md"),
    ("Get the same bits in every run or batch", "`deterministic`", "docs/bitwise.md"),
    ("Find the first operator that differs", "`liger-multi bisect FILE.py`", "docs/bisect.md"),
    ("Write a model with modules", "`liger_multi.nn`", "liger_multi/nn"),
    ("Call operators", "`liger_multi.ops`", "liger_multi/ops"),
    ("Check whether a model is supported", "list of models", "tests/sweep/results.json"),
    ("See speed and memory", "tables with peers", "docs/performance.md"),
    ("See what ran on which device", "results", "benchmarks/README.md#results-of-the-suite"),
    ("Add an operator", "three files", "docs/extending.md"),
    ("Add or test a backend", "`python -m liger_multi.testing`", "docs/backends.md"),
    ("Learn the terms", "operator, backend, reference", "docs/concepts.md"),
)
"""What people come for, how it begins, and what the page is made of that says more."""
FIRST = re.compile(r"^(?=!\[|## )", re.MULTILINE)  # the first picture or heading of README


def tasks() -> str:
    """The table of tasks, with links as they are from the root of the repository."""
    lines = [(f"[{task}]({page})", start) for task, start, page in TASKS]
    rows = text_table(("I want to", "Start with"), lines)
    return "\n".join(["## Find your task", "", *rows, "", ""])


def front() -> str:
    """The site's first page: README with the tasks before its first picture or section."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    text = FIRST.sub(lambda _: tasks(), text, count=1)
    return NOTE + "\n\n" + linked(text, "", sources(public_operators()))


def committed(path: str) -> str:
    """A committed page outside of ``docs`` as a page of the site."""
    text = (ROOT / path).read_text(encoding="utf-8")
    return linked(text, str(PurePosixPath(path).parent), sources(public_operators()))


def tables() -> dict[str, Callable[[], str]]:
    """Every table of a committed page, by the name of its markers."""
    lines: dict[str, Callable[[], list[str]]] = {
        **measured.TABLES,
        "bitwise-costs": bitwise.costs,
        "op-table": operator_table,
        "loss-head": head,
        "loss-families": families,
        "trees-types": coverage.shared_prefixes,
        "shards-types": coverage.sharded_rows,
        "support": verification.support,
        "verified": verification.rows,
    }
    builders: dict[str, Callable[[], str]] = {
        **float8.BLOCKS,
        **performance.BLOCKS,
        **traces.BLOCKS,
        "headline": performance.headline,
        "trainers": runs.table,
    }
    return builders | {name: partial(_joined, make) for name, make in lines.items()}


def _joined(make: Callable[[], list[str]]) -> str:
    return "\n".join(make())


def pages() -> list[Path]:
    """Every committed page that may have tables."""
    return [ROOT / "README.md", ROOT / "examples" / "README.md", *sorted(DOCS.glob("*.md"))]


def whole_pages() -> dict[str, Callable[[], str]]:
    """Every page that is made whole for the site, by its path there."""
    builders: dict[str, Callable[[], str]] = {
        "index.md": front,
        "ops/index.md": operators_page,
        "convergence.md": measured.curves_page,
        "coverage.md": coverage.page,
        "examples.md": partial(committed, "examples/README.md"),
        "loss-options.md": losses_whole,
        "nn.md": modules_page,
        "verification.md": verification.page,
        "benchmarks.md": partial(committed, "benchmarks/README.md"),
    }
    return builders | {
        f"ops/{name}.md": partial(operator_page, name) for name in public_operators()
    }


def build(folder: Path) -> None:
    """Write the sources of the site below a folder."""
    write_site(folder, public_operators(), whole_pages())


def stale() -> Mapping[Path, tuple[str, str]]:
    """The pages whose text differs from what they are made of: old and new text by path."""
    outdated, builders = {}, tables()
    for path in pages():
        old = path.read_text(encoding="utf-8")
        new = filled(old, builders)
        if new != old:
            outdated[path] = (old, new)
    return outdated


# --- tables between two markers ---

MARKER = re.compile(r"<!-- ([\w-]+):start -->\n.*?<!-- \1:end -->", re.DOTALL)
WIDTH = 120
MARKER_NOTE = "<!-- generated by `make docs` from contracts and `benchmarks/results` -->"


def filled(page: str, tables: Mapping[str, Callable[[], str]]) -> str:
    """A page with every table made again; markers of other names stay as they are."""

    def replacement(match: re.Match[str]) -> str:
        name = match[1]
        if name not in tables:
            return match[0]
        lines = (tables[name]().strip() or "Not measured yet.").splitlines()
        text = "\n".join(line for long in lines for line in _wrapped(long))
        return f"<!-- {name}:start -->\n{MARKER_NOTE}\n\n{text}\n\n<!-- {name}:end -->"

    return MARKER.sub(replacement, page)


def _wrapped(line: str) -> list[str]:
    """A sentence in lines of a page's width; rows of tables, pictures and commands stay whole."""
    if line.startswith(("|", "!", "    ")):
        return [line]
    return textwrap.wrap(line, WIDTH, break_long_words=False, break_on_hyphens=False) or [""]


# --- the site ---

DOCS = ROOT / "docs"
THEME = ROOT / "ci" / "site"  # the configuration of mkdocs, and the stylesheet
NAV = "# operators"  # the line of the configuration that the operators' entries replace
# code, which has no links, or a link to a file
CODE_OR_LINK = re.compile(
    r"^```.*?^```|(!?)\[([^\]]*)\]\((?![a-z]+:|#)([^)\s]+)\)|`[^`\n]*`", re.DOTALL | re.MULTILINE
)
MADE_OF = {
    "README.md": "index.md",
    "liger_multi/ops": "ops/index.md",
    "ci/npu/levels.py": "ops/index.md",
    "liger_multi/losses": "loss-options.md",
    "liger_multi/losses/distillation.py": "loss-options.md",
    "liger_multi/losses/policy.py": "loss-options.md",
    "liger_multi/losses/preference.py": "loss-options.md",
    "liger_multi/losses/sequence.py": "loss-options.md",
    "liger_multi/nn": "nn.md",
    "benchmarks/README.md": "benchmarks.md",
    "benchmarks/README.md#results-of-the-suite": "verification.md",
    "benchmarks/README.md#training-curves": "convergence.md",
    "tests/sweep/results.json": "coverage.md",
    "examples/README.md": "examples.md",
}


def contract(name: str) -> str:
    """The file of an operator's contract."""
    return f"liger_multi/ops/{name}.py"


def sources(operators: Iterable[str]) -> dict[str, str]:
    """The page of the site that is made of a file, by the file's path in the repository."""
    return MADE_OF | {contract(name): f"ops/{name}.md" for name in operators}


def linked(text: str, folder: str, known: Mapping[str, str]) -> str:
    """A committed page as a page of the site.

    Args:
        text: The page.
        folder: Its folder in the repository, from which its links lead.
        known: From :func:`sources`.
    """

    def changed(match: re.Match[str]) -> str:
        picture, shown, link = match.groups()
        if link is None:
            return match[0]
        file, _, anchor = link.partition("#")
        path = posixpath.normpath(posixpath.join(folder, file))
        page = known.get(f"{path}#{anchor}") or known.get(path)
        if page is not None:
            return f"[{shown}]({page})"
        if path.startswith("docs/"):
            inside = path.removeprefix("docs/") + (f"#{anchor}" if anchor else "")
            return f"{picture}[{shown}]({inside})"
        return f"{shown} (`{path}`)"  # no page of the site

    return CODE_OR_LINK.sub(changed, text)


def configuration(operators: Iterable[str]) -> str:
    """The configuration of the site, with one entry an operator; it stands beside ``docs``."""
    text = (THEME / "mkdocs.yml").read_text(encoding="utf-8")
    matches = re.findall(rf"^( *){NAV}$", text, re.MULTILINE)
    if len(matches) != 1:
        raise SystemExit(f"ci/site/mkdocs.yml needs the line {NAV!r} once, where the operators go")
    lines = []
    for title, names in by_family(operators).items():
        lines += [f"- {title[0].upper()}{title[1:]}:"]
        lines += [f"    - {name}: ops/{name}.md" for name in names]
    indented = "\n".join(matches[0] + line for line in lines)
    return re.sub(rf"^ *{NAV}$", indented, text, flags=re.MULTILINE)


def write_site(
    folder: Path, operators: Iterable[str], whole: Mapping[str, Callable[[], str]]
) -> None:
    """Write ``mkdocs.yml`` and ``docs`` below a folder, in place of what is there.

    Args:
        folder: Where.
        operators: The public operators.
        whole: The pages that are made whole, by their path in the site.
    """
    names = list(operators)
    pages = folder / "docs"
    shutil.rmtree(pages, ignore_errors=True)
    known = sources(names)
    for path in sorted(DOCS.rglob("*")):
        name = path.relative_to(DOCS)
        if not path.is_file() or name.as_posix() in whole:
            continue
        target = pages / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".md":
            text = path.read_text(encoding="utf-8")
            target.write_text(linked(text, "docs", known), encoding="utf-8")
        else:
            shutil.copyfile(path, target)
    for page, make in whole.items():
        target = pages / page
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(make(), encoding="utf-8")
    shutil.copyfile(THEME / "site.css", pages / "site.css")
    (folder / "mkdocs.yml").write_text(configuration(names), encoding="utf-8")


# --- the losses ---

FAMILIES = (
    ("Preference pairs with a reference", "dpo_loss", "DPOOptions", ("preference", "DPO")),
    ("Preference pairs without a reference", "cpo_loss", "CPOOptions", ("preference", "CPO")),
    ("Unpaired preferences", "kto_loss", "KTOOptions", ("preference", "KTO")),
    ("Policies", "policy_loss", "PolicyOptions", ("policy", "POLICY")),
    ("Sequences", "sequence_loss", "SequenceOptions", ("sequence", "SEQUENCE")),
    ("Multi-token prediction", "mtp_loss", "SequenceOptions", None),
    ("Distillation", "distillation_loss", "DistillationOptions", ("distillation", "DIVERGENCES")),
)


def arguments(documented: Any) -> dict[str, str]:
    """The arguments of a docstring in Google's style, by name."""
    text = inspect.getdoc(documented) or ""
    body = re.split(r"^Args:\n", text, maxsplit=1, flags=re.MULTILINE)[1]
    body = textwrap.dedent(re.split(r"^\w+:\n", body, maxsplit=1, flags=re.MULTILINE)[0])
    texts: dict[str, str] = {}
    for line in body.splitlines():
        match = re.match(r"(\w+): (.*)", line)
        if match:
            texts[match[1]] = match[2]
        elif line.strip():
            texts[list(texts)[-1]] += f" {line.strip()}"
    return texts


def options(options_class: type) -> list[str]:
    """The table of a dataclass of options."""
    defaults = {f.name: f.default for f in dataclasses.fields(options_class)}
    lines = [(f"`{n}`", f"`{defaults[n]!r}`", t) for n, t in arguments(options_class).items()]
    return text_table(("Option", "Default", "What"), lines)


def head() -> list[str]:
    """The table of what a head takes."""
    texts = arguments(losses.Head)
    return text_table(("Of a head", "What"), [(f"`{n}`", t) for n, t in texts.items()])


def loss_types(place: tuple[str, str]) -> Mapping[str, Any]:
    """The formulas of a family, by the name of the loss type."""
    literals: Mapping[str, Any] = getattr(
        importlib.import_module(f"liger_multi.losses.{place[0]}"), place[1]
    )
    return literals


def families() -> list[str]:
    """The table of all functions: what each is for, and its loss types."""
    lines = []
    for title, name, _, place in FAMILIES:
        file = getattr(losses, name).__module__.replace(".", "/")
        types = ", ".join(f"`{n}`" for n in loss_types(place)) if place else "as `sequence_loss`"
        lines.append((title, f"[`{name}`](../{file}.py)", types))
    return text_table(("Losses", "Function", "Loss types"), lines)


def losses_whole() -> str:
    """The page with a section for every function: its arguments, loss types and options."""
    out = [NOTE, "", "# Loss options", ""]
    out += ["How to use them: [losses](losses.md).", ""]
    for title, name, options_class, place in FAMILIES:
        function = getattr(losses, name)
        text = (inspect.getdoc(function) or "").split("Args:")[0].strip()
        out += [f"## {title}", "", f"`losses.{name}`: {markdown(text)}", ""]
        lines = [(f"`{n}`", t) for n, t in arguments(function).items() if n != "options"]
        out += [*text_table(("Argument", "What"), lines), ""]
        if place is None:
            out += ["Further options are those of `sequence_loss`.", ""]
            continue
        what = "Divergence" if place[1] == "DIVERGENCES" else "Loss type"
        lines = [(f"`{n}`", str(formula.source)) for n, formula in loss_types(place).items()]
        out += [
            *text_table((what, "Source"), lines),
            "",
            *options(getattr(losses, options_class)),
            "",
        ]
    return "\n".join(out)


# --- the command ---


def main() -> int:
    """Write the pages, or with ``--check`` say which are stale."""
    parser = argparse.ArgumentParser(prog="python -m ci.docs", description=main.__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if one is stale")
    parser.add_argument("--site", type=Path, metavar="FOLDER", help="where the site's pages go")
    options = parser.parse_args()
    pages = stale()
    for path, (old, new) in pages.items():
        if options.check:
            difference = difflib.unified_diff(
                old.splitlines(True), new.splitlines(True), path.name, "generated", n=0
            )
            print("".join(difference))
            print(f"{path.relative_to(ROOT)} is stale: run `make docs`")
        else:
            path.write_text(new, encoding="utf-8")
            print(f"wrote {path.relative_to(ROOT)}")
    if options.site:
        build(options.site)
    return int(options.check and bool(pages))


if __name__ == "__main__":
    raise SystemExit(main())
