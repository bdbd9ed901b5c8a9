"""A whole run, from an empty folder to a summary, with this machine as its head. What is started here is ended here.

Where the other machines come from is the business of a `Site`; by default this machine plays them all.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from spotlight.config import RunConfig
from spotlight.errors import Interrupted, SpotlightError
from spotlight.observe.meter import RunMeter
from spotlight.observe.metrics import Recorder, open_recorder
from spotlight.observe.progress import ProgressLog
from spotlight.provision.base import Provider
from spotlight.rl import data
from spotlight.runtime import loop
from spotlight.runtime.accounts import Accounts
from spotlight.runtime.coordinator import start_coordinator
from spotlight.runtime.crew import places
from spotlight.runtime.driver import Driver, Emit, Groups
from spotlight.runtime.fleet import Fleet
from spotlight.runtime.place import Place
from spotlight.runtime.preempt import Preemption
from spotlight.runtime.remote import get
from spotlight.runtime.session import HEAD, Session
from spotlight.runtime.trainers import Gpu, Trainers

JOURNAL = "journal"
SUMMARY = "summary.json"


class Site(Protocol):
    """The machines of a run. `session` is the head's part, `spot` gives the spot nodes, `store` all share."""

    session: Session
    spot: Provider
    store: str

    def trainer_gpus(self, number: int) -> list[Gpu]:
        """Where so many training processes stand, the first on the head; 0: one on every on-demand GPU."""

    def accounts(self, folder: Path, config: RunConfig) -> Accounts:
        """The books of such machines."""

    def close(self) -> None:
        """End all machines but this one, and the session."""


class OwnMachine:
    """This machine as a site: nodes are process trees."""

    def __init__(self, folder: Path) -> None:
        self.session = Session(folder)
        self.spot: Provider = self.session.provider
        self.store = str(folder)

    def trainer_gpus(self, number: int) -> list[Gpu]:
        """All on the head. One unless told otherwise: this machine plays the spot nodes as well."""
        return [(HEAD.name, gpu) for gpu in range(number or 1)]

    def accounts(self, folder: Path, config: RunConfig) -> Accounts:
        """What they would have cost as rented ones."""
        return Accounts(folder, config.budget)

    def close(self) -> None:
        """Kill every node."""
        self.session.close()


def run(
    config: RunConfig,
    folder: Path,
    *,
    preemptions: Sequence[Preemption] = (),
    resume: bool = False,
    on_event: Callable[[dict[str, Any]], None] | None = None,
    make_site: Callable[[Path, Emit], Site] | None = None,
) -> dict[str, Any]:
    """Train in `folder`, which exists and holds the resolved config. Returns what `summary.json` says.

    Raises a SpotlightError; whatever happens, no process of the run is left.
    """
    tell = ProgressLog(folder, on_event)
    try:
        with _interruptible():
            site = make_site or (lambda folder, _: OwnMachine(folder))
            return _run(config, folder, preemptions, resume, tell, site)
    except KeyboardInterrupt:
        error = Interrupted("interrupted", hint=f"spotlight train --resume --name {folder.name}")
        _tell_failure(tell, error)
        raise error from None
    except SpotlightError as error:
        _tell_failure(tell, error)
        raise
    except Exception as error:
        _tell_failure(tell, SpotlightError(f"{type(error).__name__}: {error}"))
        raise
    finally:
        tell.close()


def _tell_failure(tell: Emit, error: SpotlightError) -> None:
    tell({"kind": "run_failed", "code": error.code, "message": error.message, "hint": error.hint})


def _run(
    config: RunConfig,
    folder: Path,
    preemptions: Sequence[Preemption],
    resume: bool,
    tell: Emit,
    make_site: Callable[[Path, Emit], Site],
) -> dict[str, Any]:
    began = time.time()
    tell({"kind": "run_started", "run": folder.name, "iterations": config.iterations, **_facts(config)})
    with contextlib.ExitStack() as tidy:
        driver = _bring_up(config, folder, preemptions, tell, make_site, tidy)
        first, groups = _beginning(driver, resume)
        driver.await_spot(config.cluster.start_with)
        loop.train(driver, first=first, groups=groups)
        driver.trainers.everywhere("export")
        get(driver.coordinator.stop.remote("finished"))
        summary = _summary(driver, began)
        _write(folder / SUMMARY, summary)
    tell({"kind": "run_finished", "summary": summary})
    return summary


