"""One contract for all object stores: a local folder, memory, S3 (moto's server), GCS (a fake of its API)."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from object_servers import fake_gcs, make_bucket, moto_s3, serving

from spotlight.errors import IntegrityError, NotFoundError, UserError
from spotlight.store.objects import ObjectStore, open_store

KINDS = ["folder", "memory", "s3", "gs"]


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    with moto_s3() as address:
        yield address


@pytest.fixture(params=KINDS)
def store(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ObjectStore]:
    kind = request.param
    if kind == "folder":
        yield open_store(tmp_path / "objects")
    elif kind == "memory":
        yield open_store("memory://")
    elif kind == "s3":
        address = request.getfixturevalue("s3")
        bucket = uuid.uuid4().hex
        make_bucket(address, bucket)
        for name, value in {
            "AWS_ENDPOINT_URL": f"http://{address}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_REGION": "us-east-1",
        }.items():
            monkeypatch.setenv(name, value)
        yield open_store(f"s3://{bucket}/some/prefix")
    else:
        with serving(fake_gcs()) as server:
            base = f"http://127.0.0.1:{server.server_address[1]}"
            yield open_store("gs://bucket/some/prefix", base_url=base, bearer_token="test")


def test_what_was_put_is_got(store: ObjectStore) -> None:
    for data in (b"", b"\0\xff" * 1000, b"x" * 3_000_000):
        key = f"a/{len(data)}"
        tag = store.put_new(key, data)
        blob = store.get(key)
        assert (blob.data, blob.tag) == (data, tag)


def test_create_only(store: ObjectStore) -> None:
    assert store.put_new("a/b", b"first")
    assert store.put_new("a/b", b"second") is None
    assert store.put_new("a/b", b"first") is None  # equal bytes are no exception
    assert store.get("a/b").data == b"first"


def test_compare_and_set(store: ObjectStore) -> None:
    old = store.put_new("k", b"1")
    assert old
    new = store.put_if("k", b"2", old)
    assert new
    assert store.put_if("k", b"3", old) is None
    assert store.get("k").data == b"2"
    assert store.put_if("k", b"3", store.get("k").tag)
    assert store.get("k").data == b"3"


def test_compare_and_set_of_what_is_gone(store: ObjectStore) -> None:
    tag = store.put_new("k", b"1")
    assert tag
    store.delete("k")
    assert store.put_if("k", b"2", tag) is None
    assert store.list_keys() == []
    assert store.put_new("k", b"3")


def test_missing(store: ObjectStore) -> None:
    with pytest.raises(NotFoundError, match="a/b"):
        store.get("a/b")
    store.delete("a/b")
    assert store.list_keys("a") == []


def test_keys_go_by_whole_segments_and_are_sorted(store: ObjectStore) -> None:
    for key in ("v1/x", "v10/x", "v1/y/z", "v2", "latest"):
        assert store.put_new(key, b"")
    assert store.list_keys("v1") == ["v1/x", "v1/y/z"]
    assert store.list_keys() == ["latest", "v1/x", "v1/y/z", "v10/x", "v2"]


def test_delete(store: ObjectStore) -> None:
    for key in ("a/b/c", "a/d"):
        store.put_new(key, b"")
    store.delete("a/b/c")
    assert store.list_keys() == ["a/d"]
    assert store.put_new("a/b/c", b"again")
    assert store.put_new("a/b/e", b"beside it")


HOSTILE = [
    "",
    "/etc/passwd",
    "..",
    "../../x",
    "a/../../x",
    "a//b",
    "a/",
    ".",
    "./a",
    ".lock",
    "a/.hidden",
    "a\n",
    "a\0b",
    "a b",
    "$(id)",
    "a; rm -rf ~",
    "é",
    "a\\b",
    "%2e%2e/x",
    "~/x",
    'mine", "/home/x/.ssh": "s3://x',
    "x" * 300,
    "/".join("x" * 500),
]


def test_hostile_keys_are_refused_everywhere(store: ObjectStore) -> None:
    for key in HOSTILE:
        for use in (
            lambda key=key: store.put_new(key, b""),
            lambda key=key: store.put_if(key, b"", '{"e_tag": "x"}'),
            lambda key=key: store.get(key),
            lambda key=key: store.delete(key),
            lambda key=key: store.list_keys(key or "/"),
        ):
            with pytest.raises(UserError, match="bad object key"):
                use()
    assert store.list_keys() == []


def test_limit(store: ObjectStore) -> None:
    store.put_new("k", b"12345")
    assert store.get("k", limit_bytes=5).data == b"12345"
    with pytest.raises(IntegrityError, match="5 bytes, at most 4"):
        store.get("k", limit_bytes=4)


def test_of_many_creators_one_wins(store: ObjectStore) -> None:
    start = threading.Barrier(8)

    def create(i: int) -> bool:
        start.wait()
        return store.put_new("k", b"%d" % i) is not None

    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(create, range(8)))
    assert won.count(True) == 1
    assert store.get("k").data == b"%d" % won.index(True)


def test_no_update_is_lost(store: ObjectStore) -> None:
    store.put_new("k", b"0")

    def add(times: int) -> None:
        while times:
            blob = store.get("k")
            times -= store.put_if("k", b"%d" % (int(blob.data) + 1), blob.tag) is not None

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(add, [10] * 4))
    assert store.get("k").data == b"40"
