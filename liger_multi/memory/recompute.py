"""Run decoder layers under a recompute policy, and take it back."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from liger_multi import checks
from liger_multi.memory.policies import Counted, Policy, policy_of, traced

CACHES = ("past_key_values", "past_key_value", "layer_past")
Policies = str | Policy | Sequence[str | Policy] | Mapping[int, str | Policy]


def decoder_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Path and module of every layer, in order: the entries of the outermost lists of blocks.

    A block has at least two matrices; lists inside of blocks, such as experts, are parts of them.
    """
    found: list[tuple[str, nn.Module]] = []

    def visit(module: nn.Module, path: str) -> None:
        for name, child in module.named_children():
            place = f"{path}.{name}" if path else name
            blocks = list(child.named_children()) if isinstance(child, nn.ModuleList) else []
            if blocks and all(_matrices(block) > 1 for _, block in blocks):
                found.extend((f"{place}.{number}", block) for number, block in blocks)
            else:
                visit(child, place)

    visit(model, "")
    return found


def _matrices(module: nn.Module) -> int:
    return sum(p.ndim > 1 for p in module.parameters())


class _Recomputed:
    """What stands in for a layer's ``forward``; plain attributes, so that copies copy it."""

    def __init__(self, layer: nn.Module, path: str, policy: Policy, rng: bool) -> None:
        self.layer, self.path, self.policy, self.rng = layer, path, policy, rng
        self.before = layer.__dict__.get("forward")
        self.learned: dict[tuple[type, str], int | None] = {}
        self.skip: int | None = None
        self._make_contexts()

    def _make_contexts(self) -> None:
        # made before it is called, as a compiler takes it for a constant
        self.contexts = functools.partial(create_selective_checkpoint_contexts, traced(self.policy))

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "contexts"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._make_contexts()

    def original(self, *args: Any, **kwargs: Any) -> Any:
        """The layer as it was."""
        if self.before is not None:
            return self.before(*args, **kwargs)
        return type(self.layer).forward(self.layer, *args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer; without gradients as it was."""
        if not torch.is_grad_enabled() or self.policy.keeps is None:
            return self.original(*args, **kwargs)
        theirs = getattr(self.layer, "gradient_checkpointing", False) and self.layer.training
        if theirs or checks.in_checkpoint():
            raise RuntimeError(
                f"{self.path} runs under the recompute policy {self.policy.name!r} and under "
                "another checkpointing, which would compute it twice: call "
                "model.gradient_checkpointing_disable(), or remove() the policy"
            )
        if not getattr(self.layer, "_can_checkpoint_with_cache", False):
            kwargs = self._without_cache(kwargs)
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
        counted = Counted(self.policy, skip)
        options["context_fn"] = lambda: create_selective_checkpoint_contexts(counted)
        result = checkpoint(self.original, *args, **options, **kwargs)
        self.skip = self.learned[key] = counted.last
        return result

    def _without_cache(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Computing a layer again would write into the cache again."""
        given = [name for name in CACHES if kwargs.get(name) is not None]
        if not given:
            return kwargs
        if not torch.compiler.is_compiling():
            _warn(f"a recomputed layer writes no cache: {', '.join(given)} left out in {self.path}")
        return {**kwargs, **dict.fromkeys(given)}


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
        for one in self._wrapped:
            if one.layer.__dict__.get("forward") is not one:
                raise RuntimeError(
                    f"the forward of {one.path} was replaced after apply_recompute "
                    f"({one.layer.__dict__.get('forward')!r:.80}); undo that first"
                )
        for one in self._wrapped:
            if one.before is None:
                del one.layer.__dict__["forward"]
            else:
                one.layer.__dict__["forward"] = one.before
        self._wrapped = []

    def __enter__(self) -> Recompute:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()

    def __str__(self) -> str:
        counts: dict[str, int] = {}
        for name in self.policies.values():
            counts[name] = counts.get(name, 0) + 1
        return ", ".join(f"{name}: {n} layers" for name, n in counts.items())


def undo_all(model: nn.Module) -> None:
    """Take back what any handle did to the layers of a model."""
    wrapped = [m.__dict__.get("forward") for m in model.modules()]
    Recompute({}, [one for one in wrapped if isinstance(one, _Recomputed)]).remove()


def apply_recompute(
    model: nn.Module,
    policy: Policies = "norms_and_mlp",
    layers: int | Iterable[int] | None = None,
    *,
    preserve_rng_state: bool = True,
) -> Recompute:
    """Let decoder layers keep less for backward and compute the rest again.

    Loss and gradients are the same to the bit. Works on Hugging Face models and others whose
    layers stand in a ``ModuleList``, patched or not, in either order, and under ``torch.compile``.

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
    found = decoder_layers(model)
    if not found:
        raise ValueError(f"{type(model).__name__} has no list of layers (torch.nn.ModuleList)")
    chosen = _chosen(policy, layers, len(found))
    for path, layer in found:
        if getattr(layer, "gradient_checkpointing", False):
            raise ValueError(
                f"{path} is checkpointed by its model already; call "
                "model.gradient_checkpointing_disable() first"
            )
        if isinstance(layer.__dict__.get("forward"), _Recomputed):
            raise ValueError(f"{path} has a recompute policy already; remove() that one first")
    wrapped: list[_Recomputed] = []
    learned: dict[tuple[type, str], int | None] = {}
    for number, one in chosen.items():
        path, layer = found[number]
        if one.keeps is not None:
            made = _Recomputed(layer, path, one, preserve_rng_state)
            made.learned = learned
            layer.__dict__["forward"] = made
            wrapped.append(made)
    names = {path: chosen[i].name if i in chosen else "none" for i, (path, _) in enumerate(found)}
    return Recompute(names, wrapped)


def _chosen(policy: Policies, layers: int | Iterable[int] | None, count: int) -> dict[int, Policy]:
    if isinstance(policy, str | Policy):
        one = policy_of(policy)
        numbers = range(layers) if isinstance(layers, int) else layers
        made = dict.fromkeys(range(count) if numbers is None else numbers, one)
    elif layers is not None:
        raise ValueError(f"layers={layers!r} goes with one policy; got {policy!r:.80}")
    elif isinstance(policy, Mapping):
        made = {number: policy_of(one) for number, one in policy.items()}
    else:
        made = {number: policy_of(one) for number, one in enumerate(policy)}
        if len(made) != count:
            raise ValueError(f"expected a policy for each of {count} layers, got {len(made)}")
    outside = [n for n in made if not isinstance(n, int) or not 0 <= n < count]
    if outside:
        raise ValueError(f"layers are 0 to {count - 1}, got {outside[0]!r}")
    return made
