"""What can be said of vendors' backends without their devices and packages.

AMD without a card: fake devices of five architectures, in waves of 64 and of 32.

Ascend without its packages. Limits of torch_npu's operators, one at a time: the last call that
fits, the first beyond. Predicates look at shapes, types and strides alone, so this runs anywhere.
Every operator says by which path it runs on Ascend, and which level that reached.
"""

import importlib.metadata
import importlib.util
import re
import sys
import types
from pathlib import Path

import pytest
import torch
import yaml

from ci import layering
from ci.npu import levels
from liger_multi.backends.npu.common import limits
from liger_multi.backends.rocm import BACKEND, FULL_CARD, SIBLINGS, USUAL_CARD
from liger_multi.dispatch import launch, registry
from liger_multi.errors import ConfigurationError
from tests import harness

# --- AMD ---


ROOT = Path(__file__).parents[2]
# what PyTorch says of a card: name with its features, lanes of a wave, LDS, compute units
CARDS = {
    "gfx90a": ("gfx90a:sramecc+:xnack-", 64, 65536, 104),
    "gfx942": ("gfx942:sramecc+:xnack-", 64, 65536, 304),
    "gfx950": ("gfx950:sramecc+:xnack-", 64, 163840, 256),
    "gfx1100": ("gfx1100", 32, 65536, 48),
    "gfx1201": ("gfx1201", 32, 65536, 32),
}
DEVICE = torch.device("cuda", 0)
# without their caches, which hold what this machine has
UNAVAILABLE = registry.unavailable.__wrapped__
DEVICE_INFO = launch._device_info.__wrapped__


@pytest.fixture(params=CARDS)
def card(request, monkeypatch):
    """A machine whose PyTorch is a ROCm build and sees one card."""
    return plug(monkeypatch, *CARDS[request.param])


def plug(monkeypatch, name, wave, lds, cores):
    facts = types.SimpleNamespace(
        gcnArchName=name,
        warp_size=wave,
        shared_memory_per_block=lds,
        multi_processor_count=cores,
        major=9,
        minor=4,
    )
    monkeypatch.setattr(torch.version, "hip", "7.2.0")
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    monkeypatch.setattr(
        torch.cuda, "get_device_capability", lambda *a: pytest.fail("a capability was asked for")
    )
    monkeypatch.setattr(registry, "unavailable", UNAVAILABLE)
    monkeypatch.setattr(launch, "_device_info", DEVICE_INFO)
    monkeypatch.setattr(launch, "_configs", {})
    return name.partition(":")[0]


def test_rocm_build_uses_rocm_backend_only(card):
    assert [record.name for record in registry.serving("cuda")] == ["rocm"]
    assert registry.unavailable("cuda") == "needs a CUDA build of PyTorch"


def test_limits_are_the_device_s(card):
    _, wave, lds, _ = CARDS[card]
    info = launch.device_info(DEVICE)
    assert (info.backend, info.arch, info.table) == ("rocm", card, card)
    assert (info.warp_size, info.max_threads, info.shared_bytes) == (wave, 1024, lds)
    assert info.cores == FULL_CARD.get(card, USUAL_CARD)
    assert f"waves of {wave}" in BACKEND.describe()["cuda:0"]


@pytest.mark.parametrize("cores", [19, 38, 228, 304, 400])
def test_every_card_of_an_architecture_adds_in_the_same_order(monkeypatch, cores):
    """The promise "cards": no launch follows the number of cores that a card, or a part of it, has.

    Everything that a formula can ask of a device is in its limits.
    """
    plug(monkeypatch, "gfx942:sramecc+:xnack-", 64, 65536, 304)
    full = launch.device_info(DEVICE)
    plug(monkeypatch, "gfx942:sramecc+:xnack-", 64, 65536, cores)
    assert launch.device_info(DEVICE) == full


def test_nobody_else_counts_cores():
    folder = Path(registry.__file__).parent.parent.parent / "backends"
    asks = [f.parent.name for f in folder.rglob("*.py") if "multi_processor_count" in f.read_text()]
    assert not asks


