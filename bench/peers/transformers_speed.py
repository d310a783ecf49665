"""Speed of transformers on PyTorch, eager BF16 on the CPU: transformers_speed.py CHECKPOINT THREADS.

The model has the sizes of the checkpoint's configuration and random weights, which are of no matter for speed. Prints
one line of JSON: tokens a second of `prefill.512`, `prefill.2048` and `decode.b1` after 512 tokens, medians of three.
"""

import json
import statistics
import sys
import time
from pathlib import Path

import torch
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

LAYERS = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
SAME = """vocab_size hidden_size num_hidden_layers num_attention_heads head_dim qk_rope_head_dim q_lora_rank o_groups
o_lora_rank index_n_heads index_head_dim index_topk n_routed_experts num_experts_per_tok moe_intermediate_size
max_position_embeddings""".split()
STEPS, ROUNDS = 16, 3


def build(c):
    layers, hashed = c["num_hidden_layers"], c["num_hash_layers"]
    config = DeepseekV4Config(
        **{name: c[name] for name in SAME},
        partial_rotary_factor=c["qk_rope_head_dim"] / c["head_dim"],
        layer_types=[LAYERS[ratio] for ratio in c["compress_ratios"][:layers]],
        mlp_layer_types=["hash_moe"] * hashed + ["moe"] * (layers - hashed),
    )
    model = DeepseekV4ForCausalLM(config).to(torch.bfloat16).eval()
    for name, buffer in model.named_buffers():
        if "tid2eid" in name:
            buffer.copy_(torch.randint(0, c["n_routed_experts"], buffer.shape))
    return model


def prefill(model, vocab, tokens):
    ids = torch.randint(0, vocab, (1, tokens))
    start = time.perf_counter()
    out = model(ids, use_cache=True)
    return tokens / (time.perf_counter() - start), out


def decode(model, out):
    start = time.perf_counter()
    for _ in range(STEPS):
        out = model(out.logits[:, -1:].argmax(-1), past_key_values=out.past_key_values, use_cache=True)
    return STEPS / (time.perf_counter() - start)


def main():
    config = json.loads((Path(sys.argv[1]) / "config.json").read_text())
    torch.manual_seed(0)
    torch.set_num_threads(int(sys.argv[2]))
    model, vocab = build(config), config["vocab_size"]
    rates = {"prefill.512": [], "prefill.2048": [], "decode.b1": []}
    with torch.inference_mode():
        prefill(model, vocab, 64)
        for _ in range(ROUNDS):
            rates["prefill.2048"].append(prefill(model, vocab, 2048)[0])
            rate, out = prefill(model, vocab, 512)
            rates["prefill.512"].append(rate)
            rates["decode.b1"].append(decode(model, out))
    print(json.dumps({name: statistics.median(values) for name, values in rates.items()}))


main()
