"""Requests that no reader sends: each gets an error for an answer, and changes nothing.

What Dask's protocol makes of a message is Dask's affair, pickles included. From there on the
handlers take plain values only, and run no code of anything else.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
import re
from types import SimpleNamespace

import numpy as np
import pytest
from distributed import LocalCluster
from distributed.comm import connect
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_p2p.backends.declared import dtype_text
from dask_p2p.config import options
from dask_p2p.engine.task import PLUGIN_NAME
from dask_p2p.interprocess import cuda_ipc
from dask_p2p.interprocess.segments import Segment
from dask_p2p.monitoring.records import RecordLog
from dask_p2p.plugins.context import DaskWorkerContext
from dask_p2p.plugins.scheduler import P2PSchedulerPlugin
from dask_p2p.plugins.worker import P2PPlugin
from dask_p2p.transports.in_place import ipc as ipc_module
from dask_p2p.transports.in_place.cma import CmaTransport
from dask_p2p.transports.in_place.ipc import IpcTransport
from dask_p2p.transports.in_place.reading import DirectoryOptions
from dask_p2p.transports.packed import ucx as ucx_module
from dask_p2p.transports.packed.comm import CommTransport
from dask_p2p.transports.packed.pinned import PinnedTransport
from dask_p2p.transports.packed.ucx import UcxTransport
from tests.faults.hostile import (
    BLOCKS,
    Bomb,
    are_good_blocks,
    garbage,
    is_good,
    is_good_read,
    is_good_send,
    is_number,
    is_refusal,
    numbers,
    requests,
    send_requests,
    spoiled_requests,
    to_pack,
    wanted_bytes,
    wire,
    with_checksum,
)
from tests.support import BOUND_S, with_section
from tests.transports.loopback import EventLoop, LoopbackHost
from tests.usage import usage

# Hypothesis makes an example's requests faster than as many examples: 2,000 in all, and 11,000 with
# --slow, which has five times as many examples.
REQUESTS_AN_EXAMPLE = 10
MOST_EXAMPLES = settings().max_examples
EXAMPLES = {
    "p2p_comm_read": MOST_EXAMPLES,
    "p2p_publish": MOST_EXAMPLES // 2,  # of ipc, and of cma
    "p2p_ucx_read": MOST_EXAMPLES,
    "p2p_pinned_read": MOST_EXAMPLES // 2,
    "p2p_peer": MOST_EXAMPLES // 4,  # of ipc, of cma, and of ucx
    "p2p_records": MOST_EXAMPLES // 2,  # of a worker, and of the scheduler
}


async def no_answers(**request):
    return {}


@pytest.fixture(scope="module")
def holder(tmp_path_factory):
    """A worker's side of both transports, without a worker. Nothing here may be unpickled."""

    def never(*args, **kwargs):
        Bomb.went_off.append("something was unpickled")
        raise AssertionError

    loop = EventLoop()
    host = LoopbackHost("holder", loop.loop, {}, tmp_path_factory.mktemp("holder"))
    host.blocks = dict(BLOCKS)
    chosen = with_section(options(), DirectoryOptions, retain_s=60.0)
    classes = (CommTransport, IpcTransport, CmaTransport, UcxTransport, PinnedTransport)
    transports = _, ipc, cma, ucx, pinned = [make(host, chosen) for make in classes]
    handlers = {op: of for transport in transports for op, of in transport.handlers().items()}
    directories = {transport.name: transport.directory for transport in (ipc, cma)}

    context = object.__new__(DaskWorkerContext)
    context.records, context.running = RecordLog(10), {}
    scheduler = P2PSchedulerPlugin()
    scheduler.scheduler = SimpleNamespace(
        plugins={PLUGIN_NAME: scheduler}, worker_plugins={}, workers={}, broadcast=no_answers
    )
    handlers["worker's p2p_records"] = context.new_records
    handlers["p2p_records"] = scheduler.records
    handlers["p2p_register"] = scheduler.register

    async def address_of(reader):
        return b"somewhere"

    sent = []

    def send(self):
        assert type(self.asked.dtype) is type(self._to.reader) is str
        assert (self.asked.left_s >= 0, type(self.asked.with_sums)) == (True, bool)
        (tag,) = self._to.tags
        assert 0 <= tag < 2**62
        sent.append(tag)

    def ask(op, requests):
        async def all_of_them():
            return [await handlers[op](**request) for request in requests]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pickle, "loads", never)
            patch.setattr(pickle, "Unpickler", never)
            return loop.run(all_of_them())

    with pytest.MonkeyPatch.context() as patch:
        place = cuda_ipc.IpcHandle("", "00", 1, 0, 1, 0)
        patch.setattr(cuda_ipc, "export", lambda block: place)
        patch.setattr(IpcTransport, "kinds", ("numpy",))  # which the blocks are here
        patch.setattr(ipc_module, "wait_until_written", lambda blocks, any_stream: None)
        # Nothing leaves this process.
        patch.setattr(ucx, "messenger", lambda: SimpleNamespace(address=b"here"))
        patch.setattr(ucx, "_address_of", address_of)
        patch.setattr(ucx_module.Outgoing, "send", send)
        Bomb.went_off.clear()
        yield SimpleNamespace(
            host=host,
            ask=ask,
            directories=directories,
            sent=sent,
            mapped=lambda: usage(pinned)["mapped"],
        )
    for transport in (ipc, cma, pinned):
        loop.run(transport.close())
    host.close()
    loop.close()


