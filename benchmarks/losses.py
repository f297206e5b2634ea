"""Whole losses beside peers, forward with backward: ``python -m benchmarks.losses``.

A loss is a function of a student's or policy's hidden states and head. Its floor is the GEMMs
that it cannot do without (three of the head; one more, without gradients, where a teacher or a
reference has a head too). Time and memory are measured as for the operators: interleaved rounds,
and the peak without inputs, gradients, and an fp32 gradient of the weight.

``float8_logits`` and ``float8`` are ours with GEMMs of the head in FP8.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import liger_multi
from benchmarks import store
from benchmarks.harness import device_of
from liger_multi import losses
from liger_multi.bench.cases import error
from liger_multi.bench.measure import (
    Clock,
    Runner,
    host_us,
    interleave,
    memory_bytes,
    release,
)
from liger_multi.bench.peers import TABLE
from liger_multi.bench.providers import Provider
from liger_multi.dispatch.config import Configuration, parse, using_configuration
from liger_multi.memory.measure import format_bytes
from liger_multi.ops import fused_linear_cross_entropy

ROOT = Path(__file__).parent.parent
TOKENS = 1024  # of an answer
Loss = Callable[..., Tensor]


@dataclass(frozen=True)
class Shape:
    """Tokens of a batch, width of the hidden states, classes."""

    tokens: int
    width: int
    classes: int

    def __str__(self) -> str:
        return f"{self.tokens}x{self.width}x{self.classes}"


def draw(shape: Shape, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """Inputs of every loss; answers of equal length, of which a tenth is padding."""
    g = torch.Generator(device).manual_seed(0)
    length = min(TOKENS, shape.tokens // 2)
    rows = shape.tokens // length

    def normal(*size: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(size, generator=g, device=device) * scale).to(dtype)

    target = torch.randint(shape.classes, (rows, length), generator=g, device=device)
    target[:, length - length // 10 :] = -100
    tensors = {
        "hidden": normal(rows, length, shape.width).requires_grad_(),
        "weight": normal(shape.classes, shape.width, scale=shape.width**-0.5).requires_grad_(),
        "target": target,
        "other": normal(rows, length, shape.width),
        "other_weight": normal(shape.classes, shape.width, scale=shape.width**-0.5),
        "advantages": torch.randn(rows, generator=g, device=device),
    }
    with torch.no_grad():  # log-probabilities that an earlier step has computed
        near = losses.Head(tensors["hidden"] + 0.01 * tensors["other"], tensors["weight"])
        tensors["old"] = losses.tokens(near, target).log_prob  # type: ignore[assignment]
    return tensors


# --- ours ---


def nll(hidden: Tensor, weight: Tensor, target: Tensor, **o: Any) -> Tensor:
    """The mean over tokens, as a patched model computes it; gradients are made in forward."""
    o.pop("keep", None)  # no logits stay
    loss: Any = fused_linear_cross_entropy(hidden, weight, target, **o)
    return loss  # type: ignore[no-any-return]


def float8_nll(gemms: str) -> Loss:
    """The same with GEMMs in FP8."""
    scope = Configuration((parse({"head_gemms": gemms}, __name__),))

    def call(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        with using_configuration(scope):
            return nll(hidden, weight, target)

    return call


def log_prob_nll(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """The same of every token's log-probability; backward computes the logits once more."""
    loss = losses.tokens(losses.Head(hidden, weight), target, ("log_prob",))
    assert loss.log_prob is not None
    return _mean(loss.log_prob, target)


def _mean(log_prob: Tensor, target: Tensor) -> Tensor:
    return -log_prob.sum() / (target >= 0).sum()


def dpo(hidden: Tensor, weight: Tensor, target: Tensor, old: Tensor, **o: Any) -> Tensor:
    """DPO with log-probabilities of the reference from before."""
    return losses.dpo_loss(losses.Head(hidden, weight, **o), target, old)[0]


