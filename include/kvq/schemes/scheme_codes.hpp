// The codes of scheme<...>: how they are packed, with one width for all channels (bits<B>) or with several
// (mixed_bits<...>).
//
//   one width        the matrix of the block (core/shape.hpp): codes(shape)
//   several widths   [codes of the widest channels] ... [codes of the narrowest], each a matrix of its own:
//                    for_each_segment(shape, id, f)
//
// Several widths have a plan. For each layer and head, a plan gives the order of the channels and the number
// of quads of each width. It is fixed before the first token; every plan of a shape gives blocks of the same
// size. The order is a permutation of the query, which attention applies once.
// Source: allocation by E[q^2] var(k): quant/width_allocation.hpp. docs/reference/format.md draws the block.
#pragma once

#include <algorithm>
#include <concepts>
#include <cstring>
#include <limits>
#include <memory>
#include <utility>

#include "../core/error.hpp"
#include "../core/tagged_vector.hpp"
#include "../core/text.hpp"
#include "../pack/bit_pack.hpp"
#include "../quant/calibration.hpp"
#include "../quant/granularity.hpp"
#include "../quant/quantize_group.hpp"
#include "../quant/width_allocation.hpp"
#include "concepts.hpp"
#include "mixed_bits.hpp"
#include "plan_text.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace detail {

template <class Codes, class Granularity>
struct scheme_codes {
    static_assert(
        std::is_void_v<Codes> || !requires { Codes::row_words(1); },
        "kvq::scheme: several widths are per channel, over a number of tokens that is part of the type");
};

/// One width.
template <int Bits, class Granularity>
struct scheme_codes<bits<Bits>, Granularity> {
    static constexpr int code_bits = Bits, top = (1 << Bits) - 1;

    [[no_unique_address]] Granularity granularity{};

    scheme_codes() = default;
    explicit scheme_codes(Granularity g) : granularity(g) {}
    explicit scheme_codes(const calibration&) {}
    static const width_plan* width_plan_of() noexcept { return nullptr; }
    static void check_shape(const cache_shape&) noexcept {}

    /// Codes of a block; they start at its first byte.
    KVQ_HD KVQ_INLINE constexpr code_layout<Bits> codes(const block_shape& s) const noexcept {
        return {row_axis(granularity, s), col_axis(granularity, s)};
    }

    /// The largest code of every channel.
    static void set_tops(const block_shape& s, block_id, std::uint8_t* tops) noexcept {
        for (int c = 0; c < s.dim; ++c) tops[c] = top;
    }
    /// values: codes, [tokens][dim].
    void pack(const block_shape& s, block_id, const float* values, std::byte* block) const noexcept {
        const auto layout = codes(s);
        const bool key = s.role == tensor::key;
        for (int t = 0; t < s.tokens; ++t)
            for (int c = 0; c < s.dim; ++c)
                pack_code(layout, block, key ? t : c, key ? c : t,
                          static_cast<unsigned>(values[t * s.dim + c]));
    }
    /// Calls f.operator()<bits>(token, channel, code) for tokens [begin, end).
    template <class F>
    void each_code(const block_shape& s, block_id, const std::byte* block, int begin, int end, F&& f) const {
        const auto layout = codes(s);
        const bool key = s.role == tensor::key;
        for (int t = begin; t < end; ++t)
            for (int c = 0; c < s.dim; ++c)
                f.template operator()<Bits>(
                    t, c, static_cast<int>(unpack_code(layout, block, key ? t : c, key ? c : t)));
    }
};

