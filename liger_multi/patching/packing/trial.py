"""Whether a model keeps the samples of a packed row apart, found out by running it.

A row of two short samples goes through the model with the kinds of arguments that a call has, again
with other tokens in one of the samples, and each sample by itself. What comes out for a sample is
to be the same every time. So nothing needs to be known of a model: masks, caches, convolutions and
recurrences are all seen. The tokens are made up and the same on every device, so ranks that call a
sharded model together also try it together.

Routers may add noise in training. The same random numbers make the same noise for a row of the same
length, but not for a sample by itself, so that such a model is tried by rows alone. One that gives
something else whenever it runs, as a layer that counts its calls may, cannot be tried.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import random
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from liger_multi._torch_private import Dropouts
from liger_multi.errors import summary
from liger_multi.patching.evidence.probe import own_copies
from liger_multi.patching.evidence.reached import is_plain
from liger_multi.patching.packing.samples import is_numbered

Arguments: TypeAlias = dict[str, Any]
TOKENS = 64  # of a trial, where a model has as many positions
COARSE, FINE = 1e-2, 1e-4  # changes that rounding explains, in 16 bits and in more
ALONE = 10  # times as much, where GEMMs have other sizes
SHIFT = 7  # from one made-up token to another

# --- the row of a trial ---


@dataclass(frozen=True)
class Row:
    """Two samples in a row.

    Attributes:
        tokens: Of both.
        first: Of the first one.
        device: Where the model is called.
        vocabulary: Ids that stand for text.
    """

    tokens: int
    first: int
    device: torch.device
    vocabulary: tuple[int, ...]

    def ids(self, first: int = 0, second: int = 0) -> Tensor:
        """Made-up ids ``(1, tokens)``, moved on by a number in each of the samples."""
        many = len(self.vocabulary)
        moved = [first] * self.first + [second] * (self.tokens - self.first)
        token_ids = [self.vocabulary[(7 * i * i + 3 * i + by) % many] for i, by in enumerate(moved)]
        return torch.tensor([token_ids], device=self.device)

    def samples(self) -> Tensor:
        """The sample of every token, ``(1, tokens)``."""
        return (torch.arange(self.tokens, device=self.device) >= self.first).long()[None]

    def positions(self) -> Tensor:
        """Positions that begin again, ``(1, tokens)``."""
        place = torch.arange(self.tokens, device=self.device)
        return torch.where(place < self.first, place, place - self.first)[None]

    def ends(self) -> Tensor:
        """Where samples begin and end."""
        return torch.tensor([0, self.first, self.tokens], device=self.device, dtype=torch.int32)

    def mask(self, dtype: torch.dtype, causal: bool = True) -> Tensor:
        """A mask ``(1, 1, tokens, tokens)`` that hides the other sample, and what comes later."""
        samples = self.samples()
        visible = (samples[:, :, None] == samples[:, None])[:, None]
        visible = visible.tril() if causal else visible
        hidden = torch.full(visible.shape, torch.finfo(dtype).min, dtype=dtype, device=self.device)
        return hidden.masked_fill(visible, 0.0)


def row_of(model: Any, called_with: Mapping[str, Any], rows: Tensor) -> Row:
    """The row for a call with ``input_ids`` or ``inputs_embeds`` as ``rows``."""
    positions = getattr(text_config(model), "max_position_embeddings", None)
    tokens = min(TOKENS, positions) if isinstance(positions, int) and positions > 2 else TOKENS
    configs = [c for c in (getattr(model, "config", None), text_config(model)) if c is not None]
    special = {
        value
        for config in configs
        for name, value in vars(config).items()
        if isinstance(value, int) and name.endswith(("token_id", "token_index"))
    }
    most = _vocabulary(model, called_with)
    text = tuple(i for i in range(min(most, 512)) if i not in special) or (0,)
    first = tokens // 2 + tokens // 8 + 1  # 41 of 64: at no border that a model may have
    return Row(tokens, min(first, tokens - 1), rows.device, text)


def text_config(model: Any) -> Any:
    """The configuration of what reads text, or None."""
    get = getattr(getattr(model, "config", None), "get_text_config", None)
    return get() if callable(get) else None


def _vocabulary(model: Any, called_with: Mapping[str, Any]) -> int:
    with contextlib.suppress(AttributeError, NotImplementedError):
        return len(model.get_input_embeddings().weight)
    return (
        int(called_with["input_ids"].max()) + 1 if called_with.get("input_ids") is not None else 1
    )


# --- the arguments of a trial ---

TOKENS_OF = ("input_ids", "inputs_embeds")
DROPPED = ("labels", "shift_labels", "num_items_in_batch", "logits_to_keep", "loss_kwargs")


def arguments_of(called_with: Mapping[str, Any], row: Row, rows: Tensor) -> Arguments:
    """The arguments of a call, for the row: tensors anew, numbers and texts, and no objects.

    A cache, or whatever else a model may write to, belongs to the caller.
    """
    arguments: Arguments = {"return_dict": True}
    for name, value in called_with.items():
        if name in DROPPED or value is None:
            continue
        if name in _ANEW and isinstance(value, (Tensor, int)):
            arguments[name] = _ANEW[name](row, value)
        elif is_plain(value):
            arguments[name] = value
        elif isinstance(value, Tensor) and value.shape[:2] == rows.shape[:2]:
            arguments[name] = value.new_zeros(1, row.tokens, *value.shape[2:])
    return {name: value for name, value in arguments.items() if name not in TOKENS_OF}


def left_out(called_with: Mapping[str, Any]) -> list[str]:
    """Objects of a call that no trial touches, as nobody knows what a model would do to them."""
    return sorted(
        f"{name} ({type(value).__name__})"
        for name, value in called_with.items()
        if name not in DROPPED and not isinstance(value, Tensor) and not is_plain(value)
    )


def _positions(row: Row, value: Tensor) -> Tensor:
    positions = row.positions()
    return positions if value.ndim < 3 else positions.expand(value.shape[0], -1, -1)


def _mask(row: Row, value: Tensor) -> Tensor:
    ones = value.new_ones(1, row.tokens)
    return ones + row.samples().to(value.dtype) if is_numbered(value) else ones


_ANEW: dict[str, Callable[[Row, Any], Any]] = {
    "position_ids": _positions,
    "seq_idx": lambda row, value: row.samples().to(value.dtype),
    "cu_seq_lens_q": lambda row, value: row.ends().to(value.dtype),
    "cu_seq_lens_k": lambda row, value: row.ends().to(value.dtype),
    "max_length_q": lambda row, value: row.first,
    "max_length_k": lambda row, value: row.first,
    "attention_mask": _mask,
}

# --- what to pass instead ---


def _no_cache(arguments: Arguments, row: Row, dtype: torch.dtype) -> Arguments:
    return {**arguments, "use_cache": False}


def _no_mask(arguments: Arguments, row: Row, dtype: torch.dtype) -> Arguments:
    return {name: value for name, value in arguments.items() if name != "attention_mask"}


def _with_positions(arguments: Arguments, row: Row, dtype: torch.dtype) -> Arguments:
    return {**arguments, "position_ids": row.positions()}


def _four_rows(arguments: Arguments, row: Row, dtype: torch.dtype) -> Arguments:
    return {**arguments, "position_ids": row.positions().expand(4, -1, -1)}


def _lengths(arguments: Arguments, row: Row, dtype: torch.dtype) -> Arguments:
    ends = {"cu_seq_lens_q": row.ends(), "cu_seq_lens_k": row.ends()}
    most = {"max_length_q": row.first, "max_length_k": row.first}
    return {**arguments, **ends, **most, "seq_idx": row.samples().int()}


def _block_mask(arguments: Arguments, row: Row, dtype: torch.dtype) -> Arguments:
    return {**arguments, "attention_mask": row.mask(dtype)}


def _open_mask(arguments: Arguments, row: Row, dtype: torch.dtype) -> Arguments:
    return {**arguments, "attention_mask": row.mask(dtype, causal=False)}


Remedy: TypeAlias = tuple[str, Callable[[Arguments, Row, torch.dtype], Arguments]]
REMEDIES: tuple[Remedy, ...] = (
    ("use_cache=False", _no_cache),
    ("no attention_mask", _no_mask),
    ("position_ids of shape (B, T) that begin again with every sample", _with_positions),
    ("position_ids of shape (4, B, T), the positions of text first", _four_rows),
    ("cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k and seq_idx", _lengths),
    ("an attention_mask of shape (B, 1, T, T) that hides other samples", _block_mask),
    ("an attention_mask of shape (B, 1, T, T) that hides other samples", _open_mask),
)
"""What may keep samples apart where a call does not, the least trouble first."""


def _choices() -> Iterator[Sequence[Remedy]]:
    """One of them, then two, then three; a mask of one's own after all others."""
    *others, causal, free = REMEDIES
    for many in (1, 2, 3):
        yield from itertools.combinations(others, many)
    for mask in (causal, free):  # the second one is for encoders
        yield from ((mask,), (others[0], mask))


