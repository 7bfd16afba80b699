#!/usr/bin/env python3
"""What Doxygen reads of a header: its first comment as the documentation of the file, inline namespaces left out. Lines stay lines."""
import re
import sys

path = sys.argv[1]
text = open(path, encoding="utf-8").read()
if not path.endswith(".dox"):
    first = re.match(r"(// SPDX[^\n]*\n)?((?://[^\n]*\n)+)", text)
    if first:
        lines = [re.sub(r"^// ?", "", line) for line in first[2].splitlines()]
        # The first sentence; it may take several lines.
        end = next((i for i, line in enumerate(lines) if not line.strip() or line.endswith((".", ":"))), 0) + 1
        brief = re.sub(r"([@\\<>#])", r"\\\1", " ".join(lines[:end]).strip().rstrip(":.")) + "."
        about = f"/** @file {path[path.rindex('kvq/') :]} @brief {brief}"
        about += "\n" * end + "@verbatim " + "\n".join(lines[end:]) + " @endverbatim */" if len(lines) > end else "\n" * (len(lines) - 1) + " */"
        # A class of the header's name takes its first line.
        name = re.escape(path[path.rindex("/") + 1 : path.rindex(".")])
        text = re.sub(rf"(?<!\*/\n)^(?=(?:class|struct) {name} [^;]*\{{)", f"/** {brief} @details See {path[path.rindex('kvq/') :]}. */ ", text, 1, re.M)
        text = ("\n" if first[1] else "") + about + "\n" + text[first.end() :]
    text = re.sub(r"^namespace kvq \{ inline namespace \w+ \{", "namespace kvq {", text, flags=re.M)
    text = re.sub(r"^\}(\}+)(?=  // namespace kvq)", r"\1", text, flags=re.M)
    text = re.sub(r"\bKVQ_TAGGED\b", "tagged", text)
sys.stdout.write(text)
