"""SkyPilot's words as ours, its absence, its deadline; nothing here reaches a server or a cloud."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest
from fakes.fake_account import LAUNCH, Account
from fakes.fake_cloud import FakeCloud

from spotlight.errors import CapacityError, CredentialError, PreconditionError, QuotaError, UserError
from spotlight.provision import refusals, skypilot, templates
from spotlight.provision.base import NodeSpec, NodeState, Role

SPOT = NodeSpec(name="s0", role=Role.SPOT, zones=("us-east-1a", "us-east-1b"))


def refusal(*history: str) -> Exception:
    exceptions = pytest.importorskip("sky.exceptions")
    return exceptions.ResourcesUnavailableError(
        "Failed to acquire resources in all zones", failover_history=[Exception(text) for text in history]
    )


@pytest.mark.parametrize(
    ("history", "kind"),
    [
        (["An error occurred (InsufficientInstanceCapacity) when calling RunInstances"], CapacityError),
        (["An error occurred (MaxSpotInstanceCountExceeded) ..."], QuotaError),
        (["An error occurred (VcpuLimitExceeded) ..."], QuotaError),
        (["QUOTA_EXCEEDED: Quota 'PREEMPTIBLE_NVIDIA_H100_GPUS' exceeded"], QuotaError),
        (["ZONE_RESOURCE_POOL_EXHAUSTED"], CapacityError),
        (["VcpuLimitExceeded", "InsufficientInstanceCapacity"], CapacityError),  # one zone may yet have it
        ([], CapacityError),
    ],
)
def test_no_quota_is_told_from_no_capacity(history: list[str], kind: type) -> None:
    found = refusals.translated(refusal(*history), "s0")
    assert type(found) is kind
    assert found.message.startswith("s0: ")


ATTEMPT = (
    "W 12-01 12:47:08 instance.py:415] create_instances: Attempt failed with An error occurred ({}) when calling \
the RunInstances operation (reached max retries: 0): {}"
)


@pytest.mark.parametrize(
    ("codes", "kind"),
    [
        (["VcpuLimitExceeded", "VcpuLimitExceeded"], QuotaError),
        (["InsufficientInstanceCapacity", "VcpuLimitExceeded"], CapacityError),
        (["InsufficientInstanceCapacity"], CapacityError),
    ],
)
def test_the_cause_stands_in_the_log_alone(codes: list[str], kind: type) -> None:
    """As SkyPilot 0.14.1 does it: the exception and its history say only that all zones were tried."""
    log = "\n".join(f"\x1b[2m{ATTEMPT.format(code, 'none left')}\x1b[0m" for code in codes)
    found = refusals.translated(refusal("Failed to acquire resources in all zones in us-east-1. "), "s0", log)
    assert type(found) is kind
    assert found.message.startswith(f"s0: ({codes[0]}) when calling the RunInstances")
    assert "\x1b" not in found.message


def test_a_refused_login_and_anything_else_are_told_apart() -> None:
    assert type(refusals.translated(Exception("UnauthorizedOperation: no"), "s0")) is CredentialError
    assert type(refusals.translated(TimeoutError("ssh"), "s0")) is PreconditionError
    assert len(refusals.translated(Exception("x" * 10_000), "s0").message) < 400


@pytest.mark.parametrize(
    "spec", [None, SimpleNamespace(origin=None)]
)  # not there, or a bare folder of that name
def test_without_skypilot_one_message_says_so(monkeypatch: pytest.MonkeyPatch, spec: object) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: spec)
    with pytest.raises(CredentialError, match="SkyPilot is not installed") as caught:
        skypilot.require()
    assert caught.value.exit_code == 4


@pytest.mark.parametrize(
    ("text", "place"),
    [
        (None, (None, None)),
        ("", (None, None)),
        ("aws", ("aws", None)),
        ("gcp/us-central1", ("gcp", "us-central1")),
    ],
)
def test_infra_names_a_cloud_and_perhaps_a_region(
    text: str | None, place: tuple[str | None, str | None]
) -> None:
    assert skypilot.parse_infra(text) == place


@pytest.mark.parametrize(
    "text",
    ["aws/us-east-1,aws/us-west-2", "aws,gcp", "azure", "aws/", "aws/$(id)", "../x", "aws/us-east-1\n", "*"],
)
def test_a_wider_span_or_nonsense_is_refused(text: str) -> None:
    with pytest.raises(UserError):
        skypilot.parse_infra(text)


class FakeSky:
    """The few calls of SkyPilot's SDK that a launch makes. `status` is what its server says of the request."""

    StatusRefreshMode = SimpleNamespace(FORCE="force")

    def __init__(self, cloud: FakeCloud, status: str = "SUCCEEDED") -> None:
        self.cloud, self.answer = cloud, status
        self.calls: list[str] = []
        self.said = ""
        self.interrupt = False
        self.task: Any = None
        outer = self

        class Task:
            num_nodes = 1

            @staticmethod
            def from_yaml_config(tree: dict[str, Any]) -> Any:
                outer.task = Task()
                outer.task.tree = tree
                return outer.task

            def set_resources(self, resources: list[Any]) -> None:
                self.resources = resources

        self.Task = Task

    def Resources(self, **fields: Any) -> SimpleNamespace:
        return SimpleNamespace(**fields)

    def status(self, names: list[str], refresh: str) -> str:
        self.calls.append("status")
        return "status"

    def launch(self, task: Any, *, cluster_name: str, idle_minutes_to_autostop: int, down: bool) -> str:
        self.calls.append(f"launch {cluster_name} {idle_minutes_to_autostop} {down}")
        self.cloud._boot(NodeSpec(name=task.resources[0].labels["spotlight-node"], role=Role.SPOT))
        self.cloud.launches.append(SPOT)
        return "request"

    def api_status(self, request_ids: list[str]) -> list[SimpleNamespace]:
        if self.interrupt:
            raise KeyboardInterrupt
        return [SimpleNamespace(status=self.answer)]

    def api_cancel(self, request_ids: list[str]) -> str:
        self.calls.append(f"cancel {request_ids[0]}")
        return "cancelled"

    def get(self, request: str) -> None:
        if request == "request" and self.answer == "FAILED":
            raise refusal("Failed to acquire resources in all zones")

    def stream_and_get(self, request: str, *, follow: bool, output_stream: Any) -> None:
        output_stream.write(self.said)
        self.get(request)


