#include "architecture.hpp"

#include <cmath>
#include <set>

namespace llama {
namespace {

constexpr architecture architectures[] = {
    {.name = "llama"},
    {.name = "mistral"},
    {.name = "qwen2", .needs_biases = true},
    {.name = "qwen3", .needs_head_norms = true},
    {.name = "gemma", .is_gemma = true},
    {.name = "gemma2", .is_gemma = true, .output_norms = true, .full_attention_every = 2},
    {.name = "gemma3",
     .needs_head_norms = true,
     .is_gemma = true,
     .output_norms = true,
     .full_attention_every = 6},
    {.name = "gemma3_text",
     .needs_head_norms = true,
     .is_gemma = true,
     .output_norms = true,
     .full_attention_every = 6},
    {.name = "qwen3_5_text", .needs_head_norms = true, .is_hybrid = true, .full_attention_every = 4},
};

std::string sizes_of(const std::vector<std::uint64_t>& sizes) {
    std::string text;
    for (const std::uint64_t size : sizes) {
        text += (text.empty() ? "" : " x ") + std::to_string(size);
    }
    return text;
}

// Takes tensors out of a directory, checks their sizes, and remembers which were taken.
class tensor_taker {
public:
    tensor_taker(const tensor_directory& tensors, const refusal& refuse)
        : tensors_(tensors), refuse_(refuse) {}

    bool has(std::string_view name, int layer, std::string_view suffix) const {
        return !name.empty() && tensors_.find(full_name(name, layer, suffix)) != tensors_.end();
    }

    stored_matrix take(std::string_view name, int layer, std::string_view suffix,
                       const std::vector<std::uint64_t>& sizes) {
        const std::string full = full_name(name, layer, suffix);
        const auto found = tensors_.find(full);
        if (found == tensors_.end()) {
            refuse("tensor \"" + full + "\" is missing");
        }
        const stored_tensor& tensor = found->second;
        const std::string what = "tensor \"" + full + "\" in \"" + tensor.file + "\"";
        if (tensor.type == nullptr) {
            refuse(what + " has the type " + tensor.type_name + "; read are " + stored_type_names());
        }
        if (tensor.sizes != sizes) {
            refuse(what + " has the sizes " + sizes_of(tensor.sizes) + ", expected " + sizes_of(sizes));
        }
        taken_.insert(full);
        const auto rows = sizes.size() > 1 ? sizes.front() : 1;
        return {tensor.type, tensor.bytes, static_cast<Eigen::Index>(rows),
                static_cast<Eigen::Index>(sizes.back())};
    }

    row_vector take_row(std::string_view name, int layer, std::string_view suffix, int size,
                        float offset = 0.0F) {
        const stored_matrix stored = take(name, layer, suffix, {static_cast<std::uint64_t>(size)});
        row_vector values(size);
        stored.read_rows(0, 1, values.data());
        return values.array() + offset;
    }

    // A tensor as rows of `columns` numbers.
    matrix take_matrix(std::string_view name, int layer, std::string_view suffix,
                       const std::vector<std::uint64_t>& sizes) {
        const stored_matrix stored = take(name, layer, suffix, sizes);
        matrix values(stored.outputs, stored.inputs);
        stored.read_rows(0, stored.outputs, values.data());
        return values;
    }

    row_vector take_bias(std::string_view name, int layer, int size, bool needed) {
        return needed || has(name, layer, ".bias") ? take_row(name, layer, ".bias", size) : row_vector();
    }

    linear take_linear(std::string_view name, int layer, int outputs, int inputs) {
        return linear(take(name, layer, ".weight",
                           {static_cast<std::uint64_t>(outputs), static_cast<std::uint64_t>(inputs)}));
    }

    // Every tensor must have been taken: a model that lacks a part of it is another model.
    void check_rest(std::string_view architecture_name) const {
        for (const auto& [name, tensor] : tensors_) {
            const bool is_table = name.ends_with("rotary_emb.inv_freq");  // the model computes it itself
            if (taken_.count(name) == 0 && !is_table) {
                refuse("tensor \"" + name + "\" in \"" + tensor.file +
                       "\" is not handled for the architecture " + std::string(architecture_name));
            }
        }
    }

private:
    static std::string full_name(std::string_view name, int layer, std::string_view suffix) {
        std::string full(name);
        if (const std::size_t place = full.find('#'); place != std::string::npos) {
            full.replace(place, 1, std::to_string(layer));
        }
        return full += suffix;
    }
    [[noreturn]] void refuse(const std::string& reason) const {
        refuse_(reason);
        throw std::logic_error("a refusal returned");
    }

