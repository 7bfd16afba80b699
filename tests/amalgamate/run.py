#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""The program of README.md, compiled with the one header of scripts/amalgamate and a library of one format, and run. With
KVQ_DEFINE_BUILTIN_FORMATS the header defines the built-in formats; that file is read only, since its code takes minutes.

    run.py REPOSITORY FOLDER COMPILER [flags...]
"""
import pathlib
import re
import subprocess
import sys

# A library with one format, for the portable backend: all of them would take minutes.
FORMATS = """#include "kvq_single.hpp"

const kvq::builtin_format* kvq::builtin_formats(std::size_t* count) {
    static const auto list = [] {
        kvq::detail::builtin_list formats;
        kvq::detail::add_builtin_preset<kvq::scalar, kvq::std4, kvq::detail::every_format>(formats);
        return formats;
    }();
    *count = list.size();
    return list.data();
}
"""
DEFINING = """#define KVQ_DEFINE_BUILTIN_FORMATS
#include "kvq_single.hpp"
"""
DEFINITION = re.compile(r"builtin_formats\(std::size_t\* count\) \{")


def main():
    root, folder = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
    compiler = sys.argv[3:]
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, root / "scripts/amalgamate", folder / "kvq_single.hpp"], check=True)
    program = re.search(r"```cpp\n(.*?)```", (root / "README.md").read_text(), re.S)[1]
    program = re.sub(r"^#include <kvq/.*\n", "", program, flags=re.M)
    # By the name of the library's format, too.
    program = program.replace("kvq::preset_options(kvq::make_formats<kvq::std4>())", 'kvq::preset("std4")')
    (folder / "main.cpp").write_text('#include "kvq_single.hpp"\n' + program)
    (folder / "formats.cpp").write_text(FORMATS)
    flags = ["-std=c++20", "-Wall", "-Wextra", "-pthread"]
    for source in ("main.cpp", "formats.cpp"):
        subprocess.run([*compiler, *flags, "-c", folder / source, "-o", folder / f"{source}.o"], check=True)
    subprocess.run([*compiler, *flags, folder / "main.cpp.o", folder / "formats.cpp.o", "-o", folder / "program"], check=True)
    printed = subprocess.run([folder / "program"], check=True, capture_output=True, text=True).stdout
    if not re.fullmatch(r"\d+ bytes, in 16 bit 4096000\n", printed):
        sys.exit(f"the program of README.md prints {printed}")

    (folder / "defining.cpp").write_text(DEFINING)
    for source, wanted in (("main.cpp", 0), ("defining.cpp", 1)):
        read = subprocess.run([*compiler, *flags, "-E", folder / source], check=True, capture_output=True, text=True)
        found = len(DEFINITION.findall(read.stdout))
        if found != wanted:
            sys.exit(f"{source} defines the built-in formats {found} times, not {wanted}")
    subprocess.run([*compiler, *flags, "-fsyntax-only", folder / "defining.cpp"], check=True)


main()
