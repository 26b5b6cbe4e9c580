"""Damaged checkpoints and frames, lost power, full disks, and runs that share a folder."""

import asyncio
import errno
import os
import random
import re
import resource
import shutil
import warnings
from pathlib import Path

import dask
import dask.array as da
import numpy as np
import pytest

from dask_p2p import Checkpoint, Save, iterate, spmd
from dask_p2p.errors import FileError, InputError
from tests.sections.iterate.output.test_stores import run_here
from tests.support import BOUND_S, mostly_slow
from tests.transports.loopback import wait_until

zarr = pytest.importorskip("zarr")

U = np.random.default_rng(0).normal(size=400)


def heat(u, t):
    return {"u": u[1:-1] + 0.25 * (u[2:] - 2 * u[1:-1] + u[:-2]), "t": t + 0.5}


def by_iterate(folder, steps, save=(), scheduler="sync", **options):
    """Return the field after some steps, which `iterate` makes."""
    fields = {"u": da.from_array(U, chunks=100), "t": 0.0}
    checkpoint = Checkpoint(folder, every=10, **options)
    record = {"sum": lambda u: u[1:-1].sum()}
    stores = {"save": save, "checkpoint": checkpoint, "record": record}
    lazy_result = iterate(heat, fields, 1, steps, ranks=1, **stores)
    return dask.compute(lazy_result, scheduler=scheduler)[0]["u"]


def by_steps(folder, steps, scheduler="sync", **options):
    """Return the field after some steps, which a loop of `spmd` makes."""

    def loop(ctx, u):
        s = ctx.state(u=u, t=0.0, rng=np.random.default_rng(1))
        for _ in ctx.steps(steps, s, checkpoint=Checkpoint(str(folder), every=10, **options)):
            s.u = heat(ctx.pad(s.u, 1, "periodic"), s.t)["u"]
            s.t += 0.5
            s.u[0] += s.rng.normal()
        return s.u

    return spmd(loop, da.from_array(U, chunks=100), ranks=1).compute(scheduler=scheduler)


def missing(file, draw, chunks):
    file.unlink()


def empty(file, draw, chunks):
    file.write_bytes(b"")


