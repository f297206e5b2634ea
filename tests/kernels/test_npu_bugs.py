"""Bugs planted in an Ascend kernel are found by running it: the fourth level can fail.

Runs as tests/kernels/test_npu.py does; interpreted or lowered, in either order of programs.
"""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

if importlib.util.find_spec("ascendnpuir") is None or importlib.util.find_spec("torch_npu") is None:
    pytest.skip("needs the environment of make test-npu", allow_module_level=True)

from liger_multi.backends.npu.common.launching import start
from liger_multi.backends.npu.norms import operators as norms

ROWS, COLS, WIDE, GUARD = 5, 150, 170, 7.0
# what is written, and what stands there instead; every place of the forward kernel
BUGS = {
    "none": ("", ""),
    "mask": ("mask = col < cols", "mask = col <= cols"),
    "stride": ("row * x_stride", "row * cols"),
    "eps": ("/ cols + eps)", "/ cols)"),
    "last column": ("mask = col < cols", "mask = col < cols - 1"),
    "row overrun": ("rows, tl.num_programs(0))", "rows + 1, tl.num_programs(0))"),
    "no mask": ("mask=mask, other=0.0).to(tl.float32)\n            if residual",
                "mask=col < 256, other=0.0).to(tl.float32)\n            if residual"),
    "lost step": ("total += s * s", "total = s * s"),
}  # fmt: skip


def planted(folder, bug):
    """The kernel file with a bug in its forward kernel."""
    was, now = BUGS[bug]
    source = Path(norms.__file__).read_text(encoding="utf-8")
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
    x = torch.full((ROWS + 1, WIDE), float("nan"))
    x[:ROWS, :COLS] = torch.randn(ROWS, COLS, generator=generator) * 1e-3
    weight = torch.full((WIDE,), float("nan"))
    weight[:COLS] = torch.randn(COLS, generator=generator)
    y, rstd = torch.full((ROWS + 2, COLS), GUARD), torch.full((ROWS + 2,), GUARD)
    x, weight, y, rstd = (t.to("npu") for t in (x, weight, y, rstd))
    start(
        kernel, ROWS, x, None, weight, y, None, rstd, WIDE, 0, ROWS, COLS, 1e-6, 0.0,
        EXACT=True, ROUND=False, BLOCK=128,
    )  # fmt: skip
    x, y, weight = x.cpu().double(), y.cpu().double(), weight.cpu().double()
    part = x[:ROWS, :COLS]
    wanted = part / torch.sqrt((part * part).mean(-1, True) + 1e-6) * weight[:COLS]
    close = torch.allclose(y[:ROWS], wanted, rtol=1e-5, atol=1e-6)
    return close and bool((y[ROWS:] == GUARD).all()) and bool((rstd.cpu()[ROWS:] == GUARD).all())


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_found(tmp_path, bug):
    assert run(planted(tmp_path, bug)) is (bug == "none")
