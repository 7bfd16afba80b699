// SPDX-License-Identifier: MIT
// Tokenizers of small vocabularies, whose ids can be checked by hand, from every kind of file.
#include <load_tokenizer.hpp>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include "gguf_writer.hpp"
#include "run_model.hpp"
#include "support/random.hpp"
#include "temporary_folder.hpp"

namespace {

using ids = std::vector<int>;
using strings = std::vector<std::string>;

std::string decoded(const llama::tokenizer& pieces, const ids& tokens, int previous) {
    std::string text;
    for (const int token : tokens) {
        text += pieces.decode(previous, token);
        previous = token;
    }
    return text;
}

// "Ġ" for a space, as GPT-2 writes bytes.
std::string printable(int byte) {
    std::string text;
    int other = 0x100;
    for (int b = 0; b < 256; ++b) {
        const bool plain = (b >= 33 && b <= 126) || (b >= 161 && b != 173);
        if (b == byte) llama::append_utf8(text, static_cast<char32_t>(plain ? b : other));
        other += plain ? 0 : 1;
    }
    return text;
}

// 0 to 255: the bytes; then he, ll, hell, hello, " w", wo, 12, 123; then two added tokens.
strings byte_level_tokens() {
    strings tokens;
    for (int byte = 0; byte < 256; ++byte) tokens.push_back(printable(byte));
    for (const char* const word :
         {"he", "ll", "hell", "hello", "\u0120w", "wo", "12", "123", "<|begin|>", "<|end|>"})
        tokens.push_back(word);
    return tokens;
}
const strings byte_level_merges{"h e", "l l",      "he ll", "hell o",
                                "w o", "\u0120 w", "1 2"};  // 123 is made by none of them
enum { he = 256, ll, hell, hello, space_w, wo, one_two, one_two_three, begin, end };

test::gguf_writer byte_level_gguf(const char* pre) {
    test::gguf_writer file;
    file.add("tokenizer.ggml.model", "gpt2");
    if (pre != nullptr) file.add("tokenizer.ggml.pre", pre);
    file.add("tokenizer.ggml.tokens", byte_level_tokens());
    std::vector<std::int32_t> kinds(264, 1);
    kinds.insert(kinds.end(), {3, 3});
    file.add("tokenizer.ggml.token_type", kinds);
    file.add("tokenizer.ggml.merges", byte_level_merges);
    file.add("tokenizer.ggml.bos_token_id", begin);
    file.add("tokenizer.ggml.eos_token_id", end);
    return file;
}

std::string quoted(const std::string& text) { return nlohmann::json(text).dump(); }

std::string byte_level_json(const std::string& pre_tokenizer, bool ignore_merges) {
    std::string vocab, merges;
    const strings tokens = byte_level_tokens();
    for (int id = 0; id < begin; ++id)
        vocab +=
            (id > 0 ? ", " : "") + quoted(tokens[static_cast<std::size_t>(id)]) + ": " + std::to_string(id);
    for (const std::string& merge : byte_level_merges) merges += (merges.empty() ? "" : ", ") + quoted(merge);
    return R"({"added_tokens": [{"id": 264, "content": "<|begin|>", "special": true, "lstrip": false},
                                {"id": 265, "content": "<|end|>", "special": true, "rstrip": true}],
               "normalizer": {"type": "NFC"}, "pre_tokenizer": )" +
           pre_tokenizer +
           R"(, "post_processor": {"type": "Sequence", "processors": [{"type": "ByteLevel"}, {"type": "TemplateProcessing",
               "single": [{"SpecialToken": {"id": "<|begin|>"}}, {"Sequence": {"id": "A"}}],
               "special_tokens": {"<|begin|>": {"id": "<|begin|>", "ids": [264], "tokens": ["<|begin|>"]}}}]},
               "model": {"type": "BPE", "ignore_merges": )" +
           (ignore_merges ? "true" : "false") + ", \"vocab\": {" + vocab + "}, \"merges\": [" + merges +
           "]}}";
}

// SentencePiece: unknown, begin, end, bytes, then pieces with scores.
struct sentence_piece {
    strings tokens{"<unk>", "<s>", "</s>"};
    std::vector<float> scores{0, 0, 0};
    std::vector<std::int32_t> kinds{2, 3, 3};

    sentence_piece() {
        for (int byte = 0; byte < 256; ++byte) {
            char name[8];
            std::snprintf(name, sizeof name, "<0x%02X>", static_cast<unsigned>(byte));
            add(name, 0, 6);
        }
        //        259   260   261  262  263   264   265    266     267
        for (const char* const piece :
             {"\u2581", "a", "b", "ab", "\u2581a", "\u2581ab", "ba", "\u00E9", "aba"})
            add(piece, -static_cast<float>(tokens.size()), 1);
        scores[262] = -1;  // ab is the best
    }
    void add(const std::string& text, float score, int kind) {
        tokens.push_back(text);
        scores.push_back(score);
        kinds.push_back(kind);
    }
};

}  // namespace

