"""Whatever a user passes is accepted with its documented meaning or refused in one clear error.

Configuration values and files are drawn from seeded generators and judged by rules that are
implemented here a second time; every option of every command gets meaningless values.
"""

import argparse
import contextlib
import enum
import json
import logging
import math
import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch
import yaml

import liger_multi
from liger_multi import ops
from liger_multi.cli.main import _parser, main
from liger_multi.dispatch import config, launch, registry, resolve as planning
from liger_multi.dispatch.config import configure, current, forget, load, parse, parse_bytes
from liger_multi.errors import ConfigurationError, shown, unknown
from liger_multi.files import documents
from liger_multi.memory import Profile, estimate
from liger_multi.memory.sizes import config_of
from tests.comparing import recorded
from tests.harness import PATIENCE

ROOT = Path(__file__).parents[2]


@contextlib.contextmanager
def at_most(seconds):
    """Reads that would block raise instead."""

    def late(*_):
        raise TimeoutError(f"still busy after {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# --- values of a configuration ---


class Backend(str, enum.Enum):
    REFERENCE = "reference"


class Loud:
    """Nothing can be asked of it."""

    def __repr__(self):
        raise OSError("no repr")

    def __eq__(self, other):
        raise OSError("no comparison")

    def __bool__(self):
        raise OSError("no truth")

    __hash__ = object.__hash__


def circle():
    items = []
    items.append(items)
    return items


VALUES = (
    None,
    True,
    False,
    0,
    1,
    -1,
    3,
    2**62,
    2**63,
    10**400,
    10**5000,
    -(10**5000),
    0.0,
    1.5,
    2.0,
    math.nan,
    math.inf,
    1e308,
    1j,
    "",
    " ",
    "auto",
    "reference",
    "triton",
    "refrence",
    "512MiB",
    "1.5GiB",
    "1.5",
    "0.3KiB",
    "12",
    "-12",
    "٣MiB",
    "9" * 400,
    "9" * 5000,
    "512 mib ",
    "1 TB",
    "a\0b",
    "\ud800",
    "x" * 10**6,
    "['reference']",
    "exact",
    "float8",
    "float8_logits",
    "on",
    [],
    ["reference"],
    ["triton", "reference"],
    ["reference", "reference"],
    ["auto"],
    ["auto", "reference"],
    [["reference"]],
    [None],
    [1],
    ("reference",),
    {"reference"},
    {},
    {"a": 1},
    {1: 2},
    b"reference",
    bytearray(b"x"),
    numpy.int64(4096),
    numpy.float32(2),
    numpy.array(["reference"]),
    numpy.bool_(True),
    torch.tensor(4096),
    torch.float32,
    Loud(),
    Backend.REFERENCE,
    circle(),
    iter(["reference"]),
    object,
    len,
    Path("reference"),
)
OPERATORS = (
    "rms_norm",
    "rms_*",
    "*",
    "sw?glu",
    "[rs]*",
    "[z-a]",
    "[",
    "",
    "rms_nrom",
    "RMS_NORM",
    "\0",
    "\ud800",
    "*" * 500,
    "a" * 10**5,
    "ops",
    "default",
)
DEVICES = (
    "cpu",
    "cuda",
    "npu",
    "xpu",
    "meta",
    "cuda:0",
    "cuda:300",
    "CUDA",
    "gpu",
    "",
    "\0",
    "\ud800",
)
KEYS = (None, True, 1, 1.5, 10**5000, (), b"ops", Loud(), "", "op", "Ops")


def is_choice(value):
    """A backend's name, or a list of different ones; 'auto' stands alone."""
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not names:
        return False
    if not all(isinstance(n, str) and n in (*registry.backends(), "auto") for n in names):
        return False
    return len(names) == len(set(names)) and (len(names) == 1 or "auto" not in names)


def is_bytes(value):
    """A positive integer below 2**63, or a text of one with a unit."""
    if isinstance(value, int | numpy.integer) and not isinstance(value, bool):
        return 1 <= value < 2**63
    if not isinstance(value, str) or len(value) > 60:
        return False
    match = re.fullmatch(r"\s*(\d+)(\.\d+)?\s*(|b|[kmgt]i?b?)\s*", value.lower(), re.ASCII)
    if not match or (match[2] and match[3] in ("", "b")):
        return False
    base, power = 1024 if "i" in match[3] else 1000, "bkmgt".index((match[3] or "b")[0])
    return 1 <= float(match[1] + (match[2] or "")) * base**power < 2**63


def outcome(function, *args, **options):
    """Whether it was accepted; any other exception than ours fails the test."""
    message = ""
    try:
        function(*args, **options)
    except ConfigurationError as error:
        message = str(error)
        message.encode("utf-8")
    assert len(message) < 3000
    return not message


@pytest.mark.parametrize("index", range(len(VALUES)))
def test_any_value_in_any_place(index):
    value = VALUES[index]
    empty = value is None or (isinstance(value, dict) and not value)
    absent = value is None
    assert outcome(parse, {"default": value}, "x") == (absent or is_choice(value))
    assert outcome(parse, {"ops": {"rms_norm": value}}, "x") == (absent or is_choice(value))
    assert outcome(parse, {"chunk_bytes": value}, "x") == (value is None or is_bytes(value))
    assert outcome(parse, {"ops": value}, "x") == empty
    assert outcome(parse, {"devices": value}, "x") == empty
    assert outcome(parse_bytes, value, "x") == is_bytes(value)
    for _ in range(2):  # scopes are cached by their text: no two scopes may have the same one
        with contextlib.ExitStack() as stack:
            scope = lambda **choices: stack.enter_context(liger_multi.use(**choices))  # noqa: E731
            assert outcome(scope, rms_norm=["reference"])
            assert outcome(scope, rms_norm=value) == is_choice(value)
            assert outcome(scope, default=value) == is_choice(value)
    if value is not None and not isinstance(value, str | os.PathLike):
        assert outcome(configure, value) == (isinstance(value, dict) and not value)


def test_a_scope_is_no_text_of_another():
    with liger_multi.use(rms_norm=["reference"]):
        pass
    with (
        pytest.raises(ConfigurationError, match="unknown backend for 'rms_norm'"),
        liger_multi.use(rms_norm="['reference']"),
    ):
        pass


@pytest.mark.parametrize("index", range(len((*KEYS, *OPERATORS, *DEVICES))))
def test_any_key_in_any_place(index):
    key = (*KEYS, *OPERATORS, *DEVICES)[index]
    assert not outcome(parse, {key: {}}, "x") or key == "ops"
    served = isinstance(key, str) and key in OPERATORS[:5]
    assert outcome(parse, {"ops": {key: "reference"}}, "x") == served
    there = isinstance(key, str) and key in DEVICES[:5]
    assert outcome(parse, {"devices": {key: None}}, "x") == there


def test_byte_counts():
    assert parse_bytes("1.5GiB", "x") == 3 * 2**29
    assert parse_bytes(4096, "x") == 4096
    assert parse_bytes("9007199254740993", "x") == 2**53 + 1
    assert parse_bytes(numpy.int64(5), "x") == 5
    assert parse_bytes("0.3KiB", "x") == 307
    with pytest.raises(ConfigurationError, match="positive number"):
        parse_bytes("1 TX", "x")
    with pytest.raises(ConfigurationError, match=r"below 2\*\*63 .* got 1\.5"):
        parse_bytes(1.5, "x")
    with pytest.raises(ConfigurationError, match="got an integer of 16610 bits"):
        parse_bytes(10**5000, "x")


def test_messages_are_short_and_never_fail():
    for value in VALUES:
        assert len(shown(value)) < 1000
        assert len(unknown("thing", value, ["one", "two"])) < 1000
    many = [f"name_{i}" for i in range(500)]
    message = unknown("thing", "name_17", many)
    assert "did you mean 'name_17'" in message
    assert message.count("name_") <= 8
    assert "500 known" in message


# --- plans ---


@pytest.fixture
def built(monkeypatch):
    """The operators and directions that were resolved, in order."""
    forget()  # what earlier tests resolved
    note = lambda self, prim, *_: f"{prim.op.name}.{prim.direction}"  # noqa: E731
    return recorded(monkeypatch, planning.Dispatch, "__init__", note)


def step():
    ops.rms_norm(torch.randn(3, 8, requires_grad=True)).sum().backward()


def test_configure_within_scope_resolves_once(built):
    with liger_multi.use(rms_norm=["reference"]):
        configure({"ops": {"swiglu": "reference"}})
        identities = {id(current()) for _ in range(3)}
        for _ in range(4):
            step()
        assert current().choice_in("rms_norm", ("cpu", "")).source == "use()"
        assert current().choice_in("swiglu", ("cpu", "")).source == "configure()"
    assert len(identities) == 1
    assert sorted(built) == ["rms_norm.backward", "rms_norm.forward"]


def test_equal_configuration_resolves_nothing(built, tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("ops: {rms_norm: reference}\n")
    for _ in range(3):
        for source in ({"ops": {"rms_norm": ["reference"]}}, path, None):
            configure(source)
            step()
            with liger_multi.use(rms_norm="reference"):
                step()
                configure({"default": "auto", "chunk_bytes": "2MiB"})
                step()
    assert len(built) == 2 * (3 * 2 + 1), "one plan a half and configuration"
    assert len(built) == len(set(built)) * 7


def test_patterns_count_in_their_order():
    first = {"ops": {"rms_*": "reference", "rms_n*": ["triton", "reference"]}}
    second = {"ops": dict(reversed(first["ops"].items()))}
    assert configure(first).choice_in("rms_norm", ("cpu", "")).order == ("reference",)
    assert configure(second).choice_in("rms_norm", ("cpu", "")).order == ("triton", "reference")


def test_configurations_do_not_pile_up():
    for size in range(1, 3 * config.MOST_CONFIGURATIONS):
        configure({"chunk_bytes": size})
    assert len(config._configurations) <= config.MOST_CONFIGURATIONS
    assert current().chunk_bytes == size


def test_a_fall_back_is_logged_once_for_each_configuration(monkeypatch, caplog):
    module = registry.module("triton", "swiglu")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(module, "supports", lambda gate: "is away today", raising=False)
    x = torch.randn(2, 8)
    with caplog.at_level(logging.WARNING, "liger_multi"):
        for _ in range(3):
            with liger_multi.use(swiglu=["triton", "reference"]):
                configure({"ops": {"rms_norm": "reference"}})
                ops.swiglu(x, x)
                ops.swiglu(x, x)
    messages = [r.getMessage() for r in caplog.records if "is away today" in r.getMessage()]
    assert len(messages) == 1


# --- files ---

BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{b}: &{b} [{', '.join(['*' + a] * 10)}]\n"
    for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)
REFUSED = {
    "twice": (
        b"ops: {rms_norm: reference}\nops: {}\n",
        "line 2, .*'ops' is given twice, first on line 1",
    ),
    "twice inside": (
        b"ops:\n  rms_norm: reference\n  'rms_norm': triton\n",
        "line 3, .*given twice",
    ),
    "a boolean": (b"ops: {rms_norm: true}\n", "got True"),
    "on": (b"default: on\n", "unknown backend .* 'on'"),
    "off": (b"ops: {swiglu: off}\n", "unknown backend .* 'off'"),
    "a date": (b"default: 2026-13-45\n", "unknown backend .* '2026-13-45'"),
    "minutes": (b"chunk_bytes: 1:30\n", "got '1:30'"),
    "hexadecimal": (b"chunk_bytes: 0x10\n", "got '0x10'"),
    "a fraction": (b"chunk_bytes: 1.5\n", "got 1.5"),
    "400 digits": (b"chunk_bytes: " + b"9" * 400, "number of 400 digits"),
    "5000 digits": (b"chunk_bytes: " + b"9" * 5000, "number of 5000 digits"),
    "an exponent": (b"chunk_bytes: 1e999\n", "got '1e999'"),
    "infinity": (b"chunk_bytes: 1.0e+999\n", "out of range"),
    "a text of digits": (b"chunk_bytes: '" + b"9" * 400 + b"'", "positive number"),
    "brackets": (b"[" * 3000, "nested deeper than 32 levels"),
    "braces": (b"ops: " + b"{a: " * 3000, "nested deeper than 32 levels"),
    "an open bracket": (b"ops: {rms_norm: [", "is not YAML"),
    "dashes": (b"- " * 3000, "nested deeper than 32 levels"),
    "a list of operators": (b"ops: []\n", "must be a mapping of operator names"),
    "a list of devices": (b"devices: []\n", "must be a mapping of device types"),
    "a text": (b"reference\n", "must be a mapping with the keys"),
    "a list": (b"- ops\n", "must be a mapping with the keys"),
    "a number as key": (b"1: {}\n", "key must be text, got 1"),
    "a list as key": (b"? [a]\n: b\n", "key must be text"),
    "an empty key": (b"? \n: b\n", "key must be text, got None"),
    "a merge": (b"x: &x {rms_norm: reference}\nops: {<<: *x}\n", "unknown key"),
    "a tab": (b"ops:\n\trms_norm: reference\n", "line 2"),
    "two documents": (b"ops: {}\n---\nops: {}\n", "a second document begins"),
    "a tag": (b"!!python/object/apply:os.system ['true']\n", "the tag .* is not supported"),
    "a plain tag": (b"chunk_bytes: !!int x\n", "the tag .* is not supported"),
    "a bomb": (BOMB.encode(), "more than 10000 values"),
    "itself": (b"ops: &a {x: *a}\n", "the alias 'a' has no anchor before it"),
    "no anchor": (b"ops: *a\n", "the alias 'a' has no anchor"),
    "latin": ("default: réf\n".encode("latin-1"), "is not YAML: its text is not UTF-8, byte 10"),
    "binary": (b"\xff\xfe\x00\x9f", "is not YAML"),
    "UTF-16": ("default: auto\n".encode("utf-16"), "is not YAML: its text is not UTF-8"),
    "a NUL": (b"default: a\0b\n", r"is not YAML: line 1: it holds the character '\\x00'"),
    "beyond Unicode": (b'default: "\\UFFFFFFFF"\n', "is not YAML"),
    "a directive": (b"%YAML " + b"9" * 5000 + b".1\n---\na: b\n", "is not YAML"),
    "huge": (b"# " + b"x" * 2**21, "larger than 1 MiB"),
    "many": (b"ops: [" + b"a," * 20000 + b"]", "more than 10000 values"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_that_is_refused(name, tmp_path, monkeypatch):
    content, message = REFUSED[name]
    path = tmp_path / "a.yaml"
    path.write_bytes(content)
    with at_most(20), pytest.raises(ConfigurationError, match=message) as error:
        load(path)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 2500
    assert str(path) in str(error.value)
    monkeypatch.setenv("LIGER_MULTI_CONFIG", str(path))
    with pytest.raises(ConfigurationError, match=rf"{message}.*\(named by LIGER_MULTI_CONFIG\)"):
        configure({"default": "auto"})


@pytest.mark.parametrize(
    ("content", "keys"),
    [
        (b"", {}),
        (b"# nothing\n", {}),
        (b"---\n", {}),
        (b"null\n", {}),
        (b"ops:\ndevices:\nchunk_bytes:\nhead_gemms:\n", {}),
        (b"devices: {cuda: }\n", {}),
        ("\ufeffchunk_bytes: 4096\n".encode(), {"chunk_bytes": 4096}),
        (b"chunk_bytes: 0512\n", {"chunk_bytes": 512}),
        (b"chunk_bytes: '1.5GiB'\r\n", {"chunk_bytes": 3 * 2**29}),
        (b"x-y: 1\n", None),
        (b"head_gemms: float8\n...\n", {"head_gemms": "float8"}),
    ],
)
def test_a_file_that_is_taken(content, keys, tmp_path):
    path = tmp_path / "a.yaml"
    path.write_bytes(content)
    if keys is None:
        assert not outcome(load, path)
        return
    layer = load(path)
    assert layer.chunk_bytes == keys.get("chunk_bytes")
    assert layer.head_gemms == keys.get("head_gemms")


def test_places_that_are_no_file(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    places = {
        tmp_path: "Is a directory",
        pipe: "it is a pipe, not a file",
        "/dev/zero": "it is a device, not a file",
        "": "No such file",
        "a\0b": "null byte",
        "\ud800": "surrogates",
        "x" * 10**5: "File name too long",
        tmp_path / "absent.yaml": "No such file",
        5: "must be named by text or a path, got int 5",
        b"a.yaml": "must be named by text or a path, got bytes",
        True: "got bool True",
        1.5: "got float 1.5",
    }
    for place, message in places.items():
        with at_most(20), pytest.raises(ConfigurationError, match=message):
            configure(place)


def test_written_plans_load(tmp_path):
    """PyYAML writes YAML 1.1, from which nothing may change here."""
    content = {
        "a": True,
        "b": None,
        "c": 5,
        "d": [1.5, -2, 1e-05, "on", "1:30", "0512", "08", "~", ""],
        "e": {"f": "2026-01-01", "g": "null", "h": "é", "i": "1e5", "j": 1e5},
    }
    path = tmp_path / "a.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    assert documents.read_yaml(path, "the plan") == content


PIECES = (
    "ops",
    "rms_norm",
    "reference",
    "auto",
    "devices",
    "cuda",
    "default",
    "chunk_bytes",
    "512MiB",
    ": ",
    ":\n  ",
    ", ",
    "\n",
    "\n- ",
    "[",
    "]",
    "{",
    "}",
    "&a ",
    "*a",
    "!!int ",
    "!",
    "|",
    ">",
    "'",
    '"',
    "#",
    "---\n",
    "...\n",
    "%YAML 1.1\n",
    "? ",
    "\t",
    "\0",
    "\u2028",
    "\ufeff",
    "@",
    "`",
    "1",
    "9" * 50,
    ".",
    "e",
    "~",
    "on",
    "\\x",
    "<<",
)


@pytest.mark.parametrize("seed", range(4))
def test_any_text_as_configuration(seed, tmp_path):
    rng, path = random.Random(seed), tmp_path / "a.yaml"
    valid = "ops:\n  rms_norm: reference\ndevices: {cuda: {default: auto}}\nchunk_bytes: 512MiB\n"
    accepted = 0
    for turn in range(500):
        if turn % 2:
            text = "".join(rng.choice(PIECES) for _ in range(rng.randrange(1, 30)))
        else:
            text = valid
            for _ in range(rng.randrange(4)):
                place = rng.randrange(len(text))
                text = text[:place] + rng.choice(PIECES) + text[place + rng.randrange(3) :]
        path.write_text(text, encoding="utf-8")
        with at_most(20):
            accepted += outcome(load, path)
    assert 20 < accepted < 480


@pytest.mark.parametrize("seed", range(2))
def test_any_text_as_plan(seed, tmp_path):
    from liger_multi.memory.planning import Settings, load as load_plan

    rng, path = random.Random(seed), tmp_path / "plan.yaml"
    good = {"version": 1, "settings": Settings().as_data()}
    for _ in range(150):
        content = {**good, "settings": dict(good["settings"])}
        name = rng.choice(list(content["settings"]))
        value = rng.choice([None, True, 0, -1, 1, 2**31, 1.5, "x", "", "auto", [], {}, "sdpa"])
        content["settings"][name] = value
        path.write_text(yaml.safe_dump(content))
        if not outcome(load_plan, path):
            continue
        plan = load_plan(path)
        assert plan.level >= 0
        assert plan.dtype
        assert str(plan)
        assert plan.sequences >= 1


# --- commands ---


class Worked(BaseException):
    """A command has begun its work."""


@pytest.fixture
def tiny(tmp_path):
    """A folder with a configuration, to be asked about."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path / "model"
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
    config.save_pretrained(folder)
    return folder


WORKING = (
    "bench.runner.run_plan",
    "cli.verify.verify",
    "demo.command._demo",
    "demo.command._profile",
    "memory.estimation.Simulation",
    "memory.planning.search.Shapes",
)
"""What commands begin their work with."""


@pytest.fixture
def idle(monkeypatch, tmp_path):
    """Commands say that they would work now; the current folder is an empty one."""
    pytest.importorskip("rich")

    def work(*_, **__):
        raise Worked

    for name in WORKING:
        monkeypatch.setattr(f"liger_multi.{name}", work)
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_DISABLE_TELEMETRY"):
        monkeypatch.setenv(name, os.environ.get(name, "1"))
    place = tmp_path / "here"
    place.mkdir()
    monkeypatch.chdir(place)
    return place


def tree(folder):
    """Everything below a folder."""
    return {p: p.read_bytes() if p.is_file() else None for p in sorted(folder.rglob("*"))}


def called(argv, capsys):
    """The exit code (None: it began to work) and what was said; errors are of one form."""
    try:
        with at_most(60):
            code = main(argv)
    except Worked:
        code = None
    except SystemExit as stop:
        code = stop.code
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    if code == 2:
        assert not captured.out
        line = captured.err.splitlines()[-1]
        assert re.match(r"liger-multi( [\w-]+)*: error: .", line), captured.err
        assert len(captured.err) < 12_000
    return code, captured.err


def commands():
    """Every command's words and its options that take a value."""
    cases, queue = [], [((), _parser())]
    while queue:
        words, parser = queue.pop()
        choices = [a.choices for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
        queue += [((*words, name), sub) for each in choices for name, sub in each.items()]
        if not choices:
            taking = [a for a in parser._actions if a.nargs != 0 and a.dest != "help"]
            cases += [(words, (a.option_strings or [""])[0], a.type) for a in taking]
    return cases


NEEDED = {("plan",): ["{model}", "--gpu", "24GiB"], ("estimate",): ["{model}"]}
JUNK = ("", "a\0b", "nosuch", "-1", "0", "nan", "inf", "1e999", "9" * 5000, "\ud800", "[]", "1.5")


def _shown(value):
    if isinstance(value, tuple):
        return " ".join(value)
    return getattr(
        getattr(value, "func", value), "__name__", str(value)
    )  # the same in every process


@pytest.mark.parametrize(("words", "option", "option_type"), commands(), ids=_shown)
def test_any_value_of_any_option(words, option, option_type, tiny, idle, capsys):
    """A value is refused with code 2 before any work, or taken; nothing is written."""
    before = tree(idle.parent)
    for value in JUNK:
        needed = [part.format(model=tiny) for part in NEEDED.get(words, [])]
        if not option and needed:
            needed[0] = value
            value_args = []
        else:
            value_args = [f"{option}={value}"] if option else [value]
        code, output = called([*words, *needed, *value_args], capsys)
        assert code in (None, 0, 1, 2)
        path = getattr(option_type, "__name__", "") == "path"
        if value in ("", "a\0b", "\ud800", "[]", "9" * 5000) and not path:
            assert code == 2, f"{words} {option} took {value!r}"
            assert output
    assert tree(idle.parent) == before


@pytest.mark.parametrize("command", ["bench", "demo", "memory-demo", "plan --write"])
@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("absent/folder", "there is no folder 'absent'"),
        ("taken", "is not a folder"),
        ("taken/folder", "there is no folder 'taken'"),
        ("/proc/nosuch", "cannot write into '/proc'"),
        ("/proc/self", "cannot write into '/proc/self'"),
    ],
)
def test_a_folder_that_cannot_be_written(command, place, message, tiny, idle, capsys):
    (idle / "taken").write_text("mine")
    before = tree(idle)
    words = {"plan --write": ["plan", str(tiny), "--gpu", "24GiB", "--write", place]}
    argv = words.get(command, [command, "--output", place])
    code, error = called(argv, capsys)
    assert code == 2
    assert message in error
    assert argv[-2] in error
    assert tree(idle) == before


@pytest.mark.parametrize("command", ["bench", "demo", "memory-demo", "plan --write"])
def test_a_new_folder_beside_others_is_taken(command, tiny, idle, capsys):
    words = {"plan --write": ["plan", str(tiny), "--gpu", "24GiB", "--write", "new"]}
    assert called(words.get(command, [command, "--output", "new"]), capsys)[0] is None
    assert not (idle / "new").exists(), "it is made when there is something to write"


@pytest.mark.parametrize(
    ("argv", "name"),
    [
        (["demo", "--output", "."], "demo.json"),
        (["demo"], "demo-output/demo.png"),
        (["memory-demo", "--output", "."], "unpatched.json"),
        (["plan", "{model}", "--gpu", "24GiB", "--write", "."], "accelerate.yaml"),
        (["plan", "{model}", "--gpu", "24GiB", "--picture", "a.png"], "a.png"),
    ],
)
def test_what_exists_is_not_overwritten_unasked(argv, name, tiny, idle, capsys):
    (idle / name).parent.mkdir(exist_ok=True)
    (idle / name).write_text("mine")
    argv = [part.format(model=tiny) for part in argv]
    code, error = called(argv, capsys)
    assert code == 2
    assert f"{name} would be overwritten; allow it with --overwrite" in error
    assert called([*argv, "--overwrite"], capsys)[0] is None
    assert (idle / name).read_text() == "mine"


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("plan", "must end with .png"),
        ("plan.jpeg", "must end with .png"),
        ("absent/plan.png", "there is no such folder"),
        ("folder.png", "is a folder"),
        ("/proc/plan.png", "cannot write into '/proc'"),
    ],
)
def test_a_picture_that_cannot_be_written(place, message, tiny, idle, capsys):
    (idle / "folder.png").mkdir()
    code, error = called(["plan", str(tiny), "--gpu", "24GiB", "--picture", place], capsys)
    assert code == 2
    assert message in error


def test_a_benchmark_takes_names_that_are_free(tmp_path):
    from liger_multi.bench import report

    result = {
        "device": {"name": "X 1"},
        "date": "2026-01-02T",
        "rows": [{"op": "a", "sample": "s"}],
    }
    result["rows"][0] |= {"provider": "ours", "status": "failed"}
    (tmp_path / "x-1-2026-01-02-a.png").write_text("mine")
    (path,) = report.save(result, tmp_path)
    assert path.name == "x-1-2026-01-02-2.json"


@pytest.mark.parametrize("device", ["nosuch", "cdua", "cuda:300", "cuda:", "CUDA", "cuda:-1", ""])
@pytest.mark.parametrize("command", ["explain", "bench", "demo", "memory-demo", "estimate", "plan"])
def test_a_device_that_nobody_knows(command, device, tiny, idle, capsys):
    needed = [part.format(model=tiny) for part in NEEDED.get((command,), [])]
    code, error = called([command, *needed, f"--device={device}"], capsys)
    assert code == 2
    if device == "cdua":
        assert "unknown device type 'cdua'; did you mean 'cuda'" in error


def test_devices_that_the_library_knows():
    from liger_multi.dispatch.registry import device_type

    assert [device_type(name) for name in ("cpu", "cuda", "npu", "xpu")]
    for name in (None, 5, "cuda:0", torch.device("cpu"), Loud()):
        assert not outcome(device_type, name)
    with pytest.raises(ConfigurationError, match="unknown device type 'nosuch'"):
        estimate(None, 1, 1, device="nosuch")
    with pytest.raises(TypeError, match=r"must be a torch[.]device or its name, got 5"):
        liger_multi.explain("rms_norm", 5)
    with pytest.raises(TypeError, match=r"must be a torch[.]dtype, got 'float32'"):
        liger_multi.explain("rms_norm", "cpu", "float32")


# --- models of a file ---


def test_named_model_file_is_read(tiny, capsys):
    other = json.loads((tiny / "config.json").read_text()) | {"num_hidden_layers": 5}
    for name in ("other.json", "noend", ".hidden", "a b.json"):
        (tiny / name).write_text(json.dumps(other))
        assert config_of(tiny / name).num_hidden_layers == 5
    assert config_of(tiny).num_hidden_layers == 2
    assert config_of(f"{tiny}/").num_hidden_layers == 2
    assert config_of(tiny / "config.json").num_hidden_layers == 2
    sizes = []
    for name in ("config.json", "other.json"):
        assert main(["estimate", str(tiny / name), "--sequence", "8", "--json"]) == 0
        sizes.append(json.loads(capsys.readouterr().out)["parameters"])
    assert sizes[0] < sizes[1]
    argv = [
        "--gpu",
        "24GiB",
        "--seq",
        "8",
        "--batch",
        "1",
        "--no-limits",
        "--data-parallel",
        "--precision",
        "fp32",
        "--json",
    ]
    assert main(["plan", str(tiny / "other.json"), *argv]) == 0
    assert json.loads(capsys.readouterr().out)["layers"] == 5


BROKEN = {
    "torn": ("{", "is not JSON"),
    "empty": ("", "is not JSON"),
    "a list": ("[1, 2]", r"must hold a mapping, the configuration of a model, got list \[1, 2\]"),
    "null": ("null", "got NoneType None"),
    "a number": ("1", "got int 1"),
    "nested": ("[" * 10**5, "is not JSON: it is nested too deep"),
    "digits": ('{"a": ' + "9" * 5000 + "}", "is not JSON"),
    "no type": ('{"hidden_size": 8}', r"has no model_type.* its keys are \['hidden_size'\]"),
    "a wrong type": (
        '{"model_type": "lama"}',
        "unknown model_type in .* 'lama'; did you mean 'llama'",
    ),
    "another type": ('{"model_type": 5}', "unknown model_type in .* 5"),
    "a type of no text": ('{"model_type": "vit"}', "has no causal language model for a ViTConfig"),
    "wrong sizes": ('{"model_type": "llama", "num_attention_heads": 0}', "."),
    "a wrong kind": ('{"model_type": "llama", "hidden_size": "many"}', "."),
    "negative": ('{"model_type": "llama", "hidden_size": -8}', "."),
    "no layers": ('{"model_type": "llama", "num_hidden_layers": 0, "vocab_size": 0}', "."),
    "a map of code": ('{"model_type": "llama", "auto_map": null, "hidden_size": []}', "."),
    "an unknown own": (
        '{"model_type": "mine", "auto_map": {"AutoConfig": "a.B"}}',
        r"the code of its own that it names \(auto_map\) is not run",
    ),
}


@pytest.mark.parametrize("command", ["estimate", "plan"])
@pytest.mark.parametrize("name", BROKEN)
def test_a_file_that_is_no_model(command, name, tmp_path, capsys):
    pytest.importorskip("transformers")
    content, message = BROKEN[name]
    path = tmp_path / "other.json"
    path.write_text(content)
    argv = {
        "estimate": ["estimate", str(path), "--sequence", "8"],
        "plan": ["plan", str(path), "--gpu", "24GiB", "--seq", "8"],
    }
    code, error = called(argv[command], capsys)
    assert code == 2
    assert re.search(message, error)
    assert len(error) < 1500, "hundreds of names help nobody"


@pytest.mark.parametrize("command", ["estimate", "plan"])
@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("", "unknown model ''"),
        ("empty", "has no config.json"),
        ("pipe", "it is a pipe, not a file"),
        ("folder", "Is a directory"),
        ("nowhere", "unknown model"),
        ("x" * 5000, "unknown model"),
        ("latin.json", "is not JSON: its text is not UTF-8"),
    ],
)
def test_a_place_that_holds_no_model(command, place, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "folder" / "config.json").mkdir(parents=True)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "latin.json").write_bytes(b'{"a": "\xe9"}')
    code, error = called(
        [command, place, *(["--gpu", "24GiB"] if command == "plan" else [])], capsys
    )
    assert code == 2
    assert message in error


