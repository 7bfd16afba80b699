// Position of the codes of a channel grid in a block: one width for all channels, or several.
//
//   one width        the matrix of the block (core/shape.hpp): codes(shape)
//   several widths   [codes of the widest channels] ... [codes of the narrowest], each a matrix of its own: for_each_segment(shape, id, f)
//
// Several widths have a plan. For each layer and head, a plan gives the order of the channels and the number of quads of each width. It
// is fixed before the first token; every plan of a shape gives blocks of the same size. Without a plan channels keep their order and
// have the average width, or the two widths around it. The order is a permutation of the query, which attention applies once.
// Source: allocation by E[q^2] var(k): quant/width_allocation.hpp. docs/reference/format.md draws the block.
#pragma once

#include <concepts>
#include <cstring>
#include <limits>
#include <memory>
#include <span>
#include <utility>

#include "../core/error.hpp"
#include "../core/text.hpp"
#include "../pack/bit_pack.hpp"
#include "../quant/calibration.hpp"
#include "../quant/granularity.hpp"
#include "../quant/quantize_channels.hpp"
#include "../quant/width_allocation.hpp"
#include "concepts.hpp"

namespace kvq::inline KVQ_TAGGED {

/// Bits per code: one width for all channels, {4}, or up to 8 different ones, the widest first, {6, 4, 3, 0}. A last width of 0 stores
/// the mean alone. (An aggregate, because nvcc prints template arguments as aggregates.)
struct code_widths {
    int first = 0, second = -1, third = -1, fourth = -1, fifth = -1, sixth = -1, seventh = -1, eighth = -1;

    KVQ_HD constexpr int operator[](int i) const noexcept {
        return i == 0   ? first
               : i == 1 ? second
               : i == 2 ? third
               : i == 3 ? fourth
               : i == 4 ? fifth
               : i == 5 ? sixth
               : i == 6 ? seventh
               : i == 7 ? eighth
                        : -1;
    }
    KVQ_HD constexpr int count() const noexcept {
        int n = 1;
        while ((*this)[n] >= 0) ++n;
        return n;
    }
};

/// Widths and groups of a channel grid: channel_grid<grid{.bits = {4}, .group = 64}>,
/// channel_grid<grid{.bits = {4, 2, 0}, .average_eighths = 16, .group = 64}>.
struct grid {
    code_widths bits{};
    int average_eighths = 0;  ///< for several widths: average bits of a channel, in eighths
    int group = 0;            ///< tokens that share a channel's parameters; 0: the whole page
};

namespace detail {

/// Common part of one width and several widths.
template <grid Options>
struct grid_geometry {
    static_assert(
        [] {
            for (int i = 0; i + 1 < Options.bits.count(); ++i)
                if (Options.bits[i] <= Options.bits[i + 1]) return false;
            return Options.bits[0] >= 1 && Options.bits[0] <= 8;
        }(),
        "kvq::channel_grid: .bits is a width of 1 to 8, or different widths of 0 to 8 bits, the widest "
        "first");
    static_assert(Options.group >= 0, "kvq::channel_grid: .group is at least 1 (or 0 for the whole page)");

    static constexpr bool several_widths = Options.bits.count() > 1;

