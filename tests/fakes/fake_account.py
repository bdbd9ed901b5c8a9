"""A small launch, and the cloud's own list of its machines, over the fake cloud."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal

from fakes.fake_cloud import FakeCloud

from spotlight.core.capacity import PlanRow
from spotlight.provision.base import Role
from spotlight.provision.launch import Launch
from spotlight.provision.machines import Machine


def row(price_class: str, nodes: int, zones: tuple[str, ...] = ()) -> PlanRow:
    return PlanRow(
        role="trainer", price_class=price_class, gpu="H100", gpus=8, nodes=nodes, cloud="aws", region="us-east-1",
        zones=zones, instance_type="p5.48xlarge", usd_per_h=Decimal("55.04"), ceiling_usd_per_h=Decimal("55.04"),
        why="",
    )  # fmt: skip


LAUNCH = Launch(run="demo", store="s3://b/demo", rows=(row("on_demand", 2), row("spot", 3, ("za", "zb"))))


class Account:
    """The cloud's own list, over the fake cloud. `on_terminate` happens in the middle of a termination."""

    def __init__(self, cloud: FakeCloud) -> None:
        self.cloud = cloud
        self.on_terminate: Callable[[], None] = lambda: None
        self.stubborn = False

    def of_run(self, run: str) -> list[Machine]:
        return [
            Machine(
                instance=info.instance, node=info.name, zone=info.zone, spot=info.role is Role.SPOT,
                state=info.state, launched_s=0.0,
            )
            for info in self.cloud.list()
        ]  # fmt: skip

    def runs(self) -> set[str]:
        return {"demo"} if any(self.cloud.is_alive(name) for name in self.cloud.machines) else set()

    def terminate(self, instances: list[str]) -> None:
        self.on_terminate()
        for info in self.cloud.list():
            if info.instance in instances and not self.stubborn:
                self.cloud.terminate(info.name)
