"""Shell completion from what lies on this disk: never the network, never a heavy import."""

from __future__ import annotations


def recipes(incomplete: str) -> list[str]:
    """Names of shipped recipes."""
    from spotlight import config

    return [name for name in config.recipes() if name.startswith(incomplete)]


def runs(incomplete: str) -> list[str]:
    """Names of runs in the home folder."""
    from spotlight.names import home

    folder = home() / "runs"
    if not folder.is_dir():
        return []
    return sorted(run.name for run in folder.iterdir() if run.name.startswith(incomplete))
