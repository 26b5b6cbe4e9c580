"""The option of reads through CUDA IPC."""

from __future__ import annotations

from dask_p2p import tuning
from dask_p2p.backends import SLOTS
from dask_p2p.config import Options, TransportOptions, option, section, size_bytes


@section("transports.ipc")
class IpcOptions(TransportOptions):
    """See p2p-schema.yaml."""

    staging_bytes: int = option("staging-bytes", size_bytes)


def ipc_part_bytes(options: Options) -> int | None:
    """Return the limit of a part that a copy engine brings at a time; None: kernels read."""
    # At most half of the limit: the rest is for parts from other hosts.
    slots_bytes = min(IpcOptions.of(options).staging_bytes, options.staging_limit_bytes // 2)
    slot_bytes = slots_bytes // SLOTS
    return slot_bytes if slot_bytes >= tuning.current.copy_engine_bytes else None
