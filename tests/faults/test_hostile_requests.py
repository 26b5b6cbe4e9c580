"""Requests that no reader sends: each gets an error for an answer, and changes nothing.

What Dask's protocol makes of a message is Dask's affair, pickles included. From there on the
handlers take plain values only, and run no code of anything else.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
from types import SimpleNamespace

import numpy as np
import pytest
from distributed import LocalCluster
from distributed.comm import connect
from distributed.protocol import Serialized, serialize
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_p2p.config import options
from dask_p2p.layout import box_slices
from dask_p2p.task import PLUGIN_NAME
from dask_p2p.transports import cuda_ipc
from dask_p2p.transports import ipc as ipc_module
from dask_p2p.transports import ucx as ucx_module
from dask_p2p.transports.cma import CmaTransport
from dask_p2p.transports.comm import CommTransport
from dask_p2p.transports.directory import DirectoryOptions
from dask_p2p.transports.ipc import IpcTransport
from dask_p2p.transports.pinned import PinnedTransport
from dask_p2p.transports.replies import find_block, refuse
from dask_p2p.transports.segments import Segment
from dask_p2p.transports.ucx import UcxTransport
from dask_p2p.worker import P2PPlugin
from tests.support import with_section
from tests.transports.loopback import EventLoop, LoopbackHost

# Hypothesis makes an example's requests faster than as many examples: 2,000 in all, and 11,000 with
# --slow, which has five times as many examples.
REQUESTS_AN_EXAMPLE = 10
MOST_EXAMPLES = settings().max_examples
EXAMPLES = {
    "p2p_comm_read": MOST_EXAMPLES,
    "p2p_post": MOST_EXAMPLES // 2,  # of ipc, and of cma
    "p2p_ucx_send": MOST_EXAMPLES,
    "p2p_pinned_read": MOST_EXAMPLES // 2,
    "p2p_peer": MOST_EXAMPLES // 4,  # of ipc, of cma, and of ucx
}

BLOCKS = {
    ("x", 0, 0): np.arange(60.0).reshape(6, 10),
    ("x", 1): np.arange(5, dtype="i2"),
    "0-d": np.array(7.5),
    ("empty", 0): np.zeros((0, 3)),
    3: np.arange(4).reshape(2, 2),
}


class Bomb:
    """Any use of it is noted."""

    went_off: list[str] = []  # noqa: RUF012  # one list for all

    def _note(self, *args, **kwargs):
        self.went_off.append("used")
        raise RuntimeError("bomb")

    __hash__ = __eq__ = __index__ = __int__ = __len__ = __iter__ = __repr__ = __str__ = _note
    __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __getitem__ = __reduce__ = _note


class Fuse:
    """Unpickling it is noted."""

    def __reduce__(self):
        return (Bomb.went_off.append, ("unpickled",))


def deep(levels):
    value = ()
    for _ in range(levels):
        value = (value,)
    return value


numbers = (
    st.integers()
    | st.integers(-3, 12)
    | st.sampled_from([2**31, 2**63, -(2**63), 10**400])
    | st.floats()
    | st.booleans()
    | st.sampled_from([np.int64(1), np.float64(2), "1", b"2", None])
)
atoms = (
    numbers
    | st.text(max_size=8)
    | st.binary(max_size=8)
    | st.builds(Bomb)
    | st.sampled_from(
        [
            pickle.dumps(Fuse()),
            Serialized(*serialize(Fuse(), serializers=["pickle"])),
            bytearray(b"x"),
            np.arange(3),
            slice(None),
            Ellipsis,
            {1, 2},
            deep(50),
            (0,) * 5000,
        ]
    )
)
garbage = st.recursive(
    atoms,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
    max_leaves=6,
)


@st.composite
def requests(draw):
    """A good request with something wrong about it, mostly; now and then a good one."""
    key = draw(st.sampled_from(sorted(BLOCKS, key=str)))
    shape = BLOCKS[key].shape
    box = []
    for length in shape:
        stop = draw(st.integers(0, length))
        box.append((draw(st.integers(0, stop)), stop))
    request = {"key": key, "box": tuple(box), "shape": shape}
    if draw(st.integers(0, 3)) == 0:
        request["checksum"] = draw(st.sampled_from([True, False, "crc32", "mixed64"]) | garbage)
    for _ in range(draw(st.integers(0, 2))):
        field = draw(st.sampled_from(sorted(request) or ["key"]))
        how = draw(st.sampled_from(["garbage", "garbage", "missing", "unknown", "inside"]))
        if how == "garbage":
            request[field] = draw(garbage)
        elif how == "missing":
            request.pop(field, None)
        elif how == "unknown":
            request[draw(st.text(max_size=5))] = draw(garbage)
        elif isinstance(request.get(field), (tuple, list)) and request[field]:
            inside = list(request[field])
            at = draw(st.integers(0, len(inside) - 1))
            if isinstance(inside[at], tuple) and inside[at] and draw(st.booleans()):
                pair = list(inside[at])
                pair[draw(st.integers(0, len(pair) - 1))] = draw(numbers)
                inside[at] = draw(st.sampled_from([tuple, list]))(pair)
            else:
                inside[at] = draw(numbers | garbage)
            request[field] = draw(st.sampled_from([tuple, list]))(inside)
    return request


def wire(request):
    """Return a request about one block as readers send it: for several blocks, and their parts."""
    rest = {k: v for k, v in request.items() if k not in ("key", "shape", "box", "boxes")}
    of_block = tuple(request[name] for name in ("key", "shape") if name in request)
    if of_block:
        rest["blocks"] = [of_block]
    if "box" in request:
        rest["parts"] = [(0, request["box"])]
    elif type(boxes := request.get("boxes")) in (tuple, list):
        rest["parts"] = type(boxes)([(0, box) for box in boxes])
    elif "boxes" in request:
        rest["parts"] = boxes
    return rest


def is_key(value):
    if type(value) is tuple:
        return all(type(part) in (str, int, float) for part in value)
    return type(value) in (str, int, float)


def whole(values):
    return type(values) in (tuple, list) and all(type(value) is int for value in values)


def is_good(request, fields):
    """Say what is a good request, in other words than the product's."""
    if set(request) != set(fields) or not is_key(request["key"]) or request["key"] not in BLOCKS:
        return False
    shape = BLOCKS[request["key"]].shape
    if not whole(request["shape"]) or tuple(request["shape"]) != shape:
        return False
    if "box" not in fields:
        return True
    box = request["box"]
    if type(box) not in (tuple, list) or len(box) != len(shape):
        return False
    return all(
        whole(pair) and len(pair) == 2 and pair[0] in range(pair[1] + 1) and pair[1] <= length
        for pair, length in zip(box, shape, strict=True)
    )


