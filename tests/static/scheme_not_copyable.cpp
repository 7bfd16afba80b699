// expect: kvq::make_format: a scheme must be copyable and destructible
// SPDX-License-Identifier: MIT
#include <kvq/format/make_format.hpp>
#include <kvq/schemes/affine.hpp>
#include <memory>

struct holds_state : kvq::affine<4> {
    std::unique_ptr<float> state;
};
const auto made = kvq::make_format<holds_state, kvq::scalar>();
