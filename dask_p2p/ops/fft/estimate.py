"""`dask_p2p.fft.estimate`: bytes that a transform's exchanges move, and their memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from graphlib import TopologicalSorter
from math import prod
from typing import Any

from dask.utils import format_bytes

from dask_p2p.engine.task import AssembleTask
from dask_p2p.geometry import Chunks, block_indices, block_shape
from dask_p2p.inputs import checked_count
from dask_p2p.ops.arguments import check_array
from dask_p2p.ops.estimate import even_share
from dask_p2p.plugins.registration import cluster_size
from dask_p2p.types import DaskArray


@dataclass(frozen=True, slots=True)
class ExchangeEstimate:
    """One all-to-all exchange between workers, which assembles an array in other blocks.

    Attributes
    ----------
    operation : str
        Name of its tasks on Dask's dashboard, such as ``p2p-fft``.
    before, after : tuple of tuple of int
        Chunks of the input, and of the assembled blocks.
    size_bytes : int
        Size of the assembled array.
    moved_bytes : int
        Part of `size_bytes` that comes from other workers, if blocks are spread evenly.
    task_bytes : int
        Peak memory of one task, without its worker's blocks of the input: the assembled block,
        and the larger of the regions in transfer and the memory for the block's transform.
    worker_bytes : int
        Peak memory of one worker: its blocks of the input and the output, and the temporary memory
        of its concurrent tasks.
    """

    operation: str
    before: Chunks
    after: Chunks
    size_bytes: int
    moved_bytes: int
    task_bytes: int
    worker_bytes: int

    def __str__(self) -> str:
        grids = (" x ".join(str(len(sizes)) for sizes in c) for c in (self.before, self.after))
        moved, size, task, worker = map(
            format_bytes, (self.moved_bytes, self.size_bytes, self.task_bytes, self.worker_bytes)
        )
        return (
            f"{self.operation}: {' -> '.join(grids)} blocks; {moved} of {size} move; a task takes "
            f"{task}, a worker holds {worker}"
        )


@dataclass(frozen=True, slots=True)
class TransformEstimate:
    """Bytes that a lazy array's exchanges move, and their memory; as text, one line each.

    Attributes
    ----------
    workers : int
        Number of workers that the estimate assumes.
    exchanges : tuple of ExchangeEstimate
        The exchanges, in their order.
    """

    workers: int
    exchanges: tuple[ExchangeEstimate, ...]

    @property
    def moved_bytes(self) -> int:
        """Bytes that all exchanges move between workers."""
        return sum(exchange.moved_bytes for exchange in self.exchanges)

    @property
    def worker_bytes(self) -> int:
        """Peak memory of one worker."""
        return max((exchange.worker_bytes for exchange in self.exchanges), default=0)

    def __str__(self) -> str:
        n = len(self.exchanges)
        head = (
            f"{n} exchange{'' if n == 1 else 's'} between {self.workers} workers; "
            f"{format_bytes(self.moved_bytes)} move; a worker holds at most "
            f"{format_bytes(self.worker_bytes)}"
        )
        return "\n".join([head, *(f"  {exchange}" for exchange in self.exchanges)])


def estimate(y: DaskArray, *, workers: int | None = None) -> TransformEstimate:
    """Estimate the exchanges of a lazy array: their number, the bytes they move, their memory.

    Computes nothing. The estimate assumes that blocks are spread evenly over the workers, with
    neighbours on the same worker. It leaves out the memory of Dask's own tasks, and the work areas
    of FFT libraries.

    Parameters
    ----------
    y : dask.array.Array
        A result of a function of `dask_p2p.fft`, or an array computed from one.
    workers : int, optional
        Number of workers, each with one thread. Default: the workers and threads of the current
        synchronous client. Without a client: the number of blocks that the first exchange reads.

    Returns
    -------
    TransformEstimate
        The exchanges, in their order.

    Raises
    ------
    UnsupportedArrayError
        If `y` is not a Dask array.
    InputError
        If `workers` is not a positive integer.

    Examples
    --------
    >>> import dask.array as da
    >>> from dask_p2p import fft
    >>> x = da.ones((256, 256, 256), chunks=(64, -1, -1)).astype(complex)
    >>> print(fft.estimate(fft.fftn(x), workers=4))
    1 exchange between 4 workers; 192.00 MiB move; a worker holds at most 177.00 MiB
      p2p-fft: 4 x 1 x 1 -> 1 x 4 x 1 blocks; 192.00 MiB of 256.00 MiB move; a task takes \
113.00 MiB, a worker holds 177.00 MiB
    """
    check_array(y)
    assembled: defaultdict[str, list[AssembleTask]] = defaultdict(list)
    above: defaultdict[str, set[str]] = defaultdict(set)
    for key, task in dict(y.__dask_graph__()).items():
        name = key[0] if isinstance(key, tuple) else key
        read = getattr(task, "dependencies", ())
        above[name] |= {k[0] if isinstance(k, tuple) else k for k in read} - {name}
        if isinstance(task, AssembleTask):
            assembled[name].append(task)
    ordered = [name for name in TopologicalSorter(above).static_order() if name in assembled]
    cluster = cluster_size() if workers is None else (workers, 1)
    if cluster is None:
        cluster = (prod(map(len, _read(assembled[ordered[0]][0]))) if ordered else 1, 1)
    checked_count("workers", workers=cluster[0])
    exchanges = (_exchange(name, assembled[name], *cluster) for name in ordered)
    return TransformEstimate(cluster[0], tuple(exchanges))


def _read(task: AssembleTask) -> Chunks:
    """Return the chunks of the array that the task reads."""
    plan: Any = task.plan
    chunks: Chunks = getattr(plan, "plan", plan).src_chunks
    return chunks


def _exchange(
    name: str, tasks: Iterable[AssembleTask], workers: int, threads: int
) -> ExchangeEstimate:
    task, *_ = tasks
    plan, output, before = task.plan, task.output, _read(task)
    item_bytes = output.dtype.itemsize
    largest_shape = max((block_shape(plan.chunks, i) for i in block_indices(plan.chunks)), key=prod)
    largest_bytes = prod(largest_shape) * item_bytes
    remote_bytes = largest_bytes if workers > 1 else 0
    need = output.need(output.kind, largest_shape, plan.largest_piece * item_bytes, remote_bytes)
    temporary_bytes = need.peak_bytes - largest_bytes
    input_bytes, _ = even_share(before, workers, item_bytes)
    output_bytes, blocks = even_share(plan.chunks, workers, item_bytes)
    return ExchangeEstimate(
        operation=name.rpartition("-")[0],
        before=before,
        after=plan.chunks,
        size_bytes=prod(map(sum, plan.chunks)) * item_bytes,
        moved_bytes=_moved_elements(tasks, before, workers) * item_bytes,
        task_bytes=need.peak_bytes,
        worker_bytes=input_bytes + output_bytes + min(threads, blocks) * temporary_bytes,
    )


def _moved_elements(tasks: Iterable[AssembleTask], before: Chunks, workers: int) -> int:
    """Return the number of elements that tasks read from other workers.

    Each task is assumed to run on the worker that holds most elements of its block.
    """
    holders = {
        index: number * workers // prod(map(len, before))
        for number, index in enumerate(block_indices(before))
    }
    moved = 0
    for task in tasks:
        held: defaultdict[int, int] = defaultdict(int)
        sources, elements = task.plan.sources(task.index), task.plan.source_elements(task.index)
        for source, count in zip(sources, elements, strict=True):
            held[holders[source]] += count
        moved += sum(held.values()) - max(held.values(), default=0)
    return moved
