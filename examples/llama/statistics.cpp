#include "statistics.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

namespace llama {
namespace {

void add_statistics(kvq::calibration& statistics, const model_shape& shape, const recording_cache& cache,
                    kvq::thread_pool& workers) {
    workers.parallel_for(shape.layers, [&](int layer) {
        const auto& of = cache.layers()[static_cast<std::size_t>(layer)];
        const int count = static_cast<int>(of.keys.size()) / shape.kv_dim();
        statistics.add_keys(layer, kvq::token_view(of.keys.data(), count, shape.kv_heads, shape.head_dim()));
        statistics.add_queries(layer,
                               kvq::token_view(of.queries.data(), count, shape.heads, shape.head_dim()));
    });
}

}  // namespace

kvq::calibration gather_statistics(const model& llama, std::span<const int> tokens, int window,
                                   activations& space, recording_cache* first) {
    constexpr std::size_t fewest = 64;
    if (tokens.size() < fewest) {
        throw std::runtime_error("statistics need at least 64 tokens, the text has " +
                                 std::to_string(tokens.size()));
    }
    const model_shape& shape = llama.shape();
    kvq::calibration statistics(
        {.layers = shape.layers, .kv_heads = shape.kv_heads, .head_dim = shape.head_dim()}, true);
    const std::size_t step = static_cast<std::size_t>(window - 1);
    for (std::size_t begin = 0; begin < tokens.size() && (begin == 0 || tokens.size() - begin >= fewest);
         begin += step) {
        std::vector<int> input{llama.begin_of_text()};
        const auto text = tokens.subspan(begin, std::min(step, tokens.size() - begin));
        input.insert(input.end(), text.begin(), text.end());
        recording_cache another(shape);
        recording_cache& cache = first && begin == 0 ? *first : another;
        llama.read(input, 0, cache, static_cast<int>(input.size()), space);
        add_statistics(statistics, shape, cache, space.workers);
    }
    return statistics;
}

}  // namespace llama
