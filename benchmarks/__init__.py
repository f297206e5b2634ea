"""Scripts that measure: ``python -m benchmarks.<name>``. Their results stand in ``results/``."""
