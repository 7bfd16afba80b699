"""kvq._abi and kvq._cuda_abi, which bindings/generate.py writes, against tests/c_interface/abi.txt and abi_cuda.txt: structs and constants
as a C compiler sees them."""
import ctypes
import pathlib
import re
import unittest

from kvq import _abi, _cuda_abi

ROOT = pathlib.Path(__file__).resolve().parents[3]


HALVES = [(_abi, (ROOT / "tests/c_interface/abi.txt").read_text()), (_cuda_abi, (ROOT / "tests/c_interface/abi_cuda.txt").read_text())]


class Abi(unittest.TestCase):
    def test_constants(self):
        for module, text in HALVES:
            found = re.findall(r"^constant KVQ_(\w+): (-?\d+)$", text, re.M)
            self.assertGreater(len(found), 0)
            for name, value in found:
                self.assertEqual(getattr(module, name), int(value), name)

    def test_structs(self):
        for module, text in HALVES:
            lines = []
            for name, struct in vars(module).items():
                if name.startswith("kvq_") and isinstance(struct, type) and struct.__module__ == module.__name__:
                    lines.append(f"struct {name}: {ctypes.sizeof(struct)} bytes")
                    lines += [f"  {m}: {getattr(struct, m).offset}, {ctypes.sizeof(of)} bytes" for m, of in struct._fields_]
            self.assertEqual(lines, re.findall(r"^struct .*|^  .*", text, re.M))


if __name__ == "__main__":
    unittest.main()
