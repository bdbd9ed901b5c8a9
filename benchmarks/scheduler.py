"""How fast the scheduler decides, and how fast work is pulled through the coordinator.

core: events a second of the pure core, one thread, by number of workers. Workers pull batches of 8, report
      each denoising step, beat and commit, at the rates of a real run; ticks and second runs included.
ray:  requests a second, and the 99th percentile of a pull's latency, of workers in two Ray actors that pull
      and hand in the results with the next pull, beside the same work through `ray.util.queue.Queue` (one
      for requests, one for results) and `ActorPool` on the same cluster: one request at a time, and, as a
      run does it, 8 at a time (`batched_`, lists of 8 for the other two). The coordinator leases, fences and
      journals each request; the other two do not.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import heapq
import json
import random
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
        """Let something happen at a virtual time."""
        self.order += 1
        heapq.heappush(self.heap, (at, self.order, what, who))

    def granted(self, grant: ev.Grant, now: float) -> None:
        """A worker begins a batch."""
        held = self.held.setdefault(grant.worker, [])
        held.append(grant)
        if grant.token == grant.batch:
            self.later(now + 1.0 + 0.2 * self.rng.random(), "step", (grant.worker, 1))

    def submit(self, now: float) -> None:
        """A new iteration: weights, and the finals of 2 rows a worker."""
        self.iteration += 1
        self.feed(ev.Publish(self.iteration, "d", 1), now)
        for name, epoch in self.epochs.items():
            self.feed(ev.Admit(name, epoch, self.iteration, "d", 1), now)
        ids = [
            SampleId(self.iteration, row, seed) for row in range(self.num_workers * 2) for seed in range(24)
        ]
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
        """Time passes."""
        self.feed(ev.Tick(0.1), now)
        self.later(now + 0.1, "tick", None)

    def beat(self, name: str, now: float) -> None:
        """A worker lives, and hears what it must drop."""
        beats = tuple((grant.token, 1) for grant in self.held.get(name, ()))
        cancelled = self.feed(ev.Heartbeat(name, self.epochs[name], beats), now)[-1].cancelled
        if cancelled:
            self.held[name] = [grant for grant in self.held[name] if grant.token not in cancelled]
        self.later(now + 1.0, "beat", name)

    def pull(self, name: str, now: float) -> None:
        """A worker is free."""
        self.feed(ev.Pull(name, self.epochs[name], BATCH), now)

    def step(self, who: tuple[str, int], now: float) -> None:
        """A worker has done one step of its batch, or all of them."""
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


class Clients:
    """Half of the workers of the Ray part, as coroutines in one process."""

    async def through_coordinator(self, coordinator: Any, names: list[str], batch: int) -> list[float]:
        """Pull and commit until there is nothing left; the latency of each pull that gave something, in s."""
        latencies: list[float] = []
        await asyncio.gather(*[self._serve(coordinator, name, batch, latencies) for name in names])
        return latencies

    async def _serve(self, coordinator: Any, name: str, batch: int, latencies: list[float]) -> None:
        epoch = (await coordinator.register.remote(name, name, "spot"))["epoch"]
        await coordinator.admitted.remote(name, epoch, 0, "d", 1)
        results: list[tuple[int, dict[str, Any]]] = []
        while True:
            start = time.perf_counter()
            reply = await coordinator.pull.remote(name, epoch, batch, 0.2, results)
            if not reply["grants"]:
                return
            latencies.append(time.perf_counter() - start)
            results = [(g["token"], result(g["request"]["sample"], name)) for g in reply["grants"]]

    async def through_queue(self, work: Any, done: Any, names: list[str], batch: int) -> None:
        """The same through two queues: `work` is full from the beginning, and empty at the end."""
        from ray.util.queue import Empty

        async def serve(name: str) -> None:
            with contextlib.suppress(Empty):
                while items := await work.actor.get_nowait_batch.remote(batch):
                    await done.actor.put_nowait_batch.remote([result(item["sample"], name) for item in items])

        await asyncio.gather(*[serve(name) for name in names])

    async def serve(self, items: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Some requests, as ActorPool hands them over."""
        return [result(item["sample"], "pool") for item in items]


def result(sample: str, worker: str) -> dict[str, Any]:
    """An outcome of the usual size."""
    return {
        "sample": sample, "kind": "final", "version": 0, "reward": 0.5, "digest": "crc32:00000000",
        "worker": worker, "cost_s": 0.6, "num_steps": STEPS,
    }  # fmt: skip


def requests(count: int) -> list[dict[str, Any]]:
    """That many finals."""
    return [
        {"kind": "final", "sample": f"it1/row{i % 64}/s{i // 64}", "batch_key": "k", "num_steps": STEPS}
        for i in range(count)
    ]


