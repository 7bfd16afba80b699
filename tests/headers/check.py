#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Compiles every header of the library alone, and all of them together.

check.py <include folder> [--without simd|eigen|io|mpi|ggml|nccl]... [--together] <compiler> [flags...]

With g++ and clang++: every *.hpp by itself, included twice, after macros that other people's headers define
(poison.hpp). Headers that need xsimd, Eigen, nlohmann-json, MPI or ggml are left out with --without, and go unpoisoned.
--together leaves this out: what a header forgets to include, a second compiler misses as well.
With nvcc: everything that must be usable from device code in one translation unit, and by themselves headers for NCCL and
the one with the instructions of devices (ptx.cuh). The other *.cuh are compiled by themselves with clang++, and tests/gpu/emulated
in place of ptx.cuh: nvcc takes longer. So are *.hpp that include the toolkit, and once more with KVQ_COMPILED.
"By itself": headers are compiled in chains. Each header of a chain includes the one before it, and therefore sees nothing
that it does not include. A chain is one translation unit. A few headers are precompiled (PRECOMPILED), and chains of headers
that include one of them begin with it: all takes two thirds of the time.
With all of them: every header in one translation unit, behind the standard library and macros that it cannot take
(poison_late.hpp).
"""

import concurrent.futures
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent

# Folders and files that a .cu file may include.
DEVICE = ("version.hpp", "config.hpp", "core/", "pack/", "quant/", "schemes/", "page/")

# What includes this one includes the CUDA toolkit.
TOOLKIT = "cuda/layout/status.hpp"

# Component, and the beginnings of its headers' paths.
THIRD_PARTY = {
    "simd": ("cpu/simd", "cpu/arch/", "format/define_builtin_formats"),
    "eigen": ("adapters/eigen",),
    "io": ("io/safetensors", "io/saved_sequence", "io/saved_index", "io/save", "io/restore", "io/file", "policy/prefix_tiers",
           "cuda/host/save"),
    "mpi": ("adapters/distributed/mpi",),
    "ggml": ("adapters/ggml",),
    "nccl": ("adapters/distributed/nccl", "adapters/distributed/peer_attention"),
}

# The oldest cards that have the kernels.
DEVICE_FLAGS = ["-std=c++20", "-arch=sm_80", "-Werror", "all-warnings"]
# Headers of one instruction set: the processor they are for, and the flags they need there.
INSTRUCTION_SETS = {
    "cpu/arch/x86_sse": ("x86_64", ["-march=x86-64-v2"]),
    "cpu/arch/x86_avx2": ("x86_64", ["-march=x86-64-v3"]),
    "cpu/arch/x86_avx512": ("x86_64", ["-march=x86-64-v4", "-mavx512vnni"]),
    "cpu/arch/x86_amx": ("x86_64", []),
    "cpu/arch/neon": ("aarch64", []),
}

# The processor that the headers above are tested on, with all of its instructions.
WHOLE_PROCESSOR = {"x86_64": ["-march=x86-64-v4", "-mavx512vnni", "-mamx-tile", "-mamx-int8"]}

# Headers that many others include, by themselves or through others. Each from sources: clang 14 loses macros where one precompiled header
# begins with another.
PRECOMPILED = ("core/text.hpp", "quant/error_feedback.hpp", "attention/held_pages.hpp", "cache/sequence.hpp", "cuda/layout/cache_ref.cuh")

WARNINGS = ["-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Wshadow", "-Werror"]


def warnings_of(compiler):
    if "clang" in os.path.basename(compiler):
        return [*WARNINGS, "-ferror-limit=3", "-Wno-sign-conversion"]  # the latter as in CMakeLists.txt
    return [*WARNINGS, "-fmax-errors=3"]


def precompile(command, header, output):
    command = [*command, "-x", "c++-header", "-include", f"kvq/{header}", os.devnull, "-o", output]
    return f"{header}, precompiled", subprocess.run(command, capture_output=True, text=True)


def compile_chain(command, chain, precompiled):
    if precompiled:
        command = [*command, "-include-pch", precompiled.result()[1].args[-1]]
    for header in chain:
        command = [*command, "-include", f"kvq/{header}", "-include", f"kvq/{header}"]
    return ", ".join(chain), subprocess.run([*command, "-fsyntax-only", "-x", "c++", os.devnull], capture_output=True, text=True)


def submit_chains(pool, graph, headers, command, folder):
    """Jobs that compile headers in chains. Without warnings, which the one translation unit of all headers gives."""
    command = [*command, "-std=c++20", "-w"]
    jobs, groups = {}, {}
    for header in PRECOMPILED:
        if header in headers and "clang" in os.path.basename(command[0]):
            jobs[header] = pool.submit(precompile, command, header, f"{folder}/{header.replace('/', '_')}.pch")
    for header in headers:
        included = [other for other in jobs if other in graph.of(header)]
        groups.setdefault(jobs[max(included, key=lambda other: len(graph.of(other)))] if included else None, []).append(header)
    chains = [pool.submit(compile_chain, command, chain, begin) for begin, group in groups.items() for chain in graph.chains(group)]
    return [*jobs.values(), *chains]


class include_graph:
    """Which headers every header includes, through others as well. Conditional includes do not count."""

    def __init__(self, root):
        self.root, self.all = root, {}

    def of(self, header):
        if header not in self.all:
            self.all[header] = {header}
            depth, text = 0, (self.root / header).read_text()
            for directive, name in re.findall(r'^ *# *(if|endif|include)\w* *(?:"([^"]+)")?', text, re.MULTILINE):
                depth += {"if": 1, "endif": -1, "include": 0}[directive]
                if name and depth == 0:
                    self.all[header] |= self.of(os.path.relpath((self.root / header).parent / name, self.root))
        return self.all[header]

    def chains(self, headers):
        """As few chains as there can be: a largest matching of headers with headers that they include."""

        after = {}

        def match(header, tried):
            for other in sorted(self.of(header) & set(headers) - {header} - tried):
                tried.add(other)
                if other not in after or match(after[other], tried):
                    after[other] = header
                    return True
            return False

        result = [[header] for header in headers if not match(header, set())]
        for chain in result:
            while chain[-1] in after:
                chain.append(after[chain[-1]])
        return result


def emulated_device(include, folder):
    """The library with the instructions of tests/gpu/emulated, and the flags that its device headers need there."""
    emulated = pathlib.Path(folder) / "emulated"
    shutil.copytree(include.resolve(), emulated, copy_function=os.symlink)
    instructions = emulated / "kvq/cuda/arch/ptx.cuh"
    instructions.unlink()
    instructions.symlink_to(HERE.parent / "gpu/emulated/ptx.cuh")
    return emulated, ["-I", str(HERE.parent / "gpu/emulated")]


def compile_device(compiler, flags, include, headers, folder):
    source = pathlib.Path(folder) / (headers[-1].replace("/", "_") + ".cu")
    source.write_text("".join(f"#include <kvq/{header}>\n" for header in headers))
    command = [compiler, *DEVICE_FLAGS, *flags, "-I", str(include)]
    # The device's side of it; the host's is in the poisoned source.
    command += ["-ptx", "-o", str(source) + ".ptx", str(source)]
    return ", ".join(headers), subprocess.run(command, capture_output=True, text=True)


def write_poisoned(include, headers, folder, suffix, machine):
    """A source that includes the headers behind whatever they include themselves, and behind poison_late.hpp."""
    root = (include / "kvq").resolve()
    # A conditional include of another processor's header brings nothing here: some compilers have its headers all the same.
    texts, left = [], [root / header for header in headers]
    seen = {root / f"{header}.hpp" for header, (processor, _) in INSTRUCTION_SETS.items() if processor != machine}
    while left:
        path = left.pop().resolve()
        if path in seen:
            continue
        seen.add(path)
        texts.append(path.read_text())
        left.extend(path.parent / name for name in re.findall(r'^ *# *include "([^"]+)"', texts[-1], re.MULTILINE))
    others = sorted({name for text in texts for name in re.findall(r"^ *# *include <([^>]+)>", text, re.MULTILINE)})
    lines = [f"#if __has_include(<{name}>)\n#include <{name}>\n#endif\n" for name in others]
    lines += [f'#include "{HERE / "poison_late.hpp"}"\n', *(f"#include <kvq/{header}>\n" for header in headers)]
    lines += ["#if !defined(slots) || !defined(min) || !defined(max)\n#error something undefined the poison\n#endif\n"]
    source = pathlib.Path(folder) / f"poisoned.{suffix}"
    source.write_text("".join(lines))
    return source


def machine_of(compiler):
    return subprocess.run([compiler, "-dumpmachine"], capture_output=True, text=True).stdout.split("-")[0]


def compile_poisoned(compiler, flags, include, headers, folder):
    source = write_poisoned(include, headers, folder, "cpp", machine_of(compiler))
    command = [compiler, "-std=c++20", "-fsyntax-only", *warnings_of(compiler), *flags, "-I", str(include), str(source)]
    return "poisoned", subprocess.run(command, capture_output=True, text=True)


def compile_poisoned_device(compiler, flags, include, headers, folder):
    source = write_poisoned(include, headers, folder, "cu", platform.machine())
    command = [compiler, *DEVICE_FLAGS, *flags, "-I", str(include)]
    command += ["-c", "-o", f"{source}.o", str(source)]
    return "poisoned", subprocess.run(command, capture_output=True, text=True)


def main():
    arguments = sys.argv[1:]
    include = pathlib.Path(arguments.pop(0))
    left_out = []
    while arguments[0] == "--without":
        left_out.extend(THIRD_PARTY[arguments[1]])
        del arguments[:2]
    together_only = arguments[0] == "--together"
    compiler, *flags = arguments[together_only:]

    root = include / "kvq"
    graph = include_graph(root)
    headers = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.hpp"))
    device_headers = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.cuh"))
    # Plain C++ that needs the toolkit's headers: here those of tests/gpu/emulated.
    device_headers += [header for header in headers if TOOLKIT in graph.of(header)]
    headers = [header for header in headers if TOOLKIT not in graph.of(header)]
    device_headers = [header for header in device_headers if not header.startswith(tuple(left_out))]

    with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        if "nvcc" in os.path.basename(compiler):
            alone = [header for header in device_headers if header.startswith(THIRD_PARTY["nccl"]) or header == "cuda/arch/ptx.cuh"]
            groups = [[header for header in headers if header.startswith(DEVICE)], *graph.chains(alone)]
            jobs = [pool.submit(compile_device, compiler, flags, include, group, folder) for group in groups if group]
            everything = groups[0] + [header for header in device_headers if header not in alone]
            jobs.append(pool.submit(compile_poisoned_device, compiler, flags, include, everything, folder))
        else:
            machine = machine_of(compiler)
            jobs, together, alone = [], [], {}
            for header in headers:
                processor, extra = INSTRUCTION_SETS.get(header.removesuffix(".hpp"), (machine, []))
                if processor == machine and not header.startswith(tuple(left_out)):
                    together.append(header)
                    poisoned = not header.startswith(sum(THIRD_PARTY.values(), ()))
                    alone.setdefault((poisoned, *extra), []).append(header)
            for (poisoned, *extra), group in alone.items() if not together_only else ():
                poison = ["-include", str(HERE / "poison.hpp")] if poisoned else []
                jobs += submit_chains(pool, graph, group, [compiler, *flags, *extra, "-I", str(include), *poison], folder)
            if "clang" in os.path.basename(compiler) and not together_only:
                emulated, extra = emulated_device(include, folder)
                group = [header for header in device_headers if not header.startswith(THIRD_PARTY["nccl"])]
                # Before the flags, which may name the folder of the toolkit's own headers.
                jobs += submit_chains(pool, graph, group, [compiler, *extra, *flags, "-I", str(emulated)], folder)
                # Programs without nvcc have them with kvq::library.
                group = [header for header in group if header.endswith(".hpp")]
                compiled = [compiler, *extra, *flags, "-DKVQ_COMPILED", "-I", str(emulated)]
                jobs += submit_chains(pool, graph, group, compiled, folder)
            extra = WHOLE_PROCESSOR.get(machine, [])
            jobs.append(pool.submit(compile_poisoned, compiler, [*flags, *extra], include, together, folder))
        results = [job.result() for job in jobs]

    failed = [(name, result) for name, result in results if result.returncode != 0]
    for name, result in failed:
        print(f"---- {name}\n{result.stdout}{result.stderr}")
    print(f"{len(results) - len(failed)} of {len(results)} compile with {compiler}")
    return 1 if failed or not results else 0


if __name__ == "__main__":
    sys.exit(main())
