#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cohort/checkpoint/manifest.h"

/// The checkpoints that a folder holds, and which of them belong to one history. No LibTorch.
///
/// Note [Histories]
/// A run that goes back to an earlier checkpoint gives up those saved after it: they are of another history,
/// and stay until there is no room for them. Sequences grow with every save, whatever the history, so what a
/// save gives up is what lies between the sequence of the checkpoint that it resumes from and its own. Each
/// state.json lists these ranges.
namespace cohort::checkpoint {

inline constexpr std::string_view kReplacedMark = "~old";  ///< a checkpoint that is being replaced

/// The paths of what lies in `folder`; nothing if it is not there. Throws: DataError if it cannot be listed
/// to its end.
std::vector<std::filesystem::path> entries_of(const std::filesystem::path& folder);

/// The checkpoint that a killed process had moved away to put another in its place; empty for another name.
std::string replaced_name(const std::filesystem::path& path);

/// The name that the checkpoint in `folder` has, or had before it was moved away.
std::string name_of(const std::filesystem::path& folder);

/// `checkpoint`, or where a process that was killed while it replaced it has put it.
std::filesystem::path locate_checkpoint(const std::filesystem::path& checkpoint);

/// False where it is known that `path` is no folder. A network file system that fails for a moment does not
/// say so: nothing may be given up then.
bool may_be_folder(const std::filesystem::path& path);

/// True for a folder with the state.json of a checkpoint that was saved under the folder's name: not for a
/// copy that somebody made, or a checkpoint that was renamed. Only such a folder may be removed.
bool is_own_checkpoint(const std::filesystem::path& folder);

/// A folder that may be a checkpoint.
struct KnownCheckpoint {
  std::filesystem::path folder;
  std::optional<Manifest> manifest = {};  ///< nothing: it cannot be read; without the files and the state
  /// Manifest::sequence; -1 where the manifest cannot be read, so that such a folder is the oldest.
  std::int64_t sequence() const { return manifest ? manifest->sequence : -1; }
};

/// The checkpoints in `folder`, newest first, those that cannot be read last. Throws: DataError as
/// entries_of().
std::vector<KnownCheckpoint> known_checkpoints(const std::filesystem::path& folder);

/// The checkpoints that led to one of them. Note [Histories].
class History {
 public:
  /// That of `last`; of the newest that can be read if `last` is not among them.
  History(const std::vector<KnownCheckpoint>& known, const std::optional<std::filesystem::path>& last);

  /// False for what was given up; true where that cannot be known.
  bool holds(const KnownCheckpoint& checkpoint) const;
  /// What a checkpoint that resumes from here, with that sequence, gives up.
  std::vector<SequenceRange> given_up_by(std::int64_t sequence) const;

 private:
  std::int64_t head_ = -1;  // its sequence; -1: there is none
  std::vector<SequenceRange> given_up_;
};

}  // namespace cohort::checkpoint
