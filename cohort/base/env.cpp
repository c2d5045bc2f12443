// Variables are read in each call and never kept. An empty one counts as not set. A value that cannot be read
// is a ConfigError, which names the variable and what is expected. cohort_variables() lists all that Cohort
// reads, so that a misspelt COHORT_ name can be told. Always: a number is read as a whole or not at all, so
// "8 cores" is no number.
#include "cohort/base/env.h"

#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>
#include <cstdlib>

#include "cohort/base/error.h"
#include "cohort/base/text/format_list.h"
#include "cohort/base/text/nearest_name.h"

namespace cohort::base {
namespace {

[[noreturn]] void reject_value(const std::string& name, const std::string& value, std::string_view expected) {
  throw ConfigError("base.env",
                    concat("environment variable ", name, ": got \"", value, "\", expected ", expected),
                    concat("export ", name, "=... with such a value, or unset ", name));
}

std::string lower(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return text;
}

}  // namespace

std::optional<std::string> env_string(const std::string& name) {
  const char* value = std::getenv(name.c_str());
  if (value == nullptr || *value == '\0') return std::nullopt;
  return std::string(value);
}

std::optional<std::int64_t> env_int(const std::string& name, std::int64_t low, std::int64_t high) {
  const std::optional<std::string> text = env_string(name);
  if (!text) return std::nullopt;
  std::int64_t value = 0;
  const char* end = text->data() + text->size();
  const auto result = std::from_chars(text->data(), end, value);
  // Not strtoll(), which would take leading spaces and stop at the first letter.
  if (result.ec == std::errc() && result.ptr == end && value >= low && value <= high) return value;
  if (low == INT64_MIN && high == INT64_MAX) reject_value(name, *text, "a whole number");
  if (high == INT64_MAX) reject_value(name, *text, concat("a whole number of at least ", low));
  reject_value(name, *text, concat("a whole number from ", low, " to ", high));
}

std::optional<double> env_double(const std::string& name) {
  const std::optional<std::string> text = env_string(name);
  if (!text) return std::nullopt;
  double value = 0;
  const char* end = text->data() + text->size();
  const auto result = std::from_chars(text->data(), end, value);
  // from_chars() reads "inf" and "nan", and no setting means them.
  if (result.ec != std::errc() || result.ptr != end || !std::isfinite(value))
    reject_value(name, *text, "a number");
  return value;
}

std::optional<bool> env_bool(const std::string& name) {
  const std::optional<std::string> text = env_string(name);
  if (!text) return std::nullopt;
  const std::string value = lower(*text);
  if (value == "1" || value == "true" || value == "yes" || value == "on") return true;
  if (value == "0" || value == "false" || value == "no" || value == "off") return false;
  reject_value(name, *text, "1, true, yes, on or 0, false, no, off");
}

std::optional<std::string> env_choice(const std::string& name, std::span<const std::string> choices) {
  const std::optional<std::string> text = env_string(name);
  if (!text) return std::nullopt;
  const std::string value = lower(*text);
  TextList list;
  for (const std::string& choice : choices) {
    // As the choice is spelt, so that callers can compare it.
    if (lower(choice) == value) return choice;
    list.add(choice);
  }
  reject_value(name, *text, concat("one of ", list.text()));
}

std::span<const EnvVariable> cohort_variables() {
  static const std::vector<EnvVariable> variables = {
      {"COHORT_AGENT_FD", "link of a rank of elastic training to its agent; set by cohort run --elastic"},
      {"COHORT_ALLOCATOR", "tuned (default) or system: whether tune_allocator() changes glibc's malloc"},
      {"COHORT_CORES", "number of cores to count on, instead of what affinity and cgroup quota allow"},
      {"COHORT_CRASH_FOLDER", "where the test that kills a process while it saves works; set by that test"},
      {"COHORT_INTERFACE", "network interface that connections between hosts go through, such as eth1"},
      {"COHORT_KERNELS",
       "instructions that backends shm and mpi sum with: avx512, avx2 or portable, instead of the best"},
      {"COHORT_KILLS", "how often the kill-and-resume test kills; the slow script asks for twenty"},
      {"COHORT_LOG",
       "lowest level of log lines that are written: debug, info (default), warning, error, off"},
      {"COHORT_NO_INSTALL", "set by --no-install of ./quickstart and ./test: install nothing"},
      {"COHORT_PRESET", "preset of CMakePresets.json that ./quickstart builds instead of release"},
      {"COHORT_PRIVATE", "set by --private of ./quickstart and ./test: install into .cohort/ only"},
      {"COHORT_PYTHON", "Python with torch, for tests that compare with it"},
      {"COHORT_SECRET_FD", "where the secret of the job is; set by cohort run and spawn"},
      {"COHORT_SECRET_FILE", "file of the job's secret, where no cohort run hands one over"},
      {"COHORT_SILENCE_MS",
       "for which an agent of an elastic run may be silent; set by cohort run --elastic"},
      {"COHORT_SLOW_REPEAT", "how often the slow tests repeat; set by the slow script"},
      {"COHORT_SPAWN_CALL", "which call of launch::spawn a rank was made by; set by spawn"},
      {"COHORT_SPAWN_ERROR_FD", "where a rank made by launch::spawn writes its error; set by spawn"},
      {"COHORT_TLS_AUTHORITIES", "file of the authorities that sign the certificates of peers (PEM)"},
      {"COHORT_TLS_CERTIFICATE",
       "file of this process's certificate (PEM): TCP between workers is encrypted"},
      {"COHORT_TLS_KEY", "file of the key of this process's certificate (PEM)"},
      {"COHORT_VERBOSE", "set by --verbose of ./quickstart and ./test: show what every command prints"},
      {"COHORT_VIRTUAL_RANKS", "virtual ranks of an elastic run; set by cohort run --elastic"},
  };
  return variables;
}

std::vector<std::string> unknown_cohort_variables() {
  std::vector<std::string> known;
  for (const EnvVariable& variable : cohort_variables()) known.push_back(variable.name);
  std::vector<std::string> messages;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    const std::string_view line = *entry;
    const std::string name(line.substr(0, line.find('=')));
    if (!name.starts_with("COHORT_") || std::find(known.begin(), known.end(), name) != known.end()) continue;
    const std::optional<std::string> near = nearest_name(name, known);
    messages.push_back(concat("environment variable ", name, " is not read by Cohort",
                              near ? concat("; did you mean ", *near, "?") : std::string()));
  }
  // The environment has no order that repeats.
  std::sort(messages.begin(), messages.end());
  return messages;
}

}  // namespace cohort::base
