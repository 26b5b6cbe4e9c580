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

import errno
import json
import re
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from hashlib import blake2b
from itertools import chain
from types import MappingProxyType
from typing import Any

import numpy as np
from distributed import warn

from dask_p2p.errors import FileError, InputError, P2PWarning
from dask_p2p.geometry import Box
from dask_p2p.sections.context.context import Context
from dask_p2p.sections.context.state import DIVIDED, NUMBER, OWN, SavedValue
from dask_p2p.sections.gang.checkpoints import Period
from dask_p2p.sections.iterate.output.files import (
    SERIES,
    FieldValues,
    Parts,
    StateValues,
    fingerprint,
)
from dask_p2p.sections.iterate.output.groups import (
    Folder,
    Shapes,
    check_seen,
    create_arrays,
    create_group,
    describe_shapes,
    difference,
    explain_errors,
    newer_run_error,
    open_group,
    run_on_first_rank,
    store_chunks,
)
from dask_p2p.types import Array

#: Attributes of the group of a checkpoint.
_ATTRIBUTES = {"format": "dask_p2p checkpoint 3"}
_METADATA = "zarr.json", ".zattrs"  # files with these attributes
_LACKS = {errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE}  # no other run causes these
_COMPLETE, _INCOMPLETE = ".complete", ".incomplete"
_STEP_NAME = re.compile(rf"step-(\d{{12}})({_COMPLETE}|{_INCOMPLETE}|)")
_RUN_NAME = re.compile(r"dask_p2p-run-[0-9a-f]{16}")

Values = Mapping[str, SavedValue]  # of a checkpoint, by name


