"""Test whether a model keeps the samples of a packed row apart, by running it.

:func:`trial` takes a model and the arguments of a call, and returns a :class:`Verdict`. It runs the
model on a row of two short samples, with arguments of the same form. It runs again with other
tokens in one sample, and with each sample alone. The outputs of a sample must be the same each
time. So a trial covers masks, caches, convolutions and recurrences without knowing the model.

Token ids are synthetic and equal on every device. So all ranks of a sharded model run the same
trial.

Routers may add noise in training. Equal seeds give equal noise for rows of one length only, so
such a model is not compared with single samples. A model whose output changes from run to run, such
as one with a layer that counts its calls, cannot be tried.
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
from liger_multi.patching.evidence.signature import is_infrastructure
from liger_multi.patching.packing.samples import is_numbered

Arguments: TypeAlias = dict[str, Any]
TOKENS = 64  # of a trial, where a model has as many positions
COARSE, FINE = 1e-2, 1e-4  # largest relative rounding errors, in 16 bits and in fp32
ALONE = 10  # factor on these between a row and a single sample, whose GEMMs have other sizes
SHIFT = 7  # from a token id to another one

# --- the row of a trial ---


@dataclass(frozen=True)
class Row:
    """Two samples in a row.

    Attributes:
        tokens: Length of the row.
        first: Length of the first sample.
        device: Device of the model's inputs.
        vocabulary: Token ids without special ones.
    """

    tokens: int
    first: int
    device: torch.device
    vocabulary: tuple[int, ...]

    def ids(self, first: int = 0, second: int = 0) -> Tensor:
        """Synthetic ids ``(1, tokens)``, with an offset for each of the samples."""
        offsets = [first] * self.first + [second] * (self.tokens - self.first)
        values = [7 * i * i + 3 * i + offset for i, offset in enumerate(offsets)]
        token_ids = [self.vocabulary[value % len(self.vocabulary)] for value in values]
        return torch.tensor([token_ids], device=self.device)

    def samples(self) -> Tensor:
        """The number of every token's sample, ``(1, tokens)``."""
        return (torch.arange(self.tokens, device=self.device) >= self.first).long()[None]

    def positions(self) -> Tensor:
        """Positions that restart with each sample, ``(1, tokens)``."""
        token = torch.arange(self.tokens, device=self.device)
        return torch.where(token < self.first, token, token - self.first)[None]

    def ends(self) -> Tensor:
        """Cumulative lengths of the samples, from 0."""
        return torch.tensor([0, self.first, self.tokens], device=self.device, dtype=torch.int32)

    def mask(self, dtype: torch.dtype, causal: bool = True) -> Tensor:
        """A mask ``(1, 1, tokens, tokens)`` that hides the other sample, and later tokens."""
        samples = self.samples()
        visible = (samples[:, :, None] == samples[:, None])[:, None]
        visible = visible.tril() if causal else visible
        hidden = torch.full(visible.shape, torch.finfo(dtype).min, dtype=dtype, device=self.device)
        return hidden.masked_fill(visible, 0.0)


def row_of(model: Any, called_with: Mapping[str, Any], rows: Tensor) -> Row:
    """The row of a trial, for a call with ``rows`` as ``input_ids`` or ``inputs_embeds``."""
    positions = getattr(text_config(model), "max_position_embeddings", None)
    tokens = min(TOKENS, positions) if isinstance(positions, int) and positions > 2 else TOKENS
    configs = [c for c in (getattr(model, "config", None), text_config(model)) if c is not None]
    special = {
        value
        for config in configs
        for name, value in vars(config).items()
        if isinstance(value, int) and name.endswith(("token_id", "token_index"))
    }
    ids_allowed = _vocabulary(model, called_with)
    text = tuple(i for i in range(min(ids_allowed, 512)) if i not in special) or (0,)
    first = tokens // 2 + tokens // 8 + 1  # 41 of 64: no multiple of a block of a model
    return Row(tokens, min(first, tokens - 1), rows.device, text)


def text_config(model: Any) -> Any:
    """The configuration of a model's text part, or None."""
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
    """The arguments of a call in the form of the row: new tensors, and numbers and strings.

    Objects are left out: a cache, for example, belongs to the caller, and the model writes to it.
    """
    arguments: Arguments = {"return_dict": True}
    for name, value in called_with.items():
        if name in DROPPED or value is None:
            continue
        if name in _NEW and isinstance(value, (Tensor, int)):
            arguments[name] = _NEW[name](row, value)
        elif is_plain(value):
            arguments[name] = value
        elif isinstance(value, Tensor) and value.shape[:2] == rows.shape[:2]:
            arguments[name] = value.new_zeros(1, row.tokens, *value.shape[2:])
    return {name: value for name, value in arguments.items() if name not in TOKENS_OF}


