// Writes the input of a cache to files: q, k and v of every layer, for tools that judge schemes without a
// model (bench_quality).
#pragma once

#include "model.hpp"

#include <span>
#include <string>

namespace llama {

struct dump_settings {
    int window = 512;
    int windows = 1;
    int queries = 0;  // number of last queries of each window; 0: all
};

// One folder per window of text, w000, w001, ..., each with files like L02_k_f16_T256_H6_D48.bin: raw
// little-endian halfs, [token][head][channel], positions applied. Returns the number of windows written:
// fewer when the text ends.
int dump(const model& llama, std::span<const int> tokens, const std::string& directory,
         const dump_settings& settings);

}  // namespace llama
