#pragma once

#include <memory>
#include <span>

#include "cohort/script/internal/execute/program.h"
#include "cohort/script/internal/passes/backward.h"

namespace cohort::script {

/// Returns what `program` computes from inputs that its guards hold for. `rerun`: the node's, see backward.h.
Tensors replay(std::span<const at::Tensor> inputs, const std::shared_ptr<const Program>& program,
               Rerun rerun = nullptr);

}  // namespace cohort::script