@pytest.mark.parametrize("command", ["estimate", "plan"])
@pytest.mark.parametrize("model_type", ["llama", "vit", "mine"])
def test_code_of_configuration_never_runs(command, model_type, tmp_path, monkeypatch, capsys):
    from transformers import dynamic_module_utils
    from transformers.models.auto import auto_factory, configuration_auto

    def never(*_, **__):
        raise AssertionError("code of a folder, or a question about it")

    for module in (dynamic_module_utils, auto_factory, configuration_auto):
        monkeypatch.setattr(module, "get_class_from_dynamic_module", never)
    monkeypatch.setattr("builtins.input", never)
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    own = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    sizes = {
        "vocab_size": 64,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    content = {"model_type": model_type, "auto_map": own, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(content))
    planned = "--gpu 24GiB --seq 8 --batch 1 --no-limits --data-parallel --precision fp32"
    options = {"estimate": ["--sequence", "8"], "plan": planned.split()}
    code, _ = called([command, str(tmp_path), *options[command]], capsys)
    assert code == (0 if model_type == "llama" else 2)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("content", ["{", "[]", '{"title": 1}', '{"holders": 5, "saved": 1}'])
def test_a_file_that_is_no_profile(content, tmp_path):
    (tmp_path / "a.json").write_text(content)
    assert not outcome(Profile.load, tmp_path / "a.json")


@pytest.mark.parametrize(
    "options",
    [{"batch": True}, {"sequence": 2**40}, {"world": "2"}, {"capacity": "80GiB"}, {"dtype": []}],
)
def test_wrong_options_of_an_estimate(options, tiny):
    with pytest.raises(ValueError, match=r"must be a positive integer, got|unknown dtype \[\]"):
        estimate(config_of(tiny), **{"batch": 1, "sequence": 8, **options})


# --- programs ---


def program(*argv, **options):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "LIGER_MULTI_CONFIG": ""}
    environment |= options.pop("environment", {})
    command = [sys.executable, "-m", "liger_multi", *argv]
    return subprocess.run(
        command, env=environment, stderr=subprocess.PIPE, timeout=PATIENCE, check=False, **options
    )


