// SPDX-License-Identifier: MIT
// What an error says.
#pragma once

#include <kvq/core/error.hpp>
#include <string>

namespace test {

/// The message of the kvq::error that f() raises; empty if it raises none.
template <class F>
std::string message_of(F&& f) {
    try {
        f();
    } catch (const kvq::error& e) {
        return e.what();
    }
    return {};
}
inline bool contains(const std::string& text, const char* part) {
    return text.find(part) != std::string::npos;
}

}  // namespace test