def left_out(called_with: Mapping[str, Any]) -> list[str]:
    """Objects among the arguments, which a trial does not pass since a model may change them."""
    return sorted(
        f"{name} ({type(value).__name__})"
        for name, value in called_with.items()
        if name not in DROPPED and not isinstance(value, Tensor) and not is_plain(value)
    )


def _positions(row: Row, value: Tensor) -> Tensor:
    positions = row.positions()
    return positions if value.ndim < 3 else positions.expand(value.shape[0], -1, -1)


def _mask(row: Row, value: Tensor) -> Tensor:
    unmasked = value.new_ones(1, row.tokens)
    return unmasked + row.samples().to(value.dtype) if is_numbered(value) else unmasked


_NEW: dict[str, Callable[[Row, Any], Any]] = {
    "position_ids": _positions,
    "seq_idx": lambda row, value: row.samples().to(value.dtype),
    "cu_seq_lens_q": lambda row, value: row.ends().to(value.dtype),
    "cu_seq_lens_k": lambda row, value: row.ends().to(value.dtype),
    "max_length_q": lambda row, value: row.first,
    "max_length_k": lambda row, value: row.first,
    "attention_mask": _mask,
}

# --- arguments that may keep samples apart ---

Remedy: TypeAlias = tuple[str, Callable[[Row, torch.dtype], Arguments]]
REMEDIES: tuple[Remedy, ...] = (
    ("use_cache=False", lambda row, dtype: {"use_cache": False}),
    ("no attention_mask", lambda row, dtype: {"attention_mask": None}),
    (
        "position_ids of shape (B, T) that begin again with every sample",
        lambda row, dtype: {"position_ids": row.positions()},
    ),
    (
        "position_ids of shape (4, B, T), the positions of text first",
        lambda row, dtype: {"position_ids": row.positions().expand(4, -1, -1)},
    ),
    (
        "cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k and seq_idx",
        lambda row, dtype: {
            **dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), row.ends()),
            **dict.fromkeys(("max_length_q", "max_length_k"), row.first),
            "seq_idx": row.samples().int(),
        },
    ),
    (
        "an attention_mask of shape (B, 1, T, T) that hides other samples",
        lambda row, dtype: {"attention_mask": row.mask(dtype)},
    ),
    (
        "an attention_mask of shape (B, 1, T, T) that hides other samples",  # for encoders
        lambda row, dtype: {"attention_mask": row.mask(dtype, causal=False)},
    ),
)
"""Arguments by their description, the simplest first; None leaves an argument out."""


def _choices() -> Iterator[Sequence[Remedy]]:
    """One remedy, then two, then three; masks of queries and keys come last."""
    *simple_remedies, causal, bidirectional = REMEDIES
    for count in (1, 2, 3):
        yield from itertools.combinations(simple_remedies, count)
    for mask in (causal, bidirectional):
        yield from ((mask,), (simple_remedies[0], mask))


# --- a trial ---


@dataclass(frozen=True)
class Verdict:
    """The result of a trial.

    Attributes:
        change: Largest relative change of a sample's outputs, with other tokens in the other sample
            or without that sample; 0 if rounding explains it.
        remedy: Arguments that were tried and keep samples apart; empty if there are none.
        untried: Why there was no trial; the other values then mean nothing.
    """

    change: float = 0.0
    remedy: tuple[str, ...] = ()
    untried: str = ""


def trial(
    model: nn.Module, forward: Callable[..., Any], called_with: Mapping[str, Any], rows: Tensor
) -> Verdict:
    """Try a model with the arguments of a call, and with others if these mix samples.

    The model, its buffers and attributes, and the states of generators are restored. Hooks of users
    are not called.
    """
    row = row_of(model, called_with, rows)
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    arguments = arguments_of(called_with, row, rows)
    embeds = None
    if called_with.get("input_ids") is None:  # as many as needed, over and over
        embeds = rows[:1].detach()[:, torch.arange(row.tokens, device=rows.device) % rows.shape[1]]
    with undisturbed(model), short_chunks(model):
        trial_run = Trial(forward, row, embeds, is_coarse(model, rows.device))
        try:
            change = trial_run.change(arguments)
            if change and trial_run.varies(arguments, seed=0):
                return Verdict(untried="its output is another one in a second run of equal tokens")
            if change and trial_run.varies(arguments, seed=1):
                trial_run = replace(trial_run, noisy=True)
                change = trial_run.change(arguments)
        except Exception as error:  # of any model's code, which meets inputs of ours
            return Verdict(untried=summary(error))
        if not change:
            return Verdict()
        if objects := left_out(called_with):
            return Verdict(untried=f"a trial hands over no objects, got {', '.join(objects)}")
        for chosen in _choices():
            remedied = dict(arguments)
            for _, remedy in chosen:
                remedied |= remedy(row, dtype)
            remedied = {name: value for name, value in remedied.items() if value is not None}
            with contextlib.suppress(Exception):
                if not trial_run.change(remedied):
                    return Verdict(change, tuple(text for text, _ in chosen))
    return Verdict(change)


