#include "drafts.hpp"

#include <algorithm>

namespace llama {

std::vector<int> lookup_drafts(std::span<const int> before, std::span<const int> text, int position) {
    std::vector<int> all(before.begin(), before.end());
    all.insert(all.end(), text.begin(), text.begin() + position);
    for (std::ptrdiff_t length = 3; length > 0; --length) {
        if (std::ssize(all) <= length) {
            continue;
        }
        // A match may overlap the end, but is not the end itself.
        const auto found = std::find_end(all.begin(), all.end() - 1, all.end() - length, all.end());
        if (found != all.end() - 1) {
            const auto next = found + length;
            return {next, next + std::min<std::ptrdiff_t>(draft_tokens, all.end() - next)};
        }
    }
    return {};
}

draft_count accepted_drafts(std::span<const int> text, std::span<const int> likeliest,
                            std::span<const std::vector<int>> drafts) {
    draft_count count;
    for (std::size_t at = 0; at < drafts.size();) {
        ++count.steps;
        const std::size_t room = std::min(drafts[at].size(), drafts.size() - at);
        count.drafted += static_cast<int>(room);
        std::size_t on_text = 0;
        for (bool goes_on = true; goes_on && on_text < room; on_text += goes_on) {
            const int drafted = drafts[at][on_text], wanted = likeliest[at + on_text];
            count.accepted += drafted == wanted;
            goes_on = drafted == wanted && wanted == text[at + on_text];
        }
        at += on_text + 1;
    }
    return count;
}

draft_count accepted_own_drafts(std::span<const int> text, std::span<const int> likeliest) {
    std::vector<std::vector<int>> drafts;
    for (std::size_t at = 0; at < text.size(); ++at) {
        const auto end = std::min(text.size(), at + draft_tokens);
        drafts.emplace_back(likeliest.begin() + static_cast<std::ptrdiff_t>(at),
                            likeliest.begin() + static_cast<std::ptrdiff_t>(end));
    }
    return accepted_drafts(text, text, drafts);
}

}  // namespace llama