    const tensor_directory& tensors_;
    const refusal& refuse_;
    std::set<std::string> taken_;
};

}  // namespace

const architecture* find_architecture(std::string_view name) {
    for (const architecture& each : architectures) {
        if (each.name == name) {
            return &each;
        }
    }
    return nullptr;
}

std::string architecture_names() {
    std::string names;
    for (const architecture& each : architectures) {
        names += (names.empty() ? "" : ", ") + std::string(each.name);
    }
    return names;
}

void apply_architecture(const architecture& kind, int window, model_config& config) {
    model_shape& shape = config.shape;
    if (kind.is_gemma) {
        config.gate = activation::gelu_tanh;
        config.embedding_scale = std::sqrt(static_cast<float>(shape.dim));
    }
    if (window > 0) {
        const int every = kind.full_attention_every;
        for (int layer = 0; layer < shape.layers; ++layer) {
            shape.windows.push_back(every > 0 && layer % every == every - 1 ? 0 : window);
        }
    }
}

void check_shape(const model_shape& shape, const refusal& refuse) {
    if (shape.head_channels == 0 && shape.dim % shape.heads != 0) {
        refuse(std::to_string(shape.dim) + " channels are no multiple of " + std::to_string(shape.heads) +
               " heads");
    }
    if (shape.heads % shape.kv_heads != 0) {
        refuse(std::to_string(shape.heads) + " heads are no multiple of " + std::to_string(shape.kv_heads) +
               " kv heads");
    }
    if (shape.head_dim() % 2 != 0) {
        refuse("heads of " + std::to_string(shape.head_dim()) + " channels are not pairs");
    }
}

model_weights build_model(const architecture& kind, model_config config, const tensor_directory& tensors,
                          const tensor_names& names, float norm_offset, const refusal& refuse) {
    const model_shape& shape = config.shape;
    check_shape(shape, refuse);
    tensor_taker taker(tensors, refuse);
    model_weights model;
    constexpr int none = 0;
    model.embedding =
        taker.take(names.embedding, none, ".weight",
                   {static_cast<std::uint64_t>(shape.vocab), static_cast<std::uint64_t>(shape.dim)});
    model.final_norm = taker.take_row(names.final_norm, none, ".weight", shape.dim, norm_offset);
    for (int layer = 0; layer < shape.layers; ++layer) {
        const auto norm = [&](std::string_view name, int size) {
            return taker.take_row(name, layer, ".weight", size, norm_offset);
        };
        const auto maybe_norm = [&](std::string_view name, int size, bool needed) {
            return needed || taker.has(name, layer, ".weight") ? norm(name, size) : row_vector();
        };
        layer_weights of;
        of.attention_norm = norm(names.attention_norm, shape.dim);
        of.feed_forward_norm = norm(names.feed_forward_norm, shape.dim);
        of.gate = taker.take_linear(names.gate, layer, shape.hidden_dim, shape.dim);
        of.up = taker.take_linear(names.up, layer, shape.hidden_dim, shape.dim);
        of.down = taker.take_linear(names.down, layer, shape.dim, shape.hidden_dim);
        if (shape.is_recurrent(layer)) {
            const delta_shape& delta = shape.delta;
            const auto channels = static_cast<std::uint64_t>(delta.mixed_dim()),
                       kernel = static_cast<std::uint64_t>(delta.kernel);
            of.delta = {
                .mixed = taker.take_linear(names.delta_mixed, layer, delta.mixed_dim(), shape.dim),
                .gate = taker.take_linear(names.delta_gate, layer, delta.value_dim(), shape.dim),
                .beta = taker.take_linear(names.delta_beta, layer, delta.value_heads, shape.dim),
                .decay = taker.take_linear(names.delta_decay, layer, delta.value_heads, shape.dim),
                .kernel = taker.take_matrix(names.delta_kernel, layer, ".weight", {channels, 1, kernel})
                              .transpose(),
                .decay_bias = taker.take_row(names.delta_decay_bias, layer, "", delta.value_heads),
                .log_decay = taker.take_row(names.delta_log_decay, layer, "", delta.value_heads),
                .norm = taker.take_row(names.delta_norm, layer, ".weight", delta.value_channels),
                .output = taker.take_linear(names.delta_output, layer, shape.dim, delta.value_dim())};
            model.layers.push_back(std::move(of));
            continue;
        }
        const int gates = config.attention_gate ? 2 : 1;
        of.query = taker.take_linear(names.query, layer, gates * shape.query_dim(), shape.dim);
        of.key = taker.take_linear(names.key, layer, shape.kv_dim(), shape.dim);
        of.value = taker.take_linear(names.value, layer, shape.kv_dim(), shape.dim);
        of.attention_output = taker.take_linear(names.attention_output, layer, shape.dim, shape.query_dim());
        of.query_bias = taker.take_bias(names.query, layer, gates * shape.query_dim(), kind.needs_biases);
        of.key_bias = taker.take_bias(names.key, layer, shape.kv_dim(), kind.needs_biases);
        of.value_bias = taker.take_bias(names.value, layer, shape.kv_dim(), kind.needs_biases);
        of.attention_output_bias = taker.take_bias(names.attention_output, layer, shape.dim, false);
        of.query_norm = maybe_norm(names.query_norm, shape.head_dim(), kind.needs_head_norms);
        of.key_norm = maybe_norm(names.key_norm, shape.head_dim(), kind.needs_head_norms);
        if (kind.output_norms) {
            of.attention_output_norm = norm(names.attention_output_norm, shape.dim);
            of.feed_forward_output_norm = norm(names.feed_forward_output_norm, shape.dim);
        }
        model.layers.push_back(std::move(of));
    }
    const bool tied = !taker.has(names.logits, none, ".weight");
    model.logits =
        tied ? linear(model.embedding) : taker.take_linear(names.logits, none, shape.vocab, shape.dim);
    taker.check_rest(kind.name);
    model.config = std::move(config);
    return model;
}

}  // namespace llama
