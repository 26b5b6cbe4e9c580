"""One line makes a new transport known: to options, to workers, and to what counts memory."""

from __future__ import annotations

import dask
import pytest

from dask_p2p import config
from dask_p2p.config import NOT_IN_AUTO, options
from dask_p2p.errors import ConfigError
from dask_p2p.transports import make_transports, registry
from dask_p2p.transports.base import Transport
from dask_p2p.transports.flow_control import FlowControl, PackingLimits
from tests.transports.loopback import LoopbackHost

MIB = 2**20


class Pigeon(Transport):
    name = "pigeon"
    kinds = ("numpy",)
    idle_parts = 3

    @classmethod
    def rank(cls, kind, options):
        return 1 if kind == "numpy" else NOT_IN_AUTO

    @classmethod
    def flow_control(cls, options, kind):
        return FlowControl(512 * MIB, 0)

    @classmethod
    def packing(cls, options, kind):
        return PackingLimits(900 * MIB, 5)

    handlers = obstacle = read = close = None


@pytest.fixture
def pigeon(monkeypatch):
    monkeypatch.setitem(registry.classes, "pigeon", None)  # so that both are taken back
    monkeypatch.setitem(config._known, "pigeon", None)
    registry.register(Pigeon)


def test_it_can_be_named_and_comes_where_it_ranks(pigeon):
    assert options().order("numpy") == ("pigeon", "cma", "comm")
    assert options().order("cupy") == ("ipc", "ucx", "pinned", "comm")
    with dask.config.set({"p2p.transports.order": ["pigeon"]}):
        assert options().order("cupy") == ("pigeon", "comm")


def test_who_is_not_registered_cannot_be_named():
    with (
        dask.config.set({"p2p.transports.order": ["pigeon"]}),
        pytest.raises(ConfigError, match="out of ipc, cma, ucx, pinned, comm"),
    ):
        options()


def test_what_it_holds_counts(pigeon):
    with dask.config.set({"p2p.transports.order": ["pigeon"]}):
        chosen = options()
    assert registry.staging_bytes(chosen, "numpy", 2**40, 2**40, 8) == 512 * MIB
    assert registry.staging_bytes(chosen, "cupy", 2**40, 2**40, 8) < 512 * MIB, "not for these"
    assert registry.packed_bytes(chosen, "numpy", 1, 2**40) == 900 * MIB
    assert registry.packed_bytes(chosen, "numpy", 100, 100) == 500
    assert registry.idle_bytes(chosen, "numpy") == 3 * 512 * MIB


def test_each_worker_has_one(pigeon, loop, tmp_path):
    host = LoopbackHost("here", loop.loop, {}, tmp_path)
    made = make_transports(host, options())
    assert isinstance(made["pigeon"], Pigeon)
    assert made["pigeon"].packed is made["comm"].packed
    for transport in made.values():
        if transport.name != "pigeon":
            loop.run(transport.close())
    host.close()
