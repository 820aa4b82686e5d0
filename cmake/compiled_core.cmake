# Extension modules beside the Python modules that they are translated from, which Python imports before those.
set(GENERATED ${CMAKE_CURRENT_BINARY_DIR}/compiled_core)
execute_process(
  COMMAND "${Python_EXECUTABLE}" ${CMAKE_CURRENT_LIST_DIR}/compiled_core.py ${CMAKE_CURRENT_SOURCE_DIR}/src ${GENERATED}
  OUTPUT_VARIABLE said ERROR_VARIABLE said RESULT_VARIABLE status)
if(NOT status EQUAL 0)
  message(WARNING "core/ stays interpreted, since it could not be translated:\n${said}")
  return()
endif()
enable_language(C)

function(headrace_add_extension name)
  string(REGEX MATCH "^(.+)\\.([^.]+)$" _ ${name})
  string(REPLACE "." "/" folder ${CMAKE_MATCH_1})
  set(file ${CMAKE_MATCH_2})
  string(REPLACE "." "_" target ${name})
  Python_add_library(${target} MODULE WITH_SOABI ${ARGN})
  set_target_properties(${target} PROPERTIES OUTPUT_NAME ${file} LIBRARY_OUTPUT_DIRECTORY ${GENERATED}/lib/${folder})
  target_include_directories(${target} PRIVATE ${MYPYC_INCLUDE_DIR} ${GENERATED} ${GENERATED}/headrace)
  # The calls into the interpreter are what takes the time: -O2 compiles twice as long for hardly a difference.
  target_compile_options(${target} PRIVATE -O1 -fwrapv -w)
  install(TARGETS ${target} LIBRARY DESTINATION ${folder})
endfunction()

include(${GENERATED}/sources.cmake)
