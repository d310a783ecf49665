"""What the peers of the transfer bench share: pinning, pages, two processes, the line protocol.

A contestant is asked on standard input, line by line, and answers on standard output:

    round PAGE PAGES WORD...    ->  seconds S
    check PAGE PAGES WORD...    ->  right

`check` moves the pages of a round into cleared memory and compares what landed. The WORDs are the
setting of that round. Anything else that is said is an error.
"""

import os
import pickle
import socket
import struct
import subprocess
import sys
import zlib

TARGET_CORE, INITIATOR_CORE = 0, 1


def pin(core):
    """This process and its threads to come run on one core, where there are two."""
    os.sched_setaffinity(0, {core % os.cpu_count()})


def places(page, pages, buffer_bytes):
    """Offsets of a round's pages: scattered, and rotating over the buffer."""
    slots = buffer_bytes // page
    return [n % slots * 7919 % slots * page for n in range(pages)]


def digest(buffer, page, pages):
    """Checksum of every page of a round."""
    crc = 0
    for at in places(page, min(pages, len(buffer) // page), len(buffer)):
        crc = zlib.crc32(buffer[at : at + page], crc)
    return crc


class Link:
    """Pickled values between the two processes, which are one program."""

    def __init__(self, connection):
        self.connection = connection

    def say(self, value):
        data = pickle.dumps(value)
        self.connection.sendall(struct.pack("<Q", len(data)) + data)

    def hear(self):
        head = self.connection.recv(8, socket.MSG_WAITALL)
        if len(head) < 8:
            return None
        (size,) = struct.unpack("<Q", head)
        return pickle.loads(self.connection.recv(size, socket.MSG_WAITALL))


def start_target():
    """Starts this program once more, as the target; its link."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        target = subprocess.Popen(
            [sys.executable, *sys.argv, "--target", port], stdin=subprocess.DEVNULL
        )
        server.settimeout(60)
        connection, _ = server.accept()
    connection.settimeout(None)
    return target, Link(connection)


def serve(link, buffer):
    """The target's life: it fills, clears and digests its buffer as it is told."""
    while (asked := link.hear()) is not None:
        match asked:
            case ("fill", seed):
                fill(buffer, seed)
                link.say(True)
            case ("digest", page, pages):
                link.say(digest(buffer, page, pages))
    os._exit(0)  # without the engines' teardown, which needs the other side


def fill(buffer, seed):
    """Random bytes; zeros for seed 0."""
    import numpy

    if seed == 0:
        buffer[:] = 0
    else:
        buffer[:] = numpy.frombuffer(
            numpy.random.default_rng(seed).bytes(len(buffer)), dtype=numpy.uint8
        )


def contest(name, link, target, buffer, run):
    """Answers rounds until the end of standard input. `run(page, pages, words)` moves the pages of
    a round and gives seconds; a `words[0]` of READ brings them here, WRITE there."""
    print("ready", name, flush=True)
    for line in sys.stdin:
        verb, page, pages, *words = line.split()
        page, pages = int(page), int(pages)
        try:
            if verb == "check":
                check(link, buffer, page, pages, words, run)
                print("right", flush=True)
            else:
                print("seconds", run(page, pages, words), flush=True)
        except Exception as error:  # whatever it is, the bench has to say it
            print("error", name, repr(error).replace("\n", " "), flush=True)
            break
    link.connection.close()
    target.wait(timeout=60)
    os._exit(0)


def check(link, buffer, page, pages, words, run):
    """Moves pages into cleared memory and compares both sides."""
    fill(buffer, 1 if words[0] == "WRITE" else 0)
    link.say(("fill", 0 if words[0] == "WRITE" else 1))
    link.hear()
    run(page, pages, words)
    link.say(("digest", page, pages))
    ours, theirs = digest(buffer, page, pages), link.hear()
    if ours != theirs:
        raise ValueError(f"other bytes: {ours:08x} here, {theirs:08x} at the target")
    if ours == zeros(page, pages, len(buffer)):
        raise ValueError("nothing moved")


def zeros(page, pages, buffer_bytes):
    """The digest of cleared pages."""
    crc = 0
    for _ in range(min(pages, buffer_bytes // page)):
        crc = zlib.crc32(bytes(page), crc)
    return crc
