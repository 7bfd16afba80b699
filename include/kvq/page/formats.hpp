// The closed list of formats that the pages of a cache may use; each page carries an index into it.
//
// Index 0 is always the window format (16 or 32 bit): sinks, recent tokens and pages not yet coded. With one coded format
// the dispatch is one comparison; kernels are instantiated per scheme for K and per scheme for V, never per pair.
#pragma once

#include <tuple>
#include <utility>

#include "../schemes/full.hpp"

namespace kvq::inline v0_1 {

/// Several schemes for one tensor: cache<formats<affine<4>, affine<2>>, int8>.
template <class... Schemes>
struct formats {};

namespace detail {

/// Calls f with the element of the given index; the last one takes every index that is left.
template <std::size_t Index = 0, class... T, class F>
decltype(auto) visit_element(const std::tuple<T...>& elements, int index, F&& f) {
    if constexpr (Index + 1 < sizeof...(T))
        if (index != static_cast<int>(Index)) return visit_element<Index + 1>(elements, index, f);
    return f(std::get<Index>(elements));
}

/// A scheme that lacks something is told what.
template <class S>
struct checked_scheme {
    using type = full<float16>;  // so that nothing else is said
    static constexpr bool has_name = requires(const S s) {
        { s.name() } -> std::convertible_to<std::string>;
    };
    static constexpr bool has_block_bytes = requires(const S s, block_shape shape) {
        { s.block_bytes(shape) } -> std::convertible_to<std::size_t>;
    };
    static constexpr bool has_encode =
        requires(const S s, block_shape shape, block_id id, float* values, std::byte* block) {
        { s.encode(shape, id, values, block) } -> std::convertible_to<std::uint32_t>;
    };
    static constexpr bool has_decode =
        requires(const S s, block_shape shape, block_id id, const std::byte* block, float* values) {
        s.decode(shape, id, block, values);
    };
    static constexpr bool something = has_block_bytes || has_encode || has_decode;
    static_assert(something,
                  "kvq::cache: a format must be a scheme (kv_scheme), a pair like kivi<4>, or formats<...>; "
                  "the order is cache<keys, values, backend, window>, for a pair cache<pair, pair, backend>");
    static_assert(!something || std::copy_constructible<S>,
                  "kvq::cache: a scheme must be copyable and destructible");
    static_assert(!something || has_name, "kvq::cache: a scheme needs `std::string name() const`");
    static_assert(!something || has_block_bytes,
                  "kvq::cache: a scheme needs `std::size_t block_bytes(block_shape) const`");
    static_assert(!something || has_encode,
                  "kvq::cache: a scheme needs `std::uint32_t encode(block_shape, "
                  "block_id, float* values, std::byte* block) const`");
    static_assert(!something || has_decode,
                  "kvq::cache: a scheme needs `void decode(block_shape, block_id, "
                  "const std::byte* block, float* values) const`");
};
template <kv_scheme S>
struct checked_scheme<S> {
    using type = S;
};

template <class F, tensor Role>
struct format_list {
    using type = formats<typename checked_scheme<F>::type>;
};
template <class... S, tensor Role>
struct format_list<formats<S...>, Role> {
    using type = formats<typename checked_scheme<S>::type...>;
};
template <class F, tensor Role>
requires requires {
    typename F::keys;
    typename F::values;
}
struct format_list<F, Role> {
    using type =
        typename format_list<std::conditional_t<Role == tensor::key, typename F::keys, typename F::values>,
                             Role>::type;
};

}  // namespace detail

template <tensor Role, class Window, class List>
class format_table;

template <tensor Role, class Window, class... Schemes>
class format_table<Role, Window, formats<Schemes...>> {
public:
    static_assert(float_format<Window>, "kvq::cache: the window format must be float16, bfloat16 or float");
    static_assert((detail::supports<Schemes>(Role) && ...),
                  "kvq::cache: one of the schemes does not support this tensor (key or value)");
    /// Another one where it is refused, so that nothing else is said.
    using window_scheme = full<std::conditional_t<float_format<Window>, Window, float16>>;
    static constexpr tensor role = Role;
    static constexpr int size = 1 + static_cast<int>(sizeof...(Schemes));

    format_table() = default;
    /// Implicit: the only scheme of a list stands for its table.
    format_table(Schemes... schemes) : schemes_(window_scheme{}, std::move(schemes)...) {}

    /// f(scheme) of every scheme as a tuple.
    template <class F>
    auto map(F f) const {
        return std::apply([&](const auto&... scheme) { return std::make_tuple(f(scheme)...); }, schemes_);
    }

    /// Calls f(scheme) with the scheme of the given index.
    template <class F>
    decltype(auto) visit(int index, F&& f) const {
        return detail::visit_element(schemes_, index, f);
    }

    /// Calls f(scheme, index) for every scheme, the window included.
    template <class F>
    void for_each(F&& f) const {
        [&]<std::size_t... Index>(std::index_sequence<Index...>) {
            (f(std::get<Index>(schemes_), static_cast<int>(Index)), ...);
        }
        (std::index_sequence_for<window_scheme, Schemes...>{});
    }

    /// Index of what pages are coded to when the user's list says `listed` (0-based): the window itself needs no coding.
    int index_of(int listed) const {
        const int index = listed + 1;
        return visit(index, []<class S>(const S&) { return std::is_same_v<S, window_scheme>; }) ? 0 : index;
    }

    std::size_t block_bytes(int index, const block_shape& shape) const {
        return visit(index, [&](const auto& s) { return static_cast<std::size_t>(s.block_bytes(shape)); });
    }

private:
    std::tuple<window_scheme, Schemes...> schemes_;
};

namespace detail {

/// The table of a cache that was given none.
template <class Table>
Table default_table() {
    static_assert(std::is_default_constructible_v<Table>,
                  "kvq::cache: one of the schemes holds state that it cannot make up, such as the matrices "
                  "of rotated<>: "
                  "pass it to the cache, as in cache(shape, options, keys(...), values(...))");
    if constexpr (std::is_default_constructible_v<Table>) return {};
}

}  // namespace detail

}  // namespace kvq::inline v0_1
