#!/usr/bin/env python3
"""Writes kv-events.txt with the encoder that SGLang and vLLM use: `pip install msgspec==0.23.0`.

One line for each batch: its name, and the bytes of its payload in hex.
"""

import pathlib
from typing import Optional

import msgspec

HERE = pathlib.Path(__file__).resolve().parent
LIST = {"array_like": True, "omit_defaults": True}


class Batch(msgspec.Struct, **LIST):
    ts: float
    events: list
    data_parallel_rank: Optional[int] = None


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


def name_of(first, rest):
    """A chain hash's first eight bytes, as a signed number."""
    return int.from_bytes(bytes([first] + [rest] * 7), "big", signed=True)


def main():
    # Every length of a number is in here.
    tokens = [n * n * n % 129280 for n in range(256)]
    others = [(1 << 31) + n for n in range(256)]
    batches = {
        "cleared": Batch(0.0, [AllBlocksCleared()], 0),
        "stored": Batch(1764501000.25, [
            BlockStored([name_of(0xFF, 7)], None, tokens, 256, None, "GPU"),
            BlockStored([name_of(0x01, 2)], name_of(0xFF, 7), others, 256, None, "CPU_PINNED"),
            BlockStored([name_of(0, 0)], name_of(0x01, 2), tokens, 256, None, "DISK"),
        ], 0),
        "removed": Batch(0.1, [
            BlockRemoved([name_of(0x7F, n) for n in range(20)], "GPU"),
            BlockRemoved([name_of(0x80, 0), -1, 0, 127, 128, 65536, -32, -33], "CPU_PINNED"),
            BlockRemoved([5], "DISK"),
            AllBlocksCleared(),
        ], 0),
    }
    encode = msgspec.msgpack.Encoder().encode
    lines = [f"{name} {encode(batch).hex()}\n" for name, batch in batches.items()]
    (HERE / "kv-events.txt").write_text("".join(lines))


if __name__ == "__main__":
    main()
