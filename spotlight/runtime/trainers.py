"""The training processes of a run as one: every GPU of the on-demand part has one, and they move in step.

A call goes to all of them or to the first alone. When one ends, the others wait for it in a collective; whoever waits
for them stops waiting.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray

from spotlight.errors import CapacityError, CommError, RunError, SpotlightError
from spotlight.observe import grids
from spotlight.runtime.place import Place
from spotlight.runtime.remote import get
from spotlight.runtime.session import Session

AWAIT_NODES_S = 600.0
# How long after the first failure the true one may still show: peers notice a death before Ray does.
BLAME_S = 10.0

Gpu = tuple[str, int]  # node and index


class TrainerActor:
    """One process. It sees its own GPU only, which has to be said before anything imports torch."""

    def __init__(self, gpu: int, told: Mapping[str, Any], coordinator: Any, who: Mapping[str, Any]) -> None:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(gpu)
        from spotlight.runtime.trainer import TrainerProcess

        self._process = TrainerProcess(told, coordinator, gpu=gpu, **who)

    def call(self, method: str, *arguments: Any) -> Any:
        """One of `TrainerProcess`'s methods."""
        return getattr(self._process, method)(*arguments)


class Trainers:
    """One process on each of `gpus`, the first of which is on the head. Raises CapacityError if a node is missing."""

    def __init__(self, session: Session, gpus: Sequence[Gpu], place: Place, coordinator: Any) -> None:
        self._place, self._gpus = place, list(gpus)
        self._address = session.address
        ids = _await_nodes(session, {node for node, _ in gpus})
        self._actors = [
            ray.remote(TrainerActor)
            .options(max_concurrency=2, **session.on(ids[node]))
            .remote(gpu, place.tell(), coordinator, {"node": node, "rank": rank, "world": len(gpus)})
            for rank, (node, gpu) in enumerate(gpus)
        ]

    def prepare(self) -> dict[str, Any]:
        """Bring all of them up. Facts about the base."""
        port = self.first("host", self._address) if len(self._actors) > 1 else 0
        facts: dict[str, Any] = self.everywhere("prepare", self._address, port)
        return facts

    def everywhere(self, method: str, *arguments: Any) -> Any:
        """Call it in all processes and wait for all; the first one's answer. Raises CommError for one that is gone."""
        return self.finish(self.start(method, *arguments))

    def first(self, method: str, *arguments: Any) -> Any:
        """Call it in the first process alone."""
        return get(self._actors[0].call.remote(method, *arguments))

    def tell_first(self, method: str, *arguments: Any) -> None:
        """The same without waiting."""
        self._actors[0].call.remote(method, *arguments)

    def start(self, method: str, *arguments: Any) -> list[Any]:
        """Begin a call in all processes, to be watched with `check` and ended with `finish`."""
        return [actor.call.remote(method, *arguments) for actor in self._actors]

    def finish(self, calls: Sequence[Any]) -> Any:
        """The first process's answer, when all have answered."""
        return self._finish(calls)[0]

    def check(self, calls: Sequence[Any]) -> None:
        """Raise what one of these calls has raised, if one has."""
        done, _ = ray.wait(list(calls), num_returns=len(calls), timeout=0)
        self._raise_first(done, calls)

    def evaluate(self, iteration: int) -> dict[str, Any]:
        """Held-out score after `iteration` iterations, with a sheet of the first images."""
        parts = self._finish(self.start("evaluate"))
        scores, captions, pixels = (_dealt([part[column] for part in parts]) for column in range(3))
        good = [score for score in scores if score is not None]
        mean = sum(good) / len(good) if good else 0.0
        path = grids.write_grid(
            self._place.folder,
            iteration,
            pixels,
            captions,
            title=f"iteration {iteration}, held-out {self._place.config.reward.held_out} {mean:.3f}",
        )
        return {
            "score": mean,
            "exact": sum(score == 1.0 for score in good) / max(len(good), 1),
            "failed": len(scores) - len(good),
            "grid": str(path.relative_to(self._place.folder)),
        }

    def _finish(self, calls: Sequence[Any]) -> list[Any]:
        waiting = list(calls)
        while waiting:
            done, waiting = ray.wait(waiting, num_returns=1)
            self._raise_first(done, calls)
        return [get(call) for call in calls]

    def _raise_first(self, done: Sequence[Any], calls: Sequence[Any]) -> None:
        if any(_failure(call) is not None for call in done):
            raise self._blame(calls)

    def _blame(self, calls: Sequence[Any]) -> SpotlightError:
        """Why it failed: a process that is gone, else an error of ours, else whatever the first one met."""
        deadline = time.monotonic() + BLAME_S
        while True:
            done, waiting = ray.wait(list(calls), num_returns=len(calls), timeout=0.2)
            failures = {calls.index(call): error for call in done if (error := _failure(call)) is not None}
            gone = next((rank for rank, error in failures.items() if isinstance(error, CommError)), None)
            if gone is not None:
                return self._gone(gone, failures[gone])
            ours = next((error for error in failures.values() if type(error) is not RunError), None)
            if ours is not None or not waiting or time.monotonic() > deadline:
                return ours or next(iter(failures.values()))

    def _gone(self, rank: int, error: SpotlightError) -> SpotlightError:
        node, world = self._gpus[rank][0], len(self._gpus)
        return CommError(
            f"training process {rank} of {world} on {node} ended: {error.message}",
            hint=f"spotlight train --resume --name {self._place.folder.name} goes on from the newest checkpoint",
        )


def _await_nodes(session: Session, wanted: set[str]) -> dict[str, str]:
    """Ray's id of every node by our name, when all of them are there."""
    deadline = time.monotonic() + AWAIT_NODES_S
    while missing := wanted - (found := {name: id_ for id_, name in session.node_ids().items()}).keys():
        if time.monotonic() > deadline:
            raise CapacityError(f"{', '.join(sorted(missing))} did not join within {AWAIT_NODES_S:.0f} s")
        time.sleep(0.1)
    return found


def _failure(call: Any) -> SpotlightError | None:
    try:
        get(call)
    except SpotlightError as error:
        return error
    return None


def _dealt(hands: Sequence[Sequence[Any]]) -> list[Any]:
    """What was dealt out one by one, back in order."""
    return [hand[turn] for turn in range(len(hands[0])) for hand in hands if turn < len(hand)]
