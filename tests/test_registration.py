from __future__ import annotations

import dask.array as da

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
