from __future__ import annotations

import json
import os
import subprocess

import dask_p2p
from benchmarks.environment import commit, environment


def test_it_is_json_and_says_what_figures_depend_on():
    found = json.loads(json.dumps(environment()))
    assert found["hardware"]["cpu"]
    assert found["hardware"]["cpu_count"] >= 1
    assert set(found) == {"versions", "commit", "hardware"}


def test_commit_is_that_of_the_checkout(monkeypatch, tmp_path):
    git = ["git", "-c", "user.name=n", "-c", "user.email=e", "-C", str(tmp_path)]
    subprocess.run([*git, "init", "-q"], check=True)
    file = tmp_path / "__init__.py"
    file.write_text("")
    monkeypatch.setattr(dask_p2p, "__file__", str(file))
    assert commit() is None, "not tracked"
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-qm", "first"], check=True)
    first = commit()
    assert len(first) == 40
    file.write_text("changed")
    assert commit() == f"{first}-dirty"


def test_no_commit_outside_of_a_checkout(monkeypatch, tmp_path):
    monkeypatch.setattr(dask_p2p, "__file__", str(tmp_path / "__init__.py"))
    assert commit() is None
    monkeypatch.setenv("PATH", os.devnull)
    assert commit() is None
