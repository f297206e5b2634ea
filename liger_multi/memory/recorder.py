"""Record every storage of a step from birth to death: its category, module and operator.

One dispatch mode serves every device: real tensors on a CPU or an accelerator, and meta tensors,
whose storages have sizes and no memory. Autograd's sequence numbers tell a module's part of the
backward pass: a node that was created while a module ran belongs to that module.
"""

from __future__ import annotations

import bisect
import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from liger_multi._torch_private import current_autograd_node, next_sequence_nr
from liger_multi.memory.measure import StorageMode, Storages, primitive_of, tensors_in

PARAMETERS, GRADIENTS, STATES = "parameters", "gradients", "optimizer states"
SAVED, LOGITS, TEMPORARY, OTHER = "saved activations", "logits and loss", "temporaries", "other"
CATEGORIES = (PARAMETERS, GRADIENTS, STATES, SAVED, LOGITS, TEMPORARY, OTHER)
FORWARD, BACKWARD, RECOMPUTE, OPTIMIZER, BETWEEN = (
    "forward",
    "backward",
    "recompute",
    "optimizer",
    "between",
)
LOSSES = ("cross_entropy", "fused_linear", "log_softmax", "nll_loss", "log_prob")


@dataclass
class Block:
    """One storage, or one block of an allocator.

    Attributes:
        size: Bytes.
        phase: Phase of the step in which it was allocated; empty for one older than the step.
        module: Path of the module that it belongs to.
        module_class: Class of that module.
        op: Operator that allocated it.
        wide: Whether its last axis is the vocabulary.
        role: Parameters, gradients or optimizer states where that is known, else empty.
        died: Phase in which it was freed; empty while it lives.
        address: Of its memory, where it has some.
        time: When it was first seen, in microseconds.
    """

    size: int
    phase: str = ""
    module: str = ""
    module_class: str = ""
    op: str = ""
    wide: bool = False
    role: str = ""
    died: str = ""
    address: int = 0
    time: int = 0

    @property
    def category(self) -> str:
        """One of :data:`CATEGORIES`, from the whole life of the block."""
        if self.role:
            return self.role
        if self.wide or any(name in self.op for name in LOSSES):
            return LOGITS
        if not self.phase:
            return OTHER
        if self.phase in (FORWARD, RECOMPUTE) and self.died != self.phase:
            return SAVED
        return TEMPORARY