/// Several widths. Place: the position of a channel in the order of the plan.
template <class Widths, class Average, int Group>
requires(Group != any_group) struct scheme_codes<mixed_bits<Widths, Average>, per_channel<Group>>
    : mixed_bits<Widths, Average> {
    using policy = mixed_bits<Widths, Average>;
    using policy::eighths;
    using policy::even_quads;
    using policy::row_words;
    using typename policy::width_list;
    using typename policy::width_quads;

    scheme_codes() = default;
    explicit scheme_codes(std::shared_ptr<const width_plan> plan) : plan_(std::move(plan)) {
        if (plan_) check_plan(*plan_);
        fingerprint_ = plan_fingerprint(plan_.get());
    }
    explicit scheme_codes(const calibration& statistics)
        : scheme_codes(std::make_shared<const width_plan>(make_plan(statistics))) {}

    /// The plan of least expected error (quant/width_allocation.hpp). doubt: how far the quantized text may
    /// differ from that of the statistics; 0: not at all. Few statistics raise it; statistics without queries
    /// doubt key_doubt in its place, and statistics without keys give even widths.
    static width_plan make_plan(const calibration& statistics, double doubt = text_doubt(eighths / 8.0)) {
        const cache_shape& s = statistics.shape();
        width_plan plan{s.kv_heads, s.head_dim, {}};
        tagged_vector<double> importance(static_cast<std::size_t>(s.head_dim));
        for (int layer = 0; layer < s.layers; ++layer)
            for (int head = 0; head < s.kv_heads; ++head) {
                const bool queries = statistics.queries(layer, head) > 0.0;
                for (int c = 0; c < s.head_dim; ++c) {
                    const double variance = statistics.key_variance(layer, head, c);
                    importance[static_cast<std::size_t>(c)] =
                        queries ? statistics.query_power(layer, head, c) * variance
                                : key_importance(statistics.key_power(layer, head, c), variance);
                }
                const double counted = statistics.keys(layer, head);
                steady_importance(importance,
                                  doubt > 0.0
                                      ? (queries ? doubt + chance(statistics.queries(layer, head), counted)
                                                 : doubt_of_keys(counted))
                                      : 0.0);
                plan.blocks.push_back(allocate_widths(importance, width_list::values, row_words(s.head_dim)));
            }
        return plan;
    }

    /// What a plan of so many keys, and of no queries, doubts.
    static double doubt_of_keys(double keys) { return key_doubt + chance(0.0, keys); }

    /// A plan of keys alone, of one layer, for every layer that uses it. Channels of one width keep their
    /// order, so that a digit for each channel says all (write_plan).
    static width_plan plan_of_keys(const calibration& statistics) {
        width_plan plan = make_plan(statistics);
        plan.blocks.resize(static_cast<std::size_t>(plan.kv_heads));
        plan.of_every_layer = true;
        tagged_vector<std::size_t> width(static_cast<std::size_t>(plan.head_dim));
        for (channel_allocation& a : plan.blocks) {
            std::size_t place = 0;
            for (std::size_t w = 0; w < a.quads.size(); ++w)
                for (int i = 0; i < 4 * a.quads[w] && place < width.size(); ++i) width[a.order[place++]] = w;
            place = 0;
            for (std::size_t w = 0; w < a.quads.size(); ++w)
                for (std::size_t c = 0; c < width.size(); ++c)
                    if (width[c] == w) a.order[place++] = static_cast<std::uint16_t>(c);
        }
        return plan;
    }
    /// The plan as text, and back (schemes/plan_text.hpp).
    std::size_t write_plan(char* to) const { return write_plan_text(*plan_, to); }
    static width_plan plan_of_text(const char* text, std::size_t letters) {
        return detail::plan_of_text(text, letters, width_list::count);
    }
    /// The error that the plan expects of a head whose channels have these importances, as a part of that of
    /// even widths; 1 where nothing is to lose. importance[channel]: a double.
    template <class Importance>
    double relative_error(const block_shape& s, block_id id, const Importance& importance) const {
        const channel_allocation* const a = allocation(s, id);
        if (!a) return 1.0;
        double planned = 0.0, even = 0.0;
        const width_quads quads = even_quads(s.dim);
        std::size_t place = 0, even_place = 0;
        for (std::size_t w = 0; w < a->quads.size(); ++w) {
            const double noise = width_noise(width_list::values[w]);
            for (int i = 0; i < 4 * a->quads[w] && place < a->order.size(); ++i)
                planned += rounded_product(noise, importance[static_cast<int>(a->order[place++])]);
            for (int i = 0; i < 4 * quads.of[w] && even_place < a->order.size(); ++i)
                even += rounded_product(noise, importance[static_cast<int>(even_place++)]);
        }
        return even > 0.0 ? planned / even : 1.0;
    }

    const std::shared_ptr<const width_plan>& plan() const noexcept { return plan_; }
    const width_plan* width_plan_of() const noexcept { return plan_.get(); }
    /// Fingerprint of the plan: pages can be read only with the plan that quantized them. 0 without a plan.
    std::uint64_t fingerprint() const noexcept { return fingerprint_; }
    /// Raises kvq::error if the plan belongs to another shape.
    void check_shape(const cache_shape& s) const {
        if (!plan_) return;
        expect(s.kv_heads == plan_->kv_heads && s.head_dim == plan_->head_dim &&
                   (plan_->of_every_layer || static_cast<int>(plan_->blocks.size()) == s.layers * s.kv_heads),
               "a plan for ", plan_->blocks.size(), " blocks of ", plan_->head_dim,
               " channels in a cache of ", s.layers, " layers, ", s.kv_heads, " heads of ", s.head_dim);
    }

    static short_text width_name() {
        short_text all = "mixed";
        for (const int w : width_list::values) all += "-" + short_text::of(w);
        all += "-avg" + short_text::of(eighths / 8);
        constexpr const char* parts[8] = {"", ".125", ".25", ".375", ".5", ".625", ".75", ".875"};
        return all + parts[eighths % 8];
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
        return {row_axis(per_channel<Group>{}, s), {segment.columns, segment.columns}};
    }

    /// Position of the codes of one width; no columns if no channel has this width.
    template <int Width>
    KVQ_HD static constexpr code_segment segment(const block_shape& s, const width_quads& quads) noexcept {
        code_segment at;
        if constexpr (Width > 0) {
            at = segment<Width - 1>(s, quads);
            at.first += 4 * quads.of[Width - 1];
            at.offset +=
                4 * static_cast<std::size_t>(row_axis(per_channel<Group>{}, s).padded_size()) *
                static_cast<std::size_t>(code_words(width_list::values[Width - 1], quads.of[Width - 1]));
        }
        at.columns = larger(0, smaller(4 * quads.of[Width], s.dim - at.first));
        return at;
    }

    /// The largest code of every place.
    void set_tops(const block_shape& s, block_id id, std::uint8_t* tops) const {
        for_each_segment(s, id, [&]<int Bits>(const code_segment& segment) {
            for (int c = 0; c < segment.columns; ++c)
                tops[segment.first + c] = static_cast<std::uint8_t>((1 << Bits) - 1);
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
    /// The code of a place that has width number `Width` or a later one.
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
    /// Variance, by chance, of the logarithm of an importance: 2 / n each for a mean of n independent
    /// squares, twice that for tokens that resemble their neighbours.
    static double chance(double queries, double keys) {
        // A constant: the function belongs to no instruction set (core/tagged_vector.hpp).
        constexpr double unknown = std::numeric_limits<double>::infinity();
        if (keys == 0.0) return unknown;
        return 4.0 / (queries > 0.0 ? queries : keys) + 4.0 / keys;
    }

    const channel_allocation* allocation(const block_shape& s, block_id id) const {
        if (!plan_) return nullptr;
        const auto index = static_cast<std::size_t>(plan_->of_every_layer ? 0 : id.layer) *
                               static_cast<std::size_t>(plan_->kv_heads) +
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

    static void check_plan(const width_plan& plan) {
        const auto dim = static_cast<std::size_t>(plan.head_dim);
        expect(plan.head_dim >= 1 && plan.kv_heads >= 1, "a plan for ", plan.kv_heads, " heads of ",
               plan.head_dim, " channels");
        for (const channel_allocation& a : plan.blocks) {
            tagged_vector<char> seen(dim);
            expect(a.order.size() == dim && a.quads.size() == std::size_t{width_list::count}, "a plan with ",
                   a.order.size(), " places and ", a.quads.size(), " widths for ", dim, " channels and ",
                   width_list::count);
            for (const int c : a.order) {
                expect(static_cast<std::size_t>(c) < dim && !seen[static_cast<std::size_t>(c)],
                       "a plan is no permutation: channel ", c, " of ", dim);
                seen[static_cast<std::size_t>(c)] = 1;
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

}}}  // namespace kvq::detail
