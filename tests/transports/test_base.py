"""What all transports share: obstacles, probes, parts, and how a class makes one known."""

import importlib
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import EntryPoint
from math import prod
from unittest.mock import MagicMock

import dask
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_p2p import config, transports
from dask_p2p.backends import MOST_UNREAD, SLOTS
from dask_p2p.backends.kernels.copies import engine_pitch
from dask_p2p.config import checked_options, options
from dask_p2p.errors import ConfigError, Obstacle, TransferError
from dask_p2p.geometry import box_shape, box_size
from dask_p2p.transports import OWN, CmaTransport, CommTransport, IpcTransport, UcxTransport
from dask_p2p.transports.base import (
    PROBE_BYTES,
    Probes,
    Reading,
    Region,
    Request,
    Transport,
    check_probe,
    most_probe_bytes,
    probe_key,
)
from dask_p2p.transports.buffers import (
    ByteBudget,
    Footprint,
    buffer_bytes,
    idle_bytes,
    packed_bytes,
    staging_bytes,
)
from dask_p2p.transports.pinned import PinnedTransport


class Ferry(Transport):
    name, kinds = "ferry", ("numpy",)
    handlers = footprint = read = close = None

    def __init__(self):
        self.options = options()

    def holder_obstacle(self, holder):
        return Obstacle("far", "it is far away") if holder == "far" else None


@pytest.mark.parametrize(
    ("holder", "kind", "dtype", "text"),
    [
        ("near", "numpy", "f8", None),
        ("far", "numpy", "f8", "it is far away"),
        ("far", "cupy", "f8", "ferry moves NumPy blocks, not cupy"),
        ("near", "numpy", object, "ferry moves bytes, not Python objects"),
        ("near", "numpy", [("a", "i1"), ("b", object)], "ferry moves bytes, not Python objects"),
    ],
    ids=str,
)
def test_what_a_transport_does_not_move_is_an_obstacle(monkeypatch, holder, kind, dtype, text):
    obstacle = Ferry().obstacle(holder, kind, np.dtype(dtype))
    assert (obstacle and obstacle.text) == text
    monkeypatch.setattr(Ferry, "moves_objects", True)
    obstacle = Ferry().obstacle(holder, kind, np.dtype(dtype))
    assert (obstacle is None) == (holder == "near")


@pytest.mark.parametrize("error", [TransferError("trouble"), TimeoutError()], ids=repr)
def test_a_probe_that_fails_says_so_and_leaves_nothing_open(error, monkeypatch):
    reading = MagicMock()
    reading.__iter__.return_value = [Region(0, 0, ((0, 1),)).mark_failed(error)]
    monkeypatch.setattr(Ferry, "read", lambda transport, requests, options: reading)
    with pytest.raises(TransferError, match=r"trouble|the worker's event loop did not respond"):
        Ferry().probe("there", "numpy")
    reading.close.assert_called_once()


class _Nothing(Reading):
    """Regions that nobody asks for."""

    __iter__ = close = None


@pytest.mark.parametrize(
    ("kind", "fast_axis", "shape"),
    [
        ("cupy", 0, (256, 16, 64)),  # rows of 1 KiB, along all of the axis
        ("cupy", 1, (16, 256, 64)),
        ("cupy", None, (16, 256, 64)),
        ("numpy", 0, (16, 256, 64)),  # a processor writes them item by item
    ],
)
def test_parts_for_gpus_keep_rows_of_the_output_whole(kind, fast_axis, shape):
    box = ((0, 256), (0, 256), (0, 64))
    request = Request("key", "holder", (256, 256, 64), np.dtype("f4"), kind, [box], fast_axis)
    reading = _Nothing([request], Footprint(2**20, 1))
    parts = [part.box for part in reading.parts()]
    assert {box_shape(part) for part in parts} == {shape}
    assert sum(map(box_size, parts)) == 256 * 256 * 64


