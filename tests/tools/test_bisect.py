"""``testing.bisect`` and its command: planted faults are named, and nothing is changed."""

import copy
import functools
import importlib
import importlib.util
import json
import math
import random
import sys
import types

import pytest
import torch

import liger_multi
from liger_multi import nn
from liger_multi.cli.bisect import settings
from liger_multi.cli.main import main
from liger_multi.dispatch import launch, registry, resolve
from liger_multi.dispatch.config import current, forget
from liger_multi.dispatch.torch_ops import Primitive
from liger_multi.errors import ConfigurationError
from liger_multi.patching import register_attention
from liger_multi.reference.norms import rms_norm as reference
from liger_multi.testing import bisect
from liger_multi.testing.bisection.recorder import (
    BLOCK,
    digest,
    distance,
    on_host,
    path_of,
    relative,
)
from tests import models

PLANTED = {"rms_norm": ["planted", "reference"]}


class Norms(torch.nn.Module):
    """Three norms and linear layers between them; the second norm is the fault's."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.first, self.second, self.third = (nn.RMSNorm(16, dtype=dtype) for _ in range(3))
        self.between = torch.nn.Linear(16, 16, dtype=dtype)
        self.drop = torch.nn.Dropout(0.25)

    def forward(self, x):
        return self.third(self.drop(self.between(self.second(self.between(self.first(x))))))


def norms(dtype=torch.float32, rows=4):
    torch.manual_seed(0)
    return Norms(dtype), torch.randn(rows, 5, 16, dtype=dtype, requires_grad=True)


def nudged(tensor):
    """A copy in which one element is one ulp larger."""
    out = tensor.clone()
    bits = out.view(torch.int16 if out.element_size() == 2 else torch.int32)
    bits[(0,) * bits.ndim] += 1
    return out


@pytest.fixture
def planted(monkeypatch, tmp_path):
    """A backend for rms_norm by name only: what a test puts into it, else the reference."""
    folder = tmp_path / "site" / "planted"
    folder.mkdir(parents=True)
    record = "from liger_multi.dispatch.backend import Backend\nBACKEND = Backend('planted')\n"
    (folder / "__init__.py").write_text(record)
    (folder / "rms_norm.py").write_text("")
    monkeypatch.syspath_prepend(folder.parent)
    point = types.SimpleNamespace(name="planted", value="planted")
    monkeypatch.setattr(registry.importlib.metadata, "entry_points", lambda group: [point])
    cached = (
        registry.packages,
        registry.backends,
        registry.unavailable,
        registry.module,
        resolve._implementation,
        launch.bounded_by_rows,
    )
    for function in cached:
        function.cache_clear()
    forget()

    def plant(direction, wrong):
        """Let ``wrong(call, outputs)`` give the results of a call, counted from 1."""
        expected, calls = getattr(reference, direction), []

        @functools.wraps(expected)
        def run(*args):
            calls.append(args)
            return wrong(len(calls), expected(*args), *args)

        setattr(importlib.import_module("planted.rms_norm"), direction, run)

    yield plant
    monkeypatch.undo()
    for name in ("planted", "planted.rms_norm"):
        sys.modules.pop(name, None)
    for function in cached:
        function.cache_clear()
    forget()


def second(call, outs, *args):
    """The second of three calls of a run has one element that is an ulp off."""
    return (nudged(outs[0]), *outs[1:]) if call % 3 == 2 else outs


# --- planted faults ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_wrong_operator_is_named_with_its_distance(planted, direction, dtype):
    planted(direction, second)
    model, x = norms(dtype)
    report = bisect(model, None, x, b=PLANTED)
    first = report.first
    assert (first.kind, first.name, first.direction) == ("operator", "rms_norm", direction)
    assert (first.row.number, first.cause, first.ulps) == (2, "computation", 1)
    (apart,) = first.distances
    assert apart.name == ("y" if direction == "forward" else "dx")
    assert (apart.elements, apart.of_elements, apart.rows, apart.of_rows) == (1, 320, 1, 20)
    assert first.row.backends == ("reference", "planted")
    assert first.row.where == ("second" if direction == "forward" else "")
    assert first.repeatable
    assert not first.broken
    assert "two backends" in first.promise
    assert all(row.state == "equal" for row in report.rows[: first.row.index])
    assert 0 < first.row.difference < 0.01
    assert "<- first" in str(report)
    assert "at most 1 ulp" in str(report)


def test_what_a_run_does_not_repeat_breaks_a_promise(planted):
    planted(
        "forward", lambda call, outs, *args: (nudged(outs[0]) if call % 2 else outs[0], outs[1])
    )
    model, x = norms()
    report = bisect(model, model, x, a=PLANTED, b=PLANTED, backward=False)
    assert report.first.broken == ("repeat",)
    assert "broken: rms_norm forward of planted promises 'repeat'" in str(report)


def test_bisect_reports_unrepeatable_differences(planted):
    planted("forward", lambda call, outs, *args: second(call if call < 4 else 1, outs))
    model, x = norms()
    first = bisect(model, None, x, b=PLANTED).first
    assert (first.name, first.repeatable, first.distances) == ("rms_norm", False, ())
    assert "not repeatable" in first.reason


def test_rows_that_depend_on_others_break_the_promise(planted):
    planted("forward", lambda call, outs, x, *args: second(2 if len(x) == 1 else 1, outs))
    model, x = norms()
    same = {**PLANTED, "deterministic": "rows"}
    first = bisect(model.eval(), None, x, a=same, b={**same, "split": 1}).first
    assert (first.name, first.row.number, first.broken) == ("rms_norm", 1, ("rows",))
    (apart,) = first.distances
    assert (apart.elements, apart.of_elements) == (4, 320)  # one in each of four runs


def test_bisect_reports_unequal_inputs_first():
    model, x = norms()
    other, _ = norms()
    with torch.no_grad():
        other.second.weight[3] += 1
    first = bisect(model, other, x).first
    assert (first.cause, first.name, first.ulps) == ("weights", "second.weight", 2**23)
    with torch.no_grad():
        other.second.weight[3] = -model.second.weight[3]
    assert bisect(model, other, x).first.ulps == 2 * 0x3F800000


def test_bisect_names_code_between_operators():
    class Between(Norms):
        def forward(self, x):
            return self.second(self.first(x) * (1 if self.training else 1 + 2**-20))

    model = Between()
    first = bisect(model, copy.deepcopy(model).eval(), torch.randn(2, 16)).first
    assert (first.cause, first.row.inputs, first.row.number) == ("between", "differs", 2)
    assert "after first forward (module, call 1)" in first.reason


def test_other_shapes_and_other_calls_are_reported():
    class Odd(Norms):
        def forward(self, x):
            x = self.second(self.first(x))
            return x if self.training else self.first(x)

    model = Odd()
    other = copy.deepcopy(model).eval()
    assert bisect(model, other, torch.randn(2, 16)).first.cause == "sequence"
    first = bisect(Norms(), Norms(torch.float64), torch.randn(2, 16)).first
    assert (first.cause, first.name) == ("shape", "first.weight")
    assert "torch.float32 in a, (16,) torch.float64 in b" in first.reason


# --- equal runs ---


def test_bisect_repeats_a_run_with_dropout():
    model, x = norms()
    report = bisect(model, model, x)
    assert report.equal
    assert report.first is None
    assert {row.state for row in report.rows} == {"equal"}
    row_kinds = {row.kind for row in report.rows}
    assert row_kinds == {
        "data",
        "weight",
        "operator",
        "module",
        "output",
        "gradient",
        "loss",
        "parameter gradient",
    }
    operators = [(r.name, r.direction) for r in report.rows if r.kind == "operator"]
    assert operators == [("rms_norm", "forward")] * 3 + [("rms_norm", "backward")] * 3
    assert bisect(model, model, x, b={"seed": 1}).first.name == "drop"


def test_nothing_of_the_caller_is_changed():
    class Counted(Norms):
        def __init__(self):
            super().__init__()
            self.norm = torch.nn.BatchNorm1d(5)
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x):
            self.seen = self.seen + 1
            return super().forward(self.norm(x))

    model, (_, x) = Counted(), norms()
    model.first.weight.grad = stored = torch.ones(16)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    call, module_call, config = Primitive.call, torch.nn.Module._call_impl, current()
    states = torch.get_rng_state(), random.getstate()
    report = bisect(
        model, None, x, a={"default": "reference", "chunk_bytes": 1000}, b={"split": 3, "seed": 5}
    )
    assert not report.equal
    assert (Primitive.call, torch.nn.Module._call_impl) == (call, module_call)
    assert current() is config
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert model.first.weight.grad is stored
    assert stored.eq(1).all()
    assert x.grad is None
    assert all(p.grad is None for n, p in model.named_parameters() if n != "first.weight")
    torch.testing.assert_close({**model.state_dict()}, before, rtol=0, atol=0)
    assert model.training
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
    assert not any(getattr(m, name) for m in model.modules() for name in hooks)


def test_an_error_of_the_model_restores_everything():
    model, x = norms()
    call = Primitive.call
    with pytest.raises(ValueError, match="the last axis of the input must be 16"):
        bisect(model, None, x[..., :3])
    assert Primitive.call is call
    assert bisect(model, None, x).equal


def test_autocast_records_a_call_once():
    model, x = norms()
    with torch.autocast("cpu", torch.bfloat16):
        report = bisect(model, None, x)
    assert report.equal
    assert sum(row.kind == "operator" for row in report.rows) == 6


# --- hashes ---


def one(tensor):
    pair = digest(tensor)
    return on_host([pair])[id(pair)]


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.bfloat16,
        torch.float64,
        torch.complex64,
        torch.bool,
        torch.int8,
        torch.int64,
        torch.float8_e4m3fn,
    ],
)
def test_hash_depends_on_bits_and_positions(dtype):
    numbers = torch.arange(24).reshape(4, 6) % 7
    x, mixed = numbers.to(dtype), numbers.flatten().flip(0).reshape(4, 6).to(dtype)
    assert one(x).hash != one(mixed).hash
    assert one(x).hash == one(x.t().contiguous().t()).hash == one(x.clone()).hash
    changed = x.clone()
    changed[2, 3] = 1 - int(x[2, 3].real if dtype.is_complex else x[2, 3])
    assert one(x).hash != one(changed).hash
    assert one(x[:0]) == one(x[:0].clone())
    assert distance("x", x, changed).elements == 1


def test_the_hash_sees_every_block_signs_and_nan():
    x = torch.zeros(2 * BLOCK + 5)
    swapped = x.clone()
    x[3], swapped[BLOCK + 3] = 1, 1
    assert one(x).hash != one(swapped).hash
    assert relative([one(x)], [one(swapped)]) > 0
    assert one(torch.tensor([0.0])).hash != one(torch.tensor([-0.0])).hash
    nan = torch.tensor([1.0, math.nan])
    assert one(nan).hash == one(nan.clone()).hash
    assert math.isnan(one(nan).largest)
    assert distance("x", nan, torch.ones(2)).ulps == math.inf
    assert distance("x", nan, nan.clone()).elements == 0
    zeros = distance("x", torch.tensor([0.0]), torch.tensor([-0.0]))
    assert (zeros.ulps, zeros.elements) == (0, 1)


def test_the_estimated_difference_is_right_to_a_factor():
    x = torch.randn(3000, 200)
    for size in (1e-6, 1e-2):
        y = x + size * torch.randn_like(x)
        exact = float((y - x).norm() / x.norm())
        assert exact / 3 < relative([one(x)], [one(y)]) < exact * 3


def test_paths_have_no_prefixes_of_wrappers():
    paths = {
        "_orig_mod.model.norm": "model.norm",
        "module.base_model.model.model.norm": "model.norm",
        "layers.0._orig_mod.mlp": "layers.0.mlp",
        "base_model.model": "base_model.model",
        "_orig_mod": "",
    }
    assert {name: path_of(name) for name in paths} == paths


# --- models ---


@pytest.fixture(scope="module")
def llama():
    return models.build("llama"), models.batch(rows=4)


def test_chunk_sizes(llama):
    model, batch = llama
    report = bisect(model, None, batch, a={"patch": True}, b={"patch": True, "chunk_bytes": 2000})
    assert (report.first.name, report.first.direction) == ("fused_linear_cross_entropy", "forward")
    assert "budget=0 in a, 2000 in b" in report.first.reason


@pytest.mark.slow
def test_rows_of_a_whole_model_do_not_depend_on_the_batch(llama):
    """Every operator with equal inputs; sums over rows are rounded in turn.

    Attention is ours, for the bits of PyTorch's follow the thread that computes a head. The head's
    gradient is of a GEMM, which no contract promises to round by the row.
    """
    register_attention()
    model, batch = copy.deepcopy(llama[0]), llama[1]
    model.set_attn_implementation("liger_multi")
    strict = {"patch": True, "deterministic": "rows", "rope": "reference"}
    report = bisect(model, None, batch, a=strict, b={**strict, "split": 3})
    operators = [r for r in report.rows if r.kind == "operator"]
    changed = {(r.name, r.differing) for r in operators if "equal" == r.inputs != r.state}
    assert changed <= {("fused_linear_cross_entropy", ("hidden_gradient",))}
    names = {r.name for r in operators if r.direction == "forward" and r.inputs == "equal"}
    assert {"attention", "gated_mlp", "fused_linear_cross_entropy", "rope"} <= names
    if not changed:
        assert report.equal or report.first.kind in ("loss", "parameter gradient")
        assert report.equal or "added in another order" in report.first.reason
    loose = bisect(model, None, batch, a={"patch": True}, b={"patch": True, "split": 1})
    assert loose.first.row.index <= report.rows[-1].index


def test_the_gradients_of_split_batches_add_up(llama):
    model, batch = llama
    report = bisect(model, None, batch, b={"split": 1})
    gradients = [r for r in report.rows if r.kind in ("loss", "parameter gradient")]
    assert len(gradients) == 22
    assert all(r.difference < 1e-5 for r in gradients), "labels are counted over all runs"


def test_the_loss_of_a_mean_is_weighted_by_labels():
    class Classifier(Norms):
        def forward(self, x, labels):
            return {"loss": torch.nn.functional.cross_entropy(super().forward(x).mean(1), labels)}

    model, (_, x) = Classifier().eval(), norms()
    batch = {"x": x.detach(), "labels": torch.tensor([1, 2, -100, 3])}
    report = bisect(model, None, batch, b={"split": 2})
    (loss,) = [r for r in report.rows if r.kind == "loss"]
    assert loss.difference < 1e-6


def test_unpatched_against_patched(llama):
    model, batch = llama
    report = bisect(model, None, batch, b={"patch": True})
    states = {(r.kind, r.name): r.state for r in report.rows}
    assert states["module", "model.layers.0.mlp"] == "equal"
    assert states["output", "logits"] == "equal"
    assert states["operator", "gated_mlp"] == "only in b"
    assert report.first.kind == "gradient"
    assert "fused_linear_cross_entropy backward (only in b)" in report.first.reason
    assert type(model.model.norm).__module__.startswith("transformers")


def test_patched_logits_are_read_without_a_trace(llama, monkeypatch):
    """The fused loss runs as ever, although logits are hashed and modules recorded."""

    model, batch = llama
    with liger_multi.patched(model):
        calls = models.Calls(monkeypatch)
        report = bisect(model, None, batch)
    assert report.equal
    assert calls["fused_linear_cross_entropy"] == 2
    assert calls["gated_mlp"] == 4, "layers under a hook would be called one by one"


def test_checkpointing_changes_no_bit(llama):
    model, batch = llama
    report = bisect(model, None, batch, b={"checkpoint": True})
    assert report.equal
    assert any("run again" in note for note in report.notes)
    assert not any(getattr(m, "gradient_checkpointing", False) for m in model.modules())


@pytest.mark.slow
def test_eager_against_compiled(llama):
    model, batch = llama
    same = {"patch": True}
    report = bisect(model, None, batch, a=same, b={**same, "compile": "aot_eager"}, backward=False)
    states = {(r.name, r.state) for r in report.rows if r.kind == "operator"}
    assert ("rms_norm", "equal") in states
    assert {r.state for r in report.rows if r.kind == "module"} == {"only in a"}
    assert {r.state for r in report.rows if r.kind == "output"} == {"equal"}
    assert any("compiled" in note for note in report.notes)


@pytest.mark.slow
def test_eager_against_inductor(llama):
    model, batch = llama
    report = bisect(model, None, batch, a={"patch": True}, b={"patch": True, "compile": True})
    known = [r for r in report.rows if r.kind == "parameter gradient"]
    assert len(known) == 21
    assert all(r.difference < 1e-4 for r in known)


# --- results ---


def test_json_and_the_picture(planted, tmp_path):
    pytest.importorskip("matplotlib")
    planted("backward", second)
    model, x = norms()
    report = bisect(model, None, x, b=PLANTED)
    data = json.loads(report.to_json())
    assert (data["first"]["name"], data["first"]["ulps"]) == ("rms_norm", 1)
    assert data["rows"][data["first"]["row"]]["state"] == "differs"
    assert not data["equal"]
    for name, result in (("differs", report), ("equal", bisect(model, None, x))):
        result.picture(tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    nan = bisect(model, None, x.detach() * math.nan, backward=False)
    assert nan.equal
    json.loads(nan.to_json())


@pytest.mark.parametrize(
    ("model", "batch", "settings", "text"),
    [
        (3, torch.ones(2), {}, "model_a must be a torch.nn.Module, got 3"),
        (Norms(), None, {}, "batch must be a tensor, or a tuple or mapping with tensors, got None"),
        (Norms(), torch.ones(2), {"rmsnorm": "reference"}, "did you mean 'rms_norm'"),
        (Norms(), torch.ones(2), {"rms_norm": "refrence"}, "did you mean 'reference'"),
        (Norms(), torch.ones(2), {"split": 0}, "split of configuration a must be an integer of at"),
        (Norms(), torch.ones(2), {"patch": 1}, "patch of configuration a must be true or false"),
        (Norms(), torch.ones(2), {"compile": 1}, "compile of configuration a must be true, false"),
        (Norms(), torch.ones(2), 7, "configuration a must be a mapping such as"),
        (Norms(), torch.ones(2, 16), {"checkpoint": True}, "checkpoint=True needs a Hugging Face"),
    ],
)
def test_wrong_input_is_named(model, batch, settings, text):
    with pytest.raises(ConfigurationError) as caught:
        bisect(model, None, batch, a=settings)
    assert text in str(caught.value)


# --- the command ---

FILE = """
import torch
from liger_multi import nn

