// Coding a full block of window values with a composed scheme, a vector of rows at a time.
//
// The window block and the coded block have the same tiles, so nothing is transposed: a lane stays a row. Parameters of rows
// are found across columns in every lane at once, parameters of columns across lanes.
// Contract: the same bytes as scheme::encode (tests/conformance). Blocks that hold NaN or infinities, and row groups that
// do not line up with tiles, are left to it: encode_block returns false and has written nothing that matters.
#pragma once

#include <cstring>

#include "../../pack/value_layout.hpp"
#include "../../schemes/scheme.hpp"

namespace kvq::inline v0_1::kernels {

template <class S>
inline constexpr bool is_composed = false;
template <class Bits, class Levels, class Granularity, class Params>
inline constexpr bool is_composed<scheme<Bits, Levels, Granularity, Params>> =
    std::same_as<Levels, asymmetric> || std::same_as<Levels, symmetric>;

/// A scheme that block_encoder knows how to write: composed of the library's own levels, and not a type derived from one,
/// whose encode() may do more (transform, search).
template <class S>
concept composed_scheme = is_composed<S>;

template <class Lanes, class Window, composed_scheme Scheme>
class block_encoder {
public:
    block_encoder(const Scheme& scheme, const block_shape& shape, const std::byte* window, std::byte* block,
                  float* scratch)
        : scheme_(scheme),
          shape_(shape),
          window_(shape),
          codes_(scheme.codes(shape)),
          from_(window),
          to_(block),
          scratch_(scratch) {}

    bool run() {
        const grouped_axis& rows = codes_.rows();
        const bool lines_up = rows.groups() == 1 || rows.group % tile_layout::tile_rows == 0 ||
                              tile_layout::tile_rows % rows.group == 0;
        if (!lines_up || shape_.rows() < 2 || !all_finite()) return false;
        // Padding between sections and of odd groups is zero, as the reference writes it.
        std::memset(to_, 0, scheme_.block_bytes(shape_));
        const bool on_rows = detail::on_rows<typename Scheme::granularity_type>(shape_.role);
        for (int rg = 0; rg < rows.groups(); ++rg) {
            if (!on_rows) fit_columns(rg);
            for (int part = 0; part < rows.group_size(rg);) {
                const int height = detail::smaller(
                    tile_layout::tile_rows,
                    rows.group_slots(rg) - part / tile_layout::tile_rows * tile_layout::tile_rows);
                const int in_tile = part % tile_layout::tile_rows;
                const int n = detail::smaller(Lanes::width,
                                              detail::smaller(rows.group_size(rg) - part, height - in_tile));
                if (on_rows)
                    code_rows(part, n);
                else
                    code_columns(rg, part, n);
                part += n;
            }
        }
        return true;
    }

private:
    using levels = typename Scheme::levels;
    using parameter = typename Scheme::parameter;
    using planes = code_planes<Scheme::code_bits>;
    using floats = typename Lanes::floats;
    using ints = typename Lanes::ints;
    static constexpr int bits = Scheme::code_bits;
    static constexpr int per_word = value_layout<Window>::values_per_word;

    bool all_finite() const {
        // Exponent bits all set: infinity or NaN. Works on words, whatever they hold two of.
        const std::size_t words = window_.tiles.words();
        std::uint32_t found = 0;
        for (std::size_t i = 0; i < words; ++i) {
            const auto w = detail::load_as<std::uint32_t>(from_ + 4 * i);
            if constexpr (std::same_as<Window, float>) {
                found |= static_cast<std::uint32_t>((w & 0x7f800000u) == 0x7f800000u);
            } else {
                constexpr std::uint32_t e = std::same_as<Window, float16> ? 0x7c00u : 0x7f80u;
                found |= static_cast<std::uint32_t>((w & e) == e) |
                         static_cast<std::uint32_t>((w & (e << 16)) == (e << 16));
            }
        }
        return found == 0;
    }

    ints load_word(int row, int word, int n) const {
        const std::byte* const p = from_ + 4 * window_.tiles.word(row, word);
        return n == Lanes::width ? Lanes::load(p) : Lanes::load(p, n);
    }
    template <int Half>
    static KVQ_INLINE floats half(ints words) {
        if constexpr (std::same_as<Window, float>)
            return Lanes::as_floats(words);
        else
            return Lanes::template halves<Window, Half>(words);
    }

