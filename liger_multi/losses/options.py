"""What the options of losses share: dataclasses that check themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeAlias

from liger_multi import checks
from liger_multi.errors import unknown

Kinds: TypeAlias = tuple[tuple[str, str, bool], ...]
_KINDS: dict[str, Callable[[str, str, object], Any]] = {
    "bool": checks.boolean,
    "float": checks.number,
    "int": checks.integer,
}


def kinds_of(annotations: Mapping[str, str]) -> Kinds:
    """The fields that are numbers or truth values: name, kind, and whether None is one more."""
    plain = {name: kind.removesuffix(" | None") for name, kind in annotations.items()}
    return tuple((n, k, annotations[n] != k) for n, k in plain.items() if k in _KINDS)


def check_kinds(title: str, kinds: Kinds, owner: object) -> None:
    """Every field is of its kind."""
    for name, kind, optional in kinds:
        value = getattr(owner, name)
        if not (optional and value is None):
            _KINDS[kind](title, name, value)


class Options:
    """Base of the dataclasses of options; an unknown name is an error that names the nearest."""

    NAMES: ClassVar[tuple[str, ...]] = ()
    KINDS: ClassVar[Kinds] = ()

    def __init_subclass__(cls) -> None:
        """Keep names and kinds: compilers do not follow ``dataclasses.fields``."""
        cls.NAMES = tuple(cls.__annotations__)
        cls.KINDS = kinds_of(cls.__annotations__)

    def __post_init__(self) -> None:
        """Check what annotations say; subclasses check ranges."""
        check_kinds(self.title(), self.KINDS, self)

    @classmethod
    def of(cls, **given: Any) -> Any:
        """Options by name."""
        for key in given:
            if key not in cls.NAMES:
                raise TypeError(f"{cls.title()}: {unknown('option', key, cls.NAMES)}")
        return cls(**given)

    @classmethod
    def title(cls) -> str:
        """The name of the loss in messages."""
        return cls.__name__.removesuffix("Options")

    def number(
        self, name: str, low: float = float("-inf"), high: float = float("inf"), above: bool = False
    ) -> None:
        """A number in a range."""
        checks.number(self.title(), name, getattr(self, name), low, high, above=above)

    def serves(self, name: str, neutral: Any, served: bool, what: str) -> None:
        """An option that nothing reads is an error, not a word in the wind."""
        value = getattr(self, name)
        if value != neutral and not served:
            raise ValueError(f"{self.title()}: {name}={value!r} has no meaning for {what}")
