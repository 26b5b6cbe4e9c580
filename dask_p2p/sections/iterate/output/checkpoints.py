"""A folder of checkpoints in files: which are complete and undamaged, and which are too old.

Rank 0 creates the arrays of a checkpoint, and all ranks write their parts. When these are on the
disk, rank 0 writes a *record*. It has the description of the program, and a fingerprint of all
values, which is compared after the values are read again::

    step-000000000400/            u  v         the arrays
    step-000000000400.complete                 their record
    step-000000000600/            u  v
    step-000000000600.incomplete               a checkpoint that is being written, or removed
    dask_p2p-run-8c0f5d1a22e94b37              the newest run with this folder

One of these two files, or the attributes of the group, mark a checkpoint of this package. All other
files and folders belong to users, and stay.
"""

from __future__ import annotations

import json
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np

from dask_p2p.errors import FileError, InputError, P2PWarning
from dask_p2p.geometry import Box, box_slices, split_box
from dask_p2p.sections.context.context import Context
from dask_p2p.sections.exchange.device import HOST, Host
from dask_p2p.sections.gang.checkpoints import Period
from dask_p2p.sections.iterate.output.groups import (
    CONFIG,
    Folder,
    another_run,
    difference,
    explained,
    is_seen_by_all,
    not_seen,
    opened,
    stored,
    together,
)
from dask_p2p.types import Array

if TYPE_CHECKING:
    from dask_p2p.sections.iterate.output.specs import CheckpointArguments


#: Attributes of the group of a checkpoint.
ATTRIBUTES = {"format": "dask_p2p checkpoint 2"}
_METADATA = "zarr.json", ".zattrs"  # files with these attributes
_COMPLETE, _INCOMPLETE = ".complete", ".incomplete"
_STEP_NAME = re.compile(rf"step-(\d{{12}})({_COMPLETE}|{_INCOMPLETE}|)")
_RUN_NAME = re.compile(r"dask_p2p-run-[0-9a-f]{16}")


