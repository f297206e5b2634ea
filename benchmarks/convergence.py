"""Training curves of unpatched and patched models: ``python -m benchmarks.convergence``.

Every provider trains the same weights on the same batches of Python's own sources; the loss and
the norm of the gradient of every step are kept, and held against the bounds stated here.
``stock`` is Hugging Face's model, ``ours`` a patched one, ``liger`` one that Liger-Kernel patched,
``seed`` the same from other weights; ``control-N`` is ``stock``, disturbed by as much as rounding
is (there are ``--controls`` of them). ``float8`` has linear layers in FP8, whose rounding no bound
allows. ``--models`` takes names of this module, or NAME:BATCHxTOKENS of a size in
:data:`liger_multi.memory.sizes.SIZES`. ``--draw`` makes a picture, also of a file (``--of``).

A row of a result file names what was trained, and has the curves of every provider.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import importlib.util
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import harness, store
from liger_multi.files import pictures
from liger_multi.memory.sizes import SIZES, config_of

# --- the bounds, stated before any run ---
#
# Training amplifies rounding: two right programs part, and how fast depends on model, data and
# rate. So a patched curve is held against controls and not against a number: unpatched runs whose
# weights start off by at most one unit in the last place of the dtype, and whose gradients are off
# by as much in every step. Distance is the root of the mean square of the relative differences from
# the baseline, over all steps so far, of the loss and of the gradient's norm. In every step from
# EARLIEST on (one difference alone may be near zero by chance) a patched curve may be FACTOR times
# as far as the farthest control: a patched layer rounds at some ten other places in each direction,
# where a control is rounded once, and independent errors add as a root, so 4 and not 16. FLOOR is
# what a sum in fp32 in another order makes of a loss, where controls happen to agree.
FACTOR, FLOOR, EARLIEST = 4.0, 8 * torch.finfo(torch.float32).eps, 10
# Chaos must not hide a curve that ends elsewhere: the mean loss of the last LAST steps. Nobody can
# tell runs apart by a thousandth, and other weights at the start move it by about a hundredth.
LAST, FINAL = 20, {"float32": 1e-3, "bfloat16": 1e-2}

CURVES = ("loss", "gradient_norm")
Curves = dict[str, list[float]]


def distance(curve: Sequence[float], baseline: Sequence[float]) -> Tensor:
    """Root of the mean square of the relative differences, over all steps so far."""
    ratio = torch.tensor(curve, dtype=torch.float64) / torch.tensor(baseline, dtype=torch.float64)
    square = (ratio - 1).square()
    return (square.cumsum(0) / torch.arange(1, len(square) + 1)).sqrt()


def allowed(curves: Mapping[str, Curves], name: str) -> Tensor:
    """How far a curve may be from the baseline in each step, from how far controls are."""
    controls = [c[name] for provider, c in curves.items() if provider.startswith("control")]
    farthest = torch.stack([distance(c, curves["stock"][name]) for c in controls]).amax(0)
    return FACTOR * farthest + FLOOR


@dataclass(frozen=True)
class Verdict:
    """How a curve stands to the baseline's.

    Attributes:
        shares: Largest part of the allowed distance that is used, for each of CURVES.
        final: Difference of the last losses' mean, relative to the baseline's.
        beyond: First step that is out of bounds, if one is.
        good: Whether every bound holds.
    """

    shares: dict[str, float]
    final: float
    beyond: int | None
    good: bool


def final(curves: Mapping[str, Curves], provider: str) -> float:
    """Difference of the last losses' mean, relative to the baseline's."""
    one, baseline = (sum(curves[p]["loss"][-LAST:]) for p in (provider, "stock"))
    return one / baseline - 1


def judge(row: Mapping[str, Any], provider: str = "ours") -> Verdict:
    """Hold one provider's curves against the bounds."""
    curves, shares, beyond = row["curves"], {}, []
    for name in CURVES:
        used = distance(curves[provider][name], curves["stock"][name]) / allowed(curves, name)
        used = used[EARLIEST - 1 :]
        shares[name] = used.amax().item()
        beyond += (~(used <= 1)).nonzero().flatten().tolist()[:1]  # NaN is beyond too
    last = final(curves, provider)
    good = not beyond and abs(last) <= FINAL[row["dtype"]]
    return Verdict(shares, last, min(beyond) + EARLIEST if beyond else None, good)


# --- pictures ---

COLORS = {
    "stock": pictures.STOCK,
    "ours": pictures.OURS,
    "liger": pictures.LIGER,
    "seed": "#cc79a7",
}
NOTE = "Below each loss: distance from Hugging Face's; dotted, what the controls allow"
NAMES = {
    "stock": "Hugging Face",
    "ours": "liger_multi",
    "liger": "Liger-Kernel",
    "seed": "other seed",
}


