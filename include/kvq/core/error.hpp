// Errors: one exception type, raised in one place.
//
// Bad shapes, sizes and arguments raise kvq::error with the offending numbers in the message, before anything
// is changed. Running out of memory or of a byte budget raises kvq::out_of_memory (a std::bad_alloc).
// With exceptions switched off the message goes to a handler that must not return (default: print and abort).
#pragma once

#include <cstdio>
#include <cstdlib>
#include <new>
#include <stdexcept>
#include <string>

#include "text.hpp"

namespace kvq::inline v0_2 {

/// Bad argument or state. The message is one sentence that contains the numbers.
class error : public std::invalid_argument {
public:
    KVQ_NO_COPY explicit error(const char* message) : std::invalid_argument(message) {}
    KVQ_NO_COPY explicit error(const std::string& message) : std::invalid_argument(message) {}
};

/// No memory, or the byte budget of a page pool would be exceeded. Nothing was changed.
class out_of_memory : public std::bad_alloc {
public:
    KVQ_NO_COPY explicit out_of_memory(const char* message) : message_(message) {}
    KVQ_NO_COPY out_of_memory(std::size_t wanted, std::size_t in_use, std::size_t budget)
        : message_("kvq: a page of " + std::to_string(wanted) +
                   " bytes does not fit: " + std::to_string(in_use) + " of a budget of " +
                   std::to_string(budget) + " bytes are in use") {}
    /// The same when the memory was allocated up front: `longest` bytes are free in one range.
    KVQ_NO_COPY out_of_memory(std::size_t wanted, std::size_t in_use, std::size_t budget, std::size_t longest)
        : out_of_memory(wanted, in_use, budget) {
        message_ += ", and the longest free range has " + std::to_string(longest);
    }
    const char* what() const noexcept override { return message_.c_str(); }

private:
    std::string message_;
};

/// Called instead of throwing when exceptions are off. Must not return.
using error_handler = void (*)(const char* message);

inline error_handler& current_error_handler() noexcept {
    static error_handler handler = [](const char* message) {
        std::fprintf(stderr, "%s\n", message);
        std::abort();
    };
    return handler;
}

}  // namespace kvq::inline v0_2

namespace kvq::inline KVQ_TAGGED::detail {

template <class Error, class... Args>
[[noreturn]] inline void raise(Args&&... args) {
#if KVQ_EXCEPTIONS
    throw Error(static_cast<Args&&>(args)...);
#else
    current_error_handler()(Error(static_cast<Args&&>(args)...).what());
    std::abort();
#endif
}

template <class Part>
short_text to_text(const Part& part) {
    if constexpr (std::is_arithmetic_v<Part>)
        return short_text::of(part);
    else
        return short_text(part);
}

template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
    short_text message = "kvq: ";
    ((message += to_text(parts)), ...);
    raise<error>(message.c_str());
}

/// Raises kvq::error with all arguments joined, unless `condition` holds.
template <class... Parts>
constexpr void expect(bool condition, const Parts&... parts) {
    if (!condition) [[unlikely]]
        fail(parts...);
}

}  // namespace kvq::inline KVQ_TAGGED::detail
