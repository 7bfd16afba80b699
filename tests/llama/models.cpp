// SPDX-License-Identifier: MIT
// A model has the same logits from every kind of file, and those of a textbook in double precision.
#include <rotary_scaling.hpp>
#include <stored_type.hpp>

#include <doctest/doctest.h>

#include "model_named.hpp"
#include "run_model.hpp"

namespace {

using test::model_named;
using test::tiny_model;

constexpr const llama::stored_type* all_types[] = {
    &llama::type_f32,  &llama::type_f16,  &llama::type_bf16, &llama::type_q8_0,   &llama::type_q4_0,
    &llama::type_q4_1, &llama::type_q5_0, &llama::type_q5_1, &llama::type_q2_k,   &llama::type_q3_k,
    &llama::type_q4_k, &llama::type_q5_k, &llama::type_q6_k, &llama::type_iq2_xxs};

std::vector<int> some_tokens(test::generator& random, int count, int vocab) {
    std::vector<int> tokens;
    for (int i = 0; i < count; ++i) tokens.push_back(random.between(0, vocab - 1));
    return tokens;
}

}  // namespace

TEST_CASE("every stored type becomes the values of its layout") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (const llama::stored_type* const type : all_types) {
        CAPTURE(type->name);
        for (int round = 0; round < 20; ++round) {
            const int blocks = random.between(1, 9);
            const auto values = static_cast<std::size_t>(blocks * type->block_values);
            // An odd address: tensors in a file lie anywhere.
            const std::string bytes = "x" + test::random_blocks(random, *type, values, 10.0f);
            std::vector<float> got(values);
            type->dequantize(reinterpret_cast<const std::byte*>(bytes.data()) + 1, blocks, got.data());
            for (std::size_t i = 0; i < values; ++i) {
                const auto block = static_cast<std::size_t>(type->block_values);
                const auto* const b = reinterpret_cast<const unsigned char*>(bytes.data()) + 1 +
                                      i / block * static_cast<std::size_t>(type->block_bytes);
                const double expected = test::reference_value(*type, b, static_cast<int>(i % block));
                // Two roundings of numbers that may cancel; both parts are below a few hundred here.
                REQUIRE(std::abs(static_cast<double>(got[i]) - expected) <= 1e-6 * std::abs(expected) + 2e-5);
                if (type->block_values == 1) REQUIRE(static_cast<double>(got[i]) == expected);
            }
        }
        CHECK(llama::find_ggml_type(static_cast<std::uint32_t>(type->ggml_number)) == type);
    }
    CHECK(llama::find_ggml_type(17) == nullptr);
    CHECK(llama::ggml_type_name(17) == "IQ2_XS");
    CHECK(llama::ggml_type_name(1234) == "type 1234");
}

TEST_CASE("a llama2.c checkpoint and a GGUF file in F32 have the same logits, to the bit") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    const test::temporary_folder folder;
    for (const bool tied : {true, false}) {
        tiny_model m;
        m.tied = tied;
        m.kv_heads = tied ? 4 : 1;
        m.fill(random);
        test::write_file(folder / "m.bin", m.llama2c());
        test::write_file(folder / "m.gguf", m.gguf());
        const std::vector<int> tokens = some_tokens(random, 17, m.vocab);
        const std::vector<float> expected = test::logits_of(folder / "m.bin", tokens);
        CHECK(test::logits_of(folder / "m.gguf", tokens) == expected);
        CHECK(test::logits_of(folder / "m.bin", tokens, 3) == expected);
        CHECK(test::distance(expected, m.logits(tokens)) < 2e-5);
    }
}

