"""Cases of operators: ``apply`` of the autograd functions, functional forms and modules.

The real package runs them in Triton's interpreter (:mod:`ci.liger.interpreted`).
"""

from __future__ import annotations

import functools
import importlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ci.liger import precision
from ci.liger.precision import drawn

ROWS, WIDTH, CLASSES = 6, 24, 37
Case = tuple[str, Callable[[], dict[str, Any]]]


class Inputs:
    """Draws the inputs of a case from its seed, and differentiates by those that are asked for."""

    def __init__(self) -> None:
        self.dtype, self.leaves = precision.now().computed, list[Tensor]()
        self._source = torch.Generator("cpu").manual_seed(0)

    def fixed(self, *shape: int, like: Callable[[Tensor], Tensor] = lambda x: x) -> Tensor:
        """Numbers without a gradient."""
        made = drawn(torch.randn, *shape, generator=self._source)
        return precision.now().of(like(made))

    def leaf(self, *shape: int, like: Callable[[Tensor], Tensor] = lambda x: x) -> Tensor:
        """Numbers with a gradient; what is returned is no leaf, so that it may be overwritten."""
        made = self.fixed(*shape, like=like).requires_grad_()
        self.leaves.append(made)
        return made.clone()

    def targets(self, *shape: int, ignored: int = -100) -> Tensor:
        """Classes, some of them ignored."""
        made = drawn(torch.randint, CLASSES, shape, generator=self._source)
        made.view(-1)[1::3] = ignored
        return made

    def index(self, below: int, *shape: int) -> Tensor:
        """Integers."""
        return drawn(torch.randint, below, shape, generator=self._source)

    def graded(self, found: Any) -> dict[str, Any]:
        """Outputs, and gradients of leaves by a random weight of every output."""
        kind = "tuple" if isinstance(found, tuple) else type(found).__name__
        outputs = [*found] if kind == "tuple" else [found]
        if is_dataclass(found):
            outputs = [getattr(found, field.name) for field in fields(found)]
        weighted = [
            (x * drawn(torch.randn, x.shape, generator=self._source).to(x.dtype)).float().sum()
            for x in outputs
            if isinstance(x, Tensor) and x.requires_grad
        ]
        made: dict[str, Any] = {"kind": kind, "with a gradient": str([
            i for i, x in enumerate(outputs) if isinstance(x, Tensor) and x.requires_grad
        ])}  # fmt: skip
        made |= {f"output {i}": x.clone() if isinstance(x, Tensor) else x
                 for i, x in enumerate(outputs)}  # fmt: skip
        if weighted:  # some modules of liger-kernel write to .grad in their backward
            torch.autograd.backward(sum(weighted[1:], weighted[0]))
        return made | {f"gradient {i}": x.grad for i, x in enumerate(self.leaves)}


def _named(path: str) -> Any:
    home, _, name = path.rpartition(".")
    return getattr(importlib.import_module(f"liger_kernel.{home}"), name)


def function(name: str) -> Any:
    """``apply`` of a class of ``liger_kernel.ops``."""
    return _named(f"ops.Liger{name}Function").apply


def _each(**axes: tuple[Any, ...]) -> Iterator[dict[str, Any]]:
    for values in itertools.product(*axes.values()):
        yield dict(zip(axes, values, strict=True))


def _title(name: str, options: dict[str, Any]) -> str:
    return " ".join([name, *[f"{k}={v}" for k, v in options.items()]])


def _cases(name: str, build: Callable[..., Any], *options: dict[str, Any]) -> Iterator[Case]:
    for o in options or ({},):
        yield _title(name, o), functools.partial(_built, build, o)


def _built(build: Callable[..., Any], options: dict[str, Any]) -> dict[str, Any]:
    inputs = Inputs()
    return inputs.graded(build(inputs, **options))


# --- norms ---

EPS = 1e-5