@pytest.mark.parametrize(
    ("request_shape", "block", "part"),
    [
        ((256, 256, 64), (256, 512, 64), (256, 16, 64)),
        ((256, 4, 4096), (256, 4, 8192), (256, 4, 256)),  # not along axis 1: rows have gaps
        ((256, 256, 64), (256, 256, 128), (16, 256, 64)),  # too little would be left of rows
    ],
)
def test_parts_of_a_part_of_a_block_are_what_copy_engines_copy(request_shape, block, part):
    box = tuple((0, length) for length in request_shape)
    request = Request("key", "holder", block, np.dtype("f4"), "cupy", [box], 0)
    parts = [region.box for region in _Nothing([request], Footprint(2**20, 1)).parts()]
    assert {box_shape(box) for box in parts} == {part}
    strides = [4 * prod(block[axis + 1 :]) for axis in range(3)]
    assert engine_pitch(part, tuple(strides), 4) is not None


comm_footprint, ucx_footprint = CommTransport.footprint, UcxTransport.footprint


KIB, MIB, GIB = 2**10, 2**20, 2**30
KINDS = ("numpy", "cupy")


@given(
    limit_bytes=st.integers(16 * KIB, 4 * GIB),
    part_bytes=st.integers(1, 8 * GIB),
    order=st.sampled_from([None, *((transport.name, "comm") for transport in OWN)]),
    kind=st.sampled_from(KINDS),
)
def test_what_a_task_holds_is_within_the_limit(limit_bytes, part_bytes, order, kind):
    sizes = {"part_bytes": part_bytes, "ipc_staging_bytes": part_bytes}
    chosen = replace(options(), staging_limit_bytes=limit_bytes, transports=order, **sizes)
    unread = MOST_UNREAD if kind == "cupy" else 0
    slots = SLOTS * (IpcTransport.footprint(chosen, "cupy").part_bytes or 0)
    if kind != "cupy" or "ipc" not in chosen.order(kind):
        slots = 0
    comm, ucx = comm_footprint(chosen, kind), ucx_footprint(chosen, kind)
    on_device = 1 + unread if kind == "cupy" else 0
    assert slots + (comm.parts_in_flight + 1 + on_device) * comm.part_bytes <= limit_bytes
    assert slots + (ucx.parts_in_flight + 1 + unread) * buffer_bytes(ucx.part_bytes) <= limit_bytes
    pinned = PinnedTransport.footprint(chosen, kind)
    parts_held = pinned.parts_in_flight + 1 + (unread + 2 if kind == "cupy" else 0)
    assert slots + parts_held * buffer_bytes(pinned.part_bytes) <= limit_bytes
    cma = CmaTransport.footprint(chosen, "numpy")
    assert buffer_bytes(cma.part_bytes) <= limit_bytes
    assert cma.part_bytes <= GIB
    assert max(cma.part_bytes, comm.part_bytes, ucx.part_bytes) <= part_bytes
    for largest_bytes in (0, 100 * KIB, 100 * GIB):
        held_bytes = staging_bytes(chosen, kind, largest_bytes, 100 * GIB, 8)
        assert held_bytes <= limit_bytes
    assert packed_bytes(chosen, kind, 100, 100 * GIB) <= limit_bytes
    for transport in OWN:
        assert transport.footprint(chosen, kind).idle_bytes(chosen) <= limit_bytes
    assert idle_bytes(replace(chosen, transports=("comm",)), kind) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_limit_of_one_byte_leaves_parts_of_one(kind):
    chosen = replace(options(), staging_limit_bytes=1)
    assert comm_footprint(chosen, kind).part_bytes == 1
    ucx = ucx_footprint(chosen, kind)
    assert (ucx.part_bytes, ucx.parts_in_flight) == (512, 0), "one after another"
    ipc = IpcTransport.footprint(chosen, "cupy")
    assert ipc.part_bytes is None, "kernels read the other GPU's memory in place"


