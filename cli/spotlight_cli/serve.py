"""`spotlight serve-reward`: score images for runs whose packages cannot live beside the reward's."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from spotlight_cli.render import output


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("serve-reward", rich_help_panel="Run")(serve_reward)


def serve_reward(
    reward: Annotated[str, typer.Argument(help="A shipped reward or your own module:name.")],
    host: Annotated[
        str, typer.Option(help="Address to listen on; beyond loopback a token is needed.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one.")] = 8900,
) -> None:
    """Serve one reward over HTTP (JSON and base64 PNG) until Ctrl-C; its address is a reward name.

    The token, if any, is read from SPOTLIGHT_REWARD_TOKEN.
    """
    from spotlight import api

    out = output()
    with api.serve_reward(
        reward, host=host, port=port, token=os.environ.get("SPOTLIGHT_REWARD_TOKEN")
    ) as server:
        if out.json:
            out.document({"url": server.url, "reward": reward})
        else:
            out.line(server.url)
            out.next_steps([f"spotlight train --set 'reward.train={{\"{server.url}\": 1}}'"])
        server.serve_forever()
