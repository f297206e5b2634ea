"""The loop of fused linear operators: the logits of a chunk of rows at a time.

A backend supplies row kernels. The memory plan, the GEMMs, the dropping of ignored rows and the
gradients of the head (fp32 sums over chunks, rounded once) are implemented here once.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from liger_multi._torch_private import dispatch_key, has_kernel
from liger_multi.reference.common.chunking import (
    add_product_,
    capturing,
    chunk_rows,
    fits_one_chunk,
    free_bytes,
    row_blocks,
    statistics_dtype,
    weight_gradient_dtype,
)
from liger_multi.reference.common.float8 import GRADIENT
from liger_multi.reference.common.retry import divided
from liger_multi.reference.common.stored import (
    gradient_into,
    linear_into,
    opened_if_small,
)
from liger_multi.reference.common.strict import by_rows
from liger_multi.reference.cross_entropy.float8 import PLAIN, Head, Rounding, logits_dtype
from liger_multi.reference.cross_entropy.reduction import divide
from liger_multi.reference.cross_entropy.rows import Objective, RowStats

# --- chunks of rows ---

THIN = 512  # rows


def has_few_rows(target: Tensor) -> bool:
    """Whether a device gains nothing by fewer rows.

    The products of so few rows take the time in which the weight is read, and the wait for their
    count takes longer than that.
    """
    return target.device.type != "cpu" and target.numel() <= THIN


SCALES = (
    'a head in FP8 has no independent rows, which deterministic="rows" asks for: one scale serves '
    'a chunk; use head_gemms="exact" (compute_dtype=None), or deterministic=True'
)

# hook for the memory simulation, which skips chunks that repeat the one before
visited: ContextVar[Callable[[Iterable[slice]], Iterable[slice]]] = ContextVar(
    "liger_multi_visited", default=iter
)


AHEAD = 8  # the first chunk is at most this part of the rows, or it waits for their number


class ValidRows:
    """Places of the rows that are kept, whose number the host reads while the device goes on.

    A device that ran ``nonzero``, which waits for its own result, would then wait for the host.
    Here the number is copied behind an event: what is enqueued until :meth:`get` keeps the device
    busy meanwhile (llama-4-layers:8x4096 on an H100, 2026-11: idle at the head 0.79 to 0.37 ms,
    and 0.62 to 0.03 on a slower host where the first chunk's logits are part of that).
    That takes more calls, 0.16 to 0.34 ms of that host for 0.07, so a device that has nothing to
    do, whose host is late already, is asked at once; unless ``ahead`` says that work for it
    follows whatever the number is, which :meth:`first` finds.
    """

    def __init__(self, is_valid: Tensor, ahead: bool = False) -> None:
        self._kept, self._event = is_valid, None
        if has_static_nonzero(is_valid.device.type):
            stream = torch.get_device_module(is_valid.device).current_stream(is_valid.device)
            if ahead or not stream.query():
                self._count = is_valid.sum().to("cpu", non_blocking=True)
                self._event = stream.record_event()
                self._padded = torch.nonzero_static(is_valid, size=is_valid.numel()).squeeze(1)

    def first(self, rows: int) -> Tensor:
        """The first places, before their number is known; 0 where there are fewer."""
        return self._padded[:rows].clamp(min=0)

    def get(self) -> Tensor:
        """The places, in order."""
        if self._event is None:
            return self._kept.nonzero().squeeze(1)
        self._event.synchronize()
        return self._padded[: int(self._count)]


@functools.cache
def has_static_nonzero(device_type: str) -> bool:
    """Whether a device has a kernel that gives places without saying how many they are."""
    if device_type in ("cpu", "meta"):
        return False  # a wait costs nothing there
    if dispatch_key is None or has_kernel is None:
        return False
    try:
        key = dispatch_key(device_type)
    except RuntimeError:  # a PrivateUse1 backend with a name of its own
        key = "PrivateUse1"
    # not by a trial: a fall back to the CPU would pass it, and wait
    return has_kernel("aten::nonzero_static", key)


@dataclass(frozen=True)
class ChunkSpec:
    """The arguments of a fused linear loss that say how to go through the rows."""

    chunk: int
    budget: int
    compute_dtype: torch.dtype | None
    compact: bool


class Chunks:
    """Iterate over chunks of rows with valid targets; their logits share one buffer.

    How many rows are valid is asked first and needed last: by ``index`` and what follows from it,
    ``rows``, ``step`` and ``buffer``. Until the answer is there the host waits. All that can be
    launched or looked up without it comes in between, and has the device work until the host goes
    on: work that surrounds the loop asks ``drops`` and ``like``. Where there are many chunks, the
    logits of the first are launched before the host waits. They belong to the rows of the first
    places; should there be fewer, the rest of them is not used.

    Attributes:
        drops: Whether rows without a valid target may be left out.
        like: An empty tensor of the device and dtype of the logits.
        ahead: Whether the logits of the first chunk do not wait for the number of rows.
        ready: Whether the logits stand in the buffer already.

    ``rounding`` is how a head in 8 bits rounds; ``needs_gradient`` says whether it computes the
    gradient of the hidden states too.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        target: Tensor,
        bias: Tensor | None,
        objective: Objective,
        chunk_spec: ChunkSpec,
        rounding: Rounding = PLAIN,
        needs_gradient: bool = False,
    ) -> None:
        dtype = logits_dtype(chunk_spec.compute_dtype, hidden.dtype)
        self.hidden, self.target = hidden, target
        self.weight = opened_if_small(weight.to(dtype))
        self.bias = None if bias is None else bias.to(dtype)
        self.dtype, self.chunk_spec, self.ignore_index = dtype, chunk_spec, objective.ignore_index
        self.float8: Head | None = None
        if chunk_spec.compute_dtype is not None and chunk_spec.compute_dtype.itemsize == 1:
            if by_rows():
                raise ValueError(SCALES)
            gradients = chunk_spec.compute_dtype == GRADIENT
            self.float8 = Head(self.weight, gradients, needs_gradient, rounding)
        self.drops = chunk_spec.compact and not (has_few_rows(target) or capturing(hidden.device))
        is_valid = target != objective.ignore_index if self.drops else None
        self.like = hidden.new_empty(0, hidden.shape[1], dtype=dtype)
        # of all rows, dropped or not: nothing that only the run knows decides a dtype
        count, size = target.numel(), self.like.element_size()
        limits = (chunk_spec.chunk, chunk_spec.budget)
        self.one_chunk = fits_one_chunk(count, hidden.shape[1], weight.shape[0], size, *limits)
        self.free = None if self.one_chunk or any(limits) else free_bytes(hidden.device)
        self.ahead, self.places, self.ready = False, None, False
        if is_valid is None:  # nothing to wait for
            self.index, self.rows = None, count
        else:
            many_chunks = has_static_nonzero(is_valid.device.type) and not self.one_chunk
            fits = many_chunks and AHEAD * self._step_of(count) <= count
            self.ahead = fits and self.float8 is None  # its scale depends on the rows of the chunk
            self.places = ValidRows(is_valid, self.ahead)

    @functools.cached_property
    def index(self) -> Tensor | None:
        """Places of the valid rows; None where all are. The one read-back."""
        if self.places is None:
            return None
        index = self.places.get()
        return index if index.numel() < self.target.numel() else None

    @functools.cached_property
    def rows(self) -> int:
        """Number of rows that are processed."""
        return self.target.numel() if self.index is None else self.index.numel()

    @functools.cached_property
    def step(self) -> int:
        """Rows of a chunk."""
        return self._step_of(self.target.numel() if self.ahead else self.rows)

    def _step_of(self, rows: int) -> int:
        if self.one_chunk:
            return max(1, rows)
        limits = (self.chunk_spec.chunk, self.chunk_spec.budget)
        step = chunk_rows(rows, self.like, self.weight.shape[0], *limits, self.free)
        return divided(min(step, max(1, rows)))

    @functools.cached_property
    def buffer(self) -> Tensor:
        """The buffer for the logits of a chunk."""
        rows = self.step if self.ahead else min(self.step, self.rows)
        return self.like.new_empty(rows, self.weight.shape[0])

    def __iter__(self) -> Iterator[tuple[slice, Tensor | slice, Tensor, Tensor, Tensor]]:
        """Yield slices of valid rows and of all rows, hidden states, targets and raw logits."""
        first = self._first() if self.ahead else None
        for chunk_slice in visited.get()(row_blocks(self.rows, 1, self.step)):
            rows = chunk_slice.stop - chunk_slice.start
            gathered = None if first is None or chunk_slice.start else first[:rows]
            yield self.at(
                chunk_slice, self.buffer[:rows], self.ready or gathered is not None, gathered
            )

    def keeps(self) -> bool:
        """Whether a backward pass can find the logits again: one chunk, and rows in one order.

        A capture drops no rows, and the logits may be read outside of it.
        """
        return self.one_chunk and self.drops == (
            self.chunk_spec.compact and not has_few_rows(self.target)
        )

    def _first(self) -> Tensor:
        """Hidden states of the first chunk, whose logits are written into the buffer."""
        assert self.places is not None
        h = self.hidden[self.places.first(self.step)].to(self.dtype)
        linear_into(h, self.weight, self.bias, self.buffer)
        return h

    def at(
        self,
        chunk_slice: slice,
        raw: Tensor,
        has_logits: bool = False,
        hidden: Tensor | None = None,
    ) -> tuple[slice, Tensor | slice, Tensor, Tensor, Tensor]:
        """One chunk; its logits are written into ``raw`` unless they are there already.

        Its hidden states may be passed in as well.
        """
        rows_of_chunk = chunk_slice if self.index is None else self.index[chunk_slice]
        h = self.hidden[rows_of_chunk].to(self.dtype) if hidden is None else hidden
        if has_logits:
            pass
        elif self.float8 is not None:
            self.float8.logits(h, self.bias, raw)
        else:
            linear_into(h, self.weight, self.bias, raw)
        return chunk_slice, rows_of_chunk, h, self.target[rows_of_chunk], raw


