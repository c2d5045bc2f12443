// A folder counts as a checkpoint under its own name, or under the temporary name of a checkpoint that is
// being replaced. Sequence numbers, not times or names, order checkpoints; a copy stands after its original.
// A history is a head and the ranges given up: a checkpoint belongs to it up to the head and outside of the
// ranges. What cannot be read is kept in the list, and never taken for given up.
#include "cohort/checkpoint/known.h"

#include <algorithm>
#include <functional>
#include <tuple>

#include "cohort/base/error.h"
#include "cohort/checkpoint/internal/temporary_name.h"

namespace cohort::checkpoint {
namespace {

namespace fs = std::filesystem;

// Before a state.json held its checkpoint's name, `cohort train` saved under these.
bool is_name_of_trainer(std::string_view name) {
  const bool known = name.starts_with("epoch_") || name.starts_with("step_");
  const std::string_view number = name.substr(name.find('_') + 1);
  return known && !number.empty() && number.find_first_not_of("0123456789") == std::string_view::npos;
}

bool was_saved_as(const Manifest& manifest, const std::string& name) {
  return manifest.name.empty() ? is_name_of_trainer(name) : manifest.name == name;
}

}  // namespace

std::vector<fs::path> entries_of(const fs::path& folder) {
  std::vector<fs::path> entries;
  std::error_code error;
  for (fs::directory_iterator each(folder, error), end; !error && each != end; each.increment(error)) {
    entries.push_back(each->path());
  }
  // No folder is an empty list: the first save has not been made yet.
  if (error && error != std::errc::no_such_file_or_directory) {
    throw DataError("checkpoint.find", base::concat("cannot list ", folder.string(), ": ", error.message()));
  }
  return entries;
}

std::string replaced_name(const fs::path& path) {
  const auto found = parse_temporary_name(path.filename().string());
  return found && found->name.ends_with(kReplacedMark)
             ? found->name.substr(0, found->name.size() - kReplacedMark.size())
             : "";
}

std::string name_of(const fs::path& folder) {
  const std::string replaced = replaced_name(folder);
  return replaced.empty() ? folder.filename().string() : replaced;
}

fs::path locate_checkpoint(const fs::path& checkpoint) {
  std::error_code error;
  // After an error nothing is known; who opens the path gets the better message.
  if (fs::exists(checkpoint, error) || error) return checkpoint;
  for (const fs::path& path : entries_of(checkpoint.parent_path())) {
    if (replaced_name(path) == checkpoint.filename()) return path;
  }
  return checkpoint;
}

bool may_be_folder(const fs::path& path) {
  std::error_code error;
  const fs::file_type type = fs::status(path, error).type();
  // An error may pass, and a checkpoint that is given up for it would be lost to the run.
  return type == fs::file_type::directory || type == fs::file_type::none;  // none: an error
}

bool is_own_checkpoint(const fs::path& folder) {
  try {
    return was_saved_as(read_manifest(folder), name_of(folder));
  } catch (const Error&) {
    return false;
  }
}

std::vector<KnownCheckpoint> known_checkpoints(const fs::path& folder) {
  std::vector<KnownCheckpoint> known;
  std::error_code error;
  for (const fs::path& path : entries_of(folder)) {
    const std::string replaced = replaced_name(path);
    const bool is_hidden =
        path.filename().string()[0] == '.' && (replaced.empty() || fs::exists(folder / replaced, error));
    if (is_hidden || !fs::is_directory(fs::symlink_status(path, error))) continue;
    KnownCheckpoint found{path};
    try {
      found.manifest = read_manifest(path);
      // A state may be large, and a list keeps one manifest for each checkpoint.
      found.manifest->state = nullptr;
    } catch (const Error&) {
      // Whoever loads it is told what is wrong with it.
    }
    known.push_back(std::move(found));
  }
  // A copy comes after what it is a copy of.
  const auto rank = [](const KnownCheckpoint& entry) {
    const bool is_own = entry.manifest && was_saved_as(*entry.manifest, name_of(entry.folder));
    return std::tuple(entry.sequence(), is_own, entry.folder);
  };
  std::ranges::sort(known, std::ranges::greater(), rank);
  return known;
}

History::History(const std::vector<KnownCheckpoint>& known, const std::optional<fs::path>& last) {
  const auto named = std::ranges::find_if(
      known, [&](const KnownCheckpoint& entry) { return entry.manifest && entry.folder == last; });
  // Without a readable `last` the newest checkpoint is the head: nothing says that any was given up.
  const auto head = named != known.end() ? named : known.begin();
  if (head == known.end() || !head->manifest) return;
  head_ = head->sequence();
  given_up_ = head->manifest->given_up;
}

bool History::holds(const KnownCheckpoint& checkpoint) const {
  const int64_t sequence = checkpoint.sequence();
  // Unknown numbers count as held, so that nothing is hidden for a file that cannot be read.
  if (head_ < 0 || sequence < 0) return true;
  return sequence <= head_ && std::ranges::none_of(given_up_, [&](const SequenceRange& range) {
           return range.first <= sequence && sequence <= range.last;
         });
}

std::vector<SequenceRange> History::given_up_by(int64_t sequence) const {
  std::vector<SequenceRange> ranges = given_up_;
  // Numbers between the head and the new one belong to later checkpoints, which the run has given up.
  if (head_ >= 0 && sequence > head_ + 1) ranges.push_back({head_ + 1, sequence - 1});
  return ranges;
}

}  // namespace cohort::checkpoint
