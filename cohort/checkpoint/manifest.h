#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "cohort/checkpoint/file_writer.h"

/// `state.json` of a checkpoint folder; no LibTorch.
///
///     {"format": "cohort-checkpoint", "format_version": 1, "name": "epoch_0005", "sequence": 7,
///      "best": "epoch_0003", "given_up": [[4, 5]],
///      "files": {"model.safetensors": {"bytes": 1234, "xxh3_64": "0123456789abcdef"}, ...},
///      "state": {what the user saves}, "xxh3_64": "checksum of the rest"}
namespace cohort::checkpoint {

/// The newest format that this version writes and reads.
inline constexpr std::int64_t kCheckpointFormatVersion = 1;
/// Name of the file in a checkpoint's folder that holds its manifest.
inline constexpr const char* kManifestFile = "state.json";
/// What to try where a checkpoint is damaged.
inline constexpr const char* kDamagedHint =
    "resume from an earlier checkpoint (auto does), or restore the file from a copy";

/// Checkpoints by their sequences, both ends included.
struct SequenceRange {
  std::int64_t first = 0, last = 0;
  bool operator==(const SequenceRange&) const = default;
};

/// What state.json says of a checkpoint.
struct Manifest {
  std::string name = {};      ///< That the checkpoint was saved under; empty: by an older version.
  std::int64_t sequence = 0;  ///< Grows with every save of a run; says which checkpoint is newer.
  std::string best = {};      ///< The run's best checkpoint when this one was saved; empty: none was chosen.
  /// Checkpoints of other histories: the run went back to before them.
  std::vector<SequenceRange> given_up = {};
  /// The other files of the folder, by name: what load() compares them with.
  std::map<std::string, FileSummary> files = {};
  /// What the user saved: CheckpointContent::state.
  nlohmann::json state = nlohmann::json::object();
};

/// True for what a checkpoint can be named: a plain file name, not hidden, not one of the links.
bool is_checkpoint_name(std::string_view name);

/// Writes `folder`/state.json and waits until it is on disk.
/// Throws: SystemError; UsageError for a state that cannot be read again (text that is not UTF-8, more than
/// 64 MiB, nested deeper than 64 levels with the file's own).
void write_manifest(const std::filesystem::path& folder, const Manifest& manifest);

/// False where `file` is a JSON object that another program wrote; true for all else, damaged or not.
bool is_manifest(const std::filesystem::path& file);

/// Reads and checks `folder`/state.json.
/// Throws: DataError naming the file and what differs; for a newer format, both versions.
Manifest read_manifest(const std::filesystem::path& folder);

/// The same for the text of a file, which messages call `path`. Any bytes may be given.
Manifest parse_manifest(std::string_view text, const std::filesystem::path& path);
/// The text of the file. Throws: UsageError as write_manifest().
std::string manifest_text(const Manifest& manifest);

}  // namespace cohort::checkpoint
