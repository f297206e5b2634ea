"""Random programs on patched models and random patched modules behave as stock ones do.

``fuzz_logits.py`` has programs of what user code does to logits. ``fuzz_modules.py`` has modules:
patched equals unpatched, or is left alone.
"""

import contextlib
import os
import re
import textwrap
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

import fuzz_logits
from fuzz_logits import LIMITS, Fuzzer, programs, report, run
from fuzz_logits_run import Program, models, statements
from fuzz_logits_steps import V

from liger_multi._torch_private import function_apply_code
from liger_multi.patching.head import storage
from liger_multi.patching.head.loss import SWAPS

# --- logits ---


SEEDS = (1, 2, 3)
EAGER, COMPILED, WHOLE = 32, 4, 2
"""Programs of a seed whose verdicts are counted as well; `make test` runs those of the first."""

SOME_SEEDS = pytest.mark.parametrize(
    "seeds",
    [SEEDS[:1], pytest.param(SEEDS[1:], marks=pytest.mark.slow)],
    ids=["first seed", "other seeds"],
)


@pytest.fixture
def often():
    """The compiler does not give up on a model that is called in many ways."""
    with torch._dynamo.config.patch(dict.fromkeys(LIMITS, 2000)):
        yield


def judge_all(actual):
    """Fail with the shortest failing programs; return how often each verdict came."""
    verdicts, failed = Counter(), []
    for program, verdict in actual:
        verdicts[verdict.outcome] += 1
        verdicts["fused"] += bool(verdict.fused)
        verdicts["trained"] += verdict.finite
        if verdict.outcome == "failed":
            failed.append(report(program, verdict))
    failed.sort(key=len)
    assert not failed, f"{len(failed)} of {verdicts}\n" + "\n".join(failed[:3])
    return verdicts


@pytest.mark.parametrize("seed", SEEDS)
def test_eager(seed, fused):
    verdicts = judge_all(run(seed, EAGER, fused=fused))
    # neither refusals nor real logits everywhere pass for equality
    assert verdicts["refused"] + verdicts["lenient"] <= EAGER // 5, verdicts
    assert verdicts["fused"] >= EAGER // 4, verdicts
    assert verdicts["trained"] >= EAGER // 2, verdicts


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_eager_with_lazy_logits_unchanged(seed, fused, monkeypatch):
    """As they do before PyTorch 2.11."""
    monkeypatch.setattr(storage, "SWAPS", False)
    judge_all(run(seed, 200, fused=fused))


@pytest.mark.slow
@SOME_SEEDS
def test_compiled_programs(seeds, fused, often):
    for mode, count in (("compiled", COMPILED), ("whole", WHOLE)):
        actual = [pair for seed in seeds for pair in run(seed, count, mode, fused=fused)]
        verdicts = judge_all(actual)
        # an autograd.Function takes no gradient of what is no tensor, so many programs end early
        assert verdicts["equal"] >= len(actual) // 4, verdicts


