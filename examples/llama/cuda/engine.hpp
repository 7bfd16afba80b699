// A model whose forward pass and KV cache are on a GPU: prompts in chunks, decode steps of a batch as one
// CUDA graph each. Plain C++: the kernels are behind it (engine.cu).
//
// Weights and activations are 16 bit, products accumulate in fp32 (cuBLAS), the residual stream is fp32. Keys
// and values lie in a kvq::cuda::cache in one of the formats that the program was compiled with
// (formats.cuh).
#pragma once

#include "weights_source.hpp"

#include <kvq/core/shape.hpp>

#include <cstddef>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

namespace llama::device {

enum class precision { bf16, fp16 };

// Weights in device memory. Engines of several formats share them.
struct device_model {
    virtual ~device_model() = default;
    model_config config;
    precision type = precision::bf16;
    std::size_t bytes = 0;  // of device memory
};

// Throws std::runtime_error where the device has not enough memory.
std::shared_ptr<const device_model> upload(const weights_source& weights, precision type);

// Pages whose tokens are all `age` tokens or more behind the end of their sequence get this format.
struct format_tier {
    int age = 0;
    std::string format{};
};

struct engine_options {
    std::string format = "std4";  // of the pages; "fp16" and "bf16": everything stays as the activations are
    int sinks = 4, recent = 128;  // tokens in 16 bit
    int page_tokens = kvq::default_page_tokens;  // that of a compiled format
    int max_batch = 1;                           // sequences of a decode step
    int max_tokens = 0;                          // of one sequence; 0: the model's context
    int chunk = 512;                             // tokens of a prompt in one forward pass
    bool graphs = true;                          // decode steps are captured and replayed
    // Memory of the cache. pool: pages for so many tokens and sequences are allocated up front, and graphs
    // stay valid while they suffice.
    int pool_tokens = 0, pool_sequences = 0;
    bool growing = true;
    std::size_t cache_bytes = 0;  // it takes at most so many bytes; 0: no limit
    // Step down: older pages in fewer bits. While pages take more than `budget` bytes, the oldest ones go one
    // tier down, and further.
    std::vector<format_tier> tiers{};
    std::size_t budget = 0;  // 0: none
};

// The cache has no room for more tokens. A decode step has changed nothing then. A prompt may have been read
// in part: its sequence is to be freed.
struct out_of_memory : std::runtime_error {
    using std::runtime_error::runtime_error;
};

struct engine_usage {
    std::size_t cache_bytes = 0;       // what the cache has allocated
    std::size_t cache_pages = 0;       // of it, pages that sequences hold
    std::size_t activation_bytes = 0;  // buffers between layers, cuBLAS' workspace, angles
};

// Calls come from one thread. Sequences are numbers that new_sequence() and fork() give. Logits, choices and
// states are those of the last read() (row 0: its last token) or decode() (a row for each sequence). Errors
// are std::runtime_error.
class engine {
public:
    virtual ~engine() = default;

    virtual const model_config& config() const = 0;
    virtual const engine_options& options() const = 0;

    virtual int new_sequence() = 0;
    // Another sequence with the same tokens. Quantized pages are shared, 16-bit pages are copied.
    virtual int fork(int sequence) = 0;
    virtual void free(int sequence) = 0;
    // Removes tokens from position n on. A cut through a quantized page is refused.
    virtual void trim(int sequence, int n) = 0;
    virtual int tokens(int sequence) const = 0;
    // Bytes of a sequence's pages, shared ones included.
    virtual std::size_t bytes(int sequence) const = 0;

    // The tokens follow those that the sequence has. states: [tokens][dim], the normed states of all of them,
    // or null.
    virtual void read(int sequence, std::span<const int> tokens, float* states = nullptr) = 0;
    // One token for each sequence. Without tokens: those that the last step has chosen, and the same
    // sequences.
    virtual void decode(std::span<const int> sequences, std::span<const int> tokens) = 0;

    // The likeliest tokens. Waits for the device.
    virtual void choices(std::span<int> out) = 0;
    // [rows][vocab]. Waits for the device.
    virtual void logits(std::span<float> out) = 0;
    // Logits of normed states.
    virtual void logits_of(std::span<const float> states, std::span<float> out) = 0;
    virtual void wait() = 0;

    virtual engine_usage usage() const = 0;
    // Bytes of the pages of a sequence with so many tokens that shares none.
    virtual std::size_t bytes_for(int tokens) const = 0;
    // Graphs that were captured so far.
    virtual int captures() const = 0;

    // For measurements: keys and values that read() makes from now on are kept, up to n tokens, and
    // append_recorded() gives a sequence n of them, from token `first` on, without a forward pass.
    virtual void record(int n) = 0;
    virtual void append_recorded(int sequence, int first, int n) = 0;
};

// Throws std::invalid_argument for a format that was not compiled; the message lists those that were.
std::unique_ptr<engine> make_engine(std::shared_ptr<const device_model> model, const engine_options& options);

// Formats for heads of this size, 16 bit included.
std::vector<std::string> format_names(int head_dim, precision type);

}  // namespace llama::device
