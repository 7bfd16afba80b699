// Errors: what kvq raises has one base, and is raised in one place.
//
//   kvq::error              the base: catch (const kvq::error& e) takes everything that kvq raises itself;
//                           e.what() says why
//     kvq::argument_error   a std::invalid_argument: bad shapes, sizes, arguments and states, with the
//                           numbers in the message
//     kvq::out_of_memory    a std::bad_alloc: no room in a byte budget
//
// All are raised before anything is changed. Memory that the system or a memory resource refuses is a
// std::bad_alloc of theirs, so a handler of std::bad_alloc, before that of kvq::error, takes all that ends
// when memory is freed:
//
//   try { step(); }
//   catch (const std::bad_alloc&) { make room and try again }
//   catch (const kvq::error& e) { refuse the request, with e.what() }
//
// Contract: each type has one std::exception, so a handler of std::exception takes all of them; therefore
// kvq::error is none itself. With exceptions switched off the message goes to a handler that must not return
// (default: print and abort).
#pragma once

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>

#include "text.hpp"

namespace kvq { inline namespace v0_3 {

/// What kvq raises: an argument_error or out_of_memory. It has no virtual functions: a type with two tables
/// of them would have a destructor with vector instructions, which objects of several instruction sets share.
class error {
public:
    /// One sentence with the numbers.
    KVQ_NO_COPY const char* what() const noexcept { return message_; }

    error(const error&) = delete;
    error& operator=(const error&) = delete;

protected:
    KVQ_NO_COPY error() noexcept = default;
    ~error() = default;
    /// message: as long as this object lives.
    KVQ_NO_COPY void say(const char* message) noexcept { message_ = message; }

private:
    const char* message_ = "";
};

/// Bad argument or state.
class argument_error : public std::invalid_argument, public error {
public:
    KVQ_NO_COPY explicit argument_error(const char* message) : std::invalid_argument(message) { say(what()); }
    KVQ_NO_COPY explicit argument_error(const std::string& message) : std::invalid_argument(message) {
        say(what());
    }
    KVQ_NO_COPY argument_error(const argument_error& other) noexcept : std::invalid_argument(other), error() {
        say(what());
    }
    using std::invalid_argument::what;
};

/// No memory, or the byte budget of a page pool would be exceeded. Nothing was changed.
class out_of_memory : public std::bad_alloc, public error {
public:
    KVQ_NO_COPY explicit out_of_memory(std::string message) : message_(std::move(message)) { say(what()); }
    KVQ_NO_COPY out_of_memory(std::size_t wanted, std::size_t in_use, std::size_t budget)
        : out_of_memory("kvq: a page of " + std::to_string(wanted) +
                        " bytes does not fit: " + std::to_string(in_use) + " of a budget of " +
                        std::to_string(budget) + " bytes are in use") {}
    /// The same when the memory was allocated up front: `longest` bytes are free in one range.
    KVQ_NO_COPY out_of_memory(std::size_t wanted, std::size_t in_use, std::size_t budget, std::size_t longest)
        : out_of_memory(wanted, in_use, budget) {
        message_ += ", and the longest free range has " + std::to_string(longest);
        say(what());
    }
    KVQ_NO_COPY out_of_memory(const out_of_memory& other)
        : std::bad_alloc(other), error(), message_(other.message_) {
        say(what());
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

}}  // namespace kvq

namespace kvq { inline namespace KVQ_TAGGED { namespace detail {

template <class Error, class... Args>
[[noreturn]] inline void raise(Args&&... args) {
#if KVQ_EXCEPTIONS
    throw Error(static_cast<Args&&>(args)...);
#else
    current_error_handler()(Error(static_cast<Args&&>(args)...).what());
    std::abort();
#endif
}

/// Runs f. Returns the error that it raises, or null.
template <class F>
std::exception_ptr caught(F&& f) noexcept {
#if KVQ_EXCEPTIONS
    try {
        f();
    } catch (...) {
        return std::current_exception();
    }
#else
    f();
#endif
    return {};
}
/// Runs f. False: it has raised this Error. Others pass.
template <class Error, class F>
bool runs_without(F&& f) {
#if KVQ_EXCEPTIONS
    try {
        f();
    } catch (const Error&) {
        return false;
    }
#else
    f();
#endif
    return true;
}
/// Runs f. False: it has refused its arguments.
template <class F>
bool accepted(F&& f) {
    return runs_without<std::invalid_argument>(f);
}
template <class F>
bool has_memory(F&& f) {
    return runs_without<std::bad_alloc>(f);
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
    raise<argument_error>(message.c_str());
}

/// Raises kvq::argument_error with all arguments joined, unless `condition` holds.
template <class... Parts>
constexpr void expect(bool condition, const Parts&... parts) {
    if (!condition) [[unlikely]]
        fail(parts...);
}

}}}  // namespace kvq::detail
