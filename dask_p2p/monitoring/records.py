"""Records: what each attempt at a task leaves behind, and where they are kept.

A worker keeps its newest records, and sends nothing by itself: that would cost each task a message,
and the scheduler the time to read it, also where nobody looks. Whoever looks asks for what is new
(`RecordLog.since`). The scheduler does so for `last_runs`; a live page may do the same twice a
second, in one answer of each worker however many tasks ended.
"""

from __future__ import annotations

import pickle
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from dask.utils import key_split

from dask_p2p.types import Key

__all__ = [
    "REASON_CHARS",
    "RECORDS_OP",
    "Fallback",
    "Record",
    "RecordLog",
    "RecordStore",
    "Stage",
    "packed",
    "unpacked",
]

#: By which a scheduler asks workers for their records, and a client the scheduler.
RECORDS_OP = "p2p_records"

#: That a record keeps of why something failed.
REASON_CHARS = 500

_SCHEDULER_RECORDS = 40_000  # that a scheduler keeps, and their stages


class Stage(NamedTuple):
    """What came from one holder, by one transport."""

    holder: str
    transport: str
    nbytes: int
    #: Seconds that the task's thread stood still for it: until blocks could be read, and for
    #: regions that had not arrived, or that this thread itself copies.
    waited_s: float = 0.0
    #: From asking until the last region was here. Where copy engines bring regions, the seconds
    #: that they copied; None where kernels read them where they are.
    wire_s: float | None = None
    begun_s: float = 0.0  # seconds from the task's start until reading began
    #: Seconds of kernels that put its regions into place. On a GPU they run beside other kernels,
    #: and beside the transfer of what comes next.
    kernel_s: float = 0.0


class Fallback(NamedTuple):
    """A better transport than the one that was used, which had failed for this holder."""

    holder: str
    transport: str  # that failed, in this task or before
    reason: str


class Record(NamedTuple):
    """An attempt at a task: when it ran, what it read from where, and what came of it."""

    key: Key
    start_s: float  # since the epoch
    stop_s: float
    stages: Sequence[Stage] = ()
    worker: str = ""
    shape: tuple[int, ...] = ()  # of the block; empty if the attempt failed
    dtype: str = ""
    nbytes: int = 0
    array_shape: tuple[int, ...] = ()  # of the whole output
    blocks: tuple[int, ...] = ()  # of the whole output, along each axis
    axes: tuple[int, ...] = ()  # output axis i is input axis axes[i]
    wasted_bytes: int = 0  # that came, and had to be read again
    fallbacks: tuple[Fallback, ...] = ()
    error: str = ""  # why the attempt failed; empty if it did not
    kernel_s: float = 0.0  # of kernels that put the worker's own blocks into place
    #: Of an attempt under way, bytes that are to come from others in all; None once it has ended.
    wanted_bytes: int | None = None

    @property
    def is_made(self) -> bool:
        """Whether the attempt made its block."""
        return not self.error and self.wanted_bytes is None

    @property
    def name(self) -> str:
        """Of the output array."""
        return str(self.key[0])

    @property
    def block(self) -> str:
        """Index of the block in the output array, as one writes it."""
        return ", ".join(map(str, self.key[1:]))

    @property
    def operation(self) -> str:
        """What Dask calls such tasks: the prefix of the key."""
        return str(key_split(self.key))

    def span_s(self, stage: Stage) -> tuple[float, float]:
        """When one of its stages began and ended, since the epoch; never after the attempt."""
        stop_s = max(self.start_s, self.stop_s)
        begun_s = min(self.start_s + max(0.0, stage.begun_s), stop_s)
        # At least: what is measured may overlap, and need not be all.
        taken_s = max(stage.wire_s or 0.0, stage.waited_s + stage.kernel_s)
        return begun_s, min(begun_s + taken_s, stop_s)


_STAGES = Record._fields.index("stages")


def packed(records: Iterable[Record]) -> bytes:
    """Return what travels of records: plain values, with the names of the fields once for all."""
    rows = [
        (*record[:_STAGES], [tuple(stage) for stage in record.stages], *record[_STAGES + 1 :])
        for record in records
    ]
    return pickle.dumps({"record": Record._fields, "stage": Stage._fields, "rows": rows})


