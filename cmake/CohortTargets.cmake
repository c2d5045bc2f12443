# The three kinds of target that Cohort is made of. Each module's CMakeLists.txt names its sources by hand, so that
# what is built can be read there.

add_library(cohort_flags INTERFACE)
target_compile_options(cohort_flags INTERFACE -Wall -Wextra $<$<BOOL:${COHORT_WERROR}>:-Werror>)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  # False alarms on std::string, GCC bug 105651; the last two come with precompiled headers alone.
  target_compile_options(cohort_flags INTERFACE -Wno-restrict -Wno-stringop-overflow -Wno-array-bounds)
endif()
if(COHORT_SANITIZE)
  target_compile_options(cohort_flags INTERFACE
    -fsanitize=${COHORT_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer -g1)
  target_link_options(cohort_flags INTERFACE -fsanitize=${COHORT_SANITIZE})
  target_compile_definitions(cohort_flags INTERFACE COHORT_IS_SANITIZED)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    # False alarms, which GCC's manual promises beside sanitizers.
    target_compile_options(cohort_flags INTERFACE -Wno-maybe-uninitialized)
  elseif(COHORT_SANITIZE MATCHES "undefined")
    # clang's check of an object's type opens a pipe, and reports an error where no descriptor is left for one.
    target_compile_options(cohort_flags INTERFACE -fno-sanitize=vptr)
  endif()
endif()

# With COHORT_READERS_ONLY every target is still declared, but those that need LibTorch are left out of `all` (and of
# ctest), so module files need no conditions of their own.
# _cohort_needs_torch(RESULT target...): whether one of the targets is, or links, a library declared with TORCH.
function(_cohort_needs_torch result)
  set(${result} OFF PARENT_SCOPE)
  foreach(lib IN LISTS ARGN)
    if(TARGET ${lib})
      get_target_property(torch ${lib} COHORT_TORCH)
      if(torch)
        set(${result} ON PARENT_SCOPE)
        return()
      endif()
    endif()
  endforeach()
endfunction()

# cohort_precompile(NAME FLAGS target HEADERS header...): makes the target NAME, whose precompiled header others take with
# REUSE_FROM. Few headers: what functions in them instantiate, each source that takes them instantiates again, and an
# empty source beside <torch/torch.h> takes 6 s of compiling, beside <torch/nn/module.h> 3 and beside <ATen/ATen.h> 2.
function(cohort_precompile name)
  cmake_parse_arguments(arg "" "FLAGS" "HEADERS" ${ARGN})
  file(CONFIGURE OUTPUT "${PROJECT_BINARY_DIR}/${name}.cpp" CONTENT "// Has a precompiled header made.\n")
  add_library(${name} STATIC "${PROJECT_BINARY_DIR}/${name}.cpp")
  target_compile_features(${name} PUBLIC cxx_std_20)
  target_precompile_headers(${name} PRIVATE ${arg_HEADERS})
  target_link_libraries(${name} PRIVATE LibTorch::LibTorch Threads::Threads ${arg_FLAGS})
endfunction()

# cohort_library(NAME [TORCH] SOURCES file... [LIBS target...] [PRIVATE_LIBS target...])
# Adds the shared library libcohort_NAME, known as cohort::NAME. Without TORCH no LibTorch header can be
# included: readers of untrusted bytes are built so.
function(cohort_library name)
  cmake_parse_arguments(arg "TORCH" "" "SOURCES;LIBS;PRIVATE_LIBS" ${ARGN})
  add_library(cohort_${name} SHARED ${arg_SOURCES})
  add_library(cohort::${name} ALIAS cohort_${name})
  target_include_directories(cohort_${name} PUBLIC
    $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}> $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
  target_compile_features(cohort_${name} PUBLIC cxx_std_20)
  _cohort_needs_torch(torch ${arg_LIBS} ${arg_PRIVATE_LIBS})
  if(arg_TORCH)
    set(torch ON)
  endif()
  set_target_properties(cohort_${name} PROPERTIES COHORT_TORCH ${torch})
  if(torch AND COHORT_READERS_ONLY)
    set_target_properties(cohort_${name} PROPERTIES EXCLUDE_FROM_ALL ON)
    return()
  endif()
  target_link_libraries(cohort_${name}
    PUBLIC ${arg_LIBS} $<$<BOOL:${arg_TORCH}>:LibTorch::LibTorch>
    PRIVATE ${arg_PRIVATE_LIBS} Threads::Threads $<BUILD_INTERFACE:cohort_flags>)
  # Names in the anonymous namespaces of a library's sources differ for this.
  set_target_properties(cohort_${name} PROPERTIES UNITY_BUILD ${COHORT_UNITY} UNITY_BUILD_BATCH_SIZE 3)
  if(COHORT_UNITY AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    # It warns of headers, and takes a source that another one includes for one.
    target_compile_options(cohort_${name} PRIVATE -Wno-subobject-linkage)
  endif()
  if(torch AND TARGET cohort_headers)
    # Without cohort_NAME_EXPORTS, which would differ from what the header was compiled with.
    set_target_properties(cohort_${name} PROPERTIES DEFINE_SYMBOL "")
    target_precompile_headers(cohort_${name} REUSE_FROM cohort_headers)
  endif()
  set_target_properties(cohort_${name} PROPERTIES
    EXPORT_NAME ${name} VERSION ${PROJECT_VERSION} SOVERSION ${PROJECT_VERSION_MAJOR}
    INSTALL_RPATH "$ORIGIN;${LibTorch_LIBRARY_DIR};${COHORT_EXTRA_RPATH}")
  set_property(GLOBAL APPEND PROPERTY COHORT_LIBRARIES cohort_${name})
endfunction()

# _cohort_discover_suites(NAME LABELS TIMEOUT WAITS SLEEPS IDLES ALONE): as gtest_discover_tests() does for cases.
function(_cohort_discover_suites name labels timeout waits sleeps idles alone)
  set(suites "${CMAKE_CURRENT_BINARY_DIR}/${name}_suites.cmake")
  set(discover "${PROJECT_SOURCE_DIR}/tests/support/discover_suites.cmake")
  add_custom_command(TARGET ${name}_test POST_BUILD BYPRODUCTS "${suites}" VERBATIM
    COMMAND "${CMAKE_COMMAND}" -DPROGRAM=$<TARGET_FILE:${name}_test> -DPREFIX=${name} "-DLABELS=${labels}"
      -DTIMEOUT=${timeout} "-DWAITS=${waits}" "-DSLEEPS=${sleeps}" "-DIDLES=${idles}"
      "-DALONE=${alone}" "-DOUTPUT=${suites}" -P "${discover}")
  set_property(TARGET ${name}_test APPEND PROPERTY LINK_DEPENDS "${discover}")
  file(WRITE "${CMAKE_CURRENT_BINARY_DIR}/${name}_include.cmake"
    "if(EXISTS \"${suites}\")\n  include(\"${suites}\")\nelse()\n  add_test(${name}_NOT_BUILT ${name}_NOT_BUILT)\nendif()\n")
  set_property(DIRECTORY APPEND PROPERTY TEST_INCLUDE_FILES "${CMAKE_CURRENT_BINARY_DIR}/${name}_include.cmake")
endfunction()

# cohort_test(NAME [WAITS regex] [SLEEPS regex] [IDLES regex] [ALONE regex] SOURCES file... [LIBS target...] [LABELS label...])
# One GoogleTest executable, NAME_test. Of one with LibTorch every suite becomes a ctest test `NAME.Suite`, which runs each
# case in a process of its own; of others every case becomes one, `NAME.Suite.Case`. NAME is the module, or MODULE_part
# where a part needs no LibTorch and is to run under sanitizers too. WAITS: suites of these names, or where each case is a
# ctest test all of them, wait for deadlines and processes more than they compute. SLEEPS: they wait so, and compute a sixth of
# their time at most. ./test runs one of both that failed once more, alone: build/test/waiting_tests.txt. IDLES: as WAITS, but
# beside others no deadline passes too early, so that a failure is one. ALONE: suites of these names have threads for all cores,
# and take many times as long beside another test.
# ctest is given three slots for each core and two more. A test that computes takes three, one that waits or idles two, one that
# sleeps one: two sleep beside those that compute, so that no core has nothing to do meanwhile.
function(cohort_test name)
  cmake_parse_arguments(arg "" "WAITS;SLEEPS;IDLES;ALONE" "SOURCES;LIBS;LABELS" ${ARGN})
  add_executable(${name}_test ${arg_SOURCES})
  _cohort_needs_torch(torch ${arg_LIBS})
  if(torch AND COHORT_READERS_ONLY)
    set_target_properties(${name}_test PROPERTIES EXCLUDE_FROM_ALL ON)
    return()
  endif()
  target_link_libraries(${name}_test PRIVATE ${arg_LIBS} cohort_test_support cohort_test_flags)
  if(NOT torch)
    set_property(GLOBAL APPEND PROPERTY COHORT_READER_PROGRAMS ${name}_test)  # CohortTestSources.cmake
  endif()
  if(NOT arg_LABELS)
    set(arg_LABELS unit)
  endif()
  foreach(names IN LISTS arg_WAITS arg_SLEEPS)
    set_property(GLOBAL APPEND_STRING PROPERTY COHORT_WAITING_TESTS "^${name}\\..*(${names})\n")
  endforeach()
  set(timeout 300)
  if(COHORT_SANITIZE)
    set(timeout 1200)
  endif()
  if(torch)
    if(TARGET cohort_test_headers)
      target_precompile_headers(${name}_test REUSE_FROM cohort_test_headers)
    endif()
    target_link_libraries(${name}_test PRIVATE cohort_test_main)
    if(COHORT_UNITY AND COHORT_TESTS_BY_CLANG)
      # g++ would take more than 25 s for one of script's. Names in the anonymous namespaces of a program's sources differ.
      set_target_properties(${name}_test PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 4)
    endif()
    math(EXPR timeout "2 * ${timeout}")  # of all cases together; main.cpp ends one that takes too long
    _cohort_discover_suites(${name} "${arg_LABELS}" ${timeout} "${arg_WAITS}" "${arg_SLEEPS}" "${arg_IDLES}" "${arg_ALONE}")
  else()
    target_link_libraries(${name}_test PRIVATE GTest::gtest_main)
    set_target_properties(${name}_test PROPERTIES UNITY_BUILD ${COHORT_UNITY} UNITY_BUILD_BATCH_SIZE 4)
    set(processors 3)
    if(arg_WAITS OR arg_IDLES)
      set(processors 2)
    endif()
    gtest_discover_tests(${name}_test TEST_PREFIX "${name}." DISCOVERY_TIMEOUT 120
      PROPERTIES LABELS "${arg_LABELS}" TIMEOUT ${timeout} PROCESSORS ${processors} ENVIRONMENT "OMP_NUM_THREADS=1")
  endif()
endfunction()

set(COHORT_PROGRAM_FLAGS cohort_flags)
set(COHORT_PROGRAM_HEADERS cohort_program_headers)

# cohort_program(NAME SOURCES file... LIBS target...)
# An executable that is not installed: a benchmark, an example or a fuzzer's replay.
function(cohort_program name)
  cmake_parse_arguments(arg "" "" "SOURCES;LIBS" ${ARGN})
  add_executable(${name} ${arg_SOURCES})
  _cohort_needs_torch(torch ${arg_LIBS})
  if(torch AND COHORT_READERS_ONLY)
    set_target_properties(${name} PROPERTIES EXCLUDE_FROM_ALL ON)
    return()
  endif()
  target_link_libraries(${name} PRIVATE ${arg_LIBS} ${COHORT_PROGRAM_FLAGS})
  if(torch AND TARGET ${COHORT_PROGRAM_HEADERS})
    target_precompile_headers(${name} REUSE_FROM ${COHORT_PROGRAM_HEADERS})
  endif()
endfunction()

# _cohort_leave_out_torch(directory): leaves every target that links LibTorch out of `all`, those too that a module declared
# without the functions above (plug-ins of tests).
function(_cohort_leave_out_torch directory)
  get_property(targets DIRECTORY "${directory}" PROPERTY BUILDSYSTEM_TARGETS)
  foreach(target IN LISTS targets)
    get_target_property(libs ${target} LINK_LIBRARIES)
    if(libs)
      _cohort_needs_torch(torch ${libs})
      if(torch)
        set_target_properties(${target} PROPERTIES EXCLUDE_FROM_ALL ON)
      endif()
    endif()
  endforeach()
  get_property(subdirectories DIRECTORY "${directory}" PROPERTY SUBDIRECTORIES)
  foreach(subdirectory IN LISTS subdirectories)
    _cohort_leave_out_torch("${subdirectory}")
  endforeach()
endfunction()
