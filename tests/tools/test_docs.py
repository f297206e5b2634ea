"""The pages: their links lead somewhere, their code runs, and what is generated is current.

The examples run with ``--tiny`` as a user starts them, learn, and say how to run them on a GPU.
"""

import argparse
import ast
import importlib
import importlib.util
import inspect
import json
import os
import pydoc
import re
import runpy
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch
import yaml

import liger_multi
from benchmarks import examples as example_runs, pictures, store
from benchmarks.tables import (
    models as docs_models,
    performance as docs_performance,
    training as docs_training,
)
from ci.docs import site as docs_site, tables as docs_tables, verification as docs_status
from ci.docs.api import public_operators
from liger_multi.cli import main as command_line
from liger_multi.patching import options as patch_options
from tests import comparing, harness

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
EVERY = [
    *ROOT.glob("README.md"),
    *ROOT.glob("CONTRIBUTING.md"),
    ROOT / "benchmarks" / "README.md",
    ROOT / "examples" / "README.md",
    *PAGES,
]
NAMES = [p.relative_to(ROOT).as_posix() for p in EVERY]
RUN = ("losses.md", "concepts.md", "dispatch.md", "configuration.md")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The sources of the site."""
    folder = tmp_path_factory.mktemp("site")
    docs_site.build(folder)
    return folder


@pytest.fixture(scope="module")
def tracked():
    """Files of the repository; what git ignores is not among them."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listed.returncode:
        pytest.skip("a source package has no list of files")
    return {(ROOT / name).resolve() for name in listed.stdout.splitlines()}


def without_code(text):
    return re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)


def anchors(path):
    """Anchors of a page's headings, as the site's generator and code hosts make them."""
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    words = [
        re.sub(r"[^\w\s-]", "", h).strip().lower() for h in re.findall(r"^#+ (.*)$", text, re.M)
    ]
    return {re.sub(r"[\s-]+", "-", word) for word in words}


def blocks(path, language):
    text = path.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def links(path):
    return re.findall(r"\]\(([^)\s]+)\)", without_code(path.read_text(encoding="utf-8")))


def lead_somewhere(path, root):
    for link in links(path):
        if re.match(r"[a-z]+:", link):
            assert re.match(r"https://[\w.-]+\.[a-z]+(/|$)", link), link
            continue
        file, _, anchor = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        assert target.exists(), f"{path.name}: {link}: {target} is absent"
        assert root in target.parents, f"{path.name}: {link} leads out"
        if anchor:
            assert anchor in anchors(target), f"{path.name}: {link}: no such heading"
        yield target


@pytest.mark.parametrize("path", EVERY, ids=NAMES)
def test_links_in_pages_lead_to_tracked_files(path, tracked):
    """Where pages are read in the repository, those that are made for the site are not there."""
    for target in lead_somewhere(path, ROOT):
        has = target in tracked or any(target in file.parents for file in tracked)
        assert has, f"{target} is not in the repository"


def test_links_of_the_site_lead_to_its_pages(site):
    pages = sorted((site / "docs").rglob("*.md"))
    assert len(pages) > len(PAGES) + len(public_operators())
    assert sum(len(list(lead_somewhere(path, (site / "docs").resolve()))) for path in pages) > 200


@pytest.mark.parametrize("name", public_operators())
def test_first_call_on_the_page_of_an_operator_runs(name, site):
    page = site / "docs" / "ops" / f"{name}.md"
    code = blocks(page, "python")[0]
    assert f"ops.{name}(" in code
    scope = {}
    exec(code, scope)
    assert scope["result"] is not None


def test_generated_pages_are_not_committed():
    assert not [name for name in docs_site.whole_pages() if (ROOT / "docs" / name).exists()]


@pytest.mark.parametrize("path", PAGES, ids=[p.name for p in PAGES])
def test_pages_have_at_most_200_lines(path):
    """A page answers one question; what is longer is two pages. Rows of tables do not count."""
    lines = path.read_text(encoding="utf-8").splitlines()
    assert len([line for line in lines if not line.startswith("|")]) <= 200
    long = [x for x in lines if len(x) > docs_tables.WIDTH and not x.startswith("|")]
    assert not long


