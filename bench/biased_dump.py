#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Writes a dump (bench/dump.hpp) of normal queries, keys and values whose keys have a bias, as those of Qwen2 models.

biased_dump.py AMPLITUDE FOLDER [seed]

A bias is added before rotary embedding: `AMPLITUDE` in three of the slowest pairs of channels (base 1e6, half-split), 0 in the others.
2048 tokens, 2 kv heads and 8 query heads of 128 channels, queries at the last 64 positions. The same arguments give the same bytes.
"""

import array
import math
import pathlib
import random
import sys

TOKENS, QUERIES, KV_HEADS, Q_HEADS, DIM, BASE = 2048, 64, 2, 8, 128, 1e6
PAIRS = (59, 61, 63)


def write(folder, name, tokens, heads, row):
    values = array.array("f")
    for token in range(tokens):
        for head in range(heads):
            values.extend(row(token, head))
    if sys.byteorder == "big":
        values.byteswap()
    (folder / f"L00_{name}_f32_T{tokens}_H{heads}_D{DIM}.bin").write_bytes(values.tobytes())


def main():
    if len(sys.argv) not in (3, 4):
        sys.exit(__doc__)
    amplitude, folder = float(sys.argv[1]), pathlib.Path(sys.argv[2])
    numbers = random.Random(int(sys.argv[3]) if len(sys.argv) == 4 else 1)
    folder.mkdir(parents=True, exist_ok=True)

    def normal(_token, _head):
        # Rotary embedding leaves the distribution of normal numbers as it is.
        return [numbers.gauss(0.0, 1.0) for _ in range(DIM)]

    def biased(token, head):
        row = normal(token, head)
        for pair in PAIRS:
            angle = token * BASE ** (-2.0 * pair / DIM) + head + pair
            row[pair] += amplitude * math.cos(angle)
            row[pair + DIM // 2] += amplitude * math.sin(angle)
        return row

    write(folder, "k", TOKENS, KV_HEADS, biased)
    write(folder, "v", TOKENS, KV_HEADS, normal)
    write(folder, "q", QUERIES, Q_HEADS, normal)


if __name__ == "__main__":
    main()
