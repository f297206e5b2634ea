"""Plan what fits: search ways to train a model, predict peaks and times, write ready files."""

from __future__ import annotations

from liger_multi.memory.planning.applying import Applied, apply
from liger_multi.memory.planning.cost import CARDS, Card
from liger_multi.memory.planning.result import Candidate, Settings, TrainingPlan, load
from liger_multi.memory.planning.search import Space, plan

__all__ = [
    "CARDS",
    "Applied",
    "Candidate",
    "Card",
    "Settings",
    "Space",
    "TrainingPlan",
    "apply",
    "load",
    "plan",
]
