# An overlay port of the checkout that it lies in: vcpkg install kvq --overlay-ports=packaging/vcpkg --binarysource=clear
get_filename_component(SOURCE_PATH "${CURRENT_PORT_DIR}/../../.." ABSOLUTE)
if(NOT "library" IN_LIST FEATURES)
  set(VCPKG_BUILD_TYPE release) # headers only
endif()

vcpkg_check_features(OUT_FEATURE_OPTIONS options FEATURES library KVQ_LIBRARY)
vcpkg_cmake_configure(SOURCE_PATH "${SOURCE_PATH}"
                      OPTIONS ${options} -DKVQ_TESTS=OFF -DKVQ_EXAMPLES=OFF -DKVQ_BENCH=OFF)
vcpkg_cmake_install()
vcpkg_cmake_config_fixup(PACKAGE_NAME kvq CONFIG_PATH share/cmake/kvq)
vcpkg_fixup_pkgconfig()

file(REMOVE_RECURSE "${CURRENT_PACKAGES_DIR}/debug/include" "${CURRENT_PACKAGES_DIR}/debug/share"
     "${CURRENT_PACKAGES_DIR}/share/doc")
file(INSTALL "${CMAKE_CURRENT_LIST_DIR}/usage" DESTINATION "${CURRENT_PACKAGES_DIR}/share/${PORT}")
vcpkg_install_copyright(FILE_LIST "${SOURCE_PATH}/LICENSE")
