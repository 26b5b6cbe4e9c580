"""The local blocks of an assembly: those that its own worker holds, in memory or spilled.

With the plugin a task gets references to its local blocks, as to remote ones. Dask therefore
neither unspills them for the task nor keeps them in memory. The task looks them up and reads them
one after another. Without the plugin Dask passes them as arrays.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

from dask_p2p.backends import MOST_UNREAD, Queue, as_array, backend_for, backend_named
from dask_p2p.backends.declared import checked_block
from dask_p2p.config import Options
from dask_p2p.engine.context import TaskContext
from dask_p2p.engine.fetch import BlockRef
from dask_p2p.engine.memory import in_memory_bytes
from dask_p2p.errors import BlockUnavailableError, TransferError
from dask_p2p.geometry import box_slices, split_box
from dask_p2p.plans import BlockPlan, Piece
from dask_p2p.types import Array, DType, Key, Kind

_PART_BYTES = 2**24  # size of a spilled block's parts on their way to a GPU
_SHARE = 8  # a part takes at most 1/8 of the staging limit
_PARTS = MOST_UNREAD + 1  # parts in memory of the GPU at a time


class HeldBlocks:
    """The blocks of one assembly that its own worker holds.

    Blocks that GPU kernels read stay referenced until `release`. All others are referenced only
    during the read, so that Dask can spill them and free their memory at any time.
    """

    def __init__(
        self,
        plan: BlockPlan,
        keys: Sequence[Key],  # keys of the plan's sources
        dtype: DType,  # dtype of the input blocks
        options: Options,  # the task's
        context: TaskContext,  # the worker's
    ) -> None:
        self._plan, self._keys, self._dtype, self._context = plan, keys, dtype, context
        self._any_stream = options.any_producer_stream
        self._part_bytes = max(1, min(_PART_BYTES, options.staging_limit_bytes // _SHARE))
        #: Arrays, or references to this worker, by their number among the plan's sources.
        self.blocks: dict[int, Any] = {}
        self._being_read: dict[int, Array] = {}  # blocks that queued kernels read

    def __bool__(self) -> bool:
        return bool(self.blocks)

    def in_memory(self) -> dict[int, Array]:
        """Return the blocks that are in memory now, checked, by number.

        Raises `BlockMismatchError` or `UnsupportedArrayError` if a block differs from its array's
        declaration.
        """
        found = {}
        for number, given in self.blocks.items():
            if not isinstance(given, BlockRef):
                found[number] = self.blocks[number] = self._checked(number, given)
                continue
            try:
                found[number] = self._checked(number, self._context.in_memory(given.key))
            except KeyError:  # spilled or released
                continue
        return found

    def kinds(self, in_memory: Mapping[int, Array]) -> dict[str, int]:
        """Return the known kinds of the blocks, each with the number of one block of this kind."""
        kinds = {backend_for(block).name: number for number, block in in_memory.items()}
        for number in self.blocks.keys() - in_memory.keys():
            kind = self._context.kind_of(self._keys[number])
            if kind is not None:
                kinds.setdefault(kind, number)
        return kinds

    def needed_bytes(self, in_memory: Mapping[int, Array], kind: Kind) -> int:
        """Return the bytes of all blocks in memory, and of reading the largest spilled one."""
        spilled_bytes = max(
            (
                prod(self._plan.source_shapes[number]) * self._dtype.itemsize
                for number in self.blocks.keys() - in_memory.keys()
            ),
            default=0,
        )
        if backend_named(kind).on_device:
            spilled_bytes = _PARTS * min(self._part_bytes, spilled_bytes)
        return sum(map(in_memory_bytes, in_memory.values())) + spilled_bytes

    def hold(self, queue: Queue) -> None:
        """Keep references to the blocks in GPU memory, and make the queue wait for their values."""
        if backend_named(queue.kind).on_device:
            found = self.in_memory()
            self._being_read = {n: found[n] for n in found if backend_for(found[n]).on_device}
            queue.wait_until_written(self._being_read.values(), any_stream=self._any_stream)

    def release(self) -> None:
        """Drop all references. Call only when the queue is synchronised."""
        self._being_read = {}

    def put_into(self, out: Array, queue: Queue) -> None:
        """Queue all pieces of these blocks, block after block.

        Raises `TransferError` if a block was released (its task was cancelled, for example) or
        cannot be read.
        """
        pieces: defaultdict[int, list[Piece]] = defaultdict(list)
        for piece in self._plan.pieces:
            if piece.source in self.blocks:
                pieces[piece.source].append(piece)
        for number, own in pieces.items():
            if number in self._being_read:
                self._put_at_once(out, queue, self._being_read[number], own)
            else:
                self._put_by_parts(out, queue, self._found(number), own)

    def _put_at_once(self, out: Array, queue: Queue, block: Array, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            region = block[box_slices(piece.src)]
            queue.permute(out[box_slices(piece.dst)], region, self._plan.axes, concurrent=True)

    def _put_by_parts(
        self, out: Array, queue: Queue, block: Array, pieces: Sequence[Piece]
    ) -> None:
        """Queue a block's pieces, in parts if the block goes to a GPU."""
        if backend_for(block).on_device:  # unspilled as a whole
            queue.wait_until_written([block], any_stream=self._any_stream)
        for piece in pieces:
            for box in self._parts(piece, queue):
                target = box_slices(self._plan.destination(piece, box))
                queue.permute_and_drop(out[target], block[box_slices(box)], self._plan.axes)

    def _parts(self, piece: Piece, queue: Queue) -> Iterator[Any]:
        if not backend_named(queue.kind).on_device:
            return iter([piece.src])
        return split_box(piece.src, max(1, self._part_bytes // max(1, self._dtype.itemsize)))

    def _found(self, number: int) -> Any:
        """Return a block from memory or from disk. A spilled block stays spilled."""
        block, key = self.blocks[number], self._keys[number]
        if isinstance(block, BlockRef):
            try:
                block = self._context.block(key)
            except KeyError:
                here = self._context.address
                raise BlockUnavailableError(f"block {key!r} is no longer on {here}") from None
            except OSError as exc:
                raise TransferError(f"block {key!r} cannot be read from disk: {exc}") from exc
        return self._checked(number, block)

    def _checked(self, number: int, block: Any) -> Any:
        shape = self._plan.source_shapes[number]
        return checked_block(as_array(block), self._keys[number], shape, self._dtype)
