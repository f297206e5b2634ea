"""The ``Liger*Function`` classes of ``liger_kernel.ops``: their ``apply`` calls our operators.

Arguments and results are those of Liger-Kernel, by position. Nothing that a caller owns is
overwritten but the logits of ``LigerCrossEntropyFunction``, where they are no leaf; ``in_place``,
``row_mode``, ``BLOCK_SIZE``, ``m_tiles_per_cluster`` and ``tiles_per_reduce`` change nothing.
"""
