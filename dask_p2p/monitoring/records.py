"""Records of attempts at tasks, and the logs that keep them.

A worker keeps its newest records, and sends them only on request. A message for each task would
cost the scheduler time, even if no user looks at the records. The scheduler requests new records
(`RecordLog.since`) for `last_runs`, and twice a second while a page is open. Each worker sends all
new records in one reply.
"""

from __future__ import annotations

import pickle
import threading
from bisect import bisect
from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from dask.utils import key_split

from dask_p2p.types import Key
from dask_p2p.versions import check_version, own_version

MOST_ARRAYS = 10_000  # with separate runs
MOST_RUNS = 1_000  # of one array

#: RPC operation of requests for records, from scheduler to workers and from client to scheduler.
RECORDS_OP = "p2p_records"

#: RPC operation of requests for progress, from client to scheduler.
PROGRESS_OP = "p2p_progress"

#: Longest reason of a failure in a record.
REASON_CHARS = 500

_SCHEDULER_RECORDS = 40_000  # records and stages that a scheduler keeps: at most 30 MB


class Stage(NamedTuple):
    """A task's read from one holder by one transport."""

    holder: str
    transport: str
    nbytes: int
    #: Seconds that the task's thread waited: until blocks could be read, and for regions in
    #: transfer. Includes copies of regions by the thread itself.
    waited_s: float = 0.0
    #: Seconds from the request to the arrival of the last region. For copy engines, the seconds of
    #: their copies. None if kernels read regions in place.
    wire_s: float | None = None
    begun_s: float = 0.0  # seconds from the task's start to the start of the read
    #: Seconds of kernels that write the regions to the output. On a GPU other kernels, and further
    #: transfers, run concurrently.
    kernel_s: float = 0.0


class Fallback(NamedTuple):
    """A preferred transport that was not used, since it had failed for this holder."""

    holder: str
    transport: str  # the transport that failed, in this task or before
    reason: str


class TaskRecord(NamedTuple):
    """A record of an attempt at a task: its times, its reads and its outcome."""

    key: Key  #: of the task
    start_s: float  #: since the epoch
    stop_s: float  #: since the epoch

    stages: tuple[Stage, ...] = ()  #: its reads, in order
    worker: str = ""  #: address
    shape: tuple[int, ...] = ()  #: shape of the block; empty if the attempt failed
    dtype: str = ""  #: dtype of the block
    nbytes: int = 0  #: size of the block

    array_shape: tuple[float, ...] | None = ()  #: shape of the whole output; None: unknown
    blocks: tuple[int, ...] = ()  #: number of the whole output's blocks along each axis
    wasted_bytes: int = 0  #: bytes that arrived but had to be read again

    fallbacks: tuple[Fallback, ...] = ()  #: preferred transports that were not used
    error: str = ""  #: reason of the failure; empty if the attempt succeeded
    kernel_s: float = 0.0  #: seconds of kernels that write the worker's own blocks to the output
    #: total bytes to read from other workers, for a running attempt; None for a finished one
    wanted_bytes: int | None = None
    run: int = 0  #: number of the array's run; until the scheduler has it, Dask's of the task's run
    outcome: str = ""  #: "failed" or "cancelled" if the array's run has ended so

    # For ranks of `iterate` or `spmd`:
    step: int = 0  #: finished steps
    steps: int = 0  #: total number of steps; 0 if unknown
    first_step: int = 0  #: first step of this attempt
    attempt: int = 0  #: number of the gang's attempt, from 1

    # For blocks of `map_on_gpu`. Seconds are the GPU's, for all parts together:
    parts: int = 0  #: number of parts of the block
    up_bytes: int = 0  #: bytes copied to the GPU
    down_bytes: int = 0  #: bytes copied back
    up_s: float = 0.0  #: seconds of copies to the GPU
    function_s: float = 0.0  #: seconds of the function; on a CPU until it returned
    down_s: float = 0.0  #: seconds of copies back

    @property
    def is_made(self) -> bool:
        """True if the attempt made its block."""
        return not self.error and self.wanted_bytes is None

    @property
    def name(self) -> str:
        """Name of the output array."""
        return str(self.key[0])

    @property
    def block(self) -> str:
        """Index of the block in the output array, as text."""
        return ", ".join(map(str, self.key[1:]))

    @property
    def operation(self) -> str:
        """Prefix of the key. For ranks, this is the prefix of the output's tasks."""
        return str(key_split(self.key)).removesuffix("-ranks")

    @property
    def steps_per_s(self) -> float:
        """Steps per second of a rank, in this attempt."""
        return (self.step - self.first_step) / max(self.stop_s - self.start_s, 1e-9)

    @property
    def waited_s(self) -> float:
        """Seconds that the thread waited for others; at most the duration of the attempt."""
        waited_s = sum(stage.waited_s for stage in self.stages)
        return max(0.0, min(waited_s, self.stop_s - self.start_s))

    @property
    def waited_share(self) -> float:
        """Fraction of the attempt's time that the thread waited for others: 0 to 1."""
        return self.waited_s / max(self.stop_s - self.start_s, 1e-9)

    @property
    def waited_per_step_s(self) -> float:
        """Seconds that a rank waited for others in a step, on average over the attempt."""
        return self.waited_s / max(self.step - self.first_step, 1)

    def span_s(self, stage: Stage) -> tuple[float, float]:
        """Return the start and the end of a stage, since the epoch, clipped to the attempt."""
        stop_s = max(self.start_s, self.stop_s)
        begun_s = min(self.start_s + max(0.0, stage.begun_s), stop_s)
        # A lower bound: the measured times may overlap, and other times are not measured.
        taken_s = max(stage.wire_s or 0.0, stage.waited_s + stage.kernel_s)
        return begun_s, min(begun_s + taken_s, stop_s)


