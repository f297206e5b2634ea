"""Linear layers in FP8 beside bf16: ``python -m benchmarks.linear_float8 [PART ...]``.

Every part is forward and backward; variants take turns, and times are medians. A device waits for
the host before every call. Of layers, ``row_ms`` is a call among ten that it does not wait for.

* ``kernels``: what one layer consists of: rounding, and the GEMMs of the library.
* ``codes``: norms and activations that write codes, beside the 16-bit result and its rounding in a
  pass of its own; the codes are compared first. Forward alone.
* ``adapters``: ``lora_mlp`` and ``lora_qkv`` of Llama-3-8B over a base in bf16 and in FP8, beside
  layers in FP8 with ``lora_update``; errors are relative to the variant in bf16.
* ``mlp``: ``gated_mlp`` of Llama-3-8B and 3.2-1B, its weights trained or frozen, beside
  ``gated_mlp_float8`` and layers in FP8 around the activation; errors as of ``adapters``.
* ``linear``: one layer, its weight trained or frozen, beside torchao's ``rowwise_with_gw_hp``
  (compiled) where that is installed; errors are relative to fp32 GEMMs, by the Frobenius norm.
* ``layer``: a decoder layer of Llama-3-8B, patched, with and without ``linear_float8``, and beside
  torchao's with the compiler; ``gradients`` has it too.
* ``model`` and ``lora``: whole steps, checkpointed; of LoRA with the bytes of the base, and also
  with the head in FP8.
  ``gradients`` is a step of ``model`` without its optimizer, for cards that do not hold the states.
* ``accumulated``: steps of four micro-batches, with codes of weights made at each use, and kept.

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
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import liger_multi
from benchmarks import models, store
from liger_multi import ops
from liger_multi.patching.float8.code_cache import bit_sums
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
TINY_SHAPES = ((64, 32, 48),)
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
Call = Callable[[], Any]


class Place:
    """The device, and how long something takes on it."""

    def __init__(self, tiny: bool) -> None:
        self.tiny = tiny
        accelerator = None if tiny else torch.accelerator.current_accelerator(check_available=True)
        self.device = accelerator or torch.device("cpu")
        self.rounds = 2 if tiny else 20

    def wait(self) -> None:
        """For the device."""
        if self.device.type != "cpu":
            torch.get_device_module(self.device).synchronize()

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        """Random numbers in bf16."""
        return torch.randn(shape, device=self.device, dtype=torch.bfloat16) * scale

    def in_turns(self, calls: Mapping[str, Call], rounds: int = 0) -> dict[str, float]:
        """Median milliseconds of every call."""
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(3):
            for call in calls.values():
                call()
        for _ in range(rounds or self.rounds):
            for name, call in calls.items():
                self.wait()
                start = time.perf_counter()
                call()
                self.wait()
                times[name].append(1e3 * (time.perf_counter() - start))
        return {name: statistics.median(samples) for name, samples in times.items()}

    def in_a_row(self, call: Call) -> float:
        """Milliseconds per call in a sequence of calls, with the host ahead of the device."""
        count, repeats = (2, 1) if self.tiny else (10, 3)
        times = []
        for _ in range(repeats):
            self.wait()
            start = time.perf_counter()
            for _ in range(count):
                call()
            self.wait()
            times.append(1e3 * (time.perf_counter() - start) / count)
        return min(times)

    def traced(self, call: Call) -> dict[str, float]:
        """Milliseconds of a call's kernels by kind, and from the first one to the last."""
        if self.device.type == "cpu":
            return {}
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            call()
            self.wait()
        milliseconds = dict.fromkeys(KERNELS, 0.0)
        ran = [
            event
            for event in profiler.events() or ()
            if event.device_type.name == "CUDA" and not event.is_user_annotation
        ]
        for event in ran:
            group = next(k for k, p in KERNELS.items() if re.search(p, event.name.lower()))
            milliseconds[group] += event.time_range.elapsed_us() / 1e3
        ends = max(e.time_range.end for e in ran) - min(e.time_range.start for e in ran)
        return milliseconds | {"span": ends / 1e3}

    def peak(self, call: Call) -> int:
        """Bytes that a call held at most beyond what was there."""
        if self.device.type == "cpu":
            return 0
        module = torch.get_device_module(self.device)
        gc.collect()
        module.reset_peak_memory_stats()
        before = module.memory_allocated()
        call()
        self.wait()
        return int(module.max_memory_allocated() - before)


