#include "text_pattern.hpp"

#include <algorithm>
#include <stdexcept>
#include <tuple>

namespace llama {

bool text_pattern::character_set::has(char32_t code_point) const {
    const category_set category = category_of(code_point);
    bool found = (category & categories) != 0 || (no_categories != 0 && (category & no_categories) == 0) ||
                 (white_space && is_white_space(code_point)) ||
                 (no_white_space && !is_white_space(code_point));
    for (const auto& [low, high] : ranges) {
        found = found || (code_point >= low && code_point <= high);
    }
    return found != negated;
}

// Descends through the expression and writes steps. A part of the program is relocatable: its jumps count
// from its begin.
class pattern_parser {
public:
    using step = text_pattern::step;
    using kind = text_pattern::kind;
    using program = std::vector<step>;

    pattern_parser(std::string_view expression, text_pattern& pattern)
        : expression_(expression), text_(decode_utf8(expression).code_points), pattern_(pattern) {}

    program parse() {
        program all = alternatives(0);
        if (at_ < text_.size()) {
            refuse("has a ) without (");
        }
        all.push_back({kind::end});
        return all;
    }

private:
    static constexpr std::size_t most_steps = 20000;

    [[noreturn]] void refuse(const std::string& reason) const {
        throw std::runtime_error("the expression \"" + std::string(expression_) + "\" " + reason);
    }
    bool more() const { return at_ < text_.size(); }
    bool takes(char32_t expected) {
        const bool found = more() && text_[at_] == expected;
        at_ += found ? 1 : 0;
        return found;
    }
    char32_t take() {
        if (!more()) {
            refuse("ends too early");
        }
        return text_[at_++];
    }

    void append(program& to, const program& part) const {
        const std::size_t shift = to.size();
        if (shift + part.size() > most_steps) {
            refuse("needs more than " + std::to_string(most_steps) + " steps");
        }
        for (step each : part) {
            each.first += each.what == kind::set ? 0 : shift;
            each.second += shift;
            to.push_back(each);
        }
    }

    program alternatives(int depth) {
        if (depth > 50) {
            refuse("is nested more than 50 times");
        }
        program left = sequence(depth);
        while (takes('|')) {
            // fork: left, jump behind right; right
            const program right = sequence(depth);
            program both{{kind::fork, 1, left.size() + 2}};
            append(both, left);
            both.push_back({kind::jump, left.size() + right.size() + 2});
            append(both, right);
            left = std::move(both);
        }
        return left;
    }

    program sequence(int depth) {
        program all;
        while (more() && text_[at_] != '|' && text_[at_] != ')') {
            append(all, quantified(atom(depth)));
        }
        return all;
    }

    program atom(int depth) {
        const char32_t c = take();
        if (c == '(') {
            return group(depth);
        }
        text_pattern::character_set set;
        if (c == '[') {
            set = bracket();
        } else if (c == '\\') {
            escape(set);
        } else if (c == '.') {
            set.negated = true;
            set.ranges.emplace_back(U'\n', U'\n');
        } else if (std::u32string_view(U"^$*+?{").find(c) != std::u32string_view::npos) {
            refuse(std::string("has a ") + static_cast<char>(c) + " that is not understood, at character " +
                   std::to_string(at_));
        } else {
            set.ranges.emplace_back(c, c);
        }
        return single(std::move(set));
    }

    program single(text_pattern::character_set set) {
        if (ignore_case_) {
            for (std::size_t i = set.ranges.size(); i-- > 0;) {
                const auto [low, high] = set.ranges[i];
                for (char32_t c = std::max(low, U'A'); c <= std::min(high, U'z'); ++c) {
                    const char32_t swapped = c ^ 0x20;
                    if ((c <= 'Z' || c >= 'a')) {
                        set.ranges.emplace_back(swapped, swapped);
                    }
                }
            }
        }
        pattern_.sets_.push_back(std::move(set));
        return {{kind::set, pattern_.sets_.size() - 1}};
    }

