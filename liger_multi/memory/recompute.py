"""Run decoder layers under a recompute policy, and take it back.

A policy says which results of a layer are kept for backward, and which are computed again. It names
operators: PyTorch's GEMMs and attention, and ours. What a policy keeps is the *result* of an
operator; backward then runs the layer's forward once more, in which a kept result is looked up and
everything else is computed, up to the last tensor that is needed.
"""

from __future__ import annotations

import functools
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from liger_multi import checks
from liger_multi._torch_private import TorchDispatchMode, detached, tree_map, tree_map_only
from liger_multi.errors import check_name
from liger_multi.modules.arguments import parameters_of, without_caches

# --- policies ---

# GEMMs with weights. Batched ones without weights are unfused attention: as large as its scores.
PRODUCTS = (
    *("aten::mm", "aten::addmm", "aten::linear", "aten::_scaled_mm", "aten::_grouped_mm"),
    *("aten::convolution", "aten::mkldnn_linear*", "bitsandbytes::*"),
    *("liger_multi::fused_moe_*", "liger_multi::lora_moe_*", "liger_multi::linear_float8_*"),
)
ATTENTION = (
    *(
        "*scaled_dot_product_*",
        "aten::_flash_attention_forward",
        "flash_attn*::*",
        "flex_attention",
    ),
    *("aten::_efficient_attention_forward", "liger_multi::*attention_forward"),
)
# Gated activations of ours are in no list: their operators compute them again as they are.
ACTIVATIONS = (
    *("aten::silu", "aten::gelu", "aten::relu", "aten::sigmoid", "aten::tanh", "aten::hardswish"),
    "liger_multi::relu_squared_*",
)


@dataclass(frozen=True)
class Policy:
    """Which results of a layer are kept for backward.

    Attributes:
        name: Its name in :data:`POLICIES`.
        description: What it keeps, in one line.
        keeps: Patterns of names of operators (``namespace::name``) whose results are kept; all
            others are computed again. None: nothing is.
        widening: Whether GEMMs whose output rows are longer than their input rows are kept too.
    """

    name: str
    description: str
    keeps: tuple[str, ...] | None = ()
    widening: bool = True

    def keep(self, op: str, width: tuple[int, int] | None = None) -> bool:
        """Whether the result of an operator is kept.

        Args:
            op: ``namespace::name``.
            width: Of a GEMM: columns of its input and of its output.
        """
        if self.keeps is None:
            return True
        if width is not None and not self.widening and width[1] > width[0]:
            return False
        return any(fnmatchcase(op, pattern) for pattern in self.keeps)


POLICIES: Mapping[str, Policy] = MappingProxyType(
    {
        policy.name: policy
        for policy in (
            Policy("none", "keep what autograd keeps; compute nothing again", None),
            Policy(
                "norms",
                "compute norms, rotary embeddings and sums again; keep products, attention and "
                "activations",
                PRODUCTS + ATTENTION + ACTIVATIONS,
            ),
            Policy(
                "norms_and_mlp",
                "keep products and attention; compute everything else again",
                PRODUCTS + ATTENTION,
            ),
            Policy(
                "narrow",
                "keep attention and products that are no wider than their input; compute the inner "
                "tensors of the MLP again",
                PRODUCTS + ATTENTION,
                widening=False,
            ),
            Policy("keep_attention", "keep attention; compute everything else again", ATTENTION),
            Policy("full", "keep the layer's input only"),
        )
    }
)
"""Policies by name, from the least to the most recomputation."""


def policy_of(policy: str | Policy) -> Policy:
    """A policy by its name; a policy is returned as it is."""
    if isinstance(policy, Policy):
        return policy
    check_name(ValueError, "recompute policy", policy, POLICIES)
    return POLICIES[policy]


def _name(func: Any) -> str:
    """``namespace::name`` without the overload; a higher-order operator has a bare name."""
    name = func.name() if callable(getattr(func, "name", None)) else str(func)
    return str(name).partition(".")[0]


@functools.cache
def _keeps_result(policy: Policy, func: Any, width: tuple[int, int] | None) -> bool:
    return policy.keep(_name(func), width)


@functools.cache
def _is_product(func: Any) -> bool:
    return any(fnmatchcase(_name(func), pattern) for pattern in PRODUCTS)


@functools.cache
def _randomness(func: Any) -> int | None:
    """Position of the dropout probability in an operator that may draw numbers; -1: it always does.

    None: it never does.
    """
    tags = getattr(func, "tags", ())
    if torch.Tag.nondeterministic_seeded not in tags:
        return None
    names = [argument.name for argument in func._schema.arguments]
    return names.index("dropout_p") if "dropout_p" in names else -1


