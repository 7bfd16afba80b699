// What a device_format says of the blocks of its pairs: names, fingerprints, and what the host makes of them.
//
// Contract: names are those of the CPU's formats; built-in ones are found by find_format.
#pragma once

#include "../../format/format_names.hpp"
#include "../layout/latent_pair.cuh"
#include "device_format.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda::detail {

/// The name of a scheme: format::name() of the CPU's format.
template <class S>
std::string scheme_name() {
    if constexpr (std::is_default_constructible_v<S>)
        return std::string(S{}.name());
    else
        return "rotated-" + scheme_name<typename inner_of<S>::type>();
}
/// Its fingerprint, as far as the type says it; of a rotation: rotated_fingerprint().
template <class S>
std::uint64_t scheme_fingerprint() {
    if constexpr ((has_transform<S> || token_row_scheme<S>)&&std::is_default_constructible_v<S>)
        return S{}.fingerprint();
    else
        return 0;
}

/// The name of the blocks of a tensor: format::name() of the CPU's format. Those of latents are keys.
template <tensor Role, class Pair>
std::string block_name() {
    if constexpr (is_latent_pair<Pair>) {
        std::string name = scheme_name<typename Pair::keys>();
        if (Pair::second_channels > 0)
            name += std::string("-") + common::last_channels_name_of(scheme_name<typename Pair::last>()) +
                    "x" + std::to_string(Pair::second_channels);
        return name;
    } else {
        return scheme_name<scheme_of<Role, Pair>>() + (has_lower<Pair> ? "-nested8" : "");
    }
}
/// Is S the scheme of nested4? The schemes of its values and those of std4 have one name.
template <tensor Role, class S>
inline constexpr bool is_nested4 =
    std::is_same_v<S, std::conditional_t<Role == tensor::key, nested4::keys, nested4::values>>;

/// Names by which find_format gives this format; its own name if there is none.
template <tensor Role, class Pair>
std::vector<std::string> names_of_blocks() {
    using S = scheme_of<Role, Pair>;
    const std::string own = block_name<Role, Pair>();
    if constexpr (has_lower<Pair>) return {is_nested4<Role, S> ? "nested8" : own};
    if constexpr (Role == tensor::value && is_nested4<Role, S>) return {"nested4"};
    std::vector<std::string> names = common::built_in_names(own, is_latent_pair<Pair> ? tensor::key : Role);
    if constexpr (Role == tensor::key && is_nested4<Role, S>) names.push_back("nested4");
    if (names.empty()) names.push_back(own);
    return names;
}

template <tensor Role, class Pair>
host_blocks host_blocks_of() {
    using S = scheme_of<Role, Pair>;
    host_blocks b{};
    b.has_fingerprint = requires(const S& s) {
        { s.fingerprint() } -> std::convertible_to<std::uint64_t>;
    };
    if constexpr (is_latent_pair<Pair>) {
        b.bytes = [](const block_shape& s) {
            constexpr int second = Pair::second_channels;
            if (s.dim <= second) return std::size_t{0};  // of a layer without such blocks
            std::size_t bytes = block_bytes_of<S>({s.role, s.tokens, s.dim - second});
            if (second > 0) bytes += block_bytes_of<typename Pair::last>({s.role, s.tokens, second});
            return bytes;
        };
    } else {
        b.bytes = [](const block_shape& s) { return block_bytes_of<S>(s); };
        if constexpr (has_lower<Pair>) {
            b.lower_bytes = [](const block_shape& s) { return lower_bytes_of<S>(s); };
            b.bytes = [](const block_shape& s) { return block_bytes_of<S>(s) + lower_bytes_of<S>(s); };
            b.dequantize = [](const block_shape& s, block_id id, const std::byte* block, float* values) {
                if (id.lower == nullptr) return S{}.dequantize(s, id, block, values);
                for (int t = 0; t < s.tokens; ++t)
                    for (int c = 0; c < s.dim; ++c)
                        values[t * s.dim + c] = read_planes<S>(s, block, id.lower, t, c);
            };
        } else if constexpr (std::is_default_constructible_v<S>)
            b.dequantize = [](const block_shape& s, block_id id, const std::byte* block, float* values) {
                S{}.dequantize(s, id, block, values);
            };
    }
    return b;
}

}}}  // namespace kvq::cuda::detail
