"""Was every promise kept? Checkers of INV-1 to INV-5 over the records of any journal, in one pass.

They know nothing of the scheduler: they judge what it was told and what it answered. The scheduler's
docstring says what each invariant promises. `core.history_nodes` has INV-6 and INV-7, which are about
machines and money.

Each "start" record begins a new coordinator, whose requests, tokens and epochs are its own (after a restart
the driver trains on from its checkpoint, and what was made after that never entered training).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from spotlight.core.events import decode
from spotlight.core.types import Policy
from spotlight.core.verdict import Offence, Verdict, reading, verdict

Record = Mapping[str, Any]


@dataclass(slots=True)
class Granted:
    """A token: what it was given for, and how it ended (None: it still holds)."""

    worker: str
    epoch: int
    request: str
    kind: str
    version: int
    ended: str | None = None


@dataclass(slots=True)
class Facts:
    """What a coordinator had been told and had decided up to some record."""

    max_draft_lag: int = 1
    current: int | None = None
    published: dict[int, tuple[str, int]] = field(default_factory=dict)
    epochs: dict[str, int] = field(default_factory=dict)
    admitted: dict[str, int] = field(default_factory=dict)
    asked: dict[str, Record] = field(default_factory=dict)
    drafting: Record | None = None
    tokens: dict[int, Granted] = field(default_factory=dict)
    fates: dict[str, str] = field(default_factory=dict)
    saved: dict[str, tuple[int, int]] = field(default_factory=dict)
    last_token: int = 0
    last_epoch: int = 0
    stopped: bool = False


class Checker:
    """Judges one invariant. `see` is called for each command before the facts know of it."""

    name = ""
    unit = ""

    def __init__(self) -> None:
        self.checked = 0
        self.offences: list[Offence] = []
        self.note = ""

    def see(self, seq: int, event: Record, command: Record, facts: Facts) -> None:
        """Look at one command and the event that caused it."""
        handler = getattr(self, f"_on_{command['type'].lower()}", None)
        if handler:
            handler(seq, event, command, facts)

    def finish(self, seq: int, facts: Facts) -> None:
        """A coordinator's records are over."""

    def blame(self, seq: int, what: str) -> None:
        """Note an offence."""
        self.offences.append(Offence(seq, what))

    def verdict(self) -> Verdict:
        """The judgement on what was seen."""
        note = f", {self.note}" if self.note else ""
        return verdict(self.name, f"{self.checked} {self.unit}{note}", self.offences)


class OneFate(Checker):
    """Granted requests end once, and all have ended when the coordinator was stopped."""

    name, unit = "INV-1 one fate", "fates"

    def _on_grant(self, seq: int, event: Record, command: Record, facts: Facts) -> None:
        request = request_id(command["request"])
        if request in facts.fates:
            self.blame(seq, f"{request} granted after it was {facts.fates[request]}")

    def _on_accepted(self, seq: int, event: Record, command: Record, facts: Facts) -> None:
        if not command.get("again"):
            self._end(seq, command["request"], facts)

    def _on_cancelled(self, seq: int, event: Record, command: Record, facts: Facts) -> None:
        if not command["reason"]:
            self.blame(seq, f"{command['request']} cancelled without a reason")
        self._end(seq, command["request"], facts)

    def _end(self, seq: int, request: str, facts: Facts) -> None:
        self.checked += 1
        if request in facts.fates:
            self.blame(seq, f"{request} ends again, it was {facts.fates[request]}")
        if request not in facts.asked:
            self.blame(seq, f"{request} ends, and was never asked for")

    def finish(self, seq: int, facts: Facts) -> None:
        """What was asked for and has no fate is an offence once the coordinator was stopped."""
        still_open = [request for request in facts.asked if request not in facts.fates]
        if facts.stopped:
            for request in still_open:
                self.blame(seq, f"{request} has no fate")
        elif still_open:
            self.note = f"{len(still_open)} without one yet where the journal ends"


class OneCommit(Checker):
    """A SampleId is accepted for training once; a repeated answer goes to the token that won."""

    name, unit = "INV-2 one commit", "commits"

    def __init__(self) -> None:
        super().__init__()
        self._winners: dict[str, int] = {}

    def _on_accepted(self, seq: int, event: Record, command: Record, facts: Facts) -> None:
        request, token = command["request"], command["token"]
        winner = self._winners.setdefault(request, token)
        self.checked += not command.get("again")
        if command.get("again"):
            if winner != token:
                self.blame(seq, f"{request}: token {token} told that it had won, but {winner} did")
        elif facts.fates.get(request) == "committed":
            self.blame(seq, f"{request} committed by token {token} after token {winner}")

    def finish(self, seq: int, facts: Facts) -> None:
        """The next coordinator's requests are its own."""
        self._winners.clear()


