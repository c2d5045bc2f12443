// A warm-up watches one plain run, and then plans memory. find_memory() says which storages the part makes
// and how long they live. The log says which blocks each operator asks for. Trials say which operators may
// write into planned memory. finish() gives each value and each work space a piece, packs the pieces, and
// writes offsets into the instructions. Always: all lifetimes are moments of one clock, the log's. If the
// arena becomes larger than allowed, larger pieces are left out, and all is planned again. Each try works on
// a copy of the WarmUp.
#include "cohort/script/internal/record/warm_up.h"

#include <algorithm>

#include "cohort/script/internal/passes/memory_schedule.h"

namespace cohort::script {
namespace {

// Note [How large an arena may be]
// What backward reads of forward lies outside of the arena and goes piece by piece, as in eager mode, while
// the arena stays. So where there is a backward, the arena takes small pieces only, and of all that backward
// reads no more than this share: to allocate a larger piece takes little beside its operator. A part that
// stands alone has all in its arena, which is no larger than what lives at once.
constexpr std::size_t kShareOfSaved = 16;  // one part in
constexpr std::size_t kAlwaysAllowed = std::size_t{32} << 10;

}  // namespace

WarmUp::WarmUp(const Trace& trace, const ExecutionPlan& plan, Phase phase, const CompiledPhase& plain)
    : trace_(trace),
      plan_(plan),
      phase_(phase),
      plain_(plain),
      concurrent_(concurrent_steps(plain.regions)),
      memory_(trace.tape.num_storages()),
      is_resident_(trace.tape.values().size()),
      is_dropped_(plain.instructions.size()),
      begins_(plain.instructions.size()),
      held_(plain.instructions.size()) {
  find_memory();
  leave_out_regions();
  find_kept();
}

WarmUp::Memory& WarmUp::memory_of(int slot) {
  return memory_[trace_.tape.values()[at_slot(slot)].storage];
}

// Which storages this part makes, and from which instruction to which they are used.
void WarmUp::find_memory() {
  for (std::size_t i = 0; i < plain_.instructions.size(); ++i) {
    const Instruction& instruction = plain_.instructions[i];
    const auto use = [&](int slot) {
      Memory& memory = memory_of(slot);
      if (memory.first == kNone) memory.first = i;  // and not ours, if it is not a result
      memory.last = i;
    };
    if (instruction.call == nullptr) {
      use(instruction.view_of);
      continue;
    }
    each_slot(instruction.call->inputs, use);
    each_slot(instruction.call->results, [&](int slot) {
      Memory& memory = memory_of(slot);
      if (memory.first == kNone) memory.is_ours = memory.is_internal = is_dense(layout(slot));
      use(slot);
    });
    for (const TensorPlace& place : instruction.call->inputs) {
      for (const int slot : place.slots) {
        // An operator of somebody else's may keep what it is handed.
        if (slot >= 0 && (place.fresh_handle || instruction.call->is_custom_op))
          memory_of(slot).is_ours = false;
      }
    }
    if (!instruction.call->is_custom_op) continue;
    each_slot(instruction.call->results, [&](int slot) { memory_of(slot).is_ours = false; });
  }
}

// What is made while several threads run is allocated for itself, so that only one takes blocks of the arena,
// and what was made before stays where it is until there is one thread again.
void WarmUp::leave_out_regions() {
  for (const Concurrent& instructions : concurrent_) {
    for (Memory& memory : memory_) {
      if (memory.first == kNone) continue;
      if (instructions.holds(memory.first)) memory.is_ours = memory.is_internal = false;
      if (instructions.holds(memory.last)) memory.last = instructions.end;
    }
  }
}

bool WarmUp::is_concurrent(std::size_t instruction) const {
  return std::any_of(concurrent_.begin(), concurrent_.end(), [instruction](const Concurrent& instructions) {
    return instructions.holds(instruction);
  });
}

// What is handed out gets memory of its own, but for the gradients of a whole step: the next one drops them
// before it begins, or takes another arena.
void WarmUp::find_kept() {
  const auto& values = trace_.tape.values();
  const std::vector<bool> kept = plan_.kept(phase_, trace_);
  std::vector<bool> is_gradient(values.size());
  if (!trace_.has_backward) {
    for (const int slot : trace_.gradients) {
      if (slot >= 0) is_gradient[at_slot(slot)] = true;
    }
    for (const std::vector<int>* slots : {&trace_.outputs, &trace_.inputs}) {
      for (const int slot : *slots) {
        if (slot >= 0) is_gradient[at_slot(slot)] = false;
      }
    }
  }
  for (std::size_t i = 0; i < values.size(); ++i) {
    Memory& memory = memory_[values[i].storage];
    if (values[i].source != Source::kMade || values[i].layout.device != c10::kCPU) memory.is_ours = false;
    if (!kept[i]) continue;
    memory.is_internal = false;
    if (!is_gradient[i]) memory.is_ours = false;
  }
  for (Memory& memory : memory_) {
    memory.is_internal &= memory.is_ours;
    if (memory.is_ours && !memory.is_internal) memory.last = plain_.instructions.size();
  }
}

// Of an operator that works element by element: an argument of the result's layout that it uses last.
int WarmUp::argument_to_write_over(std::size_t instruction, int result) const {
  const OperatorCall& call = *plain_.instructions[instruction].call;
  if (!call.op.hasTag(at::Tag::pointwise)) return kUndefined;
  for (const TensorPlace& place : call.inputs) {
    if (place.kind != TensorPlace::ArgumentType::kTensor || place.slots.front() < 0) continue;
    const int slot = place.slots.front();
    const Memory& memory = memory_of(slot);
    if (!memory.is_internal || memory.last != instruction || layout(slot) != layout(result)) continue;
    bool has_other_view = false;
    each_slot(call.inputs,
              [&](int other) { has_other_view |= other != slot && &memory_of(other) == &memory; });
    if (!has_other_view) return slot;
  }
  return kUndefined;
}

void WarmUp::after(std::size_t number, const Tensors& values) {
  const Instruction& instruction = plain_.instructions[number];
  if (instruction.call == nullptr) return;
  each_slot(instruction.call->results, [&](int slot) {
    Memory& memory = memory_of(slot);
    if (!memory.is_ours || memory.first != number) return;
    const c10::Storage& storage = values[at_slot(slot)].storage();
    memory.entry = log_.find(storage.data());
    // Larger than its elements, or allocated by another step: nothing is known of its place.
    if (storage.nbytes() != static_cast<std::size_t>(layout(slot).bytes()) ||
        memory.entry == AllocationLog::kNever) {
      memory.is_ours = memory.is_internal = false;
    }
  });
  const int result = result_of(*instruction.call, trace_, plan_);
  if (result == kUndefined || !memory_of(result).is_internal || memory_of(result).first != number) return;
  auto out = out_variant(*instruction.call, result);
  if (!out) return;
  const int over = argument_to_write_over(number, result);
  AllocationLog scratch;
  const Trial trial = try_out(*out, result, over, values, scratch);
  if (trial == Trial::kFails) return;
  outs_.emplace(number,
                Out{std::move(*out), trial == Trial::kReplaces ? over : kUndefined, scratch.entries()});
}

// The last moment of an instruction, when it has released what it uses last.
std::size_t WarmUp::end_of(std::size_t instruction) const {
  if (const auto found = pauses_.find(instruction); found != pauses_.end()) return found->second;
  return instruction + 1 < begins_.size() ? begins_[instruction + 1] - 1 : kNone;
}

std::size_t WarmUp::new_piece(std::size_t bytes, std::size_t first, std::size_t last) {
  pieces_.push_back({.bytes = bytes, .first = first, .last = last});
  return pieces_.size() - 1;
}

// What an operator asks for, from the arena if a piece of it is meant.
void WarmUp::add_block(std::size_t instruction, const AllocationLog::Allocation& entry, std::size_t piece) {
  if (entry.bytes == 0) piece = kNone;
  std::vector<Held>& held_pieces = held_[instruction];
  const auto held = std::count_if(held_pieces.begin(), held_pieces.end(), [&](const Held& other) {
    return other.piece != kNone && other.died > entry.born;
  });
  compiled_.instructions[instruction].blocks.push_back(
      {.bytes = entry.bytes, .is_raw = entry.is_raw, .held = static_cast<std::size_t>(held)});
  held_pieces.push_back({piece, entry.died});
}

// Operators that write into what is there, tensors that need no operator, and views of both.
void WarmUp::add_residents() {
  for (std::size_t i = 0; i < plain_.instructions.size(); ++i) {
    const Instruction& instruction = plain_.instructions[i];
    if (instruction.call == nullptr) {
      if (!is_resident_[at_slot(instruction.view_of)]) continue;
      is_resident_[at_slot(instruction.view)] = is_dropped_[i] = true;
      compiled_.residents.push_back({instruction.view, instruction.view_of, instruction.offset, 0});
      continue;
    }
    const int result = result_of(*instruction.call, trace_, plan_);
    if (result == kUndefined) continue;
    Memory& memory = memory_of(result);
    if (!memory.is_internal || memory.first != i) continue;
    const auto found = outs_.find(i);
    if (found == outs_.end() && !instruction.call->is_uninitialized_factory()) continue;
    const auto bytes = static_cast<std::size_t>(layout(result).bytes());
    is_resident_[at_slot(result)] = true;
    if (found == outs_.end()) {
      is_dropped_[i] = true;
    } else {
      Instruction& out = compiled_.instructions[i];
      out.call = std::make_shared<const OperatorCall>(found->second.call);
      out.modes = modes_of(*out.call);
      out.unboxed = unbox(*out.call, kUndefined);
      ++compiled_.num_outs;
      for (const auto& entry : found->second.scratch) {
        const bool is_scratch = entry.died != AllocationLog::kNever && entry.bytes <= most_piece_bytes_;
        add_block(i, entry, is_scratch ? new_piece(entry.bytes, begins_[i], end_of(i)) : kNone);
      }
      // add_blocks() ran before, and residents go in order, so the argument has its piece.
      if (const int over = found->second.over; over != kUndefined) memory.piece = memory_of(over).piece;
    }
    if (memory.piece == kNone) {
      memory.piece = new_piece(bytes, begins_[i], end_of(memory.last));
    } else {
      pieces_[memory.piece].last = end_of(memory.last);
    }
    compiled_.residents.push_back({result, kUndefined, 0, bytes});
  }
}

void WarmUp::add_blocks() {
  const auto entries = log_.entries();
  std::unordered_map<std::size_t, Memory*> by_entry;
  for (Memory& memory : memory_) {
    if (memory.is_ours && memory.entry != kNone) by_entry.emplace(memory.entry, &memory);
  }
  for (std::size_t i = 0; i < entries.size(); ++i) {
    const AllocationLog::Allocation& entry = entries[i];
    if (outs_.count(entry.step) != 0 || is_dropped_[entry.step] || is_concurrent(entry.step)) continue;
    const auto found = by_entry.find(i);
    const bool is_kept_by_somebody = entry.died == AllocationLog::kNever;
    std::size_t piece = kNone;
    if (found != by_entry.end() && found->second->is_internal == !is_kept_by_somebody) {
      piece = found->second->piece = new_piece(entry.bytes, entry.born, end_of(found->second->last));
    } else if (!is_kept_by_somebody && entry.died <= end_of(entry.step) && entry.bytes <= most_piece_bytes_) {
      piece = new_piece(entry.bytes, entry.born, entry.died);
    }
    add_block(entry.step, entry, piece);
  }
}

// Note [How large an arena may be]
std::size_t WarmUp::most_arena_bytes() const {
  if (!trace_.has_backward) return SIZE_MAX;
  std::unordered_map<std::size_t, std::size_t> saved;  // by storage
  for (const int slot : plan_.saved) {
    std::size_t& bytes = saved[trace_.tape.values()[at_slot(slot)].storage];
    bytes = std::max(bytes, static_cast<std::size_t>(layout(slot).bytes()));
  }
  std::size_t sum = 0;
  for (const auto& [storage, bytes] : saved) sum += bytes;
  return std::max(kAlwaysAllowed, sum / kShareOfSaved);
}

CompiledPhase WarmUp::finish() const {
  const std::size_t most = most_arena_bytes();
  // Ends: with no piece above 0 bytes the arena is empty.
  for (std::size_t most_piece = SIZE_MAX;; most_piece = std::min(most, most_piece / 2)) {
    CompiledPhase compiled = WarmUp(*this).build(most_piece);
    if (compiled.arena_bytes <= most) return compiled;
  }
}

// Larger pieces are allocated for themselves, by operators as they were recorded.
void WarmUp::leave_out(std::size_t most_piece_bytes) {
  most_piece_bytes_ = most_piece_bytes;
  const auto entries = log_.entries();
  for (Memory& memory : memory_) {
    if (memory.is_ours && memory.entry != kNone && entries[memory.entry].bytes > most_piece_bytes) {
      memory.is_ours = memory.is_internal = false;
    }
  }
  std::erase_if(outs_, [&](const auto& out) {
    return !memory_of(result_of(*plain_.instructions[out.first].call, trace_, plan_)).is_internal;
  });
}

CompiledPhase WarmUp::build(std::size_t most_piece_bytes) {
  leave_out(most_piece_bytes);
  compiled_.instructions = plain_.instructions;
  add_blocks();
  add_residents();
  const Packing packing = pack(pieces_);
  compiled_.arena_bytes = packing.bytes;
  for (Resident& resident : compiled_.residents) {
    if (resident.view_of == kUndefined) resident.offset = packing.offsets[memory_of(resident.slot).piece];
  }
  for (std::size_t i = 0; i < compiled_.instructions.size(); ++i) {
    Instruction& instruction = compiled_.instructions[i];
    for (std::size_t k = 0; k < instruction.blocks.size(); ++k) {
      const std::size_t piece = held_[i][k].piece;
      if (piece != kNone) instruction.blocks[k].offset = packing.offsets[piece];
    }
    // A replay compares these places with where results came to lie (Program::is_placed).
    if (instruction.call == nullptr || outs_.count(i) != 0) continue;
    each_slot(instruction.call->results, [&](int slot) {
      const Memory& memory = memory_of(slot);
      if (memory.piece == kNone || memory.first != i || is_resident_[at_slot(slot)]) return;
      instruction.placed.emplace_back(slot, packing.offsets[memory.piece]);
    });
  }
  take_instructions();
  return std::move(compiled_);
}

// Of all instructions those that residents do not make needless.
void WarmUp::take_instructions() {
  std::vector<Instruction> instructions;
  std::vector<std::size_t> place(compiled_.instructions.size() + 1);
  std::vector<int> left;  // values to release, of instructions that are not there
  for (std::size_t i = 0; i < compiled_.instructions.size(); ++i) {
    place[i] = instructions.size();
    Instruction& instruction = compiled_.instructions[i];
    instruction.releases.insert(instruction.releases.end(), left.begin(), left.end());
    std::erase_if(instruction.releases, [&](int slot) { return is_resident_[at_slot(slot)]; });
    left.clear();
    if (is_dropped_[i]) {
      left = std::move(instruction.releases);
    } else {
      instructions.push_back(std::move(instruction));
    }
  }
  place.back() = instructions.size();
  compiled_.instructions = std::move(instructions);
  compiled_.releases_at_end = plain_.releases_at_end;
  compiled_.releases_at_end.insert(compiled_.releases_at_end.end(), left.begin(), left.end());
  std::erase_if(compiled_.releases_at_end, [&](int slot) { return is_resident_[at_slot(slot)]; });
  for (const ParallelRegion& region : plain_.regions) {
    const ParallelRegion moved{place[region.begin], place[region.end], place[region.join]};
    if (moved.begin < moved.end) compiled_.regions.push_back(moved);
  }
}

}  // namespace cohort::script
