// Regular expressions of pre-tokenizers: the part of their syntax that tokenizers use, on Unicode code
// points.
//
//   a|b  (a)  (?:a)  (?i:a)  (?=a)  (?!a)  a?  a*  a+  a{2}  a{1,3}  a{2,}  each also lazy, with ? behind
//   .  [a-z]  [^a]  \s \S \d \D \p{L} \P{Lu}  \r \n \t  \x41 \x{41}
//     \' (any other character that is not a letter or digit)
//
// Matching tries the alternatives in order and goes back where one fails, as Perl does. (?i: ) ignores the
// case of ASCII letters.
#pragma once

#include "unicode.hpp"

#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace llama {

class text_pattern {
public:
    // Throws std::runtime_error that says which part of the expression is not understood.
    explicit text_pattern(std::string_view expression);

    static constexpr std::size_t no_match = static_cast<std::size_t>(-1);

    // The end of the match that begins at text[begin]. Throws std::runtime_error for a match of more than 100
    // million steps.
    std::size_t match(std::span<const char32_t> text, std::size_t begin) const;

private:
    friend class pattern_parser;

    // A set of code points.
    struct character_set {
        bool negated = false, white_space = false, no_white_space = false;
        category_set categories = 0, no_categories = 0;  // code points in these; code points outside of those
        std::vector<std::pair<char32_t, char32_t>> ranges;

        bool has(char32_t code_point) const;
    };
    // A program: `set` takes a code point, `fork` goes on at `first` and, if that fails, at `second`, `jump`
    // goes on at `first`. `look` asks whether the program from the next step on matches here (or does not:
    // `wanted`), then goes on at `first`.
    enum class kind { set, fork, jump, look, end };
    struct step {
        kind what;
        std::size_t first = 0, second = 0;
        bool wanted = true;
    };

    std::size_t run(std::span<const char32_t> text, std::size_t at, std::size_t pc,
                    std::size_t& budget) const;

    std::vector<character_set> sets_;
    std::vector<step> steps_;
};

// A part of a text: code points [begin, end).
struct text_part {
    std::size_t begin, end;
};

// Cuts every part into the matches of a pattern and what lies between them. A match sees nothing outside of
// its part.
std::vector<text_part> split(std::span<const char32_t> text, const std::vector<text_part>& parts,
                             const text_pattern& pattern);

}  // namespace llama
