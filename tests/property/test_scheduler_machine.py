"""The scheduler under every event in every order, twice and late.

The machine keeps its own, much simpler book of what must hold, from the commands alone; at the end it lets the work
drain, and what happened is judged again by the checkers that `spotlight verify` uses, and replayed.
SPOTLIGHT_NIGHTLY=1 runs 2000 examples of 100 steps.
"""

from __future__ import annotations

import os

import pytest
from fakes.fake_drafts import FakeDrafts
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from spotlight.core import events as ev
from spotlight.core.history import check
from spotlight.core.replay import replay
from spotlight.core.scheduler import Scheduler
from spotlight.core.types import Outcome, Policy, Request, SampleId

NIGHTLY = bool(os.environ.get("SPOTLIGHT_NIGHTLY"))
POLICY = Policy(dead_after_s=3.0, stall_after_s=20.0, quiet_s=5.0, flap_backoff_s=2.0, keep_iterations=1)
WORKERS = {"a": ("n0", "on_demand"), "b": ("n0", "spot"), "c": ("n1", "spot"), "d": ("n2", "spot")}
STEPS = 4

workers = st.sampled_from(sorted(WORKERS))
nodes = st.sampled_from(["n0", "n1", "n2", "n9"])
mostly = st.sampled_from([True] * 7 + [False])  # the wrong thing now and then
rarely = st.sampled_from([False] * 7 + [True])
picks = st.integers(0, 30)  # which of the things at hand, the newest first


