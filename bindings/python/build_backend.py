"""Builds wheels and source archives of kvq: pip and `python3 -m build` call these functions (PEP 517). The standard library is all
they need, so nothing is fetched.

    pip wheel bindings/python                                    compiles the library with CMake: all formats, all instruction sets
    pip wheel bindings/python --config-settings=cmake.define.KVQ_LIBRARY_FORMATS=std4      options of CMake
    pip wheel bindings/python --config-settings=library=$PWD/build/src/libkvq.so           a library that is there already
    python3 -m build --sdist bindings/python                     an archive with the sources of the library

A wheel serves every Python 3 (the package has no extension module) on systems like the one that it was built on.
"""
import base64
import hashlib
import io
import os
import pathlib
import re
import shutil
import subprocess
import sysconfig
import tarfile
import tempfile
import zipfile

HERE = pathlib.Path(__file__).resolve().parent
IN_ARCHIVE = HERE / "sources"  # of the library, in a source archive
ROOT = IN_ARCHIVE if IN_ARCHIVE.exists() else HERE.parents[1]
LIBRARIES = (".so", ".dylib", ".dll")
SOURCES = ("CMakeLists.txt", "LICENSE", "cmake", "include", "src")

VERSION = ".".join(re.findall(r"#define KVQ_VERSION_\w+ (\d+)", (ROOT / "include/kvq/version.hpp").read_text()))
NAME = f"kvq-{VERSION}"
INFO = f"{NAME}.dist-info"
TAG = "py3-none-" + re.sub(r"\W", "_", sysconfig.get_platform())
METADATA = f"""Metadata-Version: 2.1
Name: kvq
Version: {VERSION}
Summary: KV caches of transformers in few bits, and attention on them
License: MIT
Requires-Python: >=3.8
Provides-Extra: numpy
Requires-Dist: numpy; extra == 'numpy'
Provides-Extra: torch
Requires-Dist: torch; extra == 'torch'
Description-Content-Type: text/markdown

{(HERE / "README.md").read_text()}"""


def _files(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)


def _compile(folder, settings):
    """Compiles the library into a folder: its file."""
    options = [f"-D{key[len('cmake.define.'):]}={value}" for key, value in settings.items() if key.startswith("cmake.define.")]
    if shutil.which("ninja") and "CMAKE_GENERATOR" not in os.environ:  # a system may have no make
        options += ["-G", "Ninja"]
    build, out = os.path.join(folder, "build"), os.path.join(folder, "out")
    subprocess.check_call(["cmake", "-S", HERE, "-B", build, "-DCMAKE_BUILD_TYPE=" + os.environ.get("CMAKE_BUILD_TYPE", "Release"), *options])
    subprocess.check_call(["cmake", "--build", build, "--parallel", str(os.cpu_count() or 1)])
    subprocess.check_call(["cmake", "--install", build, "--prefix", out, "--strip"])
    return next(path for path in (pathlib.Path(out) / "kvq").iterdir() if path.suffix in LIBRARIES)


def _info():
    """Files of the folder .dist-info, but for its list of all files."""
    return {
        f"{INFO}/METADATA": METADATA.encode(),
        f"{INFO}/WHEEL": f"Wheel-Version: 1.0\nGenerator: kvq\nRoot-Is-Purelib: false\nTag: {TAG}\n".encode(),
        f"{INFO}/LICENSE": (ROOT / "LICENSE").read_bytes(),
    }


def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    """Without it pip would compile for the metadata alone."""
    for name, data in _info().items():
        path = pathlib.Path(metadata_directory, name)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
    return INFO


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    settings = config_settings or {}
    for key in settings:
        if key != "library" and not key.startswith("cmake.define."):
            raise SystemExit(f"kvq: no such setting: {key}; there are library and cmake.define.NAME")
    with tempfile.TemporaryDirectory() as folder:
        library = pathlib.Path(settings["library"]) if "library" in settings else _compile(folder, settings)
        if not library.is_file() or library.suffix not in LIBRARIES:
            raise SystemExit(f"kvq: no library that Python finds ({', '.join(LIBRARIES)}) here: {library.absolute()}")
        members = {f"kvq/{path.relative_to(HERE / 'src/kvq').as_posix()}": path.read_bytes() for path in _files(HERE / "src/kvq")}
        members["kvq/libkvq" + library.suffix if library.suffix != ".dll" else "kvq/kvq.dll"] = library.read_bytes()
    members.update(_info())
    record = f"{INFO}/RECORD"
    lines = []
    for name, data in members.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        lines.append(f"{name},sha256={digest},{len(data)}\n")
    members[record] = ("".join(lines) + f"{record},,\n").encode()
    wheel = f"{NAME}-{TAG}.whl"
    with zipfile.ZipFile(os.path.join(wheel_directory, wheel), "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            member = zipfile.ZipInfo(name)  # of one date: equal input, equal wheel
            member.compress_type, member.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
            archive.writestr(member, data)
    return wheel


def build_sdist(sdist_directory, config_settings=None):
    name = f"{NAME}.tar.gz"

    def plain(member):
        member.uid = member.gid = member.mtime = 0
        member.uname = member.gname = ""
        return None if "__pycache__" in member.name else member

    with tarfile.open(os.path.join(sdist_directory, name), "w:gz", format=tarfile.PAX_FORMAT) as archive:
        for path in ("pyproject.toml", "build_backend.py", "CMakeLists.txt", "README.md", "src/kvq"):
            archive.add(HERE / path, f"{NAME}/{path}", filter=plain)
        for path in SOURCES:
            archive.add(ROOT / path, f"{NAME}/sources/{path}", filter=plain)
        info = tarfile.TarInfo(f"{NAME}/PKG-INFO")
        info.size = len(METADATA.encode())
        archive.addfile(info, io.BytesIO(METADATA.encode()))
    return name
