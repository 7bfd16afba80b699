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
template <kv_scheme... Schemes>
struct formats {};

namespace detail {

/// Calls f with the element of the given index; the last one takes every index that is left.
template <std::size_t Index = 0, class... T, class F>
decltype(auto) visit_element(const std::tuple<T...>& elements, int index, F&& f) {
    if constexpr (Index + 1 < sizeof...(T))
        if (index != static_cast<int>(Index)) return visit_element<Index + 1>(elements, index, f);
    return f(std::get<Index>(elements));
}

template <class F, tensor Role>
struct format_list {
    static_assert(kv_scheme<F>,
                  "kvq::cache: a format must be a scheme (kv_scheme), a pair like kivi<4>, or formats<...>; "
                  "the order is "
                  "cache<keys, values, backend, window>, for a pair cache<pair, pair, backend>");
    using type = formats<F>;
};
template <class... S, tensor Role>
struct format_list<formats<S...>, Role> {
    using type = formats<S...>;
};
template <class F, tensor Role>
requires requires {
    typename F::keys;
    typename F::values;
}
struct format_list<F, Role> {
    using type = formats<std::conditional_t<Role == tensor::key, typename F::keys, typename F::values>>;
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
    static constexpr tensor role = Role;
    static constexpr int size = 1 + static_cast<int>(sizeof...(Schemes));

    format_table() = default;
    explicit format_table(Schemes... schemes) : schemes_(full<Window>{}, std::move(schemes)...) {}

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
        (std::index_sequence_for<full<Window>, Schemes...>{});
    }

    /// Index of what pages are coded to when the user's list says `listed` (0-based): the window itself needs no coding.
    int index_of(int listed) const {
        const int index = listed + 1;
        return visit(index, []<class S>(const S&) { return std::is_same_v<S, full<Window>>; }) ? 0 : index;
    }

    std::size_t block_bytes(int index, const block_shape& shape) const {
        return visit(index, [&](const auto& s) { return static_cast<std::size_t>(s.block_bytes(shape)); });
    }

private:
    std::tuple<full<Window>, Schemes...> schemes_;
};

}  // namespace kvq::inline v0_1
