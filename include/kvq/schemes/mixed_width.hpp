// Keys whose channels have different widths: more bits where queries look and keys vary, none where neither matters.
//
//   x^[t][c] = scale_c * code + bias_c          code of 0, 2 or 4 bits, say; 0 bits: the channel's mean alone
//
//   block = [codes of the widest channels] ... [codes of the narrowest][parameters, by place]              docs/format.md
//
// A plan says, per layer and head, in which order channels lie and how many quads have each width. It is fixed before the first
// token; every plan of a shape gives blocks of the same size. Without a plan channels keep their order and have the average
// width, or the two widths around it. The order is a permutation of the query, which attention applies once.
// Contract: each channel as in schemes/dual.hpp, with 2^B - 1 steps of its own width; a channel of 0 bits dequantizes to its
// group's mean, to half a step of stored biases. At most 1024 tokens and channels per block.
// Source: allocation by E[q^2] var(k): quant/width_allocation.hpp.
#pragma once

#include <cstring>
#include <limits>
#include <memory>

#include "../core/text.hpp"
#include "../pack/bit_pack.hpp"
#include "../quant/affine.hpp"
#include "../quant/channel_params.hpp"
#include "../quant/error_feedback.hpp"
#include "../quant/granularity.hpp"
#include "../quant/quantize_channels.hpp"
#include "../quant/width_allocation.hpp"
#include "concepts.hpp"

namespace kvq::inline KVQ_TAGGED {

/// Widths that channels may have, falling; 0 is one of them if it is the last.
template <int... Widths>
struct widths {
    static constexpr int count = sizeof...(Widths);
    static constexpr int values[count] = {Widths...};
    static_assert(
        [] {
            for (int i = 0; i + 1 < count; ++i)
                if (values[i] <= values[i + 1]) return false;
            return values[0] <= 8 && values[count - 1] >= 0 && values[0] > 0;
        }(),
        "kvq::widths<...>: different widths of 0 to 8 bits, the widest first");
};

namespace detail {

/// The columns of a block of mixed widths as one matrix.
template <int Group, class Parameters>
struct width_columns {
    std::size_t parameters = 0;      ///< offset in the block
    int groups = 0, slot_count = 0;  ///< of the parameters

    constexpr code_layout<8> codes(const block_shape& s) const noexcept {
        return {row_axis(per_channel<Group>(), s), {s.dim, s.dim}};
    }
    static constexpr fold_use fold(tensor) noexcept { return {false, false, true, true}; }
    template <class Backend>
    void load(const std::byte* block, int row_group, float* scale, float* bias,
              const float* factor = nullptr) const {
        const std::byte* const at = block + parameters;
        Parameters::template load_scales<Backend>(at, groups, slot_count, row_group, 0, slot_count, scale,
                                                  factor);
        Parameters::template load_biases<Backend>(at, groups, slot_count, row_group, 0, slot_count, bias);
    }
};

}  // namespace detail

/// Widths: widths<4, 2, 0>; AverageEighths: average bits per channel, in eighths of a bit; Group, Encoder, Params as in
/// schemes/dual.hpp. For keys.
template <class Widths, int AverageEighths, int Group = 64, class Encoder = min_max, class Params = coded>
struct mixed_width {
    using attends_as = mixed_width;
    using width_list = Widths;
    using parameters = channel_parameters<Params>;
    using params_type = Params;
    using encoder_type = Encoder;
    static constexpr int group = Group;
    static_assert(detail::grid_encoder<Encoder>,
                  "kvq::mixed_width<widths, eighths, group, encoder, parameters>: the fourth argument must "
                  "be an encoder, "
                  "such as min_max");
    static_assert(AverageEighths >= 8 * Widths::values[Widths::count - 1] &&
                      AverageEighths <= 8 * Widths::values[0],
                  "kvq::mixed_width: the average lies between the narrowest and the widest channel");

    static constexpr bool supports(tensor role) noexcept { return role == tensor::key; }

