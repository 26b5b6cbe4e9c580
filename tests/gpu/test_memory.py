"""Memory of GPUs: allocators, spilling, and shortage."""

import asyncio
import time

import dask
import dask.array as da
import pytest
from distributed import wait

import dask_p2p
from dask_p2p.cli.cluster import indexed_array
from dask_p2p.errors import MemoryLimitError, TransferError
from dask_p2p.plugins.registration import workers_of
from tests.backends.support import cupy
from tests.faults.support import addresses, forget, one_block_each, set_trap
from tests.gpu.support import assert_right, check_transpose, free_all_blocks, gpu_client, ipc_counts
from tests.simulation.streams import drop_queue_slots
from tests.support import persisted, used
from tests.transports.loopback import wait_until

pytestmark = pytest.mark.gpu(2)


def test_cupys_own_pool():
    shape = (3000, 2000)
    with gpu_client(rmm_pool_size=None, rmm_allocator_external_lib_list=None) as client:
        for _ in range(3):
            a = persisted(client, indexed_array(shape, (700, 2000), "f4", kind="cupy"))
            check_transpose(client, a, "ipc")
            del a
            client.run(free_all_blocks)


def count_restored(dask_worker):
    from dask_cuda import device_host_file

    restore, dask_worker.restored = device_host_file.host_to_device, 0

    def counted(block):
        dask_worker.restored += 1
        return restore(block)

    device_host_file.host_to_device = counted  # Dask's stores have the original function


@pytest.mark.parametrize("transport", ["ipc", "ucx", "pinned", "comm"])
def test_spilled_blocks_are_read_out_of_host_memory(transport):
    shape = (4000, 4000)  # in two blocks of 32 MB
    with (
        dask.config.set({"p2p.transports.order": [transport]}),
        gpu_client(device_memory_limit="40 MB") as client,
    ):
        dask_p2p.register(client)
        reader, holder = addresses(client)
        x = indexed_array(shape, (2000, 4000), "f4", kind="cupy")
        x = client.persist(x, workers=[holder])
        wait(x)
        client.run(count_restored)
        before = client.run(on_host, workers=[holder])[holder]
        assert before > 0
        y = client.persist(dask_p2p.transpose(x), workers=[reader])
        wait(y)
        assert client.run(lambda dask_worker: dask_worker.restored)[holder] == 0
        assert client.run(on_host, workers=[holder])[holder] == before
        transports = used(client, y)  # by ipc what is on the GPU yet
        assert transports <= {"ipc", "comm"} if transport == "ipc" else transports == {transport}
        assert_right(client, y, shape)


# One that could grow would take the whole GPU, and leave nothing for CUDA itself.
SMALL_POOL = {"rmm_pool_size": 4 * 2**30, "rmm_maximum_pool_size": 4 * 2**30}


def on_host(dask_worker):
    return len(dask_worker.data.host)


@pytest.mark.parametrize("transport", ["ipc", "ucx"])
def test_blocks_are_spilled_while_they_are_read(gate, transport):
    """The lease keeps a block in device memory while it is read, whatever its holder does."""
    shape = (4000, 4000)  # in two blocks of 32 MB
    options = {
        "p2p.transports.order": [transport],
        "p2p.transports.ipc.staging-bytes": "12 MiB",
        "p2p.transports.part-bytes": "4 MiB",
    }
    with dask.config.set(options), gpu_client(device_memory_limit="80 MB") as client:
        dask_p2p.register(client)
        reader, holder = workers = addresses(client)
        x = one_block_each(client, indexed_array(shape, (2000, 4000), "f4", kind="cupy"), workers)
        wait(x)
        client.run(set_trap, "placed", 1, "wait", gate.path, workers=[reader])
        y = client.persist(dask_p2p.transpose(x).blocks[0], workers=[reader])
        gate.wait_until_reached()
        spilling = indexed_array((8000, 4000), (2000, 4000), "f4", kind="cupy")
        spilling = client.persist(spilling, workers=[holder])
        wait(spilling)
        assert client.run(on_host, workers=[holder])[holder] > 0
        gate.open()
        y = da.concatenate([y, dask_p2p.transpose(x).blocks[1]])
        assert_right(client, y, shape)
        del x, y, spilling


def fill_pool(leave_bytes, dask_worker):
    """Allocate all but some bytes of the worker's pool, in pieces as large as possible."""
    remainder = cupy.cuda.alloc(leave_bytes)
    dask_worker.filling = []
    piece_bytes = 2**30
    while piece_bytes >= 2**20:
        try:
            dask_worker.filling.append(cupy.cuda.alloc(piece_bytes))
        except MemoryError:
            piece_bytes //= 2
    del remainder


def empty_pool(dask_worker):
    del dask_worker.filling


def test_parts_are_read_in_place_where_there_is_no_memory_to_copy_them_into():
    shape = (10000, 20000)
    options = {"p2p.transports.order": ["ipc"], "p2p.transports.ipc.staging-bytes": "768 MiB"}
    with dask.config.set(options), gpu_client(**SMALL_POOL) as client:
        a = persisted(client, indexed_array(shape, (5000, 20000), "f4", kind="cupy"))
        reader = sorted(addresses(client))[0]
        client.run(fill_pool, 2**29, workers=[reader])  # for the output, 400 MB, and little more
        y = persisted(client, dask_p2p.transpose(a))
        assert used(client, y) == {"ipc"}
        client.run(empty_pool, workers=[reader])
        assert_right(client, y, shape)


