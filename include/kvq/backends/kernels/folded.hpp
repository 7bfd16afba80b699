// Folding: turns the vectors of a product into fixed-point pieces, once per block, so that the product runs on codes.
//
//   x'  = col_scale * x                                        (only where columns carry parameters)
//   x' ~= step * (256 * high + low),  high, low signed bytes,  step = max|x'| / 32512
//
// With one piece (Backend::pieces == 1): x' ~= step * high, step = max|x'| / 127. The low word of a pair is not used then.
// Where the instruction set multiplies 16-bit words as fast as bytes (Lanes::word_products; no VNNI), x' ~= step * word instead of two
// pieces: half of the products. The step grows where sums of words might not fit 32 bits (8-bit codes, 260 columns).
// Contract: |x' - step * (256 high + low)| <= step / 2, that is 2^-16 of the largest |x'|: as fine as fp16 for the
// largest elements and finer than fp16 sums for the rest. Sums and bias products are taken in float.
// Layout for a set of vectors (one set per row group if columns carry parameters, else one):
//   [query block][column group][quad][query in block] two 32-bit words: high and low of four signed bytes each, or 16-bit
//   words of columns 0 and 2 and of columns 1 and 3.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../../schemes/concepts.hpp"

namespace kvq::inline v0_1::kernels {

/// Queries that share one pass over a block.
inline constexpr int query_block = 4;

/// Splits n queries into blocks of 4, 2 and 1.
constexpr int next_query_block(int remaining) noexcept { return remaining >= 4 ? 4 : remaining >= 2 ? 2 : 1; }

/// How numbers of a folded vector are held: a signed byte, two of them, a signed 16-bit word.
enum class vector_form { byte, two_bytes, word };

template <class Lanes, class Backend>
inline constexpr vector_form form_of = Backend::pieces == 1   ? vector_form::byte
                                       : Lanes::word_products ? vector_form::word
                                                              : vector_form::two_bytes;

/// What remains of a vector besides its pieces, per (set, column group, query).
struct fold_scalars {
    float step;
    float sum;              // of x'
    float bias_dot;         // of x with col_bias
    std::int32_t high_sum;  // of the bytes, or of the words
    std::int32_t low_sum;
};

/// Sizes of a folded set of `n` vectors; see above.
template <int Bits>
struct fold_layout {
    static constexpr int step = code_planes<Bits>::quads_per_step;
    /// Bytes that storing whole vectors of pieces may write beyond the last word.
    static constexpr std::size_t overrun = 256;

    grouped_axis cols;
    int sets;
    int n;

    constexpr fold_layout(const code_layout<Bits>& codes, bool per_row_group, int queries) noexcept
        : cols(codes.cols), sets(per_row_group ? codes.rows().groups() : 1), n(queries) {}

    constexpr int first_step(int group) const noexcept { return cols.group_begin(group) / 4 / step; }
    constexpr int last_step(int group) const noexcept {
        return detail::ceil_div((cols.group_begin(group) + cols.group_slots(group)) / 4, step);
    }
    /// Words per query of one set.
    constexpr int set_words() const noexcept {
        int steps = 0;
        for (int g = 0; g < cols.groups(); ++g) steps += last_step(g) - first_step(g);
        return steps * step * 2;
    }
    constexpr std::size_t scalars() const noexcept {
        return static_cast<std::size_t>(sets) * static_cast<std::size_t>(cols.groups()) *
               static_cast<std::size_t>(n);
    }
    constexpr std::size_t bytes() const noexcept {
        return detail::round_up(scalars() * sizeof(fold_scalars), std::size_t{64}) +
               detail::round_up(static_cast<std::size_t>(sets) * static_cast<std::size_t>(set_words()) *
                                        static_cast<std::size_t>(n) * 4 +
                                    overrun,
                                std::size_t{64}) +
               3 * scratch_floats() * sizeof(float);
    }
    /// One padded row of floats.
    constexpr std::size_t scratch_floats() const noexcept {
        const int floats = detail::round_up(cols.slots(), 4 * step) + 32;
        return static_cast<std::size_t>(floats);
    }

