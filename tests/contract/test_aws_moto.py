"""EC2 end reasons and prices, with an unchanged boto3 over the wire against moto's server."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal

import boto3
import end_source_contract
import pytest
from botocore.stub import Stubber
from moto.core import DEFAULT_ACCOUNT_ID
from moto.ec2.models import ec2_backends
from moto.ec2.models.instances import StateReason
from moto.server import ThreadedMotoServer

from spotlight.core import cost
from spotlight.core.billing import bill
from spotlight.core.ledger import ledger_from_records
from spotlight.core.money import usd_of
from spotlight.errors import CredentialError, PreconditionError
from spotlight.provision import aws, live
from spotlight.provision.base import NodeState
from spotlight.provision.buckets import open_bucket
from spotlight.provision.prices import load_rules

REGION = "us-east-1"


class Ec2World:
    """moto's EC2 plus what it lacks: interruptions, done inside its model the way EC2 reports them."""

    prefix = "ec2:"
    never_existed = "i-0123456789abcdef0"

    def __init__(self, endpoint: str) -> None:
        self.ec2 = aws.client(REGION, endpoint)
        self.source = aws.Ec2Ends(self.ec2)
        self._image = self.ec2.describe_images()["Images"][0]["ImageId"]
        self._backend = ec2_backends[DEFAULT_ACCOUNT_ID][REGION]

    def run(self) -> str:
        spec = {"ImageId": self._image, "InstanceType": "p5.48xlarge"}
        asked = self.ec2.request_spot_instances(LaunchSpecification=spec, InstanceCount=1)
        request_id = asked["SpotInstanceRequests"][0]["SpotInstanceRequestId"]
        found = self.ec2.describe_spot_instance_requests(SpotInstanceRequestIds=[request_id])
        return found["SpotInstanceRequests"][0]["InstanceId"]

    def terminate(self, instance: str) -> None:
        self.ec2.terminate_instances(InstanceIds=[instance])

    def stop(self, instance: str) -> None:
        self.ec2.stop_instances(InstanceIds=[instance])

    def interrupt(self, instance: str) -> None:
        self._backend.get_instance(instance).terminate()
        self._taken(instance, "Server.SpotInstanceTermination", "instance-terminated-no-capacity")

    def interrupt_to_stop(self, instance: str) -> None:
        self._backend.get_instance(instance).stop()
        self._taken(instance, "Server.SpotInstanceShutdown", "instance-stopped-no-capacity")

    def _taken(self, instance: str, reason: str, code: str) -> None:
        machine = self._backend.get_instance(instance)
        machine._reason = ""
        machine.state_reason = StateReason(reason, reason)
        request = self.spot_request(instance)
        request.state, request._status_code = "closed", code

    def spot_request(self, instance: str):
        requests = self._backend.spot_instance_requests.values()
        return next(r for r in requests if r.instance and r.instance.id == instance)


@pytest.fixture(scope="module")
def endpoint():
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def world(endpoint, monkeypatch):
    for name, value in {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}.items():
        monkeypatch.setenv(name, value)
    return Ec2World(endpoint)


@pytest.mark.parametrize("clause", end_source_contract.CONTRACT, ids=lambda clause: clause.__name__)
def test_end_source_contract(world, clause):
    clause(world)


def test_a_marked_instance_still_runs(world):
    """The two minutes between notice and end are not the end."""
    instance = world.run()
    world.spot_request(instance)._status_code = "marked-for-termination"
    assert world.source.end_of(instance) is None


def test_an_instance_that_we_end_after_the_notice_is_ours(world):
    """EC2 bills it, first hour or not, so it must not be taken for an interruption."""
    instance = world.run()
    world.spot_request(instance)._status_code = "marked-for-termination"
    world.terminate(instance)
    world.spot_request(instance)._status_code = "instance-terminated-by-user"
    assert world.source.end_of(instance).reason == "user"


@pytest.mark.parametrize(
    "code",
    [
        "instance-terminated-by-price",
        "instance-terminated-capacity-oversubscribed",
        "instance-stopped-by-price",
    ],
)
def test_every_ec2_made_end_is_an_interruption(world, code):
    instance = world.run()
    world._backend.get_instance(instance).terminate()
    world.spot_request(instance)._status_code = code
    end = world.source.end_of(instance)
    assert (end.reason, end.source) == ("interrupted", f"ec2:{code}")


