// SPDX-License-Identifier: MIT
// What tests of latents and of lists of tokens share: formats, windows, and attention in double arithmetic
// over what a sequence holds.
#pragma once

#include <cmath>
#include <kvq/attention/reference.hpp>

#include "caches.hpp"

namespace test {

template <class Scheme>
kvq::format format_of() {
    static const kvq::format f = made<usual>(Scheme{});
    return f;
}
inline kvq::format random_window(generator& random) {
    return random.pick(std::vector<kvq::format>{format_of<kvq::full<kvq::float16>>(),
                                                format_of<kvq::full<kvq::bfloat16>>(),
                                                format_of<kvq::full<float>>()});
}

/// |out - want| / |want|, over all that was added.
struct errors {
    double difference = 0, norm = 0;
    double relative() const { return difference == 0 ? 0.0 : std::sqrt(difference / norm); }
    void add(const std::vector<float>& out, const tensor<double>& want) {
        for (std::size_t i = 0; i < out.size(); ++i) {
            const double d = static_cast<double>(out[i]) - want.values()[i];
            difference += d * d;
            norm += want.values()[i] * want.values()[i];
        }
    }
};

/// Attention in double over rows of keys and of values.
template <class Mods>
tensor<double> attended(const tensor<float>& keys, const tensor<float>& values, const tensor<float>& q,
                        const Mods& mods) {
    tensor<double> out(q.tokens(), q.view().heads, values.view().dim);
    kvq::reference_attend(keys.view(), values.view(), q.view(), out.view(), mods);
    return out;
}
/// Over keys [tokens][1][channels], whose first `values` channels are the values.
inline tensor<double> attended(const tensor<float>& keys, const tensor<float>& q, int values) {
    tensor<float> v(keys.tokens(), 1, values);
    for (int t = 0; t < keys.tokens(); ++t) std::copy_n(keys.view().at(t, 0), values, v.view().at(t, 0));
    return attended(keys, v, q, kvq::causal{});
}

}  // namespace test
