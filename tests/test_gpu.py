"""The whole package on several GPUs: CuPy blocks on a dask-cuda cluster."""

from __future__ import annotations

import os
import signal
import time
import warnings

import dask
import dask.array as da
import numpy as np
import pytest

import dask_p2p
from dask_p2p.errors import BlockMismatchError, MemoryLimitError, P2PWarning, TransferError
from dask_p2p.indexed import count_wrong, indexed_array
from dask_p2p.measure import collect
from dask_p2p.task import PLUGIN_NAME

pytestmark = [
    pytest.mark.gpu(2),
    pytest.mark.filterwarnings("default"),  # of libraries that CI never sees
    pytest.mark.timeout(300),
]

POOL = {"rmm_pool_size": 8 * 2**30}


@pytest.fixture(scope="module")
def gpu_cluster():
    with dask_p2p.local_cluster(2, gpus=True, **POOL) as cluster:
        yield cluster


@pytest.fixture
def client(gpu_cluster):
    from distributed import Client

    with Client(gpu_cluster) as client:
        yield client


def on_gpu(x, chunks):
    import cupy

    return da.from_array(x, chunks=chunks).map_blocks(cupy.asarray)


def persisted(client, x):
    from distributed import wait

    x = client.persist(x)
    wait(x)
    return x


def transports(client, y):
    exchange = collect(client, y.name)
    return {transport for _, _, transport in exchange.pairs} if exchange else set()


def held(client):
    """Blocks kept by notice boards, and mappings that are open, on each worker."""

    def look(dask_worker):
        ipc = dask_worker.plugins[PLUGIN_NAME].runtime.links.transports["ipc"]
        return len(ipc._board), len(ipc._mappings)

    return client.run(look)


CASES = [
    ((400, 300), (100, 300), None, None),
    ((401, 299), (101, 299), None, None),
    ((400, 300), (70, 80), None, None),
    ((400, 300), (200, 300), None, (400, 7)),
    ((12, 10, 80), (3, 10, 80), (2, 0, 1), None),
    ((12, 10, 80), (3, 5, 80), (0, 2, 1), (5, 50, 5)),
    ((3, 4, 5, 6), (1, 2, 5, 3), (2, 0, 3, 1), None),
    ((3, 7), (1, 7), None, None),
    ((400,), (90,), None, None),
    ((0, 5), (1, 5), None, None),
]


@pytest.mark.parametrize(("shape", "chunks", "axes", "to"), CASES)
@pytest.mark.parametrize("order", [["ipc"], ["ucx"], ["comm"]], ids=str)
@pytest.mark.parametrize("mode", ["async", "sync"])
def test_equals_numpy(client, shape, chunks, axes, to, order, mode):
    x = np.arange(int(np.prod(shape)), dtype=np.float64).reshape(shape)
    a = persisted(client, on_gpu(x, chunks))
    with dask.config.set({"p2p.mode": mode, "p2p.transports.order": order}):
        y = persisted(client, dask_p2p.transpose(a, axes, chunks=to))
    # Only CuPy blocks have get().
    got = y.map_blocks(lambda b: b.get(), meta=np.empty((0,) * y.ndim)).compute()
    np.testing.assert_array_equal(got, np.transpose(x, axes))
    assert transports(client, y) <= set(order)


@pytest.mark.parametrize(
    "dtype", ["bool", "int8", "uint16", "float16", "float32", "int64", "complex64", "complex128"]
)
@pytest.mark.parametrize("transport", ["ipc", "ucx"])
def test_every_item_size(client, dtype, transport):
    shape = (1030, 770)
    a = persisted(client, indexed_array(shape, (300, 770), dtype, kind="cupy"))
    with dask.config.set({"p2p.transports.order": [transport]}):
        y = persisted(client, dask_p2p.transpose(a))
    assert y.dtype == dtype
    assert int(count_wrong(y, shape, (1, 0), kind="cupy").compute()) == 0
    assert transports(client, y) == {transport}


