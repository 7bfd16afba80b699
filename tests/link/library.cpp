// SPDX-License-Identifier: MIT
// kvq::library as far as the program needs it: the code of caches, and fp16 for the windows of formats. Compiled for the weakest CPU.
#include "../../src/kvq.cpp"

#include <kvq/format/make_format.hpp>

const kvq::format& kvq::builtin_fp16() {
    static const kvq::format fp16 = make_format<full<float16>, scalar>();
    return fp16;
}
const kvq::builtin_format* kvq::builtin_formats(std::size_t* count) {
    *count = 0;
    return nullptr;
}
