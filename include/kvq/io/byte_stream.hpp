// Sinks and sources of bytes: any callable, so that files, sockets and memory need no class of kvq.
//
//   sink      write(const void* data, std::size_t bytes)                    takes all bytes, or throws
//   source    read(void* to, std::size_t bytes) -> std::size_t              returns how many bytes it gave; 0
//                                                                           at the end
//
// Integers are little-endian, like the pages themselves (docs/reference/format.md). So the machine must be
// little-endian.
#pragma once

#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>

#include "../core/error.hpp"
#include "checksum.hpp"

namespace kvq { inline namespace KVQ_COMMON { namespace detail {

struct sink_view {
    void* sink;
    void (*write)(void* sink, const void* data, std::size_t bytes);

    KVQ_NO_COPY void operator()(const void* data, std::size_t bytes) const { write(sink, data, bytes); }
};
struct source_view {
    void* source;
    std::size_t (*read)(void* source, void* to, std::size_t bytes);

    KVQ_NO_COPY std::size_t operator()(void* to, std::size_t bytes) const { return read(source, to, bytes); }
};

}}}  // namespace kvq::detail

namespace kvq { inline namespace KVQ_TAGGED {

template <class S>
concept byte_sink = requires(S& write, const void* data, std::size_t bytes) {
    write(data, bytes);
};

template <class S>
concept byte_source = requires(S& read, void* to, std::size_t bytes) {
    { read(to, bytes) } -> std::convertible_to<std::size_t>;
};

namespace detail {

/// Gives functions that are compiled once a sink or a source of any type, which may be a function.
template <class Sink>
struct held_sink {
    Sink& sink;

    operator sink_view() noexcept {
        return {this, [](void* self, const void* data, std::size_t bytes) {
                    static_cast<held_sink*>(self)->sink(data, bytes);
                }};
    }
};
template <class Source>
struct held_source {
    Source& source;

    operator source_view() noexcept {
        return {this, [](void* self, void* to, std::size_t bytes) {
                    return static_cast<std::size_t>(static_cast<held_source*>(self)->source(to, bytes));
                }};
    }
};

static_assert(std::endian::native == std::endian::little,
              "kvq: saved sequences and pages on the wire are little-endian, and copied as they are");

/// Reads exactly the wanted bytes and keeps a checksum of them.
class exact_source {
public:
    explicit exact_source(const source_view& read) : read_(read) {}

    /// `what`: name of the data, for the message when the source ends too early.
    void read(void* to, std::size_t bytes, const char* what) {
        auto* const at = static_cast<std::byte*>(to);
        for (std::size_t done = 0; done < bytes;) {
            const std::size_t got = read_(at + done, bytes - done);
            expect(got > 0 && got <= bytes - done, "truncated: the input ends after ", position_ + done,
                   " bytes, in the middle of ", what, " (", bytes - done, " bytes are missing)");
            done += got;
        }
        position_ += bytes;
        checksum_.add(to, bytes);
    }

    /// Appends n elements to a vector or a string, in parts, so that a false number does not allocate memory.
    template <class List>
    void append(List& to, std::uint64_t n, const char* what) {
        while (n > 0) {
            const std::size_t had = to.size(),
                              more = static_cast<std::size_t>(smaller(n, std::uint64_t{1} << 16));
            to.resize(had + more);
            read(to.data() + had, more * sizeof(to[0]), what);
            n -= more;
        }
    }

    /// Checksum of everything since the last restart().
    std::uint32_t checksum() const noexcept { return checksum_.value(); }
    void restart() noexcept { checksum_ = {}; }
    std::size_t position() const noexcept { return position_; }

private:
    source_view read_;
    std::size_t position_ = 0;
    crc32c checksum_;
};

}  // namespace detail
}}  // namespace kvq
