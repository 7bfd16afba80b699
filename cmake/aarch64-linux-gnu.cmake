# Cross compilation to 64-bit ARM with Debian's g++-aarch64-linux-gnu; programs run under qemu-user.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64 -L /usr/aarch64-linux-gnu)

# The compiler looks into /usr/include by itself, which is where header-only libraries are; but Debian keeps the
# CMake package of xsimd in the library folder of the building machine's architecture.
file(GLOB kvq_xsimd_dir /usr/lib/*-linux-gnu/cmake/xsimd)
if(kvq_xsimd_dir)
  list(GET kvq_xsimd_dir 0 kvq_xsimd_dir)
  set(xsimd_DIR ${kvq_xsimd_dir} CACHE PATH "")
endif()
