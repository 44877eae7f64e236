"""Operations on machine words that Numba has no name for."""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_MULTIPLIER = 0x2360ED051FC65DA44385DF649FCCF645  # of PCG64


@intrinsic
def trailing_zeros(typingctx, word):
    """Number of zero bits below the lowest one of a uint64 that is not 0."""
    if word != types.uint64:
        return None

    def lower(context, builder, signature, arguments):
        return builder.cttz(arguments[0], context.get_constant(types.boolean, True))

    return types.int64(types.uint64), lower


@intrinsic
def leading_zeros(typingctx, word):
    """Number of zero bits above the highest one of a uint64 that is not 0."""
    if word != types.uint64:
        return None

    def lower(context, builder, signature, arguments):
        return builder.ctlz(arguments[0], context.get_constant(types.boolean, True))

    return types.int64(types.uint64), lower


@intrinsic
def bit(typingctx, place):
    """1 << place, uint64, place taken modulo 64."""

    def lower(context, builder, signature, arguments):
        wide = context.cast(builder, arguments[0], signature.args[0], types.uint64)
        low = builder.and_(wide, context.get_constant(types.uint64, 63))
        return builder.shl(context.get_constant(types.uint64, 1), low)

    return types.uint64(place), lower


@intrinsic
def multiplied(typingctx, high, low, more, less):
    """128 bits, given as two words, times PCG64's multiplier plus 128 more, as two words."""

    def lower(context, builder, signature, arguments):
        wide = ir.IntType(128)

        def joined(upper, lower):
            shifted = builder.shl(builder.zext(upper, wide), ir.Constant(wide, 64))
            return builder.or_(shifted, builder.zext(lower, wide))

        state = builder.mul(joined(arguments[0], arguments[1]), ir.Constant(wide, _MULTIPLIER))
        state = builder.add(state, joined(arguments[2], arguments[3]))
        word = ir.IntType(64)
        upper = builder.trunc(builder.lshr(state, ir.Constant(wide, 64)), word)
        return cgutils.pack_array(builder, [upper, builder.trunc(state, word)])

    word = types.uint64
    return types.UniTuple(word, 2)(word, word, word, word), lower
