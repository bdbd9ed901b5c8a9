"""Secrets never leave the process: every sink, log line, config dump and report passes through here.

Two nets. By value: what the environment calls a token, a secret or a key is known and is cut out wherever it
turns up. By shape: well-known token formats, `password=...` pairs, PEM blocks and passwords inside URLs.
Objects are scrubbed before they are serialised, so JSON or HTML escaping cannot hide a value.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import quote

MASK = "[redacted]"
_SHORTEST_SECRET = 8  # shorter values would blank ordinary words

_SECRET_KEY = re.compile(
    r"(?i)(?:^|[_.\-])(?:password|passwd|secret|token|api_?key|access_?key|private_?key|secret_?key"
    r"|credentials?|authorization|auth)$"
)

# No pattern backtracks over unbounded runs: a megabyte of hostile text stays linear.
_SHAPES: tuple[tuple[re.Pattern[str], str], ...] = (
    (
        re.compile(r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----[\s\S]{0,8000}?-----END [A-Z ]{0,40}KEY-----"),
        MASK,
    ),
    (re.compile(r"\bhf_[A-Za-z0-9]{16,}"), MASK),
    (re.compile(r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"), MASK),
    (re.compile(r"\b(?:gh[pousr]_[A-Za-z0-9]{20,}|github_pat_[A-Za-z0-9_]{20,})"), MASK),
    (re.compile(r"\bsk-[A-Za-z0-9_\-]{20,}"), MASK),
    (re.compile(r"\bAIza[0-9A-Za-z_\-]{30,}"), MASK),
    (re.compile(r"\beyJ[A-Za-z0-9_\-]{8,2000}\.[A-Za-z0-9_\-]{8,4000}\.[A-Za-z0-9_\-]{8,}"), MASK),
    (re.compile(r"(?i)\b(bearer|basic)\s{1,4}[A-Za-z0-9._~+/\-]{8,}=*"), rf"\1 {MASK}"),
    (re.compile(r"(://[^\s/:@]{0,64}:)[^\s/@]{1,200}@"), rf"\1{MASK}@"),
    (
        re.compile(
            r"(?i)(password|passwd|secret|token|api_?key|access_?key|private_?key)"
            r"([\"']?\s{0,4}[=:]\s{0,4}[\"']?)(?!\d+\b)(?!\[redacted)[^\s\"',;&]{8,}"
        ),
        rf"\1\2{MASK}",
    ),
)


class Redactor:
    """Cuts known values and secret-shaped text out of strings and trees of plain data."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        long_enough = {value for value in secrets if len(value) >= _SHORTEST_SECRET}
        forms = long_enough | {quote(value, safe="") for value in long_enough}
        # Longest first: a secret that contains another must go as a whole.
        ordered = sorted(forms, key=lambda value: (-len(value), value))
        self._known = re.compile("|".join(map(re.escape, ordered))) if ordered else None

    @classmethod
    def from_environment(
        cls, environ: Mapping[str, str] | None = None, extra: Iterable[str] = ()
    ) -> Redactor:
        """Know every value whose variable's name says it is a secret, and `extra`."""
        environ = os.environ if environ is None else environ
        return cls([*(value for name, value in environ.items() if is_secret_key(name)), *extra])

    def text(self, value: str) -> str:
        """Return `value` with every secret replaced by a mask."""
        if self._known is not None:
            value = self._known.sub(MASK, value)
        for shape, replacement in _SHAPES:
            value = shape.sub(replacement, value)
        return value

    def scrub(self, value: Any) -> Any:
        """Return a copy of plain data (dicts, lists, tuples, scalars) without secrets.

        A string under a key such as `api_key` goes whole; numbers stay, so a counter named `token` survives.
        """
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {self.text(str(key)): self._entry(str(key), item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.scrub(item) for item in value]
        return value

    def _entry(self, key: str, item: Any) -> Any:
        return MASK if isinstance(item, str) and item and is_secret_key(key) else self.scrub(item)


def is_secret_key(name: str) -> bool:
    """Whether a variable or a config key of that name holds a secret (`HF_TOKEN` does, `max_tokens` not)."""
    return _SECRET_KEY.search(name) is not None


class RedactingFilter(logging.Filter):
    """Scrub log records, arguments and tracebacks included, before any handler sees them."""

    def __init__(self, redactor: Redactor) -> None:
        super().__init__()
        self._redactor = redactor

    def filter(self, record: logging.LogRecord) -> bool:
        """Rewrite the record in place; never drops one."""
        record.msg, record.args = self._redactor.text(record.getMessage()), None
        if record.exc_info:
            record.exc_text = self._redactor.text(logging.Formatter().formatException(record.exc_info))
        return True
