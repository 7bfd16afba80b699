// save(sequence, path) and restore(cache, path).
//
// The file is written beside its place and renamed when it is complete, so that a reader finds the old file
// or the new one, never half of one. Restoring raises kvq::error for a file that has data after its last
// tensor.
#pragma once

#include "restore.hpp"
#include "save.hpp"

namespace kvq { inline namespace KVQ_COMMON {

/// Writes the sequence to `path`, through `path`.tmp. No other process may use `path`.tmp.
void save(const sequence& s, const std::string& path, const save_options& options = {});

/// A new sequence of the cache from a file.
[[nodiscard]] sequence restore(cache& of, const std::string& path, const restore_options& options = {});

}}  // namespace kvq

#if !defined(KVQ_COMPILED)
#include "file-inl.hpp"
#endif
