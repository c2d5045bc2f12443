# What each compiler is started through: compile.sh, with ccache where it is installed, and with clang in place of g++ for
# tests, benchmarks and examples (COHORT_TESTS_BY_CLANG) where that is. Neither is needed.
set(COHORT_TESTS_BY_CLANG OFF)
if(NOT DEFINED CMAKE_CXX_COMPILER_LAUNCHER)
  set(CMAKE_CXX_COMPILER_LAUNCHER "${CMAKE_CURRENT_LIST_DIR}/compile.sh")
  if(COHORT_CCACHE)
    find_program(COHORT_CCACHE_PROGRAM ccache)
    mark_as_advanced(COHORT_CCACHE_PROGRAM)
    if(COHORT_CCACHE_PROGRAM)
      list(APPEND CMAKE_CXX_COMPILER_LAUNCHER --through "${COHORT_CCACHE_PROGRAM}")
    endif()
  endif()
  # A sanitizer's library is its compiler's, so then one compiler makes all.
  if(COHORT_CLANG_FOR_TESTS AND COHORT_BUILD_TESTS AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND NOT COHORT_SANITIZE)
    find_program(COHORT_CLANG_PROGRAM NAMES clang++-19 clang++-18 clang++-17 clang++-16)
    mark_as_advanced(COHORT_CLANG_PROGRAM)
    # It takes the newest g++'s headers, which may not be there.
    if(COHORT_CLANG_PROGRAM)
      file(WRITE "${PROJECT_BINARY_DIR}/clang_probe.cpp" "#include <filesystem>\n#include <ranges>\n")
      execute_process(COMMAND "${COHORT_CLANG_PROGRAM}" -std=c++20 -fsyntax-only "${PROJECT_BINARY_DIR}/clang_probe.cpp"
        RESULT_VARIABLE _clang_fails OUTPUT_QUIET ERROR_QUIET)
    endif()
    if(COHORT_CLANG_PROGRAM AND NOT _clang_fails)
      set(COHORT_TESTS_BY_CLANG ON)
    endif()
  endif()
endif()
