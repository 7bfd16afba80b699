// transformed<Transform, Inner>: an orthogonal transform of every token's channels before another scheme.
//
//   block = Inner of T x;   x^ = T^-1 Inner(T x);   q . k = (T q) . (T k),   sum p v = T^-1 sum p (T v)
//
// So attention transforms each query once and each output once, and works on Inner's codes in between:
// foldable schemes stay foldable. Aliases: hadamard<Inner>, rotated<Inner>.
//
// Contract: a transform spreads its input over all channels, so a value that is not finite becomes 0 before
// it, and is counted. The bound of Inner holds in the transformed basis; the length of a token's error is the
// same in both bases.
#pragma once

#include <type_traits>
#include <utility>

#include "../core/float_formats.hpp"
#include "../core/text.hpp"
#include "../quant/hadamard.hpp"
#include "../quant/rotation.hpp"
#include "codec_spec.hpp"
#include "concepts.hpp"

namespace kvq { inline namespace KVQ_TAGGED {

/// Transform: name(), fingerprint(), forward(dim, id, x), backward(dim, id, x) in place, orthogonal;
/// check(cache_shape, tensor) if it has state; `value` if kernels know it (quant/token_transform.hpp).
template <class Transform, kv_scheme Inner>
struct transformed : Inner {
    using attends_as = std::conditional_t<foldable<Inner> || segmented<Inner>, transformed, void>;
    using inner_scheme = Inner;

    Transform transform;

    transformed() = default;
    explicit transformed(Transform t, Inner inner = Inner())
        : Inner(std::move(inner)), transform(std::move(t)) {}

    short_text name() const { return transform.name() + "-" + Inner::name(); }

    /// Fingerprint of the transform and of Inner (io/scheme_identity.hpp).
    std::uint64_t fingerprint() const { return fingerprint(transform.fingerprint(), *this); }
    static std::uint64_t fingerprint(std::uint64_t of_transform, [[maybe_unused]] const Inner& inner) {
        detail::fingerprint_hash hash;
        hash.add(of_transform);
        if constexpr (requires { inner.fingerprint(); }) hash.add(inner.fingerprint());
        return hash.value;
    }

    /// Raises kvq::error if the state of the transform or of Inner belongs to another shape; a cache calls it
    /// when it is made.
    void check(const cache_shape& s, tensor role) const {
        if constexpr (requires { transform.check(s, role); }) transform.check(s, role);
        if constexpr (requires(const Inner& inner) { inner.check(s, role); }) Inner::check(s, role);
    }

    std::uint32_t quantize(const block_shape& s, const block_id& id, float* values, std::byte* block) const {
        const std::uint32_t not_finite = transform_values(s, id, values);
        Inner::quantize(s, id, values, block);
        return not_finite;
    }
    /// Quantizes values that were quantized before, as Inner does. Without this the one of Inner would be
    /// called, without T.
    std::uint32_t requantize(const block_shape& s, const block_id& id, float* values, float* scales_of_tokens,
                             std::byte* block) const requires detail::requantizing<Inner> {
        const std::uint32_t not_finite = transform_values(s, id, values);
        Inner::requantize(s, id, values, scales_of_tokens, block);
        return not_finite;
    }
    /// The input of Inner: T x for every token, in place; returns how many values were not finite.
    std::uint32_t transform_values(const block_shape& s, const block_id& id, float* values) const {
        std::uint32_t not_finite = 0;
        for (std::size_t i = 0; i < s.values(); ++i)
            if (!detail::is_finite(values[i])) {
                ++not_finite;
                values[i] = 0.0f;
            }
        for (int t = 0; t < s.tokens; ++t)
            transform.forward(s.dim, id, values + static_cast<std::ptrdiff_t>(t) * s.dim);
        return not_finite;
    }

    void dequantize(const block_shape& s, const block_id& id, const std::byte* block, float* values) const {
        Inner::dequantize(s, id, block, values);
        restore_values(s, id, values);
    }
    /// T^-1 y for every token, in place.
    void restore_values(const block_shape& s, const block_id& id, float* values) const {
        for (int t = 0; t < s.tokens; ++t)
            transform.backward(s.dim, id, values + static_cast<std::ptrdiff_t>(t) * s.dim);
    }

    // Inner may have a transform of its own (an order of channels): it is applied second.
    void transform_query(const block_shape& s, const block_id& id, float* x) const
        requires(foldable<Inner> || segmented<Inner>) {
        transform.forward(s.dim, id, x);
        if constexpr (transforming<Inner>) Inner::transform_query(s, id, x);
    }
    void restore_output(const block_shape& s, const block_id& id, float* y) const
        requires(foldable<Inner> || segmented<Inner>) {
        if constexpr (transforming<Inner>) Inner::restore_output(s, id, y);
        transform.backward(s.dim, id, y);
    }
};

namespace detail {
/// Blocks are those of Inner, which attention reads as they are if they have codes to fold.
template <class Transform, class Inner>
struct codec_maker<transformed<Transform, Inner>> {
    static constexpr codec_spec read(codec_spec c) noexcept {
        if (!foldable<Inner> && !segmented<Inner>) c.reading = block_reading::dequantized;
        return c;
    }
    static constexpr codec_spec of_type() noexcept { return read(codec_maker<Inner>::of_type()); }
    static constexpr codec_spec of(const Inner& s) noexcept { return read(codec_maker<Inner>::of(s)); }
};

// Matrices of a rotation are checked when it is made (quant/rotation.hpp).
template <class Transform, class Inner>
inline constexpr bool composed_by_library<transformed<Transform, Inner>> =
    value_of_transform<Transform>().kind != transform_kind::own&& composed_by_library<Inner>;
}  // namespace detail

/// Random signs and Walsh-Hadamard before Inner, in blocks of at most `Largest` channels (0: as large as they
/// fit).
template <kv_scheme Inner, int Largest = 0, std::uint32_t Seed = 1>
using hadamard = transformed<hadamard_transform<Largest, Seed>, Inner>;

/// A given rotation per layer and head before Inner: rotated<affine<2>>(rotation(layers, heads, dim,
/// matrices)).
template <kv_scheme Inner>
using rotated = transformed<rotation, Inner>;

}}  // namespace kvq
