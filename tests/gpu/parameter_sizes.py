#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Do kernels find the members of their parameters where the host puts them?

parameter_sizes.py OUTPUT.ptx COMPILER...    compiles parameter_sizes.cu to OUTPUT.ptx; fails where a parameter's bytes differ
"""
import pathlib
import re
import subprocess
import sys


def main() -> None:
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    output, compiler = sys.argv[1], sys.argv[2:]
    source = pathlib.Path(__file__).with_suffix(".cu")
    subprocess.run([*compiler, "-ptx", "-o", output, str(source)], check=True)
    found = re.findall(r"\.param .*kernel_parameterILj(\d+)E\w*_param_0\[(\d+)\]", pathlib.Path(output).read_text())
    print(f"{len(found)} parameters, bytes on the host and in PTX:", ", ".join(f"{host} {device}" for host, device in found))
    if not found or any(host != device for host, device in found):
        sys.exit("kernels read members of a parameter elsewhere than the host writes them")


if __name__ == "__main__":
    main()