class CheckpointFiles:
    """The checkpoints of one rank in the folder of a `Checkpoint`, `spec`."""

    reads_halos, is_resumed = False, True

    def __init__(
        self,
        spec: Any,
        ctx: Context,
        values: FieldValues | StateValues,
        # Name, block and box of each array, and whether the block counts on this rank.
        constants: Iterable[tuple[str, Array, Box, bool]] = (),
        settings: Callable[[], Mapping[str, str]] = dict,  # returns texts of the run's, by name
        records: Mapping[str, Any] = MappingProxyType({}),  # kinds of all series
    ) -> None:
        self.ctx, self._spec, self._values, self._records = ctx, spec, values, records
        self._folder, self.schedule = Folder(str(spec.path)), Period(spec.every)
        current, is_first = values.current(), ctx.rank == 0
        series = {SERIES + name for name in records}
        self._kinds = {name: v.kind for name, v in current.items() if name not in series}
        initial = [
            (name, value.array, value.box, is_first or value.kind == DIVIDED)
            for name, value in current.items()
            if value.kind != OWN
        ]
        #: Fingerprints of this rank's parts of the initial values, by name.
        self._fingerprints = {
            name: fingerprint(ctx.device, block, box) if counts else np.uint64(0)
            for name, block, box, counts in chain(initial, constants)
        }
        #: Settings, and fingerprints of the whole initial values, as texts.
        self._initial = dict(settings()) if is_first else {}
        self._run: Folder | None = None  # the file of this run
        self.step = -1  # of the newest checkpoint of this run

    def __str__(self) -> str:
        return str(self._folder)

    def resume(self, first: int, steps: int | None) -> int:
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
        for step in (step for step in checkpoints if step > first):
            record, cause = self._load(step)
            if not cause:
                self._report(step, record, damage, is_first=not first)
                self._initial = record["initial"]
                run_on_first_rank(self.ctx, self._folder, partial(self._make_room, step))
                return step
            damage = (
                damage or f"expected the values that were written to {self._of_step(step)}, {cause}"
            )
        if damage:
            raise FileError(
                f"{damage}. There is no other checkpoint to resume from. Copy it here again, or "
                f"remove {self} to begin at step 0."
            )
        run_on_first_rank(self.ctx, self._folder, partial(self._make_room, first))
        return first

    def write(self, step: int, flush: Callable[[], None]) -> None:
        """Write a checkpoint; `flush` completes all frames before it is complete."""
        ctx, folder, values = self.ctx, self._of_step(step), self._values.current()
        self.step, rank_names = step, self._differing(values)

        def create() -> None:
            with self._explain_errors(folder):
                self._check_run()
                if folder.exists() and not self._has_mark(step):
                    raise FileError(
                        f"expected no folder at {folder}, got one that dask_p2p has not written. "
                        f"Move it, or give another path."
                    )
                self._remove(step)
                self._of_step(step, _INCOMPLETE).touch()  # before there is a folder
                dtypes = (value.array.dtype for value in values.values())
                group = create_group(folder, dtypes, _ATTRIBUTES)
                chunks = store_chunks(ctx.grid_of().ranks.chunks)
                create_arrays(group, self._shapes(values), chunks)

        run_on_first_rank(ctx, folder, create)
        check_seen(ctx, folder, self._check_run)
        with self._explain_errors(folder):
            part = self._write_parts(open_group(folder), values, rank_names)
            folder.sync()
        flush()
        record = {
            "program": self._program(values),
            "step": step,
            "initial": self._initial,
            "fingerprint": int(ctx.allreduce(part)),
            "kinds": {name: value.kind for name, value in values.items()},
            "ranks": ctx.size,
            "own": rank_names,
            "records": dict(self._records),
        }
        run_on_first_rank(ctx, folder, lambda: self._complete(step, record))

    def flush(self) -> None:
        """Return immediately: checkpoints are complete after `write`."""

    def close(self) -> None:
        """Release the folder for other runs."""
        if self.ctx.rank == 0 and self._run is not None:
            self._run.remove()

    # --- contents of a checkpoint

    def _shapes(self, values: Values) -> Shapes:
        divided = {name: value for name, value in values.items() if value.kind == DIVIDED}
        return {name: (value.shape, value.array.dtype) for name, value in divided.items()}

    def _differing(self, values: Values) -> list[str]:
        """Return names of each rank's values that differ. Raises `InputError` for a number."""
        values = {name: value for name, value in values.items() if value.kind != DIVIDED}
        if not values:
            return []
        hosts = [self.ctx.device.to_host(value.array) for value in values.values()]
        digests = [_digest(f"{a.dtype.str}{a.shape}".encode() + a.tobytes()) for a in hosts]
        rows = np.frombuffer(b"".join(digests), np.uint8).reshape(len(values), -1)
        every = self.ctx.allgather(rows)
        is_same = (every == every[0]).all(axis=(0, 2)).tolist()
        names = [name for name, same in zip(values, is_same, strict=True) if not same]
        for name in names:
            if values[name].kind == NUMBER:
                raise InputError(
                    f"state: expected numbers that are the same on all ranks, as checkpoint= "
                    f"requires, got {name}, which differs. Give an array of one element, "
                    f"np.array([...]): each rank has its own."
                )
        return names

    def _write_parts(self, group: Any, values: Values, rank_names: Collection[str]) -> np.uint64:
        """Write this rank's parts of all values; `rank_names` names those of each rank."""
        parts = Parts()
        for name, value in values.items():
            block = self.ctx.device.to_host(value.array)
            if value.kind == DIVIDED:
                parts.write(group, name, block, value.box)
            elif name in rank_names:
                parts.create(group, self._rank_name(name), block)
            elif self.ctx.rank == 0:
                parts.create(group, name, block)
        return parts.fingerprint

    def _rank_name(self, name: str) -> str:
        return f"{name}.rank-{self.ctx.rank}"

    # --- to resume

    def _begin(self, first: int) -> list[int]:
        """Begin to use the folder; return the steps of complete checkpoints, the newest first."""
        ctx, steps = self.ctx, list[int]()
        number = int(ctx.bcast(secrets.randbits(62) if ctx.rank == 0 else None))
        self._run = run = self._folder.child(f"dask_p2p-run-{number:016x}")
        run_on_first_rank(ctx, self._folder, lambda: steps.extend(self._enter(run)))
        check_seen(ctx, run, self._check_run)
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
                self._of_step(step, _INCOMPLETE).remove()
            elif self._has_mark(step):  # the other run may still write to it: the file stays
                self._of_step(step).remove()
        return sorted(complete, reverse=True)

    def _load(self, step: int) -> tuple[Any, str]:
        """Load a checkpoint; return its record, and a text if it is damaged on some rank.

        Raises `InputError` if this run cannot use it.
        """
        import zarr

        record, part, cause = None, np.uint64(0), ""
        try:
            record = self._record(step)
            self._check_program(record)
            parts = Parts()
            group = zarr.open_group(self._of_step(step).store, mode="r")
            self._values.load(step, self._read(group, record, parts))
            part = parts.fingerprint
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
        digest, _, text = self._of_step(step, _COMPLETE).read().partition(b"\n")
        if digest != _digest(text).hex().encode():
            raise ValueError(f"{self._of_step(step, _COMPLETE)} has other contents")
        return json.loads(text)

    def _read(self, group: Any, record: Mapping[str, Any], parts: Parts) -> Iterator[Any]:
        boxes = {name: value.box for name, value in self._values.current().items()}
        for name, kind in record["kinds"].items():
            if kind == DIVIDED:
                yield name, parts.read(group, name, boxes[name])
            elif name in record["own"]:
                yield name, parts.read(group, self._rank_name(name))
            else:
                yield name, parts.read(group, name, counts=self.ctx.rank == 0)

    def _program(self, values: Values) -> dict[str, Any]:
        arrays = describe_shapes(self._shapes(values))
        return {**_ATTRIBUTES, "values": self._kinds, "arrays": arrays}

    def _check_program(self, record: Mapping[str, Any]) -> None:
        """Raise `InputError` for a checkpoint that this run cannot use."""
        program = self._program(self._values.current())
        if record["program"] != program:
            raise InputError(
                f"expected a checkpoint of the same fields at {self}, got "
                f"{difference(record['program'], program)}. Give another path, or the same fields."
            )
        if record["own"] and record["ranks"] != self.ctx.size:
            raise InputError(
                f"ranks: expected {record['ranks']} ranks, as the checkpoint at {self} has values "
                f"that differ between ranks, got {self.ctx.size}. Give ranks={record['ranks']}."
            )
        stored_records, records = record["records"], self._records
        names = [name for name, kind in records.items() if stored_records.get(name, kind) != kind]
        if names:
            raise InputError(
                f"record: expected records of the same steps, shape and dtype as in the checkpoint "
                f"at {self}, {stored_records}, got {records}. Give {', '.join(names)} another "
                f"name, or the checkpoint another path."
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
        if new := sorted(self._records.keys() - record["records"].keys()):
            self._warn(
                f"record: the run resumes at step {step} of {self}, which has no values of "
                f"{', '.join(new)}. Their series have NaN, or 0 for integers, for the steps "
                f"before. Give the records in the first run."
            )

    # --- to write

    def _complete(self, step: int, record: Mapping[str, Any]) -> None:  # on rank 0
        text = json.dumps(record).encode()
        with self._explain_errors(self._of_step(step)):
            self._check_run()
            self._of_step(step, _COMPLETE).write(_digest(text).hex().encode() + b"\n" + text)
            self._of_step(step, _INCOMPLETE).remove()
            self._make_room(step)

    def _make_room(self, newest: int) -> None:  # on rank 0
        steps = sorted(self._steps(_COMPLETE, self._folder.names()))
        older = [step for step in steps if step <= newest]
        for step in {*steps} - {*older[-self._spec.keep :]}:
            self._remove(step)

    def _remove(self, step: int) -> None:
        """Remove a checkpoint; in each moment a file shows that this package wrote it."""
        incomplete = self._of_step(step, _INCOMPLETE)
        with suppress(OSError):  # on a full disk
            incomplete.touch()
        self._of_step(step, _COMPLETE).remove()
        self._of_step(step).remove()
        if not self._of_step(step).exists():
            incomplete.remove()

    def _check_run(self) -> None:
        if self._run is None or not self._run.exists():
            raise newer_run_error("checkpoints", self._folder)

    @contextmanager
    def _explain_errors(self, folder: Folder) -> Iterator[None]:
        """Name the folder in errors of files, and a later run if that has removed them."""
        try:
            with explain_errors(folder):
                yield
        except Exception as exc:
            if getattr(exc.__cause__, "errno", None) not in _LACKS:
                self._check_run()
            raise

    def _warn(self, text: str) -> None:
        if self.ctx.rank == 0:
            warn(text, P2PWarning)

    # --- names

    def _of_step(self, step: int, end: str = "") -> Folder:
        return self._folder.child(f"step-{step:012}{end}")

    def _steps(self, end: str, names: list[str]) -> list[int]:
        matches = filter(None, map(_STEP_NAME.fullmatch, names))
        return [int(match[1]) for match in matches if match[2] == end]

    def _has_mark(self, step: int) -> bool:
        if any(self._of_step(step, end).exists() for end in (_COMPLETE, _INCOMPLETE)):
            return True
        mark = _ATTRIBUTES["format"].rpartition(" ")[0].encode()
        files = [self._of_step(step).child(name) for name in _METADATA]
        return any(file.exists() and mark in file.read() for file in files)


def _digest(contents: bytes) -> bytes:
    return blake2b(contents, digest_size=16).digest()
