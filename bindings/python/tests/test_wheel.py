"""The wheel and the source archive that build_backend.py makes; the library is the one that the other tests use."""
import base64
import hashlib
import os
import pathlib
import subprocess
import sys
import tarfile
import tempfile
import unittest
import zipfile

PACKAGE = pathlib.Path(__file__).resolve().parents[1]
LIBRARY = os.environ["KVQ_LIBRARY_PATH"]


def build(function, package, out, settings=None):
    """Calls the backend of a package as pip does: in a process of its own, in the folder of the package."""
    code = f"import build_backend; print(build_backend.{function}({str(out)!r}, {settings!r}))"
    made = subprocess.run([sys.executable, "-c", code], cwd=package, check=True, capture_output=True, text=True)
    return out / made.stdout.strip()


class Wheel(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def test_wheel_holds_all_and_runs(self):
        wheel = build("build_wheel", PACKAGE, self.folder, {"library": LIBRARY})
        there = self.folder / "there"
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(there)
            names = set(archive.namelist())
        expected = {"kvq/" + path.name for path in (PACKAGE / "src/kvq").iterdir() if path.is_file()}
        self.assertLessEqual(expected, names)
        self.assertEqual((there / "kvq/libkvq.so").read_bytes(), pathlib.Path(LIBRARY).read_bytes())
        record = next(there.glob("kvq-*.dist-info/RECORD"))
        recorded = set()
        for line in record.read_text().splitlines():
            name, digest, size = line.rsplit(",", 2)
            recorded.add(name)
            if name != str(record.relative_to(there)):
                data = (there / name).read_bytes()
                self.assertEqual((digest, size), ("sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("="),
                                                  str(len(data))))
        self.assertEqual(recorded, names)
        environment = {name: value for name, value in os.environ.items() if name != "KVQ_LIBRARY_PATH"}
        environment["PYTHONPATH"] = str(there)
        subprocess.run([sys.executable, PACKAGE / "examples/guide.py"], env=environment, check=True, stdout=subprocess.DEVNULL)

    def test_source_archive_builds_the_same_wheel(self):
        archive = build("build_sdist", PACKAGE, self.folder)
        with tarfile.open(archive) as opened:
            opened.extractall(self.folder)
        package = self.folder / archive.name[: -len(".tar.gz")]
        for name in ("PKG-INFO", "sources/CMakeLists.txt", "sources/cmake/kvqConfig.cmake.in", "sources/include/kvq/kvq.h", "sources/src/kvq.cpp"):
            self.assertTrue((package / name).is_file(), name)
        wheels = []
        for name, of in (("here", PACKAGE), ("there", package)):
            (self.folder / name).mkdir()
            wheels.append(build("build_wheel", of, self.folder / name, {"library": LIBRARY}).read_bytes())
        self.assertEqual(*wheels)

    def test_unknown_setting_is_refused(self):
        with self.assertRaises(subprocess.CalledProcessError) as error:
            build("build_wheel", PACKAGE, self.folder, {"libary": LIBRARY})
        self.assertIn("no such setting: libary", error.exception.stderr)

    def test_library_that_python_would_not_find_is_refused(self):
        for name in ("libkvq.so", "libkvq.so.0"):
            with self.subTest(name):
                library = self.folder / name
                if name.endswith("0"):
                    library.write_bytes(b"")
                with self.assertRaises(subprocess.CalledProcessError) as error:
                    build("build_wheel", PACKAGE, self.folder, {"library": str(library)})
                self.assertIn(f"here: {library}", error.exception.stderr)


if __name__ == "__main__":
    unittest.main()
