#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "cohort/memory/step_memory.h"
#include "cohort/pipeline/model_runner.h"

/// What a pipeline takes in memory on each placement.
namespace cohort::pipeline {

/// Returns for each placement what its thread asks for in `step(call, n)`, which is to be a step of n
/// samples, at any n. The placement is ahead in that step (PipelineOptions::run_ahead), so nothing is missing
/// that is under way between two stages, whoever is faster. The last is the calling thread's: what `step`
/// made there, such as the batch, and losses that are added up. With `again` it is a step whose gradients are
/// added to those of one before, which do not count. For `samples` or numbers that leave the same rest when
/// cut into micro-batches. GPUs' placements run on the CPU. The parameters' gradients are gone afterwards.
/// Threads: as memory::AllocationProfiler. Throws: UsageError for options that no Pipeline takes, such as
/// neither num_micro_batches nor split_size.
std::vector<memory::StepMemory> probe_memory(
    const PipelineParts& parts,
    const std::function<void(const parallel::ModelRunner& call, std::int64_t samples)>& step,
    std::int64_t samples, bool again);

/// Returns the bytes of the gradients that the parameters of a placement's stages have.
std::int64_t gradient_bytes(const PipelineParts& parts, int placement);

/// Returns what the model runner `pipeline` keeps in each place, where it makes `parts` of plain.model and
/// each micro-batch has `micro_batch_size` samples, from what probe_memory() finds.
parallel::RunnerMemory plan_memory(const parallel::PlainMemory& plain, const PipelineParts& parts,
                                   std::int64_t micro_batch_size);

}  // namespace cohort::pipeline
