"""The search of a plan: its cache between processes, limits, rank and passes of candidates."""

import contextlib
import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

pytest.importorskip("transformers")


import transformers

from benchmarks.memory import Case
from liger_multi import use
from liger_multi.cli.main import main
from liger_multi.dispatch.config import parse_bytes
from liger_multi.errors import ConfigurationError, PlanError
from liger_multi.memory import Settings, Space, TrainingPlan, estimate, plan
from liger_multi.memory.planning import Candidate, cost, predict, search, store
from liger_multi.memory.planning.cost import CARDS, card_of
from liger_multi.memory.planning.predict import Passes, Predictor
from liger_multi.memory.planning.shapes import Shapes
from liger_multi.memory.planning.store import Store
from liger_multi.memory.planning.traces import sequence_of, work_of
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


@pytest.mark.slow
def test_repeated_plan_needs_no_simulation(cache):
    first = cached_plan()
    assert first.simulations > 5
    again = cached_plan()
    assert again.simulations == 0
    assert again == replace(first, simulations=0)
    assert plan(config_of(), "80MiB", sequence=LENGTH, space=SMALL).simulations, "by default"


@pytest.mark.slow
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


@pytest.mark.slow
def test_plans_of_models_are_not_cached(cache):
    """A model may have code and adapters of its own."""
    model = transformers.AutoModelForCausalLM.from_config(config_of())
    for _ in range(2):
        assert cached_plan(model, limits=False).simulations
    assert not cache.exists()


# --- misses ---


def unreadable(file):
    file.unlink()
    file.mkdir()


def edited(change):
    return lambda file: file.write_text(change(file.read_text()))


