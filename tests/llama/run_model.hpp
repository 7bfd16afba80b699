// SPDX-License-Identifier: MIT
// Logits of a model that a file holds, and how far they are from others.
#pragma once

#include <load_model.hpp>
#include <model.hpp>
#include <reference_cache.hpp>

#include <cmath>
#include <cstddef>
#include <string>
#include <vector>

namespace test {

/// [tokens][vocab], with the textbook cache, the tokens in pieces of `chunk`.
inline std::vector<float> logits_of(const llama::model& model, const std::vector<int>& tokens,
                                    int threads = 1, int chunk = 5) {
    llama::reference_cache cache(model.shape());
    llama::activations space(threads);
    llama::matrix logits;
    model.logits(model.read(tokens, 0, cache, chunk, space), logits, space.workers);
    return {logits.data(), logits.data() + logits.size()};
}
inline std::vector<float> logits_of(const std::string& path, const std::vector<int>& tokens,
                                    int threads = 1) {
    return logits_of(llama::model(llama::load_model(path)), tokens, threads);
}

/// The largest difference, relative to the largest logit; NaN counts as infinite.
template <class A, class B>
double distance(const A& a, const B& b) {
    double most = 0.0, size = 1e-30;
    for (std::size_t i = 0; i < a.size(); ++i) {
        const double difference = std::abs(static_cast<double>(a[i]) - static_cast<double>(b[i]));
        most = difference <= most ? most : std::isnan(difference) ? INFINITY : difference;
        size = std::max(size, std::abs(static_cast<double>(b[i])));
    }
    return a.size() == b.size() ? most / size : INFINITY;
}

/// What a call throws; "" if it does not.
template <class Call>
std::string message_of(const Call& call) {
    try {
        call();
    } catch (const std::exception& error) {
        return error.what();
    }
    return "";
}
inline bool contains(const std::string& text, const std::string& part) {
    return text.find(part) != std::string::npos;
}

}  // namespace test
