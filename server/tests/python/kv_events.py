"""Reads KV events with libzmq and msgspec: URL, port of the events, port of the replay."""

import json
import sys
import urllib.request
from typing import Optional, Union

import msgspec
import zmq

LIST = {"array_like": True, "omit_defaults": True}
END = (-1).to_bytes(8, "big", signed=True)


class BlockStored(msgspec.Struct, tag=True, **LIST):
    block_hashes: list[int]
    parent_block_hash: Optional[int]
    token_ids: list[int]
    block_size: int
    lora_id: Optional[int]
    medium: Optional[str] = None


class BlockRemoved(msgspec.Struct, tag=True, **LIST):
    block_hashes: list[int]
    medium: Optional[str] = None


class AllBlocksCleared(msgspec.Struct, tag=True, **LIST):
    pass


class Batch(msgspec.Struct, **LIST):
    ts: float
    events: list[Union[BlockStored, BlockRemoved, AllBlocksCleared]]
    data_parallel_rank: Optional[int] = None


DECODE = msgspec.msgpack.Decoder(Batch).decode


def ask(url, ids):
    body = {"model": "dsv4-mini", "prompt": ids, "max_tokens": 1, "temperature": 0}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(),
                                     {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.status == 200


def check_live(context, url, port):
    """The first batch that arrives live, of a prompt whose tokens are in it."""
    socket = context.socket(zmq.SUB)
    socket.connect(f"tcp://127.0.0.1:{port}")
    socket.setsockopt(zmq.SUBSCRIBE, b"")
    for number in range(200):
        ask(url, [1000 + number] + [7 + n % 50 for n in range(299)])
        if socket.poll(100):
            break
    topic, seq, payload = socket.recv_multipart()
    batch = DECODE(payload)
    assert topic == b"" and len(seq) == 8 and batch.data_parallel_rank == 0
    stored = [event for event in batch.events if isinstance(event, BlockStored)]
    assert stored and all(len(event.token_ids) == event.block_size == 256 for event in stored)
    return int.from_bytes(seq, "big"), payload


def check_replay(context, port, kind, seq, payload):
    """All from the first on without a gap, the one that came live among them."""
    socket = context.socket(kind)
    socket.connect(f"tcp://127.0.0.1:{port}")
    request = (0).to_bytes(8, "big")
    socket.send_multipart([request] if kind == zmq.REQ else [b"", request])
    batches = []
    while True:
        assert socket.poll(60_000), "no answer"
        *empty, number, body = socket.recv_multipart()
        if number == END:
            break
        batches.append((int.from_bytes(number, "big"), body))
        if kind == zmq.REQ:
            break  # it takes one answer to a request
    assert [number for number, _ in batches] == list(range(len(batches)))
    assert isinstance(DECODE(batches[0][1]).events[0], AllBlocksCleared)
    if kind == zmq.DEALER:
        assert dict(batches)[seq] == payload
    for _, body in batches:
        DECODE(body)


def main():
    url, events, replay = sys.argv[1:]
    context = zmq.Context()
    seq, payload = check_live(context, url, events)
    for kind in (zmq.DEALER, zmq.REQ):
        check_replay(context, replay, kind, seq, payload)
    context.destroy(linger=0)
    print("all is well")


if __name__ == "__main__":
    main()
