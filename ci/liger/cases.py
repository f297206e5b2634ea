"""Chunked losses of ``liger_kernel`` that both packages run.

The package is whatever ``import liger_kernel`` finds (:mod:`ci.liger.runs`). Every case is a call
that returns tensors by name, or raises. Inputs come from one seed a case. Targets have padding,
answers of different lengths, and ids that are ignored.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ci.liger import precision
from ci.liger.precision import drawn

ROWS, LENGTH, HIDDEN, CLASSES = 4, 6, 16, 37
Case = Callable[[], Any]


class Batch:
    """Inputs of the chunked losses."""

    def __init__(self, padding: bool = True) -> None:
        g = torch.Generator("cpu").manual_seed(0)

        def draw(*shape: int, scale: float = 1.0) -> Tensor:
            return precision.now().of(drawn(torch.randn, *shape, generator=g) * scale)

        self.x, self.w = draw(ROWS, LENGTH, HIDDEN), draw(CLASSES, HIDDEN, scale=0.3)
        self.x, self.w = self.x.requires_grad_(), self.w.requires_grad_()
        self.b = draw(CLASSES).requires_grad_()
        self.rx, self.rw, self.rb = draw(ROWS, LENGTH, HIDDEN), draw(CLASSES, HIDDEN), draw(CLASSES)
        self.tx, self.tw, self.tb = draw(ROWS, LENGTH, 8), draw(CLASSES, 8), draw(CLASSES)
        self.t = drawn(torch.randint, CLASSES, (ROWS, LENGTH), generator=g)
        self.full = self.t.clone()
        if padding:
            self.t[:, 0] = self.t[1, 3:] = self.t[2, 5:] = -100
        self.mask, self.ids = (self.t != -100).long(), self.full
        self.advantages = torch.tensor([1.0, -0.5, 0.3, -1.0])
        own = (self.x.float() @ self.w.float().T + self.b.float()).log_softmax(-1).detach()
        own = own.gather(-1, self.ids.unsqueeze(-1)).squeeze(-1)
        self.old = own + 0.4 * drawn(torch.randn, ROWS, LENGTH, generator=g)
        self.ref = own + 0.4 * drawn(torch.randn, ROWS, LENGTH, generator=g)
        self.ratios = drawn(torch.rand, ROWS, LENGTH, generator=g) + 0.5
        self.liked = torch.tensor([True, False, False, True])

    def graded(self, found: Any, *inputs: Tensor) -> dict[str, Any]:
        """The loss, its gradients, and everything beside it."""
        loss, *rest = found if isinstance(found, tuple) else (found,)
        inputs = inputs or (self.x, self.w, self.b)
        gradients = torch.autograd.grad(loss, inputs, allow_unused=True)
        if len(rest) == 1 and isinstance(rest[0], (tuple, list)):
            rest = list(rest[0])
        made = {"loss": loss, **{f"aux {i}": x for i, x in enumerate(rest)}}
        made |= {f"gradient {i}": g for i, g in enumerate(gradients)}
        made["aux with a gradient"] = str([
            i for i, x in enumerate(rest) if isinstance(x, Tensor) and x.requires_grad
        ])  # fmt: skip
        return made


def loss_of(name: str, **options: Any) -> Any:
    """A chunked loss that is not compiled."""
    home = importlib.import_module("liger_kernel.chunked_loss")
    return getattr(home, f"LigerFusedLinear{name}Loss")(compiled=False, **options)


def product(**axes: tuple[Any, ...]) -> Iterator[dict[str, Any]]:
    """Every combination of options."""
    for values in itertools.product(*axes.values()):
        yield dict(zip(axes, values, strict=True))


def title(name: str, options: dict[str, Any]) -> str:
    """A case's name."""
    return " ".join([name, *[f"{k}={v}" for k, v in options.items()]])


# --- pairs ---

DPO_TYPES = {
    "sigmoid": 0.0, "apo_zero": 0.0, "apo_down": 0.0, "sppo_hard": 0.0, "nca_pair": 0.0,
    "hinge": 0.0, "bco_pair": 0.0, "discopop": 0.0, "robust": 0.2, "exo_pair": 1e-3,
}  # fmt: skip


def _dpo(options: dict[str, Any], bias: bool = True) -> Any:
    b = Batch()
    reference = (b.rx, b.rw, b.rb) if options.get("use_ref_model", True) else ()
    found = loss_of("DPO", **options)(b.w, b.x, b.t, b.b if bias else None, *reference)
    return b.graded(found)


