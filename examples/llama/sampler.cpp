#include "sampler.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <utility>
#include <vector>

namespace llama {

int sampler::operator()(std::span<const float> logits) {
    const auto largest = std::max_element(logits.begin(), logits.end());
    if (settings_.temperature <= 0.0) {
        return static_cast<int>(largest - logits.begin());
    }

    std::vector<std::pair<double, int>> heap;
    heap.reserve(logits.size());
    double sum = 0.0;
    for (std::size_t token = 0; token < logits.size(); ++token) {
        const double weight = std::exp((logits[token] - *largest) / settings_.temperature);
        heap.emplace_back(weight, static_cast<int>(token));
        sum += weight;
    }

    // The likeliest tokens leave the heap until their sum is top_p: they are few, so no sort is needed.
    std::make_heap(heap.begin(), heap.end());
    auto end = heap.end();
    double kept = 0.0;
    do {
        std::pop_heap(heap.begin(), end);
        --end;
        kept += end->first;
    } while (end != heap.begin() && kept < settings_.top_p * sum);

    // The standard distributions differ between libraries; this gives the same token everywhere.
    double left = static_cast<double>(random_() >> 11) * 0x1p-53 * kept;
    for (auto candidate = heap.end(); candidate != end;) {
        --candidate;
        left -= candidate->first;
        if (left < 0.0) {
            return candidate->second;
        }
    }
    return end->second;
}

}  // namespace llama
