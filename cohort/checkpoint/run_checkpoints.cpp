// A checkpoint is written under a temporary name, and gets its own by a rename, or by an exchange with the
// folder it replaces. Then the link `last` moves, which is what makes it count; `best` follows what the last
// checkpoint says. So at each moment a complete checkpoint stands under its name, or where the next save or
// reader finds it. A failure before `last` has moved is undone; a leftover of a killed save is finished by
// the next, under a lock. A reader beside a run that saves reads again as long as `last` moves.
#include "cohort/checkpoint/run_checkpoints.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <exception>

#include "cohort/base/error.h"
#include "cohort/base/files/atomic_file.h"
#include "cohort/base/files/file_lock.h"
#include "cohort/base/log.h"
#include "cohort/checkpoint/internal/checkpoint_files.h"
#include "cohort/checkpoint/internal/temporary_name.h"
#include "cohort/checkpoint/known.h"
#include "cohort/checkpoint/link.h"
#include "cohort/checkpoint/tensor_format.h"

namespace cohort::checkpoint {
namespace {

namespace fs = std::filesystem;
using base::concat;

constexpr std::string_view kModelFile = "model.";  // and the extension of the format
constexpr std::string_view kOptimizerFile = "optimizer.";
constexpr const char* kLockFile = ".lock";
constexpr int kMaxTries = 100;  // to read beside a run that saves, which takes longer than to open files
constexpr std::string_view kRemovedMark = "~gone";  // a checkpoint that is being removed

void check_name(const std::string& name) {
  if (!is_checkpoint_name(name)) {
    throw UsageError("checkpoint.save", concat("a checkpoint cannot be named ", printable(name)),
                     "a plain name such as epoch_0005");
  }
}

/// Swaps two names in one step; false if the filesystem cannot.
bool exchange(const fs::path& a, const fs::path& b) {
  return ::renameat2(AT_FDCWD, a.c_str(), AT_FDCWD, b.c_str(), RENAME_EXCHANGE) == 0;
}

/// Gives the folder `replaced` its name `target` again, as far as the file system lets it. The folder that
/// has the name now gets one of the other two names.
void restore_name(const fs::path& replaced, const fs::path& target, const fs::path& temporary) {
  if (exchange(replaced, target)) return;
  std::error_code ignored;
  fs::rename(target, temporary, ignored);
  fs::rename(replaced, target, ignored);
}

// Of the file with the model. Without one the error is about the usual one.
std::string extension_of(const Manifest& manifest) {
  for (const auto& [name, summary] : manifest.files) {
    if (name.starts_with(kModelFile)) return name.substr(kModelFile.size());
  }
  return "safetensors";
}

}  // namespace

RunCheckpoints::RunCheckpoints(fs::path folder, RunCheckpointsOptions options)
    : folder_(std::move(folder)), options_(options) {}

fs::path RunCheckpoints::save(const std::string& name, const CheckpointContent& content,
                              SaveOptions options) {
  check_name(name);
  std::error_code error;
  if (fs::create_directories(folder_, error)) {
    base::sync_folder(fs::absolute(folder_).parent_path());
  }
  if (error) {
    throw SystemError("checkpoint.save", concat("cannot create ", folder_.string(), ": ", error.message()));
  }
  const base::FileLock lock(folder_ / kLockFile);
  recover(lock.is_held());
  Manifest manifest{.name = name, .state = content.state};
  const std::vector<KnownCheckpoint> known = known_checkpoints(folder_);
  for (const KnownCheckpoint& other : known) {
    manifest.sequence = std::max(manifest.sequence, other.sequence() + 1);
  }
  manifest.given_up = History(known, last()).given_up_by(manifest.sequence);
  const auto earlier_best = best();
  const bool has_earlier = earlier_best && may_be_folder(*earlier_best);
  manifest.best = options.is_best ? name : has_earlier ? name_of(*earlier_best) : "";
  const bool replaces_best = !options.is_best && manifest.best == name;
  if (replaces_best) manifest.best = "";
  const fs::path temporary = folder_ / temporary_name(name);
  fs::remove_all(temporary, error);
  fs::path replaced;
  const auto earlier_last = follow_link(folder_ / "last");
  try {
    if (!fs::create_directory(temporary, error)) {
      throw SystemError("checkpoint.save",
                        concat("cannot create ", temporary.string(), ": ", error.message()));
    }
    write_folder(temporary, content, std::move(manifest));
    if (replaces_best) fs::remove(folder_ / "best", error);
    replaced = put(temporary, name);
    point("last", name);  // from here on this checkpoint counts, and what it says is the best
  } catch (...) {
    const bool has_moved = follow_link(folder_ / "last") != earlier_last;  // and then the disk failed
    if (!replaced.empty() && !has_moved) restore_name(replaced, folder_ / name, temporary);
    for (const fs::path& each : {temporary, replaced}) fs::remove_all(each, error);
    repair_best_if_possible();
    throw;
  }
  fs::remove_all(replaced, error);  // which takes a while
  repair_best();
  prune();
  return folder_ / name;
}

void RunCheckpoints::write_folder(const fs::path& folder, const CheckpointContent& content,
                                  Manifest manifest) const {
  const TensorFormat format = tensor_format(options_.format);
  const std::string model = concat(kModelFile, format.extension);
  const std::string optimizer = concat(kOptimizerFile, format.extension);
  manifest.files[model] = format.write(folder / model, content.model);
  manifest.files[optimizer] = format.write(folder / optimizer, content.optimizer);
  write_manifest(folder, manifest);
  base::sync_folder(folder);
}

/// Returns where what it has replaced is now; empty: it has replaced nothing.
fs::path RunCheckpoints::put(const fs::path& temporary, const std::string& name) const {
  const fs::path target = folder_ / name;
  std::error_code ignored;
  if (fs::exists(fs::symlink_status(target)) && !is_own_checkpoint(target) && !is_linked_old(target)) {
    set_aside(target);
  }
  if (!fs::exists(fs::symlink_status(target))) {
    rename_and_sync(temporary, target);
    return {};
  }
  if (exchange(temporary, target)) {
    base::sync_folder(folder_);
    return temporary;
  }
  const fs::path old = folder_ / temporary_name(name + std::string(kReplacedMark));
  rename_and_sync(target, old);  // killed here: locate_checkpoint() finds it, recover() restores it
  try {
    rename_and_sync(temporary, target);
  } catch (...) {
    fs::rename(old, target, ignored);
    throw;
  }
  return old;
}

/// True for a checkpoint of an older version, without a name in it, which `last` or `best` names.
bool RunCheckpoints::is_linked_old(const fs::path& folder) const {
  if (follow_link(folder_ / "last") != folder && follow_link(folder_ / "best") != folder) return false;
  try {
    return read_manifest(folder).name.empty();
  } catch (const Error&) {
    return false;
  }
}

/// Moves something that is no checkpoint, a damaged one or somebody's copy of one out of the way of a
/// checkpoint of that name.
void RunCheckpoints::set_aside(const fs::path& folder) const {
  fs::path aside;
  for (int number = 1; aside.empty() || fs::exists(fs::symlink_status(aside)); ++number) {
    aside = folder_ / concat(folder.filename().string(), ".replaced-", number);
  }
  rename_and_sync(folder, aside);
  base::log_warning(concat("[checkpoint.save] ", folder.string(),
                           " was no checkpoint that can be read and was saved under this name; it is now ",
                           aside.string()));
}

void RunCheckpoints::point(const char* link, const std::string& name) const {
  point_link(folder_ / link, name, folder_ / temporary_name(link));
}

/// Lets the link `best` point to what the last checkpoint says: a process may have been killed between the
/// two links. Where there is no best, the link is one of another history, and goes.
void RunCheckpoints::repair_best() const {
  const auto link = follow_link(folder_ / "best");
  const auto wanted = best();
  if (!wanted || !may_be_folder(*wanted)) {
    std::error_code ignored;
    if (link) fs::remove(folder_ / "best", ignored);
  } else if (link != folder_ / name_of(*wanted)) {
    point("best", name_of(*wanted));
  }
}

/// For a save that has failed: that is what its caller is told.
void RunCheckpoints::repair_best_if_possible() const {
  try {
    repair_best();
  } catch (const std::exception&) {
    // The next save repairs it.
  }
}

void RunCheckpoints::prune() const {
  if (options_.keep <= 0) {
    return;
  }
  std::vector<fs::path> all = list();
  std::erase_if(all, [](const fs::path& folder) { return !is_own_checkpoint(folder); });
  const auto last_folder = last(), best_folder = best(), best_link = follow_link(folder_ / "best");
  for (size_t i = static_cast<size_t>(options_.keep); i < all.size(); ++i) {
    const fs::path& folder = all[i];
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
    base::log_warning(concat("[checkpoint.save] cannot remove the old checkpoint ", folder.string(), ": ",
                             error.message()));
  }
}

/// Finishes what a killed save left. `alone`: no other process can be saving here, so what a save on another
/// host or in another container made is a leftover too. A file may be save_safetensors()'s, which has no
/// lock.
void RunCheckpoints::recover(bool alone) const {
  std::error_code error;
  for (const fs::path& path : entries_of(folder_)) {
    const auto found = parse_temporary_name(path.filename().string());
    if (!found || found->owner == Owner::kRuns) continue;
    const bool is_of_save =
        found->name == "last" || found->name == "best" || fs::is_directory(fs::symlink_status(path, error));
    if (found->owner == Owner::kUnknown && !(alone && is_of_save)) continue;
    const std::string replaced = replaced_name(path);
    if (!replaced.empty() && !fs::exists(folder_ / replaced)) {
      fs::rename(path, folder_ / replaced, error);
    } else {
      fs::remove_all(path, error);
    }
  }
  repair_best();
}

std::vector<fs::path> RunCheckpoints::list() const {
  std::vector<KnownCheckpoint> known = known_checkpoints(folder_);
  const History history(known, last());
  std::ranges::stable_partition(known, [&](const KnownCheckpoint& entry) { return history.holds(entry); });
  std::vector<fs::path> result;
  for (KnownCheckpoint& entry : known) {
    result.push_back(std::move(entry.folder));
  }
  return result;
}

std::optional<fs::path> RunCheckpoints::last() const {
  const auto target = follow_link(folder_ / "last");
  return target ? std::optional(locate_checkpoint(*target)) : std::nullopt;
}

std::optional<fs::path> RunCheckpoints::best() const {
  if (const auto folder = last()) {
    try {
      return best_named_by(*folder, true);
    } catch (const Error&) {
      // Whoever loads it is told what is wrong with it.
    }
  }
  const auto target = follow_link(folder_ / "best");
  return target ? std::optional(locate_checkpoint(*target)) : std::nullopt;
}

std::optional<fs::path> RunCheckpoints::best_of(const fs::path& checkpoint) const {
  const auto link = follow_link(folder_ / "last");
  return best_named_by(checkpoint, link && link->filename() == name_of(checkpoint));
}

/// A best that was saved later is one of another history. But beside the last checkpoint the link `best` is
/// never one of those (go_back_to() removes it): it is what a save that was cut short, or that moves `last`
/// in this moment, has put in place of the best before.
std::optional<fs::path> RunCheckpoints::best_named_by(const fs::path& checkpoint, bool is_last) const {
  std::error_code error;
  if (!fs::equivalent(checkpoint.parent_path(), folder_, error)) {
    return std::nullopt;
  }
  const Manifest manifest = read_manifest(checkpoint);
  // A checkpoint of an older version does not name it.
  const auto link = follow_link(folder_ / "best");
  const auto target = manifest.best.empty() ? link : std::optional(folder_ / manifest.best);
  if (!target) {
    return std::nullopt;
  }
  const fs::path best = locate_checkpoint(*target);
  const bool is_linked = is_last && !manifest.best.empty() && link == target;
  if (is_linked || name_of(best) == name_of(checkpoint)) return best;  // a run may replace it in this moment
  try {
    if (fs::is_directory(best, error) && read_manifest(best).sequence > manifest.sequence) {
      return std::nullopt;
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
    std::error_code error;
    std::optional<fs::path> target;
    // In this moment it may be between two names.
    for (int tries = 0; tries < kMaxTries; ++tries) {
      target = which == "last" ? last() : best();
      if (!target || fs::is_directory(*target, error)) return target;
    }
    throw DataError(
        "checkpoint.find",
        concat((folder_ / which).string(), " points to ", target->string(), ", which is not there"),
        "auto, or one of the checkpoints that are there");
  }
  const fs::path given(which);
  std::error_code error;
  for (const fs::path& path : {locate_checkpoint(given), locate_checkpoint(folder_ / given)}) {
    if (fs::is_directory(path / "checkpoints", error)) {
      return RunCheckpoints(path / "checkpoints").find("last");
    }
    if (fs::is_directory(path, error)) {
      const fs::path real = fs::is_symlink(path, error) ? fs::canonical(path, error) : path;
      if (!real.empty()) return real;  // a link may move in this moment
    }
    if (const auto target = follow_link(path); target && fs::is_directory(*target, error)) {
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
  const base::FileLock lock(folder_ / kLockFile);
  recover(lock.is_held());
  const std::string name = name_of(checkpoint);
  if (follow_link(folder_ / "last") != folder_ / name) {
    if (!best_of(folder_ / name)) fs::remove(folder_ / "best", error);
    point("last", name);
    repair_best();
  }
}

/// Calls `read` until it returns true, or until `last` stays where it is: a run that saves meanwhile removes
/// what was the newest a moment ago, after it has moved `last`.
void RunCheckpoints::until_last_stays(const std::function<bool()>& read) const {
  for (int tries = 1; tries <= kMaxTries; ++tries) {
    const auto before = follow_link(folder_ / "last");
    if (read() || follow_link(folder_ / "last") == before) return;
  }
}

std::optional<LoadedCheckpoint> RunCheckpoints::find_and_load(const std::string& which) const {
  if (which == "auto") return load_usable();
  std::optional<LoadedCheckpoint> found;
  std::exception_ptr problem;
  until_last_stays([&] {
    try {
      problem = nullptr;
      if (const auto folder = find(which)) found = {*folder, load(*folder)};
    } catch (const DataError&) {
      problem = std::current_exception();
    }
    return found.has_value();
  });
  if (problem != nullptr) std::rethrow_exception(problem);
  return found;
}

/// Reads the newest checkpoint of this history that is whole; lists what is wrong with those before it.
std::optional<LoadedCheckpoint> RunCheckpoints::first_usable(std::vector<std::string>& problems) const {
  std::vector<KnownCheckpoint> known = known_checkpoints(folder_);
  const auto last_folder = last();
  const History history(known, last_folder);
  std::vector<fs::path> candidates;
  if (last_folder) candidates.push_back(*last_folder);
  for (const KnownCheckpoint& entry : known) {
    if (history.holds(entry) && entry.folder != last_folder) candidates.push_back(entry.folder);
  }
  for (const fs::path& candidate : candidates) {
    try {
      return LoadedCheckpoint{candidate, load(candidate)};
    } catch (const DataError& error) {
      problems.emplace_back(error.what());
    }
  }
  return std::nullopt;
}

std::optional<LoadedCheckpoint> RunCheckpoints::load_usable() const {
  std::optional<LoadedCheckpoint> found;
  std::vector<std::string> problems;
  until_last_stays([&] {
    problems.clear();
    found = first_usable(problems);
    return problems.empty();
  });
  for (const std::string& problem : problems) {
    base::log_warning(concat("skipping a checkpoint that cannot be used: ", problem));
  }
  if (!found && !problems.empty()) {
    throw DataError("checkpoint.find", concat("none of the ", problems.size(), " checkpoints in ",
                                              folder_.string(), " can be used; the first: ", problems[0]));
  }
  if (!problems.empty()) {
    base::log_warning(concat("falling back to the checkpoint ", found->folder.string()));
  }
  return found;
}

CheckpointContent RunCheckpoints::load(const fs::path& folder) {
  std::string extension, model, optimizer;
  CheckpointFiles opened = open_checkpoint(folder, [&](const Manifest& manifest) -> std::vector<std::string> {
    extension = extension_of(manifest);
    model = concat(kModelFile, extension);
    optimizer = concat(kOptimizerFile, extension);
    return {model, optimizer};
  });
  const TensorFormat format = tensor_format_of(extension);
  CheckpointContent content;
  content.model = format.read(opened.files.at(model));
  content.optimizer = format.read(opened.files.at(optimizer));
  content.state = std::move(opened.manifest.state);
  return content;
}

}  // namespace cohort::checkpoint
