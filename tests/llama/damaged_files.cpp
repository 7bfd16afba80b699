// SPDX-License-Identifier: MIT
// Truncated and altered files raise an error or give a model; they never read outside of the file or take
// memory without end.
#include <load_model.hpp>
#include <load_tokenizer.hpp>

#include <doctest/doctest.h>

#include <stdexcept>

#include "run_model.hpp"
#include "tiny_model.hpp"

namespace {

using test::tiny_model;

// Changes some bytes among the first `head`, cuts the file, or both.
std::string damaged(test::generator& random, std::string bytes, std::size_t head) {
    const auto any = [&](std::size_t below) { return static_cast<std::size_t>(random.bits() % below); };
    head = std::min(head, bytes.size());
    for (int changes = random.between(0, 4); changes > 0; --changes) {
        const std::size_t at = any(head);
        const int kind = random.between(0, 3);
        if (kind == 0) {
            bytes[at] = static_cast<char>(random.between(0, 255));
        } else if (kind == 1) {
            bytes[at] = static_cast<char>(bytes[at] ^ (1 << random.between(0, 7)));
        } else {  // a whole number: 0, -1 or a huge one
            const std::uint64_t number =
                kind == 2
                    ? random.pick(std::vector<std::uint64_t>{0, ~0ull, 1ull << 63, 1ull << 40, 1ull << 31})
                    : random.bits();
            const std::size_t size = random.one_in(2) ? 8 : 4;
            if (at + size <= bytes.size()) std::memcpy(bytes.data() + at, &number, size);
        }
    }
    if (random.one_in(3)) bytes.resize(any(random.one_in(2) ? head : bytes.size()));
    return bytes;
}

// An exception with a sentence, or a model that runs.
void load_and_run(const std::string& path) {
    try {
        const llama::model model(llama::load_model(path));
        if (model.shape().vocab > 3) test::logits_of(model, {1, 2, 3});
    } catch (const std::runtime_error& error) {
        CHECK(std::string(error.what()).size() > 20);
    } catch (const std::logic_error& error) {
        FAIL("not an error of the file: " << error.what());
    }
}
void load_and_encode(const std::string& path) {
    try {
        const llama::tokenizer pieces = llama::load_tokenizer(path);
        const std::string text = "hello ab 123 \u00E9 <s>\xFF";
        for (const int id : pieces.encode(text)) {
            REQUIRE(id >= 0);
            REQUIRE(id < pieces.size());
            pieces.decode(1, id);
        }
    } catch (const std::runtime_error& error) {
        CHECK(std::string(error.what()).size() > 20);
    } catch (const std::logic_error& error) {
        FAIL("not an error of the file: " << error.what());
    }
}

tiny_model small_model() {
    tiny_model m;
    m.dim = 32;
    m.hidden_dim = 32;
    m.heads = 2;
    m.kv_heads = 1;
    m.head_dim = 16;
    m.layers = 2;
    m.vocab = 8;
    m.context = 32;
    return m;
}

constexpr int rounds = 700;

}  // namespace

TEST_CASE("damaged GGUF files") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    const test::temporary_folder folder;
    tiny_model m = small_model();
    m.fill(random, llama::type_q8_0);
    test::gguf_writer file = m.gguf_values();
    file.add("llama.rope.scaling.type", "yarn");
    file.add("llama.rope.scaling.factor", 2.0f);
    file.add("tokenizer.ggml.bos_token_id", 1);
    m.add_tensors(file);
    const std::string good = file.file();
    for (int round = 0; round < rounds; ++round) {
        test::write_file(folder / "m.gguf", damaged(random, good, file.header().size()));
        load_and_run(folder / "m.gguf");
    }
    // Every length of the header.
    for (std::size_t size = 0; size < file.header().size(); size += 3) {
        test::write_file(folder / "m.gguf", good.substr(0, size));
        CHECK(test::message_of([&] { llama::load_model(folder / "m.gguf"); }) != "");
    }
    test::write_file(folder / "m.gguf", good.substr(0, good.size() - 33));
    CHECK(test::contains(test::message_of([&] { llama::load_model(folder / "m.gguf"); }),
                         " of a file of " + std::to_string(good.size() - 33) + " bytes"));
}

TEST_CASE("damaged folders") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    const test::temporary_folder folder;
    tiny_model m = small_model();
    m.half_split = true;
    m.fill(random, llama::type_bf16);
    m.write_folder(folder);
    const std::string good = m.safetensors(), config = m.config();
    for (int round = 0; round < rounds; ++round) {
        const bool is_config = random.one_in(2);
        test::write_file(folder / "config.json", is_config ? damaged(random, config, config.size()) : config);
        test::write_file(folder / "model.safetensors", is_config ? good : damaged(random, good, 2500));
        load_and_run(folder.path());
    }
    std::filesystem::remove(folder / "model.safetensors");
    CHECK(test::contains(test::message_of([&] {
                             m.write_folder(folder);
                             std::filesystem::remove(folder / "model.safetensors");
                             llama::load_model(folder.path());
                         }),
                         "model.safetensors\" cannot be opened"));
}

TEST_CASE("damaged llama2.c checkpoints") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    const test::temporary_folder folder;
    tiny_model m = small_model();
    m.fill(random);
    for (int round = 0; round < rounds / 5; ++round) {
        test::write_file(folder / "m.bin", damaged(random, m.llama2c(), 28));
        load_and_run(folder / "m.bin");
    }
    CHECK(test::contains(test::message_of([&] { llama::load_model(folder / "none.bin"); }),
                         "none.bin\" cannot be opened"));
}

TEST_CASE("damaged tokenizers") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    const test::temporary_folder folder;
    std::vector<std::string> tokens{"<unk>", "<s>", "</s>", "<0x61>", "a", "b", "ab",
                                    "h",     "e",   "he",   "1",      "2", "12"};
    std::vector<std::int32_t> kinds{2, 3, 3, 6, 1, 1, 1, 1, 1, 1, 1, 1, 1};
    std::vector<float> scores(tokens.size(), -1.0f);
    for (const bool byte_level : {false, true}) {
        test::gguf_writer file;
        file.add("tokenizer.ggml.model", byte_level ? "gpt2" : "llama");
        file.add("tokenizer.ggml.tokens", tokens);
        file.add("tokenizer.ggml.token_type", kinds);
        file.add("tokenizer.ggml.scores", scores);
        file.add("tokenizer.ggml.merges", std::vector<std::string>{"a b", "h e", "1 2"});
        file.add("tokenizer.ggml.eos_token_id", 2);
        const std::string good = file.file();
        for (int round = 0; round < rounds; ++round) {
            test::write_file(folder / "t.gguf", damaged(random, good, good.size()));
            load_and_encode(folder / "t.gguf");
        }
    }
    const std::string json =
        R"({"added_tokens": [{"id": 1, "content": "<s>", "special": true}], "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Split", "pattern": {"Regex": "\\p{N}{1,3}|[^a-c]+?"}, "behavior": "Isolated"}]},
            "post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>"}}], "special_tokens": {"<s>": {"ids": [1]}}},
            "model": {"type": "BPE", "byte_fallback": true, "unk_token": "<unk>", "vocab": {"<unk>": 0, "<s>": 1, "a": 2, "b": 3, "ab": 4, "▁": 5, "1": 6},
            "merges": ["a b"]}})";
    for (int round = 0; round < 2 * rounds; ++round) {
        test::write_file(folder / "tokenizer.json", damaged(random, json, json.size()));
        load_and_encode(folder / "tokenizer.json");
    }
}
