"""Makes vectors.txt: page digests, tags, token chains, fingerprints and plan hashes.

Plain Python without packages, written from the definitions in the crate's documentation and the
BLAKE3 specification, so that it shares no code with what it checks. The geometry texts beside it
are input (`KV_POOL_UPDATE=1 cargo test -p kv-pool` writes them).

    python3 make.py > vectors.txt
"""

import pathlib
import struct

M32, M64 = (1 << 32) - 1, (1 << 64) - 1

# BLAKE3 --------------------------------------------------------------------------------------
IV = [0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A, 0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19]
PERMUTE = [2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8]
CHUNK_START, CHUNK_END, PARENT, ROOT = 1, 2, 4, 8
KEYED_HASH, DERIVE_CONTEXT, DERIVE_MATERIAL = 16, 32, 64


def rotr(x, n):
    return (x >> n | x << (32 - n)) & M32


def compress(cv, block, counter, length, flags):
    s = cv + IV[:4] + [counter & M32, counter >> 32, length, flags]
    m = list(struct.unpack("<16I", block.ljust(64, b"\0")))

    def g(a, b, c, d, x, y):
        s[a] = (s[a] + s[b] + x) & M32
        s[d] = rotr(s[d] ^ s[a], 16)
        s[c] = (s[c] + s[d]) & M32
        s[b] = rotr(s[b] ^ s[c], 12)
        s[a] = (s[a] + s[b] + y) & M32
        s[d] = rotr(s[d] ^ s[a], 8)
        s[c] = (s[c] + s[d]) & M32
        s[b] = rotr(s[b] ^ s[c], 7)

    for _ in range(7):
        for n, (a, b, c, d) in enumerate([
            (0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15),
            (0, 5, 10, 15), (1, 6, 11, 12), (2, 7, 8, 13), (3, 4, 9, 14),
        ]):
            g(a, b, c, d, m[2 * n], m[2 * n + 1])
        m = [m[i] for i in PERMUTE]
    return [s[i] ^ s[i + 8] for i in range(8)]


