# `cmake --install`: libraries, headers, the program and a package for find_package(Cohort), which finds it in the build
# folder too.
get_property(_libraries GLOBAL PROPERTY COHORT_LIBRARIES)
include(CMakePackageConfigHelpers)
if(_libraries)
  install(TARGETS ${_libraries} EXPORT CohortTargets LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
  # What lies under internal/ is not for users.
  install(DIRECTORY cohort/ DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/cohort FILES_MATCHING PATTERN "*.h"
    PATTERN "declarations" EXCLUDE PATTERN "internal" EXCLUDE)
  install(EXPORT CohortTargets NAMESPACE cohort:: DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/Cohort)
  configure_package_config_file(cmake/CohortConfig.cmake.in ${PROJECT_BINARY_DIR}/CohortConfig.cmake
    INSTALL_DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/Cohort)
  write_basic_package_version_file(${PROJECT_BINARY_DIR}/CohortConfigVersion.cmake COMPATIBILITY SameMinorVersion)
  install(FILES ${PROJECT_BINARY_DIR}/CohortConfig.cmake ${PROJECT_BINARY_DIR}/CohortConfigVersion.cmake
    cmake/FindLibTorch.cmake DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/Cohort)
  export(EXPORT CohortTargets NAMESPACE cohort:: FILE ${PROJECT_BINARY_DIR}/CohortTargets.cmake)
  configure_file(cmake/FindLibTorch.cmake ${PROJECT_BINARY_DIR}/FindLibTorch.cmake COPYONLY)
endif()
