"""One of the two configurations, and a training step under it that restores the model."""

from __future__ import annotations

import contextlib
import inspect
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from liger_multi._torch_private import lookup_backend
from liger_multi.dispatch import config as configuration
from liger_multi.dispatch.config import Configuration, current, parse, use
from liger_multi.dispatch.registry import operators
from liger_multi.errors import ConfigurationError, shown, unknown
from liger_multi.patcher import patcher
from liger_multi.testing.bisection import recorder as recording
from liger_multi.testing.bisection.recorder import Key, Recorder, computed, path_of, tensors_in

# --- what a configuration says ---

SCOPED = ("default", "deterministic")
PROCESS = ("chunk_bytes", "head_gemms")
RUN = ("split", "compile", "checkpoint", "patch", "seed")
IGNORED = -100  # the label that losses skip


@dataclass(frozen=True)
class Side:
    """One configuration.

    Attributes:
        name: ``a`` or ``b``.
        config: The configuration as the caller wrote it.
        choices: Arguments of :func:`liger_multi.use`.
        process: Arguments of :func:`liger_multi.configure`.
        split: Rows of the batch per run; 0 for all in one.
        compile: The backend of ``torch.compile``, or nothing.
        checkpoint: Whether layers are run again in backward.
        patch: Whether the model is patched for the run.
        seed: Seed of the run.
    """

    name: str
    config: Mapping[str, Any] = field(default_factory=dict)
    choices: Mapping[str, Any] = field(default_factory=dict)
    process: Mapping[str, Any] = field(default_factory=dict)
    split: int = 0
    compile: str = ""
    checkpoint: bool = False
    patch: bool = False
    seed: int = 0

    def __str__(self) -> str:
        text = ", ".join(f"{name}={value}" for name, value in self.config.items())
        return text or "no settings"


def side_of(name: str, config: Mapping[str, Any]) -> Side:
    """Check a configuration.

    Raises:
        ConfigurationError: An unknown key, operator or backend, or a value of the wrong form.
    """
    if not isinstance(config, Mapping):
        raise ConfigurationError(
            f"configuration {name} must be a mapping such as {{'rms_norm': 'reference'}}, "
            f"got {shown(config)}"
        )
    allowed = (*SCOPED, *PROCESS, *RUN, *operators())
    for key in config:
        if key not in allowed and not (isinstance(key, str) and set(key) & set("*?[")):
            hint = "liger-multi explain lists operators"
            noun = f"key of configuration {name}"
            raise ConfigurationError(f"{unknown(noun, key, allowed)} ({hint})")
    choices = {k: v for k, v in config.items() if k not in (*PROCESS, *RUN)}
    process = {k: v for k, v in config.items() if k in PROCESS}
    ops = {k: v for k, v in choices.items() if k not in SCOPED}
    parse(
        {**{k: config[k] for k in SCOPED if k in config}, **process, "ops": ops},
        f"configuration {name}",
    )
    compiler = config.get("compile", False)
    if not isinstance(compiler, bool | str):
        raise _invalid(name, "compile", "true, false or a backend of torch.compile", compiler)
    return Side(
        name,
        dict(config),
        choices,
        process,
        split=_integer(name, config, "split", 1) if "split" in config else 0,
        compile="inductor" if compiler is True else compiler or "",
        checkpoint=_flag(name, config, "checkpoint"),
        patch=_flag(name, config, "patch"),
        seed=_integer(name, config, "seed", 0) if "seed" in config else 0,
    )


def _invalid(side: str, key: str, expected: str, value: object) -> ConfigurationError:
    return ConfigurationError(
        f"{key} of configuration {side} must be {expected}, got {shown(value)}"
    )


def _integer(side: str, config: Mapping[str, Any], key: str, smallest: int) -> int:
    value = config[key]
    if isinstance(value, bool) or not isinstance(value, int) or value < smallest:
        raise _invalid(side, key, f"an integer of at least {smallest}", value)
    return value


def _flag(side: str, config: Mapping[str, Any], key: str) -> bool:
    value = config.get(key, False)
    if not isinstance(value, bool):
        raise _invalid(side, key, "true or false", value)
    return value