# --- a trial ---


@dataclass(frozen=True)
class Verdict:
    """What a trial found.

    Attributes:
        change: Of what comes out for a sample, relative to its size, where the other one's tokens
            are changed, or where it is by itself; 0 where rounding explains it.
        remedy: What was tried in place of the arguments and keeps samples apart; empty: nothing.
        untried: Why there was no trial; the others then say nothing.
    """

    change: float = 0.0
    remedy: tuple[str, ...] = ()
    untried: str = ""


def trial(
    model: nn.Module, forward: Callable[..., Any], called_with: Mapping[str, Any], rows: Tensor
) -> Verdict:
    """Try a model with the arguments of a call, and others if these do not keep samples apart.

    The model, its buffers and attributes, and the states of random numbers are afterwards what
    they were; hooks of users are not called.
    """
    row = row_of(model, called_with, rows)
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    arguments = arguments_of(called_with, row, rows)
    embeds = None
    if called_with.get("input_ids") is None:  # as many as needed, over and over
        embeds = rows[:1].detach()[:, torch.arange(row.tokens, device=rows.device) % rows.shape[1]]
    with undisturbed(model), short_chunks(model):
        tried = Trial(forward, row, embeds, is_coarse(model, rows.device))
        try:
            change = tried.change(arguments)
            if change and tried.varies(arguments, seed=0):
                return Verdict(untried="its output is another one in a second run of equal tokens")
            if change and tried.varies(arguments, seed=1):
                tried = replace(tried, noisy=True)
                change = tried.change(arguments)
        except Exception as error:  # of any model's code, which meets inputs of ours
            return Verdict(untried=summary(error))
        if not change:
            return Verdict()
        if objects := left_out(called_with):
            return Verdict(untried=f"a trial hands over no objects, got {', '.join(objects)}")
        for chosen in _choices():
            other = arguments
            for _, remedy in chosen:
                other = remedy(other, row, dtype)
            with contextlib.suppress(Exception):
                if not tried.change(other):
                    return Verdict(change, tuple(text for text, _ in chosen))
    return Verdict(change)