@pytest.fixture
def unchanged(holder):
    before = {key: block.tobytes() for key, block in BLOCKS.items()}
    yield
    assert holder.host.blocks == BLOCKS, "the very same blocks"
    assert {key: block.tobytes() for key, block in BLOCKS.items()} == before
    assert not any(map(len, holder.directories.values()))
    assert Bomb.went_off == []


def some(requests):
    return st.lists(requests, min_size=REQUESTS_AN_EXAMPLE, max_size=REQUESTS_AN_EXAMPLE)


@pytest.mark.usefixtures("unchanged")
def test_arguments_with_the_names_of_handlers_own(holder):
    ops = [f"p2p_{name}_{op}" for name in ("cma", "ipc") for op in ("peer", "publish")]
    ops.append("p2p_comm_read")
    ops += ["worker's p2p_records", "p2p_records", "p2p_register"]
    for op in (*ops, "p2p_ucx_peer", "p2p_ucx_read", "p2p_pinned_read"):
        for reply in holder.ask(op, [{"self": 1}, {"unknown": 1}, {"kwargs": {}}]):
            assert is_refusal(reply)


def wheres(segment):
    """Valid values of `where`, and checks of them, by handler."""
    name = segment.name

    def is_name(where):
        if type(where) not in (tuple, list) or list(map(type, where)) != list(map(type, name)):
            return False
        # A process has names by its threads, too, and may have a file open twice.
        other = name._replace(pid=where[2], fd=where[3])
        return tuple(where) == other and other.is_open()

    def is_mailbox(where):
        return (
            type(where) in (tuple, list)
            and len(where) == 3
            and type(where[0]) in (tuple, list)
            and len(where[0]) == 1
            and is_number(where[0][0], (int,), 0, 2**62 - 1)
            and type(where[1]) is str
            and len(where[1]) <= 10_000
            and is_number(where[2], (int,), 0, 2**31)
        )

    return {
        "p2p_comm_read": (None, lambda where: where is None),
        "p2p_ucx_read": (([2**62 - 1], "tcp://a:1", 2**31), is_mailbox),
        "p2p_pinned_read": (tuple(name), is_name),
    }


#: Words of the error, one at least, by the field that is wrong.
WORDS = {
    "blocks": "blocks|block|key|shape",
    "parts": "parts|block|box|where",
    "where": "where|tag|reader|closed|memory|kernel|pid_namespace|hosts",
}


def assert_refused(name, reply):
    assert is_refusal(reply), name
    for part in reply.get("parts", [reply]):
        if part["status"] == "error":
            assert re.search(WORDS.get(name, name), part["message"])


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize("op", ["p2p_comm_read", "p2p_ucx_read", "p2p_pinned_read"])
def test_reads_with_one_thing_wrong(holder, op):
    """Anywhere in the request. A refused request packs, sends and maps nothing."""
    segment = Segment.make(4096)
    where, is_good_where = wheres(segment)[op]
    good = {
        "blocks": [(("x", 0, 0), (6, 10))],
        "parts": [(0, ((0, 6), (0, 10)))],
        "dtype": "float64 <f8",
        "item_bytes": 8,
        "wait_s": 3600,
        "checksum": False,
        **({} if where is None else {"where": where}),
    }
    mapped = holder.mapped()
    for name, request in spoiled_requests(good):
        holder.sent.clear()
        (reply,) = holder.ask(op, [request])
        if reply == {"status": "ok", "parts": []}:
            assert len(request["parts"]) == 0
        elif is_good_read(request, is_good_where) and (
            op != "p2p_pinned_read" or wanted_bytes(request) <= 4096
        ):
            assert {answer["status"] for answer in reply["parts"]} == {"ok"}
            mapped = holder.mapped()
            segment.bytes[:] = 0
        else:
            assert_refused(name, reply)
            assert holder.sent == []
            assert holder.mapped() == mapped
            assert not segment.bytes.any()


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize("transport", ["ipc", "cma"])
def test_asking_to_publish_with_one_thing_wrong(holder, transport):
    directory = holder.directories[transport]
    for name, request in spoiled_requests({"blocks": [(("x", 0, 0), (6, 10))]}):
        (reply,) = holder.ask(f"p2p_{transport}_publish", [request])
        is_good = request.keys() == {"blocks"} and are_good_blocks(request["blocks"])
        if is_good and len(request["blocks"]) > 0:
            assert reply == {"status": "ok"}
            directory.withdraw(("x", 0, 0))
        else:
            assert_refused(name, reply)
            assert len(directory) == 0