def is_refusal(reply):
    """A short text and nothing else, but for how much was sent before."""
    more = ("block", "sent", "nbytes", "checksums")
    assert all(type(reply.get(name, 0)) in (int, list) for name in more)
    reply = {name: said for name, said in reply.items() if name not in more}
    if "parts" in reply:  # it is said of each
        return all(map(is_refusal, reply["parts"])) and reply["parts"] != []
    if reply == {"status": "missing"}:
        return True
    return (
        set(reply) == {"status", "message"}
        and reply["status"] in ("error", "mismatch", "unsuitable")
        and type(reply["message"]) is str
        and len(reply["message"]) < 1000
    )


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

    async def address_of(reader):
        return b"somewhere"

    def send(self, blocks, parts):
        outbox = self._outbox
        assert (type(self._dtype), outbox._ahead > 0, outbox._timeout_s >= 0) == (str, True, True)
        assert 0 <= outbox._tag < 2**64
        assert self._algorithm in (None, "crc32", "mixed64")
        for number, (key, shape) in enumerate(blocks):
            try:
                block = find_block(host, key, shape)
            except Exception as exc:
                return {**refuse(exc), "block": number}
            for _, box in parts:
                block[box_slices(box)]  # it lies in it
        return {}

    def ask(op, requests):
        async def all_of_them():
            return [await handlers[op](**request) for request in requests]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pickle, "loads", never)
            patch.setattr(pickle, "Unpickler", never)
            return loop.run(all_of_them())

    with pytest.MonkeyPatch.context() as patch:
        place = cuda_ipc.Place("", "00", 1, 0, 1, 0)
        patch.setattr(cuda_ipc, "export", lambda block: place)
        patch.setattr(ipc_module, "wait_until_written", lambda blocks, any_stream: None)
        # Nothing leaves this process.
        patch.setattr(ucx, "messenger", lambda: SimpleNamespace(address=b"here"))
        patch.setattr(ucx, "_address_of", address_of)
        patch.setattr(ucx_module.Sending, "run", send)
        Bomb.went_off.clear()
        yield SimpleNamespace(host=host, ask=ask, directories=directories, loop=loop)
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


def with_checksum(request, choices):
    """Take the checksum out of a request; say whether it may be in there."""
    rest = {name: value for name, value in request.items() if name != "checksum"}
    said = request.get("checksum", choices[0])
    return rest, any(type(said) is type(choice) and said == choice for choice in choices)