    fold_scalars* scalars(std::byte* memory) const noexcept {
        return reinterpret_cast<fold_scalars*>(memory);
    }
    std::uint32_t* words(std::byte* memory) const noexcept {
        return reinterpret_cast<std::uint32_t*>(
            memory + detail::round_up(scalars() * sizeof(fold_scalars), std::size_t{64}));
    }
    float* scratch(std::byte* memory) const noexcept {
        return reinterpret_cast<float*>(memory + bytes() - 3 * scratch_floats() * sizeof(float));
    }
};

template <class Lanes>
std::int32_t sum_words(typename Lanes::ints a) {
    std::byte words[4 * Lanes::width];
    Lanes::store(words, a);
    std::int32_t sum = 0;
    for (int i = 0; i < Lanes::width; ++i) sum += detail::load_as<std::int32_t>(words + 4 * i);
    return sum;
}

/// Folds n vectors x[i] (cols floats each, x_stride apart) for products with `block`.
template <class Lanes, class Backend, class Scheme>
void fold(const Scheme& scheme, const block_shape& shape, block_id id, const std::byte* block, const float* x,
          std::ptrdiff_t x_stride, int n, std::byte* memory) {
    const fold_use use = Scheme::fold(shape.role);
    const auto codes = scheme.codes(shape);
    const fold_layout<Scheme::code_bits> layout(codes, use.columns(), n);
    constexpr int step = fold_layout<Scheme::code_bits>::step;
    constexpr vector_form form = form_of<Lanes, Backend>;
    constexpr float top_code = (1 << Scheme::code_bits) - 1;
    const grouped_axis& cols = layout.cols;
    float* const vector = layout.scratch(memory);
    float* const scale = vector + layout.scratch_floats();
    float* const bias = scale + layout.scratch_floats();
    const bool dense = cols.groups() == 1 || cols.group % 4 == 0;

    for (int set = 0; set < layout.sets; ++set) {
        if (use.columns()) {
            if constexpr (requires {
                              scheme.template col_parameters<Backend>(shape, id, block, set, scale, bias);
                          })
                scheme.template col_parameters<Backend>(shape, id, block, set, scale, bias);
        }
        std::uint32_t* words = layout.words(memory) + static_cast<std::size_t>(set) *
                                                          static_cast<std::size_t>(layout.set_words() * n);
        for (int first = 0; first < n;) {
            const int block_n = next_query_block(n - first);
            for (int i = first; i < first + block_n; ++i) {
                const float* const row = x + i * x_stride;
                std::uint32_t* out = words + 2 * (i - first);
                for (int g = 0; g < cols.groups(); ++g) {
                    const int begin = cols.group_begin(g), size = cols.group_size(g);
                    const int from = 4 * step * layout.first_step(g), to = 4 * step * layout.last_step(g);
                    // x' of this group with zeros around it, up to the borders of a step.
                    for (int c = from; c < begin; ++c) vector[c - from] = 0.0f;
                    float* const inside = vector + (begin - from);
                    const float* const source = row + (dense ? begin : g * cols.group);
                    fold_scalars s{0.0f, 0.0f, 0.0f, 0, 0};
                    typename Lanes::floats largest = Lanes::splat_float(0.0f), sum = largest, dot = largest;
                    for (int c = 0; c < size; c += Lanes::width) {
                        const int left = size - c;
                        auto v = left >= Lanes::width ? Lanes::load_floats(source + c)
                                                      : Lanes::load_floats(source + c, left);
                        if (use.col_bias) {
                            const auto b = left >= Lanes::width ? Lanes::load_floats(bias + begin + c)
                                                                : Lanes::load_floats(bias + begin + c, left);
                            dot = Lanes::multiply_add(v, b, dot);
                        }
                        if (use.col_scale) {
                            const auto f = left >= Lanes::width ? Lanes::load_floats(scale + begin + c)
                                                                : Lanes::load_floats(scale + begin + c, left);
                            v = Lanes::multiply(v, f);
                        }
                        Lanes::store_floats(inside + c, v);
                        largest = Lanes::max(largest, Lanes::abs(v));
                        sum = Lanes::add(sum, v);
                    }
                    for (int c = begin - from + size; c < to - from; ++c) vector[c] = 0.0f;
                    s.sum = Lanes::sum(sum);
                    s.bias_dot = Lanes::sum(dot);
                    const float top = Lanes::largest(largest);
                    float range = form == vector_form::byte ? 127.0f : 32512.0f;
                    if constexpr (form == vector_form::word)
                        range = detail::smaller(range, 0x1.fffffp30f / (top_code * static_cast<float>(size)));
                    // Vectors this small are zero next to anything float can hold.
                    const float inverse = top > 1e-33f ? range / top : 0.0f;
                    s.step = top > 1e-33f ? top / range : 0.0f;
                    auto sums = Lanes::splat(0), high_sums = sums;
                    for (int c = 0; c < to - from; c += Lanes::width) {
                        const auto fixed = Lanes::round(
                            Lanes::multiply(Lanes::load_floats(vector + c), Lanes::splat_float(inverse)));
                        auto high = fixed;
                        if constexpr (form == vector_form::two_bytes)
                            high =
                                Lanes::template shift_right_signed<8>(Lanes::add(fixed, Lanes::splat(128)));
                        if constexpr (form == vector_form::word)
                            Lanes::store_word_pairs(out, 2 * block_n, fixed);
                        else
                            Lanes::store_pieces(out, 2 * block_n, high, fixed);
                        out += Lanes::width / 4 * 2 * block_n;
                        if constexpr (Scheme::zero_code != 0) {
                            sums = Lanes::add(sums, fixed);
                            high_sums = Lanes::add(high_sums, high);
                        }
                    }
                    // A vector may have run over the end of the group: the next one starts where this one ends.
                    out -= (detail::round_up(to - from, Lanes::width) - (to - from)) / 4 * 2 * block_n;
                    if constexpr (Scheme::zero_code != 0) {
                        s.high_sum = sum_words<Lanes>(high_sums);
                        if constexpr (form == vector_form::two_bytes)
                            s.low_sum = sum_words<Lanes>(sums) - 256 * s.high_sum;
                    }
                    layout.scalars(memory)[(set * cols.groups() + g) * n + i] = s;
                }
            }
            words += layout.set_words() * block_n;
            first += block_n;
        }
    }
}

}  // namespace kvq::inline v0_1::kernels