TEST_CASE("every architecture has the logits of a textbook, from GGUF files and from folders") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    for (const char* const name : {"llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3"}) {
        CAPTURE(name);
        tiny_model m = model_named(name);
        m.fill(random);
        const std::vector<int> tokens = some_tokens(random, 13, m.vocab);
        const test::temporary_folder folder;
        test::write_file(folder / "m.gguf", m.gguf());
        const std::vector<float> from_gguf = test::logits_of(folder / "m.gguf", tokens);
        CHECK(test::distance(from_gguf, m.logits(tokens)) < 5e-5);

        // The same tensors with pairs as in Hugging Face's files.
        m.half_split = true;
        if (m.architecture == "gemma3") m.architecture = "gemma3_text";
        m.write_folder(folder, m.gelu ? 1.0f : 0.0f);
        const std::vector<float> from_folder = test::logits_of(folder.path(), tokens);
        CHECK(test::distance(from_folder, m.logits(tokens)) < 5e-5);
        if (m.architecture == "qwen2" || m.architecture == "qwen3") CHECK(from_folder == from_gguf);
        // Two rotary bases in newer files.
        if (m.architecture == "gemma3_text") {
            m.theta = 7.0f;
            m.write_folder(folder, 1.0f,
                           ", \"rope_parameters\": {\"full_attention\": {\"rope_theta\": 1e6}, "
                           "\"sliding_attention\": {\"rope_theta\": 1e4, \"rope_type\": \"default\"}}");
            CHECK(test::logits_of(folder.path(), tokens) == from_folder);
        }
    }
}

TEST_CASE("a model with recurrent layers has the logits of a textbook, on any number of threads") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    const test::temporary_folder folder;
    for (int round = 0; round < 4; ++round) {
        tiny_model m = model_named("qwen3_5_text");
        m.layers = random.between(1, 4);
        m.recurrent.clear();
        for (int layer = 0; layer < m.layers; ++layer) m.recurrent.push_back(random.one_in(2));
        m.recurrent[static_cast<std::size_t>(random.between(0, m.layers - 1))] = false;
        m.key_heads = random.between(1, 3);
        m.value_heads = m.key_heads * random.between(1, 3);
        m.key_channels = random.between(1, 20);
        m.value_channels = random.between(1, 20);
        m.kernel = random.between(2, 6);
        m.rotated = 2 * random.between(1, m.head_dim / 2);
        m.frequencies.assign(static_cast<std::size_t>(m.layers), kvq::rotary_frequencies(m.rotated, 10000.0));
        m.tied = random.one_in(2);
        m.fill(random);
        m.write_folder(folder, 1.0f);
        const std::vector<int> tokens = some_tokens(random, random.between(1, 40), m.vocab);
        const llama::model model(llama::load_model(folder.path()));
        const std::vector<float> got = test::logits_of(model, tokens);
        CHECK(test::distance(got, m.logits(tokens)) < 1e-4);
        CHECK(test::logits_of(model, tokens, 3) == got);
        CHECK(test::distance(test::logits_of(model, tokens, 1, 1), got) < 1e-5);
    }
}

TEST_CASE("weights in every type have the logits of the same values in F32, on any number of threads") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    const test::temporary_folder folder;
    for (const llama::stored_type* const type : all_types) {
        CAPTURE(type->name);
        tiny_model m = model_named(random.one_in(2) ? "llama" : "qwen2");
        m.vocab = 140;  // more than a tile of outputs
        m.fill(random, *type);
        const std::vector<int> tokens = some_tokens(random, 9, m.vocab);
        test::write_file(folder / "m.gguf", m.gguf());
        test::write_file(folder / "f32.gguf", m.in_f32().gguf());
        const std::vector<float> got = test::logits_of(folder / "m.gguf", tokens);
        CHECK(test::distance(got, test::logits_of(folder / "f32.gguf", tokens)) < 2e-5);
        CHECK(test::distance(got, m.logits(tokens)) < 5e-5);
        CHECK(test::logits_of(folder / "m.gguf", tokens, 3) == got);
        if (type == &llama::type_f16 || type == &llama::type_bf16) {
            m.half_split = true;
            m.write_folder(folder);
            CHECK(test::distance(test::logits_of(folder.path(), tokens), m.logits(tokens)) < 5e-5);
        }
    }
}

