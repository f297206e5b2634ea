"""What an install holds: wheel, sdist, zip of the checkout and editable, in fresh environments.

Only the packages' own files are in question, so the environments see this interpreter's PyTorch.
"""

import importlib.util
import os
import re
import shutil
import site
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
import yaml

from liger_multi.demo import command

ROOT = Path(__file__).parents[2]
FOLDERS = {
    "liger_multi": "liger_multi",
    "backends": "liger_multi/backends",
    "reference": "liger_multi/reference",
}
LAUNCH = "backends/cuda/launch/packaging-test.yaml"
ADDRESS = "https://forge.example/owner/name"
SKIP = {
    ".git",
    ".venv",
    ".cache",
    "build",
    "dist",
    "__pycache__",
    "demo-output",
    ".mypy_cache",
    ".ruff_cache",
    ".editable",
}

CALL = """
import importlib.resources, importlib.util, sys
import torch, liger_multi
from liger_multi import ops

origin = liger_multi.__file__
assert {inside!r} in origin, origin
assert liger_multi.__version__ == {version!r}
x = torch.ones(3, 8, requires_grad=True)
ops.rms_norm(x, torch.ones(8)).sum().backward()
assert x.grad is not None
for name in ("backends.triton", "backends.cuda", "reference.norms.rms_norm", "patching", "cli",
             "testing.suite.test_operators"):
    assert importlib.util.find_spec("liger_multi." + name), name
assert importlib.resources.files("liger_multi").joinpath("py.typed").is_file()
launch = importlib.resources.files("liger_multi.backends.cuda").joinpath("launch")
assert launch.joinpath("packaging-test.yaml").is_file()
for name in ("backends", "reference", "benchmarks", "ci", "tests"):
    assert importlib.util.find_spec(name) is None, name + " is installed at the top"
print("complete")
"""

TYPED = """
import torch
from typing_extensions import assert_type

import liger_multi
from liger_multi import ops
from liger_multi.patching import PatchReport


def promised(x: torch.Tensor) -> None:
    assert_type(ops.cross_entropy(x, x), torch.Tensor)
    assert_type(liger_multi.patch("llama"), PatchReport)
"""
"""What a type checker sees after an editable install, without any configuration."""