MANY = [("eager", 55, EAGER, 10), ("compiled", 42, COMPILED, 2), ("whole", 17, WHOLE, 2)]
"""Further programs of every seed, in parts of so many."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "count", "start"),
    [(mode, n, first + n * part) for mode, n, first, parts in MANY for part in range(parts)],
)
@pytest.mark.parametrize("seed", SEEDS)
def test_many_programs(seed, mode, count, start, fused, often):
    judge_all(run(seed, count, mode, start, fused))


FUSED = {
    "labels": "out = model(ids, labels=labels)\nout.loss.backward()",
    "a loss of one's own": """
        z = model(ids).logits
        loss = F.cross_entropy(z.view(-1, V), targets(z, 1).view(-1), label_smoothing=0.1)
        loss.backward()
    """,
    "shifted rows": """
        z = model(ids).logits
        rows = z[..., :-1, :].contiguous().float()
        loss = F.cross_entropy(rows.view(-1, V), targets(z, 1)[..., 1:].reshape(-1))
        loss.backward()
    """,
    "temperature and soft cap": """
        z = model(ids).logits / 2.0
        z = torch.tanh(z / 3.0) * 3.0
        loss = F.cross_entropy(z.flatten(0, 1), targets(z, 1).flatten(), reduction='none')
        loss.mean().backward()
    """,
    "class weights": """
        z = model(ids).logits[0]
        loss = F.cross_entropy(z, targets(z, 2), weight=class_weights(z, 2), ignore_index=3)
        loss.backward()
    """,
    "nll_loss": """
        z = model(ids).logits
        loss = F.nll_loss(z.log_softmax(-1).view(-1, V), targets(z, 2).view(-1))
        loss.backward()
    """,
    "metrics beside the loss": """
        out = model(ids, labels=labels)
        hits = (out.logits.argmax(-1) == ids).float().mean()
        entropy = -(out.logits.softmax(-1) * out.logits.log_softmax(-1)).sum(-1)
        best = out.logits.topk(3).values
        loss = F.cross_entropy(out.logits.view(-1, V), ids.view(-1))
        (loss + entropy.mean()).backward()
    """,
    "without gradients": """
        with torch.no_grad():
            out = model(ids, labels=labels)
        loss = F.cross_entropy(out.logits.view(-1, V), ids.view(-1))
    """,
}


def program(text, model="llama", mode="eager"):
    return Program.parse(f"# model={model} mode={mode}\n{textwrap.dedent(text)}")


@pytest.mark.parametrize("text", FUSED.values(), ids=FUSED)
def test_lazy_results_are_fused(text, fused):
    verdict = Fuzzer(fused).judge(program(text))
    assert verdict.outcome == "equal", verdict
    assert verdict.fused, "the loss took real logits"


LOSS = "v1 = F.cross_entropy(z.view(-1, V), targets(z, 1).view(-1))"
WRITES = (
    *("z[..., :50] = -1e4", "z.masked_fill_(cell_mask(z, 1), -1e4)", "z.div_(2.0)", "z /= 2.0"),
    *("z.clamp_(-1, 1)", "z.copy_(z * 0.5)", "z.add_(0.5 * z)", "z[..., :50].fill_(-9.0)"),
    *("z.select(-1, 3).fill_(9.0)", "z.narrow(-1, 3, 2).zero_()", "z.view(-1).mul_(2.0)"),
    *("z.squeeze().mul_(2.0)", "z.mT.mul_(2.0)", "z.data.mul_(2.0)", "z.detach().mul_(2.0)"),
    *("F.relu(z, inplace=True)", "F.hardtanh(z, inplace=True)", "dropout(z, 3, inplace=True)"),
    *("torch._foreach_mul_([z], 2.0)", "torch.ops.aten.mul_.Scalar(z, 2.0)", "torch.relu_(z)"),
    *("real_logits(z).mul_(2.0)", "with torch.no_grad():\n    torch.div(z, 2.0, out=z)"),
    *(
        "z.detach().numpy()[..., 3] = 9.0",
        "np.asarray(z.detach())[...] *= 2.0",
        "z[:, None].mul_(2.0)",
    ),
    *("z.contiguous().mul_(2.0)", "with torch.no_grad():\n    z[0].mul_(2.0)"),
    *("z[..., :-1, :].mul_(2.0)", "z[0].zero_()", "z.transpose(0, 1).mul_(2.0)"),
    *("torch.nn.init.constant_(z[0], 1.0)", "z.as_subclass(torch.Tensor).mul_(2.0)"),
    *(
        "torch.as_tensor(z).mul_(2.0)",
        "HalveInPlace.apply(z)",
        "torch.from_dlpack(z.detach()).mul_(2.0)",
    ),
)
"""Routes by which user code writes to logits; graphs have no numpy and no dlpack."""
BELOW = {"z.as_subclass(torch.Tensor).mul_(2.0)"}
if function_apply_code is not None:  # of C++ since PyTorch 2.14, which lets the protocol see it
    BELOW.add("HalveInPlace.apply(z)")
"""Writes that no function protocol sees, which lazy logits refuse."""
REFUSED = {"torch.as_tensor(z).mul_(2.0)", "HalveInPlace.apply(z)"}
"""What logits of compiled models refuse, which are no tensors."""


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("aliased", [False, True], ids=["alone", "aliased"])
def test_writes_reach_every_later_use(write, aliased):
    """By whatever route; views that were taken before see them, and copies do not."""
    before = "\nv2 = z[:1]\nv3 = z.contiguous()\nv4 = z / 3\nv5 = z[[1, 0]]" if aliased else ""
    verdict = Fuzzer().judge(
        program(f"z = model(ids).logits{before}\n{write}\n{LOSS}\n(v1 + z.mean()).backward()")
    )
    # a list as an index has computed the others, which are real then
    refused = write in BELOW and not (aliased and SWAPS)
    assert verdict.outcome == ("refused" if refused else "equal"), verdict.why


@pytest.mark.slow
def test_writes_to_logits_of_compiled_models(often):
    """The same outside of a compiled model, and some in one graph with it."""
    failed = {}
    for write in WRITES:
        if re.search(r"numpy|dlpack|np\.", write):
            continue
        steps = ("z = model(ids).logits", *statements(write), LOSS, "v1.backward()")
        for mode in ("compiled", *(["whole"] if write in WRITES[:3] else [])):
            graph = len(steps) - 1 if mode == "whole" else 0
            verdict = Fuzzer().judge(Program("small", mode, steps, graph))
            if verdict.outcome != ("refused" if write in REFUSED else "equal"):
                failed[write, mode] = f"{verdict.outcome} {verdict.why[:60]}"
    assert not failed, "\n".join(f"{key}: {why}" for key, why in failed.items())


USES = {
    "contiguous rows are a copy": """
        z = model(ids).logits
        v1 = z[..., :-1, :].contiguous()
        v1.mul_(2.0)
        v2 = v1.view(-1, V)
    """,
    "a function of autograd scales the gradient": """
        z = model(ids).logits
        v1 = ScaleByOne.apply(z, 0.5)
        v2 = F.cross_entropy(v1.view(-1, V), targets(v1, 1).view(-1))
        v2.backward()
    """,
    "the same by a copy": """
        z = model(ids).logits
        v1 = ScaleByClone.apply(z, 0.5)
        v1.sum().backward()
    """,
    "the same by a view, and logits beside it": """
        z = model(ids).logits
        v1 = ScaleByView.apply(z, 0.5)
        (v1.mean() + z.sum()).backward()
    """,
    "a function of autograd that saves its input": """
        z = model(ids).logits
        v1 = Squares.apply(z)
        (v1.mean() + z.sum()).backward()
    """,
    "hook before the loss": """
        z = model(ids).logits
        z.register_hook(lambda g: g * 0.5)
        v1 = F.cross_entropy(z.view(-1, V), targets(z, 1).view(-1))
        v1.backward()
    """,
    "hook after the loss": """
        z = model(ids).logits
        v1 = F.cross_entropy(z.view(-1, V), targets(z, 1).view(-1))
        z.register_hook(lambda g: g * 0.5)
        v1.backward()
    """,
    "hook after a row was taken": """
        z = model(ids).logits
        v1 = z[:1].add(2.0)
        z.register_hook(lambda g: g * 0.5)
        v1.mean().backward()
    """,
    "gradient by logits after the loss": """
        z = model(ids).logits
        v1 = F.cross_entropy(z.view(-1, V), targets(z, 1).view(-1))
        v2 = z[..., :3].sum()
        v3 = torch.autograd.grad(v1, z, allow_unused=True)
    """,
    "what is derived without gradients": """
        z = model(ids).logits
        with torch.no_grad():
            v1 = z / 1.3
        v2 = v1 * 2.0
        v3 = F.cross_entropy(v1.view(-1, V), targets(v1, 1).view(-1))
    """,
    "a view taken without gradients": """
        z = model(ids).logits
        with torch.no_grad():
            v1 = z[0]
        v2 = F.cross_entropy(v1, targets(v1, 4))
        (v2 + z.mean()).backward()
        del v1, v2  # stock's say that they require a gradient, which nobody gets
    """,
    "first read in inference mode": """
        z = model(ids).logits
        with torch.inference_mode():
            v1 = z.min(-1).values
        v2 = z.masked_fill(cell_mask(z, 1), 0.0)
        v2.sum().backward()
    """,
    "checkpoint of a reduction, logits read later": """
        z = model(ids).logits
        v1 = checkpointed(lambda x: x.float().logsumexp(-1).mean(), z)
        (v1 + z.sum()).backward()
    """,
    "checkpoint, then a write": """
        z = model(ids).logits
        v1 = checkpointed(lambda x: x.float().logsumexp(-1).mean(), z)
        z.mul_(0.5)
        v1.backward()
    """,
    "metadata in place": "z = model(ids).logits\nz.unsqueeze_(0)\nv1 = z[0]",
    "axes in place": "z = model(ids).logits\nz.transpose_(0, 1)\nv1 = z.sum(-1)",
    "detach in place": "z = model(ids).logits\nz.detach_()\nv1 = z.sum()",
    "other storage": "z = model(ids).logits\nz.set_(z.detach() * 2.0)",
    "strides of rows": "z = model(ids).logits\nv1 = z[:, :-1]\nv2 = v1.is_contiguous()",
    "gradient of a gradient": """
        z = model(ids).logits
        v1 = F.cross_entropy(z.view(-1, V), targets(z, 1).view(-1))
        v2 = torch.autograd.grad(v1, model.lm_head.weight, create_graph=True)[0]
        (v1 + v2.pow(2).sum()).backward()
    """,
}


@pytest.mark.parametrize("text", USES.values(), ids=USES)
def test_past_failures(text):
    """Each was found by the fuzzer; our own messages may stand in the place of values."""
    verdict = Fuzzer().judge(program(text))
    assert verdict.outcome in ("equal", "refused"), verdict.why


REAL = {
    "hook after a write to a row": """
        z = model(ids).logits
        v1 = z.to(z, copy=True)
        v1[0].zero_()
        v1.register_hook(lambda g: g * 0.5)
        v1.sum().backward()
    """,
    "detach in place": "z = model(ids).logits\nz.detach_()",
    "write after the loss": """
        out = model(ids, labels=labels)
        z = out.logits
        z.mul_(2.0)
        out.loss.backward()
    """,
    "write without gradients": """
        z = model(ids).logits
        with torch.no_grad():
            z.copy_(z * 3)
        v1 = z.log_softmax(-1).mean()
    """,
}


@pytest.mark.parametrize("model", ["on_real", "with_loss"])
@pytest.mark.parametrize("text", REAL.values(), ids=REAL)
def test_real_logits_with_our_loss(text, model):
    verdict = Fuzzer().judge(program(text, model))
    # that loss saves the logits and not a copy, as docs/logits.md says
    expected = "refused" if text == REAL["write after the loss"] and model == "on_real" else "equal"
    assert verdict.outcome == expected, verdict.why


def test_dtype_of_the_loss():
    """In bf16 the loss of logits in bf16 has their dtype, as stock's."""
    for text in (f"z = model(ids).logits\n{LOSS}", "out = model(ids, labels=labels)"):
        verdict = Fuzzer().judge(program(text, "bf16"))
        assert verdict.outcome == "equal", verdict.why


