"""`spotlight recipes` and `spotlight config`: what can be run and how it is set."""

from __future__ import annotations

from typing import Annotated

import typer

from spotlight_cli import complete
from spotlight_cli.render import output

_config = typer.Typer(help="Show the configuration of a recipe, or the schema of all keys.")


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command(rich_help_panel="Set up")(recipes)
    app.add_typer(_config, name="config", rich_help_panel="Set up")


def recipes() -> None:
    """List the recipes that come with Spotlight."""
    from spotlight import config

    out = output()
    rows = []
    for name in config.recipes():
        recipe = config.load(name)
        rows.append(
            {
                "name": name,
                "model": recipe.model.kind,
                "size": f"{recipe.model.width}x{recipe.model.height}",
                "reward": " + ".join(recipe.reward.train),
                "algorithm": recipe.algorithm.kind,
                "iterations": recipe.iterations,
            }
        )
    if out.json:
        out.document(rows)
    else:
        columns = list(rows[0]) if rows else ["name"]
        out.table([column.upper() for column in columns], [list(row.values()) for row in rows])
        out.next_steps([f"spotlight train {rows[0]['name']}"] if rows else [])


@_config.command()
def show(
    recipe: Annotated[
        str, typer.Argument(help="A shipped recipe or a .yaml file.", autocompletion=complete.recipes)
    ] = "tiny",
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a value; repeat as needed.")
    ] = None,
) -> None:
    """Print the resolved configuration as YAML, fit to be used as a recipe."""
    from spotlight import config
    from spotlight.observe.redact import Redactor

    out = output()
    resolved = config.load(recipe, overrides or [])
    redactor = Redactor.from_environment()
    if out.json:
        out.document(redactor.scrub(resolved.model_dump(mode="json")))
    else:
        out.line(redactor.text(config.dump(resolved)).rstrip("\n"))


@_config.command()
def schema() -> None:
    """Print the JSON schema of all keys, with defaults, bounds and meaning."""
    from spotlight import config

    output().document(config.RunConfig.model_json_schema())
