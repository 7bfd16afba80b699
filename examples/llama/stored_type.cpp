#include "stored_type.hpp"

#include <Eigen/Core>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <utility>

namespace llama {
namespace {

std::uint8_t byte_at(const std::byte* bytes, int index) {
    return std::to_integer<std::uint8_t>(bytes[index]);
}

float half_at(const std::byte* bytes) {
    Eigen::half half;
    std::memcpy(&half, bytes, sizeof half);
    return static_cast<float>(half);
}

void read_f32(const std::byte* bytes, std::ptrdiff_t count, float* out) {
    std::memcpy(out, bytes, static_cast<std::size_t>(count) * sizeof(float));
}

// Blocks of 64 values: the bytes in the file may lie at any address.
void read_f16(const std::byte* bytes, std::ptrdiff_t count, float* out) {
    constexpr std::ptrdiff_t part = 64;
    std::array<Eigen::half, part> halves;
    for (std::ptrdiff_t first = 0; first < count; first += part) {
        const std::ptrdiff_t n = std::min(part, count - first);
        std::memcpy(static_cast<void*>(halves.data()), bytes + 2 * first, static_cast<std::size_t>(2 * n));
        Eigen::Map<Eigen::ArrayXf>(out + first, n) =
            Eigen::Map<const Eigen::Array<Eigen::half, Eigen::Dynamic, 1>>(halves.data(), n).cast<float>();
    }
}

void read_bf16(const std::byte* bytes, std::ptrdiff_t count, float* out) {
    for (std::ptrdiff_t i = 0; i < count; ++i) {
        std::uint16_t upper;
        std::memcpy(&upper, bytes + 2 * i, sizeof upper);
        const std::uint32_t bits = static_cast<std::uint32_t>(upper) << 16;
        std::memcpy(out + i, &bits, sizeof bits);
    }
}

void read_q8_0(const std::byte* block, std::ptrdiff_t blocks, float* out) {
    for (; blocks > 0; --blocks, block += 34, out += 32) {
        const float scale = half_at(block);
        for (int i = 0; i < 32; ++i) {
            out[i] = scale * static_cast<float>(static_cast<std::int8_t>(byte_at(block, 2 + i)));
        }
    }
}

// Q4_0, Q4_1, Q5_0, Q5_1: Bits per value, and whether the block has a minimum instead of a middle.
template <int Bits, bool Minimum>
void read_legacy(const std::byte* block, std::ptrdiff_t blocks, float* out) {
    constexpr int fifth_bits = Minimum ? 4 : 2, codes = fifth_bits + (Bits == 5 ? 4 : 0);
    constexpr int middle = Minimum ? 0 : 1 << (Bits - 1);
    for (; blocks > 0; --blocks, block += codes + 16, out += 32) {
        const float scale = half_at(block), minimum = Minimum ? half_at(block + 2) : 0.0F;
        std::uint32_t fifth = 0;
        if constexpr (Bits == 5) {
            std::memcpy(&fifth, block + fifth_bits, sizeof fifth);
        }
        for (int i = 0; i < 16; ++i) {
            const int pair = byte_at(block, codes + i);
            const int low = (pair & 15) | static_cast<int>((fifth >> i & 1) << 4);
            const int high = (pair >> 4) | static_cast<int>((fifth >> (i + 16) & 1) << 4);
            out[i] = scale * static_cast<float>(low - middle) + minimum;
            out[i + 16] = scale * static_cast<float>(high - middle) + minimum;
        }
    }
}

// Scale and minimum of a group of Q4_K and Q5_K. Groups 0 to 3 have the low 6 bits of bytes g and g + 4;
// groups 4 to 7 have their low 4 bits in byte g + 4 and their high 2 bits at the top of the bytes of groups 0
// to 3.
std::pair<int, int> six_bit_pair(const std::byte* packed, int group) {
    if (group < 4) {
        return {byte_at(packed, group) & 63, byte_at(packed, group + 4) & 63};
    }
    const int low = byte_at(packed, group + 4);
    return {(low & 15) | (byte_at(packed, group - 4) >> 6) << 4, (low >> 4) | (byte_at(packed, group) >> 6)
                                                                                  << 4};
}

template <int Bits>
void read_k(const std::byte* block, std::ptrdiff_t blocks, float* out) {
    constexpr int fifth_bits = 16, codes = Bits == 5 ? 48 : 16;
    for (; blocks > 0; --blocks, block += codes + 128, out += 256) {
        const float scale = half_at(block), minimum = half_at(block + 2);
        for (int group = 0; group < 8; ++group) {
            const auto [s, t] = six_bit_pair(block + 4, group);
            const float step = scale * static_cast<float>(s), low = minimum * static_cast<float>(t);
            const std::byte* const pairs = block + codes + 32 * (group / 2);
            const int shift = 4 * (group % 2);
            for (int i = 0; i < 32; ++i) {
                int code = byte_at(pairs, i) >> shift & 15;
                if constexpr (Bits == 5) {
                    code |= (byte_at(block, fifth_bits + i) >> group & 1) << 4;
                }
                out[32 * group + i] = step * static_cast<float>(code) - low;
            }
        }
    }
}

// Each half of 128 values: value 32 j + i has its low bits in byte i + 32 (j % 2), low half for j < 2, and
// its high bits at bit 2 j of byte i.
void read_q6_k(const std::byte* block, std::ptrdiff_t blocks, float* out) {
    for (; blocks > 0; --blocks, block += 210, out += 256) {
        const float scale = half_at(block + 208);
        for (int half = 0; half < 2; ++half) {
            const std::byte* const low = block + 64 * half;
            const std::byte* const high = block + 128 + 32 * half;
            const std::byte* const scales = block + 192 + 8 * half;
            for (int j = 0; j < 4; ++j) {
                for (int part = 0; part < 2; ++part) {
                    const auto s = static_cast<std::int8_t>(byte_at(scales, 2 * j + part));
                    const float step = scale * static_cast<float>(s);
                    float* const to = out + 128 * half + 32 * j + 16 * part;
                    for (int i = 0; i < 16; ++i) {
                        const int at = 16 * part + i;
                        const int code = (byte_at(low, 32 * (j % 2) + at) >> (4 * (j / 2)) & 15) |
                                         (byte_at(high, at) >> (2 * j) & 3) << 4;
                        to[i] = step * static_cast<float>(code - 32);
                    }
                }
            }
        }
    }
}

// Q2_K and Q3_K: value 128 h + 32 j + i has its two bits at bit 2 j of byte 32 h + i.
int two_bits(const std::byte* codes, int value) {
    return byte_at(codes, value / 128 * 32 + value % 32) >> (value % 128 / 32 * 2) & 3;
}

void read_q2_k(const std::byte* block, std::ptrdiff_t blocks, float* out) {
    for (; blocks > 0; --blocks, block += 84, out += 256) {
        const float scale = half_at(block + 80), minimum = half_at(block + 82);
        for (int group = 0; group < 16; ++group) {
            const int pair = byte_at(block, group);
            const float step = scale * static_cast<float>(pair & 15),
                        low = minimum * static_cast<float>(pair >> 4);
            for (int i = 16 * group; i < 16 * group + 16; ++i) {
                out[i] = step * static_cast<float>(two_bits(block + 16, i)) - low;
            }
        }
    }
}

// The scale of group g has its low 4 bits in byte g % 8, its high 2 bits at bit 2 (g / 4) of byte 8 + g % 4.
void read_q3_k(const std::byte* block, std::ptrdiff_t blocks, float* out) {
    for (; blocks > 0; --blocks, block += 110, out += 256) {
        const std::byte* const scales = block + 96;
        const float scale = half_at(block + 108);
        for (int group = 0; group < 16; ++group) {
            const int s = (byte_at(scales, group % 8) >> (group / 8 * 4) & 15) |
                          (byte_at(scales, 8 + group % 4) >> (group / 4 * 2) & 3) << 4;
            const float step = scale * static_cast<float>(s - 32);
            for (int i = 16 * group; i < 16 * group + 16; ++i) {
                const int code = two_bits(block + 32, i) | (byte_at(block, i % 32) >> (i / 32) & 1) << 2;
                out[i] = step * static_cast<float>(code - 4);
            }
        }
    }
}

constexpr std::uint16_t iq2_xxs_table[256] = {
#include "data/iq2_xxs_table.inc"
};

void read_iq2_xxs(const std::byte* block, std::ptrdiff_t blocks, float* out) {
    static const auto vectors = [] {
        std::array<std::array<float, 8>, 256> all;
        for (std::size_t i = 0; i < all.size(); ++i) {
            int digits = iq2_xxs_table[i];
            for (float& value : all[i]) {
                value = digits % 3 == 0 ? 8.0F : digits % 3 == 1 ? 25.0F : 43.0F;
                digits /= 3;
            }
        }
        return all;
    }();
    for (; blocks > 0; --blocks, block += 66) {
        const float scale = half_at(block);
        for (int group = 0; group < 8; ++group) {
            const std::byte* const choices = block + 2 + 8 * group;
            std::uint32_t bits;
            std::memcpy(&bits, choices + 4, sizeof bits);
            const float step = scale * (0.5F + static_cast<float>(bits >> 28)) * 0.25F;
            for (int part = 0; part < 4; ++part, out += 8) {
                const std::uint32_t seven = bits >> (7 * part) & 127;
                const std::uint32_t signs = seven | static_cast<std::uint32_t>(std::popcount(seven) % 2) << 7;
                const auto& values = vectors[byte_at(choices, part)];
                for (std::size_t i = 0; i < 8; ++i) {
                    out[i] = (signs >> i & 1) != 0 ? -step * values[i] : step * values[i];
                }
            }
        }
    }
}

}  // namespace

const stored_type type_f32{"F32", 0, 1, 4, read_f32};
const stored_type type_f16{"F16", 1, 1, 2, read_f16};
const stored_type type_bf16{"BF16", 30, 1, 2, read_bf16};
const stored_type type_q8_0{"Q8_0", 8, 32, 34, read_q8_0};
const stored_type type_q4_0{"Q4_0", 2, 32, 18, read_legacy<4, false>};
const stored_type type_q4_1{"Q4_1", 3, 32, 20, read_legacy<4, true>};
const stored_type type_q5_0{"Q5_0", 6, 32, 22, read_legacy<5, false>};
const stored_type type_q5_1{"Q5_1", 7, 32, 24, read_legacy<5, true>};
const stored_type type_q2_k{"Q2_K", 10, 256, 84, read_q2_k};
const stored_type type_q3_k{"Q3_K", 11, 256, 110, read_q3_k};
const stored_type type_q4_k{"Q4_K", 12, 256, 144, read_k<4>};
const stored_type type_q5_k{"Q5_K", 13, 256, 176, read_k<5>};
const stored_type type_q6_k{"Q6_K", 14, 256, 210, read_q6_k};

const stored_type type_iq2_xxs{"IQ2_XXS", 16, 256, 66, read_iq2_xxs};

namespace {
constexpr const stored_type* all_types[] = {&type_f32,  &type_f16,  &type_bf16, &type_q8_0,   &type_q4_0,
                                            &type_q4_1, &type_q5_0, &type_q5_1, &type_q2_k,   &type_q3_k,
                                            &type_q4_k, &type_q5_k, &type_q6_k, &type_iq2_xxs};
}

std::string stored_type_names() {
    std::string names;
    for (const stored_type* const type : all_types) {
        names += (names.empty() ? "" : ", ") + std::string(type->name);
    }
    return names;
}

const stored_type* find_ggml_type(std::uint32_t number) {
    for (const stored_type* const type : all_types) {
        if (static_cast<std::uint32_t>(type->ggml_number) == number) {
            return type;
        }
    }
    return nullptr;
}

std::string ggml_type_name(std::uint32_t number) {
    static constexpr std::pair<std::uint32_t, const char*> unread[] = {
        {9, "Q8_1"},   {15, "Q8_K"},  {17, "IQ2_XS"}, {18, "IQ3_XXS"}, {19, "IQ1_S"}, {20, "IQ4_NL"},
        {21, "IQ3_S"}, {22, "IQ2_S"}, {23, "IQ4_XS"}, {24, "I8"},      {25, "I16"},   {26, "I32"},
        {27, "I64"},   {28, "F64"},   {29, "IQ1_M"},  {34, "TQ1_0"},   {35, "TQ2_0"}, {39, "MXFP4"}};
    if (const stored_type* const type = find_ggml_type(number)) {
        return type->name;
    }
    for (const auto& [known, name] : unread) {
        if (known == number) {
            return name;
        }
    }
    return "type " + std::to_string(number);
}

}  // namespace llama
