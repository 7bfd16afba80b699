#include "llama_cpu.hpp"

#include "../../examples/llama/kvq_cache.hpp"
#include "../../examples/llama/load_model.hpp"
#include "../../examples/llama/load_tokenizer.hpp"
#include "../../examples/llama/model.hpp"
#include "../../examples/llama/reference_cache.hpp"
#include "../../examples/llama/token_source.hpp"
#include "../llama/tiny_model.hpp"

#include <kvq/cpu/scalar.hpp>
#include <kvq/format/make_format.hpp>
#include <kvq/schemes/full.hpp>
#include <kvq/schemes/presets.hpp>

namespace test {
namespace {

class engine_on_cpu final : public cpu_engine {
public:
    engine_on_cpu(const std::string& path, double rope_theta)
        : weights_(llama::load_model(path, rope_theta)), model_(llama::load_model(path, rope_theta)) {}

    llama::weights_source source() const override { return llama::source_of(weights_); }

    std::vector<float> logits(const std::vector<int>& tokens, const std::string& format, int sinks,
                              int recent, int page_tokens, int chunk) const override {
        std::unique_ptr<llama::kv_cache> cache;
        if (format.empty()) {
            cache = std::make_unique<llama::reference_cache>(model_.shape());
        } else {
            kvq::cache_options options;
            options.sinks = sinks;
            options.recent = recent;
            options.page_tokens = page_tokens;
            const auto set = [&]<class Keys, class Values>(Keys, Values) {
                options.keys = kvq::make_format<Keys, kvq::scalar>();
                options.values = kvq::make_format<Values, kvq::scalar>();
            };
            if (format == "fp16") set(kvq::full<kvq::float16>{}, kvq::full<kvq::float16>{});
            if (format == "int8") set(kvq::int8{}, kvq::int8{});
            if (format == "kivi-4-g64") set(kvq::kivi<4, 64>::keys{}, kvq::kivi<4, 64>::values{});
#if !defined(PART) || PART == 1  // formats of the tests that it is linked with
            if (format == "std4") set(kvq::std4::keys{}, kvq::std4::values{});
            if (format == "low2") set(kvq::low2::keys{}, kvq::low2::values{});
#endif
            cache = std::make_unique<llama::kvq_cache>(model_.shape(), options);
        }
        llama::activations space;
        llama::matrix logits;
        model_.logits(model_.read(tokens, 0, *cache, chunk, space), logits, space.workers);
        return {logits.data(), logits.data() + logits.size()};
    }

private:
    llama::model_weights weights_;
    llama::model model_;
};

}  // namespace

std::unique_ptr<cpu_engine> engine_of_file(const std::string& path, double rope_theta) {
    return std::make_unique<engine_on_cpu>(path, rope_theta);
}

std::unique_ptr<cpu_engine> tiny_engine(const std::string& architecture, int head_dim, std::uint64_t seed) {
    generator random(seed);
    tiny_model m;
    m.architecture = architecture;
    m.dim = 64;
    m.hidden_dim = 96;
    m.heads = 4;
    m.kv_heads = 2;
    m.head_dim = head_dim;
    m.half_split = architecture != "llama";
    m.biases = architecture == "qwen2";
    m.head_norms = architecture == "qwen3" || architecture == "gemma3";
    if (architecture.starts_with("gemma")) {
        m.gelu = m.tied = true;
        m.embedding_scale = 8.0f;
        m.output_norms = architecture != "gemma";
        if (architecture == "gemma2") {
            m.attention_softcap = 3.0f;
            m.logit_softcap = 5.0f;
        }
        if (m.output_norms) m.windows = {7, 0};
    }
    m.fill(random);
    const temporary_folder folder;
    write_file(folder / "m.gguf", m.gguf());
    return engine_of_file(folder / "m.gguf");
}

std::vector<int> tokens_of_file(const std::string& path, const std::string& tokenizer, int count) {
    std::vector<int> tokens{1};
    const std::vector<int> text = path.ends_with(".u16")
                                      ? llama::read_token_ids(path, 1 << 16)
                                      : llama::read_text(path, llama::load_tokenizer(tokenizer));
    tokens.insert(tokens.end(), text.begin(), text.end());
    tokens.resize(static_cast<std::size_t>(count));
    return tokens;
}

}  // namespace test
