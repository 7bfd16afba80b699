// The types in which files hold weights, and how they become floats.
//
//   F32, F16, BF16   IEEE-754 binary32, binary16; the upper half of binary32
//   Q8_0   32 values: d (F16), 32 signed bytes q                                           x = d q
//   Q4_0   32 values: d (F16), 16 bytes: q[i] low, q[i + 16] high                          x = d (q - 8)
//   Q4_1   the same, with m (F16) behind d                                                 x = d q + m
//   Q5_0   as Q4_0, before the bytes 32 bits: bit i is the fifth bit of q[i]               x = d (q - 16)
//   Q5_1   the same, with m (F16) behind d                                                 x = d q + m
//   Q4_K   256 values in 8 groups g of 32: d, m (F16), 12 bytes with a 6-bit s[g] and t[g] x = d s q - m t
//          each, 128 bytes: of 32 each the low halves are one group, the high halves the next
//   Q5_K   the same, before the last 128 bytes 32 more: bit g of byte i is the fifth bit of value i of group
//          g
//   Q2_K   256 values in 16 groups of 16: 16 bytes with s (low half) and t (high) of a group,
//          64 bytes of 2 bits, d, m (F16)                                                  x = d s q - m t
//   Q3_K   the same groups: 32 bytes with the third bits (bit i / 32 of byte i % 32), 64 bytes of 2 bits,
//          12 bytes of 6-bit s, d (F16)                                                    x = d (s - 32) (q
//            - 4)
//   Q6_K   256 values in 16 groups of 16: 128 bytes of low 4 bits, 64 bytes of high 2 bits,
//          a signed byte s for each group, d (F16)                                         x = d s (q - 32)
//   IQ2_XXS  256 values in 8 groups of 32: d (F16); a group has four bytes that choose 8 values v each from a
//            table of 256,
//          and 32 bits: four times 7 signs (the eighth makes their number even), then s      x = +- d (s +
//            1/2) v / 4
//
// All numbers are little-endian, rows are whole blocks. Source: the layouts in ggml
// (github.com/ggml-org/ggml, ggml-common.h), which GGUF files name by number (docs/gguf.md of the same).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace llama {

struct stored_type {
    const char* name;
    int ggml_number;                // in GGUF files
    int block_values, block_bytes;  // values and bytes of a block
    // blocks * block_values floats to `out`.
    void (*dequantize)(const std::byte* bytes, std::ptrdiff_t blocks, float* out);

    bool operator==(const stored_type& other) const { return ggml_number == other.ggml_number; }
};

extern const stored_type type_f32, type_f16, type_bf16, type_q8_0, type_q4_0, type_q4_1, type_q5_0, type_q5_1,
    type_q2_k, type_q3_k, type_q4_k, type_q5_k, type_q6_k, type_iq2_xxs;

// Returns nullptr for a type that is not read.
const stored_type* find_ggml_type(std::uint32_t number);

// "IQ1_S", "type 77"; also for types that are not read.
std::string ggml_type_name(std::uint32_t number);

// The names of all types that are read, separated by commas.
std::string stored_type_names();

}  // namespace llama
