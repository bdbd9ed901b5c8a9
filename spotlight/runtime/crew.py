"""The explorers of one node: who sits on which GPUs, who is ready, who has to be replaced."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import ray

from spotlight.errors import SpotlightError

MAX_DEATHS = 3  # of one explorer on one machine, before its place is left empty

Gpus = tuple[int, ...]


def places(gpus: int, sp_degree: int) -> list[Gpus]:
    """How a node's GPUs are shared out: one place per `sp_degree` GPUs, the rest are spares of the last one.

    Degree 0: all GPUs together, as one group whose degree the cost model chooses.
    """
    number = gpus // sp_degree if sp_degree else 1
    bounds = [*(place * (sp_degree or gpus) for place in range(number)), gpus]
    return [tuple(range(start, stop)) for start, stop in pairwise(bounds)]


@dataclass(slots=True)
class _Post:
    """One explorer's place, through all who sit there."""

    index: int
    gpus: Gpus
    explorer: Any = None
    preparing: Any = None
    running: Any = None
    deaths: int = 0

    def leave(self) -> None:
        self.explorer = self.preparing = self.running = None

    @property
    def ready(self) -> bool:
        return self.explorer is not None and self.preparing is None


class Crew:
    """`make(index, gpus, node_id)` starts an explorer actor on a node of Ray."""

    def __init__(self, shared_out: Sequence[Gpus], make: Callable[[int, Gpus, str], Any]) -> None:
        self._posts = [_Post(index, gpus) for index, gpus in enumerate(shared_out)]
        self._make = make

    @property
    def ready(self) -> bool:
        """Whether every explorer serves."""
        return all(post.ready for post in self._posts)

    @property
    def vacant(self) -> bool:
        """Whether a place waits for an explorer."""
        return any(post.explorer is None and post.deaths < MAX_DEATHS for post in self._posts)

    def start(self, node_id: str) -> None:
        """Fill every vacant place."""
        for post in self._posts:
            if post.explorer is None and post.deaths < MAX_DEATHS:
                post.explorer = self._make(post.index, post.gpus, node_id)
                post.preparing = post.explorer.prepare.remote()
                post.running = post.explorer.run.remote()

    def lose_all(self) -> None:
        """The machine is gone, and with it the memory of what went wrong on it."""
        for post in self._posts:
            post.leave()
            post.deaths = 0

    def problems(self) -> Iterator[str]:
        """Look at all places; what went wrong since the last time. Those who failed have left."""
        for post in self._posts:
            reference = post.preparing or post.running
            if reference is None or not _ended(reference):
                continue
            why = _failure(reference)
            if why is None and reference is post.preparing:
                post.preparing = None
            elif why is None:
                post.running = None  # it was told that the run is over
            else:
                post.leave()
                post.deaths += 1
                yield why + ("" if post.deaths < MAX_DEATHS else "; its place stays empty")


def _ended(reference: Any) -> bool:
    done, _ = ray.wait([reference], timeout=0)
    return bool(done)


def _failure(reference: Any) -> str | None:
    """Why a finished call failed; None if it did not."""
    try:
        ray.get(reference)
        return None
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        text = cause.message if isinstance(cause, SpotlightError) else f"{type(cause).__name__}: {cause}"
        return text[:300]
    except ray.exceptions.RayActorError:
        return "its process ended"
