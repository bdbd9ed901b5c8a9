import json
import socket
import struct
import threading

import pytest
import torch

from spotlight.runtime.link import Link, encode


@pytest.fixture
def pair():
    a, b = socket.socketpair()
    ends = Link(a), Link(b)
    ends[1].set_timeout(5)
    yield ends
    for end in ends:
        end.close()


def read_one(link):
    while not (frames := link.read()):
        pass
    (frame,) = frames
    return frame


def test_frames_with_and_without_tensors(pair):
    ours, theirs = pair
    tensors = {
        "x": torch.randn(3, 4).to(torch.bfloat16),
        "nan": torch.tensor([float("nan")]),
        "i": torch.arange(3),
    }
    ours.send({"op": "a", "text": "ü\n"}, tensors)
    head, got = read_one(theirs)
    assert head == {"op": "a", "text": "ü\n"}
    assert got.keys() == tensors.keys()
    assert torch.equal(got["x"], tensors["x"])
    assert got["nan"].isnan()
    ours.send({"op": "b"})
    assert read_one(theirs) == ({"op": "b"}, {})


def test_frames_that_arrive_in_pieces_or_together(pair):
    ours, theirs = pair
    frame = encode({"op": "a"}, {"x": torch.ones(5)})
    for byte in frame[:-1]:
        ours.send_bytes(bytes([byte]))
        assert theirs.read() == []
    ours.send_bytes(frame[-1:] + frame + frame)
    frames = []
    while len(frames) < 3:
        frames += theirs.read()
    assert [head["op"] for head, _ in frames] == ["a"] * 3


def test_threads_do_not_mix_their_frames(pair):
    ours, theirs = pair
    senders = [
        threading.Thread(
            target=lambda i=i: [
                ours.send({"op": "x", "i": i}, {"t": torch.full((999,), i)}) for _ in range(20)
            ]
        )
        for i in range(4)
    ]
    for sender in senders:
        sender.start()
    got = []
    while len(got) < 80:
        got += theirs.read()
    assert all(tensors["t"].eq(head["i"]).all() for head, tensors in got)
    for sender in senders:
        sender.join()


def raw(head, body=b""):
    return struct.pack("!IQ", len(head), len(body)) + head + body


@pytest.mark.parametrize(
    "data",
    [
        raw(b"not json"),
        raw(b"[1, 2]"),
        raw(b'{"no": "op"}'),
        raw(b'{"op": 3}'),
        raw(b"\xff\xfe"),
        raw(b"[" * 100_000),
        raw(b'{"op": "x"}', b"not safetensors"),
        raw(b'{"op": "x"}', struct.pack("<Q", 1 << 40)),
        struct.pack("!IQ", 1 << 31, 0),
        struct.pack("!IQ", 4, 1 << 60),
    ],
)
def test_whatever_is_not_a_frame_ends_the_connection(pair, data):
    ours, theirs = pair
    ours.send_bytes(data)
    with pytest.raises(ConnectionError):
        read_one(theirs)


def test_a_stranger_may_not_send_tensors(pair):
    ours, theirs = pair
    theirs.body_limit_bytes = 0
    ours.send({"op": "hello"})
    assert read_one(theirs)[0]["op"] == "hello"
    ours.send({"op": "hello"}, {"x": torch.ones(1)})
    with pytest.raises(ConnectionError, match="announces"):
        theirs.read()


def test_hanging_up_and_not_reading_are_connection_errors(pair):
    ours, _ = pair
    ours.set_timeout(0.05)
    with pytest.raises(ConnectionError, match="does not take data"):
        ours.send_bytes(bytes(50_000_000))  # more than any socket buffer holds
    other, gone = (Link(end) for end in socket.socketpair())
    gone.close()
    with pytest.raises(ConnectionError):
        other.read()
    other.close()


def test_the_head_is_plain_json(pair):
    assert json.loads(encode({"op": "x", "n": 1})[12:]) == {"op": "x", "n": 1}
