"""The provider contract in one life of two nodes, for providers whose machines take minutes; cheap ones run it too."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from spotlight.provision.base import NodeInfo, NodeSpec, NodeState, Role


def whole_life(
    provider: Any,
    kill: Callable[[NodeInfo], None],
    done: Callable[[str], None] = lambda _: None,
    zones: tuple[str, ...] = (),
) -> None:
    """`kill` takes a machine as its provider would; `done` hears of each part that holds."""

    def only(name: str) -> NodeInfo:
        (info,) = (info for info in provider.list() if info.name == name)
        return info

    def until_gone(name: str) -> NodeInfo:
        deadline = time.monotonic() + 120
        while (info := only(name)).state is not NodeState.GONE:
            assert time.monotonic() < deadline, info
            time.sleep(0.1)
        return info

    specs = [NodeSpec(name=name, role=Role.SPOT, zones=zones) for name in ("s0", "s1")]
    assert provider.list() == []
    provider.terminate("s0")
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(provider.launch, specs))
    first = only("s0")
    assert (first.role, first.state, first.reason) == (Role.SPOT, NodeState.UP, "")
    assert first.instance
    done("launched")
    provider.launch(specs[0])
    assert only("s0") == first
    done("launching a living name again changes nothing")
    kill(first)
    lost = until_gone("s0")
    assert (lost.instance, lost.interrupted) == (first.instance, True)
    assert only("s1").state is NodeState.UP
    done("taken, alone")
    provider.launch(specs[0])
    again = only("s0")
    assert again.state is NodeState.UP
    assert again.instance != first.instance
    done("launched again")
    provider.terminate("s0")
    ended = only("s0")
    assert (ended.state, ended.interrupted) == (NodeState.GONE, False)
    assert ended.reason
    provider.terminate("s0")
    assert only("s1").state is NodeState.UP
    provider.terminate("s1")
    assert only("s1").state is NodeState.GONE
    done("ended by us")
