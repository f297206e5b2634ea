"""Every private symbol of PyTorch that this library uses, and what happens without it.

A private symbol may leave with any release, so nothing else may name one (``python -m ci.layering``
checks that). Each :func:`bind` below is one row of the table: the path of the symbol, what it
serves, and what stands in for it where this PyTorch lacks it. Importing and patching never fail for
a missing symbol. What stands in either does the same by public means, or switches off what the
symbol serves and says so, once, in the log. ``liger-multi doctor`` lists missing symbols.

Symbols are looked up once, when this module is imported, so that a call costs what it costs
elsewhere. Those in modules that are expensive to import are looked up by :func:`lazy_symbol`.

Attributes of objects that PyTorch hands out (``Tensor._version``, ``Module._parameters``,
``OpOverload._schema``, ``UntypedStorage._cdata``) are no symbols of a module and are used where
they are needed.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad as _forward_ad

SEEN = "2.9 to 2.15"
"""The releases of PyTorch in which the symbols were seen whose rows name no others."""

logger = logging.getLogger("liger_multi")
Marked = TypeVar("Marked", bound=Callable[..., Any])
_MISSING = object()


@dataclass
class Symbol:
    """One row of the table.

    Attributes:
        paths: Where it stands; more than one where releases differ, the preferred one first.
        serves: What needs it.
        lost: What does not work, or costs more, without it. Empty: the same is done by public
            means.
        versions: The releases of PyTorch in which it was seen.
        absent: Whether this PyTorch lacks it.
    """

    paths: tuple[str, ...]
    serves: str
    lost: str = ""
    versions: str = SEEN
    absent: bool = False
    said: bool = field(default=False, repr=False)

    def say(self) -> None:
        """Log, once, what is switched off."""
        if self.absent and self.lost and not self.said:
            self.said = True
            logger.warning("%s", self)

    def __str__(self) -> str:
        lost = self.lost or "public functions do the same"
        return f"PyTorch {torch.__version__} has no {self.paths[0]} (for {self.serves}): {lost}"


SYMBOLS: list[Symbol] = []
"""The table, in the order of this file."""


def missing_symbols() -> list[Symbol]:
    """The symbols that this PyTorch lacks."""
    return [symbol for symbol in SYMBOLS if symbol.absent]


def _lookup(path: str) -> Any:
    """The object at a dotted path; the longest part of it that is a loaded module comes first."""
    parts = path.split(".")
    count = next(n for n in range(len(parts), 0, -1) if ".".join(parts[:n]) in sys.modules)
    value: Any = sys.modules[".".join(parts[:count])]
    for name in parts[count:]:
        try:
            value = getattr(value, name)
        except (AttributeError, RuntimeError):  # torch.ops raises either
            return _MISSING
    return value


def bind(
    *paths: str, serves: str, instead: Any = None, lost: str = "", versions: str = SEEN
) -> Any:
    """One row of the table: the object at the first path that exists, else what stands in.

    Args:
        paths: Of the symbol.
        serves: What needs it.
        instead: What stands in. Where ``lost`` is not empty, a function logs it when it is called
            first; who tests for None calls :func:`log_missing`.
        lost: See :class:`Symbol`.
        versions: See :class:`Symbol`.
    """
    symbol = Symbol(paths, serves, lost, versions)
    SYMBOLS.append(symbol)
    for path in paths:
        value = _lookup(path)
        if value is not _MISSING:
            return value
    symbol.absent = True
    if lost and callable(instead) and not isinstance(instead, type):
        return _announced(symbol, instead)
    return instead


def _announced(symbol: Symbol, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        symbol.say()
        return function(*args, **kwargs)

    return run


def lazy_symbol(path: str, serves: str, lost: str = "") -> Callable[[], Any]:
    """A row whose module is imported when the returned function is called; None: it is missing."""
    symbol = Symbol((path,), serves, lost)
    SYMBOLS.append(symbol)

    @functools.cache
    def look_up() -> Any:
        module = path.rpartition(".")[0]
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
        value = _lookup(path)
        symbol.absent = value is _MISSING
        symbol.say()
        return None if symbol.absent else value

    return look_up


def log_missing(*names: str) -> None:
    """Log, once, what is switched off without the symbols of these names."""
    for symbol in SYMBOLS:
        if symbol.paths[0].rpartition(".")[2].lstrip("_") in names:
            symbol.say()


# --- autocast ---


def _autocast_types() -> list[str]:
    accelerator = torch.accelerator.current_accelerator()
    types = ["cpu"] if accelerator is None else ["cpu", accelerator.type]
    return [device_type for device_type in types if torch.is_autocast_enabled(device_type)]


class _WithoutAutocast(contextlib.ExitStack):
    def __enter__(self) -> Any:
        for device_type in _autocast_types():
            self.enter_context(torch.autocast(device_type, enabled=False))
        return super().__enter__()


is_any_autocast_enabled = bind(
    "torch._C._is_any_autocast_enabled",
    serves="operators, which run without autocast",
    instead=lambda: bool(_autocast_types()),
)
WithoutAutocast = bind(
    "torch._C._DisableAutocast",
    serves="operators, which run without autocast",
    instead=_WithoutAutocast,
)

# --- who looks on: profilers, dispatch modes, tracers, transforms ---

profiler_enabled = bind(
    "torch._C._autograd._profiler_enabled",
    "torch.autograd._profiler_enabled",
    serves="names of operators in profiles",
    instead=lambda: False,
    lost="a profile shows what operators consist of, not their names",
)
dispatch_mode_count = bind(
    "torch._C._len_torch_dispatch_stack",
    serves="dispatch modes, which see one call per operator",
    instead=lambda: 1,
    lost="every call goes through torch.library, which costs some 20 us",
)
is_tracing = bind(
    "torch._C._is_tracing",
    serves="torch.jit.trace, which sees one call per operator",
    instead=getattr(torch.jit, "is_tracing", lambda: False),
)
_interpreter = bind(
    "torch._C._functorch.peek_interpreter_stack",
    serves="torch.func, if torch._C._are_functorch_transforms_active is missing",
    instead=lambda: None,
)
transforms_active = bind(
    "torch._C._are_functorch_transforms_active",
    serves="torch.func, whose transforms operators refuse",
    instead=lambda: _interpreter() is not None,
)
is_functorch_wrapped = bind(
    "torch._C._functorch.is_functorch_wrapped_tensor",
    serves="torch.func, whose tensors operators refuse",
    instead=lambda tensor: False,
    lost="tensors that leaked out of a transform of torch.func are not refused",
)
is_legacy_batched = bind(
    "torch._C._functorch.is_legacy_batchedtensor",
    serves="torch.autograd.grad(is_grads_batched=True), which operators refuse",
    instead=lambda tensor: False,
    lost="is_grads_batched=True has no message of ours",
)
disable_current_modes = bind(
    "torch.utils._python_dispatch._disable_current_modes",
    serves="probes, which run outside of the caller's dispatch modes",
    instead=contextlib.nullcontext,
    lost="patch() inside of a dispatch mode may recognize fewer modules",
)


class _Levels:
    """The level of forward-mode derivatives, by trying to open one: they cannot be nested."""

    unpack_dual = staticmethod(_forward_ad.unpack_dual)

    @property
    def _current_level(self) -> int:
        try:
            with _forward_ad.dual_level():
                return -1
        except RuntimeError:
            return 0


forward_ad: Any = _forward_ad
"""A module or object whose ``_current_level`` is 0 or more within forward-mode derivatives."""
if bind("torch.autograd.forward_ad._current_level", serves="forward-mode AD") is None:
    forward_ad = _Levels()


def forward_ad_level() -> int:
    """The level of forward-mode derivatives that is open, or -1."""
    return forward_ad._current_level  # type: ignore[no-any-return]


is_deterministic = bind(
    "torch._C._get_deterministic_algorithms",
    serves="the switch of deterministic results",
    instead=torch.are_deterministic_algorithms_enabled,
)
set_deterministic = bind(
    "torch._C._set_deterministic_algorithms",
    serves="FlashAttention, whose backward is in order only by this switch",
    instead=torch.use_deterministic_algorithms,
)

# --- compilers ---

IS_COMPILING = (
    "_is_compiling_flag"
    if bind("torch.compiler._is_compiling_flag", serves="calls outside of compilers") is not None
    else "is_compiling()"
)
"""What of ``torch.compiler`` tells that a compiler traces, without two calls where possible."""

_EXPORTING = bind("torch.compiler._is_exporting_flag", serves="logits under torch.export")

if _EXPORTING is None:

    def is_exporting() -> bool:
        """Whether ``torch.export`` traces."""
        return torch.compiler.is_exporting()

else:

    def is_exporting() -> bool:
        """Whether ``torch.export`` traces; ``is_exporting()`` of torch < 2.12 means any graph."""
        return torch.compiler._is_exporting_flag


DYNAMO = "torch._dynamo"
"""The compiler's module, which ``sys.modules`` has where something was compiled."""
frame_callback = bind(
    "torch._C._dynamo.eval_frame.get_eval_frame_callback",
    serves="lazy logits, which ask whether a compiler traces their consumer",
)
instruction_translator = lazy_symbol(
    "torch._dynamo.symbolic_convert.InstructionTranslator",
    serves="lazy logits in a compiled function",
    lost="compiled models compute their logits",
)
lookup_backend = lazy_symbol(
    "torch._dynamo.lookup_backend",
    serves="bisect with compile=",
    lost="two sides that are compiled alike may share a graph",
)
function_apply_code = bind(
    "torch.autograd.Function.apply.__func__.__code__",
    serves="logits of compiled models, which refuse to be the input of an autograd.Function",
    versions="2.9 to 2.13",
)
"""The code of ``Function.apply``; None where that is not Python (2.14 and newer)."""
call_linear = bind(
    "torch._C._nn.linear",
    serves="linear layers, whose function may have been replaced before import",
    instead=nn.functional.linear,
)


