"""kvq._abi and kvq._cuda_abi against tests/c_interface/abi.txt and abi_cuda.txt: the functions, structs and constants of kvq.h and
kvq_cuda.h as a C compiler sees them."""
import ctypes
import pathlib
import re
import unittest

from kvq import _abi, _cuda_abi

ROOT = pathlib.Path(__file__).resolve().parents[3]


class Half:
    """A header, what a C compiler says of it, and the module that repeats it."""

    def __init__(self, header, abi, module, least):
        self.module, self.least = module, least
        self.text = (ROOT / "tests/c_interface" / abi).read_text()
        self.handles = set(re.findall(r"typedef struct (\w+) \1;", (ROOT / "include/kvq" / header).read_text()))
        self.structs = {name: c for name, c in vars(module).items() if name.startswith("kvq_") and isinstance(c, type)}


HALVES = [Half("kvq.h", "abi.txt", _abi, (80, 30)), Half("kvq_cuda.h", "abi_cuda.txt", _cuda_abi, (20, 0))]
HANDLES = HALVES[0].handles | HALVES[1].handles
STRUCTS = {**HALVES[0].structs, **HALVES[1].structs}


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
          "uint32_t": ctypes.c_uint32, "uint64_t": ctypes.c_uint64, "kvq_role": ctypes.c_int32, "kvq_status": ctypes.c_int32,
          **STRUCTS}[base]
    return ctypes.POINTER(of) if stars else of


class Abi(unittest.TestCase):
    def test_functions(self):
        for half in HALVES:
            found = re.findall(r"^function (.+?)\s*(kvq_\w+)\((.*)\)$", half.text, re.M)
            functions, texts = half.module.FUNCTIONS, getattr(half.module, "TEXTS", {})
            self.assertGreater(len(found), half.least[0])
            self.assertEqual(sorted(name for _, name, _ in found), sorted([*functions, *texts]))
            for result, name, parameters in found:
                types = [c_type(p) for p in parameters.split(",")] if parameters != "void" else []
                if name in functions:
                    self.assertEqual(result, "kvq_status", name)
                    declared = functions[name]
                else:
                    declared_result, declared = texts[name]
                    self.assertIs(declared_result, ctypes.c_char_p if "*" in result else ctypes.c_int32, name)
                self.assertEqual(len(declared), len(types), name)
                for i, (here, there) in enumerate(zip(declared, types)):
                    # Bytes of Python are passed as char*.
                    same = here is there or (there is ctypes.c_void_p and here is ctypes.c_char_p)
                    self.assertTrue(same, f"{name}, argument {i}: {here}, in C {there}")

    def test_constants(self):
        for half in HALVES:
            found = re.findall(r"^constant KVQ_(\w+): (-?\d+)$", half.text, re.M)
            self.assertGreater(len(found), half.least[1])
            for name, value in found:
                self.assertEqual(getattr(half.module, name), int(value), name)

    def test_structs(self):
        for half in HALVES:
            lines = []
            for name, c in half.structs.items():
                if name == "kvq_tensor" and half.module is not _abi:
                    continue
                lines.append(f"struct {name}: {ctypes.sizeof(c)} bytes")
                lines += [f"  {member}: {getattr(c, member).offset}, {ctypes.sizeof(of)} bytes" for member, of in c._fields_]
            self.assertEqual(lines, re.findall(r"^struct .*|^  .*", half.text, re.M))

    def test_plain_tensor(self):
        self.assertEqual([(n, ctypes.sizeof(t)) for n, t in _cuda_abi.plain_tensor._fields_],
                         [(n, ctypes.sizeof(t)) for n, t in _abi.kvq_tensor._fields_])


if __name__ == "__main__":
    unittest.main()
