"""kvq._abi against tests/c_interface/abi.txt, the functions, structs and constants of kvq.h as a C compiler sees them."""
import ctypes
import pathlib
import re
import unittest

from kvq import _abi

ROOT = pathlib.Path(__file__).resolve().parents[3]
ABI = (ROOT / "tests/c_interface/abi.txt").read_text()
HANDLES = set(re.findall(r"typedef struct (\w+) \1;", (ROOT / "include/kvq/kvq.h").read_text()))
STRUCTS = {name: c for name, c in vars(_abi).items() if name.startswith("kvq_") and isinstance(c, type)}


def c_type(text):
    """The ctypes of a parameter."""
    text = re.sub(r"\bconst\b", " ", text)
    stars = text.count("*")
    base = text.replace("*", " ").split()[0]
    if base in HANDLES:
        return [None, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p)][stars]
    if base in ("void", "char") and stars == 1:
        return {"void": ctypes.c_void_p, "char": ctypes.c_char_p}[base]
    if base in ("kvq_write", "kvq_read"):
        return getattr(_abi, base[4:] + "_function")
    of = {"int32_t": ctypes.c_int32, "int64_t": ctypes.c_int64, "size_t": ctypes.c_size_t, "double": ctypes.c_double,
          "kvq_role": ctypes.c_int32, "kvq_status": ctypes.c_int32, **STRUCTS}[base]
    return ctypes.POINTER(of) if stars else of


class Abi(unittest.TestCase):
    def test_functions(self):
        found = re.findall(r"^function (.+?)\s*(kvq_\w+)\((.*)\)$", ABI, re.M)
        self.assertGreater(len(found), 80)
        self.assertEqual(sorted(name for _, name, _ in found), sorted([*_abi.FUNCTIONS, *_abi.TEXTS]))
        for result, name, parameters in found:
            types = [c_type(p) for p in parameters.split(",")] if parameters != "void" else []
            if name in _abi.FUNCTIONS:
                self.assertEqual(result, "kvq_status", name)
                declared = _abi.FUNCTIONS[name]
            else:
                declared_result, declared = _abi.TEXTS[name]
                self.assertIs(declared_result, ctypes.c_char_p if "*" in result else ctypes.c_int32, name)
            self.assertEqual(len(declared), len(types), name)
            for i, (here, there) in enumerate(zip(declared, types)):
                # Bytes of Python are passed as char*.
                same = here is there or (there is ctypes.c_void_p and here is ctypes.c_char_p)
                self.assertTrue(same, f"{name}, argument {i}: {here}, in C {there}")

    def test_constants(self):
        found = re.findall(r"^constant KVQ_(\w+): (-?\d+)$", ABI, re.M)
        self.assertGreater(len(found), 30)
        for name, value in found:
            self.assertEqual(getattr(_abi, name), int(value), name)

    def test_structs(self):
        lines = []
        for name, c in STRUCTS.items():
            lines.append(f"struct {name}: {ctypes.sizeof(c)} bytes")
            lines += [f"  {member}: {getattr(c, member).offset}, {ctypes.sizeof(of)} bytes" for member, of in c._fields_]
        self.assertEqual(lines, re.findall(r"^struct .*|^  .*", ABI, re.M))


if __name__ == "__main__":
    unittest.main()
