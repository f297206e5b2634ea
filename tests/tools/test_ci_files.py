"""Workflow, images and their pages say what Makefile, pyproject.toml and the backends say.

What `ci.layering` refuses is at the end.
"""

import ast
import importlib
import importlib.util
import inspect
import itertools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import liger_multi
from ci import layering, plan, portable, venv
from ci.npu import environment
from liger_multi import _torch_private
from liger_multi._tested import TESTED, untested
from liger_multi.dispatch.registry import backends

ROOT = Path(__file__).parents[2]
GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
WORKFLOW = GITHUB / "workflows" / "ci.yml"
IMAGES = {
    p.name.removesuffix(".Dockerfile"): p for p in (ROOT / "ci" / "docker").glob("*.Dockerfile")
}
DEVICES = sorted(name for name, record in backends().items() if record.device_type)


def read(path):
    return (ROOT / path).read_text(encoding="utf-8")


def workflow():
    return yaml.load(WORKFLOW.read_text(encoding="utf-8"), yaml.BaseLoader)  # `on` stays a word


def steps():
    return [(name, s) for name, job in workflow()["jobs"].items() for s in job["steps"]]


def targets():
    return set(re.findall(r"^([a-z-]+):", read("Makefile"), re.MULTILINE))


def variables():
    return set(re.findall(r"^([A-Z_]+) [?:]?= ?", read("Makefile"), re.MULTILINE)) | {"NO_VENV"}


def floors():
    """The oldest version of every package that pyproject.toml names."""
    return dict(re.findall(r'"([A-Za-z_-]+)>=([0-9.]+)', read("pyproject.toml")))


# --- the workflow ---


def test_every_backend_with_a_device_is_in_the_matrix():
    assert sorted(plan.DEVICES) == DEVICES
    choice = workflow()["on"]["workflow_dispatch"]["inputs"]["backend"]
    assert choice["options"] == ["all", "cpu", *plan.DEVICES]
    assert sorted(IMAGES) == sorted(["cpu", *DEVICES])
    for name in DEVICES:
        assert f"`{plan.LABEL}{name}`" in read("docs/runners.md")


def test_the_cpu_is_tested_at_the_edges_of_what_is_supported():
    rows = workflow()["jobs"]["cpu"]["strategy"]["matrix"]["versions"]
    versions = {row["name"]: row for row in rows}
    pythons = [tuple(map(int, row["python"].split("."))) for row in rows]
    floor = tuple(map(int, floors_of_python().split(".")))
    assert min(pythons) == floor
    assert len(rows) == len(set(pythons))
    text = re.findall(r'"Programming Language :: Python :: (\d\.\d+)"', read("pyproject.toml"))
    assert text == [f"{a}.{b}" for a, b in sorted(pythons)], "classifiers for what a job runs"
    default = re.search(r"^TORCH \?= (\S+)", read("Makefile"), re.MULTILINE)[1]
    assert versions["pinned"]["torch"] == default
    assert versions["newest"]["torch"] == "torch"
    oldest = dict(
        re.findall(r"^([a-z]+)==([0-9.]+)", read("ci/constraints/oldest.txt"), re.MULTILINE)
    )
    assert versions["oldest"]["torch"] == f"torch=={oldest['torch']}"
    for name in ("torch", "transformers"):
        assert oldest[name].startswith(floors()[name]), f"{name}: the floor is {floors()[name]}"
    assert versions["oldest"]["python"] == floors_of_python()
    assert versions["oldest"]["constraint"] == "ci/constraints/oldest.txt"
    assert all((ROOT / c).is_file() for row in rows if (c := row["constraint"]))
    assert not versions["newest"]["constraint"], "whatever the package index has"


def pins(name):
    return dict(re.findall(r"^([\w.-]+)==(\S+)", read(f"ci/constraints/{name}.txt"), re.MULTILINE))


def test_what_doctor_calls_tested_is_what_rows_run():
    """From the oldest row to the newest; the workflow of every week is ahead of both."""
    oldest, pinned = pins("oldest"), pins("pinned")
    for name, (first, last) in TESTED.items():
        if name == "python":
            rows = workflow()["jobs"]["cpu"]["strategy"]["matrix"]["versions"]
            assert {first, last} <= {row["python"] for row in rows}
            continue
        assert first == oldest.get(name, pinned.get(name))
        assert untested({name: first}) == untested({name: last}) == []
        assert untested({name: pinned.get(name, first)}) == [], f"{name} is pinned beyond its range"
    release = re.match(r"\d+\.\d+", TESTED["torch"][1])[0]
    assert _torch_private.SEEN.endswith(f" to {release}")


