"""What the options of losses share: dataclasses that check themselves."""

from __future__ import annotations

from typing import Any, ClassVar

from liger_multi import checks
from liger_multi.errors import unknown


class Options:
    """Base of the dataclasses of options; an unknown name is an error that names the nearest."""

    NAMES: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls) -> None:
        """Keep the names: compilers do not follow ``dataclasses.fields``."""
        cls.NAMES = tuple(cls.__annotations__)

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
        self, name: str, low: float = float("-inf"), high: float | None = None, above: bool = False
    ) -> None:
        """A number in a range."""
        checks.number(self.title(), name, getattr(self, name), low, high, above=above)

    def serves(self, name: str, neutral: Any, served: bool, what: str) -> None:
        """An option that nothing reads is an error, not a word in the wind."""
        value = getattr(self, name)
        if value != neutral and not served:
            raise ValueError(f"{self.title()}: {name}={value!r} has no meaning for {what}")