def dpo_reference(
    hidden: Tensor, weight: Tensor, target: Tensor, other: Tensor, other_weight: Tensor, **o: Any
) -> Tensor:
    """DPO with a second model's head."""
    reference = losses.Head(other, other_weight)
    return losses.dpo_loss(losses.Head(hidden, weight, **o), target, reference)[0]


def grpo(
    hidden: Tensor, weight: Tensor, target: Tensor, advantages: Tensor, old: Tensor, **o: Any
) -> Tensor:
    """GRPO of tokens, clipped, with the divergence from the old policy."""
    passes = o.pop("passes", "auto")
    return losses.policy_loss(
        losses.Head(hidden, weight, **o),
        target,
        advantages,
        old=old,
        reference=old,
        beta=0.04,
        passes=passes,
        metrics=(),
    )[0]


def gspo(
    hidden: Tensor, weight: Tensor, target: Tensor, advantages: Tensor, old: Tensor, **o: Any
) -> Tensor:
    """GSPO: ratios of whole answers."""
    return losses.policy_loss(
        losses.Head(hidden, weight, **o), target, advantages, old=old, loss_type="gspo", metrics=()
    )[0]


def jsd(
    hidden: Tensor, weight: Tensor, target: Tensor, other: Tensor, other_weight: Tensor, **o: Any
) -> Tensor:
    """Distillation from a teacher's head."""
    teacher = losses.Head(other, other_weight)
    return losses.distillation_loss(losses.Head(hidden, weight, **o), teacher, target)[0]


def policy(hidden: Tensor, weight: Tensor, target: Tensor, advantages: Tensor, **o: Any) -> Tensor:
    """A policy gradient with a bonus of entropy, of one call's statistics."""
    tokens = losses.tokens(losses.Head(hidden, weight, **o), target, ("log_prob", "entropy"))
    assert tokens.log_prob is not None
    assert tokens.entropy is not None
    return _policy(tokens.log_prob, tokens.entropy, target, advantages)


def _policy(log_prob: Tensor, entropy: Tensor, target: Tensor, advantages: Tensor) -> Tensor:
    return _mean(log_prob * advantages.unsqueeze(1) + 0.01 * entropy, target)


# --- a user's code, on logits ---


def policy_of_logits(logits: Tensor, target: Tensor, advantages: Tensor) -> Tensor:
    """The same on logits, as a training script computes it."""
    log_p = torch.log_softmax(logits.float(), -1)
    own = log_p.gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    kept = target >= 0
    return _policy(torch.where(kept, own, 0), torch.where(kept, entropy, 0), target, advantages)


