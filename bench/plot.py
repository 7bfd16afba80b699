#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Plots and tables of the JSON lines that bench_quality, kvq_llama evaluate and bench_attention print.

plot.py pareto RESULTS.jsonl OUT.svg [--y kld|out|ppl_delta_pct|bare_kld|scheme_error|...]   quality against bits per value
plot.py speed  RESULTS.jsonl OUT.svg [--schemes fp16,std4,...]                  time of a decode step, a panel for each context
plot.py table  RESULTS.jsonl                                                    Markdown of bench_quality or evaluate

Several files of results may be given. Plots are SVG. pareto draws a line each through what no other of its kind beats: presets of this
library (--own) with statistics (+stats), as they are by default, and published methods; plans of widths (-plan) are left to the tables. The
same input gives the same bytes.
"""

import argparse
import json
import re
import sys

OWN = "ref8,hi6,hi6-h,std5,std5-h,std4,std4-h,mix4,mix5,mix6,low3,low3-h,low2,low2-h"
SHOWN = "fp16,int8,kivi-4-g64,std4,low3,low2,ggml f16,ggml q8_0,ggml q4_0"
LABELS = {
    "kld": "KL divergence (nats)",
    "out": "relative error of the attention output",
    "worst": "worst query, relative error",
    "bare_kld": "KL divergence without window (nats)",
    "bare_out": "relative error without window",
    "ppl_delta_pct": "perplexity increase (%)",
    "scheme_error": "relative error of the attention output, random data",
}


def read(paths):
    rows = []
    for path in paths:
        with open(path, encoding="utf-8") as file:
            rows += [json.loads(line) for line in file if line.startswith("{")]
    if not rows:
        sys.exit(f"plot.py: no JSON lines in {' '.join(paths)}")
    return rows


def front(points):
    """Points that no other beats in both coordinates, by bits."""
    best, kept = float("inf"), []
    for x, y, name in sorted(points):
        if y < best:
            best = y
            kept.append((x, y, name))
    return kept


def is_own(name, own):
    base = name.split("+")[0]
    return any(base == o or base.startswith(o + "-") for o in own)


SIDES = ((5, -3, "left"), (-5, -3, "right"), (5, 4, "left"), (-5, 4, "right"), (5, -10, "left"), (-5, -10, "right"),
         (0, 6, "center"), (0, -12, "center"), (5, 11, "left"), (-5, 11, "right"), (5, -17, "left"), (-5, -17, "right"))  # fmt: skip


def place_label(axes, x, y, text, color, taken, must):
    """Writes text beside a point, on the first side where neither text nor a point is; where there is none only if it must be there."""
    size = 7.5
    width, height = 0.55 * size * len(text), 0.9 * size  # in points, near enough
    px, py = in_points(axes, x, y)
    boxes = []
    for dx, dy, align in SIDES:
        left = px + dx - {"left": 0, "right": width, "center": width / 2}[align]
        boxes.append(((left, py + dy - 1, left + width, py + dy + height), dx, dy, align))
    frame = axes.get_window_extent()
    inside = [b for b in boxes if b[0][0] > frame.x0 * 72 / axes.figure.dpi and b[0][2] < frame.x1 * 72 / axes.figure.dpi]
    free = [b for b in inside if all(b[0][2] < t[0] or t[2] < b[0][0] or b[0][3] < t[1] or t[3] < b[0][1] for t in taken)]
    if not free and not must:
        return
    box, dx, dy, align = (free or boxes)[0]
    taken.append(box)
    axes.annotate(text, (x, y), xytext=(dx, dy), textcoords="offset points", fontsize=size, color=color, ha=align)


def in_points(axes, x, y):
    to_points = 72.0 / axes.figure.dpi
    return (v * to_points for v in axes.transData.transform((x, y)))


def pareto(rows, y, own, figure):
    axes = figure.subplots()
    figure.subplots_adjust(left=0.1, right=0.98, bottom=0.1, top=0.97)
    kinds = {"published": [], "kvq presets": [], "kvq presets with statistics": []}
    spans = []  # intervals
    defaults = {re.sub(r"[+]own[0-9]+$", "+own", row["scheme"]) for row in rows}
    for row in rows:
        value, name = row.get(y), row["scheme"]
        if value is None or value <= 0 or name in ("fp16", "reference") or name.endswith(("/1", "/vnni")) or "-plan" in name:
            continue
        mine = is_own(name, own)
        if mine and name + "+own" in defaults:
            continue  # even widths, which have to be asked for
        kind = "published" if not mine else "kvq presets with statistics" if "+stats" in name or "+self" in name else "kvq presets"
        kinds[kind].append((row["bits"], value, re.sub(r"[+](stats|own[0-9]*)$", "", name)))
        low, high = row.get(y + "_low"), row.get(y + "_high")
        if low is not None and 0 < low < high:
            spans.append((row["bits"], low, high, kind))
    looks = {"published": ("#777777", "o"), "kvq presets": ("#5b9bd5", "s"), "kvq presets with statistics": ("#1f3fa8", "D")}
    for kind, points in kinds.items():
        color, marker = looks[kind]
        if points:
            axes.scatter([p[0] for p in points], [p[1] for p in points], s=20, color=color, marker=marker, label=kind, zorder=3)
            line = front(points)
            axes.plot([p[0] for p in line], [p[1] for p in line], color=color, linewidth=1.3, zorder=2)
    for bits, low, high, kind in spans:
        axes.vlines(bits, low, high, color=looks[kind][0], linewidth=0.9, zorder=2)
    axes.set_yscale("log")
    axes.margins(x=0.14, y=0.07)
    axes.grid(True, which="major", linewidth=0.3)
    axes.set_xlabel("bits per stored value, parameters included")
    axes.set_ylabel(LABELS.get(y, y))
    axes.legend(loc="upper right", fontsize=8.5)
    figure.canvas.draw()
    taken = []
    for points in kinds.values():
        for bits, value, _ in points:
            px, py = in_points(axes, bits, value)
            taken.append((px - 2.5, py - 2.5, px + 2.5, py + 2.5))
    for kind, points in reversed(kinds.items()):
        line = front(points)
        for bits, value, name in sorted(points, key=lambda p: (p not in line, p)):
            place_label(axes, bits, value, name, looks[kind][0], taken, kind != "published")


def speed(rows, shown, figure):
    """Bars: lines of seven formats lie on each other. Most formats take about as long; what differs is what is worth a look."""
    tokens = sorted({row["tokens"] for row in rows})
    by_scheme = {(row["scheme"], row["tokens"]): row["ns"] / 1e6 for row in rows}
    names = [name for name in shown if any((name, n) in by_scheme for n in tokens)]
    width = 1.0 + 2.2 * len(tokens)
    figure.set_size_inches(width, 0.5 + 0.27 * len(names))
    panels = figure.subplots(1, len(tokens), sharey=True, squeeze=False)[0]
    figure.subplots_adjust(left=1.0 / width, right=0.98, bottom=0.18, top=0.9, wspace=0.08)
    for panel, n in zip(panels, tokens):
        times = [by_scheme.get((name, n), 0.0) for name in names]
        colors = ["#777777" if name.startswith("ggml") else "#9db7e8" if name == "fp16" else "#1f3fa8" for name in names]
        panel.barh(range(len(names)), times, color=colors, height=0.72)
        panel.set_xscale("log")
        low, high = min(t for t in times if t) * 0.6, max(times)
        panel.set_xlim(low, high * 3.2)
        for i, t in enumerate(times):
            panel.annotate(f"{t:.3g}", (t, i), xytext=(3, 0), textcoords="offset points", fontsize=8, va="center")
        panel.set_title(f"{n} tokens", fontsize=9)
        panel.set_xlabel("ms, logarithmic", fontsize=8)
        panel.tick_params(axis="x", labelsize=7)
        panel.tick_params(axis="y", length=0)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_yticks(range(len(names)), names)
    panels[0].invert_yaxis()


TABLES = {
    "out": (("bits", ".2f"), ("bits_with_window", ".2f"), ("out", ".4f"), ("kld", ".2e"), ("worst", ".3f"),
            ("bare_out", ".4f"), ("bare_kld", ".2e"), ("key_quantize_ns", ".1f"), ("value_quantize_ns", ".1f")),
    "ppl_delta_pct": (("bits", ".2f"), ("perplexity", ".3f"), ("ppl_delta_pct", "+.2f"), ("kld", ".2e"),
                      ("kld_worst_window", ".2e"), ("top1", ".4f"), ("window_bytes_per_token", ".0f")),
}  # fmt: skip


def cell(row, name, form):
    """A figure, and its interval where it has one."""
    low, high = row.get(name + "_low"), row.get(name + "_high")
    text = format(row[name], form)
    return text if low is None or low == high else f"{text} ({low:{form}} to {high:{form}})"


def table(rows):
    columns = next((c for key, c in TABLES.items() if key in rows[0]), None)
    if columns is None:
        sys.exit("plot.py: these are no results of bench_quality or kvq_llama evaluate")
    print("| scheme | " + " | ".join(name for name, _ in columns) + " |")
    print("|---|" + "---:|" * len(columns))
    seen = set()
    for row in sorted(rows, key=lambda r: (-r["bits"], r["kld"])):
        if row["scheme"] not in seen:
            seen.add(row["scheme"])
            print(f"| `{row['scheme']}` | " + " | ".join(cell(row, name, form) for name, form in columns) + " |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("pareto", "speed", "table"))
    parser.add_argument("files", nargs="+", metavar="FILE")
    parser.add_argument("--y")
    parser.add_argument("--own", default=OWN, help="names of this library's presets, separated by commas")
    parser.add_argument("--schemes", default=SHOWN, help="those that speed shows, from top to bottom, separated by commas")
    parser.add_argument("--max-y", type=float, help="leave out what is worse")
    parser.add_argument("--tokens", type=int, help="only rows of this context")
    chosen = parser.parse_args()
    if chosen.kind == "table":
        return table(read(chosen.files))
    if len(chosen.files) < 2:
        parser.error("name the results and the file to write")
    y = chosen.y or "kld"

    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    # Nothing in the file may depend on the day or on the run.
    plt.rcParams.update({"svg.hashsalt": "kvq", "svg.fonttype": "none", "font.size": 9})
    figure = plt.figure(figsize=(7.6, 5.2))
    rows = read(chosen.files[:-1])
    if chosen.tokens is not None:
        rows = [row for row in rows if row["tokens"] == chosen.tokens]
    if chosen.max_y is not None:
        rows = [row for row in rows if row.get(y, 0) <= chosen.max_y]
    if chosen.kind == "speed":
        speed(rows, chosen.schemes.split(","), figure)
    else:
        pareto(rows, y, chosen.own.split(","), figure)
    figure.savefig(chosen.files[-1], metadata={"Date": None})


if __name__ == "__main__":
    main()
