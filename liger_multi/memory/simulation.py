"""Simulate a training step on the meta device, where storages have sizes and no memory.

The model's own forward and autograd's own backward run, so that architectures, patches, adapters
and checkpointing need no formulas. Three things get an implementation of ours on the meta device:
attention (which PyTorch would spell out there), our operators with chunks, and values that
decide about shapes.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.library import Library
from torch.overrides import TorchFunctionMode

from liger_multi._torch_private import (
    TorchDispatchMode,
    current_autograd_node,
    may_overwrite,
    reference_counts,
    run_backward,
)
from liger_multi.checks import autocast, autocast_dtype
from liger_multi.dispatch import registry
from liger_multi.dispatch.stored import StoredWeight, assumed_memory
from liger_multi.memory.measure import tensors_in
from liger_multi.memory.recorder import Block, Recorder

if TYPE_CHECKING:
    from liger_multi.reference.activations.gated_mlp import CodedGradients
    from liger_multi.reference.float8.rows import Float8Rows

P = ParamSpec("P")
R = TypeVar("R")

# --- operators on the meta device as a card runs them: references around kernels ---

# Loops over chunks, GEMMs and adapters are the reference's own, so that memory and work are those
# of the code that runs. What a backend computes by a kernel only allocates here; what it reads
# and writes besides is read and written by one operation of PyTorch, so that a planner counts the
# bytes.
#
# Other operators run as one kernel, whose results have known shapes. An entry of :data:`SCRATCH`
# allocates what the launchers on an accelerator allocate besides; a test compares both. Sizes
# that depend on the card are those of a Hopper card.

CHUNKED = (
    "fused_linear_cross_entropy",
    "fused_linear_log_prob",
    "gated_mlp",
    "gated_mlp_float8",
    "linear_float8",
    "lora_mlp",
    "lora_qkv",
    "lora_update",
)
"""Operators of more than one kernel."""


class _Rounding:
    """Rounding to FP8 by a kernel: a copy in one layout, or in two."""

    def rounded(self, x: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> Any:
        from liger_multi.reference.common.float8 import Rounded

        return Rounded(torch.empty_like(x, dtype=dtype), x.new_empty((), dtype=torch.float32))

    def both_ways(self, x: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> Any:
        return self.rounded(x, dtype), self.rounded(x.t(), dtype)


class _LossKernels:
    """Row kernels of losses, which overwrite the logits and return numbers per row."""

    rounding = _Rounding()

    def statistics(
        self, raw: Tensor, target: Tensor, weight: Any, objective: Any, outputs: str
    ) -> Any:
        from liger_multi.reference.cross_entropy.rows import RowStats

        return RowStats.empty(raw.shape[0], objective, outputs, raw)

    def statistics_and_gradient_(
        self, raw: Tensor, target: Tensor, weight: Any, objective: Any, scales: Any, outputs: str
    ) -> Any:
        return self.statistics(raw, target, weight, objective, outputs)

    def results(self, *args: Any) -> Any:
        from liger_multi.reference.cross_entropy.reduction import results

        return results(*args)

    def gradient_(self, *_: Any) -> None:
        return None

    log_prob_gradient_ = gradient_

    def scale(
        self,
        gradient: Tensor,
        factor: Any,
        dtype: torch.dtype,
        denominators: Any = None,
        overwrite: bool = False,
    ) -> Tensor:
        if (factor is None or overwrite) and gradient.dtype == dtype:
            return gradient
        return torch.empty_like(gradient, dtype=dtype)


class _RowQuantizer:
    """Rounding of rows by a kernel: a conversion, which moves as many bytes."""

    def rows(self, x: Tensor, columns: Any, format: torch.dtype) -> Float8Rows:
        from liger_multi.reference.float8.rows import Float8Rows

        return Float8Rows(x.to(format), x.new_empty(x.shape[0], dtype=torch.float32))

    def across(self, x: Tensor, scale: Any, format: torch.dtype) -> Tensor:
        if x.dtype == format:
            return x.t().clone(memory_format=torch.contiguous_format)
        return x.t().to(format, memory_format=torch.contiguous_format)

    def of(self, x: Tensor) -> Float8Rows:
        """Rows in the format of their device."""
        from liger_multi.reference.float8.rows import format_of

        return self.rows(x, None, format_of(x.device))


_ROWS = _RowQuantizer()


class _ActivationKernels:
    """The activation of a gated MLP as one kernel.

    What it reads and writes is read and written by multiplications, which are counted.
    """

    def product(self, gate: Tensor, up: Tensor, activation: str) -> Tensor:
        return gate * up

    def gradients(
        self, dproduct: Tensor, gate: Tensor, up: Tensor, activation: str
    ) -> tuple[Tensor, Tensor, Tensor]:
        return dproduct * gate, dproduct * up, dproduct

    def coded(
        self, gate: Tensor, up: Tensor, activation: str, needs_product: bool
    ) -> tuple[Tensor, Float8Rows]:
        return gate * up if needs_product else gate.new_empty(0), _ROWS.of(gate)

    def coded_gradients(
        self,
        dproduct: Tensor,
        gate: Tensor,
        up: Tensor,
        activation: str,
        columns: Any,
        needs_grads: tuple[bool, bool],
        product: bool,
    ) -> CodedGradients:
        from liger_multi.reference.activations.gated_mlp import CodedGradients

        gradients = [
            dproduct * x if w else x.new_empty(0)
            for x, w in zip((gate, up), needs_grads, strict=True)
        ]
        pairs = zip((gate, up), columns, strict=True)
        codes = [None if column is None else _ROWS.of(x) for x, column in pairs]
        return CodedGradients(gradients[0], gradients[1], dproduct, codes[0], codes[1])


def _parts_of_thin(x: Tensor, order: Sequence[int], axis: int) -> Tensor:
    """A thin matrix as parts in bf16, by one kernel."""
    shape = list(x.shape)
    shape[axis] *= len(order)
    return x.new_empty(shape, dtype=torch.bfloat16)


Directions = tuple[Callable[..., Any], Callable[..., Any]]


@functools.cache
def around_kernels(name: str) -> Directions:
    """Forward and backward of one of :data:`CHUNKED`."""
    from liger_multi.reference.activations import gated_mlp
    from liger_multi.reference.adapters import lora_mlp, lora_qkv, lora_update, low_rank
    from liger_multi.reference.cross_entropy import (
        fused_linear_cross_entropy,
        fused_linear_log_prob,
    )
    from liger_multi.reference.float8 import gated_mlp_float8, linear_float8

    loss: Any = _LossKernels()
    adapters: Any = low_rank.LowRank(_parts_of_thin, _ROWS)
    makers: Mapping[str, Callable[[], Directions]] = {
        "fused_linear_cross_entropy": functools.partial(
            fused_linear_cross_entropy.implement_fused_linear_cross_entropy, loss
        ),
        "fused_linear_log_prob": functools.partial(
            fused_linear_log_prob.implement_fused_linear_log_prob, loss
        ),
        "gated_mlp": functools.partial(gated_mlp.implement_gated_mlp, _ActivationKernels()),
        "gated_mlp_float8": functools.partial(
            gated_mlp_float8.implement_gated_mlp_float8, _ActivationKernels(), _ROWS
        ),
        "linear_float8": functools.partial(linear_float8.implement_linear_float8, _ROWS),
        "lora_mlp": functools.partial(lora_mlp.implement_lora_mlp, _ActivationKernels(), adapters),
        "lora_qkv": functools.partial(lora_qkv.implement_lora_qkv, adapters),
        "lora_update": functools.partial(lora_update.implement_lora_update, adapters),
    }
    return makers[name]()


# --- scratch memory of single kernels ---

Arguments = Mapping[str, Any]
FP32 = torch.float32
WRITTEN_BYTES, SCRATCH_SHARE = 2**26, 0.7  # of rows of experts
TRAINED_PAIRS_BYTES, PAIRS_BYTES = 2**28, 2**27  # of sums of experts
CHUNK = 64  # tokens of a chunk of linear attention
SPAN = 256  # tokens of a program of the selective scan
CHANNELS, TOKENS = 32, 4  # of a program of the selective scan, and between states in memory
PROGRAMS = 32 * 132  # of backward of the selective scan that run at a time at least


def _experts(args: Arguments) -> list[Tensor]:
    """Rows gathered by expert, or results of GEMMs before they are summed: the most at a time.

    In backward, gradients of weights that are not there yet leave room. The one whose rows take
    less comes last; if that is the second, gate and up are overwritten by its rows of dy.
    """
    index, second = args["index"], args["down_weight"]
    hidden, inner = second.shape[1:][:: -1 if args["transposed"] else 1]
    rows, size = index.numel(), second.dtype.itemsize
    wide, narrow = rows * hidden * size, rows * inner * size
    needs = [args.get(f"needs_{n}_weight", False) for n in ("gate_up", "down")]
    if "dy" not in args:
        limit = TRAINED_PAIRS_BYTES if any(needs) else PAIRS_BYTES
        return [index.new_empty(narrow + min(wide, limit), dtype=torch.uint8)]
    cols = args["gate_up"].shape[1]
    if needs[1] and inner < hidden:
        overwrites = wide > WRITTEN_BYTES and cols >= SCRATCH_SHARE * hidden
        sizes = (
            narrow + wide * needs[0] - second.nbytes,
            narrow + min(wide, TRAINED_PAIRS_BYTES) * args["needs_x"] - second.nbytes,
            narrow if overwrites else narrow + wide,
        )
    else:
        first = second.shape[0] * cols * hidden * size * needs[0]
        gathered, summed = wide * needs[0], min(wide, PAIRS_BYTES) * args["needs_x"]
        sizes = (narrow + wide * needs[1] - first, gathered, summed)
    copied = 0 if may_overwrite() else args["gate_up"].nbytes
    # as many empty tensors as tell which way needs most: between two of them no size is linear
    largest = [index.new_empty(0) for _ in range(sizes.index(max(sizes)))]
    return [index.new_empty(max(sizes) + copied, dtype=torch.uint8), *largest]


def _filters(tokens: int) -> Callable[[Arguments], list[Tensor]]:
    """Sums of every program's tokens for the gradients of a convolution's weight and bias."""

    def allocate(args: Arguments) -> list[Tensor]:
        weight, (batch, length) = args["weight"], args["x"].shape[:2]
        programs = batch * -(-length // tokens) if "dy" in args else 0
        sizes = [weight.numel(), len(weight) if args["bias"] is not None else 0]
        return [weight.new_empty(programs, size, dtype=FP32) for size in sizes]

    return allocate


def _delta_rule(args: Arguments) -> list[Tensor]:
    """Squares and gates of chunks; for backward, states and their gradients, and N."""
    k, v = args["k"], args["v"]
    (batch, length, value_heads, value), (heads, dim) = v.shape, k.shape[2:]
    streams, chunks = batch * value_heads, -(-length // CHUNK)
    tokens = chunks * CHUNK
    tensors = [
        k.new_empty(2, streams, tokens, CHUNK),
        k.new_empty(4, streams, tokens, dtype=FP32),
        k.new_empty(2, batch * heads, tokens * args["qk_l2norm"], dtype=FP32),
    ]
    if "dy" in args:
        tensors += [
            v.new_empty(2, streams, chunks, dim, value),
            v.new_empty(streams, length, value),
            k.new_empty(2, streams, tokens, dtype=FP32),
        ]
    return tensors


def _channel_delta_rule(args: Arguments) -> list[Tensor]:
    """Buffers of the delta rule with gates of channels: gated rows of q and k, sums of gates."""
    k, v = args["k"], args["v"]
    (batch, length, value_heads, value), (heads, dim) = v.shape, k.shape[2:]
    streams, chunks = batch * value_heads, -(-length // CHUNK)
    tokens, is_backward = chunks * CHUNK, "dy" in args
    padded, planes = max(16, 1 << (dim - 1).bit_length()), k.element_size() // 2
    tensors = [
        k.new_empty(planes, streams, tokens, padded, dtype=FP32),
        k.new_empty(3, streams, tokens, dim),
        k.new_empty(streams, chunks, padded, dtype=FP32),
        k.new_empty(2, batch * heads, tokens * args["qk_l2norm"], dtype=FP32),
        k.new_empty(2 + is_backward, streams, tokens, CHUNK),
    ]
    if is_backward:
        tensors += [
            v.new_empty(2, streams, chunks, dim, value),
            v.new_empty(streams, length, value),
            k.new_empty(2, streams, tokens, padded, dtype=FP32),
        ]
    return tensors


def _state_space(args: Arguments) -> list[Tensor]:
    """Gates and states of chunks; for backward, gradients of states and sums of chunks too."""
    x = args["x"]
    (batch, length, heads_of_x, value), (groups, size) = x.shape, args["B"].shape[2:]
    streams, chunks = batch * heads_of_x, -(-length // CHUNK)
    tokens, is_backward = chunks * CHUNK, "dy" in args
    tensors = [
        x.new_empty(5, streams * tokens, dtype=FP32),
        x.new_empty(1 + is_backward, streams, chunks, size, value),
    ]
    if is_backward and args["z"] is not None:
        tensors += [torch.empty_like(x)]  # the gradient of y before the gate
    if is_backward:
        tensors += [
            x.new_empty(batch * groups * chunks, CHUNK, CHUNK),
            x.new_empty(2 + -(-size // 128), streams * tokens, dtype=FP32),
        ]
    return tensors


def _scan(args: Arguments) -> list[Tensor]:
    """B and C in order; for backward, A, parts of sums, and what some sequences at a time have.

    These are gradients after spans and sums of spans, states of chunks, and parts of dB and dC.
    """
    u, states, is_backward = args["u"], args["B"].shape[2], "dy" in args
    batch, length, cols = u.shape
    spans, blocks = -(-length // SPAN), -(-cols // CHANNELS)
    sequences = min(batch, -(-PROGRAMS // (spans * blocks)))
    # forward by spans turns A as well
    tensors = [
        args[n].new_empty(args[n].shape, dtype=FP32) for n in ("ABC" if is_backward else "BC")
    ]
    if is_backward:
        tensors += [u.new_empty(sequences, spans * (spans > 1), states + 1, cols, dtype=FP32)]
        tensors += [u.new_empty(sequences, -(-length // TOKENS), states, cols, dtype=FP32)]
        tensors += [
            u.new_empty(batch, spans, args[f"needs_{n}"] * k, cols, dtype=FP32)
            for n, k in (("A", states), ("D", 1), ("delta_bias", 1))
        ]
        if args["needs_B"] or args["needs_C"]:  # side by side
            tensors += [u.new_empty(blocks, sequences, length, 2, states, dtype=FP32)]
    return tensors


SCRATCH: dict[str, Callable[[Arguments], list[Tensor]]] = {
    "causal_conv1d": _filters(128),
    "fused_moe": _experts,
    "gated_delta_rule": _delta_rule,
    "gated_short_conv": _filters(64),
    "kimi_delta_attention": _channel_delta_rule,
    "lora_moe": _experts,
    "selective_scan": _scan,
    "ssd_scan": _state_space,
}


# --- what stands in on the meta device ---

NAMESPACE = "liger_multi_stand_in"


def _attend(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Result and normalizer of a flash attention kernel."""
    shape = (*query.shape[:-1], value.shape[-1])
    order = (0, 2, 1, 3) if query.ndim == 4 else tuple(range(query.ndim))
    out = query.new_empty([shape[i] for i in order]).permute(order)
    return out, query.new_empty(query.shape[:-1], dtype=torch.float32)


