"""Vectors of float32 for Numba, as many lanes as a register of this machine has, and what is built of them.

A tile is HEADS queries by ROWS rows of a cache. It has as many sums as a vector has lanes, so that they end in one
vector, and takes half of the registers: AVX-512 has 32 of sixteen floats, AVX2 16 of eight. Half-precision numbers come
as their bits, uint16 for bfloat16 and int16 for float16.
"""

import functools
import hashlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numba import njit, types
from numba.core import cgutils
from numba.core.cgutils import ir
from numba.core.registry import cpu_target
from numba.extending import intrinsic, models, register_model

LANES = 16 if "+avx512f" in cpu_target.target_context.codegen().magic_tuple()[2] else 8
HEADS, ROWS = 4, LANES // 4
WORD, INDEX, FLOAT = ir.IntType(32), ir.IntType(64), ir.FloatType()
FLOATS, _WORDS = ir.VectorType(FLOAT, LANES), ir.VectorType(WORD, LANES)
_STORED = {types.float32: FLOATS, types.int16: ir.VectorType(ir.HalfType(), LANES),
           types.uint16: ir.VectorType(ir.IntType(16), LANES)}
# Sums in any order, so that they vectorise. Infinities and NaN keep their rules: they can reach every operator here.
_FREE = {"reassoc", "contract", "nsz"}
_DIGEST = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()


def compiled(*, fast=False):
    """njit without the GIL, cached on disk where there is a place for it.

    Numba takes what is cached for this CPU's name and features only, and for the function's own file as it is; here
    also for this file as it is, of which the code is built.
    """

    def decorate(function):
        options = {"nogil": True, "fastmath": _FREE if fast else False}
        try:
            dispatcher = njit(cache=True, **options)(function)
        except RuntimeError:  # no place to write a cache
            return njit(**options)(function)
        stored = dispatcher._cache._cache_file
        stored._source_stamp = (stored._source_stamp, _DIGEST)
        return dispatcher

    return decorate


class _Lanes(types.Type):
    """LANES float32 side by side."""

    def __init__(self):
        super().__init__(name=f"{LANES}_floats")


@register_model(_Lanes)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, manager, kind):
        super().__init__(manager, kind, FLOATS)


lanes = _Lanes()


class Flat(NamedTuple):
    """A flat array while code is built: the address of its first number, and what they are."""

    data: ir.Value
    dtype: types.Type


def instruction(result, *arguments):
    """A function of Numba code from one that builds it of LLVM values; None stands for any flat array."""

    def decorate(build):
        @intrinsic
        @functools.wraps(build)  # its arguments' names
        def made(context, *given):
            def generate(context, builder, signature, values):
                values = [Flat(context.make_array(kind)(context, builder, value).data, kind.dtype)
                          if isinstance(kind, types.Array) else value
                          for kind, value in zip(signature.args, values, strict=True)]
                built = build(builder, *values)
                return context.get_dummy_value() if result is types.void else built

            return result(*(g if kind is None else kind for g, kind in zip(given, arguments, strict=True))), generate

        return made

    return decorate


@intrinsic
def pointer(context, kind, address):
    """An address as that of what `kind`, an array, holds."""
    result = types.CPointer(kind.dtype)

    def generate(context, builder, signature, values):
        return builder.inttoptr(values[1], context.get_value_type(result))

    return result(kind, types.intp), generate


def call(builder, name, result, *values, **options):
    """A call of one of LLVM's own functions."""
    kind = ir.FunctionType(result, [value.type for value in values])
    function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
    return builder.call(function, values, **options)


def constant(number):
    return ir.Constant(FLOATS, [np.float32(number).item()] * LANES)


def at(builder, flat, i, kind=FLOATS):
    """The address of flat[i], as one of `kind`."""
    return builder.bitcast(builder.gep(flat.data, [i]), kind.as_pointer())


