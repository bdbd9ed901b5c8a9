"""`spotlight sample`: draw with what a run has learned."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from spotlight_cli import complete
from spotlight_cli.render import output


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(rich_help_panel="Run")(sample)


def sample(
    run: Annotated[str, typer.Argument(help="Name of a run.", autocompletion=complete.runs)],
    prompt: Annotated[str, typer.Argument(help="What to draw.")],
    out_file: Annotated[Path, typer.Option("--out", "-o", help="PNG file to write.", dir_okay=False)] = Path(
        "sample.png"
    ),
    seed: Annotated[int, typer.Option(min=0, help="Seed of the noise.")] = 0,
) -> None:
    """Write one image from a run's result."""
    from spotlight import api

    out = output()
    path = api.sample(run, prompt, out=out_file, seed=seed)
    if out.json:
        out.document({"path": str(path), "run": run, "prompt": prompt, "seed": seed})
    else:
        out.line(str(path))