@functools.cache
def _headed(classes: int, width: int) -> Any:
    """A patched model of no layers: its logits are those of what goes in."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=classes,
        hidden_size=width,
        num_hidden_layers=0,
        num_attention_heads=1,
        num_key_value_heads=1,
        intermediate_size=1,
        tie_word_embeddings=False,
        use_cache=False,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    model.model.norm = torch.nn.Identity()
    model.model.rotary_emb = torch.nn.Identity()
    liger_multi.patch(model, rope=False, rms_norm=False, swiglu=False)
    return model


def _lazy(hidden: Tensor, weight: Tensor) -> Tensor:
    """The lazy logits of a patched model."""
    head = _headed(*weight.shape).lm_head
    head._parameters.pop("weight", None)
    head.weight = weight  # the tensor itself, whose gradient is asked for
    return head(hidden)  # type: ignore[no-any-return]


def _eager(hidden: Tensor, weight: Tensor) -> Tensor:
    return hidden @ weight.mT


def nll_of_logits(logits: Tensor, target: Tensor) -> Tensor:
    """The loss of tokens, as a training script writes it."""
    return F.cross_entropy(logits.float().flatten(0, 1), target.flatten())


def from_head(loss: Loss, logits: Callable[[Tensor, Tensor], Tensor] = _eager) -> Loss:
    """A loss of logits as one of hidden states and the weight of the head."""
    return lambda hidden, weight, **inputs: loss(logits(hidden, weight), **inputs)


# --- plain PyTorch ---


def _rows(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    log_p = torch.log_softmax((hidden @ weight.mT).float(), -1)
    log_prob = log_p.gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return torch.where(target >= 0, log_prob, 0)


def torch_dpo(hidden: Tensor, weight: Tensor, target: Tensor, old: Tensor) -> Tensor:
    """The same in eager PyTorch."""
    chosen, rejected = (_rows(hidden, weight, target) - old).sum(-1).chunk(2)
    return -F.logsigmoid(0.1 * (chosen - rejected)).mean()


def torch_dpo_reference(
    hidden: Tensor, weight: Tensor, target: Tensor, other: Tensor, other_weight: Tensor
) -> Tensor:
    """The same in eager PyTorch."""
    with torch.no_grad():
        before = _rows(other, other_weight, target)
    return torch_dpo(hidden, weight, target, before)


def torch_grpo(
    hidden: Tensor, weight: Tensor, target: Tensor, advantages: Tensor, old: Tensor
) -> Tensor:
    """The same in eager PyTorch."""
    own, mask, a = _rows(hidden, weight, target), target >= 0, advantages.unsqueeze(1)
    ratio = torch.exp(own - old)
    each = -torch.min(ratio * a, ratio.clamp(0.8, 1.2) * a)
    each = each + 0.04 * (torch.exp(old - own) - (old - own) - 1)
    return ((each * mask).sum(-1) / mask.sum(-1)).mean()


def torch_gspo(
    hidden: Tensor, weight: Tensor, target: Tensor, advantages: Tensor, old: Tensor
) -> Tensor:
    """The same in eager PyTorch."""
    own, mask = _rows(hidden, weight, target), target >= 0
    ratio = torch.exp(((own - old) * mask).sum(-1) / mask.sum(-1))
    return -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()


def torch_jsd(
    hidden: Tensor, weight: Tensor, target: Tensor, other: Tensor, other_weight: Tensor
) -> Tensor:
    """The same in eager PyTorch."""
    q = torch.log_softmax((hidden @ weight.mT).float(), -1)
    p = torch.log_softmax((other @ other_weight.mT).float(), -1)
    m = torch.log(0.5 * p.exp() + 0.5 * q.exp())
    each = 0.5 * (p.exp() * (p - m)).sum(-1) + 0.5 * (q.exp() * (q - m)).sum(-1)
    return (each * (target >= 0)).sum() / (target >= 0).sum()


# --- Liger's losses ---


def _peer(module: str, name: str) -> Any:
    return getattr(importlib.import_module(f"liger_kernel.chunked_loss.{module}"), name)


def liger_nll(accumulate: torch.dtype | None = None) -> Loss:
    """Its fused cross entropy; the weight's gradient is summed in its own dtype by default."""
    home = importlib.import_module("liger_kernel.transformers.fused_linear_cross_entropy")
    loss = home.LigerFusedLinearCrossEntropyLoss(accum_dtype=accumulate)
    return lambda hidden, weight, target: loss(weight, hidden.flatten(0, 1), target.flatten())


def liger_policy() -> Loss:
    """Its scaled cross entropy, which verl's fused head calls, with entropies."""
    home = importlib.import_module("liger_kernel.ops")
    apply = home.LigerFusedLinearScaledCrossEntropyFunction.apply

    def call(hidden: Tensor, weight: Tensor, target: Tensor, advantages: Tensor) -> Tensor:
        tokens = apply(hidden.flatten(0, 1), weight, target.flatten(), 1.0, -100, 1, True)
        each, entropy = (x.view(target.shape) for x in tokens)
        return _policy(-each, torch.where(target >= 0, entropy, 0), target, advantages)

    return call


def liger_dpo() -> Loss:
    """Its DPO, which wants the reference's hidden states and weight."""
    loss = _peer("dpo_loss", "LigerFusedLinearDPOLoss")(compute_nll_loss=False)
    return lambda hidden, weight, target, other, other_weight: loss(
        weight, hidden, target, ref_input=other, ref_weight=other_weight
    )[0]


