// The file only grows, but for the lines that are cut off when it is opened or a run resumes. These are found
// from its end, so that a long file is not read.
#include "cohort/train/internal/elastic/sample_ledger.h"

#include <algorithm>
#include <charconv>
#include <fstream>
#include <limits>
#include <optional>
#include <string>
#include <system_error>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/train/sinks/internal/append_file.h"

namespace cohort::train {
namespace fs = std::filesystem;
namespace {

constexpr const char* kLedgerHead = "step,epoch,samples\n";
constexpr std::int64_t kChunkBytes = 1 << 14;

/// Reads backwards.
class LedgerTail {
 public:
  explicit LedgerTail(const fs::path& path) : file_(path, std::ios::binary) {}

  /// Returns where the line begins that ends before `end`: after the last newline before `end` - 1.
  std::int64_t begin_of_line(std::int64_t end) {
    std::int64_t at = end - 1;  // its own newline does not count
    while (at > 0) {
      const std::int64_t begin = std::max<std::int64_t>(0, at - kChunkBytes);
      const std::string chunk = read(begin, at);
      const std::size_t newline = chunk.rfind('\n');
      if (newline != std::string::npos) return begin + static_cast<std::int64_t>(newline) + 1;
      at = begin;
    }
    return 0;
  }
  std::string read(std::int64_t begin, std::int64_t end) {
    std::string text(static_cast<std::size_t>(end - begin), '\0');
    file_.clear();
    file_.seekg(begin);
    file_.read(text.data(), std::ssize(text));
    return text;
  }

 private:
  std::ifstream file_;
};

/// Returns the step of a line; nothing for the head, or what is no line.
std::optional<std::int64_t> step_of(const std::string& line) {
  std::int64_t step = 0;
  const auto [end, error] = std::from_chars(line.data(), line.data() + line.size(), step);
  if (error != std::errc() || end == line.data() + line.size() || *end != ',') return std::nullopt;
  return step;
}

}  // namespace

SampleLedger::SampleLedger(fs::path path) : path_(std::move(path)) {
  cut_after(std::numeric_limits<std::int64_t>::max());
}

SampleLedger::~SampleLedger() = default;

void SampleLedger::truncate_after(std::int64_t step) {
  if (step < last_step_) cut_after(step);
}

void SampleLedger::cut_after(std::int64_t step) {
  file_.reset();
  std::error_code error;
  const auto size = fs::exists(path_, error) ? static_cast<std::int64_t>(fs::file_size(path_)) : 0;
  std::int64_t end = size;
  last_step_ = 0;
  LedgerTail tail(path_);
  while (end > 0) {
    const std::int64_t begin = tail.begin_of_line(end);
    // The numbers alone: a line may be long.
    const std::string head = tail.read(begin, std::min(end, begin + 64));
    const bool is_whole = tail.read(end - 1, end) == "\n";
    const std::optional<std::int64_t> found = step_of(head);
    if (is_whole && (begin == 0 || (found && *found <= step))) {
      last_step_ = found.value_or(0);
      break;
    }
    end = begin;
  }
  if (end < size) fs::resize_file(path_, static_cast<std::uintmax_t>(end), error);
  if (error) {
    throw SystemError("train.elastic", base::concat(path_.string(), " cannot be cut: ", error.message()),
                      "another run.dir");
  }
  file_ = std::make_unique<AppendFile>(path_);
  if (end == 0) file_->write(kLedgerHead);
}

void SampleLedger::write(std::int64_t step, std::int64_t epoch, std::int64_t num_virtual_ranks,
                         const std::map<std::int64_t, std::vector<std::int64_t>>& samples) {
  if (step <= last_step_) return;
  std::string line = base::concat(step, ",", epoch, ",");
  for (std::int64_t share = 0; share < num_virtual_ranks; ++share) {
    if (share > 0) line += '|';
    const auto found = samples.find(share);
    if (found == samples.end()) continue;
    for (std::size_t i = 0; i < found->second.size(); ++i) {
      if (i > 0) line += ' ';
      line += std::to_string(found->second[i]);
    }
  }
  // In one piece, so that a crash leaves a line or none, mostly.
  file_->write(line + "\n");
  last_step_ = step;
}

}  // namespace cohort::train
