"""`spotlight train`: run a recipe on this machine and watch it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from spotlight_cli import complete
from spotlight_cli.live import RunView
from spotlight_cli.render import Output, output


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(rich_help_panel="Run")(train)


def train(
    recipe: Annotated[
        str,
        typer.Argument(help="A shipped recipe or a .yaml file.", autocompletion=complete.recipes),
    ] = "tiny",
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a value; repeat as needed.")
    ] = None,
    spot: Annotated[int | None, typer.Option(min=0, help="Spot nodes; 0 explores nothing.")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the run; default: the recipe, numbered.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint.")] = False,
    preempt: Annotated[
        str | None, typer.Option(metavar="TRACE|demo|none", help="Kill spot nodes after a trace.")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of the run.")] = None,
    iterations: Annotated[int | None, typer.Option(min=0, help="Iterations to train.")] = None,
) -> None:
    """Post-train a diffusion transformer on this machine: a local cluster with spot nodes that may die."""
    from spotlight import api, config

    out = output()
    resolved = config.load(recipe, flag_overrides(overrides or [], seed=seed, iterations=iterations))
    with RunView(out) as view:
        summary = api.train(
            resolved,
            name=name,
            base_name=default_name(recipe),
            spot=spot,
            preempt=preempt,
            resume=resume,
            on_event=view,
        )
    show_summary(out, summary)


def flag_overrides(overrides: list[str], **flags: float | None) -> list[str]:
    """The overrides with those that have a flag of their own; a flag wins over `--set`."""
    return [*overrides, *(f"{key}={value}" for key, value in flags.items() if value is not None)]


def default_name(recipe: str) -> str:
    """A run name made from a recipe's name or file name."""
    stem = Path(recipe).stem.lower()
    slug = "".join(c if c.isascii() and c.isalnum() else "-" for c in stem).strip("-")[:16].rstrip("-")
    return slug if slug[:1].isalpha() else f"run-{slug}".rstrip("-")


def show_summary(out: Output, summary: dict[str, Any]) -> None:
    """Print what the run achieved: a document under --json, a short table otherwise."""
    from spotlight.observe import jsonl, words

    if out.json:
        out.document(jsonl.finite(summary))
        return
    out.pairs(words.summary_lines(summary))
    run = words.clean(summary.get("run", ""), 40)
    if run:
        out.next_steps(
            [f"spotlight report {run}", f'spotlight sample {run} "482"', f"spotlight verify {run}"]
        )