    program group(int depth) {
        const bool outer_case = ignore_case_;
        bool looks = false, wanted = true;
        if (takes('?')) {
            const char32_t what = take();
            if (what == 'i') {
                ignore_case_ = true;
                if (take() != ':') {
                    refuse("has a group that is not understood, at character " + std::to_string(at_));
                }
            } else if (what == '=' || what == '!') {
                looks = true;
                wanted = what == '=';
            } else if (what != ':') {
                refuse("has a group that is not understood, at character " + std::to_string(at_));
            }
        }
        program inner = alternatives(depth + 1);
        if (!takes(')')) {
            refuse("has a ( without )");
        }
        ignore_case_ = outer_case;
        if (!looks) {
            return inner;
        }
        program all{{kind::look, inner.size() + 2, 0, wanted}};
        append(all, inner);
        all.push_back({kind::end});
        return all;
    }

    program quantified(program part) {
        std::size_t least = 1, most = 1;
        const std::size_t begin = at_;
        constexpr std::size_t any = text_pattern::no_match;
        if (takes('?')) {
            least = 0;
        } else if (takes('*')) {
            least = 0;
            most = any;
        } else if (takes('+')) {
            most = any;
        } else if (takes('{')) {
            least = number();
            most = least;
            if (takes(',')) {
                most = more() && text_[at_] == '}' ? any : number();
            }
            if (!takes('}') || most < least) {
                refuse("has a { that is not understood, at character " + std::to_string(begin + 1));
            }
        } else {
            return part;
        }
        const bool lazy = takes('?');
        if (more() && text_[at_] == '+') {
            refuse("has a possessive quantifier, which is not understood, at character " +
                   std::to_string(at_ + 1));
        }
        // A loop over something that may match nothing would not end.
        if (most == any && !always_takes(part)) {
            refuse("repeats something that may be empty, at character " + std::to_string(begin + 1));
        }
        program all;
        for (std::size_t i = 0; i < least; ++i) {
            append(all, part);
        }
        const auto fork = [&](std::size_t inside, std::size_t behind) {
            return lazy ? step{kind::fork, behind, inside} : step{kind::fork, inside, behind};
        };
        if (most == any) {
            // loop: fork to the part or behind; part; jump to loop
            program loop{fork(1, part.size() + 2)};
            append(loop, part);
            loop.push_back({kind::jump, 0});
            append(all, loop);
        } else {
            for (std::size_t i = least; i < most; ++i) {
                program maybe{fork(1, part.size() + 1)};
                append(maybe, part);
                append(all, maybe);
            }
        }
        return all;
    }

    // Does every way through the part take a code point?
    static bool always_takes(const program& part) {
        std::vector<bool> seen(part.size(), false);
        std::vector<std::size_t> open{0};
        while (!open.empty()) {
            const std::size_t pc = open.back();
            open.pop_back();
            if (pc >= part.size()) {
                return false;
            }
            if (seen[pc] || part[pc].what == kind::set) {
                continue;
            }
            seen[pc] = true;
            open.push_back(part[pc].first);
            if (part[pc].what == kind::fork) {
                open.push_back(part[pc].second);
            }
        }
        return true;
    }

    std::size_t number() {
        std::size_t value = 0, digits = 0;
        for (; more() && text_[at_] >= '0' && text_[at_] <= '9' && digits < 4; ++digits) {
            value = 10 * value + (take() - U'0');
        }
        if (digits == 0) {
            refuse("lacks a number at character " + std::to_string(at_ + 1));
        }
        return value;
    }

    text_pattern::character_set bracket() {
        text_pattern::character_set set;
        set.negated = takes('^');
        for (bool first = true; first || !takes(']'); first = false) {
            char32_t low = take();
            if (low == '[' || (low == '&' && more() && text_[at_] == '&')) {
                refuse("has a set in a set, which is not understood, at character " + std::to_string(at_));
            }
            if (low == '\\' && !escape_one(set, low)) {
                continue;
            }
            char32_t high = low;
            if (at_ + 1 < text_.size() && text_[at_] == '-' && text_[at_ + 1] != ']') {
                ++at_;
                high = take();
                if (high == '\\' && !escape_one(set, high)) {
                    refuse("has a range that ends in a set, at character " + std::to_string(at_));
                }
            }
            if (high < low) {
                refuse("has a range that runs backwards, at character " + std::to_string(at_));
            }
            set.ranges.emplace_back(low, high);
        }
        return set;
    }

    void escape(text_pattern::character_set& set) {
        char32_t one = 0;
        if (escape_one(set, one)) {
            set.ranges.emplace_back(one, one);
        }
    }

