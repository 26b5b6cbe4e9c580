from __future__ import annotations

import itertools
import os
import resource
import shutil
from pathlib import Path

import dask
import numpy as np
import pytest

from dask_p2p.errors import AxesError, ChunksError, FileError, InputError, P2PError
from dask_p2p.files import prepare, transpose_file
from dask_p2p.files.execute import default_memory_bytes
from dask_p2p.registration import workers_of

zarr = pytest.importorskip("zarr")
data = pytest.importorskip("skimage.data")


def names(folder):
    return sorted(os.listdir(folder))


def put(folder, array, kind=".npy"):
    path = folder / f"in{kind}"
    if kind == ".npy":
        np.save(path, array)
    else:
        chunks = tuple(min(100, max(n, 1)) for n in array.shape)
        zarr.create_array(path, shape=array.shape, dtype=array.dtype, chunks=chunks)
        zarr.open_array(path, mode="r+")[...] = array
    return str(path)


def got(path):
    if path.endswith(".npy"):
        out = np.load(path)
        assert out.flags.c_contiguous
        return out
    return zarr.open_array(path, mode="r")[...]


def run(client, source, target, axes=None, *, memory_bytes=None, **options):
    hooks = {name: options.pop(name) for name in ("progress", "stopped") if name in options}
    job = prepare(source, target, axes, **options)
    return transpose_file(job, client, memory_bytes=memory_bytes, **hooks)


def check(client, array, source, target, axes=None, **options):
    written = []
    summary = run(client, source, target, axes, progress=written.append, **options)
    out = got(target)
    np.testing.assert_array_equal(out, array.transpose(axes))
    assert out.dtype == array.dtype
    assert sum(written) == array.nbytes
    assert names(Path(target).parent) == sorted({Path(source).name, Path(target).name})
    return summary


@pytest.mark.parametrize("axes", list(itertools.permutations(range(3))))
@pytest.mark.parametrize("kinds", [(".npy", ".npy"), (".npy", ".zarr"), (".zarr", ".npy")])
def test_image_in_all_orders(client, tmp_path, kinds, axes):
    image = data.astronaut()
    source = put(tmp_path, image, kinds[0])
    summary = check(client, image, source, str(tmp_path / f"out{kinds[1]}"), axes)
    assert summary.passes == 1
    assert summary.workers == len(workers_of(client))