def _pairs(name: str, options: dict[str, Any], nll: str = "") -> Any:
    b = Batch()
    own = b.full.clone()
    own[0, 4:] = -100
    given = {"": (), "all rows": (own,)}[nll]
    return b.graded(loss_of(name, **options)(b.w, b.x, b.t, b.b, *given))


def pairs() -> Iterator[tuple[str, Case]]:
    """DPO, CPO, SimPO and ORPO."""
    for kind, smoothing in DPO_TYPES.items():
        for more in product(use_ref_model=(True, False), average_log_prob=(False, True)):
            o = {"loss_type": kind, "label_smoothing": smoothing, "beta": 0.3, **more}
            yield title("dpo", o), functools.partial(_dpo, o)
    for o in ({"compute_nll_loss": True, "alpha": 0.5}, {"label_smoothing": 0.1},
              {"loss_type": "discopop", "discopop_tau": 0.2}, {"chunk_size": 2}):  # fmt: skip
        yield title("dpo", o), functools.partial(_dpo, o)
    yield "dpo without a bias", functools.partial(_dpo, {}, False)
    for o in product(label_smoothing=(0.0, 0.2), compute_nll_loss=(True, False), alpha=(0.5,)):
        for average in (False, True):
            cpo = {**o, "average_log_prob": average}
            yield title("cpo", cpo), functools.partial(_pairs, "CPO", cpo)
        simpo = {**o, "gamma": 0.3, "beta": 2.0}
        yield title("simpo", simpo), functools.partial(_pairs, "SimPO", simpo)
    for o in product(compute_nll_loss=(True, False), nll=("", "all rows"), chunk_size=(1, 2)):
        rest = {k: v for k, v in o.items() if k != "nll"}
        yield title("orpo", o), functools.partial(_pairs, "ORPO", rest, o["nll"])


def _kto(options: dict[str, Any], kl: Any) -> Any:
    b = Batch()
    reference = (b.rx, b.rw, b.rb) if options["use_ref_model"] else (None, None, None)
    found = loss_of("KTO", **options)(b.x, b.w, b.t, b.b, b.liked, *reference, kl=kl)
    return b.graded(found)


def answers() -> Iterator[tuple[str, Case]]:
    """KTO."""
    for o in product(use_ref_model=(True, False), average_log_prob=(False, True)):
        for kl in (None, torch.tensor(0.2)):
            name = title("kto", {**o, "kl": None if kl is None else kl.item()})
            yield name, functools.partial(_kto, {**o, "beta": 0.3}, kl)


# --- policies ---

POLICY_TYPES = ("dapo", "grpo", "bnpo", "dr_grpo", "luspo", "cispo", "sapo", "vespo")


def _grpo(options: dict[str, Any], given: tuple[str, ...] = ("old", "ref")) -> Any:
    b = Batch(padding="whole" not in given)
    every = {
        "old": ("old_per_token_logps", b.old), "ref": ("ref_per_token_logps", b.ref),
        "ratios": ("vllm_is_ratio", b.ratios), "ratio": ("vllm_is_ratio", b.ratios[:, :1]),
        "flat": ("vllm_is_ratio", b.ratios[:, 0]), "items": ("num_items_in_batch", 31.0),
        "wrong": ("vllm_is_ratio", b.ratios[:, :3]),
    }  # fmt: skip
    call = dict(every[key] for key in given if key in every)
    if "head" in options:
        call |= {"ref_input": b.rx, "ref_weight": b.rw, "ref_bias": b.rb}
    o = {"max_completion_length": 9, **{k: v for k, v in options.items() if k != "head"}}
    return b.graded(loss_of("GRPO", **o)(b.x, b.w, b.ids, b.mask, b.advantages, b.b, **call))


