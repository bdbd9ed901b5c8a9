"""How fast the scheduler decides, and how fast work is pulled through the coordinator.

core: events a second of the pure core, one thread, by number of workers. Workers pull batches of 8, report each
      denoising step, beat and commit, at the rates of a real run; ticks and stragglers included.
ray:  pulls a second, and the 99th percentile of a pull's latency, of real Ray actors that pull one request and commit
      it at once, beside the same work through `ray.util.queue.Queue` and `ActorPool` on the same cluster.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from spotlight.core import events as ev
from spotlight.core.scheduler import Scheduler
from spotlight.core.types import Outcome, Request, SampleId

STEPS, BATCH = 4, 8


class Fleet:
    """Virtual workers on an event heap: each pulls a batch, does its steps, commits, and pulls again."""

    def __init__(self, num_workers: int, seed: int = 0) -> None:
        self.scheduler = Scheduler()
        self.rng = random.Random(seed)
        self.num_events = 0
        self.spent_s = 0.0
        self.commits = 0
        self.heap: list[tuple[float, int, str, Any]] = []
        self.order = 0
        self.held: dict[str, list[ev.Grant]] = {}
        self.epochs: dict[str, int] = {}
        self.num_workers = num_workers
        self.iteration = 0
        for index in range(num_workers):
            name = f"w{index}"
            role = "spot" if index % 4 else "on_demand"
            self.epochs[name] = self.feed(ev.Join(name, f"n{index // 8}", role), 0.0)[0].epoch
        self.feed(ev.Publish(0, "d", 1), 0.0)
        for name in self.epochs:
            self.feed(ev.Admit(name, self.epochs[name], 0, "d", 1), 0.0)
            self.later(self.rng.random(), "pull", name)
            self.later(self.rng.random(), "beat", name)
        self.later(0.1, "tick", None)

    def feed(self, event: ev.Event, now: float) -> list[ev.Command]:
        """One event; only the scheduler's own time is counted."""
        start = time.perf_counter()
        commands = self.scheduler.on(event, now)
        self.spent_s += time.perf_counter() - start
        self.num_events += 1
        for command in commands:
            if type(command) is ev.Grant:
                self.granted(command, now)
        return commands

    def later(self, at: float, what: str, who: Any) -> None:
        self.order += 1
        heapq.heappush(self.heap, (at, self.order, what, who))

    def granted(self, grant: ev.Grant, now: float) -> None:
        held = self.held.setdefault(grant.worker, [])
        held.append(grant)
        if grant.token == grant.batch:
            self.later(now + 1.0 + 0.2 * self.rng.random(), "step", (grant.worker, 1))

    def submit(self, now: float) -> None:
        self.iteration += 1
        self.feed(ev.Publish(self.iteration, "d", 1), now)
        for name, epoch in self.epochs.items():
            self.feed(ev.Admit(name, epoch, self.iteration, "d", 1), now)
        ids = [SampleId(self.iteration, row, seed) for row in range(self.num_workers * 2) for seed in range(24)]
        self.feed(ev.Submit(tuple(Request("final", sample, "512", STEPS) for sample in ids)), now)
        self.left = len(ids)

    def run(self, num_events: int) -> None:
        """Until so many events were taken; a new iteration begins whenever the last one is done."""
        self.left = 0
        now = 1.0
        while self.num_events < num_events:
            if self.left == 0:
                self.submit(now)
            at, _, what, who = heapq.heappop(self.heap)
            now = max(now, at)
            getattr(self, what)(who, now)

    def tick(self, _: None, now: float) -> None:
        self.feed(ev.Tick(0.1), now)
        self.later(now + 0.1, "tick", None)

    def beat(self, name: str, now: float) -> None:
        beats = tuple((grant.token, 1) for grant in self.held.get(name, ()))
        cancelled = self.feed(ev.Heartbeat(name, self.epochs[name], beats), now)[-1].cancelled
        if cancelled:
            self.held[name] = [grant for grant in self.held[name] if grant.token not in cancelled]
        self.later(now + 1.0, "beat", name)

    def pull(self, name: str, now: float) -> None:
        self.feed(ev.Pull(name, self.epochs[name], BATCH), now)

    def step(self, who: tuple[str, int], now: float) -> None:
        name, step = who
        for grant in self.held[name]:
            self.feed(ev.Progress(grant.token, step, "crc32:0", 1 << 18), now)
        if step < STEPS:
            self.later(now + 1.0 + 0.2 * self.rng.random(), "step", (name, step + 1))
            return
        for grant in self.held.pop(name):
            outcome = Outcome(grant.request.sample, "final", grant.version, 0.5, "d", name, 0.6, STEPS)
            answer = self.feed(ev.Commit(grant.token, outcome), now)[0]
            self.left -= type(answer) is ev.Accepted
        self.pull(name, now)


def core(num_workers: int, num_events: int) -> float:
    """Events a second of the core alone."""
    fleet = Fleet(num_workers)
    fleet.run(num_events)
    return fleet.num_events / fleet.spent_s


if __name__ == "__main__":
    for n in (16, 256, 1024):
        print(n, core(n, 200000))
