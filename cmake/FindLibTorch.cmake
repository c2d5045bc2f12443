# Finds LibTorch without LibTorch's own CMake package, which stops with an error when the wheel is a CUDA build and
# the machine has no CUDA toolkit.
#
# Looks, in this order, in: LIBTORCH_ROOT, Torch_DIR and CMAKE_PREFIX_PATH (CMake variables, then environment
# variables), the `torch` that Python3_EXECUTABLE (or python3) can import. A root is the folder of a wheel or of an
# unpacked archive: it holds lib/libtorch_cpu.so and the headers in include/. A root that is named but does not hold
# them is an error, never passed over.
#
# Defines LibTorch::LibTorch (libtorch_cpu and libc10), LibTorch_VERSION, LibTorch_ROOT, LibTorch_LIBRARY_DIR,
# LibTorch_CUDA (the build has CUDA kernels: libtorch_cuda.so is loaded at run time, no toolkit needed), and when the
# toolkit's headers are there too LibTorch::CUDA and LibTorch::c10_cuda (streams and guards alone, for kernels). No OpenMP is linked: the wheel brings its own.

set(_libtorch_version_header include/torch/csrc/api/include/torch/version.h)

# _libtorch_is_root(RESULT folder): whether headers and libraries of LibTorch are there.
function(_libtorch_is_root result folder)
  if(EXISTS "${folder}/lib/libtorch_cpu.so" AND EXISTS "${folder}/lib/libc10.so"
     AND EXISTS "${folder}/${_libtorch_version_header}")
    set(${result} ON PARENT_SCOPE)
  else()
    set(${result} OFF PARENT_SCOPE)
  endif()
endfunction()

set(LibTorch_ROOT "")
set(_libtorch_named "${LIBTORCH_ROOT}")
if(NOT _libtorch_named)
  set(_libtorch_named "$ENV{LIBTORCH_ROOT}")
endif()
set(_libtorch_candidates)
if(_libtorch_named)
  get_filename_component(_libtorch_named "${_libtorch_named}" ABSOLUTE BASE_DIR "${CMAKE_BINARY_DIR}")
  set(_libtorch_candidates "${_libtorch_named}")
