// The scales of rows of tokens as floats, and minima.
//
//   row_scale_reader<Lanes> r(layout, tensor_scale, dim, turned)
//   r.read(place, rows, scales, tokens, codes, to, minima)     true: 2^31 times each is known to be finite
//
// turned: scale g of token t at to[g * tokens_of_pass + t], as products of codes take them (row_codes.hpp);
// else those of a token side by side, of chunks of 32 channels or of smaller groups.
// Contract: a scale is the stored one times that of the tensor, rounded once; of fp16 the tensor's is not
// used. Nothing outside of the rows and their scales is read.
#pragma once

#include <cstring>

#include "../../core/row_place.hpp"
#include "../../schemes/row_layout.hpp"
#include "../special_values.hpp"
#include "row_codes.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace kernels {

/// All words or-ed.
template <class Lanes>
std::uint32_t any_bits(typename Lanes::ints a) {
    std::uint32_t words[Lanes::width], all = 0;
    Lanes::store(reinterpret_cast<std::byte*>(words), a);
    for (const std::uint32_t w : words) all |= w;
    return all;
}
/// 2^(code - 127); the code 255 is NaN.
template <class Lanes>
typename Lanes::floats powers_of_two(typename Lanes::ints codes) {
    const auto where_negative = [](typename Lanes::ints a) {
        return Lanes::bit_and(Lanes::template shift_right_signed<31>(a), Lanes::splat(1 << 22));
    };
    const auto special = Lanes::bit_or(where_negative(Lanes::subtract(codes, Lanes::splat(1))),
                                       where_negative(Lanes::subtract(Lanes::splat(254), codes)));
    return Lanes::as_floats(Lanes::bit_or(Lanes::template shift_left<23>(codes), special));
}

template <class Lanes>
class row_scale_reader {
public:
    row_scale_reader(const row_layout& layout, float tensor_scale, int dim, bool turned)
        : layout_(layout), turned_(turned), factor_(tensor_scale) {
        const bool scaled = layout.scale != row_layout::stored::none;
        groups_ = scaled ? dim / layout.group_of(dim) : 0;
        channels_ = layout.channels % row_chunk == 0 && layout.scale != row_layout::stored::fp16
                        ? row_chunk
                        : layout.channels;
        line_ = scaled ? detail::ceil_div(dim, channels_) : 0;
        // Chunks have two. No kernel takes fp16 of 16 channels.
        if (layout.channels == 16 && layout.scale != row_layout::stored::fp16)
            line_ = detail::round_up(line_, 2);
    }

    int groups() const { return groups_; }
    /// Scales of a token, which are its stride unless they are turned. 0: none.
    int line() const { return line_; }
    /// Floats of `tokens` tokens.
    int floats(int tokens) const { return turned_ ? groups_ * tokens_of_pass : tokens * line_; }
    /// Where the scale of a channel is.
    int place(int token, int channel) const {
        return turned_ ? channel / channels_ * tokens_of_pass + token : token * line_ + channel / channels_;
    }
    /// Are 2^power times them?
    bool finite(const float* scales, int tokens, int power) const {
        return turned_
                   ? all_finite<Lanes>(scales, static_cast<std::size_t>(tokens), power, groups_,
                                       tokens_of_pass)
                   : all_finite<Lanes>(
                         scales, static_cast<std::size_t>(tokens) * static_cast<std::size_t>(line_), power);
    }