def test_a_broken_file_of_the_environment(tmp_path):
    (tmp_path / "a.yaml").write_text("ops: {}\nops: {}\n")
    environment = {"LIGER_MULTI_CONFIG": str(tmp_path / "a.yaml")}
    done = program("explain", "rms_norm", environment=environment, stdout=subprocess.PIPE)
    assert (done.returncode, done.stdout) == (2, b"")
    output = done.stderr.decode()
    assert output.startswith("liger-multi: error: ")
    assert output.count("\n") == 1
    assert output.endswith("(named by LIGER_MULTI_CONFIG)\n")


@pytest.mark.slow
def test_output_that_cannot_be_written():
    with open("/dev/full", "wb") as full:
        done = program("explain", "rms_norm", stdout=full)
    assert done.returncode == 2
    assert done.stderr.decode().startswith("liger-multi: error: [Errno 28] No space left")
    assert done.stderr.count(b"\n") == 1


@pytest.mark.slow
def test_a_reader_who_leaves():
    reading, writing = os.pipe()
    os.close(reading)
    done = program("explain", stdout=writing)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.slow
def test_names_that_the_output_cannot_spell(tmp_path):
    path = os.fsencode(tmp_path) + b"/\xff.yaml"
    with open(path, "wb") as file:
        file.write(b"default: auto\n")
    done = program("config", "check", path, stdout=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.endswith(b"\\udcff.yaml: fine\n")


def test_a_launch_table_that_says_something_twice(tmp_path, monkeypatch):
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch" / "a1.yaml").write_text("entries: {}\nentries: {}\n")
    monkeypatch.setitem(registry.packages(), "toy", "toy")
    monkeypatch.setattr(launch.importlib.resources, "files", lambda name: tmp_path)
    with pytest.raises(ConfigurationError, match=r"a1\.yaml' is not YAML: line 2.*given twice"):
        launch.table("toy", "a1")