else()
  set(_libtorch_prefixes "$ENV{CMAKE_PREFIX_PATH}")
  string(REPLACE ":" ";" _libtorch_prefixes "${_libtorch_prefixes}")
  # Torch_DIR is ROOT/share/cmake/Torch, torch.utils.cmake_prefix_path is ROOT/share/cmake.
  foreach(_libtorch_dir IN ITEMS ${Torch_DIR} $ENV{Torch_DIR})
    get_filename_component(_libtorch_dir "${_libtorch_dir}/../../.." ABSOLUTE)
    list(APPEND _libtorch_candidates "${_libtorch_dir}")
  endforeach()
  foreach(_libtorch_dir IN LISTS CMAKE_PREFIX_PATH _libtorch_prefixes)
    list(APPEND _libtorch_candidates "${_libtorch_dir}")
    get_filename_component(_libtorch_dir "${_libtorch_dir}/../.." ABSOLUTE)
    list(APPEND _libtorch_candidates "${_libtorch_dir}")
  endforeach()
  set(_libtorch_python "${Python3_EXECUTABLE}")
  if(NOT _libtorch_python)
    find_program(_libtorch_python_program python3)
    mark_as_advanced(_libtorch_python_program)
    set(_libtorch_python "${_libtorch_python_program}")
  endif()
  if(_libtorch_python)
    execute_process(
      COMMAND "${_libtorch_python}" -c
        "import importlib.util as u; s = u.find_spec('torch'); print(s.submodule_search_locations[0] if s else '')"
      OUTPUT_VARIABLE _libtorch_dir OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    if(_libtorch_dir)
      list(APPEND _libtorch_candidates "${_libtorch_dir}")
    endif()
  endif()
endif()

foreach(_libtorch_dir IN LISTS _libtorch_candidates)
  _libtorch_is_root(_libtorch_ok "${_libtorch_dir}")
  if(_libtorch_ok)
    set(LibTorch_ROOT "${_libtorch_dir}")
    break()
  endif()
endforeach()

set(_libtorch_reason "LibTorch was not found. Try: ./quickstart --libtorch PATH, or cmake -DLIBTORCH_ROOT=PATH \
(the folder that holds lib/libtorch_cpu.so), or `pip install torch==2.13.0` for the python3 on PATH.")
if(_libtorch_named AND NOT LibTorch_ROOT)
  set(_libtorch_reason "LIBTORCH_ROOT is ${_libtorch_named}, but lib/libtorch_cpu.so, lib/libc10.so or \
${_libtorch_version_header} is not in it. Try: the folder of an unpacked LibTorch or of a Python `torch` package.")
endif()

if(LibTorch_ROOT)
  set(LibTorch_LIBRARY_DIR "${LibTorch_ROOT}/lib")
  set(_libtorch_text "")
  foreach(_libtorch_file IN ITEMS "${_libtorch_version_header}" include/torch/headeronly/version.h)
    if(EXISTS "${LibTorch_ROOT}/${_libtorch_file}")
      file(READ "${LibTorch_ROOT}/${_libtorch_file}" _libtorch_part)
      string(APPEND _libtorch_text "${_libtorch_part}")
    endif()
  endforeach()
  set(LibTorch_VERSION "")
  foreach(_libtorch_part IN ITEMS MAJOR MINOR PATCH)
    if(_libtorch_text MATCHES "#define TORCH_VERSION_${_libtorch_part} ([0-9]+)")
      list(APPEND LibTorch_VERSION "${CMAKE_MATCH_1}")
    endif()
  endforeach()
  string(REPLACE ";" "." LibTorch_VERSION "${LibTorch_VERSION}")
  if(LibTorch_FIND_VERSION AND LibTorch_VERSION VERSION_LESS LibTorch_FIND_VERSION)
    set(_libtorch_reason "LibTorch ${LibTorch_VERSION} at ${LibTorch_ROOT} is too old: Cohort needs \
${LibTorch_FIND_VERSION} to 2.14. Try: ./quickstart --libtorch PATH, or `pip install torch==2.13.0`.")
  endif()
endif()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(LibTorch
  REQUIRED_VARS LibTorch_ROOT VERSION_VAR LibTorch_VERSION REASON_FAILURE_MESSAGE "${_libtorch_reason}")

if(LibTorch_FOUND AND NOT TARGET LibTorch::LibTorch)
  # The files name each other by soname ($ORIGIN in their run path), so the linker is told where to look for them.
  add_library(LibTorch::c10 SHARED IMPORTED)
  set_target_properties(LibTorch::c10 PROPERTIES IMPORTED_LOCATION "${LibTorch_LIBRARY_DIR}/libc10.so"
    IMPORTED_SONAME libc10.so)
  add_library(LibTorch::LibTorch SHARED IMPORTED)
  set_target_properties(LibTorch::LibTorch PROPERTIES
    IMPORTED_LOCATION "${LibTorch_LIBRARY_DIR}/libtorch_cpu.so"
    IMPORTED_SONAME libtorch_cpu.so
    INTERFACE_LINK_LIBRARIES LibTorch::c10
    INTERFACE_COMPILE_DEFINITIONS "USE_DISTRIBUTED;USE_C10D_GLOO;USE_RPC;USE_TENSORPIPE"
    INTERFACE_COMPILE_FEATURES cxx_std_20
    INTERFACE_INCLUDE_DIRECTORIES
      "${LibTorch_ROOT}/include;${LibTorch_ROOT}/include/torch/csrc/api/include")

  set(LibTorch_CUDA OFF)
  set(_libtorch_note "CPU build")
  if(EXISTS "${LibTorch_LIBRARY_DIR}/libtorch_cuda.so")
    set(LibTorch_CUDA ON)
    set(_libtorch_note "CUDA build, no CUDA toolkit found (CUDA devices work; CUDA sources are not compiled)")
    # libtorch_cpu.so of a CUDA build names CUDA's own libraries, which the loader finds beside the wheel but the
    # linker need not see.
    set_target_properties(LibTorch::LibTorch PROPERTIES
      INTERFACE_LINK_OPTIONS "LINKER:--allow-shlib-undefined;LINKER:--unresolved-symbols=ignore-in-shared-libs")
    find_package(CUDAToolkit QUIET)
    if(CUDAToolkit_FOUND AND EXISTS "${LibTorch_LIBRARY_DIR}/libc10_cuda.so")
      add_library(LibTorch::c10_cuda INTERFACE IMPORTED)
      set_target_properties(LibTorch::c10_cuda PROPERTIES INTERFACE_LINK_LIBRARIES
        "LibTorch::c10;${LibTorch_LIBRARY_DIR}/libc10_cuda.so;CUDA::cudart")
      add_library(LibTorch::CUDA INTERFACE IMPORTED)
      set_target_properties(LibTorch::CUDA PROPERTIES INTERFACE_LINK_LIBRARIES
        "LibTorch::LibTorch;${LibTorch_LIBRARY_DIR}/libtorch_cuda.so;LibTorch::c10_cuda")
      set(_libtorch_note "CUDA build, toolkit ${CUDAToolkit_VERSION}")
    endif()
  endif()
  message(STATUS "LibTorch ${LibTorch_VERSION} at ${LibTorch_ROOT} (${_libtorch_note})")
endif()
