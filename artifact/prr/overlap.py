"""How selection and speculation run beside each other: in turn, on two threads, or on two streams of a GPU.

Each is a function of two functions that need nothing of each other, `main` and `side`, and gives both their results;
`artifact.prr.decode.step` takes one as its `both`. Kernels on the CPU let go of the interpreter while they run, so that
two threads are two cores. What each of them computes is the same in any of the three, and so are the bits.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

M, S = TypeVar("M"), TypeVar("S")
Both = Callable[[Callable[[], M], Callable[[], S]], tuple[M, S]]


def in_turn(main: Callable[[], M], side: Callable[[], S]) -> tuple[M, S]:
    """`main`, then `side`."""
    return main(), side()


class Threads:
    """`main` where it is called and `side` on a thread of its own, each with one thread of torch's and one core.

    A context manager: within, torch has one thread here, and as many as before afterwards. Where the system lets them
    the two threads keep to the first two cores they may use: left to itself it often wakes the second on the core of
    the first, and then they take turns. What either raises is raised once both have ended, `main`'s first.
    """

    def __enter__(self) -> "Threads":
        self._threads = torch.get_num_threads()
        torch.set_num_threads(1)
        self._side = ThreadPoolExecutor(1, "side", initializer=torch.set_num_threads, initargs=(1,))
        self._cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        if len(self._cores) > 1:
            os.sched_setaffinity(0, self._cores[:1])  # of this thread alone
            self._side.submit(os.sched_setaffinity, 0, self._cores[1:2]).result()
        return self

    def __exit__(self, *_: object) -> None:
        self._side.shutdown()
        if len(self._cores) > 1:
            os.sched_setaffinity(0, self._cores)
        torch.set_num_threads(self._threads)

    def __call__(self, main: Callable[[], M], side: Callable[[], S]) -> tuple[M, S]:
        modes = torch.is_inference_mode_enabled(), torch.is_grad_enabled()  # a thread has its own
        later = self._side.submit(_as, side, *modes)
        try:
            first = main()
        except BaseException:
            later.exception()  # nothing of a step still runs once it has failed
            raise
        return first, later.result()


class Streams:
    """`main` on the current CUDA stream and `side` on another one, of lower priority than `first`.

    `first`: the stream that a step, or its capture, is to run on: selection's kernels are dispatched before those of
    the side wherever both wait. Each call forks and joins, so that memory which one stream frees is used by the other
    only after it; a capture in progress takes both streams in. No call waits for the device. ValueError without CUDA.
    """

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise ValueError("two streams need a CUDA device; on a CPU: Threads")
        lowest, highest = torch.cuda.Stream.priority_range()
        self.first, self.side = torch.cuda.Stream(priority=highest), torch.cuda.Stream(priority=lowest)

    def __call__(self, main: Callable[[], M], side: Callable[[], S]) -> tuple[M, S]:
        here = torch.cuda.current_stream()
        self.side.wait_stream(here)
        one = main()
        with torch.cuda.stream(self.side):
            other = side()
        here.wait_stream(self.side)
        return one, other


def _as(side, inference, grad):
    with torch.inference_mode(inference), torch.set_grad_enabled(grad):
        return side()