def loaded(builder, flat, i):
    """flat[i : i + LANES], widened."""
    x = builder.load(at(builder, flat, i, _STORED[flat.dtype]), align=flat.dtype.bitwidth // 8)
    if flat.dtype == types.uint16:  # bfloat16: the upper half of a float32
        return builder.bitcast(builder.shl(builder.zext(x, _WORDS), ir.Constant(_WORDS, [16] * LANES)), FLOATS)
    return builder.fpext(x, FLOATS) if flat.dtype == types.int16 else x


def spread(builder, x):
    """x in every lane."""
    one = builder.insert_element(ir.Constant(FLOATS, ir.Undefined), x, WORD(0))
    return builder.shuffle_vector(one, one, ir.Constant(_WORDS, [0] * LANES))


def product(builder, a, b, c):
    """a * b + c"""
    return call(builder, f"llvm.fmuladd.v{LANES}f32", FLOATS, a, b, c)


def ask(builder, flat, i):
    """Asks for the cache line of flat[i] in the second level; no harm past the array's end."""
    call(builder, "llvm.prefetch.p0", ir.VoidType(), builder.gep(flat.data, [i]), WORD(0), WORD(2), WORD(1))


def slots(builder, count):
    """Variables of `count` vectors, zero at first: registers once they are optimised."""
    made = [cgutils.alloca_once(builder, FLOATS) for _ in range(count)]
    for slot in made:
        builder.store(constant(0), slot)
    return made


def accumulate(builder, slot, a, b):
    """The variable's vector += a * b"""
    builder.store(product(builder, a, b, builder.load(slot)), slot)


def folded(builder, sums):
    """One vector of LANES vectors: in each lane the sum of the vector of that number."""
    while len(sums) > 1:
        half, later = len(sums) // 2, []
        for a, b in zip(sums[:half], sums[half:], strict=True):
            kept = [i + LANES * bool(i & half) for i in range(LANES)]  # a's lanes without this bit, b's with it
            moved = [i ^ half for i in kept]
            kept, moved = (builder.shuffle_vector(a, b, ir.Constant(_WORDS, order)) for order in (kept, moved))
            later.append(builder.fadd(kept, moved))
        sums = later
    return sums[0]


def over_channels(builder, dim, most):
    """The loops over `dim` channels, `most` at a time, then half of it, then 16. -> the first and how many of each."""
    done = INDEX(0)
    for channels in sorted({most, max(16, most // 2), 16}, reverse=True):
        end = builder.sub(dim, builder.srem(dim, INDEX(channels)))
        with cgutils.for_range_slice(builder, done, end, INDEX(channels), INDEX) as (d, _):
            yield d, channels
        done = end


def rows_from(builder, i, step, last, count):
    """Where `count` rows from i lie, `step` apart; past the last one that one."""
    rows = [builder.add(i, builder.mul(INDEX(r), step)) for r in range(count)]
    return [builder.select(builder.icmp_signed("<", row, last), row, last) for row in rows]


def store_sums(builder, sums, out, places):
    """out[place] and after it = the totals of as many of the LANES `sums` as there are for each place."""
    rows = len(sums) // len(places)
    sums = folded(builder, [builder.load(slot) for slot in sums])
    for h, place in enumerate(places):
        order = ir.Constant(ir.VectorType(WORD, rows), list(range(h * rows, (h + 1) * rows)))
        row = builder.shuffle_vector(sums, sums, order)
        builder.store(row, at(builder, out, place, row.type), align=4)


@instruction(lanes, None, types.intp)
def load(builder, flat, i):
    """flat[i : i + LANES], widened."""
    return loaded(builder, flat, i)


@instruction(types.void, None, types.intp, lanes)
def store(builder, flat, i, x):
    """flat[i : i + LANES] = x"""
    builder.store(x, at(builder, flat, i), align=4)


@instruction(types.void, None, types.intp)
def prefetch(builder, flat, i):
    """Asks for the cache line of flat[i] in the second level; no harm past the array's end."""
    ask(builder, flat, i)


@instruction(lanes, types.float32)
def splat(builder, x):
    """x in every lane."""
    return spread(builder, x)


@instruction(lanes, lanes, lanes)
def add(builder, a, b):
    return builder.fadd(a, b)


@instruction(lanes, lanes, lanes)
def larger(builder, a, b):
    """The larger of each; a where b is NaN."""
    return builder.select(builder.fcmp_ordered(">", b, a), b, a)


@instruction(lanes, lanes, lanes)
def exp2_of_difference(builder, x, y):
    """2**(x - y) where x <= y, within 2e-7 of it, 0 below 2**-126 and NaN where either is.

    2**x = 2**n * 2**r with n whole and |r| <= 1/2, the latter as a polynomial.
    """
    x = builder.fsub(x, y)
    tiny = builder.fcmp_ordered("<", x, constant(-126))
    x = builder.select(tiny, constant(-126), x)
    rounding = constant(12582912)  # 1.5 * 2**23: the sum's last bit is worth one
    n = builder.fadd(x, rounding)
    r = builder.fsub(x, builder.fsub(n, rounding))
    z = constant(1.5403530e-4)
    for c in (1.3333558e-3, 9.6181291e-3, 5.5504109e-2, 2.4022651e-1, 6.9314718e-1, 1.0):
        z = product(builder, z, r, constant(c))
    power = builder.shl(builder.bitcast(n, _WORDS), ir.Constant(_WORDS, [23] * LANES))
    power = builder.add(power, ir.Constant(_WORDS, [127 << 23] * LANES))
    return builder.select(tiny, constant(0), builder.fmul(z, builder.bitcast(power, FLOATS)))


@instruction(types.float32, lanes)
def largest(builder, x):
    return call(builder, f"llvm.vector.reduce.fmax.v{LANES}f32", FLOAT, x)


@instruction(types.float32, lanes)
def total(builder, x):
    return call(builder, f"llvm.vector.reduce.fadd.v{LANES}f32", FLOAT, FLOAT(0.0), x, fastmath=("reassoc",))
