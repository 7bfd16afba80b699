// scheme<bits, levels, granularity, params, encoder>: the composed scheme that every published affine method is an alias of.
//
//   block = [codes][scales][biases]          each section padded to 16 bytes; docs/reference/format.md
//   parameters of rows    are stored [column group][row slot], those of columns [row group][column slot]
//
// Encoder: quant/encoders.hpp. min_max, the only encoder that kernels vectorise here, takes the range of the group with parameters
// rounded outside it (quant/affine.hpp). All encoders have the same block format and the same dequantizing.
// Example: scheme<bits<3>, asymmetric, per_channel<32>, params<float16>>
#pragma once

#include <cstring>
#include <vector>

#include "../core/text.hpp"
#include "../pack/bit_pack.hpp"
#include "../quant/affine.hpp"
#include "../quant/error_feedback.hpp"
#include "../quant/granularity.hpp"
#include "../quant/params.hpp"
#include "../quant/symmetric.hpp"
#include "concepts.hpp"

namespace kvq::inline KVQ_TAGGED {

namespace detail {
template <class Bits, class Levels, class Granularity>
concept scheme_arguments = granularity<Granularity> && requires {
    { Bits::value } -> std::convertible_to<int>;
    { Levels::has_bias } -> std::convertible_to<bool>;
    { Levels::min_bits } -> std::convertible_to<int>;
};
}  // namespace detail

template <class Bits, class Levels, class Granularity, class Params = params<float16>,
          class Encoder = min_max>
struct scheme {
    using attends_as = scheme;
    static_assert(
        detail::scheme_arguments<Bits, Levels, Granularity>,
        "kvq::scheme<bits<B>, levels, granularity, params<P>>: in this order, levels such as asymmetric, "
        "the granularity per_token<G> or per_channel<G>");
    using levels = Levels;
    using granularity_type = Granularity;
    using parameter = typename detail::parameter_of<Params>::type;
    using encoder_type = Encoder;
    static constexpr bool fits_range = std::same_as<Encoder, min_max>;
    static_assert(detail::grid_encoder<Encoder> && (fits_range || Levels::has_bias),
                  "kvq::scheme<bits<B>, levels, granularity, params<P>, encoder>: the fifth argument must be "
                  "an encoder, such "
                  "as least_squares; symmetric levels take min_max alone");
    static constexpr int code_bits = Bits::value;
    static_assert(code_bits < 1 || code_bits >= Levels::min_bits,
                  "kvq::scheme: symmetric levels need at least 2 bits");
    static constexpr int zero_code = Levels::template zero_code<code_bits>;

    [[no_unique_address]] Granularity granularity{};
    [[no_unique_address]] Encoder encoder{};

    scheme() = default;
    /// For a granularity whose group size is a value.
    explicit scheme(Granularity g, Encoder e = {}) : granularity(g), encoder(std::move(e)) {}
    explicit scheme(Encoder e) requires(!fits_range) : encoder(std::move(e)) {}
    /// With error feedback, if the statistics hold products of queries.
    explicit scheme(const calibration& statistics) requires
        std::constructible_from<Encoder, const calibration&, const width_plan*>
        : encoder(statistics, nullptr) {}

    short_text name() const {
        return short_text(Levels::name) + short_text::of(code_bits) + "-" + granularity.name() + "-" +
               detail::parameter_name<parameter>();
    }

    /// Codes of a block of shape `s`; they start at its first byte.
    KVQ_HD KVQ_INLINE constexpr code_layout<code_bits> codes(const block_shape& s) const noexcept {
        return {detail::row_axis(granularity, s), detail::col_axis(granularity, s)};
    }

    KVQ_HD constexpr std::size_t block_bytes(const block_shape& s) const noexcept {
        return scale_offset(s) + (Levels::has_bias ? 2 : 1) * section_bytes(s);
    }