def test_two_that_look_at_the_same_time():
    both_look = threading.Barrier(2)

    class Watched(ByteBudget):
        @property
        def reserved_bytes(self):
            found_bytes = super().reserved_bytes
            with suppress(threading.BrokenBarrierError):
                both_look.wait(0.2)
            return found_bytes

    budget = Watched(100)
    with ThreadPoolExecutor(2) as threads:
        reservations = [threads.submit(budget.reserve, 60) for _ in range(2)]
    assert sorted(bool(future.result()) for future in reservations) == [False, True]


def test_blocks_are_made_once_and_few_are_kept():
    probes = Probes()
    first = probes.block(probe_key("numpy"))
    assert first.shape == (PROBE_BYTES,)
    assert probes.block(list(probe_key("numpy"))) is first
    for nbytes in (1, 2, 4):
        assert probes.block(probe_key("numpy", nbytes)).nbytes == nbytes
    assert probes.block(probe_key("numpy")) is not first
    probes.clear()


def test_all_that_may_be_asked_for_take_a_few_per_cent_of_the_memory():
    for memory_bytes in (2**26, 300 * 10**6, 2**31, 2**40, None):
        most_bytes = most_probe_bytes("numpy", memory_bytes)
        probes = Probes()
        block = probes.block(probe_key("numpy", most_bytes), memory_bytes)
        assert block.nbytes == most_bytes
        with pytest.raises(ValueError, match=f"at most {most_bytes} bytes"):
            probes.block(probe_key("numpy", 2 * most_bytes), memory_bytes)
        sizes_bytes = [2**n for n in range(41) if 2**n <= most_bytes]
        assert sum(sizes_bytes) < (memory_bytes or 2**31) / 15
    assert most_probe_bytes("numpy", 2**20) == PROBE_BYTES


@pytest.mark.parametrize("shift", [0, 1, 2, 256, 4096])
@pytest.mark.parametrize("kind", ["numpy", pytest.param("cupy", marks=pytest.mark.gpu)])
def test_changes_are_seen(kind, shift):
    xp = importlib.import_module(kind)
    good = Probes().block(probe_key(kind))
    assert isinstance(good, xp.ndarray)
    if shift == 0:
        check_probe(good)
        return
    with pytest.raises(TransferError, match="bytes of a probe arrived changed"):
        check_probe(xp.roll(good, shift))
    one = good.copy()
    one[shift] ^= 1
    with pytest.raises(TransferError, match="1 of 65536 bytes"):
        check_probe(one)


class Pigeon(Transport):
    name = "pigeon"
    kinds = ("numpy",)

    @classmethod
    def footprint(cls, options, kind):
        return Footprint(512 * MIB, 0, parts_packed=2, parts_idle=3, copies=5)

    handlers = obstacle = read = close = None


@pytest.fixture
def install(monkeypatch):
    """Give a function that installs a transport with another package."""

    def installed(name):
        points = [EntryPoint("pigeon", f"{__name__}:{name}", "dask_p2p.transports")]
        monkeypatch.setattr(transports, "entry_points", lambda group: points)
        config.transport_classes.cache_clear()

    yield installed
    config.transport_classes.cache_clear()


def test_it_can_be_named_and_comes_first(install):
    install("Pigeon")
    assert options().order("numpy") == ("pigeon", "cma", "comm")
    assert options().order("cupy") == ("ipc", "ucx", "pinned", "comm")
    with dask.config.set({"p2p.transports.order": ["pigeon"]}):
        assert options().order("cupy") == ("pigeon", "comm")


@pytest.mark.parametrize("name", ["NotThere", "MIB", "LoopbackHost"])
def test_an_entry_point_that_names_no_transport(install, name):
    install(name)
    with pytest.raises(ConfigError, match=rf"entry point pigeon .*:{name}, is no transport: "):
        checked_options()