    mixed_width() = default;
    /// plan: for every layer and head of the caches that use it; null: the same widths everywhere. Raises kvq::error where a
    /// plan's orders are no permutations, or its widths do not fit the words of a row.
    explicit mixed_width(std::shared_ptr<const width_plan> plan, Encoder e = {})
        : encoder(std::move(e)), plan_(std::move(plan)) {
        if (plan_) check_plan(*plan_);
        fingerprint_ = fingerprint_of(plan_.get());
    }
    /// With a plan, and if the encoder takes it feedback, made from statistics. Keys alone make a plan and no feedback.
    explicit mixed_width(const calibration& statistics)
        : plan_(std::make_shared<const width_plan>(make_plan(statistics))) {
        encoder = detail::make_encoder<Encoder>(statistics, plan_.get());
        fingerprint_ = fingerprint_of(plan_.get());
    }

    /// The plan of least expected error (quant/width_allocation.hpp). doubt: how far the text that is read may differ from that of
    /// the statistics; 0 trusts them. Few statistics raise it, keys alone make it key_doubt or more, without keys widths are even.
    static width_plan make_plan(const calibration& statistics,
                                double doubt = text_doubt(AverageEighths / 8.0)) {
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
                const double expected = queries ? doubt : detail::larger(doubt, key_doubt);
                steady_importance(importance, doubt > 0.0 ? expected + chance(statistics, layer, head) : 0.0);
                plan.blocks.push_back(allocate_widths(importance, Widths::values, row_words(s.head_dim)));
            }
        return plan;
    }

    /// The format; encoders do not change it.
    short_text name() const {
        short_text all = "mixed";
        for (const int w : Widths::values) all += (all == "mixed" ? "" : "-") + short_text::of(w);
        all += "-avg" + short_text::of(AverageEighths / 8);
        constexpr const char* eighths[8] = {"", ".125", ".25", ".375", ".5", ".625", ".75", ".875"};
        return all + eighths[AverageEighths % 8] + (Group ? "-g" + short_text::of(Group) : "") + "-" +
               parameters::name();
    }

    /// Raises kvq::error for blocks of more than 1024 tokens or channels.
    static constexpr std::size_t block_bytes(const block_shape& s) {
        if (s.tokens > detail::most_quantized || s.dim > detail::most_quantized)
            detail::expect(false, "mixed_width codes blocks of up to ", detail::most_quantized,
                           " tokens and channels, got ", s.tokens, " x ", s.dim);
        return detail::round_up(
            parameter_offset(s) + parameters::bytes(token_axis(s).groups(), channel_slots(s)),
            std::size_t{16});
    }

