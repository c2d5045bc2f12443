#pragma once

#include <nlohmann/json.hpp>
#include <string>

/// Names of files and folders in JSON: they may be any bytes, and a text of JSON is UTF-8.
namespace cohort::train {

/// The text; where it is not UTF-8, a list of its bytes.
nlohmann::json text_to_json(const std::string& text);
/// Throws: nlohmann::json::exception for what text_to_json() does not make.
std::string text_from_json(const nlohmann::json& value);

}  // namespace cohort::train
