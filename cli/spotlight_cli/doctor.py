"""`spotlight doctor`: is this machine fit, and if not, what to do."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Annotated

import typer

from spotlight.errors import PreconditionError
from spotlight_cli.cluster import STORE
from spotlight_cli.render import output


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(rich_help_panel="Set up")(doctor)


def doctor(
    cloud: Annotated[
        bool, typer.Option("--cloud", help="Also logins, clock, bucket and stray machines.")
    ] = False,
    gpus: Annotated[
        str, typer.Option(metavar="TYPE:COUNT", help="Also the account's limits for such a launch.")
    ] = "",
) -> None:
    """Check this machine, one line a finding; exit 3 when something would stop a run."""
    from spotlight import api
    from spotlight.observe.doctor import examine

    out = output()
    checks = examine()
    if cloud or gpus:
        checks += api.check_cloud(os.environ.get(STORE, ""), gpus)
    failed = [check.name for check in checks if check.verdict == "fail"]
    if out.json and not failed:
        out.document([asdict(check) for check in checks])
    elif not out.json:
        out.table(
            ["CHECK", "", "FOUND", "WHAT TO DO"], [(c.name, c.verdict, c.found, c.fix or "-") for c in checks]
        )
    if failed:
        fixes = "; ".join(check.fix for check in checks if check.verdict == "fail")
        raise PreconditionError(f"not fit: {', '.join(failed)}", hint=fixes)