@pytest.mark.parametrize("kinds", list(itertools.product([".npy", ".zarr"], repeat=2)))
def test_image_in_several_passes(client, tmp_path, kinds):
    image = data.coins()
    source = put(tmp_path, image, kinds[0])
    options = {"chunks": (64, 100)} if kinds[1] == ".zarr" else {}
    target = str(tmp_path / f"out{kinds[1]}")
    summary = check(client, image, source, target, memory_bytes=image.nbytes // 2, **options)
    assert summary.passes >= 4


def test_colours_first_when_one_colour_is_too_large_for_memory(client, tmp_path):
    image = data.astronaut()
    target = str(tmp_path / "out.npy")
    summary = check(
        client, image, put(tmp_path, image), target, (2, 0, 1), memory_bytes=image.nbytes // 2
    )
    assert summary.passes == 6


def test_there_and_back(client, tmp_path):
    image = data.camera()
    there, back = str(tmp_path / "there.zarr"), str(tmp_path / "back.npy")
    source = put(tmp_path, image)
    run(client, source, there, chunks=100)
    run(client, there, back)
    assert Path(back).read_bytes() == Path(source).read_bytes()


MADE = {
    "F": np.asfortranarray(np.arange(7 * 5 * 3).reshape(7, 5, 3)),
    "0-d": np.array(7.5),
    "1-d": np.arange(11),
    "empty": np.empty((3, 0, 2), np.float32),
    "one row": np.arange(9.0).reshape(1, 9),
    "big-endian": np.arange(35, dtype=">f8").reshape(5, 7),
    "datetime": np.arange(35).astype("M8[ns]").reshape(5, 7),
    "structured": np.zeros((5, 4), dtype=[("a", "<i4"), ("b", "<f8")]),
    "text": np.array([["a", "bcd"], ["e", "f"]]),
}


@pytest.mark.parametrize("name", MADE)
def test_made_arrays(client, tmp_path, name):
    array = MADE[name]
    source = put(tmp_path, array)
    run(client, source, str(tmp_path / "between.zarr"), chunks=2)
    run(client, str(tmp_path / "between.zarr"), str(tmp_path / "out.npy"), memory_bytes=300)
    out = np.load(tmp_path / "out.npy")
    np.testing.assert_array_equal(out, array)
    assert out.dtype == array.dtype


def test_every_worker_reads_and_writes(client, tmp_path):
    image = data.camera()
    source, target = put(tmp_path, image), str(tmp_path / "out.npy")
    client.run(_note_maps)
    run(client, source, target)
    seen = client.run(_noted_maps)
    assert all(maps == {("npy", "r"), ("partial", "r+")} for maps in seen.values()), seen


def _note_maps():
    """Note which kinds of files this worker maps from now on, and how."""
    from numpy.lib import format as module

    before, seen = module.open_memmap, set()

    def noting(path, mode, **options):
        seen.add((path.rpartition(".")[2], mode))
        return before(path, mode, **options)

    noting.before, noting.seen = before, seen
    module.open_memmap = noting


def _noted_maps():
    from numpy.lib import format as module

    noting = module.open_memmap
    module.open_memmap = noting.before
    return noting.seen


def test_chunks_as_asked(client, tmp_path):
    image = data.camera()
    source = put(tmp_path, image)
    run(client, source, str(tmp_path / "o.zarr"), chunks=(100, -1))
    assert zarr.open_array(tmp_path / "o.zarr").chunks == (100, 512)
    run(client, source, str(tmp_path / "auto.zarr"), chunks="auto")
    assert zarr.open_array(tmp_path / "auto.zarr").chunks == (512, 512)


def test_small_chunks_asked_of_an_npy_file_make_no_small_tasks(client, tmp_path):
    image = data.camera()
    written = []
    check(client, image, put(tmp_path, image), str(tmp_path / "o.npy"), chunks=8)
    run(client, str(tmp_path / "in.npy"), str(tmp_path / "p.npy"), progress=written.append)
    assert len(written) == len(workers_of(client))


def test_zarr_output_keeps_the_chunks_of_a_zarr_input(client, tmp_path):
    array = np.arange(50 * 60 * 7).reshape(50, 60, 7)
    source, target = str(tmp_path / "in.zarr"), str(tmp_path / "out.zarr")
    codec = zarr.codecs.GzipCodec(level=2)
    zarr.create_array(source, data=array, chunks=(10, 20, 7), shards=(20, 40, 7), compressors=codec)
    check(client, array, source, target, (1, 2, 0), memory_bytes=array.nbytes)
    out = zarr.open_array(target, mode="r")
    assert (out.chunks, out.shards, out.compressors) == ((20, 7, 10), (40, 7, 20), (codec,))


def test_force(client, tmp_path):
    image = data.coins()
    source, target = put(tmp_path, image), str(tmp_path / "out.zarr")
    run(client, source, target)
    with pytest.raises(FileError, match="--force"):
        run(client, source, target)
    check(client, image, source, target, (0, 1), force=True)


class Cluster:
    """A client of workers that say how much memory they may use, and their hosts have free."""

    def __init__(self, *workers):
        self.workers = {
            f"tcp://{k}": {"host": host, "memory_limit": limit}
            for k, (host, limit, _) in enumerate(workers)
        }
        self.free = {f"tcp://{k}": free for k, (_, _, free) in enumerate(workers)}

    def sync(self, ask_the_scheduler, client):
        return self.workers

    def run(self, function, workers):
        assert function() > 0
        return {address: self.free[address] for address in workers}


@pytest.mark.parametrize(
    ("workers", "bytes_"),
    [
        ([("a", 100, 1000), ("a", 200, 1000), ("b", 300, 1000)], 240),
        ([("a", 100, 120), ("a", 200, 120)], 48),  # others use the memory of the host too
        ([("a", 0, 1000), ("a", 0, 1000)], 400),  # no limit
    ],
)
def test_default_memory(workers, bytes_):
    assert default_memory_bytes(Cluster(*workers)) == bytes_


@pytest.fixture
def work(tmp_path):
    """A made file that takes many passes, in a folder for the output alone."""
    array = np.arange(200 * 200).reshape(200, 200)
    source = put(tmp_path, array)
    (tmp_path / "out").mkdir()
    return source, tmp_path / "out"


def fails(client, source, target, *words, exception=FileError, **options):
    with pytest.raises(exception) as caught:
        run(client, source, str(target), memory_bytes=100_000, **options)
    text = str(caught.value)
    assert "\n" not in text
    for word in words:
        assert word in text
    assert not target.exists()
    assert not [name for name in names(target.parent) if "partial" in name]


@pytest.mark.parametrize("suffix", [".npy", ".zarr"])
@pytest.mark.parametrize("exception", [KeyboardInterrupt, ZeroDivisionError])
def test_an_interrupted_job_leaves_nothing(client, work, suffix, exception):
    source, folder = work

    def stop(_):
        assert len(names(folder)) == 1
        raise exception

    target = folder / f"out{suffix}"
    fails(client, source, target, exception=exception, progress=stop, chunks=10)


def test_a_job_that_is_asked_to_stop_leaves_nothing(client, work):
    source, folder = work
    written = []
    fails(
        client,
        source,
        folder / "out.npy",
        exception=KeyboardInterrupt,
        progress=written.append,
        stopped=lambda: len(written) > 2,
    )
    assert len(written) == 3


@pytest.mark.parametrize("suffix", [".npy", ".zarr"])
def test_an_output_that_appears_meanwhile_is_kept(client, work, suffix):
    source, folder = work
    target = folder / f"out{suffix}"

    def put_one(_):
        if not target.exists():
            target.write_text("mine")

    with pytest.raises(FileError, match="already there"):
        run(client, source, str(target), memory_bytes=100_000, progress=put_one)
    assert target.read_text() == "mine"
    assert names(folder) == [target.name]


def test_input_truncated_midway(client, work):
    source, folder = work
    fails(
        client,
        source,
        folder / "out.npy",
        "changed while it was read",
        "320128 bytes and has 1000",
        progress=lambda _: os.truncate(source, 1000),
    )


@pytest.mark.parametrize("kind", [".npy", ".zarr"])
def test_input_removed_midway(client, tmp_path, kind):
    source = put(tmp_path, np.zeros((200, 200)), kind)

    def remove(_):
        if os.path.isdir(source):
            shutil.rmtree(source)
        elif os.path.exists(source):
            os.remove(source)

    fails(client, source, tmp_path / "out.npy", source, "worker on", progress=remove)
    assert names(tmp_path) == []


def test_full_disk_is_found_before_the_work(client, small_disk, tmp_path):
    source = put(tmp_path, np.zeros((600, 600)))
    written = []
    target = small_disk / "out.npy"
    fails(client, source, target, "needs 2.75 MiB", "are free", progress=written.append)
    assert not written


@pytest.fixture
def little_space(monkeypatch):
    """Have this process think that disks are all but full; it is the one that looks."""
    usage = shutil.disk_usage(".")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=2**20))


