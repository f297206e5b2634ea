"""Tables of pages, made of ``benchmarks/results``; :mod:`ci.docs` puts them between markers."""

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
    "residuals": "residual streams",
    "embedding": "embedding",
}
"""Families of operators as people call them, in the order of the first page's table."""
