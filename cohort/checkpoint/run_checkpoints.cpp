#include "cohort/checkpoint/run_checkpoints.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "cohort/checkpoint/link.h"
#include "cohort/checkpoint/manifest.h"
#include "cohort/checkpoint/temporary_name.h"
#include "cohort/core/atomic_file.h"
#include "cohort/core/error.h"
#include "cohort/core/file_lock.h"
#include "cohort/core/log.h"

namespace cohort::checkpoint {
namespace {

namespace fs = std::filesystem;
using core::concat;

constexpr const char* kModelFile = "model.safetensors";
constexpr const char* kOptimizerFile = "optimizer.safetensors";
constexpr const char* kLockFile = ".lock";
constexpr std::string_view kReplacedMark = "~old";  // a checkpoint that is being replaced
constexpr std::string_view kRemovedMark = "~gone";  // a checkpoint that is being removed

void check_name(const std::string& name) {
  if (!is_checkpoint_name(name)) {
    throw UsageError("checkpoint.save", concat("a checkpoint cannot be named ", printable(name)),
                     "a plain name such as epoch_0005");
  }
}

bool is_checkpoint(const fs::path& folder) {
  try {
    (void)read_manifest(folder);
    return true;
  } catch (const Error&) {
    return false;
  }
}

/// The checkpoint that a killed process had moved away to put another in its place; empty for another name.
std::string replaced_name(const fs::path& path) {
  const auto found = parse_temporary_name(path.filename().string());
  return found && found->name.ends_with(kReplacedMark)
             ? found->name.substr(0, found->name.size() - kReplacedMark.size())
             : "";
}

/// The name that the checkpoint in `folder` has, or had before it was moved away.
std::string name_of(const fs::path& folder) {
  const std::string replaced = replaced_name(folder);
  return replaced.empty() ? folder.filename().string() : replaced;
}

/// Swaps two names in one step; false if the filesystem cannot.
bool exchange(const fs::path& a, const fs::path& b) {
  return ::renameat2(AT_FDCWD, a.c_str(), AT_FDCWD, b.c_str(), RENAME_EXCHANGE) == 0;
}

}  // namespace

struct RunCheckpoints::Known {
  fs::path folder;
  int64_t sequence = -1;  // -1: state.json cannot be read
};

RunCheckpoints::RunCheckpoints(fs::path folder, RunCheckpointsOptions options)
    : folder_(std::move(folder)), options_(options) {}

fs::path RunCheckpoints::save(const std::string& name, const CheckpointContent& content,
                              SaveOptions options) {
  check_name(name);
  std::error_code error;
  if (fs::create_directories(folder_, error)) {
    core::sync_folder(fs::absolute(folder_).parent_path());
  }
  if (error) {
    throw SystemError("checkpoint.save", concat("cannot create ", folder_.string(), ": ", error.message()));
  }
  const core::FileLock lock(folder_ / kLockFile);
  recover(lock.is_held());
  int64_t sequence = 0;
  for (const Known& other : known()) {
    sequence = std::max(sequence, other.sequence + 1);
  }
  const auto earlier_best = best();
  const bool has_earlier = earlier_best && fs::is_directory(*earlier_best);
  const std::string best_name = options.is_best ? name : has_earlier ? name_of(*earlier_best) : "";
  const fs::path temporary = folder_ / temporary_name(name);
  fs::remove_all(temporary, error);
  try {
    if (!fs::create_directory(temporary, error)) {
      throw SystemError("checkpoint.save",
                        concat("cannot create ", temporary.string(), ": ", error.message()));
    }
    write_folder(temporary, content, sequence, best_name);
    put(temporary, name);
  } catch (...) {
    fs::remove_all(temporary, error);
    throw;
  }
  point("last", name);  // from here on this checkpoint counts, and what it says is the best
  repair_best();
  prune();
  return folder_ / name;
}

void RunCheckpoints::write_folder(const fs::path& folder, const CheckpointContent& content, int64_t sequence,
                                  const std::string& best) const {
  const Metadata metadata{{"format", "pt"}};  // what Python's loaders (transformers, timm) expect to see
  Manifest manifest;
  manifest.sequence = sequence;
  manifest.best = best;
  manifest.state = content.state;
  manifest.files[kModelFile] = write_new_safetensors(folder / kModelFile, content.model, metadata);
  manifest.files[kOptimizerFile] =
      write_new_safetensors(folder / kOptimizerFile, content.optimizer, metadata);
  write_manifest(folder, manifest);
  core::sync_folder(folder);
}

void RunCheckpoints::put(const fs::path& temporary, const std::string& name) const {
  const fs::path target = folder_ / name;
  std::error_code ignored;
  if (fs::exists(fs::symlink_status(target)) && !is_checkpoint(target)) {
    set_aside(target);
  }
  if (!fs::exists(fs::symlink_status(target))) {
    rename_and_sync(temporary, target);
  } else if (exchange(temporary, target)) {
    core::sync_folder(folder_);
    fs::remove_all(temporary, ignored);
  } else {
    const fs::path old = folder_ / temporary_name(name + std::string(kReplacedMark));
    rename_and_sync(target, old);  // killed here: located() finds it, recover() puts it back
    try {
      rename_and_sync(temporary, target);
    } catch (...) {
      fs::rename(old, target, ignored);
      throw;
    }
    fs::remove_all(old, ignored);
  }
}

/// Moves something that is no checkpoint, or a damaged one, out of the way of a checkpoint of that name.
void RunCheckpoints::set_aside(const fs::path& folder) const {
  fs::path aside;
  for (int number = 1; aside.empty() || fs::exists(fs::symlink_status(aside)); ++number) {
    aside = folder_ / concat(folder.filename().string(), ".replaced-", number);
  }
  rename_and_sync(folder, aside);
  core::log_warning(concat("[checkpoint.save] ", folder.string(),
                           " was no checkpoint that can be read; it is now ", aside.string()));
}

void RunCheckpoints::point(const char* link, const std::string& name) const {
  point_link(folder_ / link, name, folder_ / temporary_name(link));
}

/// Lets the link `best` point to what the last checkpoint says: a process may have been killed between the
/// two links. Where there is no best, the link is one of another history, and goes.
void RunCheckpoints::repair_best() const {
  const auto link = follow_link(folder_ / "best");
  const auto wanted = best();
  std::error_code ignored;
  if (!wanted || !fs::is_directory(*wanted)) {
    if (link) fs::remove(folder_ / "best", ignored);
  } else if (link != folder_ / name_of(*wanted)) {
    point("best", name_of(*wanted));
  }
}

void RunCheckpoints::prune() const {
  if (options_.keep <= 0) {
    return;
  }
  std::vector<Known> all = known();
  std::erase_if(all, [](const Known& one) { return one.sequence < 0; });  // not known to be ours: left alone
  const auto last_folder = last(), best_folder = best(), best_link = follow_link(folder_ / "best");
  for (size_t i = static_cast<size_t>(options_.keep); i < all.size(); ++i) {
    const fs::path& folder = all[i].folder;
    if (folder != last_folder && folder != best_folder && folder != best_link) {
      remove_folder(folder);
    }
  }
}

void RunCheckpoints::remove_folder(const fs::path& folder) const {
  // Renamed first: killed half-way, nothing incomplete stands under a checkpoint's name.
  const fs::path gone = folder_ / temporary_name(folder.filename().string() + std::string(kRemovedMark));
  std::error_code error;
  fs::rename(folder, gone, error);
  if (!error) {
    fs::remove_all(gone, error);
  }
  if (error) {
    core::log_warning(concat("[checkpoint.save] cannot remove the old checkpoint ", folder.string(), ": ",
                             error.message()));
  }
}

/// Finishes what a killed save left. `alone`: no other process can be saving here, so what comes from another
/// host or container is a leftover too. Note that a file of save_safetensors() may be among them.
void RunCheckpoints::recover(bool alone) const {
  std::error_code error;
  for (const auto& item : fs::directory_iterator(folder_, error)) {
    const auto found = parse_temporary_name(item.path().filename().string());
    if (!found || found->owner == Owner::kRuns || (found->owner == Owner::kUnknown && !alone)) {
      continue;
    }
    const std::string replaced = replaced_name(item.path());
    if (!replaced.empty() && !fs::exists(folder_ / replaced)) {
      fs::rename(item.path(), folder_ / replaced, error);
    } else {
      fs::remove_all(item.path(), error);
    }
  }
  repair_best();
}

std::vector<RunCheckpoints::Known> RunCheckpoints::known() const {
  std::vector<Known> result;
  std::error_code error;
  for (const auto& item : fs::directory_iterator(folder_, error)) {
    const std::string replaced = replaced_name(item.path());
    const bool is_hidden =
        item.path().filename().string()[0] == '.' && (replaced.empty() || fs::exists(folder_ / replaced));
    if (!item.is_directory() || item.is_symlink() || is_hidden) {
      continue;
    }
    Known one{item.path(), -1};
    try {
      one.sequence = read_manifest(item.path()).sequence;
    } catch (const Error&) {
      // Stays at the end of the list; load_usable() says what is wrong with it.
    }
    result.push_back(std::move(one));
  }
  std::sort(result.begin(), result.end(), [](const Known& a, const Known& b) {
    return a.sequence != b.sequence ? a.sequence > b.sequence : a.folder > b.folder;
  });
  return result;
}

std::vector<fs::path> RunCheckpoints::list() const {
  std::vector<fs::path> result;
  for (Known& one : known()) {
    result.push_back(std::move(one.folder));
  }
  return result;
}

/// `folder`, or where a process that was killed while it replaced it has put it.
fs::path RunCheckpoints::located(fs::path folder) const {
  std::error_code error;
  if (!fs::exists(folder, error)) {
    for (const auto& item : fs::directory_iterator(folder_, error)) {
      if (replaced_name(item.path()) == folder.filename()) {
        return item.path();
      }
    }
  }
  return folder;
}

std::optional<fs::path> RunCheckpoints::last() const {
  const auto target = follow_link(folder_ / "last");
  return target ? std::optional(located(*target)) : std::nullopt;
}

std::optional<fs::path> RunCheckpoints::best() const {
  if (const auto folder = last()) {
    try {
      return best_of(*folder);
    } catch (const Error&) {
      // Whoever loads it is told what is wrong with it.
    }
  }
  const auto target = follow_link(folder_ / "best");
  return target ? std::optional(located(*target)) : std::nullopt;
}

std::optional<fs::path> RunCheckpoints::best_of(const fs::path& checkpoint) const {
  std::error_code error;
  if (!fs::equivalent(checkpoint.parent_path(), folder_, error)) {
    return std::nullopt;
  }
  const Manifest manifest = read_manifest(checkpoint);
  // A checkpoint of an older version does not name it.
  const auto target =
      manifest.best.empty() ? follow_link(folder_ / "best") : std::optional(folder_ / manifest.best);
  if (!target) {
    return std::nullopt;
  }
  const fs::path best = located(*target);
  try {
    if (fs::is_directory(best) && read_manifest(best).sequence > manifest.sequence) {
      return std::nullopt;  // saved later: by a run that went on from an earlier checkpoint
    }
  } catch (const Error&) {
    // Whoever loads it is told what is wrong with it.
  }
  return best;
}

std::optional<fs::path> RunCheckpoints::find(const std::string& which) const {
  if (which == "auto") {
    const auto usable = load_usable();
    return usable ? std::optional(usable->folder) : std::nullopt;
  }
  if (which == "last" || which == "best") {
    const auto target = which == "last" ? last() : best();
    if (target && !fs::is_directory(*target)) {
      throw DataError(
          "checkpoint.find",
          concat((folder_ / which).string(), " points to ", target->string(), ", which is not there"),
          "auto, or one of the checkpoints that are there");
    }
    return target;
  }
  const fs::path given(which);
  for (const fs::path& path : {given, folder_ / given}) {
    if (fs::is_directory(path / "checkpoints")) {
      return RunCheckpoints(path / "checkpoints").find("last");
    }
    if (fs::is_directory(path)) {
      return fs::is_symlink(path) ? fs::canonical(path) : path;
    }
    if (const auto target = follow_link(path); target && fs::is_directory(*target)) {
      return *target;
    }
  }
  throw DataError("checkpoint.find", concat("no checkpoint at ", which, " (nor in ", folder_.string(), ")"),
                  "last, best, auto, or the folder of a checkpoint");
}

void RunCheckpoints::go_back_to(const fs::path& checkpoint) const {
  std::error_code error;
  if (!fs::equivalent(checkpoint.parent_path(), folder_, error)) {
    return;
  }
  const core::FileLock lock(folder_ / kLockFile);
  recover(lock.is_held());
  const std::string name = name_of(checkpoint);
  if (follow_link(folder_ / "last") != folder_ / name) {
    point("last", name);
    repair_best();
  }
}

std::optional<LoadedCheckpoint> RunCheckpoints::load_usable() const {
  std::vector<Known> all = known();
  const auto last_folder = last();
  const auto newest =
      std::find_if(all.begin(), all.end(), [&](const Known& one) { return one.folder == last_folder; });
  if (newest != all.end() && newest->sequence >= 0) {
    const int64_t sequence = newest->sequence;
    std::erase_if(all, [&](const Known& one) { return one.sequence > sequence; });
  }
  std::vector<fs::path> candidates;
  for (const Known& one : all) candidates.push_back(one.folder);
  if (last_folder) {
    std::erase(candidates, *last_folder);
    candidates.insert(candidates.begin(), *last_folder);
  }
  std::string first_problem;
  for (const fs::path& candidate : candidates) {
    LoadedCheckpoint loaded{candidate, {}};
    try {
      loaded.content = load(candidate);
    } catch (const DataError& error) {
      core::log_warning(concat("skipping a checkpoint that cannot be used: ", error.what()));
      first_problem = first_problem.empty() ? error.what() : first_problem;
      continue;
    }
    if (!first_problem.empty()) {
      core::log_warning(concat("falling back to the checkpoint ", candidate.string()));
    }
    return loaded;
  }
  if (!candidates.empty()) {
    throw DataError("checkpoint.find", concat("none of the ", candidates.size(), " checkpoints in ",
                                              folder_.string(), " can be used; the first: ", first_problem));
  }
  return std::nullopt;
}

CheckpointContent RunCheckpoints::load(const fs::path& folder) {
  if (!fs::is_directory(folder)) {
    throw DataError("checkpoint.load", concat(folder.string(), " is not the folder of a checkpoint"));
  }
  const fs::path real = fs::canonical(folder);  // one checkpoint throughout, even if a link moves meanwhile
  Manifest manifest = read_manifest(real);
  CheckpointContent content;
  content.model = SafetensorsFile::from_mapping(open_verified(real, manifest, kModelFile)).tensors();
  content.optimizer = SafetensorsFile::from_mapping(open_verified(real, manifest, kOptimizerFile)).tensors();
  content.state = std::move(manifest.state);
  return content;
}

}  // namespace cohort::checkpoint
