"""Thresholds and sizes that measurements chose, and times of gangs, which tests replace.

All other constants are in the modules that use them. Tests replace a number by one that lets small
arrays or short waits reach all code. Code reads `tuning.current` at each
use, but not in inner loops, so that it uses a replaced number.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tuning:
    """The numbers, by the package that uses them, from the bottom up."""

    # backends: permutations in host memory. These sizes were the fastest, or within 5 % of it, for
    # matrices from 100 x 100 to 10000 x 10000 with items of 1 to 16 bytes. `benchmarks/kernels.py`
    # repeats the comparison.
    #: Least items for copies in blocks. For smaller arrays, the computation of a block shape takes
    #: as long as it saves.
    blocked_items: int = 1 << 15
    #: Least items of a block, which hide the interpreter's overhead.
    block_items: int = 1 << 13
    #: Most items of a block that is extended over further axes.
    grown_block_items: int = 1 << 15
    block_columns: int = 512
    most_block_rows: int = 256
    least_block_rows: int = 32
    #: Most rows of a plain copy: they hit the second-level cache and the translation cache. Blocks
    #: have no advantage then, unless rows compete for lines of the first-level cache.
    unblocked_rows: int = 1024
    #: Lines of a first-level cache for addresses that compete. Rows at a distance of a power of two
    #: all compete, so fewer of them fit.
    cache_ways: int = 8
    first_touch_bytes: int = 2**26  # least for each of several threads

    # backends: GPUs.
    #: Bytes of a row that a GPU kernel writes at a time: one side of its tiles, of items up to 8
    #: bytes.
    gpu_row_bytes: int = 512

    # transports.
    #: Shortest run that a system call copies between processes. NumPy packs and copies shorter ones
    #: faster.
    process_run_bytes: int = 256
    #: Additional wait after a call's own deadline. Then this worker's event loop does not respond.
    event_loop_grace_s: float = 10.0

    # engine and plugins.
    worker_answer_s: float = 10.0  # longest wait of the scheduler for a worker

    # on_gpu.
    #: Smallest block of a layer that starts another task ahead, which takes the host 1 ms. On an
    #: H200, this made layers of blocks of 32 and 128 MiB slower (50 ms against 40, 53 against 48),
    #: and those of 256 MiB and more faster.
    task_ahead_bytes: int = 2**28

    # sections.wire.
    #: Smallest value of a GPU that its receiver copies from the sender's memory. Smaller ones go
    #: through host memory.
    lent_message_bytes: int = 2**16
    #: Time of polling for messages before a rank blocks: waking up takes about as long. A rank
    #: polls only where each rank of the host has a core. Otherwise it would take a core from the
    #: others.
    spin_s: float = 50e-6
    #: Smallest message by UCX. Smaller ones are faster in the socket, with their header.
    ucx_message_bytes: int = 1 << 16
    ucx_part_bytes: int = 1 << 25  # size of a large message's parts

    # sections.exchange and sections.gpu.
    #: Smallest array, or mean size of redistributed regions, that ranks of one host read in each
    #: other's memory. Smaller ones are faster as messages.
    read_bytes: int = 2**16
    #: The same for arrays of a fused graph. Smaller ones are packed. A read of 4 MiB by regions of
    #: 64 KiB and rows of 1 KiB took 4.2 ms of two EPYC cores, and packed 1.2 ms, copies included.
    lent_read_bytes: int = 2**18
    #: Bytes of packed arrays that a rank reads at a time.
    packed_part_bytes: int = 2**18
    #: Shortest contiguous row of a region that a rank reads in another one's memory.
    read_run_bytes: int = 2**11
    #: Bytes of arrays on a GPU that a rank lends another one until that one's next message.
    lent_bytes: int = 2**26
    #: Largest local block on a GPU that ranks of one host exchange through windows: one slot for
    #: each other rank has its part. Copies into windows take longer than messages of larger blocks.
    window_bytes: int = 2**26
    #: Least elements of a local block in host memory for overlap. Overlap calls the function for
    #: three or more parts. For a five-point stencil in NumPy these calls took 0.02 ms a step more:
    #: a quarter of the step at 128 x 128, nothing measurable from 512 x 512 on. Overlap hides the
    #: network, so it is useless between ranks of one host.
    overlap_elements: int = 1 << 18
    #: Least size of a local block on a GPU for overlap, if halos come by messages. Other halos come
    #: as fast as parts of the boundary are computed. On two H200, a 25-point step in float32 of 512
    #: MiB took 0.70 to 0.74 ms with overlap and without.
    gpu_overlap_bytes: int = 2**28
    #: The same for captured steps, whose exchange has a stream of its own. On two H200,
    #: this took 0.109 ms in place of 0.119 for 64 MiB, and 0.0405 in place of 0.0400 for 8 MiB.
    graph_overlap_bytes: int = 2**25
    #: Least size of all fields on a GPU whose steps are not captured: the GPU takes longer than the
    #: host. Capture saves 10 % of the time of 375 MiB, and nothing of 1 GiB (two H200).
    captured_bytes: int = 2**29
    #: Least number of steps that are captured by default. The compilation of the barrier, the
    #: capture and its rehearsal take an H100 as long as 100 to 300 steps.
    capture_steps: int = 500
    #: Calls of a resident gang before GPUs replay them.
    replay_after_calls: int = 32
    #: Limit of the last part of a read from another GPU. A kernel puts it into place in 50 µs: the
    #: host needs as long for one more part.
    last_part_bytes: int = 2**26
    lost_gpu_s: float = 30.0  # wait after the end of an attempt, before the GPU counts as lost
    #: Lifetime of windows that peers may still read, after an attempt that failed.
    window_linger_s: float = 60.0

    # sections.context.
    #: Size of arrays that ranks reduce in parts: each rank one part, which it sends to the others.
    parted_reduction_bytes: int = 1 << 20
    #: Least size of a piece of a transform's result: the host needs 0.1 to 0.2 ms for each. On two
    #: H200, `rfftn` of 256 MiB a rank took 0.96 ms in one piece and 0.87 in two on a fast host. On
    #: slow ones it took 0.95 to 1.2 ms in one, and 1.2 to 1.6 in two.
    transform_piece_bytes: int = 2**28

    # fusing.
    #: Most tasks of a graph that is fused: programs of more take as long to make as they save.
    fused_tasks: int = 200_000
    client_wait_s: float = 60.0  # longest wait of a resident rank for its client
    #: Most commands of a resident gang's log: beyond, it drops those before a checkpoint.
    logged_commands: int = 100_000
    kept_commands: int = 10_000  # most commands between two checkpoints of a resident gang
    kept_s: float = 30.0  # most time between two of its checkpoints

    # tools and cli.
    check_repeats: int = 5  # measurements of a transport by `check`
    #: Least speed-up of another transport that `check` names.
    check_speed_up: float = 2


#: The numbers in use in this process.
current = Tuning()
