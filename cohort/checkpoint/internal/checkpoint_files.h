#pragma once

#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "cohort/checkpoint/manifest.h"
#include "cohort/checkpoint/mapped_file.h"

/// Reading a checkpoint while its run saves others. No LibTorch.
namespace cohort::checkpoint {

/// A checkpoint whose files were opened together: those of one checkpoint, whatever gets its name meanwhile.
struct CheckpointFiles {
  Manifest manifest;
  std::map<std::string, std::shared_ptr<const MappedFile>> files;
};

/// Maps the files that `names_of` says by the manifest of the checkpoint `folder`, and checks their sizes and
/// checksums against its manifest. A checkpoint that is replaced in this moment is read again.
/// Throws: DataError naming the file, what it has and what it should have; for a newer format, both versions.
CheckpointFiles open_checkpoint(
    const std::filesystem::path& folder,
    const std::function<std::vector<std::string>(const Manifest& manifest)>& names_of);

}  // namespace cohort::checkpoint