    /// Collects the scales of all tokens, then converts vectors of them. True: 2^31 times each is finite.
    bool read(const row_place& of, const std::byte* const* rows, const std::byte* const* places, int tokens,
              std::byte* codes, float* scales, float* minima) const {
        if (layout_.scale == row_layout::stored::fp16) {
            const bool finite = read_halves(rows, 0, tokens, codes, scales);
            return (!layout_.minimum || read_halves(rows, 2, tokens, codes, minima)) && finite;
        }
        const bool follow = of.group_stride == 1 && of.scale_stride == groups_ && !of.blocks;
        if (turned_) return read_turned_scales(of.group_stride, follow, places, tokens, codes, scales);
        const int all = tokens * groups_;
        if (follow) {
            std::memcpy(codes, places[0], static_cast<std::size_t>(all));
        } else {
            for (int t = 0; t < tokens; ++t)
                for (int g = 0; g < groups_; ++g) codes[t * groups_ + g] = places[t][g * of.group_stride];
        }
        const int copies = layout_.channels / channels_;
        const bool dense = copies == 1 && line_ == groups_;
        float* const to = dense ? scales : reinterpret_cast<float*>(codes + detail::round_up(all, 64));
        for (int i = 0; i < all; i += Lanes::width)
            Lanes::store_floats(
                to + i, Lanes::multiply(numbers_of_scales(layout_.scale, Lanes::load_bytes(codes + i)),
                                        Lanes::splat_float(factor_)));
        for (int t = 0; t < tokens && !dense; ++t)
            for (int g = 0; g < line_; ++g)
                scales[t * line_ + g] = g / copies < groups_ ? to[t * groups_ + g / copies] : 0.0f;
        return false;
    }

private:
    static typename Lanes::floats numbers_of_scales(row_layout::stored kind, typename Lanes::ints codes) {
        return kind == row_layout::stored::e4m3 ? float_lanes<Lanes, e4m3>::values(codes)
                                                : powers_of_two<Lanes>(codes);
    }
    /// Four of a token in a word, words of a vector of tokens. follow: those of a token lie side by side,
    /// and so do tokens.
    bool read_turned_scales(std::ptrdiff_t group_stride, bool follow, const std::byte* const* places,
                            int tokens, std::byte* codes, float* to) const {
        const auto factor = Lanes::splat_float(factor_);
        if constexpr (multiplies_codes<Lanes>)
            if (follow && groups_ == 8 && e4m3_eights(places[0], tokens, codes, to)) return true;
        bool finite = true;
        for (int g = 0; g < groups_; g += 4) {
            const int here = detail::smaller(groups_ - g, 4);
            const int copied = follow && groups_ == 4 ? tokens : 0;
            if (copied > 0) std::memcpy(codes, places[0], 4 * static_cast<std::size_t>(tokens));
            if (group_stride == 1 && here == 4)
                for (int t = copied; t < tokens; ++t) std::memcpy(codes + 4 * t, places[t] + g, 4);
            else
                for (int t = 0; t < tokens; ++t)
                    for (int k = 0; k < here; ++k) codes[4 * t + k] = places[t][(g + k) * group_stride];
            const auto convert = [&](const auto& number) {
                for (int t = 0; t < tokens; t += Lanes::width) {
                    auto words = Lanes::load(codes + 4 * t);
                    for (int k = 0; k < here; ++k, words = Lanes::template shift_right<8>(words))
                        Lanes::store_floats(
                            to + (g + k) * tokens_of_pass + t,
                            Lanes::multiply(number(Lanes::bit_and(words, Lanes::splat(255))), factor));
                }
            };
            if (layout_.scale == row_layout::stored::e4m3) {
                if constexpr (multiplies_codes<Lanes>)
                    if (here == 4 && e4m3_words(codes, tokens, to + g * tokens_of_pass)) continue;
                convert([](auto x) { return numbers_of_scales(row_layout::stored::e4m3, x); });
            } else {
                convert([](auto x) { return numbers_of_scales(row_layout::stored::e8m0, x); });
            }
            finite = false;
        }
        return finite;
    }
    /// Is 2^31 times each? e4m3 is read through 16-bit floats, whose unit is 2^-8 of its own.
    bool stays_finite() const { return factor_ * 448.0f * 0x1p31f * 0.0f == 0.0f; }
    static typename Lanes::ints nan_of_e4m3(typename Lanes::ints found, typename Lanes::ints codes) {
        return Lanes::bit_or(
            found, Lanes::add(Lanes::bit_and(codes, Lanes::splat(0x7f7f7f7f)), Lanes::splat(0x01010101)));
    }
    /// Eight of a token side by side, tokens behind each other. False: one is NaN, or 2^31 times it infinite.
    bool e4m3_eights(const std::byte* from, int tokens, std::byte* codes, float* to) const {
        constexpr int width = Lanes::width;
        if (layout_.scale != row_layout::stored::e4m3 || !stays_finite()) return false;
        const auto factor = Lanes::splat_float(256.0f * factor_);
        auto found = Lanes::splat(0);
        for (int t = 0; t < tokens; t += width, from += 8 * width) {
            if (tokens - t < width) {
                std::memset(codes, 0, 8 * width);
                std::memcpy(codes, from, 8 * static_cast<std::size_t>(tokens - t));
                from = codes;
            }
            const typename Lanes::ints two[2] = {Lanes::load(from), Lanes::load(from + 4 * width)};
            found = nan_of_e4m3(nan_of_e4m3(found, two[0]), two[1]);
            typename Lanes::floats of[8];
            Lanes::turn_e4m3(two, of);
            for (int k = 0; k < 8; ++k)
                Lanes::store_floats(to + k * tokens_of_pass + t, Lanes::multiply(of[k], factor));
        }
        return (any_bits<Lanes>(found) & 0x80808080u) == 0;
    }
    /// Four in a word. False: the same.
    bool e4m3_words(const std::byte* codes, int tokens, float* to) const {
        if (!stays_finite()) return false;
        const auto factor = Lanes::splat_float(256.0f * factor_);
        auto found = Lanes::splat(0);
        for (int t = 0; t < tokens; t += Lanes::width) {
            found = nan_of_e4m3(found, Lanes::load(codes + 4 * t));
            typename Lanes::floats of[4];
            Lanes::load_e4m3_words(codes + 4 * t, of);
            for (int k = 0; k < 4; ++k)
                Lanes::store_floats(to + k * tokens_of_pass + t, Lanes::multiply(of[k], factor));
        }
        return (any_bits<Lanes>(found) & 0x80808080u) == 0;
    }
    /// The fp16 `offset` bytes behind the beginning of each group. True: all are known to be finite.
    bool read_halves(const std::byte* const* rows, int offset, int tokens, std::byte* bits, float* to) const {
        constexpr int width = Lanes::width;
        const int step = layout_.group_bytes(layout_.channels);
        if (!turned_) {
            for (int t = 0; t < tokens; ++t)
                for (int g = 0; g < groups_; ++g)
                    std::memcpy(bits + 2 * (t * groups_ + g), rows[t] + offset + g * step, 2);
            for (int i = 0; i < tokens * groups_; i += width)
                Lanes::store_floats(to + i, Lanes::template load_values<float16>(bits + 2 * i));
            return false;
        }
        auto found = Lanes::splat(0);
        for (int g = 0; g < groups_; g += 4, to += 4 * tokens_of_pass) {
            const int here = detail::smaller(groups_ - g, 4);
            std::ptrdiff_t place[4];  // of four groups, or of the last one again
            for (int k = 0; k < 4; ++k)
                place[k] = offset + std::ptrdiff_t{g + detail::smaller(k, here - 1)} * step;
            const int half = 4 * detail::round_up(tokens, width);
            for (int t = 0; t < tokens; ++t) {
                const std::byte* const row = rows[t];
                const auto two = [&](int k) KVQ_INLINE_LAMBDA {
                    return std::uint32_t{detail::load_as<std::uint16_t>(row + place[k])} |
                           std::uint32_t{detail::load_as<std::uint16_t>(row + place[k + 1])} << 16;
                };
                const std::uint32_t first = two(0), second = two(2);
                std::memcpy(bits + 4 * t, &first, 4);
                std::memcpy(bits + half + 4 * t, &second, 4);
            }
            for (int t = 0; t < tokens; t += width)
                for (int k = 0; k < here; k += 2) {
                    const auto words = Lanes::load(bits + k / 2 * half + 4 * t);
                    found = Lanes::bit_or(found, special_values<Lanes, float16>::marks(words));
                    float* const two = to + k * tokens_of_pass + t;
                    Lanes::store_floats(two, Lanes::template halves<float16, 0>(words));
                    if (k + 1 < here)
                        Lanes::store_floats(two + tokens_of_pass, Lanes::template halves<float16, 1>(words));
                }
        }
        return !special_values<Lanes, float16>::any(found);
    }

    row_layout layout_;
    bool turned_;
    float factor_;
    int groups_, channels_, line_;
};

}}}  // namespace kvq::kernels
