#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "cohort/checkpoint/file_writer.h"
#include "cohort/checkpoint/mapped_file.h"

/// `state.json` of a checkpoint folder; no LibTorch.
///
///     {"format": "cohort-checkpoint", "format_version": 1, "sequence": 7, "best": "epoch_0003",
///      "files": {"model.safetensors": {"bytes": 1234, "xxh3_64": "0123456789abcdef"}, ...},
///      "state": {what the user saves}, "xxh3_64": "checksum of the rest"}
namespace cohort::checkpoint {

/// The newest format that this version writes and reads.
inline constexpr std::int64_t kCheckpointFormatVersion = 1;
inline constexpr const char* kManifestFile = "state.json";

struct Manifest {
  std::int64_t sequence = 0;  ///< Grows with every save of a run; says which checkpoint is newer.
  std::string best;           ///< The run's best checkpoint when this one was saved; empty: none was chosen.
  std::map<std::string, FileSummary> files;
  nlohmann::json state = nlohmann::json::object();
};

/// True for what a checkpoint can be named: a plain file name, not hidden, not one of the links.
bool is_checkpoint_name(std::string_view name);

/// Writes `folder`/state.json and waits until it is on disk.
/// Throws: SystemError; UsageError for a state that cannot be read again (text that is not UTF-8, more than
/// 64 MiB, nested deeper than 64 levels with the file's own).
void write_manifest(const std::filesystem::path& folder, const Manifest& manifest);

/// Reads and checks `folder`/state.json.
/// Throws: DataError naming the file and what differs; for a newer format, both versions.
Manifest read_manifest(const std::filesystem::path& folder);

/// The same for the text of a file, which messages call `path`. Any bytes may be given.
Manifest parse_manifest(std::string_view text, const std::filesystem::path& path);
/// The text of the file. Throws: UsageError as write_manifest().
std::string manifest_text(const Manifest& manifest);

/// Maps `folder`/`name` and checks its size and checksum against the manifest.
/// Throws: DataError naming the file, what it has and what it should have.
std::shared_ptr<const MappedFile> open_verified(const std::filesystem::path& folder, const Manifest& manifest,
                                                const std::string& name);

}  // namespace cohort::checkpoint