def truncated(file, draw, chunks):
    contents = file.read_bytes()
    file.write_bytes(contents[: len(contents) // 2])


def zeros(file, draw, chunks):
    file.write_bytes(bytes(file.stat().st_size))


def with_another_bit(file, draw, chunks):
    contents = bytearray(file.read_bytes())
    contents[draw.randrange(len(contents))] ^= 1 << draw.randrange(8)
    file.write_bytes(contents)


def swapped(file, draw, chunks):
    another = draw.choice([chunk for chunk in chunks if chunk != file])
    contents = file.read_bytes()
    file.write_bytes(another.read_bytes())
    another.write_bytes(contents)


DAMAGE = [missing, empty, truncated, zeros, with_another_bit, swapped]


@pytest.mark.parametrize("damage", mostly_slow(DAMAGE, [missing, with_another_bit]))
@pytest.mark.parametrize("program", [by_iterate, by_steps])
def test_the_older_checkpoint_is_taken_if_the_newest_is_damaged(tmp_path, program, damage):
    """Each file in turn: chunks, metadata, and the record beside them."""
    program(tmp_path / "first", 20)
    truth = program(tmp_path / "whole", 30)
    newest, draw = f"step-{20:012}", random.Random(damage.__name__)
    files = [path.relative_to(tmp_path / "first") for path in (tmp_path / "first").rglob("*")]
    files = [path for path in files if str(path).startswith(newest)]
    for number, path in enumerate(files):
        folder = tmp_path / str(number)
        shutil.copytree(tmp_path / "first", folder)
        if (folder / path).is_dir():
            continue
        chunks = [file for file in (folder / newest / "u" / "c").rglob("*") if file.is_file()]
        damage(folder / path, draw, chunks)
        with warnings.catch_warnings(record=True, action="always") as caught:
            values = program(folder, 30)
        assert np.array_equal(values, truth), path
        texts = [str(warning.message) for warning in caught]
        is_needed = path.name != "zarr.json" or damage is not with_another_bit
        if is_needed and path.parts[0] == newest and path != Path(newest, "zarr.json"):
            pattern = rf"written to .*{newest}, .* resumes at the older checkpoint of step 10"
            assert any(re.search(pattern, text) for text in texts), (path, texts)
        names = {name.name for name in folder.iterdir()}
        assert names == {f"step-{step:012}{end}" for step in (20, 30) for end in ("", ".complete")}


@pytest.mark.parametrize("program", [by_iterate, by_steps])
def test_a_run_without_another_checkpoint_ends_with_the_path(tmp_path, program):
    program(tmp_path, 20, keep=1)
    chunk = tmp_path / f"step-{20:012}" / "u" / "c" / "1"
    contents = chunk.read_bytes()
    chunk.unlink()
    for _ in range(2):
        with pytest.raises(FileError, match=rf"{tmp_path}/step-{20:012}, got others.*Copy it"):
            program(tmp_path, 30, keep=1)
    chunk.write_bytes(contents)
    with warnings.catch_warnings(action="error"):
        values = program(tmp_path, 30)
    assert np.array_equal(values, program(tmp_path / "whole", 30))


@pytest.mark.parametrize("program", [by_iterate, by_steps])
def test_all_files_are_on_the_disk_before_the_record(tmp_path, program, monkeypatch):
    """The order of calls: otherwise the loss of a host leaves records without values."""
    synced, fsync, replace = {}, os.fsync, os.replace

    def note(number):
        path = Path(os.readlink(f"/proc/self/fd/{number}"))
        synced[path] = path.stat().st_ino
        fsync(number)

    def check(source, target):
        if str(target).endswith(".complete"):
            folder = Path(str(target).removesuffix(".complete"))
            for path in (folder, *folder.rglob("*"), Path(source)):
                assert synced.get(path) == path.stat().st_ino, path
        replace(source, target)

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(os, "replace", check)
    program(tmp_path / "states", 20, keep=1)
    record = tmp_path / "states" / f"step-{20:012}.complete"
    assert record.exists()
    assert record.parent in synced


# --- frames


@pytest.mark.parametrize("dtype", ["<f8", ">f8", "<i4"])  # big-endian: Zarr's version 2
@pytest.mark.parametrize("damage", [empty, truncated, zeros, with_another_bit])
def test_readers_of_damaged_frames_get_an_error(tmp_path, damage, dtype):
    fields = {"u": da.from_array((U * 100).astype(dtype), chunks=100)}
    save = Save(tmp_path, 1)
    run_here(lambda u: u, fields, 0, 3, save=save)
    files = [path for path in (tmp_path / "u").rglob("*") if path.is_file()]
    chunks = [path for path in files if not path.name.startswith((".", "zarr"))]
    draw = random.Random(0)
    for chunk in chunks:
        damage(chunk, draw, chunks)
    array = zarr.open(tmp_path, mode="r")["u"]
    for frame in range(3):
        for start in range(0, 400, 100):
            with pytest.raises((RuntimeError, ValueError)):
                array[frame, start : start + 100]


# --- folders


@pytest.mark.parametrize("program", [by_iterate, by_steps])
def test_room_is_made_at_the_start(tmp_path, program, monkeypatch):
    """On a full disk nothing can be written before old checkpoints are removed."""
    program(tmp_path, 40, keep=9)
    shutil.copytree(tmp_path / f"step-{40:012}", tmp_path / f"step-{50:012}")
    (tmp_path / f"step-{50:012}.incomplete").touch()
    set_key, names = zarr.storage.LocalStore.set, []

    async def full(self, key, value):
        names[:] = [path.name for path in tmp_path.glob("step-*[0-9]")]
        if len(names) > 2:  # the new one is the second
            raise OSError(errno.ENOSPC, "No space left on device")
        await set_key(self, key, value)

    monkeypatch.setattr(zarr.storage.LocalStore, "set", full)
    program(tmp_path, 60, keep=1)
    assert sorted(names) == [f"step-{50:012}", f"step-{60:012}"]


def test_a_full_disk_is_named_though_the_first_rank_has_ended(tmp_path, monkeypatch):
    """That rank has seen it, too, and has removed the file of the run."""

    async def full(self, key, value):
        for file in tmp_path.glob("dask_p2p-run-*"):
            file.unlink()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(zarr.storage.LocalStore, "set", full)
    with pytest.raises(FileError, match="No space left"):
        by_iterate(tmp_path, 10)


def test_a_run_goes_on_after_one_that_could_open_no_file(tmp_path):
    """A checkpoint begins with a file that marks its folder; others are a user's."""
    limits, once = resource.getrlimit(resource.RLIMIT_NOFILE), tmp_path / "once"

    def keep(u, at):
        if at.step == 3 and not once.exists():
            once.mkdir()
            resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
        return {"u": u}

    fields = {"u": da.from_array(U, chunks=100)}
    y = iterate(keep, fields, 0, 4, checkpoint=Checkpoint(tmp_path, 2))["u"]
    try:
        with pytest.raises(FileError, match="Too many open files"):
            y.compute(scheduler="sync")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert np.array_equal(y.compute(scheduler="sync"), U)


@pytest.mark.parametrize("program", [by_iterate, by_steps])
@pytest.mark.parametrize("call", ["set", "get"])
@pytest.mark.parametrize("number", mostly_slow([0, 1, 3, 5], [0, 3]))
def test_of_two_runs_the_earlier_one_ends_by_name(tmp_path, program, monkeypatch, call, number):
    """Also if the later one begins within any call of Zarr."""
    original, calls, results = getattr(zarr.storage.LocalStore, call), [], []

    async def begin(self, key, *args, **options):
        if "step-000000000010" in str(self.root) and not results:
            calls.append(key)
            if len(calls) == number + 1:
                results.append(None)
                results.append(await asyncio.to_thread(program, tmp_path, 30))
        return await original(self, key, *args, **options)

    monkeypatch.setattr(zarr.storage.LocalStore, call, begin)
    pattern = f"one run at a time that writes checkpoints at {tmp_path}, got another one"
    with pytest.raises(FileError, match=pattern):
        program(tmp_path, 30)
    wait_until(lambda: len(results) == 2, BOUND_S)  # another call of Zarr may end the earlier run
    monkeypatch.undo()
    assert np.array_equal(results[1], program(tmp_path / "alone", 30))


@pytest.mark.parametrize("path", ["a\0b", Path("a\0b")])
def test_null_characters_in_paths_are_refused(path):
    fields = {"u": da.from_array(U, chunks=100)}
    for stores in ({"save": Save(path, 1)}, {"checkpoint": Checkpoint(path)}):
        with pytest.raises(InputError, match="without null characters"):
            iterate(lambda u: u, fields, 0, 2, **stores)
    with pytest.raises(InputError, match="without null characters"):
        by_steps(f"/{path}", 2)
