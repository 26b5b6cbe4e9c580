"""A class makes a new transport known: to options, to workers, and to what counts memory."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import dask
import pytest

from dask_p2p import config, transports
from dask_p2p.config import checked_options, options
from dask_p2p.errors import ConfigError
from dask_p2p.transports.base import Transport
from dask_p2p.transports.buffers import Footprint

MIB = 2**20


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
