from __future__ import annotations

import numpy as np
import pytest
from distributed import Client

import dask_p2p
from dask_p2p.errors import InputError
from dask_p2p.inputs import checked_choice, checked_count, checked_dtype

TAKE_A_CLIENT = (dask_p2p.check, dask_p2p.last_runs, dask_p2p.register)


@pytest.mark.parametrize("function", TAKE_A_CLIENT)
def test_what_is_no_open_client(function, cluster):
    with Client(cluster) as closed:
        pass
    with pytest.raises(InputError, match="the client is closed"):
        function(closed)
    for value in (cluster, cluster.scheduler_address):
        with pytest.raises(InputError, match=r"expected a distributed\.Client, got .*tcp://"):
            function(value)


async def test_an_asynchronous_client_that_is_closed(cluster):
    async with Client(cluster.scheduler_address, asynchronous=True) as client:
        assert await dask_p2p.register(client) is None
    for function in TAKE_A_CLIENT:
        with pytest.raises(InputError, match="the client is closed"):
            function(client)


def test_numbers_that_may_be_zero():
    assert checked_count("things", 0, n=0) == 0
    for value in (-1, False, None):
        with pytest.raises(InputError, match=rf"at least 0, got n={value!r}"):
            checked_count("things", 0, n=value)


def test_choices():
    assert checked_choice("op", "sum", {"sum": 1, "max": 2}) == "sum"
    for value in ("mean", None, 1, ["sum"], {"sum": 1}, np.zeros(2), np.array(["sum", "max"])):
        with pytest.raises(InputError, match=r"op: expected one of sum, max, got .* Name one"):
            checked_choice("op", value, ("sum", "max"))


def test_dtypes():
    assert checked_dtype("dtype", "f4") == np.float32
    assert checked_dtype("dtype", [("a", "i4"), ("b", "f8")]).names == ("a", "b")
    for value in ("x", 3, 1.5, True, [], {}, (), [1], (1, 2, 3), {"a": 1}, np.zeros(2), object()):
        with pytest.raises(InputError, match=r"dtype: expected a dtype, got .* Give a type such"):
            checked_dtype("dtype", value)
