/* SPDX-License-Identifier: MIT */
/* kvq_cuda.h alone, twice, in C99 and in C++98. */
#include <kvq/kvq_cuda.h>

int use_header(void);
int use_header(void) {
    kvq_cuda_cache_options options;
    kvq_cuda_attend_options how;
    KVQ_INIT(options);
    KVQ_INIT(how);
    options.sinks = KVQ_NONE;
    how.softcap = 30.0f;
    return kvq_cuda_cache_create(&options, NULL, NULL) == KVQ_ERROR_HANDLE && options.size == sizeof(options);
}
