"""A remote reward against its own server, and against servers that misbehave."""

from __future__ import annotations

import base64
import http.client
import json
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from spotlight.errors import ConfigError, LockError
from spotlight.rl.rewards import Scores, combine, load_reward
from spotlight.rl.rewards.remote import RemoteReward, decode_image, encode_image
from spotlight.rl.rewards.server import MAX_REQUEST_BYTES, RewardServer

IMAGES = torch.linspace(0, 1, 10).view(10, 1, 1, 1).expand(10, 1, 4, 8).contiguous()
TWO_SIZES = (IMAGES[0], IMAGES[0][:, 1:])
PROMPTS = [f"prompt {i} 🙂" for i in range(10)]
METADATA = [{"target": str(i)} for i in range(10)]


class Brightness:
    """Mean pixel plus the target as a number, so that a mix-up of rows shows."""

    def score(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Any]) -> Scores:
        if "explode" in prompts[0]:
            raise RuntimeError("out of memory")
        values = [
            float(image.mean()) + int(row["target"]) for image, row in zip(images, metadata, strict=True)
        ]
        return Scores(values, {"shape": [list(image.shape) for image in images], "prompt": list(prompts)})


@contextmanager
def serving(reward: Any, **options: Any) -> Iterator[RewardServer]:
    server = RewardServer(reward, **options)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def answering(answer: Callable[[int], bytes]) -> Iterator[tuple[str, list[int]]]:
    """A raw server that reads a request, sends `answer(number)` and closes; b"" hangs instead."""
    calls: list[int] = []
    done = threading.Event()
    listener = socket.create_server(("127.0.0.1", 0))

    def handle(connection: socket.socket, number: int) -> None:
        with connection:
            try:
                _read_request(connection)
                reply = answer(number)
                if reply:
                    connection.sendall(reply)
                else:
                    done.wait()
            except OSError:
                pass

    def loop() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            calls.append(len(calls))
            threading.Thread(target=handle, args=(connection, calls[-1]), daemon=True).start()

    thread = threading.Thread(target=loop, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/score", calls
    finally:
        done.set()
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


def _read_request(connection: socket.socket) -> None:
    data = b""
    while b"\r\n\r\n" not in data:
        data += connection.recv(65536)
    head, _, body = data.partition(b"\r\n\r\n")
    length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
    while len(body) < length:
        body += connection.recv(65536)


def reply(body: Any, status: str = "200 OK") -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(data)}\r\nConnection: close\r\n\r\n".encode() + data


def quick(url: str, **options: Any) -> RemoteReward:
    return RemoteReward(url, **({"timeout_s": 5.0, "backoff_s": 0.0} | options))


def test_scores_and_info_come_back_in_order_over_several_requests() -> None:
    with serving(Brightness()) as server:
        scores = quick(server.url).score(IMAGES, PROMPTS, METADATA)
    expected = [round(i / 9 * 255) / 255 + i for i in range(10)]
    assert scores.values == pytest.approx(expected, abs=1e-6)
    assert scores.info["prompt"] == PROMPTS
    assert scores.info["shape"] == [[1, 4, 8]] * 10


def test_a_url_is_a_reward_name() -> None:
    with serving(Brightness()) as server:
        scores = combine({server.url: 2.0}).score(IMAGES[:1], PROMPTS[:1], METADATA[:1])
    assert scores.values == [0.0]
    assert isinstance(load_reward("https://example.org/score"), RemoteReward)


def test_pixels_survive_the_trip() -> None:
    for channels in (1, 3):
        image = torch.randint(0, 256, (channels, 5, 7)).float() / 255
        assert torch.equal(decode_image(encode_image(image)), image)


def test_images_that_are_not_finite_fail_alone() -> None:
    images = IMAGES.clone()
    images[1] = torch.nan
    with serving(Brightness()) as server:
        values = quick(server.url).score(images, PROMPTS, METADATA).values
    assert values[1] is None
    assert values.count(None) == 1


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"scores": [1.0]}, "1 scores for 3 images"),
        ({"scores": [1.0] * 4}, "4 scores for 3 images"),
        ({"scores": "111"}, "no list of scores"),
        ([1.0, 2.0, 3.0], "no list of scores"),
        (b"\x80\x04K\x01.", "no JSON"),
        (b"[" * 100_000, "no JSON"),
        (b" " * 10_000_000, "longer than"),
    ],
)
def test_an_answer_that_makes_no_sense_fails_and_is_not_asked_again(body: Any, message: str) -> None:
    with answering(lambda _: reply(body)) as (url, calls):
        scores = quick(url).score(IMAGES[:3], PROMPTS[:3], METADATA[:3])
    assert scores.values == [None] * 3
    assert message in scores.info["error"][0]
    assert len(calls) == 1


def test_odd_scores_fail_one_by_one() -> None:
    body = b'{"scores": [1.5, NaN, "2.0"], "info": {"short": [1], "why": ["a", "b", "c"], "no": 7}}'
    with answering(lambda _: reply(body)) as (url, _):
        scores = quick(url).score(IMAGES[:3], PROMPTS[:3], METADATA[:3])
    assert scores == Scores([1.5, None, None], {"why": ["a", "b", "c"]})


@pytest.mark.parametrize("status", ["500 Internal Server Error", "503 Unavailable", "429 Too Many Requests"])
def test_a_passing_failure_is_tried_again_and_then_given_up(status: str) -> None:
    waits: list[float] = []
    with answering(lambda _: reply(b"busy", status)) as (url, calls):
        reward = quick(url, tries=3, backoff_s=0.5, sleep=waits.append)
        scores = reward.score(IMAGES[:1], PROMPTS[:1], METADATA[:1])
    assert scores.values == [None]
    assert status[:3] in scores.info["error"][0]
    assert len(calls) == 3
    assert waits == [0.5, 1.0]