    // Behind a backslash: adds a set and returns false, or stores one code point and returns true.
    bool escape_one(text_pattern::character_set& set, char32_t& one) {
        const char32_t c = take();
        switch (c) {
            case 's':
                set.white_space = true;
                return false;
            case 'S':
                set.no_white_space = true;
                return false;
            case 'd':
                set.categories |= find_category("Nd");
                return false;
            case 'D':
                add_complement(set, find_category("Nd"));
                return false;
            case 'p':
                set.categories |= category();
                return false;
            case 'P':
                add_complement(set, category());
                return false;
            case 'r':
                one = U'\r';
                return true;
            case 'n':
                one = U'\n';
                return true;
            case 't':
                one = U'\t';
                return true;
            case 'x':
                one = hexadecimal();
                return true;
            default:
                if (c < 0x80 && (category_of(c) & (find_category("L") | find_category("N"))) != 0) {
                    refuse(std::string("has \\") + static_cast<char>(c) + ", which is not understood");
                }
                one = c;
                return true;
        }
    }

    void add_complement(text_pattern::character_set& set, category_set outside) const {
        if (set.no_categories != 0) {
            refuse("has two complements in a set, which is not understood, at character " +
                   std::to_string(at_));
        }
        set.no_categories = outside;
    }

    category_set category() {
        std::string name;
        if (takes('{')) {
            while (!takes('}')) {
                append_utf8(name, take());
            }
        } else {
            append_utf8(name, take());
        }
        const category_set set = find_category(name);
        if (set == 0) {
            refuse("has the category " + name + ", which is not known");
        }
        return set;
    }

    char32_t hexadecimal() {
        const bool braces = takes('{');
        char32_t value = 0;
        for (int digits = 0; braces ? !takes('}') : digits < 2; ++digits) {
            const char32_t c = take();
            const bool digit = c >= '0' && c <= '9';
            const char32_t letter = c | 0x20;
            if ((!digit && (letter < 'a' || letter > 'f')) || digits > 6) {
                refuse("has an impossible number at character " + std::to_string(at_));
            }
            value = 16 * value + (digit ? c - U'0' : letter - U'a' + 10);
        }
        return value;
    }

    std::string_view expression_;
    std::vector<char32_t> text_;
    text_pattern& pattern_;
    std::size_t at_ = 0;
    bool ignore_case_ = false;
};

text_pattern::text_pattern(std::string_view expression) {
    steps_ = pattern_parser(expression, *this).parse();
}

std::size_t text_pattern::match(std::span<const char32_t> text, std::size_t begin) const {
    std::size_t budget = 100'000'000;
    return run(text, begin, 0, budget);
}

std::size_t text_pattern::run(std::span<const char32_t> text, std::size_t at, std::size_t pc,
                              std::size_t& budget) const {
    std::vector<std::pair<std::size_t, std::size_t>> others;  // step and place of alternatives that are left
    others.reserve(16);
    for (;;) {
        if (budget-- == 0) {
            throw std::runtime_error(
                "a match of a pre-tokenizer's expression takes more than 100 million steps");
        }
        const step& now = steps_[pc];
        bool failed = false;
        switch (now.what) {
            case kind::end:
                return at;
            case kind::set:
                failed = at == text.size() || !sets_[now.first].has(text[at]);
                ++at;
                ++pc;
                break;
            case kind::fork:
                others.emplace_back(now.second, at);
                pc = now.first;
                break;
            case kind::jump:
                pc = now.first;
                break;
            case kind::look:
                failed = (run(text, at, pc + 1, budget) != no_match) != now.wanted;
                pc = now.first;
                break;
        }
        if (failed) {
            if (others.empty()) {
                return no_match;
            }
            std::tie(pc, at) = others.back();
            others.pop_back();
        }
    }
}

std::vector<text_part> split(std::span<const char32_t> text, const std::vector<text_part>& parts,
                             const text_pattern& pattern) {
    std::vector<text_part> pieces;
    for (const text_part& part : parts) {
        const auto inside = text.first(part.end);
        std::size_t rest = part.begin;
        for (std::size_t at = part.begin; at < part.end;) {
            const std::size_t end = pattern.match(inside, at);
            if (end == text_pattern::no_match || end == at) {
                ++at;
                continue;
            }
            if (rest < at) {
                pieces.push_back({rest, at});
            }
            pieces.push_back({at, end});
            rest = at = end;
        }
        if (rest < part.end) {
            pieces.push_back({rest, part.end});
        }
    }
    return pieces;
}

}  // namespace llama
