"""``liger_multi.testing``: the formula library, and the suite as a vendor runs it.

The guide for a new operator (three files and one line) is taken from its page and run.
"""

import inspect
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from liger_multi import ops
from liger_multi.bench.peers import EAGER, TABLE
from liger_multi.dispatch.registry import operators
from liger_multi.testing import FORMULAS, check_operator, checks, samples
from tests import harness

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
VENDOR = (ROOT / "docs" / "backends.md").read_text(encoding="utf-8")


# --- formulas ---


def test_every_operator_has_a_formula():
    assert set(FORMULAS) == set(operators())
    assert FORMULAS["kl_div_inplace"] is samples.contract("kl_div").formula


@pytest.mark.parametrize("op", operators())
def test_a_formula_has_the_signature_of_the_public_function(op):
    public = getattr(ops, samples.public(op))
    of_public = inspect.signature(public).parameters
    more = {name for name in samples.RICHER if name not in of_public}
    if more & {"quantize"}:  # which takes the names of what it returns
        more.add("outputs")

    def arguments(function):
        every = []
        for p in inspect.signature(function).parameters.values():
            if p.name.endswith("_lora"):  # formulas take the parts of an adapter
                layer = p.name.removesuffix("_lora")
                every += [(f"{layer}_{part}", p.kind, None) for part in "ab"]
                every.append((f"{layer}_scale", p.KEYWORD_ONLY, 1.0))
            elif p.name not in more:
                every.append((p.name, p.kind, p.default))
        by_name = {name: default for name, kind, default in every if kind is p.KEYWORD_ONLY}
        return [a[0] for a in every if a[1] is p.POSITIONAL_OR_KEYWORD], by_name

    (first, defaults), (of_first, of_public) = arguments(FORMULAS[op]), arguments(public)
    assert first == of_first
    any_more = inspect.getfullargspec(FORMULAS[op]).varkw  # of several operators
    shared = defaults.keys() & of_public if any_more else defaults.keys() | of_public
    assert {n: defaults[n] for n in shared} == {n: of_public[n] for n in shared}


def test_benchmark_times_the_formula():
    for op, providers in TABLE.items():
        assert providers["torch"] is EAGER.get(op, FORMULAS[op])
    assert set(EAGER) < set(FORMULAS)


def test_documents_and_the_places_where_they_begin_are_one_mask():
    q, k, v = (torch.randn(1, 2, 9, 4, dtype=torch.float64) for _ in range(3))
    ids = torch.tensor([[0, 0, 0, 1, 1, 1, 1, -1, -1]])
    by_ids = FORMULAS["attention"](q, k, v, causal=True, documents=ids)
    by_starts = FORMULAS["attention"](q, k, v, causal=True, cu_seqlens=torch.tensor([0, 3, 7]))
    assert torch.equal(by_ids, by_starts)
    assert not by_ids[:, :, 7:].any()


def test_many_scores_are_made_a_head_at_a_time(monkeypatch):
    attention = samples.contract("attention")
    tensors = [torch.randn(1, h, 8, 4, dtype=torch.float64, requires_grad=True) for h in (4, 2, 2)]
    results = []
    for most in (attention.MOST_SCORES, 1):
        monkeypatch.setattr(attention, "MOST_SCORES", most)
        y = attention.formula(*tensors, causal=True)
        results.append((y, *torch.autograd.grad(y.square().sum(), tensors)))
    torch.testing.assert_close(*results)


# --- one operator ---


def test_check_operator_says_how_many_calls_it_compared():
    outcome = check_operator("softmax", "reference", dtypes=(torch.float32,))
    expected = [s for s in samples.of("softmax") if s.size != "bench"]
    assert outcome.compared == len(expected)
    assert not outcome.refused


