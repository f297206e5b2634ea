"""Columns a step of every Ascend kernel, found with the vendor's compiler.

``python -m ci.npu.blocks`` searches and writes two things, of every kernel, chip and type of
elements: ``backends/npu/launch/<family>.yaml``, the largest block with which every form of the
kernel compiles within the unified buffer, double buffers included; and ``ci/npu/forms/<chip>.txt``,
what each of those forms takes there, and which one refuses the next larger block. ``--kernel``
searches for some kernels and leaves what stands of the others. A search is finished when both ends
are known, and an entry says so. tests/kernels/test_npu.py compares the second file with today's
sources, and compiles some of it again.

The calls are of real models' widths and reach every kernel in every form that it has. Sizes are
plain arguments of the kernels, so that few rows compile what many would.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.metadata
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import torch
import yaml

import liger_multi
from ci.npu import lowering
from ci.npu.lowering import CHIPS, Chip, Launch, caught
from ci.npu.simulate import Device
from liger_multi.backends.npu.common import launching as npu
from liger_multi.dispatch import launch as launching
from liger_multi.dispatch.backend import DeviceInfo
from liger_multi.dispatch.op import OPS
from liger_multi.grouping import grouped
from liger_multi.ops.cross_entropy import EVERYTHING
from liger_multi.testing import samples
from liger_multi.testing.samples import Sample, Tensor as T

# --- calls ---

ROWS = 4
WIDTHS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def _logits(cols: int, weighted: bool = False) -> dict[str, T]:
    tensors = {"logits": T((ROWS, cols)), "target": T((ROWS,), classes=cols)}
    extra = {"weight": T((cols,), positive=True, grad=False)}
    return {**tensors, **(extra if weighted else {})}


def _pair(cols: int) -> dict[str, T]:
    return {
        "student": T((ROWS, cols), positive=True),
        "teacher": T((ROWS, cols), positive=True, grad=False),
        "target": T((ROWS,), classes=9),
    }


def _norm(cols: int, **terms: T) -> dict[str, T]:
    return {"x": T((ROWS, cols)), **terms}


def _head(cols: int) -> dict[str, T]:
    return {"hidden": T((ROWS, 64)), "weight": T((cols, 64)), "target": T((ROWS,), classes=cols)}


FORMS = [
    {"form": student, "teacher_form": teacher}
    for student, teacher in (
        ("logits", "logits"),
        ("log_prob", "log_prob"),
        ("prob", "prob"),
        ("logits", "prob"),
    )
]
TERMS = (("x", None), ("residual", torch.float32))


def _rope(cols: int, angles: int, dtype: torch.dtype | None = None) -> dict[str, T]:
    tensors = {n: T((1, h, ROWS, cols), layout="swapped") for n, h in (("q", 32), ("k", 8))}
    return tensors | {n: T((1, ROWS, angles), dtype=dtype, grad=False) for n in ("cos", "sin")}


def _convolution(cols: int, width: int, more: str = "") -> dict[str, T]:
    tensors = {
        "x": T((1, 24, cols)),
        "weight": T((cols, width)),
        "bias": T((cols,)),
        "initial_state": T((1, width - 1, cols)),
        "seq_idx": T((1, 24), classes=2, grad=False),
    }
    return {n: t for n, t in tensors.items() if n in ("x", "weight", *more.split())}


def _scan(cols: int, size: int, more: str = "D delta_bias") -> dict[str, T]:
    tensors = {
        **{n: T((1, 17, cols)) for n in ("u", "delta", "z")},
        **{n: T((1, 17, size)) for n in "BC"},
        "A": T((cols, size), torch.float32, negative=True),
        "D": T((cols,)),
        "delta_bias": T((cols,)),
        "initial_state": T((1, cols, size)),
        "seq_idx": T((1, 17), classes=2, grad=False),
    }
    return {n: t for n, t in tensors.items() if n in ("u", "delta", *"ABC", *more.split())}


def _codes(group: int, scales: T, **more: T) -> dict[str, T]:
    """Rows of 4096 codes in blocks of ``group``."""
    blocks = (ROWS, 4096 // group)
    tensors = {"codes": T((ROWS, 2048), torch.uint8, classes=256), "scales": scales, **more}
    return {
        n: t if n in ("codes", "global_scale") else replace(t, shape=blocks)
        for n, t in tensors.items()
    }


MANY = 65536  # channels, with which every core has a block of the largest size
SOFT: dict[str, object] = {"delta_softplus": True}
FILTER = (("weight", (3,)), ("bias", ()))
SILU: dict[str, object] = {"activation": "silu"}
W32 = T((4096,), dtype=torch.float32)
FP32, BYTES = T((), torch.float32, grad=False), T((), torch.uint8, classes=16)
ONE = T((1,), torch.float32, positive=True, grad=False)
PLAIN = {"x": T((ROWS, 4096)), "residual": T((ROWS, 4096))}
CASES: dict[str, tuple[tuple[dict[str, T], dict[str, object]], ...]] = {
    "cross_entropy": (
        (_logits(32000), {}),
        (_logits(151936), {"label_smoothing": 0.1, "z_loss": 1e-4}),
        (_logits(262144), {"softcap": 30.0}),
        (_logits(128256, True), EVERYTHING),
    ),
    "fused_linear_log_prob": ((_head(32000), {"outputs": ("entropy",), "softcap": 30.0}),),
    "token_log_prob": ((_logits(32000), {"outputs": ("entropy",), "softcap": 30.0}),),
    **{
        name: tuple((_pair(128256), {**form, **own}) for own in options for form in FORMS)
        for name, options in (
            ("kl_div", ({},)),
            ("tvd", ({},)),
            ("jsd", ({"beta": 0.5}, {"beta": 1.0})),
        )
    },
    "rms_norm": (
        (_norm(4096, weight=W32), {}),
        (_norm(16384), {}),
        ({"x": T((ROWS, 16384), grad=False), "weight": T((16384,))}, {}),
        (_norm(3072, weight=T((3072,))), {"offset": 1.0, "casting": "gemma"}),
        (_norm(5120, weight=T((5120,), dtype=torch.float32)), {"offset": 1.0}),
    ),
    "fused_add_rms_norm": (
        ({n: T((ROWS, 16384), dtype=d) for n, d in TERMS} | {"weight": T((16384,))}, {}),
        (PLAIN | {"weight": T((4096,))}, {}),
        (PLAIN | {"weight": W32}, {}),
        (PLAIN | {"weight": T((4096,))}, {"offset": 1.0, "casting": "gemma"}),
    ),
    "swiglu": (({"gate": T((ROWS, 14336)), "up": T((ROWS, 14336))}, {}),),
    "swiglu_packed": (({"gate_up": T((ROWS, 22016))}, {"gate_multiplier": 0.5}),),
    "geglu": (
        ({"gate": T((ROWS, 14336)), "up": T((ROWS, 14336))}, {}),
        ({"gate": T((ROWS, 14336)), "up": T((ROWS, 14336))}, {"approximate": "none"}),
    ),
    "geglu_packed": (({"gate_up": T((ROWS, 22016))}, {}),),
    "rope": tuple(
        (tensors, {"style": style, **own})
        for style in ("half", "interleaved")
        for tensors, own in (
            (_rope(512, 512, torch.float32), {}),  # what npu_rotary_mul refuses: types that differ,
            (_rope(128, 128, torch.float32), {}),
            (_rope(80, 32), {"rotary_dim": 32}),
            (_rope(128, 64), {"rotary_dim": 64}),  # channels that pass,
            (_rope(64, 32), {"rotary_dim": 64}),  # and one value a pair
        )
    ),
    "dequantize": tuple(
        (tensors, {**options, "dtype": dtype})
        for dtype in (torch.bfloat16, torch.float32)
        for tensors, options in (
            (_codes(64, FP32), {"format": "nf4"}),
            (_codes(32, BYTES), {"format": "mxfp4"}),
            (_codes(16, BYTES), {"format": "nvfp4"}),
            (_codes(16, BYTES, global_scale=ONE), {"format": "nvfp4"}),
            (_codes(16, BYTES, global_scale=ONE), {"format": "nvfp4", "divides": True}),
            (_codes(128, FP32), {"format": "int4"}),
            (_codes(128, T((), grad=False), zeros=BYTES), {"format": "int4"}),
        )
    ),
    "dyt": (
        (_norm(4096, alpha=T((1,)), weight=T((4096,)), bias=T((4096,))), {}),
        (_norm(16384, alpha=T((1,)), weight=T((16384,))), {}),
    ),
    "causal_conv1d": (
        (_convolution(8192, 4), SILU),
        (_convolution(8192, 4, "seq_idx"), SILU),
        (_convolution(4352, 4, "bias seq_idx"), SILU),
        (_convolution(8192, 4, "bias initial_state seq_idx"), SILU),
        (_convolution(8192, 3), {}),
    ),
    "gated_short_conv": (
        (_convolution(6144, 3) | {"weight": T((2048, 3))}, {}),
        (_convolution(6144, 3, "seq_idx") | {"weight": T((2048, 3))}, {}),
        (_convolution(6144, 3, "bias seq_idx") | {n: T((2048, *s)) for n, s in FILTER}, {}),
    ),
    "selective_scan": (
        (_scan(8192, 16), SOFT),
        (_scan(MANY, 16), SOFT),
        (_scan(MANY, 16, "D z delta_bias"), SOFT),
        (_scan(MANY, 16, "D z delta_bias seq_idx"), SOFT),
        (_scan(MANY, 16, "initial_state"), {"output_final_state": True}),
        (_scan(MANY // 4, 128), SOFT),
    ),
}


def info(chip: Chip) -> DeviceInfo:
    """What the backend would say of a chip."""
    return DeviceInfo("npu", chip.name, 1, 1, chip.buffer, chip.cores, "a5" if chip.a5 else "a2")


def _call(op: str, tensors: dict[str, T], options: dict[str, object], dtype: torch.dtype) -> None:
    arguments = Sample("case", tensors, options).make("npu", dtype)
    result = samples.call(op, **arguments, **options)
    parts = [result] if isinstance(result, torch.Tensor) else list(result)
    outs = [p for p in parts if p is not None and p.requires_grad]
    if outs:
        torch.autograd.backward(outs, [torch.ones_like(p) for p in outs])


@contextlib.contextmanager
def blocks(of: dict[str, int] | None) -> Iterator[None]:
    """Use these blocks, by kernel, in place of the table's, however narrow the rows."""
    if of is None:
        yield
        return
    entries = {name: ({"when": {}, "config": {"block": block}},) for name, block in of.items()}
    with (
        mock.patch.object(launching, "table", return_value=entries),
        mock.patch.object(npu, "power_of_2", return_value=2**30),
    ):
        yield


