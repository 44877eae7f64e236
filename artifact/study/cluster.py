"""Cells of a sweep on the workers of a Dask cluster; what has finished survives the worker that computed it.

A result is kept where it was computed as soon as it is there, if the worker sees the folder of finished cells, and by
the caller as soon as it arrives. When a worker dies, Dask gives its cells to another, which looks into that folder
first.
"""

from collections.abc import Callable, Iterator, Sequence

WAIT_S = 30  # for a scheduler to answer and for its first worker


def each(work: Callable, cells: Sequence, todo: Sequence[int], address: str) -> Iterator[tuple]:
    """Yields what `work(i, cell)` gives, (i, summary, error), for each i of `todo`, as they finish anywhere.

    `address`: a scheduler's, like tcp://host:8786. A cell that Dask gives up, because every worker that tried it died,
    comes as an error. Raises ValueError when distributed is not installed, nothing answers or no worker is there.
    """
    try:
        from distributed import Client, as_completed
    except ModuleNotFoundError:
        raise ValueError("executor dask needs distributed: pip install 'prr-kvpimple-artifact[cluster]'") from None
    try:
        client = Client(address, timeout=WAIT_S, set_as_default=False)
    except (OSError, ValueError, TypeError) as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise ValueError(f"executor: no Dask scheduler answers at {address!r}: {reason}; "
                         "`dask scheduler` prints its address") from None
    with client:
        try:
            client.wait_for_workers(1, timeout=WAIT_S)
        except TimeoutError:
            raise ValueError(f"executor: the scheduler at {address!r} has no worker; "
                             f"`dask worker {address}` starts one") from None
        futures = {client.submit(work, i, cells[i], pure=False): i for i in todo}
        for future in as_completed(futures, loop=client.loop):
            try:
                yield future.result()
            except Exception as error:  # whatever happened to the worker; the cell's own errors come as results
                yield futures[future], None, f"{type(error).__name__}: {error}"
            future.release()
