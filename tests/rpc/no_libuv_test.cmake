# LibTorch's wheel exports the symbols of a libuv of another version. So what the agents run on has nothing of libuv.
#
#   cmake -DREADELF=readelf "-DLIBRARIES=libcohort_net.so;libcohort_rpc.so" -P no_libuv_test.cmake
foreach(library IN LISTS LIBRARIES)
  execute_process(COMMAND "${READELF}" --wide --dynamic --dyn-syms "${library}"
    RESULT_VARIABLE status OUTPUT_VARIABLE text ERROR_VARIABLE error)
  if(NOT status EQUAL 0 OR NOT text MATCHES "\\(NEEDED\\)[^\n]*libc\\.so" OR NOT text MATCHES " UND [a-z]")
    message(FATAL_ERROR "${READELF} cannot read ${library}: ${error}")
  endif()
  string(REGEX MATCHALL "\\(NEEDED\\)[^\n]*libuv[^\n]*| UND uv_[^\n]*" found "${text}")
  if(found)
    message(FATAL_ERROR "${library} uses libuv: ${found}")
  endif()
endforeach()
