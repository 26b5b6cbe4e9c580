"""The limit: a contiguous all-to-all of the same bytes by copy engines, without transposing.

    python -m benchmarks.rivals.copy_engines --gpus 8 --size 65536 --size 131072

One process has a stream for each GPU. At stage s, GPU r gets its tile from GPU (r + s) mod n, so
that each GPU sends to one and receives from one. Only tiles that cross a link are copied. Two forms
are tried: pulls (on a stream of the receiver) and pushes (on a stream of the sender). The faster
form is reported. `--dtype` sets only the number of bytes of an element.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import permutations
from typing import Any

import numpy as np

from benchmarks.rivals.common import BAND, Case, cases, emit, parser, read, row, time_forms

WAY = "copy engines (limit)"

WORD_BYTES = 4
#: The largest prime below 2**32: words are their index in the matrix modulo it.
MODULUS = 4294967291


def staged(gpus: int) -> Iterator[tuple[int, int]]:
    """Yield (receiver, sender) of each tile that crosses a link, in stage order.

    >>> list(staged(3))
    [(0, 1), (1, 2), (2, 0), (0, 2), (1, 0), (2, 1)]
    """
    for stage in range(1, gpus):
        for receiver in range(gpus):
            yield receiver, (receiver + stage) % gpus


class Gpus:
    """The CUDA calls of this program, on several GPUs."""

    def __init__(self, count: int) -> None:
        import cupy

        self.module = cupy
        self.runtime = cupy.cuda.runtime
        device_count = self.runtime.getDeviceCount()
        if device_count < count:
            sys.exit(f"expected {count} GPUs, CuPy finds {device_count}")
        self.streams = []
        for gpu in range(count):
            with self.on(gpu):
                self.streams.append(cupy.cuda.Stream(non_blocking=True))
                for peer in range(count):
                    if peer == gpu:
                        continue
                    # Without peer access CUDA copies through the host.
                    if not self.runtime.deviceCanAccessPeer(gpu, peer):
                        sys.exit(f"GPU {gpu} cannot reach the memory of GPU {peer}")
                    self.runtime.deviceEnablePeerAccess(peer)
        self.versions = {
            "cupy": cupy.__version__,
            "cuda_runtime": str(self.runtime.runtimeGetVersion()),
        }

    def on(self, gpu: int) -> Any:
        """Make a GPU the current one."""
        return self.module.cuda.Device(gpu)

    def copy(self, dst: Any, dst_gpu: int, src: Any, src_gpu: int, on_gpu: int) -> None:
        """Start a copy, on the stream of `on_gpu`."""
        self.runtime.memcpyPeerAsync(
            dst.data.ptr, dst_gpu, src.data.ptr, src_gpu, src.nbytes, self.streams[on_gpu].ptr
        )

    def synchronize(self) -> None:
        """Wait for all started copies."""
        for gpu in range(len(self.streams)):
            with self.on(gpu):
                self.runtime.deviceSynchronize()


class Processor:
    """A substitute for `Gpus` on a CPU, to try the program."""

    def __init__(self) -> None:
        self.module = np
        self.versions = {"numpy": np.__version__}

    def on(self, gpu: int) -> Any:
        return nullcontext()

    def copy(self, dst: Any, dst_gpu: int, src: Any, src_gpu: int, on_gpu: int) -> None:
        dst[...] = src

    def synchronize(self) -> None:
        pass


def exchange(
    device: Any, sent: Sequence[Any], received: Sequence[Any], pull: bool, tile_words: int
) -> None:
    """Start the copies of all tiles: tile q in the received slab comes from GPU q."""
    for receiver, sender in staged(len(sent)):
        device.copy(
            tile(received[receiver], sender, tile_words),
            receiver,
            tile(sent[sender], receiver, tile_words),
            sender,
            receiver if pull else sender,
        )


def tile(slab: Any, number: int, tile_words: int) -> Any:
    """Return one contiguous tile of a slab."""
    return slab[number * tile_words : (number + 1) * tile_words]


def measure(case: Case, device: Any) -> dict[str, Any]:
    """Time the all-to-all of a matrix's bytes, and check the received tiles."""
    tile_bytes = case.rows**2 * case.itemsize
    if tile_bytes % WORD_BYTES:
        sys.exit(f"tiles of {tile_bytes} bytes are no multiple of {WORD_BYTES}")
    tile_words = tile_bytes // WORD_BYTES
    sent, received = [], []
    for gpu in range(case.gpus):
        with device.on(gpu):
            slab = device.module.empty(tile_words * case.gpus, np.uint32)
            for start, stop in bands(slab.size):
                slab[start:stop] = words(device.module, gpu * slab.size, start, stop)
            sent.append(slab)
            received.append(device.module.empty_like(slab))

    def seconds(pull: bool) -> float:
        """Time one run, to the end of the slowest GPU."""
        device.synchronize()
        start_s = time.perf_counter()
        exchange(device, sent, received, pull, tile_words)
        device.synchronize()
        return time.perf_counter() - start_s

    forms: dict[str, Callable[[], float]] = {
        "pull": partial(seconds, True),
        "push": partial(seconds, False),
    }
    timing = time_forms(forms, case.repeats)

    for gpu, slab in enumerate(received):
        with device.on(gpu):
            slab.fill(MODULUS)  # different from all words
    forms[timing.form]()
    wrong_count = sum(
        count_wrong(device, received[receiver], receiver, sender, tile_words)
        for receiver, sender in permutations(range(case.gpus), 2)
    )
    return row(WAY, case, timing, wrong_count, versions=device.versions)


def count_wrong(device: Any, slab: Any, receiver: int, sender: int, tile_words: int) -> int:
    """Count the wrong words of one received tile."""
    wrong_count = 0
    first = (sender * (slab.size // tile_words) + receiver) * tile_words
    received = tile(slab, sender, tile_words)
    with device.on(receiver):
        for start, stop in bands(tile_words):
            wrong_count += int(
                (received[start:stop] != words(device.module, first, start, stop)).sum()
            )
    return wrong_count


def words(module: Any, first: int, start: int, stop: int) -> Any:
    """Return the words of a range that starts at word `first` of the matrix."""
    return (module.arange(first + start, first + stop, dtype=np.uint64) % MODULUS).astype(np.uint32)


def bands(length: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of a length, so that temporaries stay small."""
    for start in range(0, length, BAND):
        yield start, min(start + BAND, length)


def main() -> None:
    """Read the command line, measure."""
    options = read(parser(__doc__))
    device = Processor() if options.cpu else Gpus(options.gpus)
    for case in cases(options):
        emit(measure(case, device), options.json)


if __name__ == "__main__":
    main()