    std::uint32_t quantize(const block_shape& s, block_id id, const float* values, std::byte* block) const {
        std::memset(block, 0, block_bytes(s));
        if constexpr (!fits_range) return quantize_fitted(s, id, values, block);
        const auto layout = codes(s);
        std::uint32_t not_finite = 0;
        each_group(s, [&](const value_group& g) {
            float lo = 0.0f, hi = 0.0f;
            bool any = false;
            for (int i = 0; i < g.size; ++i) {
                const float x = values[g.index(s, i)];
                if (!detail::is_finite(x)) {
                    ++not_finite;
                    continue;
                }
                lo = any ? detail::smaller(lo, x) : x;
                hi = any ? detail::larger(hi, x) : x;
                any = true;
            }
            const auto stored = Levels::template fit<code_bits, parameter>(lo, hi);
            store_parameters(s, block, g.number, g.slot, stored);
            const float scale = static_cast<float>(stored.scale), bias = static_cast<float>(stored.bias);
            const float inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
            for (int i = 0; i < g.size; ++i)
                pack_code(layout, block, g.row(i), g.col(i),
                          static_cast<unsigned>(
                              Levels::template code<code_bits>(values[g.index(s, i)], bias, inverse)));
        });
        return not_finite;
    }

    void dequantize(const block_shape& s, block_id, const std::byte* block, float* values) const {
        const auto layout = codes(s);
        const bool rows = detail::on_rows<Granularity>(s.role);
        const grouped_axis lines = rows ? layout.rows() : layout.cols;
        const grouped_axis cut = rows ? layout.cols : layout.rows();
        const std::byte* const scales = block + parameter_offset(s, 0, 0);
        const std::size_t section = section_bytes(s);
        const int slot_count = lines.padded_size(), row_count = s.rows(), col_count = s.cols();
        for (int r = 0; r < row_count; ++r)
            for (int c = 0; c < col_count; ++c) {
                const int g = (rows ? c : r) / cut.group, slot = lines.slot(rows ? r : c);
                const auto stored = load_parameters(
                    scales + static_cast<std::size_t>(g * slot_count + slot) * sizeof(parameter), section);
                values[index(s, r, c)] = Levels::template value<code_bits>(
                    static_cast<int>(unpack_code(layout, block, r, c)), static_cast<float>(stored.scale),
                    static_cast<float>(stored.bias));
            }
    }

    /// Raises kvq::error if the encoder's statistics belong to another shape; a cache calls it when it is made.
    void check(const cache_shape& shape, tensor) const requires(!fits_range) {
        if constexpr (requires { encoder.check(shape); }) encoder.check(shape);
    }

    // Folding: attention on the codes (schemes/concepts.hpp).

    KVQ_HD static constexpr fold_use fold(tensor role) noexcept {
        return detail::on_rows<Granularity>(role) ? fold_use{true, Levels::has_bias, false, false}
                                                  : fold_use{false, false, true, Levels::has_bias};
    }
    template <class Backend>
    void row_parameters(const block_shape& s, block_id, const std::byte* block, int col_group, float* scale,
                        float* bias) const {
        load_section<Backend>(s, block, col_group, scale, bias);
    }
    template <class Backend>
    void col_parameters(const block_shape& s, block_id, const std::byte* block, int row_group, float* scale,
                        float* bias) const {
        load_section<Backend>(s, block, row_group, scale, bias);
    }

    // Groups and sections of the block, for encoders.

    /// Values that share parameters: a part of a row or of a column.
    struct value_group {
        bool on_row;
        int line, first, size;  // row (column), and the part of it
        int number, slot;       // position of its parameters

        int row(int i) const noexcept { return on_row ? line : first + i; }
        int col(int i) const noexcept { return on_row ? first + i : line; }
        /// Index of member i among the values of the block.
        int index(const block_shape& s, int i) const noexcept { return scheme::index(s, row(i), col(i)); }
    };
    /// Calls f(value_group) for every group, line by line.
    template <class F>
    void each_group(const block_shape& s, F&& f) const {
        const auto layout = codes(s);
        const bool rows = detail::on_rows<Granularity>(s.role);
        const grouped_axis lines = rows ? layout.rows() : layout.cols;
        const grouped_axis cut = rows ? layout.cols : layout.rows();
        for (int line = 0; line < lines.size; ++line)
            for (int g = 0; g < cut.groups(); ++g)
                f(value_group{rows, line, g * cut.group, cut.group_size(g), g, lines.slot(line)});
    }

