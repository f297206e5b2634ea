"""A reward for ms-swift: the file that ``--external_plugins`` names."""

from __future__ import annotations

from typing import Any

from swift.rewards import ORM, orms

from tests.trainers.runs.setting import reward


class Toy(ORM):  # type: ignore[misc]
    """:func:`tests.trainers.runs.setting.reward`."""

    def __call__(self, completions: list[Any], **kwargs: Any) -> list[float]:
        """A number an answer."""
        return reward(completions)


orms["toy"] = Toy
