"""deploy/ssh: run against an ssh server on this host's loopback."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.deploy.support import DEPLOY, free_ports, output_of, running
from tests.support import import_path
from tests.transports.loopback import wait_until

pytestmark = pytest.mark.programs

SSHD = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")


def keys(folder):
    command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / "id_ed25519")]
    subprocess.run(command, check=True, timeout=60)
    return (folder / "id_ed25519.pub").read_text()


@contextmanager
def server(folder, port):
    """An ssh server of this user's own, with a home folder that knows its key."""
    home, host = folder / "home", folder / "host"
    (home / ".ssh").mkdir(parents=True)
    host.mkdir()
    (folder / "authorized").write_text(keys(home / ".ssh"))
    (home / ".ssh" / "known_hosts").write_text(f"[127.0.0.1]:{port} {keys(host)}")
    (folder / "config").write_text(
        f"ListenAddress 127.0.0.1:{port}\n"
        f"HostKey {host}/id_ed25519\n"
        f"AuthorizedKeysFile {folder}/authorized\n"
        "StrictModes no\nUsePAM no\nPasswordAuthentication no\nPidFile none\n"
    )
    if os.getuid() == 0:  # where it keeps what has no rights
        Path("/run/sshd").mkdir(exist_ok=True)
    with running(folder, [SSHD, "-D", "-e", "-f", str(folder / "config")]):
        wait_until(lambda: "listening" in (folder / "0.log").read_text())
        yield home


@pytest.mark.skipif(SSHD is None, reason="there is no sshd: apt-get install openssh-server")
def test_a_cluster_on_hosts_that_ssh_reaches(tmp_path):
    (port,) = free_ports(1)
    python = tmp_path / "python"  # ssh takes no environment along
    python.write_text(f'#!/bin/sh\nPYTHONPATH={import_path()} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    hosts = ["127.0.0.1"] * 3  # with a worker on each of the last two
    with server(tmp_path, port) as home:
        program = [sys.executable, DEPLOY / "ssh" / "cluster.py"]
        options = ["--port", port, "--python", python, "--each", "1"]
        output = output_of(*program, *options, *hosts, HOME=str(home), cwd=tmp_path)
    assert "every element is right: True" in output
    assert output.startswith("2 workers")
