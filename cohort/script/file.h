#pragma once

#include <filesystem>
#include <vector>

#include "cohort/script/loaded_program.h"

/// Programs in files that run without the code that made them: docs/guide/script.md, "Program files".
///
///     model->eval();
///     auto fast = script::script(model);
///     { at::NoGradGuard no_grad; fast(x); fast(x); }  // twice for each size that is to be saved
///     fast.save("model.program", {{"made_by", "me"}});
///     ...
///     const script::LoadedProgram program = script::load("model.program");
///     at::Tensor y = program(x).front();
namespace cohort::script {

class Cache;

/// Writes the programs of `caches` that need no gradient, for modules as they are now, with the tensors that
/// they captured. The file appears under its name when it is complete. What is Scripted::save made of.
/// Throws: UsageError where there is no such program, or one holds what no file can; SystemError.
void save(const std::filesystem::path& path, const std::vector<const Cache*>& caches,
          const Metadata& metadata);

/// Reads a file of save(). A program calls any operator that its file names: load what you trust.
/// Throws: DataError naming the file: missing, no program, damaged, of a newer format, with an operator that
/// is not known here or on a device that is not there.
LoadedProgram load(const std::filesystem::path& path);

}  // namespace cohort::script