def draw(data: Mapping[str, Any], path: Path, plotted: str = "") -> None:
    """A panel a model: losses, and below them how far from the baseline, with what is allowed."""
    models = list(dict.fromkeys(row["model"] for row in data["rows"]))
    across = min(4, len(models))
    down = -(-len(models) // across)
    with pictures.figure(path, max(6.4, 2.5 * across), 0.9 + 2.6 * down, plotted, 110) as drawing:
        axes = drawing.subplots(2 * down, across, squeeze=False, height_ratios=[3, 2] * down)
        for axis in axes.flat:
            axis.set_visible(False)
            axis.tick_params(labelsize=8)
        for i, model in enumerate(models):
            pair = [axes[2 * (i // across) + k, i % across] for k in (0, 1)]
            _panel(pair, model, [row for row in data["rows"] if row["model"] == model])
            if i == 0:
                handles, labels = pair[0].get_legend_handles_labels()
                place = {"loc": "outside lower center", "ncols": 6, "fontsize": 9}
                drawing.legend(handles, labels, title=NOTE, title_fontsize=9, **place)
            if i % across == 0:
                pair[0].set_ylabel("loss")
                pair[1].set_ylabel("distance")
        drawing.suptitle(_title(data), x=0.012, ha="left", fontsize=11, fontweight="bold")


def _title(data: Mapping[str, Any]) -> str:
    dtypes = " and ".join(dict.fromkeys(row["dtype"] for row in data["rows"]))
    steps = data["rows"][0]["steps"]
    return f"{data['device']['name']}, {dtypes}, {steps} steps on Python's sources"


def _panel(pair: Sequence[Any], model: str, rows: Sequence[Mapping[str, Any]]) -> None:
    above, below = pair
    above.set_visible(True)
    below.set_visible(True)
    above.set_title(model, fontsize=10)
    below.set_yscale("log")
    for row in rows:
        style = "-" if row["dtype"] == "float32" or len(rows) == 1 else (0, (2, 1.5))
        label = "" if style == "-" else ", bf16"
        curves = row["curves"]
        steps = range(1, row["steps"] + 1)
        for name in ("seed", "stock", "liger", "ours"):
            if name in curves:
                wide = 3.5 if name == "stock" else 1.1
                dim = 0.6 if name in ("stock", "seed") else 1.0
                look = {"color": COLORS[name], "lw": wide, "alpha": dim, "ls": style}
                above.plot(steps, curves[name]["loss"], label=f"{NAMES[name]}{label}", **look)
        for name in ("liger", "ours"):
            if name in curves:
                far = distance(curves[name]["loss"], curves["stock"]["loss"])
                below.plot(steps, far.clamp(min=1e-9), color=COLORS[name], lw=1.4, ls=style)
        bound = allowed(curves, "loss")[EARLIEST - 1 :]
        below.plot(steps[EARLIEST - 1 :], bound, color=pictures.ALARM, lw=1.2, ls=(0, (1, 1)))


# --- cases ---

WARM_STEPS, RATE, WIDE_RATE, CLIP = 10, 1e-3, 2e-4, 1.0
TINY: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
    "use_cache": False,
}
ROUTED = {"num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 0.01}
SLIDING = {"query_pre_attn_scalar": 16, "sliding_window": 16}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 16},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"tie_word_embeddings": True},
    "gemma2": {**SLIDING, "final_logit_softcapping": 30.0},
    "gemma3_text": {**SLIDING, "sliding_window_pattern": 2},
    "phi3": {"partial_rotary_factor": 0.5},
    "olmo2": {},
    "glm4": {"partial_rotary_factor": 0.5},
    "granite": {"logits_scaling": 2.0, "residual_multiplier": 0.5, "embedding_multiplier": 4.0},
    "qwen3_moe": {**ROUTED, "num_experts": 4, "moe_intermediate_size": 64, "mlp_only_layers": [0]},
    "gpt_oss": {
        **ROUTED,
        "num_local_experts": 4,
        "sliding_window": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
}


@dataclass(frozen=True)
class Case:
    """What is trained: a model, its precision, and the size of the run."""

    model: str
    dtype: str
    batch: int
    tokens: int
    steps: int

    @classmethod
    def parse(cls, text: str, dtype: str, steps: int) -> Case:
        """From the command line's ``NAME`` or ``NAME:BATCHxTOKENS``."""
        name, _, size = text.partition(":")
        batch, _, tokens = (size or "4x32").partition("x")
        known = [*KINDS, *SIZES]
        if name not in known or not (batch.isdigit() and tokens.isdigit()):
            raise ValueError(
                f"a model is NAME or NAME:BATCHxTOKENS with a name of {', '.join(known)}; "
                f"got {text!r}"
            )
        return cls(name, dtype, int(batch), int(tokens), steps)

    @property
    def vocabulary(self) -> int:
        """Entries of the tokenizer; a wide model's own has more, which stay unused."""
        return TINY["vocab_size"] if self.model in KINDS else 32768


# --- providers ---


def _ours(model: Any) -> None:
    import liger_multi

    liger_multi.patch(model, strict=True)


def _float8(model: Any) -> None:
    import liger_multi

    liger_multi.patch(model, linear_float8={"smallest": 0})


def _norms(model: Any) -> Iterator[nn.Module]:
    return (module for module in model.modules() if type(module).__name__.endswith("RMSNorm"))


def _wrong_eps(model: Any) -> None:
    for norm in list(_norms(model)):
        for name in {"eps", "variance_epsilon"} & set(vars(norm)):
            setattr(norm, name, 10 * getattr(norm, name))
    _ours(model)


def _wrong_gradient(model: Any) -> None:
    _ours(model)
    layer = next(module for name, module in model.named_modules() if name.endswith(".mlp"))
    layer.register_full_backward_pre_hook(lambda _, dys: tuple(1.01 * dy for dy in dys))


def _wrong_weights(model: Any) -> None:
    for norm in _norms(model):
        norm.requires_grad_(False)
    _ours(model)


# what must be found: a norm's eps ten times too large, the gradient of one MLP 1 % too large, and
# weights of norms that get none
BUGS: dict[str, Callable[[Any], None]] = {
    "bug-eps": _wrong_eps,
    "bug-gradient": _wrong_gradient,
    "bug-weights": _wrong_weights,
}
PROVIDERS: dict[str, Callable[[Any], None]] = {
    "stock": lambda model: None,
    "ours": _ours,
    "liger": harness.liger,
    "float8": _float8,
    "seed": lambda model: None,
    **BUGS,
}


# --- training ---


def text(case: Case) -> Tensor:
    """Token ids of Python's own sources, steps x batch x tokens; no network is asked."""
    from liger_multi.demo import training

    count = case.steps * case.batch
    content = training.read(min(9_000_000, 6 * count * case.tokens + 200_000))
    tokenizer = training.learn_tokenizer(content, case.vocabulary)
    cut = training.blocks(content, tokenizer, count, case.tokens, 0).tokens
    return cut.view(case.steps, case.batch, case.tokens)


def build(case: Case, device: torch.device, seed: int) -> Any:
    """The model with random weights, made on its device."""
    from transformers import AutoConfig

    if case.model in SIZES:
        config = config_of(case.model, case.tokens)
        config.use_cache = False
    else:
        sizes = {**TINY, "max_position_embeddings": max(64, case.tokens), **KINDS[case.model]}
        config = AutoConfig.for_model(case.model, **sizes)
    return harness.causal(config, device, getattr(torch, case.dtype), seed)


@torch.no_grad()
def disturb(tensors: Sequence[Tensor], generator: torch.Generator) -> None:
    """Move every number by at most one unit in its last place."""
    for x in tensors:
        shift = torch.rand(x.shape, generator=generator, device=x.device).mul_(2).sub_(1)
        x.copy_(torch.addcmul(x.float(), x.float(), shift, value=torch.finfo(x.dtype).eps))


def train(
    case: Case,
    provider: str,
    ids: Tensor,
    device: torch.device,
    after: Callable[[Any], None] | None = None,
) -> Curves:
    """Loss, and norm of the gradient before it is clipped, of every step; then ``after(model)``."""
    family, _, number = provider.partition("-")
    model = build(case, device, seed=1 if provider == "seed" else 0)
    parameters, noise = list(model.parameters()), None
    if family == "control":
        noise = torch.Generator(device).manual_seed(int(number))
        disturb(parameters, noise)
    else:
        PROVIDERS[provider](model)
    rate = RATE if case.model in KINDS else WIDE_RATE
    optimizer = torch.optim.AdamW(parameters, lr=rate, fused=device.type == "cuda")
    curves: dict[str, list[Tensor]] = {name: [] for name in CURVES}
    for step, some in enumerate(ids.to(device)):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / WARM_STEPS)
        loss = model(input_ids=some, labels=some).loss
        loss.backward()
        grads = [p.grad for p in parameters if p.grad is not None]
        if noise is not None:
            disturb(grads, noise)
        norms = [torch.linalg.vector_norm(g, dtype=torch.float32) for g in grads]
        norm = torch.linalg.vector_norm(torch.stack(norms))
        torch.nn.utils.clip_grads_with_norm_(parameters, CLIP, norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        curves["loss"].append(loss.detach().float())
        curves["gradient_norm"].append(norm)
    if after is not None:
        after(model)
    rounded = {name: torch.stack(values).tolist() for name, values in curves.items()}
    return {name: [float(f"{x:.9g}") for x in values] for name, values in rounded.items()}


# --- the command ---


def child(case: Case, provider: str, file: Path, device: torch.device) -> Curves:
    """Train in a process of its own, since a peer patches modules of the whole process."""
    command = ["--child", json.dumps(asdict(case)), "--providers", provider]
    command += ["--of", str(file), "--device", str(device)]
    curves = harness.child("benchmarks.convergence", *command)
    if "failure" not in curves:
        return curves
    if provider != "liger":
        raise RuntimeError(f"{case.model} {case.dtype} {provider}: {curves['failure']}")
    print(f"{case.model} {case.dtype} liger failed: {curves['failure']}", flush=True)
    return {}


def rows_of(
    cases: Sequence[Case], providers: Sequence[str], device: torch.device, jobs: int
) -> Iterator[dict[str, Any]]:
    """Every case's curves; with jobs, in so many processes at once."""
    from rich.progress import track

    for case in track(cases, "models", disable=not sys.stderr.isatty()):
        ids = text(case)
        if jobs:
            with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
                file = Path(folder) / "ids.pt"
                torch.save(ids, file)
                results = pool.map(lambda p: child(case, p, file, device), providers)  # noqa: B023
                curves = {p: c for p, c in zip(providers, results, strict=True) if c}
        else:
            curves = {p: train(case, p, ids, device) for p in providers}
        digest = hashlib.sha256(ids.numpy().tobytes()).hexdigest()[:12]
        yield {**asdict(case), "text": digest, "curves": curves}


def line(row: Mapping[str, Any], provider: str) -> str:
    """What was found, as a row of the table."""
    verdict, curves = judge(row, provider), row["curves"][provider]["loss"]
    word = "within" if verdict.good else f"BEYOND, from step {verdict.beyond}"
    return (
        f"{row['model']:12s} {row['dtype']:8s} {provider:12s} {curves[0]:.3f} to {curves[-1]:.3f}, "
        f"last {100 * verdict.final:+.4f} %, of what is allowed: "
        f"loss {verdict.shares['loss']:.2f}, gradient {verdict.shares['gradient_norm']:.2f}  {word}"
    )


def parser() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.convergence", description=__doc__)
    parser.add_argument("--models", default=",".join(KINDS))
    parser.add_argument("--providers", default="stock,ours,seed", help=", ".join(PROVIDERS))
    parser.add_argument("--controls", type=int, default=2)
    parser.add_argument("--dtype", default="float32,bfloat16", help="also fp32, bf16")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, help="processes at once; 0: this one (CPU's default)")
    parser.add_argument("--draw", type=Path, help="the picture")
    parser.add_argument("--of", type=Path, help="draw the newest run of this file, train nothing")
    store.add_options(parser)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Train and judge; 1 where a curve of ours is out of bounds."""
    options = parser()
    args = options.parse_args(arguments)
    device, providers = torch.device(args.device), args.providers.split(",")
    if args.child:
        case = Case(**json.loads(args.child))
        print(json.dumps(train(case, providers[0], torch.load(args.of), device)))
        return 0
    if args.of:
        draw(store.newest_of("convergence", args.of), args.draw)
        return 0
    short = {"fp32": "float32", "bf16": "bfloat16"}
    dtypes = [short.get(name, name) for name in args.dtype.split(",")]
    try:
        models = args.models.split(",")
        cases = [Case.parse(name, dtype, args.steps) for name in models for dtype in dtypes]
    except ValueError as wrong:
        options.error(str(wrong))
    if "stock" not in providers or args.controls < 1:
        options.error("curves are held against stock and at least one control")
    return run(cases, providers, device, args)


def run(
    cases: Sequence[Case],
    providers: Sequence[str],
    device: torch.device,
    options: argparse.Namespace,
) -> int:
    """Train everything, and write, draw and print what was found."""
    if "liger" in providers and importlib.util.find_spec("liger_kernel") is None:
        print("liger-kernel is not installed and left out", flush=True)
        providers = [name for name in providers if name != "liger"]
    everybody = [*providers, *(f"control-{n + 1}" for n in range(options.controls))]
    jobs = options.jobs if options.jobs is not None else 4 * (device.type != "cpu")
    data = store.head("convergence", options, device) | {"rows": []}
    data["versions"]["transformers"] = importlib.metadata.version("transformers")
    bad = 0
    for row in rows_of(cases, everybody, device, jobs):
        data["rows"].append(row)
        for provider in providers:
            if provider != "stock" and provider in row["curves"]:
                print(line(row, provider), flush=True)
                bad += provider == "ours" and not judge(row, provider).good
        store.keep(data, options)
    if options.draw:
        draw(data, options.draw)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
