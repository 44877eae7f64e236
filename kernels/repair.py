"""Triton: a partial state continued over the blocks it missed.

What it means stands in `reference.repair`. The kernel is `decode.attend_blocks`, with the state as the accumulator of
the list's first part. How many blocks each list names is found on the device, so the host waits for nothing: a part
of the list with none left costs its launch and reading its slots.
"""

from artifact.kernels import decode


def repair(state, q, kv, missed, parts=None):
    """`reference.repair`; `parts` as in `decode.attend`. A list without slots launches nothing and gives `state`."""
    return decode.continued(state, q, kv, missed, parts)
