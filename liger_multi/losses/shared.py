"""Shared by losses: options that check themselves, and reductions over tokens.

Sums and means, and divisors that ranks share. Every mean divides by a count of at least one: a
batch without targets has a loss of zero that is still connected to the model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar, NamedTuple, TypeAlias

import torch
from torch import Tensor

from liger_multi import checks
from liger_multi.errors import unknown

# --- options ---

FieldTypes: TypeAlias = tuple[tuple[str, str, bool], ...]
_CHECKS: dict[str, Callable[[str, str, object], Any]] = {
    "bool": checks.boolean,
    "float": checks.number,
    "int": checks.integer,
}


def field_types(annotations: Mapping[str, str]) -> FieldTypes:
    """Fields that are numbers or booleans: name, type, and whether None is allowed."""
    plain = {name: type_name.removesuffix(" | None") for name, type_name in annotations.items()}
    return tuple((n, k, annotations[n] != k) for n, k in plain.items() if k in _CHECKS)


def check_types(title: str, types: FieldTypes, owner: object) -> None:
    """Check that every field has its type."""
    for name, type_name, optional in types:
        value = getattr(owner, name)
        if not (optional and value is None):
            _CHECKS[type_name](title, name, value)


class Range(NamedTuple):
    """The numbers that an option takes: both ends, but not ``low`` where ``above``."""

    low: float = float("-inf")
    high: float = float("inf")
    above: bool = False


AT_LEAST_0, ABOVE_0, SHARE = Range(0.0), Range(0.0, above=True), Range(0.0, 1.0)


class Options:
    """Base of the dataclasses of options; an unknown name is an error that names the nearest.

    Attributes:
        RANGES: Options that are numbers within limits, and the limits; None passes where a type
            allows it.
        WORDS: Options that are words, and the words that they take.
        METRICS: What ``metrics`` may name.
    """

    NAMES: ClassVar[tuple[str, ...]] = ()
    FIELD_TYPES: ClassVar[FieldTypes] = ()
    RANGES: ClassVar[tuple[tuple[str, Range], ...]] = ()
    WORDS: ClassVar[tuple[tuple[str, Collection[str]], ...]] = ()
    METRICS: ClassVar[tuple[str, ...]] = ()
    metrics: tuple[str, ...]

    def __init_subclass__(cls) -> None:
        """Keep names and kinds: compilers do not follow ``dataclasses.fields``."""
        cls.NAMES = tuple(cls.__annotations__)
        cls.FIELD_TYPES = field_types(cls.__annotations__)

    def __post_init__(self) -> None:
        """Check types, ranges and words; subclasses check what depends on several options."""
        title = self.title()
        check_types(title, self.FIELD_TYPES, self)
        for name, allowed in self.WORDS:
            checks.one_of(title, name, getattr(self, name), allowed)
        for name, (lowest, highest, is_open) in self.RANGES:
            if getattr(self, name) is not None:
                checks.number(title, name, getattr(self, name), lowest, highest, above=is_open)
        checks.names(title, self.metrics, self.METRICS, "metrics")

    @classmethod
    def of(cls, **options: Any) -> Any:
        """Options by name."""
        for key in options:
            if key not in cls.NAMES:
                raise TypeError(f"{cls.title()}: {unknown('option', key, cls.NAMES)}")
        return cls(**options)

    @classmethod
    def title(cls) -> str:
        """The name of the loss in messages."""
        return cls.__name__.removesuffix("Options")

    def serves(self, name: str, neutral: Any, served: bool, reader: str) -> None:
        """Raise for an option that the loss type does not read."""
        value = getattr(self, name)
        if value != neutral and not served:
            raise ValueError(f"{self.title()}: {name}={value!r} has no meaning for {reader}")


# --- from tokens to sequences to a number ---


def counting_mask(name: str, target: Tensor, ignore_index: int) -> Tensor:
    """The tokens that count."""
    checks.ids(name, "target", target)
    return target != checks.integer(name, "ignore_index", ignore_index)


def of_tokens(name: str, argument: str, x: Tensor, target: Tensor) -> Tensor:
    """Check a tensor with one entry per token."""
    if not isinstance(x, Tensor) or x.shape != target.shape:
        raise ValueError(
            f"{name}: {argument} must have shape {tuple(target.shape)}, got {checks.describe(x)}"
        )
    return x


def positive(name: str, argument: str, value: int) -> int:
    """Check a count, which is at least one."""
    if checks.integer(name, argument, value) < 1:
        raise ValueError(f"{name}: {argument} must be at least 1, got {value}")
    return value


def lengths(mask: Tensor) -> Tensor:
    """Tokens of every sequence, at least one."""
    return mask.sum(-1).clamp(min=1)


def reciprocal(count: Tensor) -> Tensor:
    """``1 / count`` in fp32; the default dtype, which scripts set to 16 bits, has no say."""
    return count.to(torch.float32).reciprocal()


def select_number(condition: Tensor, yes: float, no: float) -> Tensor:
    """One of two numbers, in fp32 as well."""
    numbers = torch.full(condition.shape, no, dtype=torch.float32, device=condition.device)
    return numbers.masked_fill(condition, yes)


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """The mean of ``x`` over tokens."""
    return torch.where(mask, x, 0).sum() / mask.sum().clamp(min=1)


def mean_over_ranks(total: Tensor, group: Any) -> Tensor:
    """``total``, or its mean over the ranks of a group; it is overwritten."""
    if group is None:
        return total
    import torch.distributed as dist

    dist.all_reduce(total, group=group)
    return total / float(dist.get_world_size(group))


def token_count(mask: Tensor, group: Any = None) -> Tensor:
    """Tokens of a step: of this rank, or the mean over the ranks of ``group``, by one collective.

    A sum divided by it, and averaged over ranks as data parallelism averages gradients, is the mean
    over the tokens of all ranks.
    """
    return mean_over_ranks(mask.sum().to(torch.float32), group)


def divisor(
    name: str, mask: Tensor, num_items: Tensor | float | None, processes: int, group: Any
) -> Tensor:
    """What the sum over this rank's tokens is divided by.

    ``num_items`` counts the tokens of all ranks and of all micro-batches of a step, as trainers do.
    """
    positive(name, "processes", processes)
    if num_items is None:
        return token_count(mask, group).clamp(min=1)
    if not isinstance(num_items, Tensor):
        checks.number(name, "num_items", num_items, 0.0)
    elif num_items.numel() != 1:
        raise ValueError(f"{name}: num_items must be one number, got {checks.describe(num_items)}")
    count = torch.as_tensor(num_items, device=mask.device, dtype=torch.float32)
    return count.clamp(min=1) / processes


def segment_weights(mask: Tensor, segments: Tensor | None) -> Tensor:
    """Weights whose sum over tokens is the mean over sequences of the means over their tokens.

    Args:
        mask: Tokens that count, ``(rows, T)`` or ``(T,)``.
        segments: Numbers of the sequences in packed rows, any integers that differ within a row;
            without them every row is one sequence.
    """
    rows = mask.reshape(-1, mask.shape[-1])
    if segments is None:
        sizes_of_tokens = rows.sum(-1, keepdim=True).expand(rows.shape)
        count = (rows.sum(-1) > 0).sum()
    else:
        ids = segments.reshape(rows.shape)
        row_index = torch.arange(rows.shape[0], device=mask.device).unsqueeze(1).expand(rows.shape)
        pairs = torch.stack((row_index, ids), -1).reshape(-1, 2)
        _, index = torch.unique(pairs, dim=0, return_inverse=True)
        sizes = torch.zeros(index.numel(), device=mask.device, dtype=torch.int64)
        sizes.index_add_(0, index, rows.reshape(-1).to(torch.int64))
        sizes_of_tokens, count = sizes[index].view(rows.shape), (sizes > 0).sum()
    weights = torch.where(rows, reciprocal(sizes_of_tokens.clamp(min=1)), 0) / count.clamp(min=1)
    return weights.view(mask.shape)


def segments_of(position_ids: Tensor) -> Tensor:
    """Numbers of packed sequences from positions, which start again at 0 in every sequence."""
    return (position_ids == 0).cumsum(-1)
