"""Rent a run's machines, and give them back: all or nothing, whatever happens in between.

The run's name, cloud and region are on disk before the first machine is asked for, so that `spotlight down RUN` can
always find them. Whatever ends `bring_up` early (an error, Ctrl-C, twice) ends the machines too, or says how.
"""

from __future__ import annotations

import secrets
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from spotlight.errors import Interrupted, SpotlightError
from spotlight.provision import skypilot, templates
from spotlight.provision.base import Provider, Role
from spotlight.provision.launch import FILE, Launch
from spotlight.provision.machines import MachineList, machine_list

SKY_CONFIG = "sky.yaml"
SETTLE_S = 3.0
Say = Callable[[str], None]
MakeProvider = Callable[[Launch, Path], Provider]


def bring_up(
    launch: Launch,
    folder: Path,
    say: Say,
    *,
    make: MakeProvider | None = None,
    machines: MachineList | None = None,
    forget: Callable[[str], None] = skypilot.forget,
) -> None:
    """Rent the on-demand part of a run whose `folder` holds launch.json and config.yaml; the head gets the rest.

    `make`, `machines` and `forget` are for other clouds than SkyPilot's. Raises a SpotlightError, machines ended.
    """
    machines = machines or machine_list(launch.cloud, launch.region)
    # Under the home folder: SkyPilot's server must see it too, and /tmp may be private to us.
    with tempfile.TemporaryDirectory(prefix="launch-", dir=folder) as staged:
        try:
            stage(folder, Path(staged))
            provider = (make or _sky_provider)(launch, Path(staged))
            (head,) = (spec for spec in launch.specs(Role.ON_DEMAND) if spec.head)
            say(f"asking {launch.cloud} for {head.name} in {launch.region}")
            with skypilot.its_words_aside():
                provider.launch(head)
        except BaseException as error:
            _undo(launch, machines, forget, say)
            if isinstance(error, KeyboardInterrupt):
                raise Interrupted("interrupted; nothing is left in the cloud") from None
            raise


def give_back(
    launch: Launch,
    *,
    machines: MachineList | None = None,
    forget: Callable[[str], None] = skypilot.forget,
    settle_s: float = SETTLE_S,
) -> int:
    """End every machine of a run; returns how many there were, once the cloud's own list shows none twice.

    Between the two looks SkyPilot is made to forget the on-demand cluster: that ends whatever its server may still be
    doing for it, such as trying the next zone because the machine of the first one went away.

    Raises PreconditionError naming what would not end, CredentialError when the cloud cannot be asked.
    """
    machines = machines or machine_list(launch.cloud, launch.region)
    ended = skypilot.end_machines(machines, launch.run)
    forget(templates.cluster_name(launch.run, "od0"))
    time.sleep(settle_s)  # what the head had asked for in its last moment
    return ended + skypilot.end_machines(machines, launch.run)


def stage(folder: Path, target: Path) -> None:
    """Lay out what is sent to the head: the launch, the configuration, SkyPilot's settings, what to install."""
    told = target / "launch"
    told.mkdir()
    for name in (FILE, "config.yaml"):
        shutil.copy2(folder / name, told / name)
    settings = skypilot.user_config()
    if settings.is_file():
        shutil.copy2(settings, told / SKY_CONFIG)
    templates.stage_dist(target / "dist")


def _sky_provider(launch: Launch, staged: Path) -> Provider:
    return skypilot.SkyProvider(
        launch,
        machine_list(launch.cloud, launch.region),
        token=secrets.token_hex(32),
        mounts={
            templates.SCRIPTS: templates.folder(),
            templates.DIST: staged / "dist",
            templates.LAUNCH: staged / "launch",
        },
        envs=templates.versions(),
    )


def _undo(launch: Launch, machines: MachineList, forget: Callable[[str], None], say: Say) -> None:
    """End what a broken launch has made; if even that is broken off, say how to do it."""
    command = f"spotlight down {launch.run}"
    say("ending what was begun ...")
    try:
        give_back(launch, machines=machines, forget=forget)
    except KeyboardInterrupt:
        raise Interrupted("interrupted while ending machines; some may live on", hint=command) from None
    except SpotlightError as error:
        raise type(error)(f"{error.message}\nmachines may live on", hint=command) from error
