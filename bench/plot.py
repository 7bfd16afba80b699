#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Plots and tables of the JSON lines that bench_quality, kvq_llama evaluate and bench_attention print.

plot.py pareto RESULTS.jsonl OUT.svg [--y kld|out|ppl_delta_pct|bare_kld|scheme_error|...]   quality against bits per value
plot.py speed  RESULTS.jsonl OUT.svg [--y ns|vs_fp16]                           time of a decode step against context
plot.py table  RESULTS.jsonl                                                    Markdown of bench_quality or evaluate

Several files of results may be given. Plots are SVG. Schemes of this library (--own) and published ones get a line each through
what no other of their kind beats. The same input gives the same bytes.
"""

import argparse
import json
import sys

OWN = "ref8,hi6,std5,std4,mix4,low3,low2"
LABELS = {
    "kld": "KL divergence (nats)",
    "out": "relative error of the attention output",
    "worst": "worst query, relative error",
    "bare_kld": "KL divergence without window (nats)",
    "bare_out": "relative error without window",
    "ppl_delta_pct": "perplexity increase (%)",
    "ns": "time of one decode step (us)",
    "vs_fp16": "speed against 16-bit pages",
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


def place_label(axes, x, y, text, color, taken):
    """Writes text beside a point, on the first of six sides where no other text is; nowhere if there is none."""
    size = 6
    width, height = 0.62 * size * len(text), 1.15 * size  # in points, near enough
    axes.figure.canvas.draw()
    to_points = 72.0 / axes.figure.dpi
    px, py = (v * to_points for v in axes.transData.transform((x, y)))
    for dx, dy in ((4, -2), (4, 4), (4, -8), (-4 - width, -2), (-4 - width, 4), (-4 - width, -8)):
        box = (px + dx, py + dy, px + dx + width, py + dy + height)
        if all(box[2] < t[0] or t[2] < box[0] or box[3] < t[1] or t[3] < box[1] for t in taken):
            taken.append(box)
            axes.annotate(text, (x, y), xytext=(dx, dy), textcoords="offset points", fontsize=size, color=color)
            return


def pareto(rows, y, own, axes):
    own_points, published = [], []
    for row in rows:
        value = row.get(y)
        if value is None or value <= 0 or row["scheme"] in ("fp16", "reference") or row["scheme"].endswith(("/1", "/vnni")):
            continue
        (own_points if is_own(row["scheme"], own) else published).append((row["bits"], value, row["scheme"]))
    for points, color, marker, label in ((published, "tab:gray", "o", "published"), (own_points, "tab:blue", "s", "kvq presets")):
        if not points:
            continue
        axes.scatter([p[0] for p in points], [p[1] for p in points], s=14, color=color, marker=marker, label=label, zorder=3)
        line = front(points)
        axes.plot([p[0] for p in line], [p[1] for p in line], color=color, linewidth=1, zorder=2)
    axes.set_yscale("log")
    axes.margins(x=0.12)
    taken = []
    for points, color in ((own_points, "tab:blue"), (published, "tab:gray")):
        line = front(points)
        for bits, value, name in sorted(points, key=lambda p: (p not in line, p)):
            place_label(axes, bits, value, name, color, taken)
    axes.set_xlabel("bits per stored value, parameters included")
    axes.set_ylabel(LABELS.get(y, y))
    axes.legend(loc="upper right", fontsize=8)


def speed(rows, y, _own, axes):
    by_scheme = {}
    for row in rows:
        by_scheme.setdefault(row["scheme"], []).append((row["tokens"], row[y] / (1000 if y == "ns" else 1)))
    for index, (name, points) in enumerate(by_scheme.items()):
        points.sort()
        axes.plot([p[0] for p in points], [p[1] for p in points], marker="osv^Dx+*"[index % 8], markersize=4, linewidth=1, label=name)
    axes.set_xscale("log", base=2)
    if y == "ns":
        axes.set_yscale("log")
    axes.set_xlabel("tokens in the cache")
    axes.set_ylabel(LABELS.get(y, y))
    # Beside the axes: seventeen names would hide lines. In the order in which they end.
    last = {name: max(points)[1] for name, points in by_scheme.items()}
    lines, names = axes.get_legend_handles_labels()
    order = sorted(range(len(names)), key=lambda i: -last[names[i]])
    axes.legend([lines[i] for i in order], [names[i] for i in order], fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    axes.figure.set_size_inches(8.2, 4.6)
    axes.figure.subplots_adjust(right=0.83)


TABLES = {
    "out": (("bits", ".2f"), ("bits_with_window", ".2f"), ("out", ".4f"), ("kld", ".2e"), ("worst", ".3f"),
            ("bare_out", ".4f"), ("bare_kld", ".2e"), ("key_quantize_ns", ".1f"), ("value_quantize_ns", ".1f")),
    "ppl_delta_pct": (("bits", ".2f"), ("perplexity", ".3f"), ("ppl_delta_pct", "+.2f"), ("kld", ".2e"),
                      ("top1", ".4f"), ("window_bytes_per_token", ".0f")),
}  # fmt: skip


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
            print(f"| `{row['scheme']}` | " + " | ".join(format(row[name], form) for name, form in columns) + " |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("pareto", "speed", "table"))
    parser.add_argument("files", nargs="+", metavar="FILE")
    parser.add_argument("--y")
    parser.add_argument("--own", default=OWN, help="names of this library's presets, separated by commas")
    parser.add_argument("--title", default="")
    parser.add_argument("--max-y", type=float, help="leave out what is worse")
    parser.add_argument("--tokens", type=int, help="only rows of this context")
    chosen = parser.parse_args()
    if chosen.kind == "table":
        return table(read(chosen.files))
    if len(chosen.files) < 2:
        parser.error("name the results and the file to write")
    y = chosen.y or {"pareto": "kld", "speed": "ns"}[chosen.kind]

    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    # Nothing in the file may depend on the day or on the run.
    plt.rcParams.update({"svg.hashsalt": "kvq", "svg.fonttype": "none", "font.size": 9})
    figure, axes = plt.subplots(figsize=(7, 4.6))
    rows = read(chosen.files[:-1])
    if chosen.tokens is not None:
        rows = [row for row in rows if row["tokens"] == chosen.tokens]
    if chosen.max_y is not None:
        rows = [row for row in rows if row.get(y, 0) <= chosen.max_y]
    figure.subplots_adjust(left=0.11, right=0.98, bottom=0.11, top=0.95)
    {"pareto": pareto, "speed": speed}[chosen.kind](rows, y, chosen.own.split(","), axes)
    axes.set_title(chosen.title, fontsize=9)
    axes.grid(True, which="major", linewidth=0.3)
    figure.savefig(chosen.files[-1], metadata={"Date": None})


if __name__ == "__main__":
    main()
