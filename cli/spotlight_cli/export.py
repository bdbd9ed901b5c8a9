"""`spotlight export`: what a run has learned as files for diffusers, or as a repository on the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from spotlight_cli import complete
from spotlight_cli.render import output


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(rich_help_panel="Run")(export)


def export(
    run: Annotated[str, typer.Argument(help="Name of a run.", autocompletion=complete.runs)],
    out_dir: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="New or empty folder; default RUN-export.", file_okay=False),
    ] = None,
    merged: Annotated[
        bool, typer.Option("--merged", help="The whole transformer, a LoRA added into its weights.")
    ] = False,
    live: Annotated[
        bool, typer.Option("--live/--ema", help="The weights of the last step instead of the averaged ones.")
    ] = False,
    checkpoint: Annotated[
        int | None, typer.Option(min=0, help="Iteration of the checkpoint; default the newest.")
    ] = None,
    push: Annotated[
        str | None,
        typer.Option(
            metavar="OWNER/NAME", help="Upload to this hub repository too, with the token in HF_TOKEN."
        ),
    ] = None,
) -> None:
    """Write a checkpoint's weights in diffusers' layout, and load them again to see that they do what was trained."""
    from spotlight import api

    out = output()
    target = out_dir or Path(f"{run}-export")
    found = api.export(run, out=target, merged=merged, live=live, checkpoint=checkpoint, push=push)
    if out.json:
        out.document(found)
        return
    out.line(found["path"])
    if found["pushed_to"]:
        out.line(found["pushed_to"])