def test_prices_of_every_zone_over_the_wire(world):
    """moto's prices are a constant, but zones, paging and types are those of the real call."""
    quotes = aws.spot_quotes(world.ec2, "p5.48xlarge", datetime(2026, 3, 2, tzinfo=UTC).timestamp())
    assert len({quote.market.zone for quote in quotes}) == len(quotes) >= 3
    for quote in quotes:
        assert quote.market[:2] == ("aws", REGION)
        assert (quote.source, quote.as_of) == ("EC2 spot price history", "2026-03-02")
        assert quote.usd_per_h > 0


def test_price_series_over_two_pages(world):
    """Points in time order, duplicates once, the price in force before the start included."""
    ec2 = world.ec2

    def row(hour, usd):
        return {
            "AvailabilityZone": "us-east-1a",
            "InstanceType": "p5.48xlarge",
            "SpotPrice": usd,
            "Timestamp": datetime(2026, 3, 2, hour, tzinfo=UTC),
        }

    with Stubber(ec2) as stub:
        pages = [[row(12, "18.500000"), row(11, "16.2")], [row(11, "16.2"), row(3, "15")]]
        stub.add_response("describe_spot_price_history", {"SpotPriceHistory": pages[0], "NextToken": "more"})
        stub.add_response("describe_spot_price_history", {"SpotPriceHistory": pages[1]})
        start, end = (datetime(2026, 3, 2, hour, tzinfo=UTC).timestamp() for hour in (10, 13))
        points = aws.spot_series(ec2, "p5.48xlarge", "us-east-1a", start, end)
    assert [point.usd_per_h for point in points] == [Decimal("15"), Decimal("16.2"), Decimal("18.5")]
    assert points[0].at_s < start
    assert {point.source for point in points} == {"EC2 spot price history"}


def test_no_login_is_a_credential_error(monkeypatch, tmp_path):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    with pytest.raises(CredentialError, match="no AWS login"):
        aws.client(REGION)


@pytest.mark.parametrize(
    ("code", "error"), [("AuthFailure", CredentialError), ("InternalError", PreconditionError)]
)
def test_refusals_are_told_apart(world, code, error):
    client = boto3.client("ec2", region_name=REGION)
    with Stubber(client) as stub:
        stub.add_client_error("describe_instances", service_error_code=code)
        with pytest.raises(error):
            aws.Ec2Ends(client).end_of("i-1")


