"""A plan: what was weighed, what is best, and how it is shown, kept and written out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from liger_multi.memory.planning.settings import Candidate


@dataclass
class TrainingPlan:
    """What was found for a model, a memory and a number of devices.

    Attributes:
        model: Its type.
        layers: How many it has.
        card: Whose rates the times are told with.
        memory_bytes: Of one device.
        budget_bytes: What of it a peak may take.
        devices: How many.
        batch: Sequences of one optimizer step that were asked for.
        candidates: The best of each kind: those that fit, the fastest a token first, then the
            others, the lowest peak first.
        largest_batch: Largest micro-batch with the settings of the best candidate.
        longest_sequence: Longest sequence with them, one at a time.
        most_batch: The same with the settings of the candidate with the lowest peak.
        most_sequence: Likewise.
        notes: Advice in sentences.
        simulations: How many steps were simulated.
        compression: Whether files ask engines for their own compression.
        layer_class: Class of a layer, which engines wrap.
        vocabulary: Of the model.
    """

    model: str
    layers: int
    card: str
    memory_bytes: int
    budget_bytes: int
    devices: int
    batch: int | None
    candidates: list[Candidate]
    largest_batch: int = 0
    longest_sequence: int = 0
    most_batch: int = 0
    most_sequence: int = 0
    notes: list[str] = field(default_factory=list)
    simulations: int = 0
    compression: bool = False
    layer_class: str = ""
    vocabulary: int = 0

    @property
    def best(self) -> Candidate:
        """The fastest that fits."""
        return self.candidates[0]

    @property
    def nearest(self) -> Candidate:
        """The one with the lowest peak."""
        return min(self.candidates, key=lambda c: c.peak_bytes)

    @property
    def fitting(self) -> list[Candidate]:
        """Those that fit, the fastest first."""
        return [c for c in self.candidates if c.fits]

    def as_data(self) -> dict[str, Any]:
        """The plan as plain data."""
        return asdict(self)

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> TrainingPlan:
        """From :meth:`as_data`."""
        found = [Candidate.from_data(one) for one in data["candidates"]]
        return cls(**{**data, "candidates": found})

    def draw(self, path: str | Path, most: int = 12) -> None:
        """Write a PNG of the memory of the first candidates by part (needs matplotlib)."""
        from liger_multi.memory.planning.picture import draw

        draw(self, Path(path), most)

    def write(self, folder: str | Path, candidate: Candidate | None = None) -> list[Path]:
        """Write ready files for a candidate; None: the best one. Returns what was written."""
        from liger_multi.memory.planning.files import write

        return write(self, Path(folder), candidate or self.best)

    def __str__(self) -> str:
        from liger_multi.memory.planning.page import plan_page

        return plan_page(self).plain()

    def __rich__(self) -> Any:
        from liger_multi.memory.planning.page import plan_page

        return plan_page(self).rich()