def packed(records: Iterable[TaskRecord]) -> bytes:
    """Return records as bytes, readable by the same version of the package only."""
    return pickle.dumps((own_version(), pickle.dumps([*records])))


def unpacked(data: bytes) -> list[TaskRecord]:
    """Return records of the bytes of `packed`; `RegistrationError` for another version."""
    version, records = pickle.loads(data)
    check_version(version)
    return list(pickle.loads(records))


class RecordLog:
    """A log of the newest records. Any thread may use it."""

    def __init__(self, size: int) -> None:  # most records and stages in the log, together
        self.size = size
        self._records: deque[TaskRecord] = deque()
        self._weight = 0
        self.count = 0  # number of all records so far, including dropped ones
        self._lock = threading.Lock()

    def append(self, record: TaskRecord) -> None:
        """Add a record. Drop the oldest ones if the log is full."""
        with self._lock:
            self._records.append(record)
            self.count += 1
            self._weight += 1 + len(record.stages)
            while self._weight > self.size and len(self._records) > 1:
                self._weight -= 1 + len(self._records.popleft().stages)

    def since(self, number: int) -> tuple[int, list[TaskRecord]]:
        """Return the number of the first record returned, and all kept records from `number` on.

        Records are numbered from 0.
        """
        with self._lock:
            gone = self.count - len(self._records)
            first = min(max(number, gone), self.count)
            return first, list(self._records)[first - gone :]

    def newest(self, size: int) -> list[TaskRecord]:
        """Return the newest records up to this size, counted as in `size`, oldest first."""
        with self._lock:
            newest = []
            for record in reversed(self._records):
                size -= 1 + len(record.stages)
                if size < 0:
                    break
                newest.append(record)
            return newest[::-1]

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[TaskRecord]:
        return iter(self.since(0)[1])


class RecordStore(RecordLog):
    """The newest records of all workers, each once. They stay after their worker has left."""

    def __init__(self, size: int = _SCHEDULER_RECORDS) -> None:
        super().__init__(size)
        self.runs = RunLog()
        self._next: dict[str, int] = {}  # by worker: number of the first missing record

    def since(self, number: int) -> tuple[int, list[TaskRecord]]:
        first, records = super().since(number)
        return first, self.runs.with_outcomes(records)

    def newest(self, size: int) -> list[TaskRecord]:
        return self.runs.with_outcomes(super().newest(size))

    def next(self, worker: str) -> int:
        """Return the number of a worker's first record that is missing here."""
        return self._next.get(worker, 0)

    def add(self, worker: str, first: int, records: list[TaskRecord]) -> None:
        """Add the records that a worker has sent. Skips known ones, as requests may overlap."""
        for record in records[max(0, self.next(worker) - first) :]:
            self.append(record)
        self._next[worker] = max(self.next(worker), first + len(records))

    def forget(self, worker: str) -> None:
        """Drop the state of a worker that has left. Its records stay."""
        self._next.pop(worker, None)


class RunLog:
    """The starts and outcomes of each array's runs.

    Kept on the scheduler, which has all unfinished tasks. A run starts with the first task that is
    sent to a worker, and ends when no task of its array is left.
    """

    def __init__(self) -> None:
        self._starts: dict[str, list[int]] = {}  # by array: Dask's number of each first task
        self._open: set[str] = set()  # arrays with a run in progress
        self._outcomes: dict[tuple[str, int], str] = {}  # by array and number of the run

    def sent(self, name: str, number: int) -> None:
        """Record that a task of an array was sent to a worker, with Dask's number of the task."""
        if name not in self._open:
            self._open.add(name)
            starts = self._starts.setdefault(name, [])
            starts[:] = [*starts[1 - MOST_RUNS :], number]
            if len(self._starts) > MOST_ARRAYS:
                del self._starts[next(iter(self._starts))]

    def newest(self, name: str) -> int:
        """Return the number of an array's newest run; 0 if it is unknown."""
        return self._starts.get(name, [0])[-1]

    def is_open(self, name: str) -> bool:
        return name in self._open

    def end(self, name: str) -> None:
        self._open.discard(name)

    def set_outcome(self, name: str, outcome: str) -> None:
        """Record that the run in progress has failed or was cancelled. The first outcome counts.

        After a failure Dask releases tasks that nobody needs any more, as after a cancellation.
        """
        if name in self._open and (starts := self._starts.get(name)):
            self._outcomes.setdefault((name, starts[-1]), outcome)
            if len(self._outcomes) > MOST_ARRAYS:
                del self._outcomes[next(iter(self._outcomes))]

    def with_outcomes(self, records: Iterable[TaskRecord]) -> list[TaskRecord]:
        if not self._outcomes:
            return list(records)
        outcomes = ((record, self._outcomes.get((record.name, record.run))) for record in records)
        return [record._replace(outcome=text) if text else record for record, text in outcomes]

    def assigned(self, records: Iterable[TaskRecord]) -> list[TaskRecord]:
        assigned = []
        for record in records:
            starts = self._starts.get(record.name, ())
            position = bisect(starts, record.run)
            assigned.append(record._replace(run=starts[position - 1] if position else 0))
        return assigned
