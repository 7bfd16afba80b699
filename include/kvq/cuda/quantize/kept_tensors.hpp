// Which tensors of pages keep their bytes when the format changes: what host code says to pages.cuh.
//
// Contract: a plain value.
#pragma once

#include "../../config.hpp"

namespace kvq { inline namespace KVQ_TAGGED { namespace cuda {

/// Tensors whose scheme is the same before and after.
struct kept_tensors {
    bool keys = false, values = false;
};

}}}  // namespace kvq::cuda
