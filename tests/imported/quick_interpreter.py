"""Triton's interpreter without what it computes again and again: the same results in less than half the time.

An operation on a small array takes it 50 times as long as NumPy: it makes types, shapes and constants anew that it has
made before, compares them part by part, and computes sums in 64 bits that only `debug` would read.
"""

import functools
from typing import Any


def make_quick() -> None:
    """From here on, in this process."""
    try:
        import triton.language as tl
        from triton.language.semantic import TritonSemantic
        from triton.runtime import interpreter
    except ImportError:
        return
    patch_helpers_once(tl, interpreter)
    call_builtins_directly(interpreter)
    check_overflow_if_asked(TritonSemantic)
    make_types_once(tl.core)
    describe_tensors_once(tl.core)
    leave_equal_types_alone(tl.core, TritonSemantic)
    interpreter._get_np_dtype = find_once(tl.core, interpreter._get_np_dtype)


def patch_helpers_once(tl: Any, interpreter: Any) -> None:
    """At every call of a helper, all of `triton.language` is looked through for functions to patch, although they are
    patched already."""

    @functools.cache
    def languages(function: Any) -> list[Any]:
        return [module for module in function.__globals__.values() if module is tl or module is tl.core]

    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        if any(tl.core.is_builtin(module.load) for module in languages(self.fn)):
            interpreter._patch_lang(self.fn)
        try:
            return self.rewrite()(*arguments, **options)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    interpreter.InterpretedFunction.__call__ = call


def call_builtins_directly(interpreter: Any) -> None:
    """Around a builtin there is a function that asks for `_semantic`, which the patch always gives."""
    patch = interpreter._patch_attr

    def quick(owner: Any, name: str, member: Any, *more: Any) -> None:
        patch(owner, name, getattr(member, "__wrapped__", member), *more)

    interpreter._patch_attr = quick


def check_overflow_if_asked(semantic: Any) -> None:
    """Without `debug`, the assertion at the end of this check is none."""
    check = semantic.binary_op_sanitize_overflow_impl

    def quick(self: Any, *arguments: Any) -> None:
        if self.builder.options.debug:
            check(self, *arguments)

    semantic.binary_op_sanitize_overflow_impl = quick


def make_types_once(core: Any) -> None:
    """Those of blocks of numbers. A type of pointers is made for each launch."""
    block_type, initialise, made = core.block_type, core.block_type.__init__, dict[Any, Any]()

    def new(cls: type, element_ty: Any = None, shape: Any = ()) -> Any:
        if cls is not block_type or type(element_ty) is not core.dtype:
            return object.__new__(cls)
        key = (element_ty.name, *shape)
        return made.get(key) or made.setdefault(key, object.__new__(cls))

    def init(self: Any, *arguments: Any, **options: Any) -> None:
        if not vars(self):
            initialise(self, *arguments, **options)

    block_type.__new__, block_type.__init__ = new, init


def describe_tensors_once(core: Any) -> None:
    """All that a tensor knows follows from its type, but for its values."""
    initialise = core.tensor.__init__

    def init(self: Any, handle: Any, type: Any) -> None:
        known = vars(type).get("of_tensors")
        if known is None:
            initialise(self, handle, type)
            type.of_tensors = {name: value for name, value in vars(self).items() if name != "handle"}
        else:
            vars(self).update(known)
            self.handle = handle

    core.tensor.__init__ = init


def leave_equal_types_alone(core: Any, semantic: Any) -> None:
    """Operands of one type are neither converted nor broadcast; scalars of 16 bits are, by a division."""
    check, broadcast, cast = semantic.binary_op_type_checking_impl, semantic.broadcast_impl_value, semantic.cast
    promote, equal, promoted = semantic.computation_type_impl, core.dtype.__eq__, dict[Any, Any]()
    lasting = {"fp32", "fp64", "int1", "int32", "int64"}

    def quick_check(self: Any, lhs: Any, rhs: Any, *how: Any, **options: Any) -> Any:
        if type(lhs) is type(rhs) is core.tensor and lhs.type is rhs.type and lhs.dtype.name in lasting:
            return lhs, rhs
        return check(self, lhs, rhs, *how, **options)

    def quick_broadcast(self: Any, lhs: Any, rhs: Any) -> Any:
        one, other = lhs.type, rhs.type
        if one is other or (one.is_block() and other.is_block() and [*one.shape] == [*other.shape]):
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    def quick_cast(self: Any, input: Any, dst_ty: Any, *how: Any, **options: Any) -> Any:
        return input if input.dtype is dst_ty else cast(self, input, dst_ty, *how, **options)

    def quick_promote(self: Any, a_ty: Any, a_is_scalar: bool, b_ty: Any, *how: Any) -> Any:
        if not type(a_ty) is type(b_ty) is core.dtype:
            return promote(self, a_ty, a_is_scalar, b_ty, *how)
        key = (a_ty.name, a_is_scalar, b_ty.name, *how)
        return promoted.get(key) or promoted.setdefault(key, promote(self, a_ty, a_is_scalar, b_ty, *how))

    def quick_equal(self: Any, other: Any) -> Any:
        return self.name == other.name if type(other) is core.dtype else equal(self, other)

    semantic.binary_op_type_checking_impl, semantic.broadcast_impl_value = quick_check, quick_broadcast
    semantic.cast, semantic.computation_type_impl, core.dtype.__eq__ = quick_cast, quick_promote, quick_equal


def find_once(core: Any, find: Any) -> Any:
    """NumPy's types for Triton's."""
    known = dict[str, Any]()

    def quick(kind: Any) -> Any:
        scalar = kind.element_ty if type(kind) is core.block_type else kind
        if type(scalar) is not core.dtype:
            return find(kind)
        return known.get(scalar.name) or known.setdefault(scalar.name, find(kind))

    return quick
