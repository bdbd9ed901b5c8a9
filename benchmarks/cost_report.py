"""How long a cost report takes, from the journal on disk to the JSON document, and how that grows.

A real scheduler is driven with made-up workers on 8-GPU nodes of which some are lost and launched again; its
journal is written by the run's own writer. Aim: 100 000 records in under 2 s.

    python benchmarks/cost_report.py [--records 100000] [--json]
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from spotlight.core import cost
from spotlight.core import events as ev
from spotlight.core.ledger import ledger_from_records
from spotlight.core.scheduler import Scheduler
from spotlight.core.types import Gpu, Outcome, Policy, Request, SampleId
from spotlight.observe import bill, journal
from spotlight.provision.prices import load_rules

NODES, GPUS = 16, 8


class MadeRun:
    """Writes a journal of at least `records` records."""

    def __init__(self, folder: Path, records: int) -> None:
        self.journal = journal.Journal(folder, fsync="never")
        self.scheduler = Scheduler(Policy(dead_after_s=1e9, stall_after_s=1e9))
        self.count, self.now, self.start_s = 0, 0.0, time.time()
        self.write({"type": "start", "policy": {}, "first_token": 1})
        self.on(ev.Publish(0, "d", 1))
        market = {"cloud": "aws", "instance_type": "p5.48xlarge"}
        for usd, price_class in (("15", "spot"), ("55.04", "on_demand")):
            point = cost.PricePoint(
                **market, price_class=price_class, usd_per_h=cost.amount(usd), source="made"
            )
            self.write(cost.encode(point))
        self.launches = dict.fromkeys((f"s{i}" for i in range(NODES)), -1)
        self.workers: dict[str, int] = {}
        for node in self.launches:
            self.launch(node)
        iteration = 0
        while self.count < records:
            self.iterate(iteration)
            iteration += 1
        self.journal.close()

    def iterate(self, iteration: int) -> None:
        """One roll-out of 512 samples; now and then a node is lost in the middle of it."""
        requests = tuple(Request("final", SampleId(iteration, i // 8, i % 8), "b", 4) for i in range(512))
        self.on(ev.Submit(requests))
        lost = f"s{iteration % NODES}" if iteration % 4 == 0 else None
        while True:
            held: dict[str, list[ev.Grant]] = {}
            for worker, epoch in self.workers.items():
                grants = [c for c in self.on(ev.Pull(worker, epoch, 8)) if isinstance(c, ev.Grant)]
                if grants:
                    held[worker] = grants
                else:
                    self.on(ev.EndPull(worker, epoch))
            if not held:
                return
            if lost is not None:
                self.lose(lost)
            for worker, grants in held.items():
                if lost is None or not worker.startswith(f"{lost}/"):
                    for grant in grants:
                        self.commit(grant)
            lost = None

    def commit(self, grant: ev.Grant) -> None:
        """Save one step on the way, then finish."""
        request = grant.request
        self.on(ev.Progress(grant.token, 2, "digest", 1000))
        outcome = Outcome(request.sample, request.kind, grant.version, 1.0, "d", grant.worker, 1.0, 4)
        self.on(ev.Commit(grant.token, outcome))

    def launch(self, node: str) -> None:
        """The next machine behind a name, with a worker on each GPU."""
        self.launches[node] += 1
        key = {"node": node, "launch": self.launches[node]}
        self.write(
            cost.encode(
                cost.NodeRequested(
                    **key,
                    at_s=self.start_s + self.now,
                    cloud="aws",
                    instance_type="p5.48xlarge",
                    gpus=GPUS,
                    price_class="spot",
                )
            )
        )
        for record in (
            cost.NodeUp(**key, at_s=self.start_s + self.now),
            cost.NodeReady(**key, at_s=self.start_s + self.now),
        ):
            self.write(cost.encode(record))
        for index in range(GPUS):
            worker = f"{node}/{index}"
            commands = self.on(ev.Join(worker, node, "spot", (Gpu(node, index),)))
            epoch = next(c.epoch for c in commands if isinstance(c, ev.Joined))
            self.on(ev.Admit(worker, epoch, 0, "d", 1))
            self.workers[worker] = epoch

    def lose(self, node: str) -> None:
        """EC2 takes a machine; another comes at once."""
        self.on(ev.NodeLost(node, "preempted"))
        ended = cost.NodeEnded(
            node=node,
            launch=self.launches[node],
            at_s=self.start_s + self.now,
            reason="interrupted",
            source="ec2:Server.SpotInstanceTermination",
        )
        self.write(cost.encode(ended))
        for index in range(GPUS):
            self.workers.pop(f"{node}/{index}", None)
        self.launch(node)

    def on(self, event: Any) -> list[Any]:
        """One event through the scheduler and into the journal."""
        self.now += 0.05
        commands = self.scheduler.on(event, self.now)
        encoded = [ev.encode(command) for command in commands]
        self.write(
            {
                "type": "on",
                "utc": self.start_s + self.now,
                "now": self.now,
                "event": ev.encode(event),
                "commands": encoded,
            }
        )
        return commands

    def write(self, record: dict[str, Any]) -> None:
        """One record, at the run's own time."""
        self.journal.append({"utc": self.start_s + self.now, **record})
        self.count += 1


