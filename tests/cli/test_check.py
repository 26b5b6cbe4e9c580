from __future__ import annotations

import pytest
from click.testing import CliRunner

from dask_p2p.cli import p2p
from dask_p2p.tools import check as diagnosis
from tests.tools.test_check import GOOD, LINK

pytestmark = pytest.mark.programs


@pytest.fixture
def run():
    return lambda *args: CliRunner().invoke(p2p, ["check", *args])


def test_a_cluster_that_it_starts(run):
    result = run("--workers", "2", "--cpu")
    assert result.exit_code == 0, result.output
    assert "Transport" in result.output
    assert "cma" in result.output
    assert "GB/s" in result.output
    # A busy machine may make one way look slow.
    assert "No problems found." in result.output or "times as fast" in result.output


def test_one_worker_makes_no_pair(run):
    result = run("--workers", "1", "--cpu")
    assert result.exit_code == 0, result.output
    assert "No pair of workers to check" in result.output
    assert "No problems found." not in result.output
    assert "GB/s" not in result.output


def test_problems_and_links_that_do_not_work(run, cluster, monkeypatch):
    broken = diagnosis.Link("b", "a", None, 0.0, 0.0, {}, "TransferError: no answer")
    problem = diagnosis.Problem(("a", "b"), "something is slow", "Do this")
    report = diagnosis.Report([GOOD, GOOD | {"address": "b"}], [LINK, broken], [problem])
    monkeypatch.setattr(diagnosis, "check", lambda client: report)
    result = run("--scheduler", cluster.scheduler_address)
    assert result.exit_code == 1
    assert "Worker 0, 1: something is slow." in result.output
    assert "something is slow. Do this." in result.output
    assert "NVIDIA H200" in result.output
    assert "should carry 450 GB/s one way" in result.output


def test_wrong_use(run):
    assert (
        "for a cluster on this machine"
        in run("--scheduler", "tcp://127.0.0.1:1", "--workers", "2").output
    )
    result = run("--scheduler", "no address")
    assert result.exit_code == 1
    assert "no scheduler answers at no address" in result.output
