# The target kvq_quality_schemes: what bench_quality, bench_ablation and examples/llama compare.
include_guard(GLOBAL)

add_library(kvq_quality_schemes STATIC ${CMAKE_CURRENT_LIST_DIR}/quality_schemes.cpp)
target_link_libraries(kvq_quality_schemes PUBLIC kvq::library PRIVATE kvq_dev)
