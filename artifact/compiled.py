"""Numba with a cache that survives the process, notices every edit, and heals itself.

Numba keys a cached function by its own file. The simulator's loops call into each other across files, so an edit
to one of them would leave the callers' cached code stale. Here the key is the content of every compiled source.
"""

import hashlib
from pathlib import Path

from numba import njit
from numba.core.caching import FunctionCache, IndexDataCacheFile


def _digest():
    root = Path(__file__).parent
    sources = [root / "arena.py", root / "words.py"]
    sources += [path for room in ("kv", "pim", "prr") for path in sorted((root / room).glob("*.py"))]
    return hashlib.sha256(b"".join(p.name.encode() + p.read_bytes() for p in sources)).hexdigest()


DIGEST = _digest()


class _Cache(FunctionCache):
    """Numba's function cache; unreadable entries are dropped and compiled again."""

    def __init__(self, function):
        super().__init__(function)
        old = self._cache_file
        self._cache_file = IndexDataCacheFile(old._cache_path, self._impl.filename_base, (old._source_stamp, DIGEST))

    def load_overload(self, sig, target_context):
        try:
            return super().load_overload(sig, target_context)
        except Exception:  # a torn or foreign file raises whatever pickle meets in it
            self._drop()
            return None

    def save_overload(self, sig, data):
        try:
            super().save_overload(sig, data)
        except OSError:  # full or read-only disk: the function works, it is compiled again next time
            pass

    def _drop(self):
        try:
            self.flush()
        except OSError:
            self.disable()


def compiled(function):
    """`function` compiled in nopython mode, without the GIL, and cached on disk where that is possible."""
    dispatcher = njit(nogil=True)(function)
    try:
        dispatcher._cache = _Cache(function)
    except RuntimeError:  # no place to write a cache
        pass
    return dispatcher


def inlined(function):
    """`function` compiled into each of its compiled callers: for what is short and called for every block."""
    return njit(nogil=True, forceinline=True)(function)
