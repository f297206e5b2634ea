"""`liger-multi verify`: planted faults are found, and end in a quarantine under which models train.

The faults are in a backend of an entry point, which child processes find as users' processes do.
"""

import codecs
import contextlib
import errno
import json
import os
import signal
import textwrap
import threading
import time

import pytest
import torch

import liger_multi
from liger_multi import ops
from liger_multi.cli import doctor, verify
from liger_multi.cli.main import main
from liger_multi.dispatch.config import Configuration, load, parse, using_configuration
from liger_multi.dispatch.registry import operators
from liger_multi.errors import ConfigurationError
from liger_multi.files.documents import write_whole, yaml_of
from liger_multi.testing import bitwise, checks, samples
from liger_multi.testing.checks import guarded, overwritten
from liger_multi.testing.verify import cases, quarantine, run
from liger_multi.testing.verify.run import Result
from tests import harness

CPU = torch.device("cpu")
FP32 = (torch.float32, CPU)
# Its name is that of the backend whose launch tables a CPU has.
NAME = "interpreter"
HEAD = """
import os, time, torch
from liger_multi.dispatch.launch import launch_config
from torch import Tensor
from liger_multi.reference.{family}.{op} import backward, forward as right
from tests import harness
"""
FAULTS = {
    "a factor": ("norms", "rms_norm", "y, rstd = right(*args); return y * 1.001, rstd"),
    "one row of 65,537": (
        "norms",
        "layer_norm",
        "y, *rest = right(*args); y.view(-1, y.shape[-1])[65536:] *= 2; return (y, *rest)",
    ),
    "an unwritten tail": (
        "activations",
        "swiglu",
        "y = torch.empty_like(args[0]); y[..., :-1] = right(*args)[..., :-1]; return y",
    ),
    "NaN spreads": (
        "activations",
        "geglu",
        "return right(*args) + 0 * args[0].sum()",
    ),
    "an endless loop": ("norms", "poly_norm", "while True: time.sleep(1)"),
    "a crash": ("activations", "swiglu_clamped", "os.abort()"),
    "no memory": ("norms", "group_norm", "raise torch.OutOfMemoryError('too much')"),
}
IN_BACKWARD = {
    "a dtype": ("norms", "dyt", "return tuple(t.double() for t in grads(*args))"),
    "two runs differ": (
        "activations",
        "relu_squared",
        "COUNT.append(0); return grads(*args) * (1 + 2e-7 * (len(COUNT) % 2))",
    ),
}
EXPECTED = {
    "rms_norm": "wrong",
    "layer_norm": "wrong",
    "swiglu": "wrong",
    "geglu": "wrong",
    "poly_norm": "hung",
    "relu_squared": "wrong",
    "group_norm": "out of memory",
    "dyt": "wrong",
    "swiglu_clamped": "crashed",
    "softmax": "wrong",
    "sparsemax": "wrong",
    "kl_div": "refused",
}
AT_LENGTH = (
    "layer_norm",
    "softmax",
    "sparsemax",
)  # which samples and entries of the default level find
BY_ENTRY = """
from dataclasses import dataclass
@dataclass(frozen=True)
class Config:
    fault: int = 0
RUNS = []
def forward(x, *args):
    formula = lambda info, cols: Config()
    config = launch_config("{op}.forward", formula, x.device, cols=x.shape[-1])
    y, end = right(x, *args), x.storage_offset() + x.numel()
    RUNS.append(0)
    {body}
"""
IN_ENTRIES = {
    "reads past the end": (
        "softmax",
        "return y + 0 * x.as_strided((1,), (1,), end) if config.fault else y",
    ),
    "two runs differ": ("sparsemax", "return y * (1 + config.fault * 2**-7 * (len(RUNS) % 2))"),
}
TABLE = """\
  {op}.forward:
    - {{when: {{cols: [100000, 200000]}}, config: {{fault: 1}}, source: a test}}
"""


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """A folder for PYTHONPATH with an installed backend whose operators are wrong."""
    root = tmp_path_factory.mktemp("planted")
    package, info = root / "planted", root / "planted-1.0.dist-info"
    (package / "launch").mkdir(parents=True)
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: planted\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[liger_multi.backends]\n{NAME} = planted\n")
    tables = "".join(TABLE.format(op=op) for op, _ in IN_ENTRIES.values())
    (package / "launch" / "cpu.yaml").write_text(f"entries:\n{tables}")
    (package / "__init__.py").write_text(
        "from liger_multi.dispatch.backend import Backend\n"
        f"BACKEND = Backend({NAME!r}, device_type='cpu')\n"
    )
    for family, op, body in FAULTS.values():
        text = f"def forward(*args):\n    {body}\n"
        (package / f"{op}.py").write_text(_with_schema(family, op, text, "forward", "right"))
    for family, op, body in IN_BACKWARD.values():
        text = f"COUNT = []\ngrads = backward\nforward = right\ndef backward(*args):\n    {body}\n"
        (package / f"{op}.py").write_text(_with_schema(family, op, text, "backward", "grads"))
    for op, body in IN_ENTRIES.values():
        text = BY_ENTRY.format(op=op, body=body)
        (package / f"{op}.py").write_text(
            _with_schema("cross_entropy", op, text, "forward", "right")
        )
    refusing = "forward = right\ndef supports(direction):\n    return 'has no card'\n"
    head = textwrap.dedent(HEAD).format(family="divergences", op="kl_div")
    (package / "kl_div.py").write_text(head + refusing)
    return root


