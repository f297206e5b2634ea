"""Linear layers in FP8 beside bf16: ``python -m benchmarks.linear_float8 [PART ...]``.

Every part is forward and backward; variants take turns, and times are medians. A device waits for
the host before every call. Of layers, ``row_ms`` is a call among ten that it does not wait for.

* ``linear``: one layer, its weight trained or frozen, beside torchao's ``rowwise_with_gw_hp``
  (compiled) where that is installed; errors are relative to fp32 GEMMs, by the Frobenius norm.
* ``mlp``: ``gated_mlp`` of Llama-3-8B and 3.2-1B, its weights trained or frozen, beside
  ``gated_mlp_float8`` and layers in FP8 around the activation; errors are relative to bf16.
* ``layer``: a decoder layer of Llama-3-8B, patched, with and without ``linear_float8``, and beside
  torchao's with the compiler; ``gradients`` has it too.
* ``model`` and ``lora``: whole steps, checkpointed; of LoRA with the bytes of the base, and also
  with the head in FP8.
  ``gradients`` is a step of ``model`` without its optimizer, for cards that do not hold the states.

Steps and layers are traced once per variant: milliseconds of the device by kind of kernel
(:data:`KERNELS`), and of the whole span.

``--tiny`` tries it on a CPU.
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import liger_multi
from benchmarks import configs, store
from benchmarks.harness import Call, added_bytes, device_of, in_turns, train_step, wait
from liger_multi import ops
from liger_multi.patching.float8.weight import Float8Weight

SHAPES = (
    (8192, 4096, 14336),
    (8192, 14336, 4096),
    (16384, 2048, 8192),
    (8192, 4096, 4096),
    (8192, 4096, 1024),
    (16384, 2048, 2048),
    (8192, 896, 4864),
)
MLPS = ((8192, 4096, 14336), (16384, 2048, 8192))
TINY_SHAPES = ((64, 32, 48),)
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
KERNELS = {
    "FP8 GEMM": "e4m3|f8f8|nvjet_(sm[0-9]+_)?qq",
    "rounding": "quantize|_across_kernel",
    "attention": "cudnn|flash|fmha|attention",
    "16-bit GEMM": "nvjet|gemm|cutlass|xmma|splitk|_update_kernel|_split_kernel|_thin",
    "activation": "swiglu|geglu|gated",
    "norm, RoPE, loss": "norm|rope|cross_entropy",
    "other": "",
}
"""Kinds of kernels of a trace, by the first pattern that is in a name."""
Row = dict[str, Any]


class Place:
    """The device, and how long something takes on it."""

    def __init__(self, tiny: bool) -> None:
        self.tiny, self.device = tiny, device_of(tiny)

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        """Random numbers in bf16."""
        return torch.randn(shape, device=self.device, dtype=torch.bfloat16) * scale

    def in_turns(self, calls: Mapping[str, Call], rounds: int = 20) -> dict[str, float]:
        """Median milliseconds of every call; fewer rounds for a trial."""
        return in_turns(calls, self.device, 2 if self.tiny else rounds)

    def in_a_row(self, call: Call) -> float:
        """Milliseconds per call in a sequence of calls, with the host ahead of the device."""
        count, repeats = (2, 1) if self.tiny else (10, 3)
        times = []
        for _ in range(repeats):
            wait(self.device)
            start = time.perf_counter()
            for _ in range(count):
                call()
            wait(self.device)
            times.append(1e3 * (time.perf_counter() - start) / count)
        return min(times)

    def traced(self, call: Call) -> dict[str, float]:
        """Milliseconds of a call's kernels by kind, and from the first one to the last."""
        if self.device.type == "cpu":
            return {}
        from benchmarks.traces import spans

        ran = spans(call, self.device)
        milliseconds = dict.fromkeys(KERNELS, 0.0)
        for span in ran:
            group = next(k for k, p in KERNELS.items() if re.search(p, span.name.lower()))
            milliseconds[group] += span.length / 1e3
        return milliseconds | {"span": (max(s.end for s in ran) - ran[0].start) / 1e3}


# --- one layer, one MLP ---


def compared(
    place: Place,
    names: Mapping[str, str],
    calls: Mapping[str, Callable[[], Tensor]],
    leaves: Sequence[Tensor],
    exact: Sequence[Tensor] = (),
) -> Iterator[Row]:
    """Forward and backward of every variant.

    Args:
        place: Where.
        names: Part, name and shape of the rows.
        calls: Results by variant.
        leaves: What gradients are computed of; the first is x.
        exact: Result and gradients that errors are relative to; those of the first variant without.
    """
    first = next(iter(calls.values()))
    dy = torch.randn_like(first()) if not exact else exact[-1]

    def both(run: Callable[[], Tensor]) -> tuple[Tensor, ...]:
        y = run()
        return y.detach(), *torch.autograd.grad(y, list(leaves), dy)

    runs = {variant: functools.partial(both, run) for variant, run in calls.items()}
    expected = exact[:-1] or [x.float() for x in both(first)]
    times = place.in_turns(runs)
    for variant, run in runs.items():
        pairs = zip(("y", "dx", "dweight"), run(), expected, strict=False)
        errors = {name: float((a.float() - b).norm() / b.norm()) for name, a, b in pairs}
        assert max(errors["y"], errors["dx"]) < 0.2, (names, variant, errors)
        yield {
            **names,
            "variant": variant,
            "both_ms": times[variant],
            "row_ms": place.in_a_row(run),
            "extra_bytes": added_bytes(run, place.device),
            "error": errors,
        }