NOISE = np.random.default_rng(0).integers(0, 255, (1200, 1200), np.uint8)


@pytest.mark.usefixtures("little_space")
@pytest.mark.parametrize("options", [{}, {"chunks": 100}])
def test_what_does_not_fit_compressed_is_found_before_the_work(client, tmp_path, options):
    source = put(tmp_path, NOISE)
    (tmp_path / "out").mkdir()
    written = []
    target = tmp_path / "out" / "out.zarr"
    words = ["cannot write", "needs about 1.37 MiB", "1.00 MiB are free"]
    fails(client, source, target, *words, progress=written.append, **options)
    assert not written


@pytest.mark.usefixtures("little_space")
@pytest.mark.parametrize("kind", [".npy", ".zarr"])
def test_what_fits_only_compressed_is_written(client, tmp_path, kind):
    array = np.zeros((1200, 1300), "i4")
    check(client, array, put(tmp_path, array, kind), str(tmp_path / "out.zarr"))


def test_disk_that_fills_up_midway(client, small_disk, tmp_path, monkeypatch):
    monkeypatch.setattr("dask_p2p.files.job.check_space", lambda *_: None)
    source = put(tmp_path, NOISE)
    target = small_disk / "out.zarr"
    fails(client, source, target, "cannot write", "No space left on device", chunks=100)
    assert names(small_disk) == []


