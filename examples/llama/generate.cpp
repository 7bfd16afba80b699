#include "generate.hpp"

#include "live_cache.hpp"
#include "stopwatch.hpp"

#include <algorithm>
#include <limits>
#include <ostream>
#include <span>
#include <stdexcept>

namespace llama {
namespace {

// hidden: tokens that are never chosen.
int next_token(sampler& pick, matrix& logits, Eigen::Index row, std::span<const int> hidden) {
    for (const int token : hidden) {
        logits(row, token) = -std::numeric_limits<float>::infinity();
    }
    return pick({logits.row(row).data(), static_cast<std::size_t>(logits.cols())});
}

// Greedy text in which the model drafts for itself: tokens one by one from the upper planes of the cache,
// then one pass over both planes for all of them, which keeps those that it would have chosen, and one more.
// emit: returns false at the end of the text. states: of the last token that the cache holds.
template <class Emit>
void generate_by_drafts(const model& llama, kv_cache& cache, matrix states, int draft, int steps,
                        const sampling& how, std::span<const int> hidden, activations& space,
                        generation_result& result, Emit&& emit) {
    sampler pick(how);
    matrix logits;
    const auto choose = [&](Eigen::Index row) { return next_token(pick, logits, row, hidden); };
    llama.logits(states, logits, space.workers);
    std::vector<int> tokens{choose(0)};
    while (emit(tokens[0]) && result.generated_tokens < steps) {
        const int held = result.tokens_held,
                  count =
                      std::min({draft, steps - result.generated_tokens, llama.shape().context - held - 1});
        cache.read_upper_planes(true);
        for (int i = 0; i < count; ++i) {
            states = llama.forward({&tokens.back(), 1}, held + i, cache, 1, space);
            llama.logits(states, logits, space.workers);
            tokens.push_back(choose(0));
        }
        cache.read_upper_planes(false);
        cache.trim(held);
        states = llama.forward(tokens, held, cache, count + 1, space);
        llama.logits(states, logits, space.workers);
        int kept = 0;
        bool more = true;
        while (kept < count && tokens[static_cast<std::size_t>(kept) + 1] == choose(kept) && more) {
            more = emit(tokens[static_cast<std::size_t>(++kept)]);
        }
        result.drafted_tokens += count;
        result.accepted_tokens += kept;
        result.tokens_held = held + kept + 1;
        cache.trim(result.tokens_held);
        if (!more) {
            break;
        }
        tokens = {choose(kept)};
    }
}

}  // namespace

generation_result generate(const model& llama, const tokenizer& pieces, const scheme_choice& scheme,
                           const generation_settings& settings, std::ostream& out) {
    const auto cache = scheme.make_cache(llama.shape());
    auto* const living = dynamic_cast<live_cache*>(cache.get());
    if (living == nullptr && !(settings.load.empty() && settings.save.empty())) {
        throw std::invalid_argument("scheme " + scheme.label + " cannot be saved, a live cache can");
    }
    if (settings.draft > 0 && (settings.sampler.temperature > 0.0 || llama.shape().has_state())) {
        throw std::invalid_argument(llama.shape().has_state()
                                        ? "models with recurrent layers do not draft for themselves"
                                        : "drafts need --temperature 0");
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

    std::vector<int> hidden;
    for (int token = 0; settings.ignore_eos && token < llama.shape().vocab; ++token) {
        if (pieces.ends_text(token)) {
            hidden.push_back(token);
        }
    }
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
    const auto emit = [&](int token) {
        if (pieces.ends_text(token) || result.generated_tokens == steps) {
            return false;
        }
        out << pieces.decode(previous, token) << std::flush;
        previous = token;
        ++result.generated_tokens;
        return true;
    };
    if (settings.draft > 0) {
        generate_by_drafts(llama, *cache, states, settings.draft, steps, settings.sampler, hidden, space,
                           result, emit);
    }
    while (settings.draft == 0 && result.generated_tokens < steps) {
        llama.logits(states, logits, space.workers);
        const int token = next_token(pick, logits, 0, hidden);
        if (!emit(token)) {
            break;
        }
        if (result.generated_tokens < steps) {
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
