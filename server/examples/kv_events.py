"""Says what a worker's cache holds, from the KV events that it publishes.

    pip install pyzmq msgspec
    python kv_events.py tcp://127.0.0.1:5557 [tcp://127.0.0.1:5558]

The second address is the worker's replay_endpoint: what was published before is asked for there, and so
is what was missed. Prints a line for each batch; ends with the worker, or with Ctrl-C.
"""

import sys

import msgspec
import zmq

END = (-1).to_bytes(8, "big", signed=True)


def replayed(context, address, first):
    """Batches from number `first` on, as the worker still has them."""
    socket = context.socket(zmq.DEALER)
    socket.connect(address)
    socket.send_multipart([b"", first.to_bytes(8, "big")])
    while True:
        _, number, payload = socket.recv_multipart()
        if number == END:
            break
        yield int.from_bytes(number, "big"), payload
    socket.close()


def apply(held, payload):
    """Brings `held`, a set of (medium, block hash), up to date; how many came and went."""
    _, events, *_ = msgspec.msgpack.decode(payload)
    came = went = 0
    for kind, *fields in events:
        if kind == "BlockStored":
            hashes, _parent, _tokens, _block_size, _lora, *medium = fields
            new = {(medium[0] if medium else None, block) for block in hashes}
            came += len(new - held)
            held |= new
        elif kind == "BlockRemoved":
            hashes, *medium = fields
            gone = {(medium[0] if medium else None, block) for block in hashes}
            went += len(gone & held)
            held -= gone
        elif kind == "AllBlocksCleared":
            went += len(held)
            held.clear()
    return came, went


def main(events, replay=None):
    context = zmq.Context()
    socket = context.socket(zmq.SUB)
    socket.connect(events)
    socket.setsockopt(zmq.SUBSCRIBE, b"")
    held, expected = set(), None

    def take(number, payload):
        came, went = apply(held, payload)
        media = sorted({str(medium) for medium, _ in held})
        count = ", ".join(f"{sum(str(m) == medium for m, _ in held)} {medium}" for medium in media)
        print(f"batch {number}: {came} came, {went} went; there are {count or 'none'}", flush=True)

    if replay:
        for number, payload in replayed(context, replay, 0):
            take(number, payload)
            expected = number + 1
    while True:
        _topic, number, payload = socket.recv_multipart()
        number = int.from_bytes(number, "big")
        if expected is not None and number < expected:
            continue
        if replay and expected is not None and number > expected:
            for missed, old in replayed(context, replay, expected):
                if missed < number:
                    take(missed, old)
        take(number, payload)
        expected = number + 1


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    try:
        main(*sys.argv[1:])
    except KeyboardInterrupt:
        pass
