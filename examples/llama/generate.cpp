#include "generate.hpp"

#include "live_cache.hpp"
#include "stopwatch.hpp"

#include <ostream>
#include <stdexcept>

namespace llama {

generation_result generate(const model& llama, const tokenizer& pieces, const scheme_choice& scheme,
                           const generation_settings& settings, std::ostream& out) {
    const auto cache = scheme.make_cache(llama.shape());
    auto* const living = dynamic_cast<live_cache*>(cache.get());
    if (living == nullptr && !(settings.load.empty() && settings.save.empty())) {
        throw std::invalid_argument("scheme " + scheme.label + " cannot be saved, a live cache can");
    }
    const int loaded = settings.load.empty() ? 0 : living->load(settings.load);

    std::vector<int> prompt;
    const std::vector<int> text = pieces.encode(settings.prompt);
    if (loaded == 0 && (pieces.adds_begin_of_text() || text.empty())) {
        prompt.push_back(llama.begin_of_text());
    }
    prompt.insert(prompt.end(), text.begin(), text.end());
    if (prompt.empty()) {
        throw std::invalid_argument("a loaded cache needs a prompt to go on with");
    }
    const int context = llama.shape().context, read = loaded + static_cast<int>(prompt.size());
    // The last token is only printed; it is not appended to the cache.
    const int room = context - read + 1;
    if (room < 1 || settings.steps > room) {
        throw std::invalid_argument("a prompt of " + std::to_string(read) + " tokens and " +
                                    std::to_string(settings.steps) + " steps do not fit into a context of " +
                                    std::to_string(context));
    }
    const int steps = settings.steps > 0 ? settings.steps : room;

    sampler pick(settings.sampler);
    out << settings.prompt << std::flush;

    activations space(settings.threads);
    matrix logits;
    const stopwatch prompt_time;
    matrix states = llama.read(prompt, loaded, *cache, settings.chunk, space).bottomRows(1);
    generation_result result{.prompt_tokens = static_cast<int>(prompt.size()),
                             .prompt_seconds = prompt_time.seconds(),
                             .tokens_held = read};
    const stopwatch time;
    int previous = prompt.back();
    while (result.generated_tokens < steps) {
        llama.logits(states, logits, space.workers);
        const int token = pick({logits.data(), static_cast<std::size_t>(logits.size())});
        if (pieces.ends_text(token)) {
            break;
        }
        out << pieces.decode(previous, token) << std::flush;
        previous = token;
        if (++result.generated_tokens < steps) {
            states = llama.forward({&token, 1}, result.tokens_held, *cache, 1, space);
            ++result.tokens_held;
        }
    }
    result.seconds = time.seconds();
    result.bytes_held = cache->bytes();
    if (!settings.save.empty()) {
        living->save(settings.save);
    }
    out << std::endl;
    return result;
}

}  // namespace llama