def checkpoints(model: nn.Module) -> bool:
    """Whether a model uses activation checkpointing, which disables its cache."""
    return any(getattr(m, "gradient_checkpointing", False) for m in model.modules())


def is_coarse(model: nn.Module, device: torch.device) -> bool:
    """Whether something is computed in 16 bits or fewer, or by GEMMs with such inputs."""
    small = any(p.dtype.itemsize < 4 for p in model.parameters())
    rounded = device.type != "cpu" and torch.get_float32_matmul_precision() != "highest"
    return small or rounded or torch.is_autocast_enabled(device.type)


@dataclass(frozen=True)
class Trial:
    """Runs of a row.

    Attributes:
        forward: The forward of the model.
        row: The row.
        embeds: Embeddings in place of ids, ``(1, tokens, ...)``; None if there are ids.
        coarse: Whether rounding may select other experts for a few tokens.
        noisy: Whether outputs depend on random numbers.
    """

    forward: Callable[..., Any]
    row: Row
    embeds: Tensor | None
    coarse: bool
    noisy: bool = False

    def change(self, arguments: Arguments) -> float:
        """The largest relative change of a sample with its surroundings; 0 if that is rounding."""
        plain = self._run(arguments)
        parts = (slice(None, self.row.first), slice(self.row.first, None))
        limit, change = COARSE if self.coarse else FINE, 0.0
        for part_kept, other_part, offsets in zip(
            parts, parts[::-1], ((0, SHIFT), (SHIFT, 0)), strict=True
        ):
            changed = self._run(arguments, *offsets)
            changes = relative(plain[part_kept], changed[part_kept])
            change = max(change, excess(float(changes.max()), limit))
            for of_both, part, offset in (
                () if self.noisy else ((plain, part_kept, 0), (changed, other_part, SHIFT))
            ):
                changes = relative(of_both[part], self._run_alone(arguments, part, offset))
                change = max(change, excess(self._largest_change(changes), ALONE * limit))
        return change

    def varies(self, arguments: Arguments, seed: int) -> bool:
        """Whether a second run of the same tokens, with this seed, has other outputs."""
        changes = relative(self._run(arguments), self._run(arguments, seed=seed))
        return excess(self._largest_change(changes), COARSE if self.coarse else FINE) > 0

    def _largest_change(self, changes: Tensor) -> float:
        return float(changes.median() if self.coarse else changes.max())

    def _run(
        self, arguments: Arguments, first: int = 0, second: int = 0, *, seed: int = 0
    ) -> Tensor:
        """The outputs of every token, with an offset of the tokens of each sample."""
        torch.manual_seed(seed)
        return per_token(self.forward(**self._rows(first, second), **arguments), self.row.tokens)

    def _run_alone(self, arguments: Arguments, part: slice, offset: int) -> Tensor:
        """The same for one sample without the other."""
        unchanged = {n: v for n, v in arguments.items() if n not in _NEW} | self._rows(
            offset, offset
        )
        kwargs = {
            n: v[:, part] if isinstance(v, Tensor) and v.shape[:2] == (1, self.row.tokens) else v
            for n, v in unchanged.items()
        }
        kwargs["use_cache"] = False  # positions are the model's own
        torch.manual_seed(0)
        tokens = self.row.first if part.start is None else self.row.tokens - self.row.first
        return per_token(self.forward(**kwargs), tokens)

    def _rows(self, first: int, second: int) -> Arguments:
        if self.embeds is None:
            return {"input_ids": self.row.ids(first, second)}
        is_moved = torch.where(self.row.samples().bool()[..., None], second > 0, first > 0)
        return {"inputs_embeds": torch.where(is_moved, -self.embeds.flip(1), self.embeds)}


def excess(change: float, limit: float) -> float:
    """``change`` if it is larger than rounding errors, else 0.

    Raises:
        ValueError: It is not finite.
    """
    if not 0 <= change < float("inf"):
        raise ValueError("what comes out is not finite")
    return change if change > limit else 0.0


