"""Mooncake's transfer engine over TCP as a contestant of the transfer bench: DRAM to DRAM between
two processes. The word of a round: READ or WRITE."""

import argparse
import os
import time

for name, value in {
    "MC_TCP_BIND_ADDRESS": "127.0.0.1",
    # The default refuses batches of this size.
    "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "32768",
    "MC_LOG_LEVEL": "ERROR",
    "GLOG_minloglevel": "3",
}.items():
    os.environ.setdefault(name, value)

import contest
import numpy


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--buffer", type=int, required=True, help="bytes")
    parser.add_argument("--target", type=int, default=0, help="port of the initiator")
    arguments = parser.parse_args()
    is_target = arguments.target != 0
    contest.pin(contest.TARGET_CORE if is_target else contest.INITIATOR_CORE)
    from mooncake.engine import TransferEngine

    engine = TransferEngine()
    if engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") != 0:
        raise SystemExit("mooncake did not start")
    buffer = numpy.zeros(arguments.buffer, dtype=numpy.uint8)
    base = buffer.ctypes.data
    if engine.register_memory(base, len(buffer)) != 0:
        raise SystemExit("mooncake did not register memory")
    if is_target:
        import socket

        link = contest.Link(socket.create_connection(("127.0.0.1", arguments.target)))
        link.say((f"127.0.0.1:{engine.get_rpc_port()}", base))
        contest.serve(link, buffer)
    target, link = contest.start_target()
    peer, remote_base = link.hear()

    def run(page, pages, words):
        move = {
            "READ": engine.batch_transfer_sync_read,
            "WRITE": engine.batch_transfer_sync_write,
        }[words[0]]
        batch = int(words[1])
        offsets = contest.places(page, pages, len(buffer))
        parts = [offsets[at : at + batch] for at in range(0, pages, batch)]
        batches = [
            ([base + o for o in part], [remote_base + o for o in part], [page] * len(part))
            for part in parts
        ]
        begin = time.perf_counter()
        for ours, theirs, sizes in batches:
            status = move(peer, ours, theirs, sizes)
            if status != 0:
                raise ValueError(f"a transfer failed: {status}")
        return time.perf_counter() - begin

    contest.contest("mooncake", link, target, buffer, run)


main()
