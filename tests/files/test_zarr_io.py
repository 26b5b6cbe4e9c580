from __future__ import annotations

import json
import shutil
import sys

import numpy as np
import pytest

from dask_p2p.errors import FileError
from dask_p2p.files.zarr_io import create_zarr, open_zarr
from tests.files.support import refused

zarr = pytest.importorskip("zarr", minversion="3")


def whole(array):
    return tuple(slice(0, n) for n in array.shape)


def made(folder, array, **options):
    path = str(folder / "in.zarr")
    target = zarr.create_array(path, data=array, **options)
    assert target.shape == array.shape
    return path


ARRAYS = {
    "floats": np.arange(60.0).reshape(3, 4, 5),
    "negative zeros": np.full((4, 4), -0.0 - 0.0j),
    "0-d": np.array(7.5),
    "empty": np.empty((3, 0, 2), np.float32),
    "big-endian": np.arange(6, dtype=">f8").reshape(2, 3),
    "datetime": np.arange(6).astype("M8[ns]").reshape(2, 3),
    "structured": np.array([(1, 2.5), (3, 4.5)], dtype=[("a", "<i4"), ("b", "<f8")]),
    "text": np.array([["a", "bcd"]]),
    "raw": np.array([b"abc", b"d"], dtype="V3"),
    "half": np.arange(6, dtype=np.float16).reshape(2, 3),
    "bool": np.array([[True, False, True]]),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_write_and_read_are_exact(tmp_path, name):
    array = ARRAYS[name]
    chunks = tuple(min(2, n) for n in array.shape)
    target = create_zarr(tmp_path / "out", "out", array.shape, array.dtype, chunks)
    target[whole(array)] = array
    source = open_zarr(str(tmp_path / "out"))
    block = source[whole(array)]
    assert source.dtype == block.dtype == array.dtype
    assert block.shape == array.shape
    assert block.tobytes() == array.tobytes()


@pytest.mark.parametrize("version", [2, 3])
def test_both_versions(tmp_path, version):
    array = np.arange(60).reshape(3, 4, 5)
    source = open_zarr(made(tmp_path, array, chunks=(2, 2, 2), zarr_format=version))
    assert source.chunks == (2, 2, 2)
    place = np.s_[1:3, 0:3, 2:5]
    np.testing.assert_array_equal(source[place], array[place])


AXES = (2, 0, 1)


def transposed(folder, array, to_chunks=None, **options):
    """Make an array, write its transpose, and return both."""
    source = open_zarr(made(folder, array, **options))
    shape = tuple(source.shape[axis] for axis in AXES)
    chunks = to_chunks or tuple(source.chunks[axis] for axis in AXES)
    target = create_zarr(folder / "out", "out", shape, source.dtype, chunks, like=source, axes=AXES)
    target[whole(target)] = source[whole(array)].transpose(AXES)
    out = zarr.open_array(folder / "out", mode="r")
    np.testing.assert_array_equal(out[...], array.transpose(AXES))
    return zarr.open_array(source.path, mode="r"), out


CUBE = np.arange(6 * 8 * 10, dtype="i4").reshape(6, 8, 10)


@pytest.mark.parametrize("version", [2, 3])
def test_attributes_and_names_of_axes_are_taken_over(tmp_path, version):
    names = {"dimension_names": ["t", "y", "x"]} if version == 3 else {}
    attributes = {"units": "K"} | ({} if names else {"_ARRAY_DIMENSIONS": ["t", "y", "x"]})
    options = {"zarr_format": version, "attributes": attributes, "fill_value": -1}
    _, out = transposed(tmp_path, CUBE, **options, **names)
    assert out.attrs["units"] == "K"
    assert out.fill_value == -1
    if version == 3:
        assert out.metadata.dimension_names == ("x", "t", "y")
    else:
        assert out.attrs["_ARRAY_DIMENSIONS"] == ["x", "t", "y"]


def test_codecs_and_chunks_of_version_2_are_kept(tmp_path):
    numcodecs = pytest.importorskip("numcodecs")
    source, out = transposed(
        tmp_path,
        CUBE,
        zarr_format=2,
        order="F",
        filters=[numcodecs.Delta(dtype="i4")],
        compressors=numcodecs.Blosc(cname="lz4"),
        chunk_key_encoding={"name": "v2", "separator": "/"},
    )
    assert out.metadata.zarr_format == 2
    assert (out.order, out.filters, out.compressors) == ("F", source.filters, source.compressors)
    assert out.metadata.dimension_separator == "/"
    assert out.chunks == tuple(source.chunks[axis] for axis in AXES)


@pytest.mark.parametrize(
    ("to_chunks", "chunks", "shards"),
    [(None, (1, 2, 4), (4, 4, 8)), ((5, 3, 4), (5, 3, 4), None)],
)
def test_codecs_chunks_and_shards_of_version_3_are_kept(tmp_path, to_chunks, chunks, shards):
    source, out = transposed(
        tmp_path,
        CUBE,
        to_chunks,
        chunks=(2, 4, 1),
        shards={"shape": (4, 8, 4), "index_location": "start"},
        compressors=zarr.codecs.GzipCodec(level=3),
        serializer=zarr.codecs.BytesCodec(endian="big"),
    )
    assert (out.chunks, out.shards) == (chunks, shards)
    assert (out.compressors, out.serializer) == (source.compressors, source.serializer)
    if shards:
        assert out.metadata.codecs[0].index_location.value == "start"


def test_a_folder_without_metadata(tmp_path):
    refused(open_zarr, tmp_path, "no Zarr array")


def test_a_group_names_its_arrays(tmp_path):
    group = zarr.create_group(tmp_path / "g.zarr")
    refused(open_zarr, tmp_path / "g.zarr", "group", "no arrays")
    group.create_array("a", shape=3, dtype="i4")
    group.create_array("deep/b", shape=3, dtype="i4")
    refused(open_zarr, tmp_path / "g.zarr", f"{tmp_path}/g.zarr/a, {tmp_path}/g.zarr/deep/b")


@pytest.mark.parametrize("content", ["", "{", "[]", '{"zarr_format": 3, "node_type": "array"}'])
def test_garbage_metadata(tmp_path, content):
    path = made(tmp_path, np.zeros(3))
    (tmp_path / "in.zarr" / "zarr.json").write_text(content)
    refused(open_zarr, path, "cannot read")


def test_texts_of_any_length_are_refused(tmp_path):
    path = str(tmp_path / "in.zarr")
    zarr.create_array(path, shape=3, dtype=str)
    refused(open_zarr, path, "texts of any length")


@pytest.mark.parametrize("dtype", ["|O", "|u1"])
def test_pickles_are_refused(tmp_path, dtype):
    folder = tmp_path / "in.zarr"
    folder.mkdir()
    metadata = {
        "zarr_format": 2,
        "shape": [3],
        "chunks": [3],
        "dtype": dtype,
        "compressor": None,
        "fill_value": 0,
        "order": "C",
        "filters": [{"id": "pickle", "protocol": 5}],
    }
    (folder / ".zarray").write_text(json.dumps(metadata))
    refused(open_zarr, folder)


def test_damaged_chunk(tmp_path):
    path = made(tmp_path, np.arange(100), chunks=(50,))
    (tmp_path / "in.zarr" / "c" / "1").write_bytes(b"no chunk")
    source = open_zarr(path)
    source[0:50,]
    with pytest.raises(FileError, match="cannot read"):
        source[0:100,]


@pytest.mark.parametrize("change", ["another", "gone"])
def test_an_array_that_changes_after_it_was_opened(tmp_path, change):
    path = made(tmp_path, np.arange(100))
    source = open_zarr(path)
    shutil.rmtree(path)
    if change == "another":
        made(tmp_path, np.arange(50))
    with pytest.raises(FileError, match="changed" if change == "another" else "workers must see"):
        source[0:10,]


def test_without_zarr_it_says_how_to_get_it(tmp_path, monkeypatch):
    path = made(tmp_path, np.arange(100))
    monkeypatch.setitem(sys.modules, "zarr", None)
    refused_without = pytest.raises(FileError, match="pip install 'zarr>=3'")
    with refused_without:
        open_zarr(path)
    with refused_without:
        create_zarr(tmp_path / "out", "out", (3,), np.dtype(float), (3,))


def test_with_an_old_zarr_it_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(zarr, "__version__", "2.18.0")
    with pytest.raises(FileError, match=r"2\.18\.0 is here"):
        open_zarr(str(tmp_path))


def test_a_dtype_that_zarr_lacks(tmp_path):
    with pytest.raises(FileError, match="cannot write out"):
        create_zarr(tmp_path / "out", "out", (3,), np.dtype(np.longdouble), (3,))
