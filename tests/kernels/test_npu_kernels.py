"""Every Ascend kernel by name: results, however its programs are run.

Runs as tests/kernels/test_npu.py does: lowered with programs in either order, and interpreted.
The rows are more than the cores, and the columns more than a step's; so are heads of a rotation.
Bugs planted in a kernel are found by running it: the fourth level can fail.
"""

import importlib
import importlib.util
import inspect
import re
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

if importlib.util.find_spec("ascendnpuir") is None or importlib.util.find_spec("torch_npu") is None:
    pytest.skip("needs the environment of make test-npu", allow_module_level=True)

from ci.npu import blocks
from liger_multi.backends import npu
from liger_multi.backends.npu.common.launching import start
from liger_multi.backends.npu.norms import rows as norm_rows
from liger_multi.testing import samples
from liger_multi.testing.samples import Sample, Tensor
from liger_multi.testing.tolerance import excess

# --- every kernel ---

NPU = torch.device("npu", 0)
HOME = Path(npu.__file__).parent
FILES = sorted(
    p.relative_to(HOME).with_suffix("")
    for p in HOME.rglob("*.py")
    if "_kernel(" in p.read_text("utf-8")
)
MODULES = [importlib.import_module(".".join((npu.__name__, *p.parts))) for p in FILES]
ROWS, COLS, BLOCK = 41, 200, 128
X, COLUMN = Tensor((ROWS, COLS)), Tensor((COLS,))
FIXED = Tensor((ROWS, COLS), grad=False)
LOGITS = {"logits": X, "target": Tensor((ROWS,), classes=COLS)}
PAIR = {"student": X, "teacher": FIXED, "target": Tensor((ROWS,), classes=9)}
FORMS = {"form": "logits", "teacher_form": "logits"}
ANGLES = {n: Tensor((1, 21, 128), grad=False) for n in ("cos", "sin")}
OUTSIDE = ANGLES | {n: Tensor((2, heads, 21, 132)) for n, heads in (("q", 3), ("k", 1))}
INSIDE = ANGLES | {n: Tensor((2, 21, heads, 132)) for n, heads in (("q", 3), ("k", 1))}
IDS = {"seq_idx": Tensor((2, ROWS), classes=3, grad=False), "bias": COLUMN}
PACKED = {"x": Tensor((2, ROWS, COLS)), "weight": Tensor((COLS, 4)), **IDS}
PACKED |= {"initial_state": Tensor((2, 3, COLS))}
GATED = {"x": Tensor((2, ROWS, 3 * COLS)), "weight": Tensor((COLS, 3)), **IDS}
SCAN = {n: Tensor((2, 37, COLS), scale=0.4) for n in ("u", "delta", "z")}
SCAN |= {n: Tensor((2, 37, 3), scale=0.4) for n in "BC"} | dict.fromkeys(
    ("D", "delta_bias"), COLUMN
)
SCAN |= {"A": Tensor((COLS, 3), negative=True), "initial_state": Tensor((2, COLS, 3))}
SCAN |= {"seq_idx": Tensor((2, 37), classes=3, grad=False)}
CODES = {"codes": Tensor((ROWS, COLS * 16), torch.uint8, classes=256), "scales": X}
CODES |= {"zeros": Tensor((ROWS, COLS), torch.uint8, classes=16)}
STEPS = {"delta_softplus": True, "output_final_state": True}
# an operator, tensors, options, and which kernels it is here for
CALLS = {
    "norm": ("rms_norm", {"x": X}, {}, ("forward", "backward")),
    "norm's weight": ("rms_norm", {"x": FIXED, "weight": COLUMN}, {}, ("weight",)),
    "row": ("cross_entropy", LOGITS, {}, ("statistics", "gradient")),
    "pair": ("jsd", PAIR, FORMS, ("sums", "gradient")),
    "gated": ("swiglu", {"gate": X, "up": X}, {}, ("forward", "backward")),
    "dyt": ("dyt", {"x": X, "alpha": Tensor((1,)), "weight": COLUMN}, {}, ("forward", "backward")),
    "conv": ("causal_conv1d", PACKED, {"activation": "silu"}, ("forward", "backward")),
    "conv with gates": ("gated_short_conv", GATED, {}, ("forward", "backward")),
    "scan": ("selective_scan", SCAN, STEPS, ("forward", "reverse")),
    "rope": ("rope", INSIDE, {"unsqueeze_dim": 2}, ("",)),
    "dequantize": ("dequantize", CODES, {"format": "int4", "dtype": torch.float32}, ("",)),
    "rope of neighbors": ("rope", OUTSIDE, {"style": "interleaved"}, ("",)),
}


def kernels(call):
    """The kernels that a call is here for."""
    name = re.match("[a-z]+", call)[0]
    return {f"_{name}_{part}_kernel".replace("__", "_") for part in CALLS[call][3]}


@pytest.fixture
def started(monkeypatch):
    """What was launched, by the kernel's name."""
    starts = Counter()
    for module in MODULES:
        original = module.start

        def start(kernel, pieces, /, *args, original=original, **constants):
            starts[kernel.__name__] += 1
            original(kernel, pieces, *args, **constants)

        monkeypatch.setattr(module, "start", start)
    return starts