    std::uint32_t quantize(const block_shape& s, block_id id, float* values, std::byte* block) const {
        return quantize_by(encoder, s, id, values, block);
    }
    /// Of values that were quantized before.
    std::uint32_t requantize(const block_shape& s, block_id id, float* values, float*,
                             std::byte* block) const {
        return quantize_by(detail::grid_keeper<Encoder>{encoder}, s, id, values, block);
    }

private:
    template <class E>
    std::uint32_t quantize_by(const E& fitted, const block_shape& s, block_id id, float* values,
                              std::byte* block) const {
        std::memset(block, 0, block_bytes(s));
        const std::uint32_t not_finite = detail::bound_magnitudes(values, s.values());
        for (int t = 0; t < s.tokens; ++t) transform_query(s, id, values + t * s.dim);
        std::uint8_t top[detail::most_quantized];
        for_each_segment(s, id, [&]<int Bits>(const code_segment& segment) {
            std::memset(top + segment.first, (1 << Bits) - 1, static_cast<std::size_t>(segment.columns));
        });
        const grouped_axis tokens = token_axis(s);
        for (int g = 0; g < tokens.groups(); ++g)
            detail::quantize_channels<parameters>(
                fitted, id, values + g * tokens.group * s.dim, tokens.group_size(g), s.dim, s.dim,
                [&](int c) { return static_cast<int>(top[c]); }, block + parameter_offset(s), tokens.groups(),
                channel_slots(s), g);
        for_each_segment(s, id, [&]<int Bits>(const code_segment& segment) {
            if constexpr (Bits > 0) {
                const auto layout = segment_layout<Bits>(s, segment);
                for (int t = 0; t < s.tokens; ++t)
                    for (int c = 0; c < segment.columns; ++c)
                        pack_code(layout, block + segment.offset, t, c,
                                  static_cast<unsigned>(values[t * s.dim + segment.first + c]));
            }
        });
        return not_finite;
    }

public:
    void dequantize(const block_shape& s, block_id id, const std::byte* block, float* values) const {
        const grouped_axis tokens = token_axis(s);
        float scales[detail::most_quantized], biases[detail::most_quantized];
        for (int g = 0; g < tokens.groups(); ++g) {
            columns(s).template load<detail::plain_loads>(block, g, scales, biases);
            const int begin = g * tokens.group, end = begin + tokens.group_size(g);
            for_each_segment(s, id, [&]<int Bits>(const code_segment& segment) {
                for (int t = begin; t < end; ++t)
                    for (int c = 0; c < segment.columns; ++c) {
                        const int place = segment.first + c;
                        float& x = values[t * s.dim + place];
                        x = biases[place];
                        if constexpr (Bits > 0) {
                            const auto layout = segment_layout<Bits>(s, segment);
                            x = detail::affine_value(
                                static_cast<int>(unpack_code(layout, block + segment.offset, t, c)),
                                scales[place], biases[place]);
                        }
                    }
            });
        }
        for (int t = 0; t < s.tokens; ++t) restore_output(s, id, values + t * s.dim);
    }

    /// Raises kvq::error if the plan or other statistics are those of another shape; a cache calls it when it is made.
    void check(const cache_shape& s, tensor) const {
        if (plan_)
            detail::expect(s.kv_heads == plan_->kv_heads && s.head_dim == plan_->head_dim &&
                               static_cast<int>(plan_->blocks.size()) == s.layers * s.kv_heads,
                           "a plan for ", plan_->blocks.size(), " blocks of ", plan_->head_dim,
                           " channels in a cache of ", s.layers, " layers, ", s.kv_heads, " heads of ",
                           s.head_dim);
        if constexpr (requires { encoder.check(s); }) encoder.check(s);
    }

    /// Channels in the order of the plan.
    void transform_query(const block_shape& s, block_id id, float* x) const {
        const channel_allocation* const a = allocation(s, id);
        if (!a) return;
        float y[detail::most_quantized];
        for (int c = 0; c < s.dim; ++c) y[c] = x[a->order[static_cast<std::size_t>(c)]];
        std::memcpy(x, y, sizeof(float) * static_cast<std::size_t>(s.dim));
    }
    /// Back to the channels' own order.
    void restore_output(const block_shape& s, block_id id, float* y) const {
        const channel_allocation* const a = allocation(s, id);
        if (!a) return;
        float x[detail::most_quantized];
        for (int c = 0; c < s.dim; ++c) x[a->order[static_cast<std::size_t>(c)]] = y[c];
        std::memcpy(y, x, sizeof(float) * static_cast<std::size_t>(s.dim));
    }

    // Segments: what attention needs to run on the codes (schemes/concepts.hpp).

    /// Calls f.operator()<Bits>(code_segment) for every width in use, from the first place on.
    template <class F>
    void for_each_segment(const block_shape& s, block_id id, F&& f) const {
        width_quads quads;
        segment_quads(s, id, quads.of);
        visit_segments<0>(s, quads, f);
    }
    /// Parameters of all places.
    static constexpr detail::width_columns<Group, parameters> columns(const block_shape& s) noexcept {
        return {parameter_offset(s), token_axis(s).groups(), channel_slots(s)};
    }
    /// Codes of a segment: tokens as rows, its own columns.
    template <int Bits>
    KVQ_HD static constexpr code_layout<Bits> segment_layout(const block_shape& s,
                                                             const code_segment& segment) noexcept {
        return {token_axis(s), {segment.columns, segment.columns}};
    }

