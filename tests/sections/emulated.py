"""Sections of CuPy arrays without a GPU: values, and a check of every access of memory."""

import gc
import itertools
import threading
import zlib
from collections import defaultdict
from functools import partial
from types import SimpleNamespace

import numpy as np

from dask_p2p import loading
from dask_p2p.backends import cupy as cupy_backend
from dask_p2p.engine.task import RankTask
from dask_p2p.geometry import box_slices
from dask_p2p.sections import checks
from dask_p2p.sections.exchange import device as host_device
from dask_p2p.sections.gpu import device, halo_windows, windows
from dask_p2p.sections.gpu import regions as region_windows
from dask_p2p.sections.gpu import streams as gpu_streams
from dask_p2p.sections.gpu.device import Gpu
from dask_p2p.sections.wire import endpoint
from dask_p2p.transports import cuda_ipc
from tests.sections import gangs
from tests.sections.gangs import run_gang
from tests.simulation.streams import HOST, Array, emulated, kernels
from tests.support import tune


def emulated_gpu(monkeypatch):
    """A recorder that replaces CuPy. All ranks have one GPU, and read each other's windows."""
    recorder = emulated(monkeypatch)
    # A real timer would close unused mappings during another test, without this CuPy.
    never = SimpleNamespace(start=lambda: None, cancel=lambda: None)
    monkeypatch.setattr(cuda_ipc, "RepeatingTimer", lambda *args: never)
    mappings = recorder.mappings = cuda_ipc.Mappings()

    def export(block):
        """Return a handle as of a pool of RMM, which is one allocation."""
        start, size_bytes = recorder.base, recorder.memory.nbytes
        handle = start.to_bytes(8, "little").hex()
        return cuda_ipc.IpcHandle("gpu", handle, 1, start, size_bytes, block.data.ptr - start)

    begin = halo_windows.begin_in_order

    def noted(connections, order, call, sends, receives, in_background):
        """Sockets read and write from now on."""
        for buffers, access in ((sends, "reads"), (receives, "writes")):
            on_host = [array for array in buffers.values() if not isinstance(array, Array)]
            arrays = [np.frombuffer(array, "u1") for array in on_host if len(array)]
            recorder.do(HOST, "a socket", **{access: arrays})
        return begin(connections, order, call, sends, receives, in_background)

    def checksum(array):
        stream = recorder.current[-1]
        recorder.do(stream.name, "a checksum", reads=[array])
        stream.synchronize()
        return zlib.crc32(np.ascontiguousarray(array.values).tobytes())

    for where, name, value in (
        (halo_windows, "begin_in_order", noted),
        *((module, "checksum", checksum) for module in (host_device, gpu_streams)),
        (cupy_backend, "_import_kernels", lambda: kernels(recorder)),
        (cupy_backend, "_rmm_resources", list),
        (cupy_backend, "_total_bytes", lambda device: recorder.limit_bytes),
        (Gpu, "_idle", defaultdict(list)),
        (Gpu, "_lost", []),
        (checks, "_STRICT_KINDS", ""),  # emulated arrays have no such views
        (loading, "_LIBRARIES", loading._LIBRARIES | {"tests"}),  # copies of functions have it
        (device, "_pools", defaultdict(list)),
        *(
            (module, "region_batch", lambda: EmulatedBatch(recorder))
            for module in (device, region_windows)
        ),
        (cuda_ipc, "MAPPINGS", mappings),
        (windows, "separation", lambda values, peer: None),
        (cuda_ipc, "export", export),
        (cuda_ipc, "gpu_uuid", lambda: "gpu"),
        (cuda_ipc, "peer_obstacle", lambda gpu: None),
    ):
        monkeypatch.setattr(where, name, value, raising=False)
    return recorder


class EmulatedBatch:
    """Enqueues copies of small regions as `RegionBatch` does."""

    large_bytes = 256

    def __init__(self, gpu):
        self.gpu, self.permute_into, self.pending = gpu, kernels(gpu).permute_into, []

    def copy_pieces(self, dst, src, pieces, axes):
        assert dst.dtype == src.dtype
        large = []
        for piece in pieces:
            into, region = dst[box_slices(piece.dst)], src[box_slices(piece.src)]
            if into.nbytes >= self.large_bytes:
                large.append(piece)
            else:
                self.pending.append((into, region, axes))
        return large

    def fill(self, dst, fills):
        for box, value in fills:
            target = dst[box_slices(box)]
            self.gpu.do(self.gpu.current[-1].name, "a constant", writes=[target])
            target.values[...] = value

    def flush(self):
        pending, self.pending = self.pending, []
        for copy in pending:
            self.permute_into(*copy)


class Message:
    """A message of UCX. UCX may read or write its array until it is done."""

    def __init__(self, array):
        self.array, self.is_complete = array, False

    def result(self, timeout_s):
        assert self.is_complete