def test_the_readme_has_at_most_150_lines():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


@pytest.mark.parametrize("path", EVERY, ids=NAMES)
def test_files_named_in_pages_exist(path):
    if path.name == "extending.md":
        pytest.skip("speaks of files that its reader will write")
    text = path.read_text(encoding="utf-8")
    folders = "docs|ci|tests|benchmarks|backends|liger_multi|reference"
    for name in re.findall(rf"`((?:{folders})/[\w./-]+\.(?:md|py|yaml|yml|txt|sh|json))\b", text):
        assert (ROOT / name).exists(), name


@pytest.mark.parametrize("name", RUN)
def test_the_code_of_a_page_runs(name, capsys):
    """One block after the other, in one namespace."""
    page = ROOT / "docs" / name
    snippets = blocks(page, "python")
    assert len(snippets) >= 2
    if any("from trl import" in block for block in snippets):
        comparing.require_trl()
    namespace = {}
    for block in snippets:
        exec(compile(block, name, "exec"), namespace)


def test_every_python_block_is_python():
    for path in EVERY:
        for block in blocks(path, "python"):
            compile(block, path.name, "exec")


# --- the site ---


def nav(site):
    def pages(entry):
        if isinstance(entry, str):
            return [entry]
        children = entry if isinstance(entry, list) else list(entry.values())
        return [page for child in children for page in pages(child)]

    return pages(yaml.safe_load((site / "mkdocs.yml").read_text())["nav"])


def test_site_lists_every_page_once(site):
    pages = (site / "docs").rglob("*.md")
    assert sorted(nav(site)) == sorted(p.relative_to(site / "docs").as_posix() for p in pages)


@pytest.mark.slow
def test_generated_tables_are_current():
    assert [str(path) for path in docs_tables.stale()] == []


def test_the_site_loads_nothing_from_elsewhere(site):
    settings = yaml.safe_load((site / "mkdocs.yml").read_text())
    assert settings["theme"]["font"] is False
    assert [*settings["extra_css"], *settings.get("extra_javascript", [])] == ["site.css"]
    assert not re.search("@import|url\\(", (site / "docs" / "site.css").read_text())


def test_slow_kernels_in_tables_have_their_limit():
    page = (ROOT / "docs" / "operators-h100.md").read_text(encoding="utf-8")
    limits = page.partition("\n## Below the target")[2].partition("\n## ")[0]
    under = {
        op
        for (op, _), rows in docs_performance.operators_measured().items()
        if (docs_performance.peak(rows["ours"]) or 100) < 79.5
    }
    assert sorted(op for op in under if f"`{op}`" not in limits) == []