def _with_schema(family, op, text, direction, like):
    """A module whose function has the schema of the reference's."""
    head = textwrap.dedent(HEAD).format(family=family, op=op)
    schema = f"import functools\n{direction} = functools.wraps({like})({direction})\n"
    return f"{head}{text}{schema}"


def command(root, *words, **environment):
    """The command in a process that sees the planted backend."""
    return harness.python("-m", "liger_multi", *words, path=[root], code=None, **environment)


MODEL = """
import json, sys, torch
from liger_multi import ops, use
import contextlib

def train():
    torch.manual_seed(0)
    w = {n: torch.randn(16, requires_grad=True) for n in ("a", "b", "c")}
    first, losses = torch.randn(16, 16, requires_grad=True), []
    optimizer = torch.optim.SGD([*w.values(), first], lr=0.01)
    for step in range(4):
        x = torch.randn(6, 16) @ first
        x = ops.rms_norm(x, w["a"])
        x = ops.layer_norm(x, w["b"], w["c"])
        x = ops.swiglu(x, x) + ops.geglu(x, x) + ops.softmax(x)
        loss = x.square().mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        losses.append(loss.item())
    return losses

mine = train()
NAMES = ("rms_norm", "layer_norm", "swiglu", "geglu", "softmax")
with use(**dict.fromkeys(NAMES, "reference")):
    right = train()
print(json.dumps([mine, right]))
"""


@pytest.fixture(scope="module")
def verified(planted):
    """What the command says of the planted backend, and the configuration that it writes."""
    file, report = planted / "mine.yaml", planted / "report.json"
    file.write_text("# mine\nops:\n  tvd: reference  # slow here\nchunk_bytes: 64MiB\n")
    options = ("--backend", NAME, "--device", "cpu", "--limit", "5", "--jobs", "2")
    options += ("--quarantine", str(file), "--report", str(report))
    quick = sorted(EXPECTED.keys() - AT_LENGTH)
    runs, report_rows = (("--quick", "--ops", ",".join(quick)), ("--ops", ",".join(AT_LENGTH))), {}
    for words in runs:
        done = command(planted, "verify", *words, *options, TRITON_INTERPRET="")
        assert done.returncode == 1, done.stderr
        report_rows |= json.loads(report.read_text())["operators"][NAME]
    return done.stdout, report_rows, file.read_text(), planted