    /// Calls f(col, values) for columns [begin, end) of n rows from `row` on.
    template <class F>
    KVQ_INLINE void each_column(int row, int n, int begin, int end, F&& f) const {
        int c = begin;
        const std::byte* p = from_ + 4 * window_.tiles.word(row, begin / per_word);
        const std::ptrdiff_t step =
            window_.tiles.words_per_row > 1
                ? 4 * static_cast<std::ptrdiff_t>(window_.tiles.word(row, 1) - window_.tiles.word(row, 0))
                : 0;
        const auto load = [&] { return n == Lanes::width ? Lanes::load(p) : Lanes::load(p, n); };
        if constexpr (per_word == 2) {
            if (c % 2) {
                f(c++, half<1>(load()));
                p += step;
            }
            for (; c + 1 < end; c += 2, p += step) {
                const ints w = load();
                f(c, half<0>(w));
                f(c + 1, half<1>(w));
            }
            if (c < end) f(c, half<0>(load()));
        } else {
            for (; c < end; ++c, p += step) f(c, half<0>(load()));
        }
    }

    static KVQ_INLINE ints to_codes(floats x, floats bias, floats inverse) {
        constexpr auto top = static_cast<float>(levels::template top<bits>);
        if constexpr (levels::has_bias) {
            const floats v = Lanes::multiply(Lanes::subtract(x, bias), inverse);
            return Lanes::round(Lanes::min(Lanes::max(v, Lanes::splat_float(0.0f)), Lanes::splat_float(top)));
        } else {
            constexpr int zero = levels::template zero_code<bits>;
            constexpr auto steps = top - static_cast<float>(zero);
            const floats v = Lanes::multiply(x, inverse);
            const floats bounded =
                Lanes::min(Lanes::max(v, Lanes::splat_float(-steps)), Lanes::splat_float(steps));
            return Lanes::add(Lanes::round(bounded), Lanes::splat(zero));
        }
    }

    /// Collects codes column by column and stores whole vectors of every plane.
    struct code_writer {
        const block_encoder& self;
        std::byte* at;                // first vector of these rows
        std::ptrdiff_t vector_bytes;  // from one vector to the next
        int n;
        ints word = Lanes::splat(0);
        ints pending[planes::count] = {};

        code_writer(const block_encoder& e, int row, int rows)
            : self(e), at(e.to_ + 4 * e.codes_.tiles.word(row, 0)), vector_bytes(0), n(rows) {
            if (e.codes_.tiles.words_per_row > 1)
                vector_bytes = 4 * static_cast<std::ptrdiff_t>(e.codes_.tiles.word(row, 1) -
                                                               e.codes_.tiles.word(row, 0));
            for (int p = 0; p < planes::count; ++p) pending[p] = Lanes::splat(0);
        }

        KVQ_INLINE void put(int slot, ints code) {
            switch (slot % 4) {
                case 0:
                    word = code;
                    return;
                case 1:
                    word = Lanes::bit_or(word, Lanes::template shift_left<8>(code));
                    return;
                case 2:
                    word = Lanes::bit_or(word, Lanes::template shift_left<16>(code));
                    return;
                default:
                    word = Lanes::bit_or(word, Lanes::template shift_left<24>(code));
            }
            finish_quad(slot / 4);
        }
        /// The last columns of a group may not fill their quad.
        KVQ_INLINE void end_group(int last_slot) {
            if (last_slot % 4 != 3) finish_quad(last_slot / 4);
        }
        void flush() {
            const int quads = self.codes_.quads();
            add_planes<0, true>(quads - 1);
        }

    private:
        KVQ_INLINE void finish_quad(int quad) { add_planes<0, false>(quad); }

        template <int Plane, bool Flush>
        KVQ_INLINE void add_planes(int quad) {
            if constexpr (Plane < planes::count) {
                constexpr int width = planes::width(Plane), per_vector = planes::quads_per_word(Plane);
                if constexpr (!Flush) {
                    constexpr std::uint32_t mask = ((1u << width) - 1u) * 0x01010101u;
                    const ints part = Lanes::bit_and(Lanes::template shift_right<planes::shift(Plane)>(word),
                                                     Lanes::splat(static_cast<std::int32_t>(mask)));
                    pending[Plane] =
                        Lanes::bit_or(pending[Plane], shifted<width, per_vector>(part, quad % per_vector));
                }
                const bool full = quad % per_vector == per_vector - 1;
                if (Flush ? !full : full) {
                    std::byte* const to =
                        at +
                        (planes::first_vector(Plane, self.codes_.quads()) + quad / per_vector) * vector_bytes;
                    if (n == Lanes::width)
                        Lanes::store(to, pending[Plane]);
                    else
                        Lanes::store(to, pending[Plane], n);
                    pending[Plane] = Lanes::splat(0);
                }
                add_planes<Plane + 1, Flush>(quad);
            }
        }
        template <int Width, int PerVector, int At = 0>
        static KVQ_INLINE ints shifted(ints part, int index) {
            if constexpr (At + 1 < PerVector)
                if (index != At) return shifted<Width, PerVector, At + 1>(part, index);
            return Lanes::template shift_left<Width * At>(part);
        }
    };

