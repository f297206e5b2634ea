"""Plan what fits: search ways to train a model, predict peaks and times, write ready files."""

from __future__ import annotations

from liger_multi.memory.planning.applying import Applied, apply
from liger_multi.memory.planning.cards import CARDS, Card
from liger_multi.memory.planning.files import load
from liger_multi.memory.planning.result import TrainingPlan
from liger_multi.memory.planning.search import Space, plan
from liger_multi.memory.planning.settings import Candidate, Settings

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
