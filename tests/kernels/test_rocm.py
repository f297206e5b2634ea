"""AMD without a card: fake devices of five architectures, in waves of 64 and of 32."""

import re
import types
from pathlib import Path

import pytest
import torch
import yaml

from ci import layering
from liger_multi.backends.rocm import BACKEND, SIBLINGS
from liger_multi.dispatch import launch, registry
from liger_multi.errors import ConfigurationError
from tests import harness

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
        gcnArchName=name, warp_size=wave, shared_memory_per_block=lds, multi_processor_count=cores,
        major=9, minor=4,
    )  # fmt: skip
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
    monkeypatch.setattr(launch, "_found", {})
    return name.partition(":")[0]


def test_a_rocm_build_is_served_by_rocm_alone(card):
    assert [record.name for record in registry.serving("cuda")] == ["rocm"]
    assert registry.unavailable("cuda") == "needs a CUDA build of PyTorch"


def test_limits_are_the_device_s(card):
    _, wave, lds, cores = CARDS[card]
    info = launch.device_info(DEVICE)
    assert (info.backend, info.arch, info.table) == ("rocm", card, card)
    assert (info.warp_size, info.max_threads, info.shared_bytes) == (wave, 1024, lds)
    assert info.cores == cores
    assert f"waves of {wave}" in BACKEND.describe()["cuda:0"]


def test_a_machine_without_a_card_says_so(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", None)
    assert BACKEND.probe() == "needs a ROCm build of PyTorch"
    monkeypatch.setattr(torch.version, "hip", "7.2.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert BACKEND.probe() == "PyTorch sees no ROCm device"


@pytest.mark.parametrize(("arch", "table"), SIBLINGS.items())
def test_an_architecture_without_a_table_takes_that_of_its_sibling(monkeypatch, arch, table):
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
    from ci.static import static_cases
    from ci.static.cases import calls

    return card, static_cases(launch.device_info(DEVICE), calls())


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
        tile = case.constants.get("ROWS", 1) * case.constants.get("BLOCK", 1)
        assert tile <= 32768, f"{case.name} ({case.label}): {tile} elements a tile"
        if case.constants.get("ROWS", 1) > 1:  # as_rows promises as much, see assume_rows
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
    from liger_multi.backends.triton.cross_entropy.operators import scale_config
    from liger_multi.backends.triton.norms import row_config

    plug(monkeypatch, "gfx1234", wave, 65536, 40)
    info = launch.device_info(DEVICE)
    for cols in (1, 2, 16, 17):
        for k in (
            row_config.forward_config(info, 1, cols),
            row_config.backward_config(info, 1, cols, 4),
            cross_entropy.row_config(info, 1, cols, 1), gated.tile_config(info, 1, cols),
            scale_config(info, 1, cols),
        ):  # fmt: skip
            assert k.num_warps >= 1


# --- launch tables ---

TABLES = {path.stem: path for path in (ROOT / "backends" / "rocm" / "launch").glob("*.yaml")}


def test_every_architecture_has_a_table():
    assert sorted(TABLES) == sorted(CARDS)


@pytest.mark.parametrize("arch", CARDS)
def test_every_entry_says_where_its_numbers_come_from(arch):
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
def test_habits_that_other_cards_punish(tmp_path, path, source, said):
    (tmp_path / path).parent.mkdir(parents=True)
    (tmp_path / path).write_text(f'"""A file."""\n{source}')
    found = [str(f) for f in layering.portable(layering.Tree(tmp_path))]
    assert len(found) == bool(said)
    assert said in "".join(found)
