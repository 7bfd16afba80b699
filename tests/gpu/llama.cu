// The engine of examples/llama on the device against the one on the CPU: logits of every architecture, text
// and perplexity with quantized caches, chunks, batches, forks, graphs, continuous batching, step down,
// refusals.
//
// -DPART=0: heads of 32 channels, 1: of 64. Weights and activations in fp16. The emulator multiplies matrices
// in a fixed order, so a prompt is bit for bit what it is alone; on a device cuBLAS chooses another order for
// another number of rows. Attention of a decode step adds up in another order in another batch
// (schedule.cuh): then a few activations round to the neighbouring 16-bit number, 2^-11 of the number.
//
//   llama1 [MODEL TEXT TOKENIZER [ROPE_THETA]]    perplexity and text of another model; TEXT may be ids
//                                                 (*.u16)
#include "../../examples/llama/cuda/engine.cu"

#include "../../examples/llama/cuda/batch.hpp"
#include "llama_cpu.hpp"
#include "support.cuh"

#include <numeric>

using namespace llama::device;

namespace {

#ifdef __CUDACC__
constexpr bool is_exact = false;
constexpr int text_tokens = 480, decoded_tokens = 40;
constexpr double other_batch = 2e-2;
#else
constexpr bool is_exact = true;
constexpr int text_tokens = 150, decoded_tokens = 15;  // a page is quantized
constexpr double other_batch = 0x1p-9;
#endif
#if PART == 0
constexpr int dim = 32;
const std::vector<std::string> formats = {"int8", "kivi-4-g64"};
const bool added = add_format<kvq::float16, kvq::cuda::block_pair<kvq::int8, kvq::int8, dim, 64>,
                              kvq::cuda::kivi_pair<4, 64, dim, 64>>();
const std::vector<std::string> architectures = {"llama", "qwen3", "gemma2"};
#else
constexpr int dim = 64;
const std::vector<std::string> formats = {"std4", "low2"};
const bool added = add_format<kvq::float16, kvq::cuda::preset_pair<kvq::std4, dim, 64>>() &&
                   add_format<kvq::float16, kvq::cuda::preset_pair<kvq::low2, dim, 64>>();
const std::vector<std::string> architectures = {"qwen2", "gemma3"};
#endif

const char* const data = "examples/llama/data/";

/// The largest difference, relative to the largest number; NaN counts as infinite.
double distance(const std::vector<float>& a, const std::vector<float>& b) {
    double most = 0.0, size = 1e-30;
    for (std::size_t i = 0; i < a.size(); ++i) {
        const double difference = std::abs(static_cast<double>(a[i]) - static_cast<double>(b[i]));
        most = difference <= most ? most : std::isnan(difference) ? INFINITY : difference;
        size = std::max(size, std::abs(static_cast<double>(b[i])));
    }
    return a.size() == b.size() ? most / size : INFINITY;
}

double perplexity(const std::vector<float>& logits, const std::vector<int>& tokens) {
    const std::size_t vocab = logits.size() / tokens.size();
    double sum = 0.0;
    for (std::size_t t = 0; t + 1 < tokens.size(); ++t) {
        const float* const row = &logits[t * vocab];
        const double most = static_cast<double>(*std::max_element(row, row + vocab));
        double weights = 0.0;
        for (std::size_t i = 0; i < vocab; ++i) weights += std::exp(static_cast<double>(row[i]) - most);
        sum += most + std::log(weights) - static_cast<double>(row[tokens[t + 1]]);
    }
    return std::exp(sum / static_cast<double>(tokens.size() - 1));
}

struct one_model {
    std::unique_ptr<test::cpu_engine> cpu;
    std::shared_ptr<const device_model> gpu;
    int vocab;

