// The model in a GGUF file: values <architecture>.*, and tensors by the names of llama.cpp.
#include "architecture.hpp"
#include "gguf.hpp"
#include "load_model.hpp"
#include "rotary_scaling.hpp"

#include <cmath>
#include <cstdio>
#include <exception>
#include <iterator>

namespace llama {
namespace {

constexpr tensor_names gguf_names{.embedding = "token_embd",
                                  .final_norm = "output_norm",
                                  .logits = "output",
                                  .attention_norm = "blk.#.attn_norm",
                                  .query = "blk.#.attn_q",
                                  .key = "blk.#.attn_k",
                                  .value = "blk.#.attn_v",
                                  .attention_output = "blk.#.attn_output",
                                  .query_norm = "blk.#.attn_q_norm",
                                  .key_norm = "blk.#.attn_k_norm",
                                  .attention_output_norm = "blk.#.post_attention_norm",
                                  .feed_forward_norm = "blk.#.ffn_norm",
                                  .gate = "blk.#.ffn_gate",
                                  .up = "blk.#.ffn_up",
                                  .down = "blk.#.ffn_down",
                                  .feed_forward_output_norm = "blk.#.post_ffw_norm"};
constexpr std::string_view rotary_factors = "rope_freqs.weight";

// The values that a reader of these architectures must know: any other may change the model.
constexpr std::string_view handled[] = {"vocab_size",
                                        "tensor_data_layout",
                                        "block_count",
                                        "context_length",
                                        "embedding_length",
                                        "feed_forward_length",
                                        "attention.head_count",
                                        "attention.head_count_kv",
                                        "attention.key_length",
                                        "attention.value_length",
                                        "attention.layer_norm_rms_epsilon",
                                        "attention.sliding_window",
                                        "attn_logit_softcapping",
                                        "final_logit_softcapping",
                                        "rope.dimension_count",
                                        "rope.freq_base",
                                        "rope.freq_base_swa",
                                        "rope.scale_linear",
                                        "rope.scaling.type",
                                        "rope.scaling.factor",
                                        "rope.scaling.original_context_length",
                                        "rope.scaling.finetuned",
                                        "rope.scaling.attn_factor",
                                        "rope.scaling.yarn_beta_fast",
                                        "rope.scaling.yarn_beta_slow",
                                        "expert_count"};

// The files of a model in parts are named -00001-of-00003.gguf, ...
std::vector<gguf_file> open_all(const std::string& path) {
    std::vector<gguf_file> files;
    files.emplace_back(path);
    const auto parts = static_cast<int>(files.front().integer("split.count", 0, 9999, 0));
    if (parts < 2) {
        return files;
    }
    char ending[40];
    std::snprintf(ending, sizeof ending, "-00001-of-%05d.gguf", parts);
    if (!path.ends_with(ending)) {
        files.front().refuse("it is one of " + std::to_string(parts) + " files; the first one ends in " +
                             ending);
    }
    const std::string stem = path.substr(0, path.size() - std::string_view(ending).size());
    for (int part = 2; part <= parts; ++part) {
        std::snprintf(ending, sizeof ending, "-%05d-of-%05d.gguf", part, parts);
        files.emplace_back(stem + ending);
    }
    return files;
}

// Values of one architecture.
class hyperparameters {
public:
    hyperparameters(const gguf_file& file, std::string_view kind)
        : file_(file), prefix_(std::string(kind) + ".") {
        for (const auto& [name, value] : file.values()) {
            if (name.starts_with(prefix_) &&
                std::find(std::begin(handled), std::end(handled),
                          std::string_view(name).substr(prefix_.size())) == std::end(handled)) {
                file.refuse("the hyper-parameter \"" + name + "\" is not handled");
            }
        }
    }