def checkpoints(model: nn.Module) -> bool:
    """Whether layers of a model are computed again for backward, which turns its cache off."""
    return any(getattr(m, "gradient_checkpointing", False) for m in model.modules())


def is_coarse(model: nn.Module, device: torch.device) -> bool:
    """Whether anything is computed in 16 bits or fewer, or by GEMMs that round to so many."""
    small = any(p.dtype.itemsize < 4 for p in model.parameters())
    rounded = device.type != "cpu" and torch.get_float32_matmul_precision() != "highest"
    return small or rounded or torch.is_autocast_enabled(device.type)


@dataclass(frozen=True)
class Trial:
    """Runs of a row.

    Attributes:
        forward: Of the model.
        row: Two samples.
        embeds: What stands in place of ids, ``(1, tokens, ...)``, if anything.
        coarse: Whether rounding may choose other experts for a few tokens.
        noisy: Whether random numbers are part of what comes out.
    """

    forward: Callable[..., Any]
    row: Row
    embeds: Tensor | None
    coarse: bool
    noisy: bool = False

    def change(self, arguments: Arguments) -> float:
        """How much a sample differs with its surroundings, relative to its size; 0: by rounding."""
        plain = self._run(arguments)
        parts = (slice(None, self.row.first), slice(self.row.first, None))
        limit, change = COARSE if self.coarse else FINE, 0.0
        for mine, theirs, moved in zip(parts, parts[::-1], ((0, SHIFT), (SHIFT, 0)), strict=True):
            other = self._run(arguments, *moved)
            changes = relative(plain[mine], other[mine])
            change = max(change, above(float(changes.max()), limit))
            for of_both, part, by in (
                () if self.noisy else ((plain, mine, 0), (other, theirs, SHIFT))
            ):
                changes = relative(of_both[part], self._alone(arguments, part, by))
                change = max(change, above(self._most(changes), ALONE * limit))
        return change

    def varies(self, arguments: Arguments, seed: int) -> bool:
        """Whether a second run of the same tokens gives something else, with random numbers so."""
        changes = relative(self._run(arguments), self._run(arguments, seed=seed))
        return above(self._most(changes), COARSE if self.coarse else FINE) > 0

    def _most(self, changes: Tensor) -> float:
        return float(changes.median() if self.coarse else changes.max())

    def _run(
        self, arguments: Arguments, first: int = 0, second: int = 0, *, seed: int = 0
    ) -> Tensor:
        """What comes out for every token, with the tokens of a sample moved on."""
        torch.manual_seed(seed)
        return per_token(self.forward(**self._rows(first, second), **arguments), self.row.tokens)

    def _alone(self, arguments: Arguments, part: slice, by: int) -> Tensor:
        """The same for the tokens of one sample, which nothing stands beside."""
        unchanged = {n: v for n, v in arguments.items() if n not in _ANEW} | self._rows(by, by)
        kwargs = {
            n: v[:, part] if isinstance(v, Tensor) and v.shape[:2] == (1, self.row.tokens) else v
            for n, v in unchanged.items()
        }
        kwargs["use_cache"] = False  # and the positions that the model makes itself
        torch.manual_seed(0)
        tokens = self.row.first if part.start is None else self.row.tokens - self.row.first
        return per_token(self.forward(**kwargs), tokens)

    def _rows(self, first: int, second: int) -> Arguments:
        if self.embeds is None:
            return {"input_ids": self.row.ids(first, second)}
        moved = torch.where(self.row.samples().bool()[..., None], second > 0, first > 0)
        return {"inputs_embeds": torch.where(moved, -self.embeds.flip(1), self.embeds)}