# ---------------------------------------------------------------------- the fuzzer's own tests


@pytest.mark.slow
def test_plain_logits_are_equal():
    """A patch that leaves the head alone: what the comparison finds is not of its own making."""
    actual = [replace(program, model="plain") for program in programs(4, 20)]
    judge_all((program, Fuzzer().judge(program)) for program in actual)


def forward(head, hidden):
    return nn.Linear.forward(head, hidden)


def refusing(head, hidden):
    raise RuntimeError("not today")


class Slack(torch.Tensor):
    """Logits that drop what is written to their parts."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.Tensor.__setitem__:
            return None
        return super().__torch_function__(func, types, args, kwargs or {})


def gentle(head, hidden):
    """No error where PyTorch raises one."""
    logits = forward(head, hidden)
    return logits if torch.is_grad_enabled() else logits.requires_grad_()


READ = ["z = model(ids).logits"]
PLANTED = {
    "values": (lambda head, x: forward(head, x) * 1.0003, [*READ, LOSS], "values"),
    "gradients": (
        lambda head, x: forward(head, x.detach()),
        [*READ, LOSS, "v1.backward()"],
        "of gradient",
    ),
    "history": (lambda head, x: forward(head, x).detach(), [*READ, LOSS], "requires_grad"),
    # a copy for whoever reads a part of them
    "strides": (lambda head, x: torch.cat([forward(head, x)] * 2, -1)[..., :V], READ, "strides"),
    "dtype": (lambda head, x: forward(head, x).bfloat16(), READ, "dtype"),
    "refusal": (refusing, READ, "ours raises"),
    "write": (
        lambda head, x: forward(head, x).as_subclass(Slack),
        [*READ, "z[..., :5] = 1.0", LOSS],
        "values",
    ),
    "no error": (
        gentle,
        ["with torch.no_grad():\n    z = model(ids).logits", LOSS, "v1.backward()"],
        "stock raises",
    ),
}


@contextlib.contextmanager
def planted(forward):
    """The small model with a head that does something else."""
    head = models("small").ours.lm_head
    before, head.__class__ = head.__class__, type("Planted", (nn.Linear,), {"forward": forward})
    try:
        yield
    finally:
        head.__class__ = before


@pytest.mark.parametrize(("head", "steps", "topic"), PLANTED.values(), ids=PLANTED)
def test_planted_defects_are_found(head, steps, topic):
    program = Program("small", "eager", tuple(steps))
    assert Fuzzer().judge(program).outcome == "equal"
    with planted(head):
        verdict = Fuzzer().judge(program)
    assert verdict.outcome == "failed"
    assert topic in verdict.topic


@pytest.mark.skipif(torch.cuda.is_available(), reason="a process that began a device runs no forks")
def test_a_crash_is_a_failure(monkeypatch):
    program = Program("small", "eager", ("z = model(ids).logits", "v1 = z.sum()"))
    monkeypatch.setattr(fuzz_logits, "observe", lambda run: os.abort())
    verdict = Fuzzer().judge(program)
    assert (verdict.outcome, verdict.topic) == ("failed", "crash")


# --- modules ---


@pytest.fixture
def fuzz_modules():
    pytest.importorskip("peft")
    import fuzz_modules

    return fuzz_modules


def differences(fuzz_modules, seed, modules):
    summary = fuzz_modules.run(seed, modules)
    shown = [f"{failure}\n{case}" for case, failure in summary.failures[:3]]
    assert not summary.failures, "\n\n".join([f"{len(summary.failures)} failures", *shown])
    return summary.counts


@pytest.mark.slow
def test_fifty_modules(fuzz_modules):
    counts = differences(fuzz_modules, 0, 50)
    assert counts["patched"] > 15
    assert counts["served"] > 100


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1000, 2000, 3000])
def test_five_hundred_modules(fuzz_modules, seed):
    counts = differences(fuzz_modules, seed, 500)
    for block in fuzz_modules.FORMS:
        assert counts[f"patched {block}"] > 15
    assert counts["served"] > 1000


@pytest.mark.slow
def test_fault_is_detected_and_printed(fuzz_modules, monkeypatch):
    """A fuzzer that cannot fail holds nothing: here nobody looks at the signature."""
    from liger_multi.patching import mlp

    monkeypatch.setattr(mlp, "is_current", lambda module, signature: True)
    case, _ = fuzz_modules.run(0, 60).failures[0]
    assert case.block == "mlp"
    assert case.actions[-1] in str(case)
    assert "class Generated(nn.Module):" in str(case)
