"""Tiles of the GEMM of ``deterministic="rows"``: few rows have another one, and the same bits.

On a GPU, numbers are random, and the bits of a row tell the order of its sum. An interpreter's sums
follow NumPy, so there the numbers are small integers, whose sums are exact in any order.
"""

import pytest
import torch

from liger_multi.dispatch import launch
from liger_multi.dispatch.launch import DeviceInfo
from tests import harness

pytest.importorskip("triton")
if (DEVICE := harness.device_of("triton")) is None:
    pytest.skip("kernels on a CPU need TRITON_INTERPRET=1", allow_module_level=True)

from liger_multi.backends.triton.common import gemm

HOPPER = DeviceInfo("cuda", "sm90", 32, 1024, 232448, 132)
TILES = [e for e in launch.table_of(HOPPER)["gemm_by_rows"] if e["equal_bits"]]
SIZES = [(256, 136), (320, 512), (136, 1000)]  # K and N
NATIVE = DEVICE.type != "cpu"


def numbers(*shape, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    if NATIVE:
        return torch.randn(shape, generator=generator).to(DEVICE, dtype)
    return torch.randint(-3, 4, shape, generator=generator).to(DEVICE, dtype)


def product(a, weight):
    out = a.new_empty(a.shape[0], weight.shape[0])
    gemm.gemm_by_rows(a, weight.t(), None, out)
    return out


def config_of(rows, **changed):
    shape = {"cols": 2048, "element_bytes": 2, "narrow": 0, "turned": 1, **changed}
    shape["rows"] = min(rows, gemm.FEW + 1)
    with launch.simulate(HOPPER):
        return launch.launch_config("gemm_by_rows", gemm.gemm_config, torch.device("meta"), **shape)


@pytest.fixture
def any_rows():
    token = launch.any_rows.set(True)
    yield
    launch.any_rows.reset(token)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", SIZES if not NATIVE else [*SIZES, (2048, 2048), (8192, 512)])
def test_tiles_of_few_rows_have_the_bits_of_all(dtype, size):
    """Every entry that says so, against the tile of many rows."""
    inner, cols = size
    a = numbers(130, inner, dtype=dtype)
    weight = numbers(cols, inner, dtype=dtype, seed=1)
    many = {n: getattr(config_of(1000), n) for n in ("block_m", "block_n", "block_k", "stages")}
    with launch.forced({"gemm_by_rows": many | {"num_warps": 8}}):
        whole = product(a, weight)
    assert TILES
    for entry in TILES:
        low, high = entry["when"]["rows"]
        with launch.forced({"gemm_by_rows": entry["config"]}):
            for rows in (low, high):
                for start in (0, 37):
                    part = slice(start, start + rows)
                    assert torch.equal(product(a[part], weight), whole[part]), (entry, rows)


def test_few_rows_have_a_tile_of_their_own(any_rows):
    """Also where rows must not depend on each other: a device gave these tiles the same bits."""
    heights = [config_of(rows).block_m for rows in (1, 16, 17, 64, 65, 5000)]
    assert heights == [16, 16, 64, 64, 256, 256]
    for changed in ({"turned": 0}, {"narrow": 1}, {"element_bytes": 4}):  # nobody looked
        assert config_of(1, **changed) == config_of(5000, **changed)


@pytest.mark.parametrize("equal_bits", [None, False, True])
def test_a_bound_on_rows_holds_by_rows_if_bits_are_equal(monkeypatch, any_rows, equal_bits):
    entry = {"when": {"rows": [1, 8]}, "config": {"block_m": 32}, "source": "a test"}
    entry |= {} if equal_bits is None else {"equal_bits": equal_bits}
    table = {"gemm_by_rows": (launch._entry(entry, "gemm_by_rows", "a file", {}),)}
    monkeypatch.setattr(launch, "table_of", lambda info: table)
    assert (config_of(1).block_m == 32) == bool(equal_bits)
    monkeypatch.setattr(launch, "table", lambda backend, arch: table)
    launch.bounded_by_rows.cache_clear()
    try:
        assert ("gemm_by_rows" in launch.bounded_by_rows()) == (not equal_bits)
    finally:
        launch.bounded_by_rows.cache_clear()
