"""The node-side files: found, filled in, and closed against values that would break out."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from spotlight.errors import PreconditionError, UserError
from spotlight.names import run_name
from spotlight.provision import templates

HOSTILE = [
    "a; rm -rf ~",
    "$(id)",
    "../../x",
    "a\nb",
    'mine", "/x/.ssh": "s3://x',
    "${HOME}",
    "`id`",
    "",
    "a" * 41,
    "ünï",
    "-rf",
    "a\x00b",
]
SECRETS = {"SPOTLIGHT_RAY_TOKEN": "0" * 64}


def envs(template: str = "ondemand", **changed: str) -> dict[str, str]:
    tree = yaml.safe_load((templates.folder() / f"{template}.yaml").read_text())
    return {**dict.fromkeys(tree["envs"], "x"), **changed}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_never_reach_a_cloud(name: str) -> None:
    with pytest.raises(UserError):
        run_name(name)
    with pytest.raises(UserError):
        templates.cluster_name(name, "s0")
    with pytest.raises(UserError):
        templates.cluster_name("fine", name)


def test_cluster_names_are_those_one_would_type() -> None:
    assert templates.cluster_name("run", "od0") == templates.cluster_name("run", "od1") == "spotlight-run-od"
    assert templates.cluster_name("run", "s12") == "spotlight-run-s12"


@pytest.mark.parametrize("template", ["ondemand", "spot"])
def test_a_task_holds_the_values_as_values(template: str) -> None:
    hostile = 'x", "/x/.ssh": "s3://evil $(id) `id` ; rm -rf ~'
    tree = templates.task(
        template,
        envs=envs(template, SPOTLIGHT_RUN=hostile),
        secrets=SECRETS,
        mounts={"~/.spotlight/x": Path("/a/b")},
    )
    assert tree["envs"]["SPOTLIGHT_RUN"] == hostile
    assert tree["file_mounts"] == {"~/.spotlight/x": "/a/b"}
    assert hostile not in tree["run"] + tree["setup"]


@pytest.mark.parametrize("value", ["a\nb", "\x1b[31m", "x" * 4001, "ü"])
def test_values_that_no_variable_should_hold_are_refused(value: str) -> None:
    with pytest.raises(UserError, match="SPOTLIGHT_RUN"):
        templates.task("ondemand", envs=envs(SPOTLIGHT_RUN=value), secrets=SECRETS, mounts={})


@pytest.mark.parametrize("path", ["/a/${HOME}", "/a b", '/a", "/x/.ssh": "/b', "/a/../../etc", "/a\n", ""])
@pytest.mark.parametrize("side", ["here", "there"])
def test_mounts_are_plain_paths(path: str, side: str) -> None:
    mounts = {path: Path("/a")} if side == "there" else {"/a": Path(path)}
    if side == "here" and not path:
        return  # Path("") is "."
    with pytest.raises(UserError, match="cannot send"):
        templates.task("ondemand", envs=envs(), secrets=SECRETS, mounts=mounts)


def test_skypilot_itself_finds_no_second_mount() -> None:
    """The real parser, with the value that would add a mount if any template used it in one."""
    sky = pytest.importorskip("sky")
    value = 'mine", "/x/.ssh": "s3://x'
    tree = templates.task(
        "spot",
        envs=envs("spot", SPOTLIGHT_RUN=value),
        secrets=SECRETS,
        mounts={"~/.spotlight/node": Path("/a")},
    )
    task = sky.Task.from_yaml_config(tree)
    assert list(task.file_mounts or {}) == ["~/.spotlight/node"]
    assert task.envs["SPOTLIGHT_RUN"] == value


def test_a_value_that_the_template_does_not_know_is_a_bug() -> None:
    with pytest.raises(ValueError, match="NEW"):
        templates.task("ondemand", envs={**envs(), "NEW": "x"}, secrets=SECRETS, mounts={})


def test_templates_open_no_port_and_mount_nothing_by_themselves() -> None:
    for name in ("ondemand", "spot"):
        text = (templates.folder() / f"{name}.yaml").read_text()
        tree = yaml.safe_load(text)
        assert not {"ports", "file_mounts", "workdir", "resources"} & tree.keys()
        assert "$" not in text  # nothing is substituted into any command
        assert set(tree["secrets"]) == {"SPOTLIGHT_RAY_TOKEN"}


def scripts() -> list[Path]:
    return sorted(templates.folder().glob("*.sh"))


@pytest.mark.parametrize("script", scripts(), ids=lambda path: path.name)
def test_scripts_are_valid_strict_and_quote_every_variable(script: Path) -> None:
    text = script.read_text()
    assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0
    assert "set -euo pipefail" in text
    if shutil.which("shellcheck"):
        assert subprocess.run(["shellcheck", str(script)], check=False).returncode == 0
    code = "\n".join(line.partition(" # ")[0] for line in text.splitlines() if not line.startswith("#"))
    bare = re.sub(r'"[^"]*"|\'[^\']*\'', "", code)  # what stands outside quotes
    unquoted = re.findall(r"(?<![=\w])\$\{?[A-Z_a-z]\w*", re.sub(r"\w+=\$\S+", "", bare))
    assert not unquoted
    assert "ray stop" not in code
    assert "eval" not in code


def test_scripts_are_found_in_an_installed_wheel_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site-packages" / "spotlight"
    (package / "provision").mkdir(parents=True)
    shutil.copytree(templates.folder(), package / "_sky")
    monkeypatch.setattr(templates, "__file__", str(package / "provision" / "templates.py"))
    assert templates.folder() == package / "_sky"


def test_a_wheel_that_is_named_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = tmp_path / "spotlight_rl-0.1.0-py3-none-any.whl"
    wheel.write_bytes(b"wheel")
    monkeypatch.setenv("SPOTLIGHT_WHEEL", str(wheel))
    templates.stage_dist(tmp_path / "dist")
    assert (tmp_path / "dist" / wheel.name).read_bytes() == b"wheel"
    pins = (tmp_path / "dist" / "constraints.txt").read_text().splitlines()
    assert any(re.fullmatch(r"ray==\d+\.\d+\.\d+", pin) for pin in pins)
    assert not any("+" in pin or pin.startswith("spotlight-rl") for pin in pins)
    monkeypatch.setenv("SPOTLIGHT_WHEEL", str(tmp_path / "none.whl"))
    with pytest.raises(PreconditionError, match="no wheel"):
        templates.stage_dist(tmp_path / "dist")
