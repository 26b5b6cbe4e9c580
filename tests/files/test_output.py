from __future__ import annotations

import errno
import os

import numpy as np
import pytest

from dask_p2p.errors import FileError, P2PWarning
from dask_p2p.files import output
from dask_p2p.files.output import check_output, partial


def fill(path, kind, text):
    if kind == "file":
        path.write_text(text)
    else:
        path.mkdir()
        (path / "zarr.json").write_text(text)


def write(final, kind, *, force=False, then=lambda: None):
    with partial(final, "out", force=force) as path:
        fill(path, kind, "new")
        then()


def text_of(path):
    return (path / "zarr.json" if path.is_dir() else path).read_text()


def names(folder):
    return sorted(os.listdir(folder))


@pytest.fixture(params=["file", "folder"])
def kind(request):
    return request.param


@pytest.fixture
def final(tmp_path, kind):
    return tmp_path / ("out.npy" if kind == "file" else "out.zarr")


@pytest.mark.parametrize("force", [False, True])
def test_the_final_name_appears_at_the_end(final, kind, force):
    with partial(final, "out", force=force) as path:
        assert path.parent == final.parent
        fill(path, kind, "new")
        assert not final.exists()
    assert text_of(final) == "new"
    assert names(final.parent) == [final.name]


@pytest.mark.parametrize("exception", [ValueError, KeyboardInterrupt, SystemExit])
def test_nothing_is_left_after_trouble(final, kind, exception):
    def fail():
        raise exception

    with pytest.raises(exception):
        write(final, kind, then=fail)
    assert names(final.parent) == []


def test_what_appeared_meanwhile_is_kept(final, kind):
    with pytest.raises(FileError, match="already there; --force"):
        write(final, kind, then=lambda: fill(final, kind, "other"))
    assert text_of(final) == "other"
    assert names(final.parent) == [final.name]


def test_force_replaces(final, kind):
    fill(final, kind, "old")
    with partial(final, "out", force=True) as path:
        fill(path, kind, "new")
        assert text_of(final) == "old"
    assert text_of(final) == "new"
    assert names(final.parent) == [final.name]


def test_the_old_one_comes_back_when_the_swap_fails(tmp_path, monkeypatch):
    final = tmp_path / "out.zarr"
    fill(final, "folder", "old")
    rename = os.rename

    def fail_once(source, target):
        if str(source).endswith(".partial"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        rename(source, target)

    monkeypatch.setattr(os, "rename", fail_once)
    with pytest.raises(FileError, match="cannot write out"), partial(final, "out", force=True) as p:
        fill(p, "folder", "new")
    assert text_of(final) == "old"
    assert names(tmp_path) == ["out.zarr"]


def test_a_file_system_without_hard_links(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", fail)
    final = tmp_path / "out.npy"
    with partial(final, "out", force=False) as path:
        path.write_text("new")
    assert final.read_text() == "new"
    with pytest.raises(FileError, match="already there"), partial(final, "out", force=False) as p:
        p.write_text("newer")
    assert final.read_text() == "new"
    assert names(tmp_path) == ["out.npy"]


def test_what_cannot_be_removed_is_told(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    monkeypatch.setattr(output, "_REMOVE_PAUSE_S", 0)
    monkeypatch.setattr(output.shutil, "rmtree", fail)
    final = tmp_path / "out.zarr"
    with (
        pytest.warns(P2PWarning, match="could not be removed"),
        pytest.raises(FileError, match="already there"),
    ):
        write(final, "folder", then=lambda: fill(final, "folder", "other"))


def test_a_long_name(tmp_path):
    final = tmp_path / ("x" * 251 + ".npy")
    with partial(final, "out", force=False) as path:
        path.write_text("new")
    assert final.exists()


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "in.npy"
    np.save(path, np.zeros(3))
    return str(path)


def refused(name, source, match, *, force=True):
    with pytest.raises(FileError, match=match):
        check_output(str(name), source, force=force)


def test_names_that_are_refused(tmp_path, source):
    refused(tmp_path / "out.tif", source, r"\.npy or \.zarr")
    refused(tmp_path / "no" / "out.npy", source, "no folder")
    refused(source, source, "input itself")
    (tmp_path / "link.npy").symlink_to(source)
    refused(tmp_path / "link.npy", source, "input itself")
    os.link(source, tmp_path / "hard.npy")
    refused(tmp_path / "hard.npy", source, "input itself")


def test_input_and_output_one_inside_the_other(tmp_path):
    store = tmp_path / "in.zarr"
    fill(store, "folder", "")
    refused(store / "out.npy", str(store), "inside")
    (store / "a").mkdir()
    refused(store, str(store / "a"), "inside")


def test_present_needs_force(tmp_path, source):
    final = tmp_path / "out.npy"
    final.write_text("old")
    refused(final, source, "already there; --force", force=False)
    assert check_output(str(final), source, force=True) == final
    (tmp_path / "dangling.npy").symlink_to(tmp_path / "nowhere.npy")
    assert check_output(str(tmp_path / "dangling.npy"), source, force=False).name == "nowhere.npy"


def test_force_removes_nothing_but_arrays(tmp_path, source):
    precious = tmp_path / "out.zarr"
    precious.mkdir()
    check_output(str(precious), source, force=True)
    (precious / "thesis.txt").write_text("")
    refused(precious, source, "no Zarr array")
    (tmp_path / "out.npy").mkdir()
    refused(tmp_path / "out.npy", source, "folder")
    (tmp_path / "file.zarr").write_text("")
    assert check_output(str(tmp_path / "file.zarr"), source, force=True).name == "file.zarr"
    os.mkfifo(tmp_path / "pipe.npy")
    refused(tmp_path / "pipe.npy", source, "no regular file")


def test_force_may_find_the_name_free_or_taken_anew(tmp_path):
    final = tmp_path / "out.zarr"
    write(final, "folder", force=True, then=lambda: fill(final, "folder", "other"))
    assert text_of(final) == "new"
    final = tmp_path / "gone.npy"
    fill(final, "file", "old")
    write(final, "file", force=True, then=final.unlink)
    assert text_of(final) == "new"


def test_an_old_one_that_cannot_be_removed_is_told(tmp_path, monkeypatch):
    def fail(path):
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    final = tmp_path / "out.zarr"
    fill(final, "folder", "old")
    monkeypatch.setattr(output, "_REMOVE_PAUSE_S", 0)
    monkeypatch.setattr(output.shutil, "rmtree", fail)
    with pytest.warns(P2PWarning, match="old one is left"):
        write(final, "folder", force=True)
    assert text_of(final) == "new"


def test_a_folder_that_cannot_be_renamed_leaves_nothing(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(FileError, match="Input/output error"):
        write(tmp_path / "out.zarr", "folder")
    assert names(tmp_path) == []
