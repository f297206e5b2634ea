"""Which samples of an operator reach the same code, so that what is slow need not run all of them.

A sample's form is what decides the constants of kernels and the graph of a compiler: the tensors
that are there, their fixed dtypes, which of them need gradients, and the options. Numbers of
options count as given or not; shapes and strides are run-time arguments. Where a shape chooses
another kernel, the sample says so (``Sample.path``).
"""

import functools

from liger_multi.testing import samples


def form(sample):
    """What samples that reach the same code have in common."""
    options = frozenset(
        (name, value if isinstance(value, (bool, str, tuple)) else "given")
        for name, value in sample.options.items()
    )
    tensors = tuple((name, t.dtype, t.grad) for name, t in sample.tensors.items())
    return options, tensors, sample.path


def first(op, sample):
    """Whether a sample is the first of its operator."""
    return sample.name == next(s.name for s in samples.of(op) if s.size == "small")


def repeats(op, sample):
    """Whether an earlier sample of the operator has the same form."""
    return sample.name in _repeating(op)


@functools.cache
def _repeating(op):
    seen, names = set(), set()
    for sample in samples.of(op):
        if sample.size == "small":
            (names.add(sample.name) if form(sample) in seen else seen.add(form(sample)))
    return frozenset(names)


def adds(op, sample):
    """Whether a sample is the first with one of its options, or the first without some tensor.

    What a graph of the compiler depends on; of frozen tensors the first is enough.
    """
    return sample.name in _adding(op, False)


def launches(op, sample):
    """The same, or the first of its path: what it adds to the kernels that are launched."""
    return sample.name in _adding(op, True)


@functools.cache
def _adding(op, paths):
    seen, names = set(), set()
    for sample in samples.of(op):
        if sample.size == "small":
            options, tensors, path = form(sample)
            frozen = sum(not grad for *_, grad in tensors) - sum(
                t.classes > 0 for t in sample.tensors.values()
            )
            parts = {*options, frozenset(sample.tensors), frozen > 0, *([("path", path)] * paths)}
            if not parts <= seen:
                names.add(sample.name)
            seen |= parts
    return frozenset(names)
