"""Calls of real models' widths that reach every Ascend kernel in every form that it has.

Sizes are plain arguments of the kernels, so that few rows compile what many would.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import torch

import liger_multi
from ci.npu.lowering import Chip, Launch, caught
from ci.npu.simulate import Device
from liger_multi import ops
from liger_multi.backends.npu.common import launching as npu
from liger_multi.dispatch import launch as launching
from liger_multi.dispatch.backend import DeviceInfo
from liger_multi.dispatch.op import OPS
from liger_multi.ops.cross_entropy import EVERYTHING
from liger_multi.testing.samples import Sample
from liger_multi.testing.samples import Tensor as T

ROWS = 4
WIDTHS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def _logits(cols: int, weighted: bool = False) -> dict[str, T]:
    made = {"logits": T((ROWS, cols)), "target": T((ROWS,), classes=cols)}
    extra = {"weight": T((cols,), positive=True, grad=False)}
    return {**made, **(extra if weighted else {})}


def _pair(cols: int) -> dict[str, T]:
    return {
        "student": T((ROWS, cols), positive=True),
        "teacher": T((ROWS, cols), positive=True, grad=False),
        "target": T((ROWS,), classes=9),
    }


def _norm(cols: int, **terms: T) -> dict[str, T]:
    return {"x": T((ROWS, cols)), **terms}


def _head(cols: int) -> dict[str, T]:
    return {
        "hidden": T((ROWS, 64)), "weight": T((cols, 64)), "target": T((ROWS,), classes=cols)
    }  # fmt: skip


FORMS = [
    {"form": student, "teacher_form": teacher}
    for student, teacher in (
        ("logits", "logits"), ("log_prob", "log_prob"), ("prob", "prob"), ("logits", "prob"),
    )
]  # fmt: skip
TERMS = (("x", None), ("residual", torch.float32))


def _rope(cols: int, angles: int, dtype: torch.dtype | None = None) -> dict[str, T]:
    made = {n: T((1, h, ROWS, cols), layout="swapped") for n, h in (("q", 32), ("k", 8))}
    return made | {n: T((1, ROWS, angles), dtype=dtype, grad=False) for n in ("cos", "sin")}


W32 = T((4096,), dtype=torch.float32)
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
            ("kl_div", ({},)), ("tvd", ({},)), ("jsd", ({"beta": 0.5}, {"beta": 1.0})),
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
    "dyt": (
        (_norm(4096, alpha=T((1,)), weight=T((4096,)), bias=T((4096,))), {}),
        (_norm(16384, alpha=T((1,)), weight=T((16384,))), {}),
    ),
}  # fmt: skip


def info(chip: Chip) -> DeviceInfo:
    """What the backend would say of a chip."""
    return DeviceInfo("npu", chip.name, 1, 1, chip.buffer, chip.cores, "a5" if chip.a5 else "a2")


def _call(op: str, tensors: dict[str, T], options: dict[str, object], dtype: torch.dtype) -> None:
    made = Sample("case", tensors, options).make("npu", dtype)
    result = getattr(ops, op)(**made, **options)
    parts = [result] if isinstance(result, torch.Tensor) else list(result)
    outs = [p for p in parts if p is not None and p.requires_grad]
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


def launches(chip: Chip, dtype: torch.dtype, of: dict[str, int] | None = None) -> dict[str, Launch]:
    """What the cases launch on a chip, by what is compiled."""
    found: dict[str, Launch] = {}
    with (
        Device(), launching.simulate(info(chip)), blocks(of),
        caught(lambda made: found.update({made.key: made}), chip),
    ):  # fmt: skip
        for op, calls in CASES.items():
            assert op in OPS, op
            for tensors, options in calls:
                with liger_multi.use(**{op: "npu"}):
                    _call(op, tensors, options, dtype)
    return found


# By what was seen of the compiler: the mixture of two distributions takes the most, and tanh.
ROOM = {"KIND": (1, 2, 3, 0), "ACTIVATION": (0, 2, 1), "CAPPED": (0, 1), "HALF": (1, 0)}


def appetite(launch: Launch) -> tuple[int, int]:
    """How a kernel's forms rank by the room that they want: that with fewer parts left out."""
    constants = launch.constants
    kinds = sum(ROOM[n][int(v)] for n, v in constants.items() if n in ROOM)
    return kinds, -sum(v is None for v in constants.values())
