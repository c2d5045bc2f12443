find_package(yaml-cpp REQUIRED)
find_package(nlohmann_json REQUIRED)

# Configuration, sinks and progress: no LibTorch. yaml-cpp's target was renamed in 0.8.
set(_yaml_cpp yaml-cpp)
if(TARGET yaml-cpp::yaml-cpp)
  set(_yaml_cpp yaml-cpp::yaml-cpp)
endif()
cohort_library(config
  SOURCES
    best_metric.cpp
    config.cpp
    config_docs.cpp
    config_keys.cpp
    config_reader.cpp
    config_resume.cpp
    config_tables_data.cpp
    config_tables_run.cpp
    config_tables_train.cpp
    config_types.cpp
    config_values.cpp
    flat_keys.cpp
    renamed_keys.cpp
    progress.cpp
    yaml_text.cpp
    sinks/curves.cpp
    sinks/metrics_log.cpp
    sinks/tensorboard.cpp
  LIBS cohort::base
  PRIVATE_LIBS ${_yaml_cpp} nlohmann_json::nlohmann_json)
