#pragma once

#include <filesystem>

namespace cohort::base {

/// Loads a shared library, whose parts the registries then know by their names (docs/guide/plugins.md).
/// The library is never unloaded. An exception that the library throws while it is loaded ends the process
/// with status 2: dlopen does not let exceptions through. A message names the library and the exception.
/// Threads: one caller at a time. Throws: UsageError saying why it cannot be loaded.
void load_plugin(const std::filesystem::path& library);

}  // namespace cohort::base
