#include "on_device.hpp"

#include "../stopwatch.hpp"
#include "batch.hpp"

#include <map>
#include <ostream>

namespace llama {
namespace {

// The name of a scheme among the device's formats.
std::string device_name(const scheme_choice& scheme) {
    if (scheme.live) {
        throw std::invalid_argument(scheme.label +
                                    ": caches that change are for the CPU, but generate takes --tiers");
    }
    if (scheme.use_statistics) {
        throw std::invalid_argument(scheme.label + ": statistics are for the CPU");
    }
    if (scheme.key_name != scheme.value_name) {
        throw std::invalid_argument(scheme.label + ": the device has one format for keys and values");
    }
    const std::string& name = scheme.key_name;
    const bool is_short =
        (name.starts_with("kivi-") || name.starts_with("affine-")) && name.find("-g") == std::string::npos;
    return is_short ? name + "-g32" : name;
}

device::engine_options options_of(const scheme_choice& scheme, const device_settings& on) {
    device::engine_options options;
    options.format = device_name(scheme);
    options.sinks = scheme.settings.sinks;
    options.recent = std::max(1, scheme.settings.recent);  // a step's new token is in the window
    options.page_tokens = scheme.settings.page_tokens;
    options.max_batch = on.batch;
    options.cache_bytes = on.cache_bytes;
    for (const tier_choice& tier : on.live.tiers) {
        options.tiers.push_back({tier.age, tier.scheme});
    }
    options.budget = on.live.budget == live_settings{}.budget ? 0 : on.live.budget;
    return options;
}

device::precision precision_of(const device_settings& on) {
    return on.fp16 ? device::precision::fp16 : device::precision::bf16;
}

class device_reader final : public text_reader {
public:
    device_reader(const model_weights& weights, const device_settings& on)
        : weights_(device::upload(source_of(weights), precision_of(on))), settings_(on) {}

    const model_config& config() const override { return weights_->config; }
    text_in_cache read(std::span<const int> tokens, const scheme_choice& scheme, int chunk) const override {
        device::engine& on = engine_of(scheme, chunk);
        text_in_cache text;
        text.states.resize(static_cast<Eigen::Index>(tokens.size()), config().shape.dim);
        const int sequence = on.new_sequence();
        const stopwatch time;
        on.read(sequence, tokens, text.states.data());
        text.seconds = time.seconds();
        text.bytes = on.bytes(sequence);
        on.free(sequence);
        return text;
    }
    void logits(const kv_cache::const_rows& states, matrix& out) const override {
        const matrix rows = states;  // one after the other
        out.resize(states.rows(), config().shape.vocab);
        engines_.begin()->second->logits_of({rows.data(), static_cast<std::size_t>(rows.size())},
                                            {out.data(), static_cast<std::size_t>(out.size())});
    }

private:
    device::engine& engine_of(const scheme_choice& scheme, int chunk) const {
        auto& on = engines_[scheme.label];
        if (!on) {
            device::engine_options options = options_of(scheme, settings_);
            options.chunk = chunk;
            options.max_batch = 1;
            on = device::make_engine(weights_, options);
        }
        return *on;
    }

    std::shared_ptr<const device::device_model> weights_;
    device_settings settings_;
    mutable std::map<std::string, std::unique_ptr<device::engine>> engines_;
};

}  // namespace

generation_result generate_on_device(const model_weights& weights, const tokenizer& pieces,
                                     const scheme_choice& scheme, const generation_settings& settings,
                                     const std::vector<std::string>& prompts, int samples,
                                     const device_settings& on, std::ostream& out) {
    if (!settings.load.empty() || !settings.save.empty()) {
        throw std::invalid_argument("--load and --save are for the CPU");
    }
    const int context = weights.config.shape.context;
    std::vector<device::request> requests;
    for (const std::string& prompt : prompts) {
        const std::vector<int> text = pieces.encode(prompt);
        device::request of;
        if (pieces.adds_begin_of_text() || text.empty()) {
            of.prompt.push_back(weights.config.begin_of_text);
        }
        of.prompt.insert(of.prompt.end(), text.begin(), text.end());
        const int read = static_cast<int>(of.prompt.size()), room = context - read + 1;
        if (room < 1 || settings.steps > room) {
            throw std::invalid_argument("a prompt of " + std::to_string(read) + " tokens and " +
                                        std::to_string(settings.steps) +
                                        " steps do not fit into a context of " + std::to_string(context));
        }
        of.steps = settings.steps > 0 ? settings.steps : room;
        of.sampler = settings.sampler;
        for (int sample = 0; sample < samples; ++sample) {
            requests.push_back(of);
            ++of.sampler.seed;
        }
    }
    device::engine_options options = options_of(scheme, on);
    options.chunk = settings.chunk;
    options.max_batch = std::min(on.batch, static_cast<int>(requests.size()));
    const auto running = device::make_engine(device::upload(source_of(weights), precision_of(on)), options);

    device::batch_settings batch;
    batch.ends_text = [&](int token) { return pieces.ends_text(token); };
    // One text appears while it grows; of several, each when all are there.
    const bool streams = requests.size() == 1;
    int previous = requests.front().prompt.back();
    if (streams) {
        out << prompts.front() << std::flush;
        batch.on_token = [&](int, int token) {
            out << pieces.decode(previous, token) << std::flush;
            previous = token;
        };
    }
    const device::batch_result result = device::run_batch(*running, requests, batch);
    generation_result total;
    for (std::size_t i = 0; i < requests.size(); ++i) {
        const device::reply& reply = result.replies[i];
        if (!streams) {
            out << (i > 0 ? "\n" : "") << prompts[i / static_cast<std::size_t>(samples)];
            previous = requests[i].prompt.back();
            for (const int token : reply.tokens) {
                out << pieces.decode(previous, token);
                previous = token;
            }
        }
        out << std::endl;
        total.tokens_held += static_cast<int>(requests[i].prompt.size() + reply.tokens.size());
        total.bytes_held += reply.bytes;
    }
    total.prompt_tokens = result.prompt_tokens;
    total.prompt_seconds = result.prompt_seconds;
    total.generated_tokens = result.generated_tokens;
    total.seconds = result.decode_seconds;
    return total;
}

std::vector<scheme_result> evaluate_on_device(const model_weights& weights, std::span<const int> tokens,
                                              std::span<const scheme_choice> schemes,
                                              evaluation_settings settings, const device_settings& on) {
    settings.threads = 1;
    return evaluate(device_reader(weights, on), tokens, schemes, settings);
}

}  // namespace llama