def test_a_version_outside_of_what_was_tested_is_named():
    assert untested({"torch": "2.16.0+cpu"}) == [
        "torch 2.16.0+cpu is newer than what was tested (2.9.1 to 2.15.0)"
    ]
    assert untested({"transformers": "4.57.1", "torch": "2.15.1", "peft": "not installed"}) == [
        "transformers 4.57.1 is older than what was tested (5.0.0 to 5.24.0)"
    ]
    assert untested({"python": "3.15.0rc1 on Linux"}) == [
        "python 3.15.0rc1 is newer than what was tested (3.10 to 3.14)"
    ]


def test_pull_requests_run_a_part_of_ascend():
    """Its wheels are of a Python that no row had, which passed for "cannot be built here"."""
    job = workflow()["jobs"]["cpu"]
    rows = job["strategy"]["matrix"]["versions"]
    assert ".".join(map(str, environment.VERSION)) in {
        row["python"] for row in rows if row["torch"] == f"torch=={environment.TORCH}"
    }
    assert job["if"] == "github.event.action != 'labeled'"
    assert "'test'" in job["env"]["TARGET"]


# --- pinned versions ---


def test_every_setting_of_processors_is_a_job():
    job = workflow()["jobs"]["portable"]
    rows = [int(row) for row in job["strategy"]["matrix"]["row"]]
    assert rows == list(range(1, len(portable.SETTINGS) + 1))


def test_what_can_turn_a_run_red_is_pinned():
    pinned = dict(venv.PIN.findall(read("ci/constraints/pinned.txt")))
    assert {"ruff", "mypy", "transformers", "trl", "triton", "peft", "pytest"} <= set(pinned)
    names = set(re.findall(r'^    "([A-Za-z-]+)>=', read("pyproject.toml"), re.M)) - {"setuptools"}
    assert names <= set(pinned) | {"wheel"}, names - set(pinned)
    for name, version in pinned.items():
        floor = floors().get(name)
        assert floor is None or numbers(version) >= numbers(floor), name
    default = re.search(r"^CONSTRAINT \?= (\S+)$", read("Makefile"), re.MULTILINE)[1]
    assert ROOT / default == venv.PINNED
    assert '--constraint "$(CONSTRAINT)"' in read("Makefile")


def numbers(version):
    return tuple(int(n) for n in re.findall(r"\d+", version))


def floors_of_python():
    return re.search(r'requires-python = ">=([0-9.]+)"', read("pyproject.toml"))[1]


def test_commands_exist():
    """Whatever a job, an image or the page for owners runs is there."""
    jobs = "\n".join(step.get("run", "") for _, step in steps())
    images = "\n".join(path.read_text() for path in IMAGES.values())
    written = read("docs/runners.md") + read("README.md")
    quoted = re.findall(r"`([^`\n]+)`|^ {4}(.*)$", written, re.MULTILINE)
    pages = "\n".join([*map("".join, quoted), read(".ci/run").partition("set -e")[2]])
    images = "\n".join(line for line in images.splitlines() if "apt-get" not in line)
    names = set(re.findall(r"\bmake ([a-z-]+)", jobs + images + pages))
    names |= set(re.findall(r"run\.sh [a-z]+ ([a-z]+)", pages))
    assert names <= targets(), names - targets()
    assert {"test", "container", "lint"} <= names
    commands = "\n".join(re.findall(r"make [^\n`|]*", jobs + pages))
    assigned = set(re.findall(r"\b([A-Z_]+)=", commands))
    assert assigned <= variables(), assigned - variables()
    for module in re.findall(r"python3? -m (ci\.\w+)", jobs + pages + images):
        assert importlib.util.find_spec(module), module
    for path in re.findall(r"\b(?:ci|tests|docs)/[\w./-]+\.(?:py|sh|txt|md)\b", pages + jobs):
        assert (ROOT / path).exists(), path


RIGHTS = {
    "ci.yml": {},
    "release.yml": {"publish": {"id-token": "write"}},
    "update.yml": {
        "pins": {"contents": "write", "pull-requests": "write"},
        "newest": {"contents": "read", "issues": "write"},
    },
}
"""What jobs may do beside reading the repository."""


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_job_can_do_little_and_ends(path):
    text = path.read_text(encoding="utf-8")
    workflow = yaml.load(text, yaml.BaseLoader)
    assert workflow["permissions"] == {"contents": "read"}
    assert "pull_request_target" not in text
    assert "secrets." not in text
    jobs = workflow["jobs"]
    rights = {name: job["permissions"] for name, job in jobs.items() if "permissions" in job}
    assert rights == RIGHTS[path.name]
    for name, job in jobs.items():
        assert 0 < int(job["timeout-minutes"]) <= 120, name
        # what a contributor writes reaches a shell through its environment only
        assert not [step for step in job["steps"] if "${{" in step.get("run", "")], name