def above(change: float, limit: float) -> float:
    """A change that rounding does not explain, or 0.

    Raises:
        ValueError: It is not finite.
    """
    if not 0 <= change < float("inf"):
        raise ValueError("what comes out is not finite")
    return change if change > limit else 0.0


def per_token(output: Any, tokens: int) -> Tensor:
    """What a model gives for every token of a row: logits, or hidden states.

    Raises:
        ValueError: It gives neither.
    """
    for name in ("logits", "last_hidden_state"):
        tensor = getattr(output, name, None)
        if isinstance(tensor, Tensor) and tensor.shape[:2] == (1, tokens):
            return tensor[0].detach().float().clone()
    raise ValueError("the model gives neither logits nor hidden states of every token")


def relative(plain: Tensor, other: Tensor) -> Tensor:
    """Changes of tokens, relative to the size of their numbers."""
    size = plain.norm(dim=-1).clamp_min(1e-30)
    return (other - plain).norm(dim=-1) / size  # type: ignore[no-any-return]


# --- a model that is left as it was ---

LIBRARIES = ("torch", "accelerate", "deepspeed", "peft", "transformers", "liger_multi")
"""Packages whose hooks are part of how a model runs."""
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")


_CHUNK, SHORT = "attention_chunk_size", 8


@contextlib.contextmanager
def short_chunks(model: nn.Module) -> Iterator[None]:
    """Chunks of attention that the tokens of a trial fill, in copies of the configurations.

    transformers 5.0 counts them from the beginning of the row, so that they end within a sample
    where they would not if it were by itself.
    """
    configs = (getattr(model, "config", None), text_config(model))
    chunked = {id(c): c for c in configs if isinstance(getattr(c, _CHUNK, None), int)}
    if not chunked:
        yield
        return
    memo: dict[int, Any] = {}
    tables = [vars(module) for module in model.modules()]
    before = [(table, table["config"]) for table in tables if table.get("config") is not None]
    try:
        with contextlib.suppress(Exception):  # of configurations that nobody can copy
            for table, config in before:
                table["config"] = copy.deepcopy(config, memo)
            for config in chunked.values():
                own = copy.deepcopy(config, memo)  # what the modules have, if one of them has it
                vars(own)[_CHUNK] = min(getattr(config, _CHUNK), SHORT)
        yield
    finally:
        for table, config in before:
            table["config"] = config