TEST_CASE("byte-level tokenizers of GGUF files") {
    const test::temporary_folder folder;
    const auto load = [&](const test::gguf_writer& file) {
        test::write_file(folder / "t.gguf", file.file());
        return llama::load_tokenizer(folder / "t.gguf");
    };
    const llama::tokenizer qwen = load(byte_level_gguf("qwen2"));
    CHECK(qwen.size() == 266);
    CHECK(!qwen.adds_begin_of_text());
    CHECK(qwen.ends_text(end));
    CHECK(!qwen.ends_text(begin));
    CHECK(qwen.encode("") == ids{});
    CHECK(qwen.encode("hello") == ids{hello});
    CHECK(qwen.encode("hellohe") == ids{hello, he});
    // "w o" comes before "\u0120 w".
    CHECK(qwen.encode("hello world") == ids{hello, ' ', wo, 'r', 'l', 'd'});
    CHECK(qwen.encode(" wx") == ids{space_w, 'x'});
    CHECK(qwen.encode("123") == ids{'1', '2', '3'});  // every digit alone
    CHECK(qwen.encode("\u00E9") == ids{0xC3, 0xA9});
    CHECK(qwen.encode("\xFF") == ids{0xFF});
    CHECK(qwen.encode("a<|begin|>he<|end|>") == ids{'a', begin, he, end});
    CHECK(qwen.encode("<|begin|") == ids{'<', '|', 'b', 'e', 'g', 'i', 'n', '|'});

    const llama::tokenizer llama3 = load(byte_level_gguf("llama-bpe"));
    CHECK(llama3.adds_begin_of_text());
    CHECK(llama3.encode("123") == ids{one_two_three});  // a token as a whole
    CHECK(llama3.encode("1234") == ids{one_two_three, '4'});
    CHECK(llama3.encode("12") == ids{one_two});
    const llama::tokenizer none = load(byte_level_gguf(nullptr));
    CHECK(none.encode("123") == ids{one_two, '3'});

    const std::string text = "hello hello,\n\n  12345 w\u00F6 \U0001F600 ";
    for (const llama::tokenizer* const each : {&qwen, &llama3, &none})
        CHECK(decoded(*each, each->encode(text), begin) == text);
    CHECK(qwen.decode(0, 100000).empty());

    test::gguf_writer file = byte_level_gguf("qwen2");
    file.add("tokenizer.ggml.add_bos_token", true);
    CHECK(load(file).adds_begin_of_text());
    CHECK(test::contains(test::message_of([&] { load(byte_level_gguf("viking")); }),
                         "t.gguf\": its pre-tokenizer is \"viking\""));
    test::gguf_writer other;
    other.add("tokenizer.ggml.model", "t5");
    CHECK(test::contains(test::message_of([&] { load(other); }),
                         "of the kind \"t5\"; read are llama and gpt2"));
}

TEST_CASE("byte-level tokenizers of tokenizer.json") {
    const test::temporary_folder folder;
    const auto load = [&](const std::string& json) {
        test::write_file(folder / "tokenizer.json", json);
        return llama::load_tokenizer(folder.path());
    };
    const std::string llama3 =
        R"json({"type": "Sequence", "pretokenizers": [{"type": "Split", "pattern": {"Regex":
        "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"},
        "behavior": "Isolated", "invert": false}, {"type": "ByteLevel", "add_prefix_space": false, "use_regex": false}]})json";
    const llama::tokenizer from_json = load(byte_level_json(llama3, true));
    CHECK(from_json.adds_begin_of_text());
    test::write_file(folder / "t.gguf", byte_level_gguf("llama-bpe").file());
    const llama::tokenizer from_gguf = llama::load_tokenizer(folder / "t.gguf");
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (int round = 0; round < 300; ++round) {
        std::string text;
        for (int i = random.between(0, 30); i > 0; --i)
            text +=
                random.pick(std::vector<std::string>{"h", "e", "l", "o", "hello", " ", " w", "1", "2", "3",
                                                     "\n", "'s", "\u00E9", "<|begin|>", "\xFF", ","});
        CHECK(from_json.encode(text) == from_gguf.encode(text));
        CHECK(decoded(from_json, from_json.encode(text), begin) == text);
    }
    // White space behind an added token that strips it is dropped.
    CHECK(from_json.encode("a<|end|> \n he") == ids{'a', end, he});

    const std::string gpt2 = R"({"type": "ByteLevel", "add_prefix_space": false})";
    CHECK(load(byte_level_json(gpt2, false)).encode("12 123") == ids{one_two, ' ', one_two, '3'});
    CHECK(
        load(byte_level_json(
                 R"({"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": true}, )" +
                     gpt2 + "]}",
                 false))
            .encode("12") == ids{'1', '2'});

    test::write_file(folder / "tokenizer_config.json",
                     R"({"add_bos_token": false, "eos_token": {"content": "<|end|>"}})");
    test::write_file(folder / "generation_config.json", R"({"eos_token_id": [104, 105]})");
    const llama::tokenizer configured = load(byte_level_json(gpt2, false));
    CHECK(!configured.adds_begin_of_text());
    CHECK(configured.ends_text(end));
    CHECK(configured.ends_text(105));
    CHECK(!configured.ends_text(106));

    const auto message = [&](std::string json, const std::string& old, const std::string& other) {
        const std::size_t place = json.find(old);
        REQUIRE(place != std::string::npos);
        json.replace(place, old.size(), other);
        return test::message_of([&] { load(json); });
    };
    const std::string good = byte_level_json(gpt2, false);
    CHECK(test::contains(message(good, "\"BPE\"", "\"Unigram\""), "its model is \"Unigram\"; read is BPE"));
    CHECK(test::contains(message(good, "\"NFC\"", "\"Lowercase\""),
                         "the normalizer {\"type\":\"Lowercase\"} is not handled"));
    CHECK(test::contains(message(good, "\"ByteLevel\", \"add", "\"Bert\", \"add"), "the pre-tokenizer {"));
    CHECK(test::contains(message(good, "hell o", "hell p"),
                         "merge 3 \"hell p\" is not two tokens that make a third"));
    CHECK(test::contains(message(good, "\"id\": 264", "\"id\": 999999999"),
                         "a token has the id 999999999, expected 0 to"));
    CHECK(test::contains(message(good, "{", "["), "tokenizer.json\": it is not a JSON object"));
}

