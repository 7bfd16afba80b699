"""kvq._abi and kvq._cuda_abi, which bindings/generate.py writes, against tests/c_interface/abi.txt and abi_cuda.txt: structs and constants
as a C compiler sees them. And every name that a module takes from another one exists, in modules that need torch as well."""
import ast
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

    def test_names(self):
        package = pathlib.Path(_abi.__file__).parent
        defined = {}
        trees = {path.stem: ast.parse(path.read_text()) for path in package.glob("*.py")}
        for module, tree in trees.items():
            names = set()
            for node in ast.walk(tree):
                if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                    names.add(node.name)
                elif isinstance(node, (ast.Import, ast.ImportFrom)):
                    names.update(a.asname or a.name for a in node.names)
                elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    names.add(node.id)
            defined[module] = names
        checked = 0
        for module, tree in trees.items():
            modules = {}  # as this file calls them
            for node in ast.walk(tree):
                if not isinstance(node, ast.ImportFrom) or node.level != 1:
                    continue
                for a in node.names:
                    if node.module is None and a.name in trees:
                        modules[a.asname or a.name] = a.name
                    elif node.module in trees:
                        self.assertIn(a.name, defined[node.module], f"{module}.py takes it from {node.module}.py")
                        checked += 1
            for node in ast.walk(tree):
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
                    other = modules[node.value.id]
                    self.assertIn(node.attr, defined[other], f"{module}.py, line {node.lineno}: {other}.{node.attr}")
                    checked += 1
        self.assertGreater(checked, 100)


if __name__ == "__main__":
    unittest.main()
