"""INV-6 and INV-7 over a journal: every machine ended with its run, and the bill adds up to their lives."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from spotlight.core.billing import bill
from spotlight.core.cost import decode, utc_seconds
from spotlight.core.ledger import Interval, Ledger, LedgerReader, NodeKey, name
from spotlight.core.money import to_ms
from spotlight.core.verdict import Offence, Verdict, reading, verdict

_MONEY_STOPS, _MONEY_ADDS_UP = "INV-6 money stops", "INV-7 money adds up"
_NOT_MACHINE_TIME = ("rounding", "disk", "egress")


class NodeHistory:
    """Collects what a journal says about machines, record by record."""

    def __init__(self) -> None:
        self._reader = LedgerReader()
        self._last_seq: dict[str, int] = {}
        self._stopped = False
        self._last_utc = 0.0

    def see(self, record: Mapping[str, Any]) -> None:
        """Take in any record. Raises DataError for one that cannot be read."""
        with reading(record):
            self._last_utc = max(self._last_utc, utc_seconds(record["utc"]))
            if record["type"] == "node":
                self._reader.add(decode(record))
                self._last_seq[str(record.get("node", ""))] = int(record["seq"])
            elif record["type"] == "start":
                self._stopped = False
            elif record["type"] == "on" and record["event"]["type"] == "Stop":
                self._stopped = True

    def verdicts(self) -> list[Verdict]:
        """INV-6 and INV-7; not applicable where no machine was recorded."""
        ledger = self._reader.ledger()
        if not ledger.intervals and not ledger.warnings:
            why = "not applicable: no machines in this journal"
            return [Verdict(name, True, why) for name in (_MONEY_STOPS, _MONEY_ADDS_UP)]
        return [self._money_stops(ledger), self._money_adds_up(ledger)]

    def _money_stops(self, ledger: Ledger) -> Verdict:
        existed = [interval for interval in ledger.intervals if interval.up_s is not None]
        alive = [interval for interval in existed if interval.ended_s is None]
        if not self._stopped:
            why = f"not applicable: the run is not over, {len(alive)} of {len(existed)} machines live"
            return Verdict(_MONEY_STOPS, True, why)
        offences = [self._offence(i.key, f"{name(i.key)} has no end, the run has") for i in alive]
        return verdict(_MONEY_STOPS, f"{len(existed)} machines", offences)

    def _money_adds_up(self, ledger: Ledger) -> Verdict:
        offences = [Offence(0, warning) for warning in ledger.warnings]
        billed_ms: dict[NodeKey, int] = defaultdict(int)
        for charge in bill(ledger, {}, self._last_utc).charges:
            if charge.phase not in _NOT_MACHINE_TIME:
                billed_ms[charge.key] += charge.gpu_ms
        lives = 0
        for interval in ledger.intervals:
            life_ms = self._life_ms(interval) * max(1, interval.gpus)
            lives += life_ms
            if life_ms < 0:
                offences.append(self._offence(interval.key, f"{name(interval.key)} ends before it begins"))
            elif life_ms != billed_ms[interval.key]:
                what = f"{name(interval.key)} lived {life_ms} GPU-ms, {billed_ms[interval.key]} are billed"
                offences.append(self._offence(interval.key, what))
        for earlier, later in _overlapping(ledger.intervals):
            offences.append(
                self._offence(later.key, f"{name(later.key)} begins before {name(earlier.key)} ends")
            )
        checked = f"{len(ledger.intervals)} launches, {lives / 3_600_000:.2f} GPU-h"
        return verdict(_MONEY_ADDS_UP, checked, offences)

    def _life_ms(self, interval: Interval) -> int:
        if interval.up_s is None:
            return 0
        end_s = interval.ended_s if interval.ended_s is not None else max(self._last_utc, interval.up_s)
        return to_ms(end_s) - to_ms(interval.up_s)

    def _offence(self, key: NodeKey, what: str) -> Offence:
        return Offence(self._last_seq.get(key.node, 0), what)


def _overlapping(intervals: Iterable[Interval]) -> Iterable[tuple[Interval, Interval]]:
    """Two machines cannot have held one name at one time."""
    last: dict[str, Interval] = {}
    for interval in sorted((i for i in intervals if i.up_s is not None), key=lambda i: i.key):
        before = last.get(interval.key.node)
        if before and (before.ended_s is None or (interval.up_s or 0.0) < before.ended_s):
            yield before, interval
        last[interval.key.node] = interval
