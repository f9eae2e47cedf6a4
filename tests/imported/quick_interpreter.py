"""Triton's interpreter without what it computes again and again: the same results in less than half the time.

An operation on a small array takes it 50 times as long as NumPy: it makes types, shapes and constants anew that it has
made before, compares them part by part, and computes sums in 64 bits that only `debug` would read.
"""

import functools
import inspect
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
    patch_builtins_once(tl.core, interpreter)
    unwrap_directly(tl.core)
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


def patch_builtins_once(core: Any, interpreter: Any) -> None:
    """At every launch, all members of the language are looked through for builtins, and each gets a new replacement
    around a function that asks for `_semantic`, which the replacement always gives."""
    patch_each, replacements = interpreter._patch_builtin, dict[Any, list[tuple[str, Any, Any]]]()
    if len(inspect.signature(patch_each).parameters) != 3:  # another version of Triton
        return

    def direct(builtin: Any) -> Any:
        function, semantic = getattr(builtin, "__wrapped__", builtin), interpreter.interpreter_semantic

        def call(*arguments: Any, **options: Any) -> Any:
            options["_semantic"] = semantic
            return function(*arguments, **options)

        return call

    def patch(package: Any, builder: Any, scope: Any) -> None:
        if package not in replacements:
            builtins = [pair for pair in inspect.getmembers(package) if core.is_builtin(pair[1])]
            replacements[package] = [(name, member, direct(member)) for name, member in builtins]
        members = [getattr(package, name) for name, *_ in replacements[package]]
        if all(member is builtin for member, (_, builtin, _) in zip(members, replacements[package], strict=True)):
            for name, _, replacement in replacements[package]:
                scope.set_attr(package, name, replacement)
        elif any(member is not new for member, (*_, new) in zip(members, replacements[package], strict=True)):
            patch_each(package, builder, scope)  # a test has changed one

    interpreter._patch_builtin = patch


def unwrap_directly(core: Any) -> None:
    """What is neither a constant nor a list stays as it is."""
    unwrap, constant, plain = core._unwrap_if_constexpr, core.constexpr, {core.tensor, bool, int, float, type(None)}

    def quick(value: Any) -> Any:
        kind = type(value)
        return value if kind in plain else value.value if kind is constant else unwrap(value)

    core._unwrap_if_constexpr = quick


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
        attributes = vars(type).get("tensor_attributes")
        if attributes is None:
            initialise(self, handle, type)
            type.tensor_attributes = {name: value for name, value in vars(self).items() if name != "handle"}
        else:
            vars(self).update(attributes)
            self.handle = handle

    core.tensor.__init__ = init


def leave_equal_types_alone(core: Any, semantic: Any) -> None:
    """Operands of one type are neither converted nor broadcast; scalars of 16 bits are, by a division."""
    check, broadcast, cast = semantic.binary_op_type_checking_impl, semantic.broadcast_impl_value, semantic.cast
    promote, equal, promoted = semantic.computation_type_impl, core.dtype.__eq__, dict[Any, Any]()
    lasting = {"fp32", "fp64", "int1", "int32", "int64"}

    def quick_check(self: Any, lhs: Any, rhs: Any, *arguments: Any, **options: Any) -> Any:
        if type(lhs) is type(rhs) is core.tensor and lhs.type is rhs.type and lhs.dtype.name in lasting:
            return lhs, rhs
        return check(self, lhs, rhs, *arguments, **options)

    def quick_broadcast(self: Any, lhs: Any, rhs: Any) -> Any:
        one, other = lhs.type, rhs.type
        if one is other or (one.is_block() and other.is_block() and [*one.shape] == [*other.shape]):
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    def quick_cast(self: Any, input: Any, dst_ty: Any, *arguments: Any, **options: Any) -> Any:
        return input if input.dtype is dst_ty else cast(self, input, dst_ty, *arguments, **options)

    def quick_promote(self: Any, a_ty: Any, a_is_scalar: bool, b_ty: Any, *arguments: Any) -> Any:
        if not type(a_ty) is type(b_ty) is core.dtype:
            return promote(self, a_ty, a_is_scalar, b_ty, *arguments)
        key = (a_ty.name, a_is_scalar, b_ty.name, *arguments)
        return promoted.get(key) or promoted.setdefault(key, promote(self, a_ty, a_is_scalar, b_ty, *arguments))

    def quick_equal(self: Any, other: Any) -> Any:
        return self.name == other.name if type(other) is core.dtype else equal(self, other)

    semantic.binary_op_type_checking_impl, semantic.broadcast_impl_value = quick_check, quick_broadcast
    semantic.cast, semantic.computation_type_impl, core.dtype.__eq__ = quick_cast, quick_promote, quick_equal


def find_once(core: Any, find: Any) -> Any:
    """NumPy's types for Triton's."""
    dtypes = dict[str, Any]()

    def quick(kind: Any) -> Any:
        scalar = kind.element_ty if type(kind) is core.block_type else kind
        if type(scalar) is not core.dtype:
            return find(kind)
        return dtypes.get(scalar.name) or dtypes.setdefault(scalar.name, find(kind))

    return quick
