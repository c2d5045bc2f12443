#pragma once

#include <filesystem>
#include <fstream>
#include <regex>
#include <sstream>
#include <string>
#include <vector>

#include "tests/support/source_dir.h"

/// The examples in headers, to be compared with the tests that compile them.
namespace cohort::test {

/// Returns the lines of the examples in cohort/`header`, without indentation.
inline std::vector<std::string> example_of(const std::string& header) {
  std::ifstream file(source_dir() / "cohort" / header);
  std::vector<std::string> lines;
  for (std::string line; std::getline(file, line);) {
    std::smatch code;
    if (std::regex_match(line, code, std::regex(" */// {5,}(.*)"))) lines.push_back(code[1]);
  }
  return lines;
}

/// Returns the first of `lines` that `text` does not have after the ones before it; empty: it has all, in
/// their order. Indentation does not count.
inline std::string first_missing(const std::vector<std::string>& lines, const std::string& text) {
  std::istringstream here(text);
  for (const std::string& line : lines) {
    for (;;) {
      std::string found;
      if (!std::getline(here, found)) return line;
      const std::size_t begin = found.find_first_not_of(' ');
      if (begin != std::string::npos && found.substr(begin) == line) break;
    }
  }
  return "";
}

}  // namespace cohort::test
