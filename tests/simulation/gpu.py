"""A GPU for each worker: memory that is reused, mappings, and kernels that run late."""

import itertools
import weakref
from contextlib import nullcontext

import numpy as np

from dask_p2p.transports import cuda_ipc
from tests.simulation.actors import current, halt

POISON = 2**63
CELLS = 8  # of a block, and of a place in memory
_PLACES = 32
_SPAN = 2**20  # between addresses of mappings


class OneDevice(nullcontext):
    """Stands for `cupy.cuda.Device`."""

    id = 0


class DeviceArray(np.ndarray):
    """Stands for `cupy.ndarray`."""

    __module__ = "cupy"
    place = mapped = None
    device = OneDevice()

    def __array_finalize__(self, source):
        self.mapped = getattr(source, "mapped", None)

    def get(self):
        return np.array(self, subok=False)


class Memory:
    """One allocation, from which all blocks of a process are cut. What is given back is reused."""

    def __init__(self):
        self.alive = True
        self.cells = np.full((_PLACES, CELLS), POISON, "u8")
        self.tenants = [None] * _PLACES
        self._free = list(range(_PLACES))
        self._serials = itertools.count()

    def put(self, values):
        place = self._free.pop()
        self.cells[place] = values.ravel()
        self.tenants[place] = next(self._serials)
        block = self.cells[place].reshape(values.shape).view(DeviceArray)
        block.place = (self, place)
        weakref.finalize(block, self._give_back, place).atexit = False
        return block

    def _give_back(self, place):
        self.cells[place] = POISON
        self.tenants[place] = None
        self._free.append(place)

    def die(self):
        self.alive = False
        self.cells[...] = POISON

    @property
    def used(self):
        return _PLACES - len(self._free)


class Driver:
    """CUDA's part in this: what is mapped where, and whether it may be read."""

    class CUDARuntimeError(RuntimeError):
        pass

    def __init__(self, world):
        self.world = world
        self.memories = {}  # by handle
        self.mapped = {}  # by address
        self._addresses = itertools.count(_SPAN, _SPAN)

    def ipcOpenMemHandle(self, handle):  # noqa: N802
        memory = self.memories[handle]
        if not memory.alive:
            raise self.CUDARuntimeError("cudaErrorInvalidValue")
        address = next(self._addresses)
        self.mapped[address] = memory
        return address

    def memGetInfo(self):  # noqa: N802
        return 2**30, 2**30

    def ipcCloseMemHandle(self, address):  # noqa: N802
        del self.mapped[address]

    def export(self, block):
        memory, place = block.place
        handle = next(handle for handle, m in self.memories.items() if m is memory)
        # Other processes have the same ids of buffers.
        offset_bytes = place * memory.cells.strides[0]
        return cuda_ipc.IpcHandle("gpu", handle.hex(), 1, 0, memory.cells.nbytes, offset_bytes)

    def array_at(self, address, shape, strides, dtype):
        base, offset = address // _SPAN * _SPAN, address % _SPAN
        memory = self.mapped[base]
        place = offset // memory.cells.strides[0]
        array = memory.cells[place].reshape(shape).view(DeviceArray)
        assert (array.strides, array.dtype) == (strides, dtype)
        array.mapped = (base, memory, place, memory.tenants[place])
        return array

    def check_read(self, array):
        """Note it if a kernel may not read this."""
        if array.mapped is None:
            return
        base, memory, place, tenant = array.mapped
        if base not in self.mapped:
            self.world.note_violation("read by a mapping that is closed")
        if not memory.alive:
            return  # the reader finds out in the end
        if tenant is None or memory.tenants[place] != tenant:
            self.world.note_violation("read memory that was freed")
        if (memory, place) not in [lease.place for lease in current().open_leases]:
            self.world.note_violation("read without a lease")


class Queue:
    """Stands for `DeviceQueue`. As late as may be: all is done when somebody waits for it."""

    kind = "cupy"
    pinned_output = False

    def __init__(self, driver, leave_bandwidth=False):
        self._driver = driver
        self._work = []

    def empty(self, shape, dtype):
        return np.full(shape, POISON, dtype).view(DeviceArray)

    scratch = empty

    def wait_until_written(self, blocks, any_stream):
        pass

    def to_host(self, array):
        self.synchronize()
        return array.get()

    def permute(self, dst, src, axes, concurrent=False):
        self._work.append((dst, src, axes))

    def permute_and_drop(self, dst, src, axes):
        self.permute(dst, src, axes)

    def fill(self, dst, value):
        self.permute(dst, np.broadcast_to(value, dst.shape), range(dst.ndim))

    def prefetch(self, src, slot_bytes):
        return src

    def permute_prefetched(self, dst, part, axes):
        self.permute(dst, part, axes)

    def pack(self, dst, src):
        self.permute(dst, src, range(src.ndim))
        return self.synchronize

    def timing(self, timer):
        return nullcontext()

    def synchronize(self):
        while self._work:
            halt("copy")
            dst, src, axes = self._work.pop(0)
            if isinstance(src, DeviceArray):
                self._driver.check_read(src)
            dst[...] = src.transpose(axes)
