"""The cache of simulations between processes: its folder, its lifetime, and when it is ignored."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

pytest.importorskip("transformers")

from benchmarks.memory import Case
from liger_multi.cli.main import main
from liger_multi.errors import PlanError
from liger_multi.memory import Space, plan
from liger_multi.memory.planning import forked, search, store
from liger_multi.memory.planning.passes import Passes
from liger_multi.memory.planning.store import Store
from liger_multi.memory.sizes import SIZES, Source
from tests import harness

LENGTH = 64
SMALL = Space(
    precisions=("bf16",),
    policies=("none", "full"),
    offload=False,
    tiled=False,
    offload_states=(None,),
    layouts=((1, 1),),
)


def config_of(layers=2):
    config = Case("dense", 2, LENGTH).config()
    config.num_hidden_layers = layers
    return config


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """An empty cache folder."""
    monkeypatch.setenv(store.VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache" / "plans"


@pytest.fixture
def model(tmp_path):
    """A folder with the configuration of two layers."""
    config_of().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def cached_plan(config=None, memory="80MiB", **options):
    return plan(config or config_of(), memory, sequence=LENGTH, space=SMALL, cache=True, **options)


def only(cache):
    (file,) = cache.iterdir()
    return file


# --- hits ---


def test_repeated_plan_needs_no_simulation(cache):
    first = cached_plan()
    assert first.simulations > 5
    again = cached_plan()
    assert again.simulations == 0
    assert again == replace(first, simulations=0)
    assert plan(config_of(), "80MiB", sequence=LENGTH, space=SMALL).simulations, "by default"


def test_simulations_shared_between_plans(cache):
    most = cached_plan().simulations
    assert cached_plan(memory="2GiB", limits=False).simulations < most / 2
    assert cached_plan(memory="80MiB", limits=False, optimizer="sgd").simulations == 0
    assert cached_plan(memory="2GiB", limits=False).simulations == 0
    assert cached_plan(config_of(3)).simulations, "another architecture"
    assert len(list(cache.iterdir())) == 2


def test_plan_that_does_not_fit_is_cached(cache):
    for _ in range(2):
        with pytest.raises(PlanError) as raised:
            cached_plan(memory="1MiB")
    assert raised.value.plan.simulations == 0


def test_cached_plan_builds_no_model(cache, model, monkeypatch):
    source = Source(model)
    first = cached_plan(source)
    monkeypatch.setattr(Source, "__call__", lambda self: pytest.fail("asked for"))
    assert cached_plan(source) == replace(first, simulations=0)


def test_published_size_identity():
    identities = [json.dumps(Source(name).identity) for name in SIZES]
    assert len(set(identities)) == len(SIZES)


def test_plans_of_models_are_not_cached(cache):
    """A model may have code and adapters of its own."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config_of())
    for _ in range(2):
        assert cached_plan(model, limits=False).simulations
    assert not cache.exists()


# --- misses ---


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: text[: len(text) // 2],
        lambda text: text.replace("1", "2", 1000),
        lambda text: "not JSON",
        lambda text: "\n" + text,
        lambda text: "",
    ],
    ids=["half of it", "other numbers", "other text", "no head", "empty"],
)
def test_a_broken_file_is_replaced(cache, spoil):
    first = cached_plan()
    file = only(cache)
    whole = file.read_text()
    file.write_text(spoil(whole))
    assert cached_plan() == first, "with as many simulations"
    assert file.read_text() == whole


def test_a_file_that_cannot_be_decoded_or_read(cache):
    first = cached_plan()
    file = only(cache)
    file.write_bytes(b"\xff\xfe\x00")
    assert cached_plan().simulations == first.simulations
    file.unlink()
    file.mkdir()
    assert cached_plan().simulations == first.simulations


@pytest.mark.parametrize("what", ["torch", "packages", "sources", "configuration", "python"])
def test_another_environment_simulates(cache, monkeypatch, what):
    first = cached_plan()
    assert set(store.environment()) >= {what}
    other = {**store.environment(), what: "another"}
    with monkeypatch.context() as patched:
        patched.setattr(store, "environment", lambda: other)
        assert cached_plan().simulations == first.simulations
        assert cached_plan().simulations == 0
    assert cached_plan().simulations == first.simulations, "one environment at a time"


def test_sources_and_configuration_have_names(tmp_path, monkeypatch):
    from liger_multi import use

    (tmp_path / "a.py").write_text("1")
    (tmp_path / "b.txt").write_text("1")
    store.sources.cache_clear()
    first = store.sources(tmp_path)
    (tmp_path / "b.txt").write_text("2")
    store.sources.cache_clear()
    assert store.sources(tmp_path) == first
    (tmp_path / "a.py").write_text("2")
    store.sources.cache_clear()
    assert store.sources(tmp_path) != first
    plain = store.environment()
    with use(rms_norm="reference"):
        assert store.environment()["configuration"] != plain["configuration"]
    assert store.environment() == plain


def test_entries_of_old_format_are_replaced(cache):
    """The checksum is right, but the entries have an older format."""
    first = cached_plan()
    file = only(cache)
    text = file.read_text()
    head, _, body = text.partition("\n")
    entries = json.loads(body)
    entries["bodies"] = {name: {"segments": 3} for name in entries["bodies"]}
    key = head.split()[1]
    other = Store(None)
    other._key = key
    changed = json.dumps(entries)
    file.write_text(f"{other._head(changed)}\n{changed}")
    assert cached_plan().candidates == first.candidates


# --- the file ---


