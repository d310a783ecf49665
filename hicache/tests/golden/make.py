#!/usr/bin/env python3
"""Writes object-v1.txt from the table in src/store/format.rs, by other code than the crate's.

Digest and keyed BLAKE3 are those of the reference in kv-pool/tests/vectors.
"""

import contextlib
import importlib.util
import io
import pathlib
import struct
import sys

HERE = pathlib.Path(__file__).resolve().parent
REFERENCE = HERE.parents[2] / "kv-pool" / "tests" / "vectors" / "make.py"
TAG_KEY = b"kv-pool 2026-01 page tag v1 ...."
FINGERPRINT = b"golden layout 01"
CHAIN = bytes(3 * n for n in range(32))
BOUNDARY = 2
TOKENS = 0x01020300
# Kind, layer, rows, page number, bytes.
SECTIONS = [(0, 0, 2, 7, 96), (4, 2, 8, 0, 45), (6, 0x0103, 1, 0, 33)]


def main():
    spec = importlib.util.spec_from_file_location("reference", REFERENCE)
    reference = importlib.util.module_from_spec(spec)
    sys.dont_write_bytecode = True
    with contextlib.redirect_stdout(io.StringIO()):  # it prints its own vectors
        spec.loader.exec_module(reference)

    header_bytes = 4096
    payload_bytes = sum(section[4] for section in SECTIONS)
    payload = bytes((n * n + 1) % 256 for n in range(header_bytes, header_bytes + payload_bytes))

    header = struct.pack("<8sII16s32sB3xIQI12x", b"DSV4HIC\0", 1, header_bytes, FINGERPRINT,
                         CHAIN, BOUNDARY, len(SECTIONS), payload_bytes, TOKENS)
    assert len(header) == 96
    entries, at = b"", 0
    for kind, layer, rows, page_no, length in SECTIONS:
        digest = reference.digest(payload[at:at + length])
        message = digest + FINGERPRINT + CHAIN + struct.pack("<IIHB", page_no, rows, layer, kind)
        tag = reference.keyed(TAG_KEY, message)[:16]
        entries += struct.pack("<BxHIII", kind, layer, rows, page_no, length) + tag
        at += length
    rest = (bytes(16) + entries).ljust(header_bytes - 112, b"\0")
    header += reference.digest(header + bytes(16) + rest) + rest
    whole = (header + payload).ljust(8192, b"\0")

    lines = [f"bytes {len(whole)}"]
    for offset in range(0, len(whole), 32):
        row = whole[offset:offset + 32]
        if any(row):
            words = " ".join(row[n:n + 8].hex() for n in range(0, 32, 8))
            lines.append(f"{offset:05} {words}")
    (HERE / "object-v1.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
