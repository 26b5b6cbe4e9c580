import json
import os
import resource
import subprocess
import time
from pathlib import Path

import dask
import dask.array as da
import numpy as np
import pytest

import dask_p2p
from dask_p2p.cli import files
from dask_p2p.cli.cluster import count_wrong, indexed_array, modulus
from dask_p2p.errors import FileError
from tests.support import assert_same_bits, persisted

zarr = pytest.importorskip("zarr", minversion="3.1")
data = pytest.importorskip("skimage.data")

KINDS = (".npy", ".zarr")


def write_file(path, array, chunks=None, **options):
    """Write a file without this package."""
    if path.suffix == ".npy":
        np.save(path, array)
    else:
        chunks = chunks or tuple(min(100, max(n, 1)) for n in array.shape)
        target = zarr.create_array(
            path, shape=array.shape, dtype=array.dtype, chunks=chunks, **options
        )
        target[...] = array
    return path


def read_file(path):
    return np.load(path) if path.suffix == ".npy" else zarr.open_array(path, mode="r")[...]


def convert(client, source, target, operation=dask_p2p.transpose, stopped=lambda: False, **options):
    """Do what the commands do; give the number of blocks."""
    overwrite = options.pop("overwrite", False)
    x = files.open_array(str(source))
    with files.write_atomically(str(target), overwrite=overwrite) as path:
        y = operation(x, chunks=options.pop("chunks", {}), **options)
        return sum(1 for _ in files.write_blocks(y, path, client, stopped))


