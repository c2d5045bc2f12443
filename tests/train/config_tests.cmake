# Configuration, sinks and progress: without LibTorch, so they run under sanitizers too.
find_package(nlohmann_json REQUIRED)
cohort_test(train_config
  SOURCES config_test.cpp flat_keys_test.cpp renamed_keys_test.cpp sinks_test.cpp progress_test.cpp
  LIBS cohort::config nlohmann_json::nlohmann_json)
