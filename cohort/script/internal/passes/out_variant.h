#pragma once

#include <cstdint>
#include <optional>

#include "cohort/script/internal/execute/arena.h"
#include "cohort/script/internal/ir/tape.h"

namespace cohort::script {

/// Returns the call that writes what `call` returns into a tensor that is there: `op.out` with slot `result`
/// as its last argument. Nothing where there is none, where LibTorch generated it (those call the operator
/// and copy), or where `call` has effects.
std::optional<OperatorCall> out_variant(const OperatorCall& call, int result);

/// What a trial of an out-variant on the values of a run showed.
enum class Trial : std::uint8_t {
  kFails,    ///< it throws, resizes, or writes other bits
  kWrites,   ///< the same bits as the operator
  kReplaces  ///< the same bits, and even where it writes over the argument that was asked about
};

/// Runs `out` beside its operator, whose result is values[result], on copies. `over`: the argument, by slot,
/// that it may write over; kUndefined: none. Leaves `values` as they were, and writes to `log` what the
/// operator allocates.
Trial try_out(const OperatorCall& out, int result, int over, const Tensors& values, AllocationLog& log);

/// True if memory of just these elements can hold such a tensor: no gaps, no element twice, from the start.
bool is_dense(const Layout& layout);

}  // namespace cohort::script
