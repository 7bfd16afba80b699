// Rows of tokens in the bytes of other systems: FP8, NVFP4, MX, ggml.
//
//   x^ = scale * number + minimum            of every `channels` neighbouring channels of a token
//
//   format    channels   bytes of them, in order                     scale
//   fp8       all        e4m3 x n                                    of the tensor
//   fp8-e5m2  all        e5m2 x n                                    of the tensor
//   nvfp4     16         e2m1 x 16; behind the page: e4m3            e4m3(max|x| / 6 / tensor)
//   mxfp8     32         e4m3 x 32; behind the page: e8m0            2^(floor(log2 max|x|) - 8)
//   mxfp4     32         e2m1 x 32; behind the page: e8m0            2^(floor(log2 max|x|) - 2)
//   q8_0      32         fp16, int8 x 32                             max|x| / 127
//   q4_0      32         fp16, 4 bit x 32                            x of max|x| / -8
//   q4_1      32         fp16, fp16 minimum, 4 bit x 32              (max - min) / 15
//   q5_0      32         fp16, fifth bits of 32, 4 bit x 32          x of max|x| / -16
//   q5_1      32         fp16, fp16 minimum, fifth bits of 32, 4 bit x 32 (max - min) / 31
//   q6_0      32         fp16, high two bits of 32, 4 bit x 32   x of max|x| / -32, then least squares
//   iq4_nl    32         fp16, 4 bit x 32: places in a table     x of max|x| / -127, then least squares
//
// nvfp4-4over6 has the bytes of nvfp4: of max|x| / 6 and max|x| / 4 the one with the smaller squared error.
// Least squares: of s * number to x, each weighted with x^2.
//
// A block is [tokens][row], zeros up to a multiple of 16 bytes. Two e2m1 in a byte: the even channel in its
// low half. "Behind the page": [tokens][scales of a token] after all rows. Numbers of ggml: channel i in the
// low half of byte i, i + 16 in its high half; bit i of the fifth bits is that of channel i. Of q6_0's eight
// bytes i has, from the lowest bits on, the pairs of channels i, i + 16, i + 8 and i + 24.
// schemes/token_rows.hpp is the scheme that reads and writes all of them.
// Contract: float arithmetic, each operation rounded on its own; every other system's rule gives the same
// bytes where it does so too (some multiply by reciprocals). NaN is quantized as the value nearest zero,
// infinities saturate, and neither sets a scale; scales in fp16 saturate. Complexity: linear.
// Sources: ggml-quants.c (quantize_row_*_ref; q6_0: that of ik_llama.cpp); OCP Microscaling Formats (MX) 1.0,
// 6.3; NVIDIA, Introducing NVFP4; vLLM, --kv-cache-dtype fp8, nvfp4_4over6.
#pragma once

#include "../core/row_place.hpp"

namespace kvq { inline namespace v0_3 {

/// What a row of tokens holds: a value, of which one scheme reads all.
struct row_layout {
    enum class number : unsigned char {
        e4m3,
        e5m2,
        e2m1,
        int8,
        centred4,
        centred5,
        unsigned4,
        unsigned5,
        centred6,
        iq4_nl
    };
    enum class stored : unsigned char { none, fp16, e4m3, e8m0 };

    const char* name;
    int channels;  ///< that share a scale; 0: all tokens of the tensor do
    number numbers;
    stored scale;                ///< fp16: in front of the numbers; others: behind all numbers of the page
    bool minimum;                ///< fp16, behind the scale
    bool four_over_six = false;  ///< nvfp4: the scale is one of two, by the error

    KVQ_HD KVQ_NO_COPY constexpr int bits() const noexcept {
        switch (numbers) {
            case number::e2m1:
            case number::centred4:
            case number::unsigned4:
            case number::iq4_nl:
                return 4;
            case number::centred6:
                return 6;
            case number::centred5:
            case number::unsigned5:
                return 5;
            default:
                return 8;
        }
    }
    /// Bytes of a group of channels in its row, the numbers in it, and scales of a token behind the page.
    KVQ_HD KVQ_NO_COPY constexpr int front_bytes() const noexcept {
        return scale == stored::fp16 ? 2 + 2 * minimum : 0;
    }
    KVQ_HD KVQ_NO_COPY constexpr int group_bytes(int n) const noexcept {
        return front_bytes() + n * bits() / 8;
    }
    KVQ_HD KVQ_NO_COPY constexpr int group_of(int dim) const noexcept {
        return channels > 0 ? channels : dim;
    }
    KVQ_HD KVQ_NO_COPY constexpr int row_bytes(int dim) const noexcept {
        return dim / group_of(dim) * group_bytes(group_of(dim));
    }
    KVQ_HD KVQ_NO_COPY constexpr int scales_behind(int dim) const noexcept {
        return scale == stored::e4m3 || scale == stored::e8m0 ? dim / group_of(dim) : 0;
    }
    KVQ_HD KVQ_NO_COPY constexpr kvq::row_bytes bytes(int dim) const noexcept {
        return {row_bytes(dim), scales_behind(dim), 0};
    }
    /// Are there such rows? Layouts of your own differ in the channels of e4m3, e2m1 and int8, and have names
    /// of their own.
    KVQ_HD KVQ_NO_COPY constexpr bool is_possible() const noexcept {
        const bool pairs = numbers == number::e2m1;
        if (four_over_six && !(pairs && scale == stored::e4m3)) return false;
        if (numbers == number::e4m3 || pairs)
            return !minimum && (scale == stored::none ? channels == 0 && !pairs
                                                      : scale != stored::fp16 && channels >= 1 &&
                                                            channels <= 32 && (!pairs || channels % 2 == 0));
        if (numbers == number::e5m2) return !minimum && scale == stored::none && channels == 0;
        return scale == stored::fp16 &&
               minimum == (numbers == number::unsigned4 || numbers == number::unsigned5) &&
               (channels == 32 || (numbers == number::int8 && channels >= 1 && channels < 32));
    }
};

/// All of them: find_format() has these names.
inline constexpr row_layout row_layouts[] = {
    {"fp8", 0, row_layout::number::e4m3, row_layout::stored::none, false},
    {"fp8-e5m2", 0, row_layout::number::e5m2, row_layout::stored::none, false},
    {"nvfp4", 16, row_layout::number::e2m1, row_layout::stored::e4m3, false},
    {"mxfp8", 32, row_layout::number::e4m3, row_layout::stored::e8m0, false},
    {"mxfp4", 32, row_layout::number::e2m1, row_layout::stored::e8m0, false},
    {"q8_0", 32, row_layout::number::int8, row_layout::stored::fp16, false},
    {"q4_0", 32, row_layout::number::centred4, row_layout::stored::fp16, false},
    {"q4_1", 32, row_layout::number::unsigned4, row_layout::stored::fp16, true},
    {"q5_0", 32, row_layout::number::centred5, row_layout::stored::fp16, false},
    {"q5_1", 32, row_layout::number::unsigned5, row_layout::stored::fp16, true},
    {"nvfp4-4over6", 16, row_layout::number::e2m1, row_layout::stored::e4m3, false, true},
    {"q6_0", 32, row_layout::number::centred6, row_layout::stored::fp16, false},
    {"iq4_nl", 32, row_layout::number::iq4_nl, row_layout::stored::fp16, false},
};

}}  // namespace kvq