@pytest.mark.usefixtures("unchanged")
@settings(max_examples=EXAMPLES["p2p_comm_read"])
@given(asked=some(requests()))
def test_regions(holder, asked):
    sent = [to_pack(request) for request in asked]
    for request, reply in zip(asked, holder.ask("p2p_comm_read", sent), strict=True):
        rest, good_sum = with_checksum(request, (False, True))
        if good_sum and is_good(rest, ("key", "box", "shape")):
            (answer,) = reply["parts"]
            assert ("checksum" in answer) == request.get("checksum", False)
            box = tuple(slice(*pair) for pair in request["box"])
            np.testing.assert_array_equal(answer["data"].data, BLOCKS[request["key"]][box])
        else:
            assert is_refusal(reply)


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize("transport", ["ipc", "cma"])
@settings(max_examples=EXAMPLES["p2p_publish"])
@given(asked=some(requests()))
def test_asking_to_publish(holder, transport, asked):
    directory = holder.directories[transport]
    for request in asked:
        request.pop("box", None)
    sent = [wire(request) for request in asked]
    for request, reply in zip(asked, holder.ask(f"p2p_{transport}_publish", sent), strict=True):
        if is_good(request, ("key", "shape")):
            assert reply == {"status": "ok"}
            directory.withdraw(request["key"])
        else:
            assert is_refusal(reply)
    assert len(directory) == 0, "what was refused was published"


@pytest.mark.usefixtures("unchanged")
@settings(max_examples=EXAMPLES["p2p_ucx_read"])
@given(asked=some(send_requests()))
def test_sends(holder, asked):
    sent = [wire(request) for request in asked]
    for request, reply in zip(asked, holder.ask("p2p_ucx_read", sent), strict=True):
        rest, good_sum = with_checksum(request, (False, True))
        if reply == {"status": "ok", "parts": []}:
            assert len(request["boxes"]) == 0
            continue
        block = BLOCKS[request["key"]] if good_sum and is_good_send(rest) else None
        if (
            block is not None
            and request["dtype"] == dtype_text(block.dtype)
            and request["item_bytes"] == block.dtype.itemsize
        ):
            assert [answer["status"] for answer in reply["parts"]] == ["ok"] * len(request["boxes"])
            assert {"checksum" in of for of in reply["parts"]} == {request.get("checksum", False)}
        else:
            assert is_refusal(reply)


@pytest.mark.usefixtures("unchanged")
@settings(max_examples=EXAMPLES["p2p_pinned_read"])
@given(asked=some(requests()), data=st.data())
def test_reads_into_memory(holder, asked, data):
    segment, sent = Segment.make(4096), []
    for request in asked:
        rest = {"where": tuple(segment.name), "wait_s": 1.0}
        rest |= {"dtype": "float64 <f8", "item_bytes": 8}
        for field in data.draw(st.lists(st.sampled_from(sorted(rest)), max_size=1)):
            rest[field] = data.draw(garbage)
        sent.append({**wire(request), **rest})
    for request, reply in zip(sent, holder.ask("p2p_pinned_read", sent), strict=True):
        if reply == {"status": "ok", "parts": []}:
            assert len(request["parts"]) == 0
        elif not is_refusal(reply):
            (answer,), (part,), (block,) = reply["parts"], request["parts"], request["blocks"]
            assert answer["status"] == "ok"
            assert ("checksum" in answer) == request.get("checksum", False)
            assert BLOCKS[block[0]].dtype == float
            assert all(type(number) is int for pair in part[1] for number in pair)


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize(
    ("op", "answer"),
    [("p2p_ipc_peer", "peer"), ("p2p_cma_peer", "peer"), ("p2p_ucx_peer", "address")],
)
@settings(max_examples=EXAMPLES["p2p_peer"])
@given(asked=some(st.dictionaries(st.text(max_size=5), garbage, max_size=2)))
def test_peers(holder, op, answer, asked):
    for request, reply in zip(asked, holder.ask(op, asked), strict=True):
        if request:
            assert is_refusal(reply)
        else:
            assert set(reply) == {"status", answer}


