#include "pre_tokenizer.hpp"

#include <stdexcept>

namespace llama {
namespace {

constexpr std::string_view gpt2 =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";
constexpr std::string_view llama3 =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr std::string_view qwen2 =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr std::string_view tekken =
    R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|)"
    R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|)"
    R"(\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

}  // namespace

const std::string_view gpt2_expression = gpt2;

pre_tokenizer find_pre_tokenizer(std::string_view name) {
    if (name == "default") {
        // Its second expression lacks the last alternative of GPT-2's: what it leaves is a part anyway.
        return {{R"([\p{P}\$\+<=>\^~\|]+)", gpt2, R"(\p{N}+)", "[0-9][0-9][0-9]"}};
    }
    if (name == "gpt-2") {
        return {{gpt2}};
    }
    if (name == "llama-bpe" || name == "llama3" || name == "llama-v3") {
        return {{llama3}, true, true};
    }
    if (name == "qwen2" || name == "deepseek-r1-qwen") {
        return {{qwen2}};
    }
    if (name == "smollm") {
        return {{R"(\p{N})", gpt2}};
    }
    if (name == "tekken") {
        return {{tekken}, true, true};
    }
    throw std::runtime_error(
        "its pre-tokenizer is \"" + std::string(name) +
        "\"; read are default, gpt-2, llama-bpe, qwen2, deepseek-r1-qwen, smollm and tekken");
}

}  // namespace llama