# --- one layer ---


def _quantizer(place: Place) -> Any:
    """What makes codes on the device."""
    if place.device.type == "cpu":
        from liger_multi.reference.float8.rows import PLAIN

        return PLAIN
    from liger_multi.backends.triton.float8.rows import TritonQuantizer

    return TritonQuantizer()


def kernels(place: Place) -> Iterator[Row]:
    """The parts of one layer."""
    from liger_multi.reference.float8.rows import Float8Rows, format_of, product

    to = _quantizer(place)
    format = format_of(place.device)
    tokens, width, out = (TINY_SHAPES if place.tiny else SHAPES)[0]
    x, w, dy = place.normal(tokens, width), place.normal(out, width), place.normal(tokens, out)
    left, expected = to.rows(x, None, format), to.rows(w, None, format)
    grad = to.rows(dy, expected.scale, format)
    across = to.across(w, expected.scale, format)
    turned = Float8Rows(across, expected.scale.new_ones(width))
    calls = {
        "round x": lambda: to.rows(x, None, format),
        "round weight": lambda: to.rows(w, None, format),
        "round dy": lambda: to.rows(dy, expected.scale, format),
        "weight across": lambda: to.across(w, expected.scale, format),
        "sum of the bits of weight": lambda: bit_sums(w),
        "codes across": lambda: to.across(expected.codes, None, format),
        "y": lambda: product(left, expected, torch.bfloat16, True),
        "dx": lambda: product(grad, turned, torch.bfloat16),
        "dx fast": lambda: product(grad, turned, torch.bfloat16, True),
        "y bf16": lambda: x @ w.t(),
        "dx bf16": lambda: dy @ w,
        "dweight bf16": lambda: dy.t() @ x,
    }
    for name, samples in place.in_turns(calls).items():
        shape = f"{tokens}x{width}x{out}"
        yield {"part": "kernels", "name": name, "shape": shape, "variant": "", "both_ms": samples}


CODED: dict[str, tuple[tuple[int, int], str, int]] = {
    "rms_norm": ((8192, 4096), "rms_norm", 1),
    "fused_add_rms_norm": ((8192, 4096), "fused_add_rms_norm", 2),
    "layer_norm": ((8192, 4096), "layer_norm", 1),
    "swiglu": ((8192, 14336), "swiglu", 2),
    "swiglu wide": ((8192, 18944), "swiglu", 2),
    "geglu": ((8192, 14336), "geglu", 2),
}
"""Shape, operator, and how many tensors of that shape it takes, by the name of a row."""


def codes(place: Place) -> Iterator[Row]:
    """Codes from the kernel that computes a row, beside a pass that rounds it."""
    from liger_multi.reference.float8.rows import format_of

    to, format = _quantizer(place), format_of(place.device)
    for name, (shape, op, count) in CODED.items():
        rows, cols = (64, 32) if place.tiny else shape
        tensors = [place.normal(rows, cols) for _ in range(count)]
        run, with_codes = getattr(ops, op), getattr(ops, f"{op}_quantized")

        def apart(op: Any = run, tensors: Any = tensors) -> Any:
            y = op(*tensors)
            y = getattr(y, "y", y)
            return y, to.rows(y, None, format)

        def fused(op: Any = with_codes, tensors: Any = tensors) -> Any:
            out = op(*tensors)
            return out.y, out.quantized

        def alone(op: Any = with_codes, tensors: Any = tensors) -> Any:
            return op(*tensors, outputs=("quantized",)).quantized

        def plain(op: Any = run, tensors: Any = tensors) -> Any:
            return op(*tensors)

        result, quantized = fused()  # another kernel's result may round a sum otherwise
        for got, expected in zip(quantized, to.rows(result, None, format), strict=True):
            assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8)), name
        calls = {"bf16": plain, "apart": apart, "float8": fused, "codes alone": alone}
        for variant, ms in place.in_turns(calls).items():
            yield {
                "part": "codes",
                "name": name,
                "shape": f"{rows}x{cols}",
                "variant": variant,
                "both_ms": ms,
                "extra_bytes": place.peak(calls[variant]),
            }


