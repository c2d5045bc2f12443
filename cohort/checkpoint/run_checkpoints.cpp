#include "cohort/checkpoint/run_checkpoints.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "cohort/checkpoint/manifest.h"
#include "cohort/core/atomic_file.h"
#include "cohort/core/error.h"
#include "cohort/core/log.h"

namespace cohort::checkpoint {
namespace {

namespace fs = std::filesystem;
using core::concat;

constexpr const char* kModelFile = "model.safetensors";
constexpr const char* kOptimizerFile = "optimizer.safetensors";
constexpr std::string_view kReplacedMark = "~old";  // a checkpoint that is being replaced
constexpr std::string_view kRemovedMark = "~gone";  // a checkpoint that is being removed

void check_name(const std::string& name) {
  const bool reserved = name == "last" || name == "best" || name == "auto";
  if (name.empty() || reserved || name[0] == '.' ||
      name.find_first_of(std::string_view("/~\0", 3)) != std::string::npos) {
    throw UsageError("checkpoint.save", concat("a checkpoint cannot be named ", printable(name)),
                     "a plain name such as epoch_0005");
  }
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
    : folder_(std::move(folder)), options_(options) {
  sweep();
}

fs::path RunCheckpoints::save(const std::string& name, const CheckpointContent& content, SaveLinks links) {
  check_name(name);
  std::error_code error;
  if (fs::create_directories(folder_, error)) {
    core::sync_folder(fs::absolute(folder_).parent_path());
  }
  if (error) {
    throw SystemError("checkpoint.save", concat("cannot create ", folder_.string(), ": ", error.message()));
  }
  int64_t sequence = 0;
  for (const Known& other : known()) {
    sequence = std::max(sequence, other.sequence + 1);
  }
  const fs::path temporary = folder_ / temporary_name(name);
  fs::remove_all(temporary, error);
  try {
    if (!fs::create_directory(temporary, error)) {
      throw SystemError("checkpoint.save",
                        concat("cannot create ", temporary.string(), ": ", error.message()));
    }
    write_folder(temporary, content, sequence);
    put(temporary, name);
  } catch (...) {
    fs::remove_all(temporary, error);
    throw;
  }
  for (const auto& [link, wanted] :
       {std::pair("last", links.update_last), std::pair("best", links.update_best)}) {
    if (wanted) {
      replace_symlink(name, folder_ / link, folder_ / temporary_name(link));
    }
  }
  prune();
  return folder_ / name;
}

void RunCheckpoints::write_folder(const fs::path& folder, const CheckpointContent& content,
                                  int64_t sequence) const {
  const Metadata metadata{{"format", "pt"}};  // what Python's loaders (transformers, timm) expect to see
  Manifest manifest;
  manifest.sequence = sequence;
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
  if (!fs::exists(fs::symlink_status(target))) {
    rename_and_sync(temporary, target);
  } else if (exchange(temporary, target)) {
    core::sync_folder(folder_);
    fs::remove_all(temporary, ignored);
  } else {
    const fs::path old = folder_ / temporary_name(name + std::string(kReplacedMark));
    rename_and_sync(target, old);  // killed here: sweep() puts it back
    rename_and_sync(temporary, target);
    fs::remove_all(old, ignored);
  }
}

void RunCheckpoints::prune() const {
  if (options_.keep <= 0) {
    return;
  }
  std::vector<Known> all = known();
  std::erase_if(all, [](const Known& one) { return one.sequence < 0; });  // not known to be ours: left alone
  const auto last = link_target("last");
  const auto best = link_target("best");
  for (size_t i = static_cast<size_t>(options_.keep); i < all.size(); ++i) {
    if (all[i].folder != last && all[i].folder != best) {
      remove_folder(all[i].folder);
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

void RunCheckpoints::sweep() const {
  std::error_code error;
  for (const auto& item : fs::directory_iterator(folder_, error)) {
    TemporaryName found;
    if (!parse_temporary_name(item.path().filename().string(), found) || found.owner_alive) {
      continue;
    }
    if (found.name.ends_with(kReplacedMark)) {
      found.name.resize(found.name.size() - kReplacedMark.size());
      if (!fs::exists(folder_ / found.name)) {
        fs::rename(item.path(), folder_ / found.name, error);
        continue;
      }
    }
    fs::remove_all(item.path(), error);
  }
}

std::vector<RunCheckpoints::Known> RunCheckpoints::known() const {
  std::vector<Known> result;
  std::error_code error;
  for (const auto& item : fs::directory_iterator(folder_, error)) {
    if (!item.is_directory() || item.is_symlink() || item.path().filename().string()[0] == '.') {
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

std::optional<fs::path> RunCheckpoints::link_target(const std::string& link) const {
  std::error_code error;
  const fs::path target = fs::read_symlink(folder_ / link, error);
  return error ? std::nullopt : std::optional(folder_ / target);
}

std::optional<fs::path> RunCheckpoints::find(const std::string& which) const {
  if (which == "auto") {
    const auto usable = load_usable();
    return usable ? std::optional(usable->folder) : std::nullopt;
  }
  if (which == "last" || which == "best") {
    const auto target = link_target(which);
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
  }
  throw DataError("checkpoint.find", concat("no checkpoint at ", which, " (nor in ", folder_.string(), ")"),
                  "last, best, auto, or the folder of a checkpoint");
}

void RunCheckpoints::go_back_to(const fs::path& checkpoint) const {
  std::error_code error;
  if (!fs::equivalent(checkpoint.parent_path(), folder_, error) ||
      link_target("last") == folder_ / checkpoint.filename()) {
    return;
  }
  replace_symlink(checkpoint.filename().string(), folder_ / "last", folder_ / temporary_name("last"));
}

std::optional<LoadedCheckpoint> RunCheckpoints::load_usable() const {
  std::vector<Known> all = known();
  const auto last = link_target("last");
  const auto newest =
      std::find_if(all.begin(), all.end(), [&](const Known& one) { return one.folder == last; });
  if (newest != all.end() && newest->sequence >= 0) {
    const int64_t sequence = newest->sequence;
    std::erase_if(all, [&](const Known& one) { return one.sequence > sequence; });
  }
  std::vector<fs::path> candidates;
  for (const Known& one : all) candidates.push_back(one.folder);
  if (last) {
    std::erase(candidates, *last);
    candidates.insert(candidates.begin(), *last);
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