ARRAYS = {
    "F": np.asfortranarray(np.arange(7 * 5 * 3).reshape(7, 5, 3)),
    "0-d": np.array(7.5),
    "empty": np.empty((3, 0, 2), np.float32),
    "negative zeros and not numbers": np.array([[-0.0, -np.nan], [np.nan, 0.0 - 0.0j]]),
    "big-endian": np.arange(35, dtype=">f8").reshape(5, 7),
    "datetime": np.arange(35).astype("M8[ns]").reshape(5, 7),
    "structured": np.array([(1, 2.5), (3, 4.5)], dtype=[("a", ">i4"), ("b", "<f8")]),
    "text": np.array([["a", "bcd"], ["e", "f"]]),
    "raw": np.array([b"abc", b"d"], dtype="V3"),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_of_all_kinds_there_and_back(client, tmp_path, name):
    array = ARRAYS[name]
    zarr_path, npy_path = tmp_path / "there.zarr", tmp_path / "back.npy"
    convert(client, write_file(tmp_path / "in.npy", array), zarr_path, chunks=2)
    assert_same_bits(read_file(zarr_path), np.ascontiguousarray(array.T).reshape(array.T.shape))
    convert(client, zarr_path, npy_path)
    assert_same_bits(read_file(npy_path), np.ascontiguousarray(array).reshape(array.shape))
    write_file(tmp_path / "by-numpy.npy", np.ascontiguousarray(array).reshape(array.shape))
    assert npy_path.read_bytes() == (tmp_path / "by-numpy.npy").read_bytes()


def test_npy_files_of_many_blocks(client, tmp_path, monkeypatch):
    monkeypatch.setattr("dask_p2p.cli.files.BLOCK_BYTES", 10_000)
    image = data.coins()
    source, target = tmp_path / "in.npy", tmp_path / "out.npy"
    assert convert(client, write_file(source, image), target) > 10
    assert_same_bits(read_file(target), image.T)


@pytest.mark.parametrize("version", [2, 3])
def test_zarr_keeps_its_chunks_with_the_axes_permuted(client, tmp_path, version):
    array = np.arange(50 * 60 * 7).reshape(50, 60, 7)
    source = write_file(tmp_path / "in.zarr", array, (20, 25, 4), zarr_format=version)
    convert(client, source, tmp_path / "out.zarr", axes=(1, 2, 0))
    assert_same_bits(read_file(tmp_path / "out.zarr"), array.transpose(1, 2, 0))
    assert zarr.open_array(tmp_path / "out.zarr").chunks == (25, 4, 20)


def test_shards_are_read_whole(client, tmp_path):
    array = np.arange(50 * 60).reshape(50, 60)
    source = write_file(tmp_path / "in.zarr", array, (10, 10), shards=(30, 20))
    assert files.open_array(str(source)).chunks == ((30, 20), (20, 20, 20))
    convert(client, source, tmp_path / "out.zarr")
    assert_same_bits(read_file(tmp_path / "out.zarr"), array.T)


@pytest.mark.parametrize("chunks", [7, (-1, 13), (45, 50)])
def test_rechunk_to_uneven_chunks(client, tmp_path, chunks):
    array = np.arange(50.0 * 60).reshape(50, 60)
    source = write_file(tmp_path / "in.zarr", array, (20, 25))
    convert(client, source, tmp_path / "out.zarr", dask_p2p.rechunk, chunks=chunks)
    assert_same_bits(read_file(tmp_path / "out.zarr"), array)
    expected_chunks = (7, 7) if chunks == 7 else tuple(50 if n == -1 else n for n in chunks)
    assert zarr.open_array(tmp_path / "out.zarr").chunks == expected_chunks


def test_arrays_of_groups(client, tmp_path):
    array = np.arange(50 * 60).reshape(50, 60)
    source = zarr.create_group(tmp_path / "in.zarr")
    source.create_array("deep/a", data=array, chunks=(20, 25))
    target = zarr.create_group(tmp_path / "out.zarr")
    target.create_array("b", data=array)
    convert(client, tmp_path / "in.zarr" / "deep" / "a", tmp_path / "out.zarr" / "a")
    target = zarr.open_group(tmp_path / "out.zarr", mode="r")
    assert {name for name, _ in target.members()} == {"a", "b"}
    assert_same_bits(target["a"][...], array.T)


def test_two_runs_in_a_row_read_the_file_anew(client, tmp_path):
    source, target = tmp_path / "in.npy", tmp_path / "out.npy"
    read_before = []
    for k in range(2):
        array = np.full((50, 60), k)
        write_file(source, array)
        read_before.append(persisted(client, files.open_array(str(source))))
        convert(client, source, target, overwrite=True)
        assert_same_bits(read_file(target), array.T)


def refused(opening, *words):
    with pytest.raises(FileError) as caught:
        opening()
    assert "\n" not in str(caught.value)
    for word in words:
        assert str(word) in str(caught.value)


def cannot_open(path, *words):
    refused(lambda: files.open_array(str(path)), path, *words)


def test_npy_files_that_cannot_be_read(tmp_path):
    cannot_open(tmp_path / "none.npy", "No such file")
    np.save(tmp_path / "objects.npy", np.array([{}]), allow_pickle=True)
    cannot_open(tmp_path / "objects.npy", "Python objects")
    file_bytes = write_file(tmp_path / "in.npy", np.zeros(1000)).read_bytes()
    (tmp_path / "cut.npy").write_bytes(file_bytes[:1000])
    cannot_open(tmp_path / "cut.npy", "mmap length is greater than file size")
    (tmp_path / "text.npy").write_text("hello, this is no array")
    cannot_open(tmp_path / "text.npy", "magic string")
    np.savez(tmp_path / "in.npz", a=np.zeros(3))
    cannot_open(tmp_path / "in.npz", "unknown file type", ".npy", "Zarr")


def test_folders_that_cannot_be_read(tmp_path):
    cannot_open(tmp_path, "cannot read")
    group = zarr.create_group(tmp_path / "g.zarr")
    group.create_array("a", shape=3, dtype="i4")
    group.create_array("deep/b", shape=3, dtype="i4")
    cannot_open(tmp_path / "g.zarr", f"{tmp_path}/g.zarr/a, {tmp_path}/g.zarr/deep/b")
    zarr.create_array(tmp_path / "text.zarr", shape=3, dtype=str)
    cannot_open(tmp_path / "text.zarr", "variable-length strings")
    (write_file(tmp_path / "in.zarr", np.zeros(3)) / "zarr.json").write_text("{")
    cannot_open(tmp_path / "in.zarr", "cannot read")


@pytest.mark.parametrize("dtype", ["|O", "|u1"])
@pytest.mark.parametrize("place", ["filters", "compressor"])
def test_pickles_are_refused(tmp_path, dtype, place):
    """They may run code when they are read."""
    pickle = {"id": "pickle", "protocol": 5}
    metadata = {
        "zarr_format": 2,
        "shape": [3],
        "chunks": [3],
        "dtype": dtype,
        "compressor": pickle if place == "compressor" else None,
        "fill_value": 0,
        "order": "C",
        "filters": [pickle] if place == "filters" else None,
    }
    (tmp_path / ".zarray").write_text(json.dumps(metadata))
    cannot_open(tmp_path)


def cannot_write(path, *words, **options):
    with files.write_atomically(str(path), **options):
        pytest.fail("this is known before")


@pytest.mark.parametrize("kind", KINDS)
def test_overwrite(client, tmp_path, kind):
    image = data.coins()
    source, target = write_file(tmp_path / "in.npy", image), tmp_path / f"out{kind}"
    convert(client, source, target)
    refused(lambda: convert(client, source, target, dask_p2p.rechunk), "already there")
    assert_same_bits(read_file(target), image.T)
    convert(client, source, target, dask_p2p.rechunk, overwrite=True)
    assert_same_bits(read_file(target), image)
    assert sorted(os.listdir(tmp_path)) == ["in.npy", target.name]


def test_the_input_itself_may_be_overwritten(client, tmp_path):
    image = data.coins()
    source = write_file(tmp_path / "in.zarr", image)
    convert(client, source, source, overwrite=True)
    assert_same_bits(read_file(source), image.T)


def test_of_folders_only_arrays_are_overwritten(tmp_path):
    folder, group = tmp_path / "folder.zarr", tmp_path / "group.zarr"
    folder.mkdir()
    (folder / "mine").touch()
    zarr.create_group(group).create_array("a", shape=3, dtype="i4")
    refused(lambda: cannot_write(folder, overwrite=True), folder)
    refused(lambda: cannot_write(group, overwrite=True), "group")
    assert (folder / "mine").exists()
    assert (group / "a").exists()


@pytest.fixture
def work(tmp_path):
    """A made file that takes many blocks, and a folder for the output alone."""
    source = write_file(tmp_path / "in.zarr", np.random.default_rng(0).random((200, 200)), (20, 20))
    (tmp_path / "out").mkdir()
    return source, tmp_path / "out"


@pytest.mark.parametrize("kind", KINDS)
def test_an_output_that_appears_meanwhile_is_kept(client, work, kind):
    source, folder = work
    target = folder / f"out{kind}"

    def put_one():
        target.write_text("mine")
        return False

    refused(lambda: convert(client, source, target, stopped=put_one), "already there")
    assert target.read_text() == "mine"
    assert os.listdir(folder) == [target.name]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("exception", [KeyboardInterrupt, ZeroDivisionError])
def test_an_interrupted_run_leaves_nothing(client, work, kind, exception):
    source, folder = work

    def stopped():
        (name,) = os.listdir(folder)
        assert name.endswith(".partial")
        if exception is ZeroDivisionError:
            raise exception
        return True

    expected = FileError if exception is ZeroDivisionError else exception
    with pytest.raises(expected):
        convert(client, source, folder / f"out{kind}", stopped=stopped)
    assert os.listdir(folder) == []


def slow_store(block, target, block_info=None):
    """Note in the folder above that of the output when a write begins and ends."""
    notes = Path(target.path).parents[2]
    name = "-".join(map(str, block_info[0]["chunk-location"]))
    (notes / f"begun-{name}").touch()
    time.sleep(0.5)
    (notes / f"ended-{name}").touch()
    return np.ones((1,) * block.ndim, bool)


def test_after_an_interruption_no_worker_writes(client, work, monkeypatch):
    source, folder = work
    monkeypatch.setattr(files, "_store", slow_store)

    def stopped():
        return any(folder.parent.glob("begun-*"))

    with pytest.raises(KeyboardInterrupt):
        convert(client, source, folder / "out.npy", stopped=stopped)
    begun, ended = (len([*folder.parent.glob(f"{mark}-*")]) for mark in ("begun", "ended"))
    assert begun == ended > 0


def test_a_block_that_cannot_be_read(client, work):
    source, folder = work
    (source / "c" / "3" / "4").write_bytes(b"no chunk")
    refused(lambda: convert(client, source, folder / "out.npy"), "cannot write", "out.npy")
    assert os.listdir(folder) == []


def test_an_input_that_is_gone_when_workers_look(client, work):
    _, folder = work
    source = write_file(folder.parent / "in.npy", np.zeros((200, 200)))

    def removed(x, chunks):
        source.unlink()
        return dask_p2p.transpose(x, chunks=chunks)

    refused(lambda: convert(client, source, folder / "out.npy", removed), "No such file", source)
    assert os.listdir(folder) == []


def _limit_files(size_bytes):
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))


