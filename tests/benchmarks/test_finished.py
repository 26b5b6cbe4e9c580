from __future__ import annotations

import sys
from argparse import Namespace

import dask.array as da
import numpy as np
import pytest

from benchmarks.finished import done

pytestmark = pytest.mark.programs


def test_dasks_tasks_wait_for_their_kernels(monkeypatch):
    waited = []
    stream = Namespace(synchronize=lambda: waited.append(None))
    cuda = Namespace(get_current_stream=lambda: stream)
    monkeypatch.setitem(sys.modules, "cupy", Namespace(cuda=cuda))
    x = da.from_array(np.arange(64).reshape(8, 8), chunks=(4, 4))
    y = done(x.rechunk((2, 8), method="tasks"))
    assert np.array_equal(y.compute(scheduler="sync"), np.arange(64).reshape(8, 8))
    assert len(waited) == 4
