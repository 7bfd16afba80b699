// Results of the commands as tables for people and JSON for programs.
#pragma once

#include "evaluate.hpp"
#include "long_context.hpp"
#include "slot.hpp"

#include <iosfwd>
#include <span>

namespace llama {

void write_table(std::ostream& out, std::span<const scheme_result> results);

// One JSON object a line.
void write_json(std::ostream& out, std::span<const scheme_result> results);

void write_table(std::ostream& out, std::span<const long_context_row> rows);
void write_json(std::ostream& out, std::span<const long_context_row> rows);

// Turns 1, 2, 4, 8, ... and the last; the first scheme is the baseline.
void write_table(std::ostream& out, std::span<const slot_result> results);
void write_json(std::ostream& out, std::span<const slot_result> results);

// A line per scheme, a column per chunk size.
void write_table(std::ostream& out, std::span<const chunk_result> results);
void write_json(std::ostream& out, std::span<const chunk_result> results);

}  // namespace llama