# an operator, so that policies of recomputation meet it by its name
_LIBRARY = Library(NAMESPACE, "DEF")
_LIBRARY.define(
    "scaled_dot_product_attention(Tensor query, Tensor key, Tensor value) -> (Tensor, Tensor)"
)
_LIBRARY.impl("scaled_dot_product_attention", _attend, "CompositeExplicitAutograd")


class _Attention(torch.autograd.Function):
    """What a flash attention kernel allocates."""

    @staticmethod
    def forward(
        ctx: Any, recorder: Recorder, query: Tensor, key: Tensor, value: Tensor, mask: Any
    ) -> Tensor:
        ctx.recorder = recorder
        out: Tensor
        attend = getattr(torch.ops, NAMESPACE).scaled_dot_product_attention
        out, normalizer = attend(query, key, value)
        ctx.save_for_backward(query, key, value, out, normalizer, mask)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:
        query, key, value, _, normalizer, _ = ctx.saved_tensors

        def make() -> tuple[Tensor, ...]:
            partial = torch.empty_like(query, dtype=torch.float32)  # of the gradient of the query
            rows = torch.empty_like(normalizer)
            # a head of keys that several heads of queries share has a gradient of each first
            shared = query.ndim == 4 and key.shape[1] != query.shape[1]
            head_gradients = [
                t.new_empty(query.shape[1], *t[:, 0].shape) for t in (key, value) if shared
            ]
            gradients = tuple(torch.empty_like(t) for t in (query, key, value))
            del partial, rows, head_gradients
            return gradients

        op_name = "scaled_dot_product_attention_backward"
        return None, *ctx.recorder.named(op_name, make), None


