#pragma once

#include <filesystem>
#include <optional>
#include <string>

/// Links to a neighbour in the same folder, also where a file system has no symbolic links. No LibTorch.
namespace cohort::checkpoint {

/// Makes `link` point to `target`, a name in the same folder, replacing a link that was there in one step;
/// `temporary` is the path used meanwhile. It is a symbolic link, or, on a file system that has none (CIFS,
/// some FUSE), a file that holds the name. It is on disk then.
/// Throws: SystemError, also if `link` is neither of these, and then nothing has changed.
void point_link(const std::filesystem::path& link, const std::string& target,
                const std::filesystem::path& temporary);

/// The path of what `link` points to; nothing if there is no such link. What it points to need not exist.
std::optional<std::filesystem::path> follow_link(const std::filesystem::path& link);

}  // namespace cohort::checkpoint