class CheckpointFolder(ABC):
    """The checkpoints of one rank in the folder of a `Checkpoint`."""

    def __init__(
        self,
        spec: CheckpointArguments,
        ctx: Context,
        fingerprints: Mapping[str, np.uint64],  # of this rank's parts of the initial values
        settings: Mapping[str, str] = {},  # of the run, by name
    ) -> None:
        self.ctx, self._spec = ctx, spec
        self._folder, self._period = Folder(str(spec.path)), Period(spec.every)
        self._fingerprints = fingerprints
        #: Settings, and fingerprints of the whole initial values, as texts.
        self._initial = {**settings}
        self._run: Folder | None = None  # the file of this run

    def __str__(self) -> str:
        return str(self._folder)

    @property
    def every(self) -> int | str:
        """The interval: a number of steps, or a time."""
        return self._spec.every

    def is_due(self, step: int) -> bool:
        """Return whether a checkpoint is due after a step: the same on all ranks."""
        return self.ctx.has_ended(self._period, step)

    def resumed(self, first: int, steps: int | None) -> int:
        """Load the newest undamaged checkpoint if it is newer than a step; return the first step.

        Raises `InputError` if it has more steps than the run, or another program wrote it, and
        `FileError` if all are damaged, or some ranks do not see the folder.
        """
        checkpoints = self._begin(first)
        if checkpoints and steps is not None and checkpoints[0] > steps:
            raise InputError(
                f"expected at least {checkpoints[0]} steps, as the checkpoint at {self} has, got "
                f"{steps}. Give more steps, or another path."
            )
        part = np.array([*self._fingerprints.values()], np.uint64)
        sums = self.ctx.allreduce(part) if part.size else part
        self._initial |= zip(self._fingerprints, map(hex, sums.tolist()), strict=True)
        damage = ""
        for step in checkpoints:
            if step <= first:
                break
            record, cause = self._loaded(step)
            if not cause:
                self._report(step, record, damage, is_first=not first)
                self._initial = record["initial"]
                together(self.ctx, self._folder, partial(self._make_room, step))
                return step
            damage = (
                damage
                or f"expected the values that were written to {self._step_folder(step)}, {cause}"
            )
        if damage:
            raise FileError(
                f"{damage}. There is no other checkpoint to resume from. Copy it here again, or "
                f"remove {self} to begin at step 0."
            )
        together(self.ctx, self._folder, partial(self._make_room, first))
        return first

    def write(self, step: int, flush: Callable[[], None]) -> None:
        """Write a checkpoint; `flush` completes all frames before it is complete."""
        ctx, folder = self.ctx, self._step_folder(step)

        def create() -> None:
            with self._explained(folder):
                self._check_run()
                self._clear(step)
                self._create(folder)

        self._prepare()
        together(ctx, folder, create)
        if not is_seen_by_all(ctx, folder):
            self._check_run()
            raise not_seen(folder)
        with self._explained(folder):
            part = self._fill(opened(folder))
            folder.sync()
        flush()
        fingerprint = int(ctx.allreduce(part))
        together(ctx, folder, lambda: self._complete(step, fingerprint))

    def flush(self) -> None:  # noqa: B027
        """Return immediately: checkpoints are complete after `write`."""

    def close(self) -> None:
        """Release the folder for other runs."""
        if self.ctx.rank == 0 and self._run is not None:
            self._run.remove()

    # --- contents of a checkpoint

    @abstractmethod
    def _program(self) -> dict[str, Any]:
        """Return a description of the values, which that of a later run must equal."""

    @abstractmethod
    def _details(self) -> dict[str, Any]:
        """Return what else the record of a checkpoint has."""

    @abstractmethod
    def _check(self, record: Mapping[str, Any]) -> None:
        """Raise `InputError` for a checkpoint that this run cannot use."""

    @abstractmethod
    def _load(self, group: Any, record: Mapping[str, Any]) -> np.uint64:
        """Read this rank's part of a checkpoint; return its fingerprint."""

    @abstractmethod
    def _prepare(self) -> None:
        """Gather the values to write. A collective call of all ranks."""

    @abstractmethod
    def _create(self, folder: Folder) -> None:
        """Create the group of a checkpoint, with its arrays and numbers. On rank 0."""

    @abstractmethod
    def _fill(self, group: Any) -> np.uint64:
        """Write this rank's part of a checkpoint; return its fingerprint."""

    # --- to resume

    def _begin(self, first: int) -> list[int]:
        """Begin to use the folder; return the steps of complete checkpoints, the newest first."""
        ctx, steps = self.ctx, list[int]()
        number = int(ctx.bcast(secrets.randbits(62) if ctx.rank == 0 else None))
        self._run = run = self._folder.child(f"dask_p2p-run-{number:016x}")
        together(ctx, self._folder, lambda: steps.extend(self._enter(run)))
        if not is_seen_by_all(ctx, run):
            together(ctx, self._folder, self._check_run)
            raise not_seen(self._folder)
        steps = [int(step) for step in ctx.bcast(np.array(steps, np.int64))]
        if steps and not self._spec.resume and not first:
            raise InputError(
                f"expected a folder without checkpoints because of resume=False, got {self} "
                f"with {len(steps)}. Give another path, or resume=True."
            )
        return steps

    def _enter(self, run: Folder) -> list[int]:
        """End other runs, and remove their remains; return complete steps. On rank 0."""
        self._folder.make()
        run.touch()  # first, so that one of two runs that begin at the same time finds the other
        names = self._folder.names()
        for name in names:  # before the checkpoints: a run that misses its files finds the cause
            if _RUN_NAME.fullmatch(name) and name != run.name:
                self._folder.child(name).remove()
        complete = self._steps(_COMPLETE, names)
        for step in {*self._steps("", names), *self._steps(_INCOMPLETE, names)} - {*complete}:
            if f"step-{step:012}" not in names:
                self._marker(step, _INCOMPLETE).remove()
            elif self._has_mark(step):  # the other run may still write to it: the file stays
                self._step_folder(step).remove()
        return sorted(complete, reverse=True)

    def _loaded(self, step: int) -> tuple[Any, str]:
        """Load a checkpoint; return its record, and a text if it is damaged on some rank.

        Raises `InputError` if this run cannot use it.
        """
        import zarr

        record, part, cause = None, np.uint64(0), ""
        try:
            record = self._record(step)
            self._check_program(record)
            self._check(record)
            part = self._load(zarr.open_group(self._step_folder(step).store, mode="r"), record)
        except (InputError, MemoryError):
            raise
        except Exception as exc:
            cause = f"got {type(exc).__name__}: {exc}"
        total, damaged_count = self.ctx.allreduce(np.array([part, bool(cause)], np.uint64))
        if damaged_count:
            return None, cause or "which some ranks cannot read"
        is_same = record is not None and int(total) == record["fingerprint"]
        return record, "" if is_same else "got others"

    def _record(self, step: int) -> Any:
        """Return the record of a checkpoint. Raises `ValueError` if it is damaged."""
        digest, _, text = self._marker(step, _COMPLETE).read().partition(b"\n")
        if digest != _digest(text):
            raise ValueError(f"{self._marker(step, _COMPLETE)} has other contents")
        return json.loads(text)

    def _check_program(self, record: Mapping[str, Any]) -> None:
        program = self._program()
        if record["program"] != program:
            raise InputError(
                f"expected a checkpoint of the same fields at {self}, got "
                f"{difference(record['program'], program)}. Give another path, or the same fields."
            )

    def _report(self, step: int, record: Mapping[str, Any], damage: str, is_first: bool) -> None:
        """Warn of damaged checkpoints, and of other settings than those of the first run."""
        if damage:
            self._warn(
                f"checkpoint: {damage}. The run resumes at the older checkpoint of step {step}, "
                f"and removes newer ones."
            )
        initial = record["initial"]
        names = [name for name, text in self._initial.items() if initial.get(name, text) != text]
        if names and is_first:
            self._warn(
                f"checkpoint: the run resumes at step {step} of {self}. It differs from the "
                f"first run there in {', '.join(names)}: the steps before are those of the first "
                f"run. Give another path to begin at step 0."
            )

    # --- to write

    def _complete(self, step: int, fingerprint: int) -> None:
        """Record that all ranks have written a checkpoint; remove old ones. On rank 0."""
        record = {
            "program": self._program(),
            "step": step,
            "initial": self._initial,
            "fingerprint": fingerprint,
            **self._details(),
        }
        text = json.dumps(record).encode()
        with self._explained(self._step_folder(step)):
            self._check_run()
            self._marker(step, _COMPLETE).write(_digest(text) + b"\n" + text)
            self._marker(step, _INCOMPLETE).remove()
            self._make_room(step)

    def _make_room(self, newest: int) -> None:
        """Remove checkpoints after a step, and all but the newest ones until it. On rank 0."""
        steps = sorted(self._steps(_COMPLETE, self._folder.names()))
        older = [step for step in steps if step <= newest]
        for step in {*steps} - {*older[-self._spec.keep :]}:
            self._remove(step)

    def _clear(self, step: int) -> None:
        """Make a place for a checkpoint. Raises `FileError` if a user's folder is there."""
        if self._step_folder(step).exists() and not self._has_mark(step):
            raise FileError(
                f"expected no folder at {self._step_folder(step)}, got one that dask_p2p has not "
                f"written. Move it, or give another path."
            )
        self._remove(step, last=False)

    def _remove(self, step: int, last: bool = True) -> None:
        """Remove a checkpoint; in each moment a file shows that this package wrote it."""
        incomplete = self._marker(step, _INCOMPLETE)
        with suppress(OSError):  # on a full disk
            incomplete.touch()
        self._marker(step, _COMPLETE).remove()
        self._step_folder(step).remove()
        if last and not self._step_folder(step).exists():
            incomplete.remove()

    def _check_run(self) -> None:
        """Raise `FileError` if another run has begun to use the folder."""
        if self._run is None or not self._run.exists():
            raise another_run("checkpoints", self._folder)

    @contextmanager
    def _explained(self, folder: Folder) -> Iterator[None]:
        """Name the folder in errors of files, and a later run if that has removed them."""
        try:
            with explained(folder):
                yield
        except Exception:
            self._check_run()
            raise

    def _warn(self, text: str) -> None:
        """Warn once, in the client and in the worker of rank 0."""
        from distributed import warn

        if self.ctx.rank == 0:
            warn(text, P2PWarning)

    # --- names

    def _step_folder(self, step: int) -> Folder:
        """Return the folder of one checkpoint."""
        return self._folder.child(f"step-{step:012}")

    def _marker(self, step: int, end: str) -> Folder:
        """Return the record of a checkpoint, or the file of an incomplete one."""
        return self._folder.child(f"step-{step:012}{end}")

    def _steps(self, end: str, names: list[str]) -> list[int]:
        """Return the steps of all names with one end."""
        matches = filter(None, map(_STEP_NAME.fullmatch, names))
        return [int(match[1]) for match in matches if match[2] == end]

    def _has_mark(self, step: int) -> bool:
        """Return whether this package has written the folder of a checkpoint."""
        if any(self._marker(step, end).exists() for end in (_COMPLETE, _INCOMPLETE)):
            return True
        mark = ATTRIBUTES["format"].rpartition(" ")[0].encode()
        files = [self._step_folder(step).child(name) for name in _METADATA]
        return any(file.exists() and mark in file.read() for file in files)