def unpacked(data: bytes) -> list[Record]:
    """Return the records in what `packed` made, perhaps in another version of the package.

    Fields that this version does not know are dropped, and those that are missing have defaults.
    """
    sent = pickle.loads(data)
    record_of, stage_of = _reader(Record, sent["record"]), _reader(Stage, sent["stage"])
    return [_shared(record_of(row), stage_of) for row in sent["rows"]]


def _reader(cls: Any, names: tuple[str, ...]) -> Callable[[Any], Any]:
    if names == cls._fields:
        return cls._make  # type: ignore[no-any-return]
    known = set(cls._fields)
    return lambda row: cls(**{n: v for n, v in zip(names, row, strict=True) if n in known})


def _shared(record: Record, stage_of: Callable[[Any], Stage]) -> Record:
    """Return a record that shares with others what is equal, which is most of it."""
    return record._replace(
        key=(_same(record.name), *record.key[1:]),
        stages=tuple(stage_of((_same(row[0]), _same(row[1]), *row[2:])) for row in record.stages),
        worker=_same(record.worker),
        shape=_same(record.shape),
        dtype=_same(record.dtype),
        array_shape=_same(record.array_shape),
        blocks=_same(record.blocks),
        axes=_same(record.axes),
    )


@lru_cache(4096)
def _same(value: Any) -> Any:
    return value


class RecordLog:
    """The newest records. Any thread may call it.

    Parameters
    ----------
    size
        Records and their stages that are kept, in all.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._kept: deque[Record] = deque()
        self._weight = 0
        self._count = 0  # of all records there ever were
        self._lock = threading.Lock()

    def append(self, record: Record) -> None:
        """Keep a record, in the place of the oldest if there are too many."""
        with self._lock:
            self._kept.append(record)
            self._count += 1
            self._weight += 1 + len(record.stages)
            while self._weight > self._size and len(self._kept) > 1:
                self._weight -= 1 + len(self._kept.popleft().stages)

    def since(self, number: int) -> tuple[int, list[Record]]:
        """Return the records from this number on, as far as they are kept.

        Returns
        -------
        int
            Number of the first one that is returned; the first that there ever was has number 0.
        list of Record
        """
        with self._lock:
            gone = self._count - len(self._kept)
            first = min(max(number, gone), self._count)
            return first, list(self._kept)[first - gone :]

    def newest(self, size: int) -> list[Record]:
        """Return the newest records, of a size that is counted as that of the log; oldest first."""
        with self._lock:
            found = []
            for record in reversed(self._kept):
                size -= 1 + len(record.stages)
                if size < 0:
                    break
                found.append(record)
            return found[::-1]

    @property
    def count(self) -> int:
        """How many records there ever were."""
        return self._count

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[Record]:
        return iter(self.since(0)[1])


class _KeptStages(Sequence[Stage]):
    """Stages in a quarter of their memory, if many: numbers as bytes, names shared by records."""

    __slots__ = ("_names", "_numbers")

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._names = _same(tuple(stage[:2] for stage in stages))
        self._numbers = pickle.dumps([stage[2:] for stage in stages])

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, number: Any) -> Any:
        return tuple(self)[number]

    def __iter__(self) -> Iterator[Stage]:
        for names, numbers in zip(self._names, pickle.loads(self._numbers), strict=True):
            yield Stage(*names, *numbers)

    def __eq__(self, other: object) -> bool:
        return tuple(self) == (tuple(other) if isinstance(other, _KeptStages) else other)


class RecordStore(RecordLog):
    """The newest records of all workers, each once. They stay when their worker leaves."""

    def __init__(self, size: int = _SCHEDULER_RECORDS) -> None:
        super().__init__(size)
        self._next: dict[str, int] = {}  # number of the first record that is not here, by worker

    def append(self, record: Record) -> None:
        super().append(record._replace(stages=_KeptStages(record.stages)))

    def next(self, worker: str) -> int:
        """Return from which number on a worker's records are wanted."""
        return self._next.get(worker, 0)

    def add(self, worker: str, first: int, records: list[Record]) -> None:
        """Keep what a worker has sent, but for what is here: two may have asked at once."""
        for record in records[max(0, self.next(worker) - first) :]:
            self.append(record)
        self._next[worker] = max(self.next(worker), first + len(records))

    def forget(self, worker: str) -> None:
        """Forget which records there are of a worker that has left."""
        self._next.pop(worker, None)
