"""Records: what each attempt at a task leaves behind, and where they are kept.

A worker keeps its newest records, and sends nothing by itself: that would cost each task a message,
and the scheduler the time to read it, also where nobody looks. The scheduler asks for what is new
(`RecordLog.since`): for `last_runs`, and twice a second while a page is open, in one answer of each
worker however many tasks ended.
"""

from __future__ import annotations

import pickle
import threading
from bisect import bisect
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from dask.utils import key_split

from dask_p2p.types import Key
from dask_p2p.versioned import check_version, own_version

#: By which a scheduler asks workers for their records, and a client the scheduler.
RECORDS_OP = "p2p_records"

#: That a record keeps of why something failed.
REASON_CHARS = 500

_SCHEDULER_RECORDS = 40_000  # that a scheduler keeps, and their stages: at most 30 MB
_MOST_ARRAYS, _MOST_RUNS = 10_000, 1_000  # whose runs are told apart; of each, the newest


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
    #: Seconds of kernels that put its regions into place. On a GPU other kernels, and the transfer
    #: of what comes next, run at the same time.
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
    stages: tuple[Stage, ...] = ()
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
    #: Seconds of the function that makes the output of the assembled block, until it returned: on a
    #: GPU its kernels may go on.
    post_s: float = 0.0
    #: Of an attempt under way, bytes that are to come from others in all; None once it has ended.
    wanted_bytes: int | None = None
    #: Number that Dask gave to this sending of the task; once the scheduler has the record,
    #: that of the first task of its run, see `RunStarts`.
    run: int = 0
    # Of a member of `iterate` or `spmd`:
    step: int = 0  # steps that are done
    steps: int = 0  # of so many; 0 if that is not known
    first_step: int = 0  # where this attempt went on
    attempt: int = 0  # of its gang, from 1
    # Of a block that `map_on_gpu` made. Seconds are the GPU's, of all parts together:
    parts: int = 0
    up_bytes: int = 0  # that went to the GPU
    down_bytes: int = 0  # that came back
    up_s: float = 0.0  # of copies to the GPU
    function_s: float = 0.0  # of the function, or on a CPU until it returned
    down_s: float = 0.0  # of copies back

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
        """What Dask calls such tasks, the prefix of the key; of members, the tasks after them."""
        return str(key_split(self.key)).removesuffix("-members")

    @property
    def steps_per_s(self) -> float:
        """Steps a second of a member, in this attempt."""
        return (self.step - self.first_step) / max(self.stop_s - self.start_s, 1e-9)

    @property
    def waited_s(self) -> float:
        """How long its thread stood still for others, which may be no longer than it took."""
        waited_s = sum(stage.waited_s for stage in self.stages)
        return max(0.0, min(waited_s, self.stop_s - self.start_s))

    @property
    def waited_share(self) -> float:
        """How much of its time it stood still for others: 0 to 1."""
        return self.waited_s / max(self.stop_s - self.start_s, 1e-9)

    def span_s(self, stage: Stage) -> tuple[float, float]:
        """When one of its stages began and ended, since the epoch; never after the attempt."""
        stop_s = max(self.start_s, self.stop_s)
        begun_s = min(self.start_s + max(0.0, stage.begun_s), stop_s)
        # At least: what is measured may overlap, and need not be all.
        taken_s = max(stage.wire_s or 0.0, stage.waited_s + stage.kernel_s)
        return begun_s, min(begun_s + taken_s, stop_s)


def packed(records: Iterable[Record]) -> bytes:
    """Return what travels of records, which only the same version of the package reads."""
    return pickle.dumps((own_version(), pickle.dumps([*records])))


def unpacked(data: bytes) -> list[Record]:
    """Return the records in what `packed` made; `VersionError` if another version did."""
    version, records = pickle.loads(data)
    check_version(version)
    return list(pickle.loads(records))


def overlap(records: Iterable[Record]) -> float:
    """How many of copies up, function and copies down went on at once, on average.

    While a worker had blocks in hand, of which the next begins before one ends. Of the worker where
    it was least; 0 if no block went through a GPU in parts.
    """
    by_worker: defaultdict[str, list[Record]] = defaultdict(list)
    for record in sorted(records, key=lambda record: record.start_s):
        if record.parts:
            by_worker[record.worker].append(record)
    return min(map(_overlap_of_one, by_worker.values()), default=0.0)


def _overlap_of_one(records: Iterable[Record]) -> float:
    """Return it for one worker's blocks, in the order in which they began."""
    done_s = spent_s = until_s = 0.0
    for record in records:
        done_s += record.up_s + record.function_s + record.down_s
        spent_s += max(0.0, record.stop_s - max(record.start_s, until_s))
        until_s = max(until_s, record.stop_s)
    return done_s / spent_s if spent_s else 0.0


class RecordLog:
    """The newest records. Any thread may call it."""

    def __init__(self, size: int) -> None:  # of records and their stages, in all
        self.size = size
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
            while self._weight > self.size and len(self._kept) > 1:
                self._weight -= 1 + len(self._kept.popleft().stages)

    def since(self, number: int) -> tuple[int, list[Record]]:
        """Return the records from this number on, as far as kept, and the number of the first.

        The first that there ever was has number 0.
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


class RecordStore(RecordLog):
    """The newest records of all workers, each once. They stay when their worker leaves."""

    def __init__(self, size: int = _SCHEDULER_RECORDS) -> None:
        super().__init__(size)
        self._next: dict[str, int] = {}  # number of the first record that is not here, by worker

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


class RunStarts:
    """Where the runs of each array begin, on the scheduler, which alone knows what is still wanted.

    A run begins with a task that is sent to a worker, and ends when no task of its array is left.
    """

    def __init__(self) -> None:
        self._starts: dict[str, list[int]] = {}  # by array, Dask's number of each run's first task
        self._open: set[str] = set()

    def sent(self, name: str, number: int) -> None:
        """Note that a task of an array was sent to a worker, as Dask's number of all that are."""
        if name not in self._open:
            self._open.add(name)
            starts = self._starts.setdefault(name, [])
            starts[:] = [*starts[1 - _MOST_RUNS :], number]
            if len(self._starts) > _MOST_ARRAYS:
                del self._starts[next(iter(self._starts))]

    def is_open(self, name: str) -> bool:
        """Return whether a run of this array has begun, and not ended."""
        return name in self._open

    def end(self, name: str) -> None:
        """Note that no task of an array is left."""
        self._open.discard(name)

    def assigned(self, records: Iterable[Record]) -> list[Record]:
        """Return the records with the number of the run that each belongs to."""
        return [record._replace(run=self._run_of(record)) for record in records]

    def _run_of(self, record: Record) -> int:
        starts = self._starts.get(record.name, ())
        place = bisect(starts, record.run)
        return starts[place - 1] if place else 0
