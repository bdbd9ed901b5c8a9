"""The process that speaks to W&B: reads one JSON object a line, first the run, then its metrics."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from typing import Any


def main(lines: Iterable[str]) -> int:
    """Log until the pipe ends. Returns 3 when the package is missing."""
    try:
        import wandb
    except ImportError:
        return 3
    messages = (json.loads(line) for line in lines)
    run = wandb.init(**next(messages), mode=mode(), settings=wandb.Settings(silent=True, console="off"))
    for message in messages:
        run.log(message["values"], step=message["step"])
    run.finish()
    return 0


def mode() -> Any:
    """Online only with a key at hand; WANDB_MODE wins."""
    return os.environ.get("WANDB_MODE") or ("online" if has_key() else "offline")


def has_key() -> bool:
    """Whether W&B could log in without asking: a key in the environment or an entry in the netrc file."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    import netrc

    try:
        return netrc.netrc().authenticators("api.wandb.ai") is not None
    except (OSError, netrc.NetrcParseError):
        return False


if __name__ == "__main__":
    sys.exit(main(sys.stdin))
