#include "on_device.hpp"

#include "../progress.hpp"
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
    if (scheme.use_statistics || scheme.own_statistics > 0) {
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

// Engines of all schemes on the same weights.
class device_engines {
public:
    device_engines(const model_weights& weights, const device_settings& on)
        : weights_(device::upload(source_of(weights), precision_of(on))), settings_(on) {}

    device::engine& of(const scheme_choice& scheme, int chunk) {
        auto& on = engines_[scheme.label];
        if (!on) {
            device::engine_options options = options_of(scheme, settings_);
            options.chunk = chunk;
            options.max_batch = 1;
            on = device::make_engine(weights_, options);
        }
        return *on;
    }

private:
    std::shared_ptr<const device::device_model> weights_;
    device_settings settings_;
    std::map<std::string, std::unique_ptr<device::engine>> engines_;
};

}  // namespace

generation_result generate_on_device(const model_weights& weights, const tokenizer& pieces,
                                     const scheme_choice& scheme, const generation_settings& settings,
                                     const std::vector<std::string>& prompts, int samples,
                                     const device_settings& on, std::ostream& out) {
    if (!settings.load.empty() || !settings.save.empty()) {
        throw std::invalid_argument("--load and --save are for the CPU");
    }
    if (settings.draft > 0 || settings.ignore_eos) {
        throw std::invalid_argument("--draft and --ignore-eos are for the CPU");
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
                                              const evaluation_settings& settings,
                                              const device_settings& on) {
    device_engines engines(weights, on);
    const model_shape& shape = weights.config.shape;
    std::vector<scheme_total> totals(schemes.size());
    const auto windows = windows_of(tokens, settings.window);
    progress_bar progress(static_cast<double>(windows.size() * schemes.size()), settings.show_progress);
    matrix baseline, logits;
    for (const std::span<const int> text : windows) {
        std::vector<int> input{weights.config.begin_of_text};
        input.insert(input.end(), text.begin(), text.end() - 1);
        const auto count = static_cast<Eigen::Index>(input.size());
        std::vector<distribution> expected;
        for (std::size_t i = 0; i < schemes.size(); ++i) {
            device::engine& engine = engines.of(schemes[i], settings.chunk);
            matrix states(count, shape.dim);
            const int sequence = engine.new_sequence();
            const stopwatch time;
            engine.read(sequence, input, states.data());
            totals[i].seconds += time.seconds();
            totals[i].bytes_held += static_cast<double>(engine.bytes(sequence));
            totals[i].tokens_held += static_cast<double>(count);
            totals[i].tokens_read += static_cast<double>(count);
            engine.free(sequence);
            matrix& of = i == 0 ? baseline : logits;  // expected distributions point into the baseline's
            of.resize(count, shape.vocab);
            engine.logits_of({states.data(), static_cast<std::size_t>(states.size())},
                             {of.data(), static_cast<std::size_t>(of.size())});
            for (Eigen::Index row = 0; row < count; ++row) {
                const distribution found(of.row(row));
                if (i == 0) expected.push_back(found);
                const auto at = static_cast<std::size_t>(row);
                totals[i].sums += compare(expected[at], found, text[at]);
            }
            progress.advance(1.0);
        }
    }
    return results_of(shape, schemes, totals);
}

}  // namespace llama
