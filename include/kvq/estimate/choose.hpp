// Which preset fits a budget of bits or bytes, and what error was measured for it.
//
//   bits of a context of T tokens = coded * (1 - w / T) + 16 * w / T,      w = sinks + recent + half a page not yet coded
//
// Errors are those of attention on real q, k, v (docs/schemes.md says which, and what prints them). They say how presets compare,
// not what a model loses.
#pragma once

#include "../cache/preset_options.hpp"
#include "../core/shape.hpp"
#include "../schemes/presets.hpp"

namespace kvq::inline KVQ_TAGGED {

/// Errors with a window of 4 sinks and 32 recent tokens.
struct measured_error {
    double output = 0;      ///< |out' - out| / |out| of attention, mean over heads
    double divergence = 0;  ///< KL divergence of attention weights, nats, mean over heads and queries
};

/// What keys are made from (quant/calibration.hpp).
enum class statistics_of {
    nothing,
    keys,             ///< a plan of widths, where the preset has one
    keys_and_queries  ///< and error feedback
};

/// Errors of a preset, by what its keys are made from.
struct measured_errors {
    measured_error plain, by_keys, by_queries;

    constexpr const measured_error& with(statistics_of statistics) const noexcept {
        return statistics == statistics_of::nothing ? plain
               : statistics == statistics_of::keys  ? by_keys
                                                    : by_queries;
    }
};

/// A preset and what it costs.
struct preset_choice {
    const char* name = nullptr;  ///< null: none fits
    double bits = 0;             ///< per number, window included where a context was given
    measured_error error;        ///< with the statistics that were asked for
};

namespace detail {

struct preset_error {
    const char* name;
    measured_errors errors;
};

/// Of real tensors of TinyLlama-1.1B (head_dim 64, 2048 tokens), as scripts/quality prints them; statistics come from the first half of
/// the dump's keys and queries, errors from the second half of the queries.
inline constexpr preset_error preset_errors[] = {
    {"low2", {{0.1455, 4.41e-2}, {0.1464, 3.66e-2}, {0.0998, 1.85e-2}}},
    {"low3", {{0.0618, 1.28e-2}, {0.0604, 6.77e-3}, {0.0452, 3.58e-3}}},
    {"std4", {{0.0281, 2.72e-3}, {0.0281, 2.72e-3}, {0.0242, 1.65e-3}}},
    {"mix4", {{0.0281, 2.72e-3}, {0.0238, 1.61e-3}, {0.0235, 1.24e-3}}},
    {"std5", {{0.0139, 6.27e-4}, {0.0139, 6.27e-4}, {0.0121, 4.11e-4}}},
    {"hi6", {{0.0080, 2.05e-4}, {0.0080, 2.05e-4}, {0.0069, 1.26e-4}}},
    {"ref8", {{0.0017, 9.04e-6}, {0.0017, 9.04e-6}, {0.0017, 9.04e-6}}},
};

constexpr const preset_error& error_of(const char* name) noexcept {
    for (const preset_error& e : preset_errors) {
        int i = 0;
        while (name[i] != 0 && name[i] == e.name[i]) ++i;
        if (name[i] == e.name[i]) return e;
    }
    return preset_errors[0];
}

}  // namespace detail

/// Bits per number of a preset's pages; with context > 0, of a whole sequence of that many tokens, window included.
template <class Preset>
double preset_bits(const cache_shape& shape, int context = 0,
                   const cache_options& options = preset_options()) {
    detail::check_shape(shape);
    detail::expect(options.page_tokens >= 1, "a page has at least 1 token, got ", options.page_tokens);
    const block_shape k{tensor::key, options.page_tokens, shape.dim(tensor::key)};
    const block_shape v{tensor::value, options.page_tokens, shape.dim(tensor::value)};
    const std::size_t bytes =
        typename Preset::keys{}.block_bytes(k) + typename Preset::values{}.block_bytes(v);
    const double coded = 8.0 * static_cast<double>(bytes) / static_cast<double>(k.values() + v.values());
    if (context <= 0) return coded;
    const double window = options.sinks + options.recent + options.page_tokens / 2.0;
    const double share = window < context ? window / context : 1.0;
    return coded * (1.0 - share) + 16.0 * share;
}

/// The preset of least divergence within `budget` bits per number. statistics: what its keys will be made from.
[[nodiscard]] inline preset_choice choose(double budget, const cache_shape& shape,
                                          statistics_of statistics = statistics_of::nothing, int context = 0,
                                          const cache_options& options = preset_options()) {
    detail::check_shape(shape);
    preset_choice best;
    for_each_preset([&]<class P>(P) {
        const double bits = preset_bits<P>(shape, context, options);
        if (!(bits <= budget)) return;
        const measured_error& error = detail::error_of(P::name).errors.with(statistics);
        if (!best.name || error.divergence < best.error.divergence) best = {P::name, bits, error};
    });
    return best;
}

/// The same for a budget of bytes per token, over all layers and heads.
[[nodiscard]] inline preset_choice choose_bytes(double bytes_per_token, const cache_shape& shape,
                                                statistics_of statistics = statistics_of::nothing,
                                                int context = 0,
                                                const cache_options& options = preset_options()) {
    detail::check_shape(shape);
    const double numbers = static_cast<double>(shape.layers) * shape.kv_heads *
                           (shape.dim(tensor::key) + shape.dim(tensor::value));
    return choose(8.0 * bytes_per_token / numbers, shape, statistics, context, options);
}

}  // namespace kvq::inline KVQ_TAGGED
