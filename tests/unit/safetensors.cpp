// SPDX-License-Identifier: MIT
// Comparison family: exact. The container takes what the format allows and nothing else; the checksum is
// CRC32C.
#include <doctest/doctest.h>

#include <cstring>
#include <kvq/io/safetensors.hpp>
#include <string>

#include "support/random.hpp"

namespace safetensors_tests {

namespace {

std::string file_of(const std::string& json) {
    std::string bytes(8, '\0');
    const std::uint64_t length = json.size();
    std::memcpy(bytes.data(), &length, 8);
    return bytes + json;
}

kvq::safetensors_header parsed(const std::string& file) {
    std::size_t position = 0;
    const auto read = [&](void* to, std::size_t n) {
        n = std::min(n, file.size() - position);
        std::memcpy(to, file.data() + position, n);
        position += n;
        return n;
    };
    return kvq::read_safetensors_header(read);
}

std::string message_of(const std::string& file) {
    try {
        parsed(file);
    } catch (const kvq::error& e) {
        return e.what();
    }
    return {};
}

std::string nested(int depth) {
    std::string s = R"({"a":)";
    for (int i = 0; i < depth; ++i) s += "[";
    return s;
}

}  // namespace

TEST_CASE("CRC32C has the values of RFC 3720, whatever the pieces") {
    CHECK(kvq::crc32c::of("123456789", 9) == 0xe3069283u);
    unsigned char bytes[32] = {};
    CHECK(kvq::crc32c::of(bytes, 32) == 0x8a9136aau);
    std::memset(bytes, 0xff, 32);
    CHECK(kvq::crc32c::of(bytes, 32) == 0x62a8ab43u);
    for (unsigned char i = 0; i < 32; ++i) bytes[i] = i;
    CHECK(kvq::crc32c::of(bytes, 32) == 0x46dd794eu);
    for (unsigned char i = 0; i < 32; ++i) bytes[i] = static_cast<unsigned char>(31 - i);
    CHECK(kvq::crc32c::of(bytes, 32) == 0x113fdb5cu);
    CHECK(kvq::crc32c::of(nullptr, 0) == 0);
    for (std::size_t first = 0; first <= 32; ++first)
        for (std::size_t second = first; second <= 32; ++second) {
            kvq::crc32c c;
            c.add(bytes, first);
            c.add(bytes + first, second - first);
            c.add(bytes + second, 32 - second);
            CHECK(c.value() == 0x113fdb5cu);
        }
}

TEST_CASE("a header that was written is read as it was") {
    kvq::safetensors_header h;
    h.metadata = {{"model", "a \"name\"\n\\ \xc3\xa4 \xf0\x9f\x99\x82"}, {"", "empty name"}};
    h.tensors = {{"b", "U8", {3, 5}, 0, 0},
                 {"a", "F16", {}, 0, 0},
                 {"none", "I32", {4, 0}, 0, 0},
                 {"c", "I64", {2}, 0, 0}};
    const std::string file = kvq::write_safetensors_header(h);
    CHECK(file.size() % 8 == 0);
    CHECK(h.data_bytes() == 15 + 2 + 16);
    const auto back = parsed(file);
    CHECK(back.metadata == h.metadata);
    REQUIRE(back.tensors.size() == 4);
    for (std::size_t i = 0; i < 4; ++i) {
        CHECK(back.tensors[i].name == h.tensors[i].name);
        CHECK(back.tensors[i].dtype == h.tensors[i].dtype);
        CHECK(back.tensors[i].shape == h.tensors[i].shape);
        CHECK(back.tensors[i].begin == h.tensors[i].begin);
        CHECK(back.tensors[i].end == h.tensors[i].end);
    }
    kvq::safetensors_header empty;
    CHECK(parsed(kvq::write_safetensors_header(empty)).tensors.empty());
}

TEST_CASE("what cannot be written is refused") {
    kvq::safetensors_header h;
    h.tensors = {{"a", "U8", {3}, 0, 0}, {"a", "U8", {3}, 0, 0}};
    CHECK_THROWS_AS(kvq::write_safetensors_header(h), kvq::error);
    h.tensors = {{"a", "U9", {3}, 0, 0}};
    CHECK_THROWS_AS(kvq::write_safetensors_header(h), kvq::error);
    h.tensors = {{"a", "U8", {1ull << 40, 1ull << 40}, 0, 0}};
    CHECK_THROWS_AS(kvq::write_safetensors_header(h), kvq::error);
    h.tensors = {};
    h.metadata = {{"model", "\xff\xfe"}};
    CHECK_THROWS_AS(kvq::write_safetensors_header(h), kvq::error);
}

TEST_CASE("a header of very many short names, texts or sizes is refused, written and read") {
    const auto message = [](const std::string& of_tensors) {
        return message_of(file_of("{" + of_tensors + "}"));
    };
    const auto many = [](int n, const char* behind_name) {
        std::string text;
        for (int i = 0; i < n; ++i) text += (i > 0 ? ",\"" : "\"") + std::to_string(i) + "\"" + behind_name;
        return text;
    };
    const char* const tensor = R"(:{"dtype":"U8","shape":[0],"data_offsets":[0,0]})";
    constexpr auto most = static_cast<int>(kvq::safetensors_header::most_names);
    CHECK(message(many(most, tensor)).empty());
    CHECK(message(many(most + 1, tensor)).find("more than 100000 tensors") != std::string::npos);
    CHECK(message("\"__metadata__\":{" + many(most, ":\"\"") + "}").empty());
    CHECK(message("\"__metadata__\":{" + many(most + 1, ":\"\"") + "}").find("more than 100000 texts") !=
          std::string::npos);
    const auto shape = [](int sizes) {
        std::string text = R"("a":{"dtype":"U8","shape":[1)";
        for (int i = 1; i < sizes; ++i) text += ",1";
        return text + R"(],"data_offsets":[0,1]})";
    };
    CHECK(message(shape(16)).empty());
    CHECK(message(shape(17)).find("more than 16 numbers") != std::string::npos);

    kvq::safetensors_header h;
    for (int i = 0; i <= most; ++i) h.metadata[std::to_string(i)] = "";
    CHECK_THROWS_AS(kvq::write_safetensors_header(h), kvq::error);
    h = {};
    h.tensors = {{"a", "U8", std::vector<std::uint64_t>(17, 1), 0, 0}};
    CHECK_THROWS_AS(kvq::write_safetensors_header(h), kvq::error);
    h.tensors = {};
    h.tensors.resize(static_cast<std::size_t>(most) + 1);
    CHECK_THROWS_AS(kvq::write_safetensors_header(h), kvq::error);
}

TEST_CASE("what the format does not allow is refused with a sentence") {
    const auto refused = [](const std::string& file, const char* part) {
        const std::string message = message_of(file);
        INFO(file.substr(0, 200));
        INFO(message);
        CHECK(message.rfind("kvq: ", 0) == 0);
        CHECK(message.find(part) != std::string::npos);
    };
    refused("", "truncated");
    refused("short", "truncated");
    refused("This is a text and not a file of tensors.", "not a safetensors file");
    refused(std::string(8, '\0'), "not a safetensors file");
    refused(std::string(8, '\xff'), "not a safetensors file");
    refused(file_of("[1, 2]"), "does not begin with {");
    refused(file_of("{}").substr(0, 9), "truncated");
    std::string huge = file_of("{}");
    huge[3] = 5;  // 83 886 082 bytes, of which two are there
    refused(huge, "truncated");

    const auto tensor = [](const std::string& inside) { return file_of(R"({"a":{)" + inside + "}}"); };
    CHECK(message_of(tensor(R"("dtype":"U8","shape":[2],"data_offsets":[0,2])")).empty());
    refused(tensor(R"("dtype":"U8","shape":[-2],"data_offsets":[0,2])"), "negative");
    refused(tensor(R"("dtype":"U8","shape":[2.5],"data_offsets":[0,2])"), "fraction");
    refused(tensor(R"("dtype":"U8","shape":[99999999999999999999],"data_offsets":[0,2])"), "too large");
    refused(tensor(R"("dtype":"U8","shape":[2],"data_offsets":[0,-2])"), "negative");
    refused(tensor(R"("dtype":"U8","shape":[2],"data_offsets":[2,0])"), "before it begins");
    refused(tensor(R"("dtype":"U8","shape":[3],"data_offsets":[0,2])"), "3 bytes but data of 2");
    refused(tensor(R"("dtype":"U8","shape":[2],"data_offsets":[0])"), "1 data offsets");
    refused(tensor(R"("dtype":"U8","shape":[2],"data_offsets":[0,2,3])"), "3 data offsets");
    refused(tensor(R"("dtype":"U8","shape":[4294967296,4294967296,16],"data_offsets":[0,0])"),
            "more elements");
    refused(tensor(R"("dtype":"Q4","shape":[2],"data_offsets":[0,2])"), "unknown dtype");
    refused(tensor(R"("dtype":8,"shape":[2],"data_offsets":[0,2])"), "a number");
    refused(tensor(R"("dtype":"U8","shape":2,"data_offsets":[0,2])"), "a number");
    refused(tensor(R"("dtype":"U8","shape":["2"],"data_offsets":[0,2])"), "text");
    refused(tensor(R"("dtype":"U8","shape":[[2]],"data_offsets":[0,2])"), "a list");
    refused(tensor(R"("dtype":"U8","shape":[{}],"data_offsets":[0,2])"), "an object");
    refused(tensor(R"("dtype":{"x":1},"shape":[2],"data_offsets":[0,2])"), "an object");
    refused(tensor(R"("dtype":null,"shape":[2],"data_offsets":[0,2])"), "null");
    refused(tensor(R"("dtype":"U8","shape":[true],"data_offsets":[0,2])"), "boolean");
    refused(tensor(R"("dtype":"U8","shape":[2])"), "nothing else");
    refused(tensor(R"("dtype":"U8","shape":[2],"data_offsets":[0,2],"more":"text")"), "has more");
    refused(tensor(R"("dtype":"U8","shape":[2],"shape":[2],"data_offsets":[0,2])"), "is duplicated");
    refused(
        file_of(
            R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"a":{"dtype":"U8","shape":[2],"data_offsets":[2,4]}})"),
        "is duplicated");
    refused(
        file_of(
            R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}})"),
        "the one before ends at 2");
    refused(
        file_of(
            R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[2],"data_offsets":[3,5]}})"),
        "the one before ends at 2");
    refused(tensor(R"("dtype":"U8","shape":[2],"data_offsets":[8,10])"), "the one before ends at 0");
    refused(file_of(R"({"__metadata__":{"a":1}})"), "a number");
    refused(file_of(R"({"__metadata__":{"a":["x"]}})"), "a list");
    refused(file_of(R"({"__metadata__":{"a":"x","a":"y"}})"), "is duplicated");
    refused(file_of(R"({"__metadata__":{},"__metadata__":{}})"), "is duplicated");
    refused(file_of(R"({"__metadata__":"x"})"), "text");
    refused(file_of(R"({"a":[1]})"), "a list");
    refused(file_of(R"({"a":7})"), "a number");
    refused(file_of("{} {}"), "not JSON");
    refused(file_of("{}\n}"), "not JSON");
    refused(file_of("{\"a\xff\":{}}"), "not JSON");
    refused(file_of(std::string("{\"a\":\0}", 7)), "not JSON");
    refused(file_of(nested(1)), "a list");
    refused(file_of(nested(1'000'000)), "a list");
    std::string objects = "{";
    for (int i = 0; i < 100'000; ++i) objects += R"("a":{)";
    refused(file_of(objects), "has a");
}

TEST_CASE("random changes of a header end in a header or in kvq::error, never in anything else") {
    const auto seed = test::seed();
    INFO("KVQ_SEED=", seed);
    test::generator random(seed);
    const std::string good = file_of(
        R"({"__metadata__":{"format":"pt"},"a":{"dtype":"U8","shape":[2,3],"data_offsets":[0,6]},"b":{"dtype":"F32","shape":[],"data_offsets":[6,10]}})");
    REQUIRE(message_of(good).empty());
    int refused = 0;
    const std::string alphabet = "{}[]\",:0123456789-.eE \\ntrufals\xc3";
    for (int round = 0; round < 20000; ++round) {
        std::string file = good;
        for (int changes = random.between(1, 4); changes > 0; --changes) {
            const auto at = static_cast<std::size_t>(random.between(8, static_cast<int>(file.size()) - 1));
            file[at] = alphabet[random.bits() % alphabet.size()];
        }
        refused += !message_of(file).empty();
    }
    CHECK(refused > 10000);
    CHECK(refused < 20000);
}

}  // namespace safetensors_tests