def _digest(text: bytes) -> bytes:
    return blake2b(text, digest_size=16).hexdigest().encode()


# Numbers that distinguish the values of arrays, for any division of the arrays between ranks.
#
# A fingerprint is the sum, modulo 2**64, of all words of an array's elements, each times a weight
# that depends on its index in the whole array. So the sum of the fingerprints of all parts is that
# of the whole array::
#
#     fingerprint(x[:5], box 0..5) + fingerprint(x[5:], box 5..9) = fingerprint(x, box 0..9)

_COPIED_ELEMENTS = 2**21  # of one copy from a GPU
_PIECE_ELEMENTS = 2**13  # whose words and weights stay in a cache
_WORD_BYTES = 4, 2, 1  # products of 64-bit words with weights would overflow
# Those of the generator SplitMix64: https://prng.di.unimi.it/splitmix64.c
_INCREMENT = np.uint64(0x9E3779B97F4A7C15)
_MIXING = (30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)
_LAST_SHIFT = 31


def fingerprint(device: Host, block: Array, box: Box) -> np.uint64:
    """Return the fingerprint of a part of an array.

    Parameters
    ----------
    device
        Device of the part.
    block
        Elements of the part.
    box
        Bounds of the part in the whole array.
    """
    total = np.zeros((), np.uint64)
    if not box:
        block, box = block.reshape(1), ((0, 1),)
    starts = [start for start, _ in box]
    for copied in split_box(box, _COPIED_ELEMENTS):
        host = device.to_host(block[box_slices(_relative(copied, starts))])
        copied_starts = [start for start, _ in copied]
        for piece in split_box(copied, _PIECE_ELEMENTS):
            total += _of_piece(host[box_slices(_relative(piece, copied_starts))], piece)
    return np.uint64(total)