def _rms(d: Inputs, weight: bool = True, **o: Any) -> Any:
    x, w = d.leaf(ROWS, WIDTH), d.leaf(WIDTH) if weight else None
    given = (o.get("offset", 0.0), o.get("casting_mode", "llama"), o.get("in_place", True))
    return function("RMSNorm")(x, w, EPS, *given, o.get("row_mode"))


def _added(d: Inputs, offset: float, casting_mode: str) -> Any:
    x, r, w = d.leaf(ROWS, WIDTH), d.leaf(ROWS, WIDTH), d.leaf(WIDTH)
    return function("FusedAddRMSNorm")(x, r, w, EPS, offset, casting_mode, False)


def _modulated(d: Inputs, rows: int, shift: bool, casting_mode: str, weight: bool) -> Any:
    x, w = d.leaf(2, 3, WIDTH), d.leaf(WIDTH) if weight else None
    by = (WIDTH,) if rows == 0 else (rows, WIDTH)
    scale, added = d.leaf(*by), d.leaf(*by) if shift else None
    return function("ModulatedRMSNorm")(x, w, scale, added, EPS, 0.0, casting_mode, False)


def _modulated_mixed(d: Inputs) -> Any:
    x, w, scale, shift = d.leaf(2, 3, WIDTH), d.leaf(WIDTH), d.leaf(WIDTH), d.leaf(WIDTH)
    return function("ModulatedRMSNorm")(x, w, scale.float(), shift.float(), EPS)


def _wide(d: Inputs, *shape: int) -> Tensor:
    """A leaf that reaches the operator in fp32, whatever the others have."""
    return d.leaf(*shape).float()


WIDE_NORMS: dict[str, Callable[[Inputs], Any]] = {
    "rms_norm": lambda d: function("RMSNorm")(d.leaf(ROWS, WIDTH), _wide(d, WIDTH), EPS),
    "rms_norm gemma": lambda d: function("RMSNorm")(
        d.leaf(ROWS, WIDTH), _wide(d, WIDTH), EPS, 1.0, "gemma"),
    "fused_add_rms_norm": lambda d: function("FusedAddRMSNorm")(
        d.leaf(ROWS, WIDTH), d.leaf(ROWS, WIDTH), _wide(d, WIDTH), EPS),
    "layer_norm": lambda d: function("LayerNorm")(
        d.leaf(ROWS, WIDTH), _wide(d, WIDTH), _wide(d, WIDTH), EPS),
    "poly_norm": lambda d: function("PolyNorm")(
        d.leaf(ROWS, WIDTH), _wide(d, 3), _wide(d, 1).reshape(()), EPS, False),
}  # fmt: skip


def _norm_module(d: Inputs, name: str, args: tuple[Any, ...] = (WIDTH,)) -> Any:
    made = _named(f"transformers.{name}")(*args).to(d.dtype)
    shapes = (2, 4, 6) if name.endswith("LigerGroupNorm") else (ROWS, WIDTH)
    return made(*[d.leaf(*shapes) for _ in range(1 + (name == "LigerFusedAddRMSNorm"))])


