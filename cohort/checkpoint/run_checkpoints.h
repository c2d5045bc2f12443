#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "cohort/checkpoint/manifest.h"
#include "cohort/checkpoint/safetensors.h"

/// The checkpoints of one run: folders that are complete or absent, with links to the last and the best.
///
///     RunCheckpoints checkpoints(run_dir / "checkpoints", {.keep = 3});
///     checkpoints.save("epoch_0005", {.model = module_state(*model), .state = {{"epoch", 5}}});
///
///     auto found = checkpoints.load_usable();
///     if (found) load_module_state(*model, found->content.model);
///
/// A training loop of one's own saves all it needs to resume with train::LoopState.
namespace cohort::checkpoint {

/// What a checkpoint holds. `state` is the user's: epoch, samples consumed, schedule, scaler, world, threads.
/// A number that is not finite becomes null in JSON.
struct CheckpointContent {
  TensorMap model = {};      ///< by name: what module_state() gives
  TensorMap optimizer = {};  ///< tensors of the optimizers' state, by name
  nlohmann::json state = nlohmann::json::object();
};

/// A checkpoint that was read, and where.
struct LoadedCheckpoint {
  std::filesystem::path folder;
  CheckpointContent content;
};

/// What RunCheckpoints keeps, and how it writes it.
struct RunCheckpointsOptions {
  /// Newest checkpoints that stay; 0 keeps all. What `last` and `best` point to always stays.
  std::int64_t keep = 3;
  /// Of the files with tensors: one of tensor_format_names().
  std::string format = "safetensors";
};

/// How one save() differs from others.
struct SaveOptions {
  bool is_best = false;  ///< `best` points to this checkpoint from now on.
};

/// A folder of checkpoints: `NAME/{model.safetensors, optimizer.safetensors, state.json}`, links
/// `last`, `best`. Another format has another extension.
/// Threads: one caller at a time; one process saves at a time (a lock sees to it), any may load.
class RunCheckpoints {
 public:
  /// Creates and changes nothing; save() does.
  explicit RunCheckpoints(std::filesystem::path folder, RunCheckpointsOptions options = {});

  /// Saves `content` as `name` (replacing one of that name in one step), moves the links, removes old
  /// checkpoints and what a killed process left under temporary names, and returns the folder. Removed are
  /// checkpoints under the name that they were saved under: never a copy, or one that was renamed. All is on
  /// disk then. Killed at any moment, the folder holds the previous checkpoint or the new one, complete, and
  /// `best` is that checkpoint's, or the new one where that has its name. Throws: UsageError for a name that
  /// is not a plain file name; SystemError (no space left, permission) naming path and bytes needed: the
  /// previous checkpoint is untouched and nothing temporary stays; SystemError if another process is saving
  /// here.
  std::filesystem::path save(const std::string& name, const CheckpointContent& content,
                             SaveOptions options = {});

  /// The folder of a checkpoint.
  /// `last`: what the link points to; `best`: what the last checkpoint says is the best so far, else what the
  /// link points to; empty if there is none.
  /// `auto`: the folder of load_usable(); whoever wants the content too calls that.
  /// Otherwise a path to a checkpoint, to a run folder (its last), or the name of a checkpoint in this
  /// folder.
  /// Throws: DataError if a link's target, or what was named by a path, is not there.
  std::optional<std::filesystem::path> find(const std::string& which) const;

  /// The best checkpoint of the run when `checkpoint`, one of this folder, was saved; nothing where none was,
  /// or where another history has replaced it. It may have been removed. Throws: DataError for a checkpoint
  /// that cannot be read.
  std::optional<std::filesystem::path> best_of(const std::filesystem::path& checkpoint) const;

  /// Reads what find() names, also while its run saves others and removes it. Throws: as find() and load().
  std::optional<LoadedCheckpoint> find_and_load(const std::string& which) const;

  /// Reads the newest checkpoint that is whole: `last` if it is, else one that led to it, with a warning
  /// that names what is damaged; empty if the folder holds none at all.
  /// Throws: DataError if there are checkpoints and none can be used.
  std::optional<LoadedCheckpoint> load_usable() const;

  /// Points `last` at a checkpoint of this folder, and `best` at what was the best then: training resumes
  /// from there, and those saved after it are another history, which load_usable() no longer takes and save()
  /// removes first. Finishes
  /// what a killed save left. A checkpoint elsewhere changes nothing. Throws: SystemError as save();
  /// DataError for a checkpoint that cannot be read.
  void go_back_to(const std::filesystem::path& checkpoint) const;

  /// Checkpoints, newest first, those of another history after the rest.
  std::vector<std::filesystem::path> list() const;

  /// Reads the checkpoint in `folder` after checking sizes, checksums and headers. The tensors alias
  /// the mapped files and stay valid when the checkpoint is deleted.
  /// Throws: DataError naming the file and what differs; for a newer format, both versions.
  static CheckpointContent load(const std::filesystem::path& folder);

  /// The folder that holds the checkpoints.
  const std::filesystem::path& folder() const { return folder_; }

 private:
  void write_folder(const std::filesystem::path& folder, const CheckpointContent& content,
                    Manifest manifest) const;
  void recover(bool alone) const;
  void repair_best() const;
  void repair_best_if_possible() const;
  std::filesystem::path put(const std::filesystem::path& temporary, const std::string& name) const;
  bool is_linked_old(const std::filesystem::path& folder) const;
  void set_aside(const std::filesystem::path& folder) const;
  void prune() const;
  void remove_folder(const std::filesystem::path& folder) const;
  void point(const char* link, const std::string& name) const;
  void until_last_stays(const std::function<bool()>& read) const;
  std::optional<LoadedCheckpoint> first_usable(std::vector<std::string>& problems) const;
  std::optional<std::filesystem::path> last() const;
  std::optional<std::filesystem::path> best() const;
  std::optional<std::filesystem::path> best_named_by(const std::filesystem::path& checkpoint,
                                                     bool is_last) const;

  std::filesystem::path folder_;
  RunCheckpointsOptions options_;
};

}  // namespace cohort::checkpoint
