"""The head of a cloud run: the same run as a local one, but its spot nodes come from a cloud.

Everything that must go on when the user's machine is gone lives in this process: driver, reconciler, mirror. It finds
what it is to do in the folder that was sent along (`launch.json`, `config.yaml`), and ends all spot nodes with itself.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from spotlight import config as configuration
from spotlight.config import RunConfig
from spotlight.core.cost import PricePoint, Record
from spotlight.core.ledger import Ledger
from spotlight.core.zones import ZoneBook
from spotlight.errors import ConfigError
from spotlight.names import run_dir
from spotlight.provision import live, rent, skypilot, templates
from spotlight.provision.base import Provider, Role
from spotlight.provision.launch import FILE, Launch
from spotlight.provision.machines import machine_list
from spotlight.provision.reconcile import Reconciler
from spotlight.provision.settle import settle
from spotlight.runtime import local_run
from spotlight.runtime.accounts import Accounts
from spotlight.runtime.driver import Emit
from spotlight.runtime.mirror import Mirror
from spotlight.runtime.node import HEAD_PORT, TOKEN, check_token, own_address
from spotlight.runtime.session import Session
from spotlight.runtime.trainers import Gpu
from spotlight.store.objects import open_store

SENT = Path(templates.LAUNCH).expanduser()
SKY_CONFIG = rent.SKY_CONFIG
SETTLE_S = 30.0


def run(environ: Mapping[str, str]) -> None:
    """Train to the end, or on from the newest checkpoint. Raises a SpotlightError when the run fails."""
    launch = Launch.load(SENT)
    config = configuration.load(SENT / "config.yaml")
    folder = run_dir(launch.run)
    resume = (folder / local_run.JOURNAL).is_dir()
    folder.mkdir(parents=True, exist_ok=True)
    for name in (FILE, "config.yaml"):
        shutil.copy2(SENT / name, folder / name)
    _use_sky_config(SENT / SKY_CONFIG)
    mirror = Mirror(folder, open_store(launch.store))
    mirror.start()
    try:
        address = own_address(environ)
        local_run.run(
            config, folder, resume=resume, make_site=lambda folder, tell: Cloud(launch, folder, address, tell)
        )
    finally:
        mirror.close()


class Cloud:
    """The machines of one launch (see `local_run.Site`)."""

    def __init__(self, launch: Launch, folder: Path, address: str, tell: Emit) -> None:
        self._launch = launch
        self.store = launch.store
        self._closing = threading.Event()
        self.session = Session(folder, at=f"{address}:{HEAD_PORT}", token=check_token(TOKEN))
        skypilot.warm_up()
        self._reconciler = self._make_reconciler(f"{address}:{HEAD_PORT}", tell)
        self._reconciler.start()
        self.spot: Provider = self._reconciler

    def trainer_gpus(self, number: int) -> list[Gpu]:
        """The GPUs of the on-demand machines, the head's first. Raises ConfigError for more than there are."""
        gpus = [(spec.name, gpu) for spec in self._launch.specs(Role.ON_DEMAND) for gpu in range(spec.gpus)]
        if number > len(gpus):
            raise ConfigError(
                f"cluster.trainers is {number}, but the on-demand machines have {len(gpus)} GPUs",
                hint="0 takes all of them",
            )
        return gpus[: number or None]

    def accounts(self, folder: Path, config: RunConfig) -> Accounts:
        """Books of rented machines, at the prices of the plan."""
        accounts = Accounts(
            folder,
            config.budget,
            rented=self._launch.market,
            ask_cloud=self._ask,
        )
        today = datetime.now(UTC).date().isoformat()
        told: dict[str, Any] = {"source": "plan of the launch", "as_of": today}
        for row in self._launch.rows:
            place: dict[str, Any] = {
                "cloud": row.cloud,
                "region": row.region,
                "instance_type": row.instance_type,
            }
            full = row.ceiling_usd_per_h
            accounts.price(PricePoint(**place, **told, zone="", price_class="on_demand", usd_per_h=full))
            for zone in row.zones:
                accounts.price(
                    PricePoint(**place, **told, zone=zone, price_class="spot", usd_per_h=row.usd_per_h)
                )
        for spec in self._launch.specs(Role.ON_DEMAND):
            if not spec.head:  # they came with the head's own cluster
                accounts.launched(spec.name, "on_demand", "trainer")
                accounts.up(spec.name)
        self._settling = threading.Thread(target=self._settle, args=(accounts,), daemon=True, name="settle")
        self._settling.start()
        return accounts

    def close(self) -> None:
        """End every spot node, then our Ray. This machine itself ends when it has been idle for a while."""
        self._closing.set()
        self._settling.join()
        self._reconciler.close()
        self.session.close()

    def _ask(self, ledger: Ledger) -> Iterator[Record]:
        """What the cloud's record adds to these books: machines, and on AWS the prices that were in force."""
        now_s = time.time()
        yield from settle(ledger, self._launch, now_s)
        if self._launch.cloud == "aws":
            known = {(point.market, point.at_s) for points in ledger.prices.values() for point in points}
            yield from (p for p in live.in_force(ledger, now_s) if (p.market, p.at_s) not in known)

    def _settle(self, accounts: Accounts) -> None:
        while not self._closing.wait(SETTLE_S):
            accounts.settle()

    def _make_reconciler(self, head: str, tell: Emit) -> Reconciler:
        launch, versions = self._launch, templates.versions()
        provider = skypilot.SkyProvider(
            launch,
            machine_list(launch.cloud, launch.region),
            token=TOKEN.read_text().strip(),
            mounts={templates.SCRIPTS: templates.folder().resolve(), templates.DIST: _dist()},
            envs={**versions, "SPOTLIGHT_HEAD": head, "SPOTLIGHT_CLOUD": launch.cloud},
        )
        zones = {zone: None for spec in launch.specs(Role.SPOT) for zone in spec.zones}
        book = ZoneBook(tuple(zones), np.random.default_rng())
        return Reconciler(provider, book, say=lambda text: tell({"kind": "warning", "text": text}))


def _dist() -> Path:
    """What this node was installed from is what the others are installed from."""
    dist = Path(templates.DIST).expanduser()
    dist.mkdir(parents=True, exist_ok=True)
    return dist


def _use_sky_config(path: Path) -> None:
    """The user's own SkyPilot settings, but for one: spot nodes get no copy of any login."""
    tree: dict[str, Any] = yaml.safe_load(path.read_text()) if path.is_file() else {}
    for cloud in skypilot.CLOUDS:
        tree[cloud] = {**(tree.get(cloud) or {}), "remote_identity": "NO_UPLOAD"}
    target = Path.home() / ".spotlight" / SKY_CONFIG
    target.write_text(yaml.safe_dump(tree))
    os.environ["SKYPILOT_GLOBAL_CONFIG"] = str(target)
