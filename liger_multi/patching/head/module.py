"""The output embedding of a patched model, and which modules may become one.

The vocabulary of a tensor parallel model is split over processes. The layer holds a DTensor, and
hooks (PyTorch's styles) or a replaced forward (transformers') hand it the hidden states and collect
what it returns. So it is the call of the module that gives lazy logits here: of the whole
vocabulary, as the original call returns them. Their loss is ``liger_multi.nn.vocab_parallel``'s,
for which no process sees another one's logits; everything else takes the original call.
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
from liger_multi.parameters import Evaluated, Job, is_computed, stored
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
    """A linear layer whose output is logits that are computed when something needs them."""

    weight: Tensor
    bias: Tensor | None
    out_features: int

    def __init_subclass__(cls, **keywords: Any) -> None:
        """A class is made in every process that patches or unpickles; graphs run no Python."""
        super().__init_subclass__(**keywords)
        count_optimizer_steps()

    @staticmethod
    def entered(module: nn.Module, settings: Any) -> None:
        """A loss of the layer's weight, for which nobody calls the layer, is looked for."""
        follow_weight(module, output_dtype)

    @staticmethod
    def left(module: nn.Module) -> None:
        """The same, no more."""
        unfollow_weight(module)

    def __setstate__(self, state: Any) -> None:
        """The same for a copy."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        follow_weight(self, output_dtype)

    def stock_forward(self, hidden: Tensor) -> Tensor:
        """The forward that the layer was built with, or the operator of independent rows."""
        layer = self.layer if isinstance(self, Evaluated) else self  # read before, or not
        own = unpatched_class(layer).forward
        if own is nn.Linear.forward and by_rows():
            return ops.linear(hidden, self.weight, self.bias)
        return cast(Tensor, own(self, hidden))

    def thin(self) -> tuple[Tensor, ...]:
        """Both factors of every low-rank adapter on the head."""
        return ()

    def scales(self) -> tuple[float, ...]:
        """What multiplies each of them."""
        return ()

    def forward(self, input: Tensor, job: Job | None = None) -> Any:
        """Lazy logits, or what ``job`` asks for."""
        module_class, hidden = type(self), input  # the name that PyTorch's layer has for callers
        grad, ours = torch.is_grad_enabled(), issubclass(module_class, LazyHead)
        if job is None and not ours:
            return module_class.forward(self, hidden)
        lazy = job is None and may_be_lazy(self, hidden, grad)
        head: Any = self
        if is_computed(self) and not isinstance(self, LazyAdaptedHead):
            if job is None and not lazy:
                return module_class.stock_forward(self, hidden)  # which reads the weight
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
        # a DTensor is a part, which nobody gathered; another subclass multiplies in its own way
        whole = type(weight) in PLAIN and (bias is None or type(bias) in PLAIN)
        if dtype is None or not fits or not whole or not lazy:
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
        hooks, replica = hooks_of(self), self.__dict__.get("_is_replica", False)  # of DataParallel
        if settings.fused is None or _conflicts(self, hooks) or (replica and not grad):
            return loss_logits(module_class.stock_forward(head, hidden), settings, grad)
        hidden = snapshot(hidden)
        settled = not (hooks and any(is_infrastructure(hook) for hook in hooks))
        guard = Guard(head, hidden, settled)
        thin, scales = module_class.thin(self), module_class.scales(self)
        deferred = DeferredLogits(
            head, (*weights, *thin), hidden, settings, dtype, grad, guard, scales=scales
        )
        return ReplicaLogits(deferred) if replica else lazy_logits(deferred)

    def asked(self, hidden: Tensor, job: Job) -> Any:
        """What ``job`` asks for, through the hooks that gather the weight and through no others."""
        hooks = hooks_of(self)
        if torch.compiler.is_compiling() or (hooks and any(is_infrastructure(h) for h in hooks)):
            return self(hidden, job)
        return self.forward(hidden, job)


class LazyAdaptedHead(LazyHead):
    """The same for a linear layer with LoRA adapters, which are part of every chunk of logits."""

    def thin(self) -> tuple[Tensor, ...]:
        """Both factors of every adapter that acts; none of those that are left to PEFT."""
        low_rank = adapters(self)
        return (
            ()
            if isinstance(low_rank, str)
            else tuple(t for one in low_rank for t in (one.a, one.b))
        )

    def scales(self) -> tuple[float, ...]:
        """Their scales."""
        low_rank = adapters(self)
        return () if isinstance(low_rank, str) else tuple(float(one.scale) for one in low_rank)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Lazy logits, or what a job asks for; calls of another form run PEFT's forward."""
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
            or not all(fits(args[0], one) for one in cast(Any, adapters(self)))
        ):
            return original(module_class)(self, *args, **kwargs)
        return LazyHead.forward(self, args[0])


