"""The output embedding (LM head) of a patched model, and which modules may be patched as one.

:func:`find_loss_head` takes the facts of a model and yields a patch for every head. A patched head
(:class:`LazyHead`) takes hidden states and returns lazy logits, or real ones if others need them.

With tensor parallelism, the vocabulary is split over processes. The layer holds a DTensor. Hooks
(PyTorch) or a replaced forward (transformers) pass hidden states to it and collect its output. So
the call of a :class:`ShardedHead`, not its forward, returns lazy logits of the whole vocabulary.
Their loss is that of ``liger_multi.nn.vocab_parallel``; everything else runs the original call.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from liger_multi import ops
from liger_multi._torch_private import is_exporting, is_tracing, lazy_logits_work
from liger_multi.checks import autocast_dtype
from liger_multi.dispatch.autograd import transforming
from liger_multi.dispatch.resolve import by_rows
from liger_multi.modules.parameters import Evaluated, Job, is_computed, stored
from liger_multi.patching.evidence.facts import ModelFacts
from liger_multi.patching.evidence.signature import (
    PLAIN,
    calls_replaced,
    global_hooks,
    is_infrastructure,
    is_plain_linear,
)
from liger_multi.patching.head.deferred import (
    DeferredLogits,
    Guard,
    TracedGuard,
    count_optimizer_steps,
)
from liger_multi.patching.head.loss import follow_weight, loss_logits, unfollow_weight
from liger_multi.patching.head.protocol import lazy_logits
from liger_multi.patching.head.traced import ReplicaLogits, TracedLogits, loss_takes_tensors
from liger_multi.patching.linear import LinearByRows
from liger_multi.patching.lora import FusedLora, adapters, fits, looks_like_lora
from liger_multi.patching.options import HeadSettings, Request
from liger_multi.patching.report import Skipped, warn_once
from liger_multi.patching.swap import (
    Change,
    Patched,
    Replace,
    Restore,
    Swap,
    apply,
    buried,
    has_own_forward,
    loss_conflict,
    original,
    stock_class,
    swapped,
    unpatched_class,
)


class LazyHead(Patched):
    """A linear layer that returns lazy logits."""

    weight: Tensor
    bias: Tensor | None
    out_features: int

    def __init_subclass__(cls, **keywords: Any) -> None:
        """Register the hook on optimizer steps in every process that patches or unpickles."""
        super().__init_subclass__(**keywords)
        count_optimizer_steps()

    @staticmethod
    def on_enter(module: nn.Module, settings: Any) -> None:
        """Let ``F.linear_cross_entropy`` recognize the weight."""
        follow_weight(module, output_dtype)

    @staticmethod
    def on_leave(module: nn.Module) -> None:
        """Undo that."""
        unfollow_weight(module)

    def __setstate__(self, state: Any) -> None:
        """Follow the weight of a copy too."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        follow_weight(self, output_dtype)

    def stock_forward(self, hidden: Tensor) -> Tensor:
        """The original forward, or the operator under ``deterministic="rows"``."""
        layer = self.layer if isinstance(self, Evaluated) else self
        forward = unpatched_class(layer).forward
        if forward is nn.Linear.forward and by_rows():
            return ops.linear(hidden, self.weight, self.bias)
        return cast(Tensor, forward(self, hidden))

    def lora_factors(self) -> tuple[Tensor, ...]:
        """Both matrices of every LoRA adapter on the head."""
        return ()

    def scales(self) -> tuple[float, ...]:
        """The scale of every adapter."""
        return ()

    def forward(self, input: Tensor, job: Job | None = None) -> Any:
        """Lazy logits, or the result of ``job``."""
        module_class, hidden = type(self), input  # nn.Linear's name of the argument
        grad, is_lazy_head = torch.is_grad_enabled(), issubclass(module_class, LazyHead)
        if job is None and not is_lazy_head:
            return module_class.forward(self, hidden)
        lazy = job is None and may_be_lazy(self, hidden, grad)
        head: Any = self
        computed = is_computed(self) or is_computed(self, "bias")
        if computed and not isinstance(self, LazyAdaptedHead):
            if job is None and not lazy:
                return module_class.stock_forward(self, hidden)  # reads the weight once
            head = Evaluated(self, LazyHead.stock_forward)
        weight = head.weight
        if weight.numel() == 0:
            raise RuntimeError(
                "the weight of the output embedding has no elements, shape "
                f"{tuple(weight.shape)}: DeepSpeed ZeRO-3 has "
                "partitioned it and its hooks did not gather it for this call. Run the model "
                "through the DeepSpeed engine, or gather "
                "the weight with deepspeed.zero.GatheredParameters"
            )
        if job is not None:
            return job.run(head, hidden)
        settings: HeadSettings = module_class._liger_multi_swap.settings  # type: ignore[assignment]
        bias, dtype = head.bias, output_dtype(hidden, weight)
        fits = hidden.shape[-1] == weight.shape[1] if hidden.ndim > 1 else False
        # a DTensor is one part of the weight; other subclasses have GEMMs of their own
        are_plain = type(weight) in PLAIN and (bias is None or type(bias) in PLAIN)
        if dtype is None or not fits or not are_plain or not lazy:
            return module_class.stock_forward(head, hidden)
        weights = (weight, bias)
        if torch.compiler.is_compiling():
            if settings.on_real is None and loss_takes_tensors():
                return module_class.stock_forward(head, hidden)
            hidden = snapshot(hidden)
            traced = TracedGuard(weight, hidden)
            return TracedLogits(
                DeferredLogits(head, weights, hidden, settings, dtype, grad, traced)
            )
        hooks, replica = hooks_of(self), self.__dict__.get("_is_replica", False)  # DataParallel
        if settings.fused is None or _conflicts(self, hooks) or (replica and not grad):
            return loss_logits(module_class.stock_forward(head, hidden), settings, grad)
        hidden = snapshot(hidden)
        settled = not (hooks and any(is_infrastructure(hook) for hook in hooks))
        guard = Guard(head, hidden, settled)
        factors, scales = module_class.lora_factors(self), module_class.scales(self)
        deferred = DeferredLogits(
            head, (*weights, *factors), hidden, settings, dtype, grad, guard, scales=scales
        )
        return ReplicaLogits(deferred) if replica else lazy_logits(deferred)

    def run_job(self, hidden: Tensor, job: Job) -> Any:
        """The result of ``job``; only hooks that gather the weight run."""
        hooks = hooks_of(self)
        if torch.compiler.is_compiling() or (hooks and any(is_infrastructure(h) for h in hooks)):
            return self(hidden, job)
        return self.forward(hidden, job)


