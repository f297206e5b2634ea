"""Tables of pages, made of ``benchmarks/results``; :mod:`ci.docs` puts them between markers."""

from collections.abc import Iterable, Sequence


def table(heads: Sequence[str], lines: Iterable[Iterable[str]]) -> list[str]:
    """Rows in Markdown."""
    every = [list(heads), ["---"] * len(heads), *map(list, lines)]
    return [f"| {' | '.join(cells)} |" for cells in every]


OPERATOR_FAMILIES = {
    "cross_entropy": "LM head and cross entropy",
    "divergences": "divergences",
    "norms": "norms",
    "activations": "MLPs and activations",
    "rope": "rotary embeddings",
    "attention": "attention",
    "linear_attention": "linear attention and state spaces",
    "experts": "mixtures of experts",
    "adapters": "LoRA",
    "float8": "FP8",
    "quantized": "weights in 4 bits",
    "residuals": "residual streams",
    "embedding": "embedding",
}
"""Families of operators as people call them, in the order of the first page's table."""