RECORDS = {
    "worker's p2p_records": {"since": lambda value: is_number(value, (int,), 0, 2**62)},
    "p2p_records": {
        "n": lambda value: value is None or is_number(value, (int,), 0, 2**62),
    },
    "p2p_register": {},
}


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize("op", RECORDS)
@settings(max_examples=EXAMPLES["p2p_records"])
@given(data=st.data())
def test_records_and_registrations(holder, op, data):
    names = st.sampled_from([*RECORDS[op], "more"]) | st.text(max_size=3)
    asked = data.draw(some(st.dictionaries(names, numbers | garbage, max_size=2)))
    for request, reply in zip(asked, holder.ask(op, asked), strict=True):
        known = request.keys() <= RECORDS[op].keys()
        if known and all(RECORDS[op][name](value) for name, value in request.items()):
            assert reply["status"] == "ok"
        else:
            assert is_refusal(reply)


def test_a_raw_client_of_a_worker(caplog):
    """The same over a connection: the worker answers each request, and logs nothing."""
    good = {"key": ("x", 0, 0), "box": ((0, 1), (0, 2)), "shape": (6, 10)}
    wrong = [
        {},
        *({field: good[field]} for field in good),
        *({**good, field: None} for field in good),
        *({**good, field: "0"} for field in good),
        *({**good, field: -1} for field in good),
        *({**good, field: float("nan")} for field in good),
        *({**good, field: [[[0]]]} for field in good),
        *({**good, field: {"a": 1}} for field in good),
        *({**good, field: b"\x80\x04N."} for field in good),
        *({**good, "box": ((0, end), (0, 1))} for end in (7, 2**40, -1, 0.5, "1", None)),
        {**good, "shape": (10, 6)},
        {**good, "key": ("x", 1, 0)},
        {**good, "more": 1},
    ]

    async def ask(comm, op, request):
        await comm.write({"op": op, "reply": True, **request})
        return await asyncio.wait_for(comm.read(), BOUND_S)

    async def main():
        async with LocalCluster(
            n_workers=1, processes=False, protocol="tcp://", dashboard_address=":0",
            asynchronous=True,
        ) as cluster:  # fmt: skip
            (worker,) = cluster.workers.values()
            await worker.plugin_add(plugin=P2PPlugin(), name=PLUGIN_NAME)
            worker.data["x", 0, 0] = BLOCKS["x", 0, 0]
            plugin = P2PSchedulerPlugin()
            await cluster.scheduler.register_scheduler_plugin(
                plugin=pickle.dumps(plugin), name=plugin.name, idempotent=True
            )
            comm, to_scheduler = [
                await connect(server.address) for server in (worker, cluster.scheduler)
            ]
            for request in wrong:
                assert is_refusal(await ask(comm, "p2p_comm_read", to_pack(request))), request
                request = wire(request)
                for transport in ("ipc", "cma"):
                    assert is_refusal(await ask(comm, f"p2p_{transport}_publish", request)), request
                    if request:
                        reply = await ask(comm, f"p2p_{transport}_peer", request)
                        assert is_refusal(reply), request
                if request:
                    assert is_refusal(await ask(comm, "p2p_records", request)), request
                    for op in ("p2p_records", "p2p_register"):
                        assert is_refusal(await ask(to_scheduler, op, request)), (op, request)
            for since in ("0", -1, None, 0.5, b"0"):
                assert is_refusal(await ask(comm, "p2p_records", {"since": since})), since
            reply = await ask(comm, "p2p_comm_read", to_pack(good))
            np.testing.assert_array_equal(reply["parts"][0]["data"], [[0.0, 1.0]])
            assert list(worker.data) == [("x", 0, 0)]
            await comm.close()
            await to_scheduler.close()

    with caplog.at_level(logging.WARNING):
        asyncio.run(main())
    assert [r.getMessage() for r in caplog.records if "p2p" in r.getMessage()] == []
