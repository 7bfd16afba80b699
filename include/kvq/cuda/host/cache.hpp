// A cache that owns its pages on the device: the verbs of kvq::cache, for batches, formats chosen when the
// program runs.
//
//   cuda::cache cache;
//   auto s = cache.open(shape, {.formats = {"kivi-4-g64"}, .sinks = 4, .recent = 128}, compiled, stream);
//   s = cache.open(layers, options, compiled, stream);      layers of several shapes, formats and windows
//                                                           (cache/layers.hpp)
//   auto a = cache.new_sequence();
//   s = cache.begin_prompt(a, n, stream);        then for every layer prefill(layer, q, k, v, out)
//   s = cache.begin_step(batch, 1, stream);
//     then for every layer append(layer, k, v) and attend(layer, q, out); models that select tokens:
//     cache_lists.hpp
//   s = cache.begin_draft(batch, n, stream);
//     the same with n guesses of the next tokens; then keep(batch, paths)
//   s = cache.begin_cross(a, n, stream);         then append(layer, k, v) for every layer with cross
//                                                attention, once
//
// begin_*() does what the host must do: lengths, page numbers, memory; it sends the words that changed in a
// small launch. What follows takes its numbers from device memory. So the appends and attends of a step can
// be captured in a graph and replayed after every begin_step() while contexts grow, as long as graph_id()
// stays the same.
// Pages are those of a CPU cache with the same options that did the same, byte for byte, and show the same
// tokens (sequence_pages.hpp).
// Two exceptions: a quantized page that is requantized to a preset is fitted anew here; a page of keys that
// the plan of its sequence does not fit has it all the same, where the CPU takes even widths.
// Contract: refused calls change nothing. One thread; one stream at a time. These wait for the stream: a pool
// that grows, a prompt that is longer than all before it, steps and prompts over keys that have moved where
// their memory grows, calibrate(), rotate(), not_finite() and fetches(). Nothing else does.
#pragma once

#include "cache_draft.hpp"
#include "cache_lists.hpp"
#include "cache_moves.hpp"
#include "cache_open.hpp"
#include "cache_pages.hpp"
#include "cache_plans.hpp"
#include "cache_resident.hpp"
#include "cache_scratch.hpp"
#include "cache_state.hpp"
#include "cache_step.hpp"