@pytest.mark.parametrize("protocol", ["tcp", "ucx"])
def test_ucx_in_small_messages_whatever_dasks_protocol(protocol):
    from distributed import Client

    shape = (6000, 5000)
    with (
        dask.config.set(
            {"p2p.transports.order": ["ucx"], "p2p.transports.ucx.part-bytes": "1 MiB"}
        ),
        dask_p2p.local_cluster(2, gpus=True, protocol=protocol, **POOL) as cluster,
        Client(cluster) as client,
    ):
        a = persisted(client, indexed_array(shape, (700, 5000), "f4", kind="cupy"))
        for _ in range(5):
            y = persisted(client, dask_p2p.transpose(a))
            assert int(count_wrong(y, shape, (1, 0), kind="cupy").compute()) == 0
            assert transports(client, y) == {"ucx"}
            del y


def test_blocks_of_any_memory_layout(client):
    x = np.arange(400 * 300.0).reshape(400, 300)
    a = on_gpu(x, (100, 300)).map_blocks(lambda b: b.copy(order="F"))
    b = on_gpu(x, (100, 300)).map_blocks(lambda b: b[::-1][::-1])
    for made in (a, b):
        y = dask_p2p.transpose(persisted(client, made))
        np.testing.assert_array_equal(y.compute().get(), x.T)


def test_leases_end_and_nothing_is_kept(client):
    x = np.arange(400 * 300.0).reshape(400, 300)
    for _ in range(3):
        a = persisted(client, on_gpu(x, (200, 300)))
        y = persisted(client, dask_p2p.transpose(a))
        del a, y
    deadline_s = time.monotonic() + 10
    while any(boards for boards, _ in held(client).values()) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    assert [boards for boards, _ in held(client).values()] == [0, 0]
    assert all(mappings <= 2 for _, mappings in held(client).values())


def test_wrong_blocks_are_named(client):
    import cupy

    x = on_gpu(np.ones((8, 8)), (2, 8))
    with pytest.raises(BlockMismatchError, match="declared as float64"):
        dask_p2p.transpose(
            x.map_blocks(lambda b: b.astype("f4"), meta=cupy.empty((0, 0)))
        ).compute()
    with pytest.raises(BlockMismatchError, match=r"declared as .*\(2, 8\)"):
        dask_p2p.transpose(x.map_blocks(lambda b: b[:1], meta=cupy.empty((0, 0)))).compute()


def test_object_dtype_is_refused(client):
    x = on_gpu(np.ones((4, 4)), (2, 4))
    x = x.map_blocks(lambda b: b, dtype=object, meta=np.empty((0, 0), object))
    with pytest.raises(BlockMismatchError, match="declared as object"):
        dask_p2p.transpose(x).compute()


def test_check_finds_nothing_in_the_way(client):
    dask_p2p.register(client)
    report = dask_p2p.check(client)
    assert [link.transport for link in report.links] == ["ipc", "ipc"]
    assert all(link.gbs > 20 and link.latency_s < 0.1 for link in report.links)
    assert report.problems == []
    for worker in report.workers:
        assert (worker.kind, worker.cupy_uses_rmm) == ("cupy", True)
        assert worker.pool_bytes % 2**21 == 0
        assert worker.link_gbs is None or worker.link_gbs > 100


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"rmm_pool_size": 2**30 + 256}, "no multiple of 2 MiB"),
        ({"rmm_pool_size": 2**30, "rmm_allocator_external_lib_list": None}, "another pool"),
        ({"rmm_async": True, "rmm_allocator_external_lib_list": ["cupy"]}, "cannot share memory"),
        ({"rmm_managed_memory": True}, "cannot share memory"),
    ],
    ids=["odd pool", "two pools", "async", "managed"],
)
def test_check_names_what_is_in_the_way(settings, words):
    from distributed import Client

    with dask_p2p.local_cluster(2, gpus=True, **settings) as cluster, Client(cluster) as client:
        report = dask_p2p.check(client)
    said = [problem for problem in report.problems if words in problem.what]
    assert len(said) == 1, str(report)
    assert len(said[0].workers) == 2
    assert "rmm_pool_size" in said[0].cure
    assert all(link.error is None for link in report.links)