    int whole(const char* name, std::int64_t most, std::optional<std::int64_t> otherwise = {},
              int least = 1) const {
        return static_cast<int>(file_.integer(prefix_ + name, least, most, otherwise));
    }
    double number(const char* name, std::optional<double> otherwise = {}) const {
        const double value = file_.number(prefix_ + name, otherwise);
        if (!std::isfinite(value) || value < 0.0) {
            file_.refuse("value \"" + prefix_ + name + "\" is " + std::to_string(value));
        }
        return value;
    }
    std::string text(const char* name, std::string_view otherwise) const {
        return std::string(file_.text(prefix_ + name, otherwise));
    }

private:
    const gguf_file& file_;
    std::string prefix_;
};

model_shape read_shape(const gguf_file& file, const hyperparameters& values) {
    constexpr int wide = 1 << 20, deep = 1 << 12, large = 1 << 24;
    model_shape shape{};
    shape.dim = values.whole("embedding_length", wide);
    shape.hidden_dim = values.whole("feed_forward_length", wide);
    shape.layers = values.whole("block_count", deep);
    shape.heads = values.whole("attention.head_count", 1 << 14);
    shape.kv_heads = values.whole("attention.head_count_kv", 1 << 14, shape.heads);
    shape.context = values.whole("context_length", large);
    shape.head_channels = values.whole("attention.key_length", 1 << 14, 0);
    if (values.whole("attention.value_length", 1 << 14, shape.head_channels) != shape.head_channels) {
        file.refuse("heads of keys and of values have different lengths, which is not handled");
    }
    if (const int rotated = values.whole("rope.dimension_count", 1 << 14, shape.head_dim());
        rotated != shape.head_dim()) {
        file.refuse("only " + std::to_string(rotated) + " of " + std::to_string(shape.head_dim()) +
                    " channels are rotated, which is not handled");
    }
    if (values.whole("expert_count", 1 << 14, 0, 0) > 0) {
        file.refuse("it is a mixture of experts, which is not handled");
    }
    const auto& tensors = file.tensors();
    const auto embedding = tensors.find(std::string(gguf_names.embedding) + ".weight");
    if (embedding == tensors.end() || embedding->second.sizes.front() > large) {
        file.refuse("the tensor \"token_embd.weight\" is missing or has too many tokens");
    }
    shape.vocab = static_cast<int>(embedding->second.sizes.front());
    shape.attention_softcap = static_cast<float>(values.number("attn_logit_softcapping", 0.0));
    return shape;
}

rotary_scaling read_scaling(const hyperparameters& values, const model_shape& shape) {
    rotary_scaling scaling;
    scaling.factor = values.number("rope.scaling.factor", values.number("rope.scale_linear", 1.0));
    scaling.type = values.text("rope.scaling.type", scaling.factor != 1.0 ? "linear" : "none");
    scaling.original_context = values.number("rope.scaling.original_context_length", shape.context);
    scaling.beta_fast = values.number("rope.scaling.yarn_beta_fast", 32.0);
    scaling.beta_slow = values.number("rope.scaling.yarn_beta_slow", 1.0);
    if (scaling.factor > 0.0) {
        scaling.amplitude = values.number("rope.scaling.attn_factor", 1.0) *
                            (1.0 + 0.1 * std::log(std::max(1.0, scaling.factor)));
    }
    return scaling;
}

// Llama 3.1 comes with a table of numbers that its frequencies are divided by.
void apply_factors(const gguf_file& file, stored_tensor factors, rotary_angles& angles) {
    if (factors.type == nullptr || factors.sizes != std::vector<std::uint64_t>{angles.frequencies.size()}) {
        file.refuse("the tensor \"" + std::string(rotary_factors) + "\" does not have " +
                    std::to_string(angles.frequencies.size()) + " numbers of a type that is read");
    }
    row_vector values(static_cast<Eigen::Index>(angles.frequencies.size()));
    stored_matrix{factors.type, factors.bytes, 1, values.size()}.read_rows(0, 1, values.data());
    for (std::size_t pair = 0; pair < angles.frequencies.size(); ++pair) {
        angles.frequencies[pair] /= static_cast<double>(values[static_cast<Eigen::Index>(pair)]);
    }
}

}  // namespace

model_weights load_gguf_model(const std::string& path, double rope_theta) {
    const std::vector<gguf_file> files = open_all(path);
    const gguf_file& file = files.front();
    const std::string name(file.text("general.architecture"));
    const architecture* const kind = find_architecture(name);
    if (kind == nullptr || kind->is_hybrid) {
        file.refuse("its architecture is \"" + name + "\"; read are " + architecture_names());
    }
    const hyperparameters values(file, name);

    model_config config;
    config.shape = read_shape(file, values);
    check_shape(config.shape, [&](const std::string& reason) { file.refuse(reason); });
    config.norm_epsilon = static_cast<float>(values.number("attention.layer_norm_rms_epsilon", 1e-5));
    config.logit_softcap = static_cast<float>(values.number("final_logit_softcapping", 0.0));
    // Weights of "llama" are permuted when they are converted, so that pairs are neighbours.
    config.pairs = name == "llama" ? kvq::rotary_layout::interleaved : kvq::rotary_layout::half_split;
    const double theta = rope_theta > 0.0 ? rope_theta : values.number("rope.freq_base", 10000.0);
    const int window = values.whole("attention.sliding_window", 1 << 24, 0, 0);
    try {
        const int head_dim = config.shape.head_dim();
        config.rotary = scaled_angles(head_dim, theta, read_scaling(values, config.shape));
        if (name == "gemma3") {
            config.window_rotary = scaled_angles(head_dim, values.number("rope.freq_base_swa", 10000.0), {});
        }
    } catch (const std::exception& error) {
        file.refuse(error.what());
    }
    apply_architecture(*kind, window, config);
    // The file does not say that the largest Gemma 2 and 3 divide scores by sqrt(dim / heads).
    if ((name == "gemma2" && config.shape.layers == 46) || (name == "gemma3" && config.shape.layers == 62)) {
        config.query_scale =
            std::sqrt(static_cast<float>(config.shape.head_dim()) * static_cast<float>(config.shape.heads) /
                      static_cast<float>(config.shape.dim));
    }
    const std::int64_t last = config.shape.vocab - 1;
    const std::int64_t end = file.integer("tokenizer.ggml.eos_token_id", 0, last, 0);
    config.begin_of_text = static_cast<int>(file.integer("tokenizer.ggml.bos_token_id", 0, last, end));

    tensor_directory tensors;
    for (const gguf_file& part : files) {
        for (const auto& [tensor_name, tensor] : part.tensors()) {
            if (tensor_name == rotary_factors) {
                apply_factors(part, tensor, config.rotary);
            } else if (!tensors.emplace(tensor_name, tensor).second) {
                part.refuse("the tensor \"" + tensor_name + "\" is in two files");
            }
        }
    }
    model_weights model = build_model(*kind, std::move(config), tensors, gguf_names, 0.0F,
                                      [&](const std::string& reason) { file.refuse(reason); });
    for (const gguf_file& part : files) {
        model.files.push_back(part.memory());
    }
    return model;
}

}  // namespace llama
