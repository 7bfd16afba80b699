#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Prints the tables of docs/gpu.md from what `scripts/gpu-bench --json` has printed.

usage: tables.py RESULTS
"""

import json
import sys

SHAPES = [(1, 131072), (8, 32768), (16, 2048), (64, 4096), (128, 8192)]
HEADS = [(32, 8), (32, 32), (64, 8)]
FORMATS = ["fp16", "int8", "token4-g128", "kivi4-g128", "kivi4-g64", "kivi4-g32", "kivi2-g128", "kivi2-g32"]
PRESETS = {
    "plain8": ["ref8"],
    "plain6": ["hi6"],
    "plain5": ["std5"],
    "plain4": ["std4", "mix4", "mix4-plan"],
    "plain3": ["low3", "low3-plan"],
    "plain2": ["low2", "low2-plan"],
}


def table(header, rows):
    print("| " + " | ".join(header) + " |")
    print("|---" * len(header) + "|")
    for row in rows:
        print("| " + " | ".join(row) + " |")
    print()


def shape_names():
    return [f"{batch} x {tokens}" for batch, tokens in SHAPES]


def main():
    rows = [json.loads(line) for line in open(sys.argv[1]) if line.startswith("{")]
    attention = {}
    for r in rows:
        if r["op"] == "attention":
            shape = (r["batch"], r["tokens"], r["ragged"], r["q_heads"], r["kv_heads"])
            attention[(r["scheme"], r["page_tokens"]) + shape] = r

    def find(scheme, heads, shape, ragged=False, page=None):
        for pages in [page] if page else [64, 128]:
            r = attention.get((scheme, pages) + shape + (ragged,) + heads)
            if r:
                return r
        return None

    def cell(r):
        if r is None:
            return "-"
        text = f"{r['us']:.1f}, {100 * r['ceiling_share']:.0f} %"
        if r["vs_torch_cudnn"] == 0:
            return text
        early = r["vs_torch_cudnn"] * r["us"] / r["us_early"]
        return f"{text}, {r['vs_torch_cudnn']:.2f} x; {early:.2f} x"

    for heads in HEADS:
        of_torch = [find("fp16", heads, shape) for shape in SHAPES]
        times = ", ".join(f"{r['us'] * r['vs_torch_cudnn']:.1f}" for r in of_torch if r)
        print(f"{heads[0]} query heads, {heads[1]} kv heads (torch: {times} us)\n")
        table(["format"] + shape_names(), [[f] + [cell(find(f, heads, s)) for s in SHAPES] for f in FORMATS])

    print("Ragged batches: microseconds, share of the read ceiling\n")
    both = [(32, 8), (64, 8)]
    ragged = [[f] + [cell(find(f, heads, (64, 4096), ragged=True)) for heads in both] for f in FORMATS]
    table(["format"] + [f"{q}/{kv} heads" for q, kv in both], ragged)

    print("Small pages, 32/8 heads\n")
    small = [
        [f"{f}, {page}"] + [cell(find(f, (32, 8), s, page=page)) for s in SHAPES]
        for page in (16, 32)
        for f in ("fp16", "int8", "token4-g128")
    ]
    table(["format, tokens of a page"] + shape_names(), small)

    for heads in [(32, 8), (64, 8)]:
        print(f"Presets, {heads[0]} query heads, {heads[1]} kv heads\n")
        lines = []
        for plain, presets in PRESETS.items():
            base = [find(plain, heads, s, page=128)["us"] for s in SHAPES]
            lines.append([plain.replace("plain", "plain ")] + [f"{us:.1f}" for us in base])
            for preset in presets:
                own = [find(preset, heads, s, page=128)["us"] for s in SHAPES]
                lines.append(
                    [preset.replace("-plan", ", plan")] + [f"{us:.1f} ({us / b:.2f})" for us, b in zip(own, base)]
                )
        table(["format"] + shape_names(), lines)

    store = [r for r in rows if r["op"] == "store"]
    tokens = sorted({r["tokens"] for r in store})
    names = list(dict.fromkeys(r["scheme"] for r in store))
    print("Store: microseconds, share of a copy\n")
    by_name = {(r["scheme"], r["tokens"]): r for r in store}
    cells = [[n] + [f"{by_name[n, t]['us']:.1f}, {100 * by_name[n, t]['ceiling_share']:.0f} %" for t in tokens] for n in names]
    table(["format"] + [f"{t} tokens" for t in tokens], cells)

    print(f"largest error {max(r['rel_error'] for r in attention.values()):.1e}")


if __name__ == "__main__":
    main()