# --- the batch ---


@dataclass(frozen=True)
class Batch:
    """The arguments that a model is called with: positional and keyword."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def rows(self) -> int:
        """Number of sequences: the length of the first tensor's first axis."""
        tensors = tensors_in([*self.args, dict(self.kwargs)])
        return next((t.shape[0] for t in tensors.values() if t.ndim), 1)

    def piece(self, start: int, stop: int) -> Batch:
        """Some of the sequences, as leaves of a graph of their own."""
        rows = self.rows

        def cut(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            part = value.detach()
            if value.ndim and value.shape[0] == rows and stop - start < rows:
                part = part[start:stop].clone()
            return part.requires_grad_(value.requires_grad) if value.requires_grad else part

        kwargs = {name: cut(value) for name, value in self.kwargs.items()}
        return Batch(tuple(map(cut, self.args)), kwargs)

    def counted(self) -> int:
        """Number of labels that count in the loss, or of sequences where there are none."""
        labels = self.kwargs.get("labels")
        if not isinstance(labels, Tensor):
            return self.rows
        return int((labels != IGNORED).sum())


def batch_of(value: Any) -> Batch:
    """The batch from a mapping (keyword arguments), a tuple (positional ones) or one tensor.

    Raises:
        ConfigurationError: It holds no tensor.
    """
    if isinstance(value, Mapping):
        batch = Batch((), {str(k): v for k, v in value.items()})
    else:
        batch = Batch(tuple(value) if isinstance(value, list | tuple) else (value,), {})
    if not tensors_in([*batch.args, dict(batch.kwargs)]):
        raise ConfigurationError(
            f"batch must be a tensor, or a tuple or mapping with tensors, got {shown(value)}"
        )
    return batch


# --- a run that leaves no trace ---


@contextlib.contextmanager
def undisturbed(model: nn.Module, seed: int) -> Iterator[None]:
    """Restore gradients, buffers and random states at the end of the block."""
    grads = [(p, p.grad) for p in model.parameters()]
    buffers_before = [(m, dict(m._buffers)) for m in model.modules()]
    copies = [(b, b.detach().clone()) for b in model.buffers()]
    devices = {t.device for t in (*model.parameters(), *model.buffers())}
    accelerators = {d.type for d in devices if d.type not in ("cpu", "meta")}
    state = random.getstate()
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        for device_type in accelerators:
            device_indices = list(range(torch.get_device_module(device_type).device_count()))
            stack.enter_context(
                torch.random.fork_rng(devices=device_indices, device_type=device_type)
            )
        try:
            for p, _ in grads:
                p.grad = None
            torch.default_generator.manual_seed(seed)
            for device_type in accelerators:
                torch.get_device_module(device_type).manual_seed_all(seed)
            random.seed(seed)
            yield
        finally:
            random.setstate(state)
            for p, grad in grads:
                p.grad = grad
            for m, buffers in buffers_before:
                m._buffers.update(buffers)
            with torch.no_grad():
                for b, copy in copies:  # equal ones are not written, as a graph may hold them
                    if not torch.equal(b, copy):
                        b.copy_(copy)


@contextlib.contextmanager
def configured(side: Side) -> Iterator[None]:
    """Apply the choices of a side on top of the caller's configuration."""
    current()  # reads the file of the environment once
    base = configuration._base
    assert base is not None
    if side.process:
        layer = parse(side.process, f"configuration {side.name}")
        configuration._base = Configuration((layer, *base.base))
    try:
        with use(**side.choices):
            yield
    finally:
        configuration._base = base


_CHECKPOINT = ("gradient_checkpointing", "_gradient_checkpointing_func")


@contextlib.contextmanager
def checkpointed(model: nn.Module) -> Iterator[None]:
    """Checkpoint the layers of a Hugging Face model."""
    layers = [m for m in model.modules() if hasattr(m, _CHECKPOINT[0])]
    if not layers or not model.training:
        raise ConfigurationError(
            f"checkpoint=True needs a Hugging Face model in training mode, got "
            f"{type(model).__name__} {'in' if model.training else 'not in'} training mode, with "
            f"{len(layers)} modules that have {_CHECKPOINT[0]}"
        )
    saved = [(m, {n: vars(m)[n] for n in _CHECKPOINT if n in vars(m)}) for m in layers]
    run = partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)
    try:
        for m in layers:
            m.gradient_checkpointing = True  # type: ignore[assignment]
            m._gradient_checkpointing_func = run  # type: ignore[assignment]
        yield
    finally:
        for m, had in saved:
            for name in _CHECKPOINT:
                vars(m).pop(name, None)
            vars(m).update(had)


