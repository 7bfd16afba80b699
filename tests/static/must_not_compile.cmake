# cmake -P must_not_compile.cmake <source> <case> <precompiled header, or none> <compiler> [flags...]
#
# The source must be refused with -DCASE=<case>, with the message and at most as many errors as it says there: see refused.cpp.

set(arguments "")
math(EXPR last "${CMAKE_ARGC} - 1")
foreach(i RANGE 3 ${last})
  list(APPEND arguments "${CMAKE_ARGV${i}}")
endforeach()
list(POP_FRONT arguments source case precompiled)

file(READ "${source}" text)
string(FIND "${text}" "\n#if CASE == ${case}  // " begin)
string(SUBSTRING "${text}" ${begin} -1 text)
string(FIND "${text}" "\n#endif" end)
string(SUBSTRING "${text}" 0 ${end} text)
if(NOT text MATCHES "^\n#if CASE == [0-9]+  // ([a-z0-9_]+)\n// expect: ([^\n]+)\n")
  message(FATAL_ERROR "${source}: case ${case} must begin with its name and '// expect: <a part of the error message>'")
endif()
set(name "${CMAKE_MATCH_1}")
set(expected "${CMAKE_MATCH_2}")
set(most_errors 3)
if(text MATCHES "\n// errors: ([0-9]+)\n")
  set(most_errors "${CMAKE_MATCH_1}")
endif()
# Macros of a case stand before the headers.
if(NOT precompiled STREQUAL "none" AND NOT text MATCHES "\n#define")
  list(APPEND arguments -include "${precompiled}")
endif()

execute_process(
  COMMAND ${arguments} -std=c++20 -fsyntax-only -DCASE=${case} "${source}"
  RESULT_VARIABLE status
  OUTPUT_VARIABLE output
  ERROR_VARIABLE output)

if(status EQUAL 0)
  message(FATAL_ERROR "${name} compiles, but must be refused with '${expected}'")
endif()
string(FIND "${output}" "${expected}" position)
if(position EQUAL -1)
  message(FATAL_ERROR "${name} is refused, but not with '${expected}':\n${output}")
endif()
string(REGEX MATCHALL "error:" errors "${output}")
list(LENGTH errors count)
if(count GREATER most_errors)
  message(FATAL_ERROR "${name} is refused with ${count} errors, at most ${most_errors} are allowed:\n${output}")
endif()
