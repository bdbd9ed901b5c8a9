"""Run one command as if it were a machine: `python -m spotlight.provision.supervise COMMAND...`

When the command ends, when standard input closes (whoever started us is gone, for whatever reason) or on
SIGTERM, everything the command ever started is killed at once, as a power cut would. Being the "subreaper"
of its descendants, this process sees those too whose own parent has already gone.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time

import psutil

_PR_SET_CHILD_SUBREAPER = 36


def supervise(command: list[str]) -> int:
    """Run `command` to its end, or to ours. Returns the command's exit code (128 + signal if killed)."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    stopped: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stopped.append(number))
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C in a terminal reaches the whole group: our parent decides
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    while child.poll() is None and not stopped and not _parent_gone(0.1):
        _reap_orphans(child.pid)
    code = child.returncode
    power_cut(psutil.Process())
    return code if code is not None and code >= 0 else 128 + signal.SIGTERM


def power_cut(root: psutil.Process) -> None:
    """Kill all descendants of `root`, those born meanwhile too. Returns when none is left."""
    while alive := [p for p in root.children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]:
        for process in alive:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        _reap_all()
        time.sleep(0.005)


def _parent_gone(wait_s: float) -> bool:
    """Wait for standard input to close; nothing is ever written to it."""
    try:
        ready, _, _ = select.select([sys.stdin], [], [], wait_s)
    except InterruptedError:
        return False
    return bool(ready) and not os.read(sys.stdin.fileno(), 4096)


def _reap_orphans(child: int) -> None:
    """Collect adopted processes that have ended, but leave `child` to its own Popen object."""
    for process in psutil.Process().children():
        try:
            if process.pid != child and process.status() == psutil.STATUS_ZOMBIE:
                os.waitpid(process.pid, os.WNOHANG)
        except (psutil.NoSuchProcess, ChildProcessError):
            continue


def _reap_all() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return


if __name__ == "__main__":
    sys.exit(supervise(sys.argv[1:]))
