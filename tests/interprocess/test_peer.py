"""Who can read whom; the rest is tested with each transport."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dask_p2p.transports.process_memory import Peer, separation

HERE = Peer("boot", "pid:[1]", 1000, 1, "p", "/tmp/a", "aa")


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"boot_id": "other"}, "other-host"),
        ({"pid_namespace": "pid:[2]"}, "other-namespace"),
        ({"user": 0}, "other-user"),
        ({"pid": 1}, "same-process"),
        ({"refusal": "its disk is full"}, "no-directory"),
    ],
)
def test_what_keeps_processes_from_reading_each_other(changes, code):
    remote = replace(HERE, pid=2)
    assert separation(HERE, remote) is None
    assert separation(HERE, replace(remote, **changes)).code == code
