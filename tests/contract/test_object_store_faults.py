"""What goes wrong with a bucket: errors, hangs, lost replies, no access; moto's S3 behind a flaky front."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from object_servers import fake_gcs, flaky, make_bucket, moto_s3, serving

from spotlight.errors import CredentialError, NotFoundError, RunError, UserError
from spotlight.store.bucket import Retries
from spotlight.store.objects import ObjectStore, open_store

QUICK = Retries(count=3, first_s=0.01, ceiling_s=0.05, total_s=20, timeout_s=0.5)
AWS = {"access_key_id": "test", "secret_access_key": "s3cr3t-value", "region": "us-east-1"}

Opener = Callable[..., tuple[ObjectStore, list[str]]]


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    with moto_s3() as address:
        make_bucket(address, "bucket")
        yield address


@pytest.fixture
def through(s3: str, request: pytest.FixtureRequest) -> Iterator[Opener]:
    """Open the bucket behind a front that spends the given faults; also returns what the front has seen."""
    with ExitStack() as stack:

        def opener(*faults: str) -> tuple[ObjectStore, list[str]]:
            seen: list[str] = []
            server = stack.enter_context(serving(flaky(s3, list(faults), seen)))
            endpoint = f"http://127.0.0.1:{server.server_address[1]}"
            folder = request.node.name.translate(str.maketrans("[]", "__"))
            return open_store(f"s3://bucket/{folder}", retries=QUICK, endpoint=endpoint, **AWS), seen

        yield opener


@pytest.mark.parametrize("fault", ["500", "503", "429", "409", "hang", "lost"])
def test_a_write_outlives_two_faults_and_is_one_write(through: Opener, fault: str) -> None:
    store, seen = through(fault, fault)
    tag = store.put_new("k", b"mine")
    assert tag == store.get("k").tag
    assert seen[:2] == [f"PUT {fault}"] * 2
    assert store.put_new("k", b"other") is None


@pytest.mark.parametrize("fault", ["500", "503", "409", "hang", "lost"])
def test_a_compare_and_set_outlives_two_faults(through: Opener, fault: str) -> None:
    store, seen = through("ok", fault, fault)
    old = store.put_new("k", b"1")
    assert old
    new = store.put_if("k", b"2", old)
    assert new == store.get("k").tag
    assert seen[:3] == ["PUT ok", f"PUT {fault}", f"PUT {fault}"]
    assert store.put_if("k", b"3", old) is None


@pytest.mark.parametrize("fault", ["500", "503", "hang", "lost", "cut"])
def test_a_read_outlives_two_faults(through: Opener, fault: str) -> None:
    store, _ = through("ok", fault, fault)
    store.put_new("k", b"x" * 100_000)
    assert store.get("k").data == b"x" * 100_000


def test_s3_says_404_to_a_compare_and_set_of_what_is_gone(through: Opener) -> None:
    store, _ = through("ok", "404")
    tag = store.put_new("k", b"1")
    assert tag
    assert store.put_if("k", b"2", tag) is None


def test_a_lost_reply_does_not_claim_what_another_wrote(through: Opener) -> None:
    """The first try fails without effect, another writer comes in between: equal bytes, but not ours."""
    theirs, _ = through()
    assert theirs.put_new("k", b"same bytes")
    ours, seen = through("503")
    assert ours.put_new("k", b"same bytes") is None
    assert seen[:2] == ["PUT 503", "PUT ok"]


@pytest.mark.parametrize("fault", ["500", "503", "hang", "lost"])
def test_retries_are_bounded(through: Opener, fault: str) -> None:
    store, seen = through(*[fault] * 50)
    with pytest.raises(RunError, match="failed at k"):
        store.get("k")
    assert len(seen) == 1 + QUICK.count


def test_no_access_is_said_at_once(through: Opener) -> None:
    store, seen = through(*["403"] * 50)
    for use in (
        lambda: store.get("k"),
        lambda: store.put_new("k", b""),
        lambda: store.list_keys(),
        lambda: store.delete("k"),
    ):
        seen.clear()
        with pytest.raises(CredentialError) as caught:
            use()
        assert len(seen) == 1
        assert "aws configure" in str(caught.value.hint)
        assert "s3cr3t-value" not in str(caught.value) + repr(caught.value.__cause__)


def test_no_such_bucket(s3: str) -> None:
    store = open_store("s3://nowhere/x", retries=QUICK, endpoint=f"http://{s3}", **AWS)
    for use in (lambda: store.get("k"), lambda: store.put_new("k", b""), store.list_keys):
        with pytest.raises(NotFoundError, match="no such bucket: s3://nowhere/x"):
            use()
    with pytest.raises(NotFoundError, match="no such bucket"):
        store.put_if("k", b"", '{"e_tag": "x"}')


def test_nobody_listens() -> None:
    with serving(fake_gcs()) as server:
        port = server.server_address[1]
    store = open_store("s3://bucket", retries=QUICK, endpoint=f"http://127.0.0.1:{port}", **AWS)
    with pytest.raises(RunError, match="s3://bucket failed at k") as caught:
        store.get("k")
    assert "Debug source" not in str(caught.value)


def test_a_login_comes_from_the_given_provider(s3: str) -> None:
    asked = []

    def login() -> dict[str, object]:
        asked.append(1)
        return {"access_key_id": "test", "secret_access_key": "test", "token": None, "expires_at": None}

    store = open_store("s3://bucket/login", credentials=login, endpoint=f"http://{s3}", region="us-east-1")
    assert store.put_new("k", b"1")
    assert asked


@pytest.mark.parametrize(
    "url",
    [
        "ftp://x/y",
        "s3://",
        "s3:///key",
        "s3://UPPER",
        "s3://a b",
        "s3://-x-",
        "s3://ab",
        "gs://x;id",
        "s3://bucket/../x",
        "s3://bucket/a//b",
        "s3://bucket/$(id)",
        "http://127.0.0.1/x",
    ],
)
def test_bad_urls_are_refused(url: str) -> None:
    with pytest.raises(UserError):
        open_store(url)


def test_no_login_at_all(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without keys the machine's metadata server is asked for a role; here it has none."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    seen: list[str] = []
    with serving(flaky(s3, ["404"] * 50, seen)) as metadata:
        store = open_store(
            "s3://bucket",
            retries=QUICK,
            endpoint=f"http://{s3}",
            region="us-east-1",
            metadata_endpoint=f"http://127.0.0.1:{metadata.server_address[1]}",
        )
        with pytest.raises(CredentialError, match="no valid login for s3://bucket"):
            store.get("k")
    assert 1 <= len(seen) <= 6
