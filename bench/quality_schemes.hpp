// The schemes that are compared, by name: one list for bench_quality and for examples/llama.
//
// Built-in formats come from kvq::library; the others are compiled once, with quality_schemes.cpp
// (quality_schemes.cmake).
#pragma once

#include <functional>
#include <kvq/format/format.hpp>
#include <kvq/quant/calibration.hpp>
#include <string>
#include <vector>

namespace quality {

/// Makes keys from statistics; without statistics (null) keys that need none.
using make_keys = std::function<kvq::format(const kvq::calibration*)>;
using make_values = std::function<kvq::format()>;

/// A format for K and one for V.
struct listed_format {
    std::string name, source;
    make_keys keys;
    make_values values;
    bool takes_statistics = false;  ///< keys differ with them
    bool plans = false;             ///< caches plan its keys by default (kvq::key_statistics::own)
};

/// Groups of channels of a token; what MLX, HQQ and many engines have.
std::vector<listed_format> affine_formats();
/// Keys per channel, values per token.
std::vector<listed_format> kivi_formats();
/// Groups of 32 or 64 channels without and with a rotation, and 8-bit floats.
std::vector<listed_format> group_formats();
/// Codebooks and rotations. Not all of them are foldable.
std::vector<listed_format> rotation_formats();
std::vector<listed_format> kvarn_formats();
/// Methods of 2026: OScaR, OSCAR, Block-GTQ, OCTOPUS; the widths of PM-KVQ.
std::vector<listed_format> recent_formats();
/// This library's presets.
std::vector<listed_format> preset_formats();
/// The presets with mixed widths whose statistics make a plan of widths and nothing else, no error feedback:
/// -plan with those of queries and keys, -key-plan with those of keys alone.
std::vector<listed_format> plan_formats();
/// Each preset with mixed widths with one ingredient changed at a time, and each of its tensors alone.
std::vector<listed_format> ingredient_formats();

/// All of them but the ingredients.
std::vector<listed_format> all_formats();

}  // namespace quality
