"""Many arrays behind one address, so that compiled functions hand each other one number.

Numba passes every array as seven numbers or more and counts references to it: a tuple of twenty arrays costs more than
the work of most functions that get it, to compile as well. An arena keeps the address and the shape of each array in
a header, and compiled code reads from there what it uses. Attributes are the same in Python and in compiled code.
"""

import numpy as np
from llvmlite import ir
from numba import types
from numba.core.imputils import impl_ret_borrowed, lower_getattr_generic
from numba.core.typing.templates import AttributeTemplate
from numba.extending import NativeValue, infer_getattr, models, register_model, typeof_impl, unbox
from numba.np.arrayobj import make_array, populate_array
from numba.np.numpy_support import from_dtype


class ArenaType(types.Type):
    """What compiled code knows of an arena: (name, type of an element, dimensions; -1 = a number) of each field."""

    def __init__(self, title, fields):
        self.fields = fields
        super().__init__(f"{title}({', '.join(f'{name}: {kind}[{ndim}]' for name, kind, ndim in fields)})")

    def place(self, attr):
        """Where the words of field `attr` begin in the header, its element's type and its dimensions."""
        word = 0
        for name, kind, ndim in self.fields:
            if name == attr:
                return word, kind, ndim
            word += 1 + max(ndim, 0)
        return None


class Arena:
    """The fields of a named tuple of arrays (C-contiguous) and whole numbers, for Python and for compiled functions.

    The arrays are the tuple's own and are kept alive with the arena; numbers are fixed. ValueError for anything else.
    """

    def __init__(self, fields):
        self._values, words, kinds = fields._asdict(), [], []
        for name, value in self._values.items():
            if isinstance(value, np.ndarray):
                if not value.flags.c_contiguous:
                    raise ValueError(f"{name} is an array with strides {value.strides}; allowed: C-contiguous")
                words += [value.ctypes.data, *value.shape]
                kinds.append((name, from_dtype(value.dtype), value.ndim))
            elif isinstance(value, (int, np.integer)):
                words.append(int(value))
                kinds.append((name, types.int64, -1))
            else:
                raise ValueError(f"{name} is {value!r}; allowed: an array or a whole number")
        self._header = np.array(words, dtype=np.int64)
        self._address = self._header.ctypes.data
        self._type = ArenaType(type(fields).__name__, tuple(kinds))
        self.__dict__.update(self._values)


@typeof_impl.register(Arena)
def _typeof(value, context):
    return value._type


@register_model(ArenaType)
class _Model(models.PrimitiveModel):
    def __init__(self, manager, kind):
        super().__init__(manager, kind, ir.IntType(64))


@unbox(ArenaType)
def _unbox(kind, value, context):
    address = context.pyapi.object_getattr_string(value, "_address")
    native = context.pyapi.long_as_longlong(address)
    context.pyapi.decref(address)
    return NativeValue(native, is_error=context.builder.icmp_unsigned(
        "!=", context.pyapi.err_occurred(), context.pyapi.get_null_object()))


@infer_getattr
class _Attributes(AttributeTemplate):
    key = ArenaType

    def generic_resolve(self, kind, attr):
        found = kind.place(attr)
        if found is None:
            return None
        _, element, ndim = found
        return element if ndim < 0 else types.Array(element, ndim, "C")


@lower_getattr_generic(ArenaType)
def _getattr(context, builder, kind, value, attr):
    word, element, ndim = kind.place(attr)
    wide = ir.IntType(64)
    header = builder.inttoptr(value, wide.as_pointer())

    def load(offset):
        """A word of the header, which never changes: read once, whatever is written in between."""
        loaded = builder.load(builder.gep(header, [ir.Constant(wide, word + offset)]))
        loaded.set_metadata("invariant.load", builder.module.add_metadata([]))
        return loaded

    if ndim < 0:
        return load(0)
    array_type = types.Array(element, ndim, "C")
    array = make_array(array_type)(context, builder)
    size = context.get_abi_sizeof(context.get_data_type(element))
    shape = [load(1 + axis) for axis in range(ndim)]
    strides = [ir.Constant(wide, size)]
    for extent in shape[:0:-1]:
        strides.insert(0, builder.mul(strides[0], extent))
    populate_array(array, data=builder.inttoptr(load(0), array.data.type), shape=shape, strides=strides,
                   itemsize=ir.Constant(wide, size), meminfo=None)
    return impl_ret_borrowed(context, builder, array_type, array._getvalue())
