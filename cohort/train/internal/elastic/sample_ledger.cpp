// The file only grows, but for the lines that are cut off when it is opened or a run resumes. These are found
// from its end, so that a long file is not read.
#include "cohort/train/internal/elastic/sample_ledger.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <limits>
#include <optional>
#include <string>
#include <system_error>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/base/files/atomic_file.h"
#include "cohort/base/files/fd.h"
#include "cohort/base/files/read_at.h"
#include "cohort/base/text/format_list.h"
#include "cohort/train/sinks/internal/append_file.h"

namespace cohort::train {
namespace fs = std::filesystem;
namespace {

constexpr const char* kLedgerHead = "step,epoch,samples\n";
constexpr std::int64_t kChunkBytes = 1 << 14;

/// Reads backwards. A file that cannot be read must not be taken for an empty one, which would be cut.
class LedgerTail {
 public:
  explicit LedgerTail(const fs::path& path) : path_(path), file_(::open(path.c_str(), O_RDONLY | O_CLOEXEC)) {
    if (!file_.is_open() && errno != ENOENT) fail();
  }

  /// 0 where there is no file.
  std::int64_t size() const {
    if (!file_.is_open()) return 0;
    struct stat status {};
    if (::fstat(file_.get(), &status) != 0) fail();
    return status.st_size;
  }
  /// Returns where the line begins that ends before `end`: after the last newline before `end` - 1.
  std::int64_t begin_of_line(std::int64_t end) const {
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
  std::string read(std::int64_t begin, std::int64_t end) const {
    const auto length = static_cast<std::size_t>(end - begin);
    std::string text = base::read_at(file_.get(), begin, length);
    if (text.size() == length) return text;
    if (errno == 0) errno = EIO;  // the file has become shorter
    fail();
  }

 private:
  [[noreturn]] void fail() const {
    throw SystemError("train.elastic",
                      base::concat(path_.string(), " cannot be read: ", std::strerror(errno)),
                      "another run.dir");
  }

  const fs::path path_;
  const base::Fd file_;
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
  const LedgerTail tail(path_);
  const std::int64_t size = tail.size();
  std::int64_t end = size;
  last_step_ = 0;
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
  if (end > 0) return;
  file_->write(kLedgerHead);
  base::sync_folder(fs::absolute(path_).parent_path());
}

std::int64_t SampleLedger::begin_after(std::int64_t step) {
  const std::int64_t missing = std::max<std::int64_t>(0, step - last_step_);
  last_step_ += missing;
  return missing;
}

void SampleLedger::write(const LedgerLine& line, std::int64_t num_virtual_ranks) {
  if (line.step <= last_step_) return;
  if (line.step != last_step_ + 1) {
    throw SystemError(
        "train.elastic",
        base::concat(path_.string(), " ends with step ", last_step_, ", and the next line is of step ",
                     line.step, ": lines in between are lost"),
        "the same command again: it resumes from the last checkpoint");
  }
  base::TextList shares("|");
  for (std::int64_t share = 0; share < num_virtual_ranks; ++share) {
    const auto found = line.samples.find(share);
    std::string indices;  // not by join(): a step may have 100,000 of them
    for (std::size_t i = 0; found != line.samples.end() && i < found->second.size(); ++i) {
      if (i > 0) indices += ' ';
      indices += std::to_string(found->second[i]);
    }
    shares.add(indices);
  }
  // In one piece, so that a crash leaves a line or none, mostly.
  file_->write(base::concat(line.step, ",", line.epoch, ",", shares.text(), "\n"));
  last_step_ = line.step;
}

void SampleLedger::sync() {
  file_->sync();
}

}  // namespace cohort::train