def policies() -> Iterator[tuple[str, Case]]:
    """GRPO and its relatives."""
    for kind in POLICY_TYPES:
        more = {"epsilon_high": 5.0} if kind == "cispo" else {}
        for o in product(loss_type=(kind,), beta=(0.0, 0.1),
                         importance_sampling_level=("token", "sequence")):  # fmt: skip
            yield title("grpo", o), functools.partial(_grpo, {**o, **more})
        for extra in (("ratios",), ("ratio",), ("flat",), ("items",), ("whole",),
                      ("ratios", "whole")):  # fmt: skip
            o = {"loss_type": kind, "beta": 0.1}
            name = title("grpo", {**o, "given": " ".join(extra)})
            yield name, functools.partial(_grpo, {**o, **more}, ("old", "ref", *extra))
    for o in (
        {"use_bias_correction_kl": True, "beta": 0.1}, {"delta": 1.1}, {"delta": 2.0},
        {"temperature": 0.7}, {"epsilon_low": 0.05, "epsilon_high": 0.1}, {"chunk_size": 2},
        {"use_ref_model": False, "beta": 0.1},
        {"loss_type": "sapo", "sapo_temperature_pos": 2.0, "sapo_temperature_neg": 0.5},
        {"loss_type": "vespo", "vespo_k_pos": 1.0, "vespo_lambda_neg": 0.5},
    ):  # fmt: skip
        yield title("grpo", o), functools.partial(_grpo, o)
    head = {"head": True, "beta": 0.1, "temperature": 0.7}
    yield "grpo with a reference's head", functools.partial(_grpo, head, ("old",))
    none = {"use_ref_model": False, "beta": 0.1}
    yield "grpo beta without a reference", functools.partial(_grpo, none, ("old",))
    yield "grpo without old log-probabilities", functools.partial(_grpo, {"beta": 0.1}, ("ref",))


# --- distillation ---


def _distill(name: str, options: dict[str, Any], classes: int = CLASSES) -> Any:
    b = Batch()
    x, w = b.x, b.w
    tw, tb = b.tw[:classes], b.tb[:classes]
    if classes > CLASSES:
        tw, tb = torch.cat((tw, tw[:1])), torch.cat((tb, tb[:1]))
    flat = x.reshape(-1, HIDDEN)
    found = loss_of(name, return_soft_hard_loss=True, **options)(
        flat, w, b.tx.reshape(-1, 8), tw, b.t.reshape(-1), b.b, tb
    )
    return b.graded(found)


def distillation() -> Iterator[tuple[str, Case]]:
    """The Jensen-Shannon divergence and the cosine."""
    for name in ("JSD", "CosineSimilarity"):
        for o in product(temperature=(1.0, 2.0), beta=(0.0, 0.3, 1.0), weight_hard_loss=(0.5, 0.0)):
            yield title(name.lower(), o), functools.partial(_distill, name, o)
        yield f"{name.lower()} chunk_size=5", functools.partial(_distill, name, {"chunk_size": 5})
        for classes in (CLASSES - 3, CLASSES + 1):
            o = {"teacher classes": classes}
            yield title(name.lower(), o), functools.partial(_distill, name, {}, classes)


# --- functions and losses of one's own ---


def _applied(name: str) -> Any:
    home = importlib.import_module("liger_kernel.chunked_loss.functional")
    call, b = getattr(home, f"liger_fused_linear_{name}"), Batch()
    arguments = {
        "dpo": (b.b, b.rx, b.rw, b.rb, -100, 0.3, True, False, True, True, 2,
                "robust", 0.1, 0.05, 0.5),
        "orpo": (b.b, -100, 0.3, True, b.full, False, 2),
        "cpo": (b.b, -100, 0.3, 0.5, 0.1, True, False, True, 2),
        "simpo": (b.b, -100, 2.0, 0.5, 0.1, True, False, 0.3, 2),
        "kto": (b.liked, b.b, b.rx, b.rw, b.rb, torch.tensor(0.1), -100, 0.3, False, True, True, 2),
    }[name] if name in ("dpo", "orpo", "cpo", "simpo", "kto") else ()  # fmt: skip
    if arguments:
        return b.graded(call(b.x, b.w, b.t, *arguments))
    if name == "grpo":
        found = call(
            b.x, b.w, b.ids, b.mask, b.advantages, b.b, b.ref, b.old, None, None, None, 0.1, 0.1,
            0.3, "bnpo", 9, "sequence", 1.0, 1.05, 0.7, False, True, 2, b.ratios, 2.0, True, 2.0,
            3.0, 3.0, 2.0, 31.0,
        )  # fmt: skip
        return b.graded(found)
    found = call(
        b.x.reshape(-1, HIDDEN), b.w, b.tx.reshape(-1, 8), b.tw, b.t.reshape(-1), b.b, b.tb, 0.3,
        0.7, 0.4, -100, 2.0, False, 5, True,
    )  # fmt: skip
    return b.graded(found)


def _base(module: str, name: str) -> Any:
    home = importlib.import_module(f"liger_kernel.chunked_loss.fused_linear_{module}")
    return getattr(home, f"LigerFusedLinear{name}Base")