    KVQ_HD static constexpr grouped_axis token_axis(const block_shape& s) noexcept {
        return detail::row_axis(per_channel<Group>(), s);
    }
    KVQ_HD static constexpr int channel_slots(const block_shape& s) noexcept {
        return detail::round_up(s.dim, 4);
    }
    KVQ_HD static constexpr std::size_t parameter_offset(const block_shape& s) noexcept {
        return detail::round_up(static_cast<std::size_t>(token_axis(s).padded_size()) *
                                    static_cast<std::size_t>(row_words(s.dim)) * 4,
                                std::size_t{16});
    }
    /// Words of a row of codes: the average width, but room for the narrower of the two widths around it.
    KVQ_HD static constexpr int row_words(int dim) noexcept {
        const int quads = detail::ceil_div(dim, 4);
        return detail::larger(detail::ceil_div(quads * AverageEighths, 64),
                              detail::code_words(narrow_width, quads));
    }
    /// Quads of every width.
    struct width_quads {
        int of[Widths::count] = {};
    };
    /// Without a plan: the average width; if it is none of the widths, the next narrower one and as many quads of the next
    /// wider one as fit.
    KVQ_HD static constexpr width_quads even_quads(int dim) noexcept {
        const int all = detail::ceil_div(dim, 4), words = row_words(dim);
        constexpr int w = width_below_average;
        width_quads quads;
        quads.of[w] = all;
        if constexpr (8 * narrow_width < AverageEighths) {
            constexpr int wider = Widths::values[w - 1];
            for (int wide = all; wide > 0; --wide)
                if (detail::code_words(wider, wide) + detail::code_words(narrow_width, all - wide) <= words) {
                    quads.of[w - 1] = wide;
                    quads.of[w] = all - wide;
                    break;
                }
        }
        return quads;
    }
    /// Where the codes of one width lie; without columns if no channel has it.
    template <int Width>
    KVQ_HD static constexpr code_segment segment(const block_shape& s, const width_quads& quads) noexcept {
        code_segment at;
        if constexpr (Width > 0) {
            at = segment<Width - 1>(s, quads);
            at.first += 4 * quads.of[Width - 1];
            at.offset +=
                4 * static_cast<std::size_t>(token_axis(s).padded_size()) *
                static_cast<std::size_t>(detail::code_words(Widths::values[Width - 1], quads.of[Width - 1]));
        }
        at.columns = detail::larger(0, detail::smaller(4 * quads.of[Width], s.dim - at.first));
        return at;
    }
    /// One number, by its place, as dequantize() gives it, for code that reads single ones.
    KVQ_HD static float value(const block_shape& s, const width_quads& quads, const std::byte* block,
                              int token, int place) noexcept {
        const grouped_axis tokens = token_axis(s);
        const int row_group = token / tokens.group, n = channel_slots(s), groups = tokens.groups();
        const std::byte* const at = block + parameter_offset(s);
        return detail::affine_value(code<0>(s, quads, block, token, place),
                                    parameters::scale(at, groups, n, row_group, place),
                                    parameters::bias(at, groups, n, row_group, place));
    }
    const std::shared_ptr<const width_plan>& plan() const noexcept { return plan_; }
    /// Of the plan: pages can be read with the plan that they were coded with, and no other. 0 without a plan.
    std::uint64_t fingerprint() const noexcept { return fingerprint_; }

    [[no_unique_address]] Encoder encoder{};

private:
    static constexpr int width_below_average = [] {
        int w = 0;
        while (8 * Widths::values[w] > AverageEighths) ++w;
        return w;
    }();
    static constexpr int narrow_width = Widths::values[width_below_average];
    /// Code in the widths from `Width` on.
    template <int Width>
    KVQ_HD static int code(const block_shape& s, const width_quads& quads, const std::byte* block, int token,
                           int place) noexcept {
        if constexpr (Width == Widths::count) {
            return 0;
        } else {
            constexpr int bits = Widths::values[Width];
            const code_segment at = segment<Width>(s, quads);
            if (place >= at.first + at.columns) return code<Width + 1>(s, quads, block, token, place);
            if constexpr (bits > 0)
                return static_cast<int>(
                    unpack_code(segment_layout<bits>(s, at), block + at.offset, token, place - at.first));
            else
                return 0;
        }
    }