@pytest.fixture
def cloud() -> FakeCloud:
    return FakeCloud()


def provider(sky: FakeSky, monkeypatch: pytest.MonkeyPatch, **options: Any) -> skypilot.SkyProvider:
    monkeypatch.setattr(skypilot, "require", lambda: sky)
    envs = {**templates.versions(), "SPOTLIGHT_HEAD": "10.0.0.1:6479", "SPOTLIGHT_CLOUD": "aws"}
    return skypilot.SkyProvider(
        LAUNCH, Account(sky.cloud), token="t", mounts={}, envs=envs, wait=lambda _: None, **options
    )


def test_a_node_is_a_tagged_cluster_of_its_own_in_the_zones_given(cloud: FakeCloud, monkeypatch) -> None:
    sky = FakeSky(cloud)
    made = provider(sky, monkeypatch)
    made.launch(SPOT)
    assert sky.calls == ["launch spotlight-demo-s0 10 True"]
    first, second = sky.task.resources
    assert (first.infra, second.infra) == ("aws/us-east-1/us-east-1a", "aws/us-east-1/us-east-1b")
    assert first.labels == {"spotlight-run": "demo", "spotlight-node": "s0"}
    assert first.use_spot
    assert not hasattr(first, "ports")
    assert sky.task.tree["secrets"] == {"SPOTLIGHT_RAY_TOKEN": "t"}
    assert "t" not in sky.task.tree["envs"].values()
    made.launch(SPOT)  # it lives: nothing more is asked
    assert len(sky.calls) == 1


def test_a_name_is_launched_again_only_after_skypilot_has_seen_the_loss(
    cloud: FakeCloud, monkeypatch
) -> None:
    sky = FakeSky(cloud)
    made = provider(sky, monkeypatch)
    made.launch(SPOT)
    cloud.kill("s0")
    made.launch(SPOT)
    assert sky.calls[1:] == ["status", "launch spotlight-demo-s0 10 True"]


def test_a_launch_that_hangs_meets_its_deadline_and_leaves_nothing(cloud: FakeCloud, monkeypatch) -> None:
    sky = FakeSky(cloud, "RUNNING")
    with pytest.raises(CapacityError, match="did not come up within 0 s"):
        provider(sky, monkeypatch, deadline_s=0.0).launch(SPOT)
    assert sky.calls[-1] == "cancel request"
    assert not cloud.is_alive("s0")


def test_ctrl_c_withdraws_the_order(cloud: FakeCloud, monkeypatch) -> None:
    sky = FakeSky(cloud, "RUNNING")
    sky.interrupt = True
    with pytest.raises(KeyboardInterrupt):
        provider(sky, monkeypatch).launch(SPOT)
    assert sky.calls[-1] == "cancel request"


@pytest.mark.parametrize(
    ("code", "kind"), [("InsufficientInstanceCapacity", CapacityError), ("VcpuLimitExceeded", QuotaError)]
)
def test_a_refused_launch_says_what_the_cloud_said(
    cloud: FakeCloud, monkeypatch, code: str, kind: type[Exception]
) -> None:
    sky = FakeSky(cloud, "FAILED")
    sky.said = ATTEMPT.format(code, "none left")
    with pytest.raises(kind, match=f"s0: .{code}"):
        provider(sky, monkeypatch).launch(SPOT)


def test_terminate_ends_the_machine_on_the_clouds_own_list(cloud: FakeCloud, monkeypatch) -> None:
    made = provider(FakeSky(cloud), monkeypatch)
    made.launch(SPOT)
    made.terminate("s0")
    (info,) = made.list()
    assert info.state is NodeState.GONE
    made.terminate("s0")
    made.terminate("s7")


def test_skypilots_words_go_to_stderr_without_its_markup(capsys) -> None:
    with skypilot.its_words_aside():
        print('<sky-payload>"<rich_init>Fetching</rich_init>"</sky-payload>', flush=True)
        print("Running on cluster")
    said = capsys.readouterr()
    assert (said.out, said.err.strip()) == ("", "Running on cluster")