def launches_of(
    chip: Chip, dtype: torch.dtype, of: dict[str, int] | None = None
) -> dict[str, Launch]:
    """What the cases launch on a chip, by what is compiled."""
    launches: dict[str, Launch] = {}
    with (
        Device(),
        launching.simulate(info(chip)),
        blocks(of),
        caught(lambda launch: launches.update({launch.key: replace(launch, arguments={})}), chip),
    ):
        for op, calls in CASES.items():
            assert op in OPS, op
            for tensors, options in calls:
                with liger_multi.use(**{op: "npu"}):
                    _call(op, tensors, options, dtype)
    return launches


# By what was seen of the compiler: the mixture of two distributions takes the most, and tanh, and
# levels that are selected.
ROOM = {
    "FORMULA": (1, 2, 3, 0),
    "ACTIVATION": (0, 2, 1),
    "CAPPED": (0, 1),
    "HALF": (1, 0),
    "HIGH_FIRST": (0, 1),
}


def appetite(launch: Launch) -> tuple[int, int]:
    """How a kernel's forms rank by the room that they want: that with fewer parts left out."""
    constants = launch.constants
    features = sum(ROOM[n][int(v)] for n, v in constants.items() if n in ROOM)
    return features, -sum(v is None for v in constants.values())


# --- the search, and what it writes ---