TEST_CASE("a model in several files is the model in one") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    const test::temporary_folder folder;
    tiny_model m = model_named("qwen3");
    m.fill(random);
    const std::vector<int> tokens = some_tokens(random, 6, m.vocab);
    m.write_folder(folder);
    const std::vector<float> expected = test::logits_of(folder.path(), tokens);

    const auto in_first = [](const std::string& name) { return !name.starts_with("blk.1"); };
    const auto in_second = [](const std::string& name) { return name.starts_with("blk.1"); };
    test::gguf_writer first = m.gguf_values(), second;
    first.add("split.count", 2);
    m.add_tensors(first, in_first);
    m.add_tensors(second, in_second);
    test::write_file(folder / "m-00001-of-00002.gguf", first.file());
    CHECK(test::contains(test::message_of([&] { test::logits_of(folder / "m-00001-of-00002.gguf", tokens); }),
                         "m-00002-of-00002.gguf\" cannot be opened"));
    test::write_file(folder / "m-00002-of-00002.gguf", second.file());
    CHECK(test::logits_of(folder / "m-00001-of-00002.gguf", tokens) == expected);

    std::filesystem::remove(folder / "model.safetensors");
    test::write_file(folder / "a.safetensors", m.safetensors(0.0f, in_first));
    test::write_file(folder / "b.safetensors", m.safetensors(0.0f, in_second));
    std::string map;
    for (const auto& [name, t] : m.tensors)
        map += (map.empty() ? "\"" : ", \"") + m.folder_name(name) + "\": \"" + (in_first(name) ? "a" : "b") +
               ".safetensors\"";
    test::write_file(folder / "model.safetensors.index.json", "{\"weight_map\": {" + map + "}}");
    CHECK(test::logits_of(folder.path(), tokens) == expected);
    test::write_file(folder / "model.safetensors.index.json",
                     "{\"weight_map\": {\"x\": \"../a.safetensors\"}}");
    CHECK(test::contains(test::message_of([&] { test::logits_of(folder.path(), tokens); }),
                         "expected the name of a file in the same folder"));
}

TEST_CASE("scaled rotary frequencies come from the file") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    const test::temporary_folder folder;
    tiny_model m;
    m.layers = 1;
    m.half_split = true;
    m.fill(random);
    const auto angles_of = [&](const std::string& more) {
        m.write_folder(folder, 0.0f, more);
        return llama::load_model(folder.path()).config.rotary;
    };
    const std::vector<double> plain = kvq::rotary_frequencies(64, 10000.0);
    CHECK(angles_of("").frequencies == plain);
    CHECK(angles_of("").amplitude == 1.0);

    const auto linear = angles_of(", \"rope_scaling\": {\"type\": \"linear\", \"factor\": 4.0}");
    CHECK(linear.frequencies[7] == plain[7] / 4);

    // The first pair turns once in 6.3 tokens and stays; the last one once in 47118 and is stretched.
    const auto llama3 = angles_of(
        ", \"rope_scaling\": {\"rope_type\": \"llama3\", \"factor\": 8.0, \"low_freq_factor\": 1.0, "
        "\"high_freq_factor\": 4.0, "
        "\"original_max_position_embeddings\": 8192}");
    CHECK(llama3.frequencies.front() == plain.front());
    CHECK(llama3.frequencies.back() == doctest::Approx(plain.back() / 8));

    const auto yarn = angles_of(
        ", \"rope_scaling\": {\"type\": \"yarn\", \"factor\": 4.0, \"original_max_position_embeddings\": "
        "4096}");
    CHECK(yarn.frequencies.front() == plain.front());
    CHECK(yarn.frequencies.back() == doctest::Approx(plain.back() / 4));
    CHECK(yarn.amplitude == doctest::Approx(0.1 * std::log(4.0) + 1.0));

    CHECK(test::contains(test::message_of([&] { angles_of(", \"rope_scaling\": {\"type\": \"longrope\"}"); }),
                         "\"longrope\" is not handled"));

    test::gguf_writer file = m.gguf_values();
    file.add("llama.rope.scaling.type", "yarn");
    file.add("llama.rope.scaling.factor", 4.0f);
    file.add("llama.rope.scaling.original_context_length", 4096);
    m.add_tensors(file);
    test::write_file(folder / "yarn.gguf", file.file());
    const auto from_gguf = llama::load_model(folder / "yarn.gguf").config.rotary;
    CHECK(from_gguf.frequencies == yarn.frequencies);
    CHECK(from_gguf.amplitude == doctest::Approx(yarn.amplitude));

    // Llama 3.1 in GGUF files: a table of divisors.
    file = m.gguf_values();
    m.add_tensors(file);
    std::vector<float> divisors(32, 1.0f);
    divisors[31] = 8.0f;
    std::string bytes(reinterpret_cast<const char*>(divisors.data()), 128);
    file.tensor("rope_freqs.weight", {32}, 0, bytes);
    test::write_file(folder / "factors.gguf", file.file());
    const auto factors = llama::load_model(folder / "factors.gguf").config.rotary.frequencies;
    CHECK(factors[30] == plain[30]);
    CHECK(factors[31] == plain[31] / 8);

    // The whole path: a model with an amplitude against the textbook.
    m.frequencies = {yarn.frequencies};
    m.amplitude = yarn.amplitude;
    m.half_split = false;
    const std::vector<int> tokens = some_tokens(random, 9, m.vocab);
    CHECK(test::distance(test::logits_of(folder / "yarn.gguf", tokens), m.logits(tokens)) < 5e-5);
}