@pytest.mark.skipif(not importlib.util.find_spec("material"), reason="no mkdocs-material")
def test_the_site_builds_without_a_warning(site, tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", site / "mkdocs.yml"]
    done = subprocess.run(
        [*command, "--site-dir", str(tmp_path)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "ops" / "rms_norm.html").exists()
    loads = r"<(?:script|img|iframe|link)\b[^>]* (?:src|href)=[\"']?(?:https?:)?//"
    for page in tmp_path.rglob("*.html"):
        assert not re.search(loads, page.read_text(encoding="utf-8")), page


# --- what pages claim ---


def test_the_table_of_commands_has_every_command_and_option():
    text = (ROOT / "docs" / "configuration.md").read_text().partition("## Command line")[2]

    def check(parser, words):
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for name, child in action.choices.items():
                    check(child, [*words, name])
            elif action.option_strings and words[1:] and "--help" not in action.option_strings:
                row = next(line for line in text.splitlines() if f"`{' '.join(words[:2])}" in line)
                assert any(f"`{o}`" in row for o in action.option_strings), (words, action.dest)

    check(command_line._parser(), ["liger-multi"])


def test_the_table_of_patch_keys_has_every_key_and_option():
    text = (ROOT / "docs" / "patching.md").read_text().partition("## Options")[2]
    documented = {}
    for row in text.partition("| Option | Default")[0].splitlines():
        cells = re.split(r"(?<!\\) \| ", row.strip("| "))
        for key in re.findall(r"`(\w+)`", cells[0]) if row.startswith("|") else ():
            documented[key] = set(re.findall(r"`(\w+)`", cells[2] if len(cells) > 2 else ""))
    for key in patch_options.BUILT_IN:
        if key == patch_options.PACKING:
            assert key in documented
            continue
        options = patch_options.parse_request({key: True}).get(key)
        assert documented[key] == {f.name for f in fields(options)} - {"backend"}, key
        assert f"``{key}``" in liger_multi.patch.__doc__


def test_readme_claims_only_devices_that_ran():
    text = (ROOT / "README.md").read_text()
    status = docs_status.page()
    for name, words in (("rocm", "not run on AMD hardware"), ("npu", "not run on an NPU")):
        row = next(line for line in status.splitlines() if line.startswith(f"| {name} "))
        assert (docs_status.NOT_RUN in row) == (words in text), name


def test_the_chains_of_the_page_are_those_of_the_registry():
    from liger_multi.dispatch.registry import REFERENCE, backends, chain

    text = (ROOT / "docs" / "dispatch.md").read_text()
    for name, record in backends().items():
        if record.device_type:
            words = ", ".join(f"`{n}`" for n in [*chain(name), REFERENCE])
            assert f"| {words} |" in text, name
    assert liger_multi.explain("rms_norm", "cpu").chosen("rms_norm") == REFERENCE


# --- tables ---


def test_every_table_has_its_place_in_a_page():
    text = "".join(path.read_text(encoding="utf-8") for path in docs_tables.pages())
    for name in docs_tables.tables():
        assert text.count(f"<!-- {name}:start -->") == 1, name
        assert text.count(f"<!-- {name}:end -->") == 1, name


# --- pictures ---


@pytest.mark.parametrize("name", sorted(pictures.known()))
def test_a_picture_shows_what_the_results_have(name):
    """`make docs ARGS=--all` draws all of them; small enough for a page."""
    path = ROOT / "docs" / name
    assert pictures.carried(path) == pictures.digest(pictures.known()[name].data), name
    assert path.stat().st_size < 80_000


# --- one provenance ---


def measured(date, card, rows, run_type="longest", **more):
    head = {"kind": run_type, "date": f"{date}T00:00:00+00:00", "commit": "abc1234"}
    return {
        **head,
        "device": {"name": card},
        "versions": {"torch": "2.11.0+cu130"},
        **more,
        "rows": rows,
    }


def test_rows_of_tables_come_from_one_run(monkeypatch):
    """Variants of an older run do not stand beside ours of a newer one."""
    row = lambda who, speed, spread=1.0: {  # noqa: E731
        "run": "llama-3.2-1b:4x4096",
        "variant": who,
        "tokens_per_second": speed * 1e3,
        "peak_bytes": 2**30,
        "spread_percent": spread,
    }
    old = measured(
        "2026-01-01",
        "NVIDIA H200",
        [row("stock", 1), row("liger", 2), row("ours", 3)],
        "models",
        limit_gb=None,
    )
    new = measured(
        "2026-02-02",
        "NVIDIA H100",
        [row("stock", 4), row("ours", 6, 60.0)],
        "models",
        limit_gb=None,
    )
    runs = [old, new]
    monkeypatch.setattr(store, "read", lambda run_type, *_: runs if run_type == "models" else [])
    older, newer = docs_models.whole_models().split("Measured on NVIDIA H100")
    cells = [c.strip() for c in older.splitlines()[-2].split("|")[2:6]]
    assert cells == ["1.0k", "2.0k", "3.0k", "1.50"], "a table for each card"
    cells = [c.strip() for c in newer.splitlines()[-1].split("|")[2:5]]
    assert cells == ["4.0k", "6.0k ± 30 %", "1.0"], "without Liger-Kernel's column"
    shown = docs_performance.shown_models()
    assert list(shown) == ["llama-3.2-1b:4x4096"]
    assert shown["llama-3.2-1b:4x4096"][0] is old, "the newer one has not all three"
    trained = [row("stock", 4), row("liger", 5), row("ours", 6)]
    mixture = [{**one, "run": "qwen3-30b-a3b-4-layers:4x2048"} for one in trained]
    old["rows"] += mixture
    runs[1] = {**new, "rows": trained}
    shown = docs_performance.shown_models()
    assert list(shown) == ["llama-3.2-1b:4x4096", mixture[0]["run"]], (
        "of the card with more of them"
    )
    assert shown["llama-3.2-1b:4x4096"][0] is old
    old["rows"] = old["rows"][: -len(mixture)]
    assert docs_performance.shown_models()["llama-3.2-1b:4x4096"][0] is runs[1], "the newer one"
    runs[1] = {**new, "rows": [{**one, "run": "llama-3.2-1b:8x4096"} for one in trained] + trained}
    assert list(docs_performance.shown_models()) == ["llama-3.2-1b:8x4096"], "each model once"
    runs[1] = {**new, "rows": [row("stock", 4, 60.0), row("liger", 5), row("ours", 6)]}
    assert docs_performance.shown_models()["llama-3.2-1b:4x4096"][0] is old, "too noisy"


# --- the examples ---

FOLDER = ROOT / "examples"
EXAMPLES = example_runs.names()
FAST = "plain_loop"  # of the others each takes as long as what it imports
RANKS = ("fsdp2", "million_tokens", "deepspeed_zero3")
HERE_FIRST = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])


