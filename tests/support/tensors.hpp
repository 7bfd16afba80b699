// SPDX-License-Identifier: MIT
// Owning tensors of tokens x heads x channels, in any of the input formats and either memory order.
#pragma once

#include <kvq/core/token_view.hpp>
#include <vector>

#include "random.hpp"

namespace test {

/// NHD: [tokens][heads][dim]. HND: [heads][tokens][dim].
enum class order { nhd, hnd };

template <class T>
class tensor {
public:
    tensor(int tokens, int heads, int dim, order memory_order = order::nhd)
        : values_(static_cast<std::size_t>(tokens) * static_cast<std::size_t>(heads) *
                  static_cast<std::size_t>(dim)),
          view_(memory_order == order::nhd ? kvq::token_view<T>(values_.data(), tokens, heads, dim)
                                           : kvq::token_view<T>(values_.data(), tokens, heads, dim, dim,
                                                                static_cast<std::ptrdiff_t>(tokens) * dim)) {}
    tensor(const tensor&) = delete;
    tensor(tensor&& other) noexcept = default;
    tensor& operator=(const tensor&) = delete;

    kvq::token_view<T> view() { return view_; }
    kvq::token_view<const T> view() const { return view_; }
    kvq::token_view<const T> slice(int first, int count) const { return view().slice(first, count); }
    std::vector<T>& values() { return values_; }
    const std::vector<T>& values() const { return values_; }
    int tokens() const { return view_.tokens; }

private:
    std::vector<T> values_;
    kvq::token_view<T> view_;
};

inline tensor<float> random_tensor(generator& random, int tokens, int heads, int dim, float factor = 1.0f) {
    tensor<float> t(tokens, heads, dim);
    for (float& x : t.values()) x = factor * random.normal();
    return t;
}

/// The same numbers, rounded to T, in another memory order.
template <class T, class From>
tensor<T> converted(const tensor<From>& from, order memory_order) {
    const auto f = from.view();
    tensor<T> to(f.tokens, f.heads, f.dim, memory_order);
    for (int t = 0; t < f.tokens; ++t)
        for (int h = 0; h < f.heads; ++h)
            for (int c = 0; c < f.dim; ++c) to.view().at(t, h)[c] = T(static_cast<float>(f.at(t, h)[c]));
    return to;
}

}  // namespace test
