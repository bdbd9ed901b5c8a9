"""What a machine checks before it joins, and the scripts that bring it there."""

from __future__ import annotations

import importlib.metadata
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from spotlight import __version__
from spotlight.errors import CredentialError, PreconditionError, RunError
from spotlight.provision import templates
from spotlight.provision.base import Role
from spotlight.runtime import node

RAY, PYTHON = importlib.metadata.version("ray"), f"{sys.version_info.major}.{sys.version_info.minor}"


def test_equal_versions_may_join() -> None:
    node.check_versions({"SPOTLIGHT_RAY": RAY, "SPOTLIGHT_PYTHON": PYTHON})
    node.check_versions({"SPOTLIGHT_RAY": ""})  # launched from a machine without Ray


@pytest.mark.parametrize(
    ("variable", "theirs", "ours"), [("SPOTLIGHT_RAY", "2.9.3", RAY), ("SPOTLIGHT_PYTHON", "3.9", PYTHON)]
)
def test_another_version_is_refused_and_both_are_named(variable: str, theirs: str, ours: str) -> None:
    with pytest.raises(PreconditionError) as caught:
        node.check_versions({variable: theirs})
    assert theirs in caught.value.message
    assert ours in caught.value.message


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604])
def test_a_token_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "token"
    path.write_text("secret")
    path.chmod(mode)
    with pytest.raises(CredentialError, match="read by others"):
        node.check_token(path)