@pytest.mark.parametrize(
    ("memory_bytes", "words"),
    [(100, "6800 passes; give at least 640 bytes"), (10**15, "more than the workers may use")],
)
def test_memory_that_is_of_no_use(client, work, memory_bytes, words):
    source, folder = work
    job = prepare(source, str(folder / "out.npy"))
    with pytest.raises(InputError, match=words):
        transpose_file(job, client, memory_bytes=memory_bytes)
    assert names(folder) == []


def test_chunks_that_are_larger_than_the_memory_given_are_held_whole(client, work):
    source, folder = work
    summary = run(client, source, str(folder / "out.zarr"), memory_bytes=1000)
    assert (summary.passes, summary.memory_bytes) == (1, 2 * 200 * 200 * 8)


def _limit_files(size_bytes):
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))


@pytest.mark.parametrize(("suffix", "outcome"), [(".npy", "written"), (".zarr", "File too large")])
def test_workers_that_may_not_enlarge_a_file(client, work, suffix, outcome):
    source, folder = work
    target = folder / f"out{suffix}"
    client.run(_limit_files, 20_000)
    try:
        # Not through shared memory, which is a file too: its trouble would outlast the limit.
        with dask.config.set({"p2p.transports.order": ["comm"]}):
            if outcome == "written":  # the space is reserved: a worker takes no more
                run(client, source, str(target), memory_bytes=100_000)
                np.testing.assert_array_equal(got(str(target)), np.load(source).T)
            else:
                fails(client, source, target, "cannot write", outcome, "worker on", chunks=150)
    finally:
        client.run(_limit_files, resource.RLIM_INFINITY)


@pytest.mark.parametrize("suffix", [".npy", ".zarr"])
def test_output_removed_midway(client, work, suffix):
    source, folder = work
    target = folder / f"out{suffix}"

    def remove(_):
        for path in folder.iterdir():
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()

    fails(client, source, target, f"cannot write {target}", "worker on", progress=remove, chunks=10)
    assert names(folder) == []


def test_input_that_cannot_be_read(tmp_path):
    target = str(tmp_path / "out.npy")
    with pytest.raises(FileError, match="No such file"):
        prepare(str(tmp_path / "none.npy"), target)
    with pytest.raises(FileError, match="no Zarr array"):
        prepare(str(tmp_path), target)


@pytest.mark.parametrize("axes", [(0,), (0, 1, 2), (0, 0), (0, 2), (-3, 1), ()])
def test_wrong_axes(work, axes):
    source, folder = work
    with pytest.raises(AxesError, match="2 dimensions: give each of 0,1 once"):
        prepare(source, str(folder / "out.npy"), axes)


@pytest.mark.parametrize("chunks", [0, -2, (1, 2, 3), "x", (0, 5)])
def test_wrong_chunks(work, chunks):
    source, folder = work
    with pytest.raises(ChunksError):
        prepare(source, str(folder / "out.zarr"), chunks=chunks)


def test_a_scheduler_without_workers(tmp_path, monkeypatch):
    from distributed import Client, LocalCluster

    from dask_p2p.files import execute

    monkeypatch.setattr(execute, "_WORKERS_WAIT_S", 0.2)
    source = put(tmp_path, np.zeros(3))
    with (
        LocalCluster(n_workers=0, processes=False, dashboard_address=":0") as cluster,
        Client(cluster, set_as_default=False) as client,
        pytest.raises(P2PError, match="has no workers"),
    ):
        run(client, source, str(tmp_path / "out.npy"))