def test_planted_faults_are_found(verified):
    _, own, _, _ = verified
    verdicts = {op: own[op]["verdict"] for op in own}
    assert {op: verdicts[op] for op in EXPECTED} == EXPECTED
    said = {op: own[op]["findings"][0]["text"] for op in EXPECTED if op != "kl_div"}
    assert "no answer within 5 s" in said["poly_norm"]
    assert "float64" in said["dyt"]
    assert "promises 'repeat'" in said["relu_squared"]
    assert "promises" in said["geglu"]
    assert "SIGABRT" in said["swiglu_clamped"]
    assert all("entry 0" in own[op]["findings"][0]["case"] for op in ("softmax", "sparsemax"))
    assert "promises 'repeat'" in said["sparsemax"]
    assert os.path.expanduser("~") not in json.dumps(own)


def test_a_quarantine_keeps_what_its_file_had(verified):
    _, _, text, _ = verified
    assert text.startswith("# mine\nops:\n  tvd: reference  # slow here\nchunk_bytes: 64MiB\n")
    assert "# wrong: rms_norm" in text
    layer = parse(yaml_of(text, "x"), "x")
    sent = {op for named in layer.quarantine.ops.values() for op in named}
    assert sent == {op for op, verdict in EXPECTED.items() if verdict != "refused"}
    assert layer.ops[""]["tvd"] == ("reference",)
    assert all(
        named == ("reference",) for n in layer.quarantine.ops.values() for named in n.values()
    )


def test_a_model_trains_right_under_the_quarantine(verified):
    _, _, _, root = verified
    (root / "model.py").write_text(MODEL)

    def losses(**environment):
        return json.loads(harness.python(root / "model.py", path=[root], **environment).stdout)

    mine, right = losses()
    assert mine != right
    mine, right = losses(LIGER_MULTI_CONFIG=str(root / "mine.yaml"))
    assert mine == right
    assert all(loss == loss for loss in right)


@pytest.mark.slow
def test_verify_under_a_quarantine_says_what_it_would_lift(verified, tmp_path):
    """The operators that are right by now, and those that still are not."""
    _, _, _, root = verified
    file = tmp_path / "q.yaml"
    file.write_text(
        'quarantine:\n  since: "2020-01-01"\n  ops:\n    cpu:\n'
        "      rms_norm: reference\n      tvd: reference\n      kl_div: reference\n"
    )
    done = command(
        root,
        *("verify", "--quick", "--ops", "rms_norm,tvd", "--device", "cpu", "--json"),
        *("--quarantine", str(file)),
        LIGER_MULTI_CONFIG=str(file),
    )
    rows = {op: said for _, op, said in json.loads(done.stdout)["quarantine"]}
    assert rows["rms_norm"].startswith("stays")
    assert rows["tvd"].startswith("right now")
    assert rows["kl_div"] == "was not checked"
    kept = load(file).quarantine
    assert {op for named in kept.ops.values() for op in named} == {"rms_norm", "kl_div"}
    assert kept.since == "2020-01-01"


# --- the file ---

BLOCK = quarantine.block({"cpu/float32": {"tvd": ("reference", "wrong: x")}}, "2026-01-01", "a CPU")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "# nothing but a comment\n",
        "ops:\n  rms_norm: reference",
        "default: auto  # why\n\n# about ops\nops: {rms_norm: reference}\n",
        f"{BLOCK}\n# about ops\nops:\n  tvd: reference\n",
        "ops: &o\n  tvd: reference\ndevices:\n  cpu:\n    ops: *o\n",
        "ops: {}\nquarantine:\n  ops:\n    cpu: {tvd: reference}\n# chunks\nchunk_bytes: 1MiB\n",
        "---\n# before the end\nops: {tvd: reference}\n...\n# behind it\n",
        "  # further in\n  ops: {tvd: reference}\n  chunk_bytes: 1MiB\n",
        "quarantine: {since: '2020-01-01',\n  ops: {cpu: {tvd: reference}}}\nchunk_bytes: 1MiB\n",
        "ops: {tvd: auto}\nquarantine:\n  ops:\n    cpu: {tvd: reference}",
        "{ops: {tvd: reference}}\n",
        "{\n  quarantine: {ops: {cpu: {tvd: reference}}},  # old\n# ops\n  ops: {tvd: auto},\n}\n",
        "~\n",
    ],
)
def test_blocks_are_merged_and_taken_out_again(text):
    new = quarantine.merged(text, BLOCK, "a file")
    comments = [line for line in text.splitlines() if line.startswith("#")]
    assert all(line in new.splitlines() for line in comments)
    assert parse(yaml_of(new, "a file"), "a file").quarantine.ops == {
        "cpu/float32": {"tvd": ("reference",)}
    }
    assert quarantine.merged(new, BLOCK, "a file") == new
    gone = quarantine.merged(new, "", "a file")
    assert "quarantine" not in (yaml_of(gone, "a file") or {})
    assert [line for line in gone.splitlines() if line.startswith("#")] == comments