def tree(key, data, flags, counter, root):
    """Chaining value of the subtree over `data`, whose first chunk has number `counter`."""
    if len(data) <= 1024:
        blocks = [data[i:i + 64] for i in range(0, len(data), 64)] or [b""]
        cv = key
        for n, block in enumerate(blocks):
            last = n == len(blocks) - 1
            f = flags | (CHUNK_START if n == 0 else 0)
            f |= (CHUNK_END | root) if last else 0
            cv = compress(cv, block, counter, len(block), f)
        return cv
    left = 1024
    while left * 2 < len(data):
        left *= 2
    pair = tree(key, data[:left], flags, counter, 0)
    pair = pair + tree(key, data[left:], flags, counter + left // 1024, 0)
    return compress(key, struct.pack("<16I", *pair), 0, 64, flags | PARENT | root)


def blake3(data, key=None, flags=0):
    key = list(struct.unpack("<8I", key)) if key else IV
    return struct.pack("<8I", *tree(key, data, flags, 0, ROOT))


def keyed(key, data):
    return blake3(data, key, KEYED_HASH)


def derive(context, material):
    return blake3(material, blake3(context, None, DERIVE_CONTEXT), DERIVE_MATERIAL)


assert blake3(b"").hex().startswith("af1349b9f5f9a1a6a0404dea36dcc949")
assert blake3(b"abc").hex().startswith("6437b3ac38465133ffb63b75273a8db5")

# Page digest ---------------------------------------------------------------------------------
SEED, P, Q = 0x243F6A8885A308D3, 0x9E3779B97F4A7C15, 0x9E3779B185EBCA87


def split_mix(seed, count):
    out = []
    for n in range(1, count + 1):
        z = (seed + n * P) & M64
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & M64
        z = (z ^ z >> 27) * 0x94D049BB133111EB & M64
        out.append(z ^ z >> 31)
    return out


STRIPE, LOW, HIGH = split_mix(SEED, 128), split_mix(SEED ^ 1, 8), split_mix(SEED ^ 2, 8)


def mix(z):
    z = (z ^ z >> 37) * 0x165667919E3779F9 & M64
    return z ^ z >> 32


def fold(x, y):
    return (x * y & M64) ^ (x * y >> 64)


def digest(data):
    low = high = 0
    for i in range(0, (len(data) + 1023) // 1024):
        chunk = data[1024 * i:1024 * (i + 1)]
        chunk = chunk.ljust((len(chunk) + 63) // 64 * 64, b"\0")
        a = [0] * 8
        for n, v in enumerate(struct.unpack(f"<{len(chunk) // 8}Q", chunk)):
            k = v ^ STRIPE[n]
            a[n % 8] += (k & M32) * (k >> 32)
            a[n % 8 ^ 1] += v
        a = [x & M64 for x in a]
        low += mix(sum(
            fold(a[2 * j] ^ (LOW[2 * j] + i * P) & M64, a[2 * j + 1] ^ (LOW[2 * j + 1] - i * P) & M64)
            for j in range(4)) & M64)
        high += mix(sum(
            fold(a[j] ^ (HIGH[2 * j] - i * Q) & M64, a[j + 4] ^ (HIGH[2 * j + 1] + i * Q) & M64)
            for j in range(4)) & M64)
    n = len(data)
    low = (low + mix((high + n * P) & M64)) & M64
    high = (high + mix(low ^ n * Q & M64)) & M64
    return struct.pack("<2Q", mix(low), mix(high))


# Vectors -------------------------------------------------------------------------------------
def pattern(length, seed):
    return bytes((i * 131 + (i >> 8) * 17 + seed) & 255 for i in range(length))


def main():
    for n in [0, 1, 7, 8, 63, 64, 65, 1023, 1024, 1025, 1168, 4352, 8448, 16384, 37376]:
        print("digest", n, digest(pattern(n, 3)).hex())
        print("digest zeros", n, digest(bytes(n)).hex())
    for kind in range(8):
        message = pattern(16, 6) + pattern(16, 4) + pattern(32, 5)
        message += struct.pack("<IIHB", 0x03040506, 61, 0x0102, kind)
        print("tag", kind, keyed(b"kv-pool 2026-01 page tag v1 ....", message)[:16].hex())
    tokens = [(i * 2654435761 & M32) >> 12 for i in range(700)]
    for name, salt in [("empty", b""), ("tenant", b"tenant")]:
        material = pattern(16, 7) + struct.pack("<Q", len(salt)) + salt
        key = derive(b"kv-pool 2026-01 token chain v1", material)
        parent = keyed(key, b"root")
        print("chain", name, "root", parent.hex())
        for block in range(3):
            part = tokens[256 * block:256 * (block + 1)]
            parent = keyed(key, parent + struct.pack(f"<I{len(part)}I", len(part), *part))
            print("chain", name, block, parent.hex())
    for index in ["fp4", "fp8", "bf16"]:
        geometry = (pathlib.Path(__file__).parent / f"geometry_official_{index}.txt").read_bytes()
        fields = [
            (b"schema", struct.pack("<I", 1)), (b"geometry", geometry),
            (b"model type", b"deepseek_v4"), (b"model digest", pattern(32, 1)),
            (b"tokenizer digest", pattern(32, 2)),
        ]
        text = b"".join(struct.pack("<Q", len(part)) + part for field in fields for part in field)
        print("fingerprint official", index, derive(b"kv-pool 2026-01 layout fingerprint v1", text)[:16].hex())
    for count in [0, 1, 100]:
        text = struct.pack("<Q", count)
        for page in range(count):
            text += struct.pack("<BBHIII", 2, 0, 9, page, 64, 8448)
        print("plan", count, keyed(b"kv-pool 2026-01 plan hash v1 ...", text)[:16].hex())


main()
