// A long prompt is read once and saved. A later process resumes from the file with the same results as
// without a stop.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <kvq/format/make_format.hpp>
#include <kvq/io/file.hpp>
#include <kvq/kvq.hpp>
#include <random>
#include <utility>
#include <vector>

namespace {

constexpr int layers = 2, kv_heads = 2, q_heads = 8, dim = 64, prompt = 1500, answer = 40;
constexpr kvq::cache_shape shape{.layers = layers, .kv_heads = kv_heads, .head_dim = dim};
const char* const path = "kvq_example_resume.safetensors";

/// Values that a model would compute: K, V and Q of token t.
struct token_data {
    std::vector<float> k, v, q;

    explicit token_data(int t) : k(kv_heads * dim), v(k.size()), q(q_heads * dim) {
        std::mt19937 random(static_cast<unsigned>(t));
        std::normal_distribution<float> normal;
        for (auto* x : {&k, &v, &q})
            for (float& f : *x) f = normal(random);
    }
};

/// Reads tokens [first, first + n) and returns the attention of the last one in every layer.
std::vector<float> read_tokens(kvq::sequence& sequence, int first, int n) {
    std::vector<float> out(static_cast<std::size_t>(layers * q_heads * dim));
    for (int t = first; t < first + n; ++t) {
        const token_data x(t);
        for (int layer = 0; layer < layers; ++layer) {
            sequence.append(layer, kvq::token_view(x.k.data(), 1, kv_heads, dim),
                            kvq::token_view(x.v.data(), 1, kv_heads, dim));
            if (t == first + n - 1)
                sequence.attend(layer, kvq::token_view(x.q.data(), 1, q_heads, dim),
                                kvq::token_view(out.data() + layer * q_heads * dim, 1, q_heads, dim));
        }
    }
    return out;
}

/// Distance of b from a, relative to a.
double distance(const std::vector<float>& a, const std::vector<float>& b) {
    double difference = 0, norm = 0;
    for (std::size_t i = 0; i < a.size(); ++i) {
        difference += static_cast<double>(a[i] - b[i]) * static_cast<double>(a[i] - b[i]);
        norm += static_cast<double>(a[i]) * static_cast<double>(a[i]);
    }
    return std::sqrt(difference / norm);
}

const kvq::format_pair eight_bit = kvq::make_formats<kvq::kivi<8, 64>, kvq::scalar>();
const kvq::format_pair four_bit = kvq::make_formats<kvq::kivi<4, 64>, kvq::scalar>();

kvq::cache_options options(kvq::format_list keys, kvq::format_list values) {
    return {.keys = std::move(keys), .values = std::move(values), .sinks = 4, .recent = 64};
}

/// The first process: reads the prompt, saves it, and answers.
std::vector<float> first_process() {
    kvq::cache cache(shape, options(eight_bit.keys, eight_bit.values));
    auto sequence = cache.new_sequence();
    read_tokens(sequence, 0, prompt);
    kvq::save(sequence, path, {.model = "example-model-7"});
    std::printf("saved %d tokens; the cache holds %zu bytes (16 bit: %d)\n", sequence.tokens(),
                sequence.usage().bytes, 2 * 2 * layers * kv_heads * dim * prompt);
    return read_tokens(sequence, prompt, answer);
}

/// The second process: restores the prompt without reading it.
std::vector<float> second_process() {
    kvq::cache cache(shape, options(eight_bit.keys, eight_bit.values));
    auto sequence = kvq::restore(cache, path, {.model = "example-model-7"});
    std::printf("resumed at token %d\n", sequence.tokens());
    return read_tokens(sequence, sequence.tokens(), answer);
}

/// Prints the reason of an error.
template <class F>
void explain(F&& f) {
    try {
        f();
    } catch (const kvq::error& e) {
        std::printf("refused: %s\n", e.what());
    }
}

}  // namespace

int main() {
    const auto a = first_process(), b = second_process();
    const bool equal = std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
    std::printf("attention after %d more tokens: %s\n", answer, equal ? "equal, bit for bit" : "NOT equal");

    explain([] {
        kvq::cache cache(shape, options(eight_bit.keys, eight_bit.values));
        (void)kvq::restore(cache, path, {.model = "another-model"});
    });
    explain([] {
        kvq::cache cache(shape, options(four_bit.keys, four_bit.values));
        (void)kvq::restore(cache, path);
    });

    // A cache that quantizes to 4 bits and also lists the file's formats keeps the pages unchanged, or
    // converts them to 4 bits.
    kvq::cache cache(shape, options({four_bit.keys, eight_bit.keys}, {four_bit.values, eight_bit.values}));
    for (const bool convert : {false, true}) {
        auto sequence = kvq::restore(cache, path, {.convert = convert});
        const std::size_t bytes = sequence.usage().bytes;
        std::printf("%s: %zu bytes, attention %.4f off\n", convert ? "converted" : "as they are", bytes,
                    distance(a, read_tokens(sequence, sequence.tokens(), answer)));
    }
    std::remove(path);
    return equal ? 0 : 1;
}
