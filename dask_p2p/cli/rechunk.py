"""``dask p2p rechunk``."""

from dask_p2p.cli.transpose import rechunk as rechunk