def test_a_block_keeps_line_ends_and_comments_of_its_file(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_bytes(
        codecs.BOM_UTF8 + b"# mine\r\nquarantine:\r\n  # ask Bo\r\n  ops: {cpu: {tvd: auto}}\r\n"
    )
    assert quarantine.write(file, BLOCK)
    data = file.read_bytes()
    assert data.startswith(b"\xef\xbb\xbf# mine\r\nquarantine:\r\n  # ask Bo\r\n")
    assert data.count(b"\r\n") == data.count(b"\n")
    assert not quarantine.write(file, BLOCK)
    assert load(file).quarantine.ops == {"cpu/float32": {"tvd": ("reference",)}}


def test_quarantine_does_not_replace_a_pipe(tmp_path):
    """As /dev/stdout may be, which a name links to."""
    pipe, link = tmp_path / "pipe", tmp_path / "r.json"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_whole(link, b"{}")
    assert os.read(reader, 9) == b"{}"
    os.close(reader)
    assert pipe.is_fifo()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EBUSY, errno.EACCES])
def test_a_file_that_cannot_be_replaced(number, tmp_path, monkeypatch):
    """A full disk and a file without the right to write leave it; a mounted one is written to."""
    file = tmp_path / "mine.yaml"
    file.write_text("chunk_bytes: 1MiB\n")

    def refused(*args):
        raise OSError(number, "refused")

    if number == errno.EACCES:
        monkeypatch.setattr(os, "access", lambda *_: False)
    else:
        monkeypatch.setattr(os, "replace", refused)
    with contextlib.nullcontext() if number == errno.EBUSY else pytest.raises(OSError):
        quarantine.write(file, BLOCK)
    assert ("quarantine" in file.read_text()) is (number == errno.EBUSY)
    assert list(tmp_path.iterdir()) == [file]


ALIASED = "quarantine: {ops: {cpu: &c {tvd: reference}}}\nops: *c\n"


