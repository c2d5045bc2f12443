#pragma once

#include <c10/macros/Macros.h>
#include <torch/version.h>

/// What differs between the versions of LibTorch that Cohort builds with (2.11 to 2.14), and nothing else.
/// Everything here needs a line saying which version changed what.

// True from LibTorch `major`.`minor` on: `#if COHORT_TORCH_AT_LEAST(2, 12)`.
#define COHORT_TORCH_AT_LEAST(major, minor) \
  (TORCH_VERSION_MAJOR > (major) || (TORCH_VERSION_MAJOR == (major) && TORCH_VERSION_MINOR >= (minor)))

static_assert(COHORT_TORCH_AT_LEAST(2, 11), "Cohort needs LibTorch 2.11 or newer");

// 2.13 renamed c10d's collectives on one tensor; the old names are deprecated there.
#if COHORT_TORCH_AT_LEAST(2, 13)
#define COHORT_C10D_ALL_GATHER all_gather_single
#define COHORT_C10D_REDUCE_SCATTER reduce_scatter_single
#define COHORT_C10D_ALL_TO_ALL all_to_all_single
#else
#define COHORT_C10D_ALL_GATHER _allgather_base
#define COHORT_C10D_REDUCE_SCATTER _reduce_scatter_base
#define COHORT_C10D_ALL_TO_ALL alltoall_base
#endif

// 2.14 asks for the profiler of all threads and for that of this thread by functions of their own.
#if COHORT_TORCH_AT_LEAST(2, 14)
#define COHORT_GLOBAL_PROFILER() torch::profiler::impl::ProfilerStateBase::getGlobal()
#else
#define COHORT_GLOBAL_PROFILER() torch::profiler::impl::ProfilerStateBase::get(/*global=*/true)
#endif

// 2.13 counts references to nodes of the graph within them: a new node of a type derived from Node.
#if COHORT_TORCH_AT_LEAST(2, 13)
#define COHORT_MAKE_NODE(Type, ...) c10::make_intrusive<Type>(__VA_ARGS__)
#define COHORT_WEAK_NODE(node) c10::weak_intrusive_ptr<torch::autograd::Node>(node)
#else
#define COHORT_MAKE_NODE(Type, ...) std::shared_ptr<Type>(new Type(__VA_ARGS__), torch::autograd::deleteNode)
#define COHORT_WEAK_NODE(node) std::weak_ptr<torch::autograd::Node>(node)
#endif
