"""Each cloud's metadata service over the wire, in all the shapes it answers in."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.metadata_server import MetadataServer

from spotlight.runtime.notices import (
    AwsNotice,
    AzureNotice,
    Background,
    GcpNotice,
    Interruption,
    Watch,
    cloud_source,
)

NOW_S = 1_764_565_200.0  # 2025-12-01T05:00:00Z


@pytest.fixture
def server(tmp_path: Path) -> Iterator[MetadataServer]:
    found = MetadataServer(tmp_path / "state.json")
    yield found
    found.close()


def aws(server: MetadataServer) -> AwsNotice:
    return AwsNotice(server.url, wall=lambda: NOW_S)


def azure(server: MetadataServer, name: str = "vm0") -> AzureNotice:
    return AzureNotice(server.url, name, wall=lambda: NOW_S)


def preempt(**fields: object) -> dict[str, object]:
    event = {"EventType": "Preempt", "Resources": ["vm0"], "NotBefore": "Mon, 01 Dec 2025 05:00:30 GMT"}
    return event | fields


def test_aws_says_nothing_until_there_is_something(server: MetadataServer) -> None:
    assert aws(server).poll() is None


def test_aws_gives_action_and_time(server: MetadataServer) -> None:
    server.say(action={"action": "terminate", "time": "2025-12-01T05:02:00Z"})
    assert aws(server).poll() == Interruption(120.0, "aws")


def test_aws_renews_a_stale_token(server: MetadataServer) -> None:
    source = aws(server)
    assert source.poll() is None
    server.say(token_epoch=1, action={"action": "stop", "time": "2025-12-01T05:00:10Z"})
    assert source.poll() == Interruption(10.0, "aws")
    assert sum(line.startswith("PUT") for line in server.requests) == 2


def test_aws_takes_a_rebalance_recommendation_for_no_notice(server: MetadataServer) -> None:
    server.say(rebalance={"noticeTime": "2025-12-01T05:00:00Z"})
    assert aws(server).poll() is None


@pytest.mark.parametrize("at", ["2025-12-01T04:00:00Z", "soon", None])
def test_a_time_that_is_past_or_nonsense_leaves_none(server: MetadataServer, at: object) -> None:
    server.say(action={"action": "terminate", "time": at})
    assert aws(server).poll() == Interruption(0.0, "aws")


@pytest.mark.parametrize("action", [{"action": "dance"}, [], "text", {"time": "2025-12-01T05:02:00Z"}])
def test_aws_ignores_what_is_no_interruption(server: MetadataServer, action: object) -> None:
    server.say(action=action)
    assert aws(server).poll() is None


def test_gcp_wakes_from_its_long_poll_when_the_key_flips(server: MetadataServer) -> None:
    source = GcpNotice(server.url, hold_s=20.0)
    threading.Timer(0.2, server.say, kwargs={"preempted": True}).start()
    began = time.monotonic()
    assert source.poll() == Interruption(30.0, "gcp")
    assert time.monotonic() - began < 20.0  # woken, not timed out


def test_gcp_says_nothing_when_nothing_changes(server: MetadataServer) -> None:
    assert GcpNotice(server.url, hold_s=0.05).poll() is None


def test_azure_gives_the_time_of_a_preemption(server: MetadataServer) -> None:
    server.say(events=[preempt(EventType="Reboot"), preempt()])
    assert azure(server).poll() == Interruption(30.0, "azure")


def test_azure_events_of_other_machines_are_not_ours(server: MetadataServer) -> None:
    server.say(events=[preempt(Resources=["vm1"])])
    assert azure(server).poll() is None


def test_azure_has_no_time_left_once_the_event_has_started(server: MetadataServer) -> None:
    server.say(events=[preempt(NotBefore="", EventStatus="Started")])
    assert azure(server).poll() == Interruption(0.0, "azure")


@pytest.mark.parametrize("status", [400, 401, 403, 404, 429, 500, 503])
@pytest.mark.parametrize("make", [aws, azure, lambda server: GcpNotice(server.url, 0.05)])
def test_a_service_that_refuses_gives_no_notice(server: MetadataServer, make, status: int) -> None:
    server.say(status=status, preempted=True, action={"action": "terminate"}, events=[preempt()])
    assert make(server).poll() is None


@pytest.mark.parametrize("make", [AwsNotice, AzureNotice, GcpNotice])
def test_a_service_that_is_not_there_gives_no_notice(make) -> None:
    assert make("http://127.0.0.1:9").poll() is None


@pytest.mark.parametrize(
    ("headers", "path", "status"),
    [
        ({}, "/latest/meta-data/spot/instance-action", 401),
        ({}, "/computeMetadata/v1/instance/preempted", 403),
        ({}, "/metadata/scheduledevents?api-version=2020-07-01", 400),
    ],
)
def test_the_fake_is_as_strict_as_the_clouds(server: MetadataServer, headers, path: str, status: int) -> None:
    from spotlight.runtime.notices import ask

    assert ask(server.url + path, headers).status == status


def test_a_standing_notice_is_news_once_although_its_time_runs_down(server: MetadataServer) -> None:
    left = iter([120.0, 119.5, 119.0, 60.0])

    class Counting:
        asked = 0

        def poll(self) -> Interruption | None:
            self.asked += 1
            return Interruption(next(left, 60.0), "aws")

    source = Counting()
    background = Background(source, every_s=0.01)
    watch, news = Watch([background]), []
    while source.asked < 6:
        notice, _ = watch.news()
        news += [notice] if notice else []
        time.sleep(0.001)
    background.close()
    assert news[0] == Interruption(120.0, "aws")
    assert len(news) <= 2  # the deadline that jumped by a minute is another one


def test_a_node_asks_its_own_cloud(server: MetadataServer) -> None:
    assert cloud_source({}) == []
    assert cloud_source({"SPOTLIGHT_CLOUD": "elsewhere"}) == []
    (source,) = cloud_source({"SPOTLIGHT_CLOUD": "aws", "SPOTLIGHT_METADATA_URL": server.url})
    server.say(action={"action": "terminate", "time": "2025-12-01T05:02:00Z"})
    deadline = time.monotonic() + 10
    while source.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert source.poll() == Interruption(0.0, "aws")
    source.close()