def test_what_publishes_runs_no_code_of_the_repository():
    jobs = yaml.load(read(".github/workflows/release.yml"), yaml.BaseLoader)["jobs"]
    assert [jobs[name].get("needs") for name in ("install", "publish")] == ["build", "install"]
    assert jobs["publish"]["environment"] == "pypi"
    assert not [step for step in jobs["publish"]["steps"] if "run" in step]


def test_actions_are_pinned_to_commits():
    used = [u for path in WORKFLOWS for u in re.findall(r"uses: (\S+)(.*)", path.read_text())]
    assert used
    known = r"(actions/[a-z-]+|pypa/gh-action-pypi-publish)@[0-9a-f]{40}"
    for action, comment in used:
        assert re.fullmatch(known, action), action
        assert re.fullmatch(r" # v\d+\.\d+\.\d+", comment), f"{action} needs its version beside it"
    assert len(dict(used)) == len({a.partition("@")[0] for a, _ in used}), "one version an action"


def test_devices_wait_for_a_reviewer_and_a_plan():
    job = workflow()["jobs"]["devices"]
    assert (job["environment"], job["needs"]) == ("devices", "plan")
    env = next(s for n, s in steps() if n == "plan" and s.get("id") == "plan")["env"]
    assert set(env) == {"EVENT", "ACTION", "LABEL", "CHOICE", "FORK", "RUNNERS"}