@pytest.mark.parametrize("text", [None, "", "  \n"])
def test_without_a_token_nothing_starts(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "token"
    if text is not None:
        path.touch(mode=0o600)
        path.write_text(text)
    with pytest.raises(CredentialError, match="no token"):
        node.check_token(path)


def test_a_node_knows_itself_by_name_and_rank() -> None:
    ips = "10.0.0.1\n10.0.0.2\n"
    second = {
        "SPOTLIGHT_NODE": "od0",
        "SPOTLIGHT_GPUS": "8",
        "SKYPILOT_NODE_RANK": "1",
        "SKYPILOT_NODE_IPS": ips,
    }
    assert (node.spec_of(second).name, node.spec_of(second).role) == ("od1", Role.ON_DEMAND)
    assert node.own_address(second) == "10.0.0.2"
    spot = node.spec_of({"SPOTLIGHT_NODE": "s3", "SPOTLIGHT_GPUS": "1"})
    assert (spot.name, spot.role, spot.gpus) == ("s3", Role.SPOT, 1)
    with pytest.raises(PreconditionError, match="no address"):
        node.own_address({"SKYPILOT_NODE_IPS": "", "SKYPILOT_NODE_RANK": "0"})


@pytest.mark.parametrize("head", ["here", "10.0.0.1", "10.0.0.1:6479; id", "[::1]:6479", "10.0.0.1:6479\n"])
def test_the_head_is_an_address_and_nothing_else(head: str) -> None:
    with pytest.raises(PreconditionError, match="bad address"):
        node.serve({"SPOTLIGHT_HEAD": head, "SPOTLIGHT_NODE": "s0"})


def test_a_head_that_cannot_be_reached_is_an_error_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        monkeypatch.setattr(node, "AWAIT_HEAD_S", 0.0)
        with pytest.raises(RunError, match="cannot be reached"):
            node.serve({"SPOTLIGHT_HEAD": f"127.0.0.1:{probe.getsockname()[1]}", "SPOTLIGHT_NODE": "s0"})


@pytest.mark.parametrize(
    ("environment", "region"),
    [
        ({"SKYPILOT_CLUSTER_INFO": '{"region": "us-west-2"}'}, "us-west-2"),
        ({"SKYPILOT_CLUSTER_INFO": '{"region": "us-west-2"}', "AWS_REGION": "eu-west-1"}, "eu-west-1"),
        ({"SKYPILOT_CLUSTER_INFO": "["}, None),
        ({"SKYPILOT_CLUSTER_INFO": "[]"}, None),
        ({}, None),
    ],
)
def test_a_node_takes_its_region_from_skypilot(environment: dict[str, str], region: str | None) -> None:
    node.use_region(environment)
    assert environment.get("AWS_REGION") == region


# ---------------------------------------------------------------------------------------------- scripts


def bootstrap(home: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    values = {
        "HOME": str(home),
        "PATH": f"{home}/bin:/usr/bin:/bin",
        "SPOTLIGHT_VERSION": __version__,
        "SPOTLIGHT_PYTHON": PYTHON,
        "SPOTLIGHT_RAY": RAY,
        "SPOTLIGHT_RAY_TOKEN": "s3cret",
    }
    return subprocess.run(
        ["bash", str(templates.folder() / "bootstrap.sh")],
        env=values | environment, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A home whose environment is there already: this interpreter's."""
    (tmp_path / ".spotlight").mkdir()
    (tmp_path / ".spotlight" / "venv").symlink_to(sys.prefix)
    return tmp_path


def test_the_token_is_for_its_owner_alone_and_what_is_there_is_not_installed_again(installed: Path) -> None:
    done = bootstrap(installed)
    assert done.returncode == 0, done.stderr
    token = installed / ".spotlight" / "token"
    assert token.read_text() == "s3cret"
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    assert (installed / ".spotlight" / "env" / "bin" / "python").exists()
    assert "s3cret" not in done.stdout + done.stderr


def test_a_node_of_another_ray_is_refused_by_the_script(installed: Path) -> None:
    done = bootstrap(installed, SPOTLIGHT_RAY="2.9.3")
    assert done.returncode == 3
    assert "2.9.3" in done.stderr


@pytest.mark.parametrize("missing", ["SPOTLIGHT_VERSION", "SPOTLIGHT_PYTHON", "SPOTLIGHT_RAY_TOKEN"])
def test_the_script_refuses_to_guess(installed: Path, missing: str) -> None:
    assert bootstrap(installed, **{missing: ""}).returncode != 0


def recording_uv(home: Path) -> Path:
    """A `uv` that notes its arguments; its `venv` makes an environment of the wanted version."""
    (home / "bin").mkdir()
    uv = home / "bin" / "uv"
    uv.write_text(
        f'#!/bin/bash\nprintf "%s\\n" "$*" >> {home}/uv.log\n'
        f'if [ "$1" = venv ]; then ln -sfn {sys.prefix} "${{@: -1}}"; fi\n'
    )
    uv.chmod(0o755)
    return home / "uv.log"


def test_a_bare_machine_installs_the_wheel_that_was_sent(tmp_path: Path) -> None:
    log = recording_uv(tmp_path)
    dist = tmp_path / ".spotlight" / "dist"
    dist.mkdir(parents=True)
    (dist / "constraints.txt").write_text("ray==1\n")
    (dist / "spotlight_rl-0.1.0-py3-none-any.whl").touch()
    done = bootstrap(tmp_path)
    assert done.returncode == 0, done.stderr
    venv, install = log.read_text().splitlines()
    assert venv.endswith(f"--python {PYTHON} {tmp_path}/.spotlight/venv")
    assert install.endswith(f"--constraint {dist}/constraints.txt {dist}/spotlight_rl-0.1.0-py3-none-any.whl")


def test_a_bare_machine_without_a_wheel_installs_by_version(tmp_path: Path) -> None:
    log = recording_uv(tmp_path)
    done = bootstrap(tmp_path)
    assert done.returncode == 0, done.stderr
    assert log.read_text().splitlines()[1].endswith(f"spotlight-rl=={__version__}")


def stop_ray(home: Path) -> int:
    return subprocess.run(
        ["bash", str(templates.folder() / "stop_ray.sh")], env={"HOME": str(home), "PATH": os.environ["PATH"]},
        timeout=40, check=False,
    ).returncode  # fmt: skip


def sleeper(*arguments: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", *arguments])
    while "sleep" not in " ".join(psutil.Process(process.pid).cmdline()):
        time.sleep(0.01)
    return process


def test_stopping_ends_our_node_and_no_other_process(tmp_path: Path) -> None:
    (tmp_path / ".spotlight").mkdir()
    pid_file = tmp_path / ".spotlight" / "node.pid"
    ours, other = sleeper("-m", "spotlight.runtime.node"), sleeper("-m", "ray")
    try:
        pid_file.write_text(str(other.pid))  # a process id that was used again
        assert stop_ray(tmp_path) == 0
        assert other.poll() is None
        pid_file.write_text(str(ours.pid))
        assert stop_ray(tmp_path) == 0
        assert ours.wait(20) == -signal.SIGTERM
        assert other.poll() is None
        assert not pid_file.exists()
        assert stop_ray(tmp_path) == 0  # nothing there: nothing to do
    finally:
        for process in (ours, other):
            process.kill()
            process.wait()
