#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Functions that objects of several instruction sets share hold only instructions of the weakest of them.

shared_code.py <object>[,<object>...] <object>...    an argument for each instruction set, from the weakest to the strongest

The linker keeps one copy of every function of one name, from whichever object comes first. A copy may therefore use no instruction
and no register that is not also somewhere in the code of each weaker instruction set with a copy. So an instruction that happens to be
missing there is a false alarm; and tzcnt is none where the weakest objects have `rep bsf`, which has the same bytes.
Reads objects with ld.bfd, nm and objdump.
"""

import collections
import pathlib
import re
import subprocess
import sys
import tempfile

HEADER = re.compile(r"^[0-9a-f]+ <(.*)>:$")
INSTRUCTION = re.compile(r"^\s+[0-9a-f]+:\s+(.*)$")
PREFIXES = {"lock", "rep", "repz", "repnz", "notrack", "bnd", "data16", "cs", "ds"}
# Registers that only some instruction sets have.
REGISTERS = (
    ("ymm", r"%ymm"),
    ("zmm", r"%zmm"),
    ("xmm16 to ymm31", r"%[xy]mm(1[6-9]|2\d|3[01])"),
    ("masks", r"%k[0-7]"),
    ("broadcast", r"\{1to"),
    ("rounding", r"\{r?[nduz]?-?sae\}"),
    ("tiles", r"%tmm"),
)


def lines_of(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


def words_of(instruction):
    """The mnemonic and the kinds of registers."""
    parts = instruction.split()
    while parts and parts[0] in PREFIXES:
        parts.pop(0)
    if parts and not parts[0].startswith(("nop", "xchg", "(bad)")):  # padding
        yield parts[0]
    for kind, pattern in REGISTERS:
        if re.search(pattern, instruction):
            yield kind


class instruction_set:
    """What the objects of one instruction set hold."""

    def __init__(self, paths):
        self.name, self.vocabulary, self.shareable = paths[-1], set(), collections.defaultdict(set)
        for path in paths:
            self.read(path)

    def read(self, path):
        with tempfile.TemporaryDirectory() as folder:
            # In one section: objdump takes a hundred times as long for one of each function.
            script, merged = pathlib.Path(folder) / "script", pathlib.Path(folder) / "merged.o"
            script.write_text("SECTIONS { .text : { *(.text .text.*) } }")
            lines_of("ld.bfd", "-r", "--force-group-allocation", "-T", script, path, "-o", merged)
            weak = {name for _, kind, name in (line.split() for line in lines_of("nm", "--defined-only", merged)) if kind in "WVu"}
            code = lines_of("objdump", "-d", "--no-show-raw-insn", merged)
        functions, name = collections.defaultdict(set), None
        for line in code:
            if found := HEADER.match(line):
                name = re.sub(r"\.(cold|part|constprop|isra).*", "", found[1])  # parts of a function, in its group
            elif (found := INSTRUCTION.match(line)) and name:
                functions[name].update(words_of(found[1]))
        for name, words in functions.items():
            self.vocabulary |= words
            if name in weak:
                self.shareable[name] |= words


def main(paths):
    if len(paths) < 2:
        sys.exit(__doc__)
    sets = [instruction_set(path.split(",")) for path in paths]
    shared, wrong = set(), 0
    for i, stronger in enumerate(sets):
        for weaker in sets[:i]:
            for name in stronger.shareable.keys() & weaker.shareable.keys():
                shared.add(name)
                if foreign := stronger.shareable[name] - weaker.vocabulary:
                    wrong += 1
                    readable = lines_of("c++filt", name)[0]
                    print(f"{readable}\n  in {stronger.name}: {', '.join(sorted(foreign))}; also in {weaker.name}")
    print(f"{len(shared)} functions of several of {len(sets)} instruction sets, {wrong} copies with instructions that no code of a weaker one uses")
    unread = [one.name for one in sets if not one.shareable.keys() & shared]
    if unread:
        print(f"no function is shared, so these are not objects of one program: {', '.join(unread)}")
    return wrong > 0 or bool(unread)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