TEST_CASE("what is not handled is named") {
    test::generator random(1);
    const test::temporary_folder folder;
    tiny_model m;
    m.fill(random);
    const auto message_of_gguf = [&](const test::gguf_writer& file) {
        test::write_file(folder / "m.gguf", file.file());
        const std::string message = test::message_of([&] { llama::load_model(folder / "m.gguf"); });
        CHECK(test::contains(message, "m.gguf"));
        return message;
    };
    {
        tiny_model other = m;
        other.architecture = "mamba";
        CHECK(test::contains(message_of_gguf(other.gguf_values()),
                             "architecture is \"mamba\"; read are llama, mistral"));
    }
    {
        test::gguf_writer file = m.gguf_values();
        m.add_tensors(file, [](const std::string& name) { return name != "blk.1.attn_k.weight"; });
        CHECK(test::contains(message_of_gguf(file), "tensor \"blk.1.attn_k.weight\" is missing"));
        file.tensor("blk.1.attn_k.weight", {256, 128}, 17, std::string(256 * 128 / 256 * 74, '\0'));
        CHECK(test::contains(message_of_gguf(file), "tensor \"blk.1.attn_k.weight\" in \"" +
                                                        (folder / "m.gguf") +
                                                        "\" has the type IQ2_XS; read are F32"));
    }
    {
        test::gguf_writer file = m.gguf_values();
        m.add_tensors(file);
        file.tensor("blk.0.ffn_gate_inp.weight", {256, 8}, 0, std::string(256 * 8 * 4, '\0'));
        CHECK(test::contains(message_of_gguf(file), "tensor \"blk.0.ffn_gate_inp.weight\" in"));
    }
    {
        test::gguf_writer file = m.gguf_values();
        file.add("llama.attention.clamp_kqv", 8.0f);
        m.add_tensors(file);
        CHECK(test::contains(message_of_gguf(file), "\"llama.attention.clamp_kqv\" is not handled"));
    }
    {
        test::gguf_writer file = m.gguf_values();
        m.add_tensors(file, [](const std::string& name) { return name != "blk.0.attn_q.weight"; });
        file.tensor("blk.0.attn_q.weight", {256, 255}, 0, std::string(256 * 255 * 4, '\0'));
        CHECK(test::contains(message_of_gguf(file), "has the sizes 255 x 256, expected 256 x 256"));
    }
    const auto message_of_folder = [&](const std::string& more) {
        m.write_folder(folder, 0.0f, more);
        return test::message_of([&] { llama::load_model(folder.path()); });
    };
    CHECK(test::contains(message_of_folder(", \"partial_rotary_factor\": 0.5"),
                         "\"partial_rotary_factor\" is not 1"));
    CHECK(test::contains(message_of_folder(", \"rope_parameters\": {\"partial_rotary_factor\": 0.5}"),
                         "\"partial_rotary_factor\" is not 1"));
    CHECK(test::contains(message_of_folder(", \"quantization_config\": {}"),
                         "\"quantization_config\" is not handled"));
    CHECK(test::contains(message_of_folder(", \"hidden_act\": \"relu\""),
                         "activation \"relu\" is not handled"));
    CHECK(test::contains(message_of_folder(", \"num_hidden_layers\": 3"),
                         "tensor \"model.layers.2.input_layernorm.weight\" is missing"));
    CHECK(test::contains(message_of_folder(", \"vocab_size\": -3"),
                         "\"vocab_size\" is -3, expected an integer from 1 to"));
    CHECK(test::contains(message_of_folder(", \"model_type\": \"phi3\""), "architecture is \"phi3\""));
    m.architecture = "qwen2";  // which has biases
    CHECK(
        test::contains(message_of_folder(""), "tensor \"model.layers.0.self_attn.q_proj.bias\" is missing"));
}