def output_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype | None:
    """The dtype of real logits; None where the original forward would raise."""
    asked = autocast_dtype(hidden.device.type)
    if asked is not None and hidden.dtype != torch.float64:
        return asked
    return hidden.dtype if hidden.dtype == weight.dtype else None


def snapshot(hidden: Tensor) -> Tensor:
    """Hidden states as they are now, for logits that are computed later.

    A copy, since no version counts what is written through ``.data``, NumPy or DLPack. It takes as
    long as one elementwise operation, and is one tensor more while the model holds the other.
    Its rows lie in memory as those of the logits would (:meth:`DeferredLogits.packed`).
    """
    return hidden.clone(memory_format=torch.contiguous_format)


def may_be_lazy(head: LazyHead, hidden: Tensor, grad: bool) -> bool:
    """Whether logits of these hidden states, here and now, can be computed later."""
    if torch.compiler.is_compiling():
        watched = hooks_of(head) or global_hooks() or calls_replaced()
        return grad and not is_exporting() and not watched
    if is_tracing() or transforming() or not lazy_logits_work():
        return False  # before a trace meets an operation on the hidden states
    if not grad and (hidden.ndim < 3 or hidden.shape[1] == 1 or torch.is_inference_mode_enabled()):
        return False  # one position a sequence is a step of generation, which reads its logits
    return type(hidden) in (Tensor, nn.Parameter) and hidden.is_floating_point()


def hooks_of(head: nn.Module) -> list[Any]:
    """Every hook that a call of the head runs."""
    every = (
        head._forward_hooks,
        head._forward_pre_hooks,
        head._backward_hooks,
        head._backward_pre_hooks,
    )
    return [hook for hooks in every if hooks for hook in hooks.values()]


def _conflicts(head: Any, hooks: list[Any]) -> bool:
    """Whether others need the logits of a head, or its call, as they are without a patch."""
    return _conflicting_hook(hooks) or (bool(hooks) and _detached(hooks)) or _grouped(head)


def _conflicting_hook(hooks: list[Any]) -> bool:
    """Whether somebody else's hook looks at what the head returns; it gets real logits, once.

    So does somebody's function in the place of PyTorch's for linear layers.
    """
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
    """Whether DeepSpeed's hooks stand on the head: ZeRO-3 returns its output detached.

    A node of its own then joins the output to the graph, which a loss of hidden states passes by.
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
    """Whether FSDP2 shards the head in one unit with modules that run before it.

    A call of the head alone, which the loss would be, has that unit freed as soon as the gradient
    of the hidden states is there. The others, such as the last norm, still need theirs.
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
    """Why the logits of a head with adapters are computed whole, or None."""
    class_name = type(head).__name__
    stay = "its logits stay real, so that the adapter trains"
    if not looks_like_lora(head):
        return f"an adapter ({class_name}) sits on the output embedding; {stay}"
    if not is_plain_linear(head.base_layer):
        return f"under the adapter on the output embedding is no plain linear layer; {stay}"
    low_rank = adapters(head)
    return f"the output embedding: {low_rank}; {stay}" if isinstance(low_rank, str) else None


# --- a vocabulary that is split over processes ---


class ShardedHead(LazyHead):
    """A linear layer with some of the classes, whose call returns lazy logits of all of them."""

    def __call__(self, hidden: Any, job: Job | None = None) -> Any:
        """Lazy logits, or what ``job`` asks for."""
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

    def asked(self, hidden: Tensor, job: Job) -> Any:
        """What ``job`` asks for."""
        return self(hidden, job)

    def stock_forward(self, hidden: Tensor) -> Tensor:
        """The call with all that collects its result."""
        return cast(Tensor, nn.Module.__call__(self, hidden))

    def forward(self, hidden: Tensor, job: Job | None = None) -> Any:
        """The layer's own product, which the original call asks for."""
        return LazyHead.stock_forward(self, hidden)