def test_every_kernel_has_a_call():
    there = {n for m in MODULES for n in vars(m) if n.endswith("_kernel")}
    assert there == set().union(*map(kernels, CALLS))


@pytest.mark.parametrize("call", CALLS)
def test_results_of_a_kernel(started, call):
    op, tensors, options, _ = CALLS[call]
    drawn = Sample("kernel", tensors, options).make("cpu", torch.float32)
    actual = []
    for device, wide in ((NPU, torch.float32), (torch.device("cpu"), torch.float64)):
        inputs = {
            n: (
                t.detach().to(device, wide) if t.is_floating_point() else t.to(device)
            ).requires_grad_(t.requires_grad)
            for n, t in drawn.items()
        }
        with blocks.blocks(BLOCK):
            result = samples.call(op, **inputs, **options)
            parts = [result] if isinstance(result, torch.Tensor) else list(result)
            outs = [p for p in parts if p is not None and p.requires_grad]
            torch.autograd.backward(outs, [p.detach().cos() for p in outs])
        actual.append([t.detach().cpu() for t in outs])
        actual[-1] += [t.grad.cpu() for t in inputs.values() if t.requires_grad]
    errors = [excess(got, right, torch.float32) for got, right in zip(*actual, strict=True)]
    assert max(errors) <= 1, errors
    assert all(started[name] for name in kernels(call)), started


def test_states_that_a_scan_keeps(monkeypatch):
    from liger_multi.dispatch import registry
    from liger_multi.reference.linear_attention import selective_scan as reference

    monkeypatch.setattr(reference, "SPAN", 8)
    tensors = Sample("kernel", SCAN, STEPS).make("cpu", torch.float32)
    tensors = {n: t.detach() for n, t in tensors.items()} | {"seq_idx": None}
    inputs = {n: tensors.get(n) for n in inspect.signature(reference.forward).parameters} | STEPS
    exact = reference.forward(**inputs)[2]
    wide = {n: t.to(NPU) if isinstance(t, torch.Tensor) else t for n, t in inputs.items()}
    actual = registry.module("npu", "selective_scan").forward(**wide)[2].cpu()
    assert actual.shape == exact.shape == (2, 5, 3, COLS)
    assert excess(actual, exact, torch.float32) <= 1


# --- planted bugs ---

FEW, NARROW, WIDE, GUARD = 5, 150, 170, 7.0
# what is written, and what stands there instead; every place of the forward kernel
BUGS = {
    "none": ("", ""),
    "mask": ("mask = col < cols", "mask = col <= cols"),
    "stride": ("row * x_stride", "row * cols"),
    "eps": ("/ cols + eps)", "/ cols)"),
    "last column": ("mask = col < cols", "mask = col < cols - 1"),
    "row overrun": ("rows, tl.num_programs(0))", "rows + 1, tl.num_programs(0))"),
    "no mask": (
        "mask=mask, other=0.0).to(tl.float32)\n            if residual",
        "mask=col < 256, other=0.0).to(tl.float32)\n            if residual",
    ),
    "lost step": ("total += s * s", "total = s * s"),
}


def planted(folder, bug):
    """The kernel file with a bug in its forward kernel."""
    was, now = BUGS[bug]
    source = Path(norm_rows.__file__).read_text(encoding="utf-8")
    head, mark, rest = source.partition("def _norm_backward_kernel")
    assert was in head
    file = folder / f"planted_{bug.replace(' ', '_')}.py"
    file.write_text(head.replace(was, now) + mark + rest)
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    return module._norm_forward_kernel


def run(kernel):
    """Outputs and what stands around them, of rows inside of wider ones with NaN beyond."""
    generator = torch.Generator().manual_seed(0)
    x = torch.full((FEW + 1, WIDE), float("nan"))
    x[:FEW, :NARROW] = torch.randn(FEW, NARROW, generator=generator) * 1e-3
    weight = torch.full((WIDE,), float("nan"))
    weight[:NARROW] = torch.randn(NARROW, generator=generator)
    y, rstd = torch.full((FEW + 2, NARROW), GUARD), torch.full((FEW + 2,), GUARD)
    x, weight, y, rstd = (t.to("npu") for t in (x, weight, y, rstd))
    sizes = (WIDE, 0, FEW, NARROW, 1e-6, 0.0)
    tensors = (x, None, weight, y, None, rstd)
    start(kernel, FEW, *tensors, *sizes, EXACT=True, ROUND=False, BLOCK=128)
    x, y, weight = x.cpu().double(), y.cpu().double(), weight.cpu().double()
    part = x[:FEW, :NARROW]
    expected = part / torch.sqrt((part * part).mean(-1, True) + 1e-6) * weight[:NARROW]
    close = torch.allclose(y[:FEW], expected, rtol=1e-5, atol=1e-6)
    return close and bool((y[FEW:] == GUARD).all()) and bool((rstd.cpu()[FEW:] == GUARD).all())


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_found(tmp_path, bug):
    assert run(planted(tmp_path, bug)) is (bug == "none")
