// The engine of examples/llama on the CPU, for the test of that on the device: plain C++ in front of it.
#pragma once

#include "../../examples/llama/cuda/weights_source.hpp"

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace test {

class cpu_engine {
public:
    virtual ~cpu_engine() = default;
    virtual llama::weights_source source() const = 0;
    /// [tokens][vocab], read in chunks. format: "fp16", "kivi-4-g64", "int8", "std4", "low2"; "": the
    /// textbook cache in fp32.
    virtual std::vector<float> logits(const std::vector<int>& tokens, const std::string& format, int sinks,
                                      int recent, int page_tokens, int chunk) const = 0;
};

/// A random model with everything that this architecture has.
std::unique_ptr<cpu_engine> tiny_engine(const std::string& architecture, int head_dim, std::uint64_t seed);
/// rope_theta: base of the rotary frequencies, 0: what the file says.
std::unique_ptr<cpu_engine> engine_of_file(const std::string& path, double rope_theta = 0.0);

/// The first tokens of a text file, or of a file of ids (*.u16), begin-of-text in front.
std::vector<int> tokens_of_file(const std::string& path, const std::string& tokenizer, int count);

}  // namespace test
