"""A launch is all or nothing: at whatever point it ends early, the cloud's own list is empty afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest
from fakes.fake_account import LAUNCH, Account, row
from fakes.fake_cloud import FakeCloud

from spotlight.errors import (
    CapacityError,
    CredentialError,
    DataError,
    Interrupted,
    NotFoundError,
    PreconditionError,
    SpotlightError,
    UserError,
)
from spotlight.provision import rent, templates
from spotlight.provision.base import NodeSpec, NodeState, Role
from spotlight.provision.launch import FILE, Launch
from spotlight.provision.machines import Machine

FORGOTTEN: list[str] = []


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "config.yaml").write_text("seed: 0\n")
    LAUNCH.save(tmp_path)
    monkeypatch.setattr(templates, "stage_dist", lambda target: target.mkdir())
    monkeypatch.setattr(rent, "SETTLE_S", 0.0)
    return tmp_path


def bring_up(folder: Path, cloud: FakeCloud, account: Account | None = None) -> list[str]:
    said: list[str] = []
    rent.bring_up(
        LAUNCH,
        folder,
        said.append,
        make=lambda *_: cloud,
        machines=account or Account(cloud),
        forget=FORGOTTEN.append,
    )
    return said


def alive(cloud: FakeCloud) -> list[str]:
    return [info.name for info in cloud.list() if info.state is not NodeState.GONE]


def test_the_head_is_asked_for_and_nothing_staged_is_left(folder: Path) -> None:
    cloud = FakeCloud()
    assert bring_up(folder, cloud) == ["asking aws for od0 in us-east-1"]
    assert [(spec.name, spec.head) for spec in cloud.launches] == [("od0", True)]
    assert sorted(path.name for path in folder.iterdir()) == ["config.yaml", FILE]


@pytest.mark.parametrize("error", [CapacityError("none"), CredentialError("no"), PreconditionError("half")])
def test_a_launch_that_fails_half_way_leaves_nothing(folder: Path, error: SpotlightError) -> None:
    cloud = FakeCloud(answers=[error], half=True)
    with pytest.raises(type(error)):
        bring_up(folder, cloud)
    assert len(cloud.launches) == 1
    assert alive(cloud) == []


class Interrupting(FakeCloud):
    """Ctrl-C before or after the machine has been made."""

    after = True

    def launch(self, spec: NodeSpec) -> None:
        if self.after:
            super().launch(spec)
        raise KeyboardInterrupt


@pytest.mark.parametrize("after", [False, True])
def test_ctrl_c_during_a_launch_leaves_nothing(folder: Path, after: bool) -> None:
    cloud = Interrupting()
    cloud.after = after
    with pytest.raises(Interrupted, match="nothing is left"):
        bring_up(folder, cloud)
    assert alive(cloud) == []


def test_ctrl_c_while_staging_asks_the_cloud_for_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(templates, "stage_dist", interrupted)
    cloud = FakeCloud()
    with pytest.raises(Interrupted):
        bring_up(folder, cloud)
    assert cloud.launches == []


def test_a_second_ctrl_c_names_the_command_that_ends_them(folder: Path) -> None:
    cloud = Interrupting()
    account = Account(cloud)

    def again() -> None:
        raise KeyboardInterrupt

    account.on_terminate = again
    with pytest.raises(Interrupted) as caught:
        bring_up(folder, cloud, account)
    assert caught.value.hint == "spotlight down demo"


def test_a_cloud_that_refuses_to_end_them_is_named_with_the_command(folder: Path) -> None:
    cloud = FakeCloud(answers=[CapacityError("none")], half=True)
    account = Account(cloud)

    def refused() -> None:
        raise CredentialError("expired")

    account.on_terminate = refused
    with pytest.raises(CredentialError, match="may live on") as caught:
        bring_up(folder, cloud, account)
    assert caught.value.hint == "spotlight down demo"


def test_give_back_looks_twice_for_what_was_under_way() -> None:
    cloud = FakeCloud()
    account = Account(cloud)
    cloud.launch(NodeSpec(name="od0", role=Role.ON_DEMAND))
    late = [NodeSpec(name="s0", role=Role.SPOT)]

    def look(run: str) -> list[Machine]:
        found = Account.of_run(account, run)
        if late and not alive(cloud):  # the head's last order arrives once the list was empty
            cloud.launch(late.pop())
        return found

    account.of_run = look  # type: ignore[method-assign]
    assert rent.give_back(LAUNCH, machines=account, forget=FORGOTTEN.append, settle_s=0.0) == 2
    assert FORGOTTEN[-1] == "spotlight-demo-od"
    assert alive(cloud) == []


def test_machines_that_will_not_end_are_named() -> None:
    from spotlight.provision import skypilot

    cloud = FakeCloud()
    account = Account(cloud)
    account.stubborn = True
    cloud.launch(NodeSpec(name="od0", role=Role.ON_DEMAND))
    with pytest.raises(PreconditionError, match="i-od0-1"):
        skypilot.end_machines(account, "demo", deadline_s=0.0, wait=lambda _: None)


def test_one_node_is_ended_without_the_others() -> None:
    from spotlight.provision import skypilot

    cloud = FakeCloud()
    for name in ("s0", "s1"):
        cloud.launch(NodeSpec(name=name, role=Role.SPOT))
    assert skypilot.end_machines(Account(cloud), "demo", node="s0", wait=lambda _: None) == 1
    assert alive(cloud) == ["s1"]


def test_a_launch_is_read_back_as_it_was(tmp_path: Path) -> None:
    LAUNCH.save(tmp_path)
    assert Launch.load(tmp_path) == LAUNCH
    assert list(LAUNCH.nodes()) == ["od0", "od1", "s0", "s1", "s2"]
    assert [spec.zones for spec in LAUNCH.specs(Role.SPOT)] == [("za", "zb")] * 3
    assert LAUNCH.market("s0")[0].price_class == "spot"


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"run": "x", "rows": [{}], "store": ""}', '{"rows": 3}']
)
def test_a_broken_launch_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text)
    with pytest.raises(DataError, match=FILE):
        Launch.load(tmp_path)


def test_a_run_that_was_never_launched_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="not in a cloud"):
        Launch.load(tmp_path)


def test_an_on_demand_part_of_two_types_is_refused() -> None:
    assert LAUNCH.check() is LAUNCH
    mixed = Launch(run="demo", store="s3://b", rows=(row("on_demand", 1), row("on_demand", 1)))
    with pytest.raises(UserError, match="must be alike"):
        mixed.check()
