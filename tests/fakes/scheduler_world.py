"""A scheduler with a clock that the test turns, short ways to say things, and a journal of all of it."""

from __future__ import annotations

from spotlight.core import events as ev
from spotlight.core.history import check
from spotlight.core.replay import replay
from spotlight.core.scheduler import Scheduler
from spotlight.core.types import Outcome, Policy, Request, SampleId

STEPS = 4


class World:
    def __init__(self, policy=None, drafts=None):
        self.policy = policy or Policy()
        self.drafts = drafts
        self.answers = []
        self.scheduler = Scheduler(self.policy, self if drafts else None)
        self.now = 100.0
        self.epoch = {}
        self.records = [
            {"type": "start", "seq": 1, "utc": 0.0, "policy": ev.encode(self.policy), "first_token": 1}
        ]
        self.published = -1

    # the draft source, its answers recorded as the coordinator does

    def next_drafts(self, max_requests, now):
        self.answers.append(self.drafts.next_drafts(max_requests, now))
        return self.answers[-1]

    def draft_done(self, *args):
        self.drafts.draft_done(*args)

    def draft_returned(self, *args):
        self.drafts.draft_returned(*args)

    def say(self, event):
        self.answers = []
        commands = self.scheduler.on(event, self.now)
        self.records.append(
            {
                "type": "on",
                "seq": len(self.records) + 1,
                "utc": self.now,
                "now": self.now,
                "event": ev.encode(event),
                "commands": [ev.encode(command) for command in commands],
                "drafts": self.answers,
            }
        )
        for command in commands:
            if isinstance(command, ev.Joined):
                self.epoch[command.worker] = command.epoch
        return commands

    def publish(self, version=None):
        self.published = self.published + 1 if version is None else version
        return self.say(ev.Publish(self.published, f"d{self.published}", 3))

    def join(self, worker, node=None, role="spot", *, admit=True):
        commands = self.say(ev.Join(worker, node or f"node-{worker}", role))
        if admit:
            commands += self.admit(worker)
        return commands

    def admit(self, worker):
        return self.say(ev.Admit(worker, self.epoch[worker], self.published, f"d{self.published}", 3))

    def submit(self, count, kind="final", *, iteration=1, key="k", first=0):
        samples = [SampleId(iteration, 1, seed) for seed in range(first, first + count)]
        return self.say(ev.Submit(tuple(Request(kind, sample, key, STEPS) for sample in samples)))

    def pull(self, worker, max_requests=1):
        return of(self.say(ev.Pull(worker, self.epoch[worker], max_requests)), ev.Grant)

    def beat(self, worker, *grants, step=0):
        beats = tuple((grant.token, step) for grant in grants)
        return of(self.say(ev.Heartbeat(worker, self.epoch[worker], beats)), ev.Renewed)[0]

    def save(self, grant, step):
        return self.say(ev.Progress(grant.token, step, "crc32:0", 9))

    def commit(self, grant, *, cost_s=1.0, digest="x", **changes):
        fields = {
            "sample": grant.request.sample,
            "kind": grant.request.kind,
            "version": grant.version,
            "reward": 0.5,
            "digest": digest,
            "worker": grant.worker,
            "cost_s": cost_s,
            "num_steps": STEPS - grant.resume_step,
            "resumed_from": grant.resume_step,
        }
        return self.say(ev.Commit(grant.token, Outcome(**(fields | changes))))

    def pass_time(self, seconds, *alive, step_s=0.5):
        """Tick on, the workers of `alive` beating with what they hold."""
        commands = []
        until = self.now + seconds
        while self.now < until:
            self.now += step_s
            for worker in filter(self.scheduler.members.workers.__contains__, alive):
                leases = self.scheduler.members.workers[worker].leases.values()
                beats = tuple((lease.token, lease.step) for lease in leases)
                commands += self.say(ev.Heartbeat(worker, self.epoch[worker], beats))
            commands += self.say(ev.Tick(step_s))
        return commands


def of(commands, kind):
    """The commands of one kind."""
    return [command for command in commands if isinstance(command, kind)]


def world(*workers, policy=None, drafts=None):
    """A world with version 0 published and these spot workers in service."""
    made = World(policy, drafts)
    made.publish()
    for worker in workers:
        made.join(worker)
    return made


def teach(w, cost_s):
    """Let each worker do one request at a known cost."""
    for number, (worker, seconds) in enumerate(cost_s.items()):
        w.submit(1, iteration=1, first=1000 + number)
        w.commit(w.pull(worker)[0], cost_s=seconds)


def assert_clean(w):
    """Every invariant is kept, and a replay decides the same."""
    for verdict in [*check(w.records), replay(w.records)]:
        assert verdict.ok, (verdict, verdict.problems)
