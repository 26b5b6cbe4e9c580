"""A Dask cluster over several hosts, whose processes are started as users start them."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from distributed import Client, Security

from tests.hosts.network import Host, Network
from tests.support import BOUND_S, import_path

PORT = 8786
#: Lost connections are noticed sooner than by default; processes start and idle in less time.
SETTINGS = {
    "DASK_DISTRIBUTED__COMM__TIMEOUTS__TCP": "11 s",
    "DASK_DISTRIBUTED__COMM__TIMEOUTS__CONNECT": "5 s",
    "DASK_DISTRIBUTED__WORKER__PROFILE__ENABLED": "False",
    "DASK_DISTRIBUTED__WORKER__MULTIPROCESSING_METHOD": "forkserver",
}


class HostsCluster:
    """A scheduler on the first host, and workers on the others; what they print is in a folder."""

    def __init__(
        self,
        network: Network,
        folder: Path,
        security: Security | None = None,
        **environment: str,
    ) -> None:
        self.network = network
        self.scheduler, *self.worker_hosts = network.hosts
        scheme = "tcp" if security is None else "tls"
        self.address = f"{scheme}://{self.scheduler.address()}:{PORT}"
        self._security = security
        self._folder = folder
        self._environment = {**SETTINGS, "PYTHONPATH": import_path(), **environment}
        if security is not None:
            self._environment |= _encrypting(security)
        self._start(self.scheduler, "scheduler", "--no-dashboard")

    def start_workers(self, host: Host, *options: str) -> None:
        """Start workers of one thread, each with a nanny."""
        self._start(host, "worker", self.address, "--nthreads", "1", "--no-dashboard", *options)

    def _start(self, host: Host, *command: str) -> None:
        log = self._folder / f"{host.name}.log"
        host.start(sys.executable, "-m", "dask", *command, log=log, **self._environment)

    @contextmanager
    def client(self) -> Iterator[Client]:
        """Connect from the scheduler's host."""
        with self.scheduler.inside():
            client = Client(self.address, timeout=BOUND_S, security=self._security)
        with client:
            yield client

    def logs(self) -> str:
        return "\n".join(path.read_text() for path in self._folder.glob("*.log"))


def _encrypting(security: Security) -> dict[str, str]:
    """Return settings for processes that have these certificates."""
    prefix = "DASK_DISTRIBUTED__COMM__TLS__"
    settings = {f"{prefix}CA_FILE": security.tls_ca_file}
    for role in ("scheduler", "worker"):
        files = security.get_tls_config_for_role(role)
        settings[f"{prefix}{role.upper()}__CERT"] = files["cert"]
        settings[f"{prefix}{role.upper()}__KEY"] = files["key"]
    return {**settings, "DASK_DISTRIBUTED__COMM__DEFAULT_SCHEME": "tls"}