def is_sharded(head: nn.Module, owners: Iterable[nn.Module] = ()) -> bool:
    """Whether a layer is tensor parallel: by its weight, or by transformers' mark and means.

    FSDP, which may stand on the modules around it, has DTensors too, but gathers them before the
    forward.
    """
    kinds = [module_class for module in (head, *owners) for module_class in type(module).__mro__]
    fsdp = any(
        module_class.__module__.startswith("torch.distributed.fsdp") for module_class in kinds
    )
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
    """Placements of input and output, and whether the output is a plain tensor.

    Both libraries keep them where functions keep what they close over.
    """
    closed_over = _closed_over(vars(head).get("forward"))
    for style in closed_over:
        if hasattr(style, "output_layouts") and hasattr(style, "input_layouts"):
            if hooks_of(head):
                return None
            local = bool(getattr(style, "use_local_output", True))
            return _one(style.input_layouts), _one(style.output_layouts), local
    before, after = list(head._forward_pre_hooks.values()), list(head._forward_hooks.values())
    if len(before) != 1 or len(after) != 1 or len(hooks_of(head)) != 2 or closed_over:
        return None
    inputs = next((c.args for c in _closed_over(before[0]) if isinstance(c, partial)), ())
    outputs = next((c.args for c in _closed_over(after[0]) if isinstance(c, partial)), ())
    if len(inputs) < 2 or len(outputs) != 2 or not isinstance(outputs[1], bool):
        return None
    return _one(inputs[0]), _one(outputs[0]), outputs[1]


def _closed_over(function: Any) -> list[Any]:
    """What a function closes over."""
    return [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]


def _one(layouts: Any) -> Any:
    return layouts[0] if isinstance(layouts, tuple) and len(layouts) == 1 else layouts


# --- the output embedding, whose loss is fused; it stays so when a vocabulary is resized ---


def with_heads(model: nn.Module) -> Iterator[nn.Module]:
    """The modules of a model that may have an output embedding."""
    for module in model.modules():
        if callable(getattr(module, "get_output_embeddings", None)):
            yield module


def find_heads(model: nn.Module) -> tuple[list[tuple[str, nn.Module]], str]:
    """The output embeddings of a model with their paths, or the reason why there is none.

    Linear layers in PyTorch's loss modules are output embeddings too.
    """
    outputs = (_output_embedding(module) for module in with_heads(model))
    head = next((each for each in outputs if each is not None), None)
    paths = {id(m): path for path, m in model.named_modules()}
    heads = [] if head is None else [(paths.get(id(h), ""), h) for h in _inside(head)]
    for path, loss in model.named_modules():
        within = _LOSS_MODULE is not None and isinstance(loss, _LOSS_MODULE)
        if within and all(h is not loss.linear for _, h in heads):
            heads.append((f"{path}.linear".strip("."), loss.linear))
    missing = "the model has no output embedding (get_output_embeddings gives none)"
    return heads, "" if heads else missing


def inner_heads(model: nn.Module, heads: list[nn.Module]) -> Iterator[tuple[str, str]]:
    """Linear output embeddings of models within a model, which are not ``heads`` and not patched.

    Of each its path, and that of the model that it belongs to.
    """
    paths = {id(m): path for path, m in model.named_modules()}
    known = {id(part) for head in heads for part in head.modules()}
    for owner in with_heads(model):
        head = _output_embedding(owner)
        is_inner = id(head) not in known and isinstance(head, nn.Linear) and id(head) in paths
        if is_inner and not isinstance(head, LazyHead) and owner is not model:
            known.add(id(head))
            yield paths[id(head)], paths[id(owner)]


def _output_embedding(owner: nn.Module) -> nn.Module | None:
    """What a model says is its output embedding."""
    try:
        head = cast(Any, owner).get_output_embeddings()
    except (AttributeError, NotImplementedError):
        return None
    return head if isinstance(head, nn.Module) else None


def _inside(head: nn.Module) -> list[nn.Module]:
    """A head itself, or the copies and the original in a wrapper of ``modules_to_save``."""
    copies = getattr(head, "modules_to_save", None)
    if isinstance(copies, nn.ModuleDict):
        original = getattr(head, "original_module", None)
        return [*copies.values(), *([original] if isinstance(original, nn.Module) else [])]
    return [head]


def _is_plain(head: nn.Module) -> bool:
    """Whether a layer is a linear one with PyTorch's forward, as far as a class on top shows."""
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
"""Why a head that is nobody else's has no lazy logits: the first that holds, with its reason."""


