// expect: kvq::scheme: levels of your own need a name (static constexpr const char*) of letters, digits, - and _, which is not affine or int
// SPDX-License-Identifier: MIT
#include <kvq/format/make_format.hpp>
#include <kvq/schemes/scheme.hpp>

struct quarter_steps : kvq::symmetric {
    template <int Bits>
    static constexpr float value(int code, float scale, float) {
        return 0.25f * scale * static_cast<float>(code - 8);
    }
};

const auto made =
    kvq::make_format<kvq::scheme<kvq::bits<4>, quarter_steps, kvq::per_token<>, kvq::params<float>>,
                     kvq::scalar>();
