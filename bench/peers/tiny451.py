"""Writes a random DeepSeek-V4 of about 450 M parameters in DeepSeek's own format: tiny451.py MINI DIR.

The configuration is that of the mini model (MINI is its checkpoint folder) with other sizes: hidden 1024, eight layers
(two of the window, three of each compression), four heads of 512, 32 experts of width 512 of which four are chosen.
Weights are normal numbers with a spread of 1 / sqrt(columns) and mean nothing: only speed can be measured with it.
"""

import json
import math
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

SIZES = {
    "hidden_size": 1024,
    "moe_intermediate_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "q_lora_rank": 256,
    "n_routed_experts": 32,
    "num_experts_per_tok": 4,
    "compress_ratios": [0, 0, 4, 128, 4, 128, 4, 128],
    "num_hash_layers": 3,
    "o_groups": 4,
    "o_lora_rank": 256,
    "index_n_heads": 16,
    "index_topk": 64,
}
LEVELS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def exponents(scale):
    """Bytes of E8M0, of the power of two that is not below `scale`."""
    return (scale.clamp_min(2.0**-100).log2().ceil() + 127).to(torch.uint8).view(torch.float8_e8m0fnu)


class Writer:
    def __init__(self, config):
        self.config, self.tensors = config, {}
        self.random = torch.Generator().manual_seed(451)

    def normal(self, rows, cols):
        return torch.randn(rows, cols, generator=self.random) / math.sqrt(cols)

    def bf16(self, name, rows, cols):
        self.tensors[name + ".weight"] = self.normal(rows, cols).to(torch.bfloat16)

    def norm(self, name, width):
        self.tensors[name + ".weight"] = torch.ones(width, dtype=torch.bfloat16)

    def fp8(self, name, rows, cols):
        values = self.normal(rows, cols)
        blocks = values.view(rows // 128, 128, cols // 128, 128)
        scale = exponents(blocks.abs().amax((1, 3)) / 448)
        codes = blocks / scale.float()[:, None, :, None]
        self.tensors[name + ".weight"] = codes.reshape(rows, cols).to(torch.float8_e4m3fn)
        self.tensors[name + ".scale"] = scale

    def fp4(self, name, rows, cols):
        groups = self.normal(rows, cols).view(rows, cols // 32, 32)
        scale = exponents(groups.abs().amax(-1) / 6)
        values = groups / scale.float()[..., None]
        codes = torch.bucketize(values.abs(), (LEVELS[1:] + LEVELS[:-1]) / 2) | ((values < 0).long() << 3)
        codes = codes.view(rows, cols)
        packed = (codes[:, 0::2] | (codes[:, 1::2] << 4)).to(torch.uint8)
        self.tensors[name + ".weight"] = packed.view(torch.int8)
        self.tensors[name + ".scale"] = scale

    def maps(self, name, maps, scales):
        self.tensors[name + "_fn"] = self.normal(maps, 4 * self.config["hidden_size"])
        self.tensors[name + "_base"] = torch.zeros(maps)
        self.tensors[name + "_scale"] = torch.ones(scales)

    def compressor(self, at, ratio, width, dim):
        self.bf16(at + ".wkv", width, self.config["hidden_size"])
        self.bf16(at + ".wgate", width, self.config["hidden_size"])
        self.tensors[at + ".ape"] = self.normal(ratio, width)
        self.norm(at + ".norm", dim)

    def attention(self, at, ratio):
        c = self.config
        hidden, heads, rank, groups = c["hidden_size"], c["num_attention_heads"], c["q_lora_rank"], c["o_groups"]
        self.fp8(at + ".wq_a", rank, hidden)
        self.norm(at + ".q_norm", rank)
        self.fp8(at + ".wq_b", heads * 512, rank)
        self.fp8(at + ".wkv", 512, hidden)
        self.norm(at + ".kv_norm", 512)
        self.fp8(at + ".wo_a", groups * c["o_lora_rank"], heads // groups * 512)
        self.fp8(at + ".wo_b", hidden, groups * c["o_lora_rank"])
        self.tensors[at + ".attn_sink"] = torch.zeros(heads)
        if ratio == 4:
            self.compressor(at + ".compressor", 4, 1024, 512)
            self.fp8(at + ".indexer.wq_b", c["index_n_heads"] * 128, rank)
            self.bf16(at + ".indexer.weights_proj", c["index_n_heads"], hidden)
            self.compressor(at + ".indexer.compressor", 4, 256, 128)
        elif ratio:
            self.compressor(at + ".compressor", ratio, 512, 512)

    def experts(self, at, is_hashed):
        c = self.config
        hidden, inner, count = c["hidden_size"], c["moe_intermediate_size"], c["n_routed_experts"]
        self.bf16(at + ".gate", count, hidden)
        if is_hashed:
            rows = torch.rand(c["vocab_size"], count, generator=self.random)
            self.tensors[at + ".gate.tid2eid"] = rows.argsort(1)[:, : c["num_experts_per_tok"]].contiguous()
        else:
            self.tensors[at + ".gate.bias"] = torch.zeros(count)
        for write, expert in [(self.fp4, f"experts.{n}") for n in range(count)] + [(self.fp8, "shared_experts")]:
            write(f"{at}.{expert}.w1", inner, hidden)
            write(f"{at}.{expert}.w2", hidden, inner)
            write(f"{at}.{expert}.w3", inner, hidden)

    def model(self):
        c = self.config
        hidden = c["hidden_size"]
        self.bf16("embed", c["vocab_size"], hidden)
        for n, ratio in enumerate(c["compress_ratios"]):
            at = f"layers.{n}"
            for site in ["attn", "ffn"]:
                self.norm(f"{at}.{site}_norm", hidden)
                self.maps(f"{at}.hc_{site}", 24, 3)
            self.attention(at + ".attn", ratio)
            self.experts(at + ".ffn", n < c["num_hash_layers"])
        self.norm("norm", hidden)
        self.bf16("head", c["vocab_size"], hidden)
        self.maps("hc_head", 4, 1)


def main():
    source, target = map(Path, sys.argv[1:3])
    config = json.loads((source / "config.json").read_text()) | SIZES
    writer = Writer(config)
    writer.model()
    target.mkdir(parents=True, exist_ok=True)
    save_file(writer.tensors, target / "model.safetensors")
    names = {name: "model.safetensors" for name in writer.tensors}
    (target / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    (target / "config.json").write_text(json.dumps(config, indent=1))


main()