# --- one side of a comparison ---

Loss = Callable[[Any, Any], Tensor]


@dataclass
class Recorded:
    """The records of a side: before its runs, in each of them, and after."""

    before: Recorder
    runs: list[Recorder]
    after: Recorder
    rows: list[int]

    @property
    def recorders(self) -> list[Recorder]:
        """All recorders in order."""
        return [self.before, *self.runs, self.after]


class Running:
    """A model under a side's configuration; it may run more than once.

    Args:
        side: The configuration.
        model: The model.
        batch: What it is called with.
        loss: From outputs and batch to the loss of a run; None for the model's own.
        backward: Whether to compute gradients.
        per_sequence: Whether either side splits the batch.
        said: Receives messages about progress.
    """

    def __init__(
        self,
        side: Side,
        model: nn.Module,
        batch: Batch,
        loss: Loss | None,
        backward: bool,
        per_sequence: bool,
        said: Callable[[str], None],
    ) -> None:
        self.side, self.model, self.batch, self.loss = side, model, batch, loss
        self.backward, self.per_sequence, self.said = backward, per_sequence, said
        self._compiled: Any = None
        hooked = [
            name
            for name, p in model.named_parameters()
            if getattr(p, "_post_accumulate_grad_hooks", None)
        ]
        if hooked and backward:
            raise ConfigurationError(
                f"parameter {hooked[0]} of model {side.name} has a hook that runs when its "
                "gradient is ready, such as an optimizer's step; remove it, as bisect would run it"
            )

    @property
    def compiles(self) -> bool:
        """Whether a part of the model is compiled, so that modules cannot be recorded."""
        return bool(self.side.compile) or any(
            hasattr(m, "_orig_mod") or getattr(m, "_compiled_call_impl", None) is not None
            for m in self.model.modules()
        )

    def record(self, keep: Key | None = None) -> Recorded:
        """Run the model on every piece of the batch and record it."""
        step = self.side.split or self.batch.rows
        starts = range(0, self.batch.rows, step)
        with contextlib.ExitStack() as stack:
            stack.enter_context(undisturbed(self.model, self.side.seed))
            stack.enter_context(configured(self.side))
            if self.side.patch:
                stack.enter_context(patcher().patched(self.model))
            if self.side.checkpoint:
                stack.enter_context(checkpointed(self.model))
            names = (
                {}
                if self.compiles
                else {
                    id(m): path_of(name) for name, m in self.model.named_modules() if path_of(name)
                }
            )
            recorded = Recorded(Recorder(keep=keep), [], Recorder(keep=keep), [])
            self._before(recorded.before)
            losses = []
            for index, start in enumerate(starts, 1):
                stop = min(start + step, self.batch.rows)
                self.said(f"{self.side.name}: run {index} of {len(starts)} ({self.side})")
                rows = stop - start if self.per_sequence else 0
                recorder = Recorder(rows, keep, names)
                losses.append(self._run(recorder, self.batch.piece(start, stop)))
                recorded.runs.append(recorder)
                recorded.rows.append(stop - start)
            self._after(recorded.after, losses)
            for recorder in recorded.recorders:
                recorder.fetch()
        return recorded

    def _before(self, recorder: Recorder) -> None:
        everything = tensors_in([*self.batch.args]) | tensors_in(dict(self.batch.kwargs))
        for name, tensor in everything.items():
            recorder.add(recording.DATA, name, recording.FORWARD, {"": tensor})
        for name, tensor in (*self.model.named_parameters(), *self.model.named_buffers()):
            recorder.add(recording.WEIGHT, path_of(name), recording.FORWARD, {"": tensor})

    def _after(self, recorder: Recorder, losses: list[Tensor | None]) -> None:
        known_losses = [loss for loss in losses if loss is not None]
        if known_losses:
            total = torch.stack(known_losses).sum() if len(known_losses) > 1 else known_losses[0]
            recorder.add(recording.LOSS, "loss", recording.FORWARD, {"": total})
        for name, p in self.model.named_parameters():
            if p.grad is not None:
                recorder.add(recording.PARAMETER, path_of(name), recording.BACKWARD, {"": p.grad})

    def _run(self, recorder: Recorder, piece: Batch) -> Tensor | None:
        kwargs = dict(piece.kwargs)
        share = self._share(piece, kwargs)
        with recorder.recording(), torch.set_grad_enabled(self.backward):
            outputs = self._call()(*piece.args, **kwargs)
            recorder.paused = True
            by_name = tensors_in(_as_mapping(outputs))
            for name, tensor in by_name.items():
                if name != "loss":
                    computed_output = {"": computed(tensor)}
                    recorder.add(
                        recording.OUTPUT, name or "output", recording.FORWARD, computed_output
                    )
            recorder.paused = False
            loss, mean = self._loss(outputs, Batch(piece.args, kwargs))
            if loss is not None and mean and share != 1:
                loss = loss * share
            if self.backward:
                if loss is None or not loss.requires_grad:
                    raise ConfigurationError(
                        f"model {self.side.name} returns no loss and no floating tensor that "
                        "requires grad; pass loss=, from outputs and batch to a scalar, or "
                        "backward=False"
                    )
                recorder.phase = recording.BACKWARD
                loss.backward()
        return None if loss is None else loss.detach()

    def _call(self) -> Any:
        if not self.side.compile:
            return self.model
        if self._compiled is None:
            look_up = lookup_backend()
            if look_up is None:
                self._compiled = torch.compile(self.model, backend=self.side.compile)
                return self._compiled
            chosen = look_up(self.side.compile)
            # a function of its own, so that no graph of another configuration is taken for this
            self._compiled = torch.compile(self.model, backend=lambda g, x: chosen(g, x))
        return self._compiled

    def _share(self, piece: Batch, kwargs: dict[str, Any]) -> float:
        """The weight of a run's loss; 1 where the model takes the number of labels of all runs."""
        if not self.per_sequence:
            return 1.0
        if self.loss is None and "labels" in kwargs and _takes_items(self.model):
            kwargs.setdefault("num_items_in_batch", self.batch.counted())
            return 1.0
        if piece.rows == self.batch.rows:
            return 1.0
        return piece.counted() / max(1, self.batch.counted())

    def _loss(self, outputs: Any, piece: Batch) -> tuple[Tensor | None, bool]:
        """The loss of a run, and whether it is a mean, which needs a weight before runs add up."""
        if self.loss is not None:
            return self.loss(outputs, piece.kwargs or piece.args), False
        by_name = _as_mapping(outputs)
        loss = by_name.get("loss")
        if isinstance(loss, Tensor):
            return loss, True
        floating = [t for t in tensors_in(by_name).values() if t.is_floating_point()]
        if not floating or not self.backward:
            return None, False
        first = floating[0]
        if not first.ndim:
            return first, True
        return first.float().square().sum() / 2, False  # its gradient is the output itself


def _as_mapping(outputs: Any) -> Mapping[str, Any]:
    """Outputs by name."""
    if isinstance(outputs, Mapping):
        return outputs
    return {"output": outputs} if isinstance(outputs, Tensor) else {"": outputs}


def _takes_items(model: nn.Module) -> bool:
    """Whether the loss can be a sum by a given number of labels, as transformers' Trainer asks."""
    inner: Any = model
    while hasattr(inner, "_orig_mod"):
        inner = inner._orig_mod
    if not hasattr(inner, "loss_function"):
        return False
    stated = getattr(inner, "accepts_loss_kwargs", None)
    if stated is not None:
        return bool(stated)
    parameters = inspect.signature(inner.forward).parameters.values()
    return any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