@pytest.mark.parametrize(
    ("op", "backend", "text"),
    [
        ("sotfmax", "reference", "unknown operator 'sotfmax'; did you mean 'softmax'"),
        ("softmax", "referense", "unknown backend 'referense'; did you mean 'reference'"),
        ("fused_moe", "pytorch", "pytorch does not implement fused_moe"),
    ],
)
def test_check_operator_refuses_what_it_cannot_compare(op, backend, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        check_operator(op, backend)


def test_a_device_without_fp64_is_compared_on_the_cpu(monkeypatch):
    """On the meta device as a replica, which computes nothing."""
    assert checks.reference_device(torch.device("cpu")) == torch.device("cpu")
    ones = torch.ones

    def without_fp64(*size, dtype=None, device=None):
        if dtype is torch.float64 and device == torch.device("meta"):
            raise TypeError("Cannot convert a tensor to float64 as the framework does not")
        return ones(*size, dtype=dtype, device=device)

    monkeypatch.setattr(torch, "ones", without_fp64)
    checks.reference_device.cache_clear()
    assert checks.reference_device(torch.device("meta")) == torch.device("cpu")
    monkeypatch.undo()
    checks.reference_device.cache_clear()


@pytest.mark.slow
def test_importing_loads_neither_formulas_nor_pytest():
    code = (
        "import sys, liger_multi, liger_multi.testing\n"
        "from liger_multi.testing import Sample, samples\n"
        "heavy = ('pytest', 'liger_multi.testing.checks')\n"
        "sys.exit(', '.join(n for n in heavy if n in sys.modules) or 0)"
    )
    harness.python("-c", code)


@pytest.mark.slow
def test_a_wrong_result_is_found_without_assertions():
    """``python -O`` removes assert statements; the comparison is none."""
    code = (
        "import torch\n"
        "from liger_multi.reference.activations import relu_squared\n"
        "from liger_multi.testing import check_operator\n"
        "right = relu_squared.forward\n"
        "def forward(x: torch.Tensor) -> torch.Tensor:\n"
        "    return right(x) * 1.5\n"
        "relu_squared.forward = forward\n"
        "try:\n"
        "    check_operator('relu_squared', 'reference')\n"
        "except AssertionError as error:\n"
        "    print(error)\n"
    )
    done = harness.python("-O", "-c", code)
    assert "errors in units of the tolerance" in done.stdout, done.stdout + done.stderr


# --- the example of the page ---


def blocks():
    """The files of the page by their path, which stands in the first line of each."""
    matches = re.findall(r"^```\w+\n# ([\w./-]+\.\w+)\n(.*?)^```", VENDOR, re.DOTALL | re.MULTILINE)
    return dict(matches)


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The example, installed by path."""
    project, site = tmp_path_factory.mktemp("project"), tmp_path_factory.mktemp("site")
    for path, text in blocks().items():
        (project / path).parent.mkdir(parents=True, exist_ok=True)
        (project / path).write_text(text)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    pip += ["--no-build-isolation", "--no-compile", "--target", str(site), str(project)]
    done = subprocess.run(pip, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return site


@pytest.fixture
def toy(installed, tmp_path):
    """A run of the suite on a copy of the installed example, in a fresh process."""
    site = tmp_path / "site"
    shutil.copytree(installed, site)
    clash = "def pytest_addoption(parser):\n    parser.addoption('--backend')\n"
    (tmp_path / "conftest.py").write_text(clash)  # a vendor's own tests have one

    def run(*arguments, module="liger_multi.testing"):
        return harness.python("-m", module, *arguments, cwd=tmp_path, path=[site], code=None)

    run.site, run.folder = site, tmp_path
    return run


def counts(done):
    """Counts by outcome from the last line of pytest."""
    return {
        outcome: int(n)
        for n, outcome in re.findall(r"(\d+) (passed|failed|xfailed|skipped)", done.stdout)
    }


QUIET = ["-q", "-p", "no:cacheprovider", "-p", "no:randomly"]


@pytest.mark.slow
def test_the_suite_runs_on_an_installed_backend(toy):
    done = toy("--backend", "toy", *QUIET)
    assert done.returncode == 0, done.stdout + done.stderr
    small = [s for s in samples.of("softmax") if s.size == "small"]
    thin = [s for s in samples.of("softmax") if s.size == "thin"]
    # three dtypes, both mixtures and the promised bits of every small sample; the others in one
    # dtype; no operator of this backend has several outputs
    assert counts(done) == {"passed": 5 * len(small) + len(thin), "skipped": 1}


PLANTED = {
    "a wrong gradient": ("upstream - (wide * upstream)", "upstream - 0.99 * (wide * upstream)"),
    "a wrong result": ("wide.amax(-1, keepdim=True)).exp()", "wide.amax()).exp() + 1e-3"),
    "an input that is written to": ("wide = x.to(", "x.mul_(2)\n    wide = x.to("),
    "memory that is not filled": (
        "return dx.to(dy.dtype).contiguous()",
        "out = torch.empty_like(dy)\n    out[..., 1:] = dx[..., 1:].to(dy.dtype)\n    return out",
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_fails(toy, name):
    expected, wrong = PLANTED[name]
    file = toy.site / "toy_backend" / "softmax.py"
    text = file.read_text()
    assert expected in text
    file.write_text(text.replace(expected, wrong, 1))
    done = toy("--backend", "toy", *QUIET, "-k", "float32 and not past")
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr
    assert counts(done)["failed"] > 0


@pytest.mark.slow
def test_expected_failures(toy):
    file = toy.site / "toy_backend" / "softmax.py"
    text = file.read_text()
    rounded = "wide = x.to(torch.bfloat16).to(torch.promote_types(x.dtype, torch.float32))"
    start = "wide = x.to(torch.promote_types(x.dtype, torch.float32))"
    assert start in text
    file.write_text(text.replace(start, rounded))  # right in bf16 alone
    only = ["-k", "rows-1-float32 or rows-2-float32"]
    known = toy.folder / "toy-failures.txt"
    known.write_text(
        "test_gone[*]  # renamed\n"
        "test_forward_and_backward[softmax-toy-*-float32]  # rounds its inputs\n"
    )
    only += ["--expected-failures", str(known)]
    done = toy("--backend", "toy", *QUIET, *only)
    assert done.returncode == 0, done.stdout
    assert counts(done) == {"xfailed": 2}
    assert "means no test: test_gone[*]" in done.stdout
    file.write_text(text)
    done = toy("--backend", "toy", *QUIET, *only)
    assert counts(done) == {"failed": 2}, "an unexpected pass fails"
    assert "XPASS(strict)" in done.stdout


@pytest.mark.slow
def test_a_refusal_is_a_skip_with_its_reason(toy):
    file = toy.site / "toy_backend" / "softmax.py"
    refusing = "\n\ndef supports(direction: str) -> str | None:\n    return 'is never ready'\n"
    file.write_text(file.read_text() + refusing)
    done = toy("--backend", "toy", *QUIET, "-rs", "-k", "float32 and not past")
    assert done.returncode == 0, done.stdout
    assert counts(done).keys() == {"skipped"}
    assert "is never ready" in done.stdout


@pytest.mark.slow
def test_reference_completes_a_forward_only_backend(toy):
    file = toy.site / "toy_backend" / "softmax.py"
    file.write_text(file.read_text().partition("def backward")[0])
    done = toy("--backend", "toy", *QUIET, "-k", "float32 and not past")
    assert done.returncode == 0, done.stdout
    assert counts(done)["passed"] > 10
    file.write_text(file.read_text().replace("sum(-1", "sum(0"))
    done = toy("--backend", "toy", *QUIET, "-k", "float32 and not past")
    assert done.returncode == pytest.ExitCode.TESTS_FAILED


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "--backend NAME is needed"),
        (["--backend", "tyo"], "unknown backend 'tyo'; did you mean 'toy'"),
    ],
)
def test_wrong_options_are_refused(toy, arguments, text):
    done = toy(*arguments)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert text in done.stderr


@pytest.mark.slow
def test_the_suite_by_the_command_of_pytest(toy):
    (command,) = re.findall(r"`(pytest --noconftest [^`]*)`", VENDOR)
    done = toy(*command.split()[1:], *QUIET, "-k", "rows and float32", module="pytest")
    assert done.returncode == 0, done.stdout + done.stderr
    assert counts(done)["passed"] > 0


@pytest.mark.slow
def test_the_python_of_the_page_runs(toy):
    (block,) = [
        b for b in re.findall(r"^```python\n(.*?)^```", VENDOR, re.S | re.M) if "outcome" in b
    ]
    script = toy.folder / "by_hand.py"
    script.write_text(block + "import json, sys\nsys.stdout.write(json.dumps(exact.shape))\n")
    done = harness.python(script, path=[toy.site])
    compared, shape = done.stdout.strip().splitlines()
    assert int(compared.split()[0]) > 40
    assert json.loads(shape)


# --- the guide for a new operator ---

OPERATOR = GUIDE
EXPORTS = "liger_multi/ops/__init__.py"


def messages():
    """The files of the guide with their text, and the line."""
    files = re.findall(
        r"^\*\*[^`]*`([\w/]+\.py)`\*\*.*?^```python\n(.*?)^```", OPERATOR, re.M | re.S
    )
    line = re.search(rf"`{EXPORTS}`:\n+```python\n(.*?)```", OPERATOR, re.S)[1]
    return dict(files), line


@pytest.fixture
def extended(tmp_path):
    """A copy of the package and its suite, with the operator."""
    for folder in ("liger_multi", "backends", "reference", "tests"):
        ignored = shutil.ignore_patterns(
            "__pycache__", "sweep", *["backends", "reference"] * (folder == "liger_multi")
        )
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignored)
    for folder in ("backends", "reference"):
        (tmp_path / "liger_multi" / folder).symlink_to(tmp_path / folder)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    files, line = messages()
    for name, text in files.items():
        assert not (tmp_path / name).exists(), f"{name} is no new file"
        (tmp_path / name).write_text(text, encoding="utf-8")
    exports = tmp_path / EXPORTS
    first, mark, rest = exports.read_text(encoding="utf-8").partition(
        "from liger_multi.ops.softmax "
    )
    exports.write_text(first + line + mark + rest, encoding="utf-8")
    return tmp_path


def test_an_operator_is_three_files_and_one_line():
    files, line = messages()
    assert [name.rpartition("/")[0] for name in files] == [
        "liger_multi/ops",
        "reference/activations",
        "backends/triton/activations",
    ]
    assert line.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_the_suite_runs_the_operator_of_the_guide(extended, backend):
    """Against fp64 on a backend, and what every contract promises."""
    if backend == "triton":
        pytest.importorskip("triton")
    files = ["tests/ops/test_ops.py"] + ["tests/ops/test_contracts.py"] * (backend == "reference")
    kernels = {"TRITON_INTERPRET": "1"} if backend == "triton" else {}
    options = ("-q", "-p", "no:cacheprovider", "-k", "tanh_glu", "--backend", backend)
    done = harness.python(
        "-m", "pytest", *options, *files, cwd=extended, path=[extended], **kernels
    )
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) >= 14, done.stdout[-500:]