def test_a_block_that_cannot_be_written(client, work):
    source, folder = work
    client.run(_limit_files, 20_000)
    try:
        # Not through shared memory, which is a file too: its trouble would outlast the limit.
        with dask.config.set({"p2p.transports.order": ["comm"]}):
            words = "cannot write", "File too large"
            refused(lambda: convert(client, source, folder / "out.zarr", chunks=150), *words)
    finally:
        client.run(_limit_files, resource.RLIM_INFINITY)
    assert os.listdir(folder) == []


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 256 KiB; only root may make one."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("may not mount a file system")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.parametrize("kind", KINDS)
def test_a_disk_without_space(client, work, small_disk, kind):
    source, _ = work
    target = small_disk / f"out{kind}"
    refused(lambda: convert(client, source, target), "cannot write", "No space left on device")
    assert os.listdir(small_disk) == []


def test_several_hosts_do_not_write_one_npy_file(client, work, monkeypatch):
    source, folder = work
    hosts = {address: {"host": address} for address in ("10.0.0.1", "10.0.0.2")}
    monkeypatch.setattr(files, "workers_of", lambda client: hosts)
    refused(lambda: convert(client, source, folder / "out.npy"), "hosts", "Zarr")
    convert(client, source, folder / "out.zarr")
    assert os.listdir(folder) == ["out.zarr"]


