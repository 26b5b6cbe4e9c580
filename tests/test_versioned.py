from __future__ import annotations

import pickle
import re
from dataclasses import dataclass, replace
from functools import partial
from weakref import ref

import numpy as np
import pytest

from dask_p2p.config import options
from dask_p2p.engine.assembly import OutputSpec
from dask_p2p.engine.remote import BlockRef
from dask_p2p.errors import RegistrationError
from dask_p2p.plans import Piece, redistribution
from dask_p2p.versioned import Unreadable, check_readable, own_version, versioned

PLAN = redistribution(((2, 2), (4,)), (1, 0), ((2, 2), (4,)))
OUTPUT = OutputSpec(("x",), np.dtype("i8"), "numpy", options())
VALUES = [
    options(),
    OUTPUT,
    PLAN,
    PLAN.block((0, 0)),
    Piece(0, ((0, 1),), ((0, 1),)),
    BlockRef("x", ("a", "b")),
]


@versioned()
@dataclass(frozen=True, slots=True)
class Value:
    needed: int
    other: int = 7


def read_pickled(reader, *arguments):
    return reader(pickle.dumps(arguments))


def written(value, **changes):
    """What another version would have written."""
    reader, arguments = value.__reduce__()
    if len(arguments) == 1:  # shared
        reader, arguments = partial(read_pickled, reader), pickle.loads(*arguments)
    sent = dict(zip(("version", "module", "name", "values"), arguments, strict=True))
    return reader(*(sent | changes).values())


def test_all_that_read_a_shared_value_get_one_object():
    sent = pickle.dumps(redistribution(((3, 1),), (0,), ((1, 3),)))
    first, second = pickle.loads(sent), pickle.loads(sent)
    assert first is second
    assert pickle.dumps(first) == sent, "as it travels on"
    left = ref(first)
    del first, second
    assert left() is None, "kept for nobody"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"version": "9.9"}, f"of dask_p2p {own_version()}, got values of dask_p2p 9.9"),
        ({"values": ()}, "missing 1 required positional argument: 'needed'"),
        ({"values": (1, 2, 3)}, "takes from 2 to 3 positional arguments but 4"),
        ({"name": "Later"}, "has no attribute 'Later'"),
        ({"module": "lacking"}, "No module named 'lacking'"),
    ],
    ids=str,
)
def test_what_cannot_be_read_is_an_error_where_it_is_used(changes, expected):
    """Never in unpickling, by which Dask would lose a worker."""
    found = pickle.loads(pickle.dumps(written(Value(1), **changes)))
    assert isinstance(found, Unreadable)
    holder = replace(OUTPUT, options=found)
    for value in (found, holder, pickle.loads(pickle.dumps(holder))):
        with pytest.raises(RegistrationError, match=re.escape(expected)):
            check_readable(PLAN, value)
    check_readable(PLAN, OUTPUT)


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_no_value_of_another_version_is_read(value):
    with pytest.raises(RegistrationError, match=r"got values of dask_p2p 9\.9"):
        check_readable(written(value, version="9.9"))