def test_a_dead_endpoint_is_a_precondition_error(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    client = boto3.client("ec2", region_name=REGION, endpoint_url="http://127.0.0.1:9")
    with pytest.raises(PreconditionError, match="EC2 cannot be reached"):
        aws.Ec2Ends(client).end_of("i-1")


def test_a_time_before_the_launch_is_not_believed(world):
    """moto stamps every spot request with 2015; the bracketed time of the state change is then the end."""
    instance = world.run()
    world._backend.get_instance(instance).terminate()
    world.spot_request(instance)._status_code = "instance-terminated-no-capacity"
    launched_s = world.ec2.describe_instances(InstanceIds=[instance])["Reservations"][0]["Instances"][0][
        "LaunchTime"
    ]
    assert world.source.end_of(instance).at_s >= launched_s.timestamp() - 1


def test_the_prices_that_were_in_force_replace_what_the_run_had(world):
    """2 h in us-east-1a: 1 h at 16.20, 1 h at 18.50; the one on demand and the one elsewhere are left alone."""
    hour = datetime(2026, 3, 2, 10, tzinfo=UTC).timestamp()
    market = {"cloud": "aws", "region": REGION, "zone": "us-east-1a", "instance_type": "p5.48xlarge"}
    records = []
    for i, other in enumerate([{}, {"price_class": "on_demand"}, {"cloud": "gcp"}]):
        its = {**market, "price_class": "spot", **other}
        records += [
            cost.NodeRequested(node=f"n{i}", at_s=hour, gpus=8, **its),
            cost.NodeUp(node=f"n{i}", at_s=hour),
            cost.NodeEnded(node=f"n{i}", at_s=hour + 7200, reason="user"),
            cost.PricePoint(**its, usd_per_h=Decimal(1), source="guess"),
        ]
    ledger = ledger_from_records([cost.encode(record) for record in records])
    asked = []

    def connect(region):
        asked.append(region)
        return world.ec2

    rows = [
        {"AvailabilityZone": "us-east-1a", "InstanceType": "p5.48xlarge", "SpotPrice": usd,
         "Timestamp": datetime(2026, 3, 2, at, tzinfo=UTC)}
        for usd, at in (("18.5", 11), ("16.2", 4))
    ]  # fmt: skip
    with Stubber(world.ec2) as stub:
        stub.add_response("describe_spot_price_history", {"SpotPriceHistory": rows})
        ledger = live.at_prices_in_force(ledger, live.in_force(ledger, hour + 9999, connect))
    found = bill(ledger, load_rules(), hour + 9999)
    assert asked == [REGION]
    assert [usd_of(charge.units) for charge in found.charges if charge.units] == [
        Decimal("34.7"), Decimal(2), Decimal(2)
    ]  # fmt: skip


def run_tagged(world, run: str, node: str, **options):
    tags = [{"Key": "spotlight-run", "Value": run}, {"Key": "spotlight-node", "Value": node}]
    answer = world.ec2.run_instances(
        ImageId=world._image, InstanceType="p5.48xlarge", MinCount=1, MaxCount=1,
        TagSpecifications=[{"ResourceType": "instance", "Tags": tags}], **options,
    )  # fmt: skip
    return answer["Instances"][0]["InstanceId"]


def test_machines_of_a_run_are_those_with_its_tag(world):
    machines = aws.Ec2Machines(world.ec2)
    head = run_tagged(world, "mine", "od0")
    spot = run_tagged(world, "mine", "s0", InstanceMarketOptions={"MarketType": "spot"})
    other = run_tagged(world, "other", "od0")
    found = {machine.instance: machine for machine in machines.of_run("mine")}
    assert found.keys() == {head, spot}
    assert (found[head].node, found[head].spot, found[head].state) == ("od0", False, NodeState.UP)
    assert (found[spot].node, found[spot].spot, found[spot].zone[:9]) == ("s0", True, "us-east-1")
    assert {"mine", "other"} <= machines.runs()
    machines.terminate([head, other, "i-0123456789abcdef0"])
    (gone,) = (machine for machine in machines.of_run("mine") if machine.instance == head)
    assert (gone.state, gone.reason, gone.interrupted) == (
        NodeState.GONE,
        "Client.UserInitiatedShutdown",
        False,
    )
    world._backend.get_instance(spot).terminate()
    world._backend.get_instance(spot).state_reason = StateReason("taken", "Server.SpotInstanceTermination")
    (taken,) = (machine for machine in machines.of_run("mine") if machine.instance == spot)
    assert (taken.state, taken.interrupted) == (NodeState.GONE, True)
    assert "mine" not in machines.runs()


@pytest.mark.parametrize("run", ["mine*", "*", "", "mine,other"])
def test_a_tag_is_no_pattern(world, run):
    """EC2 takes `*` in a filter for anything; `down` must never end another run's machines."""
    run_tagged(world, "mine-too", "od0")
    assert [m for m in aws.Ec2Machines(world.ec2).of_run(run) if m.node] == []


def test_a_profile_is_a_login_for_the_bucket(endpoint, monkeypatch, tmp_path):
    """As on a laptop: keys in ~/.aws, nothing in the environment."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "credentials").write_text(
        "[default]\naws_access_key_id = mine\naws_secret_access_key = secret\n"
    )
    (tmp_path / "config").write_text("[default]\nregion = us-west-2\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    monkeypatch.delenv("AWS_DEFAULT_REGION", raising=False)
    monkeypatch.delenv("AWS_REGION", raising=False)
    boto3.client("s3").create_bucket(
        Bucket="profiled", CreateBucketConfiguration={"LocationConstraint": "us-west-2"}
    )
    bucket = open_bucket("s3://profiled/runs")
    assert bucket.put_new("a", b"1")
    assert bucket.get("a").data == b"1"
    assert aws.bucket_login()[1] == {"region": "us-west-2"}
