"""Values and requests that no reader sends, and an independent check of good requests."""

from __future__ import annotations

import pickle
from math import prod

import numpy as np
from distributed.protocol import Serialized, serialize
from hypothesis import strategies as st

from dask_p2p.backends.declared import dtype_text

BLOCKS = {
    ("x", 0, 0): np.arange(60.0).reshape(6, 10),
    ("x", 1): np.arange(5, dtype="i2"),
    "0-d": np.array(7.5),
    ("empty", 0): np.zeros((0, 3)),
    3: np.arange(4).reshape(2, 2),
}


class Bomb:
    """An object that records each use."""

    went_off: list[str] = []  # noqa: RUF012  # one list for all

    def _note(self, *args, **kwargs):
        self.went_off.append("used")
        raise RuntimeError("bomb")

    __hash__ = __eq__ = __index__ = __int__ = __len__ = __iter__ = __repr__ = __str__ = _note
    __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __getitem__ = __reduce__ = _note


class Fuse:
    """An object that records its unpickling."""

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


#: What one value of a good request is replaced by, beside values that are like it.
NEAR = [
    *(None, True, 0, 1, -1, 7, 2**31 + 1, 2**62, 2**63, 10**400, 0.5, 1.0),
    *(float("nan"), float("inf"), "", "1", "float32 <f4", b"1", (), [], {}, {"a": 1}, set()),
    *(np.int64(1), np.float64(1), np.arange(3), slice(None), Bomb(), pickle.dumps(Fuse())),
    *(["x", 0, 0], deep(50), deep(100_000), (0,) * 100_000, ((0, 1), (0, 1.5)), "x" * 10_001),
]


def spoiled(value):
    """Copies of a value with another value at one position, at any depth."""
    yield from NEAR
    if type(value) is str:
        yield value.encode()
    elif type(value) in (int, float):
        yield from (value + 1, value - 1, value + 0.5, str(value))
    elif type(value) in (tuple, list):
        yield from (value[:-1], type(value)([*value, 0]))
        yield from (value * times for times in (2, 9, 100_000))
        yield list(value) if type(value) is tuple else tuple(value)
        yield dict(enumerate(value))
        for at, part in enumerate(value):
            for other in spoiled(part):
                yield type(value)([*value[:at], other, *value[at + 1 :]])


def spoiled_requests(good):
    """Copies of a request, each with one changed field, and the field's name."""
    yield "more", good | {"more": 1}
    for name, value in good.items():
        yield name, {other: good[other] for other in good if other != name}
        for other in spoiled(value):
            yield name, good | {name: other}


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


def to_pack(request):
    """The same for transports whose holder packs; what is about the block's values is right."""
    dtype = {"dtype": "float64 <f8", "item_bytes": 8, "wait_s": 10}
    if is_key(key := request.get("key")) and (block := BLOCKS.get(key)) is not None:
        dtype |= {"dtype": dtype_text(block.dtype), "item_bytes": block.dtype.itemsize}
    return {**dtype, **wire(request)}


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
    if "tag" in rest:
        rest["tag"] = [rest["tag"]]
    where = [rest.pop(name) for name in ("tag", "reader", "closed") if name in rest]
    return rest | ({"where": tuple(where)} if where else {})


def is_key(value):
    if type(value) is tuple:
        return all(type(part) in (str, int, float) for part in value)
    return type(value) in (str, int, float)


def whole(values):
    return type(values) in (tuple, list) and all(type(value) is int for value in values)


def is_good(request, fields):
    """Return whether a request is good, by rules written independently of the package."""
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
    """Return whether a reply is a short text and nothing else."""
    if "parts" in reply:  # a reply for each part
        return all(map(is_refusal, reply["parts"])) and reply["parts"] != []
    if reply == {"status": "missing"}:
        return True
    return (
        set(reply) == {"status", "message"}
        and reply["status"] in ("error", "mismatch", "unsuitable")
        and type(reply["message"]) is str
        and len(reply["message"]) < 1000
    )


def with_checksum(request, choices):
    """Return a request without its checksum, and whether the checksum is permitted."""
    rest = {name: value for name, value in request.items() if name != "checksum"}
    checksum = request.get("checksum", choices[0])
    return rest, any(type(checksum) is type(choice) and checksum == choice for choice in choices)


@st.composite
def send_requests(draw):
    """The same for several boxes and what else goes with them."""
    request = draw(requests())
    if "box" in request:
        box = request.pop("box")
        boxes = {"one": [box], "two": [box, box], "none": [], "tuple": (box,)}
        how = draw(st.sampled_from([*boxes, "garbage"]))  # by name: values may be bombs
        request["boxes"] = boxes[how] if how in boxes else draw(garbage)
    rest = {"tag": 7, "reader": "tcp://a:1", "closed": 0, "wait_s": 1.0}
    rest |= {"dtype": "float64 <f8", "item_bytes": 8}
    for field in draw(st.lists(st.sampled_from(sorted(rest)), max_size=1)):
        rest[field] = draw(garbage)
    return {**request, **rest}


def is_good_send(request):
    fields = ("key", "shape", "dtype", "item_bytes", "tag", "reader", "closed", "wait_s", "boxes")
    if set(request) != set(fields) or type(request["boxes"]) not in (tuple, list):
        return False
    of_block = {"key": request["key"], "shape": request["shape"]}
    return (
        is_good(of_block, ("key", "shape"))
        and all(
            is_good({**of_block, "box": box}, ("key", "shape", "box")) for box in request["boxes"]
        )
        and type(request["dtype"]) is type(request["reader"]) is str
        and type(request["tag"]) is type(request["item_bytes"]) is type(request["closed"]) is int
        and request["tag"] in range(2**62)
        and request["item_bytes"] in range(2**31 + 1)
        and request["closed"] in range(2**31 + 1)
        and type(request["wait_s"]) in (int, float)
        and 0 <= request["wait_s"] <= 3600
    )


def is_number(value, kinds, least, most):
    return type(value) in kinds and least <= value <= most


def are_good_blocks(blocks):
    return (
        type(blocks) in (tuple, list)
        and len(blocks) <= 2**16
        and all(type(pair) in (tuple, list) and len(pair) == 2 for pair in blocks)
        and all(is_good({"key": key, "shape": shape}, ("key", "shape")) for key, shape in blocks)
    )


def are_good_parts(parts, blocks):
    def is_good_part(part):
        if type(part) not in (tuple, list) or len(part) != 2:
            return False
        number, box = part
        if type(number) is not int or number not in range(len(blocks)):
            return False
        key, shape = blocks[number]
        return is_good({"key": key, "shape": shape, "box": box}, ("key", "shape", "box"))

    return type(parts) in (tuple, list) and len(parts) <= 2**16 and all(map(is_good_part, parts))


def is_good_read(request, is_good_where):
    """Return whether a request for regions of blocks of eight-byte numbers is good."""
    needed = {"blocks", "parts", "dtype", "item_bytes", "wait_s"}
    return (
        needed <= request.keys() <= needed | {"where", "checksum"}
        and are_good_blocks(request["blocks"])
        and are_good_parts(request["parts"], request["blocks"])
        and type(request["dtype"]) is str
        and request["dtype"] == "float64 <f8"
        and type(request["item_bytes"]) is int
        and request["item_bytes"] == 8
        and is_number(request["wait_s"], (int, float), 0, 3600)
        and type(request.get("checksum", False)) is bool
        and is_good_where(request.get("where"))
    )


def wanted_bytes(request):
    """Return the sizes of the regions of a good request."""
    return sum(8 * prod(stop - start for start, stop in box) for _, box in request["parts"])