    KVQ_HD static constexpr grouped_axis token_axis(const block_shape& s) noexcept {
        const per_channel<Options.group> tokens;
        return s.role == tensor::key ? row_axis(tokens, s) : col_axis(tokens, s);
    }
    KVQ_HD static constexpr int channel_slots(const block_shape& s) noexcept { return round_up(s.dim, 4); }
};

template <grid Options>
struct channel_codes;

/// One width.
template <grid Options>
requires(Options.bits.count() == 1) struct channel_codes<Options> : grid_geometry<Options> {
    static constexpr int code_bits = Options.bits[0], zero_code = 0, top = (1 << code_bits) - 1;

    channel_codes() = default;
    explicit channel_codes(const calibration&) {}
    static const width_plan* width_plan_of() noexcept { return nullptr; }
    static void check_shape(const cache_shape&) noexcept {}
    /// 0: encoders do not change dequantizing, so that pages of all encoders are read in the same way (io/scheme_identity.hpp).
    static constexpr std::uint64_t fingerprint() noexcept { return 0; }

    static short_text name() {
        return short_text("channel") + short_text::of(code_bits) +
               (Options.group ? "-g" + short_text::of(Options.group) : "");
    }

    KVQ_HD static constexpr code_layout<code_bits> codes(const block_shape& s) noexcept {
        const per_channel<Options.group> tokens;
        return {row_axis(tokens, s), col_axis(tokens, s)};
    }
    KVQ_HD static constexpr std::size_t parameter_offset(const block_shape& s) noexcept {
        return round_up(codes(s).bytes(), std::size_t{16});
    }
    KVQ_HD static int code(const block_shape& s, const std::byte* block, int token, int channel) noexcept {
        const bool key = s.role == tensor::key;
        return static_cast<int>(unpack_code(codes(s), block, key ? token : channel, key ? channel : token));
    }

    /// The largest code of every channel.
    static void set_tops(const block_shape& s, block_id, std::uint8_t* tops) noexcept {
        std::memset(tops, top, static_cast<std::size_t>(s.dim));
    }
    /// values: codes, [tokens][dim].
    static void pack(const block_shape& s, block_id, const float* values, std::byte* block) noexcept {
        const auto layout = codes(s);
        for (int t = 0; t < s.tokens; ++t)
            for (int c = 0; c < s.dim; ++c) {
                const bool key = s.role == tensor::key;
                pack_code(layout, block, key ? t : c, key ? c : t,
                          static_cast<unsigned>(values[t * s.dim + c]));
            }
    }
    /// Calls f.operator()<bits>(token, channel, code) for tokens [begin, end).
    template <class F>
    static void each_code(const block_shape& s, block_id, const std::byte* block, int begin, int end, F&& f) {
        const auto layout = codes(s);
        for (int t = begin; t < end; ++t)
            for (int c = 0; c < s.dim; ++c) {
                const bool key = s.role == tensor::key;
                f.template operator()<code_bits>(
                    t, c, static_cast<int>(unpack_code(layout, block, key ? t : c, key ? c : t)));
            }
    }
};

template <grid Options, class Index>
struct listed_widths;
template <grid Options, int... Width>
struct listed_widths<Options, std::integer_sequence<int, Width...>> {
    static constexpr int count = sizeof...(Width);
    static constexpr int values[count] = {Options.bits[Width]...};
};

/// Several widths. Place: the position of a channel in the order of the plan.
template <grid Options>
requires(Options.bits.count() > 1) struct channel_codes<Options> : grid_geometry<Options> {
    using width_list = listed_widths<Options, std::make_integer_sequence<int, Options.bits.count()>>;
    using grid_geometry<Options>::token_axis;
    static constexpr int average_eighths = Options.average_eighths;
    static_assert(
        average_eighths >= 8 * width_list::values[width_list::count - 1] &&
            average_eighths <= 8 * width_list::values[0],
        "kvq::channel_grid: .average_eighths / 8 lies between the narrowest and the widest channel");

    channel_codes() = default;
    explicit channel_codes(std::shared_ptr<const width_plan> plan) : plan_(std::move(plan)) {
        if (plan_) check_plan(*plan_);
        fingerprint_ = fingerprint_of(plan_.get());
    }
    explicit channel_codes(const calibration& statistics)
        : channel_codes(std::make_shared<const width_plan>(make_plan(statistics))) {}

    /// The plan of least expected error (quant/width_allocation.hpp). doubt: how far the quantized text may differ from that of
    /// the statistics; 0: not at all. Few statistics raise it, statistics without queries raise it to at least key_doubt, and
    /// statistics without keys give even widths.
    static width_plan make_plan(const calibration& statistics,
                                double doubt = text_doubt(average_eighths / 8.0)) {
        const cache_shape& s = statistics.shape();
        width_plan plan{s.kv_heads, s.head_dim, {}};
        std::vector<double> importance(static_cast<std::size_t>(s.head_dim));
        for (int layer = 0; layer < s.layers; ++layer)
            for (int head = 0; head < s.kv_heads; ++head) {
                const bool queries = statistics.queries(layer, head) > 0.0;
                for (int c = 0; c < s.head_dim; ++c)
                    importance[static_cast<std::size_t>(c)] =
                        (queries ? statistics.query_power(layer, head, c)
                                 : statistics.key_power(layer, head, c)) *
                        statistics.key_variance(layer, head, c);
                const double expected = queries ? doubt : larger(doubt, key_doubt);
                steady_importance(importance, doubt > 0.0 ? expected + chance(statistics, layer, head) : 0.0);
                plan.blocks.push_back(allocate_widths(importance, width_list::values, row_words(s.head_dim)));
            }
        return plan;
    }

    const std::shared_ptr<const width_plan>& plan() const noexcept { return plan_; }
    const width_plan* width_plan_of() const noexcept { return plan_.get(); }
    /// Fingerprint of the plan: pages can be read only with the plan that quantized them. 0 without a plan.
    std::uint64_t fingerprint() const noexcept { return fingerprint_; }
    /// Raises kvq::error if the plan belongs to another shape.
    void check_shape(const cache_shape& s) const {
        if (!plan_) return;
        expect(s.kv_heads == plan_->kv_heads && s.head_dim == plan_->head_dim &&
                   static_cast<int>(plan_->blocks.size()) == s.layers * s.kv_heads,
               "a plan for ", plan_->blocks.size(), " blocks of ", plan_->head_dim,
               " channels in a cache of ", s.layers, " layers, ", s.kv_heads, " heads of ", s.head_dim);
    }

    static short_text name() {
        short_text all = "mixed";
        for (const int w : width_list::values) all += "-" + short_text::of(w);
        all += "-avg" + short_text::of(average_eighths / 8);
        constexpr const char* eighths[8] = {"", ".125", ".25", ".375", ".5", ".625", ".75", ".875"};
        return all + eighths[average_eighths % 8] +
               (Options.group ? "-g" + short_text::of(Options.group) : "");
    }

    /// Channels in the order of the plan.
    void transform_query(const block_shape& s, block_id id, float* x) const {
        const channel_allocation* const a = allocation(s, id);
        if (!a) return;
        float y[most_quantized];
        for (int c = 0; c < s.dim; ++c) y[c] = x[a->order[static_cast<std::size_t>(c)]];
        std::memcpy(x, y, sizeof(float) * static_cast<std::size_t>(s.dim));
    }
    /// Restores the channels' own order.
    void restore_output(const block_shape& s, block_id id, float* y) const {
        const channel_allocation* const a = allocation(s, id);
        if (!a) return;
        float x[most_quantized];
        for (int c = 0; c < s.dim; ++c) x[a->order[static_cast<std::size_t>(c)]] = y[c];
        std::memcpy(y, x, sizeof(float) * static_cast<std::size_t>(s.dim));
    }

    // Segments: attention on the codes (schemes/concepts.hpp).

    /// Calls f.operator()<Bits>(code_segment) for every width in use, from the first place on.
    template <class F>
    void for_each_segment(const block_shape& s, block_id id, F&& f) const {
        width_quads quads;
        segment_quads(s, id, quads.of);
        visit_segments<0>(s, quads, f);
    }
    /// Codes of a segment: tokens as rows, its own columns.
    template <int Bits>
    KVQ_HD static constexpr code_layout<Bits> segment_layout(const block_shape& s,
                                                             const code_segment& segment) noexcept {
        return {token_axis(s), {segment.columns, segment.columns}};
    }

    KVQ_HD static constexpr std::size_t parameter_offset(const block_shape& s) noexcept {
        return round_up(static_cast<std::size_t>(token_axis(s).padded_size()) *
                            static_cast<std::size_t>(row_words(s.dim)) * 4,
                        std::size_t{16});
    }
    /// Words of a row of codes: the average width, but at least enough for the narrower of the two widths around it.
    KVQ_HD static constexpr int row_words(int dim) noexcept {
        const int quads = ceil_div(dim, 4);
        return larger(ceil_div(quads * average_eighths, 64), code_words(narrow_width, quads));
    }
    /// Quads of every width.
    struct width_quads {
        int of[width_list::count] = {};
    };
    /// Quads without a plan: the average width; if it is not a width of the list, the next narrower one and as many quads of the next
    /// wider one as fit.
    KVQ_HD static constexpr width_quads even_quads(int dim) noexcept {
        const int all = ceil_div(dim, 4), words = row_words(dim);
        constexpr int w = width_below_average;
        width_quads quads;
        quads.of[w] = all;
        if constexpr (8 * narrow_width < average_eighths) {
            constexpr int wider = width_list::values[w - 1];
            for (int wide = all; wide > 0; --wide)
                if (code_words(wider, wide) + code_words(narrow_width, all - wide) <= words) {
                    quads.of[w - 1] = wide;
                    quads.of[w] = all - wide;
                    break;
                }
        }
        return quads;
    }
    /// Position of the codes of one width; no columns if no channel has this width.
    template <int Width>
    KVQ_HD static constexpr code_segment segment(const block_shape& s, const width_quads& quads) noexcept {
        code_segment at;
        if constexpr (Width > 0) {
            at = segment<Width - 1>(s, quads);
            at.first += 4 * quads.of[Width - 1];
            at.offset +=
                4 * static_cast<std::size_t>(token_axis(s).padded_size()) *
                static_cast<std::size_t>(code_words(width_list::values[Width - 1], quads.of[Width - 1]));
        }
        at.columns = larger(0, smaller(4 * quads.of[Width], s.dim - at.first));
        return at;
    }

    /// The largest code of every place.
    void set_tops(const block_shape& s, block_id id, std::uint8_t* tops) const {
        for_each_segment(s, id, [&]<int Bits>(const code_segment& segment) {
            std::memset(tops + segment.first, (1 << Bits) - 1, static_cast<std::size_t>(segment.columns));
        });
    }
    /// values: codes, [tokens][places].
    void pack(const block_shape& s, block_id id, const float* values, std::byte* block) const {
        for_each_segment(s, id, [&]<int Bits>(const code_segment& segment) {
            if constexpr (Bits > 0) {
                const auto layout = segment_layout<Bits>(s, segment);
                for (int t = 0; t < s.tokens; ++t)
                    for (int c = 0; c < segment.columns; ++c)
                        pack_code(layout, block + segment.offset, t, c,
                                  static_cast<unsigned>(values[t * s.dim + segment.first + c]));
            }
        });
    }
    /// Calls f.operator()<bits>(token, place, code) for tokens [begin, end).
    template <class F>
    void each_code(const block_shape& s, block_id id, const std::byte* block, int begin, int end,
                   F&& f) const {
        for_each_segment(s, id, [&]<int Bits>(const code_segment& segment) {
            for (int t = begin; t < end; ++t)
                for (int c = 0; c < segment.columns; ++c) {
                    int code = 0;
                    if constexpr (Bits > 0)
                        code = static_cast<int>(
                            unpack_code(segment_layout<Bits>(s, segment), block + segment.offset, t, c));
                    f.template operator()<Bits>(t, segment.first + c, code);
                }
        });
    }
    /// Quantizes to the widths from `Width` on.
    template <int Width>
    KVQ_HD static int code(const block_shape& s, const width_quads& quads, const std::byte* block, int token,
                           int place) noexcept {
        if constexpr (Width == width_list::count) {
            return 0;
        } else {
            constexpr int bits = width_list::values[Width];
            const code_segment at = segment<Width>(s, quads);
            if (place >= at.first + at.columns) return code<Width + 1>(s, quads, block, token, place);
            if constexpr (bits > 0)
                return static_cast<int>(
                    unpack_code(segment_layout<bits>(s, at), block + at.offset, token, place - at.first));
            else
                return 0;
        }
    }

private:
    static constexpr int width_below_average = [] {
        int w = 0;
        while (8 * width_list::values[w] > average_eighths) ++w;
        return w;
    }();
    static constexpr int narrow_width = width_list::values[width_below_average];

    /// Variance, by chance, of the logarithm of an importance: 2 / n each for a mean of n independent squares, twice that
    /// for tokens that resemble their neighbours.
    static double chance(const calibration& statistics, int layer, int head) {
        const double queries = statistics.queries(layer, head), keys = statistics.keys(layer, head);
        if (keys == 0.0) return std::numeric_limits<double>::infinity();
        return 4.0 / (queries > 0.0 ? queries : keys) + 4.0 / keys;
    }

    const channel_allocation* allocation(const block_shape& s, block_id id) const {
        if (!plan_) return nullptr;
        const auto index = static_cast<std::size_t>(id.layer) * static_cast<std::size_t>(plan_->kv_heads) +
                           static_cast<std::size_t>(id.head);
        expect(s.dim == plan_->head_dim && id.head < plan_->kv_heads && index < plan_->blocks.size(),
               "a plan for ", plan_->blocks.size(), " blocks of ", plan_->head_dim, " channels has no layer ",
               id.layer, ", head ", id.head, " of ", s.dim);
        return &plan_->blocks[index];
    }
    void segment_quads(const block_shape& s, block_id id, int* quads) const {
        if (const channel_allocation* const a = allocation(s, id))
            for (int w = 0; w < width_list::count; ++w) quads[w] = a->quads[static_cast<std::size_t>(w)];
        else
            std::memcpy(quads, even_quads(s.dim).of, sizeof(width_quads));
    }
    template <int Width, class F>
    static void visit_segments(const block_shape& s, const width_quads& quads, F& f) {
        const code_segment at = segment<Width>(s, quads);
        if (at.columns > 0) f.template operator()<width_list::values[Width]>(at);
        if constexpr (Width + 1 < width_list::count) visit_segments<Width + 1>(s, quads, f);
    }

    /// Fingerprint of all orders and widths.
    static std::uint64_t fingerprint_of(const width_plan* plan) noexcept {
        if (!plan) return 0;
        fingerprint_hash hash;
        hash.add(static_cast<std::uint64_t>(plan->kv_heads));
        for (const channel_allocation& a : plan->blocks) {
            for (const std::uint16_t c : a.order) hash.add(c);
            for (const std::uint16_t q : a.quads) hash.add(q);
        }
        return hash.value;
    }
    static void check_plan(const width_plan& plan) {
        const auto dim = static_cast<std::size_t>(plan.head_dim);
        expect(plan.head_dim >= 1 && plan.kv_heads >= 1, "a plan for ", plan.kv_heads, " heads of ",
               plan.head_dim, " channels");
        for (const channel_allocation& a : plan.blocks) {
            std::vector<bool> seen(dim);
            expect(a.order.size() == dim && a.quads.size() == std::size_t{width_list::count}, "a plan with ",
                   a.order.size(), " places and ", a.quads.size(), " widths for ", dim, " channels and ",
                   width_list::count);
            for (const int c : a.order) {
                expect(static_cast<std::size_t>(c) < dim && !seen[static_cast<std::size_t>(c)],
                       "a plan is no permutation: channel ", c, " of ", dim);
                seen[static_cast<std::size_t>(c)] = true;
            }
            int quads = 0, words = 0;
            for (int w = 0; w < width_list::count; ++w) {
                quads += a.quads[static_cast<std::size_t>(w)];
                words += code_words(width_list::values[w], a.quads[static_cast<std::size_t>(w)]);
            }
            expect(quads == ceil_div(plan.head_dim, 4) && words <= row_words(plan.head_dim), "a plan of ",
                   quads, " quads in ", words, " words; a row has ", ceil_div(plan.head_dim, 4), " and ",
                   row_words(plan.head_dim));
        }
    }

    std::shared_ptr<const width_plan> plan_;
    std::uint64_t fingerprint_ = 0;
};

}  // namespace detail
}  // namespace kvq::inline KVQ_TAGGED
