#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Files that cannot read the version from include/kvq/version.hpp have the same one, and the namespace of the sources is that version's.

    check.py REPOSITORY
"""
import pathlib
import re
import sys

# A file, and what stands before and behind the version in it.
COPIES = (
    ("CHANGELOG.md", r"^## (\S+)"),
    ("CITATION.cff", r"^version: (\S+)"),
    ("bindings/rust/kvq/Cargo.toml", r'^version = "(\S+)"'),
    ("bindings/rust/kvq/Cargo.toml", r'kvq-sys", version = "(\S+)"'),
    ("bindings/rust/kvq-sys/Cargo.toml", r'^version = "(\S+)"'),
    ("bindings/rust/Cargo.lock", r'^name = "kvq"\nversion = "(\S+)"'),
    ("bindings/rust/Cargo.lock", r'^name = "kvq-sys"\nversion = "(\S+)"'),
    ("packaging/debian/changelog", r"^kvq \((\S+)-\d+\)"),
    ("packaging/vcpkg/kvq/vcpkg.json", r'"version-semver": "(\S+)"'),
    ("README.md", r"find_package\(kvq (\d+\.\d+)"),
    ("docs/guide/quick_start.md", r"find_package\(kvq (\d+\.\d+)"),
    ("examples/05_include_from_another_build/CMakeLists.txt", r"find_package\(kvq (\d+\.\d+)"),
    ("packaging/debian/rules", r"libkvq0 \(>= (\d+\.\d+)\)"),
    ("packaging/debian/libkvq0.lintian-overrides", r"sonames libkvq(\d+\.\d+)"),
)


def main():
    root = pathlib.Path(sys.argv[1])
    version = ".".join(re.findall(r"#define KVQ_VERSION_\w+ (\d+)", (root / "include/kvq/version.hpp").read_text()))
    wrong = 0
    for name, pattern in COPIES:
        found = re.search(pattern, (root / name).read_text(), re.M)
        if not found:
            print(f"{name}: no version: {pattern}")
        elif found[1] != version[: len(found[1])] or found[1].count(".") < 1:
            print(f"{name}: {found[1]} is not {version}")
        else:
            continue
        wrong += 1
    print(f"{len(COPIES) - wrong} of {len(COPIES)} copies are those of version {version}")
    # The namespace of what programs and the library exchange (include/kvq/config.hpp); src/exported.map names it, too.
    namespace = "v" + version[: version.rindex(".")].replace(".", "_")
    files = [path for folder in ("include", "src") for path in (root / folder).rglob("*") if path.is_file()]
    others = {f"{path.relative_to(root)}: {name}" for path in files for name in re.findall(r"\bv\d+_\d+(?=\b|_#)", path.read_text()) if name != namespace}
    for other in sorted(others):
        print(f"{other} is not {namespace}")
    return wrong != 0 or len(others) > 0


sys.exit(main())