def test_memory_of_cupys_own_pool_is_free_once_its_owner_has_freed_it():
    """Each block is an allocation of its own, and would stay taken as long as it is mapped."""

    def give_all_back():
        drop_queue_slots()  # which are kept for a second
        free_all_blocks()

    def reserved_bytes():
        free_bytes, total_bytes = cupy.cuda.runtime.memGetInfo()
        return total_bytes - free_bytes

    def blocks_in_memory(dask_worker):
        return len(dask_worker.data)

    with gpu_client(rmm_pool_size=None, rmm_allocator_external_lib_list=None) as client:
        dask_p2p.register(client)
        allocations = []
        for number in range(50):
            shape = (4000 + 64 * number, 4000)
            a = persisted(client, indexed_array(shape, (shape[0] // 2, 4000), "f4", kind="cupy"))
            y = persisted(client, dask_p2p.transpose(a))
            assert used(client, y) == {"ipc"}
            del a, y
            wait_until(lambda: not any(published for published, _ in ipc_counts(client).values()))
            wait_until(lambda: not any(client.run(blocks_in_memory).values()))
            client.run(give_all_back)  # by all first, as they may share the GPU
            allocations.append(max(client.run(reserved_bytes).values()))
    assert max(allocations[5:]) - allocations[4] < 2**25, allocations


RETAIN = "p2p.transports.directory.retain"


def device_bytes(dask_worker):
    """Return the bytes that a worker's store and the leases of its peers keep in device memory."""
    directory = dask_worker.plugins["dask-p2p"].context.router.transports["ipc"].directory
    owned = [entry.block for entry in [*directory.published.values(), *directory.withdrawn]]
    blocks = {id(block): block.nbytes for block in [*dask_worker.data.device.values(), *owned]}
    return sum(blocks.values())


@pytest.mark.parametrize("transport", ["ipc", "ucx", "comm"])
def test_the_limit_of_device_memory_is_kept(transport):
    """Blocks that are spilled are read for others where they are."""
    shape, chunks = (16000, 4000), (1000, 4000)  # 8 blocks of 16 MB a worker
    with (
        # Nothing is withdrawn because it was published long ago.
        dask.config.set({"p2p.transports.order": [transport], RETAIN: "300 s"}),
        gpu_client(device_memory_limit="40 MB") as client,
    ):
        a = persisted(client, indexed_array(shape, chunks, "f4", kind="cupy"))
        for _ in range(3):
            y = persisted(client, dask_p2p.transpose(a, chunks=(2000, -1)))
            assert_right(client, y, shape)
            del y
            wait_until(lambda: max(client.run(device_bytes).values()) <= 40e6 + 2 * 16e6)


@pytest.mark.parametrize("extent", ["one block", "all blocks"])
@pytest.mark.parametrize("transport", ["ipc", "comm"])
def test_an_array_of_three_times_the_device_memory(transport, extent):
    """A task's own blocks stay in host memory, where dask-cuda has put them.

    Each pool has room for a third of its worker's blocks.
    """
    shape, chunks = (24000, 16000), (500, 16000)  # 24 blocks of 32 MB a worker
    pool_bytes = 256 * 2**20
    pool = {"rmm_pool_size": pool_bytes, "rmm_maximum_pool_size": pool_bytes}
    with (
        dask.config.set({"p2p.transports.order": [transport, "comm"]}),
        gpu_client(device_memory_limit="100 MB", **pool) as client,
    ):
        dask_p2p.register(client)
        x = persisted(client, indexed_array(shape, chunks, "f4", kind="cupy"))
        client.run(count_restored)
        before = client.run(keys_on_host, x.name)
        assert sum(map(len, before.values())) >= 30
        y = dask_p2p.transpose(x, chunks=(500, -1))
        if extent == "one block":
            y = persisted(client, y[:500])
            after = client.run(keys_on_host, x.name)
            assert all(set(keys) <= set(after[worker]) for worker, keys in before.items())
            expected = indexed_array(shape, chunks, "f4")[:, :500].compute().T
            assert (y.compute().get() == expected).all()
        else:
            y = y.map_blocks(lambda b: b[:1, :1].copy(), chunks=((1,) * y.numblocks[0], (1,)))
            rows = persisted(client, y).compute().get()
            expected = indexed_array(shape, chunks, "f4")[0, ::500].compute()
            assert rows[:, 0].tolist() == expected.tolist()
        assert set(client.run(lambda dask_worker: dask_worker.restored).values()) == {0}


def keys_on_host(name, dask_worker):
    return sorted(key for key in dask_worker.data.host if key[0] == name)


async def read_in_threads(dask_worker, seconds):
    """Read all blocks in serving threads, while the event loop brings them back; count errors."""
    host = dask_worker.plugins["dask-p2p"].context
    keys, errors, stop_s = list(dask_worker.data), [], time.monotonic() + seconds

    def read():
        while time.monotonic() < stop_s:
            for key in keys:
                try:
                    assert host.block(key).size
                except KeyError as exc:
                    errors.append(exc)

    reading = asyncio.gather(*(asyncio.to_thread(read) for _ in range(3)))
    while time.monotonic() < stop_s:
        for key in keys:
            assert dask_worker.data[key].size
            await asyncio.sleep(0)
    await reading
    return len(errors)


def test_no_block_is_missed_while_dask_brings_it_back():
    with gpu_client(device_memory_limit="40 MB") as client:
        dask_p2p.register(client)
        a = persisted(client, indexed_array((30000, 1000), (1000, 1000), "f4", kind="cupy"))
        assert set(client.run(read_in_threads, seconds=4).values()) == {0}
        del a


@pytest.mark.parametrize(
    ("transport", "leave_bytes"), [("ipc", 0), ("ucx", 2**29), ("comm", 2**29)]
)
def test_a_reader_without_memory_raises_and_works_again(transport, leave_bytes):
    """With 512 MiB left the output (400 MB) fits, but no further memory for transfers."""
    shape = (10000, 20000)
    options = {
        "p2p.transports.order": [transport],
        "p2p.transports.ipc.staging-bytes": "768 MiB",
        "p2p.transports.part-bytes": "256 MiB",
        "p2p.timeouts.request": "5 s",
    }
    with dask.config.set(options), gpu_client(**SMALL_POOL) as client:
        a = persisted(client, indexed_array(shape, (5000, 20000), "f4", kind="cupy"))
        reader = sorted(workers_of(client))[0]
        client.run(fill_pool, leave_bytes, workers=[reader])
        y = client.compute(dask_p2p.transpose(a).blocks[0], workers=[reader])
        with pytest.raises(MemoryLimitError, match=f"on the GPU of worker {reader}") as caught:
            y.result(timeout=200)
        assert caught.value.needed_bytes > shape[0] * shape[1] * 4 / 2
        assert "chunks=" in str(caught.value)
        client.run(empty_pool, workers=[reader])
        forget(client, y)
        check_transpose(client, a)


@pytest.mark.parametrize("transport", ["ucx", "comm"])
def test_a_holder_without_memory_to_pack_in(transport):
    """By ucx the block is read in another way. If none is left the error names the lack."""
    shape = (10000, 20000)
    options = {
        "p2p.transports.order": [transport],
        "p2p.attempts": 2,
        "p2p.transports.part-bytes": "256 MiB",
    }
    with dask.config.set(options), gpu_client(**SMALL_POOL) as client:
        a = persisted(client, indexed_array(shape, (5000, 20000), "f4", kind="cupy"))
        reader, holder = sorted(workers_of(client))
        client.run(fill_pool, 0, workers=[holder])
        y = client.compute(dask_p2p.transpose(a).blocks[0], workers=[reader])
        with pytest.raises(TransferError, match=f"{holder} could not send .*out of memory"):
            y.result(timeout=200)
        client.run(empty_pool, workers=[holder])
        forget(client, y)
        check_transpose(client, a)


def test_what_no_gpu_has_is_refused_at_once():
    rows = cupy.cuda.runtime.memGetInfo()[1] // (40 * 1000 * 1000) + 100
    # Blocks that repeat one element take nothing; the transpose of them would.
    x = da.ones((40 * rows, 1000 * 1000), chunks=(rows, 1000 * 1000), dtype="u1")
    x = x.map_blocks(
        lambda b: cupy.broadcast_to(cupy.ones((), "u1"), b.shape), meta=cupy.empty((0, 0), "u1")
    )
    with (
        gpu_client() as client,
        pytest.raises(MemoryLimitError, match=r"are missing.*chunks=") as caught,
    ):
        client.compute(dask_p2p.transpose(x, chunks=-1)).result(timeout=200)
    assert caught.value.missing_bytes > 0


@pytest.mark.long
def test_an_array_that_is_larger_than_the_hosts_memory_of_its_workers():
    """Dask's own check would count all blocks of device memory against the limit of the host's.

    It does so for tasks that are not this package's: one block must fit.
    """
    shape = (131072, 131072)
    with gpu_client(memory_limit="16 GiB", rmm_pool_size=100 * 2**30) as client:
        a = persisted(client, indexed_array(shape, (16384, 131072), "f4", kind="cupy"))
        check_transpose(client, a, "ipc")


@pytest.mark.parametrize("transport", ["ipc", "ucx"])
def test_a_small_staging_limit(client, transport):
    """The pool has room for little more than blocks and the limit."""
    shape = (8000, 8000)
    options = {"p2p.memory.staging-limit": "8 MiB", "p2p.transports.order": [transport]}
    with dask.config.set(options):
        a = persisted(client, indexed_array(shape, (4000, 8000), "f4", kind="cupy"))
        memory = dask_p2p.estimate(a)
        assert memory.workers == 2
        assert memory.staging_bytes <= 2 * 8 * 2**20
        check_transpose(client, a, transport)
