"""Every operator that a backend implements, against formulas in fp64; see :mod:`.plugin`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from liger_multi.dispatch.registry import REFERENCE, operators
from liger_multi.errors import BackendUnavailableError
from liger_multi.testing import bitwise, checks, samples
from liger_multi.testing.samples import Sample


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test per operator, sample and, where a test asks for it, dtype."""
    if "op" not in metafunc.fixturenames:
        return
    backend = metafunc.config.getoption("--backend", default=None)
    if backend is None:
        raise pytest.UsageError("run python -m liger_multi.testing --backend NAME")
    fixtures = [n for n in ("op", "backend", "sample", "dtype") if n in metafunc.fixturenames]
    per_output = metafunc.function is test_one_output_at_a_time
    is_main_test = metafunc.function is test_forward_and_backward
    params = []
    for op, sample in _samples(backend):
        if (per_output and not checks.has_several_outputs(op)) or not (
            is_main_test or sample.size == "small"
        ):
            continue
        for dtype in checks.dtypes_of(sample, backend) if is_main_test else checks.DTYPES[:1]:
            name = f"{op}-{backend}-{sample.name}" + f"-{str(dtype)[6:]}" * is_main_test
            params.append(pytest.param(*(op, backend, sample, dtype)[: len(fixtures)], id=name))
    metafunc.parametrize(fixtures, params)


def _samples(backend: str) -> Iterator[tuple[str, Sample]]:
    for op in operators():
        if checks.implemented(backend, op):
            yield from ((op, sample) for sample in samples.of(op) if sample.size != "bench")


def _compare(
    op: str,
    sample: Sample,
    dtype: torch.dtype,
    device: torch.device,
    forward: str,
    backward: str,
    used: tuple[str, ...] | None = None,
) -> None:
    try:
        checks.compare(op, sample, dtype, device, forward, backward, used)
    except BackendUnavailableError as refused:
        pytest.skip(str(refused))


def test_forward_and_backward(
    device: torch.device, op: str, backend: str, sample: Sample, dtype: torch.dtype
) -> None:
    """Outputs and gradients, in every dtype."""
    _compare(op, sample, dtype, device, *checks.runs(backend, op))


def test_promised_bits(device: torch.device, op: str, backend: str, sample: Sample) -> None:
    """What contract and backend promise of bits: twice, recomputed, other rows, other chunks."""
    order = list(dict.fromkeys((*checks.runs(backend, op), REFERENCE)))
    bitwise.check_promises(op, sample, torch.float32, device, order)


def test_one_output_at_a_time(device: torch.device, op: str, backend: str, sample: Sample) -> None:
    """An output that nobody uses has no upstream gradient; the others' are right without it."""
    forward, backward = checks.runs(backend, op)
    for name in checks.exact(op, sample.name, torch.float32, device).result:
        _compare(op, sample, torch.float32, device, forward, backward, (name,))


def test_mixed_directions(device: torch.device, op: str, backend: str, sample: Sample) -> None:
    """Backward of the reference after forward of the backend, and the other way round."""
    if "forward" in checks.implemented(backend, op):
        _compare(op, sample, torch.float32, device, backend, REFERENCE)
    if "backward" in checks.implemented(backend, op):
        _compare(op, sample, torch.float32, device, REFERENCE, backend)
