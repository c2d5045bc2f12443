# Finds LibTorch without LibTorch's own CMake package, which stops with an error when the wheel is a CUDA build and
# the machine has no CUDA toolkit.
#
# Looks, in this order, in: LIBTORCH_ROOT (cache variable), Torch_DIR, CMAKE_PREFIX_PATH, the `torch` that
# Python3_EXECUTABLE (or python3) can import. A root is a folder with include/torch/version.h (or
# include/torch/headeronly/version.h) and lib/libtorch_cpu.so.
#
# Defines LibTorch::LibTorch (libtorch_cpu and libc10), LibTorch_VERSION, LibTorch_ROOT, LibTorch_LIBRARY_DIR,
# LibTorch_CUDA (the build has CUDA kernels: libtorch_cuda.so is loaded at run time, no toolkit needed), and
# LibTorch::CUDA when the toolkit's headers are there too. No OpenMP is linked: the wheel brings its own.

set(_candidates)
if(LIBTORCH_ROOT)
  list(APPEND _candidates "${LIBTORCH_ROOT}")
else()
  if(Torch_DIR)
    get_filename_component(_root "${Torch_DIR}/../../.." ABSOLUTE)
    list(APPEND _candidates "${_root}")
  endif()
  foreach(_prefix IN LISTS CMAKE_PREFIX_PATH)
    list(APPEND _candidates "${_prefix}")
    get_filename_component(_root "${_prefix}/../.." ABSOLUTE)  # torch.utils.cmake_prefix_path is ROOT/share/cmake
    list(APPEND _candidates "${_root}")
  endforeach()
  if(NOT Python3_EXECUTABLE)
    find_program(Python3_EXECUTABLE python3)
  endif()
  if(Python3_EXECUTABLE)
    execute_process(
      COMMAND "${Python3_EXECUTABLE}" -c
        "import importlib.util as u; s = u.find_spec('torch'); print(s.submodule_search_locations[0] if s else '')"
      OUTPUT_VARIABLE _root OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    if(_root)
      list(APPEND _candidates "${_root}")
    endif()
  endif()
endif()

foreach(_root IN LISTS _candidates)
  if(EXISTS "${_root}/lib/libtorch_cpu.so" AND EXISTS "${_root}/include/torch/csrc/api/include/torch/version.h")
    set(LibTorch_ROOT "${_root}")
    break()
  endif()
endforeach()

if(LibTorch_ROOT)
  set(LibTorch_LIBRARY_DIR "${LibTorch_ROOT}/lib")
  set(_version_text "")
  foreach(_file include/torch/csrc/api/include/torch/version.h include/torch/headeronly/version.h)
    if(EXISTS "${LibTorch_ROOT}/${_file}")
      file(READ "${LibTorch_ROOT}/${_file}" _text)
      string(APPEND _version_text "${_text}")
    endif()
  endforeach()
  foreach(_part MAJOR MINOR PATCH)
    if(_version_text MATCHES "#define TORCH_VERSION_${_part} ([0-9]+)")
      set(_${_part} "${CMAKE_MATCH_1}")
    endif()
  endforeach()
  set(LibTorch_VERSION "${_MAJOR}.${_MINOR}.${_PATCH}")
endif()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(LibTorch
  REQUIRED_VARS LibTorch_ROOT VERSION_VAR LibTorch_VERSION
  REASON_FAILURE_MESSAGE "LibTorch was not found. Try: ./quickstart --libtorch PATH, or cmake -DLIBTORCH_ROOT=PATH \
(the folder that holds lib/libtorch_cpu.so), or `pip install torch==2.13.0` for the python3 on PATH.")

if(LibTorch_FOUND AND NOT TARGET LibTorch::LibTorch)
  add_library(LibTorch::c10 SHARED IMPORTED)
  set_target_properties(LibTorch::c10 PROPERTIES IMPORTED_LOCATION "${LibTorch_LIBRARY_DIR}/libc10.so"
    IMPORTED_NO_SONAME ON)
  add_library(LibTorch::LibTorch SHARED IMPORTED)
  set_target_properties(LibTorch::LibTorch PROPERTIES
    IMPORTED_LOCATION "${LibTorch_LIBRARY_DIR}/libtorch_cpu.so"
    INTERFACE_LINK_LIBRARIES LibTorch::c10
    INTERFACE_COMPILE_DEFINITIONS "USE_DISTRIBUTED;USE_C10D_GLOO;USE_RPC;USE_TENSORPIPE"
    INTERFACE_COMPILE_FEATURES cxx_std_20
    INTERFACE_INCLUDE_DIRECTORIES
      "${LibTorch_ROOT}/include;${LibTorch_ROOT}/include/torch/csrc/api/include")

  set(LibTorch_CUDA OFF)
  set(_cuda_note "CPU build")
  if(EXISTS "${LibTorch_LIBRARY_DIR}/libtorch_cuda.so")
    set(LibTorch_CUDA ON)
    set(_cuda_note "CUDA build, no CUDA toolkit found (CUDA devices work; CUDA sources are not compiled)")
    find_package(CUDAToolkit QUIET)
    if(CUDAToolkit_FOUND)
      add_library(LibTorch::CUDA INTERFACE IMPORTED)
      set_target_properties(LibTorch::CUDA PROPERTIES INTERFACE_LINK_LIBRARIES
        "LibTorch::LibTorch;${LibTorch_LIBRARY_DIR}/libtorch_cuda.so;${LibTorch_LIBRARY_DIR}/libc10_cuda.so;CUDA::cudart")
      set(_cuda_note "CUDA build, toolkit ${CUDAToolkit_VERSION}")
    endif()
  endif()
  message(STATUS "LibTorch ${LibTorch_VERSION} at ${LibTorch_ROOT} (${_cuda_note})")
endif()