def _bring_up(
    config: RunConfig,
    folder: Path,
    preemptions: Sequence[Preemption],
    tell: Emit,
    make_site: Callable[[Path, Emit], Site],
    tidy: contextlib.ExitStack,
) -> Driver:
    """Cluster, coordinator, spot nodes, trainer; `tidy` learns how to end each of them."""
    recorder = open_recorder(
        folder,
        run=folder.name,
        config=config.model_dump(mode="json"),
        wandb_project=config.observe.wandb_project,
    )
    tidy.callback(_close_recorder, recorder, tell)
    site = make_site(folder, tell)
    session, accounts = site.session, site.accounts(folder / JOURNAL, config)
    tidy.callback(accounts.close)
    tidy.callback(site.close)
    _tell_head(tell, "joining")
    accounts.launched(HEAD.name, "on_demand", "trainer")
    accounts.up(HEAD.name)
    session.start()
    place = Place(config, str(folder), site.store)
    head = session.on(session.head_id())
    coordinator = _start_coordinator(config, folder, head)
    accounts.through(coordinator)
    fleet = Fleet(
        session,
        provider=site.spot,
        num_spot=config.cluster.spot,
        shared_out=places(config.cluster.gpus_per_node, config.cluster.sp_degree),
        told=place.tell(),
        coordinator=coordinator,
        respawn_s=config.cluster.respawn_s,
        preemptions=preemptions,
        emit=tell,
        accounts=accounts,
    )
    tidy.callback(fleet.close)
    fleet.start()
    trainers = Trainers(session, site.trainer_gpus(config.cluster.trainers), place, coordinator)
    trainers.prepare()
    accounts.ready(HEAD.name)
    _tell_head(tell, "ready")
    return Driver(
        place=place,
        coordinator=coordinator,
        trainers=trainers,
        fleet=fleet,
        meter=RunMeter(folder / JOURNAL),
        recorder=recorder,
        accounts=accounts,
        emit=tell,
        prompts=data.load(config.data.train, known=True),
    )


def _start_coordinator(config: RunConfig, folder: Path, head: Mapping[str, Any]) -> Any:
    return start_coordinator(
        folder / JOURNAL,
        policy=_policy(config),
        planner=_planner(config),
        tick_s=min(0.1, config.cluster.dead_after_s / 10),
        **head,
    )


def _tell_head(tell: Emit, state: str) -> None:
    tell({"kind": "node", "node": HEAD.name, "state": state, "role": "trainer", "price_class": "on_demand"})


def _close_recorder(recorder: Recorder, tell: Emit) -> None:
    for problem in recorder.close():
        tell({"kind": "warning", "text": problem})


def _beginning(driver: Driver, resume: bool) -> tuple[int, Groups]:
    """Publish what the run starts from: (first iteration, seeds chosen for it if it goes on)."""
    found = driver.trainers.everywhere("restore") if resume else None
    if found is None:
        if resume and any((driver.place.folder / "weights").glob("v*")):
            driver.trainers.first("rewind", 0)
        driver.publish_first(0)
        return 0, []
    for skipped in found["skipped"]:
        driver.emit({"kind": "warning", "text": f"checkpoint passed over: {skipped}"})
    driver.trainers.first("rewind", found["version"])
    return found["iteration"], driver.go_on_from(found)


def _policy(config: RunConfig) -> dict[str, Any]:
    cluster = config.cluster
    return {"dead_after_s": cluster.dead_after_s, "max_draft_lag": cluster.max_draft_lag}


def _planner(config: RunConfig) -> dict[str, Any]:
    explore, model = config.explore, config.model
    steps = explore.draft_steps or (config.sampler.steps,)
    return {
        "policy": explore.policy if config.cluster.spot else "none",
        "seed": config.seed,
        "value": explore.phi,
        "max_drafts": explore.max_drafts,
        "drafts_per_prompt": (explore.fixed_drafts or None) if config.cluster.spot else None,
        "control_share": explore.control_share,
        "settings": [[count, model.height, model.width] for count in steps],
    }


def _facts(config: RunConfig) -> dict[str, Any]:
    return {
        "algorithm": config.algorithm.kind,
        "model": config.model.kind,
        "spot": config.cluster.spot,
        "exploration": config.explore.policy if config.cluster.spot else "off: no spot nodes",
    }


def _summary(driver: Driver, began: float) -> dict[str, Any]:
    meter, scores = driver.meter, driver.scores
    meter.catch_up()
    money = driver.accounts.estimate()
    return {
        "run": driver.place.folder.name,
        "score_base": scores.get(0),
        "score_final": scores[max(scores)] if scores else None,
        "scores": {str(iteration): score for iteration, score in sorted(scores.items())},
        "iterations": driver.place.config.iterations,
        "drafts": meter.drafts,
        "drafts_in_training": meter.drafts_in_training,
        "spot_busy_share": meter.spot_busy_share,
        "preemptions": meter.preemptions,
        "samples_moved": meter.samples_moved,
        "samples_lost": meter.samples_lost,
        "usd_estimate": money.usd if money else None,
        "usd_on_demand": money.usd_on_demand if money else None,
        "wall_s": time.time() - began,
    }


def _write(path: Path, summary: Mapping[str, Any]) -> None:
    draft = path.with_suffix(".partial")
    draft.write_text(json.dumps(summary, indent=1, ensure_ascii=False) + "\n")
    os.replace(draft, path)


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """The first Ctrl-C ends the run in order; further ones must not break the tidying up."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def once(number: int, frame: Any) -> None:
        for each in before:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    for number in before:
        signal.signal(number, once)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
