"""Patches of Triton's interpreter: half of the time of interpreted tests, and one wrong result.

All of them end with :data:`UNTIL`: a newer interpreter runs as it is, until somebody has compared.
"""

import functools
from dataclasses import replace

UNTIL = (3, 10)
"""The first release of Triton that these were not compared with; 3.9 needs all of them."""


def patch_interpreter() -> None:
    """Apply all of them, once."""
    import triton
    from triton import language
    from triton.runtime import interpreter

    release = tuple(int(n) for n in triton.__version__.split(".")[:2])
    old = not hasattr(interpreter, "_LangPatchScope")
    if old or release >= UNTIL or hasattr(interpreter._patch_lang, "__wrapped__"):
        return
    _patch_language_once(interpreter, language)
    options = interpreter.interpreter_builder.options
    if not getattr(options, "debug", True):  # nothing asserts conditions of overflow without it
        interpreter.interpreter_builder.options = replace(options, sanitize_overflow=False)
    _remember_dtypes(interpreter)
    _remember_types(language.core)
    _widen_by_bits(interpreter, language)
    _broadcast_unequal_alone(interpreter)


def _patch_language_once(interpreter, language) -> None:
    """Let the interpreter replace its language once per launch, not at every call of a function.

    What functions that a kernel calls replace is what the kernel has replaced already, unless they
    see other modules of the language.
    """
    original = interpreter._patch_lang
    replaced: set[int] = set()

    @functools.cache
    def modules_of(fn):
        modules = (language, language.core)
        return {id(m) for m in fn.__globals__.values() if any(m is other for other in modules)}

    class Scope(interpreter._LangPatchScope):
        def restore(self):
            replaced.clear()
            self.launch.restore()

    def patch_lang(fn):
        modules, scope = modules_of(fn), Scope()
        if not modules or not modules <= replaced:
            scope.launch = original(fn)
            replaced.update(modules)
        return scope

    patch_lang.__wrapped__ = original
    interpreter._patch_lang = patch_lang


def _remember_dtypes(interpreter) -> None:
    """Look NumPy's dtype of a Triton dtype up, in place of a table built at every operation."""
    dtype_of, dtypes = interpreter._get_np_dtype, {}

    def np_dtype(dtype):
        name = dtype.scalar.name
        if name not in dtypes:
            dtypes[name] = dtype_of(dtype)
        return dtypes[name]

    interpreter._get_np_dtype = np_dtype


def _widen_by_bits(interpreter, language) -> None:
    """Widen bfloat16 to fp32 by a shift: the interpreter changes denormal numbers (Triton 3.9)."""
    convert = interpreter._convert_float

    def convert_float(values, source, target, rounding):
        if source == language.bfloat16 and target == language.float32:
            return values.view("uint16").astype("uint32") << 16
        return convert(values, source, target, rounding)

    interpreter._convert_float = convert_float


def _remember_types(core) -> None:
    """Let equal types of blocks share what they hold, and tensors of a type their shape.

    Operations make new types of blocks, and tensors count the elements of theirs: neither changes.
    """
    make_block, make_tensor = core.block_type.__init__, core.tensor.__init__
    blocks, shapes = {}, {}

    def block(self, element_ty, shape):
        sizes = tuple([s.value if isinstance(s, core.constexpr) else s for s in shape])
        key = (str(element_ty), getattr(element_ty, "address_space", None), sizes)
        if key in blocks:
            self.__dict__.update(blocks[key])
        else:
            make_block(self, element_ty, shape)
            blocks[key] = self.__dict__

    def tensor(self, handle, type):
        shared = type.__dict__.get("_of_tensors")
        if shared is None:
            make_tensor(self, handle, type)
            sizes = tuple([s.value for s in self.shape])
            type._of_tensors = self.shape, self.numel = shapes.setdefault(
                sizes, (self.shape, self.numel)
            )
        else:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.shape, self.numel = shared

    core.block_type.__init__, core.tensor.__init__ = block, tensor


def _broadcast_unequal_alone(interpreter) -> None:
    """Spare tensors of one shape the comparison of what they would be broadcast to."""
    semantic = type(interpreter.interpreter_semantic)
    broadcast = semantic.broadcast_impl_value

    def broadcast_impl_value(self, left, right):
        equal = left.type.is_block() and right.type.is_block() and left.shape is right.shape
        return (left, right) if equal else broadcast(self, left, right)

    semantic.broadcast_impl_value = broadcast_impl_value
