"""Every registered pair of model type and class with a language-model head."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

KINDS = {
    "causal": "CAUSAL_LM",
    "image-text": "IMAGE_TEXT_TO_TEXT",
    "seq2seq": "SEQ_TO_SEQ_CAUSAL_LM",
    "masked": "MASKED_LM",
}
"""Kind of a head to the part of the name of transformers' mapping."""


@dataclass(frozen=True, order=True)
class Pair:
    """One model type, one of its classes, and the first kind that it is registered for."""

    kind: str
    type: str
    cls: str

    @property
    def name(self) -> str:
        """How commands and pages call it."""
        return f"{self.type}/{self.cls}"


def registered() -> list[Pair]:
    """The pairs of the installed transformers, by kind and type."""
    from transformers.models.auto import modeling_auto

    found: dict[tuple[str, str], Pair] = {}
    for kind, name in KINDS.items():
        mapping = getattr(modeling_auto, f"MODEL_FOR_{name}_MAPPING_NAMES")
        for model_type, classes in mapping.items():
            for cls in (classes,) if isinstance(classes, str) else classes:
                found.setdefault((model_type, cls), Pair(kind, model_type, cls))
    return list(found.values())


def as_lines(result: dict[str, Any]) -> str:
    """A result as JSON, one pair a line."""
    head = json.dumps({k: v for k, v in result.items() if k != "pairs"}, sort_keys=True)[:-1]
    lines = ",\n".join(f"  {json.dumps(one, sort_keys=True)}" for one in result["pairs"])
    return f'{head}, "pairs": [\n{lines}\n]}}\n'