@pytest.mark.parametrize("present", [True, False], ids=["by another name", "absent"])
def test_triton_without_its_distribution(monkeypatch, present):
    """PyTorch for ROCm brings Triton under another name; its version is the module's."""
    triton = registry.backends()["triton"]
    find, version = importlib.util.find_spec, importlib.metadata.version

    def missing(name):
        if name == "triton":
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    monkeypatch.setitem(sys.modules, "triton", types.SimpleNamespace(__version__="3.5.1"))
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda n, *a: (present or None) if n == "triton" else find(n, *a),
    )
    assert triton.describe()["triton"] == ("3.5.1" if present else "not installed")


def test_rocm_without_a_card_has_a_reason(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", None)
    assert BACKEND.probe() == "needs a ROCm build of PyTorch"
    monkeypatch.setattr(torch.version, "hip", "7.2.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert BACKEND.probe() == "PyTorch sees no ROCm device"


@pytest.mark.parametrize(("arch", "table"), SIBLINGS.items())
def test_architecture_takes_the_table_of_its_sibling(monkeypatch, arch, table):
    plug(monkeypatch, arch, *CARDS[table][1:])
    info = launch.device_info(DEVICE)
    assert (info.arch, info.table) == (arch, table)
    assert table in CARDS
    assert arch not in CARDS


def test_an_unknown_architecture_runs_on_the_formulas(monkeypatch):
    plug(monkeypatch, "gfx1234", 32, 65536, 40)
    info = launch.device_info(DEVICE)
    assert (info.arch, info.table) == ("gfx1234", "gfx1234")
    assert launch.table("rocm", "gfx1234") == {}


# --- launches of every kernel ---


@pytest.fixture
def launches(card):
    """Every launch of every operator on a card, recorded instead of run."""
    pytest.importorskip("triton", reason="no Triton on this machine")
    if harness.interpreted():
        pytest.skip("interpreted kernels have no launches to record")
    from ci.static.cases import launched

    return card, launched(card)


@pytest.mark.slow
def test_every_launch_fits_the_card(launches):
    card, cases = launches
    _, wave, _, _ = CARDS[card]
    from ci.static import kernels

    assert {case.name for case in cases} == set(kernels())
    for case in cases:
        warps = case.options["num_warps"]
        assert 1 <= warps * wave <= 1024, f"{case.name} ({case.label}): {warps} warps of {wave}"
        assert warps & (warps - 1) == 0, f"{case.name} ({case.label}): {warps} warps"
        assert case.options["enable_fp_fusion"] is True, case.name
        tile = case.constant("ROWS", 1) * case.constant("BLOCK", 1)
        assert tile <= 32768, f"{case.name} ({case.label}): {tile} elements a tile"
        if case.constant("ROWS", 1) > 1:  # as_rows promises as much, see assume_rows
            assert tile <= 8192, f"{case.name} ({case.label}): {tile} elements of several rows"


def test_a_lane_has_as_much_to_do_in_both_kinds_of_wave(monkeypatch):
    """Formulas count threads, not warps: 16 bytes a lane whichever the wave."""
    from liger_multi.backends.triton.activations import gated
    from liger_multi.backends.triton.cross_entropy import cross_entropy
    from liger_multi.backends.triton.norms import row_config

    def threads(arch):
        plug(monkeypatch, *CARDS[arch])
        info = launch.device_info(DEVICE)
        asked = (
            row_config.forward_config(info, 8192, 4096),
            row_config.backward_config(info, 8192, 4096, 4),
            cross_entropy.row_config(info, 8192, 32000, 1),
            cross_entropy.row_config(info, 8192, 128256, 1),
            gated.tile_config(info, 1, 2**24),
        )
        return [k.num_warps * info.warp_size for k in asked]

    assert threads("gfx942") == threads("gfx1100") == [256, 256, 512, 1024, 128]


@pytest.mark.parametrize("wave", [32, 64])
def test_a_row_narrower_than_a_wave_still_has_one(monkeypatch, wave):
    pytest.importorskip("triton", reason="no Triton on this machine")
    from liger_multi.backends.triton.activations import gated
    from liger_multi.backends.triton.cross_entropy import cross_entropy
    from liger_multi.backends.triton.cross_entropy.cross_entropy_inplace import scale_config
    from liger_multi.backends.triton.norms import row_config

    plug(monkeypatch, "gfx1234", wave, 65536, 40)
    info = launch.device_info(DEVICE)
    for cols in (1, 2, 16, 17):
        for k in (
            row_config.forward_config(info, 1, cols),
            row_config.backward_config(info, 1, cols, 4),
            cross_entropy.row_config(info, 1, cols, 1),
            gated.tile_config(info, 1, cols),
            scale_config(info, 1, cols),
        ):
            assert k.num_warps >= 1


# --- launch tables ---

TABLES = {path.stem: path for path in (ROOT / "backends" / "rocm" / "launch").glob("*.yaml")}


def test_every_architecture_has_a_table():
    assert sorted(TABLES) == sorted(CARDS)


@pytest.mark.parametrize("arch", CARDS)
def test_launch_entries_name_their_source(arch):
    content = yaml.safe_load(TABLES[arch].read_text())
    _, wave, lds, _ = CARDS[arch]
    assert content["device"] == {"warp_size": wave, "shared_bytes": lds}
    for name, entries in content["entries"].items():
        for entry in entries:
            said = re.match(r"static model, not measured: |measured on ", entry["source"])
            assert said, f"{name}: {entry['source']}"
            assert entry["config"].get("num_warps", 1) * wave <= 1024, name


def test_a_table_is_for_its_wave_and_lds(monkeypatch, tmp_path):
    """The same name with other limits is another device, and runs on the formula."""
    from dataclasses import dataclass

    @dataclass(frozen=True)
    class Config:
        rows: int

    folder = tmp_path / "launch"
    folder.mkdir()
    (folder / "gfx942.yaml").write_text(
        "device: {warp_size: 64, shared_bytes: 65536}\n"
        "entries: {some.forward: [{when: {cols: [1, 8]}, config: {rows: 4}, source: a test}]}\n"
    )
    monkeypatch.setattr("importlib.resources.files", lambda package: tmp_path)
    monkeypatch.setattr(launch, "table", launch.table.__wrapped__)

    def rows(wave, lds, cols=8):
        plug(monkeypatch, "gfx942:sramecc+", wave, lds, 304)
        return launch.launch_config(
            "some.forward", lambda info, cols: Config(1), DEVICE, cols=cols
        ).rows

    assert rows(64, 65536) == 4
    assert rows(64, 163840) == 4
    assert rows(32, 65536) == 1
    assert rows(64, 32768) == 1
    assert rows(64, 65536, cols=9) == 1


def test_an_unknown_word_in_a_table_is_named(monkeypatch, tmp_path):
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch" / "gfx942.yaml").write_text("device: {warpsize: 64}\nentries: {}\n")
    monkeypatch.setattr("importlib.resources.files", lambda package: tmp_path)
    with pytest.raises(ConfigurationError, match="did you mean 'warp_size'"):
        launch.table.__wrapped__("rocm", "gfx942")


# --- what kernels may not do ---


@pytest.mark.parametrize(
    ("path", "source", "said"),
    [
        ("liger_multi/ops/x.py", "f = torch.cuda.get_device_capability()\n", "capability"),
        ("backends/triton/x.py", "acc = tl.dot(a, b, acc)\n", "input_precision"),
        ("backends/triton/x.py", "tl.atomic_add(p, v)\n", "atomic"),
        ("backends/triton/x.py", "acc = tl.dot(a, b, acc, input_precision='ieee')\n", ""),
        ("backends/cuda/x.py", "f = torch.cuda.get_device_capability()\n", ""),
    ],
)
def test_portable_rule_finds_unportable_code(tmp_path, path, source, said):
    (tmp_path / path).parent.mkdir(parents=True)
    (tmp_path / path).write_text(f'"""A file."""\n{source}')
    failures = [str(f) for f in layering.check(tmp_path) if f.rule == "portable"]
    assert len(failures) == bool(said)
    assert said in "".join(failures)


# --- Ascend ---


# --- limits ---


BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64


def t(*shape, dtype=BF16):
    """A tensor of no device."""
    return torch.empty(shape, dtype=dtype, device="meta")


def says(said, refusal):
    """Whether a predicate lets a call pass, or refuses it for the reason wanted."""
    return said is None if refusal is None else said is not None and refusal in said


@pytest.mark.parametrize(
    ("x", "refusal"),
    [
        (t(4, 6), None),
        (t(*[1] * 7, 6), None),
        (t(*[1] * 8, 6), "8 axes"),
        (t(0, 6), "got"),
        (t(4, 6, dtype=FP64), "fp32, fp16 or bf16"),
    ],
)
def test_halves(x, refusal):
    assert says(limits.packed_gates(x), refusal)


@pytest.mark.parametrize(
    ("x", "weight", "offset", "refusal"),
    [
        (t(4, 6), t(6), 0.0, None),
        (t(4, 6), None, 0.0, "a weight"),
        (t(4, 6), t(6, dtype=FP32), 0.0, "of the dtype of x"),
        (t(4, 6), t(6), 1.0, "rounded"),
        (t(4, 6, dtype=FP32), t(6, dtype=FP32), 1.0, None),
        (t(6), t(6), 0.0, "2 to 8 axes"),
        (t(*[1] * 8, 6), t(6), 0.0, "2 to 8 axes"),
        (t(0, 6), t(6), 0.0, "2 to 8 axes"),
        (t(4, 6, dtype=FP64), t(6, dtype=FP64), 0.0, "fp32, fp16 or bf16"),
    ],
)
def test_norms(x, weight, offset, refusal):
    assert says(limits.norm(x, weight, offset), refusal)


@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        ({}, None),
        ({"order": "0213"}, None),
        ({"order": "2013"}, "BNSD or BSND"),
        ({"shape": (4, 5, 64)}, "4 axes"),
        ({"shape": (2, 4, 0, 64)}, "4 axes"),
        ({"angles": FP32}, "one dtype"),
        ({"rotary": 32}, "all channels"),
        ({"cos": 32}, "all channels"),
        ({"shape": (2, 4, 5, 880)}, None),
        ({"shape": (2, 4, 5, 896)}, "at most 894"),
        ({"shape": (2, 4, 5, 40)}, "multiple of 32 bytes"),
        ({"shape": (999, 4, 5, 64)}, None),
        ({"shape": (1000, 4, 5, 64)}, "fewer than 1000"),
        ({"shape": (2, 999, 1200, 64)}, None),
        ({"shape": (2, 1000, 1200, 64)}, "fewer than 1000"),
        ({"style": "interleaved"}, None),
        ({"style": "interleaved", "batch": 2}, "all sequences share"),
        ({"batch": 2}, None),
        ({"style": "interleaved", "shape": (249, 4, 5, 64)}, None),
        ({"style": "interleaved", "shape": (250, 4, 5, 64)}, "all sequences share"),
    ],
)
def test_rotation(change, refusal):
    at = {"shape": (2, 4, 5, 64), "angles": BF16, "style": "half", "order": "0123", "batch": 1}
    at |= change
    width = at["shape"][-1]
    cos = t(at["batch"], at["shape"][-2], at.get("cos", width), dtype=at["angles"])
    how = (at["style"], at.get("rotary", width), at["order"])
    assert says(limits.rotation(t(*at["shape"]), cos, cos, *how), refusal)


