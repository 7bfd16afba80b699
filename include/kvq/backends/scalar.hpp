// The backend without intrinsics: portable, and the one whose bytes every other backend must reproduce.
//
// A backend is a type with
//   lanes                              the vectors that the kernels are written in (backends/kernels/plain_lanes.hpp)
//   load_floats<P>(bytes, n, out)      n stored parameters as floats
//   encode(scheme, shape, id, window, block, values)
//       codes a full block of Window values; `values` is scratch for shape.values() floats
//   name()
#pragma once

#include "../schemes/full.hpp"
#include "kernels/plain_lanes.hpp"

namespace kvq::inline v0_1 {

struct scalar {
    using lanes = plain_lanes;
    static constexpr const char* name() noexcept { return "scalar"; }

    template <class P>
    static void load_floats(const std::byte* from, int n, float* out) {
        for (int i = 0; i < n; ++i)
            out[i] = static_cast<float>(detail::load_as<P>(from + static_cast<std::size_t>(i) * sizeof(P)));
    }

    template <class Window, kv_scheme Scheme>
    static std::uint32_t encode(const Scheme& scheme, const block_shape& shape, block_id id,
                                const std::byte* window, std::byte* block, float* values) {
        full<Window>{}.decode(shape, id, window, values);
        return scheme.encode(shape, id, values, block);
    }
};

}  // namespace kvq::inline v0_1
