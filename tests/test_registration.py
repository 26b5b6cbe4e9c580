from __future__ import annotations

import dask.array as da
import pytest

import dask_p2p
from dask_p2p.task import PLUGIN_NAME


def test_transpose_registers_once_with_each_client(client, monkeypatch):
    calls = []
    real = type(client).register_plugin

    def register_plugin(self, plugin, name=None):
        calls.append(plugin.name)
        return real(self, plugin, name)

    monkeypatch.setattr(type(client), "register_plugin", register_plugin)
    for _ in range(3):
        dask_p2p.transpose(da.ones((4, 4), chunks=(2, 4)))
    assert calls == [PLUGIN_NAME]


def test_no_client_no_registration():
    y = dask_p2p.transpose(da.ones((4, 4), chunks=(2, 4)))
    assert y.compute(scheduler="sync").shape == (4, 4)


def test_a_worker_that_dies_while_all_are_told(client, monkeypatch):
    told = []
    real = type(client).register_plugin

    def register_plugin(self, plugin, name=None):
        told.append(plugin.idempotent)
        if len(told) < 3:
            raise OSError("a worker has gone")
        return real(self, plugin, name)

    monkeypatch.setattr(type(client), "register_plugin", register_plugin)
    dask_p2p.register(client)
    # From the second time on all workers are told again, also those who have heard of it.
    assert told == [True, False, False]
    assert all(client.run(lambda dask_worker: PLUGIN_NAME in dask_worker.plugins).values())


def test_a_scheduler_that_is_gone(client, monkeypatch):
    def register_plugin(self, plugin, name=None):
        raise OSError("nobody there")

    monkeypatch.setattr(type(client), "register_plugin", register_plugin)
    with pytest.raises(OSError, match="nobody there"):
        dask_p2p.register(client)
