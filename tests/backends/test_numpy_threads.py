"""The NumPy kernel beside other threads; with its real block sizes, which test_numpy.py varies."""

from __future__ import annotations

import sys
import threading
import time

from dask_p2p.backends.numpy import NUMPY

from .support import random_bits


def test_the_interpreter_goes_on_during_a_copy():
    src = random_bits((3000, 3000), "f8")
    dst = NUMPY.empty((3000, 3000), "f8")
    copies = threading.Thread(target=lambda: NUMPY.permute_into(dst, src, (1, 0)))
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1)  # a thread that keeps the lock is not asked for it during this test
    ticks = 0
    try:
        copies.start()
        while copies.is_alive():
            ticks += 1
            time.sleep(0.0005)
    finally:
        sys.setswitchinterval(interval)
    copies.join()
    assert ticks > 3
