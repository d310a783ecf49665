"""NIXL, with its UCX back end, as a contestant of the transfer bench: DRAM to DRAM between two
processes. `UCX_TLS` says which transports its UCX may use.

The words of a round: READ or WRITE, and the descriptors of a batch. Lists and requests are
prepared outside of the timing, as NIXL means them to be; all batches are posted, then waited for.
"""

import argparse
import os
import time

os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
os.environ.setdefault("UCX_NET_DEVICES", "lo")

import contest
import numpy


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--buffer", type=int, required=True, help="bytes")
    parser.add_argument("--progress", type=int, default=1, help="a thread at the initiator")
    parser.add_argument("--target", type=int, default=0, help="port of the initiator")
    arguments = parser.parse_args()
    is_target = arguments.target != 0
    contest.pin(contest.TARGET_CORE if is_target else contest.INITIATOR_CORE)
    from nixl_cu13._api import nixl_agent, nixl_agent_config

    # The target is passive: without the thread nothing would answer.
    settings = nixl_agent_config(
        enable_prog_thread=is_target or bool(arguments.progress), backends=["UCX"]
    )
    agent = nixl_agent("target" if is_target else "initiator", settings)
    buffer = numpy.zeros(arguments.buffer, dtype=numpy.uint8)
    base = buffer.ctypes.data
    agent.register_memory([(base, len(buffer), 0, "")], "DRAM")
    if is_target:
        import socket

        link = contest.Link(socket.create_connection(("127.0.0.1", arguments.target)))
        link.say((agent.get_agent_metadata(), base))
        agent.add_remote_agent(link.hear())
        contest.serve(link, buffer)
    target, link = contest.start_target()
    metadata, remote_base = link.hear()
    link.say(agent.get_agent_metadata())
    peer = agent.add_remote_agent(metadata)
    peer = peer.decode() if isinstance(peer, bytes) else peer
    prepared = Prepared(agent, peer, len(buffer), base, remote_base)
    contest.contest("nixl", link, target, buffer, prepared.run)


class Prepared:
    """Requests of the pages that were moved last."""

    def __init__(self, agent, peer, buffer_bytes, base, remote_base):
        self.agent, self.peer = agent, peer
        self.buffer_bytes, self.bases = buffer_bytes, (base, remote_base)
        self.case, self.lists, self.requests = None, [], {}

    def lists_of(self, page, pages):
        """Descriptor lists of both sides."""
        if self.case != (page, pages):
            for handles in self.requests.values():
                for handle in handles:
                    self.agent.release_xfer_handle(handle)
            for handle in self.lists:
                self.agent.release_dlist_handle(handle)
            self.case, self.requests = (page, pages), {}
            offsets = contest.places(page, pages, self.buffer_bytes)
            self.lists = []
            for name, base in zip(("", self.peer), self.bases):
                rows = [(base + offset, page, 0) for offset in offsets]
                rows = numpy.array(rows, dtype=numpy.uint64)
                self.lists.append(self.agent.prep_xfer_dlist(name, rows, "DRAM"))
        return self.lists

    def run(self, page, pages, words):
        operation, batch = words[0], int(words[1])
        local, remote = self.lists_of(page, pages)
        if (operation, batch) not in self.requests:
            chosen = numpy.arange(pages, dtype=numpy.int32)
            self.requests[operation, batch] = [
                self.agent.make_prepped_xfer(operation, local, part, remote, part)
                for part in (chosen[at : at + batch] for at in range(0, pages, batch))
            ]
        handles = self.requests[operation, batch]
        begin = time.perf_counter()
        open_handles = [handle for handle in handles if not self.is_done(self.agent.transfer(handle))]
        for handle in open_handles:
            while not self.is_done(self.agent.check_xfer_state(handle)):
                pass
        return time.perf_counter() - begin

    @staticmethod
    def is_done(state):
        if state == "ERR":
            raise ValueError("a transfer failed")
        return state == "DONE"


main()
