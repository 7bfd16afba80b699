// A llama2.c checkpoint (legacy format): seven 32-bit integers, then every weight as fp32 without padding.
#pragma once

#include "weights.hpp"

#include <string>

namespace llama {

// The file says nothing of its rotary base; a base of 0 is 10000.
// Throws std::runtime_error when the header is impossible or the length of the file is not exactly that of
// the header.
model_weights load_checkpoint(const std::string& path, double rope_theta = 0.0);

}  // namespace llama