    explicit one_model(std::unique_ptr<test::cpu_engine> made)
        : cpu(std::move(made)), gpu(upload(cpu->source(), precision::fp16)), vocab(gpu->config.shape.vocab) {}
};
engine_options options_for(const std::string& format, int chunk) {
    engine_options o;
    o.format = format;
    o.recent = 64;
    o.page_tokens = 64;
    o.max_batch = 3;
    o.max_tokens = 512;
    o.chunk = chunk;
    return o;
}

/// Logits of all tokens: the first `prompt` ones read, the others one by one.
std::vector<float> logits_of(engine& on, int sequence, const std::vector<int>& tokens, int prompt) {
    const auto vocab = static_cast<std::size_t>(on.config().shape.vocab);
    std::vector<float> all(tokens.size() * vocab),
        states(static_cast<std::size_t>(prompt) * static_cast<std::size_t>(on.config().shape.dim));
    if (prompt > 0) {
        on.read(sequence, std::span(tokens).first(static_cast<std::size_t>(prompt)), states.data());
        on.logits_of(states, std::span(all).first(static_cast<std::size_t>(prompt) * vocab));
    }
    for (std::size_t t = static_cast<std::size_t>(prompt); t < tokens.size(); ++t) {
        on.decode(std::span(&sequence, 1), std::span(tokens).subspan(t, 1));
        on.logits(std::span(all).subspan(t * vocab, vocab));
    }
    return all;
}
std::vector<float> logits_of(const one_model& m, const engine_options& o, const std::vector<int>& tokens,
                             int prompt) {
    const auto on = make_engine(m.gpu, o);
    return logits_of(*on, on->new_sequence(), tokens, prompt);
}

void test_architectures(test::rng& r) {
    for (const std::string& name : architectures) {
        const one_model m(test::tiny_engine(name, dim, r()));
        std::vector<int> tokens;
        for (int i = 0; i < 40; ++i) tokens.push_back(test::uniform(r, 0, m.vocab - 1));
        const std::vector<float> expected = m.cpu->logits(tokens, "", 0, 0, 1, 40);
        const double read = distance(logits_of(m, options_for("fp16", 17), tokens, 31), expected),
                     decoded = distance(logits_of(m, options_for("fp16", 17), tokens, 0), expected);
        CHECK(read < 1e-2 && decoded < 1e-2, "%s: %g of the logits read, %g decoded", name.c_str(), read,
              decoded);
        std::printf("  %s: error of logits %.1e read, %.1e decoded\n", name.c_str(), read, decoded);
    }
}

/// A trained model, and its text: of the repository, or those of the command line. The repository's has heads
/// of 8 channels, which are padded with zeros.
std::string model_path = std::string(data) + "stories260K.bin",
            text_path = std::string(data) + "tinystories.txt",
            tokenizer_path = std::string(data) + "stories260K.tokenizer.bin";
double rope_theta = 0.0;
const one_model& stories() {
    static const one_model m(test::engine_of_file(model_path, rope_theta));
    return m;
}
std::vector<int> story(int count) { return test::tokens_of_file(text_path, tokenizer_path, count); }

/// On the CPU, with the device's pages.
std::vector<float> cpu_logits(const std::string& format, const std::vector<int>& tokens, int chunk) {
    const bool is_plain = format == "fp16";
    return stories().cpu->logits(tokens, format, is_plain ? 0 : 4, is_plain ? 0 : 64, 64, chunk);
}

void test_perplexity() {
    const int count = std::min(text_tokens, stories().gpu->config.shape.context);
    const std::vector<int> tokens = story(count);
    std::vector<std::string> names = formats;
    names.insert(names.begin(), "fp16");
    for (const std::string& name : names) {
        const bool is_plain = name == "fp16";
        constexpr int chunk = 80;
        const double expected = perplexity(cpu_logits(name, tokens, chunk), tokens);
        const auto on = make_engine(stories().gpu, options_for(name, chunk));
        const double got = perplexity(logits_of(*on, on->new_sequence(), tokens, count), tokens),
                     decoded = perplexity(logits_of(*on, on->new_sequence(), tokens, count - decoded_tokens),
                                          tokens);
        const double bound = is_plain ? 1e-3 : name == "low2" ? 1e-2 : 5e-3;
        CHECK(std::abs(got / expected - 1.0) < bound && std::abs(decoded / expected - 1.0) < 2.0 * bound,
              "%s: perplexity %g read, %g decoded, %g on the CPU", name.c_str(), got, decoded, expected);
        std::printf("  %s: perplexity %.4f read, %.4f with %d tokens decoded, %.4f on the CPU\n",
                    name.c_str(), got, decoded, decoded_tokens, expected);
    }
}

/// Every token of the continuation is the likeliest one on the CPU, or as likely but for rounding.
void check_text(const char* what, const std::vector<int>& tokens, int prompt, const std::string& format,
                int chunk, double bound) {
    const std::vector<float> logits = cpu_logits(format, tokens, chunk);
    const auto vocab = static_cast<std::size_t>(stories().vocab);
    int same = 0;
    for (std::size_t t = static_cast<std::size_t>(prompt); t < tokens.size(); ++t) {
        const float* const row = &logits[(t - 1) * vocab];
        const float most = *std::max_element(row, row + vocab);
        same += row[tokens[t]] == most;
        CHECK(static_cast<double>(most - row[tokens[t]]) <= bound,
              "%s, %s: token %zu is %d, whose logit is %g below the CPU's", what, format.c_str(), t,
              tokens[t], static_cast<double>(most - row[tokens[t]]));
    }
    std::printf("  %s, %s: %d of %zu tokens are the CPU's likeliest\n", what, format.c_str(), same,
                tokens.size() - static_cast<std::size_t>(prompt));
}

/// Text chosen on the device, tokens never leaving it.
void test_text() {
    for (const std::string& name : {std::string("fp16"), formats[0]}) {
        engine_options o = options_for(name, 64);
        o.pool_tokens = o.max_tokens;
        o.pool_sequences = 1;
        const auto on = make_engine(stories().gpu, o);
        const int sequence = on->new_sequence(), steps = is_exact ? 30 : 200;
        std::vector<int> tokens = story(20), next(1);
        on->read(sequence, tokens);
        on->choices(next);
        tokens.push_back(next[0]);
        on->decode(std::span(&sequence, 1), next);
        for (int i = 0; i < steps; ++i) {
            on->choices(next);
            tokens.push_back(next[0]);
            on->decode(std::span(&sequence, 1), {});
        }
        CHECK(on->tokens(sequence) == 21 + steps, "%d tokens", on->tokens(sequence));
        CHECK(on->captures() == 1, "%d captures", on->captures());
        check_text("decoded", tokens, 20, name, 1, name == "fp16" ? 0.05 : 0.2);
    }
}

void test_chunks_and_batches() {
    const std::string& name = formats[0];
    std::vector<std::vector<int>> texts = {story(150), story(131), story(40)};
    std::reverse(texts[1].begin() + 1, texts[1].end());
    const auto vocab = static_cast<std::size_t>(stories().vocab);
    // Alone, in chunks of several sizes.
    std::vector<std::vector<float>> alone;
    for (const auto& text : texts) {
        alone.push_back(
            logits_of(stories(), options_for(name, 64), text, static_cast<int>(text.size()) - 20));
        if (is_exact && alone.size() > 1) continue;
        const double other =
            distance(logits_of(stories(), options_for(name, 23), text, static_cast<int>(text.size()) - 20),
                     alone.back());
        CHECK(other < 2e-2, "chunks of 23 instead of 64: %g", other);
    }
    // Together, with and without graphs; the third joins after 7 steps, and a fork of the first goes on
    // beside it.
    std::vector<std::vector<float>> by_graphs;
    for (const bool graphs : {true, false}) {
        engine_options o = options_for(name, 64);
        o.graphs = graphs;
        o.max_batch = 5;
        const auto on = make_engine(stories().gpu, o);
        std::vector<int> sequences;
        std::vector<float> rows;
        const auto row_alone = [&](std::size_t text, std::size_t token) {
            const auto first = alone[text].begin() + static_cast<std::ptrdiff_t>(token * vocab);
            return std::vector<float>(first, first + static_cast<std::ptrdiff_t>(vocab));
        };
        const auto join = [&](std::size_t i) {
            const std::vector<int>& text = texts[i];
            sequences.push_back(on->new_sequence());
            on->read(sequences.back(), std::span(text).first(text.size() - 20));
            rows.resize(vocab);
            on->logits(rows);
            const std::vector<float> own = row_alone(i, text.size() - 21);
            CHECK(is_exact ? rows == own : distance(rows, own) < other_batch,
                  "prompt %zu is %g from what it is alone", i, distance(rows, own));
        };
        join(0);
        join(1);
        double worst = 0.0;
        for (int step = 0; step < 20; ++step) {
            if (step == 7) {
                join(2);
                sequences.push_back(on->fork(sequences[0]));
            }
            std::vector<int> tokens;
            std::vector<std::size_t> of;  // place among its text's tokens
            for (std::size_t i = 0; i < sequences.size(); ++i) {
                const auto& text = texts[i % 3];
                of.push_back(text.size() - 20 + static_cast<std::size_t>(step - (i == 2 ? 7 : 0)));
                tokens.push_back(text[of.back()]);
            }
            on->decode(sequences, tokens);
            rows.resize(sequences.size() * vocab);
            on->logits(rows);
            by_graphs.push_back(rows);
            for (std::size_t i = 0; i < sequences.size(); ++i) {
                const std::vector<float> row(rows.begin() + static_cast<std::ptrdiff_t>(i * vocab),
                                             rows.begin() + static_cast<std::ptrdiff_t>((i + 1) * vocab));
                const double other = distance(row, row_alone(i % 3, of[i]));
                worst = std::max(worst, other);
                CHECK(other < other_batch, "row %zu of step %d is %g from what it is alone", i, step, other);
            }
        }
        std::printf("  batches%s: at most %.1e from alone\n", graphs ? ", graphs" : "", worst);
        CHECK(on->captures() == (graphs ? 2 : 0), "%d captures", on->captures());
        for (const int s : sequences) on->free(s);
        CHECK(on->usage().cache_pages == 0, "%zu bytes of pages are left", on->usage().cache_pages);
    }
    for (std::size_t i = 0; i < 20; ++i)
        CHECK(by_graphs[i] == by_graphs[i + 20], "step %zu differs with graphs", i);
}

/// Six requests (emulated, four) on three rows, with a common beginning; then with memory for two, of which
/// one may have a quantized page.
void test_continuous_batching() {
    const std::string& name = formats[0];
    std::vector<request> requests;
    int steps = 0;
    for (int i = 0; i < (is_exact ? 4 : 6); ++i) {
        request of{story(100), 46 + 3 * i, {.temperature = 0.0}};
        steps += of.steps;
        of.prompt.resize(static_cast<std::size_t>(90 + i));
        of.prompt.push_back(3 + 40 * i);
        requests.push_back(of);
    }
    for (const bool scarce : {false, true}) {
        engine_options o = options_for(name, 64);
        if (scarce) {
            o.growing = false;
            o.pool_tokens = 64;
            o.pool_sequences = 3;
        }
        const auto on = make_engine(stories().gpu, o);
        int seen = 0;
        batch_settings settings;
        settings.on_token = [&](int, int) { ++seen; };
        const batch_result result = run_batch(*on, requests, settings);
        CHECK(result.shared_tokens == 90, "%d shared tokens", result.shared_tokens);
        CHECK(result.generated_tokens == seen && seen == steps, "%d tokens", seen);
        CHECK(result.largest_batch == (scarce ? 2 : 3), "batches of %d", result.largest_batch);
        CHECK((result.evictions > 0) == scarce, "%d evictions", result.evictions);
        CHECK(on->usage().cache_pages == 0, "%zu bytes of pages are left", on->usage().cache_pages);
        for (std::size_t i = 0; i < requests.size(); ++i) {
            std::vector<int> text = requests[i].prompt;
            const int prompt = static_cast<int>(text.size());
            const auto& tokens = result.replies[i].tokens;
            CHECK(static_cast<int>(tokens.size()) == requests[i].steps, "request %zu has %zu tokens", i,
                  tokens.size());
            text.insert(text.end(), tokens.begin(), tokens.end());
            if (i % 3 == 0)
                check_text(scarce ? "batched, little memory" : "batched", text, prompt, name, 1, 0.2);
        }
        std::printf("  %d steps of at most %d sequences, %d evictions\n", result.steps, result.largest_batch,
                    result.evictions);
    }
    // Drawn tokens: the same seed, the same text.
    const auto on = make_engine(stories().gpu, options_for(name, 64));
    std::vector<request> drawn(3, request{story(30), 12, {.temperature = 1.0, .top_p = 0.95, .seed = 5}});
    drawn[2].sampler.seed = 6;
    const batch_result result = run_batch(*on, drawn, {});
    if (is_exact) CHECK(result.replies[0].tokens == result.replies[1].tokens, "the same seed, other texts");
    CHECK(result.replies[0].tokens != result.replies[2].tokens, "another seed, the same text");
}

void test_bytes() {
    for (const std::string& name : {std::string("fp16"), formats[0]}) {
        const auto on = make_engine(stories().gpu, options_for(name, 64));
        const int sequence = on->new_sequence();
        const std::vector<int> tokens = story(260);
        for (int n = 0; n < 260;) {
            const int more = n < 5 ? 2 : n % 50 + 1, end = std::min(260, n + more);
            on->read(sequence, std::span(tokens).subspan(static_cast<std::size_t>(n),
                                                         static_cast<std::size_t>(end - n)));
            n = end;
            CHECK(on->bytes(sequence) == on->bytes_for(n), "%s: %zu bytes of %d tokens, %zu were expected",
                  name.c_str(), on->bytes(sequence), n, on->bytes_for(n));
        }
    }
}

#if PART == 0
void test_step_down() {
    const std::vector<int> tokens = story(400);
    engine_options o = options_for("int8", 64);
    const auto plain = make_engine(stories().gpu, o);
    const int of_plain = plain->new_sequence();
    plain->read(of_plain, tokens);
    o.tiers = {{0, "int8"}, {128, "kivi-4-g64"}};
    o.budget = plain->bytes(of_plain) * 4 / 5;
    const auto on = make_engine(stories().gpu, o);
    const int sequence = on->new_sequence();
    on->read(sequence, tokens);
    std::vector<int> next(1);
    on->choices(next);
    on->decode(std::span(&sequence, 1), next);
    for (int i = 0; i < 65; ++i) on->decode(std::span(&sequence, 1), {});
    CHECK(on->bytes(sequence) <= o.budget, "%zu bytes, the budget is %zu", on->bytes(sequence), o.budget);
    CHECK(on->tokens(sequence) == 466, "%d tokens", on->tokens(sequence));
}
#endif

template <class Call>
void check_refused(const Call& call, const char* part) {
    std::string message = "nothing";
    try {
        call();
    } catch (const std::exception& error) {
        message = error.what();
    }
    CHECK(message.find(part) != std::string::npos, "\"%s\" was expected to say \"%s\"", message.c_str(),
          part);
}

void test_refusals() {
    const std::string& name = formats[0];
    check_refused([&] { make_engine(stories().gpu, options_for("kivi-3-g64", 64)); }, name.c_str());
    check_refused([] { upload(test::tiny_engine("llama", 128, 1)->source(), precision::fp16); },
                  "heads of 128 channels");
    check_refused([] { upload(stories().cpu->source(), precision::bf16); }, "bf16");
    check_refused([] { llama::random_source("llama-2-7b"); }, "llama-3-8b");
    engine_options o = options_for(name, 64);
    o.growing = false;
    o.pool_tokens = 128;
    o.pool_sequences = 1;
    const auto on = make_engine(stories().gpu, o);
    const int sequence = on->new_sequence();
    const std::vector<int> tokens = story(300);
    on->read(sequence, std::span(tokens).first(70));
    const std::size_t bytes = on->bytes(sequence);
    check_refused([&] { on->read(sequence, std::vector<int>{600}); }, "token 600");
    check_refused([&] { on->read(sequence, {}); }, "without tokens");
    check_refused([&] { on->decode(std::vector<int>{7}, std::vector<int>{1}); }, "no sequence 7");
    check_refused([&] { on->decode(std::vector<int>{sequence}, {}); }, "without tokens follows");
    check_refused([&] { on->decode(std::vector<int>(4, sequence), std::vector<int>(4, 1)); },
                  "max_batch is 3");
    check_refused([&] { on->read(on->new_sequence(), std::span(tokens).first(64)); }, "may not grow");
    CHECK(on->tokens(sequence) == 70 && on->bytes(sequence) == bytes, "%d tokens", on->tokens(sequence));
    const double other =
        distance(logits_of(*on, sequence, {tokens.begin() + 70, tokens.begin() + 75}, 0), [&] {
            const auto all =
                logits_of(stories(), options_for(name, 64), {tokens.begin(), tokens.begin() + 75}, 70);
            return std::vector<float>(all.end() - 5 * stories().vocab, all.end());
        }());
    CHECK(other < 1e-2, "%g after refusals", other);
}

/// Random weights of a real shape, in small: nothing but finite logits can be expected of it.
void test_random() {
    llama::weights_source source = llama::random_source("qwen3-8b", 1, 128);
    source.config.shape.dim = 64;
    source.config.shape.hidden_dim = 96;
    source.config.shape.heads = 4;
    source.config.shape.kv_heads = 2;
    source.config.shape.vocab = 300;
    source.config.shape.head_channels = dim;
    source.config.rotary.frequencies = kvq::rotary_frequencies(dim, 1e6);
    engine_options o = options_for(formats[0], 40);
    o.max_tokens = 0;
    const auto on = make_engine(upload(source, precision::fp16), o);
    CHECK(on->options().max_tokens == 128, "a context of %d", on->options().max_tokens);
    std::vector<int> tokens(100);
    std::iota(tokens.begin(), tokens.end(), 5);
    on->record(90);
    const int sequence = on->new_sequence(), copy = on->new_sequence();
    std::vector<float> logits = logits_of(*on, sequence, tokens, 90), again(logits.size());
    double most = 0.0;
    for (const float x : logits)
        most = std::abs(static_cast<double>(x)) <= most ? most : std::abs(static_cast<double>(x));
    CHECK(most > 0.5 && most < 20.0, "logits of up to %g", most);
    // What was recorded is what a prompt writes.
    on->append_recorded(copy, 0, 90);
    CHECK(on->tokens(copy) == 90 && on->bytes(copy) <= on->bytes(sequence), "%d tokens", on->tokens(copy));
    std::vector<float> row(300);
    for (std::size_t t = 90; t < 100; ++t) {
        on->decode(std::span(&copy, 1), std::span(tokens).subspan(t, 1));
        on->logits(row);
        CHECK(std::equal(row.begin(), row.end(), logits.begin() + static_cast<std::ptrdiff_t>(t * 300)),
              "token %zu has other logits", t);
    }
}

}  // namespace

int main(int argc, char** argv) {
    if (argc > 3) {
        model_path = argv[1];
        text_path = argv[2];
        tokenizer_path = argv[3];
        rope_theta = argc > 4 ? std::atof(argv[4]) : 0.0;
        std::printf("%s:\n", model_path.c_str());
        test_perplexity();
        test_text();
        return test::report("llama");
    }
    test::rng r(static_cast<unsigned>(20240207));
    std::printf("llama, heads of %d channels:\n", dim);
    test_architectures(r);
    test_perplexity();
    test_text();
    test_chunks_and_batches();
    test_continuous_batching();
#if PART == 0
    test_step_down();
#endif
    test_bytes();
    test_refusals();
    test_random();
    return test::report("llama");
}
