"""The same events through a fresh scheduler must give the same commands: what ran is what the code says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from spotlight.core.events import decode, encode
from spotlight.core.scheduler import Scheduler
from spotlight.core.verdict import Offence, Verdict, reading, verdict

_NAME = "replay: same commands"


class RecordedDrafts:
    """A draft source that answers what the journal says was answered."""

    def __init__(self) -> None:
        self.answers: list[list[tuple[int, int]]] = []

    def next_drafts(self, max_requests: int, now: float) -> list[tuple[int, int]]:
        """The next recorded answer; nothing, where it was asked more often than then."""
        return self.answers.pop(0) if self.answers else []

    def draft_done(self, row: int, seed: int, reward: float | None, cost_s: float, now: float) -> None:
        """Was taken into account when the answers were recorded."""

    def draft_returned(self, row: int, seed: int) -> None:
        """Was taken into account when the answers were recorded."""


def replay(records: Iterable[Mapping[str, Any]]) -> Verdict:
    """Feed a journal's events through fresh schedulers, one per coordinator, at the times they had.

    Not applicable where records were lost, since what was decided after depends on them.
    """
    scheduler, drafts = Scheduler(), RecordedDrafts()
    offences: list[Offence] = []
    checked = 0
    for record in records:
        if record["type"] == "gap":
            why = f"not applicable: {record.get('lost')} records before {record.get('seq')} could not be written"
            return Verdict(_NAME, True, why)
        with reading(record):
            if record["type"] == "start":
                drafts = RecordedDrafts()
                scheduler = Scheduler(
                    decode(record["policy"]), drafts, first_token=int(record["first_token"])
                )
            elif record["type"] == "on":
                checked += 1
                drafts.answers = [
                    [(row, seed) for row, seed in answer] for answer in record.get("drafts", ())
                ]
                event = decode(record["event"])
                commands = [encode(command) for command in scheduler.on(event, float(record["now"]))]
                if commands != record["commands"]:
                    what = f"{record['event']['type']}: {_difference(commands, record['commands'])}"
                    offences.append(Offence(int(record["seq"]), what))
    return verdict(_NAME, f"{checked} events", offences)


def _difference(now: list[dict[str, Any]], then: list[dict[str, Any]]) -> str:
    for new, old in zip(now, then, strict=False):
        if new != old:
            return f"now {new}, then {old}"
    return f"now {len(now)} commands, then {len(then)}"