def head_refusal(head: nn.Module, owners: Iterable[nn.Module] = ()) -> str | None:
    """Why a module cannot be a lazy head, or None; ``owners`` are the modules around it."""
    class_name = type(head).__name__
    if hasattr(head, "base_layer"):
        if "forward" in vars(head) and not has_own_forward(head):
            return f"somebody else replaced the forward of this {class_name}"
        return adapted_head_refusal(head)
    parallel = is_sharded(head, owners)
    if parallel and (reason := sharded_refusal(head)):
        return reason
    if "forward" in vars(head) and not has_own_forward(head) and not parallel:
        return f"somebody else replaced the forward of this {class_name}"
    reason = next((text for holds, text in _REFUSALS if holds(head)), None)
    if reason is None:
        return None
    weight = type(stored(head)).__name__
    return reason.format(kind=class_name, dtype=_dtype(head), weight=weight)


def _holds_codes(head: nn.Module) -> bool:
    """Whether a weight is integers or FP8."""
    dtype = _dtype(head)
    return dtype is not None and (dtype.itemsize < 2 or not dtype.is_floating_point)


def _dtype(head: nn.Module) -> torch.dtype | None:
    """The dtype of a weight that is not computed."""
    weight = stored(head)
    return None if weight is None else weight.dtype


def behavior(head: nn.Module, owners: Iterable[nn.Module] = ()) -> type[LazyHead]:
    """The class of lazy heads that fits a module which is not refused."""
    if hasattr(head, "base_layer"):
        return LazyAdaptedHead
    return ShardedHead if is_sharded(head, owners) else LazyHead


_LOSSES = ("fused_linear_cross_entropy", "cross_entropy")


def find_loss_head(model: nn.Module, request: Request) -> Iterator[Change]:
    """The output embedding."""
    settings = request.head
    heads, missing = find_heads(model)
    if settings is None:
        for path, module in heads:
            if not isinstance(module, LinearByRows):
                yield Restore(path, module)
        return
    op = _LOSSES[0] if settings.fused else _LOSSES[1]
    if missing:
        yield Skipped("", op, missing, strict=request.whole)
    theirs = next((why for m in with_heads(model) if (why := loss_conflict(m))), None)
    for path, module in heads:
        if settings.fused and hasattr(module, "base_layer"):
            yield from _unwrapped(path, module)
        if isinstance(module, FusedLora) and not head_refusal(module):  # it is more than that
            yield Restore(path, module, instead_of="lora")
        around = [m for p, m in model.named_modules() if not p or path.startswith(f"{p}.")]
        refusal = theirs or head_refusal(module, around)
        if refusal:
            for name, inner in module.named_modules():  # patched before an adapter came on top
                if not isinstance(inner, (FusedLora, LinearByRows)):
                    yield Restore(f"{path}.{name}".strip("."), inner)
            yield Skipped(path, op, refusal)
            continue
        swap = Swap(op, stock_class(module), behavior(module, around), settings)
        yield Replace(path, module, swap, op, settings.shown)
        follow_resizing()
    for path, owner in inner_heads(model, [head for _, head in heads]):
        call = f"liger_multi.patch(model.{owner})"
        reason = f"it is the output embedding of a model within the model: {call} patches it"
        yield Skipped(path, op, reason, strict=False)


def _unwrapped(path: str, module: nn.Module) -> Iterator[Change]:
    """A head that was patched before an adapter came on top of it is its plain base again."""
    for name, inner in module.named_modules():
        if isinstance(inner, LazyHead) and inner is not module:
            yield Restore(f"{path}.{name}", inner)


_LOSS_MODULE: Any = getattr(nn, "LinearCrossEntropyLoss", None)  # since PyTorch 2.13
_MARK = "_liger_multi_resizes"


def follow_resizing() -> None:
    """Wrap ``PreTrainedModel.resize_token_embeddings``, once; models without a patch see no change.

    A method of the class, since nothing is written into models: copies would hold the original's.
    """
    library = sys.modules.get("transformers.modeling_utils")
    model_class = getattr(library, "PreTrainedModel", None)
    if model_class is None or hasattr(model_class.resize_token_embeddings, _MARK):
        return
    stock = model_class.resize_token_embeddings

    @functools.wraps(stock)
    def resize_token_embeddings(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        before = [swapped(head) for _, head in find_heads(self)[0] if isinstance(head, LazyHead)]
        result = stock(self, *args, **kwargs)
        for _, head in find_heads(self)[0] if any(before) else ():
            swap = before[0]
            if swap is None or stock_class(head) is not swap.stock or head_refusal(head):
                continue
            if behavior(head) is swap.behavior:
                apply(head, swap)
        return result

    setattr(resize_token_embeddings, _MARK, True)
    model_class.resize_token_embeddings = resize_token_embeddings
