// Statistics of queries and keys, gathered while the model reads a text: the input of plans of channel
// widths.
#pragma once

#include "model.hpp"
#include "recording_cache.hpp"

#include <kvq/quant/calibration.hpp>

#include <span>

namespace llama {

// Reads the text in windows, as evaluate does; a last window of less than 64 tokens is skipped.
// Throws std::runtime_error when there are fewer than 64 tokens. first: an empty cache that keeps what the
// first window recorded, or null.
kvq::calibration gather_statistics(const model& llama, std::span<const int> tokens, int window,
                                   activations& space, recording_cache* first = nullptr);

}  // namespace llama
