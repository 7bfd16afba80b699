#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Runs the benches of two trees in turns and prints the table of bench/compare.py (scripts/gpu-bench --against).

    bench/gpu/turns.py FOLDER ROUNDS BOUND ROWS PROGRAM...    FOLDER/old/PROGRAM and FOLDER/new/PROGRAM; ROWS: only rows with this text

A row is what one program measures of one shape: its name is made of the fields that say what was measured.
"""
import json
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
# Fields of a line of JSON that say what it is about; those of times begin with "us".
WHAT = ("op", "bench", "scheme", "format", "batch", "chunk", "tokens", "context", "q_heads", "kv_heads", "page_tokens")
OTHERS = ("us_torch",)  # times of other programs


def rows_of(line):
    """(name, microseconds) of what a line of JSON has measured."""
    fields = json.loads(line)
    what = [str(fields[key]) for key in WHAT if fields.get(key)] + (["ragged"] if fields.get("ragged") else [])
    for key, value in fields.items():
        if key.split("_")[0] == "us" and key not in OTHERS and value > 0.0:
            yield " ".join(what + [key[3:]]).strip(), value


def main():
    folder, rounds, bound, wanted = pathlib.Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    for program in sys.argv[5:]:
        for tree in ("old", "new"):
            if not (folder / tree / program).exists():
                sys.exit(f"there is no {folder / tree / program}: compile it first, without --built")
    files = {tree: folder / f"{tree}.txt" for tree in ("old", "new")}
    for file in files.values():
        file.write_text("")
    for turn in range(1, rounds + 1):
        print(f"round {turn} of {rounds}", file=sys.stderr)
        for program in sys.argv[5:]:
            for tree, file in files.items():
                done = subprocess.run([folder / tree / program, "--json", "--quick"], capture_output=True, text=True)
                if done.returncode != 0:
                    sys.exit(f"{folder / tree / program} ended with {done.returncode}\n{done.stderr}")
                with file.open("a") as out:
                    for line in done.stdout.splitlines():
                        for name, value in rows_of(line) if line.startswith("{") else ():
                            if wanted in name:
                                out.write(f"{name}\t{value}\n")
    return subprocess.run([sys.executable, ROOT / "bench/compare.py", files["old"], files["new"], bound]).returncode


if __name__ == "__main__":
    sys.exit(main())
