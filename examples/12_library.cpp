// An engine in C++ over the compiled library: its files compile quickly, since they instantiate no cache.
//
//   12_library [format [tokens]]      any name of kvq_format_list, std4 by default; of the prompt, 700
#include <cstdio>
#include <cstdlib>
#include <kvq/library.hpp>
#include <string>
#include <vector>

namespace {

namespace library = kvq::library;
constexpr int layers = 4, kv_heads = 2, q_heads = 8, head_dim = 64, answer = 20;

/// What a model computes: n tokens, here of random values.
std::vector<float> values(int n, int heads) {
    std::vector<float> x(static_cast<std::size_t>(n * heads * head_dim));
    for (float& f : x) f = static_cast<float>(std::rand()) / static_cast<float>(RAND_MAX) - 0.5f;
    return x;
}

/// n more tokens in every layer.
void forward(library::sequence& sequence, int n, const library::attend_options& options) {
    for (int layer = 0; layer < layers; ++layer) {
        const auto k = values(n, kv_heads), v = values(n, kv_heads), q = values(n, q_heads);
        std::vector<float> out(q.size());
        sequence.prefill(layer, library::input(k.data(), n, kv_heads, head_dim),
                         library::input(v.data(), n, kv_heads, head_dim),
                         library::input(q.data(), n, q_heads, head_dim),
                         library::output(out.data(), n, q_heads, head_dim), options);
    }
}

}  // namespace

int main(int argc, char** argv) {
    const int prompt = argc > 2 ? std::atoi(argv[2]) : 700;  // tokens
    const std::string formats = (argc > 1 ? argv[1] : "std4") + std::string(",low2");
    library::cache_options options;
    options.layers = layers;
    options.kv_heads = kv_heads;
    options.head_dim = head_dim;
    options.keys = formats.c_str();  // values: the same
    library::cache cache(options);

    // The engine's threads. Here it has one: tasks run one after the other.
    const auto run = [](int n, auto task) {
        for (int i = 0; i < n; ++i) task(i);
    };
    const library::executor threads(1, run);
    const library::workspace workspace;
    library::attend_options attend;
    attend.executor = threads.get();
    attend.workspace = workspace.get();

    library::sequence sequence = cache.new_sequence();
    forward(sequence, prompt, attend);
    library::sequence draft = sequence.fork();
    for (int token = 0; token < answer; ++token) forward(sequence, 1, attend);

    // A mask of the engine: this sequence does not look at tokens 100 to 199.
    const auto shown = [](int /*query*/, int key) { return key < 100 || key >= 200; };
    library::mods mods;
    mods.use(shown);
    attend.mods = &mods;
    forward(draft, 1, attend);

    // A later prompt needs the memory: older pages go to 2 bits, first on paper.
    kvq_sequence* const all[] = {sequence.get(), draft.get()};
    library::requantize_request smaller;
    smaller.keys = smaller.values = "low2";
    smaller.only_smaller = 1;
    smaller.dry_run = 1;
    const kvq_requantize_report plan = cache.requantize(all, smaller);
    smaller.dry_run = 0;
    const kvq_requantize_report done = cache.requantize(all, smaller);
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
