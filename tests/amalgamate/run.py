#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""The program of README.md, compiled with the one header of scripts/amalgamate in two files, and run. With KVQ_DEFINE_BUILTIN_FORMATS the header
defines the built-in formats in one of two files; that file is read only, since its code takes minutes.

    run.py REPOSITORY FOLDER COMPILER [flags...]
"""
import pathlib
import re
import subprocess
import sys

# What the lines of README.md suppose around them.
MAIN = """#include "kvq_single.hpp"
#include <cstdio>
#include <cstdlib>

int main() {{
    constexpr int layer = 0, n = 300, n_tokens = 200, kv_heads = 8, q_heads = 32, dim = 128;
    std::vector<float> numbers(n * q_heads * dim), outputs(numbers.size());
    for (std::size_t i = 0; i < numbers.size(); ++i) numbers[i] = static_cast<float>(i * 37 % 101) / 50.0f - 1.0f;
    const kvq::token_view<const float> k(numbers.data(), n, kv_heads, dim), v(numbers.data() + 7, n, kv_heads, dim);
    const kvq::token_view<const float> q(numbers.data(), n, q_heads, dim);
    const kvq::token_view<float> out(outputs.data(), n, q_heads, dim);
{program}
    std::printf("%d and %d tokens in %zu bytes, out %g\\n", sequence.tokens(layer), other.tokens(layer), cache.bytes_in_use(), outputs[0]);
    return other.tokens(layer) == n_tokens && outputs[0] != 0.0f ? EXIT_SUCCESS : EXIT_FAILURE;
}}
"""
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
    program = re.sub(r"^#include.*\n", "", program, flags=re.M)
    (folder / "main.cpp").write_text(MAIN.format(program=program))
    (folder / "formats.cpp").write_text(FORMATS)
    flags = ["-std=c++20", "-Wall", "-Wextra", "-pthread"]
    for source in ("main.cpp", "formats.cpp"):
        subprocess.run([*compiler, *flags, "-c", folder / source, "-o", folder / f"{source}.o"], check=True)
    subprocess.run([*compiler, *flags, folder / "main.cpp.o", folder / "formats.cpp.o", "-o", folder / "program"], check=True)
    subprocess.run([folder / "program"], check=True)

    (folder / "defining.cpp").write_text(DEFINING)
    for source, wanted in (("main.cpp", 0), ("defining.cpp", 1)):
        read = subprocess.run([*compiler, *flags, "-E", folder / source], check=True, capture_output=True, text=True)
        found = len(DEFINITION.findall(read.stdout))
        if found != wanted:
            sys.exit(f"{source} defines the built-in formats {found} times, not {wanted}")
    subprocess.run([*compiler, *flags, "-fsyntax-only", folder / "defining.cpp"], check=True)


main()
