from __future__ import annotations

import signal

import pytest

from dask_p2p.cli.files import stoppable


def test_the_second_ctrl_c_does_not_wait():
    before = signal.getsignal(signal.SIGINT)
    with stoppable() as stopped:
        assert not stopped()
        signal.raise_signal(signal.SIGINT)
        assert stopped()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGINT) is before


@pytest.fixture
def unhandled():
    """SIGHUP that does not end the tests: counts those that nothing else has handled."""
    count = []

    def note(*_):
        count.append(1)

    before = signal.signal(signal.SIGHUP, note)
    yield count
    signal.signal(signal.SIGHUP, before)


def test_a_terminal_that_closes_asks_more_than_once(unhandled):
    with stoppable() as stopped:
        signal.raise_signal(signal.SIGHUP)
        assert stopped()
        signal.raise_signal(signal.SIGHUP)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert unhandled == []
    signal.raise_signal(signal.SIGHUP)
    assert unhandled == [1], "the handler of before is back"