def stored(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that hold the numbers of a parameter: itself, or codes and scales of FP8."""
    if hasattr(tensor, "codes"):
        return [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]  # type: ignore[attr-defined]
    return [tensor]


class Recorder(StorageMode):
    """See the module's docstring; everything happens within :meth:`recording`.

    Args:
        device_type: Of the tensors to record.
        model: Its parameters and modules get their names; None names modules by their class.
        optimizer: Its states and its steps are recorded as such.
        vocabulary: Tensors whose last axis has this length are logits.

    Attributes:
        blocks: Every storage that was seen.
        events: ``(block, bytes)`` for every birth (positive) and death, in order.
        phases: ``(event, phase)`` wherever the phase of the step changed.
        moments: When each of them began, in microseconds.
    """

    def __init__(
        self,
        device_type: str,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        vocabulary: int | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.blocks: list[Block] = []
        self.events: list[tuple[int, int]] = []
        self.phases: list[tuple[int, str]] = []
        self.moments: list[int] = []
        self.live = 0
        self._addresses = device_type not in ("cpu", "meta")
        self.storages = Storages(device_type, self._on_free)
        self._model, self._optimizer, self._vocabulary = model, optimizer, vocabulary
        self._index: dict[int, int] = {}
        self._modules = list(model.named_modules()) if model is not None else []
        self._paths = {id(module): path for path, module in self._modules}
        # shapes of weights with an axis as long as the vocabulary, sorted
        self._weights = [sorted(p.shape) for _, p in self._parameters() if vocabulary in p.shape]
        self._stack: list[tuple[str, str]] = []
        self._marks: list[tuple[int, str, str]] = [(-1, "", "")]
        self._ops: list[str] = []
        self._stepping = False
        self._last = FORWARD

    @contextlib.contextmanager
    def recording(self) -> Iterator[Recorder]:
        """Record what runs inside."""
        self._know()
        self.moments.append(time.time_ns() // 1000)
        self.phases.append((len(self.events), FORWARD))
        with contextlib.ExitStack() as stack:
            stack.callback(self.storages.forget)
            handles = list(self._watch_modules())
            if self._optimizer is not None:
                handles += [
                    self._optimizer.register_step_pre_hook(self._before_step),
                    self._optimizer.register_step_post_hook(self._after_step),
                ]
            for owner, parameter in self._parameters():
                if parameter.requires_grad:
                    hook = self._gradient_hook(*owner)
                    handles.append(parameter.register_post_accumulate_grad_hook(hook))
            for handle in handles:
                stack.callback(handle.remove)
            stack.enter_context(self)
            yield self
        self._know()  # gradients and states that no hook announced

    def block_of(self, tensor: torch.Tensor) -> Block | None:
        """The record of a tensor's storage."""
        entry = self.storages.see(getattr(tensor, "_local_tensor", tensor))
        return self.blocks[self._index[entry[0]]] if entry and entry[0] in self._index else None

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One operator; ours are entered, so that what they allocate is seen under their name."""
        if func.namespace != "liger_multi":
            if self._ops:
                return self.call(func, args, kwargs)
            return self.named(func.name(), lambda: self.call(func, args, kwargs))
        primitive = primitive_of(func)

        def enter() -> Any:
            with self:
                return self.run_operator(primitive, args)

        return self.named(f"{primitive.op.name}.{primitive.direction}", enter)

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operator of PyTorch."""
        return func(*args, **kwargs)

    def run_operator(self, primitive: Any, args: tuple[Any, ...]) -> Any:
        """Run one of our operators."""
        return primitive.call(*args)

    def see(self, tensor: torch.Tensor, is_output: bool) -> None:
        """Open a block for a storage that is new."""
        entry = self.storages.see(tensor)
        if entry is None:
            return
        key, previous, size = entry
        if previous is None:
            self._born(key, size, is_output, tensor)
        elif previous != size:  # sharding libraries resize in place
            index = self._index[key]
            self.blocks[index].size = max(size, self.blocks[index].size)
            self.events.append((index, size - previous))
            self.live += size - previous
        if is_output and self._vocabulary and tensor.ndim > 1 and self._vocabulary in tensor.shape:
            block = self.blocks[self._index[key]]
            if block.phase == BACKWARD and sorted(tensor.shape) in self._weights:
                block.role = block.role or GRADIENTS  # of a head, before it stands in .grad
            elif block.phase and tensor.shape[-1] == self._vocabulary:
                block.wide = True

    def _born(self, key: int, size: int, is_output: bool, tensor: torch.Tensor) -> None:
        phase = self._phase() if is_output else ""
        module, module_class = self._owner() if is_output else ("", "")
        self._index[key] = len(self.blocks)
        block = Block(size, phase, module, module_class, self._ops[0] if self._ops else "")
        if self._addresses and tensor.untyped_storage().nbytes():
            block.address = tensor.untyped_storage().data_ptr()
            block.time = time.time_ns() // 1000
        self.blocks.append(block)
        self.events.append((self._index[key], size))
        self.live += size

    def _on_free(self, key: int, size: int) -> None:
        index = self._index.pop(key, None)
        if index is not None:
            self.blocks[index].died = self._phase()
            self.events.append((index, -size))
            self.live -= size

    def named(self, name: str, call: Callable[[], Any]) -> Any:
        """``call()``, whose storages belong to the operator ``name``."""
        self._ops.append(name)
        try:
            # results are seen before the name is dropped
            result = call()
            for tensor in tensors_in((result,)):
                self.see(tensor, is_output=True)
            return result
        finally:
            self._ops.pop()

    def _watch_modules(self) -> Iterator[Any]:
        """Hooks on every module but those whose hooks would change what runs.

        A patched MLP calls its layers and its activation one by one where they have hooks, so do
        layers with adapters, and a patched head computes its logits.
        """
        modules = [module for _, module in self._modules]
        swaps = {id(m): getattr(m, "_liger_multi_swap", None) for m in modules}
        # linear layers of ours are called as PyTorch's are
        ops = {id(m): getattr(swaps[id(m)], "op", "linear") for m in modules}
        patched = [m for m in modules if ops[id(m)] not in ("linear", "four_bits")]
        heads = {id(m) for m in patched if isinstance(m, nn.Linear)}
        leaves_of_patched = {
            id(m) for parent in patched for m in parent.children() if not any(m.children())
        }
        adapted = {id(part) for m in patched if ops[id(m)] == "lora" for part in m.modules()}
        unhooked = heads | adapted | (leaves_of_patched - {id(m) for m in patched})
        for module in modules:
            if id(module) not in unhooked:
                yield module.register_forward_pre_hook(self._enter, prepend=True)
                yield module.register_forward_hook(self._leave, always_call=True)

    def _phase(self) -> str:
        in_backward = current_autograd_node() is not None
        if self._stepping:
            phase = OPTIMIZER
        elif in_backward:
            phase = RECOMPUTE if self._stack else BACKWARD
        elif self._stack or (self._last == FORWARD and torch.is_grad_enabled()):
            phase = FORWARD
        else:
            phase = BETWEEN
        named_phase = BACKWARD if phase == RECOMPUTE else phase
        if phase != BETWEEN and named_phase != self._last:
            self._last = named_phase
            self.moments.append(time.time_ns() // 1000)
            self.phases.append((len(self.events), named_phase))
        return phase

    def _owner(self) -> tuple[str, str]:
        """Path and class of the module that is running, forwards or backwards."""
        if self._stack:
            return self._stack[-1]
        sequence_nr = getattr(current_autograd_node(), "_sequence_nr", None)
        if sequence_nr is None or self._stepping:
            return "", ""
        index = bisect.bisect_right(self._marks, sequence_nr(), key=lambda mark: mark[0]) - 1
        return self._marks[index][1:]

    def _mark(self) -> None:
        owner = self._stack[-1] if self._stack else ("", "")
        sequence_nr = next_sequence_nr()
        if sequence_nr >= self._marks[-1][0]:  # another thread counts for itself
            self._marks.append((sequence_nr, *owner))

    def _enter(self, module: nn.Module, args: Any) -> None:
        module_class = type(module).__name__
        self._stack.append((self._paths.get(id(module), ""), module_class))
        self._mark()

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._stack:
            self._stack.pop()
        self._mark()

    def _before_step(self, *_: Any) -> None:
        self._stepping = True
        self._phase()
        self._states()

    def _after_step(self, *_: Any) -> None:
        self._states()
        self._stepping = False

    def _gradient_hook(self, module: str, module_class: str) -> Callable[[torch.Tensor], None]:
        def hook(parameter: torch.Tensor) -> None:
            if parameter.grad is not None:
                self._assign(parameter.grad, GRADIENTS, module, module_class)

        return hook

    def _parameters(self) -> Iterator[tuple[tuple[str, str], torch.Tensor]]:
        """Parameters with path and class of their module; those of the optimizer beside them."""
        visited: set[int] = set()
        for path, module in self._modules:
            owner = (path, type(module).__name__)
            for parameter in module._parameters.values():
                if parameter is not None and id(parameter) not in visited:
                    visited.add(id(parameter))
                    yield owner, parameter
        for group in self._optimizer.param_groups if self._optimizer is not None else ():
            yield from (
                (("", ""), p)
                for p in group["params"]
                if id(p) not in visited and not visited.add(id(p))  # type: ignore[func-returns-value]
            )

    def _assign(
        self, tensor: torch.Tensor, role: str, module: str = "", module_class: str = ""
    ) -> None:
        tensor = getattr(tensor, "_local_tensor", tensor)
        self.see(tensor, is_output=False)
        block = self.block_of(tensor)
        if block is not None and not block.role:
            block.role, block.module, block.module_class = role, module, module_class

    def _states(self) -> None:
        if self._optimizer is None:
            return
        for values in self._optimizer.state.values():
            for value in values.values() if isinstance(values, dict) else ():
                if isinstance(value, torch.Tensor):
                    self._assign(value, STATES)

    def _know(self) -> None:
        """Give parameters, buffers, gradients and optimizer states their roles."""
        for owner, parameter in self._parameters():
            for part in stored(parameter):
                self._assign(part, PARAMETERS, *owner)
            if parameter.grad is not None:
                self._assign(parameter.grad, GRADIENTS, *owner)
        for path, module in self._modules:
            owner = (path, type(module).__name__)
            for buffer in module._buffers.values():
                if buffer is not None:
                    self._assign(buffer, PARAMETERS, *owner)
        self._states()