@pytest.mark.slow
@pytest.mark.parametrize(
    "spoil",
    [
        edited(lambda text: text[: len(text) // 2]),
        edited(lambda text: text.replace("1", "2", 1000)),
        edited(lambda text: "not JSON"),
        edited(lambda text: "\n" + text),
        edited(lambda text: ""),
        lambda file: file.write_bytes(b"\xff\xfe\x00"),
        unreadable,
    ],
    ids=["half of it", "other numbers", "other text", "no head", "empty", "bytes", "a folder"],
)
def test_a_broken_file_is_replaced(cache, spoil):
    first = cached_plan()
    file = only(cache)
    whole = file.read_text()
    spoil(file)
    assert cached_plan() == first, "with as many simulations"
    assert file.is_dir() or file.read_text() == whole


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


@pytest.mark.slow
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


@pytest.mark.slow
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
    if sys.platform != "linux" or torch.cuda.is_initialized():
        pytest.skip("copies processes, which CUDA does not survive")
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
    monkeypatch.setattr(search.threading, "active_count", lambda: 1)
    monkeypatch.setattr(search.os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    monkeypatch.setattr(search.sys, "platform", "linux")
    # an earlier test of the process may have used its card
    monkeypatch.setattr(search.torch.cuda, "is_initialized", lambda: False)
    assert search.can_fork()
    for place, name, state in (
        (search.threading, "active_count", lambda: 2),
        (search.os, "sched_getaffinity", lambda _: {1}),
        (search.torch.cuda, "is_initialized", lambda: True),
        (search.sys, "platform", "darwin"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, state)
            assert not search.can_fork()


# Limits and rank of candidates: sizes with units, the host's memory, order.


UNITS = {
    "24GB": 24 * 10**9,
    "24 gb": 24 * 10**9,
    "24G": 24 * 10**9,
    "80GB": 80 * 10**9,
    "24GiB": 24 * 2**30,
    "24Gi": 24 * 2**30,
    "1.5TB": 15 * 10**11,
    "512M": 512 * 10**6,
    "16kB": 16_000,
    "1TiB": 2**40,
}


def limited_config(**changes):
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 172,
        "num_hidden_layers": 4,
        "vocab_size": 512,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
    }
    return transformers.LlamaConfig(**{**sizes, **changes})


@pytest.mark.parametrize("text", UNITS)
def test_units_of_bytes(text):
    assert parse_bytes(text, "x") == UNITS[text]
    if UNITS[text] > 2**20:
        assert card_of(text)[1] == card_of(f"h100:{text}")[1] == UNITS[text]


@pytest.mark.parametrize("size", ["24", 24, "h100:24", "80", "4096"])
def test_a_size_without_its_unit_is_refused(size):
    with pytest.raises(ConfigurationError, match=r"is \d+ bytes; did you mean '\d+GiB' or '\d+GB'"):
        card_of(size)


def test_bytes_without_a_unit_that_are_a_size():
    assert card_of(24 * 2**30)[1] == card_of(str(24 * 2**30))[1] == 24 * 2**30


@pytest.mark.parametrize(
    "argv",
    [
        ["plan", "qwen2-0.5b", "--gpu", "24"],
        ["plan", "qwen2-0.5b", "--gpu", "24GB", "--host-memory", "24"],
        ["estimate", "qwen2-0.5b", "--capacity", "24"],
    ],
)
def test_commands_refuse_a_size_without_its_unit(capsys, argv):
    assert main(argv) == 2
    assert "'24GiB' or '24GB'" in capsys.readouterr().err


# --- the host's memory ---


def test_the_memory_of_this_host(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert cost.host_bytes(None) == 128 * 2**30
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    monkeypatch.setattr(cost, "CONTAINER_LIMIT", tmp_path / "memory.max")
    machine_bytes = cost.host_bytes(None)
    (tmp_path / "memory.max").write_text("max\n")
    assert cost.host_bytes(None) == machine_bytes
    (tmp_path / "memory.max").write_text(f"{2**30}\n")
    assert cost.host_bytes(None) == 2**28
    assert cost.host_bytes("64GB") == 64 * 10**9
    with pytest.raises(ConfigurationError, match="'64GiB' or '64GB'"):
        cost.host_bytes("64")


SPACE = Space(
    precisions=("amp",), policies=("none",), patched=(True,), tiled=False, layouts=((1, 1),)
)


@pytest.fixture(scope="module")
def simulations(tmp_path_factory):
    """A cache folder for this file: simulations of one plan serve the next."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LIGER_MULTI_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def test_the_host_limits_what_is_offloaded():
    """Every candidate that fits stays within the memory of the device and of the host."""
    config = limited_config(num_hidden_layers=2)
    wide = plan(config, "1GiB", 1, 32, 512, space=SPACE, limits=False)
    most = max(c.host_bytes for c in wide.fitting)
    assert most > 2**21
    narrow = plan(config, "1GiB", 1, 32, 512, space=SPACE, limits=False, host_memory=most // 2)
    assert all(c.host_bytes <= narrow.host_memory_bytes < most // 2 for c in narrow.fitting)
    assert narrow.fitting
    assert any(c.host_bytes for c in narrow.fitting), "fewer sequences at a time are kept there"
    assert narrow.nearest.host_bytes <= narrow.host_memory_bytes


def test_host_memory_limits_fit():
    space = replace(SPACE, offload=False, offload_states=("cpu",))
    training_plan = plan(limited_config(), "1GiB", 1, 4, 512, space=space, limits=False)
    assert training_plan.best.host_bytes > 2**21
    with pytest.raises(PlanError, match=r"MiB of the host for each device.* MiB on the host"):
        plan(limited_config(), "1GiB", 1, 4, 512, space=space, limits=False, host_memory="2MiB")


def test_states_on_a_disk_take_no_memory_of_the_host():
    space = replace(SPACE, offload=False, offload_states=("nvme",))
    training_plan = plan(
        limited_config(), "1GiB", 1, 4, 512, space=space, limits=False, host_memory="2MiB"
    )
    assert training_plan.best.host_bytes == 0


def test_the_table_shows_the_hosts_memory(capsys, tmp_path, simulations):
    limited_config().save_pretrained(tmp_path)
    argv = [
        "plan",
        str(tmp_path),
        "--gpu",
        "1GB",
        "--batch",
        "1",
        "--seq",
        "64",
        "--no-limits",
        "--data-parallel",
        "--precision",
        "bf16",
    ]
    assert main([*argv, "--host-memory", "64MB", "--headroom", "0"]) == 0
    output = capsys.readouterr().out
    header = next(line for line in output.splitlines() if line.strip().startswith("way"))
    assert "on the host" in header
    assert "may be used of the host, each  61.0 MiB" in output
    assert main([*argv, "--host-memory", "64MB", "--headroom", "0", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["host_memory_bytes"] == 64 * 10**6


# --- what ranks first ---


@pytest.mark.parametrize(
    ("precisions", "devices", "optimizer"),
    [
        (("amp",), 1, "adamw"),
        (("bf16", "amp", "fp32"), 4, "adamw"),
        (("fp16", "fp32"), 1, "sgd"),
        (("amp", "bf16"), 4, "sgd"),
    ],
)
def test_offloaded_states_rank_lower(simulations, precisions, devices, optimizer):
    space = replace(SPACE, precisions=precisions, policies=("none", "full"))
    training_plan = plan(
        limited_config(),
        "24GB",
        devices,
        None,
        512,
        space=space,
        limits=False,
        optimizer=optimizer,
        cache=True,
    )
    places = {}
    for place, one in enumerate(training_plan.fitting):
        s = one.settings
        places[replace(s, micro_batch=1, layers=bool(s.layers), chunk=None)] = place
    moved = [way for way in places if way.offload_states]
    assert moved
    for way in moved:
        assert places[replace(way, offload_states=None)] < places[way], way
    shown = [one.relative for one in training_plan.fitting]
    assert shown[0] == pytest.approx(1, abs=0.006)
    assert [round(x, 2) for x in shown] == sorted(round(x, 2) for x in shown)


@pytest.mark.parametrize("precisions", [("bf16", "amp", "fp32"), ("amp",), ("fp16",)])
def test_a_small_model_is_not_sharded(simulations, precisions):
    space = replace(SPACE, precisions=precisions)
    training_plan = plan(
        limited_config(), "24GB", 4, None, 512, space=space, limits=False, cache=True
    )
    assert training_plan.best.settings.spread == "ddp"
    assert training_plan.best.settings.offload_states is None


def test_a_large_model_is_sharded():
    space = replace(SPACE, spreads=("ddp", "zero1", "zero3"), offload=False)
    training_plan = plan(
        limited_config(), "16MiB", 4, 4, 64, space=space, limits=False, device="cpu"
    )
    assert {c.settings.spread for c in training_plan.fitting} >= {"zero1", "zero3"}


def eight_heads():
    config = config_of()
    config.num_attention_heads = config.num_key_value_heads = 8
    config.head_dim = config.hidden_size // 8
    return config


def test_tokens_over_ranks(tmp_path):
    """A rank has its share of tokens and of shards; attention costs as much as in one process."""
    shapes = Shapes(eight_heads(), LENGTH)
    predictor = Predictor(shapes, CARDS["h100"], host=2**40)
    base = Settings(sequence=LENGTH, attention="sdpa", spread="fsdp2", data=1, recompute="none")
    some = {ranks: predictor.predict(replace(base, ranks=ranks)) for ranks in (2, 4)}
    one = predictor.predict(replace(base, spread="none", sequence=LENGTH // 4))
    sharded = replace(base, data=4, sequence=LENGTH // 4)
    peers = predictor.predict(sharded)
    assert some[4].parts["parameters"] == peers.parts["parameters"]
    assert some[4].parts["optimizer states"] == one.parts["optimizer states"] / 4
    assert some[4].peak_bytes > peers.peak_bytes, "rows are sent"
    for ranks, candidate in some.items():
        options = {"ranks": ranks, "world": ranks, "fsdp": True, "patched": True}
        expected = estimate(eight_heads(), 1, LENGTH, **options)
        assert candidate.peak_bytes == expected.peak_bytes
    hidden = LENGTH // 4 * shapes.facts.hidden * 2  # queries, keys, values and results
    forward, backward = sequence_of(predictor.traces(replace(base, ranks=4)))
    sent = work_of(forward + backward).exchanged
    assert sent == 8 * hidden * shapes.count, "in forward and in backward"
    assert some[2].peak_bytes > some[4].peak_bytes
    assert some[4].seconds > peers.seconds, "its heads see whole rows, and rows are sent"
    space = replace(SMALL, ranks=(1, 4), patched=(True, False))
    options = {"sequence": LENGTH, "precision": "bf16", "limits": False}
    result = plan(eight_heads(), "80MiB", 8, batch=2, space=space, **options)
    ways = {(c.settings.ranks, c.settings.data, c.settings.patched) for c in result.candidates}
    assert ways == {(4, 2, True)}, "8 devices take no 2 sequences otherwise"
    assert "sequences over 4 ranks x DP 2" in str(result.best.settings)
    assert any("shard_sequence(model, mesh['sp'])" in note for note in result.notes)
    assert "accelerate.yaml" not in {path.name for path in result.write(tmp_path)}
    with pytest.raises(ValueError, match="ranks must be"):
        plan(eight_heads(), "80MiB", 8, batch=2, space=replace(SMALL, ranks=(0,)), **options)
    heads = 8
    space = replace(SMALL, ranks=(1, 3, 2 * heads), patched=(True,))
    for devices in (3, 2 * heads):
        result = plan(eight_heads(), "80MiB", devices, batch=devices, space=space, **options)
        assert {c.settings.ranks for c in result.candidates} == {1}, "they divide no heads"
    with pytest.raises(ValueError, match=r"3 devices, and the 8 heads .* over ranks=\[3, 16\]"):
        plan(eight_heads(), "80MiB", 3, batch=1, space=space, **options)
    with pytest.raises(ValueError, match=rf"ranks={2 * heads} do not divide .* most {heads} ranks"):
        estimate(eight_heads(), 1, LENGTH, ranks=2 * heads)


def test_plans_of_a_thousand_cards():
    """Peaks fall and then stay, from 1 to 1,024 cards, and the host's memory is a limit."""
    space = replace(SMALL, ranks=(1, 8), spreads=("fsdp2",), patched=(True,))
    peaks = []
    for cards in (1, 8, 64, 1024):
        options = {"batch": max(1, cards // 8), "sequence": LENGTH, "limits": False}
        result = plan(eight_heads(), "80MiB", cards, space=space, **options)
        assert result.best.settings.data * result.best.settings.ranks == cards
        peaks.append(min(candidate.peak_bytes for candidate in result.candidates))
    assert peaks == sorted(peaks, reverse=True)


def test_page_without_offloading():
    space = replace(SPACE, offload=False, offload_states=(None,))
    training_plan = plan(limited_config(), "1GiB", 1, 4, 512, space=space, limits=False)
    assert {row[4] for row in training_plan.page().sections[1].rows} == {"-"}


def test_picture_labels_fit(tmp_path, monkeypatch):
    """Labels of the longest candidates and of the axis lie within the picture."""
    pictures = pytest.importorskip("liger_multi.files.pictures")
    pytest.importorskip("matplotlib")
    labels = []

    @contextlib.contextmanager
    def watched(*args, **options):
        with pictures.figure(*args, **options) as figure:
            yield figure
            figure.draw_without_rendering()
            (axis,) = figure.axes
            for label in (axis.xaxis.label, *axis.get_yticklabels(), axis.title):
                box = label.get_window_extent()
                labels.append(label.get_text())
                assert box.x0 >= 0, label
                assert box.x1 <= figure.bbox.x1, label
                assert box.y0 >= 0, label

    monkeypatch.setattr("liger_multi.memory.planning.result.figure", watched)
    way = Settings(
        recompute="norms_and_mlp",
        layers=80,
        tiles=16,
        offload_activations=True,
        spread="fsdp2",
        offload_states="cpu",
        tensor=4,
        pipeline=4,
        data=64,
        micro_batch=32,
        accumulation=64,
    )
    ways = [Candidate(replace(way, data=n), 2**36, {"parameters": 2**36}) for n in range(1, 13)]
    training_plan = TrainingPlan("llama", 80, "card", 2**36, 2**36, 64, None, ways)
    training_plan.draw(tmp_path / "plan.png")
    assert any("DP 12" in text for text in labels), "the end of a way is there"
    assert any("dashed: the budget" in text for text in labels)


# Passes of all candidates are derived from few simulations, and equal simulated ones.


LIMITED_LENGTH = 128
BASE = Settings(sequence=LIMITED_LENGTH, precision="bf16", chunk=16 * LIMITED_LENGTH)
STOCK = {"patched": False, "chunk": None}


def config_for_passes(model_name="dense", layers=5, **changes):
    config = Case(model_name, 2, LIMITED_LENGTH).config()
    data = {name: value for name, value in config.to_dict().items() if name != "layer_types"}
    return type(config)(**{**data, "num_hidden_layers": layers, **changes})


def predictor_of(config):
    return Predictor(Shapes(config, LIMITED_LENGTH), CARDS["h200"])


def same(actual, expected):
    assert (actual.peak_bytes, actual.parts, actual.host_bytes) == (
        expected.peak_bytes,
        expected.parts,
        expected.host_bytes,
    )
    assert actual.seconds == pytest.approx(expected.seconds, rel=1e-12)


@pytest.fixture
def simulate_all(monkeypatch):
    """Nothing is derived, and every head is simulated with its own layers."""

    def start(predictor):
        simulated = predictor.passes
        monkeypatch.setattr(
            simulated,
            "_trace",
            lambda settings, recompute: predict.Trace(
                *simulated._simulate(settings, recompute, simulated.shapes.depth)
            ),
        )
        return predictor

    return start


# --- layers and heads ---

WAYS = {
    "plain": {},
    "autocast": {"precision": "amp"},
    "stock": STOCK,
    "recomputed": {"recompute": "norms_and_mlp", "layers": 2},
    "recomputed, autocast": {"recompute": "keep_attention", "layers": 3, "precision": "amp"},
    "recomputed, stock": {"recompute": "full", "layers": 5, "precision": "amp", **STOCK},
    "tiles": {"tiles": 2},
    "offloaded": {"offload_activations": True},
}


@pytest.mark.parametrize("model_name", ["dense", "moe", "tied"])
@pytest.mark.parametrize("way", WAYS)
def test_derived_passes_equal_simulated(simulate_all, model_name, way):
    """Other numbers of sequences and other chunks, derived from simulated layers."""
    if model_name == "moe" and way == "tiles":
        pytest.skip("experts do not run in tiles")
    settings = replace(BASE, **WAYS[way])
    some, every = (
        predictor_of(config_for_passes(model_name)),
        simulate_all(predictor_of(config_for_passes(model_name))),
    )
    for micro in (1, 4, 12, 16):
        some.predict(replace(settings, micro_batch=micro))
    for micro in (8, 16):
        same(*(p.predict(replace(settings, micro_batch=micro)) for p in (some, every)))
    before = some.simulations
    if settings.patched:
        for micro, chunk in ((1, 64), (4, LIMITED_LENGTH), (8, 3 * LIMITED_LENGTH)):
            few = replace(settings, micro_batch=micro, chunk=chunk)
            same(some.predict(few), every.predict(few))
        assert some.simulations <= before + 6, "a head for each, of one layer"


@pytest.mark.parametrize(
    ("keys", "changes"),
    [
        *((16, changes) for changes in ({}, {"precision": "amp"}, STOCK, {"recompute": "full"})),
        (8, {"precision": "fp32"}),
    ],
)
def test_tensor_parallelism_between_two_degrees(simulate_all, keys, changes):
    """With one key head per device, PyTorch's fp32 attention needs no copies: it is simulated."""
    config = config_for_passes(num_attention_heads=16, num_key_value_heads=keys, head_dim=8)
    settings = replace(BASE, micro_batch=2, layers=5 * ("recompute" in changes), **changes)
    some, every = predictor_of(config), simulate_all(predictor_of(config))
    some.passes.tensors = (1, 8)
    for tensor in (1, 8):
        some.predict(replace(settings, tensor=tensor))
    before = some.simulations
    for tensor in (2, 4):
        one = replace(settings, tensor=tensor)
        same(some.predict(one), every.predict(one))
    assert (some.simulations > before) == (keys == 8)


@pytest.mark.parametrize("policy", ["full", "norms_and_mlp", "keep_attention"])
def test_casts_freed_after_forward(policy):
    """Only those of the simulated layers were freed; the others stayed until backward."""
    settings = replace(BASE, micro_batch=2, precision="amp", recompute=policy, layers=12)
    short, full = (predictor_of(config_for_passes(layers=12)) for _ in range(2))
    full.shapes.facts.uniform = False
    same(short.predict(settings), full.predict(settings))
    assert len(short.traces(settings)[0].body.layers) == 3


def test_recomputed_layer_work():
    """Its sums were taken for sums of gradients: GPT-2 under autocast raised a CheckpointError."""
    sizes = {"n_layer": 4, "n_embd": 64, "n_head": 4, "vocab_size": 1000}
    config = transformers.GPT2Config(**sizes, bos_token_id=None, eos_token_id=None)
    predictor = predictor_of(config)
    plain = predictor.predict(replace(BASE, micro_batch=4, precision="amp"))
    for policy in ("norms", "norms_and_mlp", "keep_attention"):
        settings = replace(BASE, micro_batch=4, precision="amp", recompute=policy, layers=4)
        assert predictor.predict(settings).peak_bytes < plain.peak_bytes


# --- number of simulations ---


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layers", "options", "most"),
    [
        (2, {"memory": "80MiB", "sequence": 64}, 84),
        pytest.param(2, {"memory": "24GiB", "sequence": 64}, 70, marks=pytest.mark.slow),
        pytest.param(
            6,
            {"memory": "200MiB", "sequence": 128, "devices": 4, "limits": False},
            90,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_plan_needs_few_simulations(layers, options, most):
    """There were 125, 67 and 114 before layers and heads were simulated separately."""
    config = config_for_passes(
        layers=layers, num_attention_heads=8, num_key_value_heads=8, head_dim=12
    )
    assert plan(config, **options).simulations <= most
