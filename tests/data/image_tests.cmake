# Codecs and transforms, without LibTorch; and the fuzzer's corpus, replayed.
find_package(JPEG REQUIRED)  # a test writes files that Pillow cannot write
set(_image_tests
  codecs/codec_test.cpp codecs/faults_test.cpp codecs/region_test.cpp transforms/geometry_test.cpp
  transforms/transform_pipeline_test.cpp transforms/resample_test.cpp transforms/steady_state_test.cpp
  ../fuzz/image_fuzzer.cpp ../fuzz/image_replay_test.cpp)
list(TRANSFORM _image_tests PREPEND "${CMAKE_CURRENT_LIST_DIR}/")
cohort_test(image SOURCES ${_image_tests} LIBS cohort::image JPEG::JPEG)