def fingerprint_of_same(device: Host, value: Array, rank: int) -> np.uint64:
    """Return a rank's part of the fingerprint of a number that all ranks have: it counts once."""
    return np.uint64(0) if rank else fingerprint(device, value, ())


class Parts:
    """Reads or writes one rank's parts of the arrays of a group, and sums their fingerprints.

    The sum over all ranks is the same for any division of the arrays between ranks. It changes with
    each element, and with the name, dtype and shape of each array.
    """

    def __init__(self) -> None:
        self.fingerprint = np.uint64(0)

    def write(self, group: Any, name: str, block: Array, box: Box) -> None:
        """Write a part of an array."""
        array = stored(group, name)
        if block.size:
            array[box_slices(box)] = block
        self._add(array, name, block, box)

    def create(self, group: Any, name: str, values: Array) -> None:
        """Create an array with some values."""
        self._add(group.create_array(name, data=values, config=CONFIG), name, values)

    def read(self, group: Any, name: str, box: Box | None = None, counts: bool = True) -> Array:
        """Return a part of an array, by default all of it; it may be one that counts elsewhere."""
        array = group[name]
        block = np.asarray(array[... if box is None else box_slices(box)])
        if counts:
            self._add(array, name, block, box)
        return block

    def _add(self, array: Any, name: str, block: Array, box: Box | None = None) -> None:
        box = tuple((0, length) for length in array.shape) if box is None else box
        text = f"{name} {array.dtype.str} {array.shape}".encode()
        weight = np.uint64(int.from_bytes(blake2b(text, digest_size=8).digest()) | 1)
        part = fingerprint(HOST, block, box) if block.size else np.uint64(0)
        with np.errstate(over="ignore"):
            self.fingerprint += weight * part


def _of_piece(block: Any, box: Box) -> np.uint64:
    block = np.ascontiguousarray(block)
    word_bytes = next(n for n in _WORD_BYTES if block.dtype.itemsize % n == 0)
    weights = [_weights(axis, *bounds) for axis, bounds in enumerate(box)]
    of_words = _weights(len(box), 0, block.dtype.itemsize // word_bytes)
    weights[-1] = np.multiply.outer(weights[-1], of_words).ravel()
    sums = block.view(f"u{word_bytes}").astype(np.uint64)
    for of_axis in reversed(weights):
        sums = sums @ of_axis
    return np.uint64(sums)


def _weights(axis: int, start: int, stop: int) -> Any:
    """Return odd numbers for the indices of an axis."""
    weights = np.arange(start, stop, dtype=np.uint64)
    weights += np.uint64((axis + 1) << 56)  # other numbers for each axis
    weights *= _INCREMENT
    for shift, factor in _MIXING:
        weights ^= weights >> np.uint64(shift)
        weights *= np.uint64(factor)
    weights ^= weights >> np.uint64(_LAST_SHIFT)
    return weights | np.uint64(1)


def _relative(box: Box, origin: list[int]) -> Box:
    return tuple((lo - at, hi - at) for (lo, hi), at in zip(box, origin, strict=True))