class LazyAdaptedHead(LazyHead):
    """A lazy head with LoRA adapters, which every chunk of logits includes."""

    def lora_factors(self) -> tuple[Tensor, ...]:
        """Both matrices of every active adapter; none if PEFT must run them."""
        low_rank = adapters(self)
        return (
            ()
            if isinstance(low_rank, str)
            else tuple(t for adapter in low_rank for t in (adapter.a, adapter.b))
        )

    def scales(self) -> tuple[float, ...]:
        """The scales of these adapters."""
        low_rank = adapters(self)
        return (
            () if isinstance(low_rank, str) else tuple(float(adapter.scale) for adapter in low_rank)
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Lazy logits, or the result of a job; other forms of a call run PEFT's forward."""
        job = args[1] if len(args) == 2 and isinstance(args[1], Job) else None
        if job is not None:
            return LazyHead.forward(self, args[0], job)
        module_class = type(self)
        if not issubclass(module_class, LazyAdaptedHead):
            return module_class.forward(self, *args, **kwargs)
        plain = len(args) == 1 and not kwargs and not torch.compiler.is_compiling()
        if (
            not plain
            or adapted_head_refusal(self)
            or not all(fits(args[0], adapter) for adapter in cast(Any, adapters(self)))
        ):
            return original(module_class)(self, *args, **kwargs)
        return LazyHead.forward(self, args[0])


def output_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype | None:
    """The dtype of real logits; None if the original forward raises."""
    autocast = autocast_dtype(hidden.device.type)
    if autocast is not None and hidden.dtype != torch.float64:
        return autocast
    return hidden.dtype if hidden.dtype == weight.dtype else None


def snapshot(hidden: Tensor) -> Tensor:
    """A copy of hidden states, for logits that are computed later.

    Writes through ``.data``, NumPy or DLPack change no version, so a reference is not enough. The
    copy costs one elementwise operation, and one tensor while the model keeps the original. Its
    memory layout is that of the logits (:meth:`DeferredLogits.packed`).
    """
    return hidden.clone(memory_format=torch.contiguous_format)


def may_be_lazy(head: LazyHead, hidden: Tensor, grad: bool) -> bool:
    """Whether a call with these hidden states may return lazy logits."""
    if torch.compiler.is_compiling():
        watched = hooks_of(head) or global_hooks() or calls_replaced()
        return grad and not is_exporting() and not watched
    if is_tracing() or transforming() or not lazy_logits_work():
        return False
    if not grad and (hidden.ndim < 3 or hidden.shape[1] == 1 or torch.is_inference_mode_enabled()):
        return False  # one position per sequence: a step of generation, which reads its logits
    return type(hidden) in (Tensor, nn.Parameter) and hidden.is_floating_point()


def hooks_of(head: nn.Module) -> list[Any]:
    """Every hook that a call of the head runs."""
    tables = (
        head._forward_hooks,
        head._forward_pre_hooks,
        head._backward_hooks,
        head._backward_pre_hooks,
    )
    return [hook for hooks in tables if hooks for hook in hooks.values()]


def _conflicts(head: Any, hooks: list[Any]) -> bool:
    """Whether other code needs the real logits of a head, or an unchanged call of it."""
    return _conflicting_hook(hooks) or (bool(hooks) and _detached(hooks)) or _grouped(head)


def _conflicting_hook(hooks: list[Any]) -> bool:
    """Whether a user's hook or replacement of a linear layer reads the output; warns once."""
    if calls_replaced():
        return True
    for hook in (*hooks, *global_hooks()):
        if not is_infrastructure(hook):
            name = getattr(hook, "__qualname__", type(hook).__name__)
            warn_once(
                f"the output embedding has a hook ({name}), so its logits are computed and the "
                "loss is not fused",
                "hook",
            )
            return True
    return False


def _detached(hooks: list[Any]) -> bool:
    """Whether DeepSpeed ZeRO-3 has hooks on the head; warns once.

    They detach the output and connect it by a node of their own, which a fused loss would bypass.
    """
    hooked = any(is_infrastructure(hook, ("deepspeed.",)) for hook in hooks)
    if hooked:
        warn_once(
            "DeepSpeed ZeRO-3 puts its hooks on the output embedding, so its logits are computed "
            "and the loss is not fused",
            "deepspeed",
        )
    return hooked


def _grouped(head: Any) -> bool:
    """Whether FSDP2 shards the head in one unit with earlier modules; warns once.

    The loss calls the head alone. Its backward would free the unit, whose other modules, such as
    the last norm, still need their weights.
    """
    state = getattr(head, "_get_fsdp_state", None)
    grouped = state is not None and len(getattr(state(), "_modules", ())) > 1
    if grouped:
        warn_once(
            "FSDP2 shards the output embedding in one unit with other modules, so its logits are "
            "computed and the loss is not fused; fully_shard(head) gives it a unit of its own",
            "grouped",
        )
    return grouped


def adapted_head_refusal(head: Any) -> str | None:
    """Why a head with adapters returns real logits, or None."""
    class_name = type(head).__name__
    consequence = "its logits stay real, so that the adapter trains"
    if not looks_like_lora(head):
        return f"an adapter ({class_name}) sits on the output embedding; {consequence}"
    if not is_plain_linear(head.base_layer):
        return f"under the adapter on the output embedding is no plain linear layer; {consequence}"
    low_rank = adapters(head)
    return f"the output embedding: {low_rank}; {consequence}" if isinstance(low_rank, str) else None


# --- a vocabulary that is split over processes ---


class ShardedHead(LazyHead):
    """A linear layer with a part of the classes, whose call returns lazy logits of all classes."""

    def __call__(self, hidden: Any, job: Job | None = None) -> Any:
        """Lazy logits, or the result of ``job``."""
        if job is not None:
            return job.run(self, hidden)
        module_class = type(self)
        if not issubclass(module_class, ShardedHead):
            return nn.Module.__call__(self, hidden)
        settings = cast(HeadSettings, module_class._liger_multi_swap.settings)
        grad = torch.is_grad_enabled()
        if (
            settings.fused is None
            or torch.compiler.is_compiling()
            or sharded_refusal(self) is not None
        ):
            return module_class.stock_forward(self, hidden)
        dtype = output_dtype(hidden, self.weight) if isinstance(hidden, Tensor) else None
        if dtype is None or hidden.ndim < 2 or not may_be_lazy(self, hidden, grad):
            return module_class.stock_forward(self, hidden)
        hidden = snapshot(hidden)
        guard = Guard(self, hidden, settled=False)
        weights = (self.weight, self.bias)
        return lazy_logits(DeferredLogits(self, weights, hidden, settings, dtype, grad, guard))

    def run_job(self, hidden: Tensor, job: Job) -> Any:
        """The result of ``job``."""
        return self(hidden, job)

    def stock_forward(self, hidden: Tensor) -> Tensor:
        """The original call, with the hooks that collect its result."""
        return cast(Tensor, nn.Module.__call__(self, hidden))

    def forward(self, hidden: Tensor, job: Job | None = None) -> Any:
        """The original forward, within that call."""
        return LazyHead.stock_forward(self, hidden)


def is_sharded(head: nn.Module, owners: Iterable[nn.Module] = ()) -> bool:
    """Whether a layer is tensor parallel: by its weight, or by attributes of transformers.

    FSDP on the layer or a module around it has DTensors too, but gathers them before the forward.
    """
    classes = [base for module in (head, *owners) for base in type(module).__mro__]
    fsdp = any(base.__module__.startswith("torch.distributed.fsdp") for base in classes)
    if hasattr(stored(head), "device_mesh"):
        return not fsdp
    collects = bool(hooks_of(head)) or ("forward" in vars(head) and not has_own_forward(head))
    return collects and (hasattr(head, "_hf_tp_plan") or bool(getattr(head, "_is_hooked", False)))


def sharded_refusal(head: Any) -> str | None:
    """Why the loss of a tensor parallel layer cannot be computed from its shards, or None."""
    start = "the output embedding is tensor parallel"
    weight, bias = stored(head), stored(head, "bias")
    if weight is None or not hasattr(weight, "device_mesh"):
        return f"{start}, but its weight is no DTensor that would tell whose classes it holds"
    if buried(head):
        return f"{start}, and its class is now {type(head).__name__}, on top of the patch"
    for tensor in [weight] if bias is None else [weight, bias]:
        placements: Any = getattr(tensor, "placements", ())
        if len(placements) != 1 or not placements[0].is_shard(0):
            return f"{start} with placements {placements}, which do not split the vocabulary alone"
    layouts = _layouts(head)
    if layouts is None:
        return f"{start}: hooks gather its output in a way that is not known"
    inputs, outputs, local = layouts
    if not inputs.is_replicate():
        return f"{start} on hidden states that are {inputs}: not all processes have all rows"
    if outputs.is_shard() and local:
        return (
            f"{start} and returns this process's part of the logits as a plain tensor; "
            "liger_multi.nn.vocab_parallel has losses of such parts"
        )
    return None


def _layouts(head: nn.Module) -> tuple[Any, Any, bool] | None:
    """Placements of input and output, and whether the output is a plain tensor; None if unknown.

    Both libraries keep them in closures of their hooks.
    """
    closed_over = _closed_over(vars(head).get("forward"))
    for style in closed_over:
        if hasattr(style, "output_layouts") and hasattr(style, "input_layouts"):
            if hooks_of(head):
                return None
            local = bool(getattr(style, "use_local_output", True))
            return _single_layout(style.input_layouts), _single_layout(style.output_layouts), local
    pre_hooks, hooks = list(head._forward_pre_hooks.values()), list(head._forward_hooks.values())
    if len(pre_hooks) != 1 or len(hooks) != 1 or len(hooks_of(head)) != 2 or closed_over:
        return None
    inputs = next((c.args for c in _closed_over(pre_hooks[0]) if isinstance(c, partial)), ())
    outputs = next((c.args for c in _closed_over(hooks[0]) if isinstance(c, partial)), ())
    if len(inputs) < 2 or len(outputs) != 2 or not isinstance(outputs[1], bool):
        return None
    return _single_layout(inputs[0]), _single_layout(outputs[0]), outputs[1]


def _closed_over(function: Any) -> list[Any]:
    """The values of a function's closure."""
    return [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]


def _single_layout(layouts: Any) -> Any:
    return layouts[0] if isinstance(layouts, tuple) and len(layouts) == 1 else layouts


# --- which modules are heads ---


def with_heads(model: ModelFacts) -> Iterator[nn.Module]:
    """The modules of a model that may have an output embedding."""
    for _, module in model.of_class(lambda facts: facts.answers("get_output_embeddings")):
        if callable(getattr(module, "get_output_embeddings", None)):
            yield module


def find_heads(model: ModelFacts) -> tuple[list[tuple[str, nn.Module]], str]:
    """The output embeddings of a model with their paths, or the reason why there is none.

    Linear layers in PyTorch's loss modules are output embeddings too.
    """
    outputs = (_output_embedding(module) for module in with_heads(model))
    head = next((output for output in outputs if output is not None), None)
    heads = (
        [] if head is None else [(model.paths.get(id(h), ""), h) for h in _with_inner_heads(head)]
    )
    losses = () if _LOSS_MODULE is None else model.instances(_LOSS_MODULE)
    for path, loss in cast("Iterable[tuple[str, Any]]", losses):
        if all(h is not loss.linear for _, h in heads):
            heads.append((f"{path}.linear".strip("."), loss.linear))
    missing = "the model has no output embedding (get_output_embeddings gives none)"
    return heads, "" if heads else missing


def inner_heads(model: ModelFacts, heads: list[nn.Module]) -> Iterator[tuple[str, str]]:
    """Output embeddings of models within a model that are neither in ``heads`` nor patched.

    Yields the path of each, and the path of its model.
    """
    paths = model.paths
    head_ids = {id(part) for head in heads for part in head.modules()}
    for owner in with_heads(model):
        head = _output_embedding(owner)
        is_inner = id(head) not in head_ids and isinstance(head, nn.Linear) and id(head) in paths
        if is_inner and not isinstance(head, LazyHead) and owner is not model.root:
            head_ids.add(id(head))
            yield paths[id(head)], paths[id(owner)]


def _output_embedding(owner: nn.Module) -> nn.Module | None:
    """The module that a model's ``get_output_embeddings`` returns, or None."""
    try:
        head = cast(Any, owner).get_output_embeddings()
    except (AttributeError, NotImplementedError):
        return None
    return head if isinstance(head, nn.Module) else None


def _with_inner_heads(head: nn.Module) -> list[nn.Module]:
    """A head, or the layers in PEFT's wrapper of ``modules_to_save``."""
    copies = getattr(head, "modules_to_save", None)
    if isinstance(copies, nn.ModuleDict):
        original = getattr(head, "original_module", None)
        return [*copies.values(), *([original] if isinstance(original, nn.Module) else [])]
    return [head]


def _is_plain(head: nn.Module) -> bool:
    """Whether a layer is a linear layer with PyTorch's forward."""
    return isinstance(head, nn.Linear) and (
        buried(head) or stock_class(head).forward is nn.Linear.forward
    )


_REFUSALS: tuple[tuple[Callable[[Any], bool], str], ...] = (
    (
        lambda head: not isinstance(head, nn.Linear) and _holds_codes(head),
        (
            "the output embedding is a {kind} with quantized storage ({dtype}); its "
            "logits come from its own call"
        ),
    ),
    (
        lambda head: not _is_plain(head),
        "the output embedding is a {kind}, not a plain linear layer",
    ),
    (
        lambda head: _holds_codes(head),
        (
            "the weight of the output embedding is stored as {dtype}, "
            "which only its own call can turn into numbers"
        ),
    ),
    (
        lambda head: type(stored(head)).__module__.startswith("torchao."),
        "the weight of the output embedding is a {weight}, whose products are its own",
    ),
)
"""Conditions on a head, and why one that meets it has no lazy logits; the first that holds."""


def head_refusal(head: nn.Module, owners: Iterable[nn.Module] = ()) -> str | None:
    """Why a module cannot return lazy logits, or None; ``owners`` are the modules around it."""
    class_name = type(head).__name__
    if hasattr(head, "base_layer"):
        if "forward" in vars(head) and not has_own_forward(head):
            return f"other code replaced the forward of this {class_name}"
        return adapted_head_refusal(head)
    parallel = is_sharded(head, owners)
    if parallel and (reason := sharded_refusal(head)):
        return reason
    if "forward" in vars(head) and not has_own_forward(head) and not parallel:
        return f"other code replaced the forward of this {class_name}"
    reason = next((text for applies, text in _REFUSALS if applies(head)), None)
    if reason is None:
        return None
    weight = type(stored(head)).__name__
    return reason.format(kind=class_name, dtype=_dtype(head), weight=weight)


def _holds_codes(head: nn.Module) -> bool:
    """Whether a weight is stored as integers or FP8."""
    dtype = _dtype(head)
    return dtype is not None and (dtype.itemsize < 2 or not dtype.is_floating_point)


def _dtype(head: nn.Module) -> torch.dtype | None:
    """The dtype of a weight that is not computed."""
    weight = stored(head)
    return None if weight is None else weight.dtype


def behavior(head: nn.Module, owners: Iterable[nn.Module] = ()) -> type[LazyHead]:
    """The behavior for a module that :func:`head_refusal` accepts."""
    if hasattr(head, "base_layer"):
        return LazyAdaptedHead
    return ShardedHead if is_sharded(head, owners) else LazyHead


_LOSSES = ("fused_linear_cross_entropy", "cross_entropy")


def find_loss_head(model: ModelFacts, request: Request) -> Iterator[Change]:
    """The output embedding."""
    settings = request.head
    heads, missing = find_heads(model)
    if settings is None:
        for path, module in heads:
            if not isinstance(module, LinearByRows):
                yield Restore(path, module)
        return
    op = _LOSSES[0] if settings.fused else _LOSSES[1]
    if missing and (op in request.named or model.with_attribute("config")):
        yield Skipped("", op, missing, strict=request.expects_head)
    conflict = next(
        (reason_of_loss for m in with_heads(model) if (reason_of_loss := loss_conflict(m))), None
    )
    for path, module in heads:
        if settings.fused and hasattr(module, "base_layer"):
            yield from _unwrapped(path, module)
        if isinstance(module, FusedLora) and not head_refusal(module):  # it is more than that
            yield Restore(path, module, instead_of="lora")
        enclosing = model.around(path)
        refusal = conflict or head_refusal(module, enclosing)
        if refusal:
            for name, inner in module.named_modules():  # patched before an adapter came on top
                if not isinstance(inner, (FusedLora, LinearByRows)):
                    yield Restore(f"{path}.{name}".strip("."), inner)
            yield Skipped(path, op, refusal)
            continue
        swap = Swap(op, stock_class(module), behavior(module, enclosing), settings)
        yield Replace(path, module, swap, op, settings.shown)
        follow_resizing()
    for path, owner in inner_heads(model, [head for _, head in heads]):
        call = f"liger_multi.patch(model.{owner})"
        reason = f"it is the output embedding of a model within the model: {call} patches it"
        yield Skipped(path, op, reason, strict=False)


def _unwrapped(path: str, module: nn.Module) -> Iterator[Change]:
    """Restore a head that was patched before an adapter wrapped it."""
    for name, inner in module.named_modules():
        if isinstance(inner, LazyHead) and inner is not module:
            yield Restore(f"{path}.{name}", inner)


_LOSS_MODULE: Any = getattr(nn, "LinearCrossEntropyLoss", None)  # since PyTorch 2.13
_MARK = "_liger_multi_resizes"


def follow_resizing() -> None:
    """Wrap ``PreTrainedModel.resize_token_embeddings`` once, so that new heads are patched too.

    Unpatched models are not affected. The class is changed, not the model, whose copies would keep
    a method that is bound to the original.
    """
    library = sys.modules.get("transformers.modeling_utils")
    model_class = getattr(library, "PreTrainedModel", None)
    if model_class is None or hasattr(model_class.resize_token_embeddings, _MARK):
        return
    stock = model_class.resize_token_embeddings

    @functools.wraps(stock)
    def resize_token_embeddings(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        heads = find_heads(ModelFacts(self))[0]
        swaps = [swapped(head) for _, head in heads if isinstance(head, LazyHead)]
        result = stock(self, *args, **kwargs)
        for _, head in find_heads(ModelFacts(self))[0] if any(swaps) else ():
            swap = swaps[0]
            if swap is None or stock_class(head) is not swap.stock or head_refusal(head):
                continue
            if behavior(head) is swap.behavior:
                apply(head, swap)
        return result

    setattr(resize_token_embeddings, _MARK, True)
    model_class.resize_token_embeddings = resize_token_embeddings
