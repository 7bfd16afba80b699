#include "key_bias.hpp"

#include "../../bench/attention_error.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>

namespace llama {
namespace {

constexpr int most_tokens = 1024, queries_per_head = 8,
              most_heads = 2;  // of a layer: enough to tell formats apart

// Whole pages of one head, quantized and dequantized again; the tokens behind them stay as they are.
std::vector<float> through(const kvq::format& format, kvq::tensor role, kvq::block_id id,
                           const std::vector<float>& values, int tokens, int dim, int page_tokens) {
    std::vector<float> result = values;
    const kvq::block_shape shape{role, page_tokens, dim};
    std::vector<std::byte> block(format.block_bytes(shape));
    std::vector<float> page(shape.values()), scratch(shape.values());
    for (int first = 0; first + page_tokens <= tokens; first += page_tokens) {
        float* const at = result.data() + static_cast<std::ptrdiff_t>(first) * dim;
        std::copy_n(at, page.size(), page.begin());
        format.functions().quantize_values(format.scheme(), shape, id, page.data(), block.data());
        format.functions().dequantize(format.scheme(), shape, id, block.data(), kvq::float_type::fp32, at,
                                      dim, scratch.data());
    }
    return result;
}

// Tokens of one head out of [token][head][channel].
std::vector<float> head_of(const std::vector<float>& all, int heads, int head, int dim, int tokens) {
    std::vector<float> of;
    for (int t = 0; t < tokens; ++t) {
        const auto at = all.begin() + (static_cast<std::ptrdiff_t>(t) * heads + head) * dim;
        of.insert(of.end(), at, at + dim);
    }
    return of;
}

bench::head_values in_double(const std::vector<float>& k, const std::vector<float>& v, int tokens, int dim) {
    bench::head_values head(tokens, dim, dim);
    for (int t = 0; t < tokens; ++t) {
        for (int c = 0; c < dim; ++c) {
            head.key(t, c) = static_cast<double>(k[static_cast<std::size_t>(t * dim + c)]);
            head.value(t, c) = static_cast<double>(v[static_cast<std::size_t>(t * dim + c)]);
        }
    }
    return head;
}

}  // namespace

key_bias find_key_bias(const model_config& config, const kvq::calibration& statistics) {
    const model_shape& shape = config.shape;
    const int pairs = shape.head_dim() / 2, rotated = static_cast<int>(config.rotary.frequencies.size());
    const bool interleaved = config.pairs == kvq::rotary_layout::interleaved;
    const auto slow = [&](int pair) {
        return pair >= rotated ||
               64.0 * std::abs(config.rotary.frequencies[static_cast<std::size_t>(pair)]) <= 1.0;
    };
    bool any_slow = false;
    for (int pair = 0; pair < pairs; ++pair) {
        any_slow = any_slow || slow(pair);
    }
    key_bias largest;
    for (const int layer : shape.attention_layers()) {
        for (int head = 0; head < shape.kv_heads; ++head) {
            std::vector<double> deviations;
            for (int c = 0; c < shape.head_dim(); ++c) {
                deviations.push_back(std::sqrt(statistics.key_variance(layer, head, c)));
            }
            const auto middle = deviations.begin() + static_cast<std::ptrdiff_t>(deviations.size() / 2);
            std::nth_element(deviations.begin(), middle, deviations.end());
            for (int pair = 0; pair < pairs; ++pair) {
                if (any_slow && !slow(pair)) {
                    continue;
                }
                const bool neighbours = interleaved || pair >= rotated;  // channels behind the rotated ones
                const int first = neighbours ? 2 * pair : pair,
                          second = neighbours ? first + 1 : pair + rotated;
                double square = 0.0;
                for (const int c : {first, second}) {
                    square += std::max(
                        0.0, statistics.key_power(layer, head, c) - statistics.key_variance(layer, head, c));
                }
                const key_bias found{layer, head, pair, std::sqrt(square), *middle};
                if (found.ratio() > largest.ratio()) {
                    largest = found;
                }
            }
        }
    }
    return largest;
}

std::vector<attention_error> attention_errors(const model_shape& shape, const recording_cache& recorded,
                                              std::span<const scheme_choice> schemes,
                                              kvq::thread_pool& workers) {
    const int dim = shape.head_dim(), group = shape.heads / shape.kv_heads;
    const int heads = std::min(most_heads, shape.kv_heads);
    const std::vector<int> layers = shape.attention_layers();
    const auto recorded_in = [&](int layer) -> const recording_cache::recorded& {
        return recorded.layers()[static_cast<std::size_t>(layer)];
    };
    const int tokens =
        std::min(most_tokens, static_cast<int>(recorded_in(layers.front()).keys.size()) / shape.kv_dim());
    const int jobs = static_cast<int>(layers.size()) * heads;
    std::vector<std::vector<bench::error_sums>> sums(static_cast<std::size_t>(jobs));
    workers.parallel_for(jobs, [&](int job) {
        const int layer = layers[static_cast<std::size_t>(job / heads)],
                  head = job % heads * (shape.kv_heads / heads);
        const auto& of = recorded_in(layer);
        const auto k = head_of(of.keys, shape.kv_heads, head, dim, tokens),
                   v = head_of(of.values, shape.kv_heads, head, dim, tokens),
                   q = head_of(of.queries, shape.heads, head * group, dim, tokens);
        const bench::head_values exact = in_double(k, v, tokens, dim);
        std::vector<bench::exact_query> queries;
        for (int i = 1; i <= queries_per_head; ++i) {
            const int position = tokens / 2 + (tokens - tokens / 2) * i / queries_per_head - 1;
            queries.push_back(bench::make_exact(exact, q.data() + static_cast<std::ptrdiff_t>(position) * dim,
                                                position + 1));
        }
        for (const scheme_choice& scheme : schemes) {
            const auto through_pages = [&](const kvq::format& format, kvq::tensor role,
                                           const std::vector<float>& x) {
                return through(format, role, {layer, head}, x, tokens, dim, scheme.settings.page_tokens);
            };
            const bench::head_values quantized =
                in_double(through_pages(scheme.formats.keys, kvq::tensor::key, k),
                          through_pages(scheme.formats.values, kvq::tensor::value, v), tokens, dim);
            bench::error_sums sum;
            for (const bench::exact_query& query : queries) {
                std::vector<double> logits(static_cast<std::size_t>(query.seen));
                quantized.logits(query.q, query.seen, logits.data());
                bench::add_query(exact, quantized, query, std::move(logits), scheme.settings.sinks,
                                 scheme.settings.recent, sum);
            }
            sums[static_cast<std::size_t>(job)].push_back(sum);
        }
    });
    std::vector<attention_error> errors;
    for (std::size_t scheme = 0; scheme < schemes.size(); ++scheme) {
        attention_error error{schemes[scheme].label};
        error.bits = 16.0 * schemes[scheme].bytes_per_token(shape) /
                     (4.0 * static_cast<double>(layers.size()) * shape.kv_dim());
        for (const auto& of_head : sums) {
            const bench::error_sums& sum = of_head[scheme];
            const double relative = std::sqrt(sum.error / std::max(sum.power, 1e-300));
            error.mean += relative / static_cast<double>(sums.size());
            error.worst_head = std::max(error.worst_head, relative);
            error.kl_divergence += sum.divergence / sum.queries / static_cast<double>(sums.size());
        }
        errors.push_back(std::move(error));
    }
    return errors;
}

}  // namespace llama