class Collected:
    """Statistics of all rows, collected from chunks; a single chunk is used as it is."""

    def __init__(
        self, chunks: Chunks, objective: Objective, outputs: str, *, loss: bool = True
    ) -> None:
        self.chunks, self.options = chunks, (objective, outputs)
        self.loss = loss

    @functools.cached_property
    def rows(self) -> RowStats:
        """The statistics; uninitialized until all chunks are done."""
        count, tensor, ignored = self.chunks.target.numel(), self.chunks.like, self.chunks.drops
        return RowStats.empty(count, *self.options, tensor, ignored=ignored, loss=self.loss)

    def put(self, rows_of_chunk: Tensor | slice, stats: RowStats) -> None:
        """Store the statistics of one chunk."""
        if isinstance(rows_of_chunk, slice) and rows_of_chunk == slice(
            0, self.chunks.target.numel()
        ):
            self.rows = stats
        else:
            self.rows.put(rows_of_chunk, stats)


# --- gradients of a head ---


class Gradients(NamedTuple):
    """Gradients before scaling; empty if not needed."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor


class Accumulator:
    """Collect the gradients of hidden states, weight and bias over chunks."""

    def __init__(
        self,
        chunks: Chunks,
        hidden: Tensor,
        weight: Tensor,
        accumulate: torch.dtype,
        needs: tuple[bool, ...],
    ) -> None:
        self.chunks, self.needs = chunks, needs
        make = torch.zeros if chunks.drops else torch.empty  # dropped rows keep a zero gradient
        total = weight_gradient_dtype(chunks.dtype, weight.dtype, accumulate, chunks.one_chunk)
        self.sums = Gradients(
            make(hidden.shape if needs[0] else (0,), dtype=chunks.dtype, device=hidden.device),
            torch.empty(weight.shape if needs[1] else (0,), dtype=total, device=weight.device),
            torch.zeros(
                weight.shape[0] if needs[2] else 0,
                dtype=statistics_dtype(chunks.dtype),
                device=weight.device,
            ),
        )

    @property
    def gradients(self) -> Gradients:
        """The sums, after all chunks."""
        if not self.chunks.rows:
            self.sums.weight.zero_()
        return self.sums

    def add(
        self, chunk_slice: slice, rows_of_chunk: Tensor | slice, h: Tensor, graw: Tensor
    ) -> None:
        """Add one chunk, whose logits were overwritten by their gradient.

        Hidden states that were gathered are overwritten by theirs.
        """
        if self.needs[1]:
            add_product_(self.sums.weight, graw.t(), h, first=chunk_slice.start == 0)
        if self.needs[0] and isinstance(rows_of_chunk, slice):
            self._hidden(graw, self.sums.hidden[rows_of_chunk])
        elif self.needs[0] and isinstance(rows_of_chunk, Tensor):
            self.sums.hidden.index_copy_(0, rows_of_chunk, self._hidden(graw, h))
        if self.needs[2]:
            self.sums.bias.add_(graw.sum(0, dtype=self.sums.bias.dtype))

    def _hidden(self, graw: Tensor, out: Tensor) -> Tensor:
        if self.chunks.float8 is not None and self.chunks.float8.gradients:
            return self.chunks.float8.hidden_gradient(graw, out)
        return gradient_into(graw, self.chunks.weight, out)


def scale_to(
    gradient: Tensor,
    factor: Tensor | None,
    dtype: torch.dtype,
    denominators: Tensor | None = None,
    overwrite: bool = False,
) -> Tensor:
    """``gradient * factor / denominators[1]`` in fp32, rounded once to ``dtype``, in one pass.

    It is written over the gradient where ``overwrite`` allows that and dtypes agree. The factor has
    one axis, because a tensor without axes would be rounded to the gradient's dtype first.
    """
    if factor is None:
        return gradient.to(dtype)
    if not gradient.numel():
        return torch.empty_like(gradient, dtype=dtype)
    if denominators is not None:
        factor = divide(factor, denominators[1])
    out = (
        gradient
        if overwrite and gradient.dtype == dtype
        else torch.empty_like(gradient, dtype=dtype)
    )
    return torch.mul(gradient, factor.reshape(1), out=out)