    KVQ_HD constexpr std::size_t scale_offset(const block_shape& s) const noexcept {
        return detail::round_up(codes(s).bytes(), std::size_t{16});
    }
    KVQ_HD constexpr std::size_t section_bytes(const block_shape& s) const noexcept {
        const auto layout = codes(s);
        const bool rows = detail::on_rows<Granularity>(s.role);
        const int count = rows ? layout.cols.groups() * layout.rows().padded_size()
                               : layout.rows().groups() * layout.cols.padded_size();
        return detail::round_up(static_cast<std::size_t>(count) * sizeof(parameter), std::size_t{16});
    }
    KVQ_HD constexpr std::size_t parameter_offset(const block_shape& s, int group, int slot) const noexcept {
        const auto layout = codes(s);
        const int slot_count =
            detail::on_rows<Granularity>(s.role) ? layout.rows().padded_size() : layout.cols.padded_size();
        return scale_offset(s) + static_cast<std::size_t>(group * slot_count + slot) * sizeof(parameter);
    }
    KVQ_HD void store_parameters(const block_shape& s, std::byte* block, int group, int slot,
                                 const stored_parameters<parameter>& stored) const noexcept {
        std::byte* at = block + parameter_offset(s, group, slot);
        detail::store_as(at, stored.scale);
        if constexpr (Levels::has_bias) detail::store_as(at + section_bytes(s), stored.bias);
    }

private:
    /// Quantizing with an encoder that fits the grid of a group: as quant/quantize_channels.hpp, for any granularity.
    std::uint32_t quantize_fitted(const block_shape& s, block_id id, const float* values,
                                  std::byte* block) const {
        constexpr int top = Levels::template top<code_bits>;
        const auto layout = codes(s);
        std::uint32_t not_finite = 0;
        std::vector<float> finite, scratch;
        each_group(s, [&](const value_group& g) {
            finite.clear();
            for (int i = 0; i < g.size; ++i)
                if (const float x = values[g.index(s, i)]; detail::is_finite(x)) finite.push_back(bounded(x));
            const auto n = static_cast<int>(finite.size());
            not_finite += static_cast<std::uint32_t>(g.size - n);
            scratch.resize(finite.size());
            const grid_range r = n > 0 ? encoder.fit(finite.data(), n, top, scratch.data()) : grid_range();
            if constexpr (Encoder::rounding == parameter_rounding::outside) {
                store_parameters(s, block, g.number, g.slot,
                                 Levels::template fit<code_bits, parameter>(r.first, r.last));
            } else {
                const parameter bias(bounded(r.first));
                const float scale = (r.last - static_cast<float>(bias)) / static_cast<float>(top);
                store_parameters(s, block, g.number, g.slot,
                                 {parameter(bounded(detail::larger(scale, 0.0f))), bias});
            }
        });
        const bool rows = detail::on_rows<Granularity>(s.role);
        const grouped_axis lines = rows ? layout.rows() : layout.cols;
        const grouped_axis cut = rows ? layout.cols : layout.rows();
        std::vector<double> errors(static_cast<std::size_t>(cut.groups() * lines.padded_size())),
            carried(static_cast<std::size_t>(s.dim));
        std::vector<int> counts(errors.size());
        for (int t = 0; t < s.tokens; ++t) {
            std::fill(carried.begin(), carried.end(), 0.0);
            for (int c = s.dim - 1; c >= 0; --c) {
                const int row = s.role == tensor::key ? t : c, col = s.role == tensor::key ? c : t;
                const int group = (rows ? col : row) / cut.group, slot = lines.slot(rows ? row : col);
                const auto stored =
                    load_parameters(block + parameter_offset(s, group, slot), section_bytes(s));
                const float scale = static_cast<float>(stored.scale), bias = static_cast<float>(stored.bias);
                const float x = values[t * s.dim + c];
                const float wanted = x + static_cast<float>(carried[static_cast<std::size_t>(c)]);
                const int code =
                    Levels::template code<code_bits>(wanted, bias, scale > 0.0f ? 1.0f / scale : 0.0f);
                pack_code(layout, block, row, col, static_cast<unsigned>(code));
                if (!detail::is_finite(x)) continue;
                const float error = bounded(x) - Levels::template value<code_bits>(code, scale, bias);
                const auto at = static_cast<std::size_t>(group * lines.padded_size() + slot);
                errors[at] += static_cast<double>(error);
                ++counts[at];
                if constexpr (requires { encoder.feedback_row(id, s.dim, c); })
                    // Statistics of queries apply to keys, not to values.
                    if (s.role == tensor::key)
                        if (const float* const row_of = encoder.feedback_row(id, s.dim, c))
                            for (int j = 0; j < c; ++j)
                                carried[static_cast<std::size_t>(j)] +=
                                    static_cast<double>(row_of[j]) * static_cast<double>(error);
            }
        }
        if constexpr (Encoder::corrects_mean)
            each_group(s, [&](const value_group& g) {
                const auto at = static_cast<std::size_t>(g.number * lines.padded_size() + g.slot);
                if (counts[at] == 0) return;
                auto stored =
                    load_parameters(block + parameter_offset(s, g.number, g.slot), section_bytes(s));
                const double bias =
                    static_cast<double>(static_cast<float>(stored.bias)) + errors[at] / counts[at];
                stored.bias = parameter(bounded(static_cast<float>(bias)));
                store_parameters(s, block, g.number, g.slot, stored);
            });
        return not_finite;
    }
    /// Clamps to the range of a parameter type, so that no parameter becomes infinite.
    static float bounded(float x) noexcept {
        constexpr float limit =
            0x1p100f < detail::max_finite<parameter> ? 0x1p100f : detail::max_finite<parameter>;
        return detail::larger(-limit, detail::smaller(x, limit));
    }