@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        ({}, None),
        ({"causal": True}, None),
        ({"sinks": t(4)}, "no sinks"),
        ({"ranges": t(5, 2)}, "the causal one"),
        ({"softcap": 30.0}, "no softcap"),
        ({"k": t(2, 2, 7, 64, dtype=FP32)}, "one dtype"),
        ({"width": 768}, None),
        ({"width": 776}, "768 elements"),
        ({"v": t(2, 2, 7, 32)}, None),
        ({"v": t(2, 2, 7, 72)}, "no wider"),
        ({"heads": 256}, None),
        ({"heads": 258}, "256 heads"),
        ({"rows": 0}, "1048576 tokens"),
        ({"rows": 2**20}, None),
        ({"rows": 2**20 + 1}, "1048576 tokens"),
        ({"rows": 7, "causal": True}, None),
        ({"rows": 8, "causal": True}, "no query that sees no key"),
        ({"rows": 8}, None),
    ],
)
def test_attention(change, refusal):
    at = {"heads": 4, "rows": 5, "width": 64, "causal": False, "softcap": 0.0} | change
    q, k = t(2, at["heads"], at["rows"], at["width"]), at.get("k", t(2, 2, 7, at["width"]))
    rest = (at.get("sinks"), at.get("ranges"), at["causal"], at["softcap"])
    assert says(limits.fused_attention(q, k, at.get("v", k), *rest), refusal)


