#include "rotary_scaling.hpp"

#include <cmath>
#include <stdexcept>

namespace llama {

rotary_angles scaled_angles(int head_dim, double theta, const rotary_scaling& scaling) {
    rotary_angles angles;
    if (scaling.type == "llama3") {
        angles.frequencies = kvq::llama3_frequencies(head_dim, theta,
                                                     {.factor = scaling.factor,
                                                      .low_freq_factor = scaling.low_freq_factor,
                                                      .high_freq_factor = scaling.high_freq_factor,
                                                      .original_context = scaling.original_context});
    } else if (scaling.type == "yarn") {
        angles.frequencies = kvq::yarn_frequencies(head_dim, theta,
                                                   {.factor = scaling.factor,
                                                    .original_context = scaling.original_context,
                                                    .beta_fast = scaling.beta_fast,
                                                    .beta_slow = scaling.beta_slow});
        angles.amplitude = scaling.amplitude > 0.0 ? scaling.amplitude
                           : scaling.factor > 1.0  ? 0.1 * std::log(scaling.factor) + 1.0
                                                   : 1.0;
    } else if (scaling.type == "none" || scaling.type == "default" || scaling.type == "linear") {
        angles.frequencies = kvq::rotary_frequencies(head_dim, theta);
        if (scaling.type == "linear") {
            if (!(scaling.factor > 0.0 && std::isfinite(scaling.factor))) {
                throw std::runtime_error("linear scaling of positions by " + std::to_string(scaling.factor));
            }
            for (double& frequency : angles.frequencies) {
                frequency /= scaling.factor;
            }
        }
    } else {
        throw std::runtime_error("scaling of positions \"" + scaling.type +
                                 "\" is not handled; handled are linear, llama3 and yarn");
    }
    return angles;
}

}  // namespace llama