def norms() -> Iterator[Case]:
    """Norms and dynamic tanh."""
    castings = ("llama", "gemma", "none")
    yield from _cases("rms_norm", _rms, *_each(offset=(0.0, 1.0), casting_mode=castings))
    yield from _cases("rms_norm", _rms, {"weight": False}, {"in_place": False}, {"row_mode": True})
    yield from _cases("fused_add_rms_norm", _added, *_each(offset=(0.0, 1.0),
                                                           casting_mode=castings))  # fmt: skip
    yield from _cases("modulated_rms_norm", _modulated, *_each(
        rows=(0, 1, 2), shift=(True, False), casting_mode=("llama", "gemma"),
        weight=(True, False)))  # fmt: skip
    yield from _cases("modulated_rms_norm of fp32 scale and shift", _modulated_mixed)
    yield from _cases("layer_norm", lambda d: function("LayerNorm")(
        d.leaf(ROWS, WIDTH), d.leaf(WIDTH), d.leaf(WIDTH), EPS))  # fmt: skip
    yield from _cases("group_norm", lambda d: function("GroupNorm")(
        d.leaf(2, 6, 5), d.leaf(6), d.leaf(6), 6, 3, EPS))  # fmt: skip
    yield from _cases("poly_norm", lambda d: function("PolyNorm")(
        d.leaf(ROWS, WIDTH), d.leaf(3), d.leaf(1).reshape(()), EPS, False))  # fmt: skip
    for name, build in WIDE_NORMS.items():
        yield from _cases(f"{name} of fp32 weights", build)
    for beta in (True, False):
        yield from _cases(f"dyt beta={beta}", functools.partial(_dyt, beta=beta))
    for name in ("RMSNorm", "RMSNormForGemma", "RMSNormForGemma2", "RMSNormForGemma3",
                 "RMSNormForOlmo2", "RMSNormForGlm4", "RMSNormForQwen3Next",
                 "FusedAddRMSNorm", "LayerNorm"):  # fmt: skip
        path = f"rms_norm.Liger{name}" if "For" in name else f"Liger{name}"
        yield from _cases(f"module {name}", functools.partial(_norm_module, name=path))
    yield from _cases("module GroupNorm", functools.partial(
        _norm_module, name="group_norm.LigerGroupNorm", args=(4, 2)))  # fmt: skip
    yield from _cases("module PolyNorm", functools.partial(
        _norm_module, name="LigerPolyNorm", args=()))  # fmt: skip


def _dyt(d: Inputs, beta: bool) -> Any:
    x, alpha, gamma = d.leaf(ROWS, WIDTH), d.leaf(1), d.leaf(WIDTH)
    return function("DyT")(x, alpha, gamma, d.leaf(WIDTH) if beta else None)


# --- activations, softmaxes, rotary embeddings ---


