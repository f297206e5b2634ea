"""Launches of compiled kernels without Triton's argument binder.

A kernel's first launch with arguments of some specialization goes through Triton, which compiles
it. Later launches look the compiled kernel up by the same specialization, which Triton itself
decides (:mod:`~liger_multi.backends.triton.common.specialization`), and call it: 8.0 us instead of
17.6 for 13 arguments (the host of an H200, triton 3.6, 2026-11). Of that, the look-up takes 0.4 us
more than a list of ours took, and 0.9 us more on AMD.
"""

from typing import Any

import triton
from torch import Tensor
from torch.nn import Parameter

from liger_multi.backends.triton.common.specialization import (
    ADDRESS,
    ArgumentClasses,
    specialize_for_target,
)

# from 3.3 on, a compiled kernel takes every argument in order, the constants included
_DIRECT = tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 3)
_compiled: dict[tuple[Any, ...], Any] = {}
_classes: ArgumentClasses | None = None  # all launches of a process have one target


def _runtime() -> Any:
    if hasattr(triton, "knobs"):
        return triton.knobs.runtime
    return triton.compiler.CompiledKernel  # triton 3.3 and older keep the hooks on this class


_RUNTIME = _runtime()


def launch(
    kernel: Any,
    programs: int,
    args: tuple[Any, ...],
    constants: tuple[Any, ...],
    num_warps: int,
    sets: int = 1,
) -> None:
    """Run ``programs`` programs of a jitted kernel on the current stream of the current device.

    Args:
        kernel: The function that ``triton.jit`` made.
        programs: Size of the grid's first axis.
        args: Its run-time arguments in order; the first is a tensor on the current device. Strides
            may come as tuples of integers.
        constants: The values of its ``constexpr`` parameters, which come last.
        num_warps: Warps a program.
        sets: Size of the grid's second axis.
    """
    device = args[0].get_device()
    classes = _classes
    if classes is None:
        _launch_by_triton(kernel, (programs, sets), args, constants, num_warps)
        return
    integers, tensors = classes.integers, classes.tensors
    by_address, by_storage = classes.by_address, classes.by_storage
    numbers = [id(kernel), device, num_warps, constants]
    for a in args:  # one function call per argument would take twice as long
        class_ = type(a)
        if class_ is int:
            number = integers.get(a)
        elif class_ is Tensor or class_ is Parameter:
            if by_address:
                number = tensors.get((a.dtype, a.data_ptr() & ADDRESS))
            elif by_storage:
                size = a.untyped_storage().nbytes()
                number = tensors.get((a.dtype, a.data_ptr() & ADDRESS, size))
            else:
                number = None
        elif a is None:
            number = classes.none
        elif class_ is float or class_ is bool:
            number = classes.scalars.get((class_, a))
        elif class_ is tuple:  # Triton specializes it element by element
            for n in a:
                number = integers.get(n) if type(n) is int else None
                numbers.append(classes.number(n) if number is None else number)
            number = -len(a) - 1  # where it ends, for the next argument may be a tuple as well
        else:
            number = None
        numbers.append(classes.number(a) if number is None else number)
    entry = _compiled.get(tuple(numbers))
    enter_hook, exit_hook = _RUNTIME.launch_enter_hook, _RUNTIME.launch_exit_hook
    if entry is None or (  # a profiler hooks launches; Triton then launches itself
        (enter_hook is not None and getattr(enter_hook, "calls", True))
        or (exit_hook is not None and getattr(exit_hook, "calls", True))
    ):
        _launch_by_triton(kernel, (programs, sets), args, constants, num_warps, entry is None)
        return
    run, function, metadata, stream_of, _ = entry
    stream = stream_of(device)
    run(programs, sets, 1, stream, function, metadata, None, None, None, *args, *constants)


def _launch_by_triton(
    kernel: Any,
    grid: tuple[int, int],
    args: tuple[Any, ...],
    constants: tuple[Any, ...],
    num_warps: int,
    is_new: bool = True,
) -> None:
    """Launch through Triton, and remember what it compiled; an interpreter compiles nothing."""
    global _classes
    output = kernel[grid](*args, *constants, num_warps=num_warps, enable_fp_fusion=True)
    if not (is_new and _DIRECT and hasattr(output, "packed_metadata")):
        return
    if _classes is None:
        _classes = ArgumentClasses(specialize_for_target())
    # The kernel is kept, so that no other one gets its id.
    key = (id(kernel), args[0].get_device(), num_warps, constants, *_numbers_of(_classes, args))
    stream_of = triton.runtime.driver.active.get_current_stream
    _compiled[key] = (output.run, output.function, output.packed_metadata, stream_of, kernel)


def _numbers_of(classes: ArgumentClasses, args: tuple[Any, ...]) -> list[int]:
    """The numbers of arguments for which a kernel was just compiled.

    Triton answers by its switches of this moment (``AMDGCN_USE_BUFFER_OPS``), as the compiler did;
    a remembered answer may be from before a switch was turned.
    """
    numbers = []
    for a in args:
        if type(a) is tuple:
            numbers += [classes.number(n) for n in a]
            numbers.append(-len(a) - 1)
        else:
            numbers.append(classes.none if a is None else classes.number(a))
    return numbers