class Fenced(Checker):
    """Tokens and epochs rise, and nothing is granted to, saved for or accepted from a passed one."""

    name, unit = "INV-3 fenced", "uses of a token"

    def _on_joined(self, seq: int, event: Record, command: Record, facts: Facts) -> None:
        if command["epoch"] <= facts.last_epoch:
            self.blame(seq, f"epoch {command['epoch']} of {command['worker']} does not rise")

    def _on_grant(self, seq: int, event: Record, command: Record, facts: Facts) -> None:
        worker, token = command["worker"], command["token"]
        if token <= facts.last_token:
            self.blame(seq, f"token {token} does not rise")
        if facts.epochs.get(worker) != command["epoch"]:
            self.blame(
                seq, f"token {token} granted to {worker} in epoch {command['epoch']}, which has passed"
            )

    def _on_admitted(self, seq: int, event: Record, command: Record, facts: Facts) -> None:
        if facts.epochs.get(command["worker"]) != event.get("epoch"):
            self.blame(seq, f"{command['worker']} admits weights in an epoch that has passed")

    def _on_progressed(self, seq: int, event: Record, command: Record, facts: Facts) -> None:
        self._must_hold(seq, command["token"], "reports progress", facts)

    def _on_accepted(self, seq: int, event: Record, command: Record, facts: Facts) -> None:
        if not command.get("again"):
            self._must_hold(seq, command["token"], "commits", facts)

    def _must_hold(self, seq: int, token: int, does: str, facts: Facts) -> None:
        self.checked += 1
        granted = facts.tokens.get(token)
        if granted is None:
            self.blame(seq, f"token {token}, which was never given, {does}")
        elif granted.ended is not None:
            self.blame(seq, f"token {token} {does} after it ended: {granted.ended}")
        elif facts.epochs.get(granted.worker) != granted.epoch:
            self.blame(seq, f"token {token} {does}, but the epoch of {granted.worker} has passed")


class SameSamples(Checker):
    """What is granted and committed is what was asked for, resumed from nothing but its own saved state."""

    name, unit = "INV-4 same samples", "grants"

    def __init__(self) -> None:
        super().__init__()
        self._digests: dict[str, str] = {}
        self._differing = 0

    def _on_grant(self, seq: int, event: Record, command: Record, facts: Facts) -> None:
        self.checked += 1
        given = command["request"]
        request, step = request_id(given), command.get("resume_step", 0)
        asked = facts.asked.get(request)
        if asked is None or any(asked[key] != given[key] for key in ("batch_key", "num_steps")):
            self.blame(seq, f"{request} granted as {given}, asked for as {asked}")
        if step and facts.saved.get(request) != (step, command["version"]):
            self.blame(
                seq,
                f"{request} resumes at step {step} of version {command['version']}, but saved is "
                f"(step, version) {facts.saved.get(request)}",
            )

    def _on_accepted(self, seq: int, event: Record, command: Record, facts: Facts) -> None:
        outcome = event["outcome"]
        made, granted = f"{outcome['kind']}/{outcome['sample']}", facts.tokens.get(command["token"])
        if made != command["request"] or (granted and made != granted.request):
            self.blame(seq, f"token {command['token']} is for {command['request']}, {made} was made")
        self._digests[made] = outcome["digest"]

    def _on_refused(self, seq: int, event: Record, command: Record, facts: Facts) -> None:
        """A second run gives the same bytes; across GPU models it need not, so this is only noted."""
        if event["type"] == "Commit":
            outcome = event["outcome"]
            digest = self._digests.get(f"{outcome['kind']}/{outcome['sample']}")
            granted = facts.tokens.get(event["token"])
            if digest and granted and granted.version == outcome["version"] and digest != outcome["digest"]:
                self._differing += 1
                self.note = f"{self._differing} second runs differ in bytes"

    def finish(self, seq: int, facts: Facts) -> None:
        """The next coordinator's requests are its own."""
        self._digests.clear()


class BoundedStaleness(Checker):
    """Weights are new enough when work is given and when it counts; admitted whole, with their digest."""

    name, unit = "INV-5 bounded staleness", "outcomes"

    def _on_admitted(self, seq: int, event: Record, command: Record, facts: Facts) -> None:
        bound = (event["digest"], event["num_tensors"])
        if facts.published.get(command["version"]) != bound:
            self.blame(seq, f"{command['worker']} admits version {command['version']} as {bound}")
        if command["version"] < facts.admitted.get(command["worker"], -1):
            self.blame(seq, f"the version of {command['worker']} falls to {command['version']}")

    def _on_grant(self, seq: int, event: Record, command: Record, facts: Facts) -> None:
        version, request = command["version"], request_id(command["request"])
        if facts.admitted.get(command["worker"]) != version:
            self.blame(seq, f"{request} granted for version {version}, which its worker has not admitted")
        self._new_enough(seq, request, command["request"]["kind"], version, facts)

    def _on_accepted(self, seq: int, event: Record, command: Record, facts: Facts) -> None:
        granted = facts.tokens.get(command["token"])
        if granted and not command.get("again"):
            self.checked += 1
            if event["outcome"]["version"] != granted.version:
                self.blame(seq, f"{granted.request} made with another version than granted")
            self._new_enough(seq, granted.request, granted.kind, granted.version, facts)

    def _new_enough(self, seq: int, request: str, kind: str, version: int, facts: Facts) -> None:
        lag = (facts.current if facts.current is not None else -1) - version
        if lag < 0 or lag > (facts.max_draft_lag if kind == "draft" else 0):
            self.blame(seq, f"{request} with version {version}, current is {facts.current}")


