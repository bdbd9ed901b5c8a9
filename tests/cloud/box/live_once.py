"""On the laptop of a cloud in a box: the provider contract, with SkyPilot's machines. Prints what holds."""

from __future__ import annotations

import secrets
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "contract"))

from provider_life import whole_life

from spotlight import api
from spotlight.provision import templates
from spotlight.provision.base import NodeInfo
from spotlight.provision.launch import Launch
from spotlight.provision.machines import machine_list
from spotlight.provision.skypilot import SkyProvider


def main(box: Path) -> None:
    plan = api.plan("H100:3", spot_ratio=0.67, infra="aws/us-east-1")
    launch = Launch(run="contract", store="", rows=plan.rows)
    began = time.monotonic()

    def kill(machine: NodeInfo) -> None:
        (box / f"interrupt.{machine.instance}").write_text("0")
        (box / f"interrupt.{machine.instance}").replace(box / "interrupt" / machine.instance)

    with tempfile.TemporaryDirectory(dir=Path.home()) as staged:
        templates.stage_dist(Path(staged) / "dist")
        provider = SkyProvider(
            launch,
            machine_list("aws", "us-east-1"),
            token=secrets.token_hex(32),
            mounts={templates.SCRIPTS: templates.folder(), templates.DIST: Path(staged) / "dist"},
            # There is no head: the nodes come up and wait for it.
            envs={**templates.versions(), "SPOTLIGHT_HEAD": "10.77.0.9:6479", "SPOTLIGHT_CLOUD": "aws"},
        )
        zones = next(row.zones for row in plan.rows if row.price_class == "spot")
        whole_life(provider, kill, lambda what: print(f"{time.monotonic() - began:7.1f} s  {what}"), zones)
        print({info.name: info.zone for info in provider.list()})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
