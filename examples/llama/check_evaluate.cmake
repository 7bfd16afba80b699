# cmake -D PROGRAM=kvq_llama -D DATA=folder -D WORK=folder -P check_evaluate.cmake
file(REMOVE_RECURSE ${WORK})
file(MAKE_DIRECTORY ${WORK})
set(arguments evaluate ${DATA}/stories260K.bin ${DATA}/tinystories.txt --tokenizer ${DATA}/stories260K.tokenizer.bin --tokens 1500
              --schemes int8,std4+stats --page-tokens 64 --threads 2 --no-progress --json)

# `result`: what it prints, without the times.
function(run expected_status result)
  execute_process(COMMAND ${PROGRAM} ${arguments} ${ARGN} RESULT_VARIABLE status OUTPUT_VARIABLE out ERROR_VARIABLE err)
  if(NOT status EQUAL expected_status)
    message(FATAL_ERROR "${ARGN}: exit status ${status}, not ${expected_status}\n${out}\n${err}")
  endif()
  string(REGEX REPLACE "\"tokens_per_second\":[^}]*" "" out "${out}")
  set(${result} "${out}${err}" PARENT_SCOPE)
endfunction()
function(expect text part)
  string(FIND "${text}" "${part}" at)
  if(at EQUAL -1)
    message(FATAL_ERROR "no \"${part}\" in\n${text}")
  endif()
endfunction()

# Two programs share the windows of a record. What is printed from it is what one program without a record finds.
run(0 whole)
run(0 first --record ${WORK}/record --part 1/2)
run(0 second --record ${WORK}/record --part 2/2)
file(STRINGS ${WORK}/record lines)
list(LENGTH lines count)
if(NOT count EQUAL 9)
  message(FATAL_ERROR "3 windows with 3 schemes are ${count} lines")
endif()
run(0 all --record ${WORK}/record)
file(STRINGS ${WORK}/record lines_after)
if(NOT lines STREQUAL lines_after)
  message(FATAL_ERROR "a complete record has changed")
endif()
if(NOT all STREQUAL whole)
  message(FATAL_ERROR "from a record:\n${all}\nwithout:\n${whole}")
endif()

# Interrupted in the middle of a line: that window is judged again.
file(READ ${WORK}/record text)
string(LENGTH "${text}" size)
math(EXPR size "${size} - 100")
string(SUBSTRING "${text}" 0 ${size} text)
file(WRITE ${WORK}/record "${text}")
run(0 again --record ${WORK}/record)
if(NOT again STREQUAL whole)
  message(FATAL_ERROR "from a record that was cut off:\n${again}\nwithout:\n${whole}")
endif()

# Other conditions, something else, no such part.
run(1 message --record ${WORK}/record --window 300)
expect("${message}" "another window: 512, not 300")
file(WRITE ${WORK}/text "Once upon a time\n")
run(1 message --record ${WORK}/text)
expect("${message}" "is no record of an evaluation")
run(1 message --part 3/2)
expect("${message}" "--part 3/2 is not like 1/4")
run(1 message --part 4/4)
expect("${message}" "the text has only 3 windows or fewer")

# Tokens of prompts that are dropped: half of the bytes, and all of them are what they were.
execute_process(
  COMMAND ${PROGRAM} drop ${DATA}/stories260K.bin ${DATA}/tinystories.txt --tokenizer ${DATA}/stories260K.tokenizer.bin --window 512
          --prompt 400 --tokens 511 --schemes int8 --sinks 4 --keep 1,0.5 --probes 2 --json
  OUTPUT_VARIABLE dropped
  RESULT_VARIABLE status)
string(REGEX MATCHALL "\"of_fp16\":[0-9.]+" shares "${dropped}")
if(NOT status EQUAL 0 OR NOT shares MATCHES
                             "^\"of_fp16\":1.0;\"of_fp16\":0.[56][0-9]*;\"of_fp16\":0.[5-8][0-9]*;\"of_fp16\":0.[3-5][0-9]*$")
  message(FATAL_ERROR "bytes of fp16 and int8, with all and with half of the tokens:\n${dropped}")
endif()