    /// Parameters on rows: n rows from `row` on, group after group.
    void code_rows(int row, int n) {
        const grouped_axis& cols = codes_.cols;
        code_writer writer(*this, row, n);
        for (int g = 0; g < cols.groups(); ++g) {
            const int begin = g * cols.group, end = begin + cols.group_size(g);
            floats lo = Lanes::splat_float(detail::max_float), hi = Lanes::splat_float(-detail::max_float);
            each_column(row, n, begin, end, [&](int, floats x) {
                lo = Lanes::min(lo, x);
                hi = Lanes::max(hi, x);
            });
            float low[Lanes::width], high[Lanes::width], bias[Lanes::width], inverse[Lanes::width];
            Lanes::store_floats(low, lo);
            Lanes::store_floats(high, hi);
            for (int i = 0; i < Lanes::width; ++i) bias[i] = inverse[i] = 0.0f;
            std::byte* const at = to_ + scheme_.parameter_offset(shape_, g, codes_.rows().slot(row));
            for (int i = 0; i < n; ++i) store_fit(at, i, low[i], high[i], bias[i], inverse[i]);
            const floats b = Lanes::load_floats(bias), f = Lanes::load_floats(inverse);
            const int first_slot = cols.group_begin(g);
            each_column(row, n, begin, end,
                        [&](int c, floats x) { writer.put(first_slot + c - begin, to_codes(x, b, f)); });
            writer.end_group(first_slot + end - begin - 1);
        }
        writer.flush();
    }

    KVQ_INLINE void store_fit(std::byte* at, int i, float low, float high, float& bias,
                              float& inverse) const {
        const auto stored = levels::template fit<bits, parameter>(low, high);
        std::byte* const to = at + static_cast<std::size_t>(i) * sizeof(parameter);
        detail::store_as(to, stored.scale);
        if constexpr (levels::has_bias) detail::store_as(to + scheme_.section_bytes(shape_), stored.bias);
        const float scale = static_cast<float>(stored.scale);
        bias = static_cast<float>(stored.bias);
        inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
    }

    /// Parameters on columns, for one row group; bias and inverse go to scratch.
    void fit_columns(int rg) {
        const grouped_axis& rows = codes_.rows();
        const int first = rg * rows.group, size = rows.group_size(rg), cols = shape_.cols();
        std::byte* const at = to_ + scheme_.parameter_offset(shape_, rg, 0);
        for (int c = 0; c < cols; c += per_word) {
            floats lo[2], hi[2];
            for (int h = 0; h < 2; ++h) {
                lo[h] = Lanes::splat_float(detail::max_float);
                hi[h] = Lanes::splat_float(-detail::max_float);
            }
            for (int part = 0; part < size;) {
                const int row = first + part;
                const int n = detail::smaller(
                    Lanes::width,
                    detail::smaller(size - part, tile_layout::tile_rows - row % tile_layout::tile_rows));
                const ints w = load_word(row, c / per_word, n);
                const floats x0 = whole(half<0>(w), n);
                lo[0] = Lanes::min(lo[0], x0);
                hi[0] = Lanes::max(hi[0], x0);
                if constexpr (per_word == 2) {
                    const floats x1 = whole(half<1>(w), n);
                    lo[1] = Lanes::min(lo[1], x1);
                    hi[1] = Lanes::max(hi[1], x1);
                }
                part += n;
            }
            for (int h = 0; h < per_word && c + h < cols; ++h)
                store_fit(at, c + h, Lanes::smallest(lo[h]), Lanes::largest(hi[h]), scratch_[c + h],
                          scratch_[cols + c + h]);
        }
    }

    /// Lanes from n on repeat lane 0, so that they change no minimum or maximum.
    static floats whole(floats x, int n) {
        if (n == Lanes::width) return x;
        float lane[Lanes::width];
        Lanes::store_floats(lane, x);
        for (int i = n; i < Lanes::width; ++i) lane[i] = lane[0];
        return Lanes::load_floats(lane);
    }

    void code_columns(int rg, int part, int n) {
        const int row = rg * codes_.rows().group + part, cols = shape_.cols();
        code_writer writer(*this, row, n);
        each_column(row, n, 0, cols, [&](int c, floats x) {
            writer.put(c,
                       to_codes(x, Lanes::splat_float(scratch_[c]), Lanes::splat_float(scratch_[cols + c])));
        });
        writer.end_group(cols - 1);
        writer.flush();
    }

    const Scheme& scheme_;
    const block_shape shape_;
    const value_layout<Window> window_;
    const code_layout<bits> codes_;
    const std::byte* from_;
    std::byte* to_;
    float* scratch_;
};

}  // namespace kvq::inline v0_1::kernels
