// SPDX-License-Identifier: MIT
#include <cmath>
#include <cstdio>

#include "attend.hpp"

static int compare(const char* name, const std::vector<float>& expected, const std::vector<float>& actual) {
    if (expected.size() != actual.size()) {
        std::printf("%s: %zu numbers instead of %zu\n", name, actual.size(), expected.size());
        return 1;
    }
    double worst = 0;
    for (std::size_t i = 0; i < expected.size(); ++i) {
        const double difference = std::abs(static_cast<double>(expected[i]) - static_cast<double>(actual[i]));
        if (!(difference <= worst)) worst = difference;  // also a NaN
    }
    std::printf("%s: largest difference from the scalar backend %g\n", name, worst);
    return worst <= 1e-3 ? 0 : 1;
}

int main() {
    const auto expected = attend<kvq::scalar>();
    return compare("narrow", expected, attend_narrow()) + compare("wide", expected, attend_wide());
}
