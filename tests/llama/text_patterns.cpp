// SPDX-License-Identifier: MIT
// Categories of code points, and the expressions of pre-tokenizers.
#include <pre_tokenizer.hpp>
#include <text_pattern.hpp>
#include <unicode.hpp>

#include <doctest/doctest.h>

#include "run_model.hpp"

namespace {

using strings = std::vector<std::string>;

strings parts_of(const std::vector<std::string_view>& expressions, const std::string& text) {
    const llama::decoded_text decoded = llama::decode_utf8(text);
    std::vector<llama::text_part> parts{{0, decoded.code_points.size()}};
    for (const std::string_view expression : expressions)
        parts = llama::split(decoded.code_points, parts, llama::text_pattern(expression));
    strings pieces;
    for (const llama::text_part& part : parts)
        pieces.push_back(text.substr(decoded.offsets[part.begin],
                                     decoded.offsets[part.end] - decoded.offsets[part.begin]));
    return pieces;
}
strings named(const char* name, const std::string& text) {
    return parts_of(llama::find_pre_tokenizer(name).expressions, text);
}

}  // namespace

TEST_CASE("categories are those of Unicode 14") {
    const auto is = [](char32_t c, const char* name) {
        return (llama::category_of(c) & llama::find_category(name)) != 0;
    };
    CHECK(is(U'A', "Lu"));
    CHECK(is(U'z', "Ll"));
    CHECK(is(0x0100, "Lu"));  // in a run where cases alternate
    CHECK(is(0x0101, "Ll"));
    CHECK(is(0x01C5, "Lt"));
    CHECK(is(0x4E00, "Lo"));
    CHECK(is(0x0301, "Mn"));
    CHECK(is(0x0660, "Nd"));
    CHECK(is(0x00BD, "No"));
    CHECK(is(0x3000, "Zs"));
    CHECK(is(U'_', "Pc"));
    CHECK(is(U'+', "Sm"));
    CHECK(!is(0x1F600, "L"));
    CHECK(is(0x1F600, "So"));
    CHECK(llama::find_category("X") == 0);
    // Counted in the database itself: sum(1 for c in range(0x110000) if category(chr(c))[0] == "L").
    int letters = 0, numbers = 0, marks = 0;
    for (char32_t c = 0; c < 0x110000; ++c) {
        letters += is(c, "L");
        numbers += is(c, "N");
        marks += is(c, "P");
    }
    CHECK(letters == 131756);
    CHECK(numbers == 1791);
    CHECK(marks == 819);
    CHECK(llama::is_white_space(0x00A0));
    CHECK(!llama::is_white_space(0x200B));
}

TEST_CASE("bytes that are not UTF-8 are code points of their own") {
    const llama::decoded_text text = llama::decode_utf8("a\xC3\xA9\xFF\xE2\x82\xC0\x80");
    CHECK(text.code_points ==
          std::vector<char32_t>{U'a', U'\u00E9', 0x1100FF, 0x1100E2, 0x110082, 0x1100C0, 0x110080});
    CHECK(text.offsets == std::vector<std::size_t>{0, 1, 3, 4, 5, 6, 7, 8});
    CHECK(llama::decode_utf8("\xED\xA0\x80").code_points.size() == 3);  // a surrogate
    std::string round;
    for (const char32_t c : {U'a', U'\u00E9', U'\u20AC', U'\U0001F600'}) llama::append_utf8(round, c);
    CHECK(round == "a\u00E9\u20AC\U0001F600");
}

TEST_CASE("expressions match as in Perl") {
    const auto end = [](const char* expression, const char* text) {
        const llama::decoded_text decoded = llama::decode_utf8(text);
        const std::size_t found = llama::text_pattern(expression).match(decoded.code_points, 0);
        return found == llama::text_pattern::no_match ? -1 : static_cast<int>(found);
    };
    CHECK(end("a|ab", "ab") == 1);  // the first alternative, not the longest
    CHECK(end("(?:a|ab)c", "abc") == 3);
    CHECK(end("a*ab", "aaab") == 4);
    CHECK(end("a*?b?", "aab") == 0);
    CHECK(end("a{2,3}", "aaaa") == 3);
    CHECK(end("a{2}", "a") == -1);
    CHECK(end("a{2,}b", "aaaab") == 5);
    CHECK(end("(ab)+", "ababa") == 4);
    CHECK(end("[^a-c]", "b") == -1);
    CHECK(end("[\\]a-]+", "a]-b") == 3);
    CHECK(end("\\s+(?!\\S)", "   x") == 2);
    CHECK(end("\\s+(?=x)", "  x") == 2);
    CHECK(end("(?i:'s)", "'S") == 2);
    CHECK(end("(?i:'s)t", "'sT") == -1);  // the case matters again behind the group
    CHECK(end("\\p{Lu}\\p{Ll}*", "\u00C9t\u00E92") == 3);
    CHECK(end("[\\P{L}]", "x") == -1);
    CHECK(end("\\x{20AC}\\x41", "\u20ACA") == 2);
    CHECK(end(".", "\n") == -1);
    CHECK(end("", "x") == 0);
    for (const char* const wrong :
         {"(a", "a)", "[a", "a**", "*a", "a{3,2}", "\\", "\\p{Qq}", "(?<=a)", "^a", "a$", "\\b", "a++",
          "(a*)*", "[[:alpha:]]", "[z-a]", "a{99999}", "(?P<x>a)", "\\p{"}) {
        CAPTURE(wrong);
        CHECK(test::contains(test::message_of([&] { llama::text_pattern pattern(wrong); }),
                             "the expression \""));
    }
    CHECK(test::contains(test::message_of([&] { llama::text_pattern pattern(std::string(100, '(')); }),
                         "nested"));
    CHECK(test::contains(
        test::message_of([&] { llama::text_pattern pattern("((((a{999}){999}){999}){999})"); }), "steps"));
}

TEST_CASE("pre-tokenizers cut as those of the models do") {
    const std::string text = "Hello World's 12345  \n\n  \u00E9t\u00E9!? \u4F60\u597D'LL\tx ";
    CHECK(named("llama-bpe", text) == strings{"Hello", " World", "'s", " ", "123", "45", "  \n\n", " ",
                                              " \u00E9t\u00E9", "!?", " \u4F60\u597D", "'LL", "\tx", " "});
    CHECK(named("qwen2", text) == strings{"Hello", " World", "'s", " ", "1", "2", "3", "4", "5", "  \n\n",
                                          " ", " \u00E9t\u00E9", "!?", " \u4F60\u597D", "'LL", "\tx", " "});
    CHECK(named("gpt-2", text) == strings{"Hello", " World", "'s", " 12345", "  \n\n ", " \u00E9t\u00E9",
                                          "!?", " \u4F60\u597D", "'", "LL", "\t", "x", " "});
    // Punctuation first, then words, then numbers, then three digits at a time.
    CHECK(named("default", "a1234+b, 'tis") == strings{"a", "123", "4", "+", "b", ",", " ", "'", "tis"});
    CHECK(named("smollm", "ab 12") == strings{"ab", " ", "1", "2"});
    CHECK(named("tekken", "HelloWorld ABCdef") == strings{"Hello", "World", " ABCdef"});
    CHECK(test::contains(test::message_of([] { llama::find_pre_tokenizer("viking"); }),
                         "\"viking\"; read are default"));
}
