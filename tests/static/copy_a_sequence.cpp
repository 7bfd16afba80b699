// expect: use fork()
// SPDX-License-Identifier: MIT
#include <kvq/cache/sequence.hpp>

// Sharing pages is what fork() is for; a copy would hide it. Compilers show the line that says so.
auto copy(const kvq::sequence& sequence) {
    kvq::sequence other(sequence);
    return other.tokens();
}
