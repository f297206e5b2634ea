"""The suite passes on any CPU: bounds of comparisons follow from what fp32 resolves."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ci import portable, results
from tests.comparing import ULPS, assert_same_gradients, difference

ROOT = Path(__file__).parents[2]
EPS = torch.finfo(torch.float32).eps


def gradients(scale=1.0):
    """Of a model whose keys' bias has none but rounding."""
    made = torch.Generator().manual_seed(0)
    found = {
        name: scale * torch.randn(5, 7, generator=made) * size
        for name, size in (("head", 1.0), ("value", 0.1), ("norm", 1e-3))
    }
    return {**found, "key.bias": scale * 1e-8 * torch.randn(7, generator=made)}


# --- the bound of a gradient ---


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e9])
def test_a_gradient_that_cancels_has_the_resolution_of_the_model(scale):
    """It was compared with its own largest entry and 1e-9, and failed on other CPUs."""
    wanted = gradients(scale)
    other = {**wanted, "key.bias": -wanted["key.bias"]}
    assert difference(other, wanted) == ""
    assert difference({"key.bias": other["key.bias"]}, {"key.bias": wanted["key.bias"]})
    off = 2 * ULPS * EPS * wanted["head"].abs().max()
    assert difference({**wanted, "key.bias": wanted["key.bias"] + off}, wanted)


@pytest.mark.parametrize(("name", "by"), [("head", 1e-4), ("value", 1e-4), ("norm", 2e-3)])
@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e9])
def test_a_wrong_gradient_is_seen_at_every_scale(scale, name, by):
    wanted = gradients(scale)
    other = {**wanted, name: wanted[name] * (1 + by)}
    assert difference(other, wanted).startswith(f"{name}: ")
    assert difference({n: g for n, g in wanted.items() if n != name}, wanted)
    assert difference({**wanted, name: wanted[name].double()}, wanted)
    assert difference({**wanted, name: wanted[name] * float("nan")}, wanted)


def test_a_model_without_gradients_proves_nothing():
    with pytest.raises(AssertionError):
        assert_same_gradients([None], [None])


def test_gradients_that_cancel_pass_without_vector_instructions():
    """Attention of a first position gives its queries no gradient, in exact arithmetic."""
    pytest.importorskip("transformers")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "tests/patching/test_patching.py",
            "-k",
            "custom_loss_on",
        ],
        cwd=ROOT,
        env={**os.environ, "ATEN_CPU_CAPABILITY": "default", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout


# --- `make test-portable` ---

FLAGS = {"sse4_1", "sse4_2", "avx2", "avx512f", "avx512bw"}


def test_the_rows_have_every_value():
    def values(name):
        return {getattr(setting, name) for setting in portable.SETTINGS}

    assert len(portable.SETTINGS) == 6
    assert values("aten") == {"default", "avx2", "avx512"}
    assert values("mkl") == {"SSE4_2", "AVX2", "AVX512"}
    assert values("onednn") == {"SSE41", "AVX2", "AVX512_CORE"}
    assert values("threads") == {1, 2, 4}
    assert len(values("seed")) == 3
    pairs = {(s.aten, s.mkl) for s in portable.SETTINGS}
    assert len(pairs) == 6, "no two rows are one"


def test_what_a_processor_lacks_is_named(tmp_path):
    old = FLAGS - {"avx512f", "avx512bw"}
    refused = [setting.refusal(old) for setting in portable.SETTINGS]
    assert refused[1] is None
    assert refused[2] == "this processor has no avx512bw, avx512f"
    assert not any(setting.refusal(FLAGS) for setting in portable.SETTINGS)
    file = tmp_path / "cpuinfo"
    file.write_text("processor : 0\nflags\t\t: fpu avx2 sse4_1\n")
    assert portable.flags(file) <= {"fpu", "avx2", "sse4_1"}
    assert portable.flags(tmp_path / "none") == set()


def test_one_result_has_every_row(tmp_path, monkeypatch, capsys):
    ran = []

    def run(setting, arguments):
        ran.append((setting.seed, arguments))
        red = setting.aten == "avx2"
        counts = {"passed": 5, **({"failed": 1} if red else {})}
        return results.Result(
            "native", [], {}, {}, "abc", "2026", counts, 1.0, failures=["a::b"] * red
        )

    monkeypatch.setattr(portable, "flags", lambda: FLAGS - {"avx512f"})
    monkeypatch.setattr(portable, "run", run)
    assert portable.main([str(tmp_path / "portable.json"), "--rows", "1,2,3", "-k", "x"]) == 1
    assert ran == [(1, ["-k", "x"]), (2, ["-k", "x"])]
    (found,) = results.read(tmp_path)
    assert found.part == "portable"
    assert found.counts == {"passed": 10, "failed": 1}
    assert found.failures == [f"a::b ({portable.SETTINGS[1].name})"]
    assert list(found.settings.values()) == [
        "5 passed", "**5 passed, 1 failed**", "not run: this processor has no avx512f",
    ]  # fmt: skip
    assert "not run: this processor has no avx512f" in capsys.readouterr().out
    assert portable.main([str(tmp_path / "portable.json"), "--rows", "1"]) == 0
    assert portable.main([str(tmp_path / "portable.json"), "--rows", "3"]) == 1, "nothing ran"


def test_a_row_is_a_run_of_the_suite_under_its_settings(tmp_path):
    pytest.importorskip("pytest_randomly")
    for name in ("conftest.py", "thinned.yaml"):
        (tmp_path / name).write_text((ROOT / "tests" / name).read_text())
    suite = tmp_path / "test_settings.py"
    suite.write_text(
        "import os, torch\n"
        "def test_threads(): assert torch.get_num_threads() == 2\n"
        "def test_aten(): assert torch.backends.cpu.get_cpu_capability() == 'DEFAULT'\n"
        "def test_mkl(): assert os.environ['MKL_ENABLE_INSTRUCTIONS'] == 'SSE4_2'\n"
    )
    setting = portable.Setting("default", "SSE4_2", "SSE41", 2, 1)
    found = portable.run(setting, [str(suite)])
    assert found.counts == {"passed": 3}


# --- flakes ---

TESTS = Path(__file__).parents[1]


def test_no_test_chooses_a_port_and_releases_it():
    """Somebody else could take it before the ranks of the test do: they meet in a file."""
    for path in [*TESTS.rglob("*.py"), *TESTS.parent.glob("examples/*.py")]:
        text = path.read_text(encoding="utf-8")
        if path.name == Path(__file__).name:
            continue
        assert not re.search(r"getsockname|tcp://|MASTER_PORT|free_port", text), path.name


def test_no_test_ends_a_process_that_is_only_slow():
    """The demo was given five minutes, and took more beside other work."""
    for path in TESTS.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        found = re.findall(r"timeout=(\w[\w.]*)|\.join\((\d[\d.]*)\)", text)
        assert all(limit.endswith("PATIENCE") for limit, _ in found if limit), path.name
        assert not any(limit for _, limit in found), path.name
