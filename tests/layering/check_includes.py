#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Checks that includes between the folders of the library point only down, and a few rules that keep it light.

check_includes.py <include/kvq>
"""

import pathlib
import re
import sys

# What a layer may include besides itself; a layer is the longest key that its path starts with.
BASE = {"version", "config"}
CODES = BASE | {"core", "pack", "quant", "schemes"}
# What a format is, without any kernel: all that the floors above a block see.
FORMAT = BASE | {"core", "format/format", "format/format_names", "format/bounds", "format/builtin_format", "format/latent", "format/planes"}
KERNELS = CODES | FORMAT
DEVICE = CODES | {"cuda/arch", "cuda/layout"}
# The quantizers' limits and the layout of 16-bit pages; no scheme is a template argument here.
CACHE = CODES | FORMAT | {"format/format_table", "page", "state", "attention", "cache/key_statistics", "cache/layers", "cache/requantize_request", "cache"}
CUDA = DEVICE | {"cuda/decode", "cuda/prefill", "cuda/latent", "cuda/select", "cuda/store", "cuda/quantize", "cuda/host"}
# Ranks over NCCL, above the cache on the device.
NCCL = CACHE | CUDA | {"adapters/distributed/nccl"}
SHARED = CACHE | NCCL  # what all of these sets hold
ALLOWED = {
    "version": set(),
    "config": {"version"},
    "core": BASE,
    "pack": BASE | {"core"},
    "quant": BASE | {"core", "pack"},
    "schemes": BASE | {"core", "pack", "quant"},
    "format/format": BASE | {"core"},
    "format/format_names": BASE | {"core", "format/format"},
    "format/check_products": FORMAT,
    "format/format_table": FORMAT | {"format/check_products"},
    "format/bounds": FORMAT,
    "format/latent": CODES | FORMAT,
    "format/planes": CODES | FORMAT,
    "format/builtin_format": FORMAT,
    "page": BASE | {"core", "format/format"},
    "state": BASE | {"core", "page"},
    "cpu": CODES,
    "cpu/arch": BASE | {"core"},
    "cpu/product": CODES,
    "cpu/channels": CODES | {"cpu", "cpu/product"},
    "cpu/quantize": CODES | {"cpu", "cpu/channels", "cpu/parameter_sections"},
    "cpu/dequantize": CODES | {"cpu/channels", "cpu/parameter_sections", "cpu/product"},
    "cpu/window": CODES | {"cpu", "cpu/product"},
    "cpu/kernel_table": CODES | {"cpu/product"},
    "cpu/transformed": CODES | {"cpu", "cpu/quantize"},
    "cpu/listed_tokens": CODES | {"cpu/transformed"},
    "cpu/parameter_sections": CODES | {"cpu", "cpu/kernel_table"},
    "cpu/channel_kernels": CODES | {"cpu/quantize", "cpu/dequantize", "cpu/transformed"},
    "cpu/group_kernels": CODES | {"cpu/kernel_table", "cpu/quantize", "cpu/dequantize", "cpu/transformed"},
    "cpu/rows": CODES | {"cpu"},
    "cpu/float_rows": CODES | {"cpu", "cpu/kernel_table", "cpu/product", "cpu/rows", "cpu/transformed", "cpu/window"},
    "cpu/block_product": CODES | {"cpu/float_rows", "cpu/kernel_table", "cpu/product", "cpu/rows", "cpu/window"},
    "cpu/describe": KERNELS | {"cpu"},
    "cpu/scalar": KERNELS | {"cpu", "cpu/describe"},
    "cpu/vector_backend": KERNELS | {"cpu/describe", "cpu/kernel_table", "cpu/scalar", "cpu/transformed"},
    "cpu/library_kernels": KERNELS | {"cpu/channels", "cpu/quantize", "cpu/vector_backend"},
    "cpu/simd_backend": KERNELS | {"cpu/arch", "cpu/float_rows", "cpu/window", "cpu/channel_kernels", "cpu/group_kernels",
                                   "cpu/vector_backend"},
    "cpu/simd": KERNELS | {"cpu/library_kernels", "cpu/simd_backend", "format/make_format"},
    "cuda/arch": BASE | {"core"},
    "cuda/layout": DEVICE,
    "cuda/decode": DEVICE | {"cuda/store"},
    "cuda/prefill": DEVICE | {"cuda/decode"},
    "cuda/latent": DEVICE | {"cuda/decode", "cuda/prefill"},
    "cuda/select": DEVICE | {"cuda/decode", "cuda/store"},
    "cuda/store": DEVICE | {"state"},
    "cuda/quantize": DEVICE,
    "cuda/host": CUDA | {"page", "state", "format/format_names", "cache/key_statistics", "cache/layers", "cache/requantize_request"},
    "cuda/host/offload": CACHE | CUDA,
    "cuda/host/host_pages": CACHE | CUDA | {"cpu/scalar", "cuda/host/offload", "format/make_format"},
    "cuda/host/prefixes": CACHE | CUDA | {"cuda/host/host_pages", "policy"},
    "cuda/host/self_calibration": CACHE | CUDA | {"cuda/host/host_pages", "policy"},
    "cuda/host/save": CACHE | CUDA | {"cuda/host/host_pages", "io"},
    "cuda": CUDA,
    "format/make_format": KERNELS | {"cpu", "cpu/scalar", "cpu/block_product", "cpu/listed_tokens", "cpu/product", "cpu/transformed"},
    "format/builtin_schemes": KERNELS | {"format/make_format"},
    "format/builtin_kernels": KERNELS | {"cpu/channel_kernels", "cpu/group_kernels", "format/make_format"},
    "format/define_builtin_formats": KERNELS | {"cpu/simd", "format/builtin_schemes"},
    "format/find_format": CACHE,
    "attention": BASE | {"core", "format/format", "format/format_table", "page"},
    "cache/requantize_request": BASE,
    "cache/key_statistics": BASE,
    "cache/layers": BASE | {"core", "page", "state", "attention"},
    "cache": CACHE,
    "policy": CACHE,
    "adapters": CACHE,
    "adapters/sequence_table": CACHE,
    "adapters/sequence_state": CACHE | {"io", "adapters/sequence_table"},
    "adapters/ggml": CACHE | {"adapters/sequence_table"},
    "adapters/distributed": CACHE | {"io"},
    "adapters/distributed/nccl": CUDA,
    "adapters/distributed/nccl_attention": NCCL | {"adapters/distributed"},
    "adapters/distributed/peer_attention": NCCL | {"adapters/distributed/nccl_attention"},
    "adapters/distributed/nccl_prefill": NCCL | {"adapters/distributed/nccl_attention"},
    "adapters/distributed/nccl_wire": NCCL,
    "adapters/distributed/nccl_pages": NCCL | {"adapters/distributed/nccl_wire"},
    "adapters/distributed/nccl_transfer": NCCL | {"adapters/distributed/nccl_pages"},
    "policy/prefix_tiers": CACHE | {"io", "policy"},
    "io": CACHE,
    "estimate": CACHE,
    "kvq": CACHE | {"estimate"},
    "kvq.h": set(),
    "kvq_cuda.h": {"kvq.h"},
}

# Headers of others: pattern, and the only paths where it may stand (none: nowhere).
RESTRICTED = [
    (r"ranges|iostream|regex", ()),
    (r"random", ("policy/prefix_tiers",)),  # names of folders that nobody can foretell
    (r"xsimd/.*", ("cpu/simd", "cpu/arch")),
    (r"immintrin\.h|x86intrin\.h|[a-z]mmintrin\.h|arm_neon\.h", ("cpu/arch",)),
    (r"(unsupported/)?Eigen/.*", ("adapters/eigen",)),
    (r"nlohmann/.*", ("io/safetensors",)),
    (r"mpi\.h", ("adapters/distributed/mpi",)),
    (r"ggml.*", ("adapters/ggml",)),
    (r"nccl\.h", ("adapters/distributed/nccl",)),
    (r"cuda.*|cub/.*|cooperative_groups.*|mma\.h", ("cuda", "config", "core")),
]
# What the umbrella leaves to the user, because it needs a third party.
NOT_IN_UMBRELLA = (
    "cpu/simd", "cpu/arch", "cuda", "adapters/eigen",
    "io/safetensors", "io/saved_sequence", "io/saved_index", "io/save", "io/restore", "io/file",
    "policy/prefix_tiers", "adapters/ggml", "adapters/distributed",
)
# Headers of the C interface are as long as it is.
LONG = ("kvq.h", "kvq_cuda.h")
# Macros of optional instruction sets make two objects of one program see different code under one name.
ISA_MACRO = re.compile(r"__(AVX|SSE3|SSSE3|SSE4|FMA__|F16C__|BMI|ARM_FEATURE)\w*")
ISA_ALLOWED = ("cpu/simd", "cpu/arch", "config")

MAX_LINES, MAX_COLUMNS = 600, 110

INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]')


def layer_of(path):
    """'core/float16.hpp' -> 'core', 'cpu/arch/arch.hpp' -> 'cpu/arch', 'config.hpp' -> 'config'."""
    stem = re.sub(r"(-inl)?\.(hpp|cuh)$", "", path)
    matches = [name for name in ALLOWED if stem == name or stem.startswith(name + "/")]
    return max(matches, key=len) if matches else None


def header_of(path, files):
    """The header whose definitions a file holds: of cache/sequence_steps-inl.hpp cache/sequence.hpp. Otherwise the file itself."""
    stem, inl, end = path.partition("-inl.")
    while inl and "_" in stem and f"{stem}.{end}" not in files:
        stem = stem.rpartition("_")[0]
    return f"{stem}.{end}" if inl else path


def read(root):
    """path -> lines without comments."""
    files = {}
    for path in sorted([*root.rglob("*.h"), *root.rglob("*.hpp"), *root.rglob("*.cuh")]):
        text = path.read_text()
        without_blocks = re.sub(r"/\*.*?\*/", lambda m: "\n" * m.group().count("\n"), text, flags=re.S)
        files[path.relative_to(root).as_posix()] = [re.sub(r"//.*", "", line) for line in without_blocks.split("\n")]
    return files


def check(root):
    errors = []
    files = read(root)
    edges = {path: [] for path in files}

    for path, lines in files.items():
        layer = layer_of(path)
        if layer is None:
            errors.append(f"{path}: belongs to no layer (see ALLOWED in check_includes.py)")
            continue
        if len(lines) - 1 > MAX_LINES and path not in LONG:
            errors.append(f"{path}: {len(lines) - 1} lines, more than {MAX_LINES}")

        errors += [f"{path}:{number}: {len(line)} columns, more than {MAX_COLUMNS}"
                   for number, line in enumerate((root / path).read_text().split("\n"), 1) if len(line) > MAX_COLUMNS]
        for number, line in enumerate(lines, 1):
            where = f"{path}:{number}"
            macro = ISA_MACRO.search(line)
            if macro and not path.startswith(ISA_ALLOWED):
                errors.append(f"{where}: {macro.group()} belongs into {' or '.join(ISA_ALLOWED)}")

            include = INCLUDE.match(line)
            if not include:
                continue
            quote, name = include.groups()
            target = name.removeprefix("kvq/") if name.startswith("kvq/") else None
            if quote == '"' and target is None:
                target = (root / path).parent.joinpath(name).resolve()
                target = target.relative_to(root.resolve()).as_posix() if target.is_relative_to(root.resolve()) else name
            if target is None:
                for pattern, places in RESTRICTED:
                    if re.fullmatch(pattern, name) and not path.startswith(places or "\0"):
                        errors.append(f"{where}: <{name}> belongs into {' or '.join(places) or 'no header'}")
                continue

            if target not in files:
                errors.append(f"{where}: {name} does not exist")
                continue
            # x-inl.hpp and x_part-inl.hpp hold what x.hpp declares, and are included behind it: all are one header here.
            if header_of(target, files) == header_of(path, files):
                continue
            edges[header_of(path, files)].append(target)
            below = layer_of(target)
            if below != layer and below not in ALLOWED[layer]:
                errors.append(f"{where}: {layer} must not include {below} ({name})")
            if layer == "kvq" and target.startswith(NOT_IN_UMBRELLA):
                errors.append(f"{where}: {name} needs a third party and stays out of the umbrella")

    # What a layer may include beyond the sets above it does include.
    used = {(layer_of(path), layer_of(target)) for path, targets in edges.items() for target in targets}
    for layer, allowed in ALLOWED.items():
        errors += [f"{layer} no longer includes {below} (ALLOWED in check_includes.py)"
                   for below in sorted(allowed - SHARED) if (layer, below) not in used]

    errors += cycles(edges)
    return errors, files, edges


def cycles(edges):
    errors, done, stack = [], set(), []

    def visit(path):
        if path in stack:
            errors.append("circle: " + " -> ".join([*stack[stack.index(path):], path]))
        elif path not in done:
            stack.append(path)
            for target in edges[path]:
                visit(target)
            stack.pop()
            done.add(path)

    for path in edges:
        visit(path)
    return errors


def main():
    root = pathlib.Path(sys.argv[1])
    errors, files, edges = check(root)
    for error in errors:
        print(error)
    lengths = sorted(len(lines) - 1 for lines in files.values())
    if not lengths:
        print(f"no headers in {root}")
        return 1
    print(f"{len(files)} headers, {sum(map(len, edges.values()))} includes between them, "
          f"median {lengths[len(lengths) // 2]} lines, longest {lengths[-1]}; {len(errors)} errors")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
