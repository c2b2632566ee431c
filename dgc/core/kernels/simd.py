"""Fixed-width vectors, atomic counters and raw addresses for Numba kernels.

Numba leaves vectorisation to LLVM. LLVM cannot vectorise a loop that updates a block, looks whether an entry passes a
threshold, and then decides what to store. So kernels use a vector type. A value holds LANES floats, and an operation on
it is one LLVM instruction, which LLVM splits into the machine's registers (four of 512 bits, eight of 256, sixteen of
128). Each operation is rounded separately: LLVM merges a product and a sum only if a flag allows it, and no flag does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from llvmlite import binding, ir
from numba import int32, types, uint32
from numba.core import cgutils
from numba.extending import intrinsic, models, register_jitable, register_model

from dgc.core.kernels.compile import helper

AHEAD = 512  # :func:`prefetch` is called this many elements in advance: 2 KiB of float32

# Floats in a vector, which are compared with a threshold in one operation. No result depends on this number.
LANES = 64 if binding.get_host_cpu_features().get("avx512f") else 32

_I1, _I32, _I64 = ir.IntType(1), ir.IntType(32), ir.IntType(64)
_WORDS, _VECTOR = ir.VectorType(_I32, LANES), ir.VectorType(ir.FloatType(), LANES)

Compiled: TypeAlias = Any  # a type or a value of Numba's compiler, which has no type hints


class Lanes(types.Type):
    """A Numba type: LANES numbers of 32 bits in registers. It cannot be an argument of an :func:`entry`."""


# A vector of float32 numbers, and a vector of copies of a magnitude's bits for comparisons.
VECTOR, THRESHOLD = Lanes("vector"), Lanes("threshold")


@register_model(Lanes)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, manager: Compiled, kind: Lanes) -> None:
        super().__init__(manager, kind, _VECTOR if kind is VECTOR else _WORDS)


def _splat(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    kind = ir.VectorType(value.type, LANES)
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), value, _I32(0))
    return builder.shuffle_vector(first, ir.Constant(kind, ir.Undefined), ir.Constant(_WORDS, None))


def _magnitude(builder: ir.IRBuilder, vector: ir.Value) -> ir.Value:
    """Return the bits of |x|. As integers they have the order of the magnitudes; infinity and NaN are the largest."""
    return builder.and_(builder.bitcast(vector, _WORDS), ir.Constant(_WORDS, [0x7FFFFFFF] * LANES))


def _place(
    context: Compiled, builder: ir.IRBuilder, array_type: Compiled, array: ir.Value, index: ir.Value
) -> ir.Value:
    return builder.gep(context.make_array(array_type)(context, builder, array).data, [index])


@intrinsic
def load(typing_context: Compiled, array: Compiled, index: Compiled) -> Compiled:
    """Return ``array[index : index + LANES]``, float32, as a vector."""

    def code(context: Compiled, builder: ir.IRBuilder, signature: Compiled, args: Compiled) -> Compiled:
        place = _place(context, builder, signature.args[0], *args)
        value = builder.load(builder.bitcast(place, _VECTOR.as_pointer()))
        value.align = 4
        return value

    return VECTOR(array, types.intp), code


_LINE = 64  # bytes of a cache line


def _prefetching(lines: int) -> Callable[..., ir.Value]:
    """Return code that prefetches ``lines`` cache lines, beginning with the line that holds an array's element."""

    def code(context: Compiled, builder: ir.IRBuilder, signature: Compiled, args: Compiled) -> Compiled:
        byte = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [byte, _I32, _I32, _I32])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        place = builder.bitcast(_place(context, builder, signature.args[0], args[0], args[1]), byte)
        for line in range(lines):
            # The three integers mean: prefetch for reading, into all caches, data rather than code.
            builder.call(function, [builder.gep(place, [_I64(line * _LINE)]), _I32(0), _I32(3), _I32(1)])
        return context.get_dummy_value()

    return code


@intrinsic
def prefetch(typing_context: Compiled, array: Compiled, index: Compiled) -> Compiled:
    """Prefetch ``array[index : index + LANES]`` into the caches. An address without memory does no harm.

    The processor prefetches automatically, but starts again on every page of 4 KiB. With an explicit request for each
    line, one core reads and writes 10 % more in the same time.
    """
    lines = LANES * array.dtype.bitwidth // 8 // _LINE
    return types.void(array, types.intp), _prefetching(lines)


@intrinsic
def prefetch_entry(typing_context: Compiled, array: Compiled, index: Compiled) -> Compiled:
    """Prefetch ``array[index]`` into the caches."""
    return types.void(array, types.intp), _prefetching(1)


@intrinsic
def load_half(typing_context: Compiled, words: Compiled, index: Compiled) -> Compiled:
    """Return ``words[index : index + LANES]``, float16 bits as uint16, as a float32 vector; exactly.

    It does the same as :func:`from_half`. LLVM would turn that function into shorter vectors, and a pass over float16
    would take 10 % longer.
    """

    def code(context: Compiled, builder: ir.IRBuilder, signature: Compiled, args: Compiled) -> Compiled:
        def same(value: int) -> ir.Constant:
            return ir.Constant(_WORDS, [value] * LANES)

        place = _place(context, builder, signature.args[0], *args)
        words = builder.load(builder.bitcast(place, ir.VectorType(ir.IntType(16), LANES).as_pointer()))
        words.align = 2
        bits = builder.zext(words, _WORDS)
        magnitude = builder.and_(bits, same(0x7FFF))
        special = builder.icmp_signed(">=", magnitude, same(0x7C00))
        exponent = builder.select(special, same(224 << 23), same(112 << 23))
        normal = builder.add(builder.shl(magnitude, same(13)), exponent)
        scaled = builder.fmul(builder.sitofp(magnitude, _VECTOR), ir.Constant(_VECTOR, [2.0**-24] * LANES))
        is_normal = builder.icmp_signed(">=", magnitude, same(0x0400))
        value = builder.select(is_normal, normal, builder.bitcast(scaled, _WORDS))
        sign = builder.shl(builder.and_(bits, same(0x8000)), same(16))
        return builder.bitcast(builder.or_(value, sign), _VECTOR)

    return VECTOR(words, types.intp), code