def own_pairs(use_ref_model: bool, chunk_size: int, compute_nll_loss: bool, average: bool) -> Any:
    """A loss of pairs on the base class."""
    base, b = _base("preference", "Preference"), Batch()

    class Own(base):  # type: ignore[misc, valid-type]
        @staticmethod
        def preference_loss_fn(chosen: Any, rejected: Any, target: Any, ref_chosen_logps: Any = 0.0,
                               ref_rejected_logps: Any = 0.0, beta: float = 0.1,
                               gamma: float = 0.0) -> Any:  # fmt: skip
            gap = (chosen - ref_chosen_logps) - (rejected - ref_rejected_logps) - gamma
            count = target.shape[0] // 2
            return (beta * gap).square().sum() / count, gap.sum() / count, gap.mean(), 2 * chosen

        @classmethod
        def forward(cls, ctx: Any, x: Any, w: Any, t: Any, bias: Any) -> Any:
            return super().forward(
                cls=cls, ctx=ctx, _input=x, weight=w, target=t, bias=bias, chunk_size=chunk_size,
                alpha=0.5, beta=0.3, compute_nll_loss=compute_nll_loss, compiled=False,
                use_ref_model=use_ref_model, ref_input=b.rx, ref_weight=b.rw, ref_bias=b.rb,
                average_log_prob=average, gamma=0.2,
            )  # fmt: skip

        @staticmethod
        def backward(ctx: Any, *grad_output: Any) -> Any:
            return base.backward(ctx, grad_output)[:4]

    loss, rest = Own.apply(b.x, b.w, b.t, b.b)
    return b.graded((loss * 3, rest))


def own_answers(use_ref_model: bool, chunk_size: int) -> Any:
    """A loss of single answers on the base class."""
    base, b = _base("unpaired_preference", "UnpairedPreference"), Batch()

    class Own(base):  # type: ignore[misc, valid-type]
        @staticmethod
        def preference_loss_fn(log_prob: Any, labels: Any, target: Any,
                               ref_log_prob_chunk: Any = 0.0, gamma: float = 0.0,
                               ) -> Any:  # fmt: skip
            gap = torch.where(labels, log_prob - ref_log_prob_chunk, gamma * log_prob)
            return gap.square().sum() / target.shape[0], gap.sum(), gap.max()

        @classmethod
        def forward(cls, ctx: Any, x: Any, w: Any, t: Any, liked: Any, bias: Any) -> Any:
            return super().forward(
                cls=cls, ctx=ctx, _input=x, weight=w, target=t, preference_labels=liked, bias=bias,
                chunk_size=chunk_size, compiled=False, use_ref_model=use_ref_model, ref_input=b.rx,
                ref_weight=b.rw, ref_bias=b.rb, gamma=0.2,
            )  # fmt: skip

        @staticmethod
        def backward(ctx: Any, *grad_output: Any) -> Any:
            return base.backward(ctx, grad_output)[:5]

    loss, rest = Own.apply(b.x, b.w, b.t, b.liked, b.b)
    return b.graded((loss * 3, rest))


def own_policy(options: dict[str, Any]) -> Any:
    """A loss of sampled answers on the base class."""
    base, b = _base("ppo", "PPO"), Batch()
    more = {"ref_input": b.rx, "ref_weight": b.rw} if options.pop("head", False) else {}

    class Own(base):  # type: ignore[misc, valid-type]
        @staticmethod
        def ppo_loss_fn(per_token_logps: Any, attention_mask: Any, advantages: Any,
                        full_attention_mask: Any, ref_per_token_logps: Any = None,
                        vllm_is_ratio: Any = None, epsilon_low: float = 0.0, **rest: Any,
                        ) -> Any:  # fmt: skip
            reference = 0.0 if ref_per_token_logps is None else ref_per_token_logps
            gap = (per_token_logps - reference) * attention_mask * advantages.unsqueeze(1)
            gap = gap if vllm_is_ratio is None else gap * vllm_is_ratio
            count = full_attention_mask.sum()
            return (gap.square() * epsilon_low).sum() / count, [gap.sum() / count, gap.sum(1)]

        @classmethod
        def forward(cls, ctx: Any, x: Any, w: Any, ids: Any, mask: Any, a: Any, bias: Any) -> Any:
            return super().forward(
                cls=cls, ctx=ctx, _input=x, weight=w, selected_token_ids=ids, attention_mask=mask,
                advantages=a, bias=bias, compiled=False, **more, **options,
            )  # fmt: skip

        @staticmethod
        def backward(ctx: Any, *grad_output: Any) -> Any:
            return base.backward(ctx, *grad_output)[:6]

    loss, rest = Own.apply(b.x, b.w, b.ids, b.mask, b.advantages, b.b)
    return b.graded((loss * 3, rest))


