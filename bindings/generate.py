#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Writes what the bindings repeat of include/kvq/kvq.h and kvq_cuda.h. Run it after a change of these headers.

generate.py            writes python/src/kvq/_abi.py and _cuda_abi.py, rust/kvq-sys/src/lib.rs and rust/kvq-sys/tests/layout.rs
generate.py --check    changes nothing, and fails where one of them differs

tests/c_interface/abi.txt says what a C compiler makes of the same headers; tests of both languages compare layouts with it.
"""
from __future__ import annotations

import ctypes
import difflib
import pathlib
import re
import sys
import textwrap
from typing import Dict, List

import c_header
from c_header import Function, Header, Name, Struct, Type

HERE = pathlib.Path(__file__).resolve().parent
WIDTH = 120
NUMBERS = {  # C: ctypes, Rust
    "int32_t": ("c_int32", "i32"), "int64_t": ("c_int64", "i64"), "uint32_t": ("c_uint32", "u32"), "uint64_t": ("c_uint64", "u64"),
    "size_t": ("c_size_t", "usize"), "ptrdiff_t": ("c_ssize_t", "isize"), "double": ("c_double", "f64"), "float": ("c_float", "f32")}


def wrapped(start: str, parts: List[str], end: str, indent: str) -> str:
    """start part, part, ... end, in lines of WIDTH columns."""
    text = start + ", ".join(p.replace(" ", "\0") for p in parts) + end
    lines = textwrap.wrap(text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines).replace("\0", " ")


# ---- Python ----------------------------------------------------------------------------------------------------------


class Python:
    """The names of some headers in ctypes. device_memory: pointers to numbers in structs are addresses in device memory."""

    def __init__(self, headers: List[Header], device_memory: bool):
        self.numbers: Dict[str, str] = {"char": "c_char"}
        self.numbers.update((c, names[0]) for c, names in NUMBERS.items())
        self.handles, self.structs, self.function_types = set(), set(), set()
        for header in headers:
            self.numbers.update((name, self.numbers[of]) for name, of in header.integers.items())
            self.handles.update(header.handles)
            self.structs.update(s.name for s in header.structs)
            self.function_types.update(f.name for f in header.function_types)
        self.device_memory = device_memory

    @staticmethod
    def callback(name: str) -> str:
        return name.replace("kvq_", "", 1) + "_function"

    def type(self, t: Type, member: bool) -> str:
        if t.base in self.function_types:
            return self.callback(t.base)
        if t.base in self.handles:
            return "handle" if t.pointers == 1 else "POINTER(handle)"
        if t.pointers == 0:
            return self.numbers.get(t.base, t.base)
        if t.base == "void":
            return "c_void_p"
        if t.base == "char":
            return "c_char_p"
        # Memory that a struct names and kvq writes to may be of any kind that has an address.
        if member and t.base in self.numbers and (self.device_memory or not t.consts[0]):
            return "c_void_p"
        return f"POINTER({self.numbers.get(t.base, t.base)})"

    def field(self, m: Name) -> str:
        of = self.callback(m.name) if m.function else self.type(m.type, True) + (f" * {m.count}" if m.count else "")
        return f'("{m.name}", {of})'

    def callback_type(self, f: Function, name: str) -> str:
        result = "None" if f.result.base == "void" and not f.result.pointers else self.type(f.result, False)
        types = ["c_void_p" if p.type.pointers or p.type.base in self.function_types else self.type(p.type, False)
                 for p in f.parameters]
        return wrapped(f"{self.callback(name)} = CFUNCTYPE(", [result] + types, ")", "    ")

    def struct(self, s: Struct) -> str:
        return f"class {s.name}(Struct):\n" + wrapped("    _fields_ = [", [self.field(m) for m in s.members], "]", " " * 16)

    def callbacks(self, header: Header) -> List[str]:
        """Those of functions come first."""
        members = [m.function for s in header.structs for m in s.members if m.function]
        return [self.callback_type(f, f.name) for f in header.function_types + members]

    def functions(self, header: Header) -> List[str]:
        lines = ["# Arguments of the functions that return a status.", "FUNCTIONS: Dict[str, List[Any]] = {"]
        status = [f for f in header.functions if f.result.base == "kvq_status"]
        arguments = {f.name: [self.type(p.type, False) for p in f.parameters] for f in header.functions}
        lines += [wrapped(f'    "{f.name}": [', arguments[f.name], "],", " " * 8) for f in status] + ["}"]
        others = [f for f in header.functions if f.result.base != "kvq_status"]
        if others:
            lines += ["", "# The others: result and arguments.", "OTHERS: Dict[str, Tuple[Any, List[Any]]] = {"]
            lines += [f'    "{f.name}": ({self.type(f.result, False)}, [{", ".join(arguments[f.name])}]),' for f in others] + ["}"]
        return lines


def python_module(name: str, headers: List[Header]) -> str:
    """Of the last header. Structs and callbacks of others are imported."""
    python, header = Python(headers, device_memory=len(headers) > 1), headers[-1]
    constants = [f"{c.replace('KVQ_', '', 1)} = {value}" for c, value in header.constants.items()]
    parts = ["", *constants, "", *python.callbacks(header)]
    for s in header.structs:
        parts += ["", "", python.struct(s)]
    body = "\n".join([*parts, "", "", *python.functions(header)])
    others = [s.name for of in headers[:-1] for s in of.structs]
    others += [python.callback(f.name) for of in headers[:-1] for f in of.function_types]
    names = sorted(name for name in others if re.search(rf"\b{name}\b", body))
    imported = wrapped("from ._abi import (", names, ")", " " * 19) + "\n" if names else ""
    types = ", ".join(["CFUNCTYPE", "POINTER", *sorted(set(re.findall(r"\bc_\w+(?=[,) \]])", body)) & set(dir(ctypes)))])
    typing = ", ".join(t for t in ("Any", "Dict", "List", "Tuple") if re.search(rf"\b{t}\b", body))
    return (f'"""The C interface include/kvq/{name} in ctypes: constants, structs and functions. Made by bindings/generate.py."""\n'
            f"from __future__ import annotations\n\nfrom ctypes import ({types})\nfrom typing import {typing}\n\n"
            f"from ._struct import Struct, handle\n{imported}{body}\n")


# ---- Rust ------------------------------------------------------------------------------------------------------------


KEYWORDS = {"as", "box", "fn", "impl", "in", "loop", "match", "mod", "move", "mut", "pub", "ref", "self", "type", "use", "where"}


class Rust:
    def __init__(self, header: Header):
        self.header = header
        self.names = {c: names[1] for c, names in NUMBERS.items()}
        self.names.update({"char": "c_char", "void": "c_void"})

    def type(self, t: Type) -> str:
        made = self.names.get(t.base, t.base)
        for constant in t.consts:
            made = f"*{'const' if constant else 'mut'} {made}"
        return made

    def signature(self, f: Function, start: str, end: str, indent: str) -> str:
        result = "" if f.result.base == "void" and not f.result.pointers else f" -> {self.type(f.result)}"
        parameters = [f"{'r#' if p.name in KEYWORDS else ''}{p.name}: {self.type(p.type)}" for p in f.parameters]
        return wrapped(f"{start}(", parameters, f"){result}{end}", indent)

    def callback(self, f: Function, start: str, end: str, indent: str) -> str:
        return self.signature(f, f'{start}Option<unsafe extern "C" fn', f">{end}", indent)

    def member(self, m: Name) -> str:
        if m.function:
            return self.callback(m.function, f"    pub {m.name}: ", ",", " " * 8)
        of = self.type(m.type)
        return f"    pub {m.name}: " + (f"[{of}; {m.count}]," if m.count else f"{of},")

    def struct(self, s: Struct) -> str:
        plain = all(m.type and not m.type.pointers for m in s.members) and s.members[0].name != "size"
        derive = "Clone, Copy, Debug, PartialEq" if plain else "Clone, Copy"
        if plain and not any(m.type.base in ("float", "double") for m in s.members):
            derive += ", Eq"
        return "\n".join([f"#[repr(C)]\n#[derive({derive})]\npub struct {s.name} {{", *map(self.member, s.members), "}"])

    def library(self) -> str:
        header = self.header
        parts = ["//! The C interface of kvq (include/kvq/kvq.h) as it is: see there what everything means. The crate `kvq` is the safe way",
                 "//! to it. Made by bindings/generate.py; tests/layout.rs compares it with what a C compiler makes of the header.",
                 "#![allow(non_camel_case_types)]", "#![cfg_attr(rustfmt, rustfmt_skip)]", "", "use core::ffi::c_void;",
                 "use std::os::raw::c_char;", ""]
        parts += [f"pub type {name} = {self.names[of]};" for name, of in header.integers.items()] + [""]
        parts += [f"pub const {name}: i32 = {value};" for name, value in header.constants.items()]
        for handle in header.handles:
            parts += ["", f"#[repr(C)]\npub struct {handle} {{\n    _private: [u8; 0],\n}}"]
        parts += [""] + [self.callback(f, f"pub type {f.name} = ", ";", "    ") for f in header.function_types]
        for s in header.structs:
            parts += ["", self.struct(s)]
        parts += ["", 'extern "C" {']
        parts += [self.signature(f, f"    pub fn {f.name}", ";", " " * 8) for f in header.functions]
        return "\n".join([*parts, "}"]) + "\n"

    def layout_test(self) -> str:
        names = list(self.header.constants)
        lines = [LAYOUT_TEST.rstrip("\n")]
        for s in self.header.structs:
            lines.append(wrapped(f"    layout!(lines, {s.name}: ", [m.name for m in s.members], ");", " " * 8))
        lines.append(wrapped("    constants!(lines, ", names, ");", " " * 8))
        return "\n".join(lines + ["    let known: Vec<_> = ABI.lines().filter(|l| !l.starts_with(\"function \")).collect();",
                                  "    assert_eq!(lines, known);", "}"]) + "\n"


LAYOUT_TEST = """\
//! Sizes and offsets of the structs, and the constants, against what a C compiler makes of kvq.h. Made by bindings/generate.py.
#![cfg(target_pointer_width = "64")]
#![cfg_attr(rustfmt, rustfmt_skip)]

