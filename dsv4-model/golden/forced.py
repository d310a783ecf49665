"""Golden vectors for the layer-by-layer check of `official` numerics, from models/dsv4-mini/official.py.

The first 384 tokens of prompt 4 run through official.py once with FP4 index keys; the streams of all tokens
after each layer are the inputs of the next one.
For FP8 and BF16 keys, layers 2 and 4 (the ones with an index) run again on the FP4 run's inputs.
Streams are written as BF16, which holds them exactly.

usage: forced.py CHECKPOINT GOLDEN           rewrites GOLDEN/official.safetensors (made by official.py before)
       forced.py CHECKPOINT GOLDEN measure   how far official.py is from itself with other sums
"""
import json
import pathlib
import sys

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "models" / "dsv4-mini"))
import official  # noqa: E402

LAYERS, TOKENS, KEPT = 6, 384, 64


@torch.no_grad()
def layer(net, n, X, ids):
    """Streams after layer n from the streams before it: the loop body of Official.forward."""
    for kind in ("attn", "ffn"):
        post, C, y = net.hyper(f"layers.{n}.hc_{kind}", X)
        x = official.norm(y, net.t[f"layers.{n}.{kind}_norm.weight"])
        o = net.attention(n, x) if kind == "attn" else net.moe(n, x, ids)
        X = official.bf(post.unsqueeze(-1) * o.unsqueeze(1) + torch.einsum("sjk,sjd->skd", C, X))
    return X


def run(net, ids):
    """Streams [S,4,D] of all tokens after the embedding and after each layer."""
    out = [net.t["embed.weight"][ids].unsqueeze(1).expand(-1, 4, -1).contiguous()]
    for n in range(LAYERS):
        out.append(layer(net, n, out[-1], ids))
    return out


def exact(v):
    w = v.to(torch.bfloat16).contiguous()
    assert (w.float() == v).all()
    return w


def write(checkpoint, golden, ids):
    from safetensors.torch import load_file, save_file
    old = load_file(f"{golden}/official.safetensors")
    new = {k: v for k, v in old.items() if ".last." in k}
    net = official.Official(checkpoint, "fp4")
    base = run(net, ids)
    for n in range(LAYERS):
        assert torch.equal(base[n + 1][-KEPT:], old[f"fp4.layers.{n}.streams"][-KEPT:].float()), n
        new[f"fp4.layers.{n}.streams"] = exact(base[n + 1] if n + 1 < LAYERS else base[n + 1][-KEPT:])
    for kind in ("fp8", "bf16"):
        net = official.Official(checkpoint, kind)
        for n in range(2):
            same = old.get(f"{kind}.layers.{n}.streams")
            assert same is None or torch.equal(same.float(), base[n + 1][-KEPT:]), n
        for n in range(2, LAYERS):
            new[f"{kind}.layers.{n}.streams"] = exact(old[f"{kind}.layers.{n}.streams"].float())
        for n in (2, 4):
            new[f"{kind}.layers.{n}.forced"] = exact(layer(net, n, base[n], ids)[-KEPT:])
    save_file(new, f"{golden}/official.safetensors")


class Sums:
    """Context in which every matrix product sums otherwise: "f64" (sums and means too) or "reversed"."""

    def __init__(self, how):
        self.how = how

    def __enter__(self):
        t = torch.Tensor
        self.kept = torch.einsum, t.__matmul__, t.sum, t.mean
        einsum, matmul, total, mean = self.kept
        if self.how == "reversed":
            t.__matmul__ = lambda a, b: matmul(a.flip(-1), b.flip(0))
            return
        f64 = lambda f: lambda v, *a, **k: f(v.double(), *a, **k).float() if v.dtype == torch.float32 else f(v, *a, **k)
        torch.einsum = lambda eq, *v: einsum(eq, *[x.double() for x in v]).float()
        t.__matmul__ = lambda a, b: matmul(a.double(), b.double()).float()
        t.sum, t.mean = f64(total), f64(mean)

    def __exit__(self, *_):
        t = torch.Tensor
        torch.einsum, t.__matmul__, t.sum, t.mean = self.kept


def measure(checkpoint, golden, ids):
    far = lambda a, b: ((a - b).norm() / b.norm()).item()
    show = lambda values: " ".join(f"{v:.2e}" for v in values)
    for kind in ("fp4", "fp8", "bf16"):
        net = official.Official(checkpoint, kind)
        base = run(net, ids)
        for how in ("reversed", "f64"):
            with Sums(how):
                free = run(net, ids)
                forced = [layer(net, n, base[n], ids) for n in range(LAYERS)]
            print(kind, how, "free,   all tokens    ", show(far(free[n], base[n]) for n in range(1, LAYERS + 1)))
            print(kind, how, "free,   last 64       ", show(far(free[n][-KEPT:], base[n][-KEPT:]) for n in range(1, LAYERS + 1)))
            print(kind, how, "forced, all tokens    ", show(far(forced[n], base[n + 1]) for n in range(LAYERS)))
            print(kind, how, "forced, equal tokens  ", [int((forced[n] == base[n + 1]).flatten(1).all(1).sum()) for n in range(LAYERS)], flush=True)


def main(checkpoint, golden, mode="write"):
    torch.set_num_threads(1)
    ids = torch.as_tensor(json.load(open(f"{golden}/prompts.json"))[4]["ids"][:TOKENS])
    (measure if mode == "measure" else write)(checkpoint, golden, ids)


if __name__ == "__main__":
    main(*sys.argv[1:4])
