#include "checkpoint.hpp"

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace llama {
namespace {

static_assert(std::endian::native == std::endian::little, "the checkpoint is read as it lies in the file");

using header_words = std::array<std::int32_t, 7>;

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

model_shape read_shape(const std::string& path, const header_words& fields) {
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
    explicit reader(const std::byte* weights) : next_(weights) {}

    const std::byte* take(std::ptrdiff_t floats) {
        const std::byte* const block = next_;
        next_ += 4 * floats;
        return block;
    }

private:
    const std::byte* next_;
};

// Layer `layer` of weights that the file stores for all layers together.
linear matrix_of(const std::byte* all, std::ptrdiff_t layer, Eigen::Index outputs, Eigen::Index inputs) {
    return linear({&type_f32, all + 4 * layer * outputs * inputs, outputs, inputs});
}

row_vector row_of(const std::byte* all, std::ptrdiff_t layer, Eigen::Index size) {
    row_vector values(size);
    stored_matrix{&type_f32, all, layer + 1, size}.read_rows(layer, 1, values.data());
    return values;
}

}  // namespace

model_weights load_checkpoint(const std::string& path, double rope_theta) {
    auto file = std::make_shared<const mapped_file>("checkpoint", path);
    const auto file_bytes = static_cast<std::int64_t>(file->bytes().size());
    header_words fields{};
    if (file->bytes().size() < sizeof fields) {
        refuse(path, "the file has " + std::to_string(file_bytes) + " bytes, the header alone needs " +
                         std::to_string(sizeof fields));
    }
    std::memcpy(fields.data(), file->bytes().data(), sizeof fields);
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

    // The file stores each kind of weight for all layers together.
    reader weights(file->bytes().data() + sizeof fields);
    const std::ptrdiff_t dim = shape.dim, kv_dim = shape.kv_dim(), hidden = shape.hidden_dim,
                         layers = shape.layers, vocab = shape.vocab;
    const std::byte* const embedding = weights.take(vocab * dim);
    const std::byte* const attention_norm = weights.take(layers * dim);
    const std::byte* const query = weights.take(layers * dim * dim);
    const std::byte* const key = weights.take(layers * kv_dim * dim);
    const std::byte* const value = weights.take(layers * kv_dim * dim);
    const std::byte* const attention_output = weights.take(layers * dim * dim);
    const std::byte* const feed_forward_norm = weights.take(layers * dim);
    const std::byte* const gate = weights.take(layers * hidden * dim);
    const std::byte* const down = weights.take(layers * dim * hidden);
    const std::byte* const up = weights.take(layers * hidden * dim);
    const std::byte* const final_norm = weights.take(dim);
    weights.take(std::ptrdiff_t{shape.context} *
                 shape.head_dim());  // skips tables of rotations, which the model computes itself
    const std::byte* const classifier = tied ? embedding : weights.take(vocab * dim);

    model_weights all;
    all.config.shape = shape;
    all.config.rotary.frequencies =
        kvq::rotary_frequencies(shape.head_dim(), rope_theta > 0.0 ? rope_theta : 10000.0);
    for (std::ptrdiff_t layer = 0; layer < layers; ++layer) {
        layer_weights of;
        of.attention_norm = row_of(attention_norm, layer, dim);
        of.query = matrix_of(query, layer, dim, dim);
        of.key = matrix_of(key, layer, kv_dim, dim);
        of.value = matrix_of(value, layer, kv_dim, dim);
        of.attention_output = matrix_of(attention_output, layer, dim, dim);
        of.feed_forward_norm = row_of(feed_forward_norm, layer, dim);
        of.gate = matrix_of(gate, layer, hidden, dim);
        of.down = matrix_of(down, layer, dim, hidden);
        of.up = matrix_of(up, layer, hidden, dim);
        all.layers.push_back(std::move(of));
    }
    all.embedding = {&type_f32, embedding, vocab, dim};
    all.final_norm = row_of(final_norm, 0, dim);
    all.logits = matrix_of(classifier, 0, vocab, dim);
    all.files.push_back(std::move(file));
    return all;
}

}  // namespace llama