def test_a_second_try_may_succeed() -> None:
    good = reply({"scores": [0.25]})
    with answering(lambda number: good if number else reply(b"", "500 Oops")) as (url, calls):
        assert quick(url).score(IMAGES[:1], PROMPTS[:1], METADATA[:1]).values == [0.25]
    assert len(calls) == 2


def test_a_refusal_is_final() -> None:
    with answering(lambda _: reply(b"who are you", "401 Unauthorized")) as (url, calls):
        scores = quick(url).score(IMAGES[:1], PROMPTS[:1], METADATA[:1])
    assert scores.values == [None]
    assert len(calls) == 1


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{",
        b"garbage\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n",
    ],
)
def test_a_server_that_hangs_or_breaks_off_meets_the_deadline(answer: bytes) -> None:
    with answering(lambda _: answer) as (url, calls):
        scores = quick(url, timeout_s=0.2, tries=2).score(IMAGES[:1], PROMPTS[:1], METADATA[:1])
    assert scores.values == [None]
    assert scores.info["error"][0]
    assert 1 <= len(calls) <= 2


def test_a_server_that_drips_meets_the_deadline_too() -> None:
    """Every byte would start a socket's timeout anew."""
    listener = socket.create_server(("127.0.0.1", 0))
    stop = threading.Event()

    def drip() -> None:
        connection, _ = listener.accept()
        with connection:
            try:
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
                while not stop.wait(0.05):
                    connection.sendall(b" ")
            except OSError:
                pass

    thread = threading.Thread(target=drip, daemon=True)
    thread.start()
    reward = quick(f"http://127.0.0.1:{listener.getsockname()[1]}/score", timeout_s=0.5, tries=1)
    scores = reward.score(IMAGES[:1], PROMPTS[:1], METADATA[:1])
    stop.set()
    thread.join()
    listener.close()
    assert scores.values == [None]
    assert "within 0.5 s" in scores.info["error"][0]


def test_nobody_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    scores = quick(f"http://127.0.0.1:{port}/score", tries=2).score(IMAGES[:1], PROMPTS[:1], METADATA[:1])
    assert scores.values == [None]


@pytest.mark.parametrize(
    "url", ["http://", "http:///score", "http://user:secret@host/score", "http://host:port/score"]
)
def test_an_address_that_is_none_is_a_config_error(url: str) -> None:
    with pytest.raises(ConfigError, match="reward server's address") as caught:
        load_reward(url)
    assert "secret" not in str(caught.value)


def ask(
    server: RewardServer, body: bytes, headers: dict[str, str] | None = None, path: str = "/score"
) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=10)
    connection.request("POST", path, body, headers or {})
    response = connection.getresponse()
    answer = json.loads(response.read())
    connection.close()
    return response.status, answer


def request(**changes: Any) -> bytes:
    fields = {"images": [encode_image(IMAGES[0])], "prompts": ["x"], "metadata": [{"target": "1"}]}
    return json.dumps(fields | changes).encode()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"not json",
        b"[]",
        b"{}",
        b"[" * 100_000,
        request(images=[]),
        request(images=[], prompts=[], metadata=[]),
        request(images=["%%%"]),
        request(images=[7]),
        request(images=[base64.b64encode(b"GIF89a").decode()]),
        request(images=[encode_image(IMAGES[0])[:40]]),
        request(prompts=["x", "y"]),
        request(prompts=[7]),
        request(metadata=[None]),
        request(images=[*map(encode_image, TWO_SIZES)], prompts=["x"] * 2, metadata=[{}] * 2),
        request(images=[encode_image(IMAGES[0])] * 65, prompts=["x"] * 65, metadata=[{}] * 65),
    ],
)  # fmt: skip
def test_the_server_refuses_bad_requests_and_lives_on(body: bytes) -> None:
    with serving(Brightness()) as server:
        status, answer = ask(server, body)
        assert (status, "bad request" in answer["error"]) == (400, True)
        assert ask(server, request())[0] == 200


def test_the_server_reads_no_more_than_it_must() -> None:
    with serving(Brightness()) as server:
        assert ask(server, b"", {"Content-Length": str(MAX_REQUEST_BYTES + 1)})[0] == 413
        assert ask(server, b"", path="/other")[0] == 404


def test_a_reward_that_raises_is_answered_500() -> None:
    with serving(Brightness()) as server:
        status, answer = ask(server, request(prompts=["explode"]))
        assert (status, answer) == (500, {"error": "RuntimeError('out of memory')"})


def test_a_token_is_asked_for_and_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(Brightness(), token="s3cret") as server:
        assert ask(server, request())[0] == 401
        monkeypatch.setenv("SPOTLIGHT_REWARD_TOKEN", "wrong")
        assert quick(server.url).score(IMAGES[:1], PROMPTS[:1], METADATA[:1]).values == [None]
        monkeypatch.setenv("SPOTLIGHT_REWARD_TOKEN", "s3cret")
        assert quick(server.url).score(IMAGES[:1], PROMPTS[:1], METADATA[:1]).values == [0.0]


def test_beyond_loopback_a_token_is_required() -> None:
    for host in ("0.0.0.0", "reward.example"):
        with pytest.raises(ConfigError, match="needs a token"):
            RewardServer(Brightness(), host=host)


def test_a_port_in_use_is_a_clear_error() -> None:
    with serving(Brightness()) as server, pytest.raises(LockError, match="cannot listen"):
        RewardServer(Brightness(), port=server.server_address[1])
