"""A reward server in one file, for packages that need an environment of their own: ImageReward and HPSv2.

Python 3.9 or later, Pillow and the package are all it needs; nothing of Spotlight is imported. In the
environment of the package, on any machine that the run's nodes can reach:

    SPOTLIGHT_REWARD_TOKEN=... python reward_server.py image_reward --host 0.0.0.0 --port 8900

and for the run, with the same token in its environment:

    spotlight train sd35-ocr --set 'reward.train={"http://HOST:8900/score": 1.0}'

The protocol is in `spotlight/rl/rewards/remote.py`. An image whose score fails gets null and a reason.
"""

from __future__ import annotations

import argparse
import base64
import hmac
import io
import json
import os
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from PIL import Image

MAX_REQUEST_BYTES = 64_000_000
TOKEN = os.environ.get("SPOTLIGHT_REWARD_TOKEN", "")

Score = Callable[[str, Image.Image], float]  # of a prompt and an image, higher is better


def image_reward() -> Score:
    """ImageReward (arXiv 2304.05977): standardised, about -2 to 2."""
    import ImageReward

    return ImageReward.load("ImageReward-v1.0").score


def hps() -> Score:
    """HPS v2.1 (arXiv 2306.09341): about 0.2 to 0.35."""
    import hpsv2

    return lambda prompt, image: hpsv2.score(image, prompt, hps_version="v2.1")[0]


class Handler(BaseHTTPRequestHandler):
    """POST /score; one image at a time, for models are rarely safe to call from several threads."""

    score: Score
    one_at_a_time = threading.Lock()
    timeout = 30

    def do_POST(self) -> None:  # noqa: D102
        given = self.headers.get("Authorization", "")
        if TOKEN and not hmac.compare_digest(given.encode(), f"Bearer {TOKEN}".encode()):
            return self.answer(401, {"error": "a wrong token or none"})
        length = int(self.headers.get("Content-Length") or 0)
        if not 0 < length <= MAX_REQUEST_BYTES:
            return self.answer(413, {"error": f"a body of 1 to {MAX_REQUEST_BYTES} bytes is wanted"})
        try:
            request = json.loads(self.rfile.read(length))
            pairs = list(zip(request["prompts"], request["images"]))  # noqa: B905 - Python 3.9 has no `strict`
        except (ValueError, KeyError, TypeError) as error:
            return self.answer(400, {"error": repr(error)})
        with self.one_at_a_time:
            rows = [self.judged(prompt, image) for prompt, image in pairs]
        reply = {"scores": [score for score, _ in rows], "info": {"error": [error for _, error in rows]}}
        return self.answer(200, reply)

    def judged(self, prompt: str, image: str) -> tuple[float | None, str | None]:
        """The score, or why there is none."""
        try:
            png = Image.open(io.BytesIO(base64.b64decode(image)), formats=["PNG"])
            return float(type(self).score(prompt, png.convert("RGB"))), None
        except Exception as error:  # noqa: BLE001 - whatever the package raises is that image's failure
            return None, repr(error)[:200]

    def answer(self, status: int, reply: dict[str, Any]) -> None:
        """JSON, whatever happened."""
        body = json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet: prompts may be private."""


def main() -> None:
    """Serve until Ctrl-C."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    rewards = {"image_reward": image_reward, "hps": hps}
    parser.add_argument("reward", choices=list(rewards))
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8900)
    options = parser.parse_args()
    if options.host not in ("127.0.0.1", "localhost") and not TOKEN:
        parser.error("beyond this machine a token is needed: set SPOTLIGHT_REWARD_TOKEN")
    Handler.score = staticmethod(rewards[options.reward]())
    server = ThreadingHTTPServer((options.host, options.port), Handler)
    print(f"http://{options.host}:{server.server_address[1]}/score", flush=True)  # noqa: T201
    server.serve_forever()


if __name__ == "__main__":
    main()
