// tokenizer.json of Hugging Face's tokenizers library: byte-pair encoding, byte-level or with SentencePiece's
// spaces.
#include "json_file.hpp"
#include "load_tokenizer.hpp"
#include "pre_tokenizer.hpp"

#include <filesystem>
#include <unordered_map>

namespace llama {
namespace {

using nlohmann::json;

constexpr std::string_view space_sign = "\xE2\x96\x81";  // SentencePiece's space

// A component: {"type": "Sequence", ...: [components]} becomes its components, null becomes none.
std::vector<json_object> components(const json_object& parent, const char* name, const char* list) {
    std::vector<json_object> all;
    if (!parent.has(name)) {
        return all;
    }
    const json_object one = parent.object(name);
    if (one.text("type") != "Sequence") {
        all.push_back(one);
        return all;
    }
    for (const json& each : one.get(list)) {
        if (!each.is_object()) {
            parent.refuse(std::string("\"") + name + "\" has a sequence of something else than objects");
        }
        all.push_back(one.with(each));
    }
    return all;
}

[[noreturn]] void refuse_component(const json_object& part, const char* role) {
    part.refuse(std::string("the ") + role + ' ' + json_object::short_text(part.value()) + " is not handled");
}

void read_normalizer(const json_object& file, vocabulary& words) {
    for (const json_object& part : components(file, "normalizer", "normalizers")) {
        const std::string type = part.text("type");
        if (type == "NFC") {  // texts almost always are in this form already
            continue;
        }
        if (type == "Prepend" && part.text("prepend") == space_sign) {
            words.leading_space = true;
        } else if (type == "Replace" && part.object("pattern").value() == json{{"String", " "}} &&
                   part.text("content") == space_sign) {
            words.spaces_are_signs = true;
        } else {
            refuse_component(part, "normalizer");
        }
    }
}

// The expression that matches a text literally.
std::string literal(std::string_view text) {
    std::string expression;
    for (const char32_t c : decode_utf8(text).code_points) {
        if (c < 0x80 && (category_of(c) & (find_category("L") | find_category("N"))) == 0 && c >= 0x20) {
            expression += '\\';
        }
        append_utf8(expression, c);
    }
    return expression;
}

void read_pre_tokenizer(const json_object& file, vocabulary& words) {
    for (const json_object& part : components(file, "pre_tokenizer", "pretokenizers")) {
        const std::string type = part.text("type");
        if (type == "ByteLevel") {
            if (part.flag("add_prefix_space", false)) {
                refuse_component(part, "pre-tokenizer");
            }
            words.begins_as_bytes = true;
            if (part.flag("use_regex", true)) {
                words.patterns.emplace_back(gpt2_expression);
            }
        } else if (type == "Split") {
            const json_object pattern = part.object("pattern");
            const std::string behavior = part.text("behavior");
            if (words.spaces_are_signs && pattern.value() == json{{"String", " "}}) {
                continue;  // no space is left to split at
            }
            // Matches and what lies between them are parts, or only the matches are, which is the same where
            // they are everything.
            if (behavior != "Isolated" && !(behavior == "Removed" && part.flag("invert", false))) {
                refuse_component(part, "pre-tokenizer");
            }
            words.patterns.emplace_back(pattern.has("Regex") ? pattern.text("Regex")
                                                             : literal(pattern.text("String")));
        } else if (type == "Digits") {
            words.patterns.emplace_back(part.flag("individual_digits", false) ? R"(\p{N})" : R"(\p{N}+)");
        } else if (type == "Metaspace" && part.text("replacement") == space_sign) {
            const std::string scheme =
                part.text("prepend_scheme", part.flag("add_prefix_space", true) ? "always" : "never");
            words.spaces_are_signs = true;
            words.leading_space = words.leading_space || scheme != "never";
            words.only_first = scheme == "first";
            if (part.flag("split", true)) {
                words.patterns.emplace_back(" [^ ]*");
            }
        } else {
            refuse_component(part, "pre-tokenizer");
        }
    }
}

int read_id(const json_object& file, const json& id, std::size_t most) {
    if (!id.is_number_integer() || id < 0 || id > most) {
        file.refuse("a token has the id " + json_object::short_text(id) + ", expected 0 to " +
                    std::to_string(most));
    }
    return id.get<int>();
}

void read_added_tokens(const json_object& file, std::size_t most_id, vocabulary& words) {
    if (!file.has("added_tokens")) {
        return;
    }
    for (const json& each : file.get("added_tokens")) {
        if (!each.is_object()) {
            file.refuse("\"added_tokens\" has something else than objects");
        }
        const json_object token = file.with(each);
        const std::string text = token.text("content");
        const int id = read_id(file, token.get("id"), most_id);
        if (token.flag("single_word", false)) {
            file.refuse("the added token \"" + text + "\" is a single word, which is not handled");
        }
        if (id >= std::ssize(words.tokens)) {
            words.tokens.resize(static_cast<std::size_t>(id) + 1, {{}, 0.0F, token_kind::unused});
        }
        words.tokens[static_cast<std::size_t>(id)] = {
            words.spaces_are_signs ? signs_to_spaces(text) : text, 0.0F,
            token.flag("special", false) ? token_kind::control : token_kind::user_defined};
        words.added.push_back({id, token.flag("lstrip", false), token.flag("rstrip", false)});
    }
}

void read_model(const json_object& file, vocabulary& words) {
    const json_object model = file.object("model");
    if (const std::string type = model.text("type", "BPE"); type != "BPE" || !model.has("merges")) {
        file.refuse("its model is \"" + type + "\"; read is BPE with merges");
    }
    for (const char* const name : {"continuing_subword_prefix", "end_of_word_suffix"}) {
        if (!model.text(name, "").empty()) {
            file.refuse(std::string("its model has \"") + name + "\", which is not handled");
        }
    }
    words.whole_parts = model.flag("ignore_merges", false);
    const bool byte_fallback = model.flag("byte_fallback", false);
    const std::string unknown = model.text("unk_token", "");

    const json_object vocab_object = model.object("vocab");
    const json& vocab = vocab_object.value();
    const std::size_t added = file.has("added_tokens") ? file.get("added_tokens").size() : 0;
    // A file with a false id must not take memory.
    const std::size_t most_id = 2 * (vocab.size() + added) + 4096;
    std::unordered_map<std::string, int> ids;
    for (const auto& [text, id_value] : vocab.items()) {
        const int id = read_id(file, id_value, most_id);
        ids.emplace(text, id);
        if (id >= std::ssize(words.tokens)) {
            words.tokens.resize(static_cast<std::size_t>(id) + 1, {{}, 0.0F, token_kind::unused});
        }
        vocabulary::token& token = words.tokens[static_cast<std::size_t>(id)];
        const int byte = byte_fallback ? parse_byte_name(text) : -1;
        token.kind = byte >= 0         ? token_kind::byte
                     : text == unknown ? token_kind::unknown
                                       : token_kind::normal;
        token.text = byte >= 0                ? std::string(1, static_cast<char>(byte))
                     : words.begins_as_bytes  ? bytes_of_printable(text)
                     : words.spaces_are_signs ? signs_to_spaces(text)
                                              : text;
    }
    std::size_t number = 0;
    for (const json& merge : model.get("merges")) {
        std::string left, right;
        if (merge.is_string()) {
            const auto text = merge.get<std::string>();
            const std::size_t space = text.find(' ', 1);
            left = text.substr(0, space);
            right = space == std::string::npos ? "" : text.substr(space + 1);
        } else if (merge.is_array() && merge.size() == 2 && merge[0].is_string() && merge[1].is_string()) {
            left = merge[0].get<std::string>();
            right = merge[1].get<std::string>();
        }
        const auto first = ids.find(left), second = ids.find(right), both = ids.find(left + right);
        if (left.empty() || right.empty() || first == ids.end() || second == ids.end() || both == ids.end()) {
            file.refuse("merge " + std::to_string(number) + ' ' + json_object::short_text(merge) +
                        " is not two tokens that make a third");
        }
        words.merges.push_back({first->second, second->second, both->second});
        ++number;
    }
    read_added_tokens(file, most_id, words);
}

// The token that the post-processor puts in front of a text, or -1.
int find_begin_of_text(const json_object& file) {
    for (const json_object& part : components(file, "post_processor", "processors")) {
        if (part.text("type") != "TemplateProcessing" || !part.get("single").is_array() ||
            part.get("single").empty()) {
            continue;
        }
        const json& first = part.get("single")[0];
        if (first.is_object() && first.contains("SpecialToken")) {
            const auto name = first.at("SpecialToken").at("id").get<std::string>();
            return part.value().at("special_tokens").at(name).at("ids").at(0).get<int>();
        }
    }
    return -1;
}

// A token by its text, or the "content" of an object; -1 where there is none.
int find_token(const vocabulary& words, const json& name) {
    const json& text = name.is_object() && name.contains("content") ? name["content"] : name;
    for (std::size_t id = 0; id < words.tokens.size() && text.is_string(); ++id) {
        if (words.tokens[id].text == text.get_ref<const std::string&>()) {
            return static_cast<int>(id);
        }
    }
    return -1;
}

void read_begin_and_ends(const json_object& file, const std::filesystem::path& folder, vocabulary& words) {
    const auto add_end = [&](const json& id) {
        if (id.is_number_integer() && id >= 0 && id < words.tokens.size()) {
            words.ends.push_back(id.get<int>());
        }
    };
    words.begin_of_text = find_begin_of_text(file);
    words.adds_begin_of_text = words.begin_of_text >= 0;
    if (std::filesystem::exists(folder / "tokenizer_config.json")) {
        const json_object config((folder / "tokenizer_config.json").string());
        if (config.has("bos_token") && words.begin_of_text < 0) {
            words.begin_of_text = find_token(words, config.get("bos_token"));
        }
        if (config.has("add_bos_token")) {
            words.adds_begin_of_text = config.flag("add_bos_token", true) && words.begin_of_text >= 0;
        }
        if (config.has("eos_token")) {
            add_end(find_token(words, config.get("eos_token")));
        }
    }
    for (const char* const name : {"config.json", "generation_config.json"}) {
        if (!std::filesystem::exists(folder / name)) {
            continue;
        }
        const json_object config((folder / name).string());
        if (config.has("eos_token_id")) {
            const json& ids = config.get("eos_token_id");
            if (ids.is_array()) {
                std::for_each(ids.begin(), ids.end(), add_end);
            } else {
                add_end(ids);
            }
        }
    }
}

}  // namespace

vocabulary read_json_vocabulary(const std::string& path) {
    const json_object file(path);
    vocabulary words;
    words.may_be_padded = true;
    try {
        read_normalizer(file, words);
        read_pre_tokenizer(file, words);
        read_model(file, words);
        read_begin_and_ends(file, std::filesystem::path(path).parent_path(), words);
    } catch (const json::exception& error) {
        file.refuse(error.what());
    }
    return words;
}

}  // namespace llama
