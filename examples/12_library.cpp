// An engine in C++ with kvq::library: formats by name, for the CPU that it runs on. Its files compile
// quickly, since caches are the library's.
//
//   12_library [format [tokens]]      any name of find_format, std4 by default; of the prompt, 700
#include <cstdio>
#include <cstdlib>
#include <kvq/format/find_format.hpp>
#include <kvq/kvq.hpp>
#include <string>
#include <vector>

namespace {

constexpr int layers = 4, kv_heads = 2, q_heads = 8, head_dim = 64, answer = 20;

/// What a model computes: n tokens, here of random values.
std::vector<float> values(int n, int heads) {
    std::vector<float> x(static_cast<std::size_t>(n * heads * head_dim));
    for (float& f : x) f = static_cast<float>(std::rand()) / static_cast<float>(RAND_MAX) - 0.5f;
    return x;
}

/// n more tokens in every layer.
void forward(kvq::sequence& sequence, int n, const kvq::mods_view& mods, kvq::workspace& space) {
    for (int layer = 0; layer < layers; ++layer) {
        const auto k = values(n, kv_heads), v = values(n, kv_heads), q = values(n, q_heads);
        std::vector<float> out(q.size());
        sequence.prefill(
            layer, kvq::input_view(k.data(), n, kv_heads, head_dim),
            kvq::input_view(v.data(), n, kv_heads, head_dim), kvq::query_view(q.data(), n, q_heads, head_dim),
            kvq::output_view(out.data(), n, q_heads, head_dim), mods, kvq::serial_executor{}, space);
    }
}

/// A mask of the engine: this sequence does not look at tokens 100 to 199.
struct without_a_part {
    bool mask(int /*query*/, int key) const { return key < 100 || key >= 200; }
};

}  // namespace

int main(int argc, char** argv) {
    const int prompt = argc > 2 ? std::atoi(argv[2]) : 700;  // tokens
    kvq::cache_options options = kvq::preset(argc > 1 ? argv[1] : "std4");
    options.keys.push_back(kvq::find_format("low2", kvq::tensor::key));
    options.values.push_back(kvq::find_format("low2", kvq::tensor::value));
    kvq::cache cache({.layers = layers, .kv_heads = kv_heads, .head_dim = head_dim}, options);

    kvq::workspace space;
    kvq::sequence sequence = cache.new_sequence();
    forward(sequence, prompt, kvq::causal{}, space);
    kvq::sequence draft = sequence.fork();
    for (int token = 0; token < answer; ++token) forward(sequence, 1, kvq::causal{}, space);
    forward(draft, 1, without_a_part{}, space);

    // A later prompt needs the memory: older pages go to 2 bits, first on paper.
    const kvq::requantize_request smaller{.key = 1, .value = 1, .only_smaller = true};
    kvq::sequence* const all[] = {&sequence, &draft};
    const kvq::sequence* const same[] = {&sequence, &draft};
    const kvq::requantize_report plan = cache.plan_requantize(same, smaller);
    const kvq::requantize_report done =
        cache.requantize(all, smaller, kvq::requantize_limit{}, kvq::serial_executor{}, space);
    std::printf("%zu pages converted, %zu planned: %zu bytes before, %zu after\n", done.pages, plan.pages,
                done.bytes_before, done.bytes_after);

    // An error changes nothing and is a sentence.
    try {
        sequence.trim(prompt + answer + 1);
    } catch (const kvq::error& e) {
        std::printf("refused: %s\n", e.what());
    }
    std::printf("%d tokens in %zu bytes, 16 bit would be %d\n", sequence.tokens(), sequence.usage().bytes,
                sequence.tokens() * layers * 2 * kv_heads * head_dim * 2);
}
