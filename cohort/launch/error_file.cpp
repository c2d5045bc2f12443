#include "cohort/launch/error_file.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <ctime>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>

#include "cohort/base/env.h"
#include "cohort/launch/worker.h"

namespace cohort::launch {
namespace {

using nlohmann::json;

constexpr std::size_t kMaxBytes = 64 * 1024;

std::string text_of(const json& value) {
  return value.is_string() ? value.get<std::string>() : value.dump();
}

// torchrun's format, so that errors of ranks in Python are read too.
void read_json(const json& data, RecordedError& error) {
  const json& message = data.at("message");
  if (!message.is_object()) {
    error.message = text_of(message);
    return;
  }
  if (message.contains("message")) error.message = text_of(message["message"]);
  if (const auto extra = message.find("extraInfo"); extra != message.end() && extra->is_object()) {
    if (extra->contains("py_callstack")) error.details = text_of((*extra)["py_callstack"]);
  }
}

}  // namespace

void record_error(std::string_view message) noexcept {
  try {
    const auto path = base::env_string("TORCHELASTIC_ERROR_FILE");
    if (!path) return;
    const json data = {{"message",
                        {{"message", message.substr(0, kMaxBytes)},
                         {"extraInfo", {{"timestamp", std::to_string(std::time(nullptr))}}}}}};
    // A message may hold bytes that are no UTF-8: they are replaced.
    const std::string text = data.dump(-1, ' ', false, json::error_handler_t::replace);
    Fd file(::open(path->c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0644));
    struct stat info {};
    // The first error stays: later ones follow from it.
    if (!file.is_open() || ::fstat(file.get(), &info) != 0 || info.st_size > 0) return;
    write_all(file.get(), text);
  } catch (...) {  // NOLINT: the message is on stderr all the same
  }
}

std::optional<RecordedError> read_error_file(const std::filesystem::path& path) {
  struct stat info {};
  if (::stat(path.c_str(), &info) != 0 || info.st_size == 0) return std::nullopt;
  RecordedError error;
  // When the rank failed: its process may end much later.
  error.time = static_cast<double>(info.st_mtim.tv_sec) + 1e-9 * static_cast<double>(info.st_mtim.tv_nsec);
  std::ifstream file(path, std::ios::binary);
  std::string text(kMaxBytes * 8, '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<std::size_t>(file.gcount()));
  try {
    read_json(json::parse(text), error);
  } catch (const json::exception&) {
    // A program may write plain text there.
    error.message = text;
  }
  error.message.resize(std::min(error.message.size(), kMaxBytes));
  error.details.resize(std::min(error.details.size(), kMaxBytes));
  return error;
}

}  // namespace cohort::launch
