# Codecs and transforms: they read untrusted bytes, so no LibTorch.
find_package(JPEG REQUIRED)
find_package(PNG REQUIRED)
set(_image_sources
  codecs/codec.cpp codecs/internal/color.cpp codecs/encode.cpp codecs/internal/jpeg_reader.cpp codecs/internal/png_reader.cpp
  transforms/geometry.cpp transforms/transform_pipeline.cpp transforms/internal/resample.cpp transforms/transform.cpp
  transforms/transform_registry.cpp)
list(TRANSFORM _image_sources PREPEND "${CMAKE_CURRENT_LIST_DIR}/")
cohort_library(image
  SOURCES ${_image_sources}
  LIBS cohort::base
  PRIVATE_LIBS JPEG::JPEG PNG::PNG)