def mlp(place: Place) -> Iterator[Row]:
    """A whole gated MLP, its weights trained or frozen."""
    for tokens, width, inner in TINY_SHAPES if place.tiny else MLPS:
        x = place.normal(tokens, width).requires_grad_()
        shapes = ((inner, width), (inner, width), (width, inner))
        for trained in (True, False):
            weights = [
                place.normal(*shape, scale=shape[1] ** -0.5).requires_grad_(trained)
                for shape in shapes
            ]

            def by_layers(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
                first, rows = ops.linear_float8_with_codes(x, gate)
                y, codes = ops.swiglu_quantized(first, ops.linear_float8(x, up, quantized=rows))
                assert y is not None
                return ops.linear_float8(y, down, quantized=codes)

            names = {"part": "mlp", "name": "trained" if trained else "frozen"}
            calls: dict[str, Callable[[], Tensor]] = {
                "bf16": functools.partial(ops.gated_mlp, x, *weights),
                "float8": functools.partial(ops.gated_mlp_float8, x, *weights),
                "layers": functools.partial(by_layers, x, *weights),
            }
            leaves = [x, *weights] if trained else [x]
            shape = {"shape": f"{tokens}x{width}x{inner}"}
            yield from compared(place, names | shape, calls, leaves)


def linear(place: Place) -> Iterator[Row]:
    """One layer under every variant, its weight trained or frozen."""
    for tokens, width, out in TINY_SHAPES if place.tiny else SHAPES:
        for trained in (True, False):
            x = place.normal(tokens, width).requires_grad_()
            weight = nn.Parameter(place.normal(out, width, scale=width**-0.5), trained)
            dy = place.normal(tokens, out)
            wide_x, wide_weight, wide_dy = (t.detach().float() for t in (x, weight, dy))
            exact = (wide_x @ wide_weight.t(), wide_dy @ wide_weight, wide_dy.t() @ wide_x, dy)
            variants = _linear_variants(place, weight, trained)
            calls = {name: functools.partial(run, x) for name, run in variants.items()}
            names = {"part": "linear", "name": "trained" if trained else "frozen"}
            names["shape"] = f"{tokens}x{width}x{out}"
            yield from compared(place, names, calls, [x, weight] if trained else [x], exact)


def _linear_variants(
    place: Place, weight: Tensor, trained: bool
) -> dict[str, Callable[[Tensor], Tensor]]:
    variants: dict[str, Callable[[Tensor], Tensor]] = {"bf16": lambda x: F.linear(x, weight)}
    if trained:
        variants["ours"] = lambda x: ops.linear_float8(x, weight)
    else:
        frozen = Float8Weight.of(weight, keep=False)
        variants["ours"] = lambda x: ops.linear_float8(x, frozen.codes, weight_scale=frozen.scale)
    layer = nn.Sequential(nn.Linear(weight.shape[1], weight.shape[0], False, weight.device))
    layer[0].weight = weight
    if trained and place.device.type == "cuda" and _to_torchao(layer.to(weight.dtype)):
        variants["torchao"] = torch.compile(layer)
    return variants


def _to_torchao(module: nn.Module) -> bool:
    """Let torchao run the linear layers of a module in FP8; False where it is not there."""
    try:
        peer = importlib.import_module("torchao.float8")
    except ImportError as missing:
        print(f"torchao does not run: {missing}", flush=True)
        return False
    config = peer.Float8LinearConfig.from_recipe_name("rowwise_with_gw_hp")
    peer.convert_to_float8_training(module, config=config)
    return True


# --- models ---

SIZES: dict[str, tuple[str, int, int, bool]] = {
    "layer": ("llama-3-8b", 2, 4096, False),
    "small": ("llama-3.2-1b", 4, 4096, False),
    "model": ("llama-3-8b", 2, 4096, True),
    "gradients": ("llama-3-8b", 2, 4096, True),
    "lora": ("llama-3-8b", 2, 4096, True),
}


def _built(place: Place, part: str) -> tuple[Any, Tensor]:
    run = configs.Run("tiny", 2, 32, SIZES[part][3]) if place.tiny else configs.Run(*SIZES[part])
    torch.manual_seed(0)
    model = configs.build(run, place.device)
    vocabulary = model.config.vocab_size
    return model, torch.randint(vocabulary, (run.batch, run.tokens), device=place.device)


def _row(place: Place, part: str, variant: str, ms: float, once: Call) -> Row:
    """A row of a layer or a step with its memory and its trace."""
    row = {
        "part": part,
        "name": SIZES[part][0],
        "shape": "x".join(map(str, SIZES[part][1:3])),
        "variant": variant,
        "both_ms": ms,
        "extra_bytes": added_bytes(once, place.device),
        "trace_ms": place.traced(once),
    }
    return row | ({"row_ms": place.in_a_row(once)} if part == "layer" else {})


def _steps(place: Place, part: str, model: Any, once: Call) -> Iterator[Row]:
    """The patched model with and without FP8, and with MLPs as layers, in turns; torchao last."""
    rounds = 20 if part == "layer" else 4
    float8: dict[str, Any] = {"linear_float8": {"smallest": 0} if place.tiny else True}
    settings = {"bf16": {}, "float8": float8, "layers": {**float8, "swiglu": {"whole": False}}}
    rows: dict[str, Row] = {}
    for _ in range(2):
        for name, patches in settings.items():
            liger_multi.patch(model, **patches)
            ms = place.in_turns({"": once}, rounds)[""]
            ms = min(ms, rows.get(name, {}).get("both_ms", ms))
            rows[name] = _row(place, part, name, ms, once)
    yield from rows.values()
    if part in ("layer", "gradients") and place.device.type != "cpu":
        liger_multi.unpatch(model)
        if _to_torchao(model.model.layers):
            for each in model.model.layers:
                each.compile()
            ms = place.in_turns({"": once}, rounds)[""]
            yield _row(place, part, "torchao", ms, once)


def layer(place: Place) -> Iterator[Row]:
    """One decoder layer, its input and weights with gradients."""
    model, ids = _built(place, "layer")
    hidden = place.normal(*ids.shape, model.config.hidden_size).requires_grad_()
    model.model.layers = model.model.layers[:1]
    block = model.model.layers[0]
    angles = model.model.rotary_emb(hidden, torch.arange(ids.shape[1], device=place.device)[None])

    def once() -> None:
        out = block(hidden, position_embeddings=angles)
        (out[0] if isinstance(out, tuple) else out).sum().backward()
        model.zero_grad(set_to_none=True)
        hidden.grad = None

    yield from _steps(place, "layer", model, once)


def whole_steps(place: Place, part: str) -> Iterator[Row]:
    """Steps of a 1B model; of an 8B model, checkpointed, about 75 GiB."""
    model, ids = _built(place, part)
    fused = place.device.type == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=fused)
    yield from _steps(place, part, model, functools.partial(train_step, model, ids, optimizer))


