"""Turns the tables that the timing scripts of public kernels write (JSON with `cols` and `rows`) into
lines `NAME MICROSECONDS` with the case names of `dsa-kernels/benches/cuda.rs`.

usage: kernel_tables.py FOLDER > peers.txt, then DSA_PEERS=peers.txt for the bench
"""

import json
import pathlib
import sys


def rows(folder, name):
    path = folder / f"{name}.json"
    if not path.exists():
        return
    table = json.loads(path.read_text())
    for row in table["rows"]:
        yield dict(zip(table["cols"], row))


def main():
    folder = pathlib.Path(sys.argv[1])
    lines = {}
    select, score = {}, {}
    for row in rows(folder, "b_topk512"):
        if row["peer"] == "sgl_topk_v2":
            lines[f"select.b{row['batch']}_r{row['rows']}"] = row["us"]
        if row["peer"] in ("sgl_topk_v2", "deep_select_f32"):
            case = (row["batch"], row["ctx"])
            select[case] = min(row["us"], select.get(case, row["us"]))
    for row in rows(folder, "a_indexer_logits"):
        if row["next_n"] == 1:
            case = (row["batch"], row["ctx"])
            score[case] = row["us"]
            lines[f"score.b{case[0]}_c{case[1] // 1024}k"] = row["us"]
    # Score and selection one after the other, the sum of both medians.
    for case in score.keys() & select.keys():
        for op in ("fused", "pair"):
            lines[f"{op}.b{case[0]}_c{case[1] // 1024}k"] = score[case] + select[case]
    for row in rows(folder, "c_sparse_decode"):
        if row["sq"] == 1:
            count = str(row["selected"]).split()[0]
            name = "window" if count == "0" else f"w128_{count}"
            lines[f"attend.b{row['batch']}_{name}"] = row["us"]
    # The peer's rows are BF16 before it starts; ours are expanded in the time that is measured.
    for row in rows(folder, "c_sparse_prefill"):
        lines[f"attend_prefill.q{row['q_tokens']}_{row['topk'] - 128}"] = row["us"]
    for row in rows(folder, "d_c4_step"):
        if row["phase"] == "boundary":
            op = "c4_step" if row["dim"] == 512 else "c4_index_step"
            lines[f"{op}.b{row['batch']}"] = row["both_us"]
    for name, us in sorted(lines.items()):
        print(f"{name} {us:.3f}")


if __name__ == "__main__":
    main()