def _adapted(place: Place, width: int, outs: Sequence[int]) -> list[tuple[Tensor, ...]]:
    """Weight, a and b of rank 16, of layers of one input."""
    return [
        (
            place.normal(out, width, scale=width**-0.5),
            place.normal(16, width, scale=width**-0.5).requires_grad_(),
            place.normal(out, 16, scale=0.1).requires_grad_(),
        )
        for out in outs
    ]


def _one_by_one(x: Tensor, layers: Any, held: Any, finish: Callable[..., Any]) -> Any:
    """Layers in FP8 with adapters one after the other; those of one input share its codes."""
    outputs, rows = [], None
    for (_, a, b), weight in zip(layers, held, strict=True):
        y, rows = ops.linear_float8_with_codes(
            x, weight.codes, weight_scale=weight.scale, quantized=rows
        )
        outputs.append(ops.lora_update(y, x, a, b, scale=2.0))
    return finish(*outputs)


def _fused_mlp(x: Tensor, layers: Any, held: Any = None) -> Tensor:
    kwargs: dict[str, Any] = {}
    for at, (name, (weight, a, b)) in enumerate(zip(("gate", "up", "down"), layers, strict=True)):
        kwargs |= _given(name, weight, a, b, None if held is None else held[at])
    return ops.lora_mlp(x, **kwargs)


def _given(name: str, weight: Tensor, a: Tensor, b: Tensor, held: Any) -> dict[str, Any]:
    """Arguments of a layer, its weight in bf16 or in FP8."""
    wide, scale = (weight, None) if held is None else (held.codes, held.scale)
    kwargs = {"weight": wide, "weight_scale": scale, "lora": ops.LoRA(a, b, 2.0)}
    return {f"{name}_{part}": value for part, value in kwargs.items()}


def _fused_qkv(x: Tensor, layers: Any, held: Any = None) -> Tensor:
    kwargs: dict[str, Any] = {}
    for at, (name, (weight, a, b)) in enumerate(zip("qkv", layers, strict=True)):
        kwargs |= _given(name, weight, a, b, None if held is None else held[at])
    return torch.cat([y for y in ops.lora_qkv(x, **kwargs) if y is not None], -1)


