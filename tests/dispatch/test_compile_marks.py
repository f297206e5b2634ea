"""Marks of the compiler that are set without importing it."""

import torch

from liger_multi.dispatch.primitive import constant_in_graphs


def test_the_mark_is_the_compilers_own():
    def ours():
        return 1

    def theirs():
        return 1

    assert vars(constant_in_graphs(ours)) == vars(torch.compiler.assume_constant_result(theirs))
