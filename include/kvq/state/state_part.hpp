// A part of a layer's recurrent state: a tensor [heads][rows][columns] in a type that the engine chooses, and
// how snapshots hold it.
//
//   | snapshot_type | a scale for                     | bytes, n = heads * rows * columns          |
//   |---------------|---------------------------------|--------------------------------------------|
//   | exact         |                                 | n * bytes of the type                      |
//   | int8_rows     | a head and row                  | r(n) + r(4 * heads * rows) + 24            |
//   | int8_columns  | a head and column               | r(n) + r(4 * heads * columns) + 24         |
//   | e4m3          | a head and 32 neighbouring rows | r(n) + r(4 * heads * ceil(rows / 32)) + 24 |
//
// r rounds up to a multiple of 8. int8 keeps a scale for a head and k channel: k channels are the columns of
// a state [heads][v][k], and the rows of one [heads][k][v]. Rows of a convolution stay exact: they are few,
// and the next tokens are computed from them as they are.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "../core/float_type.hpp"

namespace kvq { inline namespace KVQ_COMMON {

/// How snapshots hold a part.
enum class snapshot_type : unsigned char { exact, int8_rows, int8_columns, e4m3 };

/// A tensor [heads][rows][columns] of a layer's state. A vector has one row.
struct state_part {
    std::string name;  ///< of its own within the layer
    float_type type = float_type::fp32;
    int heads = 1;
    int rows = 1;
    int columns = 1;
    snapshot_type snapshot = snapshot_type::exact;

    std::size_t values() const noexcept {
        return static_cast<std::size_t>(heads) * static_cast<std::size_t>(rows) *
               static_cast<std::size_t>(columns);
    }
    friend bool operator==(const state_part& a, const state_part& b) noexcept {
        return a.name == b.name && a.type == b.type && a.heads == b.heads && a.rows == b.rows &&
               a.columns == b.columns && a.snapshot == b.snapshot;
    }
};

/// As files, messages and errors call it.
constexpr const char* name(snapshot_type type) noexcept {
    constexpr const char* names[] = {"exact", "int8-rows", "int8-columns", "e4m3"};
    return names[static_cast<int>(type)];
}

namespace detail {

/// Every part of a page begins at a multiple of it.
inline constexpr std::size_t state_alignment = 64;
/// Rows that share a scale in e4m3.
inline constexpr int e4m3_group_rows = 32;

/// What quantizing did to a part.
struct snapshot_sums {
    double error = 0;   ///< sum of (x - x^)^2 over finite x
    double values = 0;  ///< sum of x^2 over finite x
    std::uint64_t not_finite = 0;
};
static_assert(sizeof(snapshot_sums) == 24);

}  // namespace detail
}}  // namespace kvq
