#pragma once

#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <string>

#include "cohort/script/internal/execute/program.h"

/// A recording as JSON: docs/guide/script.md, "Program files".
namespace cohort::script {

/// Returns `trace`, which has no backward, as JSON, apart from the memory of its captured tensors and
/// constants: `keep` is handed each of them and returns the number of its storage.
/// Throws: UsageError naming an operator and what it takes that cannot be written down.
nlohmann::json to_json(const Trace& trace, const std::function<std::size_t(const at::Tensor&)>& keep);

/// Returns what to_json() was given, ready for a Program. `restore` returns a tensor that lies so in the
/// storage of that number; `file` is named in messages.
/// Throws: DataError for an operator that is not known, or takes and returns other than in the file, and for
/// numbers out of range; nlohmann::json::exception where something is missing.
Trace trace_from_json(const nlohmann::json& json,
                      const std::function<at::Tensor(std::size_t storage, const Layout&)>& restore,
                      const std::string& file);

/// Types by the names that LibTorch prints. Throws: DataError.
c10::ScalarType scalar_type_of(const std::string& name);

}  // namespace cohort::script
