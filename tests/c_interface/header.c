/* SPDX-License-Identifier: MIT */
/* kvq.h alone, twice, in C99 and in C++98. */
#include <kvq/kvq.h>

int use_header(void);
int use_header(void) {
    kvq_cache_options options;
    kvq_mods mods;
    KVQ_INIT(options);
    KVQ_INIT(mods);
    options.sinks = KVQ_NONE;
    mods.direction = KVQ_BIDIRECTIONAL;
    return kvq_cache_create(&options, NULL) == KVQ_ERROR_HANDLE && options.size == sizeof(options);
}