def nobody(why: str = "its DPO wants the reference's head") -> Loss:
    """A peer without this loss."""
    raise ImportError(f"has no such loss ({why})")


def liger_grpo() -> Loss:
    """Its GRPO, whose chunk is an answer."""
    loss = _peer("grpo_loss", "LigerFusedLinearGRPOLoss")(beta=0.04, loss_type="grpo")
    return _liger_policy(loss, "ref_per_token_logps", "old_per_token_logps")


def liger_gspo() -> Loss:
    """Its GRPO with ratios of whole answers."""
    loss = _peer("grpo_loss", "LigerFusedLinearGRPOLoss")(
        beta=0.0, loss_type="grpo", importance_sampling_level="sequence", use_ref_model=False
    )
    return _liger_policy(loss, "old_per_token_logps")


def _liger_policy(loss: Any, *olds: str) -> Loss:
    return lambda hidden, weight, target, advantages, old: loss(
        hidden,
        weight,
        target.clamp(min=0),
        (target >= 0).to(torch.float32),
        advantages,
        **dict.fromkeys(olds, old),
    )[0]


def liger_jsd() -> Loss:
    """Its distillation, without labels."""
    loss = _peer("jsd_loss", "LigerFusedLinearJSDLoss")(weight_hard_loss=0.0, weight_soft_loss=1.0)
    return lambda hidden, weight, target, other, other_weight: loss(
        hidden.flatten(0, 1), weight, other.flatten(0, 1), other_weight, target.flatten()
    )


# --- TRL's chunked log-probabilities, of which its trainers make NLL and policy losses ---


def _trl_columns() -> int:
    """Classes of a tile in TRL's trainers, whose module wants packages that the tile does not."""
    home = importlib.util.find_spec("trl")
    if home is None or home.origin is None:
        raise ImportError("trl is not installed")
    utils = Path(home.origin).parent / "trainer" / "utils.py"
    text = utils.read_text(encoding="utf-8")
    line = re.search(r"^_CHUNKED_LOGPROB_CHUNK_SIZE = (\d+)$", text, re.MULTILINE)
    if line is None:
        raise ImportError("this trl has no _CHUNKED_LOGPROB_CHUNK_SIZE in trl/trainer/utils.py")
    return int(line[1])


def trl_tokens(*outputs: str) -> Callable[[Tensor, Tensor, Tensor], list[Tensor]]:
    """Log-probabilities of tokens and ``outputs``; like its trainers, of tokens that count."""
    apply = importlib.import_module("trl.kernels").ChunkedLogProbFunction.apply
    columns = _trl_columns()

    def call(hidden: Tensor, weight: Tensor, target: Tensor) -> list[Tensor]:
        kept = target != -100
        settings = (1.0, columns, None, 1.0, outputs)
        results = apply(hidden[kept], weight, None, target[kept], *settings)
        log_prob = results[: 1 + len(outputs)]
        return [x.new_zeros(kept.shape).masked_scatter(kept, x) for x in log_prob]

    return call


def trl_nll() -> Loss:
    """Its SFT loss ``nll``, which ``chunked_nll`` became another name of."""
    tokens = trl_tokens()
    return lambda hidden, weight, target: _mean(tokens(hidden, weight, target)[0], target)


def trl_policy() -> Loss:
    """A policy loss of its log-probabilities and entropies."""
    tokens = trl_tokens("entropy")

    def call(hidden: Tensor, weight: Tensor, target: Tensor, advantages: Tensor) -> Tensor:
        log_prob, entropy = tokens(hidden, weight, target)
        return _policy(log_prob, entropy, target, advantages)

    return call


@dataclass(frozen=True)
class Case:
    """A loss: ours, plain PyTorch, and the inputs that it takes besides a head.

    ``others`` are peers and other ways of ours to the same loss, by the provider's name.
    """

    ours: Loss
    torch: Loss
    more_inputs: tuple[str, ...]
    others: Mapping[str, Callable[[], Loss]]
    teacher: bool = False