def _rope(
    d: Inputs, rotary_dim: int | None = None, unsqueeze_dim: int = 1, batch: int = 2,
    wide: bool = False,
) -> Any:  # fmt: skip
    q, k = d.leaf(2, 4, 5, 8), d.leaf(2, 2, 5, 8)
    angle = d.fixed(batch, 5, (rotary_dim or 8) // 2).float()
    kind = torch.float32 if wide else d.dtype
    cos, sin = (torch.cat([f(angle)] * 2, -1).to(kind) for f in (torch.cos, torch.sin))
    return function("Rope")(q, k, cos, sin, None, unsqueeze_dim, rotary_dim)


def _mrope(d: Inputs) -> Any:
    q, k = d.leaf(2, 4, 5, 8), d.leaf(2, 2, 5, 8)
    angle = d.fixed(3, 2, 5, 4).float()
    cos, sin = (torch.cat([f(angle)] * 2, -1).to(d.dtype) for f in (torch.cos, torch.sin))
    return function("Qwen2VLMRope")(q, k, cos, sin, [1, 2, 1], 1)


def _llama4_rope(d: Inputs, batch: bool) -> Any:
    q, k = d.leaf(2, 5, 4, 8), d.leaf(2, 5, 2, 8)
    angle = d.fixed(*((2,) if batch else ()), 5, 4).float()
    return function("Llama4Rope")(q, k, torch.polar(torch.ones_like(angle), angle))


def _mlp_module(d: Inputs, path: str, act: str) -> Any:
    config = SimpleNamespace(
        hidden_size=16, intermediate_size=24, hidden_act=act, hidden_activation=act,
        mlp_bias=False,
    )  # fmt: skip
    made = _named(f"transformers.{path}")(config)
    for weight in made.parameters():
        weight.data = d.fixed(*weight.shape, like=lambda x: x * 0.2)
    x = d.leaf(2, 3, 16)
    d.leaves.extend(made.parameters())
    return made(x)


def activations() -> Iterator[Case]:
    """Activations, softmaxes and rotary embeddings."""
    shape = (ROWS, WIDTH)
    for gate, down in ((1.0, 1.0), (0.5, 1.0), (1.5, 0.25)):
        name = f"swiglu multipliers={gate}, {down}"
        yield from _cases(name, functools.partial(_swiglu, gate=gate, down=down))
    for in_place in (False, True):
        yield from _cases(f"swiglu packed in_place={in_place}", functools.partial(
            lambda d, in_place: function("FusedGateUpSiLUMul")(d.leaf(*shape), in_place),
            in_place=in_place))  # fmt: skip
    yield from _cases("geglu", lambda d: function("GELUMul")(d.leaf(*shape), d.leaf(*shape)))
    for op in ("SiLUMul", "GELUMul"):
        yield from _cases(f"{op} of an fp32 factor", functools.partial(
            lambda d, op: function(op)(d.leaf(*shape), _wide(d, *shape)), op=op))  # fmt: skip
    yield from _cases("relu_squared", lambda d: function("ReLUSquared")(d.leaf(*shape)))
    yield from _cases("softmax", lambda d: function("Softmax")(d.leaf(*shape)))
    yield from _cases("softmax of three axes", lambda d: function("Softmax")(d.leaf(2, *shape)))
    for dim in (-1, 0):
        yield from _cases(f"sparsemax dim={dim}", functools.partial(
            lambda d, dim: function("Sparsemax")(d.leaf(*shape), dim), dim=dim))  # fmt: skip
    for path, act in (("LigerSwiGLUMLP", "silu"), ("LigerPhi3SwiGLUMLP", "silu"),
                      ("LigerBlockSparseTop2MLP", "silu"), ("LigerGEGLUMLP", "gelu_pytorch_tanh"),
                      ("LigerTiledSwiGLUMLP", "silu"),
                      ("LigerTiledGEGLUMLP", "gelu_pytorch_tanh")):  # fmt: skip
        yield from _cases(f"module {path}", functools.partial(_mlp_module, path=path, act=act))
    yield from _cases("rope", _rope, {}, {"rotary_dim": 4}, {"batch": 1}, {"wide": True})
    yield from _cases("rope of several axes", _mrope)
    for of, batch in (("a sequence", False), ("a batch", True)):
        yield from _cases(f"rope of complex numbers, angles of {of}", functools.partial(
            _llama4_rope, batch=batch))  # fmt: skip


def _swiglu(d: Inputs, gate: float, down: float) -> Any:
    return function("SiLUMul")(d.leaf(ROWS, WIDTH), d.leaf(ROWS, WIDTH), gate, down)


# --- losses ---


def _cross_entropy(d: Inputs, weight: bool = False, **o: Any) -> Any:
    logits, target = d.leaf(ROWS, CLASSES), d.targets(ROWS, ignored=o.get("ignore_index", -100))
    by = (
        drawn(torch.rand, CLASSES, generator=torch.Generator("cpu").manual_seed(1))
        if weight
        else None
    )
    return _named("transformers.functional.liger_cross_entropy")(logits, target, by, **o)


def _fused_cross_entropy(d: Inputs, bias: bool = False, **o: Any) -> Any:
    x, w = d.leaf(ROWS, WIDTH), d.leaf(CLASSES, WIDTH, like=lambda v: v * 0.3)
    b, target = d.leaf(CLASSES) if bias else None, d.targets(ROWS)
    given = _named("transformers.functional.liger_fused_linear_cross_entropy")
    return given(x, w, target, b, **o)


def _scaled(d: Inputs, temperature: float, return_entropy: bool, ids: bool) -> Any:
    x, w = d.leaf(ROWS, WIDTH), d.leaf(CLASSES, WIDTH, like=lambda v: v * 0.3)
    some = torch.tensor([3, 0, 11]) if ids else None
    call = function("FusedLinearScaledCrossEntropy")
    return call(x, w, d.targets(ROWS), temperature, -100, 1, return_entropy, some)


def _log_p(x: Tensor) -> Tensor:
    return x.log_softmax(-1)


def _p(x: Tensor) -> Tensor:
    return x.softmax(-1)


def _labels(d: Inputs, labels: bool) -> Tensor | None:
    return d.targets(ROWS) if labels else None


def _jsd(d: Inputs, beta: float, labels: bool) -> Any:
    q, p = d.leaf(ROWS, CLASSES, like=_log_p), d.fixed(ROWS, CLASSES, like=_log_p)
    return function("JSD")(q, p, _labels(d, labels), beta, -100)


def _kl(d: Inputs, reduction: str, log_target: bool) -> Any:
    q = d.leaf(ROWS, CLASSES, like=_log_p)
    p = d.fixed(ROWS, CLASSES, like=_log_p if log_target else _p)
    return function("KLDivLoss")(q, p, reduction, log_target, 1e-10)


def _tvd(d: Inputs, reduction: str, labels: bool) -> Any:
    p, q = d.leaf(ROWS, CLASSES, like=_p), d.fixed(ROWS, CLASSES, like=_p)
    return function("TVDLoss")(p, q, _labels(d, labels), reduction, -100)


def _heads(d: Inputs) -> tuple[Tensor, ...]:
    x, w = d.leaf(ROWS, WIDTH), d.leaf(CLASSES, WIDTH, like=lambda v: v * 0.3)
    return x, w, d.fixed(ROWS, WIDTH), d.fixed(CLASSES, WIDTH, like=lambda v: v * 0.3)


def _fused_jsd(d: Inputs, jsd_beta: float, labels: bool, temperature: float) -> Any:
    heads = _heads(d)
    return function("FusedLinearJSD")(*heads, _labels(d, labels), jsd_beta, -100, temperature)


def _fused_kl(d: Inputs, reduction: str, labels: bool, temperature: float) -> Any:
    x, w = _heads(d)[:2]
    p = d.fixed(ROWS, CLASSES, like=_p)
    return function("FusedLinearKLDiv")(x, w, p, _labels(d, labels), reduction, -100, temperature)


def _both(d: Inputs) -> Any:
    return function("FusedCETVD")(d.leaf(ROWS, CLASSES), d.fixed(ROWS, CLASSES), d.targets(ROWS))


def _jsd_of_leaves(d: Inputs) -> Any:
    q, p = d.leaf(ROWS, CLASSES, like=_log_p), d.leaf(ROWS, CLASSES, like=_log_p)
    return function("JSD")(q, p, None, 0.3, -100)


def _kl_function(d: Inputs, **o: Any) -> Any:
    q, p = d.leaf(ROWS, CLASSES, like=_log_p), d.fixed(ROWS, CLASSES, like=_p)
    return _named("transformers.functional.liger_kl_div")(q, p, **o)


def _selective(d: Inputs, longer: int, mask: bool) -> Any:
    logits, ids = d.leaf(2, 6, CLASSES), d.index(CLASSES, 2, 5 + longer)
    kept = torch.ones_like(ids)
    kept[0, -2:] = 0
    call = _named("ops.grpo_loss.fused_selective_log_softmax")
    return call(logits, ids, 0.9, kept if mask else None)


def _divergence_module(d: Inputs, path: str) -> Any:
    like = _p if "TVD" in path else _log_p
    q = d.leaf(ROWS, CLASSES, like=like)
    p = d.fixed(ROWS, CLASSES, like=_p if "KL" in path else like)
    return _named(f"transformers.{path}")()(q, p)


def losses() -> Iterator[Case]:
    """Cross entropies and divergences."""
    reductions = ("mean", "sum", "none")
    yield from _cases("cross_entropy", _cross_entropy, *_each(
        reduction=reductions, label_smoothing=(0.0, 0.1),
        lse_square_scale=(0.0, 1e-2)))  # fmt: skip
    more: tuple[dict[str, Any], ...] = (
        {"softcap": 3.0}, {"ignore_index": 0}, {"weight": True},
        {"weight": True, "label_smoothing": 0.1}, {"weight": True, "reduction": "sum"},
        {"return_z_loss": True, "lse_square_scale": 1e-2},
        {"return_z_loss": True, "lse_square_scale": 1e-2, "reduction": "none"},
        {"return_token_accuracy": True}, {"return_predicted_tokens": True},
        {"return_token_accuracy": True, "reduction": "none"},
        {"return_z_loss": True, "return_token_accuracy": True, "return_predicted_tokens": True},
        {"softcap": 3.0, "label_smoothing": 0.1, "lse_square_scale": 1e-2, "weight": True},
    )  # fmt: skip
    yield from _cases("cross_entropy", _cross_entropy, *more)
    fused = [{("bias" if k == "weight" else k): v for k, v in o.items() if k != "ignore_index"}
             for o in more]  # fmt: skip
    yield from _cases("fused_linear_cross_entropy", _fused_cross_entropy, *_each(
        reduction=reductions, bias=(False, True)), *fused,
        {"accum_dtype": torch.float32}, *_each(use_token_scaling=(True,), reduction=reductions),
        {"use_token_scaling": True, "label_smoothing": 0.1})  # fmt: skip
    yield from _cases("scaled_cross_entropy", _scaled, *_each(
        temperature=(1.0, 0.7), return_entropy=(False, True), ids=(False, True)))  # fmt: skip
    yield from _cases("jsd", _jsd, *_each(beta=(0.0, 0.3, 1.0), labels=(False, True)))
    yield from _cases("kl_div", _kl, *_each(
        reduction=("batchmean", *reductions), log_target=(False, True)))  # fmt: skip
    yield from _cases("tvd", _tvd, *_each(
        reduction=("batchmean", *reductions), labels=(False, True)))  # fmt: skip
    yield from _cases("fused_linear_jsd", _fused_jsd, *_each(
        jsd_beta=(0.0, 0.3, 1.0), labels=(False, True), temperature=(1.0, 2.0)))  # fmt: skip
    yield from _cases("fused_linear_kl_div", _fused_kl, *_each(
        reduction=("batchmean", "mean", "sum"), labels=(False, True),
        temperature=(2.0,)))  # fmt: skip
    yield from _cases("fused_ce_tvd", _both)
    yield from _cases("jsd of a teacher with a gradient", _jsd_of_leaves)
    for name in ("size_average", "reduce"):
        yield from _cases("cross_entropy", _cross_entropy, {name: True}, {name: False})
        yield from _cases("kl_div function", _kl_function, {name: True}, {name: False})
    yield from _cases("selective log_softmax", _selective, *_each(
        longer=(0, 2), mask=(False, True)))  # fmt: skip
    for path in ("LigerJSD", "LigerTVDLoss", "LigerKLDIVLoss"):
        yield from _cases(f"module {path}", functools.partial(_divergence_module, path=path))


# --- policies ---

POLICIES = ("dapo", "grpo", "bnpo", "dr_grpo", "luspo", "cispo", "sapo", "vespo")


def _policy(d: Inputs, given: tuple[str, ...] = ("old", "ref"), **o: Any) -> Any:
    logits = d.leaf(3, 6, CLASSES)
    ids, advantages = d.index(CLASSES, 3, 5), torch.tensor([1.0, -0.5, 0.3])
    mask = torch.ones(3, 5, dtype=torch.long)
    if "whole" not in given:
        mask[0, 4:] = mask[1, 2:] = 0
    temperature = o.pop("temperature", 0.9)
    own = (logits.detach()[:, :-1].float() / temperature).log_softmax(-1)
    own = own.gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    noise = [0.4 * d.fixed(3, 5).float() for _ in range(2)]
    old, ref = own + noise[0], own + noise[1]
    ratios = d.fixed(3, 5).float().sigmoid() + 0.5
    more = {"ratios": ratios, "ratio": ratios[:, :1]}
    chosen = next((more[key] for key in given if key in more), None)
    o = {"max_completion_length": 9, **o}
    found = _named("transformers.grpo_loss.triton_grpo_loss")(
        logits, old if "old" in given else None, ref if "ref" in given else None, ids, advantages,
        None if "no mask" in given else mask, temperature, vllm_is_ratio=chosen, **o,
    )  # fmt: skip
    return (found[0], *found[1]) if o.get("reduce") else found


def policies() -> Iterator[Case]:
    """``triton_grpo_loss``."""
    for kind in POLICIES:
        o: dict[str, Any] = {"loss_type": kind, "inplace": False}
        if kind == "cispo":
            o["eps_high"] = 1.2
        levels = ("token",) if kind in ("cispo", "sapo", "vespo") else ("token", "sequence")
        yield from _cases("triton_grpo_loss", _policy, *_each(
            **{k: (v,) for k, v in o.items()}, reduce=(False, True), beta=(0.0, 0.1),
            importance_sampling_level=levels))  # fmt: skip
        for given in (("old", "ref", "ratios"), ("old", "ref", "ratio"), ("ref",), ("old",),
                      ("old", "ref", "whole"), ("old", "ref", "whole", "ratios"),
                      ("old", "ref", "no mask")):  # fmt: skip
            for reduce in (False, True):
                named = f"triton_grpo_loss given={'+'.join(given)}"
                yield from _cases(named, functools.partial(_policy, given=given),
                                  {**o, "reduce": reduce, "beta": 0.1})  # fmt: skip
    for more in ({"delta": 1.1}, {"use_bias_correction_kl": True}, {"num_items_in_batch": 31.0},
                 {"temperature": 1.3}, {"inplace": True}):  # fmt: skip
        yield from _cases("triton_grpo_loss", _policy, *_each(
            reduce=(False, True), **{k: (v,) for k, v in more.items()}))  # fmt: skip


def _slope(**o: Any) -> dict[str, Any]:
    """Whether the gradient of a loss is its derivative along some direction."""
    d = Inputs()
    start, along = d.fixed(3, 6, CLASSES), d.fixed(3, 6, CLASSES)
    ids, advantages = d.index(CLASSES, 3, 5), torch.tensor([1.0, -0.5, 0.3])
    own = (start[:, :-1] / 0.9).log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    old, every = own + 0.4 * d.fixed(3, 5), torch.ones_like(ids)

    def loss(logits: Tensor) -> Tensor:
        call = _named("transformers.grpo_loss.triton_grpo_loss")
        found: Tensor = call(
            logits, old, None, ids, advantages, every, beta=0.0, inplace=False, reduce=True, **o
        )[0]
        return found

    leaf, step = start.clone().requires_grad_(), 1e-2
    (gradient,) = torch.autograd.grad(loss(leaf), leaf)
    ends = [loss(start + sign * step * along).item() for sign in (1, -1)]
    slope, claimed = (ends[0] - ends[1]) / (2 * step), (gradient * along).sum().item()
    return {
        "slope": torch.tensor(slope),
        "is the gradient": abs(slope - claimed) < 1e-3 * abs(slope),
    }


def slopes() -> Iterator[Case]:
    """``triton_grpo_loss`` along a direction, by finite differences."""
    settings: list[dict[str, Any]] = [
        *_each(loss_type=("dapo", "grpo", "bnpo", "luspo"),
               importance_sampling_level=("token", "sequence")),
        {"loss_type": "sapo"}, {"delta": 1.1}, {"delta": 2.0},
    ]  # fmt: skip
    for o in settings:
        yield _title("slope", o), functools.partial(_slope, **o)


# --- blocks ---


def _experts(d: Inputs) -> Any:
    x, index = d.leaf(ROWS, 16), d.index(4, ROWS, 2)
    up, down = d.leaf(4, 16, 16), d.leaf(4, 16, 8)
    routing = d.leaf(ROWS, 2, like=_p)
    return function("FusedMoE")(x, up, down, index, routing)


def _coefficients(d: Inputs, pre_eps: float) -> Any:
    x, phi = d.leaf(3, 4, 16), d.leaf(64, 24, like=lambda v: v * 0.1)
    b, alphas = d.leaf(24), [d.leaf(1).reshape(()) for _ in range(3)]
    return function("MHCCoeffs")(x, phi, b, *alphas, True, 5, 1e-6, pre_eps, 1e-6, 2.0)


def _streams(d: Inputs) -> Any:
    x, out = d.leaf(3, 4, 16), d.leaf(3, 16)
    post, mix = d.leaf(3, 4).float(), d.leaf(3, 4, 4).float()
    return function("MHCPostRes")(x, out, post, mix)


def blocks() -> Iterator[Case]:
    """Experts, residual streams, attention."""
    yield from _cases("fused_moe", _experts)
    yield from _cases("mhc coefficients", _coefficients, {"pre_eps": 0.0}, {"pre_eps": 1e-2})
    yield from _cases("mhc pre", lambda d: function("MHCPre")(
        d.leaf(3, 4, 16), d.leaf(3, 4).float()))  # fmt: skip
    yield from _cases("mhc post", _streams)
    yield from _cases("attn_res", lambda d: function("AttnRes")(
        d.leaf(3, 2, 4, 16), d.leaf(16), d.leaf(16), 1e-6))  # fmt: skip
    for sparse in (False, True):
        yield from _cases(f"multi_token_attention sparse={sparse}", functools.partial(
            _many_tokens, sparse=sparse))  # fmt: skip
    for size, dilation in ((3, 1), (5, 1), (3, 2)):
        yield from _cases(f"neighborhood_attention {size}, {dilation}", functools.partial(
            _neighbors, size=size, dilation=dilation))  # fmt: skip
    yield from _cases("embedding", lambda d: function("Embedding")(
        d.leaf(9, 16), d.index(9, 2, 4)))  # fmt: skip


def _many_tokens(d: Inputs, sparse: bool) -> Any:
    scores, w, b = d.leaf(2, 3, 6, 6), d.leaf(3, 3, 3, 3), d.leaf(3)
    return function("MultiTokenAttention")(scores, w, b, 1, 1, 1, 1, sparse)


def _neighbors(d: Inputs, size: int, dilation: int) -> Any:
    q, k, v = (d.leaf(1, 2, 12, 16) for _ in range(3))
    return function("FusedNeighborhoodAttention")(q, k, v, size, dilation, None)


# --- liger_kernel.functional ---


def _chosen(d: Inputs, name: str, args: Callable[[Inputs], tuple[Any, ...]]) -> Any:
    return _named(f"functional.{name}")(*args(d))


def chosen() -> Iterator[Case]:
    """The twelve functions of ``liger_kernel.functional``."""
    shape, vocabulary = (ROWS, WIDTH), (ROWS, CLASSES)
    table: dict[str, Callable[[Inputs], tuple[Any, ...]]] = {
        "rms_norm": lambda d: (d.leaf(*shape), d.leaf(WIDTH)),
        "layer_norm": lambda d: (d.leaf(*shape), d.leaf(WIDTH), d.leaf(WIDTH)),
        "fused_add_rms_norm": lambda d: (d.leaf(*shape), d.leaf(*shape), d.leaf(WIDTH)),
        "jsd": lambda d: (d.leaf(*vocabulary, like=_log_p), d.fixed(*vocabulary, like=_log_p)),
        "kl_div": lambda d: (d.leaf(*vocabulary, like=_log_p), d.fixed(*vocabulary, like=_p)),
        "softmax": lambda d: (d.leaf(*shape),),
        "swiglu": lambda d: (d.leaf(*shape), d.leaf(*shape)),
        "geglu": lambda d: (d.leaf(*shape), d.leaf(*shape)),
        "cross_entropy": lambda d: (d.leaf(*vocabulary), d.targets(ROWS)),
        "fused_linear_cross_entropy": lambda d: (*_heads(d)[:2], d.targets(ROWS)),
        "fused_linear_jsd": _heads,
    }
    for name, args in table.items():
        yield from _cases(f"functional.{name}", functools.partial(_chosen, name=name, args=args))


GROUPS: dict[str, Callable[[], Iterator[Case]]] = {
    "norms": norms, "activations": activations, "losses of logits and heads": losses,
    "blocks": blocks, "functional": chosen, "policies of logits": policies, "slopes": slopes,
}  # fmt: skip
"""Groups of cases, by their titles on the page."""


ONLY_FP32 = ("slopes",)
"""Groups that do not run in 16 bits."""
