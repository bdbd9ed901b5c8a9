"""The user of the cloud in a box: commands on the laptop, and a look behind the scenes."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from box import Box

# How long nobody in the box may get on with anything while something is waited for. A slow machine is no failure.
QUIET_S = float(os.environ.get("SPOTLIGHT_BOX_QUIET_S", "300"))


class Life(NamedTuple):
    """A machine in EC2's own words. Times in UTC seconds."""

    node: str
    instance: str
    kind: str
    began_s: float
    ended_s: float
    why: str


class Laptop:
    """Runs `spotlight` where the user would; `phase` hears of what is done."""

    def __init__(self, box: Box, phase: Callable[[str], None]) -> None:
        self.box, self.phase = box, phase

    def spotlight(self, *arguments: str) -> str:
        """Run a command that does what it was asked; its stdout."""
        return self._run(["spotlight", *arguments], 0).stdout

    def refused(self, *arguments: str, code: int) -> str:
        """Run a command that says no, with this exit code; what it says."""
        done = self._run(["spotlight", *arguments], code)
        return done.stdout + done.stderr

    def script(self, path: Path, *arguments: str) -> str:
        """Run a Python file; its stdout."""
        return self._run(["python", str(path), *arguments], 0).stdout

    def _run(self, command: list[str], code: int) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            self.box.command(command), env=self.box.environment(), capture_output=True, text=True, timeout=1800,
            check=False,
        )  # fmt: skip
        assert done.returncode == code, (
            f"{command}: {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}\n{self.box.post_mortem()}"
        )
        return done

    def status(self, run: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.spotlight("status", run, "--json"))
        return found

    def events(self, run: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.spotlight("logs", run, "--json").splitlines()]

    def wait(self, what: str, ready: Callable[[], Any], run: str = "", quiet_s: float = QUIET_S) -> Any:
        """Wait for something to be so, as long as the box gets on with anything and `run` has not failed."""
        pulse, since = self.box.pulse(), time.monotonic()
        while not (found := ready()):
            if run and (status := self.status(run))["state"] == "failed":
                raise AssertionError(f"{what}: the run failed: {status}\n{self.box.post_mortem()}")
            before, pulse = pulse, self.box.pulse()
            if pulse != before:
                since = time.monotonic()
            quiet = time.monotonic() - since
            assert quiet < quiet_s, f"{what}: nothing for {quiet:.0f} s\n{self.box.post_mortem()}"
            time.sleep(0.5)
        self.phase(what)
        return found

    def machines(self, *states: str) -> dict[str, str]:
        """EC2's own list: node by instance, of those in the states given (default: alive)."""
        wanted = states or ("pending", "running", "shutting-down", "stopping")
        return {
            item["InstanceId"]: _tags(item).get("spotlight-node", "?")
            for item in self._instances()
            if item["State"]["Name"] in wanted
        }

    def lives(self, run: str) -> list[Life]:
        """EC2's own record of a run's machines, the ended ones too, in the order of their launches."""
        lives = [
            Life(
                _tags(item)["spotlight-node"], item["InstanceId"], item["InstanceType"],
                datetime.fromisoformat(item["LaunchTime"]).timestamp(),
                _transition_s(item["StateTransitionReason"]), item.get("StateReason", {}).get("Code", ""),
            )
            for item in self._instances()
            if _tags(item).get("spotlight-run") == run
        ]  # fmt: skip
        return sorted(lives, key=lambda life: (life.began_s, life.instance))

    def _instances(self) -> list[dict[str, Any]]:
        return [item for group in self._describe_instances()["Reservations"] for item in group["Instances"]]

    def _describe_instances(self) -> dict[str, Any]:
        # This process is not in the box's network: ask through a command that is.
        found: dict[str, Any] = json.loads(
            self._run(["aws", "ec2", "describe-instances", "--output", "json"], 0).stdout
        )
        return found

    def launches(self) -> int:
        """Launches that SkyPilot's server is still at."""
        ask = "import sky; print(sum('launch' in request.name for request in sky.api_status()))"
        return int(self._run(["python", "-c", ask], 0).stdout.split()[-1])


def _tags(item: dict[str, Any]) -> dict[str, str]:
    return {tag["Key"]: tag["Value"] for tag in item.get("Tags", ())}


def _transition_s(reason: str) -> float:
    """The time in brackets: "User initiated (2026-03-02 10:11:12 UTC)"."""
    inside = reason.partition("(")[2].removesuffix(")").removesuffix(" UTC").removesuffix(" GMT")
    return datetime.fromisoformat(inside).replace(tzinfo=UTC).timestamp()
