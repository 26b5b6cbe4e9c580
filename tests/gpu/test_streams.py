"""Tasks that use other streams and GPUs: blocks are right, and tasks are not disturbed."""

import gc
import os
import threading
from importlib.util import find_spec

import dask
import dask.array as da
import numpy as np
import psutil
import pytest
from dask.core import flatten
from distributed import Client, wait

import dask_p2p
from dask_p2p.backends import device
from tests.backends.support import cupy
from tests.faults.support import BOUND_S, addresses, wait_at
from tests.gpu.support import POOL, HeldKernel, gpu_client
from tests.support import own_client, persisted, result_of, used
from tests.transports.loopback import wait_until

pytestmark = pytest.mark.gpu(2)

SHAPE = (1024, 1024)
LATE_NS = 500_000_000
SPIN = r"""
extern "C" __global__ void spin(long long ns) {
    long long start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); while (now - start < ns);
}
"""
TORCH = pytest.param("torch", marks=pytest.mark.skipif(not find_spec("torch"), reason="needs it"))
KEPT = []  # arrays of a worker that kernels still use when their task has returned


def spin(stream, ns=LATE_NS):
    kernel = cupy.RawKernel(SPIN, "spin")
    kernel((1,), (1,), (np.int64(ns),), stream=stream)


def on_stream(out, values, stream):
    with stream:
        spin(stream)
        cupy.copyto(out, values)


def on_graph(out, values):
    stream = cupy.cuda.Stream(non_blocking=True)
    stream.begin_capture()
    on_stream(out, values, stream)
    graph = stream.end_capture()
    graph.launch(stream)
    KEPT.append((stream, graph))


def on_torch_stream(out, values):
    import torch

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch_out, values = torch.from_dlpack(out), torch.from_dlpack(values)
        torch.cuda._sleep(LATE_NS * 2)  # cycles
        torch_out.copy_(values)
    KEPT.append((stream, torch_out, values))


def written_late(how, block_info):
    info = block_info[None]
    out = cupy.full(info["chunk-shape"], -1, "f4")
    first = info["array-location"][0][0] * SHAPE[1]
    values = cupy.arange(first, first + out.size, dtype="f4").reshape(out.shape)
    cupy.cuda.Device().synchronize()
    KEPT.append(values)
    streams = cupy.cuda.Stream
    if how == "null":
        on_stream(out, values, streams.null)
    elif how == "blocking":
        on_stream(out, values, streams())
    elif how == "non-blocking":
        on_stream(out, values, streams(non_blocking=True))
    elif how == "per-thread":
        on_stream(out, values, streams.ptds)
    else:
        {"graph": on_graph, "torch": on_torch_stream}[how](out, values)
    return out


