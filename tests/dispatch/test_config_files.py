"""Files of a configuration, a plan or a launch table: what is read, and what is refused and why."""

import os
import random

import pytest
import yaml

from liger_multi.dispatch import launch, registry
from liger_multi.dispatch.config import configure, load
from liger_multi.errors import ConfigurationError
from liger_multi.files import documents
from liger_multi.memory.planning import Settings, load as load_plan
from tests.refusals import at_most, outcome

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
    **{
        f"a merge of {value}": (f"ops:\n  <<: {value}\n".encode(), "line 2.*<< takes mappings")
        for value in ("reference", "[reference]", "~", "[]", "[{a: 1}, 2]")
    },
    "a quoted merge": (b"ops: {'<<': {rms_norm: reference}}\n", "unknown operator"),
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


def test_a_launch_table_that_says_something_twice(tmp_path, monkeypatch):
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch" / "a1.yaml").write_text("entries: {}\nentries: {}\n")
    monkeypatch.setitem(registry.packages(), "toy", "toy")
    monkeypatch.setattr(launch.importlib.resources, "files", lambda name: tmp_path)
    with pytest.raises(ConfigurationError, match=r"a1\.yaml' is not YAML: line 2.*given twice"):
        launch.table("toy", "a1")
