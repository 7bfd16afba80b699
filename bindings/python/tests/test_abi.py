"""kvq._abi against include/kvq/kvq.h: functions, constants, and the layout of structs as a C compiler sees it."""
import ctypes
import os
import pathlib
import re
import shutil
import subprocess
import tempfile
import unittest

from kvq import _abi

INCLUDE = pathlib.Path(__file__).resolve().parents[3] / "include"
HEADER = re.sub(r"//[^\n]*|/\*.*?\*/", "", (INCLUDE / "kvq/kvq.h").read_text(), flags=re.S)
STRUCTS = {name: c for name, c in vars(_abi).items() if name.startswith("kvq_") and isinstance(c, type)}
HANDLES = set(re.findall(r"typedef struct (\w+) \1;", HEADER))


def c_type(text):
    """The ctypes of a parameter."""
    text = re.sub(r"\bconst\b", " ", text)
    stars = text.count("*")
    base, *_ = text.replace("*", " ").split()
    if base in HANDLES:
        return [None, "handle", ctypes.POINTER(ctypes.c_void_p)][stars]
    if base in ("void", "char") and stars == 1:
        return {"void": ctypes.c_void_p, "char": ctypes.c_char_p}[base]
    if base in ("kvq_write", "kvq_read"):
        return getattr(_abi, base[4:] + "_function")
    of = {"int32_t": ctypes.c_int32, "int64_t": ctypes.c_int64, "size_t": ctypes.c_size_t, "double": ctypes.c_double,
          "kvq_role": ctypes.c_int32, "kvq_status": ctypes.c_int32, **STRUCTS}[base]
    return ctypes.POINTER(of) if stars else of


class Abi(unittest.TestCase):
    def test_functions(self):
        found = re.findall(r"KVQ_API\s+(const char\*|\w+)\s+(kvq_\w+)\(([^)]*)\)", HEADER)
        self.assertGreater(len(found), 80)
        names = [name for _, name, _ in found]
        self.assertEqual(sorted(names), sorted([*_abi.FUNCTIONS, *_abi.TEXTS]))
        for result, name, parameters in found:
            types = [c_type(p) for p in parameters.split(",")] if parameters.strip() != "void" else []
            if name in _abi.FUNCTIONS:
                self.assertEqual(result, "kvq_status", name)
                declared = _abi.FUNCTIONS[name]
            else:
                declared_result, declared = _abi.TEXTS[name]
                self.assertIs(declared_result, ctypes.c_char_p if "*" in result else ctypes.c_int32, name)
            self.assertEqual(len(declared), len(types), name)
            for i, (is_, must) in enumerate(zip(declared, types)):
                # Bytes of Python are passed as char*.
                same = is_ is must or (must == "handle" and is_ is ctypes.c_void_p) or (
                    must is ctypes.c_void_p and is_ is ctypes.c_char_p)
                self.assertTrue(same, f"{name}, argument {i}: {is_}, in C {must}")

    def test_constants(self):
        enums = "".join(re.findall(r"enum \{(.*?)\}", HEADER, re.S))
        found = re.findall(r"KVQ_(\w+) =\s*(-?\d+)", enums)
        found += re.findall(r"#define KVQ_(NONE|ALL_LAYERS) \((-?\d+)\)", HEADER)
        found += re.findall(r"#define KVQ_(ABI_VERSION) (\d+)", HEADER)
        self.assertEqual(len(found), enums.count("=") + 3)
        for name, value in found:
            self.assertEqual(getattr(_abi, name), int(value), name)

    def test_structs(self):
        compiler = os.environ.get("CC") or shutil.which("cc")
        if not compiler:
            self.skipTest("there is no C compiler")
        with_body = set(re.findall(r"typedef struct (\w+) \{", HEADER))
        self.assertEqual(with_body, set(STRUCTS))
        lines = []
        for name, c in STRUCTS.items():
            lines.append(f'printf("{name} %zu\\n", sizeof({name}));')
            for member in [f[0] for f in c._fields_]:
                lines.append(f'printf("{name}.{member} %zu %zu\\n", offsetof({name}, {member}), sizeof((({name}*)0)->{member}));')
        with tempfile.TemporaryDirectory() as folder:
            source, program = pathlib.Path(folder, "layout.c"), pathlib.Path(folder, "layout")
            source.write_text("#include <kvq/kvq.h>\n#include <stdio.h>\nint main(void) {\n" + "\n".join(lines) + "\nreturn 0;\n}\n")
            subprocess.run([compiler, "-std=c99", "-I", str(INCLUDE), "-o", str(program), str(source)], check=True)
            printed = subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout.split("\n")
        expected = []
        for name, c in STRUCTS.items():
            expected.append(f"{name} {ctypes.sizeof(c)}")
            for f in c._fields_:
                expected.append(f"{name}.{f[0]} {getattr(c, f[0]).offset} {ctypes.sizeof(f[1])}")
        self.assertEqual(printed[:-1], expected)

    def test_members(self):
        """Members in the order and the number of the header, so that none is missing at an end that padding hides."""
        for name, body in re.findall(r"typedef struct (\w+) \{(.*?)\n\} \1;", HEADER, re.S):
            body = re.sub(r"\(\*(\w+)\)\([^)]*\)", r"\1", body)  # functions
            members = [re.sub(r"\[.*?\]", "", part).split()[-1].lstrip("*")
                       for line in body.split(";") if line.strip() for part in line.split(",")]
            self.assertEqual(members, [f[0] for f in STRUCTS[name]._fields_], name)


if __name__ == "__main__":
    unittest.main()