def measure(records: int, repeats: int) -> dict[str, Any]:
    """Best of `repeats`; `ledger_s` holds `read_s`: the ledger is built while the journal streams by."""
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root) / "journal"
        run = MadeRun(folder, records)
        rules, now_s = load_rules(), run.start_s + run.now + 1
        best: dict[str, float] = {}
        for _ in range(repeats):
            clock = [time.perf_counter()]
            for _record in journal.read(folder):  # reading alone, to see its share
                pass
            clock.append(time.perf_counter())
            cpu_began = time.process_time()
            ledger = ledger_from_records(journal.read(folder))
            clock.append(time.perf_counter())
            report = bill.build([bill.RunCost("made", ledger)], rules, now_s, by="node").to_dict()
            json.dumps(report)
            clock.append(time.perf_counter())
            cpu_s = time.process_time() - cpu_began
            read_s, ledger_s, bill_s = (b - a for a, b in pairwise(clock))
            if not best or ledger_s + bill_s < best["total_s"]:
                best = {
                    "read_s": read_s,
                    "ledger_s": ledger_s,
                    "bill_s": bill_s,
                    "total_s": ledger_s + bill_s,
                    "cpu_s": cpu_s,  # what it takes on a machine with nothing else to do
                }
    return {
        "records": run.count,
        **{name: round(value, 4) for name, value in best.items()},
        "machines": report["machines"],
        "work_records": sum(map(len, ledger.work.values())),
        "total_usd": report["total_usd"],
        "phases_usd": report["phases_usd"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--records", type=int, default=100_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="only the last line")
    options = parser.parse_args()
    sizes = [max(2000, options.records // 4), max(4000, options.records // 2), options.records]
    results = [measure(size, options.repeats) for size in sizes]
    if not options.json:
        for row in results:
            print(
                f"{row['records']:>8} records  read {row['read_s']:.2f} s  ledger {row['ledger_s']:.2f} s  "
                f"bill {row['bill_s']:.2f} s  total {row['total_s']:.2f} s  cpu {row['cpu_s']:.2f} s  "
                f"({row['machines']} machines)"
            )
    per_record = [row["cpu_s"] / row["records"] for row in results]
    print(
        json.dumps(
            {
                "benchmark": "cost_report",
                "total_s": results[-1]["total_s"],
                "cpu_s": results[-1]["cpu_s"],
                "records": results[-1]["records"],
                "growth_per_record": round(per_record[-1] / per_record[0], 3),
                "by_size": results,
            }
        )
    )


if __name__ == "__main__":
    main()
