#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Writes several GPU tests as one program: kernels that they share are compiled once.

    one_program.py TEST:SOURCE:PART... > program.cpp        PART may be empty

Every test has a namespace of its own behind what all of them include. A test that adds to the library stands outside, at the end, and so does
a test that is alone. The program's first argument names the test that is run; the others are the test's own.
"""
import pathlib
import re
import sys

tests = [argument.split(":") for argument in sys.argv[1:]]
texts = {source: pathlib.Path(source).read_text() for _, source, _ in tests}


def outside(source):
    return len(tests) == 1 or re.search(r"^namespace kvq", texts[source], re.M)


def call(name, source):
    arguments = "argc - 1, argv + 1" if re.search(r"^int main\(.*argc", texts[source], re.M) else ""
    return f"{name}_main({arguments})" if outside(source) else f"{name}_test::main({arguments})"


included = {"#include <cstring>"}
for _, source, _ in tests:
    if not outside(source):
        # Those that only nvcc reads are left out.
        text = re.sub(r"^#ifdef __CUDACC__.*?^#endif", "", texts[source], flags=re.M | re.S)
        included |= {line.replace('"', "<", 1).replace('"', ">") for line in re.findall(r'^#include [<"][^"\n]*[">]', text, re.M)}
print("\n".join(sorted(included)))
for name, source, part in sorted(tests, key=lambda test: bool(outside(test[1]))):
    if part:
        print(f"#define PART {part}")
    if outside(source):
        print(f'#define main {name}_main\n#include "{source}"\n#undef main')
    else:
        print(f'namespace {name}_test {{\n#include "{source}"\n}}')
    for macro in sorted({"PART", *re.findall(r"^#define (\w+)", texts[source], re.M)}):
        print(f"#undef {macro}")
print("int main([[maybe_unused]] int argc, char** argv) {\n    if (argc < 2) return 2;")
for name, source, _ in tests:
    print(f'    if (!std::strcmp(argv[1], "{name}")) return {call(name, source)};')
print("    return 2;\n}")