HERE = Path(__file__).parent
FOLDER = HERE.parent.parent / "backends" / "npu" / "launch"
SIZES = (512, 1024, 2048, 4096, 8192, 16384)
TYPES = {2: torch.bfloat16, 4: torch.float32}
NAMES = (
    "row_statistics",
    "row_gradient",
    "pair_sums",
    "pair_gradient",
    "norm_forward",
    "norm_backward",
    "norm_weight",
    "gated_forward",
    "gated_backward",
    "dyt_forward",
    "dyt_backward",
    "rope",
    "dequantize",
    "conv_forward",
    "conv_backward",
    "scan_forward",
    "scan_reverse",
)
# by whose elements a kernel's block is chosen
ASKED = {
    "row": "raw",
    "pair": "student",
    "norm_forward": "y",
    "norm_backward": "dx",
    "norm_weight": "x",
    "gated_forward": "y",
    "gated_backward": "dy",
    "dyt": "x",
    "rope": "x",
    "dequantize": "y",
    "conv": "x",
    "scan": "u",
}
SIZE = {"*bf16": 2, "*fp16": 2, "*fp32": 4}
HEAD = """# Columns a step, written by `python -m ci.npu.blocks` with bishengir-compile {version} for {chip}:
# the largest with which every form of a kernel leaves room for double buffers in the {buffer}
# bytes of its unified buffer; ci/npu/forms/{chip}.txt has what each takes. Never run on a chip.
entries:
"""  # noqa: E501


