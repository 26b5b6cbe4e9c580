from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from dask_p2p.cli._signals import stoppable


def test_the_second_ctrl_c_does_not_wait():
    before = signal.getsignal(signal.SIGINT)
    with stoppable() as stopped:
        assert not stopped()
        signal.raise_signal(signal.SIGINT)
        assert stopped()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGINT) is before


def test_other_threads_have_no_handlers():
    def use():
        with stoppable() as stopped:
            return stopped()

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(use).result() is False
