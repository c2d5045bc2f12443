// Any bytes as a configuration: it is read, or rejected with an Error; what is read dumps and reads back the
// same.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "cohort/base/error.h"
#include "cohort/config/config.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace cohort::config;
  Config config;
  try {
    config = load_config_text({reinterpret_cast<const char*>(data), size}, "fuzz.yaml");
  } catch (const cohort::Error&) {
    return 0;
  }
  if (!(load_config_text(dump_config(config), "dump.yaml") == config)) std::abort();
  return 0;
}
