"""The estimate is arithmetic; what it is measured against is in test_worker.py."""

import dask
import dask.array as da
import numpy as np
import pytest

import dask_p2p
from dask_p2p import fft, spmd
from dask_p2p.errors import InputError, UnsupportedArrayError
from tests.support import persisted, run_of, spread

MIB = 2**20


@pytest.mark.parametrize(
    ("shape", "chunks", "workers", "expected"),
    [
        # 128 MiB on each worker; parts of 16 MiB, of which a reader has three, if comm is needed;
        # one of 1 MiB that cma reads beside them; cma keeps two buffers of that size.
        ((8192, 8192), (2048, 8192), 4, (128, 128, 49 + 2, 128)),
        ((8192, 8192), (2048, 8192), 2, (256, 256, 49 + 2, 48)),
        ((8192, 8192), (2048, 8192), 3, (256, 256, 49 + 2, 96)),  # four blocks on three workers
        ((8192, 8192), (2048, 8192), 1, (512, 512, 0, 0)),
        ((8192, 8192), (2048, 8192), None, (128, 128, 49 + 2, 128)),  # as many as there are slabs
        # Regions are smaller than parts: all may be on their way at a time.
        ((1024, 1024), (256, 1024), 4, (2, 2, 2.5 + 2, 2)),
    ],
)
def test_what_is_added_up(shape, chunks, workers, expected):
    need = dask_p2p.estimate(da.ones(shape, chunks=chunks), workers=workers)
    sizes = (need.input_bytes, need.output_bytes, need.staging_bytes, need.packed_bytes)
    assert tuple(nbytes / MIB for nbytes in sizes) == expected
    assert need.total_bytes == sum(expected) * MIB


def test_blocks_that_are_not_even():
    x = da.ones((100, 10), chunks=((50, 30, 20), (10,)))
    need = dask_p2p.estimate(x, workers=2, chunks=((10,), (60, 40)))
    assert need.input_bytes == 80 * 10 * 8, "the two largest of three"
    assert need.output_bytes == 60 * 10 * 8


@pytest.mark.parametrize(("workers", "rows"), [(4, 13), (16, 4), (None, 1)])
def test_groups_of_blocks_are_those_of_so_many_workers(workers, rows):
    """Two for each of them; without a cluster nobody knows yet, and 64 would gain too little."""
    x = da.ones((1600, 1600), chunks=(16, 1600))
    need = dask_p2p.estimate(x, chunks=(16, 1600), workers=workers)
    groups = -(-100 // rows)
    groups_per_worker = -(-groups // (workers or 100))
    assert need.output_bytes == groups_per_worker * rows * 16 * 1600 * 8


def test_the_options_that_count():
    x = da.ones((8192, 8192), chunks=(2048, 8192))
    with dask.config.set({"p2p.memory.staging-limit": "10 MiB"}):
        need = dask_p2p.estimate(x, workers=4)
    assert (9 + 2) * MIB < need.staging_bytes <= (10 + 2) * MIB
    assert need.packed_bytes == 10 * MIB
    with dask.config.set({"p2p.transports.order": ["ucx"]}):
        with_ucx = dask_p2p.estimate(x, workers=4)
    assert with_ucx.staging_bytes == (48 + 80) * MIB, "buffers are kept for later"
    # GPUs: slots of ipc, and what ucx would have in flight.
    assert dask_p2p.estimate(da.ones((), chunks=()), workers=4).total_bytes >= 16


@pytest.mark.parametrize("workers", [0, -1, 1.5, True, "four"])
def test_workers_must_be_a_number_of_them(workers):
    with pytest.raises(InputError, match="at least 1"):
        dask_p2p.estimate(da.ones((4, 4)), workers=workers)


def test_it_takes_what_transpose_takes():
    x = da.ones((4, 6), chunks=2)
    with pytest.raises(InputError):
        dask_p2p.estimate(x, (0, 0))
    with pytest.raises(UnsupportedArrayError):
        dask_p2p.estimate([1])
    assert dask_p2p.estimate(x, (0, 1), chunks=3).workers == 3


def test_the_workers_of_the_current_client(client):
    x = da.ones((800, 800), chunks=(100, 800))
    need = dask_p2p.estimate(x)
    assert need.workers == 4
    assert need == dask_p2p.estimate(x, workers=4), "of one thread each"


# --- exchanges of transforms ---


def cube(chunks, dtype="D"):
    return da.ones((64,) * 3, chunks=chunks, dtype=dtype)


def test_the_exchanges_of_transforms_and_the_bytes_that_they_move():
    slabs = fft.fftn(cube((16, -1, -1)))
    need = fft.estimate(slabs, workers=4)
    assert (need.exchanges, need.moved_bytes) == (1, 3 * MIB)
    assert fft.estimate(slabs, workers=2).moved_bytes == 2 * MIB
    assert fft.estimate(slabs, workers=1).moved_bytes == 0
    y = cube((16, -1, -1))
    for _ in range(4):
        y = fft.ifftn(fft.fftn(y) * 2)
    repeated = fft.estimate(y, workers=4)
    assert (repeated.exchanges, repeated.moved_bytes) == (8, 8 * 3 * MIB)
    assert repeated.total_bytes == need.total_bytes, "one exchange at a time"
    half = fft.estimate(fft.rfftn(cube((16, -1, -1), "d")), workers=4)
    assert half.moved_bytes == 3 * MIB * 33 / 64
    of_a_gang = spmd(lambda ctx, a: a, cube((16, -1, -1)), ranks=4)
    assert fft.estimate(fft.fftn(of_a_gang), workers=4) == need, "without the gang's exchanges"
    none = fft.estimate(cube(16), workers=2)
    assert str(none).startswith("0 exchanges between 2 workers: 0 B move; a worker holds at most")


def test_the_memory_of_transforms():
    with dask.config.set({"p2p.transports.order": ["cma"]}):
        to_complex = fft.fft(cube((16, -1, -1), "d"), axis=0)
        in_place = fft.fft(cube((16, -1, -1)), axis=0)
    # Of 2 MiB of real numbers in four blocks: the transform of one lies beside it.
    need, same = (fft.estimate(y, workers=1) for y in (to_complex, in_place))
    assert (need.input_bytes, need.output_bytes, need.staging_bytes) == (2 * MIB, 2 * MIB, MIB)
    assert same.total_bytes == same.input_bytes + same.output_bytes == 8 * MIB


@pytest.mark.usefixtures("without_stealing")
def test_as_many_bytes_move_as_estimated(client):
    y = fft.fftn(spread(client, cube((16, -1, -1))))
    need = fft.estimate(y)
    assert need.workers == 4
    y = persisted(client, y)
    assert run_of(client, y).moved_bytes == need.moved_bytes


@pytest.mark.parametrize(
    ("y", "workers", "error"),
    [
        (np.ones(3), 2, UnsupportedArrayError),
        (cube(16), 0, InputError),
        (cube(16), 1.5, InputError),
    ],
)
def test_wrong_input_of_transforms(y, workers, error):
    with pytest.raises(error):
        fft.estimate(y, workers=workers)