def run(*command, cwd, **environment):
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHONPATH", "VIRTUAL_ENV"))}
    done = subprocess.run(
        [str(c) for c in command],
        cwd=cwd,
        env={**env, **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def version():
    scope = {}
    exec((ROOT / "liger_multi" / "_version.py").read_text(), scope)
    return scope["__version__"]


@pytest.fixture(scope="session")
def checkout(tmp_path_factory):
    """A copy of this checkout as a clone has it, without links, with a table that must ship."""
    clone = tmp_path_factory.mktemp("clone") / "liger_multi-clone"

    def skip(folder, names):
        return {
            n
            for n in names
            if n in SKIP or n.endswith(".egg-info") or (Path(folder) / n).is_symlink()
        }

    shutil.copytree(ROOT, clone, ignore=skip)
    (clone / LAUNCH).parent.mkdir(exist_ok=True)
    (clone / LAUNCH).write_text("entries: {}\n")
    return clone


@pytest.fixture(scope="session")
def artefacts(checkout, tmp_path_factory):
    """The sdist, the wheel made from it, and what building said."""
    out = tmp_path_factory.mktemp("dist")
    text = run(
        *(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, checkout),
        cwd=out,
        REPOSITORY=f"{ADDRESS}/",
        PYTHONDONTWRITEBYTECODE="",
        PYTHONWARNINGS="default",
    )
    return {"sdist": next(out.glob("*.tar.gz")), "wheel": next(out.glob("*.whl")), "said": text}


def metadata(artefacts):
    """The headers of the wheel's metadata, and the readme."""
    with zipfile.ZipFile(artefacts["wheel"]) as wheel:
        text = wheel.read(next(n for n in wheel.namelist() if n.endswith("METADATA"))).decode()
    headers, _, readme = text.partition("\n\n")
    return headers.splitlines(), readme


@pytest.fixture
def fresh(tmp_path):
    """An environment that borrows this interpreter's packages, but for this library."""
    env = tmp_path / "env"
    venv.create(env, with_pip=False, symlinks=True)
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    own = Path(run(env / "bin" / "python", "-c", ask, cwd=tmp_path).strip())
    # by path, after the environment's own: the finders of an editable install of this checkout stay
    # behind, since an appended path runs no .pth files
    (own / "borrowed.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    (env / "bin" / "pip").write_text('#!/bin/sh\nexec python -m pip "$@"\n')
    (env / "bin" / "pip").chmod(0o755)
    return env


def sources(checkout):
    """Every file below the three folders that an install needs, by its installed path."""
    for folder, package in FOLDERS.items():
        for path in (checkout / folder).rglob("*"):
            if path.suffix in (".py", ".yaml", ".typed"):
                yield f"{package}/{path.relative_to(checkout / folder).as_posix()}"


@pytest.mark.slow
def test_the_wheel_holds_every_source_file_and_nothing_else(checkout, artefacts):
    with zipfile.ZipFile(artefacts["wheel"]) as wheel:
        names = {n for n in wheel.namelist() if ".dist-info/" not in n}
    files = set(sources(checkout))
    added = {f"{f.rpartition('/')[0]}/__init__.py" for f in files if f.endswith(".py")}
    assert names == files | added
    assert f"-{version()}-py3-none-any" in artefacts["wheel"].name


@pytest.mark.slow
def test_the_wheel_is_imported_from_its_zip(artefacts, tmp_path):
    names = ("backends.triton", "reference.norms.rms_norm", "patching.norms", "cli.main")
    code = "import importlib.util, torch\nfrom liger_multi import ops\n"
    code += "ops.rms_norm(torch.ones(3, 8), torch.ones(8))\n"
    code += f"assert all(importlib.util.find_spec('liger_multi.' + n) for n in {names})"
    run(sys.executable, "-c", code, cwd=tmp_path, PYTHONPATH=str(artefacts["wheel"]))


@pytest.mark.slow
def test_the_sdist_holds_sources_tests_and_licence(checkout, artefacts):
    with tarfile.open(artefacts["sdist"]) as sdist:
        names = {n.partition("/")[2] for n in sdist.getnames()}
    for folder in FOLDERS:
        files = {p.relative_to(checkout).as_posix() for p in (checkout / folder).rglob("*.py")}
        assert files <= names
    assert {
        LAUNCH,
        "LICENSE",
        "README.md",
        "Makefile",
        "tests/conftest.py",
        "ci/layering.py",
    } <= names
    left = [n for n in names if n.startswith("benchmarks/results")]
    assert not left, "what was measured stays in the repository"
    for page in (checkout / "README.md", *(checkout / "docs").glob("*.md")):
        folder = page.relative_to(checkout).parent
        for link in re.findall(r"!\[[^\]]*\]\(([^):]+)\)", page.read_text(encoding="utf-8")):
            assert (folder / link).as_posix() in names, f"{page.name} shows {link}"
    assert {f"examples/{p.name}" for p in (checkout / "examples").glob("*.*")} <= names


@pytest.mark.slow
def test_building_warns_of_nothing(artefacts):
    lines = artefacts["said"].splitlines()
    assert not [line for line in lines if re.search("(?i)warn|deprecat", line)]


@pytest.mark.slow
def test_readme_links_on_the_package_index(artefacts):
    headers, readme = metadata(artefacts)
    pages = [h.rpartition(", ")[2] for h in headers if h.startswith("Project-URL: ")]
    assert len(pages) == 4
    assert all(page.startswith(ADDRESS) and "//" not in page[8:] for page in pages)
    assert "Author: The liger_multi authors" in headers
    assert f"]({ADDRESS}/blob/HEAD/docs/ascend.md)" in readme
    assert f"]({ADDRESS}/raw/HEAD/docs/headline.png)" in readme
    targets = re.findall(r"\]\(([^)]+)\)", readme)
    assert targets
    assert all(t.startswith(("https://", "#")) for t in targets)


@pytest.mark.slow
def test_the_metadata_asks_for_torch_and_yaml_only(artefacts):
    lines, _ = metadata(artefacts)
    needs = [n.removeprefix("Requires-Dist: ") for n in lines if n.startswith("Requires-Dist: ")]
    assert sorted(n for n in needs if "extra ==" not in n) == ["PyYAML>=6", "torch>=2.9"]
    extras = {n.removeprefix("Provides-Extra: ") for n in lines if n.startswith("Provides-Extra: ")}
    assert extras == {"triton", "cuda", "rocm", "npu", "transformers", "cli", "test", "docs"}
    assert "License-Expression: Apache-2.0" in lines


def zipped(checkout, folder):
    """A zip of the checkout, as a forge serves it: one top folder, no links."""
    archive_path = folder / "liger_multi-main.zip"
    with zipfile.ZipFile(archive_path, "w") as archive:
        for path in checkout.rglob("*"):
            if path.is_file() and not path.is_symlink() and not SKIP & set(path.parts):
                archive.write(path, Path("liger_multi-main") / path.relative_to(checkout))
    return archive_path


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["wheel", "sdist", "zip", "editable"])
def test_an_install_is_complete(variant, checkout, artefacts, fresh, tmp_path):
    where = {"editable": lambda: ["-e", checkout], "zip": lambda: [zipped(checkout, tmp_path)]}
    target = where.get(variant, lambda: [artefacts[variant]])()
    python = fresh / "bin" / "python"
    pip = [
        python,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
    ]
    run(*pip, "--ignore-installed", *target, cwd=tmp_path)
    inside = str(checkout if variant == "editable" else fresh)
    outside = tmp_path / "elsewhere"
    outside.mkdir()
    call = CALL.format(inside=inside, version=version())
    assert run(python, "-c", call, cwd=outside, OMP_NUM_THREADS="1").strip() == "complete"
    if variant == "wheel" and all(map(importlib.util.find_spec, command.NEEDED)):
        demo = ["demo", "--quick", "--steps", "1", "--models", "qwen2", "--device", "cpu"]
        run(fresh / "bin" / "liger-multi", *demo, cwd=outside, OMP_NUM_THREADS="1")
        assert (outside / "demo-output" / "demo.png").stat().st_size
    if variant == "editable":
        assert (checkout / "liger_multi" / "backends").is_symlink()
        assert (checkout / "liger_multi" / "reference").is_symlink()
        (outside / "code.py").write_text(TYPED)
        for checker in ("mypy", "pyright"):
            if importlib.util.find_spec(checker) is None:
                continue
            strict = ["--strict"] if checker == "mypy" else ["--pythonpath", python]
            run(python, "-m", checker, *strict, "code.py", cwd=outside)


@pytest.mark.slow
def test_from_clone_to_a_trainer_by_the_first_page(checkout, fresh, tmp_path):
    """README's commands in their order in an empty folder; only names of what is elsewhere differ.

    The clone is a copy, the packages that pip would fetch are borrowed, and a small model stands
    for the one of the Hub.
    """
    transformers = pytest.importorskip("transformers")
    from tests.models import tokenizer

    page = (ROOT / "README.md").read_text(encoding="utf-8")
    prose = re.sub(r"^```.*?^```", "", page, flags=re.S | re.M)
    commands = [line.strip() for line in re.findall(r"^    \S.*$", prose, re.M)]
    # first of all stand the two commands of a fresh machine, in a clone
    assert [c.split()[:2] for c in commands[:2]] == [["make", "demo"], ["make", "test"]]
    commands = commands[2:]
    assert [c.split()[0] for c in commands] == ["git", "pip", *["liger-multi"] * 4]
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.S | re.M)
    block = next(b for b in blocks if "TrainingArguments" in b)
    desk = tmp_path / "desk"
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=16384,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(desk / "small")
    tokenizer().save_pretrained(desk / "small")
    (desk / "train.txt").write_text("one two three four\n" * 4)
    shown = (
        "print(next(c for c in trainer.callback_handler.callbacks if 'report' in dir(c)).report)"
    )
    block = block.replace("Qwen/Qwen2.5-0.5B", str(desk / "small"))
    (desk / "train.py").write_text(block + shown)
    clone = commands[0].replace("git clone ADDRESS-OF-THIS-REPOSITORY", f"cp -r {checkout}")
    assert clone != commands[0]
    install, doctor, verify, *memory = commands[1:]
    steps = [
        clone,
        install,
        doctor,
        f"{verify.partition('#')[0]} --ops rms_norm",  # all of them have a test of their own
        f"cd {desk}",
        "python train.py",
        "cp small/config.json .",
        *memory,
    ]
    offline = {"PIP_NO_DEPS": "1", "PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0"}
    path = f"{fresh / 'bin'}:{os.environ['PATH']}"
    script = "set -e\n" + "\n".join(steps)
    text = run(
        "bash",
        "-c",
        script,
        cwd=tmp_path,
        PATH=path,
        HF_HUB_OFFLINE="1",
        OMP_NUM_THREADS="1",
        **offline,
    )
    assert "patch LlamaForCausalLM" in text
    assert "'train_loss'" in text


@pytest.fixture
def project():
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_version_stands_in_one_place(project):
    assert "version" not in project
    assert "version" in project["dynamic"]
    assert version() not in (ROOT / "pyproject.toml").read_text()


def test_the_authors_are_those_that_are_cited(project):
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert project["authors"] == cited["authors"]
    assert cited["version"] == version()
    assert cited["license"] == project["license"]


def test_no_extra_replaces_the_pytorch_of_a_vendor(project):
    extras = project["optional-dependencies"]
    assert extras["rocm"] == []
    assert not any(n.startswith(("torch>", "torch=")) for names in extras.values() for n in names)