CASES: dict[str, Case] = {
    "nll": Case(
        nll,
        from_head(nll_of_logits),
        ("target",),
        {
            "log-prob": lambda: log_prob_nll,
            "lazy": lambda: from_head(nll_of_logits, _lazy),
            "float8_logits": lambda: float8_nll("float8_logits"),
            "float8": lambda: float8_nll("float8"),
            "liger": liger_nll,
            "liger-fp32": lambda: liger_nll(torch.float32),
            "trl": trl_nll,
        },
    ),
    "dpo": Case(dpo, torch_dpo, ("target", "old"), {"liger": nobody}),
    "dpo-reference": Case(
        dpo_reference,
        torch_dpo_reference,
        ("target", "other", "other_weight"),
        {"liger": liger_dpo},
        True,
    ),
    "grpo": Case(grpo, torch_grpo, ("target", "advantages", "old"), {"liger": liger_grpo}),
    "gspo": Case(gspo, torch_gspo, ("target", "advantages", "old"), {"liger": liger_gspo}),
    "jsd": Case(jsd, torch_jsd, ("target", "other", "other_weight"), {"liger": liger_jsd}, True),
    "policy": Case(
        policy,
        from_head(policy_of_logits),
        ("target", "advantages"),
        {
            "lazy": lambda: from_head(policy_of_logits, _lazy),
            "liger": liger_policy,
            "trl": trl_policy,
        },
    ),
}
VARIANTS: dict[str, dict[str, Any]] = {
    "ours": {},
    "ours-1GiB": {"keep": "996MiB", "chunk": "256MiB"},
    "ours-two": {"keep": 0},
}


def floor(case: Case) -> Loss:
    """The GEMMs alone."""
    products = TABLE["fused_linear_cross_entropy"]["products"]

    def call(hidden: Tensor, weight: Tensor, **others: Tensor) -> Tensor:
        flat = hidden.reshape(-1, hidden.shape[-1])
        if case.teacher:
            with torch.no_grad():
                other = others["other"]
                torch.mm(other.reshape(-1, other.shape[-1]), others["other_weight"].mT)
        return products(flat, weight, others["target"])  # type: ignore[no-any-return]

    return call


def provider(case: Case, name: str) -> Provider:
    """Who is measured.

    Raises:
        ImportError: It is not installed, or has no such loss.
    """
    if name in VARIANTS:
        options = dict(VARIANTS[name])
        if name == "ours-two" and case.ours is grpo:
            options["passes"] = "two"
        return Provider(name, functools.partial(case.ours, **options))
    if name == "products":
        return Provider(name, floor(case), floor=True)
    if name not in (*case.others, "torch"):
        raise ImportError("has no such loss")
    return Provider(name, case.torch if name == "torch" else case.others[name]())


def every(case: Case) -> tuple[str, ...]:
    """Who can be measured."""
    return ("products", *VARIANTS, "torch", *case.others)


def measured(
    case: Case, tensors: dict[str, Tensor], names: Sequence[str], seconds: float
) -> dict[str, dict[str, Any]]:
    """Rows by provider: error against fp32, memory, time."""
    device = tensors["hidden"].device
    clock, input_names = Clock(device), {"hidden", "weight", *case.more_inputs}
    inputs = {name: x for name, x in tensors.items() if name in input_names}
    rows: dict[str, dict[str, Any]] = {}
    runners: dict[str, tuple[Runner, int]] = {}
    expected = _right(case, inputs)
    for provider in _available(case, names, rows):
        release(device)
        runner = Runner.make(provider, inputs, (torch.ones((), device=device),))
        row = rows[provider.name] = {"status": "ok"}
        try:
            row |= _alone(runner, expected, tensors["weight"].numel(), device)
            flushes = clock.flushes(host_us(runner, clock, 3)[1])
        except Exception as failure:
            row |= {"status": f"{type(failure).__name__}: {str(failure)[:120]!r}"}
            continue
        runners[provider.name] = (runner, flushes)
    release(device)
    for name, times in interleave(runners, clock, seconds, 2).items():
        rows[name] |= times.summary()
    return rows