def constant_in_graphs(function: Marked) -> Marked:
    """Let the compiler call ``function`` while it traces and keep the result.

    The mark that ``torch.compiler.assume_constant_result`` sets; calling that would import the
    whole compiler, and Triton with it, at import.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def outside_of_graphs(function: Any, message: str) -> None:
    """Mark a function as ``torch.compiler.disable`` does, which would import the compiler here."""
    function._torchdynamo_disable = True
    function._torchdynamo_disable_msg = message


_disabled: dict[Any, Any] = {}


def disabled(function: Any) -> Any:
    """``function`` out of reach of a compiler that may be at work; itself before one is loaded."""
    if DYNAMO not in sys.modules:
        return function
    if function not in _disabled:
        _disabled[function] = sys.modules[DYNAMO].disable(function)
    return _disabled[function]


# --- autograd ---

_UNKNOWN_HOOKS = (None, None)

top_saved_tensor_hooks = bind(
    "torch._C._autograd._top_saved_tensors_default_hooks",
    serves="operators and logits in checkpointed functions",
    instead=lambda ignore_is_tracing: _UNKNOWN_HOOKS,
    lost="more is computed again: whether a function is checkpointed is unknown",
)
_pop_saved_tensor_hooks = bind(
    "torch._C._autograd._pop_saved_tensors_default_hooks",
    serves="logits in checkpointed functions",
)
_push_saved_tensor_hooks = bind(
    "torch._C._autograd._push_saved_tensors_default_hooks",
    serves="logits in checkpointed functions",
)


@contextlib.contextmanager
def without_saved_tensor_hooks() -> Iterator[None]:
    """Run a block outside of hooks on saved tensors, where they can be taken off."""
    hooks: list[Any] = []
    if _pop_saved_tensor_hooks is not None and _push_saved_tensor_hooks is not None:
        while (pair := top_saved_tensor_hooks(True)) and pair is not _UNKNOWN_HOOKS:
            _pop_saved_tensor_hooks()
            hooks.append(pair)
    try:
        yield
    finally:
        for pack, unpack in reversed(hooks):
            _push_saved_tensor_hooks(pack, unpack)


def _next_sequence_nr() -> int:
    node: Any = torch.ones((), requires_grad=True).detach().requires_grad_().view(()).grad_fn
    return int(node._sequence_nr()) + 1


next_sequence_nr = bind(
    "torch._C._autograd._get_sequence_nr",
    serves="the order of optimizer steps and graph nodes",
    instead=_next_sequence_nr,
)
_graph_task = bind(
    "torch._C._current_graph_task_id",
    serves="memory profiles, if torch._C._current_autograd_node is missing",
    instead=lambda: -1,
)
current_autograd_node = bind(
    "torch._C._current_autograd_node",
    serves="memory profiles and estimates, which tell backward from forward",
    instead=lambda: None if _graph_task() == -1 else _MISSING,
    lost="a profile of backward names no modules",
)

_exclusion = bind(
    "torch._C._SetExcludeDispatchKeyGuard",
    serves="kept results of operators, of which a later write is noticed",
    instead=lambda key, on: contextlib.nullcontext(),
    lost="a write in place to a kept result goes unnoticed",
)
_version_key = bind(
    "torch._C.DispatchKey.ADInplaceOrView", serves="kept results of operators, as above"
)


def detached(tensor: Any) -> Any:
    """``tensor.detach()`` with the version counter of the tensor, below autograd as well."""
    has_key = _version_key is not None
    with _exclusion(_version_key, False) if has_key else contextlib.nullcontext():
        return tensor.detach()


_keeps_graph = bind(
    "torch._C._autograd._get_current_graph_task_keep_graph",
    serves="gradients that overwrite what forward saved, where no second backward can read it",
    instead=lambda: True,
)


def may_overwrite() -> bool:
    """Whether a backward pass runs whose operators may overwrite, and return, what forward saved.

    A graph that is retained reads it again, a captured pass may be replayed without its forward
    pass, and a compiled graph plans its memory by itself.
    """
    compiled = type(current_autograd_node()).__name__ == "CompiledFunctionBackward"
    captured = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
    return not (compiled or captured or _keeps_graph())


def _run_backward(tensors: Any, grads: Any, *_: Any, **__: Any) -> None:
    torch.autograd.backward(tensors, grads)


run_backward = bind(
    "torch.autograd.graph._engine_run_backward",
    serves="estimates, whose backward keeps function modes",
    instead=_run_backward,
    lost="estimates with recomputation may be less exact",
)
_storage_use_count = bind(
    "torch._C._storage_Use_Count",
    serves="estimates of gradients that autograd adds in place",
    lost="estimates take every sum of two gradients for a new tensor",
)
_use_count = bind(
    "torch.Tensor._use_count",
    serves="estimates of gradients that autograd adds in place",
    lost="estimates take every sum of two gradients for a new tensor",
)


def reference_counts(tensor: Tensor) -> tuple[int, int] | None:
    """How many hold a tensor and its storage in C++; None where PyTorch does not tell."""
    if _storage_use_count is None or _use_count is None:
        log_missing("storage_Use_Count", "use_count")
        return None
    return _use_count(tensor), _storage_use_count(tensor.untyped_storage()._cdata)


# --- objects that autograd's threads see ---


class _OwnThread(threading.local):
    def __init__(self) -> None:
        self.objects: dict[str, Any] = {}

    def put(self, key: str, value: Any) -> None:
        self.objects[key] = value


_own_thread = _OwnThread()
_SCOPES = "use(...) of configurations does not reach threads of autograd"
_HANDED = {"serves": "use(...), which reaches threads of autograd"}
_tls: tuple[Any, ...] = (
    bind("torch._C._stash_obj_in_tls", **_HANDED, lost=_SCOPES),
    bind("torch._C._is_key_in_tls", **_HANDED, lost=_SCOPES),
    bind("torch._C._get_obj_in_tls", **_HANDED, lost=_SCOPES),
)
if None in _tls:

    def _stash(key: str, value: Any) -> None:
        log_missing("stash_obj_in_tls", "is_key_in_tls", "get_obj_in_tls")
        _own_thread.put(key, value)

    _tls = (
        _stash,
        lambda key: key in _own_thread.objects,
        lambda key: _own_thread.objects[key],
    )
stash_in_thread, is_stashed, stashed = _tls

# --- tensor subclasses and dispatch ---

DisableTorchFunction = bind(
    "torch._C.DisableTorchFunction",
    "torch._C.DisableTorchFunctionSubclass",
    serves="probes and profiles, in which the caller's function modes have no say",
    instead=contextlib.nullcontext,
    lost="a function mode of the caller sees probes",
)
DisableTorchFunctionSubclass = bind(
    "torch._C.DisableTorchFunctionSubclass",
    "torch._C.DisableTorchFunction",
    serves="lazy logits",
    lost="logits are computed at once",
)
EnableTorchFunction = bind(
    "torch._C._EnableTorchFunction",
    serves="recognizing sparse attention",
    lost="sparse attention is not replaced",
)
DisableTorchDispatch = bind(
    "torch._C._DisableTorchDispatch",
    serves="FP8 weights under FSDP2",
    lost="FSDP2 gathers weights in their own dtype",
)


def _without_torch_function(
    cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None
) -> Any:
    with DisableTorchFunctionSubclass():
        return func(*args, **(kwargs or {}))


no_torch_function = bind(
    "torch._C._disabled_torch_function_impl",
    serves="FP8 weights, which need no __torch_function__",
    instead=classmethod(_without_torch_function),
)
make_wrapper_subclass = bind(
    "torch.Tensor._make_wrapper_subclass",
    serves="lazy logits and FP8 weights",
    lost="logits are computed at once, and weights are not kept in FP8",
)
make_subclass = bind(
    "torch.Tensor._make_subclass",
    serves="FP8 weights under FSDP2",
    lost="FSDP2 gathers weights in their own dtype",
)
throw_on_mutable_data_ptr = bind(
    "torch._C._set_throw_on_mutable_data_ptr",
    serves="lazy logits, which have no memory that C++ may read",
    lost="logits are computed at once",
)


def lazy_logits_work() -> bool:
    """Whether a tensor without memory can stand for logits; the log says why it cannot."""
    if None not in (throw_on_mutable_data_ptr, make_wrapper_subclass, DisableTorchFunctionSubclass):
        return True
    log_missing(
        "set_throw_on_mutable_data_ptr", "make_wrapper_subclass", "DisableTorchFunctionSubclass"
    )
    return False


tensor_base = bind("torch.Tensor._base.__get__", serves="lazy logits, which are views of nothing")
is_wrapper_subclass = bind(
    "torch.utils._python_dispatch.is_traceable_wrapper_subclass",
    serves="bisect, which reads plain tensors",
    instead=lambda value: hasattr(value, "__tensor_flatten__"),
)
fake_tensor = lazy_symbol(
    "torch._subclasses.FakeTensor",
    serves="bisect, which skips tensors without numbers",
    lost="bisect cannot look at models of fake tensors",
)


class _NoDispatchMode:
    def __enter__(self) -> Any:
        raise RuntimeError(
            f"PyTorch {torch.__version__} has no torch.utils._python_dispatch.TorchDispatchMode; "
            "memory is neither measured nor estimated without it"
        )

    def __exit__(self, *_: Any) -> None:
        pass


if TYPE_CHECKING:
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
else:
    TorchDispatchMode = bind(
        "torch.utils._python_dispatch.TorchDispatchMode",
        serves="measuring and estimating memory",
        instead=_NoDispatchMode,
        lost="memory is neither measured nor estimated",
    )


def _map(function: Callable[[Any], Any], tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _map(function, value) for key, value in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(_map(function, value) for value in tree))
    if isinstance(tree, (list, tuple)):
        return type(tree)(_map(function, value) for value in tree)
    return function(tree)


def _leaves(tree: Any) -> list[Any]:
    leaves: list[Any] = []
    _map(leaves.append, tree)
    return leaves


def _map_only(cls: type, function: Callable[[Any], Any], tree: Any) -> Any:
    return _map(lambda value: function(value) if isinstance(value, cls) else value, tree)


tree_map = bind("torch.utils._pytree.tree_map", serves="arguments that hold tensors", instead=_map)
tree_leaves = bind(
    "torch.utils._pytree.tree_leaves", serves="arguments that hold tensors", instead=_leaves
)
tree_map_only = bind(
    "torch.utils._pytree.tree_map_only", serves="arguments that hold tensors", instead=_map_only
)
tensor_constructors = lazy_symbol(
    "torch.utils._device._device_constructors",
    serves="the operator suite, which fills uninitialized memory",
)

# --- modules ---

_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
_LOSSES = tuple(v for k, v in vars(nn).items() if k.endswith("Loss") and isinstance(v, type))

BatchNorms: Any = bind(
    "torch.nn.modules.batchnorm._NormBase",
    serves="modules that patch() skips",
    instead=(*_NORMS, *_INSTANCE_NORMS),
)
Dropouts: Any = bind(
    "torch.nn.modules.dropout._DropoutNd",
    serves="trials of packed rows, which turn dropout off",
    instead=(*_DROPOUTS, nn.FeatureAlphaDropout),
)
Losses: Any = bind(
    "torch.nn.modules.loss._Loss", serves="reports on what a model runs", instead=_LOSSES
)
GLOBAL_HOOKS: tuple[dict[int, Any], ...] = tuple(
    bind(
        f"torch.nn.modules.module.{name}",
        serves="hooks on every module, which patched modules run",
        instead={},
        lost="such hooks do not see modules that a patched one computes itself",
    )
    for name in (
        "_global_forward_pre_hooks",
        "_global_forward_hooks",
        "_global_backward_pre_hooks",
        "_global_backward_hooks",
    )
)
module_call = bind(
    "torch.nn.Module._call_impl",
    serves="reports on what a model runs, and bisect",
    lost="reports do not tell which modules ran",
)


def replace_module_call(function: Any) -> Any:
    """Have every module called by ``function``, and give what called them before."""
    if module_call is None:
        log_missing("call_impl")
        return None
    original = nn.Module._call_impl
    nn.Module._call_impl = function  # type: ignore[method-assign]
    return original


# --- operators of PyTorch ---


def _public_grouped_mm(a: Tensor, b: Tensor, offs: Any) -> Tensor:
    return nn.functional.grouped_mm(a, b, offs=offs)


def _no_scaled_mm(*_: Any, **__: Any) -> Tensor:
    raise NotImplementedError("this PyTorch has no torch._scaled_mm")


grouped_mm: Callable[..., Tensor] = bind(
    "torch._grouped_mm",
    serves="experts, by PyTorch's grouped GEMM where the launch table asks for it",
    instead=_public_grouped_mm if hasattr(nn.functional, "grouped_mm") else None,
    lost="" if hasattr(nn.functional, "grouped_mm") else "experts run on our kernels",
)
scaled_mm: Callable[..., Tensor] = bind(
    "torch._scaled_mm",
    serves="GEMMs in FP8",
    instead=_no_scaled_mm,
    lost="FP8 GEMMs are GEMMs of dequantized numbers",
)
assert_async = bind(
    "torch._assert_async",
    serves="checks of masks in compiled models",
    instead=lambda condition, message: None,
    lost="compiled models do not check masks",
)
_KERNELS = {"serves": "attention", "lost": "attention runs on our kernels, not on PyTorch's"}
cudnn_attention, cudnn_attention_backward, flash_attention, flash_attention_backward = (
    bind(f"torch.ops.aten._scaled_dot_product_{name}", **_KERNELS)
    for name in (
        "cudnn_attention",
        "cudnn_attention_backward",
        "flash_attention",
        "flash_attention_backward",
    )
)
HAS_ATTENTION = {
    "cudnn": None not in (cudnn_attention, cudnn_attention_backward),
    "flash": None not in (flash_attention, flash_attention_backward),
}
to_copy = bind("torch.ops.aten._to_copy.default", serves="FP8 weights, which stay so on a copy")
pin_memory = bind("torch.ops.aten._pin_memory.default", serves="FP8 weights in pinned memory")
dispatch_key = bind(
    "torch._C._dispatch_key_for_device",
    serves="losses, which count valid targets without waiting",
    lost="a loss waits for the number of valid targets",
)
has_kernel: Callable[..., bool] = bind(
    "torch._C._dispatch_has_kernel_for_dispatch_key",
    serves="losses, which count valid targets without waiting",
    lost="a loss waits for the number of valid targets",
)
get_onednn = bind(
    "torch._C._get_mkldnn_enabled",
    serves="probes, which need fp32 as it is",
    instead=lambda: getattr(torch.backends.mkldnn, "enabled", True),
)
set_onednn = bind(
    "torch._C._set_mkldnn_enabled",
    serves="probes, which need fp32 as it is",
    instead=torch.backends.mkldnn.set_flags,
)


def memory_history(memory: Any) -> tuple[Callable[..., Any], Callable[[], Any]] | None:
    """What switches a device's record of allocations on and off, and what reads it."""
    names = ("_record_memory_history", "_snapshot")
    if memory is None or not all(hasattr(memory, name) for name in names):
        return None
    return memory._record_memory_history, memory._snapshot


for _name in ("_record_memory_history", "_snapshot"):
    bind(
        f"torch.cuda.memory.{_name}",
        serves="memory profiles of a device",
        lost="profiles do not tell reserved memory",
    )


def empty_host_cache() -> None:
    """Give pinned host memory that no tensor uses back; public from PyTorch 2.13 on."""
    empty = getattr(torch.accelerator, "empty_host_cache", None)
    empty = empty or getattr(torch._C, "_host_emptyCache", None)
    if empty is not None:
        empty()