@contextlib.contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """No dropout, warnings or hooks of users within; all is as it was afterwards.

    There are gradients where layers are checkpointed: since transformers 5.24, these run without a
    cache only if there are.
    """
    grad = torch.is_grad_enabled() and checkpoints(model)
    token = _trying.set(True)
    try:
        with (
            torch.set_grad_enabled(grad),
            _state_of_process,
            _no_cached_casts(),
            _attributes(model),
        ):
            yield
    finally:
        _trying.reset(token)


_trying: ContextVar[bool] = ContextVar("liger_multi_trying", default=False)


def trying() -> bool:
    """Whether a model runs with made-up tokens, of which nobody is to keep anything."""
    return _trying.get()


class _StateOfProcess:
    """State that threads share: the first trial that runs sets it, the last one puts it back."""

    def __init__(self) -> None:
        self.lock, self.trials, self.kept = threading.Lock(), 0, contextlib.ExitStack()

    def __enter__(self) -> None:
        with self.lock:
            if not self.trials:
                with contextlib.ExitStack() as stack:
                    stack.enter_context(warnings.catch_warnings())
                    warnings.simplefilter("ignore")
                    stack.enter_context(_random_numbers())
                    # other lengths would count as recompilations of parts that are compiled
                    stack.enter_context(torch.compiler.set_stance("force_eager"))
                    self.kept = stack.pop_all()
            self.trials += 1

    def __exit__(self, *raised: object) -> None:
        with self.lock:
            self.trials -= 1
            if not self.trials:
                self.kept.close()


_state_of_process = _StateOfProcess()


@contextlib.contextmanager
def _random_numbers() -> Iterator[None]:
    accelerator = getattr(torch.accelerator, "current_accelerator", lambda: None)()
    numpy = sys.modules.get("numpy")
    states = random.getstate(), numpy.random.get_state() if numpy else None
    forked = contextlib.ExitStack()
    if accelerator is None:
        forked.enter_context(torch.random.fork_rng(devices=[]))
    else:
        count = torch.accelerator.device_count()
        forked.enter_context(
            torch.random.fork_rng(devices=range(count), device_type=accelerator.type)
        )
    with forked:
        try:
            yield
        finally:
            random.setstate(states[0])
            if numpy:
                numpy.random.set_state(states[1])


@contextlib.contextmanager
def _no_cached_casts() -> Iterator[None]:
    """Autocast keeps casts of weights, and those made without gradients would serve with them."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


@contextlib.contextmanager
def _attributes(model: nn.Module) -> Iterator[None]:
    """Buffers and attributes of all modules come back; hooks of users are set aside.

    What the model would write to within is a copy: lists, caches and tensors among attributes.
    """
    modules = list(model.modules())
    buffers = [(b, b.clone()) for b in model.buffers() if b.device.type != "meta"]
    tables = [(t, dict(t)) for m in modules for t in (vars(m), vars(m)["_buffers"])]
    hooks = [(vars(m), {k: vars(m)[k] for k in _HOOKS}) for m in modules]
    for table, tables_by_name in hooks:
        for hook_table, every in tables_by_name.items():
            table[hook_table] = type(every)((k, h) for k, h in every.items() if _of_library(h))
    for module in modules:
        vars(module).update(dict.fromkeys(_dropout_rates(module), 0.0))
    memo: dict[int, Any] = {}
    for module in modules:
        vars(module).update(own_copies(vars(module), memo))
    try:
        yield
    finally:
        for table, before in tables:
            for name in table.keys() - before.keys():
                del table[name]
            table.update(before)
        for buffer, before_it in buffers:
            if not torch.equal(buffer, before_it):
                buffer.copy_(before_it)


def _dropout_rates(module: nn.Module) -> list[str]:
    """Attributes of a module that are rates of dropout, which would differ between runs."""
    rates = [n for n, v in vars(module).items() if "drop" in n and isinstance(v, float)]
    return [*rates, "p"] if isinstance(module, Dropouts) else rates


def _of_library(hook: Any) -> bool:
    hook = getattr(hook, "func", hook)  # of a partial
    return str(getattr(hook, "__module__", "")).partition(".")[0] in LIBRARIES