TEST_CASE("SentencePiece tokenizers of all three kinds of file") {
    const test::temporary_folder folder;
    const sentence_piece pieces;
    test::gguf_writer file;
    file.add("tokenizer.ggml.model", "llama");
    file.add("tokenizer.ggml.tokens", pieces.tokens);
    file.add("tokenizer.ggml.scores", pieces.scores);
    file.add("tokenizer.ggml.token_type", pieces.kinds);
    file.add("tokenizer.ggml.bos_token_id", 1);
    file.add("tokenizer.ggml.eos_token_id", 2);
    test::write_file(folder / "t.gguf", file.file());
    const llama::tokenizer from_gguf = llama::load_tokenizer(folder / "t.gguf");

    std::string binary;
    test::put(binary, 8);
    for (std::size_t id = 0; id < pieces.tokens.size(); ++id) {
        const std::string text = llama::signs_to_spaces(pieces.tokens[id]);
        test::put(binary, pieces.scores[id]);
        test::put(binary, static_cast<std::int32_t>(text.size()));
        binary += text;
    }
    test::write_file(folder / "t.bin", binary);
    const llama::tokenizer from_llama2c = llama::load_tokenizer(folder / "t.bin");

    // Merges in the order of the scores of what they make.
    std::string vocab;
    for (std::size_t id = 0; id < pieces.tokens.size(); ++id)
        vocab += (id > 0 ? ", " : "") + quoted(pieces.tokens[id]) + ": " + std::to_string(id);
    const std::string json =
        R"({"added_tokens": [{"id": 1, "content": "<s>", "special": true}, {"id": 2, "content": "</s>", "special": true}],
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"},
                       {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]},
        "pre_tokenizer": null,
        "post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>"}}, {"Sequence": {"id": "A"}}],
                           "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}},
        "model": {"type": "BPE", "unk_token": "<unk>", "byte_fallback": true, "fuse_unk": true, "vocab": {)" +
        vocab + R"(}, "merges": ["a b", ["▁", "a"], "▁ ab", ["▁a", "b"], "b a", "ab a", "a ba"]}})";
    test::write_file(folder / "tokenizer.json", json);
    const llama::tokenizer from_json = llama::load_tokenizer(folder.path());

    for (const llama::tokenizer* const each : {&from_gguf, &from_llama2c, &from_json}) {
        CHECK(each->adds_begin_of_text());
        CHECK(each->ends_text(2) == (each != &from_json));  // tokenizer.json alone does not say it
        CHECK(each->encode("").empty());
        CHECK(each->encode("a") == ids{263});
        CHECK(each->encode("ab") == ids{264});             // ab first, then the space joins
        CHECK(each->encode("aba") == ids{264, 260});       // "▁ab" is better than "aba"
        CHECK(each->encode("bab") == ids{259, 261, 262});  // ab is better than ba
        CHECK(each->encode("b  a") == ids{259, 261, 259, 263});
        CHECK(each->encode("\u00E9\u20AC") == ids{259, 266, 3 + 0xE2, 3 + 0x82, 3 + 0xAC});
        CHECK(decoded(*each, each->encode("ab \u20AC b"), 1) == "ab \u20AC b");
    }
    for (const llama::tokenizer* const each : {&from_gguf, &from_json})
        CHECK(each->encode("a</s>b") == ids{263, 2, 259, 261});

    file.add("tokenizer.ggml.add_space_prefix", false);
    test::write_file(folder / "t.gguf", file.file());
    CHECK(llama::load_tokenizer(folder / "t.gguf").encode("ab a") == ids{262, 263});
}