def request_id(request: Record) -> str:
    """The id of an encoded request."""
    return f"{request['kind']}/{request['sample']}"


def check(records: Iterable[Record]) -> list[Verdict]:
    """The verdicts on INV-1 to INV-5. Raises DataError for a record that cannot be read."""
    checkers = [OneFate(), OneCommit(), Fenced(), SameSamples(), BoundedStaleness()]
    facts, seq = Facts(), 0
    for record in records:
        with reading(record):
            seq = int(record["seq"])
            if record["type"] == "start":
                _finish(checkers, seq, facts)
                policy: Policy = decode(record["policy"])
                facts = Facts(max_draft_lag=policy.max_draft_lag)
            elif record["type"] == "on":
                _judge(checkers, seq, record, facts)
    _finish(checkers, seq, facts)
    return [checker.verdict() for checker in checkers]


def _judge(checkers: list[Checker], seq: int, record: Record, facts: Facts) -> None:
    learn_event(facts, record)
    for command in record["commands"]:
        for checker in checkers:
            checker.see(seq, record["event"], command, facts)
        learn_command(facts, record["event"], command)


def _finish(checkers: list[Checker], seq: int, facts: Facts) -> None:
    for checker in checkers:
        checker.finish(seq, facts)


def trained_samples(records: Iterable[Record]) -> Counter[str]:
    """How often each SampleId was committed for training. Of a faulty run and a fault-free one: the same."""
    return Counter(
        record["event"]["outcome"]["sample"]
        for record in records
        if record["type"] == "on" and record["event"]["type"] == "Commit"
        for command in record["commands"]
        if command["type"] == "Accepted"
        and not command.get("again")
        and command["request"].startswith("final/")
    )


def learn_event(facts: Facts, record: Record) -> None:
    """What an event says, whatever is answered."""
    event = record["event"]
    match event["type"]:
        case "Submit":
            for request in event["requests"]:
                if request["kind"] != "draft":
                    facts.asked.setdefault(request_id(request), request)
        case "OpenDrafts":
            facts.drafting = event
        case "Stop":
            facts.stopped = True
    if facts.drafting and record.get("drafts"):
        template = {"kind": "draft", **{key: facts.drafting[key] for key in ("batch_key", "num_steps")}}
        for row, seed in (draft for answer in record["drafts"] for draft in answer):
            request = {**template, "sample": f"it{facts.drafting['iteration']}/row{row}/s{seed}"}
            facts.asked.setdefault(request_id(request), request)


def learn_command(facts: Facts, event: Record, command: Record) -> None:
    """What a command decides."""
    match command["type"]:
        case "Joined":
            facts.epochs[command["worker"]] = facts.last_epoch = command["epoch"]
        case "LostWorker":
            facts.epochs.pop(command["worker"], None)
            facts.admitted.pop(command["worker"], None)
        case "Published":
            facts.current = command["version"]
            facts.published[command["version"]] = (event["digest"], event["num_tensors"])
        case "Admitted":
            facts.admitted[command["worker"]] = command["version"]
        case "Grant":
            _learn_grant(facts, command)
        case "Progressed" if command["saved"]:
            facts.saved[command["request"]] = (command["step"], facts.tokens[command["token"]].version)
        case "StateDropped":
            facts.saved.pop(command["request"], None)
        case "Revoked":
            _end_token(facts, command["token"], command["reason"])
        case "Ignored" if command.get("request") and command["request"] not in facts.fates:
            facts.asked.pop(command["request"], None)
        case "Accepted" if not command.get("again"):
            facts.fates.setdefault(command["request"], "committed")
            _end_token(facts, command["token"], "committed")
        case "Cancelled":
            facts.fates.setdefault(command["request"], f"cancelled: {command['reason']}")


def _learn_grant(facts: Facts, command: Record) -> None:
    request = command["request"]
    facts.last_token = max(facts.last_token, command["token"])
    facts.tokens[command["token"]] = Granted(
        command["worker"], command["epoch"], request_id(request), request["kind"], command["version"]
    )


def _end_token(facts: Facts, token: int, why: str) -> None:
    if granted := facts.tokens.get(token):
        granted.ended = granted.ended or why
