// make_format<Scheme>(), on vectors: on kvq::simd<>, the best architecture of this build (simd_backend.hpp,
// which needs xsimd); in programs that link kvq::library, on its kernels (library_kernels.hpp), which are
// those of the best architecture of the CPU and compile in no time.
//
// CUDA code must not include it.
#pragma once

#include "../format/make_format.hpp"
#if defined(KVQ_COMPILED)
#include "library_kernels.hpp"
#else
#include "simd_backend.hpp"
#endif

namespace kvq { inline namespace KVQ_TAGGED {

#if defined(KVQ_COMPILED)
template <int N>
struct query_bytes;
namespace arch {
struct sse2;
struct sse4_1;
struct avx2;
struct avxvnni;
struct avx512bw;
struct avx512vnni;
struct amx;
struct neon64;
struct neon64_dot;
}  // namespace arch
/// The kernels of the library.
template <class... Chosen>
struct simd : library {
    static_assert(sizeof...(Chosen) == 0,
                  "kvq::simd: kernels are those of kvq::library, for the best instruction set of the CPU and "
                  "queries in 16 bits; a file that defines KVQ_HEADER_ONLY compiles others");
};
#endif

// Inlined, so that the linker has no copy to merge of files with and without KVQ_COMPILED, whose backends
// differ.

/// A format on the best architecture of this build.
template <class Scheme>
[[nodiscard]] KVQ_NO_COPY format make_format() {
    return make_format<Scheme, simd<>>();
}
/// A format of a scheme with state; the format keeps the state.
template <kv_scheme Scheme>
[[nodiscard]] KVQ_NO_COPY format make_format(Scheme scheme) {
    return make_format<simd<>>(std::move(scheme));
}
/// Formats of a pair such as kivi<4> or a preset; or of one scheme for both tensors.
template <class Pair>
[[nodiscard]] KVQ_NO_COPY format_pair make_formats() {
    return make_formats<Pair, simd<>>();
}

}}  // namespace kvq