def adapters(place: Place) -> Iterator[Row]:
    """Fused adapters over a base in bf16 and in FP8, beside layers one by one."""
    tokens, width, inner = (64, 32, 48) if place.tiny else (8192, 4096, 14336)
    x = place.normal(tokens, width).requires_grad_()
    mlp = [*_adapted(place, width, (inner, inner)), *_adapted(place, inner, (width,))]
    qkv = _adapted(place, width, (width, width // 4, width // 4))

    def by_layers(x: Tensor, layers: Any, held: Any) -> Tensor:
        product = _one_by_one(x, layers[:2], held[:2], ops.swiglu)
        return cast(Tensor, _one_by_one(product, layers[2:], held[2:], lambda y: y))

    def by_projections(x: Tensor, layers: Any, held: Any) -> Tensor:
        joined = _one_by_one(x, layers, held, lambda *all: torch.cat(all, -1))
        return cast(Tensor, joined)

    for name, layers, fused, apart in (
        ("lora_mlp", mlp, _fused_mlp, by_layers),
        ("lora_qkv", qkv, _fused_qkv, by_projections),
    ):
        held = [Float8Weight.of(weight, keep=False) for weight, _, _ in layers]
        thin = [t for _, a, b in layers for t in (a, b)]
        calls = {
            "bf16": functools.partial(fused, x, layers),
            "float8": functools.partial(fused, x, layers, held),
            "layers": functools.partial(apart, x, layers, held),
        }
        shown = f"{tokens}x{width}" + f"x{inner}" * (name == "lora_mlp")
        yield from _both_ways(place, "adapters", name, shown, calls, [x, *thin])


def _both_ways(
    place: Place,
    part: str,
    name: str,
    shape: str,
    calls: Mapping[str, Callable[[], Tensor]],
    leaves: list[Tensor],
) -> Iterator[Row]:
    """Forward and backward of every variant, with errors of y and dx beside the first."""
    dy = torch.randn_like(calls["bf16"]())

    def both(run: Callable[[], Tensor]) -> tuple[Tensor, ...]:
        y = run()
        return y.detach(), *torch.autograd.grad(y, leaves, dy)

    runs = {variant: functools.partial(both, run) for variant, run in calls.items()}
    exact = runs["bf16"]()
    times = place.in_turns(runs)
    for variant, run in runs.items():
        errors = [_error(got, expected.float()) for got, expected in zip(run(), exact, strict=True)]
        assert max(errors) < 0.2, (name, variant, errors)
        yield {
            "part": part,
            "name": name,
            "shape": shape,
            "variant": variant,
            "both_ms": times[variant],
            "row_ms": place.in_a_row(run),
            "extra_bytes": place.peak(run),
            "error": {"y": errors[0], "dx": errors[1]},
        }


def mlp(place: Place) -> Iterator[Row]:
    """A whole gated MLP, its weights trained or frozen."""
    for tokens, width, inner in (
        ((64, 32, 48),) if place.tiny else ((8192, 4096, 14336), (16384, 2048, 8192))
    ):
        x = place.normal(tokens, width).requires_grad_()
        shapes = ((inner, width), (inner, width), (width, inner))
        for trained in (True, False):
            weights = [
                place.normal(*shape, scale=shape[1] ** -0.5).requires_grad_(trained)
                for shape in shapes
            ]

            def by_layers(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
                first, rows = ops.linear_float8_with_codes(x, gate)
                second = ops.linear_float8(x, up, quantized=rows)
                y, codes = ops.swiglu_quantized(first, second)
                assert y is not None
                return ops.linear_float8(y, down, quantized=codes)

            calls: dict[str, Callable[[], Tensor]] = {
                "bf16": functools.partial(ops.gated_mlp, x, *weights),
                "float8": functools.partial(ops.gated_mlp_float8, x, *weights),
                "layers": functools.partial(by_layers, x, *weights),
            }
            name, shown = "trained" if trained else "frozen", f"{tokens}x{width}x{inner}"
            leaves = [x, *weights] if trained else [x]
            yield from _both_ways(place, "mlp", name, shown, calls, leaves)


def _error(got: Tensor, exact: Tensor) -> float:
    return float((got.float() - exact).norm() / exact.norm())


def _linear_variants(
    place: Place, weight: Tensor, trained: bool
) -> dict[str, Callable[[Tensor], Tensor]]:
    frozen = None if trained else Float8Weight.of(weight, keep=False)
    variants: dict[str, Callable[[Tensor], Tensor]] = {"bf16": lambda x: F.linear(x, weight)}
    if frozen is None:
        variants["ours"] = lambda x: ops.linear_float8(x, weight)
    else:
        variants["ours"] = lambda x: ops.linear_float8(x, frozen.codes, weight_scale=frozen.scale)
    peer = _torchao(weight) if trained and place.device.type == "cuda" else None
    return variants | ({} if peer is None else {"torchao": peer})


def _torchao(weight: Tensor) -> Callable[[Tensor], Tensor] | None:
    layer = nn.Sequential(nn.Linear(weight.shape[1], weight.shape[0], False, weight.device))
    layer[0].weight = weight
    return torch.compile(layer) if _to_torchao(layer.to(weight.dtype)) else None


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


def _converted(model: Any) -> bool:
    """Unpatch a model, and let torchao and the compiler run its decoder layers."""
    liger_multi.unpatch(model)
    layers = model.model.layers
    if next(layers.parameters()).device.type == "cpu" or not _to_torchao(layers):
        return False
    for each in layers:
        each.compile()
    return True


def linear(place: Place) -> Iterator[Row]:
    """One layer under every variant, its weight trained or frozen."""
    for tokens, width, out in TINY_SHAPES if place.tiny else SHAPES:
        for trained in (True, False):
            x = place.normal(tokens, width).requires_grad_()
            weight = nn.Parameter(place.normal(out, width, scale=width**-0.5), trained)
            dy = place.normal(tokens, out)
            exact = _exact(x, weight, dy)
            leaves = [x, weight] if trained else [x]

            def both(run: Callable[[Tensor], Tensor], operands: Any = (x, dy, leaves)) -> Any:
                x, dy, leaves = operands
                y = run(x)
                return y.detach(), *torch.autograd.grad(y, leaves, dy)

            variants = _linear_variants(place, weight, trained)
            calls = {name: lambda run=run: both(run) for name, run in variants.items()}
            times = place.in_turns(calls)
            for name, call in calls.items():
                results = call()  # type: ignore[no-untyped-call]
                errors = [_error(y, e) for y, e in zip(results, exact, strict=False)]
                yield {
                    "part": "linear",
                    "name": "trained" if trained else "frozen",
                    "shape": f"{tokens}x{width}x{out}",
                    "variant": name,
                    "both_ms": times[name],
                    "row_ms": place.in_a_row(call),
                    "extra_bytes": place.peak(call),
                    "error": dict(zip(("y", "dx", "dweight"), errors, strict=False)),
                }


def _exact(x: Tensor, weight: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    wide = [t.detach().float() for t in (x, weight, dy)]
    return wide[0] @ wide[1].t(), wide[2] @ wide[1], wide[2].t() @ wide[0]


# --- models ---

SIZES: dict[str, tuple[str, int, int, bool]] = {
    "layer": ("llama-3-8b", 2, 4096, False),
    "small": ("llama-3.2-1b", 4, 4096, False),
    "model": ("llama-3-8b", 2, 4096, True),
    "gradients": ("llama-3-8b", 2, 4096, True),
    "lora": ("llama-3-8b", 2, 4096, True),
    "accumulated": ("llama-3-8b", 2, 4096, True),
}


def _built(place: Place, part: str) -> tuple[Any, Tensor]:
    name, batch, tokens, checkpointing = SIZES[part]
    run = models.Run(
        "tiny" if place.tiny else name,
        2 if place.tiny else batch,
        32 if place.tiny else tokens,
        checkpointing,
    )
    torch.manual_seed(0)
    model = models.build(run, place.device)
    vocabulary = model.config.vocab_size
    return model, torch.randint(vocabulary, (run.batch, run.tokens), device=place.device)


def layer(place: Place) -> Iterator[Row]:
    """One decoder layer, its input and weights with gradients."""
    model, ids = _built(place, "layer")
    hidden = place.normal(*ids.shape, model.config.hidden_size).requires_grad_()
    model.model.layers = model.model.layers[:1]
    block = model.model.layers[0]
    positions = torch.arange(ids.shape[1], device=place.device)[None]
    angles = model.model.rotary_emb(hidden, positions)

    def once() -> None:
        out = block(hidden, position_embeddings=angles)
        (out[0] if isinstance(out, tuple) else out).sum().backward()
        model.zero_grad(set_to_none=True)
        hidden.grad = None

    yield from _compared(place, "layer", model, once)


def _compared(place: Place, part: str, model: Any, once: Call, rounds: int = 0) -> Iterator[Row]:
    """The patched model with and without FP8, and with MLPs as layers, in turns; torchao last."""
    float8: dict[str, Any] = {"linear_float8": {"smallest": 0} if place.tiny else True}
    settings = {"bf16": {}, "float8": float8, "layers": {**float8, "swiglu": {"whole": False}}}
    times: dict[str, list[float]] = {name: [] for name in settings}
    peaks: dict[str, int] = {}
    rows: dict[str, Row] = {}
    for _ in range(2):
        for name, patches in settings.items():
            liger_multi.patch(model, **patches)
            times[name].append(place.in_turns({"": once}, rounds)[""])
            peaks[name] = place.peak(once)
            rows[name] = {"trace_ms": place.traced(once)}
            if part == "layer":
                rows[name]["row_ms"] = place.in_a_row(once)
    if part in ("layer", "gradients") and _converted(model):
        times["torchao"] = [place.in_turns({"": once}, rounds)[""]]
        peaks["torchao"], rows["torchao"] = place.peak(once), {"trace_ms": place.traced(once)}
        if part == "layer":
            rows["torchao"]["row_ms"] = place.in_a_row(once)
    for name, samples in times.items():
        yield {
            "part": part,
            "name": SIZES[part][0],
            "shape": "x".join(map(str, SIZES[part][1:3])),
            "variant": name,
            "both_ms": min(samples),
            **rows.get(name, {}),
            "extra_bytes": peaks[name],
        }


def _step(model: Any, ids: Tensor, optimizer: Any) -> Call:
    def once() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return once


def _whole(place: Place, part: str) -> Iterator[Row]:
    model, ids = _built(place, part)
    fused = place.device.type == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=fused)
    yield from _compared(place, part, model, _step(model, ids, optimizer), 2 if place.tiny else 4)


def model(place: Place) -> Iterator[Row]:
    """Checkpointed steps of an 8B model, all of it trained: about 75 GiB."""
    yield from _whole(place, "model")


def gradients(place: Place) -> Iterator[Row]:
    """The same without an optimizer; each gradient is dropped once it is computed: about 20 GiB."""
    model, ids = _built(place, "gradients")
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))

    def once() -> None:
        model(input_ids=ids, labels=ids).loss.backward()

    yield from _compared(place, "gradients", model, once, 2 if place.tiny else 4)


def accumulated(place: Place) -> Iterator[Row]:
    """Steps of four micro-batches, codes made at each use or kept: about 50 GiB."""
    model, ids = _built(place, "accumulated")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)

    def once() -> None:
        for _ in range(4):
            model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    options: dict[str, Any] = {"smallest": 0} if place.tiny else {}
    settings: dict[str, Any] = {
        "bf16": False,
        "float8": options,
        "kept": {**options, "cache": True},
    }
    times: dict[str, list[float]] = {name: [] for name in settings}
    peaks: dict[str, int] = {}
    for turn in range(3 if place.tiny else 5):
        for name, chosen in settings.items():
            liger_multi.patch(model, linear_float8=chosen)
            if turn == 0:
                once()
                peaks[name] = place.peak(once)
            place.wait()
            start = time.perf_counter()
            once()
            place.wait()
            times[name].append(1e3 * (time.perf_counter() - start))
    for name, samples in times.items():
        yield {
            "part": "accumulated",
            "name": SIZES["accumulated"][0],
            "shape": "4x2x4096",
            "variant": name,
            "both_ms": statistics.median(samples),
            "extra_bytes": peaks[name],
        }


