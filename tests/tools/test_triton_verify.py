"""Faults in a copy of our own kernels are found by `liger-multi verify`'s checks, interpreted."""

import importlib.metadata
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from liger_multi.dispatch import config, registry, resolve
from liger_multi.reference.common import stored, strict
from liger_multi.testing import bitwise, samples
from liger_multi.testing.verify import child
from liger_multi.testing.verify.cases import Case
from tests import harness

if not harness.interpreted():
    pytest.skip("a copy of kernels is interpreted", allow_module_level=True)

SOURCE = Path(registry.__file__).parents[1] / "backends" / "triton" / "norms" / "rms_norm.py"
FAULTS = {
    "none": (),
    "a factor": (("tl.rsqrt(", "1.001 * tl.rsqrt("),),
    "an unwritten tail": (
        (
            "tl.store(y_ptr + first * cols + y_offset, y, mask=mask)",
            "tl.store(y_ptr + first * cols + y_offset, y, mask=mask & (col < cols - 1)[None, :])",
        ),
    ),
    "reads past the end": (
        (
            "x = tl.load(x_ptr + first * x_stride + x_offset, mask=mask, other=0.0)\n    s",
            "x = tl.load(x_ptr + first * x_stride + x_offset)\n    s",
        ),
    ),
}


@pytest.fixture
def copied(monkeypatch, tmp_path):
    """Installs a backend with a copy of the kernels of rms_norm, changed by a function."""

    def install(name, changes):
        text = SOURCE.read_text()
        for old, new in changes:
            assert old in text, f"{old!r} does not stand in the kernels anymore"
            text = text.replace(old, new)
        package = tmp_path / name
        (package / "norms").mkdir(parents=True)
        (package / "norms" / "__init__.py").write_text("")
        (package / "norms" / "rms_norm.py").write_text(text)
        (package / "__init__.py").write_text(
            "from liger_multi.dispatch.backend import Backend\n"
            f"BACKEND = Backend({name!r}, device_type='cpu')\n"
        )
        point = importlib.metadata.EntryPoint(name, name, registry.ENTRY_POINTS)
        monkeypatch.setattr(registry.importlib.metadata, "entry_points", lambda group: [point])
        monkeypatch.syspath_prepend(tmp_path)
        _forget()

    yield install
    monkeypatch.undo()
    _forget()
    for name in [n for n in sys.modules if n.startswith("copy_of_kernels")]:
        del sys.modules[name]


def _forget():
    for cached in (
        registry.packages,
        registry.backends,
        registry.unavailable,
        registry.module,
        resolve._implementation,
    ):
        cached.cache_clear()
    config.forget()


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_in_a_copy_of_our_kernels_are_found(copied, fault):
    name = f"copy_of_kernels_{list(FAULTS).index(fault)}"
    copied(name, FAULTS[fault])
    cases = [Case("rms_norm", name, s.name, "float32") for s in samples.of("rms_norm")[:6]]
    verdicts = {child.run(case, torch.device("cpu"))["verdict"] for case in cases}
    assert verdicts == {"right"} if fault == "none" else "wrong" in verdicts


def test_backward_is_checked_on_what_forward_kept_under_the_same_setting(monkeypatch):
    """Logits that forward keeps have other bits where the vendor's product stands for ours."""

    def multiply(a, b, bias, out):
        strict.multiply(a, b, bias, out)
        return out if strict.has_own_gemm() else out.mul_(1 + 2.0**-12)

    monkeypatch.setattr(stored, "multiply", multiply)
    op = "fused_linear_log_prob"
    sample = next(s for s in samples.of(op) if s.name == "all")
    order = ["triton", "reference"]
    checked = bitwise.check_promises(op, sample, torch.float32, torch.device("cpu"), order)
    assert ("backward", "rows", "chunk") in checked
