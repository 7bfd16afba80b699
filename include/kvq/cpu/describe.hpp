// format::describe(): what the registry says of the blocks of a codec, behind a transform, in flags and
// words.
#pragma once

#include "../format/format.hpp"
#include "registry.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace kernels {

inline format_description description_of(const kernel_choice& quantize, const kernel_choice& dequantize,
                                         const kernel_choice& attend, const kernel_choice& transform) {
    const auto write = [](const kernel_choice& choice, bool& in_vectors, format_description::text& by) {
        in_vectors = static_cast<bool>(choice);
        const short_text text = choice.text();
        for (std::size_t i = 0; i + 1 < sizeof(by) && text.c_str()[i] != 0; ++i) by[i] = text.c_str()[i];
    };
    format_description d;
    write(quantize, d.quantize, d.quantize_by);
    write(dequantize, d.dequantize, d.dequantize_by);
    write(attend, d.attend, d.attend_by);
    write(transform, d.transform, d.transform_by);
    return d;
}
/// Kernels of a codec that the registry names, and that are not compiled.
struct missing_kernels {
    bool quantize = false, dequantize = false, attend = false;
};
inline format_description described_as_portable(const char* why) {
    const kernel_choice none{nullptr, why};
    return description_of(none, none, none, none);
}
/// What the registry says of the blocks of a codec, behind a transform, of kernels that are compiled.
inline format_description described(const codec_spec& c, const token_transform& t, const block_shape& s,
                                    float_type window, int width, const missing_kernels& missing = {}) {
    const bool before = t.kind != transform_kind::none && t.kind != transform_kind::order;
    const kernel_choice of_window =
        before ? read_choice(s, window, width) : window_choice(c, s, window, width);
    const auto compiled = [](bool lacks, const kernel_choice& choice) {
        return lacks && choice
                   ? kernel_choice{nullptr,
                                   "kvq::library has none of this codec; files with KVQ_HEADER_ONLY do"}
                   : choice;
    };
    kernel_choice quantize = both(of_window, compiled(missing.quantize, quantize_choice(c, s))),
                  dequantize = compiled(missing.dequantize, dequantize_choice(c, s, width)),
                  transform{"no transform"};
    if (t.kind == transform_kind::order) transform = both(quantize, dequantize);
    if (before) {
        transform = dequantizer_of(c) == dequantizer::none ? dequantize : transform_choice(t, s, width);
        quantize = both(transform, quantize);
        dequantize = both(transform, dequantize);
    }
    return description_of(quantize, dequantize, missing.attend ? dequantize : attend_choice(c, s, width),
                          transform);
}

}}}  // namespace kvq::kernels