def small(place: Place) -> Iterator[Row]:
    """Steps of a 1B model."""
    yield from _whole(place, "small")


def lora(place: Place) -> Iterator[Row]:
    """Checkpointed steps of LoRA on all layers of an 8B model."""
    import peft

    model, ids = _built(place, "lora")
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    settings = peft.LoraConfig(r=16, lora_alpha=32, target_modules=targets)
    wrapped = peft.get_peft_model(model, settings, autocast_adapter_dtype=False)
    wrapped.enable_input_require_grads()
    thin = [p for p in wrapped.parameters() if p.requires_grad]
    once = _step(wrapped, ids, torch.optim.AdamW(thin, lr=1e-5))
    smallest = {"smallest": 0} if place.tiny else {"smallest": 2**20}
    frozen = {"frozen": True, "originals": False, **smallest}
    for name in ("peft", "bf16", "float8", "float8 and head"):
        if name != "peft":
            liger_multi.patch(wrapped, linear_float8=frozen if "float8" in name else False)
        gc.collect()
        on_card = place.device.type != "cpu"
        held = torch.get_device_module(place.device).memory_allocated() if on_card else 0
        liger_multi.configure({"head_gemms": "float8" if "head" in name else "exact"})
        times = place.in_turns({name: once}, 2 if place.tiny else 6)
        peak, trace = place.peak(once), place.traced(once)
        yield {
            "part": "lora",
            "name": "llama-3-8b",
            "shape": "2x4096",
            "variant": name,
            "both_ms": times[name],
            "extra_bytes": peak,
            "held_bytes": held,
            "trace_ms": trace,
        }
    liger_multi.configure(None)


PARTS: dict[str, Callable[[Place], Iterator[Row]]] = {
    "kernels": kernels,
    "codes": codes,
    "linear": linear,
    "mlp": mlp,
    "adapters": adapters,
    "layer": layer,
    "small": small,
    "lora": lora,
    "gradients": gradients,
    "accumulated": accumulated,
    "model": model,
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
