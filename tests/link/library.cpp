// SPDX-License-Identifier: MIT
// kvq::library as far as the program needs it: the code of caches and, from
// part.cpp, kernels for codes of 4 bits and fp16, of the weakest CPU alone.
#include "../../src/builtin_formats.cpp"
#include "../../src/kernels.cpp"
#include "../../src/kvq.cpp"
