// Sine and cosine of an angle in turns, for rotary embeddings (attention/rotary.hpp,
// cuda/decode/moved_keys.cuh).
//
// Contract: within 2e-7. No library function, so that a loop over pairs runs in vectors, and GPUs compute
// what CPUs do.
#pragma once

#include <cmath>

#include "../config.hpp"

namespace kvq { inline namespace KVQ_COMMON { namespace detail {

KVQ_HD inline void sine_and_cosine(double turns, float& sine, float& cosine) noexcept {
    const double quarter = std::floor(4.0 * turns + 0.5);
    const double x = (4.0 * turns - quarter) * 1.5707963267948966, y = x * x;
    const double s =
        x * (1.0 + y * (-1.0 / 6 +
                        y * (1.0 / 120 + y * (-1.0 / 5040 + y * (1.0 / 362880 - y * (1.0 / 39916800))))));
    const double c =
        1.0 + y * (-1.0 / 2 + y * (1.0 / 24 + y * (-1.0 / 720 + y * (1.0 / 40320 - y * (1.0 / 3628800)))));
    const double of_four = quarter - 4.0 * std::floor(0.25 * quarter);
    const bool odd = of_four == 1.0 || of_four == 3.0;
    const double sign_s = of_four >= 2.0 ? -1.0 : 1.0;
    const double sign_c = of_four == 1.0 || of_four == 2.0 ? -1.0 : 1.0;
    sine = static_cast<float>(sign_s * (odd ? c : s));
    cosine = static_cast<float>(sign_c * (odd ? s : c));
}

}}}  // namespace kvq::detail
