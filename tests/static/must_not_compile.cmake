# cmake -P must_not_compile.cmake <source> <compiler> [flags...]
#
# The source must be refused, with a message that contains what its first line says:
#   // expect: <a part of the message>
# and with at most 3 errors: more would bury it. A second line may allow others:
#   // errors: <most>

set(arguments "")
math(EXPR last "${CMAKE_ARGC} - 1")
foreach(i RANGE 3 ${last})
  list(APPEND arguments "${CMAKE_ARGV${i}}")
endforeach()
list(POP_FRONT arguments source)

file(STRINGS "${source}" first_line LIMIT_COUNT 1)
if(NOT first_line MATCHES "^// expect: (.+)$")
  message(FATAL_ERROR "${source}: the first line must be '// expect: <a part of the error message>'")
endif()
set(expected "${CMAKE_MATCH_1}")
set(most_errors 3)
file(STRINGS "${source}" errors_line LIMIT_COUNT 1 REGEX "^// errors: [0-9]+$")
if(errors_line MATCHES "([0-9]+)$")
  set(most_errors "${CMAKE_MATCH_1}")
endif()

execute_process(
  COMMAND ${arguments} -std=c++20 -fsyntax-only "${source}"
  RESULT_VARIABLE status
  OUTPUT_VARIABLE output
  ERROR_VARIABLE output)

if(status EQUAL 0)
  message(FATAL_ERROR "${source} compiles, but must be refused with '${expected}'")
endif()
string(FIND "${output}" "${expected}" position)
if(position EQUAL -1)
  message(FATAL_ERROR "${source} is refused, but not with '${expected}':\n${output}")
endif()
string(REGEX MATCHALL "error:" errors "${output}")
list(LENGTH errors count)
if(count GREATER most_errors)
  message(FATAL_ERROR "${source} is refused with ${count} errors, at most ${most_errors} are allowed:\n${output}")
endif()
