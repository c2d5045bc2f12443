#include "cohort/train/internal/json_text.h"

#include <vector>

namespace cohort::train {

using nlohmann::json;

json text_to_json(const std::string& text) {
  try {
    const json whole = text;
    // dump() is what finds text that is not UTF-8, such as a file's name; a json value takes it unseen.
    static_cast<void>(whole.dump());
    return whole;
  } catch (const json::exception&) {
    // As a list of numbers, so that every byte comes back.
    return std::vector<unsigned char>(text.begin(), text.end());
  }
}

std::string text_from_json(const json& value) {
  if (value.is_string()) return value.get<std::string>();
  const auto bytes = value.get<std::vector<unsigned char>>();
  return {bytes.begin(), bytes.end()};
}

}  // namespace cohort::train
