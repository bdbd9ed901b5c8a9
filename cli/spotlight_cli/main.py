"""The `spotlight` command: global options, the commands, and the one place where errors become exit codes.

Exit codes: 0 ok, 1 a bug of ours, 2 usage or config, 3 capacity, quota or lock, 4 credentials, 5 not found,
6 run failed, 7 budget, 130 interrupted.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Annotated

import typer

from spotlight.errors import Interrupted, SpotlightError, UserError
from spotlight_cli import render

EPILOG = (
    "Exit codes: 0 ok, 1 bug, 2 usage or config, 3 capacity, quota or lock, 4 credentials, 5 not found, "
    "6 run failed, 7 budget, 130 interrupted. The global options may stand anywhere on the line."
)
# In the order of `--help`. Each module adds its commands through `register(app)` and imports nothing heavy.
COMMAND_MODULES = (
    "train",
    "sample",
    "export",
    "runs",
    "cluster",
    "cost",
    "simulate",
    "recipes",
    "serve",
    "doctor",
)
_GLOBAL_FLAGS = {"--json": "--json", "--quiet": "--quiet", "-q": "--quiet", "--debug": "--debug"}
_GLOBAL_FLAGS["--no-color"] = "--no-color"


def build() -> typer.Typer:
    """The application with every command that is there."""
    app = typer.Typer(
        name="spotlight",
        help="RL post-training of diffusion transformers on mixed on-demand and spot GPUs.",
        epilog=EPILOG,
        pretty_exceptions_enable=False,
        pretty_exceptions_show_locals=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(options)
    for name in COMMAND_MODULES:
        if importlib.util.find_spec(f"spotlight_cli.{name}") is not None:
            importlib.import_module(f"spotlight_cli.{name}").register(app)
    return app


def show_version(wanted: bool) -> None:
    """Print the version and end."""
    if wanted:
        from spotlight import __version__

        render.output().line(__version__)
        raise typer.Exit


def options(
    json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only data and errors.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    no_color: Annotated[bool, typer.Option("--no-color", help="No colours (also: NO_COLOR).")] = False,
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version and exit.", is_eager=True, callback=show_version),
    ] = False,
) -> None:
    """Set how this command speaks."""
    render.configure(json=json, quiet=quiet, debug=debug, no_color=no_color)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Nothing but that code leaves here."""
    arguments = hoist(sys.argv[1:] if argv is None else argv) or ["--help"]
    # Errors of the parser itself come before the callback has run.
    flags = arguments[: _leading_flags(arguments)]
    render.configure(
        json="--json" in flags,
        quiet="--quiet" in flags,
        debug="--debug" in flags,
        no_color="--no-color" in flags,
    )
    try:
        with tidy_signals():
            code = build()(args=arguments, prog_name="spotlight", standalone_mode=False)
    except SpotlightError as error:
        return fail(error)
    except typer.TyperException as error:
        return fail(_usage(error))
    except (KeyboardInterrupt, typer.Abort):
        return fail(Interrupted("interrupted"))
    except Exception as error:  # noqa: BLE001 - the process boundary: whatever comes is one line
        return fail(_bug(error))
    if code == Interrupted.exit_code:  # the parser turns Ctrl-C into a code
        return fail(Interrupted("interrupted"))
    return code if isinstance(code, int) else 0


def hoist(arguments: Sequence[str]) -> list[str]:
    """Move the global flags to the front, so that they may stand before or after the command."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    head, tail = arguments[:end], arguments[end:]
    flags = dict.fromkeys(_GLOBAL_FLAGS[item] for item in head if item in _GLOBAL_FLAGS)
    return [*flags, *(item for item in head if item not in _GLOBAL_FLAGS), *tail]


def fail(error: SpotlightError) -> int:
    """Print an error and return its exit code."""
    out = render.output()
    if out.debug and error.__cause__ is not None:
        traceback.print_exception(error.__cause__)
    elif out.debug:
        traceback.print_exception(error)
    with contextlib.suppress(OSError):  # nobody reads stderr any more
        out.error(error)
    return error.exit_code


@contextlib.contextmanager
def tidy_signals() -> Iterator[None]:
    """End on SIGTERM and SIGHUP the way Ctrl-C does, so that nothing we started is left behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _leading_flags(arguments: Sequence[str]) -> int:
    return next((i for i, item in enumerate(arguments) if item not in _GLOBAL_FLAGS), len(arguments))


def _usage(error: typer.TyperException) -> SpotlightError:
    context = getattr(error, "ctx", None)
    command = getattr(context, "command_path", "spotlight")
    return UserError(error.format_message(), hint=f"{command} --help")


def _bug(error: Exception) -> SpotlightError:
    bug = SpotlightError(
        f"{type(error).__name__}: {error}",
        hint="this is a bug; run again with --debug and report the traceback",
    )
    bug.__cause__ = error
    return bug


if __name__ == "__main__":
    sys.exit(main())
