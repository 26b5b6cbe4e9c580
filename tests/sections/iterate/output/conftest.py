from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from dask_p2p.sections.iterate.output.frames import Frames
from tests.support import BOUND_S


@pytest.fixture
def late_writes(monkeypatch):
    """Frames whose writes wait for the event `may_write`; `threads` has the thread of each one."""
    late = SimpleNamespace(may_write=threading.Event(), threads=[])
    write_part = Frames.write_part

    def wait_and_write(self, written=0):
        late.threads.append(threading.current_thread())
        assert late.may_write.wait(BOUND_S)
        write_part(self, written)

    monkeypatch.setattr(Frames, "write_part", wait_and_write)
    return late
