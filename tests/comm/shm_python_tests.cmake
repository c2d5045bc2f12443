# PyTorch's torch.distributed over libcohort_shm. The module is compiled when the tests run, for the Python that runs
# them. Not under sanitizers: Python would need their runtime before everything else.
if(NOT COHORT_READERS_ONLY AND NOT COHORT_SANITIZE)
  set(_cohort_python_test
    sh -c [[exec "${COHORT_PYTHON:?is not set: a Python with torch (./test sets it)}" "$@"]] sh)
  set(_cohort_python_folders "${PROJECT_SOURCE_DIR}" "$<TARGET_FILE_DIR:cohort_shm>")
  set(_cohort_python_environment OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=1 "CXX=${CMAKE_CXX_COMPILER}"
    "TORCH_EXTENSIONS_DIR=${CMAKE_CURRENT_BINARY_DIR}/python")
  foreach(_cohort_what build 2 3)
    add_test(NAME comm_shm_python.${_cohort_what} COMMAND ${_cohort_python_test}
      "${CMAKE_CURRENT_SOURCE_DIR}/shm_python_test.py" ${_cohort_what} ${_cohort_python_folders} "${LibTorch_VERSION}")
  endforeach()
  foreach(_cohort_what sample all)
    add_test(NAME comm_shm_python.pytorch_${_cohort_what} COMMAND ${_cohort_python_test}
      "${CMAKE_CURRENT_SOURCE_DIR}/pytorch_distributed_test.py" ${_cohort_what} ${_cohort_python_folders} "${LibTorch_VERSION}")
    set_tests_properties(comm_shm_python.pytorch_${_cohort_what} PROPERTIES
      LABELS multiproc TIMEOUT 300 PROCESSORS 3 ENVIRONMENT "${_cohort_python_environment}" FIXTURES_REQUIRED shm_python)
  endforeach()
  set_tests_properties(comm_shm_python.pytorch_all PROPERTIES LABELS "multiproc;slow" PROCESSORS 3 TIMEOUT 3600)
  add_test(NAME examples.shm_in_python COMMAND ${_cohort_python_test}
    -m torch.distributed.run --standalone --nproc-per-node 2
    "${PROJECT_SOURCE_DIR}/examples/shm_in_python/main.py" ${_cohort_python_folders} 40)
  set_tests_properties(comm_shm_python.build comm_shm_python.2 comm_shm_python.3 examples.shm_in_python PROPERTIES
    LABELS multiproc TIMEOUT 300 PROCESSORS 3 ENVIRONMENT "${_cohort_python_environment}")
  set_tests_properties(comm_shm_python.build PROPERTIES FIXTURES_SETUP shm_python)
  set_tests_properties(comm_shm_python.2 comm_shm_python.3 examples.shm_in_python PROPERTIES FIXTURES_REQUIRED shm_python)
endif()
