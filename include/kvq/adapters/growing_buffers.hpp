// Buffers [batch * heads][capacity][width] that grow together, in steps: the storage of contiguous caches.
//
// Strong exception guarantee: all buffers change their capacity, or none; sizes that overflow raise kvq::error before
// any memory is allocated.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory_resource>
#include <tuple>
#include <vector>

#include "../core/bits.hpp"
#include "../core/resource_vector.hpp"
#include "../core/shape.hpp"

namespace kvq { inline namespace KVQ_TAGGED {

/// value_dim = 0 means "as head_dim".
struct contiguous_shape {
    int batch = 1;
    int heads = 0;
    int head_dim = 0;
    int value_dim = 0;
    int step = 256;  ///< tokens by which capacity grows

    constexpr int dim(tensor role) const noexcept {
        return role == tensor::key || value_dim == 0 ? head_dim : value_dim;
    }
    constexpr int rows() const noexcept { return batch * heads; }
};

namespace detail {

inline void check_contiguous(const contiguous_shape& s) {
    expect(s.batch >= 1, "a batch has at least 1 row, got ", s.batch);
    expect(s.step >= 1, "buffers grow by at least 1 token, got ", s.step);
    check_shape({1, s.heads, s.head_dim, s.value_dim});
    expect(s.batch <= (std::numeric_limits<int>::max)() / s.heads, "buffers of ", s.batch, " rows x ",
           s.heads, " heads are too many");
}

/// [rows][capacity][width] elements of which [rows][tokens][width] are in use.
template <class E>
class growing_buffer {
public:
    growing_buffer(int rows, int width, std::pmr::memory_resource* memory)
        : rows_(static_cast<std::size_t>(rows)), width_(static_cast<std::size_t>(width)), data_(memory) {}

    /// Raises kvq::error when the bytes of `capacity` tokens overflow.
    void check_capacity(int capacity) const {
        constexpr std::size_t most = PTRDIFF_MAX / sizeof(E);
        expect(static_cast<std::size_t>(capacity) <= most / rows_ / width_, "buffers of ", rows_, " rows x ",
               capacity, " tokens x ", width_, " elements of ", sizeof(E),
               " bytes have more bytes than can be counted");
    }
    /// Copies the tokens to a new buffer of `capacity`, which check_capacity() has accepted. *this does not change yet.
    resource_vector<E> resized(int tokens, int old_capacity, int capacity) const {
        resource_vector<E> fresh(rows_ * static_cast<std::size_t>(capacity) * width_, data_.get_allocator());
        const std::size_t used = static_cast<std::size_t>(tokens) * width_;
        for (std::size_t row = 0; row < rows_; ++row)
            std::copy_n(data_.begin() + static_cast<std::ptrdiff_t>(
                                            row * static_cast<std::size_t>(old_capacity) * width_),
                        used,
                        fresh.begin() +
                            static_cast<std::ptrdiff_t>(row * static_cast<std::size_t>(capacity) * width_));
        return fresh;
    }
    void swap(resource_vector<E>& other) noexcept { data_.swap(other); }

    E* at(int row, int token, int capacity) noexcept {
        return data_.data() + (static_cast<std::size_t>(row) * static_cast<std::size_t>(capacity) +
                               static_cast<std::size_t>(token)) *
                                  width_;
    }
    const E* at(int row, int token, int capacity) const noexcept {
        return const_cast<growing_buffer*>(this)->at(row, token, capacity);
    }
    std::size_t bytes() const noexcept { return data_.size() * sizeof(E); }

private:
    std::size_t rows_, width_;
    resource_vector<E> data_;
};

/// Tokens and capacity of several buffers that grow together.
template <class... E>
class growing_buffers {
public:
    using memory = std::tuple<resource_vector<E>...>;

    growing_buffers(const contiguous_shape& shape, growing_buffer<E>... buffers)
        : shape_(shape), buffers_(std::move(buffers)...) {}

    /// Makes room for `added` more tokens. The capacity becomes a multiple of step. Returns the old memory, if any: the tokens to
    /// append may be views of it.
    memory reserve(int added) {
        expect(added >= 0, "buffers of ", tokens_, " tokens cannot take ", added, " more");
        expect(added <= (std::numeric_limits<int>::max)() - tokens_ - shape_.step, "buffers of ", tokens_,
               " tokens cannot take ", added, " more");
        const int wanted = tokens_ + added;
        return wanted > capacity_ ? resize(round_up(wanted, shape_.step)) : memory{};
    }
    /// Returns the old memory.
    memory resize(int capacity) {
        return std::apply(
            [&](auto&... b) {
                (b.check_capacity(capacity), ...);
                memory other(b.resized(tokens_, capacity_, capacity)...);
                std::apply([&](auto&... o) { (b.swap(o), ...); }, other);
                capacity_ = capacity;
                return other;
            },
            buffers_);
    }
    void trim(int n) {
        expect(n >= 0 && n <= tokens_, "cannot trim to ", n, " tokens: the buffers hold ", tokens_);
        tokens_ = n;
    }
    void trim_to_offset() {
        if (capacity_ != tokens_) resize(tokens_);
    }

    template <std::size_t Index>
    auto* at(int row, int token) noexcept {
        return std::get<Index>(buffers_).at(row, token, capacity_);
    }
    template <std::size_t Index>
    const auto* at(int row, int token) const noexcept {
        return std::get<Index>(buffers_).at(row, token, capacity_);
    }
    std::size_t bytes() const noexcept {
        return std::apply([](const auto&... b) { return (b.bytes() + ...); }, buffers_);
    }

    contiguous_shape shape_;
    int tokens_ = 0, capacity_ = 0;

private:
    std::tuple<growing_buffer<E>...> buffers_;
};

}  // namespace detail
}}  // namespace kvq
