"""Reads the declarations of a C header of kvq: constants, handles, function types, structs and functions.

Understands the C of kvq.h and kvq_cuda.h alone: one declaration a statement, `typedef struct x {...} x`, constants with values.
Raises ValueError where a declaration has another form.
"""
from __future__ import annotations

import dataclasses
import pathlib
import re
from typing import Dict, List, Optional


@dataclasses.dataclass
class Type:
    """`const int32_t*`: base int32_t, consts [True], pointers 1. consts[i]: is what pointer i points to constant?"""

    base: str
    consts: List[bool]

    @property
    def pointers(self) -> int:
        return len(self.consts)


@dataclasses.dataclass
class Name:
    """A parameter, or a member of a struct; `function` instead of `type` for a pointer to a function."""

    name: str
    type: Optional[Type] = None
    count: int = 0  # elements of an array; 0: no array
    function: Optional["Function"] = None


@dataclasses.dataclass
class Function:
    name: str
    result: Type
    parameters: List[Name]


@dataclasses.dataclass
class Struct:
    name: str
    members: List[Name]


@dataclasses.dataclass
class Header:
    constants: Dict[str, int]
    integers: Dict[str, str]  # other names of integer types
    handles: List[str]
    function_types: List[Function]
    structs: List[Struct]
    functions: List[Function]


def _type(text: str) -> Type:
    """`kvq_sequence* const*` as a type."""
    words = re.findall(r"\w+|\*", text)
    constant = words[0] == "const"
    base = words[1 if constant else 0]
    consts = []
    for word in words[2 if constant else 1:]:
        if word == "*":
            consts.append(constant)
            constant = False
        elif word == "const":
            constant = True
        else:
            raise ValueError(f"no type: {text}")
    return Type(base, consts)


def _function(result: str, name: str, parameters: str) -> Function:
    texts = [] if parameters.strip() in ("", "void") else parameters.split(",")
    return Function(name, _type(result), [p for text in texts for p in _declaration(text)])


def _declaration(text: str) -> List[Name]:
    """The names that a member's declaration, or a parameter, declares."""
    pointer = re.fullmatch(r"\s*(.*?)\s*\(\*(\w+)\)\s*\((.*)\)\s*", text, re.S)
    if pointer:
        return [Name(pointer[2], function=_function(pointer[1], pointer[2], pointer[3]))]
    found = re.fullmatch(r"\s*((?:const\s+)?\w+(?:\s*\*\s*const\b|\s*\*)*)\s*(\w.*)", text, re.S)
    if not found:
        raise ValueError(f"no declaration: {text}")
    names = []
    base = found[1]
    for i, declarator in enumerate(found[2].split(",")):
        if i == 1:
            base = re.sub(r"[\s*]*$", "", base)  # a star belongs to one declarator
        parts = re.fullmatch(r"\s*(\**)\s*(\w+)(?:\[(\w+)\])?\s*", declarator)
        if not parts:
            raise ValueError(f"no declarator: {declarator}")
        names.append(Name(parts[2], _type(base + parts[1]), int(parts[3] or 0)))
    return names


def read(path: pathlib.Path) -> Header:
    text = re.sub(r"//[^\n]*|/\*.*?\*/", " ", path.read_text(), flags=re.S)
    enumerated = [(name, int(value)) for body in re.findall(r"enum \{(.*?)\}", text, re.S)
                  for name, value in re.findall(r"(\w+)\s*=\s*(-?\d+)", body)]
    defined = [(name, int(value)) for name, value in re.findall(r"#define (KVQ_\w+) \(?(-?\d+)\)?\s*\n", text)]
    header = Header(
        constants=dict(enumerated + defined),
        integers=dict((name, of) for of, name in re.findall(r"typedef (\w+) (\w+);", text)),
        handles=re.findall(r"typedef struct (\w+) \1;", text),
        function_types=[_function(*parts) for parts in re.findall(r"typedef (\w+) \(\*(\w+)\)\((.*?)\);", text, re.S)],
        structs=[Struct(name, [m for d in body.split(";") if d.strip() for m in _declaration(d)])
                 for name, body in re.findall(r"typedef struct (\w+) \{(.*?)\} \1;", text, re.S)],
        functions=[_function(*parts) for parts in re.findall(r"KVQ_API\s+([\w\s*]+?[\s*])(\w+)\(([^;]*)\)\s*;", text)])
    values = sum(body.count("=") for body in re.findall(r"enum \{(.*?)\}", text, re.S))
    if (values != len(enumerated) or len(header.functions) != len(re.findall(r"^KVQ_API ", text, re.M)) or
            len(header.structs) + len(header.handles) != len(re.findall(r"typedef struct", text))):
        raise ValueError(f"{path.name} has a declaration of another form")
    return header
