"""A verdict on a promise, with the journal's records that break it; and records that cannot be read at all."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from spotlight.errors import DataError

MAX_OFFENCES = 20  # kept per promise; all are counted


@dataclass(frozen=True, slots=True)
class Offence:
    """One record that breaks an invariant: its `seq` in the journal, and what is wrong with it."""

    seq: int
    what: str

    def __str__(self) -> str:
        return f"record {self.seq}: {self.what}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The judgement on one invariant: `checked` says on what, or why there was nothing to judge."""

    name: str
    ok: bool
    checked: str
    problems: tuple[Offence, ...] = ()

    def __str__(self) -> str:
        return f"{self.name}: {'kept' if self.ok else 'BROKEN'}, {self.checked}"


def verdict(name: str, checked: str, offences: list[Offence]) -> Verdict:
    """Broken if there are offences; the first ones are kept, all are counted."""
    if offences:
        return Verdict(name, False, f"{len(offences)} offences in {checked}", tuple(offences[:MAX_OFFENCES]))
    return Verdict(name, True, checked)


@contextlib.contextmanager
def reading(record: Mapping[str, Any]) -> Iterator[None]:
    """What a record lacks, or has of the wrong type, becomes a DataError that names the record."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        what = f"journal record {str(record.get('seq', '?'))[:20]} of type {str(record.get('type'))[:40]!r}"
        raise DataError(f"{what}: {repr(error)[:120]}") from None