@dataclass(frozen=True)
class Search:
    """What a search says of a kernel and a type of elements.

    Attributes:
        block: The largest that every form compiles with.
        forms: The forms with it, and the compiler's verdicts.
        refused: The form that does not compile with the next larger one, and why; None where the
            largest block of the search fits.
    """

    block: int
    forms: tuple[tuple[Launch, lowering.Verdict], ...]
    refused: tuple[Launch, lowering.Verdict] | None


def key(launch: Launch) -> str:
    """The name by which the table speaks of a kernel."""
    return launch.name.removeprefix("_").removesuffix("_kernel")


def by_kernel(launches: Iterable[Launch]) -> dict[str, list[Launch]]:
    """Forms of each kernel, the ones that want the most room first."""
    ordered = sorted(launches, key=appetite, reverse=True)
    return grouped((key(launch), launch) for launch in ordered)


def fits(verdict: lowering.Verdict) -> bool:
    """Whether a form compiled within the buffer, with double buffers and no scalar loops."""
    clean = not (verdict.scalar_loops or verdict.unstructured)
    return not verdict.error and verdict.multibuffer and clean


def why(verdict: lowering.Verdict) -> str:
    """What the compiler made of a form, in a few words."""
    if verdict.error:
        return verdict.error
    loops = verdict.scalar_loops + verdict.unstructured
    said = f"{verdict.buffer} of {verdict.room} bytes"
    said += "" if verdict.multibuffer else ", without double buffers"
    return said + (f", {loops} scalar loops" if loops else "")


def size_of(launch: Launch) -> int:
    """Bytes of an element of the tensor whose block was asked for."""
    name = key(launch)
    asked = next(tensor for start, tensor in ASKED.items() if name.startswith(start))
    return SIZE[launch.signature[f"{asked}_ptr"]]


@functools.cache
def _launched(chip: Chip, block: int) -> list[Launch]:
    launches: dict[str, Launch] = {}
    for dtype in TYPES.values():  # some tensors of a call may be wider than others
        launches |= launches_of(chip, dtype, dict.fromkeys(NAMES, block))
    return list(launches.values())


def forms(chip: Chip, size: int, block: int) -> dict[str, list[Launch]]:
    """Forms of every kernel at a block, the hungriest first."""
    return by_kernel(launch for launch in _launched(chip, block) if size_of(launch) == size)


def compiled(
    launches: list[Launch], chip: Chip
) -> tuple[list[tuple[Launch, lowering.Verdict]], tuple[Launch, lowering.Verdict] | None]:
    """Verdicts of forms up to the first that does not fit, and that one."""
    verdicts: list[tuple[Launch, lowering.Verdict]] = []
    for launch in launches:
        verdict = lowering.compile_by_vendor(launch, chip)
        if not fits(verdict):
            return verdicts, (launch, verdict)
        verdicts.append((launch, verdict))
    return verdicts, None


def search(name: str, chip: Chip, size: int) -> Search:
    """The largest block of a kernel: down from where its hungriest form still compiles."""
    refused = None
    for block in reversed(SIZES):
        verdicts, refusal = compiled(forms(chip, size, block)[name], chip)
        if refusal is None:
            return Search(block, tuple(verdicts), refused)
        refused = refusal
    raise RuntimeError(f"{name}: no block of {SIZES} fits {chip.name}: {refused}")