def tiny(name, folder, *further):
    """What an example printed with ``--tiny``; it runs as a user starts it."""
    done = subprocess.run(
        [sys.executable, FOLDER / f"{name}.py", "--tiny", *further],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": HERE_FIRST},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=harness.PATIENCE,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def learned(text, steps=12):
    """Losses as a loop and a Trainer print them."""
    losses = [float(x) for x in re.findall(r"(?<!_)loss'?:? '?([0-9.]+)", text)]
    assert len(losses) == steps, text
    assert sum(losses[-3:]) / 3 < 0.9 * losses[0], losses
    return losses


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n != FAST)) for n in EXAMPLES]
)
def test_an_example_runs_and_learns(name, tmp_path):
    for package in packages(name):
        pytest.importorskip(package)
    if name in RANKS and not torch.distributed.is_available():
        pytest.skip("torch without torch.distributed")
    text = tiny(name, tmp_path)
    assert name == "custom_model" or re.search(r"^patch(ed)? \w+ForCausalLM", text, re.M)
    if name in ("grpo", "grpo_shared"):
        assert len(re.findall("'reward': ", text)) == 3
    elif name == "yaml_override":
        assert "rms_norm  forward    cpu     reference  chosen  " in text
        first, second = re.findall(r"(\d\.\d{6})", text)
        assert first == second
    else:
        learned(text)


@pytest.mark.slow
def test_long_sequences_with_a_policy_of_your_choice(tmp_path):
    for package in packages("long_context"):
        pytest.importorskip(package)
    planned, by_hand = (
        learned(tiny("long_context", tmp_path, *further))
        for further in ((), ("--policy", "full", "--offload"))
    )
    assert planned == by_hand


def needs(name):
    """The blocks of an example that import what may be missing, and the packages each names."""
    tree = ast.parse((FOLDER / f"{name}.py").read_text(encoding="utf-8"))
    calls = {n: n.items[0].context_expr for n in ast.walk(tree) if isinstance(n, ast.With)}
    return {
        block: {argument.value for argument in call.args}
        for block, call in calls.items()
        if ast.unparse(call.func).endswith("needs")
    }


def packages(name):
    """What an example wants beside torch."""
    return {"transformers", "datasets"}.union(*needs(name).values())


