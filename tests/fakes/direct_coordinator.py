"""A real coordinator without Ray: called as an actor is, but answered before the call returns."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

from spotlight.runtime.coordinator import Coordinator


class DirectCoordinator:
    """`coordinator.method.remote(...)` gives the value itself. `calls` lists every method called that way."""

    def __init__(self, folder: Path, policy: dict[str, Any] | None = None, *, ticking: bool = False) -> None:
        self.calls: list[str] = []
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._coordinator = Coordinator(str(folder), policy, tick_s=0.02)
        if ticking:
            self.call("ready")

    def call(self, method: str, *arguments: Any) -> Any:
        """The answer of the coordinator."""
        made = getattr(self._coordinator, method)(*arguments)
        return asyncio.run_coroutine_threadsafe(made, self._loop).result(timeout=30)

    def __getattr__(self, method: str) -> Any:
        def remote(*arguments: Any) -> Any:
            self.calls.append(method)
            return self.call(method, *arguments)

        class Call:
            pass

        Call.remote = staticmethod(remote)  # type: ignore[attr-defined]
        return Call

    def close(self) -> None:
        """End its thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
