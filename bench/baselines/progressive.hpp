// progressive<Last, Earlier...>: values that went through wider schemes before, as the pages of a cache that
// steps down while it fills.
//
//   x -> Earlier_1 -> x_1 -> Earlier_2 -> x_2 ... -> Last        each dequantized and quantized again, as
//                                                                kvq::step_down does
//   block = that of Last
//
// progressive_kivi<4, 8> is PM-KVQ's widths 8, 4 and progressive_kivi<2, 8, 4> its 8, 4, 2, on KIVI's grid of
// G tokens or channels. The bits are those of KIVI's last width: they say what the oldest tokens take, and
// what a full cache takes.
// Not here: PM-KVQ's budgets by layer, its factors of channels from calibration, and its shift of codes,
// which keeps the grid of the wider code; kvq's step_down fits a new one.
//
// Contract: that of Last for the values that the last earlier scheme gives; NaN and infinities are counted by
// the first.
// Source: PM-KVQ, arXiv 2505.18610, section 3.2.
#pragma once

#include <cstdint>
#include <kvq/schemes/kivi.hpp>
#include <string>
#include <vector>

namespace baselines {

template <kvq::foldable Last, kvq::kv_scheme... Earlier>
struct progressive : Last {
    using attends_as = progressive;

    std::string name() const {
        const std::string last = Last::name();
        return "progressive" + std::to_string(sizeof...(Earlier)) + "-" + last;
    }

    /// values: [tokens][dim], overwritten. Writes the whole block. Returns how many values were not finite.
    std::uint32_t quantize(const kvq::block_shape& s, const kvq::block_id& id, float* values,
                           std::byte* block) const {
        std::uint32_t not_finite = 0;
        std::vector<std::byte> wider;
        const auto pass = [&](const auto& earlier) {
            wider.resize(earlier.block_bytes(s));
            not_finite += earlier.quantize(s, id, values, wider.data());
            earlier.dequantize(s, id, wider.data(), values);
        };
        (pass(Earlier()), ...);
        return not_finite + Last::quantize(s, id, values, block);
    }
};

namespace parts {
template <int Group, int Last, int... Earlier>
struct progressive_kivi {
    using keys =
        progressive<typename kvq::kivi<Last, Group>::keys, typename kvq::kivi<Earlier, Group>::keys...>;
    using values =
        progressive<typename kvq::kivi<Last, Group>::values, typename kvq::kivi<Earlier, Group>::values...>;
};
}  // namespace parts

/// KIVI's schemes with groups of 64 behind wider ones: the last width, then those before it, the widest
/// first.
template <int Last, int... Earlier>
using progressive_kivi = parts::progressive_kivi<64, Last, Earlier...>;

}  // namespace baselines