_attention: Any = _Attention.apply


def _spelled_out(device_type: str, arguments: Mapping[str, Any]) -> bool:
    """Whether PyTorch has no fused kernel on a GPU and keeps rows x columns of every head.

    The one for fp32 takes no groups of heads.
    """
    query, key = arguments["query"], arguments["key"]
    grouped = arguments.get("enable_gqa") and query.shape[-3] != key.shape[-3]
    return device_type != "cpu" and query.dtype == torch.float32 and bool(grouped)


_PRODUCTS = {
    *(nn.functional.linear, torch.matmul, torch.mm, torch.bmm, torch.addmm, torch.baddbmm),
    *(Tensor.matmul, Tensor.__matmul__, Tensor.mm, Tensor.bmm),
    nn.functional.scaled_dot_product_attention,
}


class MetaImplementations(TorchFunctionMode):
    """Implement ``F.scaled_dot_product_attention`` on meta, and cast GEMMs as autocast does."""

    def __init__(
        self, recorder: Recorder, target: str, autocast_to: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self._recorder, self._target, self._autocast = recorder, target, autocast_to
        self.casts: dict[int, Tensor] = {}

    def _cast(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dtype != torch.float32:
            return value
        if not isinstance(value, nn.Parameter):
            return value.to(self._autocast)
        if id(value) not in self.casts:  # autocast keeps those of weights until it ends
            self.casts[id(value)] = value.to(self._autocast)
        return self.casts[id(value)]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Pass every other function on."""
        if kwargs is None:
            kwargs = {}
        if autocast_dtype("meta") is not None and func in _PRODUCTS:
            args = tuple(self._cast(a) for a in args)
            kwargs = {name: self._cast(a) for name, a in kwargs.items()}
        if func is nn.functional.scaled_dot_product_attention:
            names = ("query", "key", "value", "attn_mask")
            arguments = {**dict(zip(names, args, strict=False)), **kwargs}
            if _spelled_out(self._target, arguments):
                return func(*args, **kwargs)
            return _attention(self._recorder, *(arguments.get(name) for name in names))
        return func(*args, **kwargs)


# --- results of operators that were asked before ---

_Form = tuple[torch.Size, tuple[int, ...], torch.dtype]
_ANSWERS: dict[Any, tuple[_Form, ...] | None] = {}
_MOST_ANSWERS = 2**16


def _key(values: Iterable[Any], key: list[Any]) -> None:
    """What the shapes of an operator's results depend on; a number counts with its type."""
    for value in values:
        if isinstance(value, Tensor):
            key += value.shape, value.stride(), value.dtype, value.is_meta
        elif isinstance(value, list | tuple):
            key += type(value), len(value)
            _key(value, key)
        else:
            key += type(value), value


def _counts(x: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    return x.new_empty(minlength, dtype=torch.int64 if weights is None else torch.float64)


_LEAST: dict[Any, Callable[..., Tensor]] = {torch.ops.aten.bincount.default: _counts}
"""Operators whose data decide a size: the least one. Routers count the tokens of experts so."""


def run_on_meta(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``func(*args, **kwargs)`` of meta tensors; many of their kernels are slow Python.

    The results of a call are made again where the same was called with the same shapes, unless a
    result shares the storage of an argument.
    """
    if func in _LEAST:
        return _LEAST[func](*args, **kwargs)
    parts: list[Any] = [id(func)]  # operators stay
    _key(args, parts)
    if kwargs:
        parts += kwargs
        _key(kwargs.values(), parts)
    key = tuple(parts)
    try:
        forms = _ANSWERS.get(key)
    except TypeError:  # an argument that has no hash
        return func(*args, **kwargs)
    if forms is not None:
        if len(forms) == 1:
            return _empty_from(*forms[0])
        return tuple(_empty_from(*form) for form in forms)
    result = func(*args, **kwargs)
    if key not in _ANSWERS and len(_ANSWERS) < _MOST_ANSWERS:
        _ANSWERS[key] = _forms(result, [*tensors_in(args), *tensors_in(kwargs.values())])
    return result


def _empty_from(shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype, device="meta")


def _forms(result: Any, inputs: list[Tensor]) -> tuple[_Form, ...] | None:
    """Shapes, strides and dtypes of results; None if some is no new tensor with its own storage."""
    results = result if isinstance(result, tuple) and len(result) > 1 else (result,)
    if not all(type(r) is Tensor and r.device.type == "meta" for r in results):
        return None
    storages = {t.untyped_storage()._cdata for t in (*inputs, *results)}
    if len(storages) < len({t.untyped_storage()._cdata for t in inputs}) + len(results):
        return None
    forms = tuple((r.shape, r.stride(), r.dtype) for r in results)
    twins = [_empty_from(*form) for form in forms]
    checks = (
        r.untyped_storage().nbytes() == t.untyped_storage().nbytes() and not r.storage_offset()
        for r, t in zip(results, twins, strict=True)
    )
    return forms if all(checks) else None


# --- a step ---


class Simulation(Recorder):
    """A recorder of meta tensors that stand for those of another device.

    Args:
        target: Device type that the tensors stand for.
        capacity: Bytes of that device, from which automatic chunks follow; None: plenty.
        model: On the meta device.
        vocabulary: As in :class:`Recorder`.
        sequence: Tokens of a sequence.
        autocast: The dtype that autocast asks for, if it is on.
    """

    def __init__(
        self,
        target: str,
        capacity: int | None,
        model: nn.Module,
        vocabulary: int | None,
        sequence: int,
        autocast: torch.dtype | None = None,
    ) -> None:
        super().__init__("meta", model, None, vocabulary)
        self._target, self._capacity, self._sequence = target, capacity, sequence
        self._autocast = autocast
        self._named: Any = None  # the last result that was seen

    def add(self, block: Block) -> None:
        """Add a block that exists during the whole step."""
        self.events.append((len(self.blocks), block.size))
        self.blocks.append(block)
        self.live += block.size

    def step(self, batch: int, sequence: int, optimizer_bytes: int) -> None:
        """Forward, loss, backward, and an optimizer step that needs some bytes beside its states.

        Args:
            batch: Sequences.
            sequence: Tokens of each.
            optimizer_bytes: Temporaries of the optimizer.
        """
        ids = torch.empty(batch, sequence, dtype=torch.int64, device="meta")
        model = cast(Any, self._model)
        with self.surroundings():
            loss = self.forward(lambda: model(input_ids=ids, labels=ids).loss)
            with autocast("meta", self._autocast):  # of what is computed again
                backward(loss)
            self._stepping = True
            scratch = torch.empty(optimizer_bytes, dtype=torch.uint8, device="meta")
            del scratch
            self._stepping = False

    @contextlib.contextmanager
    def surroundings(self) -> Iterator[None]:
        """The context in which a model runs without memory and is recorded."""
        _unshared_counts()
        self._ask_before()
        implementations = MetaImplementations(self, self._target, self._autocast)
        with _meta_has_no_autocast(), implementations, self.recording():
            self._casts = implementations.casts
            yield

    def _ask_before(self) -> None:
        """Let operators find out what products the meta device has, which is no part of a step."""
        from liger_multi.reference.common.chunking import has_out_dtype

        dtypes = {p.dtype for _, p in self._parameters()} | {self._autocast}
        for dtype in dtypes & {torch.float16, torch.bfloat16}:
            has_out_dtype("meta", dtype)

    def forward(self, call: Callable[[], Any]) -> Any:
        """``call()`` as under the autocast of this step."""
        try:
            with autocast("meta", self._autocast):
                return call()
        finally:
            self._casts.clear()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here: PyTorch need not keep its compiler away from every operator."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """As of :class:`StorageMode`."""
        return self._dispatched(func, types, args, kwargs or {})

    def _watch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """As of :class:`StorageMode`, where no storage is resized and results are often seen."""
        index = self._index
        for tensor in tensors_in((args, *kwargs.values())):
            if tensor.untyped_storage()._cdata not in index:
                self.see(tensor, is_output=False)
        result = self.run(func, args, kwargs)
        if result is not self._named:
            for tensor in tensors_in((result,)):
                self.see(tensor, is_output=True)
        self._named = None
        return result

    def named(self, name: str, call: Callable[[], Any]) -> Any:
        """As of :class:`Recorder`."""
        self._named = result = super().named(name, call)
        return result

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operator; where its result depends on values, assume an ordinary batch."""
        if self._casts and not self._stack and current_autograd_node() is not None:
            self._casts.clear()  # autocast ended with the layer that was computed again
        name = func.name()
        if name == "aten::_local_scalar_dense":
            if args[0].dtype == torch.bool:
                return True  # "is everything in place?": no padding, one sequence a row
            raise ValueError(
                f"the model's forward reads a value of a {args[0].dtype} tensor, which shapes do "
                "not give (experts in a loop do so: ask for another implementation of them)"
            )
        if name == "aten::nonzero":
            return args[0].new_empty(self._valid(args[0].numel()), args[0].ndim, dtype=torch.int64)
        if name == "aten::add.Tensor" and _accumulates(args):
            return args[0]
        if func.namespace == NAMESPACE:
            return self.named(name.partition("::")[2], lambda: func(*args, **kwargs))
        if name == "aten::_grouped_mm":  # the meta device knows it in bf16 only
            return self.named(name, lambda: _grouped(*args, **kwargs))
        return super().run(func, args, kwargs)

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator of PyTorch, or repeat its earlier result."""
        return run_on_meta(func, args, kwargs)

    def _valid(self, count: int) -> int:
        """Number of valid targets: the last token of every sequence predicts nothing."""
        return count - count // self._sequence if self._sequence > 1 else count

    def run_operator(self, primitive: Any, args: tuple[Any, ...]) -> Any:
        """Run the reference where it would run, else its loops around allocating kernels."""
        from liger_multi.reference.common.chunking import assumed_free
        from liger_multi.reference.float8.rows import assumed_gemms

        name = primitive.op.name
        if self._target != "cpu" and name not in CHUNKED:
            kwargs = dict(zip(primitive.params, args, strict=True))
            output = primitive.fake(*args)
            scratch = [torch.empty(self._opened(args), dtype=torch.uint8, device="meta")]
            if name in SCRATCH:
                scratch += SCRATCH[name](kwargs)
            return output
        direction = getattr(registry.module(registry.REFERENCE, name), primitive.direction)
        if self._target != "cpu":
            forward, backward = around_kernels(name)
            direction = forward if primitive.direction == "forward" else backward
        capacity = self._capacity or 2**60
        token = assumed_free.set(0 if self._target == "cpu" else max(1, capacity - self.live))
        gemms = assumed_gemms.set(self._target != "cpu")
        try:
            return direction(*args)
        finally:
            assumed_free.reset(token)
            assumed_gemms.reset(gemms)

    def _opened(self, args: Iterable[Any]) -> int:
        """Bytes of decoded stored weights: one of them exists at a time, or a piece of it."""
        token = assumed_memory.set(self._capacity or assumed_memory.get())
        try:
            parts = [part for a in args if isinstance(a, StoredWeight) for part in a.pieces()]
        finally:
            assumed_memory.reset(token)
        return max((part.numel() * part.itemsize for part in parts), default=0)


def on_meta(model: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
    """A copy of ``model`` on the meta device, patches and ties kept; nothing is read.

    Args:
        model: Anywhere.
        dtype: Of the copy's parameters in the dtype that most elements have; those in another one,
            such as fp32 adapters, keep it. None: as they are.
    """
    memo: dict[int, Any] = {}
    sizes = Counter[torch.dtype]()
    for parameter in model.parameters():
        sizes[parameter.dtype] += parameter.numel() * parameter.is_floating_point()
    main = max(sizes, key=sizes.__getitem__, default=None)
    for module in model.modules():
        for values in (module._parameters, module._buffers):
            for value in values.values():
                if value is None or id(value) in memo:
                    continue
                local = getattr(value, "_local_tensor", value)
                moves = isinstance(value, nn.Parameter) and value.dtype == main
                copied_dtype = dtype if dtype is not None and moves else value.dtype
                copied: Tensor
                if isinstance(local, StoredWeight):
                    copied = local.detach().to(device="meta", dtype=copied_dtype)
                else:
                    copied = torch.empty_like(local.detach(), device="meta", dtype=copied_dtype)
                if isinstance(value, nn.Parameter):
                    copied = nn.Parameter(copied, requires_grad=value.requires_grad)
                memo[id(value)] = copied
    return copy.deepcopy(model, memo)


def _grouped(
    a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Any = None, out_dtype: Any = None
) -> Tensor:
    """Allocate the result of a GEMM of groups of rows, of columns, or of a batch."""
    groups = () if offs is None or a.ndim + b.ndim != 4 else (offs.numel(),)
    batch = (a.shape[0],) if a.ndim + b.ndim == 6 else groups
    return a.new_empty(*batch, a.shape[-2], b.shape[-1], dtype=out_dtype or a.dtype)


@contextlib.contextmanager
def _meta_has_no_autocast() -> Iterator[None]:
    """Let PyTorch answer no where it refuses the question, which models of transformers 5.0 ask.

    PEFT turns autocast off around the weights of experts.
    """
    stock, entered = torch.is_autocast_enabled, torch.autocast

    def answer(*args: Any) -> bool:
        return False if args == ("meta",) else stock(*args)

    def context(device_type: str, *args: Any, **kwargs: Any) -> Any:
        meta = device_type == "meta"
        return contextlib.nullcontext() if meta else entered(device_type, *args, **kwargs)

    torch.is_autocast_enabled = answer  # type: ignore[assignment]
    torch.autocast = context  # type: ignore[assignment, misc]
    try:
        yield
    finally:
        torch.is_autocast_enabled = stock
        torch.autocast = entered  # type: ignore[misc]


def in_training(function: Callable[P, R]) -> Callable[P, R]:
    """The function with gradients, though its caller may have turned them off."""
    return torch.inference_mode(False)(torch.enable_grad()(function))


def backward(loss: Tensor) -> None:
    """``loss.backward()`` without leaving function modes, which checkpointed layers meet again."""
    grads = (torch.ones_like(loss),)
    run_backward((loss,), grads, False, False, (), allow_unreachable=True, accumulate_grad=True)


def _accumulates(args: tuple[Any, ...]) -> bool:
    """Whether autograd adds two gradients where it would write into the first one.

    It does so for a gradient that nobody else holds, but never while a dispatch mode looks on. It
    has gradients off, which a layer that is computed again within backward has on.
    """
    if current_autograd_node() is None or torch.is_grad_enabled():
        return False
    if not isinstance(args[1], Tensor):
        return False
    counts = reference_counts(args[0])
    return args[0].shape == args[1].shape and counts is not None and counts == _unshared_counts()


@functools.cache
def _unshared_counts() -> tuple[int, int]:
    """Reference counts of a gradient that only autograd owns, as a dispatch mode sees them."""
    observed: list[tuple[int, int]] = []

    class Look(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func.name() == "aten::add.Tensor":
                counts = reference_counts(args[0])
                observed.extend([] if counts is None else [counts])
            return func(*args, **(kwargs or {}))

    leaf = torch.ones(1, device="meta", requires_grad=True)
    twice = leaf * 1.0
    loss = torch.exp(twice) * torch.sin(twice)
    with Look():  # type: ignore[no-untyped-call]
        backward(loss)
    return observed[0] if observed else (-1, -1)