class SchedulerMachine(RuleBasedStateMachine):
    """Workers, a driver and a cloud that do anything at any time."""

    def __init__(self):
        super().__init__()
        self.drafts = FakeDrafts()
        self.answers = []
        self.scheduler = Scheduler(POLICY, self)
        self.now = 0.0
        self.version = 0
        self.iteration = 1
        self.seed = 0
        self.heard = []  # events, to be said again
        self.records = [{"type": "start", "seq": 0, "policy": ev.encode(POLICY), "first_token": 1}]
        # the machine's own book
        self.epoch_of = {}  # live worker -> epoch
        self.epochs = {name: [0] for name in WORKERS}  # all it ever had
        self.admitted = {}
        self.grants = {}  # token -> Grant, all ever
        self.live = set()  # tokens that hold
        self.fate = {}  # request -> how it ended
        self.trained = {}  # SampleId of finals -> token

    # -- the draft source, its answers recorded as the coordinator does

    def next_drafts(self, max_requests, now):
        self.answers.append(self.drafts.next_drafts(max_requests, now))
        return self.answers[-1]

    def draft_done(self, *args):
        self.drafts.draft_done(*args)

    def draft_returned(self, *args):
        self.drafts.draft_returned(*args)

    # -- saying something, and believing the answer

    def say(self, event, *, again=True):
        if again and not isinstance(event, ev.Tick):
            self.heard.append(event)
        self.answers, self.last = [], event
        commands = self.scheduler.on(event, self.now)
        record = {"type": "on", "seq": len(self.records), "now": self.now, "event": ev.encode(event)}
        record |= {"commands": [ev.encode(command) for command in commands], "drafts": self.answers}
        if commands or not isinstance(event, ev.Tick):
            self.records.append(record)
        for command in commands:
            self.believe(command, event)
        return commands

    def believe(self, command, event):
        match command:
            case ev.Joined():
                self.epoch_of[command.worker] = command.epoch
                self.epochs[command.worker].append(command.epoch)
                self.admitted.pop(command.worker, None)
            case ev.LostWorker():
                assert self.epoch_of.pop(command.worker) == command.epoch
            case ev.Admitted():
                assert event.epoch == self.epoch_of[command.worker]
                assert (event.digest, event.num_tensors) == (f"d{event.version}", 3)
                self.admitted[command.worker] = command.version
            case ev.Renewed():
                assert command.fenced == (self.epoch_of.get(event.worker) != event.epoch), "INV-3: who lives?"
            case ev.Grant():
                if isinstance(event, ev.Pull) and event.worker == command.worker:
                    assert event.epoch == command.epoch, "INV-3: a passed epoch pulls"
                self.believe_grant(command)
            case ev.Revoked():
                self.live.remove(command.token)
            case ev.Progressed():
                assert command.token in self.live
            case ev.Accepted(again=False):
                assert command.token in self.live, "INV-3: a passed token commits"
                self.live.remove(command.token)
                self.end(command.request, "committed")
                self.believe_commit(event.outcome, self.grants[command.token])
            case ev.Accepted(again=True):
                assert (
                    self.trained.get(self.grants[command.token].request.sample, command.token)
                    == command.token
                )
            case ev.Cancelled():
                assert command.reason
                self.end(command.request, "cancelled")

    def believe_grant(self, grant):
        request = grant.request
        assert grant.token not in self.grants
        assert grant.token > max(self.grants, default=0)
        assert self.epoch_of[grant.worker] == grant.epoch, "INV-3: granted to a passed epoch"
        assert self.admitted[grant.worker] == grant.version, "INV-5: granted without admitted weights"
        lag = self.version - grant.version
        assert 0 <= lag <= (1 if request.kind == "draft" else 0), "INV-5: too old"
        assert request.id not in self.fate, "INV-1: granted after its end"
        assert not (request.kind == "draft" and WORKERS[grant.worker][1] == "on_demand")
        others = [t for t in self.live if self.grants[t].request.id == request.id]
        assert bool(others) == grant.duplicate
        assert len(others) < 2
        assert grant.worker not in [self.grants[t].worker for t in others], "a second run of one's own"
        self.grants[grant.token] = grant
        self.live.add(grant.token)

    def believe_commit(self, outcome, grant):
        assert outcome.sample == grant.request.sample
        assert outcome.version == grant.version
        if grant.request.kind == "final":
            assert outcome.sample not in self.trained, "INV-2: trained on twice"
            self.trained[outcome.sample] = grant.token
            assert grant.version == self.version, "INV-5: a stale final is committed"

    def end(self, request, how):
        assert request not in self.fate, f"INV-1: {request} ends twice"
        self.fate[request] = how

    def token(self, pick, holds=False):
        """One of the tokens ever given (or that hold), the newest first; 0 where there are none."""
        tokens = sorted(self.live if holds and self.live else self.grants, reverse=True)
        return tokens[pick % len(tokens)] if tokens else 0

    def epoch(self, worker, right=True, pick=0):
        """Its epoch, or one that it had."""
        known = self.epochs[worker]
        return known[-1] if right else known[pick % len(known)]

    def admit(self, worker, version=None):
        version = self.version if version is None else version
        self.say(ev.Admit(worker, self.epoch(worker), version, f"d{version}", 3))

    # -- members

    @initialize(others=st.lists(workers, max_size=3, unique=True))
    def begin(self, others):
        self.say(ev.Publish(0, "d0", 3))
        for worker in dict.fromkeys(["a", "c", *others]):
            self.say(ev.Join(worker, *WORKERS[worker]), again=False)
            self.admit(worker)

    @rule(worker=workers, anew=rarely, ready=mostly)
    def bring_up(self, worker, anew, ready):
        if anew or worker not in self.epoch_of:
            self.say(ev.Join(worker, *WORKERS[worker]), again=False)
        if ready:
            self.admit(worker)

    @rule(worker=workers, right=mostly, whole=mostly, intact=mostly, behind=st.integers(0, 2), pick=picks)
    def admit_something(self, worker, right, whole, intact, behind, pick):
        version = max(0, self.version - behind)
        digest = f"d{version}" if intact else "torn"
        self.say(ev.Admit(worker, self.epoch(worker, right, pick), version, digest, 3 if whole else 2))

    @rule(worker=workers, right=mostly, pick=picks, all_held=mostly, step=st.integers(0, STEPS + 1))
    def beat(self, worker, right, pick, all_held, step):
        mine = [token for token, grant in self.grants.items() if grant.worker == worker]
        beats = [token for token in mine if not all_held or token in self.live]
        self.say(ev.Heartbeat(worker, self.epoch(worker, right, pick), tuple((t, step) for t in beats)))

    @rule(
        what=st.sampled_from(["notice", "notice", "withdraw", "node", "worker", "fail", "fail", "release"]),
        node=nodes, worker=workers, right=mostly, pick=picks, preempted=st.booleans(),
        deadline_s=st.sampled_from([-5.0, 0.0, 2.0, 30.0, 120.0]),
    )  # fmt: skip
    def something_goes_wrong(self, what, node, worker, right, pick, preempted, deadline_s):
        events = {
            "notice": ev.Notice(node, deadline_s, "test"),
            "withdraw": ev.WithdrawNotice(node),
            "node": ev.NodeLost(node, "gone", preempted),
            "worker": ev.WorkerLost(worker, self.epoch(worker, right, pick), "exit 1"),
            "fail": ev.Fail(self.token(pick, right), "out of memory"),
            "release": ev.Release(self.token(pick, right)),
        }
        self.say(events[what])

    @precondition(lambda self: any(len(epochs) > 1 for epochs in self.epochs.values()))
    @rule(worker=workers, pick=picks, what=st.sampled_from(["admit", "pull", "beat", "end"]))
    def old_self_speaks(self, worker, pick, what):
        """One that was replaced does not know it."""
        passed = self.epochs[worker][-2::-1] or [0]
        epoch = passed[pick % len(passed)]
        held = tuple((token, 1) for token in sorted(self.live) if self.grants[token].worker == worker)
        events = {
            "admit": ev.Admit(worker, epoch, self.version, f"d{self.version}", 3),
            "pull": ev.Pull(worker, epoch, 2),
            "beat": ev.Heartbeat(worker, epoch, held),
            "end": ev.EndPull(worker, epoch),
        }
        self.say(events[what])

    # -- work

    @rule(worker=workers, right=mostly, pick=picks, max_requests=st.integers(0, 5))
    def pull(self, worker, right, pick, max_requests):
        self.say(ev.Pull(worker, self.epoch(worker, right, pick), max_requests))

    @rule()
    def all_pull(self):
        for worker in self.epoch_of:
            self.say(ev.Pull(worker, self.epoch(worker), 2))

    @rule(worker=workers, right=mostly, pick=picks)
    def end_pull(self, worker, right, pick):
        self.say(ev.EndPull(worker, self.epoch(worker, right, pick)))

    @rule(pick=picks, holds=mostly, step=st.integers(-1, STEPS + 1), state=mostly)
    def progress(self, pick, holds, step, state):
        self.say(ev.Progress(self.token(pick, holds), step, "crc32:0" if state else None, 9))

    @precondition(lambda self: self.grants)
    @rule(pick=picks, holds=mostly, right=mostly, cost_s=st.sampled_from([0.0, 1.0, 1.0, 60.0]))
    def commit(self, pick, holds, right, cost_s):
        grant = self.grants[self.token(pick, holds)]
        kind, version = grant.request.kind, grant.version
        if not right:
            kind, version = ("eval", version) if pick % 2 else (kind, version + 1)
        outcome = Outcome(grant.request.sample, kind, version, 0.5, "x", grant.worker, cost_s, STEPS)
        self.say(ev.Commit(grant.token, outcome))

    @precondition(lambda self: self.zombies())
    @rule(pick=picks, commits=mostly, step=st.integers(1, STEPS))
    def hand_in_late(self, pick, commits, step):
        """A worker whose lease has passed knows nothing of it, and its request may be in other hands."""
        grant = self.grants[self.zombies()[pick % len(self.zombies())]]
        if commits:
            sample, kind = grant.request.sample, grant.request.kind
            outcome = Outcome(sample, kind, grant.version, 0.5, "x", grant.worker, 1.0, STEPS)
            self.say(ev.Commit(grant.token, outcome))
        else:
            self.say(ev.Progress(grant.token, step, "crc32:0", 9))

    def zombies(self):
        """Tokens that have passed while their request goes on, the newest first."""
        passed = [t for t in self.grants if t not in self.live and self.grants[t].request.id not in self.fate]
        return passed[::-1]

    # -- the driver

    @rule(kind=st.sampled_from(["final"] * 4 + ["eval", "draft"]), count=st.integers(1, 6), old=rarely)
    def submit(self, kind, count, old):
        first = self.seed
        self.seed += count
        iteration = max(0, self.iteration - 3) if old else self.iteration
        samples = [SampleId(iteration, 1, seed) for seed in range(first, first + count)]
        self.say(ev.Submit(tuple(Request(kind, sample, f"k{count % 2}", STEPS) for sample in samples)))

    @rule(next_iteration=st.booleans(), newer=mostly, known=mostly)
    def publish(self, next_iteration, newer, known):
        version = self.version + 1 if newer else max(0, self.version - 1)
        self.iteration += next_iteration
        self.version = max(version, self.version)
        self.say(ev.Publish(version, f"d{version}", 3))
        for worker in sorted(self.epoch_of) if known else ():
            self.admit(worker)

    @rule(
        what=st.sampled_from(["open", "open", "open", "close", "cancel"]),
        kind=st.sampled_from(["final", "eval", "draft"]), ago=st.integers(0, 2),
    )  # fmt: skip
    def drive(self, what, kind, ago):
        if what == "open":
            self.say(ev.CloseDrafts())
            self.drafts.reopen(num_drafts=40)
            self.say(ev.OpenDrafts(self.iteration + 1, "draft", STEPS), again=False)
        elif what == "close":
            self.say(ev.CloseDrafts())
        else:
            self.say(ev.Cancel(kind, max(0, self.iteration - ago), "driver"))

    # -- time, and what is said late

    @rule(gap_s=st.sampled_from([0.1, 0.9, 2.9, 2.9, 7.0, 15.0]), alive=mostly)
    def tick(self, gap_s, alive):
        self.now += gap_s
        for worker in sorted(self.epoch_of) if alive else ():
            held = tuple((t, 0) for t in sorted(self.live) if self.grants[t].worker == worker)
            self.say(ev.Heartbeat(worker, self.epoch(worker), held), again=False)
        self.say(ev.Tick(gap_s))

    @precondition(lambda self: self.heard)
    @rule(pick=st.integers(0, 60), passes_s=st.sampled_from([0.0, 0.0, 3.0]))
    def say_again(self, pick, passes_s):
        self.now += passes_s
        self.say(self.heard[-1 - pick % len(self.heard)], again=False)

    # -- what must hold after every step

    @invariant()
    def leases_agree(self):
        scheduler = self.scheduler
        assert set(scheduler.leases) == self.live
        held = {t for worker in scheduler.members.workers.values() for t in worker.leases}
        assert held == self.live
        known = {t: r.id for r in scheduler.records.values() for t in r.tokens}
        assert known == {t: self.grants[t].request.id for t in self.live}

    @invariant()
    def every_request_is_somewhere(self):
        sizes = {"final": 0, "eval": 0, "draft": 0}
        for record in self.scheduler.records.values():
            kind = record.request.kind
            sizes[kind] += record.queued_in is not None
            assert not (record.tokens and record.queued_in)
            if record.fate is not None:
                assert record.queued_in is None
                assert not record.tokens
            elif kind != "draft":
                assert bool(record.tokens) != (record.queued_in is not None)
        assert len(self.scheduler.finals) == sizes["final"]
        assert len(self.scheduler.evals) == sizes["eval"]
        assert sum(map(len, self.scheduler.started_drafts.values())) == sizes["draft"]

    @invariant()
    def no_fresh_worker_waits_beside_work(self):
        if not isinstance(self.last, ev.Tick):  # whoever is held back is looked at again on the next tick
            return
        scheduler = self.scheduler
        members = scheduler.members
        for name in scheduler.parked:
            worker = members.workers[name]
            fresh = members.serving(worker) and worker.version == members.current.n
            assert fresh == (name in members.fresh)
            for queue in (scheduler.finals, scheduler.evals):
                assert not (fresh and queue) or scheduler._sooner_elsewhere(worker, queue)

    def teardown(self):
        if self.version_is_out():
            self.drain()
            self.say(ev.Stop("test over"))
            assert not self.live
        for verdict in check(iter(self.records)):
            assert verdict.ok, (verdict, verdict.problems)
        verdict = replay(iter(self.records))
        assert verdict.ok, (verdict, verdict.problems)

    def version_is_out(self):
        return self.scheduler.members.current is not None

    def drain(self):
        """After the last fault all work gets done, by one healthy worker, in bounded time."""
        self.say(ev.CloseDrafts())
        name, node = "healthy", "n-healthy"
        self.epochs[name] = [0]
        self.say(ev.Join(name, node, "on_demand"))
        self.say(ev.Admit(name, self.epochs[name][-1], self.version, f"d{self.version}", 3))
        for _ in range(400):
            queued = len(self.scheduler.finals) + len(self.scheduler.evals)
            if not queued and not self.live:
                return
            self.now += 1.0
            held = [t for t in self.live if self.grants[t].worker == name]
            self.say(ev.Heartbeat(name, self.epochs[name][-1], tuple((t, 0) for t in held)))
            for token in held:
                grant = self.grants[token]
                if token in self.live:
                    outcome = Outcome(
                        grant.request.sample, grant.request.kind, grant.version, 0.5, "x", name, 1.0, STEPS
                    )
                    assert isinstance(self.say(ev.Commit(token, outcome))[0], ev.Accepted)
            self.say(ev.Pull(name, self.epochs[name][-1], 8))
            self.say(ev.Tick(1.0))
        raise AssertionError(f"{queued} requests wait and {len(self.live)} leases are left")


SchedulerMachine.TestCase.settings = settings(
    max_examples=2000 if NIGHTLY else 100,
    stateful_step_count=100 if NIGHTLY else 50,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestSchedulerMachine = pytest.mark.timeout(7200 if NIGHTLY else 300)(SchedulerMachine.TestCase)
