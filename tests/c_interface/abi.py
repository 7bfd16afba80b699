#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Compares the ABI of kvq.h or kvq_cuda.h with a committed list: functions, sizes and offsets of structs, values of constants.

abi.py <header> <abi.txt> <C compiler> [--write]

A difference is an error. Where programs that were compiled before still fit (a new function, a new member at the end of a struct with `size`),
write the list again. Where they do not, raise KVQ_ABI_VERSION as well.
"""

import difflib
import pathlib
import re
import subprocess
import sys
import tempfile


sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "bindings"))
sys.dont_write_bytecode = True
import c_header  # noqa: E402


def functions(text):
    return [" ".join(f.split()) for f in re.findall(r"KVQ_API\s+([^;]*?\))\s*;", re.sub(r"//[^\n]*", " ", text))]


def layout(header, compiler):
    declared = c_header.read(header)
    lines = [f"#include <kvq/{header.name}>", "#include <stdio.h>", "int main(void) {"]
    for name, members in ((s.name, [m.name for m in s.members]) for s in declared.structs):
        lines.append(f'    printf("struct {name}: %d bytes\\n", (int)sizeof({name}));')
        for m in members:
            lines.append(f'    printf("  {m}: %d, %d bytes\\n", (int)offsetof({name}, {m}), (int)sizeof((({name}*)0)->{m}));')
    lines += [f'    printf("constant {c}: %d\\n", (int){c});' for c in declared.constants]
    lines += ["    return 0;", "}"]
    with tempfile.TemporaryDirectory() as folder:
        source, program = pathlib.Path(folder) / "abi.c", pathlib.Path(folder) / "abi"
        source.write_text("\n".join(lines))
        subprocess.run([compiler, "-std=c99", "-I", header.parent.parent, "-o", program, source], check=True)
        return subprocess.run([program], check=True, capture_output=True, text=True).stdout.splitlines()


def main():
    header, wanted_path, compiler = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), sys.argv[3]
    found = [f"function {f}" for f in functions(header.read_text())] + layout(header, compiler)
    if "--write" in sys.argv:
        wanted_path.write_text("\n".join(found) + "\n")
        return
    difference = list(difflib.unified_diff(wanted_path.read_text().splitlines(), found, "committed", header.name, lineterm=""))
    if difference:
        sys.exit(f"the ABI of {header.name} is not that of {wanted_path.name}:\n" + "\n".join(difference))


main()
