#include "slot.hpp"

#include "divergence.hpp"
#include "progress.hpp"

#include <algorithm>
#include <cmath>
#include <memory>
#include <stdexcept>

namespace llama {
namespace {

class slot {
public:
    slot(const model& llama, std::span<const int> prompt, const scheme_choice& scheme, int chunk)
        : llama_(llama),
          cache_(scheme.make_cache(llama.shape())),
          prompt_(prompt.begin(), prompt.end()),
          chunk_(chunk),
          last_state_(llama.read(prompt, 0, *cache_, chunk, space_).bottomRows(1)) {}

    // Reads a text after the prompt and trims it again.
    matrix turn(std::span<const int> text) {
        matrix states = llama_.read(text, static_cast<int>(prompt_.size()), *cache_, chunk_, space_);
        llama_.trim(prompt_, *cache_, chunk_, space_);
        return states;
    }

    // The perplexity of a text after the prompt.
    double judged_turn(std::span<const int> text) {
        constexpr Eigen::Index block = 64;
        matrix logits;
        const auto count = static_cast<Eigen::Index>(text.size());
        matrix states(count, llama_.shape().dim);
        states.row(0) = last_state_;
        states.bottomRows(count - 1) =
            turn(text).topRows(count - 1);  // the state after the last token predicts nothing here
        double negative_log_likelihood = 0.0;
        for (Eigen::Index begin = 0; begin < count; begin += block) {
            llama_.logits(states.middleRows(begin, std::min(block, count - begin)), logits);
            for (Eigen::Index row = 0; row < logits.rows(); ++row) {
                negative_log_likelihood -= distribution(logits.row(row))
                                               .log_probability(text[static_cast<std::size_t>(begin + row)]);
            }
        }
        return std::exp(negative_log_likelihood / static_cast<double>(count));
    }

private:
    const model& llama_;
    std::unique_ptr<kv_cache> cache_;
    std::vector<int> prompt_;
    int chunk_;
    activations space_;
    matrix last_state_;  // after the prompt: it predicts the first token of a turn
};

// Finds the turn with the largest drift.
void find_drift(slot_result& result) {
    for (std::size_t turn = 1; turn < result.perplexity.size(); ++turn) {
        const double drift = std::abs(result.perplexity[turn] / result.perplexity[1] - 1.0);
        if (!(drift <= result.drift)) {  // a NaN perplexity counts as drift
            result.drift = drift;
            result.drift_turn = static_cast<int>(turn) + 1;
        }
    }
}

}  // namespace

std::vector<slot_result> run_slot(const model& llama, std::span<const int> tokens,
                                  std::span<const scheme_choice> schemes, const slot_settings& settings) {
    const auto prompt_text = static_cast<std::size_t>(settings.prompt_tokens - 1);
    const auto turn_tokens = static_cast<std::size_t>(settings.turn_tokens);
    if (tokens.size() < prompt_text + 2 * turn_tokens) {
        throw std::invalid_argument("a prompt of " + std::to_string(settings.prompt_tokens) +
                                    " tokens, a turn of " + std::to_string(turn_tokens) +
                                    " and another one need a longer text: it has " +
                                    std::to_string(tokens.size()) + " tokens");
    }
    if (settings.prompt_tokens + settings.turn_tokens > llama.shape().context) {
        throw std::invalid_argument("a prompt of " + std::to_string(settings.prompt_tokens) +
                                    " tokens and a turn of " + std::to_string(turn_tokens) +
                                    " do not fit into a context of " + std::to_string(llama.shape().context));
    }
    std::vector<int> prompt{llama.begin_of_text()};
    prompt.insert(prompt.end(), tokens.begin(), tokens.begin() + settings.prompt_tokens - 1);
    const auto judged = tokens.subspan(prompt_text, turn_tokens);
    const auto others = tokens.subspan(prompt_text + turn_tokens);

    std::vector<slot_result> results(schemes.size());
    progress_bar progress(static_cast<int>(schemes.size()) * settings.turns, settings.show_progress);
    kvq::thread_pool(settings.threads).parallel_for(static_cast<int>(schemes.size()), [&](int index) {
        scheme_choice scheme = schemes[static_cast<std::size_t>(index)];
        if (!llama.shape().windows.empty()) {
            scheme.settings.rollback = settings.turn_tokens;
        }
        slot_result& result = results[static_cast<std::size_t>(index)];
        result.scheme = scheme.label;
        slot seat(llama, prompt, scheme, settings.chunk);
        for (int turn = 0; turn < settings.turns; ++turn) {
            if (settings.varying) {
                // Other lengths, so that trims leave pages in other states.
                const std::size_t length = 1 + static_cast<std::size_t>(turn) * 37 % turn_tokens;
                const std::size_t room = others.size() - length + 1;
                seat.turn(others.subspan(static_cast<std::size_t>(turn) * 101 % room, length));
            }
            result.perplexity.push_back(seat.judged_turn(judged));
            progress.advance();
        }
        find_drift(result);
    });
    return results;
}

}  // namespace llama