def _available(case: Case, names: Sequence[str], rows: dict[str, dict[str, Any]]) -> list[Provider]:
    providers = []
    for name in names:
        try:
            providers.append(provider(case, name))
        except ImportError as failure:
            rows[name] = {"status": str(failure)}
    return providers


def _right(case: Case, inputs: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients in fp32 of the same rounded inputs."""
    wide = {
        n: (x.detach().float() if x.is_floating_point() else x).requires_grad_(x.requires_grad)
        for n, x in inputs.items()
    }
    loss = case.ours(**wide, chunk=512, keep=0)
    grads = torch.autograd.grad(loss, (wide["hidden"], wide["weight"]))
    return loss.detach(), {"hidden": grads[0], "weight": grads[1]}


def _alone(
    runner: Runner, expected: tuple[Tensor, dict[str, Tensor]], weight: int, device: torch.device
) -> dict[str, Any]:
    (loss,), grads = runner.both()
    row: dict[str, Any] = {}
    if not runner.provider.floor:
        row["loss"], row["right"] = float(loss), float(expected[0])
        dtype = runner.tensors["weight"].dtype
        row["error"] = max(error(g, expected[1][n], dtype)[0] for n, g in grads.items())
        row["off"] = {n: _off(grad, expected[1][n]) for n, grad in grads.items()}
    del loss, grads
    release(device)
    row["extra_bytes"], row["peak_bytes"] = memory_bytes(runner, 4 * weight, device)
    return row


def line(name: str, provider: str, row: Mapping[str, Any], floor_ms: float | None) -> str:
    """A row of the table."""
    if row["status"] != "ok":
        return f"{name:24s} {provider:10s} {row['status']}"
    ratio = f"{row['both_ms'] / floor_ms:6.3f}" if floor_ms else "     -"
    wrong = ""
    if "error" in row:
        off = ", ".join(f"{n} {x:.1e}" for n, x in row["off"].items())
        wrong = f"error {row['error']:8.2f}  loss {row['loss']:.6f} ({row['right']:.6f})  {off}"
    return (
        f"{name:24s} {provider:10s} {row['both_ms']:9.3f} ms  {ratio} x products  "
        f"extra {format_bytes(row['extra_bytes']):>10s}  {wrong}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.losses", description=__doc__)
    parser.add_argument("cases", nargs="*", default=list(CASES), help=", ".join(CASES))
    parser.add_argument("--shape", default="", help="TOKENSxWIDTHxCLASSES")
    parser.add_argument("--providers", default="", help="with commas; else all that a loss has")
    parser.add_argument("--seconds", type=float, default=5.0)
    store.add_options(parser)
    options = parser.parse_args(arguments)
    device = device_of()
    text = options.shape or ("256x32x500" if device.type == "cpu" else "8192x4096x128256")
    shape = Shape(*map(int, text.split("x")))
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    tensors, rows = draw(shape, device, dtype), list[dict[str, Any]]()
    run = store.head("losses", options, device) | {"rows": rows}
    for name in options.cases:
        case = CASES[name]
        asked = options.providers.split(",") if options.providers else every(case)
        by_provider = measured(case, tensors, asked, options.seconds)
        floor_ms = by_provider.get("products", {}).get("both_ms")
        for provider, row in by_provider.items():
            print(line(f"{name} {shape}", provider, row, floor_ms), flush=True)
            rows.append({"case": name, "shape": asdict(shape), "provider": provider, **row})
        store.keep(run, options)
    ours = [row for row in rows if row["provider"].startswith("ours")]
    return int(any(row["status"] != "ok" or row["error"] > 1 for row in ours))


def _off(actual: Tensor, exact: Tensor) -> float:
    return float((actual.float() - exact).norm() / exact.norm())


if __name__ == "__main__":
    sys.exit(main())
