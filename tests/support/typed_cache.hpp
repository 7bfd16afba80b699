// SPDX-License-Identifier: MIT
// A cache whose formats are made from schemes: typed_cache<keys, values, backend, window>, each of the first
// two a scheme, a pair such as kivi<4>, or formats<scheme...>. For tests that run for many schemes.
#pragma once

#include <kvq/format/make_format.hpp>
#include <kvq/kvq.hpp>
#include <kvq/schemes/affine.hpp>
#include <kvq/schemes/int8.hpp>
#include <kvq/schemes/kivi.hpp>
#include <kvq/schemes/presets.hpp>
#include <tuple>
#include <vector>

#include "library_formats.hpp"

namespace test {

template <class... Schemes>
struct formats {};

/// make_format; for the most usual schemes it is compiled once (below, or by kvq::library).
template <class Backend, class Scheme>
kvq::format made_once(const Scheme& scheme) {
    if constexpr (library_has<Backend>() && built_in<Scheme>)
        return from_library(scheme);
    else if constexpr (std::is_same_v<Backend, usual>)
        return made_once<kvq::scalar>(scheme);
    else
        return kvq::make_format<Backend>(scheme);
}
template <class Scheme>
using any_group_scheme = typename kvq::detail::with_any_group<Scheme>::type;
template <class Backend, class Scheme>
kvq::format made(const Scheme& scheme) {
    return made_once<Backend>(kvq::detail::with_any_group<Scheme>::of(scheme));
}
/// From statistics.
template <class Backend, class Scheme>
kvq::format made_from(const kvq::calibration& statistics) {
    if constexpr (library_has<Backend>() && built_in<Scheme>)
        return from_library(Scheme(statistics), statistics.save());
    else
        return made_once<Backend>(Scheme(statistics));
}
/// Stands for the format of a scheme with stored bounds of keys.
template <class Scheme>
struct bounded {
    Scheme inner;
    bounded() requires std::is_default_constructible_v<Scheme> : inner() {}
    explicit bounded(Scheme scheme) : inner(std::move(scheme)) {}
};
template <class Backend, class Scheme>
kvq::format made(const bounded<Scheme>& of) {
    return kvq::with_bounds(made<Backend>(of.inner));
}

/// Stands for the format of a scheme of 4 bits with a lower plane.
template <class Scheme>
struct with_planes {
    Scheme inner;
    with_planes() requires std::is_default_constructible_v<Scheme> : inner() {}
    explicit with_planes(Scheme scheme) : inner(std::move(scheme)) {}
};
template <class Backend, class Scheme>
kvq::format made(const with_planes<Scheme>& of) {
    return kvq::with_lower_plane(made<Backend>(of.inner));
}

/// The schemes of one tensor, with their state.
template <class... Schemes>
class scheme_tuple {
public:
    /// The window counts.
    static constexpr int size = 1 + static_cast<int>(sizeof...(Schemes));

    scheme_tuple() = default;
    scheme_tuple(Schemes... schemes) requires(sizeof...(Schemes) > 0) : schemes_(std::move(schemes)...) {}

    template <class Backend>
    kvq::format_list list() const {
        return std::apply([](const auto&... scheme) { return kvq::format_list{made<Backend>(scheme)...}; },
                          schemes_);
    }

private:
    std::tuple<Schemes...> schemes_;
};

}  // namespace test

/// Formats that many tests use are compiled once, in formats.cpp.
#define KVQ_COMMA ,
#define KVQ_TEST_SHARED_AFFINE(X)                  \
    X(kvq::affine<2>)                              \
    X(kvq::affine<3>)                              \
    X(kvq::affine<4>)                              \
    X(kvq::affine<8>)                              \
    X(kvq::affine<2 KVQ_COMMA kvq::per_channel<>>) \
    X(kvq::affine<3 KVQ_COMMA kvq::per_channel<>>) \
    X(kvq::affine<4 KVQ_COMMA kvq::per_channel<>>)
#define KVQ_TEST_SHARED_PRESETS(X) \
    X(kvq::int8)                   \
    X(kvq::std4::keys)             \
    X(kvq::std4::values)           \
    X(kvq::ref8::keys)             \
    X(kvq::ref8::values)           \
    X(kvq::std5::keys)             \
    X(kvq::std5::values)           \
    X(kvq::low3::keys)             \
    X(kvq::low3::values)           \
    X(kvq::low2::keys)             \
    X(kvq::low2::values)           \
    X(kvq::full<kvq::float16>)     \
    X(kvq::full<kvq::bfloat16>)    \
    X(kvq::full<float>)
#define KVQ_TEST_EXTERN(...)                                                                       \
    extern template kvq::format test::made_once<kvq::scalar, test::any_group_scheme<__VA_ARGS__>>( \
        const test::any_group_scheme<__VA_ARGS__>&);
#define KVQ_TEST_INSTANTIATE(...)                                                           \
    template kvq::format test::made_once<kvq::scalar, test::any_group_scheme<__VA_ARGS__>>( \
        const test::any_group_scheme<__VA_ARGS__>&);
#if !defined(KVQ_TEST_FORMATS_HERE)
KVQ_TEST_SHARED_AFFINE(KVQ_TEST_EXTERN)
KVQ_TEST_SHARED_PRESETS(KVQ_TEST_EXTERN)
#endif

namespace test {
namespace detail {

template <class F, kvq::tensor Role>
struct schemes_of {
    using type = scheme_tuple<F>;
};
template <class... S, kvq::tensor Role>
struct schemes_of<formats<S...>, Role> {
    using type = scheme_tuple<S...>;
};
template <class F, kvq::tensor Role>
requires requires {
    typename F::keys;
    typename F::values;
}
struct schemes_of<F, Role> {
    using type = typename schemes_of<
        std::conditional_t<Role == kvq::tensor::key, typename F::keys, typename F::values>, Role>::type;
};

}  // namespace detail

/// x becomes x^ of the format.
inline void round_trip(const kvq::format& f, const kvq::block_shape& block, kvq::block_id id,
                       std::vector<float>& x) {
    std::vector<std::byte> quantized(f.block_bytes(block));
    f.functions().quantize_values(f.scheme(), block, id, x.data(), quantized.data());
    f.functions().dequantize(f.scheme(), block, id, quantized.data(), kvq::float_type::fp32, x.data(),
                             block.dim, x.data());
}

/// Keys and values of two pairs, the inner one first.
template <class Inner, class Outer>
struct protected_layers {
    using keys = formats<typename Inner::keys, typename Outer::keys>;
    using values = formats<typename Inner::values, typename Outer::values>;
};

template <class Keys, class Values = Keys, class Backend = usual, class Window = kvq::float16>
class typed_cache : public kvq::cache {
public:
    using key_table = typename detail::schemes_of<Keys, kvq::tensor::key>::type;
    using value_table = typename detail::schemes_of<Values, kvq::tensor::value>::type;
    using backend = Backend;
    using window = Window;
    using sequence_type = kvq::sequence;

    explicit typed_cache(const kvq::cache_shape& shape, const kvq::cache_options& options = {},
                         const key_table& keys = {}, const value_table& values = {})
        : kvq::cache(shape, with_formats(options, keys, values)) {}

private:
    static kvq::cache_options with_formats(kvq::cache_options options, const key_table& keys,
                                           const value_table& values) {
        options.keys = keys.template list<Backend>();
        options.values = values.template list<Backend>();
        options.window = made<Backend>(kvq::full<Window>{});
        return options;
    }
};

}  // namespace test