class Messenger:
    """Sends arrays by UCX between ranks of this process."""

    def __init__(self, gpu):
        self.gpu, self.address = gpu, b"here"
        self.waiting = {}  # messages that were sent or are received, by tag
        self.sent = []
        self.lock = threading.Lock()

    def count_closed(self, address):
        return 0

    def reset_endpoint(self, address, closed):
        assert (address, closed) == (self.address, 0)

    def send(self, address, array, tag, other_host):
        assert other_host
        self.sent.append(array.nbytes)
        self.gpu.do(HOST, "UCX", reads=[array.values])
        return self.matched(tag, Message(array), is_sent=True)

    def receive(self, array, tag):
        self.gpu.do(HOST, "UCX", writes=[array.values])
        return self.matched(tag, Message(array), is_sent=False)

    def matched(self, tag, message, is_sent):
        with self.lock:
            counterpart = self.waiting.pop(tag, None)
            if counterpart is None:
                self.waiting[tag] = message
                return message
        to, source = (counterpart, message) if is_sent else (message, counterpart)
        to.array.values[...] = source.array.values
        to.is_complete = source.is_complete = True
        return message


def with_ucx(gpu, monkeypatch):
    """Put two ranks on each host, with UCX between hosts; return the messenger."""
    messenger, kernels = Messenger(gpu), itertools.count()
    for where, name, value in (
        (endpoint, "_kernel_and_network", lambda: f"host-{next(kernels) // 2}"),
        (gangs, "Reach", partial(gangs.Reach, "127.0.0.1", uses_ucx=True)),
        (gangs, "messenger", lambda: messenger),
    ):
        monkeypatch.setattr(where, name, value)
    tune(monkeypatch, ucx_message_bytes=64)
    return messenger


def on_gpu(gpu, x):
    """A Dask array of NumPy blocks, with CuPy ones."""
    meta = gpu.empty((0,) * x.ndim, x.dtype)
    return x.map_blocks(gpu.written, dtype=x.dtype, meta=meta)


def kernel(gpu, function):
    """A function that fills `out` on the device, as NumPy's function does on the host."""

    def on_host(array):
        return getattr(array, "values", array)

    def run(*operands, out=None, **named):
        arrays = [array for array in (*operands, *named.values()) if isinstance(array, Array)]
        stream = gpu.current[-1].name
        assert stream != "null"
        if out is None:
            return arrays[0].apply(
                lambda values, *operand_values: function(values, *operand_values, **named),
                *operands[1:],
            )
        writes = [out] if isinstance(out, Array) else [*vars(out).values()]
        host_out = (
            out.values
            if isinstance(out, Array)
            else SimpleNamespace(**{name: array.values for name, array in vars(out).items()})
        )
        values = {name: on_host(array) for name, array in named.items()}
        numbers, apply = [], partial(function, *map(on_host, operands), out=host_out, **values)
        gpu.run(
            stream, "the function", lambda: numbers.append(apply()), reads=arrays, writes=writes
        )
        result = numbers[0] if numbers else None
        return out if result is host_out else result

    return run


def run_on_gpus(gpu, ranks, function, **kwargs):
    """Call a function of a context on each rank, on its stream; return the results."""

    def rank_attempt(ctx):
        with ctx.device.running([]):
            return function(ctx)

    results = run_gang(ranks, rank_attempt, device=partial(Gpu, **kwargs))
    gc.collect()
    gpu.check()
    return results


def rank_tasks(y):
    """The tasks of a section's ranks, by rank."""
    tasks = [task for task in dict(y.__dask_graph__()).values() if isinstance(task, RankTask)]
    return sorted(tasks, key=lambda task: task.key[1])


def run_section(gpu, y, inputs, **kwargs):
    """Run all ranks of a section that makes `y`; return the values of the arrays that it makes.

    `inputs` are the values of its inputs. They are copied to the device as blocks.
    """
    task = rank_tasks(y)[0]
    ranks, body = task.args[2], task.body

    def function(ctx):
        local_block = box_slices(ctx.box)
        boxes = [box_slices(box) for _, box in ranks.blocks(ctx.rank)]
        tasks = gpu.stream()  # makes the blocks, and may still be at work
        blocks = [[gpu.written(x[local_block][box], tasks) for box in boxes] for x in inputs]
        try:
            results = body(ctx, *blocks)
        except BaseException:
            gpu.synchronize()  # the makers of the blocks may be at work
            raise
        gpu.check()
        wholes = [np.full(ranks.shape(ctx.rank), np.nan, body.dtype) for _ in results]
        for output, blocks in zip(wholes, results, strict=True):
            for box, block in zip(boxes, blocks, strict=True):
                output[box] = gpu.read(block)
        return wholes

    kwargs = {"device": Gpu, **kwargs}
    outputs = [np.full(inputs[0].shape, np.nan, body.dtype) for _ in body.outputs.specs]
    for rank, local_blocks in enumerate(run_gang(ranks, function, **kwargs)):
        for output, local_block in zip(outputs, local_blocks, strict=True):
            output[box_slices(ranks.box(rank))] = local_block
    return outputs
