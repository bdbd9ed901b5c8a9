"""The user of the cloud in a box: commands on the laptop, and a look behind the scenes."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from typing import Any

from box import Box


class Laptop:
    """Runs `spotlight` where the user would, and prints how long each phase took."""

    def __init__(self, box: Box) -> None:
        self.box = box
        self._began = time.monotonic()

    def spotlight(self, *arguments: str, code: int = 0, timeout_s: float = 600) -> str:
        """Run a command; its stdout. Its exit code must be `code`."""
        done = subprocess.run(
            self.box.command(["spotlight", *arguments]), env=self.box.environment(), cwd=self.box.home,
            capture_output=True, text=True, timeout=timeout_s, check=False,
        )  # fmt: skip
        assert done.returncode == code, (
            f"{arguments}: {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        )
        return done.stdout

    def status(self, run: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.spotlight("status", run, "--json"))
        return found

    def events(self, run: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.spotlight("logs", run, "--json").splitlines()]

    def wait(self, what: str, ready: Callable[[], Any], timeout_s: float) -> Any:
        """Wait for something to be so; print how long it took."""
        began = time.monotonic()
        while True:
            if found := ready():
                self.phase(what)
                return found
            assert time.monotonic() - began < timeout_s, f"{what}: not within {timeout_s} s"
            time.sleep(1.0)

    def phase(self, what: str) -> None:
        """A phase is over."""
        now = time.monotonic()
        print(f"{now - self._began:7.1f} s  {what}", flush=True)
        self._began = now

    def machines(self, *states: str) -> dict[str, str]:
        """EC2's own list: node by instance, of those in the states given (default: alive)."""
        found: dict[str, str] = {}
        for group in self._describe_instances()["Reservations"]:
            for item in group["Instances"]:
                if item["State"]["Name"] in (states or ("pending", "running", "shutting-down", "stopping")):
                    tags = {tag["Key"]: tag["Value"] for tag in item.get("Tags", ())}
                    found[item["InstanceId"]] = tags.get("spotlight-node", "?")
        return found

    def _describe_instances(self) -> dict[str, Any]:
        # This process is not in the box's network: ask through a command that is.
        command = self.box.command(["aws", "ec2", "describe-instances", "--output", "json"])
        done = subprocess.run(command, env=self.box.environment(), capture_output=True, text=True, check=True)
        found: dict[str, Any] = json.loads(done.stdout)
        return found
