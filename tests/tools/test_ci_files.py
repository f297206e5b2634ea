"""Workflow, images and their pages say what Makefile, pyproject.toml and the backends say."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import liger_multi
from ci import plan, portable, venv
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
RUN_SH = ROOT / "ci" / "docker" / "run.sh"


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
    assert job["environment"] == "devices"
    assert job["needs"] == "plan"
    env = next(s for n, s in steps() if n == "plan" and s.get("id") == "plan")["env"]
    assert set(env) == {"EVENT", "ACTION", "LABEL", "CHOICE", "FORK", "RUNNERS"}


@pytest.mark.skipif(not shutil.which("actionlint"), reason="actionlint is not on the path")
def test_actionlint():
    done = subprocess.run(["actionlint", *WORKFLOWS], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


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
    text = IMAGES[name].read_text()
    lines = text.splitlines()
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


def test_readme_begins_with_two_commands():
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    commands = [line.split()[:2] for line in lines[:12] if line.startswith("    ")]
    assert commands == [["make", "demo"], ["make", "test"]]
    listed = subprocess.run(
        ["make", "--silent", "help"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    for _, target in commands:
        assert re.search(rf"^{target}\b", listed, re.MULTILINE)
    assert len(lines) <= 150