@pytest.mark.parametrize("setting", ["rmm_async", "rmm_managed_memory"])
def test_an_allocator_that_ipc_cannot_share_falls_back_with_one_warning(setting):
    from distributed import Client

    x = np.arange(400 * 300.0).reshape(400, 300)
    options = {setting: True, "rmm_allocator_external_lib_list": ["cupy"]}
    with (
        dask_p2p.local_cluster(2, gpus=True, **options) as cluster,
        Client(cluster) as client,
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("default")
        a = persisted(client, on_gpu(x, (100, 300)))
        for _ in range(2):
            y = persisted(client, dask_p2p.transpose(a))
            np.testing.assert_array_equal(y.compute().get(), x.T)
            assert transports(client, y) <= {"ucx", "comm"}
            del y
        time.sleep(0.5)  # for warnings on their way
    ours = [str(w.message) for w in caught if issubclass(w.category, P2PWarning)]
    assert len(ours) == 1
    assert "cannot be shared by CUDA IPC" in ours[0]
    assert "rmm_pool_size" in ours[0]


@pytest.mark.parametrize("order", [["ucx"], ["comm"]], ids=str)
@pytest.mark.parametrize("dtype", ["f8", "f4", "i1", "c16"])
def test_checksums(client, order, dtype):
    x = np.arange(401 * 299).astype(dtype).reshape(401, 299)
    a = persisted(client, on_gpu(x, (101, 299)))
    with dask.config.set({"p2p.checksum": True, "p2p.transports.order": order}):
        y = persisted(client, dask_p2p.transpose(a))
    assert transports(client, y) == set(order)
    assert y.compute().get().tobytes() == x.T.tobytes()


def flip_messages(dask_worker):
    """Flip a bit of each message that this worker sends over UCX."""
    from dask_p2p.transports.messenger import Messenger

    def send(messenger, address, array, tag):
        changed = array.copy()
        changed[changed.size // 2] ^= 16
        np.asarray(changed[:1].get())  # it is there before UCX, which follows no stream, sends it
        return original(messenger, address, changed, tag)

    original = Messenger.send
    Messenger.send = send
    dask_worker.original_send = original


def unflip_messages(dask_worker):
    from dask_p2p.transports.messenger import Messenger

    Messenger.send = dask_worker.original_send
    dask_worker.plugins[PLUGIN_NAME].runtime.links._broken.clear()


@pytest.mark.parametrize("checksum", [True, False])
def test_flipped_bits_of_device_memory_are_found_by_checksums(client, checksum):
    x = np.arange(400 * 300.0).reshape(400, 300)
    a = persisted(client, on_gpu(x, (100, 300)))
    with dask.config.set({"p2p.transports.order": ["ucx"], "p2p.checksum": checksum}):
        persisted(client, dask_p2p.transpose(a))  # the way is proved: what follows is found by sums
        client.run(flip_messages)
        try:
            y = persisted(client, dask_p2p.transpose(a))
        finally:
            client.run(unflip_messages)
    got = y.compute().get()
    assert (got.tobytes() == x.T.tobytes()) == checksum
    assert transports(client, y) == ({"comm"} if checksum else {"ucx"})


def test_comm_over_ucx():
    from distributed import Client

    shape = (3000, 2000)
    with (
        dask_p2p.local_cluster(2, gpus=True, protocol="ucx", **POOL) as cluster,
        Client(cluster) as client,
        dask.config.set({"p2p.transports.order": ["comm"]}),
    ):
        a = persisted(client, indexed_array(shape, (700, 2000), "f4", kind="cupy"))
        y = persisted(client, dask_p2p.transpose(a))
        assert int(count_wrong(y, shape, (1, 0), kind="cupy").compute()) == 0
        assert transports(client, y) == {"comm"}


def test_cupys_own_pool():
    from distributed import Client

    shape = (3000, 2000)
    with (
        dask_p2p.local_cluster(
            2, gpus=True, rmm_pool_size=None, rmm_allocator_external_lib_list=None
        ) as cluster,
        Client(cluster) as client,
    ):
        for _ in range(3):
            a = persisted(client, indexed_array(shape, (700, 2000), "f4", kind="cupy"))
            y = persisted(client, dask_p2p.transpose(a))
            assert int(count_wrong(y, shape, (1, 0), kind="cupy").compute()) == 0
            assert transports(client, y) == {"ipc"}
            del a, y
            client.run(give_memory_back)


def give_memory_back():
    import cupy

    cupy.get_default_memory_pool().free_all_blocks()


def test_spilled_inputs():
    from distributed import Client

    shape = (8000, 8000)  # 256 MB: more than the limit on device memory allows on two GPUs
    with (
        dask_p2p.local_cluster(2, gpus=True, device_memory_limit="80 MB", **POOL) as cluster,
        Client(cluster) as client,
    ):
        a = persisted(client, indexed_array(shape, (1000, 8000), "f4", kind="cupy"))
        spilled = client.run(lambda dask_worker: len(dask_worker.data.host))
        assert any(spilled.values())
        y = persisted(client, dask_p2p.transpose(a))
        assert int(count_wrong(y, shape, (1, 0), kind="cupy").compute()) == 0


@pytest.mark.parametrize("moment_s", [0.0, 0.05])
@pytest.mark.parametrize("transport", ["ipc", "ucx"])
def test_a_killed_worker(moment_s, transport):
    from distributed import Client

    shape = (20000, 20000)
    with (
        dask.config.set({"p2p.transports.order": [transport]}),
        dask_p2p.local_cluster(2, gpus=True, **POOL) as cluster,
        Client(cluster) as client,
    ):
        a = persisted(client, indexed_array(shape, (2500, 20000), "f4", kind="cupy"))
        pid = next(iter(client.run(os.getpid).values()))
        y = client.persist(dask_p2p.transpose(a))
        time.sleep(moment_s + (0.3 if transport == "ucx" else 0))  # UCX has to start
        os.kill(pid, signal.SIGKILL)
        wrong = client.compute(count_wrong(y, shape, (1, 0), kind="cupy"))
        assert int(wrong.result(timeout=120)) == 0


def fill_pool(leave_bytes, dask_worker):
    """Take what the worker's pool has, all but so much, in pieces as large as there are."""
    import cupy

    dask_worker.filling = []
    piece_bytes = 2**30
    while piece_bytes >= 2**20:
        try:
            dask_worker.filling.append(cupy.cuda.alloc(piece_bytes))
        except MemoryError:
            piece_bytes //= 2
    freed_bytes = 0
    while freed_bytes < leave_bytes and dask_worker.filling:
        freed_bytes += dask_worker.filling.pop(0).mem.size


def empty_pool(dask_worker):
    del dask_worker.filling


def forgotten(client, future):
    """Wait until the scheduler has forgotten a task that failed, which would fail again."""
    future.release()
    deadline_s = time.monotonic() + 30
    while time.monotonic() < deadline_s and client.run_on_scheduler(
        lambda dask_scheduler: any("p2p-transpose" in str(key) for key in dask_scheduler.tasks)
    ):
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("transport", "leave_bytes"), [("ipc", 0), ("ipc", 2**29), ("ucx", 2**29), ("comm", 2**29)]
)
def test_a_reader_without_memory_says_so_and_works_again(transport, leave_bytes):
    """With 512 MiB left the output (400 MB) fits, and what comes on its way does not."""
    from distributed import Client

    shape = (10000, 20000)
    options = {
        "p2p.transports.order": [transport],
        "p2p.transports.ipc.staging-bytes": "768 MiB",
        "p2p.transports.ucx.part-bytes": "256 MiB",
        "p2p.transports.comm.part-bytes": "256 MiB",
        "p2p.timeouts.request": "5 s",
    }
    with (
        dask.config.set(options),
        dask_p2p.local_cluster(2, gpus=True, rmm_pool_size=4 * 2**30) as cluster,
        Client(cluster) as client,
    ):
        a = persisted(client, indexed_array(shape, (5000, 20000), "f4", kind="cupy"))
        reader = sorted(client.scheduler_info(n_workers=-1)["workers"])[0]
        client.run(fill_pool, leave_bytes, workers=[reader])
        y = client.compute(dask_p2p.transpose(a).blocks[0], workers=[reader])
        with pytest.raises(MemoryLimitError, match=f"out of memory on worker {reader}") as caught:
            y.result(timeout=60)
        assert caught.value.needed_bytes > shape[0] * shape[1] * 4 / 2
        assert "chunks=" in str(caught.value)
        client.run(empty_pool, workers=[reader])
        forgotten(client, y)
        y = persisted(client, dask_p2p.transpose(a))
        assert int(count_wrong(y, shape, (1, 0), kind="cupy").compute()) == 0


@pytest.mark.parametrize("transport", ["ucx", "comm"])
def test_a_holder_without_memory_to_pack_in(transport):
    """By ucx it is read in another way; when none is left the error says what it lacks."""
    from distributed import Client

    shape = (10000, 20000)
    options = {
        "p2p.transports.order": [transport],
        "p2p.attempts": 2,
        "p2p.transports.ucx.part-bytes": "256 MiB",
        "p2p.transports.comm.part-bytes": "256 MiB",
    }
    with (
        dask.config.set(options),
        dask_p2p.local_cluster(2, gpus=True, rmm_pool_size=4 * 2**30) as cluster,
        Client(cluster) as client,
    ):
        a = persisted(client, indexed_array(shape, (5000, 20000), "f4", kind="cupy"))
        reader, holder = sorted(client.scheduler_info(n_workers=-1)["workers"])
        client.run(fill_pool, 0, workers=[holder])
        y = client.compute(dask_p2p.transpose(a).blocks[0], workers=[reader])
        with pytest.raises(TransferError, match=f"{holder} could not send .*out of memory"):
            y.result(timeout=100)
        client.run(empty_pool, workers=[holder])
        forgotten(client, y)
        y = persisted(client, dask_p2p.transpose(a))
        assert int(count_wrong(y, shape, (1, 0), kind="cupy").compute()) == 0


def test_what_no_gpu_has_is_refused_at_once(client):
    import cupy

    total_bytes = cupy.cuda.runtime.memGetInfo()[1]
    rows = total_bytes // (1000 * 1000) + 1000
    # Blocks that repeat one element take nothing; the transpose of them would.
    x = da.ones((2 * rows, 1000 * 1000), chunks=(rows, 1000 * 1000), dtype="u1")
    x = x.map_blocks(
        lambda b: cupy.broadcast_to(cupy.ones((), "u1"), b.shape), meta=cupy.empty((0, 0), "u1")
    )
    y = dask_p2p.transpose(x, chunks=(1000 * 1000, rows)).blocks[0, 0]
    with pytest.raises(MemoryLimitError, match=r"are missing.*chunks=") as caught:
        client.compute(y).result(timeout=60)
    assert caught.value.missing_bytes > 0


@pytest.mark.parametrize("transport", ["ipc", "ucx"])
def test_a_small_staging_limit(client, transport):
    """The pool has room for little more than blocks and the limit."""
    shape = (8000, 8000)
    options = {"p2p.memory.staging-limit": "8 MiB", "p2p.transports.order": [transport]}
    with dask.config.set(options):
        a = persisted(client, indexed_array(shape, (4000, 8000), "f4", kind="cupy"))
        found = dask_p2p.estimate(a)
        assert found.workers == 2
        assert found.staging_bytes <= 2 * 8 * 2**20
        y = persisted(client, dask_p2p.transpose(a))
        assert int(count_wrong(y, shape, (1, 0), kind="cupy").compute()) == 0
        assert transports(client, y) == {transport}


@pytest.mark.parametrize("scheduler", ["threads", "synchronous"])
def test_without_a_cluster(scheduler):
    x = np.arange(400 * 300.0).reshape(400, 300)
    y = dask_p2p.transpose(on_gpu(x, (100, 300)))
    np.testing.assert_array_equal(y.compute(scheduler=scheduler).get(), x.T)