@pytest.mark.usefixtures("unchanged")
def test_arguments_with_the_names_of_handlers_own(holder):
    ops = [f"p2p_{name}" for name in ("comm_read", "cma_peer", "cma_post", "ipc_peer", "ipc_post")]
    for op in (*ops, "p2p_ucx_peer", "p2p_ucx_send", "p2p_pinned_read"):
        for reply in holder.ask(op, [{"self": 1}, {"unknown": 1}, {"kwargs": {}}]):
            assert is_refusal(reply)


@pytest.mark.usefixtures("unchanged")
@settings(max_examples=EXAMPLES["p2p_comm_read"])
@given(asked=some(requests()))
def test_regions(holder, asked):
    sent = [wire(request) for request in asked]
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
@settings(max_examples=EXAMPLES["p2p_post"])
@given(asked=some(requests()))
def test_posts(holder, transport, asked):
    directory = holder.directories[transport]
    for request in asked:
        request.pop("box", None)
    sent = [wire(request) for request in asked]
    for request, reply in zip(asked, holder.ask(f"p2p_{transport}_post", sent), strict=True):
        if is_good(request, ("key", "shape")):
            assert reply == {"status": "ok"}
            directory.withdraw(request["key"])
        else:
            assert is_refusal(reply)
    assert len(directory) == 0, "what was refused was published"


@st.composite
def send_requests(draw):
    """The same for several boxes and what else goes with them."""
    request = draw(requests())
    if "box" in request:
        box = request.pop("box")
        boxes = {"one": [box], "two": [box, box], "none": [], "tuple": (box,)}
        how = draw(st.sampled_from([*boxes, "garbage"]))  # by name: values may be bombs
        request["boxes"] = boxes[how] if how in boxes else draw(garbage)
    rest = {"dtype": "float64 <f8", "tag": 7, "reader": "tcp://a:1", "ahead": 2, "wait_s": 1.0}
    rest["closed"] = 0
    for field in draw(st.lists(st.sampled_from(sorted(rest)), max_size=1)):
        rest[field] = draw(garbage)
    return {**request, **rest}


def is_good_send(request):
    fields = ("key", "shape", "dtype", "tag", "reader", "closed", "ahead", "wait_s", "boxes")
    if set(request) != set(fields) or type(request["boxes"]) not in (tuple, list):
        return False
    of_block = {"key": request["key"], "shape": request["shape"]}
    return (
        is_good(of_block, ("key", "shape"))
        and all(
            is_good({**of_block, "box": box}, ("key", "shape", "box")) for box in request["boxes"]
        )
        and type(request["dtype"]) is type(request["reader"]) is str
        and type(request["tag"]) is type(request["ahead"]) is type(request["closed"]) is int
        and request["tag"] in range(2**64 - len(request["boxes"]))
        and request["ahead"] in range(1, 65)
        and request["closed"] in range(2**31 + 1)
        and type(request["wait_s"]) in (int, float)
        and 0 <= request["wait_s"] <= 3600
    )


@pytest.mark.usefixtures("unchanged")
@settings(max_examples=EXAMPLES["p2p_ucx_send"])
@given(asked=some(send_requests()))
def test_sends(holder, asked):
    sent = [wire(request) for request in asked]
    for request, reply in zip(asked, holder.ask("p2p_ucx_send", sent), strict=True):
        rest, good_sum = with_checksum(request, (None, "crc32", "mixed64"))
        if good_sum and is_good_send(rest):
            asked = request.get("checksum") is not None
            words = {"status", "nbytes", "sent"} | ({"checksums"} if asked else set())
            assert set(reply) == words
            assert reply["status"] == "ok"
        else:
            assert is_refusal(reply)


@pytest.mark.usefixtures("unchanged")
@settings(max_examples=EXAMPLES["p2p_pinned_read"])
@given(asked=some(requests()), data=st.data())
def test_reads_into_memory(holder, asked, data):
    segment, sent = Segment.make(4096), []
    for request in asked:
        rest = {"memory": tuple(segment.name), "places": [64], "inodes": [], "reader": "tcp://a:1"}
        rest["dtype"] = "float64 <f8"
        for field in data.draw(st.lists(st.sampled_from(sorted(rest)), max_size=1)):
            rest[field] = data.draw(garbage)
        sent.append({**wire(request), **rest})
    for request, reply in zip(sent, holder.ask("p2p_pinned_read", sent), strict=True):
        if reply == {"status": "ok", "parts": []}:
            assert len(request["parts"]) == len(request["places"]) == 0
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