def test_concurrent_stores_merge(tmp_path):
    path = tmp_path / "some.json"
    one, two = Store(path, {"a": 1}), Store(path, {"a": 1})
    one.write("section", "x", [1])
    one.save()
    two.write("section", "y", [2])
    two.save()
    merged = Store(path, {"a": 1})
    assert merged.names("section") == ["x", "y"]
    assert merged.read("section", "x", list) == [1]
    assert merged.read("section", "z", list) is None
    assert not list(tmp_path.glob("*.part"))


def test_a_file_does_not_grow_without_end(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "MOST_BYTES", 100)
    path = tmp_path / "some.json"
    for name in ("x", "y"):
        one = Store(path)
        one.write("section", name, "long" * 20)
        one.save()
    assert Store(path).names("section") == ["y"]


def test_a_folder_that_cannot_be_written_is_no_error(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(store.VARIABLE, str(tmp_path / "file" / "below"))
    assert cached_plan(limits=False).simulations
    assert (tmp_path / "file").read_text() == ""


@pytest.mark.parametrize(
    ("named", "home", "expected"),
    [
        ("/there", "/x", "/there"),
        ("", "/x", "/x/liger_multi"),
        ("", "relative", "~/.cache/liger_multi"),
        ("", "", "~/.cache/liger_multi"),
    ],
)
def test_cache_folder(monkeypatch, named, home, expected):
    monkeypatch.setenv(store.VARIABLE, named)
    monkeypatch.setenv("XDG_CACHE_HOME", home)
    assert str(store.folder()) == os.path.expanduser(expected)


# --- the command ---

ARGV = ["--gpu", "80MiB", "--seq", "64", "--precision", "bf16", "--data-parallel", "--no-limits"]


def test_the_command_keeps_simulations(cache, model, capsys):
    argv = ["plan", str(model), *ARGV, "--json"]
    plans = []
    for options in (["--no-cache"], [], [], ["--no-cache"]):
        assert main([*argv, *options]) == 0
        plans.append(json.loads(capsys.readouterr().out))
        assert options != ["--no-cache"] or len(plans) > 1 or not cache.exists()
    counts = [one.pop("simulations") for one in plans]
    assert counts[0] == counts[1] == counts[3] > 5
    assert counts[2] == 0
    assert plans[0] == plans[1] == plans[2] == plans[3]


def test_cached_plan_imports_no_transformers(cache, model):
    """Its import takes longer than everything else."""
    assert main(["plan", str(model), *ARGV]) == 0
    code = (
        "import sys; from liger_multi.cli.main import main; code = main(sys.argv[1:]); "
        "sys.exit(code or 7 * ('transformers' in sys.modules))"
    )
    command = [sys.executable, "-c", code, "plan", str(model), *ARGV]
    done = subprocess.run(command, capture_output=True, text=True, timeout=harness.PATIENCE)
    assert done.returncode == 0, done.stderr
    assert "Ways, the fastest that fits first" in done.stdout


# --- in two processes ---

BROAD = Space(precisions=("bf16", "fp32"), policies=("none", "full"), layouts=((1, 1),))


@pytest.fixture
def two(monkeypatch):
    """This process may be forked, whatever its threads."""
    if sys.platform != "linux":
        pytest.skip("copies processes")
    monkeypatch.setattr(search, "can_fork", lambda: True)


def planned(**options):
    return plan(config_of(), "80MiB", sequence=LENGTH, space=BROAD, limits=False, **options)


@pytest.mark.slow
def test_plan_with_two_processes(two, monkeypatch, tmp_path):
    """Each process simulates a part; only the first one reports progress."""
    alone, simulated, messages = planned(), Passes._simulated, []

    def watched(self, *rest):
        (tmp_path / f"{os.getpid()} {self.simulations}").touch()
        return simulated(self, *rest)

    def report(text):
        messages.append(text)
        (tmp_path / f"said by {os.getpid()}").touch()

    monkeypatch.setattr(Passes, "_simulated", watched)
    both = planned(processes=2, said=report)
    assert both == replace(alone, simulations=both.simulations)
    files = [file.name for file in tmp_path.iterdir()]
    assert [name for name in files if "said" in name] == [f"said by {os.getpid()}"]
    assert len(files) - 1 == both.simulations < 1.2 * alone.simulations
    assert 0 < len(messages) < 0.8 * alone.simulations


@pytest.mark.slow
def test_plan_when_second_process_fails(two, monkeypatch):
    main, simulated = os.getpid(), Passes._simulated

    def only_here(self, *rest):
        if os.getpid() != main:
            raise RuntimeError("no simulation in the copy")
        return simulated(self, *rest)

    alone = planned()
    monkeypatch.setattr(Passes, "_simulated", only_here)
    assert planned(processes=2) == alone


def test_cached_plan_starts_no_process(two, monkeypatch, cache):
    cached_plan()
    monkeypatch.setattr(search, "forked", lambda work: pytest.fail("a process was started"))
    assert cached_plan(processes=2).simulations == 0


def test_no_fork_with_threads(monkeypatch):
    monkeypatch.setattr(forked.threading, "active_count", lambda: 1)
    monkeypatch.setattr(forked.os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    monkeypatch.setattr(forked.sys, "platform", "linux")
    # an earlier test of the process may have used its card
    monkeypatch.setattr(forked.torch.cuda, "is_initialized", lambda: False)
    assert forked.can_fork()
    for place, name, state in (
        (forked.threading, "active_count", lambda: 2),
        (forked.os, "sched_getaffinity", lambda _: {1}),
        (forked.torch.cuda, "is_initialized", lambda: True),
        (forked.sys, "platform", "darwin"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, state)
            assert not forked.can_fork()