use std::mem::{size_of, MaybeUninit};

use kvq_sys::*;

const ABI: &str = include_str!("../../../../tests/c_interface/abi.txt");

fn member_bytes<T, M>(_: fn(&T) -> &M) -> usize {
    size_of::<M>()
}

macro_rules! layout {
    ($lines:ident, $name:ident: $($member:ident),*) => {
        $lines.push(format!("struct {}: {} bytes", stringify!($name), size_of::<$name>()));
        let made = MaybeUninit::<$name>::uninit();
        $(
            let offset = unsafe { std::ptr::addr_of!((*made.as_ptr()).$member) as usize } - made.as_ptr() as usize;
            let bytes = member_bytes(|s: &$name| &s.$member);
            $lines.push(format!("  {}: {}, {} bytes", stringify!($member), offset, bytes));
        )*
    };
}
macro_rules! constants {
    ($lines:ident, $($name:ident),*) => { $($lines.push(format!("constant {}: {}", stringify!($name), $name));)* };
}

#[test]
fn layouts() {
    let mut lines: Vec<String> = Vec::new();
"""


# ---- all -------------------------------------------------------------------------------------------------------------


def generated() -> Dict[pathlib.Path, str]:
    headers = [c_header.read(HERE.parent / "include/kvq" / name) for name in ("kvq.h", "kvq_cuda.h")]
    rust = Rust(headers[0])
    return {HERE / "python/src/kvq/_abi.py": python_module("kvq.h", headers[:1]),
            HERE / "python/src/kvq/_cuda_abi.py": python_module("kvq_cuda.h", headers),
            HERE / "rust/kvq-sys/src/lib.rs": rust.library(), HERE / "rust/kvq-sys/tests/layout.rs": rust.layout_test()}


def main() -> None:
    if sys.argv[1:] not in ([], ["--check"]):
        sys.exit(__doc__)
    differences = []
    for path, text in generated().items():
        if sys.argv[1:]:
            found = path.read_text() if path.exists() else ""
            differences += difflib.unified_diff(found.splitlines(), text.splitlines(), str(path.relative_to(HERE.parent)), "generated",
                                                lineterm="")
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    if differences:
        sys.exit("\n".join(differences) + "\nbindings/generate.py writes these files again")


if __name__ == "__main__":
    main()