def constants(launch: Launch) -> str:
    """How a form differs from others."""
    items = launch.constants.items()
    parts = [f"{n}={v}" for n, v in items if v is not None and n != "BLOCK"]
    absent = [n.removesuffix("_ptr") for n, v in items if v is None]
    types = sorted({v for v in launch.signature.values() if v[0] == "*"} - {"*i8", "*i64"})
    return " ".join([*parts, *types, *(["without " + ",".join(absent)] if absent else [])])


def row(size: int, launch: Launch, verdict: lowering.Verdict) -> str:
    """One line of a chip's file."""
    type_name, block = lowering.KINDS[TYPES[size]], launch.constants["BLOCK"]
    said = f"{key(launch):<16}{type_name:<6}{block:>6}  {launch.key[:16]}  "
    return f"{said}{why(verdict):<32}  {constants(launch)}"


def entry(size: int, result: Search, chip: Chip) -> str:
    """One entry of a launch table."""
    version = importlib.metadata.version("ascendnpu-ir")
    most = max(verdict.buffer for _, verdict in result.forms)
    said = f"finished search, bishengir-compile {version}, {chip.name}: {len(result.forms)} forms, "
    said += f"at most {most} of {chip.buffer} bytes"
    if result.refused is not None:
        said += f"; {2 * result.block}: {why(result.refused[1])}"
    text = yaml.safe_dump(said, width=10**6).splitlines()[0]
    return (
        f"  - when: {{bytes: [{size}, {size}]}}\n    config: {{block: {result.block}}}\n"
        f"    source: {text}\n"
    )


def _standing(chip: Chip, names: Iterable[str]) -> tuple[dict[str, str], list[str]]:
    """Entries of the launch table by kernel, and lines of forms, of kernels that are not named."""
    table, listed = files(chip)
    if set(names) == set(NAMES):
        return {}, []
    parts = re.split(r"^  (\w+):\n", table.read_text(encoding="utf-8"), flags=re.M)[1:]
    entries = {n: t for n, t in zip(parts[::2], parts[1::2], strict=True) if n not in names}
    lines = listed.read_text(encoding="utf-8").splitlines()
    return entries, [n for n in lines if n[0] != "#" and n.split()[0] not in names]


def files(chip: Chip) -> tuple[Path, Path]:
    """The launch table of a chip's family, and the list of forms."""
    return FOLDER / f"{'a5' if chip.a5 else 'a2'}.yaml", HERE / "forms" / f"{chip.name}.txt"


def write(chip: Chip, names: Iterable[str] = NAMES) -> list[Path]:
    """The table of a chip's family, and what the compiler said of every form."""
    table, listed = files(chip)
    entries, lines = _standing(chip, names)
    for name in names:
        entries[name] = ""
        for size in TYPES:
            result = search(name, chip, size)
            entries[name] += entry(size, result, chip)
            lines += [row(size, *each) for each in result.forms]
            if result.refused is not None:
                lines.append(row(size, *result.refused))
            print(lines[-1], flush=True)
    version = importlib.metadata.version("ascendnpu-ir")
    head = HEAD.format(version=version, chip=chip.name, buffer=chip.buffer)
    text = "".join(f"  {name}:\n{entries[name]}" for name in sorted(entries))
    table.write_text(head + text, encoding="utf-8")
    launching.table.cache_clear()
    # rows narrower than a block take a smaller one: what models launch beside the search
    kept = {text.split()[3] for text in lines}
    for dtype in TYPES.values():
        for launch in launches_of(chip, dtype).values():
            if launch.key[:16] not in kept:
                kept.add(launch.key[:16])
                lines.append(row(size_of(launch), launch, lowering.compile_by_vendor(launch, chip)))
    listed.parent.mkdir(exist_ok=True)
    head = (
        f"# Written by `python -m ci.npu.blocks` with bishengir-compile {version}: kernel, type,\n"
    )
    head += "# columns a step, hash of source and arguments, the compiler's verdict, form.\n"
    lines.sort(key=lambda line: line.split()[0])  # stable: by the order of the search
    listed.write_text(head + "\n".join(lines) + "\n", encoding="utf-8")
    return [table, listed]


def main() -> None:
    """Write the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("chips", nargs="*", default=list(CHIPS))
    parser.add_argument("--kernel", action="append", choices=NAMES, help="this one, or several")
    options = parser.parse_args()
    for chip in options.chips:
        for file in write(CHIPS[chip], options.kernel or NAMES):
            print(file)


if __name__ == "__main__":
    main()