def by_coordinator(clients: list[Any], names: list[list[str]], count: int, batch: int) -> tuple[float, float]:
    """(requests a second, p99 of a pull in ms)."""
    import ray

    from spotlight.runtime.coordinator import start_coordinator

    with tempfile.TemporaryDirectory() as folder:
        coordinator = start_coordinator(Path(folder), policy={"dead_after_s": 600.0})
        ray.get(coordinator.publish.remote(0, "d", 1))
        ray.get(coordinator.submit.remote(requests(count)))
        start = time.perf_counter()
        calls = [
            client.through_coordinator.remote(coordinator, group, batch)
            for client, group in zip(clients, names, strict=True)
        ]
        items, since = 0, 0
        while items < count:
            reply = ray.get(coordinator.collect.remote(since, 1.0))
            items, since = items + len(reply["items"]), reply["next"]
        rate = count / (time.perf_counter() - start)
        latencies = sorted(latency for latencies in ray.get(calls) for latency in latencies)
        ray.kill(coordinator)
    return rate, 1e3 * latencies[int(len(latencies) * 0.99)]


def by_queue(clients: list[Any], names: list[list[str]], count: int, batch: int) -> float:
    """Requests a second through `ray.util.queue.Queue`."""
    import ray
    from ray.util.queue import Queue

    work, done = Queue(actor_options={"num_cpus": 0}), Queue(actor_options={"num_cpus": 0})
    work.put_nowait_batch(requests(count))
    start = time.perf_counter()
    calls = [
        client.through_queue.remote(work, done, group, batch)
        for client, group in zip(clients, names, strict=True)
    ]
    for _ in range(0, count, batch):
        while done.qsize() < batch:
            time.sleep(0.001)
        done.get_nowait_batch(batch)
    rate = count / (time.perf_counter() - start)
    ray.get(calls)
    work.shutdown(), done.shutdown()
    return rate


def by_pool(clients: list[Any], num_workers: int, count: int, batch: int) -> float:
    """Requests a second through `ray.util.ActorPool`."""
    from ray.util import ActorPool

    pool = ActorPool([clients[i % len(clients)] for i in range(num_workers)])
    work = requests(count)
    start = time.perf_counter()
    chunks = [work[i : i + batch] for i in range(0, count, batch)]
    for _ in pool.map_unordered(lambda actor, items: actor.serve.remote(items), chunks):
        pass
    return count / (time.perf_counter() - start)


def through_ray(worker_counts: list[int], count: int, rounds: int, batch: int) -> dict[str, dict[str, float]]:
    """The best of some rounds of each way, by number of workers: the machine's noise only ever slows down."""
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    actor = ray.remote(Clients).options(num_cpus=0, max_concurrency=4096)
    clients = [actor.remote() for _ in range(2)]
    by_pool(clients, 2, 64, 1)  # both processes are up
    found: dict[str, dict[str, float]] = {
        key: {} for key in ("pulls_per_s", "pull_p99_ms", "ray_queue_pulls_per_s", "actor_pool_pulls_per_s")
    }
    for num_workers in worker_counts:
        names = [[f"w{i}" for i in range(part, num_workers, 2)] for part in range(2)]
        ours = [by_coordinator(clients, names, count, batch) for _ in range(rounds)]
        queue = max(by_queue(clients, names, count, batch) for _ in range(rounds))
        pool = max(by_pool(clients, num_workers, count, batch) for _ in range(rounds))
        best = (max(rate for rate, _ in ours), min(p99 for _, p99 in ours), queue, pool)
        for values, value in zip(found.values(), best, strict=True):
            values[str(num_workers)] = round(value, 2)
    ray.shutdown()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the JSON object alone")
    parser.add_argument("--events", type=int, default=300_000, help="events of the core, per worker count")
    parser.add_argument("--requests", type=int, default=3200, help="requests through Ray, per way and count")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--core-only", action="store_true")
    arguments = parser.parse_args()
    out: dict[str, Any] = {"core_events_per_s": {}}
    for num_workers in (16, 256, 1024):
        rate = max(core(num_workers, arguments.events) for _ in range(arguments.rounds))
        out["core_events_per_s"][str(num_workers)] = round(rate)
        if not arguments.json:
            print(f"{num_workers:>5} workers, core: {rate:,.0f} events/s")
    if not arguments.core_only:
        count = arguments.requests // BATCH * BATCH
        for prefix, batch in (("", 1), ("batched_", BATCH)):
            found = through_ray([2, 16, 64], count, arguments.rounds, batch)
            out |= {prefix + key: values for key, values in found.items()}
            if not arguments.json:
                print(f"through Ray, {batch} at a time, by number of workers: {found}")
    print(json.dumps(out))


if __name__ == "__main__":
    main()
