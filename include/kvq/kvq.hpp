// kvq: every header of a cache, without the kernels of formats. Finer includes work as well; see
// docs/reference/architecture.md.
//
//   formats come from   cpu/simd.hpp         make_format<Scheme>(), for the instructions that this build
//                                            allows
//                       format/find_format.hpp    find_format("kivi-4-g64", tensor::key), from the compiled
//                                                 library
//                       format/make_format.hpp    make_format<Scheme, scalar>(), which needs only the
//                                                 standard library
#pragma once

#include "cache/cache.hpp"
#include "cache/preset_options.hpp"
#include "cache/rearrange.hpp"
#include "cache/retain.hpp"
#include "cache/sequence.hpp"
#include "cache/step_down.hpp"
#include "cache/usage.hpp"
#include "estimate/budget.hpp"
#include "estimate/bytes.hpp"
#include "estimate/footprint.hpp"
#include "format/bounds.hpp"
#include "format/latent.hpp"
#include "format/planes.hpp"
#include "version.hpp"