def own_distillation(options: dict[str, Any]) -> Any:
    """A loss of logits on the base class."""
    base, b = _base("distillation", "Distillation"), Batch()

    class Own(base):  # type: ignore[misc, valid-type]
        @staticmethod
        def distillation_loss_fn(student: Any, teacher: Any, target: Any = None,
                                 ignore_index: Any = None, beta: float = 1.0,
                                 gamma: float = 0.0) -> Any:  # fmt: skip
            gap = (student.softmax(-1) - teacher.softmax(-1)).square().sum(-1)
            return gamma * beta * gap[target != ignore_index].sum()

        @classmethod
        def forward(cls, ctx: Any, x: Any, w: Any, tx: Any, tw: Any, t: Any, bias: Any) -> Any:
            return super().forward(
                cls=cls, ctx=ctx, student_input=x, student_weight=w, teacher_input=tx,
                teacher_weight=tw, target=t, student_bias=bias, teacher_bias=b.tb, compiled=False,
                gamma=2.0, **options,
            )  # fmt: skip

        @staticmethod
        def backward(ctx: Any, *grad_output: Any) -> Any:
            return base.backward(ctx, *grad_output)[:6]

    x = b.x.reshape(-1, HIDDEN)
    found = Own.apply(x, b.w, b.tx.reshape(-1, 8), b.tw, b.t.reshape(-1), b.b)
    loss, *rest = found if isinstance(found, tuple) else (found,)
    return b.graded((loss * 3, *rest))


def functions() -> Iterator[tuple[str, Case]]:
    """``apply`` of the eight losses, and the base classes."""
    for name in ("dpo", "orpo", "cpo", "simpo", "kto", "grpo", "jsd", "cosine"):
        yield f"functional {name}", functools.partial(_applied, name)
    for o in product(use_ref_model=(False, True), chunk_size=(1, 2), compute_nll_loss=(True, False),
                     average=(True, False)):  # fmt: skip
        yield title("base of pairs", o), functools.partial(own_pairs, **o)
    for o in product(use_ref_model=(False, True), chunk_size=(1, 3)):
        yield title("base of answers", o), functools.partial(own_answers, **o)
    settings: tuple[dict[str, Any], ...] = (
        {}, {"chunk_size": 3},
        {"head": True, "use_ref_model": True, "temperature": 0.7},
              {"use_ref_model": True}, {"loss_type": "dr_grpo"},
              {"vllm_is_ratio": torch.ones(4) * 0.5},
              {"vllm_is_ratio": torch.ones(4, 3)})  # fmt: skip
    for o in settings:
        name = title("base of policies", {k: "given" if isinstance(v, Tensor) else v
                                          for k, v in o.items()})  # fmt: skip
        if "vllm_is_ratio" in o:
            name += f" {tuple(o['vllm_is_ratio'].shape)}"
        yield name, functools.partial(own_policy, dict(o))
    for o in ({}, {"chunk_size": 5}, {"temperature": 2.0, "beta": 0.3},
              {"compute_ce_loss": False},
              {"return_soft_hard_loss": True, "weight_hard_loss": 0.3}):  # fmt: skip
        yield title("base of distillation", o), functools.partial(own_distillation, o)


# --- arguments that are refused ---


def _made(path: str, *args: Any, **options: Any) -> Any:
    home, _, name = path.rpartition(".")
    getattr(importlib.import_module(f"liger_kernel.{home}"), name)(*args, **options)
    return {"made": "yes"}