def _draws(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call takes random numbers: one that did must run again, or later ones differ."""
    argument = _randomness(func)
    if argument is None:
        return False
    if argument < 0:
        return True
    dropout = args[argument] if argument < len(args) else kwargs.get("dropout_p", 0.0)
    return bool(dropout)


def _width(func: Any, args: tuple[Any, ...]) -> tuple[int, int] | None:
    """Columns of the input and of the result of a GEMM, whose factors are its last two matrices.

    PyTorch's second factor is (columns in, columns out); that of our layers is the weight.
    """
    factors = [a for a in args[:3] if isinstance(a, torch.Tensor) and a.ndim > 1]
    out = 0 if _name(func).startswith("liger_multi::linear_float8") else -1
    return (factors[-2].shape[-1], factors[-1].shape[out]) if len(factors) > 1 else None


def keeps_result(
    policy: Policy, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> bool:
    """Whether the result of this call of an operator is kept."""
    width = _width(func, args) if not policy.widening and _is_product(func) else None
    return _keeps_result(policy, func, width) and not _draws(func, args, kwargs)


# Their backward reads nothing: what comes before them at the end of a layer is not needed.
_UNREAD = (
    *("aten::add", "aten::view", "aten::_unsafe_view", "aten::reshape", "aten::t", "aten::detach"),
    *("aten::transpose", "aten::permute", "aten::_reshape_alias", "aten::alias", "aten::expand"),
)


@functools.cache
def _unread(func: Any) -> bool:
    return _name(func) in _UNREAD


class Counted:
    """A policy within one run of a layer, which leaves out a last GEMM that nobody reads.

    Args:
        policy: The policy of the layer.
        skip: Number of the kept call that :attr:`last` was in an earlier run.

    Attributes:
        last: Number of the last kept call, if it is a GEMM and nothing after it is saved.
    """

    def __init__(self, policy: Policy, skip: int | None) -> None:
        self._policy, self._skip = policy, skip
        self._counts = [0, 0]
        self.last: int | None = None

    def __call__(self, context: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
        """PyTorch asks here what to do with the result of one operator."""
        if self.keeps(bool(context.is_recompute), func, args, kwargs):
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    def keeps(self, again: bool, func: Any, args: tuple[Any, ...], kwargs: Any) -> bool:
        """Whether the result of an operator is kept, or was kept if the layer runs again."""
        if not keeps_result(self._policy, func, args, kwargs):
            if not again and not _unread(func):
                self.last = None
            return False
        index = self._counts[again]
        self._counts[again] += 1
        if not again:
            self.last = index if _is_product(func) else None
        return index != self._skip


def traced(policy: Policy) -> Callable[..., Any]:
    """A policy for a compiler, which asks while it traces and drops what nobody reads by itself.

    It is a function because Dynamo would take an argument apart and build it again. What PyTorch
    2.9 (of a dataclass) and 2.11 (of a named tuple) build then differs from the argument.
    """

    def answer(context: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
        if keeps_result(policy, func, args, kwargs):
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return answer


# --- results that are kept elsewhere ---

store: ContextVar[Any] = ContextVar("liger_multi_store", default=None)
"""What packs the results that policies keep, and unpacks them; None: they stay as they are."""


@functools.cache
def _is_attention(func: Any) -> bool:
    return any(fnmatchcase(_name(func), pattern) for pattern in ATTENTION)


class _Packed(TorchDispatchMode):
    """Pack the results that a policy keeps, or unpack them in place of running their operators.

    Args:
        policy: The policy of the layer.
        packer: Packs and unpacks, from :data:`store`.
        results: Kept results of operators, in order.
        again: Whether the layer is recomputed.
    """

    def __init__(self, policy: Counted, packer: Any, results: deque[Any], again: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._policy, self._packer, self._results, self._again = policy, packer, results, again

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self._policy.keeps(self._again, func, args, kwargs):
            return func(*args, **kwargs)
        if self._again:
            if not self._results:
                raise RuntimeError(
                    "a layer under a recompute policy with offload has one backward: what it kept "
                    "is gone"
                )
            return tree_map(self._packer.unpack, self._results.popleft())
        result = func(*args, **kwargs)
        first = result[0] if isinstance(result, (tuple, list)) else result

        def pack(tensor: Tensor) -> Any:
            # the others are statistics, such as log-sum-exp, in which errors grow
            return self._packer.pack(detached(tensor), tensor is first and _is_attention(func))

        self._results.append(tree_map_only(Tensor, pack, result))
        return result


def _contexts(policy: Counted, packer: Any) -> tuple[Any, Any]:
    """The contexts of a layer's first run and of its recomputation."""
    if packer is None:
        first, second = create_selective_checkpoint_contexts(policy)
        return first, second
    results: deque[Any] = deque()
    return _Packed(policy, packer, results, False), _Packed(policy, packer, results, True)


# --- layers under a policy ---

Policies = str | Policy | Sequence[str | Policy] | Mapping[int, str | Policy]


def decoder_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Path and module of every layer, in order: the entries of the outermost lists of blocks.

    A block has at least two matrices; lists inside of blocks, such as experts, are parts of them.
    """
    layers: list[tuple[str, nn.Module]] = []

    def visit(module: nn.Module, path: str) -> None:
        for name, child in module.named_children():
            child_path = f"{path}.{name}" if path else name
            blocks = list(child.named_children()) if isinstance(child, nn.ModuleList) else []
            if blocks and all(
                sum(p.ndim > 1 for p in block.parameters()) > 1 for _, block in blocks
            ):
                layers.extend((f"{child_path}.{index}", block) for index, block in blocks)
            else:
                visit(child, child_path)

    visit(model, "")
    return layers


class _Recomputed:
    """What stands in for a layer's ``forward``; plain attributes, so that copies copy it."""

    def __init__(self, layer: nn.Module, path: str, policy: Policy, rng: bool) -> None:
        self.layer, self.path, self.policy, self.rng = layer, path, policy, rng
        self.before = layer.__dict__.get("forward")
        self.names = parameters_of(type(layer).forward)
        self.learned: dict[tuple[type, str], int | None] = {}
        self.skip: int | None = None
        self._make_contexts()

    def _make_contexts(self) -> None:
        # built before the call, as a compiler takes it for a constant
        self.contexts = functools.partial(create_selective_checkpoint_contexts, traced(self.policy))

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "contexts"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._make_contexts()

    def original(self, *args: Any, **kwargs: Any) -> Any:
        """Call the layer's own forward."""
        if self.before is not None:
            return self.before(*args, **kwargs)
        return type(self.layer).forward(self.layer, *args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer under its policy; unchanged without gradients."""
        if not torch.is_grad_enabled() or self.policy.keeps is None:
            return self.original(*args, **kwargs)
        is_checkpointed = (
            getattr(self.layer, "gradient_checkpointing", False) and self.layer.training
        )
        if is_checkpointed or checks.in_checkpoint():
            raise RuntimeError(
                f"{self.path} runs under the recompute policy {self.policy.name!r} and under "
                "another checkpointing, which would compute it twice: call "
                "model.gradient_checkpointing_disable(), or remove() the policy"
            )
        if not getattr(self.layer, "_can_checkpoint_with_cache", False):
            args, kwargs = self._without_cache(args, kwargs)
        return self._run(args, kwargs)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": self.rng}
        if self.policy.keeps == ():
            return checkpoint(self.original, *args, **options, **kwargs)
        if torch.compiler.is_compiling():
            options["context_fn"] = self.contexts
            return checkpoint(self.original, *args, **options, **kwargs)
        key = (type(self.layer), self.policy.name)
        skip = self.skip if self.skip is not None else self.learned.get(key)
        policy = Counted(self.policy, skip)
        options["context_fn"] = functools.partial(_contexts, policy, store.get())
        result = checkpoint(self._by_products, *args, **options, **kwargs)
        self.skip = self.learned[key] = policy.last
        return result

    def _by_products(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer with an operator for each GEMM, now and when it is recomputed."""
        token = checks.keeps_products.set(True)
        try:
            return self.original(*args, **kwargs)
        finally:
            checks.keeps_products.reset(token)

    def _without_cache(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Turn the cache off: computing a layer again would write into it again."""
        args, kwargs, dropped = without_caches(args, kwargs, self.names)
        if dropped and not torch.compiler.is_compiling():
            _warn(
                f"a recomputed layer writes no cache: {', '.join(dropped)} left out in {self.path}"
            )
        return args, kwargs


@functools.cache
def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=3)


class Recompute:
    """What :func:`apply_recompute` did; a context manager that takes it back at its end.

    Attributes:
        policies: Name of the policy of every layer, by its path, in order.
    """

    def __init__(self, policies: dict[str, str], wrapped: list[_Recomputed]) -> None:
        self.policies = policies
        self._wrapped = wrapped

    def remove(self) -> None:
        """Give every layer back the ``forward`` it had.

        Raises:
            RuntimeError: Somebody else replaced it since; nothing is changed then.
        """
        for wrapper in self._wrapped:
            if wrapper.layer.__dict__.get("forward") is not wrapper:
                raise RuntimeError(
                    f"the forward of {wrapper.path} was replaced after apply_recompute "
                    f"({wrapper.layer.__dict__.get('forward')!r:.80}); undo that first"
                )
        for wrapper in self._wrapped:
            if wrapper.before is None:
                del wrapper.layer.__dict__["forward"]
            else:
                wrapper.layer.__dict__["forward"] = wrapper.before
        self._wrapped = []

    def __enter__(self) -> Recompute:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()

    def __str__(self) -> str:
        counts = Counter(self.policies.values())
        return ", ".join(f"{name}: {n} layers" for name, n in counts.items())


def undo_all(model: nn.Module) -> None:
    """Take back what any handle did to the layers of a model."""
    wrapped = [m.__dict__.get("forward") for m in model.modules()]
    Recompute({}, [wrapper for wrapper in wrapped if isinstance(wrapper, _Recomputed)]).remove()


def apply_recompute(
    model: nn.Module,
    policy: Policies = "norms_and_mlp",
    layers: int | Iterable[int] | None = None,
    *,
    preserve_rng_state: bool = True,
) -> Recompute:
    """Let decoder layers keep less for backward and compute the rest again.

    Loss and gradients are the same to the bit, except for rounding in a patched gated MLP, which
    runs in steps where it is recomputed. It works on Hugging Face models and others whose layers
    stand in a ``ModuleList``, patched before or after, and under ``torch.compile``.

    Args:
        model: Its layers get another ``forward``; parameters and classes are left alone.
        policy: A name of :data:`POLICIES` or a :class:`Policy` for all ``layers``; or one for each
            layer of the model, as a sequence, or by number as a mapping.
        layers: Which layers: so many from the first on (what they keep lives longest), or their
            numbers. None: all.
        preserve_rng_state: Whether random numbers (dropout) are drawn again as they were.

    Returns:
        A handle; ``remove()``, or the end of ``with``, undoes it exactly.

    Raises:
        ValueError: An unknown policy or layer, a model without layers, or one whose layers are
            checkpointed already.
    """
    model_layers = decoder_layers(model)
    if not model_layers:
        raise ValueError(f"{type(model).__name__} has no list of layers (torch.nn.ModuleList)")
    chosen = _chosen(policy, layers, len(model_layers))
    for path, layer in model_layers:
        if getattr(layer, "gradient_checkpointing", False):
            raise ValueError(
                f"{path} is checkpointed by its model already; call "
                "model.gradient_checkpointing_disable() first"
            )
        if isinstance(layer.__dict__.get("forward"), _Recomputed):
            raise ValueError(f"{path} has a recompute policy already; remove() that one first")
    wrapped: list[_Recomputed] = []
    learned: dict[tuple[type, str], int | None] = {}
    for index, layer_policy in chosen.items():
        path, layer = model_layers[index]
        if layer_policy.keeps is not None:
            recomputed = _Recomputed(layer, path, layer_policy, preserve_rng_state)
            recomputed.learned = learned
            layer.__dict__["forward"] = recomputed
            wrapped.append(recomputed)
    names = {
        path: chosen[i].name if i in chosen else "none" for i, (path, _) in enumerate(model_layers)
    }
    return Recompute(names, wrapped)


def _chosen(policy: Policies, layers: int | Iterable[int] | None, count: int) -> dict[int, Policy]:
    if isinstance(policy, str | Policy):
        layer_policy = policy_of(policy)
        numbers = range(layers) if isinstance(layers, int) else layers
        policies = dict.fromkeys(range(count) if numbers is None else numbers, layer_policy)
    elif layers is not None:
        raise ValueError(f"layers={layers!r} goes with one policy; got {policy!r:.80}")
    elif isinstance(policy, Mapping):
        policies = {index: policy_of(layer_policy) for index, layer_policy in policy.items()}
    else:
        policies = {index: policy_of(layer_policy) for index, layer_policy in enumerate(policy)}
        if len(policies) != count:
            raise ValueError(f"expected a policy for each of {count} layers, got {len(policies)}")
    invalid = [n for n in policies if not isinstance(n, int) or not 0 <= n < count]
    if invalid:
        raise ValueError(f"layers are 0 to {count - 1}, got {invalid[0]!r}")
    return policies