DTYPES = ["?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8", "c8", "c16", ">f4"]


def wrong_count(y, shape, axes=(1, 0), **kwargs):
    return int(count_wrong(y, shape, axes, **kwargs).compute(scheduler="sync"))


@pytest.mark.parametrize("dtype", [*DTYPES, "longdouble"])
def test_values(dtype):
    shape = (300, 7, 5)
    x = indexed_array(shape, ((100, 150, 50), 4, 5), dtype)
    actual = x.compute(scheduler="sync")
    linear = np.arange(np.prod(shape)).reshape(shape)
    assert actual.dtype == np.dtype(dtype) == x.dtype
    assert x.chunks == ((100, 150, 50), (4, 3), (5,))
    np.testing.assert_array_equal(actual, (linear % modulus(dtype)).astype(dtype))


@pytest.mark.parametrize("dtype", ["O", "U3", "M8[s]", "V4"])
def test_dtypes_without_such_values(dtype):
    with pytest.raises(ValueError, match="expected a boolean, integer, float or complex dtype"):
        indexed_array((4, 4), 2, dtype).compute(scheduler="sync")


@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (4, 3), (3, 4, 5)])
def test_nothing_is_wrong(shape):
    axes = tuple(reversed(range(len(shape))))
    y = indexed_array(shape, 2 if shape else (), "f4").transpose(axes)
    assert wrong_count(y, shape, axes) == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_changed_element(dtype):
    x = indexed_array((40, 30), (10, 30), dtype).compute(scheduler="sync")
    y = x.T.copy()
    y[17, 3] = not y[17, 3] if dtype == "?" else y[17, 3] + 1
    assert wrong_count(da.from_array(y, chunks=(10, 40)), (40, 30)) == 1


def test_another_dtype_or_shape():
    y = indexed_array((4, 6), (2, 6), "i4").T
    assert wrong_count(y, (4, 6), dtype="i4") == 0
    assert wrong_count(y, (4, 6), dtype="i8") == 24  # the values are equal
    for lie in (lambda block: block.astype("f8"), lambda block: block[:-1]):
        assert wrong_count(y.map_blocks(lie, dtype="i4", chunks=y.chunks), (4, 6)) == 24


@pytest.mark.gpu
def test_on_a_gpu():
    import cupy

    y = indexed_array((64, 48), (16, 48), "f4", kind="cupy").T
    assert isinstance(y.blocks[0, 0].compute(scheduler="sync"), cupy.ndarray)
    assert wrong_count(y, (64, 48), kind="cupy") == 0
    assert wrong_count(y + 1, (64, 48), kind="cupy") == 64 * 48
