#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Tables that put rows of several runs side by side: Markdown of the JSON lines that bench_quality, bench_ablation and kvq_llama
evaluate print. scripts/quality makes the runs.

tables.py sizes     NAME RESULTS [NAME RESULTS]...    presets that ask for nothing against the best published method of their size
tables.py reference RESULTS                           presets against the study that they were chosen by
tables.py windows   RESULTS...                        a scheme with several windows, a file each
tables.py transfer  NAME TEXT RESULTS [TEXT RESULTS]... [, NAME ...]     statistics of several texts, the judged text's first
tables.py parts     NAME RESULTS [NAME RESULTS]...    bench_ablation: keys alone and values alone
tables.py changes   NAME RESULTS [NAME RESULTS]...    presets with one ingredient changed
tables.py gpu       RESULTS                           docs/lab/gpu.md, of `scripts/gpu-bench --json`
tables.py engine    RESULTS                           the same, of `scripts/gpu-bench engine --json`
"""

import json
import sys

# Presets that ask for nothing, by size.
SIZES = (
    (2, ("low2+own", "low2-h")),
    (3, ("low3+own", "low3-h")),
    (4, ("mix4+own", "std4-h", "std4")),
    (5, ("mix5+own", "std5-h", "std5")),
    (6, ("mix6+own", "hi6-h", "hi6")),
    (8, ("ref8",)),
)
MORE_BITS = (0.5, 1)
OWN = tuple(name.split("+")[0] for _, names in SIZES for name in names)

# Of the study: output error, KL divergence on its TinyLlama tensors (layers 2, 8, 14 and 20; two of eight query heads; 192
# queries a head). The rows of its presets, and published methods to compare them with.
REFERENCE = {
    "ref8": (0.0017, 8.5e-6),
    "hi6": (0.0077, 1.9e-4),
    "std5": (0.0145, 6.2e-4),
    "std4": (0.0271, 2.4e-3),
    "mix4+stats": (0.0230, 1.5e-3),
    "low3+stats": (0.0500, 7.2e-3),
    "low2+stats": (0.1051, 2.0e-2),
    "q8_0-h": (0.0025, 1.89e-5),
    "kivi-4-g32": (0.0252, 1.75e-3),
    "kivi-4-g64": (0.0314, 2.49e-3),
    "kvarn-free-4": (0.0296, 2.70e-3),
    "kivi-3-g64": (0.0666, 1.22e-2),
    "kivi-2-g64": (0.2127, 7.53e-2),
    "kvarn-2": (0.2167, 7.80e-2),
}
BESIDE = {
    "ref8": "q8_0-h",
    "hi6": "kivi-4-g32",
    "std5": "kivi-4-g32",
    "std4": "kivi-4-g64",
    "mix4+stats": "kivi-4-g64",
    "low3+stats": "kivi-3-g64",
    "low2+stats": "kivi-2-g64",
}

WINDOW_SCHEMES = ("kivi-4-g64", "std4", "kivi-2-g64", "low2+stats")
TRANSFER_SCHEMES = ("std4", "mix4-plan", "mix4-key-plan", "mix4", "low3-key-plan", "low3", "low2-plan", "low2-key-plan", "low2")

CHANGES = (
    ("{}+stats", "the preset, with statistics"),
    ("{}", "no statistics"),
    ("{}-plan+stats", "no error feedback"),
    ("{}-key-plan+stats", "statistics of keys alone"),
    ("{}-even+stats", "even widths"),
    ("{}-trusting+stats", "importances as they are"),
    ("{}-other-keys+stats", "keys of 2 bits: range (low2: least squares)"),
    ("{}-fp16+stats", "parameters in fp16"),
    ("{}-range-values+stats", "values: range"),
    ("{}-no-mean+stats", "values: mean not corrected"),
    ("{}-no-factors+stats", "values: no token scales"),
    ("{}-token-values+stats", "values: as in KIVI"),
    ("{}-keys+stats", "keys alone"),
    ("{}-values", "values alone"),
)


GPU_SHAPES = [(1, 131072), (8, 32768), (16, 2048), (64, 4096), (128, 8192)]
GPU_FORMATS = ["fp16", "int8", "token4-g128", "kivi-4-g128", "kivi-4-g64", "kivi-4-g32", "kivi-2-g128", "kivi-2-g32"]
GPU_PRESETS = {
    "plain8": ["ref8"],
    "plain6": ["hi6"],
    "plain5": ["std5"],
    "plain4": ["std4", "mix4", "mix4-plan"],
    "plain3": ["low3", "low3-plan"],
    "plain2": ["low2", "low2-plan"],
}


def read_lines(path):
    with open(path, encoding="utf-8") as file:
        rows = [json.loads(line) for line in file if line.startswith("{")]
    if not rows:
        sys.exit(f"tables.py: no JSON lines in {path}")
    return rows


def read(path):
    return {row["scheme"]: row for row in read_lines(path)}


def print_table(head, rows):
    print("| " + " | ".join(head) + " |")
    print("|---|" + "---:|" * (len(head) - 1))
    for row in rows:
        print("| " + " | ".join(row) + " |")


def best_published(run, bits, more):
    """The least divergence without statistics at about so many bits: from 1 % fewer to `more` bits more."""
    of = [r for r in run.values() if 0.99 * bits <= r["bits"] <= bits + more and "+" not in r["scheme"] and r["kld"] > 0]
    of = [r for r in of if not any(r["scheme"] == own or r["scheme"].startswith(own + "-") for own in OWN)]
    return min(of, key=lambda r: r["kld"], default=None)


def sizes(*words):
    names, runs = words[0::2], [read(path) for path in words[1::2]]
    rows = []
    for size, presets in SIZES:
        for preset in presets:
            found = [run.get(preset) or run.get(preset + "64") for run in runs]  # low2+own64: of short windows
            if not any(found):
                continue
            row = [str(size), f"`{preset}`"]
            for own, run in zip(found, runs):
                row.append(f"{own['bits']:.2f}: {own['kld']:.2e}" if own else "–")
                for more in MORE_BITS:
                    other = own and best_published(run, own["bits"], more)
                    row.append(f"{other['kld'] / own['kld']:.2f}, `{other['scheme']}` ({other['bits']:.2f})" if other else "–")
            rows.append(row)
    published = [f"factor of the best published, up to {more} bits more" for more in MORE_BITS]
    columns = [column for name in names for column in (name + ", bits: KL divergence", *published)]
    print_table(("size", "preset", *columns), rows)


def reference(path):
    of = read(path)

    def cells(name):
        out, kld = REFERENCE[name]
        return [f"{out:.4f} / {kld:.1e}", f"{of[name]['out']:.4f} / {of[name]['kld']:.1e}"]

    rows = []
    for name in REFERENCE:
        row = [f"`{name}`", *cells(name)]
        row.append(f"{100 * (of[name]['out'] / REFERENCE[name][0] - 1):+.0f} / {100 * (of[name]['kld'] / REFERENCE[name][1] - 1):+.0f}")
        if name in BESIDE:
            b = BESIDE[name]
            theirs = [REFERENCE[b][i] / REFERENCE[name][i] for i in (0, 1)]
            ours = [of[b][key] / of[name][key] for key in ("out", "kld")]
            row += [f"`{b}`", f"{theirs[0]:.2f} / {theirs[1]:.1f}", f"{ours[0]:.2f} / {ours[1]:.1f}"]
        else:
            row += ["", "", ""]
        rows.append(row)
    print_table(("scheme", "study", "here", "off by %", "beside", "ratios, study", "ratios, here"), rows)


def windows(*paths):
    runs = [read(path) for path in paths]
    any_row = [next(iter(run.values())) for run in runs]
    print_table(
        ("scheme", *(f"{row['sinks']} sinks, {row['recent']} recent" for row in any_row)),
        [[f"`{name}`", *(f"{run[name]['out']:.4f} / {run[name]['kld']:.1e}" for run in runs)] for name in WINDOW_SCHEMES],
    )


def transfer(*words):
    groups = [[]]
    for word in words:
        if word == ",":
            groups.append([])
        else:
            groups[-1].append(word)
    for name, *texts in groups:
        labels, runs = texts[0::2], [read(path) for path in texts[1::2]]
        heads = []
        for label, run in zip(labels, runs):
            variance = next(iter(run.values())).get("text_variance")
            heads.append(label if variance is None else f"{label} ({variance:.3f})")
        # What a cache has from the beginning of the sequence itself does not depend on the text.
        own = any(scheme + "+self" in runs[0] for scheme in TRANSFER_SCHEMES)
        print(f"{name}; statistics from: " + ", ".join(heads) + "\n")
        rows = []
        for scheme in TRANSFER_SCHEMES:
            if scheme not in runs[0]:
                continue
            row = [f"`{scheme}+stats`"]
            for key, form in (("kld", ".2e"), ("out", ".4f")):
                plain = runs[0][scheme][key]
                row.append(format(plain, form))
                row += [f"{run[scheme + '+stats'][key] / plain:.2f}" for run in runs]
                if own:
                    self = runs[0].get(scheme + "+self")
                    row.append(f"{self[key] / plain:.2f}" if self else "–")
            rows.append(row)
        columns = [*labels, "`+self`"] if own else labels
        print_table(("scheme", "KLD without", *columns, "output error without", *columns), rows)
        print()


def parts(*words):
    names, runs = words[0::2], [read(path) for path in words[1::2]]
    for letter, bits, key, form in (("K", "key_bits", "kld", ".2e"), ("V", "value_bits", "out", ".4f")):
        kinds = []
        for scheme in runs[0]:
            kind = scheme[3:]
            if scheme[0] == letter and scheme[1:3] in ("4 ", "3 ", "2 ") and kind not in kinds:
                kinds.append(kind)
        kinds = [k for k in kinds if k + "+stats" not in kinds]  # without statistics there is a row of the same already
        head = ["keys" if letter == "K" else "values", *(f"bits, {name}" for name in names)]
        head += [f"{name} {b}" if b == 4 else str(b) for name in names for b in (4, 3, 2)]
        head += [f"bare, {names[0]} 4", "3", "2", "ns/value"]
        rows = []
        for kind in kinds:
            def cell(run, b, column, form):
                row = run.get(f"{letter}{b} {kind}")
                return format(row[column], form) if row else "–"

            width = 4 if f"{letter}4 {kind}" in runs[0] else 3
            row = [kind.removesuffix("+stats") + (" (statistics)" if kind.endswith("+stats") else "")]
            row += [cell(run, width, bits, ".2f") for run in runs]
            row += [cell(run, b, key, form) for run in runs for b in (4, 3, 2)]
            row += [cell(runs[0], b, "bare_" + key, form) for b in (4, 3, 2)]
            row.append(cell(runs[0], width, "key_quantize_ns" if letter == "K" else "value_quantize_ns", ".1f"))
            rows.append(row)
        print_table(head, rows)
        print()


def changes(*words):
    names, runs = words[0::2], [read(path) for path in words[1::2]]
    presets = ("mix4", "low3", "low2")
    rows = []
    for pattern, label in CHANGES:
        row = [label]
        for run in runs:
            for preset in presets:
                found, full = run.get(pattern.format(preset)), run[preset + "+stats"]
                # Values do not touch the weights of attention: at attention its output error is there too.
                keys = ("kld", "out") if "out" in full else ("kld",)
                if found is None:
                    row.append("–")
                elif found is full:
                    row.append(" / ".join(format(full[key], ".1e" if key == "kld" else ".3f") for key in keys))
                else:
                    row.append(" / ".join(f"{found[key] / full[key]:.2f}" for key in keys))
        rows.append(row)
    print_table(("factor", *(f"{n} {p}" if p == "mix4" else p for n in names for p in presets)), rows)


def gpu(path):
    rows = read_lines(path)
    attention = {}  # of pages of 64 tokens, or 128 where a format has no others; small ones apart
    small = {}
    for r in rows:
        if r["op"] == "attention":
            key = (r["scheme"], r["batch"], r["tokens"], r["ragged"], r["q_heads"], r["kv_heads"])
            (attention if r["page_tokens"] >= 64 else small.setdefault(r["page_tokens"], {}))[key] = r

    def row(scheme, heads, cell, of=attention, shapes=GPU_SHAPES, ragged=False):
        found = [of.get((scheme, *shape, ragged, *heads)) for shape in shapes]
        return [cell(r) if r else "-" for r in found]

    def figures(r):
        text = f"{r['us']:.1f}, {100 * r['ceiling_share']:.0f} %"
        of_torch = r["vs_torch_cudnn"]
        return f"{text}, {of_torch:.2f} x; {of_torch * r['us'] / r['us_early']:.2f} x" if of_torch else text

    names = [f"{batch} x {tokens}" for batch, tokens in GPU_SHAPES]
    for heads in ((32, 8), (32, 32), (64, 8)):
        torch = ", ".join(row("fp16", heads, lambda r: f"{r['us'] * r['vs_torch_cudnn']:.1f}"))
        print(f"\n{heads[0]} query heads, {heads[1]} kv heads (torch: {torch} us)\n")
        print_table(("format", *names), [[f, *row(f, heads, figures)] for f in GPU_FORMATS])
    print("\nRagged batches: microseconds, share of the read ceiling\n")
    both = ((32, 8), (64, 8))
    ragged = [[f, *(row(f, h, figures, shapes=[(64, 4096)], ragged=True)[0] for h in both)] for f in GPU_FORMATS]
    print_table(("format", *(f"{q}/{kv} heads" for q, kv in both)), ragged)
    print("\nSmall pages, 32/8 heads\n")
    formats = ("fp16", "int8", "token4-g128")
    lines = [[f"{f}, {page}", *row(f, (32, 8), figures, of=small[page])] for page in sorted(small) for f in formats]
    print_table(("format, tokens of a page", *names), lines)
    for heads in ((32, 8), (64, 8), (32, 32)):
        print(f"\nPresets, {heads[0]} query heads, {heads[1]} kv heads\n")
        lines = []
        for plain, presets in GPU_PRESETS.items():
            base = row(plain, heads, lambda r: r["us"])
            lines.append([plain.replace("plain", "plain "), *(us if us == "-" else f"{us:.1f}" for us in base)])
            for preset in presets:
                own = row(preset, heads, lambda r: r["us"])
                cells = [us if us == "-" else f"{us:.1f} ({us / b:.2f})" for us, b in zip(own, base)]
                lines.append([preset.replace("-plan", ", plan"), *cells])
        print_table(("format", *names), lines)

    def by_tokens(op, title, cell):
        of = [r for r in rows if r["op"] == op]
        tokens = sorted({r["tokens"] for r in of})
        found = {(r["scheme"], r["tokens"]): r for r in of}
        print(f"\n{title}\n")
        schemes = dict.fromkeys(r["scheme"] for r in of)
        print_table(("format", *(f"{t} tokens" for t in tokens)), [[s, *(cell(found[s, t]) for t in tokens)] for s in schemes])

    by_tokens("store", "Store: microseconds, share of a copy", lambda r: f"{r['us']:.1f}, {100 * r['ceiling_share']:.0f} %")
    by_tokens("pages", "Whole pages: microseconds (numbers per ns)", lambda r: f"{r['us']:.1f} ({r['numbers_per_ns']:.1f})")
    by_tokens("commit", "Tokens of full pages among 128 sequences: microseconds", lambda r: f"{r['us']:.1f}")
    print("\nReal steps: attend; step; mean over the steps of a page: microseconds (times fp16)\n")
    real = [r for r in rows if r["op"] == "step" and "sinks" in r]
    print_table(
        ("format", "batch x tokens", "attend", "step", "mean"),
        [
            [
                r["scheme"],
                f"{r['batch']} x {r['tokens']}",
                f"{r['us_attend']:.1f} ({r['us_attend_fp16'] / r['us_attend']:.2f})",
                f"{r['us_early']:.1f} ({r['us_fp16'] / r['us_early']:.2f})",
                f"{r['us_mean']:.1f} ({r['us_fp16'] / r['us_mean']:.2f})",
            ]
            for r in real
        ],
    )
    print("\nstore, then attend; with `early`; attend alone: microseconds\n")
    steps = [r for r in rows if r["op"] == "step" and "sinks" not in r]
    shapes = dict.fromkeys((r["batch"], r["tokens"]) for r in steps)
    of = {(r["scheme"], r["batch"], r["tokens"]): "{us:.1f}; {us_early:.1f}; {us_attend:.1f}".format(**r) for r in steps}
    schemes = dict.fromkeys(r["scheme"] for r in steps)
    print_table(("format", *(f"{b} x {t}" for b, t in shapes)), [[s, *(of[s, *shape] for shape in shapes)] for s in schemes])
    print(f"\nlargest error {max(r['rel_error'] for r in attention.values()):.1e}")


def engine(path):
    rows = [json.loads(line) for line in open(path) if line.startswith("{")]
    runs = [r for r in rows if r["case"] != "fits"]
    gigabytes = lambda n: f"{n / 1e9:.1f}"
    head = ("sequences x tokens", "layers", "format", "tokens/s", "ms a step", "x 16 bit", "x torch", "first token, ms", "pages, GB", "peak, GB")
    print_table(head, [[f"{r['batch']} x {r['context']}", str(r["layers"]), r["format"], f"{r['tokens_per_second']:.0f}", f"{r['ms_per_step']:.2f}",
                        f"{r['vs_16_bit']:.2f}", f"{r['vs_torch']:.2f}" if r["vs_torch"] else "-", f"{r['first_token_ms']:.0f}",
                        gigabytes(r["page_bytes"]), gigabytes(r["peak_bytes"])] for r in runs])
    print()
    fits = [r for r in rows if r["case"] == "fits"]
    contexts = dict.fromkeys(r["context"] for r in fits)
    of = {(r["format"], r["context"]): f"{r['tokens'] / 1e3:.0f}k ({r['vs_16_bit']:.3f} x)" for r in fits}
    print_table(("format", *(str(c) for c in contexts)), [[f, *(of[f, c] for c in contexts)] for f in dict.fromkeys(r["format"] for r in fits)])


def main():
    kinds = {f.__name__: f for f in (sizes, reference, windows, transfer, parts, changes, gpu, engine)}
    if len(sys.argv) < 3 or sys.argv[1] not in kinds:
        sys.exit(__doc__.strip())
    kinds[sys.argv[1]](*sys.argv[2:])


if __name__ == "__main__":
    main()