@pytest.mark.parametrize(
    "change",
    [
        {"box": (("0", "1"), (0, 1))},
        {"box": ((0.0, 1.5), (0, 1))},
        {"box": ((False, True), (0, 1))},
        {"box": ["01", "01"]},
        {"box": ((-1, 1), (0, 1))},
        {"box": ((0, 2**70), (0, 1))},
        {"box": ((0, 1),)},
        {"box": ((0, 1),) * 100_000},
        {"box": ((0, 1, 2), (0, 1))},
        {"shape": (6.0, 10.0)},
        {"shape": (6, True)},
        {"shape": (6, 10, 1)},
        {"shape": "6"},
        {"shape": (10**4000,) * 64},
        {"key": ["x", 0, 0]},
        {"key": {"x": 0}},
        {"key": deep(50)},
        {"key": deep(100_000)},
        {"key": (0,) * 100_000},
        {"unheard-of": 1},
    ],
    ids=lambda change: next(iter(change)),
)
@pytest.mark.usefixtures("unchanged")
def test_what_is_nearly_right(holder, change):
    good = {"key": ("x", 0, 0), "box": ((0, 1), (0, 1)), "shape": (6, 10)}
    assert holder.ask("p2p_comm_read", [wire(good)])[0]["parts"][0]["status"] == "ok"
    (reply,) = holder.ask("p2p_comm_read", [wire({**good, **change})])
    assert is_refusal(reply)
    assert reply != {"status": "missing"}, "it was not even looked for"


@pytest.mark.usefixtures("unchanged")
@settings(max_examples=30)
@given(asked=some(st.tuples(st.sampled_from(["blocks", "parts"]), garbage)))
def test_blocks_and_parts_that_are_garbage(holder, asked):
    good = wire({"key": ("x", 0, 0), "box": ((0, 1), (0, 1)), "shape": (6, 10)})
    sent = [{**good, field: value} for field, value in asked]
    for request, reply in zip(sent, holder.ask("p2p_comm_read", sent), strict=True):
        nothing = type(request["parts"]) in (tuple, list) and len(request["parts"]) == 0
        assert is_refusal(reply) or (nothing and reply == {"status": "ok", "parts": []})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"key": ["x", 0, 0]}, "key: expected"),
        ({"shape": "66"}, "shape: expected"),
        ({"boxes": [((0, 1), (0, 11))]}, "does not lie in"),
        ({"dtype": b"float64 <f8"}, "dtype: expected a short text"),
        ({"tag": 2**64 - 2}, "tag: expected"),
        ({"reader": b"tcp://a:1"}, "reader: expected a short text"),
        ({"closed": -1}, "closed: expected"),
        ({"ahead": 65}, "ahead: expected 1 to 64"),
        ({"wait_s": 3601}, "wait_s: expected"),
        ({"checksum": "md5"}, "checksum: expected one of"),
        ({"unheard-of": 1}, "unknown arguments"),
    ],
    ids=lambda change: next(iter(change)),
)
@pytest.mark.usefixtures("unchanged")
def test_sends_that_are_nearly_right(holder, change, words):
    good = {"key": ("x", 0, 0), "boxes": [((0, 1), (0, 1))] * 2, "shape": (6, 10)}
    good |= {"dtype": "float64 <f8", "tag": 2**64 - 3, "reader": "tcp://a:1", "ahead": 64}
    good |= {"closed": 2**31, "wait_s": 3600, "checksum": "crc32"}
    assert holder.ask("p2p_ucx_send", [wire(good)])[0]["status"] == "ok"
    (reply,) = holder.ask("p2p_ucx_send", [wire({**good, **change})])
    assert is_refusal(reply)
    assert words in reply["message"]


def test_a_raw_client_of_a_worker(caplog):
    """The same over a connection: the worker answers each, says nothing of it in its log."""
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
        return await asyncio.wait_for(comm.read(), 10)

    async def main():
        async with LocalCluster(
            n_workers=1, processes=False, protocol="tcp://", dashboard_address=":0",
            asynchronous=True,
        ) as cluster:  # fmt: skip
            (worker,) = cluster.workers.values()
            await worker.plugin_add(plugin=P2PPlugin(), name=PLUGIN_NAME)
            worker.data["x", 0, 0] = BLOCKS["x", 0, 0]
            comm = await connect(worker.address)
            for request in map(wire, wrong):
                assert is_refusal(await ask(comm, "p2p_comm_read", request)), request
                for transport in ("ipc", "cma"):
                    assert is_refusal(await ask(comm, f"p2p_{transport}_post", request)), request
                    if request:
                        said = await ask(comm, f"p2p_{transport}_peer", request)
                        assert is_refusal(said), request
            reply = await ask(comm, "p2p_comm_read", wire(good))
            np.testing.assert_array_equal(reply["parts"][0]["data"], [[0.0, 1.0]])
            assert list(worker.data) == [("x", 0, 0)]
            await comm.close()

    with caplog.at_level(logging.WARNING):
        asyncio.run(main())
    assert [r.getMessage() for r in caplog.records if "p2p" in r.getMessage()] == []
