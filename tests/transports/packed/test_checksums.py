"""Flipped bits between two workers: with checksums each is found, without them none is."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from distributed.protocol import to_serialize

from dask_p2p.config import options
from dask_p2p.errors import TransferError
from dask_p2p.interprocess.messenger import Messenger
from dask_p2p.transports.packed.comm import CommTransport
from dask_p2p.transports.packed.ucx import UcxOptions, UcxTransport
from tests.faults.faulty import flipped
from tests.support import BOUND_S, with_section
from tests.transports.packed.conformance import PackedConformance
from tests.transports.reading import open_block

KEY = ("x", 0, 0)
BLOCK = np.random.default_rng(0).integers(0, 2**63, (50, 40)).view("f8")
BOX = ((3, 47), (5, 38))
REGION = BLOCK[3:47, 5:38]
BITS = 8 * REGION.nbytes
POSITIONS = [
    *(0, 1, 7, 8, 63, 64, BITS // 2 - 1, BITS // 2, BITS - 64, BITS - 2, BITS - 1),
    *map(int, np.random.default_rng(1).integers(0, BITS, 200)),
]


@pytest.fixture(params=[CommTransport, UcxTransport], ids=lambda made: made.name)
def transport(request):
    return request.param


class TestWithSums(PackedConformance):
    options = replace(options(), checksum=True)


@pytest.fixture
def link(transport, setup, monkeypatch):
    """A reader and a holder; `link.change` is done to all data on their way."""
    there = setup.host
    there.blocks[KEY] = BLOCK
    link = SimpleNamespace(
        name=transport.name, reader=setup.reader, holder=there, change=lambda array: array
    )
    if link.name == "comm":
        serve = there.handlers["p2p_comm_read"]

        async def changed(**kwargs):
            reply = await serve(**kwargs)
            for answer in reply.get("parts", ()):
                if answer["status"] == "ok":
                    answer["data"] = to_serialize(link.change(answer["data"].data))
            return reply

        there.handlers["p2p_comm_read"] = changed
    else:
        send = Messenger.send
        monkeypatch.setattr(
            Messenger,
            "send",
            lambda self, address, array, tag, **_: send(self, address, link.change(array), tag),
        )
    return link


def read(link, checksum, boxes=(BOX,), part_bytes=2**24):
    chosen = replace(options(), checksum=checksum, request_timeout_s=60.0)
    chosen = with_section(chosen, UcxOptions, host_part_bytes=part_bytes)
    of = "holder", KEY, BLOCK.shape, BLOCK.dtype, "numpy"
    remote = open_block(link.reader, *of, boxes, chosen)
    try:
        regions = [remote.request() for _ in boxes]
        regions = [np.array(region.result(BOUND_S)) for region in regions]
        remote.confirm()
        return regions
    finally:
        remote.close()


def test_every_flipped_bit_is_found(link):
    np.testing.assert_array_equal(read(link, True)[0], REGION)
    for bit in POSITIONS:
        link.change = lambda array, bit=bit: flipped(array, bit)
        with pytest.raises(TransferError, match="arrived changed") as caught:
            read(link, True)
        said = str(caught.value)
        for named in (str(BOX), f"block {KEY!r}", "holder", "crc32"):
            assert named in said
    link.change = lambda array: array
    np.testing.assert_array_equal(read(link, True)[0], REGION)


def test_without_checksums_no_flipped_bit_is_found(link):
    for bit in (0, BITS // 2, BITS - 1):
        link.change = lambda array, bit=bit: flipped(array, bit)
        (got,) = read(link, False)
        np.testing.assert_array_equal(got, flipped(np.ascontiguousarray(REGION), bit))


def test_the_part_that_is_flipped_is_named(link):
    rows = [((i, i + 1), (0, 40)) for i in range(10)]
    counter = iter(range(10))
    link.change = lambda array: flipped(array, 5) if next(counter) == 7 else array
    with pytest.raises(TransferError, match=r"\(\((\d), \d+\), \(0, 40\)\) of block .* arrived"):
        read(link, True, rows, part_bytes=384)  # a message for each


@pytest.mark.parametrize(
    "said", [None, 5, "crc32", [], [-1], ["crc32", -1], ["crc32", True], ["md5", 1]], ids=str
)
def test_a_holder_that_sends_no_checksum(link, said):
    op = f"p2p_{link.name}_read"
    serve = link.holder.handlers[op]

    async def silent(**kwargs):
        reply = await serve(**kwargs)
        reply["parts"][0]["checksum"] = said
        return reply

    link.holder.handlers[op] = silent
    with pytest.raises(TransferError, match=r"holder sent no checksums? of"):
        read(link, True)


def test_a_sum_is_asked_for_by_yes_or_no(link, loop):
    request = {"blocks": [(KEY, BLOCK.shape)], "parts": [(0, BOX)], "dtype": "float64 <f8"}
    request |= {"item_bytes": 8, "wait_s": 60.0, "checksum": "md5"}
    reply = loop.run(link.holder.handlers[f"p2p_{link.name}_read"](**request))
    assert reply["status"] == "error"
    assert "checksum: expected" in reply["message"]
