#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""The table of scripts/compare and scripts/gpu-bench --against: rows of two trees, measured in turns.

    bench/compare.py OLD NEW BOUND      files of lines "name<tab>microseconds", a line for each turn

Ends with status 1 if a row became slower by more than BOUND percent beyond the noise of old against old.
"""
import statistics
import sys


def read(path):
    rows = {}
    for line in open(path):
        name, value = line.rstrip("\n").split("\t")
        rows.setdefault(name, []).append(float(value))
    return rows


old, new, bound = read(sys.argv[1]), read(sys.argv[2]), float(sys.argv[3])
print(f"{'row':36}{'old us':>12}{'new us':>12}{'new / old':>12}{'old / old':>12}{'least':>10}")
broken = 0
for name, before in old.items():
    if name not in new:
        continue
    after = new[name]
    ratio = statistics.median(a / b for a, b in zip(after, before))
    # A turn against the one before it: what the machine alone makes of the same program.
    noise = max((abs(statistics.median(b / a for a, b in zip(before, before[1:])) - 1.0),
                 statistics.median(abs(b / a - 1.0) for a, b in zip(before, before[1:])) / 2.0)) if len(before) > 1 else 0.0
    slower = ratio > 1.0 + bound / 100.0 + noise
    broken += slower
    print(f"{name:36}{statistics.median(before):12.2f}{statistics.median(after):12.2f}{ratio:12.3f}"
          f"{1.0 + noise:12.3f}{min(after) / min(before):10.3f}{'  slower' if slower else ''}")
for file, rows, others in (sys.argv[1], old, new), (sys.argv[2], new, old):
    for name in rows.keys() - others.keys():
        print(f"only in {file}: {name}")
if not old.keys() & new.keys():
    sys.exit("no row has such a name")
print(f"{broken} of {len(old)} rows slower by more than {bound:g} % and the noise")
sys.exit(1 if broken else 0)
