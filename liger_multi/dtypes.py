"""Names of dtypes that people write: ``bf16`` and ``bfloat16`` are the same everywhere."""

from __future__ import annotations

from typing import Any

LONG = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
ALIASES = {"half": "fp16", "float": "fp32", "double": "fp64"}
SHORT = {long: short for short, long in LONG.items()} | ALIASES


def long_name(name: Any) -> Any:
    """``bfloat16`` for ``bf16``, also before a suffix such as ``-mixed``; others as they are."""
    return _renamed(name, LONG | {alias: LONG[short] for alias, short in ALIASES.items()})


def short_name(name: Any) -> Any:
    """``bf16`` for ``bfloat16``, also before a suffix such as ``-mixed``; others as they are."""
    return _renamed(name, SHORT)


def _renamed(name: Any, names: dict[str, str]) -> Any:
    if not isinstance(name, str):
        return name
    first, dash, rest = name.partition("-")
    plain = first.removeprefix("torch.")
    return f"{names.get(plain, plain if plain in names.values() else first)}{dash}{rest}"
