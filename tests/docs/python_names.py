# SPDX-License-Identifier: MIT
"""Names of kvq that a Python file uses and the package does not have: for examples that need torch, a model or a GPU to run."""
import ast


def _dotted(node):
    """["kvq", "cuda", "Cache"] of kvq.cuda.Cache; [] of anything that does not begin with a name."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.insert(0, node.attr)
        node = node.value
    return [node.id, *parts] if isinstance(node, ast.Name) else []


class _Package:
    def __init__(self, folder):
        self.modules = {path.stem: ast.parse(path.read_text()) for path in folder.glob("*.py")}
        functions = [f for tree in self.modules.values() for f in ast.walk(tree) if isinstance(f, ast.FunctionDef)]
        self.methods = {f.name for f in functions}
        self.made_with = {a.arg for f in functions if f.name == "__init__" for a in f.args.args + f.args.kwonlyargs}

    def names(self, module):
        """What a module defines or imports."""
        for node in self.modules[module].body:
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
                yield node.name
            elif isinstance(node, (ast.ImportFrom, ast.Import)):
                yield from (alias.asname or alias.name for alias in node.names)

    def arguments(self, module, name):
        """Keywords of a class or a function, or None: those of any class, which it passes on."""
        private = [m for m in self.modules if m.startswith("_") and m != "__init__"]
        for at in [module, *private]:
            for node in self.modules[at].body:
                if isinstance(node, ast.ClassDef) and node.name == name:
                    fields = {f.target.id for f in node.body if isinstance(f, ast.AnnAssign)}  # of a dataclass
                    node = next((f for f in node.body if isinstance(f, ast.FunctionDef) and f.name == "__init__"), None)
                elif not (isinstance(node, ast.FunctionDef) and node.name == name):
                    continue
                if node is None:
                    return fields
                given = {a.arg for a in node.args.args + node.args.kwonlyargs}
                return given | self.made_with if node.args.kwarg else given
        return set()


def wrong_names(path, folder):
    """Sentences. folder: that of the package's modules."""
    package, tree = _Package(folder), ast.parse(path.read_text())
    made = {target.id for node in ast.walk(tree) if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
            and _dotted(node.value.func)[:1] == ["kvq"] for target in node.targets if isinstance(target, ast.Name)}
    for node in ast.walk(tree):
        call = node if isinstance(node, ast.Call) else None
        parts = _dotted(call.func if call else node)
        if len(parts) < 2:
            continue
        at = f"{path.name}:{node.lineno}: {'.'.join(parts)}"
        if parts[0] in made and parts[1] not in package.methods:
            yield f"{at}: no class of kvq has it"
        if parts[0] != "kvq":
            continue
        module, rest = ("__init__", parts[1:]) if parts[1] not in package.modules else (parts[1], parts[2:])
        if not rest:
            continue
        if rest[0] not in package.names(module):
            yield f"{at}: not in kvq"
        elif call:
            for keyword in call.keywords:
                if keyword.arg and keyword.arg not in package.arguments(module, rest[0]):
                    yield f"{at}: no argument {keyword.arg}"