def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(nn.RMSNorm(8), torch.nn.Linear(8, 8), nn.RMSNorm(8))

def batch():
    print("a line of the file's own")
    return torch.arange(24.0).reshape(3, 8)
"""


def test_settings_of_the_command():
    assert settings("a", "") == {}
    text = "rms_norm=reference, split=1,compile,checkpoint=false,swiglu=npu+triton"
    assert settings("a", text) == {
        "rms_norm": "reference",
        "split": 1,
        "compile": True,
        "checkpoint": False,
        "swiglu": ["npu", "triton"],
    }


def test_the_command_on_a_file(tmp_path, capsys, planted):
    file = tmp_path / "mine.py"
    file.write_text(FILE)
    assert main(["bisect", str(file), "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["equal"]
    assert "bisect: " in captured.err
    planted("forward", lambda call, outs, *args: (nudged(outs[0]), outs[1]))
    chosen = ["--b", "rms_norm=planted+reference", "--forward-only"]
    assert main(["bisect", str(file), *chosen]) == 1
    assert "rms_norm forward (operator, call 1) in 0" in capsys.readouterr().out
    file.write_text(f"{FILE}\ndef model_b():\n    return model().double().float().mul_")
    assert main(["bisect", str(file)]) == 2
    assert f"{file.resolve()}:14): AttributeError" in capsys.readouterr().err


def test_the_command_on_the_model_it_brings(tmp_path, capsys):
    for name in ("transformers", "matplotlib"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"needs {name}")
    picture = tmp_path / "out.png"
    chosen = ["--device", "cpu", "--b", "chunk_bytes=9000", "--picture", str(picture)]
    assert main(["bisect", "tiny-llama", *chosen]) == 1
    assert "fused_linear_cross_entropy forward" in capsys.readouterr().out
    assert picture.stat().st_size > 1000


@pytest.mark.parametrize(
    ("text", "options", "said"),
    [
        ("def model(: pass", [], "SyntaxError"),
        ("x = 1", [], "must define a function model(), got nothing of this name"),
        ("def model(): return 3\ndef batch(): raise KeyError('x')", [], "mine.py:2): KeyError"),
        ("def model(): return 3\nbatch = 4", [], "must define a function batch(), got 4"),
        ("import sys; sys.exit(0)", [], "SystemExit"),
        (None, [], "MODEL must be tiny-llama or a Python file that exists, got"),
        (FILE, ["--a", "=3"], "--a: '=3' must be KEY or KEY=VALUE"),
        (FILE, ["--a", "split=1,split=2"], "is given twice"),
        (FILE, ["--b", "split=x"], "split of configuration b must be an integer"),
        (FILE, ["--picture", "x.jpg"], "--picture must end with .png"),
        (FILE, ["--device", "cpu"], "--device cpu is for tiny-llama"),
        (FILE.replace("(3, 8)", "(8, 3)"), [], "bisect: the model failed"),
    ],
)
def test_wrong_input_of_the_command(tmp_path, capsys, text, options, said):
    file = tmp_path / "mine.py"
    if text is not None:
        file.write_text(text)
    assert main(["bisect", str(file), *options]) == 2
    captured = capsys.readouterr()
    assert said in captured.err.splitlines()[-1]
    assert not captured.out
