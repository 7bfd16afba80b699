#include "checkpoint.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <stdexcept>

namespace llama {
namespace {

static_assert(std::endian::native == std::endian::little, "the checkpoint is read as it lies in the file");

using header = std::array<std::int32_t, 7>;

[[noreturn]] void refuse(const std::string& path, const std::string& reason) {
    throw std::runtime_error("checkpoint \"" + path + "\": " + reason);
}

// The limits are far above any real model; they keep the size computation below 2^63.
void check_range(const std::string& path, const char* name, std::int32_t value, std::int32_t limit) {
    if (value < 1 || value > limit) {
        refuse(path, std::string("the header says ") + name + " = " + std::to_string(value) +
                         ", expected 1 to " + std::to_string(limit));
    }
}

void check_divides(const std::string& path, const char* whole_name, int whole, const char* part_name,
                   int part) {
    if (whole % part != 0) {
        refuse(path, std::string(whole_name) + " = " + std::to_string(whole) + " is not a multiple of " +
                         part_name + " = " + std::to_string(part));
    }
}

model_shape read_shape(const std::string& path, const header& fields) {
    constexpr std::int32_t wide = 1 << 20, deep = 1 << 12, large = 1 << 24;
    check_range(path, "dim", fields[0], wide);
    check_range(path, "hidden_dim", fields[1], wide);
    check_range(path, "layers", fields[2], deep);
    check_range(path, "heads", fields[3], wide);
    check_range(path, "kv_heads", fields[4], wide);
    check_range(path, "context", fields[6], large);
    // A negative vocabulary size marks a separate classifier.
    if (fields[5] < -large || fields[5] > large || fields[5] == 0) {
        refuse(path, "the header says vocab = " + std::to_string(fields[5]) + ", expected 1 to " +
                         std::to_string(large) + " or the negative of it");
    }

    const model_shape shape{fields[0], fields[1], fields[2],
                            fields[3], fields[4], fields[5] < 0 ? -fields[5] : fields[5],
                            fields[6]};
    check_divides(path, "dim", shape.dim, "heads", shape.heads);
    check_divides(path, "heads", shape.heads, "kv_heads", shape.kv_heads);
    check_divides(path, "head_dim", shape.head_dim(), "a rotated pair", 2);
    return shape;
}

std::int64_t count_floats(const model_shape& shape, bool tied) {
    const std::int64_t dim = shape.dim;
    const std::int64_t attention = dim + 2 * dim * dim + 2 * dim * shape.kv_dim();
    const std::int64_t feed_forward = dim + 3 * dim * shape.hidden_dim;
    const std::int64_t rotations = std::int64_t{shape.context} * shape.head_dim();
    return shape.vocab * dim * (tied ? 1 : 2) + shape.layers * (attention + feed_forward) + dim + rotations;
}

// Returns consecutive blocks of the weights.
class reader {
public:
    explicit reader(float* weights) : next_(weights) {}

    float* take(std::ptrdiff_t count) {
        float* block = next_;
        next_ += count;
        return block;
    }

private:
    float* next_;
};

// Transposes a matrix of [outputs][inputs] in place.
matrix_view transposed(float* weights, std::ptrdiff_t outputs, std::ptrdiff_t inputs) {
    const matrix turned = matrix_view(weights, outputs, inputs).transpose();
    std::copy_n(turned.data(), turned.size(), weights);
    return {weights, inputs, outputs};
}

}  // namespace

checkpoint load_checkpoint(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    std::error_code failed;
    const auto file_bytes = static_cast<std::int64_t>(std::filesystem::file_size(path, failed));
    if (!file || failed) {
        refuse(path, "cannot be opened");
    }

    header fields{};
    if (!file.read(reinterpret_cast<char*>(fields.data()), sizeof fields)) {
        refuse(path, "the file has " + std::to_string(file_bytes) + " bytes, the header alone needs " +
                         std::to_string(sizeof fields));
    }
    const model_shape shape = read_shape(path, fields);
    const bool tied = fields[5] > 0;
    const std::int64_t floats = count_floats(shape, tied);
    const std::int64_t expected_bytes = floats * 4 + static_cast<std::int64_t>(sizeof fields);
    if (file_bytes != expected_bytes) {
        refuse(path, "the file has " + std::to_string(file_bytes) + " bytes, its header asks for " +
                         std::to_string(expected_bytes) + " (dim " + std::to_string(shape.dim) +
                         ", hidden_dim " + std::to_string(shape.hidden_dim) + ", layers " +
                         std::to_string(shape.layers) + ", heads " + std::to_string(shape.heads) + "/" +
                         std::to_string(shape.kv_heads) + ", vocab " + std::to_string(shape.vocab) +
                         ", context " + std::to_string(shape.context) + ")");
    }

    auto storage = std::make_unique_for_overwrite<float[]>(static_cast<std::size_t>(floats));
    if (!file.read(reinterpret_cast<char*>(storage.get()), floats * 4)) {
        refuse(path, "could not be read to its end");
    }

    // The file stores each kind of weight for all layers together.
    reader weights(storage.get());
    const std::ptrdiff_t dim = shape.dim, kv_dim = shape.kv_dim(), hidden = shape.hidden_dim,
                         layers = shape.layers;
    const float* embedding = weights.take(shape.vocab * dim);
    const float* attention_norm = weights.take(layers * dim);
    float* query = weights.take(layers * dim * dim);
    float* key = weights.take(layers * kv_dim * dim);
    float* value = weights.take(layers * kv_dim * dim);
    float* attention_output = weights.take(layers * dim * dim);
    const float* feed_forward_norm = weights.take(layers * dim);
    float* gate = weights.take(layers * hidden * dim);
    float* down = weights.take(layers * dim * hidden);
    float* up = weights.take(layers * hidden * dim);
    const float* final_norm = weights.take(dim);
    weights.take(std::ptrdiff_t{shape.context} *
                 shape.head_dim());  // skips tables of rotations, which the model computes itself
    const float* classifier = tied ? embedding : weights.take(shape.vocab * dim);

    std::vector<layer_weights> views;
    for (std::ptrdiff_t layer = 0; layer < layers; ++layer) {
        views.push_back({row_view(attention_norm + layer * dim, dim),
                         transposed(query + layer * dim * dim, dim, dim),
                         transposed(key + layer * kv_dim * dim, kv_dim, dim),
                         transposed(value + layer * kv_dim * dim, kv_dim, dim),
                         transposed(attention_output + layer * dim * dim, dim, dim),
                         row_view(feed_forward_norm + layer * dim, dim),
                         transposed(gate + layer * hidden * dim, hidden, dim),
                         transposed(down + layer * dim * hidden, dim, hidden),
                         transposed(up + layer * hidden * dim, hidden, dim)});
    }
    return {shape,
            std::move(storage),
            matrix_view(embedding, shape.vocab, dim),
            std::move(views),
            row_view(final_norm, dim),
            matrix_view(classifier, shape.vocab, dim).transpose()};
}

}  // namespace llama