    /// Variance of the logarithm of an importance by chance: 2 / n each for a mean of n independent squares, twice that
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
        detail::expect(s.dim == plan_->head_dim && id.head < plan_->kv_heads && index < plan_->blocks.size(),
                       "a plan for ", plan_->blocks.size(), " blocks of ", plan_->head_dim,
                       " channels has no layer ", id.layer, ", head ", id.head, " of ", s.dim);
        return &plan_->blocks[index];
    }
    void segment_quads(const block_shape& s, block_id id, int* quads) const {
        if (const channel_allocation* const a = allocation(s, id))
            for (int w = 0; w < Widths::count; ++w) quads[w] = a->quads[static_cast<std::size_t>(w)];
        else
            std::memcpy(quads, even_quads(s.dim).of, sizeof(width_quads));
    }
    template <int Width, class F>
    static void visit_segments(const block_shape& s, const width_quads& quads, F& f) {
        const code_segment at = segment<Width>(s, quads);
        if (at.columns > 0) f.template operator()<Widths::values[Width]>(at);
        if constexpr (Width + 1 < Widths::count) visit_segments<Width + 1>(s, quads, f);
    }

    /// Of all orders and widths.
    static std::uint64_t fingerprint_of(const width_plan* plan) noexcept {
        if (!plan) return 0;
        detail::fingerprint_hash hash;
        hash.add(static_cast<std::uint64_t>(plan->kv_heads));
        for (const channel_allocation& a : plan->blocks) {
            for (const std::uint16_t c : a.order) hash.add(c);
            for (const std::uint16_t q : a.quads) hash.add(q);
        }
        return hash.value;
    }
    static void check_plan(const width_plan& plan) {
        const auto dim = static_cast<std::size_t>(plan.head_dim);
        detail::expect(plan.head_dim >= 1 && plan.kv_heads >= 1, "a plan for ", plan.kv_heads, " heads of ",
                       plan.head_dim, " channels");
        for (const channel_allocation& a : plan.blocks) {
            std::vector<bool> seen(dim);
            detail::expect(a.order.size() == dim && a.quads.size() == std::size_t{Widths::count},
                           "a plan with ", a.order.size(), " places and ", a.quads.size(), " widths for ",
                           dim, " channels and ", Widths::count);
            for (const int c : a.order) {
                detail::expect(static_cast<std::size_t>(c) < dim && !seen[static_cast<std::size_t>(c)],
                               "a plan is no permutation: channel ", c, " of ", dim);
                seen[static_cast<std::size_t>(c)] = true;
            }
            int quads = 0, words = 0;
            for (int w = 0; w < Widths::count; ++w) {
                quads += a.quads[static_cast<std::size_t>(w)];
                words += detail::code_words(Widths::values[w], a.quads[static_cast<std::size_t>(w)]);
            }
            detail::expect(quads == detail::ceil_div(plan.head_dim, 4) && words <= row_words(plan.head_dim),
                           "a plan of ", quads, " quads in ", words, " words; a row has ",
                           detail::ceil_div(plan.head_dim, 4), " and ", row_words(plan.head_dim));
        }
    }

    std::shared_ptr<const width_plan> plan_;
    std::uint64_t fingerprint_ = 0;
};

static_assert(key_scheme<mixed_width<widths<4, 2, 0>, 16>> &&
              !value_scheme<mixed_width<widths<4, 2, 0>, 16>>);
static_assert(transforming<mixed_width<widths<4, 2, 0>, 16>> && segmented<mixed_width<widths<4, 2, 0>, 16>>);

}  // namespace kvq::inline KVQ_TAGGED