@pytest.mark.parametrize(
    ("name", "package"),
    [
        *((n, p) for n in EXAMPLES for ps in needs(n).values() for p in sorted(ps)),
        ("plain_loop", "datasets"),
        ("plain_loop", "transformers"),
    ],
)
def test_example_names_a_missing_package(name, package, monkeypatch):
    for other in packages(name) - {package, "deepspeed"}:
        pytest.importorskip(other)
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda n, *a: None if n == package else find(n, *a)
    )
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.delitem(sys.modules, "_common", raising=False)
    monkeypatch.setattr(sys, "argv", [f"examples/{name}.py", "--tiny"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    assert str(ended.value) == f"{name}.py needs: pip install {package}"
    monkeypatch.delitem(sys.modules, "_common", raising=False)


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_short_and_says_its_commands(name):
    """One for a CPU and one for GPUs, with arguments that it takes."""
    source = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
    shows, cpu, gpu = docs_training.script(name)
    assert source.count("\n") < 80
    assert shows.endswith(".")
    assert cpu == f"python examples/{name}.py --tiny"
    options = re.findall(r" (--[\w-]+)", gpu.partition(f"{name}.py")[2])
    assert options
    taken = source + (FOLDER / "_common.py").read_text(encoding="utf-8")
    assert [o for o in options if f'"{o}"' not in taken and f'"{o[2:]}"' not in taken] == []


def test_every_example_stands_in_the_table():
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert [
        name for name in EXAMPLES if f"examples/{name}.py --tiny`]({name}.py)" not in text
    ] == []


def test_the_notebook_is_committed_without_outputs():
    cells = json.loads((FOLDER / "quickstart.ipynb").read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert len(code) >= 5
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)


@pytest.mark.slow
def test_the_notebook_runs(tmp_path, monkeypatch):
    for package in ("transformers", "nbclient", "nbformat", "ipykernel"):
        pytest.importorskip(package)
    import nbclient
    import nbformat

    monkeypatch.setenv("PYTHONPATH", HERE_FIRST)
    notebook = nbformat.read(FOLDER / "quickstart.ipynb", as_version=4)
    nbclient.NotebookClient(notebook, resources={"metadata": {"path": tmp_path}}).execute()
    text = "".join(o.get("text", "") for c in notebook.cells for o in c.get("outputs", ()))
    assert "LazyLogits (2, 32, 1000)" in text
    assert text.rstrip().endswith("LlamaRMSNorm True")


# --- what type checkers and ``help`` see ---

ROOMS = (
    "liger_multi",
    "liger_multi.ops",
    "liger_multi.losses",
    "liger_multi.memory",
    "liger_multi.nn",
)

# the types that the package promises to both checkers
PROMISED = """
import torch
from typing_extensions import assert_type

from liger_multi import losses, memory, ops
from liger_multi.patching import PatchReport


def promised(x: torch.Tensor, names: tuple[str, ...]) -> None:
    assert_type(ops.cross_entropy(x, x), torch.Tensor)
    assert_type(ops.cross_entropy_with_outputs(x, x, outputs=names), ops.CrossEntropyOutput)
    assert_type(ops.fused_linear_cross_entropy(x, x, x), torch.Tensor)
    assert_type(
        ops.fused_linear_cross_entropy_with_outputs(x, x, x, outputs=("lse", "entropy")),
        ops.CrossEntropyOutput,
    )
    assert_type(ops.rms_norm(x, x), torch.Tensor)
    assert_type(ops.rms_norm_quantized(x, x), ops.QuantizedOutput)
    assert_type(ops.ssd_scan_with_state(x, x, x, x, x), tuple[torch.Tensor, torch.Tensor])
    assert_type(ops.linear_float8_with_codes(x, x), ops.LinearFloat8Output)
    assert_type(losses.dpo_loss(x, x)[0], torch.Tensor)
    assert_type(liger_multi.memory.format_bytes(1), str)
    assert_type(liger_multi.patch("llama"), PatchReport)
    assert_type(liger_multi.unpatch("llama"), PatchReport)
    assert_type(TrainerCallback().report, PatchReport | None)
    with liger_multi.use(rms_norm="reference"), liger_multi.patched("llama") as report:
        assert_type(report, PatchReport)
    assert_type(liger_multi.explain("rms_norm").chosen("rms_norm"), str | None)
    assert_type(memory.estimate("llama-3-8b", 1, 128).peak_bytes, int)
    ops.cross_entropy(x, x, reductoin="sum")  # type: ignore[call-arg]  # pyright: ignore
"""

# of packages without types, or with some, names are Any, as for the package itself
SKIPPED = "accelerate bitsandbytes datasets deepspeed peft tokenizers transformers trl"
CONFIGURATION = f"""\
[mypy]
strict = True
python_version = 3.10
untyped_calls_exclude = torch
[mypy-{",".join(f"{name}.*" for name in SKIPPED.split())}]
follow_imports = skip
ignore_missing_imports = True
[mypy-liger_multi.*]
follow_imports = silent
"""


@pytest.fixture
def code(tmp_path):
    """A folder with the examples, and one block of README after the other as a module."""
    matches = blocks(ROOT / "README.md", "python")
    assert len(matches) >= 3
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "readme.py").write_text("\n".join([*matches, PROMISED]), encoding="utf-8")
    for path in (ROOT / "examples").glob("*.py"):
        shutil.copy(path, folder)
    return folder


def checked(*command):
    """What a checker said, which finds the package of this checkout."""
    pytest.importorskip(command[0])
    return subprocess.run(
        [sys.executable, "-m", *map(str, command)], cwd=ROOT, capture_output=True, text=True
    )


@pytest.mark.slow
def test_mypy_strict(code, tmp_path):
    configuration = tmp_path / "mypy.ini"
    configuration.write_text(CONFIGURATION, encoding="utf-8")
    options = ("--config-file", configuration, "--cache-dir", tmp_path / "cache")
    done = checked("mypy", *options, *code.glob("*.py"))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_pyright(code):
    if importlib.util.find_spec("pyright") is None:
        pytest.skip("pyright is not installed: pip install 'pyright[nodejs]'")
    settings = {
        "extraPaths": [str(ROOT)],
        "reportMissingImports": "warning",  # DeepSpeed is not among what tests install
        "reportPrivateImportUsage": "none",  # TRL exports its trainers in a way that it cannot see
    }
    (code / "pyrightconfig.json").write_text(json.dumps(settings), encoding="utf-8")
    done = checked("pyright", "--pythonpath", sys.executable, "--project", code, "--outputjson")
    text = json.loads(done.stdout)
    errors = [d for d in text["generalDiagnostics"] if d["severity"] == "error"]
    assert not errors, json.dumps(errors, indent=1)
    assert text["summary"]["filesAnalyzed"] == len(list(code.glob("*.py")))


FUNCTIONS = {
    f"{room}.{name}": getattr(importlib.import_module(room), name)
    for room in ROOMS
    for name in importlib.import_module(room).__all__
    if inspect.isfunction(getattr(importlib.import_module(room), name))
}


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_help_shows_signature_and_docstring(function):
    """The function's own, and not those of a wrapper."""
    shown = pydoc.plain(pydoc.render_doc(function))
    signature, summary = inspect.signature(function), inspect.getdoc(function).splitlines()[0]
    # Python 3.13 and newer give long signatures a line per argument
    first = " ".join(" ".join(shown.splitlines()[2:]).partition(summary)[0].split())
    parameters = list(signature.parameters.values())
    assert first.startswith(f"{function.__name__}(")
    # Python 3.14 shows annotations without quotes and modules
    annotation = inspect.formatannotation(signature.return_annotation)
    bare = [re.sub(r"'|\w+\.", "", text) for text in (first.rpartition(" -> ")[2], annotation)]
    assert bare[0] == bare[1] != ""
    assert [p.name for p in parameters] != ["args", "kwargs"]
    assert all(p.name in first for p in parameters)
    assert len(summary) > 20
    assert summary in shown
