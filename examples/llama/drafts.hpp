// Speculative decoding along a text that is known: how many drafted tokens a cache accepts. One reading of
// the text with a cache serves every kind of draft; no text is written again for each of them.
#pragma once

#include <span>
#include <vector>

namespace llama {

inline constexpr int draft_tokens = 4;  // at most, of a step

struct draft_count {
    int steps = 0, drafted = 0, accepted = 0;

    // Each step gives the accepted tokens and the one that the verifying cache adds.
    double tokens_per_step() const { return steps > 0 ? 1.0 + static_cast<double>(accepted) / steps : 1.0; }
    double accepted_share() const { return drafted > 0 ? static_cast<double>(accepted) / drafted : 0.0; }
    void operator+=(const draft_count& other) {
        steps += other.steps;
        drafted += other.drafted;
        accepted += other.accepted;
    }
};

// Prompt lookup behind `before` and the first `position` tokens of `text`: what followed the last three
// tokens where they stood before, the latest place; else the last two, or one. Empty where the last token is
// new.
std::vector<int> lookup_drafts(std::span<const int> before, std::span<const int> text, int position);

// likeliest[i] is what the verifying cache finds likeliest behind the first i tokens of `text`, drafts[i]
// what is drafted there. A draft is accepted up to its first token that is not the likeliest; where cache and
// text part, the step ends and the next one goes on with the text.
draft_count accepted_drafts(std::span<const int> text, std::span<const int> likeliest,
                            std::span<const std::vector<int>> drafts);

// The cache of `likeliest` drafts draft_tokens at a time, and the one that wrote the text verifies.
draft_count accepted_own_drafts(std::span<const int> text, std::span<const int> likeliest);

}  // namespace llama
