"""What processes of clusters have when they are forked: all of it would take each its time."""

import gc
from contextlib import suppress

import dask.array  # noqa: F401
import distributed.protocol.numpy
import distributed.versions
import hypothesis  # noqa: F401  # as by modules of tests, whose functions they run
import pytest  # noqa: F401
import tornado.platform.asyncio  # noqa: F401

import dask_p2p.ops
import dask_p2p.plugins.worker  # noqa: F401

with suppress(ImportError):  # an extra
    import distributed.http.worker.prometheus

distributed.versions.get_versions()  # kept; looking them up takes as long as the rest of a start

# Or each process would look through all of it, and get a copy of its memory, to collect garbage.
gc.collect()
gc.freeze()
