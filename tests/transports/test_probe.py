from __future__ import annotations

import importlib

import pytest

from dask_p2p.errors import TransferError
from dask_p2p.transports.base import PROBE_BYTES, Probes, check_probe, most_probe_bytes, probe_key


def test_blocks_are_made_once_and_few_are_kept():
    probes = Probes()
    first = probes.block(probe_key("numpy"))
    assert first.shape == (PROBE_BYTES,)
    assert probes.block(list(probe_key("numpy"))) is first
    for nbytes in (1, 2, 4):
        assert probes.block(probe_key("numpy", nbytes)).nbytes == nbytes
    assert probes.block(probe_key("numpy")) is not first
    probes.clear()


def test_all_that_may_be_asked_for_take_a_few_per_cent_of_the_memory():
    for memory_bytes in (2**26, 300 * 10**6, 2**31, 2**40, None):
        most_bytes = most_probe_bytes("numpy", memory_bytes)
        probes = Probes()
        block = probes.block(probe_key("numpy", most_bytes), memory_bytes)
        assert block.nbytes == most_bytes
        with pytest.raises(ValueError, match=f"at most {most_bytes} bytes"):
            probes.block(probe_key("numpy", 2 * most_bytes), memory_bytes)
        sizes_bytes = [2**n for n in range(41) if 2**n <= most_bytes]
        assert sum(sizes_bytes) < (memory_bytes or 2**31) / 15
    assert most_probe_bytes("numpy", 2**20) == PROBE_BYTES


@pytest.mark.parametrize("shift", [0, 1, 2, 256, 4096])
@pytest.mark.parametrize("kind", ["numpy", pytest.param("cupy", marks=pytest.mark.gpu)])
def test_changes_are_seen(kind, shift):
    xp = importlib.import_module(kind)
    good = Probes().block(probe_key(kind))
    assert isinstance(good, xp.ndarray)
    if shift == 0:
        check_probe(good)
        return
    with pytest.raises(TransferError, match="bytes of a probe arrived changed"):
        check_probe(xp.roll(good, shift))
    one = good.copy()
    one[shift] ^= 1
    with pytest.raises(TransferError, match="1 of 65536 bytes"):
        check_probe(one)
