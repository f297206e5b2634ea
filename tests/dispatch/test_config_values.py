"""Any value and any key of a configuration is accepted with its meaning or refused in one error.

Values are judged by rules that are implemented here a second time.
"""

import contextlib
import enum
import logging
import math
import os
import re
from pathlib import Path

import numpy
import pytest
import torch

import liger_multi
from liger_multi import ops
from liger_multi.dispatch import config, registry, resolve as planning
from liger_multi.dispatch.config import configure, current, forget, parse, parse_bytes
from liger_multi.errors import ConfigurationError, shown, unknown
from tests.comparing import recorded
from tests.refusals import Loud, outcome

# --- values of a configuration ---


class Backend(str, enum.Enum):
    REFERENCE = "reference"


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
