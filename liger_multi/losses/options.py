"""What the options of losses share: dataclasses that check themselves."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from liger_multi import checks
from liger_multi.errors import unknown


class Options:
    """Base of the dataclasses of options; an unknown name is an error that names the nearest."""

    @classmethod
    def of(cls, **given: Any) -> Any:
        """Options by name."""
        known = [f.name for f in fields(cls)]  # type: ignore[arg-type]
        for key in given:
            if key not in known:
                raise TypeError(f"{cls.title()}: {unknown('option', key, known)}")
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
