// A folder of Hugging Face's files: config.json, and tensors in safetensors files by the names of the
// transformers library.
#include "architecture.hpp"
#include "json_file.hpp"
#include "load_model.hpp"
#include "rotary_scaling.hpp"

#include <kvq/io/safetensors.hpp>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <set>

namespace llama {
namespace {

constexpr tensor_names llama_names{.embedding = "model.embed_tokens",
                                   .final_norm = "model.norm",
                                   .logits = "lm_head",
                                   .attention_norm = "model.layers.#.input_layernorm",
                                   .query = "model.layers.#.self_attn.q_proj",
                                   .key = "model.layers.#.self_attn.k_proj",
                                   .value = "model.layers.#.self_attn.v_proj",
                                   .attention_output = "model.layers.#.self_attn.o_proj",
                                   .query_norm = "model.layers.#.self_attn.q_norm",
                                   .key_norm = "model.layers.#.self_attn.k_norm",
                                   .feed_forward_norm = "model.layers.#.post_attention_layernorm",
                                   .gate = "model.layers.#.mlp.gate_proj",
                                   .up = "model.layers.#.mlp.up_proj",
                                   .down = "model.layers.#.mlp.down_proj",
                                   .delta_mixed = "model.layers.#.linear_attn.in_proj_qkv",
                                   .delta_gate = "model.layers.#.linear_attn.in_proj_z",
                                   .delta_beta = "model.layers.#.linear_attn.in_proj_b",
                                   .delta_decay = "model.layers.#.linear_attn.in_proj_a",
                                   .delta_kernel = "model.layers.#.linear_attn.conv1d",
                                   .delta_decay_bias = "model.layers.#.linear_attn.dt_bias",
                                   .delta_log_decay = "model.layers.#.linear_attn.A_log",
                                   .delta_norm = "model.layers.#.linear_attn.norm",
                                   .delta_output = "model.layers.#.linear_attn.out_proj"};

tensor_names names_of(const architecture& kind) {
    tensor_names names = llama_names;
    if (kind.output_norms) {
        names.attention_output_norm = "model.layers.#.post_attention_layernorm";
        names.feed_forward_norm = "model.layers.#.pre_feedforward_layernorm";
        names.feed_forward_output_norm = "model.layers.#.post_feedforward_layernorm";
    }
    return names;
}

// Adds the tensors of one file.
std::shared_ptr<const mapped_file> add_tensors(const std::string& path, tensor_directory& tensors) {
    auto file = std::make_shared<const mapped_file>("safetensors file", path);
    const auto refuse = [&](const std::string& reason) {
        throw std::runtime_error("safetensors file \"" + path + "\": " + reason);
    };
    const auto bytes = file->bytes();
    std::size_t at = 0;
    const auto read = [&](void* to, std::size_t wanted) {
        const std::size_t count = std::min(wanted, bytes.size() - at);
        std::memcpy(to, bytes.data() + at, count);
        at += count;
        return count;
    };
    kvq::safetensors_header header;
    try {
        header = kvq::read_safetensors_header(read);
    } catch (const kvq::error& error) {
        refuse(error.what());
    }
    if (header.data_bytes() != bytes.size() - at) {
        refuse("its tensors have " + std::to_string(header.data_bytes()) + " bytes, the file has " +
               std::to_string(bytes.size() - at));
    }
    for (const kvq::safetensors_tensor& each : header.tensors) {
        stored_tensor tensor;
        for (const stored_type* const type : {&type_f32, &type_f16, &type_bf16}) {
            if (each.dtype == type->name) {
                tensor.type = type;
            }
        }
        tensor.type_name = each.dtype;
        tensor.sizes = each.shape;
        tensor.bytes = bytes.data() + at + each.begin;
        tensor.file = path;
        if (!tensors.emplace(each.name, std::move(tensor)).second) {
            refuse("the tensor \"" + each.name + "\" is in two files");
        }
    }
    return file;
}

std::vector<std::shared_ptr<const mapped_file>> add_all_tensors(const std::filesystem::path& folder,
                                                                tensor_directory& tensors) {
    const std::filesystem::path single = folder / "model.safetensors",
                                list = folder / "model.safetensors.index.json";
    if (std::filesystem::exists(single) || !std::filesystem::exists(list)) {
        return {add_tensors(single.string(), tensors)};
    }
    const json_object index(list.string());
    const json_object file_of = index.object("weight_map");
    std::set<std::string> names;
    for (const auto& [tensor, file] : file_of.value().items()) {
        if (!file.is_string() ||
            std::filesystem::path(file.get<std::string>()).filename() != file.get<std::string>()) {
            index.refuse("tensor \"" + tensor + "\" is in " + json_object::short_text(file) +
                         ", expected the name of a file in the same folder");
        }
        names.insert(file.get<std::string>());
    }
    std::vector<std::shared_ptr<const mapped_file>> files;
    for (const std::string& name : names) {
        files.push_back(add_tensors((folder / name).string(), tensors));
    }
    for (const auto& [tensor, file] : file_of.value().items()) {
        if (tensors.find(tensor) == tensors.end()) {
            index.refuse("tensor \"" + tensor + "\" is not in \"" + file.get<std::string>() + '"');
        }
    }
    return files;
}

// Frequencies are stretched as the members of an object say.
rotary_scaling read_scaling(const json_object& rope, double context) {
    rotary_scaling scaling;
    scaling.type = rope.text("rope_type", rope.text("type", "default"));
    scaling.factor = rope.number("factor", 1.0);
    scaling.original_context = rope.number("original_max_position_embeddings", context);
    scaling.low_freq_factor = rope.number("low_freq_factor", 1.0);
    scaling.high_freq_factor = rope.number("high_freq_factor", 4.0);
    scaling.beta_fast = rope.number("beta_fast", 32.0);
    scaling.beta_slow = rope.number("beta_slow", 1.0);
    scaling.amplitude = rope.number("attention_factor", 0.0);
    for (const char* const other : {"mscale", "mscale_all_dim", "short_factor", "long_factor"}) {
        if (rope.has(other)) {
            rope.refuse(std::string("the rotary embedding has \"") + other + "\", which is not handled");
        }
    }
    if (!rope.flag("truncate", true)) {
        rope.refuse("the rotary embedding has \"truncate\": false, which is not handled");
    }
    return scaling;
}

rotary_angles angles_of(const json_object& config, int channels, double theta,
                        const rotary_scaling& scaling) {
    try {
        return scaled_angles(channels, theta, scaling);
    } catch (const std::exception& error) {
        config.refuse(error.what());
    }
}

// The rotary embedding of layers of one type. Newer files have it in `rope_parameters`, in an object for each
// type of layer where these differ; older ones in `rope_scaling` and `rope_theta`. theta: 0, or in place of
// that of the file.
rotary_angles read_rotary(const json_object& config, const architecture& kind, const model_shape& shape,
                          const char* layer_type, double theta) {
    const char* const name = config.has("rope_parameters") ? "rope_parameters" : "rope_scaling";
    const bool has_scaling = config.has(name);
    json_object rope = has_scaling ? config.object(name) : config;
    rope = rope.has(layer_type) ? rope.object(layer_type) : rope;
    const double share = rope.number("partial_rotary_factor",
                                     config.number("partial_rotary_factor", kind.is_hybrid ? 0.25 : 1.0));
    const int channels = share > 0.0 && share <= 1.0 ? static_cast<int>(shape.head_dim() * share) : 0;
    if (kind.is_hybrid && (channels < 2 || channels % 2 != 0)) {
        config.refuse("\"partial_rotary_factor\" is " + std::to_string(share) + ", of " +
                      std::to_string(shape.head_dim()) + " channels an even number is rotated");
    }
    if (!kind.is_hybrid && share != 1.0) {
        config.refuse("\"partial_rotary_factor\" is not 1, which is not handled");
    }
    const double usual = kind.name == "gemma3_text" ? 1e6 : 10000.0;  // the library's defaults
    theta = theta > 0.0 ? theta : rope.number("rope_theta", config.number("rope_theta", usual));
    const double context = config.number("original_max_position_embeddings", shape.context);
    return angles_of(config, channels, theta, has_scaling ? read_scaling(rope, context) : rotary_scaling{});
}

// Qwen3.5.
void read_hybrid(const json_object& config, const architecture& kind, model_config& model) {
    constexpr int many = 1 << 14;
    model_shape& shape = model.shape;
    shape.delta = {.key_heads = config.whole("linear_num_key_heads", 1, many, 16),
                   .value_heads = config.whole("linear_num_value_heads", 1, many, 32),
                   .key_channels = config.whole("linear_key_head_dim", 1, many, 128),
                   .value_channels = config.whole("linear_value_head_dim", 1, many, 128),
                   .kernel = config.whole("linear_conv_kernel_dim", 2, 64, 4)};
    if (shape.delta.value_heads % shape.delta.key_heads != 0) {
        config.refuse(std::to_string(shape.delta.value_heads) +
                      " value heads of linear attention are no multiple of its " +
                      std::to_string(shape.delta.key_heads) + " key heads");
    }
    if (!config.flag("attn_output_gate", true)) {
        config.refuse("\"attn_output_gate\" is false, which is not handled");
    }
    model.attention_gate = true;
    const int every = config.whole("full_attention_interval", 1, 1 << 12, kind.full_attention_every);
    for (int layer = 0; layer < shape.layers; ++layer) {
        shape.recurrent.push_back(layer % every != every - 1);
    }
}

// What tokens the layers see.
void read_layers(const json_object& config, const architecture& kind, model_config& model) {
    constexpr int large = 1 << 24;
    model_shape& shape = model.shape;
    int window = config.has("sliding_window") ? config.whole("sliding_window", 1, large) : 0;
    const bool is_qwen = kind.name == "qwen2" || kind.name == "qwen3";
    if (kind.name == "llama" || kind.is_hybrid || (is_qwen && !config.flag("use_sliding_window", false))) {
        window = 0;
    }
    apply_architecture(kind, window, model);
    if (kind.is_hybrid) {
        read_hybrid(config, kind, model);
    }
    const std::string other = kind.is_hybrid ? "linear_attention" : "sliding_attention";
    if ((window > 0 || kind.is_hybrid) && config.has("layer_types")) {
        const nlohmann::json& types = config.get("layer_types");
        if (!types.is_array() || std::ssize(types) != shape.layers) {
            config.refuse("\"layer_types\" is no list of " + std::to_string(shape.layers) + " layers");
        }
        for (std::size_t layer = 0; layer < types.size(); ++layer) {
            if (types[layer] != "full_attention" && types[layer] != other) {
                config.refuse("layer " + std::to_string(layer) + " has the type " +
                              json_object::short_text(types[layer]) + ", which is not handled");
            }
            const bool is_full = types[layer] == "full_attention";
            if (kind.is_hybrid) {
                shape.recurrent[layer] = !is_full;
            } else {
                shape.windows[layer] = is_full ? 0 : window;
            }
        }
    } else if (window > 0 && is_qwen) {
        const int full = config.whole("max_window_layers", 0, large, shape.layers);
        std::fill_n(shape.windows.begin(), std::min(full, shape.layers), 0);
    } else if (window > 0 && kind.full_attention_every > 0 &&
               config.whole("sliding_window_pattern", 1, large, kind.full_attention_every) !=
                   kind.full_attention_every) {
        config.refuse("\"sliding_window_pattern\" is not " + std::to_string(kind.full_attention_every) +
                      ", which is not handled");
    }
}

// Values that would make it another model.
void refuse_unhandled(const json_object& config, const architecture& kind) {
    for (const char* const name : {"quantization_config", "num_local_experts", "num_experts",
                                   "attn_temperature_tuning", "use_bidirectional_attention"}) {
        if (config.has(name) && config.get(name) != false) {
            config.refuse(std::string("\"") + name + "\" is not handled");
        }
    }
    const std::string act =
        config.text("hidden_activation", config.text("hidden_act", kind.is_gemma ? "gelu" : "silu"));
    const bool handled =
        kind.is_gemma ? act == "gelu_pytorch_tanh" || (kind.name == "gemma" && act == "gelu") : act == "silu";
    if (!handled) {
        config.refuse("the activation \"" + act + "\" is not handled for the architecture " +
                      std::string(kind.name));
    }
}

model_config read_config(const json_object& config, const architecture& kind, double rope_theta) {
    constexpr int wide = 1 << 20, deep = 1 << 12, many = 1 << 14, large = 1 << 24;
    refuse_unhandled(config, kind);
    model_config model;
    model_shape& shape = model.shape;
    shape.dim = config.whole("hidden_size", 1, wide);
    shape.hidden_dim = config.whole("intermediate_size", 1, wide);
    shape.layers = config.whole("num_hidden_layers", 1, deep);
    shape.heads = config.whole("num_attention_heads", 1, many);
    shape.kv_heads = config.whole("num_key_value_heads", 1, many, shape.heads);
    shape.vocab = config.whole("vocab_size", 1, large);
    shape.context = config.whole("max_position_embeddings", 1, large);
    const int usual_head = kind.is_gemma || kind.is_hybrid ? 256
                           : kind.name == "qwen3"          ? 128
                                                           : 0;  // the library's defaults
    shape.head_channels = config.has("head_dim") ? config.whole("head_dim", 1, many) : usual_head;
    shape.attention_softcap = static_cast<float>(config.number("attn_logit_softcapping", 0.0));
    check_shape(shape, [&](const std::string& reason) { config.refuse(reason); });

    model.norm_epsilon = static_cast<float>(config.number("rms_norm_eps", 1e-6));
    model.logit_softcap = static_cast<float>(config.number("final_logit_softcapping", 0.0));
    model.pairs = kvq::rotary_layout::half_split;
    if (config.has("query_pre_attn_scalar")) {
        model.query_scale = static_cast<float>(
            std::sqrt(static_cast<double>(shape.head_dim()) / config.number("query_pre_attn_scalar")));
    }
    read_layers(config, kind, model);
    if (shape.attention_layers().empty()) {
        config.refuse("no layer has full attention, which is not handled");
    }
    model.rotary = read_rotary(config, kind, shape, "full_attention", rope_theta);
    if (config.has("rope_parameters") && config.object("rope_parameters").has("sliding_attention")) {
        model.window_rotary = read_rotary(config, kind, shape, "sliding_attention", 0.0);
    } else if (kind.name == "gemma3_text") {
        model.window_rotary =
            angles_of(config, shape.head_dim(), config.number("rope_local_base_freq", 10000.0), {});
    }
    const auto first_of = [&](const char* name) {
        nlohmann::json id = config.has(name) ? config.get(name) : nlohmann::json(0);
        id = id.is_array() && !id.empty() ? id[0] : id;
        return id.is_number_integer() && id >= 0 && id < shape.vocab ? id.get<int>() : 0;
    };
    model.begin_of_text = first_of(config.has("bos_token_id") ? "bos_token_id" : "eos_token_id");
    return model;
}

}  // namespace

model_weights load_folder_model(const std::string& path, double rope_theta) {
    const std::filesystem::path folder(path);
    const json_object config((folder / "config.json").string());
    const std::string name = config.text("model_type");
    const architecture* const kind = find_architecture(name);
    if (kind == nullptr || name == "gemma3") {  // gemma3 sees images, gemma3_text does not
        config.refuse(
            "its architecture is \"" + name +
            "\"; read are llama, mistral, qwen2, qwen3, gemma, gemma2, gemma3_text and qwen3_5_text");
    }
    model_config settings;
    try {
        settings = read_config(config, *kind, rope_theta);
    } catch (const nlohmann::json::exception& error) {
        config.refuse(error.what());
    }
    tensor_directory tensors;
    auto files = add_all_tensors(folder, tensors);
    if (config.has("tie_word_embeddings") && !config.flag("tie_word_embeddings", true) &&
        tensors.find("lm_head.weight") == tensors.end()) {
        config.refuse("\"tie_word_embeddings\" is false, but the tensor \"lm_head.weight\" is missing");
    }
    model_weights model = build_model(
        *kind, std::move(settings), tensors, names_of(*kind), kind->is_gemma || kind->is_hybrid ? 1.0F : 0.0F,
        [&](const std::string& reason) { throw std::runtime_error("model \"" + path + "\": " + reason); });
    model.files = std::move(files);
    return model;
}

}  // namespace llama
