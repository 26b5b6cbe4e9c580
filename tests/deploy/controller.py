"""A Slurm of its own: controller and nodes on this host, in a folder, on ports of their own."""

import os
import secrets
import shutil
import socket
from contextlib import contextmanager

import pytest

from tests.deploy.support import environment, free_ports, output_of, running
from tests.support import run_command
from tests.transports.loopback import wait_until

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY"}

# No control groups, as in a container, and nothing that is kept. Processors are given by number,
# however many the host has: two nodes are on it.
CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=5
NodeName=node1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 RealMemory=4000
NodeName=node2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 RealMemory=4000
PartitionName=all Nodes=ALL Default=YES
"""


@contextmanager
def controller(folder):
    """Start the daemons; give the variables with which Slurm's commands find them."""
    path = os.pathsep.join([environment()["PATH"], "/usr/sbin"])
    if missing := [name for name in PROGRAMS if shutil.which(name, path=path) is None]:
        pytest.skip(f"not installed: {', '.join(missing)} (Debian: slurmctld slurmd munge)")
    if os.getuid() != 0:
        pytest.skip("Slurm's daemons run as root, which this is not")
    host = socket.gethostname().partition(".")[0]
    (folder / "state").mkdir()
    conf = folder / "slurm.conf"
    conf.write_text(CONFIGURATION.format(folder=folder, host=host, ports=free_ports(3)))
    key = folder / "key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o600)
    variables = {"SLURM_CONF": str(conf), "PATH": path}
    files = {"key-file": key, "socket": folder / "munge"} | {
        name: folder / f"munged.{name}" for name in ("pid-file", "log-file", "seed-file")
    }
    munged = ["munged", "--foreground", "--force", *(f"--{k}={v}" for k, v in files.items())]
    daemons = [["slurmctld", "-D"], *(["slurmd", "-D", "-N", f"node{n}"] for n in (1, 2))]
    logs = [folder / "auth", folder / "daemons"]
    for log in logs:
        log.mkdir()
    with running(logs[0], munged, **variables):
        wait_until((folder / "munge").exists)
        with running(logs[1], *daemons, **variables):
            wait_until(lambda: is_up(variables))
            try:
                yield variables
            finally:
                output_of("scancel", "--user=root", **variables)
                wait_until(lambda: not output_of("squeue", "--noheader", **variables).strip())


def is_up(variables):
    command = ["sinfo", "--noheader", "--format=%t %D"]
    return run_command(*command, env=environment(**variables)).stdout.split() == ["idle", "2"]


def ended(job, variables, timeout_s=200):

    def end():
        shown = output_of("scontrol", "--oneliner", "show", "job", job, **variables)
        state = dict(part.partition("=")[::2] for part in shown.split())["JobState"]
        return state if state in ENDED else ""

    return wait_until(end, timeout_s)