def gradients(place: Place) -> Iterator[Row]:
    """The same without an optimizer; each gradient is dropped once it is computed: about 20 GiB."""
    model, ids = _built(place, "gradients")
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))

    def once() -> None:
        model(input_ids=ids, labels=ids).loss.backward()

    yield from _steps(place, "gradients", model, once)


def lora(place: Place) -> Iterator[Row]:
    """Checkpointed steps of LoRA on all layers of an 8B model."""
    import peft

    model, ids = _built(place, "lora")
    settings = peft.LoraConfig(r=16, lora_alpha=32, target_modules=TARGETS)
    wrapped = peft.get_peft_model(model, settings, autocast_adapter_dtype=False)
    wrapped.enable_input_require_grads()
    thin = [p for p in wrapped.parameters() if p.requires_grad]
    once = functools.partial(train_step, wrapped, ids, torch.optim.AdamW(thin, lr=1e-5))
    frozen = {"frozen": True, "originals": False, "smallest": 0 if place.tiny else 2**20}
    for name in ("peft", "bf16", "float8", "float8 and head"):
        if name != "peft":
            liger_multi.patch(wrapped, linear_float8=frozen if "float8" in name else False)
        gc.collect()
        on_card = place.device.type != "cpu"
        allocated = torch.get_device_module(place.device).memory_allocated() if on_card else 0
        liger_multi.configure({"head_gemms": "float8" if "head" in name else "exact"})
        times = place.in_turns({name: once}, 6)
        yield {**_row(place, "lora", name, times[name], once), "held_bytes": allocated}
    liger_multi.configure(None)


PARTS: dict[str, Callable[[Place], Iterator[Row]]] = {
    "linear": linear,
    "mlp": mlp,
    "layer": layer,
    "small": functools.partial(whole_steps, part="small"),
    "lora": lora,
    "gradients": gradients,
    "model": functools.partial(whole_steps, part="model"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__)
    store.add_options(parser)
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; all but model if none")
    parser.add_argument("--tiny", action="store_true", help="shapes for a CPU")
    options = parser.parse_args(arguments)
    place, rows = Place(options.tiny), []
    run = store.head("linear-float8", options, place.device)
    for part in options.parts or [name for name in PARTS if name != "model"]:
        for row in PARTS[part](place):
            rows.append(row)
            names = " ".join(str(row[k]) for k in ("part", "name", "shape", "variant"))
            rest = {k: v for k, v in row.items() if k in ("extra_bytes", "held_bytes", "error")}
            shown = {k: f"{v / 2**20:.0f} MiB" if k != "error" else v for k, v in rest.items()}
            print(f"{names:44} {row['both_ms']:9.3f} ms  {shown}", flush=True)
            store.keep({**run, "rows": rows}, options)
        gc.collect()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
