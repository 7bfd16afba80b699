#include "weights_source.hpp"

#include <stdexcept>
#include <string>

namespace llama {
namespace {

struct known_shape {
    std::string_view name;
    int dim, hidden_dim, layers, heads, kv_heads, vocab, context;
    double theta;
    bool head_norms;
};

// Sources: config.json of meta-llama/Meta-Llama-3-8B, Meta-Llama-3-70B and Qwen/Qwen3-8B.
constexpr known_shape shapes[] = {
    {"llama-3-8b", 4096, 14336, 32, 32, 8, 128256, 8192, 500000.0, false},
    {"llama-3-70b", 8192, 28672, 80, 64, 8, 128256, 8192, 500000.0, false},
    {"llama-3-70b-layer", 8192, 28672, 1, 64, 8, 128256, 8192, 500000.0, false},
    {"qwen3-8b", 4096, 12288, 36, 32, 8, 151936, 40960, 1000000.0, true},
};

}  // namespace

weights_source random_source(std::string_view name, int layers, int context) {
    std::string names;
    for (const known_shape& s : shapes) {
        names += (names.empty() ? "" : ", ") + std::string(s.name);
        if (s.name != name) {
            continue;
        }
        if (layers < 0 || context < 0) {
            throw std::invalid_argument("a model of " + std::to_string(layers) + " layers and a context of " +
                                        std::to_string(context) + " tokens");
        }
        weights_source source;
        source.random = true;
        source.head_norms = s.head_norms;
        model_config& config = source.config;
        config.shape = {s.dim,      s.hidden_dim, layers > 0 ? layers : s.layers,   s.heads,
                        s.kv_heads, s.vocab,      context > 0 ? context : s.context};
        config.shape.head_channels = 128;
        config.pairs = kvq::rotary_layout::half_split;
        config.rotary.frequencies = kvq::rotary_frequencies(128, s.theta);
        return source;
    }
    throw std::invalid_argument("there is no shape \"" + std::string(name) + "\"; known are " + names);
}

}  // namespace llama
