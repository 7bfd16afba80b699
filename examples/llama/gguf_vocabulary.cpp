// The tokenizer in a GGUF file: the values tokenizer.ggml.*.
#include "gguf.hpp"
#include "load_tokenizer.hpp"
#include "pre_tokenizer.hpp"

#include <algorithm>
#include <stdexcept>
#include <unordered_map>

namespace llama {
namespace {

constexpr std::int64_t most_tokens = 1 << 24;

std::string value_name(const char* name) { return std::string("tokenizer.ggml.") + name; }

// A list with one element per token; nullptr where the file has none.
const gguf_list* list_per_token(const gguf_file& file, const char* name, std::size_t tokens) {
    if (!file.has(value_name(name))) {
        return nullptr;
    }
    const gguf_list& list = file.list(value_name(name));
    if (list.is_text || list.size() != tokens) {
        file.refuse("value \"" + value_name(name) + "\" has " + std::to_string(list.size()) +
                    (list.is_text ? " texts, expected " : " elements, expected ") + std::to_string(tokens) +
                    " numbers, one per token");
    }
    return &list;
}

void read_tokens(const gguf_file& file, bool byte_level, vocabulary& words) {
    const gguf_list& texts = file.list(value_name("tokens"));
    if (!texts.is_text || texts.size() == 0 || texts.size() > most_tokens) {
        file.refuse("value \"tokenizer.ggml.tokens\" is no list of texts");
    }
    const gguf_list* const kinds = list_per_token(file, "token_type", texts.size());
    const gguf_list* const scores = list_per_token(file, "scores", texts.size());
    for (std::size_t id = 0; id < texts.size(); ++id) {
        const double kind = kinds != nullptr ? kinds->numbers[id] : 1.0;
        if (!(kind >= 0.0 && kind <= 6.0)) {
            file.refuse("token " + std::to_string(id) + " has the type " + std::to_string(kind) +
                        ", known are 0 to 6");
        }
        vocabulary::token token{std::string(texts.texts[id]),
                                scores != nullptr ? static_cast<float>(scores->numbers[id]) : 0.0F,
                                static_cast<token_kind>(std::max(1, static_cast<int>(kind)))};
        const bool is_added = token.kind == token_kind::control || token.kind == token_kind::user_defined;
        if (token.kind == token_kind::byte) {
            const int byte = parse_byte_name(token.text);
            if (byte < 0) {
                file.refuse("token " + std::to_string(id) + " stands for a byte, but is \"" + token.text +
                            "\" instead of a name like <0x41>");
            }
            token.text.assign(1, static_cast<char>(byte));
        } else if (!byte_level) {
            token.text = signs_to_spaces(token.text);
        } else if (!is_added) {
            token.text = bytes_of_printable(token.text);
        }
        if (is_added) {
            words.added.push_back({static_cast<int>(id)});
        }
        words.tokens.push_back(std::move(token));
    }
}

void read_merges(const gguf_file& file, vocabulary& words) {
    std::unordered_map<std::string_view, int> ids;
    for (int id = 0; id < std::ssize(words.tokens); ++id) {
        const vocabulary::token& token = words.tokens[static_cast<std::size_t>(id)];
        if (token.kind == token_kind::normal || token.kind == token_kind::user_defined) {
            ids.emplace(token.text, id);
        }
    }
    const gguf_list& merges = file.list(value_name("merges"));
    for (std::size_t i = 0; i < merges.texts.size(); ++i) {
        const std::string_view text = merges.texts[i];
        const std::size_t space = text.find(' ', 1);
        const auto refuse = [&](const std::string& reason) {
            file.refuse("merge " + std::to_string(i) + " \"" + std::string(text) + "\" " + reason);
        };
        if (space == std::string_view::npos) {
            refuse("is not two tokens with a space between them");
        }
        const std::string left = bytes_of_printable(text.substr(0, space)),
                          right = bytes_of_printable(text.substr(space + 1));
        int place[3];
        for (int part = 0; const std::string& word : {left, right, left + right}) {
            const auto found = ids.find(word);
            if (found == ids.end()) {
                refuse("needs a token that is not in the vocabulary");
            }
            place[part++] = found->second;
        }
        words.merges.push_back({place[0], place[1], place[2]});
    }
}

}  // namespace

vocabulary read_gguf_vocabulary(const std::string& path) {
    const gguf_file file(path);
    const std::string_view model = file.text(value_name("model"));
    const bool byte_level = model == "gpt2";
    if (model != "llama" && !byte_level) {
        file.refuse("its tokenizer is of the kind \"" + std::string(model) + "\"; read are llama and gpt2");
    }
    vocabulary words;
    read_tokens(file, byte_level, words);
    bool adds_begin = true;
    if (byte_level) {
        read_merges(file, words);
        words.begins_as_bytes = true;
        try {
            const pre_tokenizer parts = find_pre_tokenizer(file.text(value_name("pre"), "default"));
            for (const std::string_view expression : parts.expressions) {
                words.patterns.emplace_back(expression);
            }
            words.whole_parts = parts.whole_parts;
            adds_begin = parts.adds_begin_of_text;
        } catch (const std::runtime_error& error) {
            file.refuse(error.what());
        }
    } else {
        words.merges_by_score = true;
        words.spaces_are_signs = true;
        words.leading_space = file.integer(value_name("add_space_prefix"), 0, 1, 1) != 0;
    }
    const std::int64_t last = std::ssize(words.tokens) - 1;
    words.adds_begin_of_text = file.integer(value_name("add_bos_token"), 0, 1, adds_begin) != 0;
    words.begin_of_text = static_cast<int>(file.integer(value_name("bos_token_id"), 0, last, -1));
    for (const char* const name : {"eos_token_id", "eot_token_id", "eom_token_id"}) {
        if (file.has(value_name(name))) {
            words.ends.push_back(static_cast<int>(file.integer(value_name(name), 0, last)));
        }
    }
    return words;
}

}  // namespace llama