@pytest.mark.parametrize("text", [ALIASED, "[1]\n", "ops: [\n"])
def test_quarantine_does_not_write_other_files(text, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(ConfigurationError):
        quarantine.write(file, BLOCK)
    assert file.read_text() == text


def test_quarantine_precedence():
    text = {"ops": {"cpu/float32": {"tvd": "reference"}}}
    layer = parse({"quarantine": text}, "a file")
    auto, named = parse({"default": "auto"}, "x"), parse({"ops": {"tvd": "triton"}}, "y")
    for stronger, order in (((), "reference"), ((auto,), "reference"), ((named,), "triton")):
        configuration = Configuration((*stronger, layer))
        assert configuration.choice("tvd", CPU, torch.float32).order == (order,)
        assert configuration.choice("tvd", CPU, torch.bfloat16).order == (
            ("triton",) if order == "triton" else ("auto",)
        )


def test_the_narrowest_section_counts():
    content = {
        "devices": {
            "cpu": {"ops": {"tvd": "triton"}},
            "cpu/fp32": {"ops": {"tvd": "reference"}},
            "cpu/cpu/bfloat16": {"default": "reference"},
        }
    }
    configuration = Configuration((parse(content, "x"),))
    orders = {d: configuration.choice("tvd", CPU, d).order for d in checks.DTYPES}
    assert list(orders.values()) == [("reference",), ("reference",), ("triton",)]


@pytest.mark.parametrize(
    "section", ["cpu/float32/bfloat16", "cpu/a/b", "cpu/", "cpu/SM 90", "cqu/x"]
)
def test_wrong_sections_are_named(section):
    with pytest.raises(ConfigurationError, match=r"section of devices|device type"):
        parse({"devices": {section: {"default": "auto"}}}, "x")


# --- what is checked ---


def test_every_operator_has_cases_at_every_level():
    target = cases.Target("reference", "cpu")
    counts = {}
    for level in cases.LEVELS:
        by_op = cases.cases(target, "*", level)
        assert set(by_op) == set(operators())
        assert all(by_op.values())
        counts[level] = sum(map(len, by_op.values()))
    assert counts["quick"] < counts["default"] < counts["full"]


def test_promises_are_checked_where_several_rows_can_show_them():
    """One row, or a sum over rows, shows neither a NaN that spreads nor what others change."""
    target = cases.Target("reference", "cpu")
    for level in ("quick", "default"):
        for op, several in cases.cases(target, "*", level).items():
            counts = {
                s.name: cases._rows_needed(op, s) for s in samples.of(op) if s.size == "small"
            }
            checked = {c.sample for c in several if c.check == "promises"}
            assert {counts[name] for name in checked} == {max(counts.values())}, op


@pytest.mark.parametrize("op", ["cross_entropy", "kl_div", "jsd", "tvd", "indexer_scores"])
def test_each_of_65537_rows_is_compared(op):
    """A mean over so many rows hides a wrong one, and a row of zeros hides a factor."""
    result = checks.exact(op, "past-65535-rows", *FP32).result["result"]
    rows = result.flatten(0, -2) if result.ndim > 1 else result
    assert len(rows) == 65537
    assert rows[65536:].any()


def test_guards_show_what_leaves_a_tensor():
    x = torch.randn(3, 8)[:, 1:7]
    copy = guarded(x)
    assert torch.equal(copy, x)
    assert copy.stride() == x.stride()
    assert not overwritten(copy)
    copy.as_strided((1,), (1,), copy.storage_offset() + 22)[:] = 0
    assert overwritten(copy)
    ids = guarded(torch.arange(4))
    assert (
        ids.as_strided((1,), (1,), ids.storage_offset() + 4).item() == torch.iinfo(torch.int64).max
    )


def test_a_row_of_nan_may_not_reach_others():
    class Spreading(bitwise.Call):
        def run(self, mode, args=None):
            args = self.args if args is None else args
            return tuple(t + 0 * args[0].sum() for t in super().run(mode, args))

    call, *_ = bitwise.calls_of("relu_squared", samples.of("relu_squared")[0], *FP32, "reference")
    bitwise.check_rows(call, "rows")
    with pytest.raises(AssertionError, match="beside NaN"):
        bitwise.check_rows(Spreading(call.prim, call.args, call.order), "rows")


def test_a_report_is_json_of_any_reader_without_folders(monkeypatch, tmp_path):
    """Infinite errors are null; of a path only the last name is left, wherever it ran."""
    case = cases.Case("tvd", "triton", "a", "float32")
    text = f"no '/home/bo b/x/y.so', /scratch/al/k.py:1, {tmp_path}/z, cpu/float32"
    wrong = Result(case, cases.Target("triton", "cpu"), "wrong", float("inf"), text)
    known = {"device": {"type": "cpu", "name": "cpu"}, "versions": {}}
    about = {"level": "quick", "seconds": 1, "date": "", "by": "", "label": "", "lifted": ()}
    for folder in ("/", str(tmp_path)):
        monkeypatch.chdir(folder)
        monkeypatch.setenv("HOME", "/home/bo b")
        data = run.as_data(known, [wrong], **about)
        entry = json.loads(json.dumps(data, allow_nan=False))["operators"]["triton"]["tvd"]
        said = entry["findings"][0]["text"].replace("./z", "z")
        assert said == "no '~/x/y.so', k.py:1, z, cpu/float32"
        assert entry["worst"] is None
        assert "not finite" in str(run.page(data))


def test_a_full_disk_keeps_what_was_found_on_the_screen(monkeypatch, tmp_path, capsys):
    """The file with the result is not written, the table is."""
    wrong = Result(
        cases.Case("tvd", "triton", "a", "float32"), cases.Target("triton", "cpu"), "wrong"
    )
    monkeypatch.setattr(verify, "verify", lambda *_: [wrong])

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(verify, "write_whole", full)
    assert main(["verify", "--device", "cpu", "--report", str(tmp_path / "r.json"), "--json"]) == 2
    said = capsys.readouterr()
    assert json.loads(said.out)["operators"]["triton"]["tvd"]["verdict"] == "wrong"
    assert "No space left" in said.err


CASE, TARGET = cases.Case("tvd", "reference", "a", "float32"), cases.Target("reference", "cpu")
CHATTY = """
import json, sys
print("7", "null", "[1]", '{"a": 1}', "ready", json.dumps({"ready": True}), sep="\\n", flush=True)
for line in sys.stdin:
    print(json.dumps({"begin": 0}), 8, json.dumps({"end": 0, "alive": True, "verdict": "right"}),
          sep="\\n", flush=True)
"""


def test_what_libraries_print_is_no_answer(monkeypatch):
    monkeypatch.setattr(run, "CHILD", ["-c", CHATTY])
    child = run.Child(TARGET, 1)
    assert [child.ask(CASE, 20)["verdict"] for _ in range(2)] == ["right", "right"]
    child.close()


def test_verify_report_has_times(monkeypatch):
    """Which process ran which operator when, and what it compiled."""
    answers = CHATTY.replace(
        '"verdict": "right"', '"verdict": "right", "seconds": 0.5, "compiled": 2'
    )
    monkeypatch.setattr(run, "CHILD", ["-c", answers])
    groups = [(TARGET, [cases.Case(op, "reference", "a", "float32")] * 2) for op in ("tvd", "jsd")]
    times = run.timing(run.Runner(20, jobs=2).run(groups))
    assert [child["compiled"] for child in times["children"]] == [4, 4]
    assert {row["what"]: row["seconds"] for row in times["operators"]} == {
        "reference jsd": 1.0,
        "reference tvd": 1.0,
    }
    for row in times["operators"]:
        child = times["children"][row["child"]]
        assert 0 <= child["started"] < child["ready"] <= row["began"] < row["ended"]
    assert len(times["cases"]) == 2


def test_an_interrupt_ends_cases_that_hang(monkeypatch):
    hanging = 'import time; print("{\\"ready\\": true}", flush=True); time.sleep(99)'
    monkeypatch.setattr(run, "CHILD", ["-c", hanging])
    began, join = time.monotonic(), threading.Thread.join

    def interrupted(thread, timeout=None):
        monkeypatch.setattr(threading.Thread, "join", join)
        time.sleep(1)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "join", interrupted)
    runner = run.Runner(90, jobs=1)
    with runner, pytest.raises(KeyboardInterrupt):
        runner.run([(TARGET, [CASE])])
    assert [child.process.poll() for child in runner.started] == [-signal.SIGKILL]
    assert time.monotonic() - began < 60


def test_a_machine_that_starts_no_process_is_not_right(monkeypatch, capsys):
    """As with a full disk: an error, where nothing is known."""

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(run, "Child", full)
    assert main(["verify", "--quick", "--ops", "tvd", "--device", "cpu"]) == 2
    assert "No space left" in capsys.readouterr().err


def test_doctor_and_reports_name_a_quarantine(tmp_path):
    file = tmp_path / "q.yaml"
    quarantine.write(file, BLOCK)
    with using_configuration(Configuration((load(file),))):
        notes = [one["text"] for one in doctor.collect()["findings"]]
        model = torch.nn.Sequential(torch.nn.LayerNorm(8))
        report = str(liger_multi.patch(model))
    assert any("quarantine since 2026-01-01" in note and "tvd" in note for note in notes)
    assert "quarantine" not in report  # none of its operators
    quarantine.write(file, BLOCK.replace("tvd", "layer_norm"))
    with using_configuration(Configuration((load(file),))):
        model = torch.nn.Sequential(torch.nn.LayerNorm(8))
        assert "quarantine since 2026-01-01" in str(liger_multi.patch(model))
        assert ops.layer_norm(torch.ones(2, 8), torch.ones(8), torch.zeros(8)).shape == (2, 8)