def errors() -> Iterator[tuple[str, Case]]:
    """What constructors and calls refuse, and with which class."""
    chunked = "chunked_loss.LigerFusedLinear"
    wrong: list[tuple[str, dict[str, Any]]] = [
        (f"{chunked}DPOLoss", {"loss_type": "nothing"}),
        (f"{chunked}DPOLoss", {"loss_type": "exo_pair"}),
        (f"{chunked}DPOLoss", {"loss_type": "robust", "label_smoothing": 0.5}),
        (f"{chunked}DPOLoss", {"loss_type": "hinge", "label_smoothing": 0.1}),
        (f"{chunked}GRPOLoss", {"sapo_temperature_pos": 0.0}),
        (f"{chunked}GRPOLoss", {"delta": -1.0}),
        (f"{chunked}GRPOLoss", {"loss_type": "nothing"}),
        (f"{chunked}GRPOLoss", {"loss_type": "dr_grpo"}),
        (f"{chunked}JSDLoss", {"temperature": 0.0}),
    ]
    losses = "transformers.Liger"
    for name in ("CrossEntropyLoss", "FusedLinearCrossEntropyLoss"):
        for o in ({"label_smoothing": 2.0}, {"reduction": "x"}, {"softcap": -1.0}):
            wrong.append((f"{losses}{name}", o))
    wrong += [(f"{losses}FusedLinearJSD", {"temperature": 0.0}),
              (f"{losses}RMSNorm", {"hidden_size": 5, "init_fn": "x"}),
              ("transformers.group_norm.LigerGroupNorm", {"num_channels": 5, "num_groups": 2}),
              (f"{losses}LayerNorm", {"hidden_size": 5, "init_fn": "x"})]  # fmt: skip
    for path, o in wrong:
        yield title(f"error {path}", o), functools.partial(_made, path, **o)
    config = SimpleNamespace(hidden_size=8, intermediate_size=8, hidden_act="tanh", mlp_bias=False)
    for name in ("SwiGLUMLP", "BlockSparseTop2MLP", "Phi3SwiGLUMLP"):
        yield f"error {name} tanh", functools.partial(_made, f"{losses}{name}", config)
    for kind in ("cispo", "sapo", "vespo", "nothing"):
        o = {"loss_type": kind, "importance_sampling_level": "sequence"}
        yield title("error grpo", o), functools.partial(_grpo, o)
    yield "error grpo level", functools.partial(_grpo, {"importance_sampling_level": "x"})
    yield "error grpo no reference", functools.partial(_grpo, {"beta": 0.1}, ("old",))
    yield "error grpo ratios", functools.partial(_grpo, {}, ("old", "ref", "wrong"))
    yield (
        "error dr_grpo",
        functools.partial(_grpo, {"loss_type": "dr_grpo", "max_completion_length": None}),
    )


# --- which implementation runs ---


def _softmax(**options: Any) -> Any:
    home = importlib.import_module("liger_kernel.functional")
    return {"y": home.softmax(torch.arange(12.0).reshape(3, 4), **options)}


def _set(name: str) -> Any:
    home = importlib.import_module("liger_kernel")
    before = home.get_impl()
    try:
        home.set_impl(name)
        return {"before": before, "after": home.get_impl()}
    finally:
        home.set_impl(None)


def _with_variables(variables: dict[str, str], **options: Any) -> Any:
    os.environ.update(variables)
    try:
        return _softmax(**options)
    finally:
        for name in variables:
            del os.environ[name]


def _resolved(operator: str) -> Any:
    home = importlib.import_module("liger_kernel.backends")
    return {"name": home.resolve_impl(operator).impl_name}


def choosing() -> Iterator[tuple[str, Case]]:
    """``set_impl``, the argument ``impl``, and variables."""
    for name in ("triton", "nvidia-triton", "ascend-triton", "pytorch", "cutile", "cutedsl", "x"):
        yield f"set_impl {name}", functools.partial(_set, name)
    settings: tuple[dict[str, Any], ...] = (
        {}, {"impl": "triton"}, {"backend": "nvidia-triton"}, {"mode": "default"},
        {"impl": "x"}, {"backend": "x"}, {"mode": "x"}, {"impl": "triton", "backend": "x"},
        {"impl": "cutile"}, {"impl": "pytorch"},
    )  # fmt: skip
    for o in settings:
        yield title("softmax", o), functools.partial(_softmax, **o)
    every, one = "LIGER_KERNEL_IMPL", "LIGER_KERNEL_IMPL_SOFTMAX"
    older = "LIGER_KERNEL_BACKEND_SOFTMAX"
    for variables in ({every: "triton"}, {every: "x"}, {one: "x"}, {older: "x"},
                      {every: "x", one: "triton"}, {every: "triton", one: "x"},
                      {one: "triton", older: "x"}):  # fmt: skip
        yield title("softmax", variables), functools.partial(_with_variables, variables)
    over = functools.partial(_with_variables, {every: "x"}, impl="triton")
    yield "softmax impl=triton over a variable", over
    yield "an operator that is not there", functools.partial(_resolved, "x")


GROUPS = {
    "choosing": choosing, "pairs": pairs, "single answers": answers, "policies": policies,
    "distillation": distillation, "functions and bases": functions, "errors": errors,
}  # fmt: skip

IN_16_BITS = ("pairs", "single answers", "policies", "distillation")
"""Groups that run in 16 bits too."""