@intrinsic
def store(typing_context: Compiled, array: Compiled, index: Compiled, vector: Compiled) -> Compiled:
    """Store a vector to ``array[index : index + LANES]``."""

    def code(context: Compiled, builder: ir.IRBuilder, signature: Compiled, args: Compiled) -> Compiled:
        place = _place(context, builder, signature.args[0], args[0], args[1])
        builder.store(args[2], builder.bitcast(place, _VECTOR.as_pointer())).align = 4
        return context.get_dummy_value()

    return types.void(array, types.intp, vector), code


@intrinsic
def splat(typing_context: Compiled, value: Compiled) -> Compiled:
    """Return a vector with LANES copies of ``value``."""
    return VECTOR(types.float32), lambda context, builder, signature, args: _splat(builder, args[0])


@intrinsic
def add(typing_context: Compiled, a: Compiled, b: Compiled) -> Compiled:
    """Return ``a + b``."""
    return a(a, b), lambda context, builder, signature, args: builder.fadd(*args)


@intrinsic
def multiply(typing_context: Compiled, a: Compiled, b: Compiled) -> Compiled:
    """Return ``a * b``."""
    return a(a, b), lambda context, builder, signature, args: builder.fmul(*args)


@intrinsic
def splat_key(typing_context: Compiled, key: Compiled) -> Compiled:
    """Return a vector with LANES copies of the magnitude bits ``key``, for comparisons."""

    def code(context: Compiled, builder: ir.IRBuilder, signature: Compiled, args: Compiled) -> Compiled:
        return _splat(builder, builder.trunc(args[0], _I32))

    return THRESHOLD(types.int64), code


@intrinsic
def reaching(typing_context: Compiled, vector: Compiled, limit: Compiled) -> Compiled:
    """Return a mask whose bit i says whether ``|vector[i]|`` is at least ``limit``; NaN is above infinity."""

    def code(context: Compiled, builder: ir.IRBuilder, signature: Compiled, args: Compiled) -> Compiled:
        bits = builder.bitcast(builder.icmp_signed(">=", _magnitude(builder, args[0]), args[1]), ir.IntType(LANES))
        return bits if LANES == 64 else builder.zext(bits, _I64)

    return types.uint64(vector, limit), code


@intrinsic
def lowest_bit(typing_context: Compiled, mask: Compiled) -> Compiled:
    """Return the index of the lowest bit that is set in a mask other than 0."""
    return types.int64(types.uint64), lambda context, builder, signature, args: builder.cttz(args[0], _I1(1))


@intrinsic
def count_bits(typing_context: Compiled, mask: Compiled) -> Compiled:
    """Return how many bits of the mask are set."""
    return types.int64(types.uint64), lambda context, builder, signature, args: builder.ctpop(args[0])


@intrinsic
def fetch_add(typing_context: Compiled, counters: Compiled, index: Compiled, amount: Compiled) -> Compiled:
    """Add ``amount`` to ``counters[index]``, int64, atomically; return the number before.

    If a later call on another thread sees this addition, that thread also sees everything that this one wrote before.
    """

    def code(context: Compiled, builder: ir.IRBuilder, signature: Compiled, args: Compiled) -> Compiled:
        place = _place(context, builder, signature.args[0], args[0], args[1])
        return builder.atomic_rmw("add", place, args[2], "acq_rel")

    return types.int64(counters, types.intp, types.int64), code


@intrinsic
def at_address(typing_context: Compiled, address: Compiled) -> Compiled:
    """Turn an address (int64) into a pointer that ``numba.carray`` accepts."""

    def code(context: Compiled, builder: ir.IRBuilder, signature: Compiled, args: Compiled) -> Compiled:
        return builder.inttoptr(args[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.int64), code


@register_jitable
def bits_of(array: np.ndarray) -> np.ndarray:
    """Return the float32 array's memory as int32."""
    return array.view(np.int32)


@intrinsic
def bits_in(typing_context: Compiled, x: Compiled) -> Compiled:
    """Return the bits of one float32 as uint32."""
    return types.uint32(types.float32), lambda context, builder, signature, args: builder.bitcast(args[0], _I32)


@intrinsic
def float_of(typing_context: Compiled, bits: Compiled) -> Compiled:
    """Return the float32 with these bits, uint32."""
    return types.float32(types.uint32), lambda context, builder, signature, args: builder.bitcast(
        args[0], ir.FloatType()
    )


@helper
def from_half(half):
    """Return the float32 of a half, given by its bits, uint16.

    Gradients contain many denormal halves. They are converted as integers, because arithmetic with float32 denormals
    would take a hundred times as long.
    """
    bits = uint32(half)
    magnitude = bits & uint32(0x7FFF)
    exponent = uint32(0x70000000) if magnitude >= uint32(0x7C00) else uint32(0x38000000)  # infinity and NaN first
    normal = (magnitude << uint32(13)) + exponent
    denormal = bits_in(np.float32(int32(magnitude)) * np.float32(2.0**-24))
    value = normal if magnitude >= uint32(0x0400) else denormal
    return float_of(value | (bits & uint32(0x8000)) << uint32(16))
