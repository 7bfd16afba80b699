// What a long context costs on this machine, without a model: the time and the bytes of attention by length
// and scheme, and how many tokens fit into memory.
#pragma once

#include "schemes.hpp"

#include <span>
#include <string>
#include <vector>

namespace llama {

struct machine_settings {
    std::vector<int> tokens{16384, 65536};  // lengths, ascending
    int heads = 32, kv_heads = 8, head_dim = 128;
    int layers = 32;       // of the model whose longest context is sought
    double memory = 0.0;   // bytes that it may have; 0: free_memory()
    double seconds = 0.4;  // of each measurement
    int threads = 1;
};

struct context_cost {
    double seconds = 0.0;   // attention of one new token in one layer, median
    std::size_t bytes = 0;  // of the layer
};

struct machine_row {
    std::string scheme;
    std::vector<context_cost> costs;  // by length
    int longest = 0;                  // tokens of a sequence of all layers; -1: not even an empty one
};

// Random keys and values, which take the time of others. Processor caches are overwritten before each
// measured call, since those of an engine hold weights and other layers then. Throws std::invalid_argument
// for schemes that need a model.
std::vector<machine_row> measure_machine(std::span<const scheme_choice> schemes,
                                         const machine_settings& settings);

// Bytes that programs can still have without swapping; 0 where the system does not say.
double free_memory();

}  // namespace llama