    static constexpr int index(const block_shape& s, int row, int col) noexcept {
        return s.role == tensor::key ? row * s.dim + col : col * s.dim + row;
    }

    /// at: a scale; `section`: bytes from a scale to its bias.
    static stored_parameters<parameter> load_parameters(const std::byte* at, std::size_t section) noexcept {
        stored_parameters<parameter> stored;
        stored.scale = detail::load_as<parameter>(at);
        if constexpr (Levels::has_bias) stored.bias = detail::load_as<parameter>(at + section);
        return stored;
    }

    template <class Backend>
    void load_section(const block_shape& s, const std::byte* block, int group, float* scale,
                      float* bias) const {
        const auto layout = codes(s);
        const int slot_count =
            detail::on_rows<Granularity>(s.role) ? layout.rows().padded_size() : layout.cols.padded_size();
        const std::byte* at = block + parameter_offset(s, group, 0);
        Backend::template load_floats<parameter>(at, slot_count, scale);
        if constexpr (Levels::has_bias)
            Backend::template load_floats<parameter>(at + section_bytes(s), slot_count, bias);
    }
};

namespace detail {
template <class Bits, class Levels, class Granularity, class Params, class Encoder>
requires fixed_group<Granularity>
struct with_any_group<scheme<Bits, Levels, Granularity, Params, Encoder>> {
    using granularity_type = typename any_group_of<Granularity>::type;
    using type = scheme<Bits, Levels, granularity_type, Params, Encoder>;
    static type of(const scheme<Bits, Levels, Granularity, Params, Encoder>& fixed) {
        if constexpr (std::same_as<granularity_type, Granularity>)
            return fixed;
        else
            return type(granularity_type(Granularity::group), fixed.encoder);
    }
};

// A group size as a value is part of the name.
template <class Bits, class Levels, class Granularity, class Params, class Encoder>
inline constexpr bool name_says_all<scheme<Bits, Levels, Granularity, Params, Encoder>> = true;
template <class Bits, class Levels, class Granularity, class Params, class Encoder>
inline constexpr bool quantizes_by_name<scheme<Bits, Levels, Granularity, Params, Encoder>> =
    std::is_empty_v<Encoder>;
}  // namespace detail

}  // namespace kvq::inline KVQ_TAGGED
