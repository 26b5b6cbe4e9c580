"""The NumPy kernel beside other threads; with its real block sizes, which test_numpy.py varies."""

from __future__ import annotations

import sys
import threading
import time

from dask_p2p.backends.numpy import NUMPY
from tests.backends.support import random_bits


def test_the_interpreter_goes_on_during_a_copy():
    src = random_bits((3000, 3000), "f8")
    dst = NUMPY.empty((3000, 3000), "f8")
    ticks, number = [0] * 50, 0  # during each copy, and that of the copy

    def copy():
        nonlocal number
        for number in range(len(ticks)):
            NUMPY.permute_into(dst, src, (1, 0))
            if ticks[number] > 3:  # not at the first one where other processes have the cores
                break

    copies = threading.Thread(target=copy)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1)  # a thread that keeps the lock is not asked for it during this test
    try:
        copies.start()
        while copies.is_alive():
            ticks[number] += 1
            time.sleep(0.0005)
    finally:
        sys.setswitchinterval(interval)
    copies.join()
    assert max(ticks) > 3
