"""The one exception tree. Whatever a user can cause or meet is one of these.

SpotlightError                       exit 1   base; on its own: a bug of ours
├── UserError                        exit 2   usage, config, input files
│   ├── ConfigError                           unknown key, bad value, bad recipe
│   └── DataError                             a prompt, trace or price file that cannot be read
├── PreconditionError                exit 3   the world is not ready
│   ├── CapacityError                         no machine of that kind right now
│   ├── QuotaError                            the account may not have it
│   └── LockError                             another run holds the name
├── CredentialError                  exit 4   no SkyPilot, no cloud login, no token
├── NotFoundError                    exit 5   no such run, node, object
├── RunError                         exit 6   the run began and failed
│   ├── IntegrityError                        digest, count or version does not match
│   ├── FencedError                           a lease token or epoch that has passed
│   ├── TrainingError                         ratio off 1, non-finite gradients in a row
│   └── CommError                             a collective broke: peer dead, aborted or timed out
├── BudgetError                      exit 7   stopped by money or hours
└── Interrupted                      exit 130 Ctrl-C

A message says what happened, with which value, and what to do, in at most three lines.
"""

from __future__ import annotations


class SpotlightError(Exception):
    """Base of all errors a user can meet.

    `code` is the machine-readable name, `exit_code` the process's, `hint` the next thing to try.
    """

    code: str = "internal"
    exit_code: int = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UserError(SpotlightError):
    """Wrong usage."""

    code = "usage"
    exit_code = 2


class ConfigError(UserError):
    """A recipe, key or value that cannot be."""

    code = "config"


class DataError(UserError):
    """An input file that cannot be read; the message names file and line."""

    code = "data"


class PreconditionError(SpotlightError):
    """The world is not ready for what was asked."""

    code = "precondition"
    exit_code = 3


class CapacityError(PreconditionError):
    """No machine of that kind is to be had now."""

    code = "capacity"


class QuotaError(PreconditionError):
    """The account may not have that many."""

    code = "quota"


class LockError(PreconditionError):
    """Another run holds the name or the folder."""

    code = "lock"


class CredentialError(SpotlightError):
    """A login, a token or a needed cloud package is missing."""

    code = "credentials"
    exit_code = 4


class NotFoundError(SpotlightError):
    """No such run, node or object."""

    code = "not_found"
    exit_code = 5


class RunError(SpotlightError):
    """The run began and could not go on."""

    code = "run_failed"
    exit_code = 6


class IntegrityError(RunError):
    """A digest, a count or a version does not match what was promised."""

    code = "integrity"


class FencedError(RunError):
    """A lease token or an epoch that has passed: the caller's work no longer counts."""

    code = "fenced"


class TrainingError(RunError):
    """Learning went wrong in a way that more steps would hide."""

    code = "training"


class CommError(RunError):
    """A collective operation ended early: a peer died, was aborted or took too long."""

    code = "comm"


class BudgetError(SpotlightError):
    """Stopped by the budget in money or hours; a checkpoint was written."""

    code = "budget"
    exit_code = 7


class Interrupted(SpotlightError):
    """Stopped by the user."""

    code = "interrupted"
    exit_code = 130