@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        ({}, None),
        ({"table": "a5"}, "Atlas A2"),
        ({"dtype": FP64}, "fp32, fp16 or bf16"),
        ({"weight": FP32}, "one dtype"),
        ({"rows": 0}, "tokens that have experts"),
        ({"rows": 4, "per": 512}, None),
        ({"rows": 4, "per": 513}, "512 experts"),
        ({"rows": 16777214, "per": 1}, None),
        ({"rows": 16777215, "per": 1}, "16777214 token-expert pairs"),
        ({"experts": 1024}, None),
        ({"experts": 1025}, "1024 groups"),
        ({"hidden": 65535}, None),
        ({"hidden": 65536}, "65535 elements"),
        ({"inner": 32767}, None),
        ({"inner": 32768}, "65535 elements"),
        ({"turned": True}, None),
        ({"strided": True}, "contiguous"),
    ],
)
def test_experts(change, refusal):
    at = {"rows": 5, "per": 2, "experts": 3, "hidden": 8, "inner": 6, "dtype": BF16}
    at |= {"weight": change.get("dtype", at["dtype"]), "table": "a2"} | change
    options = {"device": "meta", "dtype": at["dtype"]}
    wide, shape = 2 * at["inner"], (at["experts"], at["hidden"], at["inner"])
    first = torch.empty(at["experts"], wide, at["hidden"], device="meta", dtype=at["weight"])
    first = first.mT.contiguous().mT if at.get("turned") else first
    down = torch.empty(shape, **options)
    down = (
        torch.empty((*shape[:2], 2 * shape[2]), **options)[..., ::2] if at.get("strided") else down
    )
    x = torch.empty(at["rows"], at["hidden"], **options)
    index = torch.empty(at["rows"], at["per"], dtype=torch.int64, device="meta")
    assert says(limits.experts(x, index, first, down, wide, at["table"]), refusal)


# --- levels ---


def test_ascend_level_of_operators():
    """An operator without a kernel of its own has nothing that could be compiled."""
    assert levels.level("rms_norm") == levels.level("selective_scan") == levels.COMPILED
    assert levels.level("rms_norm_rope") == levels.SIMULATED  # by two other operators
    assert levels.level("fused_moe") == levels.SIMULATED  # by torch_npu
    assert levels.level("softmax") == levels.SIMULATED
    assert levels.source("softmax") is None


@pytest.mark.parametrize("driver", ["Kernel Module", "Open Kernel Module for x86_64"])
def test_nvidia_driver_version(driver, monkeypatch, tmp_path):
    from liger_multi.backends import cuda

    path = tmp_path / "version"
    path.write_text(f"NVRM version: NVIDIA UNIX {driver}  580.95.05  Release Build\nGCC 13\n")
    monkeypatch.setattr(cuda, "DRIVER", path)
    assert cuda.BACKEND.describe()["driver"] == "580.95.05"