@pytest.mark.skipif(not shutil.which("actionlint"), reason="actionlint is not on the path")
def test_actionlint():
    done = subprocess.run(["actionlint", *WORKFLOWS], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(("open_issue", "command"), [("", "create"), ("7", "comment 7")])
def test_the_weekly_run_reports_a_failure(tmp_path, open_issue, command):
    """It opens an issue with its report, or comments on the one that is open."""
    jobs = yaml.load(read(".github/workflows/update.yml"), yaml.BaseLoader)["jobs"]
    (step,) = [s for s in jobs["newest"]["steps"] if s.get("if") == "failure()"]
    client = tmp_path / "gh"
    client.write_text(
        f'#!/bin/sh\necho "$@" >> calls\ncase "$2" in list) echo {open_issue};; esac\n'
    )
    client.chmod(0o755)
    (tmp_path / "report.txt").write_text("1 failed")
    names = {"GH_TOKEN": "x", "REPOSITORY": "o/r", "RUN": "the run", "PYTHON_VERSION": "3.14"}
    env = {**names, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-eo", "pipefail", "-c", step["run"]], env=env, cwd=tmp_path, capture_output=True
    )
    assert done.returncode == 0, done.stderr
    listed, reported = (tmp_path / "calls").read_text().splitlines()
    assert listed.startswith("issue list --repo o/r --state open")
    assert reported.startswith(f"issue {command}")
    assert reported.endswith("--body-file issue.txt")
    assert (tmp_path / "issue.txt").read_text() == "the run\n1 failed"


# --- a release ---


@pytest.mark.parametrize(("tag", "code"), [("v{}", 0), ("{}", 1), ("v{}.1", 1), ("v", 1)])
def test_a_tag_of_another_version_stops_a_release(tag, code):
    workflow = yaml.load(read(".github/workflows/release.yml"), yaml.BaseLoader)
    (step,) = [s for s in workflow["jobs"]["build"]["steps"] if "TAG" in s.get("env", {})]
    done = subprocess.run(
        ["bash", "-eo", "pipefail", "-c", step["run"]],
        env={
            "TAG": tag.format(liger_multi.__version__),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        },
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == code, done.stderr
    assert code == 0 or liger_multi.__version__ in done.stderr


# --- the plan ---

ALL = '["cuda", "rocm", "npu"]'


@pytest.mark.parametrize(
    ("environment", "planned"),
    [
        ({"EVENT": "schedule", "RUNNERS": ALL}, ["cuda", "rocm", "npu"]),
        ({"EVENT": "schedule", "RUNNERS": '["npu"]'}, ["npu"]),
        ({"EVENT": "schedule", "RUNNERS": ""}, []),
        ({"EVENT": "schedule"}, []),
        ({"EVENT": "push", "RUNNERS": ALL}, []),
        ({"EVENT": "pull_request", "ACTION": "opened", "RUNNERS": ALL}, []),
        (
            {"EVENT": "pull_request", "ACTION": "labeled", "LABEL": "test on rocm", "RUNNERS": ALL},
            ["rocm"],
        ),
        (
            {"EVENT": "pull_request", "ACTION": "labeled", "LABEL": "bug", "RUNNERS": ALL},
            [],
        ),
        # a push after the label is other code than the label was given to
        (
            {
                "EVENT": "pull_request",
                "ACTION": "synchronize",
                "LABEL": "test on rocm",
                "RUNNERS": ALL,
            },
            [],
        ),
        (
            {
                "EVENT": "pull_request",
                "ACTION": "labeled",
                "LABEL": "test on cuda",
                "FORK": "true",
                "RUNNERS": ALL,
            },
            [],
        ),
        ({"EVENT": "workflow_dispatch", "CHOICE": "all", "RUNNERS": ALL}, ["cuda", "rocm", "npu"]),
        ({"EVENT": "workflow_dispatch", "CHOICE": "npu", "RUNNERS": ALL}, ["npu"]),
        ({"EVENT": "workflow_dispatch", "CHOICE": "cpu", "RUNNERS": ALL}, []),
    ],
)
def test_plan(environment, planned):
    jobs = plan.plan(environment)
    assert [entry["backend"] for entry in jobs] == planned
    assert all(entry["labels"] == ["self-hosted", "linux", entry["backend"]] for entry in jobs)


# --- the images ---


@pytest.mark.parametrize("name", IMAGES)
def test_an_image_runs_its_backend_as_nobody(name):
    lines = IMAGES[name].read_text().splitlines()
    assert f'CMD ["test", "BACKEND={name}"]' in lines
    assert "make" in next(line for line in lines if line.startswith("ENTRYPOINT"))
    users = [line.split()[1] for line in lines if line.startswith("USER ")]
    assert users[-1] == "tester", "the suite does not run as root"
    assert lines.index("USER tester") > max(i for i, x in enumerate(lines) if "apt-get" in x)


@pytest.mark.parametrize("name", IMAGES)
def test_the_environment_of_an_image_depends_on_what_decides_it(name):
    """What make's stamp of the environment depends on is copied before it is built."""
    text = IMAGES[name].read_text()
    before = text[: text.index("make env")]
    (needed,) = re.findall(r"^\$\(VENV\)/\.stamp: (.*)$", read("Makefile"), re.MULTILINE)
    for path in needed.split():
        assert path in before, path


def test_the_cuda_image_has_the_pytorch_of_the_makefile():
    default = re.search(r"^TORCH \?= torch==(\S+)", read("Makefile"), re.MULTILINE)[1]
    assert f"ARG TAG={default}-cuda" in IMAGES["cuda"].read_text()
    assert f"ARG TORCH=torch=={default}\n" in IMAGES["cpu"].read_text()


def test_every_image_has_a_supported_python_and_pytorch():
    for name, pattern in (
        ("cpu", r"PYTHON=(\S+)"),
        ("rocm", r"_py(\d\.\d+)_"),
        ("npu", r"-py(\d\.\d+)$"),
    ):
        version = re.search(pattern, IMAGES[name].read_text(), re.MULTILINE)[1]
        assert (3, 10) <= tuple(map(int, version.split("."))) <= (3, 14), name
    for name, pattern in (("rocm", r"pytorch_release_(\S+)"), ("npu", r"TORCH=(\S+)")):
        version = re.search(pattern, IMAGES[name].read_text())[1]
        floor = tuple(map(int, floors()["torch"].split(".")))
        assert tuple(map(int, version.split(".")[:2])) >= floor, name
    npu = IMAGES["npu"].read_text()
    torch, plugin = (re.search(rf"ARG {n}=(\d+\.\d+)", npu)[1] for n in ("TORCH", "TORCH_NPU"))
    assert torch == plugin


def test_one_rocm_is_named_everywhere():
    image = re.search(r"^ARG TAG=rocm(\d+\.\d+)", IMAGES["rocm"].read_text(), re.MULTILINE)[1]
    pages = ["README.md", "ci/venv.py", *sorted((ROOT / "docs").glob("*.md"))]
    named = {page: re.findall(r"(?i)\brocm ?(\d+\.\d+)", read(page)) for page in pages}
    assert all(named[page] for page in ("README.md", "ci/venv.py", ROOT / "docs" / "rocm.md"))
    assert {version for versions in named.values() for version in versions} == {image}, named


def test_ascend_versions_agree():
    versions = dict(
        re.findall(r"^ARG (\w+)=(\d+\.\d+)\.\d+$", IMAGES["npu"].read_text(), re.MULTILINE)
    )
    extra = re.search(r"^npu = \[(.*)\]$", read("pyproject.toml"), re.MULTILINE)[1]
    pinned = dict(re.findall(r"([a-z_-]+)==(\d+\.\d+)\.", extra))
    assert pinned == {
        "torch_npu": versions["TORCH_NPU"],
        "triton-ascend": versions["TRITON_ASCEND"],
    }
    assert re.search(r"torch_npu==\d+\.\d+\.\d+\"", extra), "a post release is of another CANN"
    page = read("docs/ascend.md")
    assert f"pip install torch=={versions['TORCH']}.0\n" in page  # aarch64
    build = f"torch=={versions['TORCH']}.0+cpu"  # what torch_npu's wheel of x86-64 requires
    assert f"pip install {build} --index-url https://download.pytorch.org/whl/cpu\n" in page
    assert f"`{build}`" in read("README.md")
    for name, version in pinned.items():
        assert f"{name} {version}" in page
    assert f"`torch=={versions['TORCH']}.0`" in read("README.md")
    cann = re.search(r"^ARG TAG=(\d+\.\d+)", IMAGES["npu"].read_text(), re.MULTILINE)[1]
    assert f"for CANN {cann}" in page
    assert f"CANN {cann}" in read("README.md")


# --- the script that runs an image ---


# --- rules of the tree: ci/layering.py ---

CLEAN = {
    "liger_multi/__init__.py": "from liger_multi import ops\n__all__ = ['ops']\n",
    "liger_multi/errors.py": "",
    "liger_multi/dispatch/backend.py": "",
    "liger_multi/dispatch/launch.py": "from liger_multi.dispatch.backend import x\n",
    "liger_multi/dispatch/registry.py": "def f():\n    import liger_multi.errors\n",
    "liger_multi/dispatch/op.py": "from liger_multi.dispatch.registry import f\nimport torch\n",
    "liger_multi/ops/__init__.py": "from liger_multi.ops.rms_norm import rms_norm\n"
    "__all__ = ['rms_norm']\n",
    "liger_multi/ops/rms_norm.py": '"""On npu, gfx942, sm90."""\n'
    "from liger_multi.dispatch.op import Op\n"
    "from liger_multi.testing.samples import Sample\n",
    "liger_multi/testing/__init__.py": "",
    "liger_multi/testing/samples.py": "import torch\n",
    "liger_multi/testing/checks.py": "from liger_multi.ops import rms_norm\n",
    "liger_multi/testing/suite/plugin.py": "import pytest\n",
    "liger_multi/nn/__init__.py": "from liger_multi.ops import rms_norm\n__all__ = ['rms_norm']\n",
    "liger_multi/patching/__init__.py": "import transformers\nfrom liger_multi import nn\n",
    "liger_multi/cli/main.py": "import rich\n",
    "liger_multi/compat/__init__.py": "from liger_multi.cli import main\n",
    "reference/__init__.py": "from liger_multi.dispatch.backend import Backend\n",
    "reference/norms/rms_norm.py": "import math, torch\n"
    "from liger_multi.reference.common.chunking import r\n",
    "reference/common/chunking.py": "",
    "backends/__init__.py": "",
    "backends/triton/__init__.py": "import torch\n",
    "backends/triton/norms/rms_norm.py": "import triton\n"
    "from liger_multi.dispatch.launch import launch_config\n",
    "backends/cuda/__init__.py": "from liger_multi.dispatch.backend import Backend\n",
    "backends/cuda/rms_norm.py": "from liger_multi.backends.triton.norms import rms_norm\n",
    "backends/rocm/__init__.py": "import torch\nHIP = torch.version.hip\n",
}


@pytest.fixture
def findings(tmp_path):
    """Findings in the clean tree with some files replaced."""

    def run(**changes):
        for path, text in {**CLEAN, **changes.pop("files", {})}.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text)
        return [(f.rule, f.path) for f in layering.check(tmp_path)]

    return run


@pytest.mark.slow
def test_this_tree_keeps_every_rule():
    assert "\n".join(map(str, layering.check(ROOT))) == ""


def test_a_clean_tree_has_no_findings(findings):
    assert findings() == []


LINES = "    x = 1\n"
PLANTED = {
    "machinery imports an operator": (
        "layer",
        "liger_multi/dispatch/launch.py",
        "from liger_multi.ops import rms_norm\n",
    ),
    "machinery imports upwards": (
        "layer",
        "liger_multi/errors.py",
        "from liger_multi.dispatch.op import Op\n",
    ),
    "registry imports op": (
        "cycle",
        "liger_multi/dispatch/registry.py",
        "import liger_multi.dispatch.op\n",
    ),
    "registry imports op inside a function": (
        "cycle",
        "liger_multi/dispatch/registry.py",
        "def f():\n    from liger_multi.dispatch import op\n",
    ),
    "operator imports a module": (
        "layer",
        "liger_multi/ops/rms_norm.py",
        "from liger_multi import nn\n",
    ),
    "operator imports a formula": (
        "layer",
        "liger_multi/ops/rms_norm.py",
        "from liger_multi.testing.checks import FORMULAS\n",
    ),
    "samples import an operator": (
        "layer",
        "liger_multi/testing/samples.py",
        "from liger_multi.ops import rms_norm\n",
    ),
    "module imports patching": (
        "layer",
        "liger_multi/nn/__init__.py",
        "import liger_multi.patching\n",
    ),
    "patching imports a command": (
        "layer",
        "liger_multi/patching/__init__.py",
        "import liger_multi.cli.main\n",
    ),
    "operator imports a module inside a function": (
        "layer",
        "liger_multi/ops/rms_norm.py",
        "def f():\n    from liger_multi import nn\n",
    ),
    "machinery imports an operator by its name": (
        "layer",
        "liger_multi/dispatch/launch.py",
        "def f():\n    return importlib.import_module('liger_multi.ops').rms_norm\n",
    ),
    "a module imports patching by its name": (
        "layer",
        "liger_multi/nn/__init__.py",
        "__all__ = ['x']\nx = import_module('liger_multi.patching')\n",
    ),
    "a command imports what stands above it": (
        "layer",
        "liger_multi/cli/main.py",
        "import liger_multi.compat\n",
    ),
    "operator imports a backend inside a function": (
        "layer",
        "liger_multi/ops/rms_norm.py",
        "def f():\n    import liger_multi.backends.triton\n",
    ),
    "operators in a circle by their names": (
        "cycle",
        "liger_multi/dispatch/registry.py",
        "def f():\n    importlib.import_module('liger_multi.dispatch.op')\n",
    ),
    "reference imports the machinery by its name": (
        "reference",
        "reference/norms/rms_norm.py",
        "importlib.import_module('liger_multi.errors')\n",
    ),
    "backend imports a contract by its name": (
        "backend",
        "backends/cuda/rms_norm.py",
        "importlib.import_module('liger_multi.ops.rms_norm')\n",
    ),
    "core imports triton by its name": (
        "optional",
        "liger_multi/dispatch/launch.py",
        "tl = importlib.import_module('triton.language')\n",
    ),
    "a kernel asks for a capability number": (
        "portable",
        "backends/triton/norms/rms_norm.py",
        "x = torch.cuda.get_device_capability()\n",
    ),
    "a product of fp32 by default": (
        "portable",
        "backends/triton/norms/rms_norm.py",
        "x = tl.dot(a, b)\n",
    ),
    "an atomic sum": (
        "portable",
        "backends/triton/norms/rms_norm.py",
        "tl.atomic_add(a, b)\n",
    ),
    "operator imports a backend": (
        "layer",
        "liger_multi/ops/rms_norm.py",
        "from liger_multi.backends.triton import rms_norm\n",
    ),
    "operator imports its reference": (
        "layer",
        "liger_multi/ops/rms_norm.py",
        "from liger_multi.reference import rms_norm\n",
    ),
    "reference imports the machinery": (
        "reference",
        "reference/norms/rms_norm.py",
        "from liger_multi.errors import E\n",
    ),
    "reference imports the machinery lazily": (
        "reference",
        "reference/norms/rms_norm.py",
        "def f():\n    import liger_multi.dispatch.config\n",
    ),
    "reference imports a package": ("reference", "reference/norms/rms_norm.py", "import numpy\n"),
    "reference imports a kernel": (
        "reference",
        "reference/norms/rms_norm.py",
        "from liger_multi.backends.triton.norms.rms_norm import forward\n",
    ),
    "one vendor imports another": (
        "backend",
        "backends/cuda/rms_norm.py",
        "from liger_multi.backends.rocm import BACKEND\n",
    ),
    "one vendor imports another lazily": (
        "backend",
        "backends/cuda/rms_norm.py",
        "def f():\n    from liger_multi.backends import npu\n",
    ),
    "the shared layer imports a vendor": (
        "backend",
        "backends/triton/norms/rms_norm.py",
        "from liger_multi.backends.cuda import BACKEND\n",
    ),
    "backend imports a contract": (
        "backend",
        "backends/triton/norms/rms_norm.py",
        "from liger_multi.ops.rms_norm import op\n",
    ),
    "core imports triton": (
        "optional",
        "liger_multi/dispatch/launch.py",
        "import triton.language as tl\n",
    ),
    "core imports transformers in a try": (
        "optional",
        "liger_multi/nn/__init__.py",
        "try:\n    from transformers import X\nexcept ImportError:\n    X = None\n",
    ),
    "formulas import pytest": ("optional", "liger_multi/testing/checks.py", "import pytest\n"),
    "core imports matplotlib in a class": (
        "optional",
        "liger_multi/dispatch/op.py",
        "class A:\n    import matplotlib\n",
    ),
    "long function": ("length", "liger_multi/dispatch/op.py", "def f():\n" + LINES * 81),
    "long method": (
        "length",
        "liger_multi/dispatch/op.py",
        "class A:\n    async def f(self):\n" + f"    {LINES}" * 81,
    ),
    "long reference": ("length", "reference/norms/rms_norm.py", "def forward(x):\n" + LINES * 81),
    "long launcher": (
        "length",
        "backends/triton/norms/rms_norm.py",
        "def forward(x):\n" + LINES * 81,
    ),
    "long kernel": (
        "length",
        "backends/triton/norms/rms_norm.py",
        '@triton.jit\ndef k(x_ptr):\n    """Explained."""\n' + LINES * 81,
    ),
    "kernel without a docstring": (
        "explained",
        "backends/triton/norms/rms_norm.py",
        "@triton.jit\ndef k(x_ptr):\n    x = 1\n",
    ),
    "kernel with arguments of jit and no docstring": (
        "explained",
        "backends/cuda/rms_norm.py",
        "@triton.jit(do_not_specialize=['n'])\ndef k(x_ptr, n):\n    x = 1\n",
    ),
    "kernel with an empty docstring": (
        "explained",
        "backends/triton/norms/rms_norm.py",
        '@triton.jit\ndef k(x_ptr):\n    """ """\n    x = 1\n',
    ),
    "a sum of PyTorch's": (
        "portable",
        "backends/triton/norms/rms_norm.py",
        "def sums(x):\n    return x.float().sum(0)\n",
    ),
    **{
        f"private symbol of torch: {text}": ("private", path, text + "\n")
        for path, text in {
            "liger_multi/dispatch/op.py": "import torch\nx = torch._C._is_tracing()",
            "liger_multi/dispatch/registry.py": "from torch._C._functorch import is_batchedtensor",
            "liger_multi/errors.py": "def f():\n    import torch._dynamo",
            "reference/norms/rms_norm.py": "from torch.nn import Module as M\nx = M._call_impl",
            "backends/triton/norms/rms_norm.py": "import torch\nx = torch._grouped_mm",
            "backends/cuda/rms_norm.py": "import torch\na = torch.ops.aten\nx = a._to_copy.default",
            "liger_multi/testing/checks.py": "import torch\nx = getattr(torch._C, 'y', None)",
            "liger_multi/testing/samples.py": "import torch\nx = getattr(torch, '_scaled_mm')",
            "liger_multi/nn/__init__.py": "import torch\nx = cast(Any, torch)._C\n__all__ = ['x']",
            "liger_multi/patching/__init__.py": "from torch.utils._pytree import tree_map",
            "liger_multi/cli/main.py": "import sys\nx = 'torch._dynamo' in sys.modules",
        }.items()
    },
    "no __all__": ("exports", "liger_multi/__init__.py", "from liger_multi import ops\n"),
    "modules without __all__": (
        "exports",
        "liger_multi/nn/__init__.py",
        "from liger_multi.ops import rms_norm\n",
    ),
    "a name twice in __all__": ("exports", "liger_multi/__init__.py", "__all__ = ['ops', 'ops']\n"),
    "operator without a reference": ("exports", "liger_multi/ops/swiglu.py", ""),
    "operator not exported": ("exports", "liger_multi/ops/__init__.py", "__all__ = ['rms_norm']\n"),
}


def test_every_rule_has_a_planted_violation():
    assert {rule for rule, _, _ in PLANTED.values()} | {"vendor word"} == layering.RULES.keys()


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_violation_is_found(findings, name):
    rule, path, text = PLANTED[name]
    assert (rule, path) in findings(files={path: text})


@pytest.mark.parametrize(
    "text",
    [
        "IS = torch.version.hip is None\n",
        "from x import is_hip\n",
        "def is_npu(): pass\n",
        "import torch_npu\n",
        "if device.type == 'npu': pass\n",
        "table = {'gfx942': 1}\n",
        "ARCH = 'sm_90'\n",
        "arch = 'sm80'\n",
        "def f(is_npu): pass\n",
    ],
)
@pytest.mark.parametrize(
    "path",
    [
        "liger_multi/dispatch/op.py",
        "reference/norms/rms_norm.py",
        "backends/triton/norms/rms_norm.py",
    ],
)
def test_a_vendor_word_is_found(findings, path, text):
    assert ("vendor word", path) in findings(files={path: text})


@pytest.mark.parametrize(
    "text",
    ["# on gfx942 and npu\n", '"""For sm90 and npu."""\n', "input, inputs, nputs = 1, 2, 3\n"],
)
def test_comments_and_docstrings_may_name_vendors(findings, text):
    assert findings(files={"liger_multi/errors.py": text}) == []


def test_what_is_short_and_explained_has_no_findings(findings):
    """80 lines are not too many, docstrings do not count, and files have no limit."""
    words = '    """Explained.\n\n' + "    One fact a line.\n" * 90 + '    """\n'
    kernel = f"@triton.jit\ndef k(x_ptr):\n{words}" + LINES * 80
    files = {
        "backends/triton/norms/rms_norm.py": kernel,
        "reference/norms/rms_norm.py": "x = 1\n" * 500,
    }
    assert findings(files=files) == []


def test_a_cycle_is_found(findings):
    broken = findings(
        files={
            "liger_multi/a.py": "import liger_multi.b\n",
            "liger_multi/b.py": "from liger_multi.c import x\n",
            "liger_multi/c.py": "from liger_multi import a\n",
        }
    )
    assert broken == [("cycle", f"liger_multi/{name}.py") for name in "abc"]


def test_imports_for_type_checkers_do_not_count(findings):
    text = "if TYPE_CHECKING:\n    from liger_multi.ops import rms_norm\n    import triton\n"
    assert findings(files={"liger_multi/dispatch/launch.py": text}) == []
    text += "else:\n    import triton\n"
    assert findings(files={"liger_multi/dispatch/launch.py": text})


@pytest.mark.parametrize(
    "text", ["from liger_multi.reference import norms", "import_module('liger_multi.reference')"]
)
def test_functions_may_import_the_reference(findings, text):
    operator = CLEAN["liger_multi/ops/rms_norm.py"]
    assert (
        findings(files={"liger_multi/ops/rms_norm.py": f"{operator}def f():\n    {text}\n"}) == []
    )
    assert findings(files={"liger_multi/ops/rms_norm.py": f"{operator}{text}\n"})


def test_the_links_of_an_editable_install_are_not_read_twice(findings, tmp_path):
    findings()
    (tmp_path / "liger_multi/backends").symlink_to(tmp_path / "backends")
    (tmp_path / "backends/cuda/rms_norm.py").write_text("import liger_multi.ops\n")
    assert [f.path for f in layering.check(tmp_path)] == ["backends/cuda/rms_norm.py"]


@pytest.mark.parametrize("package", ["liger_multi", "liger_multi.ops"])
def test_every_public_name_resolves_and_is_documented(package):
    module = importlib.import_module(package)
    for name in module.__all__:
        value = getattr(module, name)
        if name.startswith("__"):
            continue
        assert inspect.getdoc(value), f"{package}.{name} has no docstring"
        if inspect.isclass(value) or inspect.isfunction(value):
            assert value.__module__.startswith("liger_multi"), (
                f"{package}.{name} is somebody else's"
            )


@pytest.mark.parametrize(
    "folder", ["liger_multi", "reference", "backends", "benchmarks", "ci", "tests"]
)
def test_nothing_stands_behind_a_return(folder):
    """A message wrapped without parentheses ends early, and its rest is a statement of its own."""
    for file in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            for body in (getattr(node, "body", None), getattr(node, "orelse", None)):
                statements = body if isinstance(body, list) else []
                for statement, dead in itertools.pairwise(statements):
                    ends = isinstance(statement, ast.Return | ast.Raise)
                    assert not ends, f"{file}:{dead.lineno}"
