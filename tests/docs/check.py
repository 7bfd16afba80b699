#!/usr/bin/env python3
"""Every C, C++, Python and Rust example of README.md and docs/ stands, word by word, in one of the files that are compiled or run.

    check.py FOLDER SNIPPETS...     FOLDER: of the repository

Comments, #include lines and white space are not compared; an ellipsis stands for anything.
"""
import pathlib
import re
import sys


def bare(code):
    code = re.sub(r"//[^\n]*", "", code)
    code = re.sub(r"^\s*#include[^\n]*", "", code, flags=re.M)
    return re.sub(r"\s+", "", re.sub(r"/\*.*?\*/", "", code))


def main():
    folder = pathlib.Path(sys.argv[1])
    compiled = "".join(bare(pathlib.Path(name).read_text()) for name in sys.argv[2:])
    found = 0
    missing = []
    for document in [folder / "README.md", *sorted((folder / "docs").glob("*.md"))]:
        for block in re.findall(r"```(?:cpp|c|python|rust)\n(.*?)```", document.read_text(), re.S):
            parts = [bare(part) for part in re.sub(r"//[^\n]*", "", block).split("...")]
            if all(part in compiled for part in parts):
                found += 1
            else:
                first = next(line for line in block.splitlines() if line and not line.startswith("#"))
                missing.append(f"{document.relative_to(folder)}: not compiled: {first.strip()}")
    print("\n".join(missing) or f"{found} examples")
    return 1 if missing or found == 0 else 0


sys.exit(main())
