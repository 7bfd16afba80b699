# Targets that bring a third-party library along:
#
#   kvq::simd    kvq::kvq and xsimd, for <kvq/cpu/simd.hpp>
#   kvq::eigen   kvq::kvq and Eigen, for <kvq/adapters/eigen.hpp>
#   kvq::io      kvq::kvq and nlohmann-json, for <kvq/io/file.hpp> and the headers below it
#
# kvq_find_component(<simd|eigen|io> [GLOBAL]) defines one of them and sets kvq_<component>_FOUND,
# quietly and only if the library is there (already a target of this build, or found as a package).

macro(kvq_find_component component)
  set(kvq_${component}_FOUND FALSE)
  if("${component}" STREQUAL "simd")
    # Its own CMake package says xsimd, a source tree says xsimd::xsimd as well.
    set(kvq_component_package xsimd)
    set(kvq_component_targets xsimd::xsimd xsimd)
  elseif("${component}" STREQUAL "eigen")
    set(kvq_component_package Eigen3)
    set(kvq_component_targets Eigen3::Eigen)
  else()
    set(kvq_component_package nlohmann_json)
    set(kvq_component_targets nlohmann_json::nlohmann_json)
  endif()

  kvq_first_target(kvq_component_target ${kvq_component_targets})
  if(NOT kvq_component_target)
    find_package(${kvq_component_package} QUIET CONFIG)
    kvq_first_target(kvq_component_target ${kvq_component_targets})
  endif()

  if(kvq_component_target)
    set(kvq_${component}_FOUND TRUE)
    if(NOT TARGET kvq::${component})
      add_library(kvq::${component} INTERFACE IMPORTED ${ARGN})
      # Headers only, and no more than that: the xsimd package of Debian 12 also asks for a library "xtl" that
      # nothing provides.
      get_target_property(kvq_component_includes ${kvq_component_target} INTERFACE_INCLUDE_DIRECTORIES)
      target_include_directories(kvq::${component} SYSTEM INTERFACE ${kvq_component_includes})
      target_link_libraries(kvq::${component} INTERFACE kvq::kvq)
    endif()
  endif()
endmacro()

function(kvq_first_target result)
  set(${result} "" PARENT_SCOPE)
  foreach(name IN LISTS ARGN)
    if(TARGET ${name})
      set(${result} ${name} PARENT_SCOPE)
      return()
    endif()
  endforeach()
endfunction()