def per_token(output: Any, tokens: int) -> Tensor:
    """Logits, or hidden states, of every token of a row.

    Raises:
        ValueError: The output has neither.
    """
    for name in ("logits", "last_hidden_state"):
        tensor = getattr(output, name, None)
        if isinstance(tensor, Tensor) and tensor.shape[:2] == (1, tokens):
            return tensor[0].detach().float().clone()
    raise ValueError("the model gives neither logits nor hidden states of every token")


def relative(plain: Tensor, changed: Tensor) -> Tensor:
    """The change of every token's outputs, relative to their norm."""
    size = plain.norm(dim=-1).clamp_min(1e-30)
    return (changed - plain).norm(dim=-1) / size  # type: ignore[no-any-return]


# --- restoring a model ---

LIBRARIES = ("torch.", "accelerate.", "deepspeed.", "peft.", "transformers.", "liger_multi.")
"""Packages whose hooks stay in place; hooks of users are removed during a trial."""
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")


_CHUNK, SHORT = "attention_chunk_size", 8


@contextlib.contextmanager
def short_chunks(model: nn.Module) -> Iterator[None]:
    """Copies of the configurations with chunks of attention that are shorter than a sample.

    transformers 5.0 counts chunks from the start of the row, which mixes packed samples.
    """
    configs = (getattr(model, "config", None), text_config(model))
    chunked = {id(c): c for c in configs if isinstance(getattr(c, _CHUNK, None), int)}
    if not chunked:
        yield
        return
    memo: dict[int, Any] = {}
    tables = [vars(module) for module in model.modules()]
    chunked_tables = [
        (table, table["config"]) for table in tables if table.get("config") is not None
    ]
    try:
        with contextlib.suppress(Exception):  # configurations that cannot be copied
            for table, config in chunked_tables:
                table["config"] = copy.deepcopy(config, memo)
            for config in chunked.values():
                config_copy = copy.deepcopy(
                    config, memo
                )  # the copy that modules have, if any has it
                vars(config_copy)[_CHUNK] = min(getattr(config, _CHUNK), SHORT)
        yield
    finally:
        for table, config in chunked_tables:
            table["config"] = config


@contextlib.contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Disable dropout, warnings and hooks of users within a block; then restore the model.

    Gradients are on if layers are checkpointed: since transformers 5.24, these run without a cache
    only then.
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
    """Whether a trial is running, whose outputs must not be recorded or cached."""
    return _trying.get()


class _StateOfProcess:
    """Settings of the process: the first running trial sets them, the last one restores them."""

    def __init__(self) -> None:
        self.lock, self.trials, self.kept = threading.Lock(), 0, contextlib.ExitStack()

    def __enter__(self) -> None:
        with self.lock:
            if not self.trials:
                with contextlib.ExitStack() as stack:
                    stack.enter_context(warnings.catch_warnings())
                    warnings.simplefilter("ignore")
                    stack.enter_context(_random_numbers())
                    # rows of other lengths would recompile compiled parts
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
    """Disable autocast's cache of weights: casts from a trial have no gradients."""
    was_enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(was_enabled)


@contextlib.contextmanager
def _attributes(model: nn.Module) -> Iterator[None]:
    """Restore buffers and attributes of all modules after a block, in which users' hooks are off.

    Lists, caches and tensors among the attributes are copies within the block.
    """
    modules = list(model.modules())
    buffers = [(b, b.clone()) for b in model.buffers() if b.device.type != "meta"]
    tables = [(t, dict(t)) for m in modules for t in (vars(m), vars(m)["_buffers"])]
    hooks = [(vars(m), {k: vars(m)[k] for k in _HOOKS}) for m in modules]
    for table, tables_by_name in hooks:
        for hook_table, old_hooks in tables_by_name.items():
            table[hook_table] = type(old_hooks)(
                (k, h) for k, h in old_hooks.items() if is_infrastructure(h, LIBRARIES)
            )
    for module in modules:
        vars(module).update(dict.fromkeys(_dropout_rates(module), 0.0))
    memo: dict[int, Any] = {}
    for module in modules:
        vars(module).update(own_copies(vars(module), memo))
    try:
        yield
    finally:
        for table, saved in tables:
            for name in table.keys() - saved.keys():
                del table[name]
            table.update(saved)
        for buffer, before_it in buffers:
            if not torch.equal(buffer, before_it):
                buffer.copy_(before_it)


def _dropout_rates(module: nn.Module) -> list[str]:
    """Attributes of a module that are dropout rates."""
    rates = [n for n, v in vars(module).items() if "drop" in n and isinstance(v, float)]
    return [*rates, "p"] if isinstance(module, Dropouts) else rates