def late_array(how, rows=512):
    chunks = ((rows,) * (SHAPE[0] // rows), SHAPE[1])
    return da.map_blocks(
        written_late, how, chunks=chunks, dtype="f4", meta=cupy.empty((0, 0), "f4")
    )


def warm(client):
    def compile_all():
        out = cupy.full((8, 8), -1, "f4")
        values = cupy.arange(0, 64, dtype="f4").reshape(8, 8)
        on_stream(out, values, cupy.cuda.Stream.null)
        cupy.cuda.Device().synchronize()

    client.run(compile_all)
    persisted(client, dask_p2p.transpose(late_array("null")))


def on_each(client, function, *args):
    """Futures of a task on each worker, in one of its task threads."""
    return [
        client.submit(function, *args, workers=[worker], pure=False) for worker in addresses(client)
    ]


VALUES = np.arange(SHAPE[0] * SHAPE[1], dtype="f4").reshape(SHAPE)


@pytest.mark.parametrize("order", [["ipc"], ["ucx"], ["comm"]], ids=str)
@pytest.mark.parametrize("how", ["null", "blocking", "per-thread", "non-blocking", "graph", TORCH])
def test_blocks_are_read_when_they_are_written(client, order, how):
    with dask.config.set({"p2p.transports.order": order}):
        warm(client)
        x = persisted(client, late_array(how))
        y = persisted(client, dask_p2p.transpose(x))
    np.testing.assert_array_equal(y.compute().get(), VALUES.T)
    assert used(client, y) == set(order)


def negated_late(block, how="non-blocking"):
    """Half a second after it has returned its block, that holds the negative of it."""
    stream = {"null": cupy.cuda.Stream.null}.get(how) or cupy.cuda.Stream(non_blocking=True)
    with stream:
        spin(stream)
        cupy.negative(block, out=block)
    KEPT.append((stream, block))
    return block


@pytest.mark.parametrize("order", [["ipc"], ["ucx"], ["pinned"], ["comm"]], ids=str)
@pytest.mark.parametrize("how", ["null", "non-blocking"])
@pytest.mark.parametrize("depth", [0, {1: 1}], ids=str)
def test_a_function_that_overwrites_its_block_late(client, order, how, depth):
    """No block has halos here: one along the second axis, and boundary "none"."""
    with dask.config.set({"p2p.transports.order": order}):
        warm(client)
        x = persisted(client, late_array("null"))
        for options in ({"trim": False}, {}):
            y = dask_p2p.map_overlap(negated_late, x, depth, how=how, dtype="f4", **options)
            z = persisted(client, dask_p2p.transpose(persisted(client, y)))
            np.testing.assert_array_equal(z.compute().get(), -VALUES.T)
            assert used(client, z) == set(order)
        again = persisted(client, dask_p2p.transpose(x))
    np.testing.assert_array_equal(again.compute().get(), VALUES.T)


@pytest.mark.parametrize("how", ["non-blocking", "graph", TORCH])
@pytest.mark.parametrize("scheduler", ["threads", "synchronous"])
@pytest.mark.gpu(1)
def test_blocks_of_one_process(how, scheduler):
    # One after another: of two tasks, one could invalidate the graph that the other captures.
    (x,) = dask.persist(late_array(how), scheduler="synchronous")
    with dask.config.set(scheduler=scheduler):
        y = dask_p2p.transpose(x).compute()
    np.testing.assert_array_equal(y.get(), VALUES.T)


def leave_stream_current(shape):
    """Let go of memory that a kernel is still to write, on a stream that stays current."""
    stream = cupy.cuda.Stream(non_blocking=True)
    stream.use()
    KEPT.append(stream)
    scratch = cupy.empty(shape, "f4")
    garbage = cupy.full(shape, -1, "f4")
    KEPT.append(garbage)
    stream.synchronize()
    on_stream(scratch, garbage, stream)


def finish():
    cupy.cuda.Device().synchronize()


@pytest.mark.parametrize("order", [["ipc"], ["ucx"], ["comm"]], ids=str)
def test_a_result_is_not_overwritten_by_an_earlier_task(client, order):
    with dask.config.set({"p2p.transports.order": order}):
        warm(client)
        x = persisted(client, late_array("null"))
        # Of the size of the output, of slots and of buffers.
        for shape in [(512, 1024), (512, 512), (1536, 512)]:
            wait(on_each(client, leave_stream_current, shape))
            y = persisted(client, dask_p2p.transpose(x))
            client.run(finish)
            np.testing.assert_array_equal(y.compute().get(), VALUES.T)
            del y
        wait(on_each(client, lambda: cupy.cuda.Stream.null.use()))


def capture(library, gate=None):
    """Capture a graph while other tasks work; return the values that it computes."""
    out = cupy.zeros(1000, "f4")
    cupy.add(out, 1, out=out)  # compiled
    cupy.cuda.Device().synchronize()
    if library == "torch":
        import torch

        torch_out, graph = torch.from_dlpack(out), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            torch_out.add_(1)
            pause(gate)
            torch_out.add_(1)
        graph.replay()
        torch.cuda.synchronize()
    else:
        stream = cupy.cuda.Stream(non_blocking=library == "cupy, non-blocking")
        with stream:
            stream.begin_capture(cupy.cuda.runtime.streamCaptureModeGlobal)
            try:
                cupy.add(out, 1, out=out)
                pause(gate)
                cupy.add(out, 1, out=out)
            finally:
                graph = stream.end_capture()
            graph.launch(stream)
            stream.synchronize()
    return float(out[0]), float(out[-1])


def pause(gate):
    if gate is not None:
        wait_at(gate)


def settle(client, x):
    """Wait until workers have let go of all but an array: that uses the null stream."""
    keys = {*map(str, flatten(x.__dask_keys__()))}
    keys_in_memory = lambda dask_worker: {*map(str, dask_worker.data)}  # noqa: E731
    wait_until(
        lambda: all(worker_keys <= keys for worker_keys in client.run(keys_in_memory).values())
    )
    client.run(gc.collect)
    client.run(finish)


LIBRARIES = ["cupy, non-blocking", "cupy, blocking", TORCH]


@pytest.mark.parametrize("order", [["ipc"], ["ucx"], ["comm"]], ids=str)
@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("how", ["null", "non-blocking"])
def test_a_graph_is_captured_while_blocks_are_served(client, gate, order, library, how):
    with dask.config.set({"p2p.transports.order": order}):
        warm(client)
        wait(on_each(client, capture, library))
        x = persisted(client, late_array(how))
        reader, holder = addresses(client)
        settle(client, x)
        graph = client.submit(capture, library, gate.path, workers=[holder], pure=False)
        gate.wait_until_reached()
        y = [
            client.compute(b, workers=[reader]) for b in dask_p2p.transpose(x).to_delayed().ravel()
        ]
        wait(y, timeout=BOUND_S)
        assert not graph.done(), "captured all the while"
        gate.open()
        assert result_of(client, graph) == (3, 3)
        np.testing.assert_array_equal(np.vstack([b.result().get() for b in y]), VALUES.T)


@pytest.fixture(scope="module")
def two_threads():
    with dask_p2p.local_cluster(2, gpus=True, threads_per_worker=2, **POOL) as cluster:
        yield cluster


@pytest.mark.parametrize("order", [["ipc"], ["ucx"], ["comm"]], ids=str)
@pytest.mark.parametrize("library", LIBRARIES)
def test_a_graph_is_captured_while_blocks_are_assembled(two_threads, gate, order, library):
    with Client(two_threads) as client, dask.config.set({"p2p.transports.order": order}):
        warm(client)
        wait(on_each(client, capture, library))
        x = persisted(client, late_array("non-blocking"))
        settle(client, x)
        graphs = on_each(client, capture, library, gate.path)
        gate.wait_until_reached(by=2)
        y = client.persist(dask_p2p.transpose(x))
        if library == "cupy, blocking":
            # The null stream, on which results are allocated, has to wait for the end of a capture
            # on a blocking one.
            wait_until(lambda: "p2p-transpose" in str(client.processing()))
            gate.open()
        wait(y, timeout=BOUND_S)
        assert library == "cupy, blocking" or not any(graph.done() for graph in graphs)
        gate.open()
        assert [result_of(client, graph) for graph in graphs] == [(3, 3), (3, 3)]
        np.testing.assert_array_equal(y.compute().get(), VALUES.T)
        assert used(client, y) == set(order)


@pytest.mark.gpu(1)
@pytest.mark.parametrize("is_blocking", [True, False])
def test_all_streams_are_waited_for_without_harm_to_a_capture(is_blocking):
    captured, go_on, result = threading.Event(), threading.Event(), []
    out = cupy.zeros(10, "f4")
    cupy.add(out, 0, out=out)

    def capturing():
        stream = cupy.cuda.Stream(non_blocking=not is_blocking)
        with stream:
            stream.begin_capture(cupy.cuda.runtime.streamCaptureModeGlobal)
            cupy.add(out, 1, out=out)
            captured.set()
            go_on.wait(30)
            graph = stream.end_capture()
            graph.launch(stream)
            stream.synchronize()
            result.append(float(out[0]))

    spin(cupy.cuda.Stream.null, 1)
    busy = cupy.cuda.Stream(non_blocking=True)
    thread = threading.Thread(target=capturing)
    with device.device_work():
        kernel = HeldKernel(busy)
        busy_event = busy.record(cupy.cuda.Event(disable_timing=True))
        thread.start()
        assert captured.wait(30)
        assert not busy_event.done
        threading.Timer(0.2, kernel.release).start()
        device.wait_for_all_streams()
        assert kernel.was_let_go
        assert busy_event.done
        other_stream = cupy.cuda.Stream(non_blocking=True)
        device.order_after_null_stream([other_stream])
        other_stream.synchronize()
    go_on.set()
    thread.join(30)
    assert result == [1.0]


def break_device():
    """Write to an invalid address: after that no call of CUDA works in this process."""
    code = 'extern "C" __global__ void wild() { *(volatile int *)16 = 1; }'
    cupy.RawKernel(code, "wild")((1,), (1,), ())


@pytest.mark.parametrize("order", [["ipc"], ["ucx"], ["comm"]], ids=str)
def test_a_worker_whose_gpu_is_lost_leaves_and_its_work_is_done_elsewhere(order):
    with dask.config.set({"p2p.transports.order": order}), gpu_client() as client:
        warm(client)
        x = persisted(client, late_array("null"))
        pids = client.run(os.getpid)
        (victim, pid) = min(pids.items())
        wait(client.submit(break_device, workers=[victim], pure=False))
        y = dask_p2p.transpose(x)
        actual = client.compute(y.map_blocks(lambda b: b.get(), meta=np.empty((0, 0), "f4")))
        np.testing.assert_array_equal(result_of(client, actual, BOUND_S), VALUES.T)
        wait_until(lambda: not psutil.pid_exists(pid), BOUND_S)
        # Its nanny has started another one, on the same GPU.
        client.wait_for_workers(2, timeout=BOUND_S)
        z = persisted(client, dask_p2p.transpose(late_array("null")))
        np.testing.assert_array_equal(z.compute().get(), VALUES.T)


def fail_on_broken_device():
    break_device()
    cupy.cuda.Device().synchronize()


def test_a_worker_leaves_as_soon_as_a_task_has_broken_its_gpu():
    with gpu_client() as client:
        warm(client)
        (victim, pid) = min(client.run(os.getpid).items())
        future = client.submit(fail_on_broken_device, workers=[victim], pure=False)
        with pytest.raises(Exception, match="illegal memory access"):
            future.result(timeout=BOUND_S)
        wait_until(lambda: not psutil.pid_exists(pid), BOUND_S)
        client.wait_for_workers(2, timeout=BOUND_S)


def on_device(block, block_info):
    with cupy.cuda.Device(block_info[0]["chunk-location"][0] % 2):
        return cupy.asarray(block)


def on_second_device(block):
    with cupy.cuda.Device(1):
        return cupy.asarray(block)


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("scheduler", ["threads", "synchronous", "one process"])
def test_two_gpus_of_one_process(scheduler):
    x = da.from_array(VALUES, chunks=(128, 1024))
    x = x.map_blocks(on_device, dtype="f4", meta=cupy.empty((0, 0), "f4"))
    if scheduler == "one process":
        with own_client(processes=False, threads_per_worker=2) as client:
            y = dask_p2p.transpose(persisted(client, x)).compute().get()
    else:
        (x,) = dask.persist(x, scheduler=scheduler)
        y = dask_p2p.transpose(x).compute(scheduler=scheduler).get()
    np.testing.assert_array_equal(y, VALUES.T)


@pytest.mark.usefixtures("two_gpus")
def test_all_blocks_on_another_gpu_than_the_current_one():
    x = da.from_array(VALUES, chunks=(256, 1024))
    x = x.map_blocks(on_second_device, dtype="f4", meta=cupy.empty((0, 0), "f4"))
    y = dask_p2p.transpose(x)
    devices = y.map_blocks(
        lambda b: np.full((1, 1), b.device.id), chunks=(1, 1), meta=np.empty((0, 0))
    )
    assert {*devices.compute(scheduler="synchronous").ravel()} == {1}
    np.testing.assert_array_equal(y.compute(scheduler="synchronous").get(), VALUES.T)
