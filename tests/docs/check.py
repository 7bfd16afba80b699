#!/usr/bin/env python3
"""Every C, C++, Python and Rust example of README.md and docs/ stands, word by word, in one of the files that are compiled or run, and
every link of a Markdown file leads to a file of the repository and to a heading that is there. Files that docs/reference and CONTRIBUTING.md
name are there. README.md and docs/ stay short, with lines that a terminal shows.

    check.py FOLDER SNIPPETS...     FOLDER: of the repository

Comments, #include lines and white space are not compared; an ellipsis stands for anything. Python snippets that nothing runs
(python_snippets.py) are parsed, and their names are looked up in the package.
"""
import pathlib
import re
import sys

sys.dont_write_bytecode = True
from python_names import wrong_names  # noqa: E402


def bare(code):
    code = re.sub(r"//[^\n]*", "", code)
    code = re.sub(r"^\s*#include[^\n]*", "", code, flags=re.M)
    return re.sub(r"\s+", "", re.sub(r"/\*.*?\*/", "", code))


def prose(text):
    """Without blocks of code."""
    return re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)


def anchors(document):
    """What `#...` may name there: headings, as GitHub and python-markdown make words of them."""
    headings = re.findall(r"^#+ (.*)$", prose(document.read_text()), re.M)
    return {re.sub(r"[^\w\s-]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def missing_files(folder, document):
    """Files that the text names, as `page/page_table.hpp`: from the repository, or as an include of the library says it."""
    bases = [folder, folder / "include", folder / "include/kvq"]
    for span in re.findall(r"`([^`\n<]+)`", prose(document.read_text())):
        for name in re.findall(r"[\w./-]+/[\w.-]+\.(?:hpp|cuh|cpp|cu|inc|h|txt|py|build)\b", span):
            if not any((base / name).exists() for base in bases):
                yield f"{document.relative_to(folder)}: no such file: {name}"


def dead_links(folder, document):
    text = re.sub(r"`[^`\n]*`", "", prose(document.read_text()))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, heading = target.partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        there = (document.parent / path).resolve() if path else document
        if not there.exists():
            yield f"{document.relative_to(folder)}: no such file: {target}"
        elif heading and there.suffix == ".md" and heading not in anchors(there):
            yield f"{document.relative_to(folder)}: no such heading: {target}"


def too_long(folder):
    """More lines than a reader takes, or lines of text that are too long; tables and code may be longer."""
    documents = [folder / "README.md", *sorted((folder / "docs").rglob("*.md"))]
    lines = [len(document.read_text().splitlines()) for document in documents]
    if lines[0] > 80:
        yield f"README.md has {lines[0]} lines, at most 80"
    if sum(lines) > 5000:
        yield f"README.md and docs/ have {sum(lines)} lines, at most 5000"
    for document in documents:
        for line in prose(document.read_text()).splitlines():
            if len(line) > 120 and not line.startswith("|"):
                yield f"{document.relative_to(folder)}: {len(line)} columns, at most 120: {line[:60]}"


def main():
    folder = pathlib.Path(sys.argv[1]).resolve()
    compiled = "".join(bare(pathlib.Path(name).read_text()) for name in sys.argv[2:])
    found = 0
    missing = []
    documents = [folder / "README.md", *sorted((folder / "docs").rglob("*.md")), *sorted(folder.glob("bindings/*/README.md"))]
    for document in documents:
        for block in re.findall(r"```(?:cpp|c|python|py|rust)\n(.*?)```", document.read_text(), re.S):
            parts = [bare(part) for part in re.sub(r"//[^\n]*", "", block).split("...")]
            if all(part in compiled for part in parts):
                found += 1
            else:
                first = next(line for line in block.splitlines() if line and not line.startswith("#"))
                missing.append(f"{document.relative_to(folder)}: not compiled: {first.strip()}")
    others = [p for name in ("*.md", "bench/**/*.md", "bindings/*/*.md", "examples/**/*.md") for p in folder.glob(name)]
    for document in sorted({*documents, *others}):
        missing += dead_links(folder, document)
        if document.parent == folder / "docs/reference" or document == folder / "CONTRIBUTING.md":
            missing += missing_files(folder, document)
    missing += too_long(folder)
    for name in sys.argv[2:]:
        if name.endswith("snippets.py"):
            missing += sorted(set(wrong_names(pathlib.Path(name), folder / "bindings/python/src/kvq")))
    print("\n".join(missing) or f"{found} examples")
    return 1 if missing or found == 0 else 0


sys.exit(main())
